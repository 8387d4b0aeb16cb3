//! Which hops are slow for a reason that the rest of a push need not share: a sick disk in the middle of a chain would
//! set the pace of all below it.
//!
//! A hop is slow whose parent always has something to send, and that brings less than half of what the parent itself
//! received and of what was planned. Whose fault it is decides what helps: where it is the child's, those below it are
//! better off at its parent; where it may be the parent's, the child is, at the parent's parent. A full link or a limit
//! that somebody set is nobody's fault.

use super::{Judge, Limit, Seen, Stop, share};
use crate::id::NodeName;
use crate::plan::WindowLimits;
use crate::topology::Topology;
use crate::units::Rate;

/// A hop below this share of what it could bring is slow.
const SLOW: f64 = 0.5;
/// A parent whose threads wait longer than this share of their time for something to send does not always have it.
const IDLE: f64 = 0.1;

/// A hop that is slow by itself.
#[derive(Debug, Clone, PartialEq)]
pub struct SlowHop {
    /// Who receives.
    pub child: NodeName,
    /// From whom.
    pub parent: NodeName,
    /// Whose fault it is.
    pub fault: Fault,
    /// What limits it, for people.
    pub text: String,
}

/// Whose fault a slow hop is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The child's: it would be as slow with another parent.
    Child,
    /// The parent's, or that of the way between them: nobody has seen yet which.
    Way,
}

/// The slow hops among those that move. `planned` gives the forecast rate of the hop to a child, `windows` what a host lets a
/// connection hold, where either is known.
pub fn slow(
    topology: &Topology,
    seen: &Seen,
    planned: &dyn Fn(&NodeName) -> Option<Rate>,
    windows: &dyn Fn(&NodeName) -> Option<WindowLimits>,
) -> Vec<SlowHop> {
    let judge = Judge::new(topology, seen);
    (0..seen.hops.len())
        .filter(|at| judge.falls_behind(*at, planned))
        .filter_map(|at| {
            let Some(Stop::Here(limit)) = judge.stop(at) else {
                return None;
            };
            let hop = &seen.hops[at];
            Some(SlowHop {
                child: hop.child.clone(),
                parent: hop.parent.clone(),
                fault: judge.fault(at, &limit)?,
                text: judge.words(at, &limit, windows),
            })
        })
        .collect()
}

