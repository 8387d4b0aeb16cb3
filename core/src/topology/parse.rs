//! From text to a draft: each table read by itself, hostlists expanded, every value with its place. What tables
//! say of each other is checked in the next room, `build`.

mod groups;

use std::net::IpAddr;
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::report::{At, Report, Section, names};
use super::{Group, hostlist};
use crate::id::{ClusterName, CongestionControl, NodeName, RootName, SwitchName};
use crate::units::Rate;

/// The file as it was written.
pub(super) struct Draft {
    pub(super) cluster: Option<ClusterName>,
    pub(super) switches: Vec<At<Vec<SwitchName>>>,
    pub(super) nodes: Vec<NodeDraft>,
    pub(super) links: Vec<LinkDraft>,
    pub(super) roots: Vec<(At<RootName>, String)>,
    pub(super) groups: Vec<(At<String>, GroupDraft)>,
    /// A list of switch or node names could not be read: what is unknown may have been in it.
    pub(super) names_missing: bool,
}

/// One `[[node]]`.
pub(super) struct NodeDraft {
    pub(super) at: usize,
    pub(super) names: At<Vec<NodeName>>,
    pub(super) legs: Vec<LegDraft>,
    /// For a node without `attach`: the addresses that a link to it takes over, one a name or none.
    pub(super) loose: Option<At<Vec<IpAddr>>>,
    pub(super) disk_write: Option<Rate>,
    pub(super) disk_read: Option<Rate>,
    pub(super) roots: Vec<(At<RootName>, String)>,
}

/// One interface, of every node of a [`NodeDraft`].
pub(super) struct LegDraft {
    pub(super) name: Option<String>,
    /// One a name, or none.
    pub(super) addresses: Option<At<Vec<IpAddr>>>,
    pub(super) attach: Option<At<SwitchName>>,
    pub(super) nic: Rate,
}

/// One `[[link]]`.
pub(super) struct LinkDraft {
    pub(super) at: usize,
    /// Where `between` stands.
    pub(super) between: usize,
    /// The names at both ends, as many on either side.
    pub(super) ends: Vec<(String, String)>,
    pub(super) capacity: Rate,
    pub(super) rtt: Option<Duration>,
    pub(super) loss: f64,
    pub(super) congestion_control: Option<CongestionControl>,
}

/// One entry of `[groups]`.
pub(super) enum GroupDraft {
    /// A hostlist.
    Static(At<Vec<NodeName>>),
    /// A command.
    Command(Group),
}

/// Stands for a rate that was wrong or missing, which is an error already: the rest is still checked.
const BROKEN_RATE: Rate = Rate::ZERO;

/// Reads the text; `None` if it is not TOML.
pub(super) fn parse(text: &str, report: &mut Report<'_>) -> Option<Draft> {
    let (document, errors) = DeTable::parse_recoverable(text);
    for error in errors {
        // What follows from broken syntax would mislead: nothing else is looked at.
        let at = error.span().map_or(0, |span| span.start);
        let near: String = text
            .get(at..)
            .unwrap_or_default()
            .lines()
            .next()
            .unwrap_or_default()
            .chars()
            .take(30)
            .collect();
        let near = if near.trim().is_empty() {
            String::new()
        } else {
            format!(" at {:?}", near.trim())
        };
        report.error(at, format!("not TOML{near}: {}", error.message()));
    }
    if !report.is_empty() {
        return None;
    }
    let top = Section::new(document.get_ref(), 0, "the file");
    top.check_keys(report, &["cluster", "switch", "node", "link", "roots", "groups"]);

    let mut names_missing = false;
    let cluster = cluster(report, &top);
    let mut switches = Vec::new();
    for section in top.tables(report, "switch", "[[switch]]") {
        section.check_keys(report, &["name"]);
        let name = section.need_text(report, "name", "rack1");
        match name.and_then(|name| names(report, &name).map(|value| At { value, at: name.at })) {
            Some(names) => switches.push(names),
            None => names_missing = true,
        }
    }
    let mut nodes = Vec::new();
    for section in top.tables(report, "node", "[[node]]") {
        match node(report, &section) {
            Some(node) => nodes.push(node),
            None => names_missing = true,
        }
    }
    let mut links = Vec::new();
    for section in top.tables(report, "link", "[[link]]") {
        links.extend(link(report, &section));
    }
    let roots = top
        .table(report, "roots", "[roots]")
        .map(|section| roots(report, &section))
        .unwrap_or_default();
    let groups = top
        .table(report, "groups", "[groups]")
        .map(|section| groups::groups(report, &section))
        .unwrap_or_default();
    Some(Draft {
        cluster,
        switches,
        nodes,
        links,
        roots,
        groups,
        names_missing,
    })
}

fn cluster(report: &mut Report<'_>, top: &Section<'_>) -> Option<ClusterName> {
    if !top.has("cluster") {
        report.error(
            0,
            "there is no [cluster]: begin with [cluster] and name = \"example\"",
        );
    }
    let section = top.table(report, "cluster", "[cluster]")?;
    section.check_keys(report, &["name"]);
    let name = section.need_text(report, "name", "example")?;
    name.value
        .parse()
        .map_err(|why: crate::id::IdError| report.error(name.at, why.to_string()))
        .ok()
}

