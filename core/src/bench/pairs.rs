//! Between whom is measured: enough to know every link, not all pairs; and in which order, so that nothing is
//! measured twice at once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::id::{NodeName, SwitchName};
use crate::topology::{End, Link, Route, Topology};

use super::Keep;

/// A link with such an RTT leads to another site.
const FAR: Duration = Duration::from_millis(1);

/// Two nodes: the first dials and measures.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pair {
    /// Who dials.
    pub from: NodeName,
    /// Who answers.
    pub to: NodeName,
}

/// How much of the fabric is to be known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cover {
    /// Each link, each switch, each site.
    Links,
    /// With them each node's interface.
    Interfaces,
}

/// The pairs to measure among `nodes`, so that all that they can tell of the fabric is told: neighbours at each switch
/// (all of them, or one pair), one pair across each link between switches, and `source` with a node of each site,
/// a site being what is joined without a link of a millisecond or more.
pub fn pairs(topology: &Topology, nodes: &[NodeName], source: &NodeName, cover: Cover) -> Vec<Pair> {
    let mut at: BTreeMap<&SwitchName, Vec<&NodeName>> = BTreeMap::new();
    for name in nodes {
        let interfaces = topology.node(name).map_or(&[][..], |node| &node.interfaces);
        for interface in interfaces {
            let here = at.entry(&interface.attach).or_default();
            if !here.contains(&name) {
                here.push(name);
            }
        }
    }
    let mut chosen = Chosen::default();
    for switch in topology.switches() {
        let Some(here) = at.get(switch) else { continue };
        let over = |from: &NodeName, to: &NodeName| {
            topology
                .route(from, to)
                .filter(|route| route.switches == std::slice::from_ref(switch))
        };
        let pairs: Vec<(&NodeName, &NodeName)> = match cover {
            Cover::Links => here.windows(2).map(|two| (two[0], two[1])).collect(),
            Cover::Interfaces => here
                .chunks(2)
                .filter_map(|two| match two {
                    [from, to] => Some((*from, *to)),
                    // The odd one out.
                    [alone] if here.len() > 1 => Some((*alone, here[0])),
                    _ => None,
                })
                .collect(),
        };
        for (from, to) in pairs {
            if let Some(route) = over(from, to) {
                chosen.take(from, to, &route);
                if cover == Cover::Links {
                    break;
                }
            }
        }
    }
    across(topology, &at, &mut chosen);
    to_sites(topology, nodes, source, &mut chosen);
    chosen.pairs
}

#[derive(Default)]
struct Chosen {
    pairs: Vec<Pair>,
    /// Wires that are passed by one of them.
    wires: BTreeSet<u32>,
    /// How often each node is in one.
    used: BTreeMap<NodeName, usize>,
}

impl Chosen {
    fn take(&mut self, from: &NodeName, to: &NodeName, route: &Route) {
        let same = |pair: &Pair| (&pair.from, &pair.to) == (from, to) || (&pair.from, &pair.to) == (to, from);
        if self.pairs.iter().any(same) {
            return;
        }
        self.wires.extend(route.edges.iter().map(|edge| edge.0 / 2));
        for node in [from, to] {
            *self.used.entry(node.clone()).or_default() += 1;
        }
        self.pairs.push(Pair {
            from: from.clone(),
            to: to.clone(),
        });
    }

    fn uses(&self, from: &NodeName, to: &NodeName) -> usize {
        let of = |node| self.used.get(node).copied().unwrap_or_default();
        of(from).max(of(to))
    }
}

/// The edges of the shortest ways across a link, and between whom they lead.
type Across<'n> = (usize, Vec<(&'n NodeName, &'n NodeName)>);

