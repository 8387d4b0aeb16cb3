//! Slow nodes: who waits for one is given to its parent, so that one sick disk or interface does not set the pace of all
//! below it. Each such move is a trial: where it did not help, it is taken back.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::{Job, TargetState};
use crate::chunk::CHUNK;
use crate::id::NodeName;
use crate::verdict::{Fault, SlowHop};

/// A hop that has been slow for so long will be, and a move that has not helped after so long does not.
pub const SLOW_AFTER: Duration = Duration::from_secs(10);
/// For so long nothing may be heard of a slow hop and it is the same trouble still: a disk that stands still says nothing.
const SILENCE: Duration = Duration::from_secs(5);
/// What is over sooner than this is left as it is.
const WORTHWHILE: Duration = Duration::from_secs(5);
/// Who was moved gets at least so many times what it got before, or goes back.
const HELPS: f64 = 1.2;

/// What is known of slow hops, and not worth storing.
#[derive(Debug, Clone, Default)]
pub(super) struct Slowness {
    /// By child.
    known: BTreeMap<NodeName, Known>,
    trial: Option<Trial>,
    /// Those for which another parent was no better: it is their own fault.
    own_fault: BTreeSet<NodeName>,
    /// A move did not help: there will be no other.
    over: bool,
}

/// A hop that was slow of late.
#[derive(Debug, Clone)]
struct Known {
    parent: NodeName,
    /// The first word of it.
    since: Duration,
    /// The last.
    last: Duration,
}

/// A move under way.
#[derive(Debug, Clone)]
struct Trial {
    /// Because of whom.
    slow: NodeName,
    since: Duration,
    moved: Vec<Moved>,
}

#[derive(Debug, Clone)]
struct Moved {
    child: NodeName,
    from: NodeName,
    to: NodeName,
    /// Bytes a second before.
    rate: f64,
}

impl Job {
    /// These hops are slow now, and of no others that is known.
    pub(super) fn slow_now(&mut self, slow: &[SlowHop]) {
        let now = self.now.up;
        for hop in slow {
            let known = self.slowness.known.remove(&hop.child);
            let since = known
                .filter(|known| known.parent == hop.parent)
                .map_or(now, |known| known.since);
            let known = Known {
                parent: hop.parent.clone(),
                since,
                last: now,
            };
            self.slowness.known.insert(hop.child.clone(), known);
        }
        self.slowness.known.retain(|_, known| now <= known.last + SILENCE);
        if let Some(trial) = self.slowness.trial.take() {
            if now < trial.since + SLOW_AFTER {
                self.slowness.trial = Some(trial);
            } else {
                self.end_trial(&trial);
            }
            return;
        }
        if self.slowness.over {
            return;
        }
        for hop in slow {
            if self.is_due(hop) && self.is_worthwhile(&hop.child) && self.try_to_help(hop) {
                return;
            }
        }
    }

    /// Whether it has been slow for long enough; with two parents in turn is enough, too.
    fn is_due(&self, hop: &SlowHop) -> bool {
        let slowness = &self.slowness;
        let since = slowness.known.get(&hop.child).map(|known| known.since);
        let is_old = since.is_some_and(|since| self.now.up >= since + SLOW_AFTER);
        self.parent_of(&hop.child) == Some(&hop.parent) && (is_old || slowness.own_fault.contains(&hop.child))
    }

    /// Whether the node receives, and will for some time.
    fn is_worthwhile(&self, child: &NodeName) -> bool {
        let Some(at) = self.index.get(child).copied() else {
            return false;
        };
        let live = &self.live[at];
        let missing = self
            .layout_count()
            .map(|count| u64::from(count.saturating_sub(live.progress.chunks)) * CHUNK);
        let rate = live.received_now().bytes_per_second();
        let is_far = missing.is_none_or(|missing| missing as f64 > rate * WORTHWHILE.as_secs_f64());
        self.targets[at].state == TargetState::Receiving && is_far
    }

