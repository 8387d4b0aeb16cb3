//! The order in which the fabric is walked: depth first over the switch tree, beginning at the source.
//!
//! A chain in this order crosses each link between switches at most once in each direction, so none of its hops
//! contend: Patarasuk, Faraj, Yuan, "Pipelined broadcast on Ethernet switched clusters" (2006). Trees cut the same
//! order into runs. Nodes and racks that are slow come last, where nobody waits behind them.
//!
//! A network that the source is not in is reached through a target that has a leg in both; the walk through it begins
//! at that node. So the walk falls into [`Section`]s, each within one network and below one root.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::PlanError;
use super::ground::{Ground, SOURCE, natural};
use crate::id::SwitchName;
use crate::topology::Route;

/// A part of the walk within one network: any two of its nodes, and its root, have a route between them.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Section {
    /// Who brings the payload in: the source, or a node of an earlier section.
    pub(super) root: usize,
    /// In walking order, the root not among them.
    pub(super) nodes: Vec<usize>,
    /// How many links between switches lie between each node and the one before it (for the first: the root).
    pub(super) gaps: Vec<usize>,
    /// The switch of each node, by a number of this walk's own.
    pub(super) places: Vec<usize>,
    /// Whether each node receives at most half as fast as the fastest at its switch.
    pub(super) sick: Vec<bool>,
}

/// The whole walk.
#[derive(Debug)]
pub(super) struct Walk {
    /// Sections; a root comes in an earlier one.
    pub(super) sections: Vec<Section>,
    /// Half of the shortest RTT from the source: nothing arrives anywhere sooner.
    pub(super) latency: Duration,
    /// Any two nodes have a route between them, so none need be looked up to be sure.
    pub(super) one_network: bool,
}

impl Walk {
    /// Walks from the source to every target.
    ///
    /// # Errors
    /// The first target (in request order) that no network joins with the source or a target that has been reached.
    pub(super) fn new(ground: &Ground<'_>) -> Result<Self, PlanError> {
        let mut waiting: Vec<usize> = (1..ground.len()).collect();
        let mut seen: BTreeSet<SwitchName> = BTreeSet::new();
        let mut shortest: Option<Duration> = None;
        let mut sections = Vec::new();
        let mut reached = Vec::new();
        let mut root = Some(SOURCE);
        while let Some(from) = root {
            let mut tree = SwitchTree::default();
            waiting.retain(|&node| {
                let Some(route) = ground.route(from, node) else {
                    return true;
                };
                if from == SOURCE {
                    let rtt = ground.rtt(from, node, &route);
                    shortest = Some(shortest.map_or(rtt, |least| least.min(rtt)));
                }
                tree.insert(ground, node, &route);
                false
            });
            seen.extend(ground.node(from).interfaces.iter().map(|leg| leg.attach.clone()));
            seen.extend(tree.places.iter().filter_map(|place| place.switch.clone()));
            for section in tree.walk(from) {
                reached.extend(&section.nodes);
                sections.push(section);
            }
            root = if waiting.is_empty() {
                None
            } else {
                gateway(ground, &reached, &seen)
            };
        }
        if let Some(&lost) = ground
            .seats
            .iter()
            .find(|seat| waiting.binary_search(seat).is_ok())
        {
            return Err(PlanError::Unreachable(ground.name(lost).clone()));
        }
        let single = (0..ground.len()).all(|node| ground.node(node).interfaces.len() == 1);
        Ok(Self {
            one_network: single && sections.len() <= 1,
            sections,
            latency: shortest.unwrap_or_default() / 2,
        })
    }

    /// All nodes but the source, each after its section's root.
    pub(super) fn nodes(&self) -> impl Iterator<Item = usize> + '_ {
        self.sections
            .iter()
            .flat_map(|section| section.nodes.iter().copied())
    }
}

/// The node that leads best into a network not seen yet: the one with the fastest leg there, of equals the first.
fn gateway(ground: &Ground<'_>, reached: &[usize], seen: &BTreeSet<SwitchName>) -> Option<usize> {
    let mut best: Option<(f64, usize)> = None;
    for &node in reached {
        for leg in ground
            .node(node)
            .interfaces
            .iter()
            .filter(|leg| !seen.contains(&leg.attach))
        {
            let rate = leg.nic.bytes_per_second();
            if best.is_none_or(|(fastest, _)| rate > fastest) {
                best = Some((rate, node));
            }
        }
    }
    best.map(|(_, node)| node)
}

/// The routes from one root laid over each other: in a fabric without loops its switch tree, hung up at the root.
struct SwitchTree {
    places: Vec<Place>,
    by_switch: BTreeMap<(usize, SwitchName), usize>,
}

