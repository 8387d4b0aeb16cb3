//! What stage says before and while it moves bytes, held against what happens: measurements of `stage bench`, stream counts, forecasts,
//! shapes, verdicts, and how long planning takes. A room for each.

pub(crate) mod auto;
pub(crate) mod bottlenecks;
pub(crate) mod forecasts;
pub(crate) mod links;
pub(crate) mod scale;
pub(crate) mod streams;

use std::time::Duration;

use serde_json::Value;
use stage_core::topology::Topology;
use stage_core::units::Rate;
use stage_lab::cluster::{Cluster, Pushed};
use stage_lab::{LabError, Speed};

use crate::bench::word_of;

/// No `stage bench` of a lab takes as long.
const BENCH: Duration = Duration::from_secs(900);

/// Two racks with narrow uplinks, a site behind 15 ms and one behind 100 ms. Slow enough that two cores have time to spare.
const FABRIC: &str = r#"[cluster]
name = "lab"

[[switch]]
name = "core"

[[switch]]
name = "rack[1-2]"

[[switch]]
name = "near"

[[switch]]
name = "far"

[[link]]
between = ["rack[1-2]", "core"]
capacity = "250 Mbit/s"

[[link]]
between = ["near", "core"]
capacity = "400 Mbit/s"
rtt = "15 ms"

[[link]]
between = ["far", "core"]
capacity = "300 Mbit/s"
rtt = "100 ms"

[[node]]
name = "head"
address = "10.78.0.1"
attach = "core"
nic = "500 Mbit/s"

[[node]]
name = "a[1-2]"
address = "10.78.1.[1-2]"
attach = "rack1"
nic = "500 Mbit/s"

[[node]]
name = "b[1-2]"
address = "10.78.2.[1-2]"
attach = "rack2"
nic = "500 Mbit/s"

[[node]]
name = "y1"
address = "10.78.3.1"
attach = "near"
nic = "500 Mbit/s"

[[node]]
name = "z1"
address = "10.78.4.1"
attach = "far"
nic = "500 Mbit/s"
"#;

/// The node of [`FABRIC`] with a slow disk, and how slow it is.
const SICK: &str = "b2";

fn parsed(name: &str, text: &str) -> Topology {
    Topology::parse(name, text).expect("the bench's own topologies are right")
}

/// A disk that writes and reads at these rates, smoothly.
fn slow(write: &str, read: &str) -> Speed {
    let rate = |text: &str| -> Rate { text.parse().expect("the bench's own rates are right") };
    Speed {
        write: rate(write),
        read: rate(read),
        cache: "4 MiB".parse().expect("the bench's own sizes are right"),
        burst: "0 B".parse().expect("the bench's own sizes are right"),
    }
}

/// `stage bench`, of nodes that look busy too: all share one machine, whose load is the lab's.
fn measure(cluster: &Cluster<'_>, words: &[&str]) -> Result<Pushed, LabError> {
    let answer = cluster.run(&[&["bench", "--busy-too"], words].concat(), BENCH)?;
    match answer.exit {
        // 5: something was not measured, which its lines tell.
        Some(0 | 5) => Ok(answer),
        exit => Err(LabError::Tool {
            command: "stage bench".to_owned(),
            message: format!("exit {exit:?}: {} {}", answer.end(), answer.errors.trim()),
        }),
    }
}

/// How much of `stage bench` goes before the pushes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Know {
    /// Nothing: the topology's words, as an administrator wrote them, and the windows that agents tell.
    Topology,
    /// `stage bench --quick`.
    Quick,
    /// `stage bench`.
    Usual,
}

impl Know {
    fn learn(self, cluster: &Cluster<'_>) -> Result<(), LabError> {
        match self {
            Self::Topology => Ok(()),
            Self::Quick => measure(cluster, &["--quick"]).map(drop),
            Self::Usual => measure(cluster, &[]).map(drop),
        }
    }
}

