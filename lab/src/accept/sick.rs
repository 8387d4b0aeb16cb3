//! One sick node in a chain that nobody knew of: the others must not wait for it.

use std::time::Duration;

use serde_json::json;
use stage_core::units::{ByteCount, Rate};
use stage_lab::cluster::{Cluster, Event, Security};
use stage_lab::{Lab, LabError, Speed, Way};

use super::report::Row;
use super::{Bench, PUSH, one_switch, random_file, rounded, word};

const SIZE: ByteCount = ByteCount(1 << 30);
const RATE: &str = "500 Mbit/s";
/// A tenth of that.
const SICK_BITS: f64 = 50e6;
const TARGETS: u32 = 5;
/// In the middle of the chain, as the topology orders it.
const SICK: &str = "n2";

/// What is wrong with the node, and how many seconds later the others may be done: it is looked on for ten; then whoever
/// waited shares the new parent's interface with the sick one, as long as that receives at full rate; and where it is the
/// receiver's interface, ten more go by until that is known.
const CASES: [(&str, f64); 3] = [
    ("its disk writes", 16.0),
    ("its interface sends", 20.0),
    ("its interface receives", 32.0),
];

pub(super) fn run(bench: &mut Bench) {
    let topology = one_switch(TARGETS, RATE);
    let mut well = None;
    bench.stand("sick: none", &topology, Security::Tls, |_, lab, cluster| {
        well = Some(others(lab, cluster)?.0);
        Ok(())
    });
    let Some(well) = well else { return };
    for (what, later) in CASES {
        let disk = Speed {
            write: Rate::from_bits_per_second(SICK_BITS),
            read: Rate::UNLIMITED,
            cache: ByteCount(4 << 20),
            burst: ByteCount(0),
        };
        let disks = [(SICK, disk)];
        let slow_roots = if what == CASES[0].0 { &disks[..] } else { &[] };
        let name = format!("sick: {what} a tenth");
        bench.stand_on(&name, &topology, Security::Tls, slow_roots, |bench, lab, cluster| {
            match what {
                "its interface sends" => lab.reshape(SICK, Way::Sends, Rate::from_bits_per_second(SICK_BITS))?,
                "its interface receives" => {
                    lab.reshape(SICK, Way::Receives, Rate::from_bits_per_second(SICK_BITS))?;
                }
                _ => {}
            }
            let (took, remarks) = others(lab, cluster)?;
            let [took_s, well_s] = [took, well].map(|time| time.as_secs_f64());
            bench.add(
                Row::new(
                    format!(
                        "of {TARGETS} in a chain at {RATE}, of {SICK} {what} a tenth: s to the last copy of the others \
                         (all well: {well_s:.1}; at its pace: {:.0})",
                        SIZE.0 as f64 * 8.0 / SICK_BITS
                    ),
                    format!("<= {:.1}", well_s + later),
                    format!("{took_s:.1}"),
                    took_s <= well_s + later,
                )
                .with(json!({ "well_seconds": rounded(well_s), "seconds": rounded(took_s), "remarks": remarks })),
            );
            Ok(())
        });
    }
}

/// How long it takes until all but the sick one have it, and what was remarked meanwhile.
fn others(lab: &Lab, cluster: &mut Cluster<'_>) -> Result<(Duration, Vec<String>), LabError> {
    let file = random_file(lab, "n0", "payload", SIZE)?;
    let to = format!("n[1-{TARGETS}]");
    let running = cluster.start_command(&["push", word(&file), "--to", &to, "--shape", "chain"])?;
    let mut took = Duration::ZERO;
    for node in (1..=TARGETS)
        .map(|at| format!("n{at}"))
        .filter(|node| node != SICK)
    {
        let published =
            |event: &Event| event.value["node"] == node.as_str() && event.value["state"] == "published";
        took = took.max(running.wait_for("a copy", PUSH, published)?.at);
    }
    let job = running.job(PUSH)?;
    if !running.has_ended() {
        cluster.run(&["cancel", &job], PUSH)?;
    }
    let told = running.finish(PUSH)?;
    let remarks = told.events.iter().filter(|event| event.kind() == "remark");
    let words = remarks.filter_map(|event| event.value["text"].as_str().map(str::to_owned));
    Ok((took, words.collect()))
}