    /// Moves somebody, if there is anybody whom that may help.
    fn try_to_help(&mut self, hop: &SlowHop) -> bool {
        let above = self.better_parent(&hop.parent);
        match (hop.fault, above) {
            (Fault::Way, Some(above)) if !self.slowness.own_fault.contains(&hop.child) => {
                self.remark(format!(
                    "{} now asks {above}: from {} it comes slowly ({})",
                    hop.child, hop.parent, hop.text
                ));
                self.begin_trial(&hop.child, vec![(hop.child.clone(), above)]);
                true
            }
            _ => self.make_leaf(hop),
        }
    }

    /// The next above that can serve and is not slow itself.
    fn better_parent(&self, parent: &NodeName) -> Option<NodeName> {
        self.ancestors(&self.parents(), parent)
            .into_iter()
            .find(|node| self.can_serve(node) && !self.is_slow(node))
    }

    /// Those who wait for it go to its parent; it stays, and others go before it as long as it receives.
    fn make_leaf(&mut self, hop: &SlowHop) -> bool {
        if self.record.slow.insert(hop.child.clone()) {
            self.dirty_record = true;
        }
        let waiting: Vec<(NodeName, NodeName)> = hop
            .waiting
            .iter()
            .filter(|child| self.parent_of(child) == Some(&hop.child) && self.is_worthwhile(child))
            .map(|child| (child.clone(), hop.parent.clone()))
            .collect();
        if waiting.is_empty() || !self.can_serve(&hop.parent) {
            return false;
        }
        let names: Vec<&str> = waiting.iter().map(|(child, _)| child.as_str()).collect();
        self.remark(format!(
            "{} is slow, and who waited for it now asks {}: {} ({})",
            hop.child,
            hop.parent,
            names.join(", "),
            hop.text
        ));
        self.begin_trial(&hop.child, waiting);
        true
    }

    fn begin_trial(&mut self, slow: &NodeName, moves: Vec<(NodeName, NodeName)>) {
        let mut moved = Vec::new();
        for (child, to) in moves {
            let (Some(at), Some(from)) = (self.index.get(&child), self.parent_of(&child).cloned()) else {
                continue;
            };
            let rate = self.live[*at].received_now().bytes_per_second();
            self.set_parent(&child, &to);
            moved.push(Moved {
                child,
                from,
                to,
                rate,
            });
        }
        self.refresh();
        self.slowness.trial = Some(Trial {
            slow: slow.clone(),
            since: self.now.up,
            moved,
        });
    }

    /// Takes back what did not help. Who ended or moved on by itself meanwhile counts no more.
    fn end_trial(&mut self, trial: &Trial) {
        let moved: Vec<&Moved> = trial
            .moved
            .iter()
            .filter(|moved| {
                let at = self.index[&moved.child];
                self.targets[at].state == TargetState::Receiving
                    && self.parent_of(&moved.child) == Some(&moved.to)
            })
            .collect();
        let before: f64 = moved.iter().map(|moved| moved.rate).sum();
        let now: f64 = moved
            .iter()
            .map(|moved| {
                self.live[self.index[&moved.child]]
                    .received_now()
                    .bytes_per_second()
            })
            .sum();
        if moved.is_empty() || now >= before * HELPS {
            return;
        }
        // Where it is no faster with another parent, it is its own fault; where nobody else is, it is nobody's.
        let went_up = moved.iter().any(|moved| moved.child == trial.slow);
        if went_up {
            self.slowness.own_fault.insert(trial.slow.clone());
        } else {
            self.slowness.over = true;
            self.record.slow.remove(&trial.slow);
        }
        let back: Vec<(NodeName, NodeName)> = moved
            .iter()
            .filter(|moved| self.can_serve(&moved.from))
            .map(|moved| (moved.child.clone(), moved.from.clone()))
            .collect();
        for (child, from) in back {
            self.remark(format!("{child} asks {from} again: it was no faster"));
            self.set_parent(&child, &from);
        }
        self.refresh();
        self.dirty_record = true;
    }
}
