//! The fabric: nodes, switches, links and groups, read from `topology.toml`.
//!
//! Each node's interface is an edge to its switch, each link an edge between switches (or a switch and a node);
//! every edge carries its capacity in both directions at once (full duplex). A route runs over switches only,
//! never through a node.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use crate::id::{ClusterName, NodeName, RootName, SwitchName};
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
    pub congestion_control: Option<String>,
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
pub struct Topology {}

/// One thing that is wrong with a topology.
#[derive(Debug, Clone, PartialEq, Eq)]
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

#[expect(clippy::unimplemented, unused_variables, reason = "being written")]
impl Topology {
    /// Reads a topology. `file` is how errors name it. All errors found are given, in line order.
    ///
    /// # Errors
    /// Everything that is wrong with the text, at least one.
    pub fn parse(file: &str, text: &str) -> Result<Self, Vec<TopologyError>> {
        unimplemented!()
    }
    /// `[cluster] name`.
    pub fn cluster(&self) -> &ClusterName {
        unimplemented!()
    }
    /// Nodes in file order.
    pub fn nodes(&self) -> &[Node] {
        unimplemented!()
    }
    /// A node by name.
    pub fn node(&self, name: &NodeName) -> Option<&Node> {
        unimplemented!()
    }
    /// Switches in file order.
    pub fn switches(&self) -> &[SwitchName] {
        unimplemented!()
    }
    /// Groups, the built-in `all` not among them.
    pub fn groups(&self) -> &BTreeMap<String, Group> {
        unimplemented!()
    }
    /// The way from one node to another over the fastest network that both are attached to.
    pub fn route(&self, from: &NodeName, to: &NodeName) -> Option<Route> {
        unimplemented!()
    }
    /// What an edge carries in its direction; equal parallel links add up.
    pub fn capacity(&self, edge: EdgeId) -> Rate {
        unimplemented!()
    }
    /// What one stream can carry over an edge: one member of parallel links.
    pub fn member_capacity(&self, edge: EdgeId) -> Rate {
        unimplemented!()
    }
    /// The edge for people: "link rack1-core", "interface of n1".
    pub fn edge_name(&self, edge: EdgeId) -> String {
        unimplemented!()
    }
    /// The nodes that a TARGETS text selects, in order of the text, each once: groups, node names, hostlists,
    /// exclusions ("all-compute,!compute[005-006]"). `commands` holds the last answers of command groups.
    ///
    /// # Errors
    /// An unknown name, a malformed hostlist, a command group without answer, or no node left.
    pub fn select(
        &self,
        targets: &str,
        commands: &BTreeMap<String, Vec<NodeName>>,
    ) -> Result<Vec<NodeName>, SelectError> {
        unimplemented!()
    }
}
