//! From a draft to a topology: what tables say of each other is checked here.

mod check;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use super::graph::{Fabric, Leg, Point, Wire};
use super::parse::{Draft, LinkDraft, NodeDraft};
use super::report::Report;
use super::{Group, Interface, Node, Topology, hostlist};
use crate::id::{CongestionControl, NodeName, RootName, SwitchName};
use crate::units::Rate;

/// The most switches: the ways between them are kept for each pair that is asked for.
const MAX_SWITCHES: usize = 4096;

/// The topology that a draft describes; `None` if the report has an error by then.
pub(super) fn build(draft: &Draft, report: &mut Report<'_>) -> Option<Topology> {
    let mut build = Build::new(report, draft.names_missing);
    let blocks = build.register(draft);
    for (block, ids) in draft.nodes.iter().zip(&blocks) {
        build.interfaces(block, ids);
    }
    for link in &draft.links {
        build.link(link);
    }
    let groups = build.groups(draft);
    build.roots(draft);
    build.addresses(draft);
    build.reachable(draft, &blocks);
    build.finish(draft, groups)
}

/// Two links are parallels of one if all this is equal.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Parallel {
    ends: [Point; 2],
    capacity: u64,
    rtt: Option<Duration>,
    loss: u64,
    congestion_control: Option<CongestionControl>,
}

struct Build<'r, 'a> {
    report: &'r mut Report<'a>,
    /// Every name of a switch or node, and where it was given.
    points: BTreeMap<String, (Point, usize)>,
    switches: Vec<SwitchName>,
    nodes: Vec<Node>,
    legs: Vec<Vec<Leg>>,
    /// Addresses of nodes without `attach`, until a link takes them.
    loose: Vec<Option<IpAddr>>,
    /// Each with its place in the file.
    wires: Vec<(usize, Wire)>,
    parallels: BTreeMap<Parallel, usize>,
    /// Switches that the file names.
    declared: usize,
    /// The hidden switches that stand for links between two nodes.
    cables: BTreeMap<[u32; 2], u32>,
    /// Names of switches or nodes are missing: what is unknown may be among them.
    names_missing: bool,
    /// An interface or link could not be placed: what is cut off may be joined by it.
    wires_missing: bool,
}

impl<'r, 'a> Build<'r, 'a> {
    fn new(report: &'r mut Report<'a>, names_missing: bool) -> Self {
        Self {
            report,
            points: BTreeMap::new(),
            switches: Vec::new(),
            nodes: Vec::new(),
            legs: Vec::new(),
            loose: Vec::new(),
            wires: Vec::new(),
            parallels: BTreeMap::new(),
            declared: 0,
            cables: BTreeMap::new(),
            names_missing,
            wires_missing: false,
        }
    }

