//! A payload laid out as chunks, and sets of chunks.
//!
//! A chunk is [`CHUNK`] bytes of the payload's sequence, the last one shorter. It is the unit of sending,
//! checking, resuming and reuse, whatever the plan.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::units::ByteCount;

/// Bytes in a chunk: 1 MiB. Filling a pipeline costs one chunk time per hop (0.8 ms at 10 Gbit/s), and the
/// digest of a chunk is 0.003 % of it.
pub const CHUNK: u64 = 1 << 20;

/// Bytes that a stream reads, hashes and writes at a time: 256 KiB, so that a block is still in the
/// processor's cache when it is written.
pub const BLOCK: usize = 256 << 10;

/// What a thread of a stream reads, hashes and writes at once where there is no buffer for the whole chunk: every stream may have
/// one, both of a relay's sides, so it is as small as system calls allow.
pub const SPARE_BLOCK: usize = 32 << 10;

/// A chunk's place in the payload's sequence.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ChunkIndex(pub u32);

impl fmt::Display for ChunkIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// How a payload is cut into chunks. Before its data comes its head: the manifest's bytes, where they are too many to
/// ride in an order. Head and data are cut each for itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    head: ByteCount,
    data: ByteCount,
}

/// No payload is this large: 2^31 chunks, 2 PiB. Head and data together are then below 2^32 chunks.
pub const MAX_PAYLOAD: ByteCount = ByteCount((1 << 31) * CHUNK);

/// In place of the size of what comes through a pipe, which ends when it ends. No payload is so large.
pub const UNKNOWN: ByteCount = MAX_PAYLOAD;

/// Where a chunk's bytes belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// In the encoded manifest, from this byte on.
    Head(u64),
    /// In the sequence of the files' data, from this byte on.
    Data(u64),
}

impl Layout {
    /// The layout of a payload with so much data and no head, or `None` if that is over [`MAX_PAYLOAD`].
    pub fn new(data: ByteCount) -> Option<Self> {
        Self::with_head(ByteCount(0), data)
    }

    /// The layout of a payload with a head, or `None` if either is over [`MAX_PAYLOAD`].
    pub fn with_head(head: ByteCount, data: ByteCount) -> Option<Self> {
        (head <= MAX_PAYLOAD && data <= MAX_PAYLOAD).then_some(Self { head, data })
    }

    /// The layout of a stream: how much data comes is known when all has come. Until then every chunk is a whole one,
    /// and none is the last.
    pub fn open() -> Self {
        Self {
            head: ByteCount(0),
            data: UNKNOWN,
        }
    }

    /// Whether its end is not known yet.
    pub fn is_open(&self) -> bool {
        self.data == UNKNOWN
    }

    /// Bytes of data.
    pub fn data(&self) -> ByteCount {
        self.data
    }

    /// Bytes in the payload, its head included.
    pub fn size(&self) -> ByteCount {
        ByteCount(self.head.0 + self.data.0)
    }

    /// How many of the first chunks are the head.
    pub fn head_count(&self) -> u32 {
        count_of(self.head)
    }

    /// How many chunks there are. An empty payload has none.
    pub fn count(&self) -> u32 {
        self.head_count() + count_of(self.data)
    }

    /// Whether `index` is one of the payload's chunks.
    pub fn contains(&self, index: ChunkIndex) -> bool {
        index.0 < self.count()
    }

    /// Where the chunk begins.
    pub fn part(&self, index: ChunkIndex) -> Part {
        match index.0.checked_sub(self.head_count()) {
            None => Part::Head(u64::from(index.0) * CHUNK),
            Some(index) => Part::Data(u64::from(index) * CHUNK),
        }
    }

    /// Bytes in the chunk: [`CHUNK`], less for the last one of head and data, zero past the end.
    pub fn len(&self, index: ChunkIndex) -> usize {
        let left = match self.part(index) {
            Part::Head(at) => self.head.0 - at,
            Part::Data(at) => self.data.0.saturating_sub(at),
        };
        usize::try_from(left.min(CHUNK)).expect("a chunk fits in memory")
    }

    /// Bytes in the chunks of a set.
    pub fn bytes_in(&self, chunks: &ChunkSet) -> u64 {
        let short = [self.head_count(), self.count()]
            .into_iter()
            .filter_map(|end| end.checked_sub(1).map(ChunkIndex))
            .collect::<BTreeSet<_>>();
        let missing: u64 = short
            .into_iter()
            .filter(|last| chunks.contains(*last))
            .map(|last| CHUNK - self.len(last) as u64)
            .sum();
        u64::from(chunks.len()) * CHUNK - missing
    }

