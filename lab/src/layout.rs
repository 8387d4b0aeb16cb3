//! A topology as namespaces, bridges, veth pairs and qdiscs: pure, as texts for `ip -batch` and `tc -batch`.
//!
//! Each switch is a bridge, all of them in one namespace, the fabric. Each wire is a veth pair with a token bucket on
//! both ends, so that it carries its rate in each direction at once; one with an RTT or a loss is a pair of TAP devices,
//! between which [`crate::path`] carries. A node's address is a host address; what it reaches and over which interface is
//! in its routes alone, so no network masks need to be invented.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;
use std::net::IpAddr;

use stage_core::id::{NodeName, SwitchName};
use stage_core::topology::{End, Node, Topology};
use stage_core::units::Rate;

use crate::path::Path;
use crate::{LabError, Options};

/// What is to be made.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) fabric: Namespace,
    /// In the topology's order.
    pub(crate) nodes: Vec<(NodeName, Namespace)>,
    /// For each edge, by its id: where its bytes are counted.
    pub(crate) taps: Vec<Tap>,
    /// Links that delay or lose: their devices in the fabric must be there before its batch runs.
    pub(crate) paths: Vec<LongLink>,
}

/// A link that a thread carries, between two devices of the fabric.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LongLink {
    pub(crate) devices: [String; 2],
    pub(crate) path: Path,
}

/// A namespace and what is set up in it. The fabric comes first: its batch makes the nodes' interfaces.
#[derive(Debug)]
pub(crate) struct Namespace {
    pub(crate) name: String,
    /// Lines for `ip -batch`.
    pub(crate) ip: String,
    /// Lines for `tc -batch`.
    pub(crate) tc: String,
    /// It passes packets on between its interfaces.
    pub(crate) forwards: bool,
}

impl Namespace {
    fn new(name: String) -> Self {
        Self {
            name,
            ip: "link set lo up\n".to_owned(),
            tc: String::new(),
            forwards: false,
        }
    }

    fn ip(&mut self, line: impl std::fmt::Display) {
        writeln!(self.ip, "{line}").expect("a string takes all");
    }

    /// A token bucket on what a device sends.
    fn shape(&mut self, device: &str, rate: Rate) {
        writeln!(self.tc, "qdisc add {}", bucket(device, rate)).expect("a string takes all");
    }
}

/// The words of a token bucket on what a device sends.
pub(crate) fn bucket(device: &str, rate: Rate) -> String {
    let bytes = rate.bytes_per_second();
    // A bucket that does not hold a whole GSO packet (64 KiB) makes the kernel cut each, which costs a core.
    let burst = (bytes * 0.001).max(128.0 * 1024.0);
    let limit = (bytes * 0.010).max(512.0 * 1024.0);
    let bits = rate.bits_per_second();
    format!("dev {device} root tbf rate {bits:.0}bit burst {burst:.0} limit {limit:.0}")
}

/// A device in the fabric that all of an edge's bytes pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tap {
    pub(crate) device: String,
    /// The bytes that it sends; else those that it receives.
    pub(crate) sends: bool,
}

/// The name of a node's interface in its namespace.
pub(crate) fn device(node: &Node, interface: usize) -> String {
    node.interfaces[interface]
        .name
        .clone()
        .unwrap_or_else(|| format!("eth{interface}"))
}

