//! The fabric: nodes, switches, links and groups, read from `topology.toml`.
//!
//! Each node's interface is an edge to its switch, each link an edge between switches (or a switch and a node);
//! every edge carries its capacity in both directions at once (full duplex). A route runs over switches only,
//! never through a node.

mod build;
mod graph;
pub mod hostlist;
mod parse;
mod report;
mod select;
mod summary;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

pub use self::summary::Summary;

use self::graph::{Fabric, Point};
use crate::id::{ClusterName, CongestionControl, NodeName, RootName, SwitchName};
use crate::units::Rate;

/// A node as the topology describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// Its name.
    pub name: NodeName,
    /// Its interfaces, in file order; one for a node written with `address`, `attach` and `nic`.
    pub interfaces: Vec<Interface>,
    /// `disk_write`, until a measurement replaces it.
    pub disk_write: Option<Rate>,
    /// `disk_read`, until a measurement replaces it.
    pub disk_read: Option<Rate>,
    /// Roots: the cluster's, overlaid with the node's own.
    pub roots: BTreeMap<RootName, String>,
}

/// A node's leg in one network.
#[derive(Debug, Clone, PartialEq)]
pub struct Interface {
    /// `name`, where the node has several.
    pub name: Option<String>,
    /// `address`; left out, the node's name is resolved.
    pub address: Option<IpAddr>,
    /// The switch it is plugged into.
    pub attach: SwitchName,
    /// Its capacity in each direction.
    pub nic: Rate,
}

/// An edge of the fabric in one direction. Edges are numbered in file order, both directions apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EdgeId(pub u32);

impl EdgeId {
    /// The same edge in the other direction.
    #[must_use]
    pub fn reverse(self) -> Self {
        Self(self.0 ^ 1)
    }
}

/// What an edge starts from or leads to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum End<'t> {
    /// A switch.
    Switch(&'t SwitchName),
    /// A node, and which of its interfaces.
    Node {
        /// The node.
        node: &'t Node,
        /// The index in [`Node::interfaces`].
        interface: usize,
    },
}

/// An interface or a link as it was written, in the direction of its even [`EdgeId`]; equal parallel links are one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link<'t> {
    /// The edge from `from` to `to`; [`EdgeId::reverse`] leads back.
    pub edge: EdgeId,
    /// Where it starts; for an interface its node.
    pub from: End<'t>,
    /// Where it leads; for an interface its switch.
    pub to: End<'t>,
    /// Of one member.
    pub member_capacity: Rate,
    /// Equal parallel links in it.
    pub members: u32,
    /// What the link says of its RTT.
    pub rtt: Option<Duration>,
    /// Its loss, 0 to 1.
    pub loss: f64,
    /// The congestion control that it asks for.
    pub congestion_control: Option<&'t CongestionControl>,
    /// An interface of a node, not a `[[link]]`.
    pub is_interface: bool,
}

/// The way from one node to another.
#[derive(Debug, Clone, PartialEq)]
pub struct Route {
    /// The edges passed, in order: the sender's interface first, the receiver's last.
    pub edges: Vec<EdgeId>,
    /// The switches passed, in order.
    pub switches: Vec<SwitchName>,
    /// Sum of what the links say of their RTT; none of them says: `None`.
    pub rtt: Option<Duration>,
    /// Loss over all links, 0 to 1.
    pub loss: f64,
    /// Congestion control that a link on the way asks for.
    pub congestion_control: Option<CongestionControl>,
    /// The receiver's address on the network that both share.
    pub to_address: Option<IpAddr>,
}

/// A named set of nodes.
#[derive(Debug, Clone, PartialEq)]
pub enum Group {
    /// Written out.
    Static(Vec<NodeName>),
    /// A command's output, run by the coordinator.
    Command {
        /// Program and arguments, no shell.
        command: Vec<String>,
        /// How often to run it again.
        every: Duration,
    },
}

/// The fabric.
#[derive(Debug, Clone)]
pub struct Topology {
    cluster: ClusterName,
    nodes: Vec<Node>,
    index: BTreeMap<NodeName, u32>,
    switches: Vec<SwitchName>,
    /// How many of them the file names; the others stand for links between two nodes.
    declared: usize,
    groups: BTreeMap<String, Group>,
    roots: BTreeMap<RootName, String>,
    fabric: Fabric,
}

/// One thing that is wrong with a topology.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}: {message}")]
pub struct TopologyError {
    /// The file as it was named.
    pub file: String,
    /// Line, from 1.
    pub line: usize,
    /// What is wrong and what to write instead.
    pub message: String,
}

/// Why a TARGETS text selects no nodes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SelectError(pub String);

impl Topology {
    /// Reads a topology. `file` is how errors name it. All errors found are given, in line order.
    ///
    /// # Errors
    /// Everything that is wrong with the text, at least one.
    pub fn parse(file: &str, text: &str) -> Result<Self, Vec<TopologyError>> {
        let mut report = report::Report::new(file, text);
        let topology = parse::parse(text, &mut report).and_then(|draft| build::build(&draft, &mut report));
        topology.ok_or_else(|| report.into_errors())
    }

    /// `[cluster] name`.
    pub fn cluster(&self) -> &ClusterName {
        &self.cluster
    }

    /// Nodes in file order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// A node by name.
    pub fn node(&self, name: &NodeName) -> Option<&Node> {
        self.index.get(name).map(|id| &self.nodes[*id as usize])
    }

