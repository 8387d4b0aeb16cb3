//! `stage-lab shapes`: star, tree and chain side by side, small and large, with what was forecast.

use serde_json::json;
use stage_core::topology::Topology;
use stage_core::units::ByteCount;
use stage_lab::cluster::{Cluster, Pushed, Setup};
use stage_lab::{Lab, LabError};

use crate::bench::{
    Common, Facts, PUSH, Spread, Table, binary, copies, good, in_words, one_switch, random_file, remove,
    rounded, spread, word,
};

/// What can be asked for.
#[derive(Debug, clap::Args)]
pub(crate) struct Shapes {
    #[command(flatten)]
    common: Common,
    /// How many targets.
    #[arg(long, default_value_t = 8)]
    targets: u32,
    /// The rate of each node's interface.
    #[arg(long, default_value = "500 Mbit/s")]
    rate: String,
    /// The sizes.
    #[arg(long, value_name = "SIZE", num_args = 1.., default_values = ["1 MiB", "512 MiB"])]
    size: Vec<ByteCount>,
    /// How often each push is done, in turns.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
}

const SHAPES: [&str; 4] = ["star", "tree:2", "chain", "auto"];

/// Measures, prints the tables, keeps the figures.
///
/// # Errors
/// For people: what was asked for cannot be done.
pub(crate) fn run(shapes: &Shapes) -> Result<(), String> {
    let stage = binary(&shapes.common.stage)?;
    let facts = Facts::now().of(&stage);
    let text = one_switch(shapes.targets, &shapes.rate);
    let topology =
        Topology::parse("shapes", &text).map_err(|errors| format!("--rate: {}", errors[0].message))?;
    let tables = tables(shapes, &stage, &text, &topology).map_err(|why| why.to_string())?;
    shapes.common.keep("shapes", &facts, &tables)
}

fn tables(
    shapes: &Shapes,
    stage: &std::path::Path,
    text: &str,
    topology: &Topology,
) -> Result<Vec<Table>, LabError> {
    let lab = Lab::up(topology)?;
    let security = shapes.common.security();
    let cluster = Cluster::up(&lab, &Setup::new(stage, text, security))?;
    let to = format!("n[1-{}]", shapes.targets);
    let mut tables = Vec::new();
    for size in &shapes.size {
        let mut runs: Vec<Vec<Pushed>> = SHAPES.iter().map(|_| Vec::new()).collect();
        for round in 0..shapes.rounds {
            for (shape, runs) in SHAPES.iter().zip(&mut runs) {
                let file = random_file(&lab, "n0", &format!("payload-{round}-{shape}"), *size)?;
                let pushed = cluster.push(&[word(&file), "--to", &to, "--shape", shape], PUSH)?;
                let pushed = good(pushed)?;
                remove(&copies(&pushed));
                remove(&[file]);
                runs.push(pushed);
            }
        }
        let title = format!(
            "{size} to {} targets at {}, {}",
            shapes.targets,
            shapes.rate,
            in_words(security)
        );
        let columns = [
            "shape",
            "s to the last copy",
            "forecast s",
            "over the forecast",
            "source sent, of the size",
        ];
        let mut table = Table::new(title, &columns);
        for (shape, runs) in SHAPES.iter().zip(&runs) {
            tell(&mut table, shape, *size, runs);
        }
        tables.push(table);
    }
    Ok(tables)
}

fn tell(table: &mut Table, shape: &str, size: ByteCount, runs: &[Pushed]) {
    let last = |pushed: &Pushed| pushed.last_published().unwrap_or(pushed.wall).as_secs_f64();
    let forecast = |pushed: &Pushed| {
        pushed.end()["plan"]["predicted_seconds"]
            .as_f64()
            .unwrap_or(f64::NAN)
    };
    let sent = |pushed: &Pushed| pushed.figure("source_bytes_sent").unwrap_or(f64::NAN) / size.0 as f64;
    let medians = (
        Spread::of(runs.iter().map(last)),
        Spread::of(runs.iter().map(forecast)),
    );
    let over = match medians {
        (Some(seen), Some(said)) => format!("{:.2}", seen.median / said.median),
        _ => "–".to_owned(),
    };
    let chosen = match (shape, runs.first()) {
        ("auto", Some(pushed)) => format!("auto: {}", pushed.end()["plan"]["shape"].as_str().unwrap_or("?")),
        _ => shape.to_owned(),
    };
    let cells = vec![
        chosen,
        spread(runs.iter().map(last), 3),
        spread(runs.iter().map(forecast), 3),
        over,
        spread(runs.iter().map(sent), 2),
    ];
    let figures = runs.iter().map(|pushed| {
        json!({ "seconds": rounded(last(pushed)), "command_seconds": rounded(pushed.wall.as_secs_f64()), "finished": pushed.end() })
    });
    table.add(cells, figures.collect());
}