/// Lays out `topology` in namespaces whose names begin with `prefix`.
pub(crate) fn layout(topology: &Topology, prefix: &str, options: &Options) -> Result<Layout, LabError> {
    let networks = Networks::of(topology)?;
    let mut fabric = Namespace::new(format!("{prefix}fabric"));
    let mut nodes: Vec<(NodeName, Namespace)> = topology
        .nodes()
        .iter()
        .map(|node| {
            (
                node.name.clone(),
                Namespace::new(format!("{prefix}node.{}", node.name)),
            )
        })
        .collect();
    let places: BTreeMap<&NodeName, usize> = topology
        .nodes()
        .iter()
        .enumerate()
        .map(|(at, node)| (&node.name, at))
        .collect();
    let bridges: BTreeMap<&SwitchName, String> = topology
        .switches()
        .iter()
        .enumerate()
        .map(|(at, switch)| (switch, format!("br{at}")))
        .collect();
    for bridge in bridges.values() {
        fabric.ip(format_args!(
            "link add name {bridge} type bridge mcast_snooping 0"
        ));
        fabric.ip(format_args!("link set dev {bridge} up"));
    }

    let mut taps = Vec::with_capacity(topology.edge_count());
    let mut paths = Vec::new();
    for (index, link) in topology.links().enumerate() {
        let rate = link.member_capacity.times(f64::from(link.members));
        let ends = [format!("w{index}a"), format!("w{index}b")];
        let long = (link.rtt.is_some() || link.loss > 0.0).then(|| {
            let mut path = Path::new(rate, link.rtt.unwrap_or_default(), link.loss);
            path.queue = options.queue.unwrap_or(path.queue);
            path.takes_turns = options.half_duplex;
            LongLink {
                devices: ends.clone(),
                path,
            }
        });
        match (link.from, link.to) {
            (End::Switch(from), End::Switch(to)) => {
                let [near, far] = &ends;
                if long.is_none() {
                    fabric.ip(format_args!("link add name {near} type veth peer name {far}"));
                }
                for (device, switch) in [(near, from), (far, to)] {
                    fabric.ip(format_args!(
                        "link set dev {device} master {} up",
                        bridges[switch]
                    ));
                    if long.is_none() && !options.unshaped {
                        fabric.shape(device, rate);
                    }
                }
                taps.extend(ends.map(|device| Tap { device, sends: true }));
            }
            (End::Node { node, interface }, End::Switch(switch))
            | (End::Switch(switch), End::Node { node, interface }) => {
                let inner = device(node, interface);
                let outer = format!("w{index}");
                let namespace = &mut nodes[places[&node.name]].1;
                fabric.ip(format_args!(
                    "link add name {outer} type veth peer name {inner} netns {}",
                    namespace.name
                ));
                match &long {
                    None => {
                        fabric.ip(format_args!("link set dev {outer} master {} up", bridges[switch]));
                        if !options.unshaped {
                            fabric.shape(&outer, rate);
                            namespace.shape(&inner, rate);
                        }
                    }
                    Some(_) => {
                        // The path stands between the node's interface and the switch, which has the rate: a bridge
                        // of its own joins it to the interface.
                        let own = format!("x{index}");
                        let [near, far] = &ends;
                        fabric.ip(format_args!("link add name {own} type bridge mcast_snooping 0"));
                        fabric.ip(format_args!("link set dev {own} up"));
                        for (device, bridge) in [(&outer, &own), (near, &own), (far, &bridges[switch])] {
                            fabric.ip(format_args!("link set dev {device} master {bridge} up"));
                        }
                    }
                }
                let from_node = matches!(link.from, End::Node { .. });
                taps.extend([!from_node, from_node].map(|sends| Tap {
                    device: outer.clone(),
                    sends,
                }));
            }
            (End::Node { node, .. }, End::Node { .. }) => {
                unreachable!(
                    "a link between two nodes runs over a switch that stands for it ({})",
                    node.name
                )
            }
        }
        paths.extend(long);
    }

    for (node, (_, namespace)) in topology.nodes().iter().zip(&mut nodes) {
        for at in 0..node.interfaces.len() {
            let device = device(node, at);
            let address = address(node, at)?;
            let options = if address.is_ipv6() { " nodad" } else { "" };
            namespace.ip(format_args!("link set dev {device} up"));
            namespace.ip(format_args!(
                "address add {} dev {device}{options}",
                host(address)
            ));
        }
        namespace.forwards = networks.of_node(node).len() > 1;
        routes(topology, &networks, node, namespace)?;
    }
    Ok(Layout {
        fabric,
        nodes,
        taps,
        paths,
    })
}

fn address(node: &Node, interface: usize) -> Result<IpAddr, LabError> {
    node.interfaces[interface]
        .address
        .ok_or_else(|| LabError::NoAddress(node.name.clone()))
}

/// The address alone, as `ip` takes it.
pub(crate) fn host(address: IpAddr) -> String {
    format!("{address}/{}", if address.is_ipv6() { 128 } else { 32 })
}