/// `None` if its names cannot be told.
fn node(report: &mut Report<'_>, section: &Section<'_>) -> Option<NodeDraft> {
    let known = [
        "name",
        "address",
        "attach",
        "nic",
        "interface",
        "disk_write",
        "disk_read",
        "roots",
    ];
    section.check_keys(report, &known);
    let name = section.need_text(report, "name", "n1");
    let names = name.and_then(|name| names(report, &name).map(|value| At { value, at: name.at }));
    let count = names.as_ref().map(|names| names.value.len());

    let mut legs = Vec::new();
    let mut loose = None;
    if section.has("interface") {
        for key in ["address", "attach", "nic"] {
            if let Some(value) = section.get(key) {
                let message =
                    format!("a node with [[node.interface]] has no {key} of its own: move it there");
                report.error(value.span().start, message);
            }
        }
        let interfaces = section.tables(report, "interface", "[[node.interface]]");
        if interfaces.is_empty() {
            report.error(
                section.at,
                "interface is empty: write [[node.interface]] for each network",
            );
            legs.push(LegDraft {
                name: None,
                addresses: None,
                attach: None,
                nic: BROKEN_RATE,
            });
        }
        for interface in &interfaces {
            legs.push(leg(report, interface, count, true));
        }
        for (at, leg) in legs.iter().enumerate().filter(|(_, leg)| leg.name.is_some()) {
            if legs[..at].iter().any(|before| before.name == leg.name) {
                let name = leg.name.as_deref().unwrap_or_default();
                let message = format!("the node has two interfaces {name:?}: give each its own name");
                report.error(interfaces[at].at, message);
            }
        }
    } else if section.has("attach") || section.has("nic") {
        legs.push(leg(report, section, count, false));
    } else {
        loose = addresses(report, section, count);
    }
    let disk_write = section.rate(report, "disk_write", "1.2 GB/s");
    let disk_read = section.rate(report, "disk_read", "2 GB/s");
    let roots = section
        .table(report, "roots", "roots.NAME = \"/path\"")
        .map(|s| roots(report, &s))
        .unwrap_or_default();
    Some(NodeDraft {
        at: section.at,
        names: names?,
        legs,
        loose,
        disk_write,
        disk_read,
        roots,
    })
}

fn leg(report: &mut Report<'_>, section: &Section<'_>, count: Option<usize>, named: bool) -> LegDraft {
    let mut name = None;
    if named {
        section.check_keys(report, &["name", "address", "attach", "nic"]);
        name = section.need_text(report, "name", "eth0").and_then(|text| {
            // Linux: 15 bytes, no slash, no white space.
            let good = (1..=15).contains(&text.value.len())
                && text.value.bytes().all(|b| b.is_ascii_graphic() && b != b'/');
            if !good {
                report.error(
                    text.at,
                    format!(
                        "{:?} is not an interface: write its name as `ip link` shows it",
                        text.value
                    ),
                );
            }
            good.then(|| text.value.to_owned())
        });
    }
    let attach = section.need_text(report, "attach", "rack1").and_then(|text| {
        match text.value.parse::<SwitchName>() {
            Ok(value) => Some(At { value, at: text.at }),
            Err(_) if text.value.contains(['[', ',']) => {
                let message = format!(
                    "attach names one switch, not {:?}: write a [[node]] for each switch",
                    text.value
                );
                report.error(text.at, message);
                None
            }
            Err(why) => {
                report.error(text.at, why.to_string());
                None
            }
        }
    });
    if !section.has("nic") {
        report.error(section.at, "the interface has no rate: add nic = \"10 Gbit/s\"");
    }
    let nic = section.rate(report, "nic", "10 Gbit/s").unwrap_or(BROKEN_RATE);
    LegDraft {
        name,
        addresses: addresses(report, section, count),
        attach,
        nic,
    }
}

/// The addresses under `address`, as many as there are names.
fn addresses(
    report: &mut Report<'_>,
    section: &Section<'_>,
    count: Option<usize>,
) -> Option<At<Vec<IpAddr>>> {
    let text = section.text(report, "address", "10.0.0.1")?;
    let listed = match hostlist::expand(text.value) {
        Ok(listed) => listed,
        Err(why) => {
            report.error(text.at, why.to_string());
            return None;
        }
    };
    let mut addresses = Vec::with_capacity(listed.len());
    for address in &listed {
        match address.parse::<IpAddr>() {
            Ok(address) if address.is_unspecified() || address.is_multicast() => {
                report.error(text.at, format!("{address} is no machine's address"));
                return None;
            }
            Ok(address) => addresses.push(address),
            Err(_) => {
                let message = format!(
                    "{address:?} is not an IP address: write for example \"10.0.0.1\", without leading zeros; \
                     leave the key out to have the node's name resolved"
                );
                report.error(text.at, message);
                return None;
            }
        }
    }
    if let Some(count) = count.filter(|count| *count != addresses.len()) {
        let (have, word) = (
            addresses.len(),
            if addresses.len() == 1 {
                "address"
            } else {
                "addresses"
            },
        );
        let names = if count == 1 { "name" } else { "names" };
        let message = format!(
            "{have} {word} for {count} {names}: they go in step, so write a hostlist of {count}, such as \
             \"10.0.1.[1-{count}]\""
        );
        report.error(text.at, message);
        return None;
    }
    Some(At {
        value: addresses,
        at: text.at,
    })
}

