//! `stage-lab auto`: the shape that stage chooses, beside the better of star and chain.

use std::path::Path;

use serde_json::json;
use stage_core::units::ByteCount;
use stage_lab::cluster::{Cluster, Pushed, Setup};
use stage_lab::{Lab, LabError};

use super::{forecast, last, parsed, shape, yes};
use crate::bench::{
    Common, Facts, PUSH, Spread, Table, binary, copies, good, one_switch, random_file, remove, rounded,
    spread, word,
};

/// `auto` may take this share longer than the better of both,
const SHARE: f64 = 0.05;
/// and so many seconds.
const SECONDS: f64 = 0.01;

/// A shape that took so many times the other's time once need not do it again.
const HOPELESS: f64 = 2.0;

/// What can be asked for.
#[derive(Debug, clap::Args)]
pub(crate) struct Auto {
    #[command(flatten)]
    common: Common,
    /// How many targets.
    #[arg(long, value_name = "N", num_args = 1.., default_values_t = [1, 2, 4, 8, 16])]
    targets: Vec<u32>,
    /// The sizes.
    #[arg(long, value_name = "SIZE", num_args = 1.., default_values = ["64 KiB", "1 MiB", "128 MiB"])]
    size: Vec<ByteCount>,
    /// The rate of each node's interface; half of it for more than 8.
    #[arg(long, default_value_t = 500)]
    megabits: u32,
    /// How often each push is done, in turns.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
}

const SHAPES: [&str; 3] = ["star", "chain", "auto"];

/// Measures, prints the table, keeps the figures. Whether all was as asked.
///
/// # Errors
/// For people: what was asked for cannot be done.
pub(crate) fn run(auto: &Auto) -> Result<bool, String> {
    let stage = binary(&auto.common.stage)?;
    let facts = Facts::now().of(&stage);
    let mut table = Table::new(
        "auto beside star and chain",
        &[
            "targets",
            "size",
            "star s",
            "chain s",
            "auto chose",
            "auto s",
            "its forecast s",
            "over the better of both, ms",
            "asked",
            "as asked",
        ],
    );
    let mut right = true;
    for targets in &auto.targets {
        right &= measure(auto, &stage, *targets, &mut table).map_err(|why| why.to_string())?;
        auto.common
            .keep_so_far("auto", &facts, std::slice::from_ref(&table))?;
    }
    auto.common.keep("auto", &facts, &[table])?;
    Ok(right)
}

fn middle(runs: &[Pushed]) -> f64 {
    Spread::of(runs.iter().map(last)).map_or(f64::INFINITY, |all| all.median)
}

fn measure(auto: &Auto, stage: &Path, targets: u32, table: &mut Table) -> Result<bool, LabError> {
    let megabits = if targets > 8 {
        auto.megabits / 2
    } else {
        auto.megabits
    };
    let text = one_switch(targets, &format!("{megabits} Mbit/s"));
    let lab = Lab::up(&parsed("auto", &text))?;
    let cluster = Cluster::up(&lab, &Setup::new(stage, &text, auto.common.security()))?;
    let to = format!("n[1-{targets}]");
    let mut right = true;
    for size in &auto.size {
        let mut runs: [Vec<Pushed>; 3] = Default::default();
        for _ in 0..auto.rounds {
            for (at, shape) in SHAPES.iter().enumerate() {
                let so_far = [middle(&runs[0]), middle(&runs[1])];
                let is_hopeless = at < 2 && !runs[at].is_empty() && so_far[at] > HOPELESS * so_far[1 - at];
                if is_hopeless {
                    continue;
                }
                let file = random_file(&lab, "n0", "payload", *size)?;
                let pushed = cluster.push(&[word(&file), "--to", &to, "--shape", shape], PUSH)?;
                let pushed = good(pushed)?;
                remove(&copies(&pushed));
                runs[at].push(pushed);
            }
        }
        let [star, chain, own] = &runs;
        let better = middle(star).min(middle(chain));
        let over = middle(own) - better;
        let fits = over <= SHARE * better + SECONDS;
        right &= fits;
        let figures = SHAPES.iter().zip(&runs).map(|(shape, runs)| {
            let runs = runs
                .iter()
                .map(|pushed| json!({ "seconds": rounded(last(pushed)), "plan": pushed.end()["plan"] }));
            json!({ "shape": shape, "runs": runs.collect::<Vec<_>>() })
        });
        table.add(
            vec![
                targets.to_string(),
                size.to_string(),
                spread(star.iter().map(last), 3),
                spread(chain.iter().map(last), 3),
                own.first().map(shape).unwrap_or_default(),
                spread(own.iter().map(last), 3),
                spread(own.iter().map(forecast), 3),
                format!("{:+.0}", over * 1e3),
                "5 % and 10 ms".to_owned(),
                yes(fits),
            ],
            figures.collect(),
        );
    }
    Ok(right)
}
