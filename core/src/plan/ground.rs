//! The bare problem: names become ordinals, and everything known of each node is laid beside its ordinal.
//!
//! Ordinal 0 is the source, the others are the targets in natural order of their names ("n2" before "n10"), so that
//! neither the order of the request nor that of the topology file changes a plan.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::time::Duration;

use super::{Facts, HopFacts, PathFacts, PlanError, Request};
use crate::cost::StreamPath;
use crate::id::{CongestionControl, NodeName};
use crate::topology::{EdgeId, Node, Route, Topology};
use crate::units::Rate;

/// The source's ordinal.
pub(crate) const SOURCE: usize = 0;

/// What a plan is made from, by ordinals.
pub(crate) struct Ground<'a> {
    pub(crate) topology: &'a Topology,
    pub(crate) request: &'a Request,
    facts: &'a Facts,
    nodes: Vec<&'a Node>,
    /// The ordinal of each target, in the request's order; [`SOURCE`] for a local copy.
    pub(crate) seats: Vec<usize>,
}

impl<'a> Ground<'a> {
    /// Looks up every node of the request.
    ///
    /// # Errors
    /// A node that is not in the topology, or no target.
    pub(crate) fn survey(
        topology: &'a Topology,
        request: &'a Request,
        facts: &'a Facts,
    ) -> Result<Self, PlanError> {
        let find = |name: &NodeName| {
            topology
                .node(name)
                .ok_or_else(|| PlanError::UnknownNode(name.clone()))
        };
        let source = find(&request.source)?;
        if request.targets.is_empty() {
            return Err(PlanError::NoTarget);
        }
        let mut seen = BTreeSet::new();
        let mut targets = Vec::with_capacity(request.targets.len());
        for name in &request.targets {
            if seen.insert(name) {
                targets.push(find(name)?);
            }
        }

        let mut by_name: Vec<usize> = (0..targets.len())
            .filter(|&i| targets[i].name != source.name)
            .collect();
        by_name.sort_unstable_by(|&a, &b| natural(targets[a].name.as_str(), targets[b].name.as_str()));
        let mut seats = vec![SOURCE; targets.len()];
        let mut nodes = vec![source];
        for target in by_name {
            seats[target] = nodes.len();
            nodes.push(targets[target]);
        }
        Ok(Self {
            topology,
            request,
            facts,
            nodes,
            seats,
        })
    }

    /// Nodes, the source among them: ordinals run from 0 to this.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(crate) fn node(&self, ordinal: usize) -> &'a Node {
        self.nodes[ordinal]
    }

    pub(crate) fn name(&self, ordinal: usize) -> &'a NodeName {
        &self.nodes[ordinal].name
    }

    /// The way of a hop.
    pub(super) fn route(&self, parent: usize, child: usize) -> Option<Route> {
        self.topology.route(self.name(parent), self.name(child))
    }

    /// A hop's RTT.
    pub(super) fn rtt(&self, parent: usize, child: usize, route: &Route) -> Duration {
        self.facts.rtt(self.name(parent), self.name(child), route)
    }

    /// What pushes met on a hop.
    pub(super) fn met(&self, parent: usize, child: usize) -> HopFacts {
        self.facts.hop(self.name(parent), self.name(child))
    }

    /// What was measured between the switches where a hop begins and ends, with the congestion control that it will have.
    pub(super) fn measured(
        &self,
        parent: usize,
        route: &Route,
        control: Option<&CongestionControl>,
    ) -> Option<&'a PathFacts> {
        self.facts.measured(self.name(parent), route, control)
    }

    /// The congestion control that a hop's connections ask for.
    pub(super) fn control(&self, parent: usize, child: usize, route: &Route) -> Option<CongestionControl> {
        self.facts
            .control(self.topology, self.name(parent), self.name(child), route)
    }

    /// The congestion control that a hop's connections have, asked for or not, if anybody says.
    pub(super) fn resolved(
        &self,
        parent: usize,
        asked: Option<&CongestionControl>,
    ) -> Option<CongestionControl> {
        self.facts.resolved(self.name(parent), asked)
    }

    /// What an edge carries of payload.
    pub(crate) fn goodput(&self, edge: EdgeId) -> Rate {
        self.facts.goodput(self.topology, edge)
    }

    /// How fast the node writes; unlimited when neither a measurement nor the topology says.
    pub(crate) fn disk_write(&self, ordinal: usize) -> Rate {
        let measured = self
            .facts
            .nodes
            .get(self.name(ordinal))
            .and_then(|facts| facts.disk_write);
        measured
            .or(self.nodes[ordinal].disk_write)
            .unwrap_or(Rate::UNLIMITED)
    }

    /// How fast the source reads, its limit aside; unlimited when nobody says.
    pub(super) fn source_disk(&self) -> Rate {
        let measured = self
            .facts
            .nodes
            .get(self.name(SOURCE))
            .and_then(|facts| facts.disk_read);
        measured
            .or(self.nodes[SOURCE].disk_read)
            .unwrap_or(Rate::UNLIMITED)
    }

    pub(super) fn source_limit(&self) -> Rate {
        self.request.source_limit.unwrap_or(Rate::UNLIMITED)
    }

    /// What each node may send over the network.
    pub(crate) fn send_limit(&self) -> Rate {
        self.request.limit.unwrap_or(Rate::UNLIMITED)
    }

    /// The path of one of a hop's streams, which ask for this congestion control; `None`: for none.
    pub(super) fn stream_path(
        &self,
        parent: usize,
        child: usize,
        route: &Route,
        control: Option<&CongestionControl>,
    ) -> StreamPath {
        self.facts.stream_path(
            self.name(parent),
            self.name(child),
            route,
            control,
            self.request.encrypted,
        )
    }
}

/// Compares names as people count: runs of digits by their value, everything else by its letters.
pub(super) fn natural(a: &str, b: &str) -> Ordering {
    let (mut left, mut right) = (a.as_bytes(), b.as_bytes());
    while let (Some(&x), Some(&y)) = (left.first(), right.first()) {
        let order = if x.is_ascii_digit() && y.is_ascii_digit() {
            let (m, n) = (take_number(&mut left), take_number(&mut right));
            m.len().cmp(&n.len()).then_with(|| m.cmp(n))
        } else {
            (left, right) = (&left[1..], &right[1..]);
            x.cmp(&y)
        };
        if order != Ordering::Equal {
            return order;
        }
    }
    // "n01" and "n1" count the same and are two names all the same.
    left.len().cmp(&right.len()).then_with(|| a.cmp(b))
}

/// Takes the digits at the front and gives them without leading zeros.
fn take_number<'a>(text: &mut &'a [u8]) -> &'a [u8] {
    let end = text
        .iter()
        .position(|b| !b.is_ascii_digit())
        .unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    *text = rest;
    let zeros = digits.iter().position(|&b| b != b'0').unwrap_or(digits.len());
    &digits[zeros..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_as_people_count() {
        let mut names = ["n10", "n2", "n1", "a9b", "n02", "n", "a10a", "n2x", "b"];
        names.sort_unstable_by(|a, b| natural(a, b));
        assert_eq!(names, ["a9b", "a10a", "b", "n", "n1", "n02", "n2", "n2x", "n10"]);
    }
}