    /// Whether there is no chunk at all.
    pub fn is_empty(&self) -> bool {
        self.size().0 == 0
    }
}

fn count_of(bytes: ByteCount) -> u32 {
    u32::try_from(bytes.0.div_ceil(CHUNK)).expect("bytes were checked against MAX_PAYLOAD")
}

/// A set of chunks of one payload, one bit each up to the highest member (128 KiB for a payload of 1 TiB).
#[derive(Clone)]
pub struct ChunkSet {
    /// Absent ones are empty.
    words: Vec<u64>,
    /// Chunks in the payload: no index at or past it is ever a member.
    limit: u32,
    len: u32,
}

impl ChunkSet {
    /// The empty set for a payload of `count` chunks.
    pub fn empty(count: u32) -> Self {
        Self {
            words: Vec::new(),
            limit: count,
            len: 0,
        }
    }

    /// The set of all `count` chunks.
    pub fn full(count: u32) -> Self {
        let mut set = Self::empty(count);
        set.insert_run(0..count);
        set
    }

    /// How many chunks are in the set.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// How many chunks the payload has.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Whether no chunk is in the set.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether every chunk of the payload is in the set.
    pub fn is_full(&self) -> bool {
        self.len == self.limit
    }

    /// How many chunks the payload has, now that this is known; members past its end are dropped.
    pub fn set_limit(&mut self, count: u32) {
        if count < self.limit {
            self.words.truncate((count as usize).div_ceil(64));
            if let Some(last) = self.words.get_mut((count / 64) as usize) {
                *last &= (1 << (count % 64)) - 1;
            }
            self.len = self.words.iter().map(|word| word.count_ones()).sum();
        }
        self.limit = count;
    }

    /// Whether the chunk is in the set.
    pub fn contains(&self, index: ChunkIndex) -> bool {
        self.words
            .get((index.0 / 64) as usize)
            .is_some_and(|word| word >> (index.0 % 64) & 1 == 1)
    }

    /// The word that holds this chunk's bit, made if it is the first one so high.
    fn word(&mut self, index: u32) -> &mut u64 {
        let at = (index / 64) as usize;
        if self.words.len() <= at {
            self.words.resize(at + 1, 0);
        }
        &mut self.words[at]
    }

    /// Puts a chunk in; `false` if it was in already or is past the payload's end.
    pub fn insert(&mut self, index: ChunkIndex) -> bool {
        if index.0 >= self.limit || self.contains(index) {
            return false;
        }
        *self.word(index.0) |= 1 << (index.0 % 64);
        self.len += 1;
        true
    }

    /// Takes a chunk out; `false` if it was not in.
    pub fn remove(&mut self, index: ChunkIndex) -> bool {
        if !self.contains(index) {
            return false;
        }
        self.words[(index.0 / 64) as usize] &= !(1 << (index.0 % 64));
        self.len -= 1;
        true
    }

    /// Puts a run in, cut at the payload's end.
    pub fn insert_run(&mut self, run: Range<u32>) {
        let end = run.end.min(self.limit);
        let mut at = run.start;
        while at < end {
            let bit = at % 64;
            let take = (64 - bit).min(end - at);
            let mask = if take == 64 {
                u64::MAX
            } else {
                ((1 << take) - 1) << bit
            };
            let word = self.word(at);
            let new = (mask & !*word).count_ones();
            *word |= mask;
            self.len += new;
            at += take;
        }
    }

    /// The lowest member at or after `from`.
    pub fn first_from(&self, from: ChunkIndex) -> Option<ChunkIndex> {
        let mut word = (from.0 / 64) as usize;
        let mut bits = self.words.get(word)? & (u64::MAX << (from.0 % 64));
        loop {
            if bits != 0 {
                return Some(ChunkIndex(word as u32 * 64 + bits.trailing_zeros()));
            }
            word += 1;
            bits = *self.words.get(word)?;
        }
    }

