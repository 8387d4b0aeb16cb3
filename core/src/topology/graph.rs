//! The fabric as a graph: wires with their capacities, and the shortest ways over switches.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::OnceLock;
use std::time::Duration;

use petgraph::graph::{NodeIndex, UnGraph};
use petgraph::unionfind::UnionFind;

use super::EdgeId;
use crate::id::CongestionControl;
use crate::units::Rate;

/// One end of a wire: an index into the topology's switches or nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Point {
    Switch(u32),
    Node(u32),
}

/// What joins two points: an interface, or a link with its equal parallels.
#[derive(Debug, Clone)]
pub(super) struct Wire {
    pub(super) ends: [Point; 2],
    /// Of one member.
    pub(super) capacity: Rate,
    /// Equal parallel links.
    pub(super) members: u32,
    pub(super) rtt: Option<Duration>,
    pub(super) loss: f64,
    pub(super) congestion_control: Option<CongestionControl>,
    /// For people; an interface is named after its node.
    pub(super) link: Option<String>,
}

impl Wire {
    pub(super) fn total(&self) -> Rate {
        self.capacity.times(f64::from(self.members))
    }
}

/// A node's leg: the wire from the node to the switch.
#[derive(Debug, Clone)]
pub(super) struct Leg {
    pub(super) switch: u32,
    pub(super) wire: u32,
    pub(super) nic: Rate,
    pub(super) address: Option<IpAddr>,
}

/// Wires, legs and the graph of switches.
#[derive(Debug, Clone)]
pub(super) struct Fabric {
    /// In file order. Wire `w` is edge `2w` from its first end to its second, and `2w + 1` back.
    pub(super) wires: Vec<Wire>,
    /// Of each node, in file order.
    pub(super) legs: Vec<Vec<Leg>>,
    /// Switches, joined by links (the weight is the wire).
    switches: UnGraph<(), u32>,
    /// The ways from each switch, found when first asked for: a planner asks for few of all pairs.
    trees: Vec<OnceLock<Tree>>,
}

/// The best way from one switch to every other.
#[derive(Debug, Clone)]
struct Tree {
    /// The switch before, and the wire from it; `None` at the root and where no way leads.
    before: Vec<Option<(u32, u32)>>,
    /// Links passed.
    links: Vec<u32>,
}

/// A way, as indices.
pub(super) struct Way<'f> {
    pub(super) edges: Vec<EdgeId>,
    pub(super) switches: Vec<u32>,
    pub(super) to: &'f Leg,
}

impl Fabric {
    pub(super) fn new(switches: usize, wires: Vec<Wire>, legs: Vec<Vec<Leg>>) -> Self {
        let mut graph = UnGraph::with_capacity(switches, wires.len());
        for _ in 0..switches {
            graph.add_node(());
        }
        for (index, wire) in (0u32..).zip(&wires) {
            if let [Point::Switch(a), Point::Switch(b)] = wire.ends {
                graph.add_edge(NodeIndex::new(a as usize), NodeIndex::new(b as usize), index);
            }
        }
        Self {
            wires,
            legs,
            switches: graph,
            trees: vec![OnceLock::new(); switches],
        }
    }

    /// The wire of an edge, if it is one of this fabric.
    pub(super) fn wire(&self, edge: EdgeId) -> Option<&Wire> {
        self.wires.get(edge.0 as usize / 2)
    }

    /// The edge over `wire` that starts at `from`.
    pub(super) fn edge(&self, wire: u32, from: Point) -> EdgeId {
        EdgeId(wire * 2 + u32::from(self.wires[wire as usize].ends[0] != from))
    }

