//! Two racks behind uplinks that all of a rack shares: the payload crosses each once.

use serde_json::{Value, json};
use stage_core::id::NodeName;
use stage_core::topology::{EdgeId, End, Topology};
use stage_core::units::ByteCount;
use stage_lab::LabError;
use stage_lab::cluster::{Cluster, Security};

use super::report::Row;
use super::{Bench, PUSH, copies, random_file, remove, right_copies, rounded, word};

const SIZE: ByteCount = ByteCount(256 << 20);
/// What may cross an uplink in one direction, over the file's size, headers and requests included.
const ONCE: f64 = 1.02;
const TARGETS: &str = "a[1-3],b[1-3]";

const TOPOLOGY: &str = r#"[cluster]
name = "lab"

[[switch]]
name = "core"

[[switch]]
name = "rack[1-2]"

[[link]]
between = ["rack[1-2]", "core"]
capacity = "500 Mbit/s"

[[node]]
name = "head"
address = "10.78.0.1"
attach = "core"
nic = "1 Gbit/s"

[[node]]
name = "a[1-3]"
address = "10.78.1.[1-3]"
attach = "rack1"
nic = "1 Gbit/s"

[[node]]
name = "b[1-3]"
address = "10.78.2.[1-3]"
attach = "rack2"
nic = "1 Gbit/s"
"#;

pub(super) fn run(bench: &mut Bench) {
    bench.stand("two racks", TOPOLOGY, Security::Tls, |bench, lab, cluster| {
        let file = random_file(lab, "head", "payload", SIZE)?;
        let digest = stage_lab::sha256sum(std::slice::from_ref(&file))?.remove(0);
        for shape in ["auto", "chain"] {
            planned(bench, cluster, lab.topology(), shape)?;
            let uplinks = uplinks(lab.topology());
            let count = |edge: &EdgeId| lab.counters(*edge).map(|counters| counters.bytes.0);
            let before: Vec<u64> = uplinks.iter().map(count).collect::<Result<_, _>>()?;
            let pushed = cluster.push(&[word(&file), "--to", TARGETS, "--shape", shape], PUSH)?;
            let after: Vec<u64> = uplinks.iter().map(count).collect::<Result<_, _>>()?;
            let crossed: Vec<f64> = before
                .iter()
                .zip(&after)
                .map(|(before, after)| (after - before) as f64 / SIZE.0 as f64)
                .collect();
            let right = right_copies(&pushed, &digest)?;
            // Both racks are reached through their uplink only: downwards it is once, upwards once at most.
            let into_racks = crossed.iter().step_by(2).all(|share| *share >= 1.0);
            let shown: Vec<String> = uplinks
                .iter()
                .zip(&crossed)
                .map(|(edge, share)| format!("{} {share:.4}", lab.topology().edge_name(*edge)))
                .collect();
            bench.add(
                Row::new(
                    format!("two racks, {shape}: bytes by interface over size"),
                    format!("<= {ONCE} each way"),
                    shown.join(", "),
                    into_racks && crossed.iter().all(|share| *share <= ONCE),
                )
                .with(json!({
                    "crossed_over_size": crossed.iter().map(|share| rounded(*share)).collect::<Vec<_>>(),
                    "finished": pushed.end(),
                })),
            );
            bench.add(Row::new(
                format!("two racks, {shape}: exit; right copies"),
                "0; 6",
                format!("{}; {right}", pushed.exit.unwrap_or(-1)),
                pushed.exit == Some(0) && right == 6,
            ));
            remove(&copies(&pushed));
        }
        Ok(())
    });
}

/// The edges between switches, into the rack first, then out of it, rack by rack.
fn uplinks(topology: &Topology) -> Vec<EdgeId> {
    let into_rack = topology.links().filter_map(|link| match (link.from, link.to) {
        (End::Switch(from), End::Switch(_)) => Some(if from.as_str() == "core" {
            link.edge
        } else {
            link.edge.reverse()
        }),
        _ => None,
    });
    into_rack.flat_map(|edge| [edge, edge.reverse()]).collect()
}

/// What `stage plan` says of the same push, without a daemon.
fn planned(
    bench: &mut Bench,
    cluster: &Cluster<'_>,
    topology: &Topology,
    shape: &str,
) -> Result<(), LabError> {
    let size = SIZE.to_string();
    let file = cluster.topology_file();
    let words = ["plan", "--topology", word(&file), "--from", "head"];
    let rest = ["--to", TARGETS, "--size", &size, "--shape", shape];
    let answer = cluster.run(&[&words[..], &rest[..]].concat(), PUSH)?;
    let plan = &answer.end()["plan"];
    let name = |value: &Value| value.as_str().and_then(|name| name.parse::<NodeName>().ok());
    let hops = plan["hops"].as_array().map_or(&[][..], Vec::as_slice);
    let routes: Vec<_> = hops
        .iter()
        .filter_map(|hop| topology.route(&name(&hop["parent"])?, &name(&hop["child"])?))
        .collect();
    let crossings: Vec<usize> = uplinks(topology)
        .iter()
        .map(|uplink| {
            routes
                .iter()
                .flat_map(|route| &route.edges)
                .filter(|edge| *edge == uplink)
                .count()
        })
        .collect();
    let shown: Vec<String> = hops
        .iter()
        .map(|hop| {
            format!(
                "{}→{}",
                hop["parent"].as_str().unwrap_or("?"),
                hop["child"].as_str().unwrap_or("?")
            )
        })
        .collect();
    bench.add(
        Row::new(
            format!("two racks, {shape}: hops of `stage plan` over each uplink (in, out, in, out)"),
            "<= 1 each",
            format!("{crossings:?}; {} {}", plan["shape"], shown.join(" ")),
            routes.len() == 6 && crossings.iter().all(|count| *count <= 1),
        )
        .with(json!({ "plan": plan })),
    );
    Ok(())
}