/// What a node reaches: its neighbours directly, nodes of other networks through a node that is in both.
fn routes(
    topology: &Topology,
    networks: &Networks,
    node: &Node,
    namespace: &mut Namespace,
) -> Result<(), LabError> {
    let single = node.interfaces.len() == 1;
    if single {
        let all = if address(node, 0)?.is_ipv6() {
            "::/0"
        } else {
            "0.0.0.0/0"
        };
        namespace.ip(format_args!("route add {all} dev {}", device(node, 0)));
    }
    let ways = networks.ways_from(topology, node);
    for other in topology.nodes().iter().filter(|other| other.name != node.name) {
        let preferred = if single {
            None
        } else {
            topology.route(&node.name, &other.name)
        };
        for (at, interface) in other.interfaces.iter().enumerate() {
            let to = address(other, at)?;
            let network = networks.of_switch(&interface.attach);
            let Some(way) = ways.get(&network) else { continue };
            match way {
                Way::Direct if single => {}
                Way::Direct => {
                    // The interface that the planner counts with, where it meets this address.
                    let first = preferred
                        .as_ref()
                        .filter(|route| route.to_address == Some(to))
                        .and_then(|route| route.edges.first().copied());
                    let out = (0..node.interfaces.len())
                        .find(|own| first.is_some() && topology.interface_edge(&node.name, *own) == first)
                        .or_else(|| networks.interface_in(node, network));
                    let Some(out) = out else { continue };
                    let source = address(node, out)?;
                    if source.is_ipv6() != to.is_ipv6() {
                        continue;
                    }
                    namespace.ip(format_args!(
                        "route add {} dev {} src {source}",
                        host(to),
                        device(node, out)
                    ));
                }
                Way::Through { relay, network } => {
                    let gateway = networks
                        .interface_in(relay, *network)
                        .map(|at| address(relay, at));
                    let (Some(gateway), Some(out)) = (gateway, networks.interface_in(node, *network)) else {
                        continue;
                    };
                    let (gateway, source) = (gateway?, address(node, out)?);
                    if gateway.is_ipv6() != to.is_ipv6() || source.is_ipv6() != to.is_ipv6() {
                        continue;
                    }
                    let device = device(node, out);
                    let line = format!(
                        "route add {} via {gateway} dev {device} onlink src {source}",
                        host(to)
                    );
                    namespace.ip(line);
                }
            }
        }
    }
    Ok(())
}

/// How a node gets to a network.
#[derive(Debug)]
enum Way<'t> {
    /// It is in it.
    Direct,
    /// Through this node, which it meets in this network.
    Through { relay: &'t Node, network: usize },
}

/// Which switches are joined: each such part is one broadcast domain.
struct Networks {
    of_switch: BTreeMap<SwitchName, usize>,
}

impl Networks {
    /// # Errors
    /// A loop: bridges would send a broadcast around for ever.
    fn of(topology: &Topology) -> Result<Self, LabError> {
        let mut of_switch: BTreeMap<SwitchName, usize> = topology
            .switches()
            .iter()
            .enumerate()
            .map(|(at, switch)| (switch.clone(), at))
            .collect();
        for link in topology.links() {
            let (End::Switch(from), End::Switch(to)) = (link.from, link.to) else {
                continue;
            };
            let (kept, gone) = (of_switch[from], of_switch[to]);
            if kept == gone {
                return Err(LabError::Loop(topology.edge_name(link.edge)));
            }
            of_switch
                .values_mut()
                .filter(|network| **network == gone)
                .for_each(|network| *network = kept);
        }
        Ok(Self { of_switch })
    }

    fn of_switch(&self, switch: &SwitchName) -> usize {
        self.of_switch[switch]
    }

    fn of_node(&self, node: &Node) -> BTreeSet<usize> {
        node.interfaces
            .iter()
            .map(|interface| self.of_switch(&interface.attach))
            .collect()
    }

    fn interface_in(&self, node: &Node, network: usize) -> Option<usize> {
        node.interfaces
            .iter()
            .position(|interface| self.of_switch(&interface.attach) == network)
    }

    /// For each network that can be reached: how, over the fewest relays.
    fn ways_from<'t>(&self, topology: &'t Topology, node: &Node) -> BTreeMap<usize, Way<'t>> {
        let relays: Vec<&Node> = topology
            .nodes()
            .iter()
            .filter(|relay| self.of_node(relay).len() > 1)
            .collect();
        let mut ways: BTreeMap<usize, Way<'t>> = BTreeMap::new();
        let mut open = VecDeque::new();
        for network in self.of_node(node) {
            ways.insert(network, Way::Direct);
            open.push_back((network, None));
        }
        while let Some((network, first)) = open.pop_front() {
            for relay in relays.iter().filter(|relay| relay.name != node.name) {
                let joined = self.of_node(relay);
                if !joined.contains(&network) {
                    continue;
                }
                for far in joined {
                    let (relay, meeting) = first.unwrap_or((*relay, network));
                    ways.entry(far).or_insert_with(|| {
                        open.push_back((far, Some((relay, meeting))));
                        Way::Through {
                            relay,
                            network: meeting,
                        }
                    });
                }
            }
        }
        ways
    }
}

#[cfg(test)]
mod tests {
    use stage_core::units::ByteCount;

    use super::*;

    fn parsed(text: &str) -> Topology {
        Topology::parse("t.toml", text).unwrap()
    }

