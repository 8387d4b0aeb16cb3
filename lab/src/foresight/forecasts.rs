//! `stage-lab forecasts`: what pushes were forecast to take, and what they took.

use std::path::Path;

use serde_json::json;
use stage_core::units::ByteCount;
use stage_lab::cluster::{Cluster, Pushed, Setup};
use stage_lab::{Lab, LabError};

use super::{FABRIC, Know, SICK, forecast, last, off, parsed, percent, shape, slow, streams_of, yes};
use crate::bench::{
    Common, Facts, PUSH, Spread, Table, binary, copies, good, random_file, remove, rounded, spread, word,
};

/// How far a push may be from its forecast: this share of it,
const SHARE: f64 = 0.15;
/// and so many seconds.
const SECONDS: f64 = 0.05;

/// What can be asked for.
#[derive(Debug, clap::Args)]
pub(crate) struct Forecasts {
    #[command(flatten)]
    common: Common,
    /// Only pushes with such a part in their name.
    #[arg(long, value_name = "NAME", num_args = 1..)]
    only: Vec<String>,
    /// How often each push is done, in turns.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// What stage knows before the first push.
    #[arg(long, value_enum, default_value = "usual")]
    know: Know,
    /// For a trial: this part of each size.
    #[arg(long, value_name = "N", default_value_t = 1, hide = true)]
    divide: u64,
}

/// A push: its name, size in MiB, targets, and other words.
type Case = (&'static str, u64, &'static str, &'static [&'static str]);

const HEALTHY: &str = "a[1-2],b1";
const LOCAL: &str = "a[1-2],b[1-2]";

const CASES: [Case; 16] = [
    ("one hop", 256, "a1", &[]),
    ("small, local", 1, HEALTHY, &[]),
    ("local, auto", 256, HEALTHY, &[]),
    ("local, chain", 256, HEALTHY, &["--shape", "chain"]),
    ("local, tree", 128, HEALTHY, &["--shape", "tree:2"]),
    ("local, star", 128, HEALTHY, &["--shape", "star"]),
    ("local with a sick disk, auto", 256, LOCAL, &[]),
    (
        "local with a sick disk, chain",
        128,
        "b2,b1,a[1-2]",
        &["--shape", "chain"],
    ),
    ("15 ms, 64 MiB", 64, "y1", &[]),
    ("15 ms", 256, "y1", &[]),
    ("100 ms, 64 MiB", 64, "z1", &[]),
    ("100 ms", 256, "z1", &[]),
    ("100 ms, one stream", 64, "z1", &["--streams", "1"]),
    ("both sites, chain", 128, "y1,z1", &["--shape", "chain"]),
    ("all, auto", 256, "all,!head", &[]),
    ("limited", 64, "a1,y1", &["--limit", "15 MB/s"]),
];

/// Measures, prints the table, keeps the figures. Whether all was as asked.
///
/// # Errors
/// For people: what was asked for cannot be done.
pub(crate) fn run(forecasts: &Forecasts) -> Result<bool, String> {
    super::unknown(&forecasts.only, CASES.iter().map(|case| case.0))?;
    let stage = binary(&forecasts.common.stage)?;
    let facts = Facts::now().of(&stage);
    let (table, right) = table(forecasts, &stage).map_err(|why| why.to_string())?;
    forecasts.common.keep("forecasts", &facts, &[table])?;
    Ok(right)
}

fn table(forecasts: &Forecasts, stage: &Path) -> Result<(Table, bool), LabError> {
    let lab = Lab::up(&parsed("forecasts", FABRIC))?;
    let setup = Setup {
        slow_roots: &[(SICK, slow("20 MB/s", "40 MB/s"))],
        ..Setup::new(stage, FABRIC, forecasts.common.security())
    };
    let cluster = Cluster::up(&lab, &setup)?;
    forecasts.know.learn(&cluster)?;
    let cases: Vec<&Case> = CASES
        .iter()
        .filter(|case| super::is_wanted(&forecasts.only, case.0))
        .collect();
    let mut runs: Vec<Vec<Pushed>> = cases.iter().map(|_| Vec::new()).collect();
    let mut trouble = None;
    'rounds: for _ in 0..forecasts.rounds {
        for (case, runs) in cases.iter().zip(&mut runs) {
            match push(&lab, &cluster, case, forecasts.divide) {
                Ok(pushed) => runs.push(pushed),
                // What was measured until now counts.
                Err(why) => {
                    trouble = Some(format!("{}: {why}", case.0));
                    break 'rounds;
                }
            }
        }
    }
    let mut table = Table::new(
        "forecast and actual",
        &[
            "push",
            "MiB",
            "targets",
            "shape",
            "streams",
            "forecast s",
            "actual s",
            "off",
            "asked",
            "as asked",
        ],
    );
    let mut right = true;
    for ((name, size, to, words), runs) in cases.into_iter().zip(&runs) {
        let middle =
            |of: fn(&Pushed) -> f64| Spread::of(runs.iter().map(of)).map_or(f64::NAN, |all| all.median);
        let (said, seen) = (middle(forecast), middle(last));
        let fits = (seen - said).abs() <= SHARE * said + SECONDS;
        right &= fits;
        let words = if words.is_empty() {
            String::new()
        } else {
            format!(" ({})", words.join(" "))
        };
        table.add(
            vec![
                format!("{name}{words}"),
                (size / forecasts.divide).to_string(),
                (*to).to_owned(),
                runs.first().map(shape).unwrap_or_default(),
                runs.first().map(streams_of).unwrap_or_default(),
                spread(runs.iter().map(forecast), 2),
                spread(runs.iter().map(last), 2),
                percent(off(seen, said)),
                "15 % and 50 ms".to_owned(),
                yes(fits),
            ],
            runs.iter()
                .map(|pushed| {
                    json!({
                        "forecast_seconds": forecast(pushed),
                        "seconds": rounded(last(pushed)),
                        "finished": pushed.end(),
                    })
                })
                .collect(),
        );
    }
    if let Some(trouble) = trouble {
        right = false;
        table.add(vec![trouble], json!({}));
    }
    Ok((table, right))
}

fn push(lab: &Lab, cluster: &Cluster<'_>, case: &Case, divide: u64) -> Result<Pushed, LabError> {
    let (_, mebibytes, to, words) = *case;
    let size = ByteCount((mebibytes << 20) / divide);
    let file = random_file(lab, "head", "payload", size)?;
    let pushed = good(cluster.push(&[&[word(&file), "--to", to], words].concat(), PUSH)?)?;
    remove(&copies(&pushed));
    Ok(pushed)
}
