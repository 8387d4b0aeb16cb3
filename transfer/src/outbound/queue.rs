//! What one child wants and what of it can be sent: the queue that the streams of a hop take from.
//!
//! The lowest ready chunk goes first. That is the order of arrival wherever chunks arrive in order, it keeps the
//! child's disk sequential after gaps, and it needs one bit a chunk instead of a list.

use stage_core::chunk::{ChunkIndex, ChunkSet};

/// The state of a hop's sending.
#[derive(Debug)]
pub(crate) struct Queue {
    /// Here, as far as this hop has been told.
    here: ChunkSet,
    /// The child has it, or answered for it.
    had: ChunkSet,
    /// Here, asked for, and not written to any stream.
    ready: ChunkSet,
    /// In offer mode: here, not had, and not yet offered.
    offer: Option<Offers>,
    /// Written (or being written) and not answered by `have`, by the stream that has it.
    sent: Vec<(u32, Vec<ChunkIndex>)>,
    started: bool,
}

#[derive(Debug)]
struct Offers {
    pending: ChunkSet,
    /// Offered and not answered.
    open: ChunkSet,
    asked: ChunkSet,
}

/// The most offers that may be unanswered: the child holds each until it has read that much of its older copy.
pub(crate) const MAX_OFFERS: u32 = 4096;

impl Queue {
    /// A queue for a payload of `count` chunks, before the child has said anything.
    pub(crate) fn new(count: u32) -> Self {
        Self {
            here: ChunkSet::empty(count),
            had: ChunkSet::empty(count),
            ready: ChunkSet::empty(count),
            offer: None,
            sent: Vec::new(),
            started: false,
        }
    }

    /// The child has this run; only before the start.
    pub(crate) fn has(&mut self, begin: u32, end: u32) {
        if !self.started {
            self.had.insert_run(begin..end);
        }
    }

    /// The child has said what it has.
    pub(crate) fn start(&mut self, offers: bool) {
        if self.started {
            if !offers {
                self.stop_offers();
            }
            return;
        }
        self.started = true;
        let mut wanted = self.here.clone();
        wanted.subtract(&self.had);
        if offers {
            let none = ChunkSet::empty(self.here.limit());
            self.offer = Some(Offers {
                pending: wanted,
                open: none.clone(),
                asked: none,
            });
        } else {
            self.ready = wanted;
        }
    }

    /// The child has nothing to hold offers against: what it has not answered is wanted.
    fn stop_offers(&mut self) {
        let Some(offers) = self.offer.take() else { return };
        for index in offers.pending.iter().chain(offers.open.iter()) {
            if self.here.contains(index) {
                self.ready.insert(index);
            }
        }
    }

    /// Whether the child has said what it has.
    pub(crate) fn is_started(&self) -> bool {
        self.started
    }

    /// Chunks that are here from the beginning.
    pub(crate) fn here(&mut self, set: &ChunkSet) {
        for run in set.runs() {
            self.here.insert_run(run);
        }
    }

    /// A chunk has come to be here.
    pub(crate) fn arrived(&mut self, index: ChunkIndex) {
        if !self.here.insert(index) || !self.started || self.had.contains(index) || self.is_sent(index) {
            return;
        }
        match &mut self.offer {
            Some(offers) if !offers.asked.contains(index) => {
                offers.pending.insert(index);
            }
            _ => {
                self.ready.insert(index);
            }
        }
    }

    /// The chunk is not here after all.
    pub(crate) fn gone(&mut self, index: ChunkIndex) {
        self.here.remove(index);
        self.forget_sent(index);
    }

    /// The child has kept this chunk.
    pub(crate) fn kept(&mut self, index: ChunkIndex) {
        self.had.insert(index);
        self.ready.remove(index);
        if let Some(offers) = &mut self.offer {
            offers.pending.remove(index);
            offers.open.remove(index);
        }
        self.forget_sent(index);
    }

    /// The child wants the bytes of this chunk, whatever was said or sent before.
    pub(crate) fn want(&mut self, index: ChunkIndex) {
        self.had.remove(index);
        self.forget_sent(index);
        if let Some(offers) = &mut self.offer {
            offers.asked.insert(index);
            offers.pending.remove(index);
            offers.open.remove(index);
        }
        if self.here.contains(index) {
            self.ready.insert(index);
        }
    }

    /// The next chunk for this stream.
    pub(crate) fn take(&mut self, stream: u32) -> Option<ChunkIndex> {
        let index = self.ready.first_from(ChunkIndex(0))?;
        self.ready.remove(index);
        match self.sent.iter_mut().find(|(s, _)| *s == stream) {
            Some((_, sent)) => sent.push(index),
            None => self.sent.push((stream, vec![index])),
        }
        Some(index)
    }

    /// The next chunks to offer, `most` at most.
    pub(crate) fn offers(&mut self, most: usize) -> Vec<ChunkIndex> {
        let Some(offers) = &mut self.offer else {
            return Vec::new();
        };
        let room = MAX_OFFERS.saturating_sub(offers.open.len()) as usize;
        let next: Vec<_> = offers.pending.iter().take(most.min(room)).collect();
        for index in &next {
            offers.pending.remove(*index);
            offers.open.insert(*index);
        }
        next
    }

