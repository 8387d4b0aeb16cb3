//! The whole way from a text to a topology; `mistakes` has that to its errors.

mod mistakes;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

const EXAMPLE: &str = include_str!("../../../topology.toml");

fn good(text: &str) -> Topology {
    Topology::parse("t.toml", text).unwrap_or_else(|errors| panic!("{}", listed(&errors)))
}

fn listed(errors: &[TopologyError]) -> String {
    errors
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("\n")
}

fn name(text: &str) -> NodeName {
    text.parse().unwrap()
}

fn switches(route: &Route) -> String {
    route
        .switches
        .iter()
        .map(SwitchName::as_str)
        .collect::<Vec<_>>()
        .join(" ")
}

/// A fabric that is right, with room for one more mistake at its end (line 15 and on).
const BASE: &str = r#"[cluster]
name = "lab"
[[switch]]
name = "core"
[[switch]]
name = "rack[1-2]"
[[link]]
between = ["rack[1-2]", "core"]
capacity = "40 Gbit/s"
[[node]]
name = "n[1-4]"
address = "10.0.1.[1-4]"
attach = "rack1"
nic = "10 Gbit/s"
"#;

#[test]
fn the_example_is_right() {
    let topology = good(EXAMPLE);
    assert_eq!(topology.cluster().as_str(), "example");
    assert_eq!(topology.nodes().len(), 67);
    assert_eq!(topology.switches().len(), 4);
    let seven = topology.node(&name("compute007")).unwrap();
    assert_eq!(seven.interfaces[0].address, Some("10.0.1.7".parse().unwrap()));
    assert_eq!(seven.interfaces[0].nic, "10 Gbit/s".parse().unwrap());
    assert_eq!(seven.disk_write, Some("1.2 GB/s".parse().unwrap()));
    assert_eq!(seven.disk_read, None);
    let root: RootName = "scratch".parse().unwrap();
    assert_eq!(seven.roots[&root], "/scratch/stage");
    assert_eq!(
        topology.node(&name("compute033")).unwrap().roots[&root],
        "/nvme/stage"
    );
    let Group::Static(members) = &topology.groups()["all-compute"] else {
        panic!("a hostlist")
    };
    assert_eq!(members.len(), 64);
    let Group::Command { command, every } = &topology.groups()["idle"] else {
        panic!("a command")
    };
    assert_eq!((command[0].as_str(), *every), ("sinfo", Duration::from_secs(60)));
    insta::assert_snapshot!(topology.summary(), @r"
    cluster example: 67 nodes, 4 switches, 2 links, 3 groups (1 by command), 1 root
    switches rack[1-2]: 32 nodes with 320 Gbit/s together share 40.0 Gbit/s to the other switches: 8.0 to 1 (each)
    dtn: in several networks: a relay between them
    ");
}

#[test]
fn a_route_runs_over_switches_and_adds_up() {
    let topology = good(EXAMPLE);
    let route = topology.route(&name("compute001"), &name("compute064")).unwrap();
    assert_eq!(switches(&route), "rack1 core rack2");
    let names: Vec<String> = route.edges.iter().map(|edge| topology.edge_name(*edge)).collect();
    assert_eq!(
        names,
        [
            "interface of compute001",
            "link rack1-core",
            "link rack2-core",
            "interface of compute064"
        ]
    );
    assert_eq!(route.rtt, Some(Duration::from_micros(400)));
    assert_eq!(route.to_address, Some("10.0.2.32".parse().unwrap()));
    let back = topology.route(&name("compute064"), &name("compute001")).unwrap();
    let reversed: Vec<EdgeId> = route.edges.iter().rev().map(|edge| edge.reverse()).collect();
    assert_eq!(back.edges, reversed);

    let near = topology.route(&name("compute001"), &name("compute002")).unwrap();
    assert_eq!(
        (switches(&near).as_str(), near.edges.len(), near.rtt),
        ("rack1", 2, None)
    );
    let own = topology.route(&name("dtn"), &name("dtn")).unwrap();
    assert_eq!(
        (own.edges.len(), own.to_address),
        (0, Some("10.0.0.9".parse().unwrap()))
    );

    // The relay's leg counts, and no route leads through it.
    let relay = topology.route(&name("archive"), &name("dtn")).unwrap();
    assert_eq!(relay.to_address, Some("192.0.2.9".parse().unwrap()));
    assert_eq!(topology.edge_name(relay.edges[1]), "interface wan0 of dtn");
    assert_eq!(topology.route(&name("archive"), &name("head")), None);
    assert_eq!(topology.route(&name("archive"), &name("nobody")), None);
}

#[test]
fn edges_are_numbered_in_file_order_both_directions_apart() {
    let topology = good(BASE);
    let names: Vec<String> = (0..topology.edge_count() as u32)
        .map(|id| topology.edge_name(EdgeId(id)))
        .collect();
    assert_eq!(
        names[..5],
        [
            "link rack1-core",
            "link rack1-core",
            "link rack2-core",
            "link rack2-core",
            "interface of n1"
        ]
    );
    let route = topology.route(&name("n2"), &name("n1")).unwrap();
    assert_eq!(route.edges, [EdgeId(6), EdgeId(5)]);
    assert_eq!(topology.interface_edge(&name("n2"), 0), Some(EdgeId(6)));
    assert_eq!(topology.interface_edge(&name("n2"), 1), None);
    let links: Vec<Link<'_>> = topology.links().collect();
    assert!(links[2].is_interface && !links[0].is_interface);
    assert_eq!(links[0].from, End::Switch(&topology.switches()[1]));
    assert_eq!(
        links[2].from,
        End::Node {
            node: &topology.nodes()[0],
            interface: 0
        }
    );
}

#[test]
fn parallel_links_add_up_if_equal() {
    let twice = |first: &str, second: &str| {
        format!(
            "[cluster]\nname = \"c\"\n[[switch]]\nname = \"s[1-2]\"\n[[node]]\nname = \"a\"\nattach = \"s1\"\nnic = \"100 Gbit/s\"\n\
             [[node]]\nname = \"b\"\nattach = \"s2\"\nnic = \"100 Gbit/s\"\n\
             [[link]]\nbetween = [\"s1\", \"s2\"]\ncapacity = \"{first}\"\n[[link]]\nbetween = [\"s2\", \"s1\"]\ncapacity = \"{second}\"\n"
        )
    };
    let equal = good(&twice("10 Gbit/s", "10 Gbit/s"));
    let edge = equal.route(&name("a"), &name("b")).unwrap().edges[1];
    assert_eq!(equal.capacity(edge), "20 Gbit/s".parse().unwrap());
    assert_eq!(equal.member_capacity(edge), "10 Gbit/s".parse().unwrap());
    assert_eq!(equal.edge_count(), 6);
    // Unequal ones stay apart, and the wider is taken.
    let unequal = good(&twice("10 Gbit/s", "25 Gbit/s"));
    let edge = unequal.route(&name("a"), &name("b")).unwrap().edges[1];
    assert_eq!(unequal.capacity(edge), "25 Gbit/s".parse().unwrap());
    assert_eq!(unequal.edge_count(), 8);
}

#[test]
fn two_nodes_talk_over_the_fastest_network_that_both_are_in() {
    let text = r#"
[cluster]
name = "c"
[[switch]]
name = "slow"
[[switch]]
name = "fast[1-2]"
[[link]]
between = ["fast1", "fast2"]
capacity = "100 Gbit/s"
loss = 0.1
congestion_control = "bbr"
[[link]]
between = ["slow", "fast1"]
capacity = "1 Gbit/s"
loss = "50 %"
[[node]]
name = "a"
[[node.interface]]
name = "eth0"
attach = "slow"
nic = "1 Gbit/s"
[[node.interface]]
name = "ib0"
address = "fd00::1"
attach = "fast1"
nic = "100 Gbit/s"
[[node]]
name = "b"
interface = [
  { name = "eth0", address = "10.0.0.2", attach = "slow", nic = "1 Gbit/s" },
  { name = "ib0", address = "fd00::2", attach = "fast2", nic = "25 Gbit/s" },
]
[[node]]
name = "c"
address = "10.0.0.3"
attach = "slow"
nic = "10 Gbit/s"
"#;
    let topology = good(text);
    let route = topology.route(&name("a"), &name("b")).unwrap();
    assert_eq!(switches(&route), "fast1 fast2");
    assert_eq!(route.to_address, Some("fd00::2".parse().unwrap()));
    assert_eq!(route.congestion_control, Some("bbr".parse().unwrap()));
    assert!((route.loss - 0.1).abs() < 1e-9);
    // c to b: min(10, 25) over two links beats min(10, 1) over none.
    let route = topology.route(&name("c"), &name("b")).unwrap();
    assert_eq!(switches(&route), "slow fast1 fast2");
    assert!((route.loss - 0.55).abs() < 1e-9);
}

#[test]
fn a_link_may_end_at_a_node() {
    let text = r#"
[cluster]
name = "c"
[[switch]]
name = "s"
[[node]]
name = "a[1-2]"
address = "10.0.0.[1-2]"
[[node]]
name = "b[1-2]"
address = "10.0.0.[3-4]"
attach = "s"
nic = "1 Gbit/s"
[[link]]
between = ["a[1-2]", "s"]
capacity = "2 Gbit/s"
rtt = "1 ms"
[[link]]
between = ["a2", "s"]
capacity = "2 Gbit/s"
rtt = "1 ms"
[[link]]
between = ["b[1-2]", "a[1-2]"]
capacity = "8 Gbit/s"
rtt = "3 ms"
"#;
    let topology = good(text);
    let second = topology.node(&name("a2")).unwrap();
    assert_eq!(second.interfaces[0].address, Some("10.0.0.2".parse().unwrap()));
    assert_eq!(second.interfaces[0].nic, "4 Gbit/s".parse().unwrap());
    let route = topology.route(&name("a1"), &name("b2")).unwrap();
    assert_eq!(
        (switches(&route).as_str(), route.rtt),
        ("s", Some(Duration::from_millis(1)))
    );
    let direct = topology.route(&name("b2"), &name("a2")).unwrap();
    // The cable: min(8, 8) beats min(4, 1).
    assert_eq!(
        (direct.edges.len(), direct.rtt),
        (2, Some(Duration::from_millis(3)))
    );
    assert_eq!(topology.edge_name(direct.edges[0]), "link b2-a2");
    assert_eq!(topology.edge_name(direct.edges[1]), "link b2-a2");
    assert_eq!(
        topology.summary().to_string().lines().next(),
        Some("cluster c: 4 nodes, 1 switch, 5 links, 0 groups, 0 roots")
    );
    assert_eq!(
        topology.node(&name("b2")).unwrap().interfaces[1].nic,
        "8 Gbit/s".parse().unwrap()
    );
}

#[test]
fn targets_are_selected_in_the_order_of_the_text() {
    let topology = good(
        &(BASE.to_owned() + "[groups]\nodd = \"n[1,3]\"\nlive = { command = [\"x\"], every = \"9 s\" }\n"),
    );
    let answers = BTreeMap::from([("live".to_owned(), vec![name("n4"), name("stranger")])]);
    let select = |text: &str| {
        topology
            .select(text, &answers)
            .map(|nodes| nodes.iter().map(NodeName::as_str).collect::<Vec<_>>().join(" "))
    };
    for (text, nodes) in [
        ("all", "n1 n2 n3 n4"),
        ("n3,n1", "n3 n1"),
        ("n[2-3],odd", "n2 n3 n1"),
        ("all,!odd", "n2 n4"),
        ("!n[1-2] all", "n3 n4"),
        ("live,n4", "n4"),
        ("n1\nn2\n", "n1 n2"),
    ] {
        assert_eq!(select(text).unwrap(), nodes, "{text}");
    }
    for (text, why) in [
        ("", "names no node: write a group"),
        ("live,!live", "leaves no node"),
        ("!n1", "only excludes: write \"all,!n1\""),
        ("all,!", "a '!' stands alone"),
        (
            "ode",
            "no node or group \"ode\" in the topology, did you mean \"odd\"?",
        ),
        (
            "n[4-5]",
            "no node or group \"n5\" (of \"n[4-5]\") in the topology, did you mean \"n1\"?",
        ),
        ("all,!n9", "no node or group \"n9\""),
        ("zzzzzz", "no node or group \"zzzzzz\" in the topology"),
        ("n[1", "no ']'"),
    ] {
        let message = select(text).unwrap_err().to_string();
        assert!(message.contains(why), "{text}: {message}");
    }
    let message = topology.select("live", &BTreeMap::new()).unwrap_err().to_string();
    assert!(message.contains("\"x\" has not answered yet"), "{message}");
}

/// 250 racks of 40 nodes.
fn large() -> String {
    let mut text = String::from(
        "[cluster]\nname = \"big\"\n[[switch]]\nname = \"core\"\n[[switch]]\nname = \"rack[001-250]\"\n",
    );
    text.push_str(
        "[[link]]\nbetween = [\"rack[001-250]\", \"core\"]\ncapacity = \"100 Gbit/s\"\nrtt = \"0.1 ms\"\n",
    );
    for rack in 1..=250 {
        writeln!(
            text,
            "[[node]]\nname = \"c{rack:03}n[01-40]\"\naddress = \"10.{rack}.0.[1-40]\"\nattach = \"rack{rack:03}\"\nnic = \"25 Gbit/s\""
        )
        .unwrap();
    }
    text.push_str("[groups]\nhalf = \"c[001-125]n[01-40]\"\n");
    text
}

#[test]
fn ten_thousand_nodes_are_read_and_routed() {
    let topology = good(&large());
    assert_eq!(topology.nodes().len(), 10_000);
    assert_eq!(topology.edge_count(), 2 * 10_250);
    let mut edges = 0;
    for (from, to) in topology.nodes().iter().zip(topology.nodes().iter().skip(1)) {
        edges += topology.route(&from.name, &to.name).unwrap().edges.len();
    }
    assert_eq!(edges, 249 * 4 + 9_750 * 2);
    let half = topology.select("half,!c001n[02-40]", &BTreeMap::new()).unwrap();
    assert_eq!(half.len(), 5_000 - 39);
    assert_eq!(
        topology.summary().remarks,
        [
            "switches rack[001-250]: 40 nodes with 1.00 Tbit/s together share 100 Gbit/s to the other switches: 10.0 to 1 (each)"
        ]
    );
}

proptest! {
    #[test]
    fn no_text_panics(text in "\\PC{0,200}") {
        drop(Topology::parse("t.toml", &text));
    }

    /// Lines of a good file, shuffled, doubled and damaged: much closer to the readers than noise.
    #[test]
    fn no_mutation_panics(
        picks in prop::collection::vec((0usize..1000, 0usize..200, prop::option::of(any::<char>())), 0..60)
    ) {
        let lines: Vec<&str> = EXAMPLE.lines().filter(|line| !line.starts_with('#')).collect();
        let mut text = String::new();
        for (line, at, with) in picks {
            let mut line: Vec<char> = lines[line % lines.len()].chars().collect();
            if let (Some(with), false) = (with, line.is_empty()) {
                let at = at % line.len();
                line[at] = with;
            }
            text.extend(line);
            text.push('\n');
        }
        match Topology::parse("t.toml", &text) {
            Ok(topology) => drop(topology.summary().to_string()),
            Err(errors) => {
                let count = text.lines().count().max(1);
                prop_assert!(!errors.is_empty());
                prop_assert!(errors.iter().all(|error| (1..=count + 1).contains(&error.line)));
            }
        }
    }

    #[test]
    fn no_targets_panic(text in "[a-z0-9!,\\[\\] -]{0,40}") {
        drop(good(BASE).select(&text, &BTreeMap::new()));
    }
}