/// One pair across each link that none crosses yet: the nearest two, of these those that are in fewest pairs.
fn across(topology: &Topology, at: &BTreeMap<&SwitchName, Vec<&NodeName>>, chosen: &mut Chosen) {
    // The last of each switch, since the first are in pairs already; a node at several switches once.
    let ends: BTreeSet<&NodeName> = at.values().filter_map(|here| here.last().copied()).collect();
    let ends: Vec<&NodeName> = ends.into_iter().collect();
    let links: BTreeSet<u32> = topology
        .links()
        .filter(|link| !link.is_interface)
        .map(|link| link.edge.0 / 2)
        .collect();
    let mut over: BTreeMap<u32, Across<'_>> = BTreeMap::new();
    for (place, from) in ends.iter().enumerate() {
        for to in &ends[place + 1..] {
            let Some(route) = topology.route(from, to) else {
                continue;
            };
            for edge in &route.edges {
                let wire = edge.0 / 2;
                if !links.contains(&wire) {
                    continue;
                }
                let (least, candidates) = over.entry(wire).or_insert((usize::MAX, Vec::new()));
                if route.edges.len() < *least {
                    *least = route.edges.len();
                    candidates.clear();
                }
                if route.edges.len() == *least {
                    candidates.push((*from, *to));
                }
            }
        }
    }
    for (wire, (_, candidates)) in over {
        if chosen.wires.contains(&wire) {
            continue;
        }
        let best = candidates
            .into_iter()
            .min_by_key(|(from, to)| chosen.uses(from, to));
        if let Some((from, to)) = best
            && let Some(route) = topology.route(from, to)
        {
            chosen.take(from, to, &route);
        }
    }
}

/// The source and a node of each other site.
fn to_sites(topology: &Topology, nodes: &[NodeName], source: &NodeName, chosen: &mut Chosen) {
    let mut site: BTreeMap<&SwitchName, usize> = topology
        .switches()
        .iter()
        .enumerate()
        .map(|(number, switch)| (switch, number))
        .collect();
    let is_short = |link: &Link<'_>| link.rtt.is_none_or(|rtt| rtt < FAR);
    for link in topology.links().filter(is_short) {
        if let (End::Switch(one), End::Switch(other)) = (link.from, link.to) {
            let (keep, gone) = (site[one], site[other]);
            site.values_mut()
                .filter(|number| **number == gone)
                .for_each(|number| *number = keep);
        }
    }
    let of = |name: &NodeName| {
        let interface = topology.node(name)?.interfaces.first()?;
        site.get(&interface.attach).copied()
    };
    let Some(home) = of(source) else { return };
    let mut seen = BTreeSet::from([home]);
    for node in nodes {
        if let Some(there) = of(node)
            && seen.insert(there)
            && let Some(route) = topology.route(source, node)
        {
            chosen.take(source, node, &route);
        }
    }
}

/// In which of the pairs the disk of which node takes what comes from the network: that of each node once, in its first.
pub fn keeps(pairs: &[Pair]) -> BTreeMap<Pair, Keep> {
    let mut seen = BTreeSet::new();
    pairs
        .iter()
        .map(|pair| {
            let keep = Keep {
                here: seen.insert(&pair.from),
                there: seen.insert(&pair.to),
            };
            (pair.clone(), keep)
        })
        .collect()
}

/// The pairs in rounds, in each of which every node and every link is in one pair at most.
pub fn rounds(topology: &Topology, pairs: &[Pair]) -> Vec<Vec<Pair>> {
    #[derive(Default)]
    struct Round<'p> {
        pairs: Vec<Pair>,
        nodes: BTreeSet<&'p NodeName>,
        wires: BTreeSet<u32>,
    }
    let mut rounds: Vec<Round<'_>> = Vec::new();
    for pair in pairs {
        let wires: Vec<u32> = topology
            .route(&pair.from, &pair.to)
            .map(|route| route.edges.iter().map(|edge| edge.0 / 2).collect())
            .unwrap_or_default();
        let ends = [&pair.from, &pair.to];
        let fits = |round: &Round<'_>| {
            !ends.iter().any(|node| round.nodes.contains(*node))
                && !wires.iter().any(|wire| round.wires.contains(wire))
        };
        let at = rounds.iter().position(fits).unwrap_or_else(|| {
            rounds.push(Round::default());
            rounds.len() - 1
        });
        let round = &mut rounds[at];
        round.pairs.push(pair.clone());
        round.nodes.extend(ends);
        round.wires.extend(wires);
    }
    rounds.into_iter().map(|round| round.pairs).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FABRIC: &str = r#"
