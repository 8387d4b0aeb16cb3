//! `stage-lab long`: one target at the other end of a long fat path, with streams by hand and as stage chooses them.
//!
//! FDT's table (100 ms, 1 Gbit/s, streams 4 to 12), with no loss and with a little; the 15 ms path with 1 to 16 streams, and
//! with the windows of both hosts limited.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stage_core::topology::Topology;
use stage_core::units::ByteCount;
use stage_lab::cluster::{Cluster, Setup};
use stage_lab::{Lab, LabError, Options};

use crate::bench::{
    Common, Facts, PUSH, Spread, Table, binary, copies, good, megabits, one_path, random_file, remove,
    rounded, spread, word,
};

/// What Gigabit Ethernet carries of TCP's payload with timestamps: 1448 bytes of 1538.
const GOODPUT: f64 = 1448.0 / 1538.0 * 1000.0;

/// A TCP connection has found its rate by then.
const START: Duration = Duration::from_secs(3);

/// How often the receiver's interface is looked at.
const SAMPLE: Duration = Duration::from_millis(50);

/// What can be asked for.
#[derive(Debug, clap::Args)]
pub(crate) struct Long {
    #[command(flatten)]
    common: Common,
    /// Only these paths: 100ms, 100ms-loss, 15ms, windows.
    #[arg(long, value_name = "NAME", num_args = 1..)]
    only: Vec<String>,
    /// Only these numbers of streams; 0 is stage's own choice.
    #[arg(long, value_name = "N", num_args = 1..)]
    streams: Vec<u16>,
    /// How often each push is done, all others between.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// The file's size; a quarter of it where windows are limited.
    #[arg(long, default_value = "1 GiB")]
    size: ByteCount,
    /// What waits at most before the path [default: as much as is under way on it].
    #[arg(long, value_name = "SIZE")]
    queue: Option<ByteCount>,
    /// Let iperf3 send as much over as many connections before each push.
    #[arg(long)]
    iperf: bool,
}

/// A path.
struct Case {
    name: &'static str,
    title: &'static str,
    rtt: &'static str,
    loss: f64,
    streams: &'static [u16],
    /// The most that both hosts' windows may be; 0: as the kernel has it.
    windows: &'static [u64],
}

const CASES: [Case; 4] = [
    Case {
        name: "100ms",
        title: "100 ms, 1 Gbit/s, no loss",
        rtt: "100 ms",
        loss: 0.0,
        streams: &[4, 6, 8, 10, 12, 0],
        windows: &[0],
    },
    Case {
        name: "100ms-loss",
        title: "100 ms, 1 Gbit/s, 0.01 % loss",
        rtt: "100 ms",
        loss: 0.0001,
        streams: &[4, 6, 8, 10, 12, 0],
        windows: &[0],
    },
    Case {
        name: "15ms",
        title: "15 ms, 1 Gbit/s, no loss",
        rtt: "15 ms",
        loss: 0.0,
        streams: &[1, 2, 4, 8, 16, 0],
        windows: &[0],
    },
    Case {
        name: "windows",
        title: "15 ms, 1 Gbit/s, windows limited",
        rtt: "15 ms",
        loss: 0.0,
        streams: &[1, 4, 16, 0],
        windows: &[256 << 10, 1 << 20, 4 << 20, 16 << 20],
    },
];

const COLUMNS: [&str; 9] = [
    "window",
    "streams asked",
    "streams used",
    "Mbit/s after the first 3 s",
    "of 941 Mbit/s",
    "Mbit/s over all, to published",
    "seconds",
    "forecast s",
    "segments lost, dropped",
];

/// Measures, prints the tables, keeps the figures.
///
/// # Errors
/// For people: what was asked for cannot be done.
pub(crate) fn run(long: &Long) -> Result<(), String> {
    if let Some(name) = long
        .only
        .iter()
        .find(|name| CASES.iter().all(|case| case.name != *name))
    {
        return Err(format!("there is no path {name:?}"));
    }
    let stage = binary(&long.common.stage)?;
    let facts = Facts::now().of(&stage);
    let mut tables = Vec::new();
    for case in CASES {
        if long.only.is_empty() || long.only.iter().any(|name| name == case.name) {
            tables.push(table(long, &stage, &case).map_err(|why| why.to_string())?);
        }
    }
    long.common.keep("long", &facts, &tables)
}

/// One push.
struct Run {
    steady: Option<f64>,
    overall: f64,
    seconds: f64,
    used: u64,
    forecast: f64,
    lost: u64,
    dropped: u64,
    iperf: Option<f64>,
    finished: Value,
}

fn table(long: &Long, stage: &std::path::Path, case: &Case) -> Result<Table, LabError> {
    let mut table = Table::new(case.title, &COLUMNS);
    let text = one_path("1 Gbit/s", case.rtt, case.loss, "");
    let parsed = Topology::parse(case.name, &text).expect("the bench's own topologies are right");
    let options = Options {
        queue: long.queue,
        ..Options::default()
    };
    let size = if case.windows == [0] {
        long.size
    } else {
        ByteCount(long.size.0 / 4)
    };
    let streams: Vec<u16> = match &long.streams[..] {
        [] => case.streams.to_vec(),
        own => own.to_vec(),
    };
    for window in case.windows {
        let lab = Lab::with(&parsed, &options)?;
        if *window > 0 {
            for node in ["near", "far"] {
                lab.windows(node, ByteCount(*window))?;
            }
        }
        let cluster = Cluster::up(&lab, &Setup::new(stage, &text, long.common.security()))?;
        let file = random_file(&lab, "near", "payload", size)?;
        let mut runs: Vec<Vec<Run>> = streams.iter().map(|_| Vec::new()).collect();
        for _ in 0..long.rounds {
            for (count, runs) in streams.iter().zip(&mut runs) {
                let iperf = (long.iperf && *count > 0)
                    .then(|| lab.iperf_bytes("near", "far", size, u32::from(*count)));
                let mut run = push(&lab, &cluster, word(&file), size, *count)?;
                run.iperf = iperf
                    .transpose()?
                    .map(|carried| carried.rate.bits_per_second() / 1e6);
                runs.push(run);
            }
        }
        for (count, runs) in streams.iter().zip(&runs) {
            tell(&mut table, *window, *count, runs);
        }
    }
    Ok(table)
}