    /// The members in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = ChunkIndex> + '_ {
        let mut next = self.first_from(ChunkIndex(0));
        std::iter::from_fn(move || {
            let this = next?;
            next = self.first_from(ChunkIndex(this.0 + 1));
            Some(this)
        })
    }

    /// The members as runs, ascending, never touching.
    pub fn runs(&self) -> impl Iterator<Item = Range<u32>> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = self.first_from(ChunkIndex(at))?.0;
            let mut end = start + 1;
            while self.contains(ChunkIndex(end)) {
                end += 1;
            }
            at = end;
            Some(start..end)
        })
    }

    /// The set of these runs for a payload of `count` chunks; what lies past the end is dropped.
    pub fn from_runs(count: u32, runs: impl IntoIterator<Item = Range<u32>>) -> Self {
        let mut set = Self::empty(count);
        for run in runs {
            set.insert_run(run);
        }
        set
    }

    /// The chunks that are not in the set.
    #[must_use]
    pub fn complement(&self) -> Self {
        let mut set = Self::full(self.limit);
        for (word, own) in set.words.iter_mut().zip(&self.words) {
            *word &= !own;
        }
        set.len = self.limit - self.len;
        set
    }

    /// Keeps only what is in `other` too. Both must be sets of one payload.
    pub fn intersect(&mut self, other: &Self) {
        self.words.truncate(other.words.len());
        self.len = 0;
        for (word, theirs) in self.words.iter_mut().zip(&other.words) {
            *word &= theirs;
            self.len += word.count_ones();
        }
    }

    /// Keeps only what is not in `other`. Both must be sets of one payload.
    pub fn subtract(&mut self, other: &Self) {
        for (word, theirs) in self.words.iter_mut().zip(&other.words) {
            self.len -= (*word & theirs).count_ones();
            *word &= !theirs;
        }
    }
}

impl PartialEq for ChunkSet {
    fn eq(&self, other: &Self) -> bool {
        let (short, long) = if self.words.len() < other.words.len() {
            (&self.words, &other.words)
        } else {
            (&other.words, &self.words)
        };
        self.limit == other.limit
            && self.len == other.len
            && long.starts_with(short)
            && long[short.len()..].iter().all(|word| *word == 0)
    }
}

impl Eq for ChunkSet {}

impl fmt::Debug for ChunkSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} ", self.len, self.limit)?;
        f.debug_list().entries(self.runs().take(8)).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes_around_a_chunk() {
        for (size, count, last) in [
            (0, 0, 0),
            (1, 1, 1),
            (CHUNK - 1, 1, CHUNK - 1),
            (CHUNK, 1, CHUNK),
            (CHUNK + 1, 2, 1),
            ((1 << 32) + 1, 4097, 1),
        ] {
            let layout = Layout::new(ByteCount(size)).unwrap();
            assert_eq!(layout.count(), count, "{size}");
            if count > 0 {
                assert_eq!(layout.len(ChunkIndex(count - 1)) as u64, last, "{size}");
            }
            assert_eq!(layout.len(ChunkIndex(count)), 0, "{size}");
            assert!(!layout.contains(ChunkIndex(count)));
        }
        assert!(Layout::new(ByteCount(MAX_PAYLOAD.0 + 1)).is_none());
    }

    #[test]
    fn a_streams_set_is_as_small_as_what_has_come() {
        let layout = Layout::open();
        assert!(layout.is_open() && layout.contains(ChunkIndex(1 << 30)));
        assert_eq!(layout.len(ChunkIndex(77)) as u64, CHUNK);
        let mut set = ChunkSet::empty(layout.count());
        set.insert_run(0..1000);
        assert!(set.words.len() <= 16 && !set.is_full());
        set.set_limit(1000);
        assert!(set.is_full());
        set.set_limit(999);
        assert!(set.is_full() && !set.contains(ChunkIndex(999)));
    }

    proptest! {
        /// Whatever is put in and taken out, the set says what a plain set of numbers says.
        #[test]
        fn a_set_is_a_set(count in 0u32..300, steps in prop::collection::vec((0u32..320, 0u32..80, any::<bool>()), 0..60)) {
            let mut set = ChunkSet::empty(count);
            let mut model = BTreeSet::new();
            for (at, run, put) in steps {
                if put {
                    set.insert_run(at..at + run);
                    model.extend((at..at + run).filter(|i| *i < count));
                } else {
                    prop_assert_eq!(set.remove(ChunkIndex(at)), model.remove(&at));
                }
            }
            prop_assert_eq!(set.len() as usize, model.len());
            prop_assert_eq!(set.iter().map(|i| i.0).collect::<Vec<_>>(), model.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(&ChunkSet::from_runs(count, set.runs()), &set);
            prop_assert_eq!(set.complement().len() + set.len(), count);
            let mut both = set.complement();
            both.intersect(&set);
            prop_assert!(both.is_empty());
            let mut rest = ChunkSet::full(count);
            rest.subtract(&set);
            prop_assert_eq!(&rest, &set.complement());
            prop_assert_eq!(rest.len(), count - set.len());
            let mut shorter = set.clone();
            shorter.set_limit(count / 2);
            let half = set.iter().filter(|i| i.0 < count / 2).map(|i| i.0..i.0 + 1);
            prop_assert_eq!(&shorter, &ChunkSet::from_runs(count / 2, half));
            prop_assert_eq!(set.is_full(), model.len() as u32 == count);
        }
    }
}