[cluster]
name = "c"
[[switch]]
name = "core"
[[switch]]
name = "rack[1-3]"
[[switch]]
name = "far"
[[node]]
name = "head"
attach = "core"
nic = "10 Gbit/s"
[[node]]
name = "a[1-3]"
attach = "rack1"
nic = "10 Gbit/s"
[[node]]
name = "b[1-4]"
attach = "rack2"
nic = "10 Gbit/s"
[[node]]
name = "c1"
attach = "rack3"
nic = "10 Gbit/s"
[[node]]
name = "z[1-2]"
attach = "far"
nic = "10 Gbit/s"
[[link]]
between = ["rack[1-3]", "core"]
capacity = "40 Gbit/s"
[[link]]
between = ["core", "far"]
capacity = "1 Gbit/s"
rtt = "15 ms"
"#;

    fn topology() -> Topology {
        Topology::parse("t", FABRIC).unwrap()
    }

    fn all(topology: &Topology) -> Vec<NodeName> {
        topology.nodes().iter().map(|node| node.name.clone()).collect()
    }

    fn shown(pairs: &[Pair]) -> Vec<String> {
        pairs
            .iter()
            .map(|pair| format!("{}-{}", pair.from, pair.to))
            .collect()
    }

    #[test]
    fn every_link_is_crossed_and_every_interface_used_if_asked() {
        let topology = topology();
        let nodes = all(&topology);
        let source: NodeName = "head".parse().unwrap();
        for cover in [Cover::Links, Cover::Interfaces] {
            let pairs = pairs(&topology, &nodes, &source, cover);
            let crossed: BTreeSet<u32> = pairs
                .iter()
                .flat_map(|pair| topology.route(&pair.from, &pair.to).unwrap().edges)
                .map(|edge| edge.0 / 2)
                .collect();
            for link in topology.links() {
                let wanted = !link.is_interface || cover == Cover::Interfaces;
                assert!(
                    !wanted || crossed.contains(&(link.edge.0 / 2)),
                    "{} is not known: {:?}",
                    topology.edge_name(link.edge),
                    shown(&pairs)
                );
            }
            assert!(pairs.len() <= 10, "{:?}", shown(&pairs));
            let far = |node: &NodeName| node.as_str().starts_with('z');
            assert!(pairs.iter().any(|pair| pair.from == source && far(&pair.to)));
        }
        let few = pairs(&topology, &nodes, &source, Cover::Links);
        let at_rack2 = shown(&few).iter().filter(|pair| pair.starts_with("b1-b")).count();
        assert_eq!(at_rack2, 1);
    }

    #[test]
    fn a_single_node_is_in_no_pair() {
        let topology = topology();
        let one = ["a1".parse().unwrap()];
        assert_eq!(pairs(&topology, &one, &one[0], Cover::Interfaces), []);
        let two: Vec<NodeName> = ["a1", "z2"].map(|name| name.parse().unwrap()).to_vec();
        assert_eq!(shown(&pairs(&topology, &two, &two[0], Cover::Links)), ["a1-z2"]);
    }

    #[test]
    fn each_disk_takes_what_comes_from_the_network_once() {
        let topology = topology();
        let nodes = all(&topology);
        let pairs = pairs(&topology, &nodes, &nodes[0], Cover::Interfaces);
        let mut taken: Vec<NodeName> = Vec::new();
        for (pair, keep) in keeps(&pairs) {
            taken.extend(keep.here.then_some(pair.from));
            taken.extend(keep.there.then_some(pair.to));
        }
        let mut wanted = nodes;
        taken.sort();
        wanted.sort();
        assert_eq!(taken, wanted);
    }

    #[test]
    fn no_node_and_no_link_is_measured_twice_at_once() {
        let topology = topology();
        let source: NodeName = "head".parse().unwrap();
        let wanted = pairs(&topology, &all(&topology), &source, Cover::Interfaces);
        let rounds = rounds(&topology, &wanted);
        let mut found = Vec::new();
        for round in &rounds {
            let (mut nodes, mut wires) = (BTreeSet::new(), BTreeSet::new());
            for pair in round {
                assert!(
                    nodes.insert(&pair.from) && nodes.insert(&pair.to),
                    "{:?}",
                    shown(round)
                );
                for edge in topology.route(&pair.from, &pair.to).unwrap().edges {
                    assert!(wires.insert(edge.0 / 2), "{:?}", shown(round));
                }
            }
            found.extend(round.clone());
        }
        let (mut found, mut all) = (found, wanted);
        found.sort();
        all.sort();
        assert_eq!(found, all);
        assert!(rounds.len() < all.len(), "some go at the same time");
    }
}