fn link(report: &mut Report<'_>, section: &Section<'_>) -> Option<LinkDraft> {
    section.check_keys(
        report,
        &["between", "capacity", "rtt", "loss", "congestion_control"],
    );
    if !section.has("capacity") {
        report.error(
            section.at,
            "the link has no capacity: add capacity = \"40 Gbit/s\"",
        );
    }
    let capacity = section
        .rate(report, "capacity", "40 Gbit/s")
        .unwrap_or(BROKEN_RATE);
    let rtt = section.time(report, "rtt", "0.2 ms").map(|time| time.value);
    let loss = section
        .get("loss")
        .and_then(|value| loss(report, value))
        .unwrap_or(0.0);
    let congestion_control = section
        .text(report, "congestion_control", "bbr")
        .and_then(|text| {
            let name = text.value.parse();
            if name.is_err() {
                let message = format!(
                    "{:?} is no congestion control: write for example \"bbr\" or \"cubic\"",
                    text.value
                );
                report.error(text.at, message);
            }
            name.ok()
        });

    const EXAMPLE: &str = "write between = [\"rack[1-2]\", \"core\"]";
    if !section.has("between") {
        report.error(
            section.at,
            format!("the link does not say what it joins: {EXAMPLE}"),
        );
    }
    let value = section.get("between")?;
    let between = value.span().start;
    let sides = value.get_ref().as_array().filter(|array| array.len() == 2);
    let mut texts = sides.into_iter().flatten().filter_map(|side| {
        side.get_ref().as_str().map(|value| At {
            value,
            at: side.span().start,
        })
    });
    let (Some(left), Some(right)) = (texts.next(), texts.next()) else {
        report.error(between, format!("between is not a list of two names: {EXAMPLE}"));
        return None;
    };
    // Names of switches or nodes: the rule for both is the same.
    let both = (
        names::<NodeName>(report, &left),
        names::<NodeName>(report, &right),
    );
    let (Some(mut left), Some(mut right)) = both else {
        return None;
    };
    let count = left.len().max(right.len());
    for side in [&mut left, &mut right] {
        if let [one] = side.as_slice() {
            *side = vec![one.clone(); count];
        }
    }
    if left.len() != right.len() {
        let message = format!(
            "{} names on one side and {} on the other: write one on a side (it is joined with each of the other \
             side), or as many on both (they are joined in step)",
            left.len(),
            right.len()
        );
        report.error(between, message);
        return None;
    }
    let ends = left
        .into_iter()
        .map(String::from)
        .zip(right.into_iter().map(String::from))
        .collect();
    Some(LinkDraft {
        at: section.at,
        between,
        ends,
        capacity,
        rtt,
        loss,
        congestion_control,
    })
}

/// A share from 0 to 1, written as a number or in percent.
fn loss(report: &mut Report<'_>, value: &Spanned<DeValue<'_>>) -> Option<f64> {
    let share = match value.get_ref() {
        DeValue::Float(number) => number.as_str().replace('_', "").parse::<f64>().ok(),
        DeValue::Integer(number) if number.radix() == 10 => number.as_str().parse::<f64>().ok(),
        DeValue::String(text) => text
            .strip_suffix('%')
            .and_then(|number| number.trim().parse::<f64>().ok())
            .map(|percent| percent / 100.0),
        _ => None,
    };
    // A link that loses everything is no link.
    let good = share.filter(|share| (0.0..1.0).contains(share));
    if good.is_none() {
        let message =
            "loss is a share of at least 0 and less than 1: write for example loss = 0.001 or \"0.1 %\"";
        report.error(value.span().start, message);
    }
    good
}

fn roots(report: &mut Report<'_>, section: &Section<'_>) -> Vec<(At<RootName>, String)> {
    let mut roots = Vec::new();
    for (key, value) in section.entries() {
        let name = match key.value.parse() {
            Ok(value) => At { value, at: key.at },
            Err(why) => {
                report.error(key.at, crate::id::IdError::to_string(&why));
                continue;
            }
        };
        let path = value.get_ref().as_str();
        match path.filter(|path| path.starts_with('/') && path.split('/').all(|part| part != "..")) {
            Some(path) if !path.contains('\0') => roots.push((name, path.to_owned())),
            _ => {
                let message = format!(
                    "root {} is not an absolute path: write {0} = \"/scratch/stage\"",
                    key.value
                );
                report.error(value.span().start, message);
            }
        }
    }
    roots
}
