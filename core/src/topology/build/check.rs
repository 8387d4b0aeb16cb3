//! What groups, addresses and the fabric as a whole must keep to.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::super::graph::{Fabric, Point};
use super::super::parse::{Draft, GroupDraft};
use super::super::{Group, hostlist};
use super::Build;
use crate::id::NodeName;

impl Build<'_, '_> {
    pub(super) fn groups(&mut self, draft: &Draft) -> BTreeMap<String, Group> {
        let mut groups = BTreeMap::new();
        for (name, group) in &draft.groups {
            if let Some((Point::Node(_), at)) = self.points.get(&name.value) {
                let line = self.report.line(*at);
                let message = format!(
                    "group {:?} has the name of a node (line {line}): use another name",
                    name.value
                );
                self.report.error(name.at, message);
            }
            let group = match group {
                GroupDraft::Command(group) => group.clone(),
                GroupDraft::Static(members) => {
                    let is_node = |name: &&NodeName| {
                        matches!(self.points.get(name.as_str()), Some((Point::Node(_), _)))
                    };
                    let strange: Vec<&str> = members
                        .value
                        .iter()
                        .filter(|name| !is_node(name))
                        .map(NodeName::as_str)
                        .collect();
                    if let (Some(first), false) = (strange.first(), self.names_missing) {
                        let message = if strange.len() > 1 {
                            format!(
                                "group {:?} names {} unknown nodes: {}",
                                name.value,
                                strange.len(),
                                hostlist::fold(strange)
                            )
                        } else {
                            let near = self.report.unknown(
                                "node",
                                first,
                                self.nodes.iter().map(|node| node.name.as_str()),
                            );
                            format!("group {:?} names an {near}", name.value)
                        };
                        self.report.error(members.at, message);
                    }
                    let mut seen = BTreeSet::new();
                    Group::Static(
                        members
                            .value
                            .iter()
                            .filter(|name| seen.insert(*name))
                            .cloned()
                            .collect(),
                    )
                }
            };
            groups.insert(name.value.clone(), group);
        }
        groups
    }

    /// Every address is given once.
    pub(super) fn addresses(&mut self, draft: &Draft) {
        let mut owners: BTreeMap<IpAddr, (usize, usize)> = BTreeMap::new();
        for block in &draft.nodes {
            for addresses in block
                .legs
                .iter()
                .filter_map(|leg| leg.addresses.as_ref())
                .chain(&block.loose)
            {
                let mut doubled = None;
                for (step, address) in addresses.value.iter().enumerate() {
                    let first = *owners.entry(*address).or_insert((addresses.at, step));
                    if first != (addresses.at, step) {
                        doubled.get_or_insert((address, first.0));
                    }
                }
                if let Some((address, first)) = doubled {
                    let line = self.report.line(first);
                    let message = format!(
                        "address {address} is there already, on line {line}: every interface needs its own"
                    );
                    self.report.error(addresses.at, message);
                }
            }
        }
    }

    /// Every node is joined with the others.
    pub(super) fn reachable(&mut self, draft: &Draft, blocks: &[Vec<Option<u32>>]) {
        if self.wires_missing || self.names_missing {
            return;
        }
        let fabric = Fabric::new(
            self.switches.len(),
            self.wires.iter().map(|(_, wire)| wire.clone()).collect(),
            self.legs.clone(),
        );
        let cut: BTreeSet<u32> = fabric.cut_off().into_iter().collect();
        for (block, ids) in draft.nodes.iter().zip(blocks) {
            let lost: Vec<u32> = ids
                .iter()
                .flatten()
                .copied()
                .filter(|id| cut.contains(id))
                .collect();
            let Some(first) = lost.first() else { continue };
            let node = &self.nodes[*first as usize];
            let folded = hostlist::fold(lost.iter().map(|id| self.nodes[*id as usize].name.as_str()));
            let remedy = match node.interfaces.first() {
                None => "add attach and nic, or a [[link]] to it".to_owned(),
                Some(interface) => format!(
                    "add a [[link]] that joins switch {:?} with the others",
                    interface.attach.as_str()
                ),
            };
            self.report.error(
                block.names.at,
                format!("{folded} cannot be reached from the other nodes: {remedy}"),
            );
        }
    }
}
