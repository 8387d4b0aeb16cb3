//! `stage-lab small`: a small file to many agents on one machine. What counts is the control plane: processes, handshakes,
//! messages and what the store and the publish make durable.
//!
//! Where the time goes is read from the command's events: each row of the second table is what passed between two of them.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stage_core::topology::Topology;
use stage_core::units::ByteCount;
use stage_lab::cluster::{Cluster, Pushed, Setup};
use stage_lab::{Group, Lab, LabError, Options};

use crate::bench::{
    Common, Facts, PUSH, Table, binary, copies, good, in_words, one_switch, random_file, remove, rounded,
    spread, word,
};

/// What can be asked for.
#[derive(Debug, clap::Args)]
pub(crate) struct Small {
    #[command(flatten)]
    common: Common,
    /// How many targets.
    #[arg(long, default_value_t = 32)]
    targets: u32,
    /// How often each size is pushed, in turns.
    #[arg(long, default_value_t = 20)]
    rounds: u32,
    /// The sizes.
    #[arg(long, value_name = "SIZE", num_args = 1.., default_values = ["1 KiB", "1 MiB"])]
    size: Vec<ByteCount>,
}

/// Moments of a push, in their order: the command's first line, the plan, the first and the last copy, the last line, the
/// command's end.
const MOMENTS: [&str; 6] = [
    "start to job committed (`submitted`)",
    "to all targets ready and the plan sent (`planned`)",
    "to the first copy published",
    "to the last copy published",
    "to the job's end (`finished`)",
    "to the command's exit",
];

fn moments(pushed: &Pushed) -> [f64; 6] {
    let first = |wanted: &dyn Fn(&stage_lab::cluster::Event) -> bool| {
        let event = pushed.events.iter().find(|event| wanted(event));
        event.map_or(f64::NAN, |event| event.at.as_secs_f64() * 1e3)
    };
    [
        first(&|event| event.kind() == "submitted"),
        first(&|event| event.kind() == "planned"),
        first(&|event| event.kind() == "node" && event.value["state"] == "published"),
        pushed
            .last_published()
            .map_or(f64::NAN, |at| at.as_secs_f64() * 1e3),
        first(&|event| event.kind() == "finished"),
        pushed.wall.as_secs_f64() * 1e3,
    ]
}

/// One push.
struct Run {
    /// Milliseconds from its start.
    at: [f64; 6],
    /// Milliseconds of all processes.
    cpu: f64,
    /// Through the source's interface, both ways, for each target: what coordinator and source say and hear.
    packets: f64,
    shape: String,
}

/// Measures, prints the tables, keeps the figures.
///
/// # Errors
/// For people: what was asked for cannot be done.
pub(crate) fn run(small: &Small) -> Result<(), String> {
    let stage = binary(&small.common.stage)?;
    let facts = Facts::now().of(&stage);
    let tables = tables(small, &stage).map_err(|why| why.to_string())?;
    small.common.keep("small", &facts, &tables)
}

fn tables(small: &Small, stage: &std::path::Path) -> Result<[Table; 2], LabError> {
    let text = one_switch(small.targets, "10 Gbit/s");
    let topology = Topology::parse("small", &text).expect("the bench's own topologies are right");
    let options = Options {
        unshaped: true,
        ..Options::default()
    };
    let lab = Lab::with(&topology, &options)?;
    let security = small.common.security();
    let group = Group::new()?;
    let setup = Setup {
        group: Some(&group),
        ..Setup::new(stage, &text, security)
    };
    let cluster = Cluster::up(&lab, &setup)?;
    let source = "n0".parse().expect("a name");
    let edge = topology
        .interface_edge(&source, 0)
        .expect("the source has an interface");
    let packets = || -> Result<u64, LabError> {
        Ok(lab.counters(edge)?.packets + lab.counters(edge.reverse())?.packets)
    };
    let to = format!("n[1-{}]", small.targets);
    let mut pushes: Vec<Vec<Run>> = small.size.iter().map(|_| Vec::new()).collect();
    let (mut version, mut nodes) = (Vec::new(), Vec::new());
    // The first one warms up what is in no cache yet.
    for round in 0..=small.rounds {
        for (at, size) in small.size.iter().enumerate() {
            let file = random_file(&lab, "n0", &format!("payload-{round}-{at}"), *size)?;
            let (cpu, before) = (group.cpu()?, packets()?);
            let pushed = good(cluster.push(&[word(&file), "--to", &to], PUSH)?)?;
            let run = Run {
                at: moments(&pushed),
                cpu: ms(group.cpu()?.saturating_sub(cpu)),
                packets: (packets()? - before) as f64 / f64::from(small.targets),
                shape: pushed.end()["plan"]["shape"].as_str().unwrap_or("?").to_owned(),
            };
            remove(&copies(&pushed));
            remove(&[file]);
            if round > 0 {
                pushes[at].push(run);
            }
        }
        let started = Instant::now();
        let mut bare = lab.command("n0", stage)?;
        drop(bare.arg("--version").output());
        version.push(ms(started.elapsed()));
        nodes.push(ms(cluster.run(&["nodes"], PUSH)?.wall));
    }

    let words = in_words(security);
    let title = format!(
        "small files to {} agents on one machine, {words}: milliseconds",
        small.targets
    );
    let columns = [
        "what",
        "to the command's exit",
        "to the last copy",
        "processor time of all",
        "packets at the source per target",
        "shape",
    ];
    let mut times = Table::new(title, &columns);
    let mut spent = Table::new("where the time goes, milliseconds", &["step", "size", "takes"]);
    for (size, runs) in small.size.iter().zip(&pushes) {
        let all = |of: &dyn Fn(&Run) -> f64| spread(runs.iter().map(of), 1);
        let figures = runs.iter().map(|run| run.at.map(rounded)).collect::<Vec<_>>();
        times.add(
            vec![
                size.to_string(),
                all(&|run| run.at[5]),
                all(&|run| run.at[3]),
                all(&|run| run.cpu),
                all(&|run| run.packets),
                runs.first().map_or("?", |run| &run.shape).to_owned(),
            ],
            json!({
                "moments": MOMENTS,
                "milliseconds": figures,
                "cpu_milliseconds": runs.iter().map(|run| run.cpu).collect::<Vec<_>>(),
            }),
        );
        for (step, name) in MOMENTS.iter().enumerate() {
            let takes = all(&|run| run.at[step] - if step == 0 { 0.0 } else { run.at[step - 1] });
            spent.add(vec![(*name).to_owned(), size.to_string(), takes], Value::Null);
        }
    }
    for (name, times_of) in [
        ("`stage --version`: a process starts in the namespace", version),
        ("`stage nodes`: and connects, and has one answer", nodes),
    ] {
        let mut cells = vec![name.to_owned(), spread(times_of.iter().copied(), 1)];
        cells.resize(columns.len(), "–".to_owned());
        times.add(cells, json!(times_of));
    }
    Ok([times, spent])
}

fn ms(time: Duration) -> f64 {
    rounded(time.as_secs_f64() * 1e3)
}