fn push(
    lab: &Lab,
    cluster: &Cluster<'_>,
    file: &str,
    size: ByteCount,
    streams: u16,
) -> Result<Run, LabError> {
    let streams = if streams == 0 {
        "auto".to_owned()
    } else {
        streams.to_string()
    };
    let received = || cluster.link_bytes("far").map(|bytes| bytes.received.0);
    let (before, started) = (received()?, Instant::now());
    let segments = lab.segments();
    let running = cluster.start_command(&["push", file, "--to", "far", "--streams", &streams])?;
    let mut samples = Vec::new();
    while !running.has_ended() && started.elapsed() < PUSH {
        samples.push((started.elapsed(), received()? - before));
        std::thread::sleep(SAMPLE);
    }
    let pushed = good(running.finish(PUSH)?)?;
    remove(&copies(&pushed));
    let seconds = pushed.last_published().unwrap_or(pushed.wall).as_secs_f64();
    let (was, is) = (segments.first().copied().unwrap_or_default(), lab.segments());
    let is = is.first().copied().unwrap_or_default();
    Ok(Run {
        steady: steady(&samples, size.0).map(|rate| rate * 8.0 / 1e6),
        overall: megabits(size.0 as f64, seconds),
        seconds,
        used: pushed
            .nodes()
            .first()
            .and_then(|node| node["streams"].as_u64())
            .unwrap_or(0),
        forecast: pushed.end()["plan"]["predicted_seconds"]
            .as_f64()
            .unwrap_or(f64::NAN),
        lost: is.lost - was.lost,
        dropped: is.dropped - was.dropped,
        iperf: None,
        finished: pushed.end().clone(),
    })
}

/// Payload a second from 3 s after the first of it until the last came. What the interface counts has headers, of which
/// super-packets have few: its share counts. `None`: it did not take so long.
fn steady(samples: &[(Duration, u64)], size: u64) -> Option<f64> {
    let whole = samples.last()?.1;
    // More than control traffic; less than a chunk.
    let sign = 256 << 10;
    let begun = samples.iter().find(|(_, bytes)| *bytes >= sign)?.0;
    let from = samples.iter().find(|(at, _)| *at >= begun + START)?;
    let to = samples.iter().find(|(_, bytes)| *bytes + sign >= whole)?;
    let seconds = to.0.checked_sub(from.0)?.as_secs_f64();
    (seconds >= 1.0).then(|| (to.1 - from.1) as f64 * size as f64 / whole as f64 / seconds)
}

fn tell(table: &mut Table, window: u64, streams: u16, runs: &[Run]) {
    let all = |of: &dyn Fn(&Run) -> f64, digits| spread(runs.iter().map(of), digits);
    let steady = || runs.iter().filter_map(|run| run.steady);
    let share = Spread::of(steady()).map(|spread| format!("{:.3}", spread.median / GOODPUT));
    let cells = vec![
        if window == 0 {
            "the kernel's".to_owned()
        } else {
            ByteCount(window).to_string()
        },
        if streams == 0 {
            "auto".to_owned()
        } else {
            streams.to_string()
        },
        all(&|run| run.used as f64, 0),
        spread(steady(), 0),
        share.unwrap_or_else(|| "–".to_owned()),
        all(&|run| run.overall, 0),
        all(&|run| run.seconds, 2),
        all(&|run| run.forecast, 2),
        format!(
            "{}, {}",
            all(&|run| run.lost as f64, 0),
            all(&|run| run.dropped as f64, 0)
        ),
    ];
    let figures = runs.iter().map(|run| {
        json!({
            "steady_megabits_per_second": run.steady.map(rounded),
            "seconds": rounded(run.seconds),
            "streams": run.used,
            "forecast_seconds": run.forecast,
            "segments_lost": run.lost,
            "segments_dropped": run.dropped,
            "iperf_megabits_per_second": run.iperf.map(rounded),
            "finished": run.finished,
        })
    });
    table.add(cells, figures.collect());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_steady_part_begins_after_the_start_and_ends_with_the_last_byte() {
        let ms = Duration::from_millis;
        // 100 bytes a millisecond from 1000 ms on, one byte in ten a header, nothing new after 7000 ms.
        let samples: Vec<_> = (0..160)
            .map(|at| {
                (
                    ms(at * 50),
                    (at * 50).clamp(1000, 7000).saturating_sub(1000) * 100_000,
                )
            })
            .collect();
        let rate = steady(&samples, 540_000_000).unwrap();
        assert!((rate / 90_000_000.0 - 1.0).abs() < 0.02, "{rate}");
        assert_eq!(steady(&samples[..90], 1), None, "three seconds and a half");
        assert_eq!(steady(&[], 1), None);
    }

    #[test]
    fn the_paths_are_topologies() {
        for case in CASES {
            let parsed = Topology::parse(case.name, &one_path("1 Gbit/s", case.rtt, case.loss, "")).unwrap();
            let [near, far] = ["near", "far"].map(|name| name.parse().unwrap());
            let route = parsed.route(&near, &far).unwrap();
            assert!(
                (route.loss - case.loss).abs() < 1e-9 && route.rtt.is_some(),
                "{}",
                case.name
            );
        }
    }
}
