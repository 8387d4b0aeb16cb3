//! Which hops are slow for a reason that the rest of a push need not share: a sick disk in the middle of a chain would
//! set the pace of all below it.
//!
//! A hop is slow whose parent always has something to send, and that brings less than half of what the parent itself
//! received and of what was planned. Where the fault may be the parent's, the child is better off one up; where it is the
//! child's, those below it are, if they wait for it and nothing else. A full link or a limit that somebody set is nobody's
//! fault. None of it is certain: who moves a node looks whether that helped.

use std::collections::BTreeMap;

use super::{Judge, Limit, Seen, Stop, share};
use crate::id::NodeName;
use crate::plan::WindowLimits;
use crate::topology::Topology;
use crate::units::Rate;

/// A hop below this share of what it could bring is slow.
const SLOW: f64 = 0.5;
/// A parent whose threads wait longer than this share of their time for something to send does not always have it.
const IDLE: f64 = 0.1;
/// Who waits for bytes at least this share of its time could take twice as much.
const WAITS: f64 = 0.5;

/// A hop that is slow by itself.
#[derive(Debug, Clone, PartialEq)]
pub struct SlowHop {
    /// Who receives.
    pub child: NodeName,
    /// From whom.
    pub parent: NodeName,
    /// Whose fault it is.
    pub fault: Fault,
    /// Those that receive from the child, and wait for what it does not have either.
    pub waiting: Vec<NodeName>,
    /// What limits it, for people.
    pub text: String,
}

/// Whose fault a slow hop is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The child's: it would be as slow with another parent.
    Child,
    /// The parent's, the child's, or that of the way between them.
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
    let behind: Vec<usize> = (0..seen.hops.len())
        .filter(|at| judge.falls_behind(*at, planned))
        .collect();
    if behind.is_empty() {
        return Vec::new();
    }
    let mut below: BTreeMap<&NodeName, Vec<usize>> = BTreeMap::new();
    for (at, hop) in seen.hops.iter().enumerate() {
        below.entry(&hop.parent).or_default().push(at);
    }
    behind
        .into_iter()
        .filter_map(|at| {
            let Some(Stop::Here(limit)) = judge.stop(at) else {
                return None;
            };
            let hop = &seen.hops[at];
            let waiting = below.get(&hop.child).into_iter().flatten();
            Some(SlowHop {
                child: hop.child.clone(),
                parent: hop.parent.clone(),
                fault: fault(&hop.child, &limit)?,
                waiting: waiting
                    .filter(|at| judge.waits(**at))
                    .map(|at| seen.hops[*at].child.clone())
                    .collect(),
                text: judge.words(at, &limit, windows),
            })
        })
        .collect()
}

