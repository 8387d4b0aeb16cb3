//! What every plan must hold to, over random fabrics.

#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::Duration;

use proptest::prelude::*;
use stage_core::cost;
use stage_core::id::NodeName;
use stage_core::plan::{Facts, Hop, NodeFacts, Plan, PlanError, Request, Shape, ShapeChoice, plan};
use stage_core::simulate::{Fault, FaultKind, Trial, simulate};
use stage_core::topology::{EdgeId, Topology};
use stage_core::units::{ByteCount, Rate};

/// A fabric of trees of switches, as blocks of a topology file.
#[derive(Debug, Clone)]
struct Fabric {
    switches: Vec<String>,
    nodes: Vec<String>,
    links: Vec<String>,
    names: Vec<NodeName>,
}

impl Fabric {
    fn parse(&self) -> Topology {
        let blocks: Vec<&str> = self
            .switches
            .iter()
            .chain(&self.nodes)
            .chain(&self.links)
            .map(String::as_str)
            .collect();
        let text = format!("[cluster]\nname = \"lab\"\n{}", blocks.concat());
        Topology::parse("random.toml", &text).unwrap_or_else(|errors| panic!("{errors:?} in {text}"))
    }
}

const RATES: [&str; 5] = ["100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "25 Gbit/s", "40 Gbit/s"];

/// Switches of one network: each but the first hangs on an earlier one. A link comes doubled at times.
fn network(name: &'static str) -> impl Strategy<Value = (Vec<String>, Vec<String>, usize)> {
    let link = (
        any::<prop::sample::Index>(),
        0..RATES.len(),
        1..=2usize,
        prop::option::of(1..200u32),
        0..3u32,
    );
    prop::collection::vec(link, 0..7).prop_map(move |links| {
        let mut blocks = Vec::new();
        for (i, (above, rate, members, rtt, loss)) in links.iter().enumerate() {
            let (below, above) = (i + 1, above.index(i + 1));
            let mut block = format!(
                "[[link]]\nbetween = [\"{name}{below}\", \"{name}{above}\"]\ncapacity = \"{}\"\n",
                RATES[*rate]
            );
            if let Some(rtt) = rtt {
                writeln!(block, "rtt = \"{rtt} ms\"").unwrap();
            }
            if *loss > 0 {
                writeln!(block, "loss = {}", f64::from(*loss) * 1e-4).unwrap();
            }
            blocks.extend(std::iter::repeat_n(block, *members));
        }
        let switches = (0..=links.len())
            .map(|i| format!("[[switch]]\nname = \"{name}{i}\"\n"))
            .collect();
        (switches, blocks, links.len() + 1)
    })
}

/// Nodes all in one network, or (`networks` = 2) in either of two, or in both.
fn fabric(networks: usize) -> impl Strategy<Value = Fabric> {
    let leg = || (any::<prop::sample::Index>(), 0..RATES.len());
    let nodes = prop::collection::vec((0..6u8, leg(), leg()), 2..24);
    (network("s"), network("t"), nodes).prop_map(move |(first, second, drawn)| {
        let mut fabric =
            Fabric { switches: first.0, nodes: Vec::new(), links: first.1, names: Vec::new() };
        if networks == 2 {
            fabric.switches.extend(second.0);
            fabric.links.extend(second.1);
        }
        for (i, (kind, one, two)) in drawn.into_iter().enumerate() {
            let in_first = format!("attach = \"s{}\"\nnic = \"{}\"\n", one.0.index(first.2), RATES[one.1]);
            let in_second = format!("attach = \"t{}\"\nnic = \"{}\"\n", two.0.index(second.2), RATES[two.1]);
            let name = format!("[[node]]\nname = \"n{i}\"\n");
            // The first two nodes join the networks, so that the fabric is one.
            fabric.nodes.push(match kind {
                _ if networks == 1 => name + &in_first,
                0 | 1 if i > 1 => name + &in_first,
                2 | 3 if i > 1 => name + &in_second,
                _ => format!(
                    "{name}[[node.interface]]\nname = \"x\"\n{in_first}[[node.interface]]\nname = \"y\"\n{in_second}"
                ),
            });
            fabric.names.push(format!("n{i}").parse().unwrap());
        }
        fabric
    })
}

fn shape() -> impl Strategy<Value = ShapeChoice> {
    prop_oneof![
        2 => Just(ShapeChoice::Auto),
        1 => Just(ShapeChoice::Fixed(Shape::Star)),
        1 => Just(ShapeChoice::Fixed(Shape::Chain)),
        2 => (1..9u16).prop_map(|k| ShapeChoice::Fixed(Shape::Tree(k))),
    ]
}

fn size() -> impl Strategy<Value = ByteCount> {
    prop_oneof![Just(0), 1..5000u64, 1 << 20..16u64 << 20, 1 << 30..1u64 << 40].prop_map(ByteCount)
}

fn rate() -> impl Strategy<Value = Option<Rate>> {
    prop::option::weighted(0.3, (1e6..5e9f64).prop_map(Rate::from_bytes_per_second))
}

/// A request for some of the fabric's nodes from one of them, and facts about all.
fn question(fabric: Fabric) -> impl Strategy<Value = (Fabric, Request, Facts)> {
    let count = fabric.names.len();
    let targets = prop::sample::subsequence(fabric.names.clone(), 1..=count).prop_shuffle();
    let disks = prop::collection::vec((rate(), rate()), count);
    let how = (
        shape(),
        size(),
        prop::option::of(1..70u16),
        rate(),
        rate(),
        any::<bool>(),
    );
    (0..count, targets, disks, how).prop_map(move |(source, targets, disks, how)| {
        let (shape, size, streams, limit, source_limit, encrypted) = how;
        let request = Request {
            source: fabric.names[source].clone(),
            targets,
            size,
            shape,
            streams,
            limit,
            source_limit,
            encrypted,
        };
        let nodes = fabric
            .names
            .iter()
            .cloned()
            .zip(disks)
            .map(|(name, (disk_write, disk_read))| {
                (
                    name,
                    NodeFacts {
                        disk_write,
                        disk_read,
                        ..NodeFacts::default()
                    },
                )
            });
        let facts = Facts {
            nodes: nodes.collect(),
            ..Facts::default()
        };
        (fabric.clone(), request, facts)
    })
}

fn any_question(networks: usize) -> impl Strategy<Value = (Fabric, Request, Facts)> {
    fabric(networks).prop_flat_map(question)
}

/// Which nodes the payload can get to at all, over targets and the source only.
fn reachable(topology: &Topology, request: &Request) -> BTreeSet<NodeName> {
    let mut reached = BTreeSet::from([request.source.clone()]);
    let mut open = vec![request.source.clone()];
    while let Some(from) = open.pop() {
        for to in &request.targets {
            if !reached.contains(to) && topology.route(&from, to).is_some() {
                reached.insert(to.clone());
                open.push(to.clone());
            }
        }
    }
    reached
}

fn check(topology: &Topology, request: &Request, plan: &Plan) -> Result<(), TestCaseError> {
    // Every target once, in the request's order.
    let children: Vec<&NodeName> = plan.hops.iter().map(|hop| &hop.child).collect();
    prop_assert_eq!(children, request.targets.iter().collect::<Vec<_>>());
    if let ShapeChoice::Fixed(shape) = request.shape {
        prop_assert_eq!(plan.shape, shape);
    }

    let by_child: BTreeMap<&NodeName, &Hop> = plan.hops.iter().map(|hop| (&hop.child, hop)).collect();
    let mut on_edge: BTreeMap<EdgeId, f64> = BTreeMap::new();
    let mut sent: BTreeMap<&NodeName, f64> = BTreeMap::new();
    for hop in &plan.hops {
        prop_assert!(hop.rate > Rate::ZERO && hop.rate < Rate::UNLIMITED);
        prop_assert!((1..=hop.streams_cap).contains(&hop.streams) && hop.streams_cap <= 64);
        let chunks = request.size.0.div_ceil(1 << 20).max(1);
        prop_assert!(u64::from(hop.streams_cap) <= chunks);
        prop_assert!(!hop.limited_by.is_empty());
        if hop.child == plan.source {
            prop_assert!(hop.parent == plan.source && hop.fallbacks.is_empty() && hop.depth == 1);
            prop_assert_eq!(
                plan.children(&hop.child)
                    .filter(|child| **child == hop.child)
                    .count(),
                1
            );
            continue;
        }
        // Depths rise by one from parent to child, from 0 at the source: so every way up ends there, without a cycle.
        let parent = if hop.parent == plan.source {
            None
        } else {
            Some(by_child[&hop.parent])
        };
        prop_assert_eq!(hop.depth, parent.map_or(0, |parent| parent.depth) + 1);

        // The route exists, and so does that of each fallback: ancestors above the parent, nearest first, the source last.
        let route = topology
            .route(&hop.parent, &hop.child)
            .expect("a hop has a route");
        let mut wanted: Vec<&NodeName> = Vec::new();
        let mut at = parent;
        while let Some(below) = at.filter(|_| wanted.len() < 3) {
            wanted.push(&below.parent);
            at = by_child
                .get(&below.parent)
                .copied()
                .filter(|above| above.child != plan.source);
        }
        if at.is_some() {
            wanted.push(&plan.source);
        }
        wanted.retain(|ancestor| topology.route(ancestor, &hop.child).is_some());
        prop_assert_eq!(hop.fallbacks.iter().collect::<Vec<_>>(), wanted);

        if let Some(parent) = parent {
            prop_assert!(hop.rate <= parent.rate, "{} outruns {}", hop.child, hop.parent);
        }
        for edge in route.edges {
            *on_edge.entry(edge).or_default() += hop.rate.bytes_per_second();
        }
        *sent.entry(&hop.parent).or_default() += hop.rate.bytes_per_second();
    }
    // Drawn from the source down, each hop comes once, behind its parent's.
    let order = plan.order();
    prop_assert_eq!(order.len(), plan.hops.len());
    let mut drawn = BTreeSet::from([&plan.source]);
    for (at, hop) in order.into_iter().enumerate() {
        prop_assert!(drawn.contains(&hop.parent));
        prop_assert!(drawn.insert(&hop.child) || (at == 0 && hop.child == plan.source));
    }
    let fits = |rate: f64, limit: Rate| rate <= limit.bytes_per_second() * (1.0 + 1e-6);
    for (edge, rate) in on_edge {
        let carries = cost::goodput(topology.capacity(edge));
        prop_assert!(
            fits(rate, carries),
            "{} is overbooked: {rate}",
            topology.edge_name(edge)
        );
    }
    if let Some(limit) = request.limit {
        prop_assert!(sent.values().all(|&rate| fits(rate, limit)));
    }
    prop_assert!(
        plan.predicted >= plan.bound,
        "forecast {:?} below bound {:?}",
        plan.predicted,
        plan.bound
    );
    prop_assert_eq!(
        plan.predicted,
        plan.hops.iter().map(|hop| hop.finish).max().unwrap()
    );
    prop_assert_eq!(plan.depth, plan.hops.iter().map(|hop| hop.depth).max().unwrap());
    Ok(())
}

/// How often each edge is passed that is not an interface.
fn uplinks(topology: &Topology, plan: &Plan) -> BTreeMap<EdgeId, usize> {
    let mut passed = BTreeMap::new();
    for hop in plan.hops.iter().filter(|hop| hop.child != hop.parent) {
        let edges = topology.route(&hop.parent, &hop.child).unwrap().edges;
        for edge in &edges[1..edges.len() - 1] {
            *passed.entry(*edge).or_default() += 1;
        }
    }
    passed
}

/// Two plans that differ at most in what names interfaces (of two that are full the first in file order is named) and in
/// the last digits of sums.
fn assert_same(one: &Plan, other: &Plan) -> Result<(), TestCaseError> {
    prop_assert_eq!(one.shape, other.shape);
    prop_assert_eq!(one.hops.len(), other.hops.len());
    for hop in &one.hops {
        let twin = other.hop(&hop.child).expect("the same targets");
        prop_assert_eq!((&hop.parent, &hop.fallbacks), (&twin.parent, &twin.fallbacks));
        prop_assert_eq!(
            (hop.streams, hop.streams_cap, hop.depth),
            (twin.streams, twin.streams_cap, twin.depth)
        );
        prop_assert!(hop.finish.abs_diff(twin.finish) <= hop.finish.mul_f64(1e-6));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn plans_hold_in_one_network((fabric, request, facts) in any_question(1)) {
        let topology = fabric.parse();
        let made = plan(&topology, &request, &facts).unwrap();
        check(&topology, &request, &made)?;
        prop_assert_eq!(&plan(&topology, &request, &facts).unwrap(), &made, "equal input, equal plan");
        if let Shape::Tree(width) = made.shape {
            for parent in &fabric.names {
                let fed = made.children(parent).filter(|child| *child != parent).count();
                prop_assert!(fed <= usize::from(width));
            }
        }
    }

    #[test]
    fn plans_hold_over_two_networks((fabric, request, facts) in any_question(2)) {
        let topology = fabric.parse();
        let reached = reachable(&topology, &request);
        match plan(&topology, &request, &facts) {
            Ok(made) => {
                check(&topology, &request, &made)?;
                prop_assert!(request.targets.iter().all(|target| reached.contains(target)));
            }
            Err(error) => {
                let lost = request.targets.iter().find(|target| !reached.contains(*target));
                prop_assert_eq!(lost.cloned().map(PlanError::Unreachable), Some(error));
            }
        }
    }

    #[test]
    fn a_chain_crosses_each_uplink_once((fabric, mut request, facts) in any_question(1)) {
        let topology = fabric.parse();
        request.shape = ShapeChoice::Fixed(Shape::Chain);
        let made = plan(&topology, &request, &facts).unwrap();
        prop_assert!(fabric.names.iter().all(|name| made.children(name).filter(|child| *child != name).count() <= 1));
        for (edge, times) in uplinks(&topology, &made) {
            prop_assert_eq!(times, 1, "{} is crossed again", topology.edge_name(edge));
        }
    }

    #[test]
    fn auto_is_never_much_worse_than_a_shape_by_hand((fabric, mut request, facts) in any_question(1)) {
        let topology = fabric.parse();
        request.shape = ShapeChoice::Auto;
        let auto = plan(&topology, &request, &facts).unwrap();
        for shape in ["star", "chain", "tree:2", "tree:3", "tree:4", "tree:8"] {
            request.shape = shape.parse().unwrap();
            let other = plan(&topology, &request, &facts).unwrap();
            prop_assert!(auto.predicted <= other.predicted.mul_f64(1.021), "{shape} beats {}", auto.shape);
        }
    }

    #[test]
    fn simulated_plans_end_as_forecast((fabric, request, facts) in any_question(1)) {
        let topology = fabric.parse();
        let made = plan(&topology, &request, &facts).unwrap();
        let trial =
            Trial { topology: &topology, request: &request, facts: &facts, faults: &[], spread: 0.0, seed: 0 };
        let outcome = simulate(&made, &trial).unwrap();
        for (hop, (node, finish)) in made.hops.iter().zip(&outcome.finishes) {
            prop_assert_eq!(&hop.child, node);
            prop_assert!(finish.is_some(), "{} is never done", node);
            if hop.child != made.source {
                // Everybody gets everything, once.
                let into: u64 = (0..)
                    .map_while(|leg| topology.interface_edge(node, leg))
                    .map(|edge| outcome.edges.get(&edge.reverse()).map_or(0, |bytes| bytes.0))
                    .sum();
                prop_assert!(into.abs_diff(request.size.0) <= 1 + request.size.0 / 1_000_000_000);
            }
        }
        let last = outcome.last().unwrap();
        prop_assert!(last >= made.bound.mul_f64(0.999), "{last:?} beats the bound {:?}", made.bound);
        // Of a file of few chunks much is start-up, in which the forecast does not see siblings that have ended.
        let off = made.predicted.abs_diff(last);
        prop_assert!(
            request.size < ByteCount(1 << 30) || off <= last.mul_f64(0.05) + Duration::from_millis(300),
            "{}: forecast {:?}, simulated {last:?}", made.shape, made.predicted
        );
    }

    #[test]
    fn survivors_are_served_whoever_dies(
        (fabric, request, facts) in any_question(1),
        deaths in prop::collection::vec((any::<prop::sample::Index>(), 0.0..1.2f64), 1..5),
    ) {
        let topology = fabric.parse();
        let made = plan(&topology, &request, &facts).unwrap();
        let faults: Vec<Fault> = deaths
            .into_iter()
            .map(|(who, when)| Fault {
                node: who.get(&made.hops).child.clone(),
                at: made.predicted.mul_f64(when),
                kind: FaultKind::Dies,
            })
            .filter(|fault| fault.node != made.source)
            .collect();
        let trial =
            Trial { topology: &topology, request: &request, facts: &facts, faults: &faults, spread: 0.0, seed: 0 };
        let outcome = simulate(&made, &trial).unwrap();
        for (node, finish) in &outcome.finishes {
            prop_assert!(finish.is_some() || faults.iter().any(|fault| fault.node == *node), "{} is forgotten", node);
        }
        prop_assert_eq!(outcome, simulate(&made, &trial).unwrap(), "equal input, equal outcome");
    }

    #[test]
    fn order_of_file_and_request_means_nothing(
        ((fabric, request, facts), switches, nodes, links, targets) in any_question(1).prop_flat_map(|asked| {
            let (fabric, request) = (asked.0.clone(), asked.1.clone());
            (
                Just(asked),
                Just(fabric.switches).prop_shuffle(),
                Just(fabric.nodes).prop_shuffle(),
                Just(fabric.links).prop_shuffle(),
                Just(request.targets).prop_shuffle(),
            )
        })
    ) {
        let one = plan(&fabric.parse(), &request, &facts).unwrap();
        let other_fabric = Fabric { switches, nodes, links, names: fabric.names };
        let other = plan(&other_fabric.parse(), &Request { targets, ..request }, &facts).unwrap();
        assert_same(&one, &other)?;
    }
}

/// Ten thousand nodes in racks of 32: no timed assertion; the point is that it ends while one waits.
#[test]
fn ten_thousand_nodes_are_planned() {
    let mut text =
        "[cluster]\nname = \"big\"\n[[switch]]\nname = \"core\"\n[[switch]]\nname = \"rack[1-313]\"\n\
        [[link]]\nbetween = [\"rack[1-313]\", \"core\"]\ncapacity = \"100 Gbit/s\"\n\
        [[node]]\nname = \"head\"\nattach = \"core\"\nnic = \"25 Gbit/s\"\n"
            .to_owned();
    for rack in 1..=313 {
        let (first, last) = (rack * 32 - 31, (rack * 32).min(10_000));
        writeln!(
            text,
            "[[node]]\nname = \"n[{first}-{last}]\"\nattach = \"rack{rack}\"\nnic = \"10 Gbit/s\""
        )
        .unwrap();
    }
    let topology = Topology::parse("big.toml", &text).unwrap();
    let source: NodeName = "head".parse().unwrap();
    let targets: Vec<NodeName> = topology
        .nodes()
        .iter()
        .map(|node| node.name.clone())
        .filter(|name| *name != source)
        .collect();
    assert_eq!(targets.len(), 10_000);
    let request = Request {
        source,
        targets,
        size: ByteCount(100 << 30),
        shape: ShapeChoice::Auto,
        streams: None,
        limit: None,
        source_limit: None,
        encrypted: true,
    };
    let made = plan(&topology, &request, &Facts::default()).unwrap();
    check(
        &topology,
        &Request {
            shape: ShapeChoice::Auto,
            ..request
        },
        &made,
    )
    .unwrap();
}

#[test]
fn a_long_chain_is_cut_where_that_costs_nothing() {
    let text = |source_nic: &str| {
        format!(
            "[cluster]\nname = \"c\"\n[[switch]]\nname = \"s\"\n[[node]]\nname = \"head\"\nattach = \"s\"\n\
            nic = \"{source_nic}\"\n[[node]]\nname = \"n[1-600]\"\nattach = \"s\"\nnic = \"1 Gbit/s\"\n"
        )
    };
    let depth = |source_nic: &str| {
        let topology = Topology::parse("c.toml", &text(source_nic)).unwrap();
        let request = Request {
            source: "head".parse().unwrap(),
            targets: topology.nodes()[1..]
                .iter()
                .map(|node| node.name.clone())
                .collect(),
            size: ByteCount(1 << 40),
            shape: ShapeChoice::Fixed(Shape::Chain),
            streams: None,
            limit: None,
            source_limit: None,
            encrypted: false,
        };
        let made = plan(&topology, &request, &Facts::default()).unwrap();
        check(&topology, &request, &made).unwrap();
        made.depth
    };
    assert!(depth("10 Gbit/s") <= 256, "the source can feed several chains");
    assert_eq!(depth("1 Gbit/s"), 600, "the source can feed one chain only");
}

/// What is dead or absurdly slow makes a plan that takes for ever, not a panic.
#[test]
fn absurd_facts_make_long_forecasts() {
    let text = "[cluster]\nname = \"c\"\n[[switch]]\nname = \"s\"\n\
        [[node]]\nname = \"n[0-3]\"\nattach = \"s\"\nnic = \"1 Gbit/s\"\n";
    let topology = Topology::parse("c.toml", text).unwrap();
    let names: Vec<NodeName> = topology.nodes().iter().map(|node| node.name.clone()).collect();
    let ages = Duration::from_secs(u64::MAX);
    for size in [0, 1, u64::MAX] {
        for shape in ["auto", "chain", "star", "tree"] {
            let request = Request {
                source: names[0].clone(),
                targets: names.clone(),
                size: ByteCount(size),
                shape: shape.parse().unwrap(),
                streams: None,
                limit: Some(Rate::ZERO),
                source_limit: Some(Rate::from_bytes_per_second(1e-9)),
                encrypted: true,
            };
            let dead = NodeFacts {
                disk_write: Some(Rate::ZERO),
                ..NodeFacts::default()
            };
            let facts = Facts {
                nodes: BTreeMap::from([(names[2].clone(), dead)]),
                rtts: BTreeMap::from([((names[0].clone(), names[1].clone()), ages)]),
                ..Facts::default()
            };
            let made = plan(&topology, &request, &facts).unwrap();
            assert_eq!(made.hops.len(), 4);
            assert!(made.predicted >= made.bound);
        }
    }
}
