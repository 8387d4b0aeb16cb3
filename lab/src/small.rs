//! `stage-lab small`: a small file to many agents on one machine. What counts is the control plane: processes, handshakes,
//! messages and what the store and the publish make durable.
//!
//! Where the time goes is read from the command's events: each row of the second table is what passed between two of them.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stage_core::topology::Topology;
use stage_core::units::ByteCount;
use stage_lab::cluster::{Cluster, Pushed, Setup};
use stage_lab::{Lab, LabError, Options};

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
    let cluster = Cluster::up(&lab, &Setup::new(stage, &text, security))?;
    let to = format!("n[1-{}]", small.targets);
    let mut pushes: Vec<Vec<Pushed>> = small.size.iter().map(|_| Vec::new()).collect();
    let (mut version, mut nodes) = (Vec::new(), Vec::new());
    // The first one warms up what is in no cache yet.
    for round in 0..=small.rounds {
        for (at, size) in small.size.iter().enumerate() {
            let file = random_file(&lab, "n0", &format!("payload-{round}-{at}"), *size)?;
            let pushed = good(cluster.push(&[word(&file), "--to", &to], PUSH)?)?;
            remove(&copies(&pushed));
            remove(&[file]);
            if round > 0 {
                pushes[at].push(pushed);
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
    let mut times = Table::new(
        title,
        &["what", "to the command's exit", "to the last copy", "shape"],
    );
    let mut spent = Table::new("where the time goes, milliseconds", &["step", "size", "takes"]);
    for (size, pushes) in small.size.iter().zip(&pushes) {
        let all: Vec<[f64; 6]> = pushes.iter().map(moments).collect();
        let shape = pushes
            .first()
            .map_or(Value::Null, |pushed| pushed.end()["plan"]["shape"].clone());
        let figures = all.iter().map(|at| at.map(rounded)).collect::<Vec<_>>();
        times.add(
            vec![
                size.to_string(),
                spread(all.iter().map(|at| at[5]), 1),
                spread(all.iter().map(|at| at[3]), 1),
                shape.as_str().unwrap_or("?").to_owned(),
            ],
            json!({ "moments": MOMENTS, "milliseconds": figures }),
        );
        for (step, name) in MOMENTS.iter().enumerate() {
            let takes = all
                .iter()
                .map(|at| at[step] - if step == 0 { 0.0 } else { at[step - 1] });
            spent.add(
                vec![(*name).to_owned(), size.to_string(), spread(takes, 1)],
                Value::Null,
            );
        }
    }
    for (name, times_of) in [
        ("`stage --version`: a process starts in the namespace", version),
        ("`stage nodes`: and connects, and has one answer", nodes),
    ] {
        let cells = vec![
            name.to_owned(),
            spread(times_of.iter().copied(), 1),
            "–".to_owned(),
            "–".to_owned(),
        ];
        times.add(cells, json!(times_of));
    }
    Ok([times, spent])
}

fn ms(time: Duration) -> f64 {
    rounded(time.as_secs_f64() * 1e3)
}