fn fault(child: &NodeName, limit: &Limit) -> Option<Fault> {
    let of = |node: &NodeName| Some(if node == child { Fault::Child } else { Fault::Way });
    match limit {
        Limit::DiskWrite(node)
        | Limit::Processor(node)
        | Limit::ReceiveWindow(node)
        | Limit::SendWindow(node)
        | Limit::ReadBack(node) => of(node),
        Limit::Loss | Limit::Network => Some(Fault::Way),
        Limit::SourceRead(_)
        | Limit::Pipe(_)
        | Limit::SendLimit(_)
        | Limit::SourceLimit(_)
        | Limit::Full(_)
        | Limit::HalfDuplex(_) => None,
    }
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

    /// Whether the hop waits for what its parent does not have either.
    fn waits(&self, at: usize) -> bool {
        let hop = &self.seen.hops[at];
        hop.moving
            && share(hop.receiving.upstream, hop.receiving.total()) >= WAITS
            && matches!(self.stop(at), Some(Stop::Above))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{hop, mb, name, receiving, seen, sending, starved, topology};
    use super::*;
    use crate::verdict::SeenHop;

    /// Child, fault and who waits, of each slow hop.
    fn found(seen: &Seen, planned: f64) -> Vec<(String, Fault, String)> {
        slow(&topology("10 Gbit/s"), seen, &|_| Some(mb(planned)), &|_| None)
            .into_iter()
            .map(|slow| {
                let waiting: Vec<String> = slow.waiting.iter().map(ToString::to_string).collect();
                (slow.child.to_string(), slow.fault, waiting.join(","))
            })
            .collect()
    }

    fn one(child: &str, fault: Fault, waiting: &str) -> Vec<(String, Fault, String)> {
        vec![(child.to_owned(), fault, waiting.to_owned())]
    }

    /// It has what it needs and waits for its own disk.
    fn disk(parent: &str, child: &str, rate: f64) -> SeenHop {
        hop(parent, child, rate, receiving(4, 88, 8), sending(0, 92, 0, 0, 8))
    }

    /// The network brings no more, and nobody knows why.
    fn network(parent: &str, child: &str, rate: f64) -> SeenHop {
        hop(parent, child, rate, receiving(92, 2, 6), sending(2, 92, 0, 0, 6))
    }

    #[test]
    fn a_sick_disk_in_a_chain_is_its_own_fault() {
        let chain = [
            starved("head", "n1", 400.0),
            disk("n1", "n2", 40.0),
            starved("n2", "n3", 40.0),
            starved("n3", "n4", 39.0),
        ];
        let sick = one("n2", Fault::Child, "n3");
        assert_eq!(found(&seen(chain.to_vec()), 400.0), sick);
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
        assert_eq!(found(&seen(half.to_vec()), 400.0), []);
        // It was planned to be slow.
        assert_eq!(found(&seen(chain.to_vec()), 40.0), []);
        // Its parent has got it all long ago.
        let mut done = chain.clone();
        done[0].moving = false;
        assert_eq!(found(&seen(done.to_vec()), 400.0), sick);
        // Who has no more to get waits for nobody.
        let mut last = chain;
        last[2].moving = false;
        assert_eq!(found(&seen(last.to_vec()), 400.0), one("n2", Fault::Child, ""));
    }

    #[test]
    fn below_the_source_a_plan_says_what_could_be() {
        let first = seen(vec![disk("head", "n1", 40.0), starved("n1", "n2", 40.0)]);
        assert_eq!(found(&first, 400.0), one("n1", Fault::Child, "n2"));
        assert_eq!(slow(&topology("10 Gbit/s"), &first, &|_| None, &|_| None), []);
    }

    #[test]
    fn where_all_disks_are_alike_nobody_waits() {
        let alike = seen(vec![disk("head", "n1", 180.0), disk("n1", "n2", 180.0)]);
        assert_eq!(found(&alike, 400.0), one("n1", Fault::Child, ""));
    }

    #[test]
    fn a_slow_way_may_be_anybodys_fault() {
        let hops = vec![
            starved("head", "n1", 400.0),
            network("n1", "n2", 40.0),
            starved("n2", "n3", 40.0),
        ];
        assert_eq!(found(&seen(hops), 400.0), one("n2", Fault::Way, "n3"));
        // Who reads back slowly, or has no processor to send with.
        let back = hop("n1", "n2", 40.0, receiving(92, 2, 6), sending(0, 4, 90, 0, 6));
        let busy = hop("n1", "n2", 40.0, receiving(92, 2, 6), sending(0, 4, 0, 0, 96));
        for above in [back, busy] {
            let seen = seen(vec![starved("head", "n1", 400.0), above]);
            assert_eq!(found(&seen, 400.0), one("n2", Fault::Way, ""));
        }
    }

    #[test]
    fn what_must_be_slow_is_left_alone() {
        let limited = hop("n1", "n2", 40.0, receiving(92, 2, 6), sending(0, 4, 0, 92, 4));
        let waits = hop("n1", "n2", 40.0, receiving(92, 2, 6), sending(30, 64, 0, 0, 6));
        for quiet in [limited, waits] {
            assert_eq!(found(&seen(vec![starved("head", "n1", 400.0), quiet]), 400.0), []);
        }
        // Three children share a link that the push fills.
        let star = ["n1", "n2", "n3"].map(|child| network("head", child, 195.0));
        let uplink = topology("5 Gbit/s");
        assert_eq!(
            slow(&uplink, &seen(star.to_vec()), &|_| Some(mb(590.0)), &|_| None),
            []
        );
    }
}