impl Judge<'_> {
    fn falls_behind(&self, at: usize, planned: &dyn Fn(&NodeName) -> Option<Rate>) -> bool {
        let hop = &self.seen.hops[at];
        let is_served = hop
            .sending
            .as_ref()
            .is_some_and(|sending| share(sending.idle, sending.total()) <= IDLE);
        if !hop.moving || !is_served || hop.parent == hop.child {
            return false;
        }
        let received = self
            .of_child
            .get(&hop.parent)
            .map(|above| self.seen.hops[*above].rate);
        // Who is the source, or had it all before, receives nothing; and what was planned to be slow is as it should be.
        let received = received.filter(|rate| *rate > Rate::ZERO);
        let could = [received, planned(&hop.child)]
            .into_iter()
            .flatten()
            .reduce(Rate::min);
        could.is_some_and(|could| hop.rate < could.times(SLOW))
    }

    fn fault(&self, at: usize, limit: &Limit) -> Option<Fault> {
        let hop = &self.seen.hops[at];
        let of = |node: &NodeName| {
            Some(if *node == hop.child {
                Fault::Child
            } else {
                Fault::Way
            })
        };
        match limit {
            Limit::DiskWrite(node)
            | Limit::Processor(node)
            | Limit::ReceiveWindow(node)
            | Limit::SendWindow(node)
            | Limit::ReadBack(node) => of(node),
            Limit::Loss | Limit::Network => Some(if self.parent_is_well(at) {
                Fault::Child
            } else {
                Fault::Way
            }),
            Limit::SourceRead(_)
            | Limit::Pipe(_)
            | Limit::SendLimit(_)
            | Limit::SourceLimit(_)
            | Limit::Full(_)
            | Limit::HalfDuplex(_) => None,
        }
    }

    /// Whether the parent sends, or sent, much faster to somebody else over the same links: what is left is the child's
    /// interface.
    fn parent_is_well(&self, at: usize) -> bool {
        let hop = &self.seen.hops[at];
        let links = |child: &NodeName| {
            let edges = self.topology.route(&hop.parent, child)?.edges;
            // The first is the parent's interface, the last the child's.
            Some(edges.get(1..edges.len().saturating_sub(1))?.to_vec())
        };
        let Some(mine) = links(&hop.child) else {
            return false;
        };
        self.seen.hops.iter().any(|other| {
            other.parent == hop.parent
                && other.child != hop.child
                && other.rate.times(SLOW) > hop.rate
                && links(&other.child).is_some_and(|theirs| mine.iter().all(|edge| theirs.contains(edge)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{hop, mb, name, receiving, seen, sending, starved, topology};
    use super::*;
    use crate::verdict::SeenHop;

    fn faults(seen: &Seen, planned: f64) -> Vec<(String, Fault)> {
        slow(&topology("10 Gbit/s"), seen, &|_| Some(mb(planned)), &|_| None)
            .into_iter()
            .map(|slow| (slow.child.to_string(), slow.fault))
            .collect()
    }

    /// It has what it needs and waits for its own disk.
    fn sick_disk(parent: &str, child: &str, rate: f64) -> SeenHop {
        hop(parent, child, rate, receiving(4, 88, 8), sending(0, 92, 0, 0, 8))
    }

    /// The network brings no more, and nobody knows why.
    fn sick_way(parent: &str, child: &str, rate: f64) -> SeenHop {
        hop(parent, child, rate, receiving(92, 2, 6), sending(2, 92, 0, 0, 6))
    }

    /// Its parent waits for work: all is well.
    fn well(parent: &str, child: &str, rate: f64) -> SeenHop {
        starved(parent, child, rate)
    }

    #[test]
    fn a_sick_disk_in_a_chain_is_its_own_fault() {
        let chain = [
            well("head", "n1", 400.0),
            sick_disk("n1", "n2", 40.0),
            well("n2", "n3", 40.0),
            well("n3", "n4", 39.0),
        ];
        let child = vec![("n2".to_owned(), Fault::Child)];
        assert_eq!(faults(&seen(chain.to_vec()), 400.0), child);
        let told = slow(
            &topology("10 Gbit/s"),
            &seen(chain.to_vec()),
            &|_| Some(mb(400.0)),
            &|_| None,
        );
        assert_eq!(told[0].parent, name("n1"));
        assert!(
            told[0].text.starts_with("n2: its disk writes 40.0 MB/s"),
            "{}",
            told[0].text
        );
        // Half as fast as its parent is slow, and not a byte more.
        let mut half = chain.clone();
        half[1].rate = mb(201.0);
        assert_eq!(faults(&seen(half.to_vec()), 400.0), []);
        // It was planned to be slow.
        assert_eq!(faults(&seen(chain.to_vec()), 40.0), []);
        // Its parent has got it all long ago.
        let mut done = chain;
        done[0].moving = false;
        assert_eq!(faults(&seen(done.to_vec()), 400.0), child);
    }

    #[test]
    fn below_the_source_a_plan_says_what_could_be() {
        let first = seen(vec![sick_disk("head", "n1", 40.0)]);
        assert_eq!(faults(&first, 400.0), [("n1".to_owned(), Fault::Child)]);
        assert_eq!(slow(&topology("10 Gbit/s"), &first, &|_| None, &|_| None), []);
    }

    #[test]
    fn a_slow_way_is_nobodys_fault_until_the_parent_is_fast_with_another() {
        let mut hops = vec![well("head", "n1", 400.0), sick_way("n1", "n2", 40.0)];
        assert_eq!(
            faults(&seen(hops.clone()), 400.0),
            [("n2".to_owned(), Fault::Way)]
        );
        hops.push(well("n1", "n3", 300.0));
        assert_eq!(
            faults(&seen(hops.clone()), 400.0),
            [("n2".to_owned(), Fault::Child)],
            "to n3 it is the same switch"
        );
        // To the head it is another way than over the uplink.
        let apart = vec![sick_way("head", "n2", 40.0), well("head", "head", 900.0)];
        assert_eq!(faults(&seen(apart), 400.0), [("n2".to_owned(), Fault::Way)]);
    }

    #[test]
    fn what_must_be_slow_is_left_alone() {
        let limited = hop("n1", "n2", 40.0, receiving(92, 2, 6), sending(0, 4, 0, 92, 4));
        let waits = hop("n1", "n2", 40.0, receiving(92, 2, 6), sending(30, 64, 0, 0, 6));
        for quiet in [limited, waits] {
            assert_eq!(faults(&seen(vec![well("head", "n1", 400.0), quiet]), 400.0), []);
        }
        // Three children share their parent's interface, and a link that the push fills.
        let star = ["n1", "n2", "n3"].map(|child| sick_way("head", child, 195.0));
        let uplink = topology("5 Gbit/s");
        assert_eq!(
            slow(&uplink, &seen(star.to_vec()), &|_| Some(mb(590.0)), &|_| None),
            []
        );
        // Who reads back slowly, or has no processor to send with, is not the child's fault.
        let back = hop("n1", "n2", 40.0, receiving(92, 2, 6), sending(0, 4, 90, 0, 6));
        let busy = hop("n1", "n2", 40.0, receiving(92, 2, 6), sending(0, 4, 0, 0, 96));
        for above in [back, busy] {
            assert_eq!(
                faults(&seen(vec![well("head", "n1", 400.0), above]), 400.0),
                [("n2".to_owned(), Fault::Way)]
            );
        }
    }
}