    /// The way between two nodes over the network that carries most (the smaller interface counts), then that with
    /// the fewest links, then the first in file order.
    pub(super) fn way(&self, from: u32, to: u32) -> Option<Way<'_>> {
        let mut best: Option<(Rate, u32, &Leg, &Leg)> = None;
        for start in &self.legs[from as usize] {
            for end in &self.legs[to as usize] {
                let Some(links) = self.links_between(start.switch, end.switch) else {
                    continue;
                };
                let rate = start.nic.min(end.nic);
                if best
                    .is_none_or(|(fastest, fewest, ..)| rate > fastest || rate == fastest && links < fewest)
                {
                    best = Some((rate, links, start, end));
                }
            }
        }
        let (_, _, start, end) = best?;
        let (switches, wires) = self.between(start.switch, end.switch);
        let mut edges = Vec::with_capacity(wires.len() + 2);
        edges.push(self.edge(start.wire, Point::Node(from)));
        edges.extend(
            wires
                .iter()
                .zip(&switches)
                .map(|(wire, at)| self.edge(*wire, Point::Switch(*at))),
        );
        edges.push(self.edge(end.wire, Point::Switch(end.switch)));
        Some(Way {
            edges,
            switches,
            to: end,
        })
    }

    /// Links on the way between two switches.
    fn links_between(&self, a: u32, b: u32) -> Option<u32> {
        let (root, leaf) = (a.min(b), a.max(b));
        let tree = self.tree(root);
        (root == leaf || tree.before[leaf as usize].is_some()).then(|| tree.links[leaf as usize])
    }

    /// The switches from `from` to `to`, both included, and the wires between them. The way back is the same one.
    fn between(&self, from: u32, to: u32) -> (Vec<u32>, Vec<u32>) {
        let (root, leaf) = (from.min(to), from.max(to));
        let tree = self.tree(root);
        let mut switches = vec![leaf];
        let mut wires = Vec::new();
        let mut at = leaf;
        while let Some((before, wire)) = tree.before[at as usize] {
            switches.push(before);
            wires.push(wire);
            at = before;
        }
        if from == root {
            switches.reverse();
            wires.reverse();
        }
        (switches, wires)
    }

    fn tree(&self, root: u32) -> &Tree {
        self.trees[root as usize].get_or_init(|| self.grow(root))
    }

    /// Fewest links first, then the widest narrowest link, then file order.
    fn grow(&self, root: u32) -> Tree {
        let count = self.switches.node_count();
        let mut before: Vec<Option<(u32, u32)>> = vec![None; count];
        let mut links = vec![u32::MAX; count];
        let mut width = vec![Rate::ZERO; count];
        links[root as usize] = 0;
        width[root as usize] = Rate::UNLIMITED;
        let mut level = vec![root];
        let mut depth = 0;
        while !level.is_empty() {
            depth += 1;
            let mut next = Vec::new();
            for &at in &level {
                for edge in self.switches.edges(NodeIndex::new(at as usize)) {
                    use petgraph::visit::EdgeRef;
                    let (a, b, wire) = (edge.source().index(), edge.target().index(), *edge.weight());
                    let to = if a == at as usize { b } else { a };
                    if links[to] < depth {
                        continue;
                    }
                    if links[to] > depth {
                        links[to] = depth;
                        next.push(to as u32);
                    }
                    let wide = width[at as usize].min(self.wires[wire as usize].total());
                    let better =
                        before[to].is_none_or(|(_, old)| wide > width[to] || wide == width[to] && wire < old);
                    if better {
                        width[to] = wide;
                        before[to] = Some((at, wire));
                    }
                }
            }
            level = next;
        }
        Tree { before, links }
    }

    /// The nodes outside the part of the fabric that holds most nodes (the first of equals). A node with legs in two
    /// networks joins them, as a relay.
    pub(super) fn cut_off(&self) -> Vec<u32> {
        let (nodes, switches) = (self.legs.len(), self.switches.node_count());
        let index = |point: Point| match point {
            Point::Node(node) => node as usize,
            Point::Switch(switch) => nodes + switch as usize,
        };
        let mut parts = UnionFind::<usize>::new(nodes + switches);
        for wire in &self.wires {
            parts.union(index(wire.ends[0]), index(wire.ends[1]));
        }
        let labels = parts.into_labeling();
        let mut sizes: BTreeMap<usize, usize> = BTreeMap::new();
        for label in &labels[..nodes] {
            *sizes.entry(*label).or_default() += 1;
        }
        let Some(largest) = sizes.values().max().copied() else {
            return Vec::new();
        };
        let main = labels.iter().find(|label| sizes.get(label) == Some(&largest));
        (0u32..)
            .zip(&labels[..nodes])
            .filter(|(_, label)| Some(*label) != main)
            .map(|(node, _)| node)
            .collect()
    }
}
