//! `stage-lab accept`: measures, on real daemons in a lab, what stage promises, and says of each figure what was asked.
//!
//! Each measurement lays out a fabric, starts a cluster in it and pushes; the rooms beside this one hold them. What
//! happened is counted from outside wherever that is possible: by the interfaces' counters, `sha256sum`, `/proc` and this
//! program's own clock, and the command line's JSON stands beside it.

mod chain;
mod faults;
mod memory;
mod racks;
mod report;
mod sizes;

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Value, json};
use stage_core::topology::Topology;
use stage_core::units::ByteCount;
use stage_lab::cluster::{Cluster, Pushed, Security, Setup};
use stage_lab::{Lab, LabError};

use self::report::{Report, Row};

/// No push of a measurement takes as long.
const PUSH: Duration = Duration::from_secs(600);

/// What can be asked for.
#[derive(Debug, clap::Args)]
pub(crate) struct Accept {
    /// The binary that is measured.
    #[arg(long, default_value = "target/release/stage")]
    stage: PathBuf,
    /// Only these measurements: chain, memory, racks, faults, sizes.
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

const MEASUREMENTS: [Measurement; 5] = [
    ("chain", chain::run),
    ("memory", memory::run),
    ("racks", racks::run),
    ("faults", faults::run),
    ("sizes", sizes::run),
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
    let stage = std::path::absolute(&accept.stage)
        .and_then(std::fs::canonicalize)
        .map_err(|why| {
            format!(
                "{}: {why}: build it with `cargo build --release -p stage`, or give --stage",
                accept.stage.display()
            )
        })?;
    let mut bench = Bench {
        stage,
        repeats: accept.repeats,
        logs: accept.logs.clone(),
        report: Report::new(),
    };
    for (name, measure) in MEASUREMENTS {
        if !accept.only.is_empty() && !accept.only.iter().any(|wanted| wanted == name) {
            continue;
        }
        measure(&mut bench);
    }
    bench.report.save(accept.json.as_deref(), &bench.stage)?;
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
        let mut logs = Value::Null;
        if let Err(why) = self.try_stand(name, topology, security, body, &mut logs) {
            self.add(Row::failed(name, &why).with(json!({ "logs": logs })));
        }
    }

    fn try_stand(
        &mut self,
        name: &str,
        topology: &str,
        security: Security,
        body: impl FnOnce(&mut Self, &Lab, &mut Cluster<'_>) -> Result<(), LabError>,
        words: &mut Value,
    ) -> Result<(), LabError> {
        let parsed = Topology::parse(name, topology).expect("the bench's own topologies are right");
        let lab = Lab::up(&parsed)?;
        let stage = self.stage.clone();
        let plain = |letter: char| !letter.is_ascii_alphanumeric();
        let logs = self.logs.as_ref().map(|dir| dir.join(name.replace(plain, "-")));
        let setup = Setup {
            stage: &stage,
            topology,
            security,
            small_roots: &[],
            slow_roots: &[],
            logs: logs.as_deref(),
        };
        let mut cluster = Cluster::up(&lab, &setup)?;
        let result = body(self, &lab, &mut cluster);
        if result.is_err() {
            *words = cluster.last_words().into();
        }
        result
    }
}

/// A fabric of one switch: a source `n0` and targets `n1` and on, all at one rate.
fn one_switch(targets: u32, rate: &str) -> String {
    format!(
        r#"[cluster]
name = "lab"

[[switch]]
name = "core"

[[node]]
name = "n[0-{targets}]"
address = "10.78.0.[1-{}]"
attach = "core"
nic = "{rate}"
"#,
        targets + 1
    )
}

fn in_words(security: Security) -> &'static str {
    match security {
        Security::Tls => "TLS",
        Security::Insecure => "insecure",
    }
}

/// Makes a file of random bytes on the source.
fn random_file(lab: &Lab, source: &str, name: &str, size: ByteCount) -> Result<PathBuf, LabError> {
    let path = lab.dir(source).join(name);
    let make = || -> io::Result<()> {
        let mut seed = [0; 32];
        File::open("/dev/urandom")?.read_exact(&mut seed)?;
        // The kernel's own generator would take longer than the push.
        let mut bytes = blake3::Hasher::new_keyed(&seed).finalize_xof().take(size.0);
        io::copy(
            &mut io::BufReader::with_capacity(1 << 20, &mut bytes),
            &mut File::create(&path)?,
        )?;
        Ok(())
    };
    make().map_err(|source| LabError::Directory {
        path: path.clone(),
        source,
    })?;
    Ok(path)
}

/// A path as a word of a command line.
fn word(path: &Path) -> &str {
    path.to_str().expect("the lab's own paths are text")
}

/// Where the command says that each copy lies.
fn copies(pushed: &Pushed) -> Vec<PathBuf> {
    let paths = pushed.nodes().iter().filter_map(|node| node["path"].as_str());
    paths.map(PathBuf::from).collect()
}

/// How many copies `sha256sum` finds right, of those that the command tells of.
fn right_copies(pushed: &Pushed, digest: &str) -> Result<usize, LabError> {
    let copies: Vec<PathBuf> = copies(pushed).into_iter().filter(|path| path.is_file()).collect();
    let sums = stage_lab::sha256sum(&copies)?;
    Ok(sums.iter().filter(|sum| *sum == digest).count())
}

/// What each target says that it received over the network.
fn received(pushed: &Pushed) -> Vec<u64> {
    let nodes = pushed.nodes().iter();
    nodes
        .map(|node| node["bytes_received"].as_u64().unwrap_or(u64::MAX))
        .collect()
}

/// Gives memory back between two pushes.
fn remove(paths: &[PathBuf]) {
    // What is not there takes no memory.
    paths.iter().for_each(|path| drop(std::fs::remove_file(path)));
}

fn seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e3).round() / 1e3
}

fn rounded(figure: f64) -> f64 {
    (figure * 1e4).round() / 1e4
}