/// Whether a figure is as asked, in a table.
fn yes(right: bool) -> String {
    if right { "yes" } else { "**no**" }.to_owned()
}

/// How far one figure is from another, as a share of the second.
fn off(seen: f64, set: f64) -> f64 {
    seen / set - 1.0
}

fn percent(share: f64) -> String {
    if share.is_finite() {
        format!("{:+.1} %", share * 100.0)
    } else {
        "–".to_owned()
    }
}

/// What the finished push says of its plan.
fn forecast(pushed: &Pushed) -> f64 {
    pushed.end()["plan"]["predicted_seconds"]
        .as_f64()
        .unwrap_or(f64::NAN)
}

/// From the command's start to its word of the last copy.
fn last(pushed: &Pushed) -> f64 {
    pushed.last_published().unwrap_or(pushed.wall).as_secs_f64()
}

fn shape(pushed: &Pushed) -> String {
    let plan = &pushed.end()["plan"];
    word_of(&plan["shape"]).to_owned()
}

/// The streams of each target, the same number once.
fn streams_of(pushed: &Pushed) -> String {
    let mut counts: Vec<u64> = pushed
        .nodes()
        .iter()
        .filter_map(|node| node["streams"].as_u64())
        .collect();
    counts.sort_unstable();
    counts.dedup();
    counts
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

/// Whether `only` asks for it: all if it asks for nothing; a part of the name is enough.
fn is_wanted(only: &[String], name: &str) -> bool {
    only.is_empty() || only.iter().any(|part| name.contains(part.as_str()))
}

/// A word of `only` that asks for nothing.
fn unknown<'n>(only: &[String], names: impl Iterator<Item = &'n str> + Clone) -> Result<(), String> {
    match only
        .iter()
        .find(|part| !names.clone().any(|name| name.contains(part.as_str())))
    {
        Some(part) => Err(format!(
            "there is nothing named {part:?}: {}",
            names.collect::<Vec<_>>().join(", ")
        )),
        None => Ok(()),
    }
}

/// All texts in `value` under a key that begins with `verdict`, however deep.
fn verdicts(value: &Value, into: &mut Vec<String>) {
    fn texts(value: &Value, into: &mut Vec<String>) {
        match value {
            Value::String(text) => into.push(text.clone()),
            Value::Array(values) => values.iter().for_each(|value| texts(value, into)),
            Value::Object(fields) => fields.values().for_each(|value| texts(value, into)),
            _ => {}
        }
    }
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                if key.starts_with("verdict") {
                    texts(value, into);
                } else {
                    verdicts(value, into);
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| verdicts(value, into)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_fabric_has_its_sites() {
        let fabric = parsed("foresight", FABRIC);
        let rtt = |to: &str| {
            let [from, to] = ["head", to].map(|name| name.parse().unwrap());
            fabric.route(&from, &to).unwrap().rtt
        };
        assert_eq!(rtt("y1"), Some(Duration::from_millis(15)));
        assert_eq!(rtt("z1"), Some(Duration::from_millis(100)));
        assert!(fabric.nodes().iter().any(|node| node.name.as_str() == SICK));
    }

    #[test]
    fn verdicts_are_found_wherever_they_stand() {
        let mut found = Vec::new();
        verdicts(
            &json!({"verdict": "a", "nodes": [{"verdicts": ["b", {"text": "c"}]}], "text": "d"}),
            &mut found,
        );
        found.sort();
        assert_eq!(found, ["a", "b", "c"]);
    }

    #[test]
    fn a_part_of_a_name_asks_for_it() {
        let only = ["15".to_owned()];
        assert!(is_wanted(&only, "15ms-0") && is_wanted(&[], "x") && !is_wanted(&only, "100ms"));
        assert!(unknown(&only, ["15ms-0", "x"].into_iter()).is_ok());
        assert!(unknown(&only, ["x"].into_iter()).unwrap_err().contains("\"15\""));
    }
}