    /// Switches in file order. A link between two nodes adds one at the end that stands for it.
    pub fn switches(&self) -> &[SwitchName] {
        &self.switches
    }

    /// Groups, the built-in `all` not among them.
    pub fn groups(&self) -> &BTreeMap<String, Group> {
        &self.groups
    }

    /// `[roots]`: each root's path where the node gives no other.
    pub fn roots(&self) -> &BTreeMap<RootName, String> {
        &self.roots
    }

    /// Every interface and link, in file order: its edge has the id `2i`, the way back `2i + 1`.
    pub fn links(&self) -> impl ExactSizeIterator<Item = Link<'_>> {
        self.fabric.wires.iter().enumerate().map(|(index, wire)| Link {
            edge: EdgeId(index as u32 * 2),
            from: self.end(wire.ends[0], index),
            to: self.end(wire.ends[1], index),
            member_capacity: wire.capacity,
            members: wire.members,
            rtt: wire.rtt,
            loss: wire.loss,
            congestion_control: wire.congestion_control.as_ref(),
            is_interface: wire.link.is_none(),
        })
    }

    fn end(&self, point: Point, wire: usize) -> End<'_> {
        match point {
            Point::Switch(switch) => End::Switch(&self.switches[switch as usize]),
            Point::Node(node) => {
                let legs = &self.fabric.legs[node as usize];
                let interface = legs
                    .iter()
                    .position(|leg| leg.wire as usize == wire)
                    .expect("a wire to a node is one of its legs");
                End::Node {
                    node: &self.nodes[node as usize],
                    interface,
                }
            }
        }
    }

    /// How many edges there are, both directions counted: each [`EdgeId`] is below this.
    pub fn edge_count(&self) -> usize {
        self.fabric.wires.len() * 2
    }

    /// The edge from a node over one of its interfaces (an index in [`Node::interfaces`]) to the switch.
    pub fn interface_edge(&self, node: &NodeName, interface: usize) -> Option<EdgeId> {
        let id = *self.index.get(node)?;
        let leg = self.fabric.legs[id as usize].get(interface)?;
        Some(self.fabric.edge(leg.wire, Point::Node(id)))
    }

    /// The way from one node to another over the fastest network that both are attached to: the smaller of both
    /// interfaces counts, then fewer links, then file order. The way back is the same. From a node to itself no edge
    /// is passed. `None`: no network joins them, or one is unknown.
    pub fn route(&self, from: &NodeName, to: &NodeName) -> Option<Route> {
        let (from, to) = (*self.index.get(from)?, *self.index.get(to)?);
        let mut route = Route {
            edges: Vec::new(),
            switches: Vec::new(),
            rtt: None,
            loss: 0.0,
            congestion_control: None,
            to_address: None,
        };
        if from == to {
            route.to_address = self.fabric.legs[to as usize].first().and_then(|leg| leg.address);
            return Some(route);
        }
        let way = self.fabric.way(from, to)?;
        let mut arrives = 1.0;
        for wire in way.edges.iter().filter_map(|edge| self.fabric.wire(*edge)) {
            route.rtt = match (route.rtt, wire.rtt) {
                (Some(sum), Some(rtt)) => Some(sum.saturating_add(rtt)),
                (sum, rtt) => sum.or(rtt),
            };
            arrives *= 1.0 - wire.loss;
            if route.congestion_control.is_none() {
                route.congestion_control.clone_from(&wire.congestion_control);
            }
        }
        route.loss = 1.0 - arrives;
        route.switches = way
            .switches
            .iter()
            .map(|switch| self.switches[*switch as usize].clone())
            .collect();
        route.edges = way.edges;
        route.to_address = way.to.address;
        Some(route)
    }

    /// What an edge carries in its direction; equal parallel links add up.
    pub fn capacity(&self, edge: EdgeId) -> Rate {
        self.fabric.wire(edge).map_or(Rate::ZERO, graph::Wire::total)
    }

    /// What one stream can carry over an edge: one member of parallel links.
    pub fn member_capacity(&self, edge: EdgeId) -> Rate {
        self.fabric.wire(edge).map_or(Rate::ZERO, |wire| wire.capacity)
    }

    /// The edge for people: "link rack1-core", "interface of n1".
    pub fn edge_name(&self, edge: EdgeId) -> String {
        let Some(wire) = self.fabric.wire(edge) else {
            return format!("edge {}", edge.0);
        };
        if let Some(link) = &wire.link {
            return format!("link {link}");
        }
        match self.end(wire.ends[0], edge.0 as usize / 2) {
            End::Node { node, interface } => match &node.interfaces[interface].name {
                Some(name) => format!("interface {name} of {}", node.name),
                None => format!("interface of {}", node.name),
            },
            End::Switch(switch) => format!("interface at {switch}"),
        }
    }

    /// The nodes that a TARGETS text selects, in order of the text, each once: groups, node names, hostlists,
    /// exclusions ("all-compute,!compute[005-006]", wherever they stand). `commands` holds the last answers of command
    /// groups; nodes in them that the topology does not know are left out.
    ///
    /// # Errors
    /// An unknown name, a malformed hostlist, a command group without answer, or no node left.
    pub fn select(
        &self,
        targets: &str,
        commands: &BTreeMap<String, Vec<NodeName>>,
    ) -> Result<Vec<NodeName>, SelectError> {
        select::select(self, targets, commands)
    }

    /// Counts and remarks, for `stage topology check`.
    pub fn summary(&self) -> Summary {
        summary::summary(self)
    }
}