/// A switch, as it is reached from the root.
#[derive(Default)]
struct Place {
    /// `None` for the root itself.
    switch: Option<SwitchName>,
    parent: usize,
    depth: usize,
    below: Vec<usize>,
    /// Nodes here, with what the way from the root and their disk let them receive, in bytes a second.
    nodes: Vec<(usize, f64)>,
}

impl Default for SwitchTree {
    fn default() -> Self {
        Self {
            places: vec![Place::default()],
            by_switch: BTreeMap::new(),
        }
    }
}

impl SwitchTree {
    fn insert(&mut self, ground: &Ground<'_>, node: usize, route: &Route) {
        let mut at = 0;
        for switch in &route.switches {
            let next = self.places.len();
            let place = *self.by_switch.entry((at, switch.clone())).or_insert(next);
            if place == next {
                let depth = self.places[at].depth + 1;
                self.places.push(Place {
                    switch: Some(switch.clone()),
                    parent: at,
                    depth,
                    ..Place::default()
                });
                self.places[at].below.push(next);
            }
            at = place;
        }
        let narrowest = route
            .edges
            .iter()
            .map(|&edge| ground.goodput(edge).bytes_per_second())
            .fold(f64::MAX, f64::min);
        let rate = narrowest.min(ground.disk_write(node).bytes_per_second());
        self.places[at].nodes.push((node, rate));
    }

    /// The depth-first walk, a section for each switch that the root is plugged into.
    fn walk(&self, root: usize) -> Vec<Section> {
        let fastest = self
            .places
            .iter()
            .flat_map(|place| &place.nodes)
            .map(|&(_, rate)| rate)
            .fold(0.0, f64::max);
        // How often the rate can be doubled before it is the fastest: 0 for the usual node.
        let slowness = |rate: f64| (fastest / rate).log2().floor() as i32;

        let sick: BTreeSet<usize> = self
            .places
            .iter()
            .flat_map(|place| {
                let best = place.nodes.iter().map(|&(_, rate)| rate).fold(0.0, f64::max);
                place.nodes.iter().filter(move |&&(_, rate)| rate * 2.0 <= best)
            })
            .map(|&(node, _)| node)
            .collect();

        // A place is as slow as the slowest node in or below it. Places below come after their parent.
        let mut worst: Vec<i32> = Vec::with_capacity(self.places.len());
        for place in &self.places {
            worst.push(
                place
                    .nodes
                    .iter()
                    .map(|&(_, rate)| slowness(rate))
                    .max()
                    .unwrap_or(0),
            );
        }
        for at in (1..self.places.len()).rev() {
            let parent = self.places[at].parent;
            worst[parent] = worst[parent].max(worst[at]);
        }

        let sorted_below = |at: usize| {
            let mut below = self.places[at].below.clone();
            let name = |place: usize| self.places[place].switch.as_ref().map_or("", SwitchName::as_str);
            below.sort_unstable_by(|&a, &b| worst[a].cmp(&worst[b]).then_with(|| natural(name(a), name(b))));
            below
        };
        let sorted_nodes = |at: usize, slow: bool| {
            let mut nodes: Vec<(i32, usize)> = self.places[at]
                .nodes
                .iter()
                .map(|&(node, rate)| (slowness(rate), node))
                .collect();
            nodes.retain(|&(class, _)| (class > 0) == slow);
            nodes.sort_unstable();
            nodes.into_iter().map(|(_, node)| node)
        };

        let mut sections = Vec::new();
        for top in std::iter::once(0).chain(sorted_below(0)) {
            // Each place is met twice: on the way down (its fast nodes), and when all below it is done (its slow ones).
            let mut stack = vec![(top, true), (top, false)];
            let mut order: Vec<(usize, usize)> = Vec::new();
            while let Some((at, done)) = stack.pop() {
                order.extend(sorted_nodes(at, done).map(|node| (node, at)));
                if !done && at != 0 {
                    for place in sorted_below(at).into_iter().rev() {
                        stack.extend([(place, true), (place, false)]);
                    }
                }
            }
            let mut before = top;
            let mut section = Section {
                root,
                nodes: Vec::new(),
                gaps: Vec::new(),
                places: Vec::new(),
                sick: Vec::new(),
            };
            for (node, at) in order {
                section.nodes.push(node);
                section.places.push(at);
                section.sick.push(sick.contains(&node));
                section.gaps.push(self.links_between(before, at));
                before = at;
            }
            if !section.nodes.is_empty() {
                sections.push(section);
            }
        }
        sections
    }

    fn links_between(&self, mut a: usize, mut b: usize) -> usize {
        let mut links = 0;
        while a != b {
            if self.places[a].depth < self.places[b].depth {
                std::mem::swap(&mut a, &mut b);
            }
            a = self.places[a].parent;
            links += 1;
        }
        links
    }
}
