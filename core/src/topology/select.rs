//! TARGETS: which nodes a text such as "all-compute,!compute[005-006]" means.

use std::collections::{BTreeMap, BTreeSet};

use super::report::suggestion;
use super::{Group, SelectError, Topology, hostlist};
use crate::id::NodeName;

/// What `commands` holds: the last answers of command groups.
type Answers = BTreeMap<String, Vec<NodeName>>;

pub(super) fn select(
    topology: &Topology,
    targets: &str,
    answers: &Answers,
) -> Result<Vec<NodeName>, SelectError> {
    let mut chosen: Vec<NodeName> = Vec::new();
    let mut excluded: BTreeSet<NodeName> = BTreeSet::new();
    for term in hostlist::terms(targets).map_err(|why| SelectError(why.to_string()))? {
        match term.strip_prefix('!') {
            Some(term) => excluded.extend(members(topology, term, answers)?),
            None => chosen.extend(members(topology, term, answers)?),
        }
    }
    let named = !chosen.is_empty();
    let mut seen = BTreeSet::new();
    chosen.retain(|node| !excluded.contains(node) && seen.insert(node.clone()));
    if !chosen.is_empty() {
        return Ok(chosen);
    }
    Err(SelectError(if named {
        format!("{targets:?} leaves no node: all that it names are excluded or not in the topology")
    } else if excluded.is_empty() {
        format!(
            "{targets:?} names no node: write a group, node names or a hostlist, such as \"all\" or \"n[1-4]\""
        )
    } else {
        format!("{targets:?} only excludes: write \"all,{targets}\" for all others")
    }))
}

/// The nodes that one term names.
fn members(topology: &Topology, term: &str, answers: &Answers) -> Result<Vec<NodeName>, SelectError> {
    let mut nodes = Vec::new();
    let names = hostlist::expand(term).map_err(|why| SelectError(why.to_string()))?;
    if names.is_empty() {
        return Err(SelectError(
            "a '!' stands alone: write for example \"all,!n1\"".to_owned(),
        ));
    }
    for name in names {
        if name == "all" {
            nodes.extend(topology.nodes.iter().map(|node| node.name.clone()));
        } else if let Some(group) = topology.groups.get(&name) {
            match group {
                Group::Static(members) => nodes.extend_from_slice(members),
                Group::Command { command, .. } => match answers.get(&name) {
                    // A scheduler may know of machines that stage does not.
                    Some(answer) => nodes.extend(
                        answer
                            .iter()
                            .filter(|node| topology.node(node).is_some())
                            .cloned(),
                    ),
                    None => {
                        let program = command.first().map_or("", String::as_str);
                        return Err(SelectError(format!(
                            "group {name:?} is a command's answer, and {program:?} has not answered yet: the \
                             coordinator runs it; try again, or name the nodes"
                        )));
                    }
                },
            }
        } else if let Some(node) = name.parse().ok().filter(|node| topology.node(node).is_some()) {
            nodes.push(node);
        } else {
            let nodes = topology.nodes.iter().map(|node| node.name.as_str());
            let groups = topology.groups.keys().map(String::as_str).chain(["all"]);
            let near = suggestion(&name, groups.chain(nodes));
            let of = if term == name {
                String::new()
            } else {
                format!(" (of {term:?})")
            };
            return Err(SelectError(format!(
                "no node or group {name:?}{of} in the topology{near}"
            )));
        }
    }
    Ok(nodes)
}