    /// Whether there is something to offer, and room for its answer.
    pub(crate) fn has_offers(&self) -> bool {
        self.offer
            .as_ref()
            .is_some_and(|offers| !offers.pending.is_empty() && offers.open.len() < MAX_OFFERS)
    }

    /// A stream has ended: what it has sent and nobody answered for is ready again.
    pub(crate) fn ended(&mut self, stream: u32) {
        let Some(at) = self.sent.iter().position(|(s, _)| *s == stream) else {
            return;
        };
        for index in self.sent.swap_remove(at).1 {
            if self.here.contains(index) && !self.had.contains(index) {
                self.ready.insert(index);
            }
        }
    }

    /// How many chunks could be sent at once.
    pub(crate) fn ready(&self) -> u32 {
        self.ready.len()
    }

    fn is_sent(&self, index: ChunkIndex) -> bool {
        self.sent.iter().any(|(_, sent)| sent.contains(&index))
    }

    fn forget_sent(&mut self, index: ChunkIndex) {
        for (_, sent) in &mut self.sent {
            sent.retain(|i| *i != index);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn i(index: u32) -> ChunkIndex {
        ChunkIndex(index)
    }

    fn started(count: u32, offers: bool) -> Queue {
        let mut queue = Queue::new(count);
        queue.start(offers);
        queue
    }

    #[test]
    fn only_the_gaps_are_sent_lowest_first() {
        let mut queue = Queue::new(10);
        queue.here(&ChunkSet::full(10));
        for even in (0..10).step_by(2) {
            queue.has(even, even + 1);
        }
        assert_eq!(
            queue.take(0),
            None,
            "nothing before the child has said what it has"
        );
        queue.start(false);
        let taken: Vec<_> = std::iter::from_fn(|| queue.take(0)).map(|i| i.0).collect();
        assert_eq!(taken, [1, 3, 5, 7, 9]);
    }

    #[test]
    fn what_a_dead_stream_has_sent_is_sent_again_unless_kept() {
        let mut queue = started(4, false);
        (0..4).for_each(|c| queue.arrived(i(c)));
        assert_eq!(
            (queue.take(1), queue.take(1), queue.take(2)),
            (Some(i(0)), Some(i(1)), Some(i(2)))
        );
        queue.kept(i(0));
        queue.ended(1);
        assert_eq!(queue.take(2), Some(i(1)));
        assert_eq!(queue.take(2), Some(i(3)));
        queue.ended(1);
        assert_eq!(queue.take(2), None);
    }

    #[test]
    fn offers_wait_for_their_answer() {
        let mut queue = started(4, true);
        (0..3).for_each(|c| queue.arrived(i(c)));
        assert_eq!(queue.take(0), None);
        assert_eq!(queue.offers(2), [i(0), i(1)]);
        assert_eq!(queue.offers(9), [i(2)]);
        assert!(!queue.has_offers());
        queue.kept(i(0));
        queue.want(i(1));
        // Wanted before it is here: then it needs no offer.
        queue.want(i(3));
        queue.arrived(i(3));
        assert_eq!(
            (queue.take(0), queue.take(0), queue.take(0)),
            (Some(i(1)), Some(i(3)), None)
        );
    }

    #[test]
    fn a_chunk_that_was_kept_can_be_wanted_back() {
        let mut queue = started(2, false);
        queue.arrived(i(0));
        queue.take(0);
        queue.kept(i(0));
        queue.want(i(0));
        assert_eq!(queue.take(0), Some(i(0)));
        queue.gone(i(0));
        queue.ended(0);
        assert_eq!(queue.take(0), None);
        queue.arrived(i(0));
        assert_eq!(queue.take(0), Some(i(0)));
    }

    proptest! {
        /// Whatever happens, a chunk that is here and that the child does not have is ready, sent, or on offer,
        /// and none is in two of these.
        #[test]
        fn nothing_is_lost(offers: bool, steps in prop::collection::vec((0u8..60, 0u32..12, 0u32..3), 0..80)) {
            let mut queue = started(12, offers);
            let mut offered = ChunkSet::empty(12);
            for (step, chunk, stream) in steps {
                match if step == 59 { 6 } else { step % 6 } {
                    6 => { queue.start(false); offered = ChunkSet::empty(12); }
                    0 => queue.arrived(i(chunk)),
                    1 => { queue.kept(i(chunk)); offered.remove(i(chunk)); }
                    2 => { queue.want(i(chunk)); offered.remove(i(chunk)); }
                    3 => { queue.take(stream); }
                    4 => queue.ended(stream),
                    _ => for index in queue.offers(2) { offered.insert(index); },
                }
                for chunk in (0..12).map(i) {
                    let on_offer = offered.contains(chunk)
                        || queue.offer.as_ref().is_some_and(|o| o.pending.contains(chunk));
                    let places = u32::from(queue.ready.contains(chunk))
                        + u32::from(queue.is_sent(chunk))
                        + u32::from(on_offer);
                    let owed = queue.here.contains(chunk) && !queue.had.contains(chunk);
                    prop_assert_eq!(places, u32::from(owed), "chunk {} in {:?}", chunk, queue);
                }
            }
        }
    }
}