    /// Gives every switch and node its index; for each `[[node]]` those of its names (`None`: a duplicate).
    fn register(&mut self, draft: &Draft) -> Vec<Vec<Option<u32>>> {
        enum Block<'d> {
            Switch(&'d [SwitchName]),
            Node(usize, &'d [NodeName]),
        }
        let mut all: Vec<(usize, Block<'_>)> = Vec::with_capacity(draft.switches.len() + draft.nodes.len());
        all.extend(
            draft
                .switches
                .iter()
                .map(|names| (names.at, Block::Switch(&names.value))),
        );
        all.extend(
            draft
                .nodes
                .iter()
                .enumerate()
                .map(|(index, node)| (node.names.at, Block::Node(index, &node.names.value))),
        );
        // In file order, so that of two equal names the later one is the wrong one.
        all.sort_by_key(|(at, _)| *at);
        let mut blocks = vec![Vec::new(); draft.nodes.len()];
        for (at, block) in all {
            let mut doubled: Option<(String, usize)> = None;
            let mut count = 0;
            let mut double = |name: String, first: usize| {
                count += 1;
                doubled.get_or_insert((name, first));
            };
            match block {
                Block::Switch(names) => {
                    for name in names {
                        let point = Point::Switch(self.switches.len() as u32);
                        match self.claim(name.as_str(), point, at) {
                            Ok(()) => self.switches.push(name.clone()),
                            Err(first) => double(name.to_string(), first),
                        }
                    }
                }
                Block::Node(index, names) => {
                    for name in names {
                        let id = self.nodes.len() as u32;
                        let claimed = self.claim(name.as_str(), Point::Node(id), at);
                        blocks[index].push(claimed.is_ok().then_some(id));
                        match claimed {
                            Ok(()) => self.add_node(name, &draft.nodes[index]),
                            Err(first) => double(name.to_string(), first),
                        }
                    }
                }
            }
            if let Some((name, first)) = doubled {
                let more = if count > 1 {
                    format!(" (and {} more)", count - 1)
                } else {
                    String::new()
                };
                let line = self.report.line(first);
                let message = format!(
                    "{name:?}{more} is there already, on line {line}: every switch and node needs a name of its own"
                );
                self.report.error(at, message);
            }
        }
        self.declared = self.switches.len();
        if self.switches.len() > MAX_SWITCHES {
            let at = draft.switches.last().map_or(0, |names| names.at);
            self.report.error(
                at,
                format!("more than {MAX_SWITCHES} switches: a fabric needs only those where flows meet"),
            );
        }
        if self.nodes.len() > hostlist::MAX_NAMES {
            let at = draft.nodes.last().map_or(0, |node| node.at);
            self.report
                .error(at, format!("more than {} nodes", hostlist::MAX_NAMES));
        }
        if draft.nodes.is_empty() && !draft.names_missing {
            self.report
                .error(0, "there is no node: add [[node]] with name, attach and nic");
        }
        blocks
    }

    /// Takes a name, or says where it was given before.
    fn claim(&mut self, name: &str, point: Point, at: usize) -> Result<(), usize> {
        match self.points.get(name) {
            Some((_, first)) => Err(*first),
            None => {
                self.points.insert(name.to_owned(), (point, at));
                Ok(())
            }
        }
    }

    fn add_node(&mut self, name: &NodeName, block: &NodeDraft) {
        self.nodes.push(Node {
            name: name.clone(),
            interfaces: Vec::with_capacity(block.legs.len()),
            disk_write: block.disk_write,
            disk_read: block.disk_read,
            roots: BTreeMap::new(),
        });
        self.legs.push(Vec::with_capacity(block.legs.len()));
        self.loose.push(None);
    }

    /// Plugs the nodes of a block into their switches.
    fn interfaces(&mut self, block: &NodeDraft, ids: &[Option<u32>]) {
        for (step, id) in ids.iter().enumerate() {
            if let (Some(id), Some(loose)) = (id, &block.loose) {
                self.loose[*id as usize] = loose.value.get(step).copied();
            }
        }
        for leg in &block.legs {
            let Some(attach) = &leg.attach else {
                self.wires_missing = true;
                continue;
            };
            let switch = match self.points.get(attach.value.as_str()) {
                Some((Point::Switch(switch), _)) => *switch,
                Some((Point::Node(_), _)) => {
                    let message = format!("{:?} is a node: attach names a switch", attach.value.as_str());
                    self.report.error(attach.at, message);
                    self.wires_missing = true;
                    continue;
                }
                None => {
                    if !self.names_missing {
                        let known = self.switches.iter().map(SwitchName::as_str);
                        let message = self.report.unknown("switch", attach.value.as_str(), known);
                        self.report.error(attach.at, message);
                    }
                    self.wires_missing = true;
                    continue;
                }
            };
            for (step, id) in ids.iter().enumerate() {
                let Some(node) = *id else { continue };
                let address = leg
                    .addresses
                    .as_ref()
                    .and_then(|all| all.value.get(step))
                    .copied();
                let wire = Wire {
                    ends: [Point::Node(node), Point::Switch(switch)],
                    capacity: leg.nic,
                    members: 1,
                    rtt: None,
                    loss: 0.0,
                    congestion_control: None,
                    link: None,
                };
                self.wires.push((block.at, wire));
                self.plug(
                    node,
                    switch,
                    self.wires.len() - 1,
                    leg.name.clone(),
                    address,
                    leg.nic,
                );
            }
        }
    }

    fn plug(
        &mut self,
        node: u32,
        switch: u32,
        wire: usize,
        name: Option<String>,
        address: Option<IpAddr>,
        nic: Rate,
    ) {
        let attach = self.switches[switch as usize].clone();
        self.nodes[node as usize].interfaces.push(Interface {
            name,
            address,
            attach,
            nic,
        });
        self.legs[node as usize].push(Leg {
            switch,
            wire: wire as u32,
            nic,
            address,
        });
    }

    fn link(&mut self, link: &LinkDraft) {
        let mut reported = BTreeSet::new();
        for (left, right) in &link.ends {
            let ends = [left, right].map(|name| self.points.get(name.as_str()).map(|(point, _)| *point));
            let [Some(a), Some(b)] = ends else {
                self.wires_missing = true;
                for (name, end) in [left, right].into_iter().zip(ends) {
                    if end.is_none() && !self.names_missing && reported.insert(name) {
                        let known = self.points.keys().map(String::as_str);
                        let message = self.report.unknown("switch or node", name, known);
                        self.report.error(link.between, message);
                    }
                }
                continue;
            };
            if a == b {
                self.wires_missing = true;
                self.report.error(
                    link.between,
                    format!("the link joins {left:?} with itself: name two ends"),
                );
                continue;
            }
            let name = format!("{left}-{right}");
            match (a, b) {
                (Point::Node(one), Point::Node(other)) => {
                    let hidden = Point::Switch(self.cable(one, other));
                    self.wire([a, hidden], link, &name, true);
                    self.wire([hidden, b], link, &name, false);
                }
                _ => self.wire([a, b], link, &name, true),
            }
        }
    }

    /// A link between two nodes is a network of its own: a hidden switch stands for it, so that a way always runs
    /// node, switches, node.
    fn cable(&mut self, one: u32, other: u32) -> u32 {
        let pair = [one.min(other), one.max(other)];
        if let Some(switch) = self.cables.get(&pair) {
            return *switch;
        }
        let name = (1..)
            .map(|n| format!("cable-{n}"))
            .find(|name| !self.points.contains_key(name))
            .expect("there are more numbers than names");
        let switch = self.switches.len() as u32;
        self.switches.push(name.parse().expect("a good name"));
        self.points.insert(name, (Point::Switch(switch), 0));
        self.cables.insert(pair, switch);
        switch
    }

    /// Lays a link, beside an equal one if there is one. What it says of itself counts once: on the `first` half.
    fn wire(&mut self, ends: [Point; 2], link: &LinkDraft, name: &str, first: bool) {
        let mut sorted = ends;
        sorted.sort_unstable();
        let key = Parallel {
            ends: sorted,
            capacity: link.capacity.bytes_per_second().to_bits(),
            rtt: link.rtt,
            loss: link.loss.to_bits(),
            congestion_control: link.congestion_control.clone(),
        };
        if let Some(&same) = self.parallels.get(&key) {
            let (_, wire) = &mut self.wires[same];
            wire.members += 1;
            let total = wire.total();
            for end in ends {
                let Point::Node(node) = end else { continue };
                let node = node as usize;
                for (leg, interface) in self.legs[node].iter_mut().zip(&mut self.nodes[node].interfaces) {
                    if leg.wire as usize == same {
                        leg.nic = total;
                        interface.nic = total;
                    }
                }
            }
            return;
        }
        let index = self.wires.len();
        self.parallels.insert(key, index);
        let wire = Wire {
            ends,
            capacity: link.capacity,
            members: 1,
            rtt: link.rtt.filter(|_| first),
            loss: if first { link.loss } else { 0.0 },
            congestion_control: link.congestion_control.clone().filter(|_| first),
            link: Some(name.to_owned()),
        };
        self.wires.push((link.at, wire));
        for (end, far) in [(ends[0], ends[1]), (ends[1], ends[0])] {
            if let (Point::Node(node), Point::Switch(switch)) = (end, far) {
                let address = self.loose[node as usize].take();
                self.plug(node, switch, index, None, address, link.capacity);
            }
        }
    }

    /// The cluster's roots under every node, overlaid with its own.
    fn roots(&mut self, draft: &Draft) {
        let known: BTreeMap<RootName, String> = draft
            .roots
            .iter()
            .map(|(name, path)| (name.value.clone(), path.clone()))
            .collect();
        for node in &mut self.nodes {
            node.roots = known.clone();
        }
        for block in &draft.nodes {
            for (root, path) in &block.roots {
                if !known.contains_key(&root.value) {
                    let near =
                        self.report
                            .unknown("root", root.value.as_str(), known.keys().map(RootName::as_str));
                    self.report
                        .error(root.at, format!("{near} (a root stands in [roots] first)"));
                }
                for name in &block.names.value {
                    if let Some((Point::Node(node), _)) = self.points.get(name.as_str()) {
                        self.nodes[*node as usize]
                            .roots
                            .insert(root.value.clone(), path.clone());
                    }
                }
            }
        }
    }

    fn finish(self, draft: &Draft, groups: BTreeMap<String, Group>) -> Option<Topology> {
        let Self {
            report,
            switches,
            nodes,
            mut legs,
            mut wires,
            declared,
            ..
        } = self;
        // A single node without any network is reached by no other: the check above has nothing to say of it.
        for (block, node) in draft.nodes.iter().zip(&nodes) {
            if node.interfaces.is_empty() && report.is_empty() {
                report.error(
                    block.names.at,
                    format!("{} is in no network: add attach and nic", node.name),
                );
            }
        }
        if !report.is_empty() {
            return None;
        }
        let mut order: Vec<u32> = (0..wires.len() as u32).collect();
        order.sort_by_key(|index| wires[*index as usize].0);
        let mut place = vec![0; wires.len()];
        for (new, old) in (0u32..).zip(&order) {
            place[*old as usize] = new;
        }
        for leg in legs.iter_mut().flatten() {
            leg.wire = place[leg.wire as usize];
        }
        wires.sort_by_key(|(at, _)| *at);
        let wires = wires.into_iter().map(|(_, wire)| wire).collect();
        let mut index = BTreeMap::new();
        for (id, node) in (0u32..).zip(&nodes) {
            index.insert(node.name.clone(), id);
        }
        let fabric = Fabric::new(switches.len(), wires, legs);
        let roots = draft
            .roots
            .iter()
            .map(|(name, path)| (name.value.clone(), path.clone()))
            .collect();
        Some(Topology {
            cluster: draft.cluster.clone()?,
            nodes,
            index,
            switches,
            declared,
            groups,
            roots,
            fabric,
        })
    }
}
