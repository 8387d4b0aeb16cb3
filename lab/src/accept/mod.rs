//! `stage-lab accept`: measures, on real daemons in a lab, what stage promises, and says of each figure what was asked.
//!
//! Each measurement lays out a fabric, starts a cluster in it and pushes; the rooms beside this one hold them. What
//! happened is counted from outside wherever that is possible: by the interfaces' counters, `sha256sum`, `/proc` and this
//! program's own clock, and the command line's JSON stands beside it.

mod chain;
mod faults;
mod memory;
mod payloads;
mod racks;
mod report;
mod sick;
mod sizes;

use std::io::{self, Write as _};
use std::path::PathBuf;

use serde_json::{Value, json};
use stage_core::topology::Topology;
use stage_lab::cluster::{Cluster, Security, Setup};
use stage_lab::{Lab, LabError, Speed};

use self::report::{Report, Row};
use crate::bench::{
    PUSH, binary, copies, in_words, one_switch, random_file, received, remove, right_copies, rounded,
    seconds, word,
};

/// What can be asked for.
#[derive(Debug, clap::Args)]
pub(crate) struct Accept {
    /// The binary that is measured.
    #[arg(long, default_value = "target/release/stage")]
    stage: PathBuf,
    /// Only these measurements: chain, memory, racks, faults, sick, sizes, blast, many, sparse,
    /// changes, expect.
    #[arg(long, value_name = "NAME", num_args = 1..)]
    only: Vec<String>,
    /// How often each timed push is done.
    #[arg(long, default_value_t = 3)]
    repeats: u32,
    /// Where the figures go [default: lab/results/DATE.json].
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Keep the daemons' logs here.
    #[arg(long, value_name = "DIR")]
    logs: Option<PathBuf>,
}

type Measurement = (&'static str, fn(&mut Bench));

const MEASUREMENTS: [Measurement; 11] = [
    ("chain", chain::run),
    ("memory", memory::run),
    ("racks", racks::run),
    ("faults", faults::run),
    ("sick", sick::run),
    ("sizes", sizes::run),
    ("blast", payloads::blast),
    ("many", payloads::many),
    ("sparse", payloads::sparse),
    ("changes", payloads::changes),
    ("expect", payloads::expect),
];

/// Measures, prints the table, keeps the figures. Whether all was as asked.
///
/// # Errors
/// For people: what was asked for cannot be done at all.
pub(crate) fn run(accept: &Accept) -> Result<bool, String> {
    let known = |name: &String| MEASUREMENTS.iter().any(|(known, _)| known == name);
    if let Some(name) = accept.only.iter().find(|name| !known(name)) {
        return Err(format!("there is no measurement {name:?}"));
    }
    let stage = binary(&accept.stage)?;
    let mut bench = Bench {
        repeats: accept.repeats,
        logs: accept.logs.clone(),
        report: Report::new(&stage),
        stage,
    };
    for (name, measure) in MEASUREMENTS {
        if !accept.only.is_empty() && !accept.only.iter().any(|wanted| wanted == name) {
            continue;
        }
        measure(&mut bench);
    }
    bench.report.save(accept.json.as_deref())?;
    let text = bench.report.to_string();
    io::stdout()
        .write_all(text.as_bytes())
        .map_err(|why| why.to_string())?;
    Ok(bench.report.is_all_right())
}

/// What all measurements share.
struct Bench {
    stage: PathBuf,
    repeats: u32,
    logs: Option<PathBuf>,
    report: Report,
}

impl Bench {
    /// Takes up a row, and shows it at once.
    fn add(&mut self, row: Row) {
        drop(writeln!(io::stderr(), "{}", row.line()));
        self.report.rows.push(row);
    }

    /// Lays out a fabric, starts a cluster in it, and does something with both. A failure becomes a row, so that the
    /// next measurement is made all the same.
    fn stand(
        &mut self,
        name: &str,
        topology: &str,
        security: Security,
        body: impl FnOnce(&mut Self, &Lab, &mut Cluster<'_>) -> Result<(), LabError>,
    ) {
        self.stand_on(name, topology, security, &[], body);
    }

    /// The same, with slow disks under some nodes' roots.
    fn stand_on(
        &mut self,
        name: &str,
        topology: &str,
        security: Security,
        slow_roots: &[(&str, Speed)],
        body: impl FnOnce(&mut Self, &Lab, &mut Cluster<'_>) -> Result<(), LabError>,
    ) {
        let mut logs = Value::Null;
        if let Err(why) = self.try_stand(name, topology, (security, slow_roots), body, &mut logs) {
            self.add(Row::failed(name, &why).with(json!({ "logs": logs })));
        }
    }

    fn try_stand(
        &mut self,
        name: &str,
        topology: &str,
        (security, slow_roots): (Security, &[(&str, Speed)]),
        body: impl FnOnce(&mut Self, &Lab, &mut Cluster<'_>) -> Result<(), LabError>,
        words: &mut Value,
    ) -> Result<(), LabError> {
        let parsed = Topology::parse(name, topology).expect("the bench's own topologies are right");
        let lab = Lab::up(&parsed)?;
        let stage = self.stage.clone();
        let plain = |letter: char| !letter.is_ascii_alphanumeric();
        let logs = self.logs.as_ref().map(|dir| dir.join(name.replace(plain, "-")));
        let setup = Setup {
            logs: logs.as_deref(),
            slow_roots,
            ..Setup::new(&stage, topology, security)
        };
        let mut cluster = Cluster::up(&lab, &setup)?;
        let result = body(self, &lab, &mut cluster);
        if result.is_err() {
            *words = cluster.last_words().into();
        }
        result
    }
}
