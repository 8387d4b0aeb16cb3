//! Memory: what agents take must not grow with the payload.

use std::collections::BTreeMap;

use serde_json::json;
use stage_core::units::ByteCount;
use stage_lab::cluster::Security;

use super::report::Row;
use super::{Bench, PUSH, one_switch, random_file, right_copies, word};

const LARGE: ByteCount = ByteCount(5 << 30);
const SMALL: ByteCount = ByteCount(64 << 20);
const MANY: ByteCount = ByteCount(1 << 30);
const PEAK: ByteCount = ByteCount(48 << 20);
const APART: ByteCount = ByteCount(8 << 20);
/// The links do not limit: as much as ever is under way.
const RATE: &str = "10 Gbit/s";
const NODES: [&str; 3] = ["n0", "n1", "n2"];

pub(super) fn run(bench: &mut Bench) {
    let mut peaks: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for size in [LARGE, SMALL] {
        let name = format!("memory, {size} to two targets");
        let topology = one_switch(2, RATE);
        bench.stand(&name, &topology, Security::Tls, |bench, lab, cluster| {
            let idle: Vec<u64> = NODES
                .iter()
                .map(|node| cluster.agent_usage(node).rss_anon_peak.0)
                .collect();
            let file = random_file(lab, "n0", "payload", size)?;
            let digest = stage_lab::sha256sum(std::slice::from_ref(&file))?.remove(0);
            let pushed = cluster.push(&[word(&file), "--to", "n[1-2]"], PUSH)?;
            let own: Vec<u64> = NODES
                .iter()
                .map(|node| cluster.agent_usage(node).rss_anon_peak.0)
                .collect();
            let right = right_copies(&pushed, &digest)?;
            bench.add(
                Row::new(
                    format!("{name}: peak RssAnon of n0, n1, n2 (before the push)"),
                    format!("< {PEAK} each"),
                    format!("{} ({}) MiB", mib(&own), mib(&idle)),
                    own.iter().all(|bytes| *bytes < PEAK.0),
                )
                .with(json!({ "peak_bytes": own, "idle_bytes": idle, "finished": pushed.end() })),
            );
            bench.add(Row::new(
                format!("{name}: exit; right copies"),
                "0; 2",
                format!("{}; {right}", pushed.exit.unwrap_or(-1)),
                pushed.exit == Some(0) && right == 2,
            ));
            for (node, bytes) in NODES.iter().zip(own) {
                peaks.entry(node).or_default().push(bytes);
            }
            Ok(())
        });
    }
    streams(bench);
    let apart: Vec<u64> = peaks
        .values()
        .filter(|bytes| bytes.len() == 2)
        .map(|bytes| bytes[0].abs_diff(bytes[1]))
        .collect();
    bench.add(Row::new(
        format!("memory: peaks of n0, n1, n2 at {LARGE} and at {SMALL} are apart by"),
        format!("<= {APART}"),
        format!("{} MiB", mib(&apart)),
        apart.len() == NODES.len() && apart.iter().all(|bytes| *bytes <= APART.0),
    ));
}

/// As many streams as there may be: each takes a little.
fn streams(bench: &mut Bench) {
    for security in [Security::Tls, Security::Insecure] {
        let name = format!("memory, {MANY} to two targets by 64 streams a hop, {security:?}");
        let topology = one_switch(2, RATE);
        bench.stand(&name, &topology, security, |bench, lab, cluster| {
            let file = random_file(lab, "n0", "payload", MANY)?;
            let chain = ["--to", "n[1-2]", "--shape", "chain", "--streams", "64"];
            let pushed = cluster.push(&[&[word(&file)], &chain[..]].concat(), PUSH)?;
            let own: Vec<u64> = NODES
                .iter()
                .map(|node| cluster.agent_usage(node).rss_anon_peak.0)
                .collect();
            let fits = pushed.exit == Some(0) && own.iter().all(|bytes| *bytes < PEAK.0);
            bench.add(Row::new(
                format!("{name}: peak RssAnon of n0, n1, n2"),
                format!("< {PEAK} each"),
                format!("{} MiB", mib(&own)),
                fits,
            ));
            Ok(())
        });
    }
}

fn mib(bytes: &[u64]) -> String {
    let figures = bytes
        .iter()
        .map(|bytes| format!("{:.1}", *bytes as f64 / f64::from(1 << 20)));
    figures.collect::<Vec<_>>().join(", ")
}
