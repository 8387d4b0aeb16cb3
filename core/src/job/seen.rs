//! What the nodes have told of rates and waits, for a verdict: over the last seconds, or over all of it.

use std::time::Duration;

use super::view::rate;
use super::{Job, Live, TargetState};
use crate::id::NodeName;
use crate::learn::Finished;
use crate::units::{ByteCount, Rate};
use crate::verdict::{Seen, SeenHop};
use crate::waits::{Reading, Waits};

/// Between the first bytes and the last ones there must be this much for a rate of its own.
const SPAN: Duration = Duration::from_millis(900);

impl Live {
    /// The rate between the first bytes seen and the last, if there was time enough.
    pub(super) fn rate_between(&self) -> Option<Rate> {
        let ((from, before), (to, after)) = (self.began?, self.grew?);
        (to >= from + SPAN).then(|| rate(after.saturating_sub(before), to - from))
    }

    fn waits_now(&self) -> &Waits {
        &self.progress.waits
    }
}

impl Job {
    /// What was seen of the job of late.
    pub fn seen_of_late(&self) -> Seen {
        self.seen(true)
    }

    /// What was seen of the job since its hops began.
    pub fn seen_whole(&self) -> Seen {
        self.seen(false)
    }

    /// The forecast rate of the hop to a target, if there is one.
    pub fn planned_rate(&self, child: &NodeName) -> Option<Rate> {
        self.hop(child)
            .map(|hop| hop.rate)
            .filter(|rate| *rate > Rate::ZERO)
    }

    /// What became of a target, for what can be learned of it.
    pub fn finished(&self, child: &NodeName) -> Finished {
        let none = Finished {
            whole: false,
            bytes: ByteCount(0),
            took: Duration::ZERO,
        };
        let Some(at) = self.index.get(child).copied() else {
            return none;
        };
        let target = &self.targets[at];
        let Some(copied) = target.copied else { return none };
        let first_try = self.record.revived == 0 && !self.live[at].moved;
        Finished {
            whole: target.state == TargetState::Published && !copied.already && first_try,
            bytes: ByteCount(copied.bytes_received),
            took: copied.took,
        }
    }

    /// Whether both were under way at the same time, on some node of both.
    pub fn meets(&self, other: &Self) -> bool {
        let time = |job: &Self| {
            let end = job.record.ended_unix_ms.unwrap_or(u64::MAX);
            (job.record.submitted_unix_ms, end)
        };
        let ((begun, ended), (other_begun, other_ended)) = (time(self), time(other));
        let has_run = other.plan.is_some() && other.live.iter().any(|live| live.last.is_some());
        has_run
            && begun < other_ended
            && other_begun < ended
            && (self.concerns(&other.spec.source)
                || other.spec.targets.iter().any(|node| self.concerns(node)))
    }

    fn seen(&self, of_late: bool) -> Seen {
        let hops = (0..self.targets.len())
            .filter_map(|at| self.seen_hop(at, of_late))
            .collect();
        let live = &self.source_live;
        let reading = if of_late {
            live.waits_now().reading.since(&live.mark_waits.reading)
        } else {
            live.waits_now().reading
        };
        let (reading, read) = if reading == Reading::default() {
            (live.waits_now().reading, Rate::ZERO)
        } else if of_late {
            (reading, live.rate_now())
        } else {
            (reading, live.rate_between().unwrap_or(Rate::ZERO))
        };
        Seen {
            source: self.spec.source.clone(),
            piped: self.spec.is_stream(),
            read,
            reading,
            limit: self.spec.limit,
            source_limit: self.spec.source_limit,
            hops,
        }
    }

    fn seen_hop(&self, at: usize, of_late: bool) -> Option<SeenHop> {
        let (child, live) = (&self.spec.targets[at], &self.live[at]);
        let parent = match &live.progress.parent {
            Some(parent) => parent.clone(),
            None => self.hop(child)?.parent.clone(),
        };
        live.last?;
        let moving = self.targets[at].state == TargetState::Receiving;
        let of_late = of_late && moving;
        // The source may have no target of its own.
        let sender = match self.index.get(&parent) {
            Some(at) => &self.live[*at],
            None if parent == self.spec.source => &self.source_live,
            None => return None,
        };
        let sending = sender.waits_now().sending_to(child).map(|now| {
            match sender.mark_waits.sending_to(child).filter(|_| of_late) {
                Some(before) => now.since(before),
                None => *now,
            }
        });
        let received = live.progress.bytes_received;
        Some(SeenHop {
            child: child.clone(),
            parent,
            moving,
            rate: if of_late {
                live.received_now()
            } else {
                let copied = self.targets[at].copied.unwrap_or_default();
                live.rate_between().unwrap_or_else(|| rate(received, copied.took))
            },
            streams: live.progress.streams,
            rtt: live.progress.rtt,
            receiving: if of_late {
                live.waits_now().receiving.since(&live.mark_waits.receiving)
            } else {
                live.waits_now().receiving
            },
            sending,
        })
    }
}
