//! What a topology holds and what is notable about it, for `stage topology check`.

use std::collections::BTreeMap;
use std::fmt;

use super::graph::Point;
use super::{Group, Topology, hostlist};
use crate::id::ClusterName;
use crate::units::Rate;

/// What a topology holds. Its text form is for people: a line of counts, then a line for each remark.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// The cluster's name.
    pub cluster: ClusterName,
    /// How many nodes.
    pub nodes: usize,
    /// How many switches.
    pub switches: usize,
    /// How many links (interfaces not counted, parallel ones counted each).
    pub links: usize,
    /// How many groups, `all` not counted.
    pub groups: usize,
    /// Of these, how many are answers of commands.
    pub command_groups: usize,
    /// How many roots.
    pub roots: usize,
    /// What is notable: oversubscribed uplinks, relays between networks, names to be resolved, idle switches.
    pub remarks: Vec<String>,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |n: usize, one: &str, many: &str| format!("{n} {}", if n == 1 { one } else { many });
        write!(
            f,
            "cluster {}: {}, {}, {}, {}",
            self.cluster,
            count(self.nodes, "node", "nodes"),
            count(self.switches, "switch", "switches"),
            count(self.links, "link", "links"),
            count(self.groups, "group", "groups"),
        )?;
        if self.command_groups > 0 {
            write!(f, " ({} by command)", self.command_groups)?;
        }
        write!(f, ", {}", count(self.roots, "root", "roots"))?;
        self.remarks.iter().try_for_each(|remark| write!(f, "\n{remark}"))
    }
}

pub(super) fn summary(topology: &Topology) -> Summary {
    // A link between two nodes is two wires over a hidden switch: the second half is not counted.
    let second_half =
        |from: Point| matches!(from, Point::Switch(switch) if switch as usize >= topology.declared);
    let links = topology
        .fabric
        .wires
        .iter()
        .filter(|wire| wire.link.is_some() && !second_half(wire.ends[0]));
    let is_command = |group: &&Group| matches!(group, Group::Command { .. });
    let mut remarks = uplinks(topology);
    let relays = topology.nodes.iter().filter(|node| {
        node.interfaces
            .iter()
            .any(|interface| interface.attach != node.interfaces[0].attach)
    });
    push_names(
        &mut remarks,
        relays.map(|node| node.name.as_str()),
        "in several networks: a relay between them",
    );
    let unresolved = topology.nodes.iter().filter(|node| {
        node.interfaces
            .iter()
            .any(|interface| interface.address.is_none())
    });
    push_names(
        &mut remarks,
        unresolved.map(|node| node.name.as_str()),
        "without an address here: the name is resolved",
    );
    Summary {
        cluster: topology.cluster.clone(),
        nodes: topology.nodes.len(),
        switches: topology.declared,
        links: links.map(|wire| wire.members as usize).sum(),
        groups: topology.groups.len(),
        command_groups: topology.groups.values().filter(is_command).count(),
        roots: topology.roots.len(),
        remarks,
    }
}

fn push_names<'a>(remarks: &mut Vec<String>, names: impl Iterator<Item = &'a str>, what: &str) {
    let names: Vec<&str> = names.collect();
    if !names.is_empty() {
        remarks.push(format!("{}: {what}", hostlist::fold(names)));
    }
}

/// Switches whose nodes could send more than their links to other switches carry, and switches that join nothing.
fn uplinks(topology: &Topology) -> Vec<String> {
    #[derive(Default, Clone)]
    struct Side {
        nodes: usize,
        inside: f64,
        outside: f64,
    }
    let mut sides = vec![Side::default(); topology.switches.len()];
    for wire in &topology.fabric.wires {
        for (here, there) in [(wire.ends[0], wire.ends[1]), (wire.ends[1], wire.ends[0])] {
            let Point::Switch(switch) = here else { continue };
            let side = &mut sides[switch as usize];
            let rate = wire.total().bytes_per_second();
            match there {
                Point::Node(_) => {
                    side.nodes += 1;
                    side.inside += rate;
                }
                Point::Switch(_) => side.outside += rate,
            }
        }
    }
    // Racks that are alike are said once.
    let mut alike: BTreeMap<(usize, String), Vec<&str>> = BTreeMap::new();
    for (at, (switch, side)) in topology.switches.iter().zip(&sides).enumerate() {
        let text = if side.nodes == 0 && side.outside == 0.0 {
            "joins nothing".to_owned()
        } else if side.outside > 0.0 && side.inside > side.outside * 1.001 {
            let ratio = side.inside / side.outside;
            format!(
                "{} nodes with {} together share {} to the other switches: {:.1} to 1",
                side.nodes,
                Rate::from_bytes_per_second(side.inside).in_bits(),
                Rate::from_bytes_per_second(side.outside).in_bits(),
                ratio
            )
        } else {
            continue;
        };
        let first = alike
            .keys()
            .find(|(_, same)| *same == text)
            .map_or(at, |(first, _)| *first);
        alike.entry((first, text)).or_default().push(switch.as_str());
    }
    alike
        .into_iter()
        .map(|((_, text), switches)| {
            let word = if switches.len() == 1 { "switch" } else { "switches" };
            format!(
                "{word} {}: {text}{}",
                hostlist::fold(switches.iter().copied()),
                if switches.len() > 1 { " (each)" } else { "" }
            )
        })
        .collect()
}