    const TWO_NETWORKS: &str = r#"
[cluster]
name = "c"
[[switch]]
name = "s[1-2]"
[[switch]]
name = "wan"
[[link]]
between = ["s1", "s2"]
capacity = "200 Mbit/s"
[[node]]
name = "a"
address = "10.9.0.1"
attach = "s1"
nic = "1 Gbit/s"
[[node]]
name = "d"
interface = [
  { name = "lan", address = "10.9.0.2", attach = "s2", nic = "1 Gbit/s" },
  { name = "wan", address = "192.0.2.2", attach = "wan", nic = "100 Gbit/s" },
]
[[node]]
name = "z"
address = "192.0.2.9"
attach = "wan"
nic = "1 Gbit/s"
"#;

    #[test]
    fn a_topology_becomes_batches() {
        let layout = layout(&parsed(TWO_NETWORKS), "p-", &Options::default()).unwrap();
        let mut text = format!("{}\n{}{}", layout.fabric.name, layout.fabric.ip, layout.fabric.tc);
        for (_, node) in &layout.nodes {
            write!(
                text,
                "\n{} forwards={}\n{}{}",
                node.name, node.forwards, node.ip, node.tc
            )
            .unwrap();
        }
        insta::assert_snapshot!(text);
        assert_eq!(
            layout.taps[0],
            Tap {
                device: "w0a".to_owned(),
                sends: true
            }
        );
        assert_eq!(
            layout.taps[1],
            Tap {
                device: "w0b".to_owned(),
                sends: true
            }
        );
        // From the node to its switch: what the switch's end receives.
        assert_eq!(
            layout.taps[2],
            Tap {
                device: "w1".to_owned(),
                sends: false
            }
        );
        assert_eq!(
            layout.taps[3],
            Tap {
                device: "w1".to_owned(),
                sends: true
            }
        );
    }

    #[test]
    fn what_bridges_cannot_do_is_refused() {
        let ring = TWO_NETWORKS.to_owned()
            + "[[switch]]\nname = \"s3\"\n[[link]]\nbetween = [\"s[1-2]\", \"s3\"]\ncapacity = \"1 Gbit/s\"\n";
        assert!(
            matches!(layout(&parsed(&ring), "p-", &Options::default()), Err(LabError::Loop(link)) if link == "link s2-s3")
        );
        let nameless = TWO_NETWORKS.replace("address = \"192.0.2.9\"\n", "");
        assert!(
            matches!(layout(&parsed(&nameless), "p-", &Options::default()), Err(LabError::NoAddress(node)) if node.as_str() == "z")
        );
    }

    #[test]
    fn a_link_with_an_rtt_is_carried_and_one_without_is_not() {
        let far = TWO_NETWORKS.replace(
            "capacity = \"200 Mbit/s\"",
            "capacity = \"200 Mbit/s\"\nrtt = \"100 ms\"\nloss = 0.01",
        );
        let laid = layout(&parsed(&far), "p-", &Options::default()).unwrap();
        let [long] = &laid.paths[..] else {
            panic!("{:?}", laid.paths)
        };
        assert_eq!(long.devices, ["w0a", "w0b"]);
        assert_eq!(long.path.delay, std::time::Duration::from_millis(50));
        assert_eq!(
            long.path.queue,
            ByteCount(2_500_000),
            "what is under way at full rate"
        );
        assert!((long.path.loss - 0.01).abs() < 1e-12);
        assert!(!laid.fabric.ip.contains("peer name w0b"), "{}", laid.fabric.ip);
        assert!(laid.fabric.ip.contains("link set dev w0a master br0 up"));
        assert!(!laid.fabric.tc.contains("w0a"));

        let options = Options {
            queue: Some(ByteCount(9)),
            unshaped: true,
            half_duplex: false,
        };
        let laid = layout(&parsed(&far), "p-", &options).unwrap();
        assert_eq!(laid.paths[0].path.queue, ByteCount(9));
        assert!(laid.fabric.tc.is_empty() && laid.nodes.iter().all(|(_, node)| node.tc.is_empty()));
    }

    #[test]
    fn a_long_cable_between_two_nodes_is_long_once() {
        let cable = TWO_NETWORKS.to_owned()
            + "[[link]]\nbetween = [\"a\", \"z\"]\ncapacity = \"1 Gbit/s\"\nrtt = \"15 ms\"\n";
        // Its ends would need addresses of their own: what is asked here is only who carries.
        let topology = parsed(&cable);
        let long: Vec<_> = topology.links().filter(|link| link.rtt.is_some()).collect();
        assert_eq!(long.len(), 1);
    }
}
