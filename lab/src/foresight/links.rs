//! `stage-lab bench`: what `stage bench` measures, held against ping, iperf3, a disk of set rate and fio.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use stage_core::topology::Topology;
use stage_lab::cluster::{Cluster, Pushed, Setup};
use stage_lab::{Lab, LabError, is_installed};

use super::{FABRIC, SICK, measure, off, parsed, percent, slow, yes};
use crate::bench::{Common, Facts, Spread, Table, binary, rounded, spread, word, word_of};

/// What is asked of round trips and rates, and of a disk of set rate.
const NEAR: f64 = 0.05;
/// What is asked of a real disk, which others use too.
const DISK: f64 = 0.25;
/// Nobody can ask more of round trips through a scheduler.
const JITTER: f64 = 0.0001;

/// What the slow disk writes and reads, MB/s.
const SET: [(&str, &str, f64); 2] = [("write", "40 MB/s", 40.0), ("read", "60 MB/s", 60.0)];

/// The node whose root is on the real disk.
const REAL: &str = "a2";

/// What can be asked for.
#[derive(Debug, clap::Args)]
pub(crate) struct Bench {
    #[command(flatten)]
    common: Common,
    /// Only these: links, disks.
    #[arg(long, value_name = "NAME", num_args = 1..)]
    only: Vec<String>,
    /// How much `stage bench` moves: quick, usual, full.
    #[arg(long, default_value = "usual")]
    depth: String,
    /// How often disks are measured, in turns with fio.
    #[arg(long, default_value_t = 6)]
    rounds: u32,
    /// A directory on a real disk, with 12 GiB free.
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    disk: PathBuf,
}

/// Measures, prints the tables, keeps the figures. Whether all was as asked.
///
/// # Errors
/// For people: what was asked for cannot be done.
pub(crate) fn run(bench: &Bench) -> Result<bool, String> {
    super::unknown(&bench.only, ["links", "disks"].into_iter())?;
    let stage = binary(&bench.common.stage)?;
    let facts = Facts::now().of(&stage);
    let own = bench.disk.join(format!("stage-lab-{}", std::process::id()));
    fs::create_dir(&own).map_err(|why| format!("{}: {why}", own.display()))?;
    let result = tables(bench, &stage, &own);
    // What is left there is known by its name.
    drop(fs::remove_dir_all(&own));
    let (tables, right) = result.map_err(|why| why.to_string())?;
    bench.common.keep("bench", &facts, &tables)?;
    Ok(right)
}

fn tables(bench: &Bench, stage: &Path, real: &Path) -> Result<(Vec<Table>, bool), LabError> {
    let topology = parsed("bench", FABRIC);
    let lab = Lab::up(&topology)?;
    let setup = Setup {
        slow_roots: &[(SICK, slow(SET[0].1, SET[1].1))],
        real_roots: &[(REAL, real)],
        ..Setup::new(stage, FABRIC, bench.common.security())
    };
    let cluster = Cluster::up(&lab, &setup)?;
    let depth = format!("--{}", bench.depth);
    let depth: &[&str] = if bench.depth == "usual" { &[] } else { &[&depth] };
    let mut tables = Vec::new();
    let mut right = true;
    if super::is_wanted(&bench.only, "links") {
        let all = measure(&cluster, depth)?;
        tables.push(whole(&all));
        right &= part("links", links(&lab, &topology, &all, &mut tables));
    }
    if super::is_wanted(&bench.only, "disks") {
        right &= part("disks", disks(bench, &cluster, depth, real, &mut tables));
    }
    Ok((tables, right))
}

/// Trouble with one part does not take away what the others have measured.
fn part(name: &str, right: Result<bool, LabError>) -> bool {
    right.unwrap_or_else(|why| {
        // Where standard error is gone too, the exit code is all that is left to say.
        drop(writeln!(io::stderr(), "{name}: {why}"));
        false
    })
}

/// One line for the whole call.
fn whole(all: &Pushed) -> Table {
    let mut table = Table::new(
        "stage bench as a whole",
        &["seconds", "measured", "skipped", "failed"],
    );
    let end = all.end();
    let count = |name: &str| end[name].to_string();
    let cells = vec![
        format!("{:.1}", all.wall.as_secs_f64()),
        count("measured"),
        count("skipped"),
        count("failed"),
    ];
    let lines: Vec<&Value> = all
        .events
        .iter()
        .filter(|event| event.kind() != "progress")
        .map(|event| &event.value)
        .collect();
    table.add(cells, json!(lines));
    table
}

fn median(times: &[Duration]) -> f64 {
    Spread::of(times.iter().map(|time| time.as_secs_f64() * 1e3)).map_or(f64::NAN, |times| times.median)
}

fn links(lab: &Lab, topology: &Topology, all: &Pushed, tables: &mut Vec<Table>) -> Result<bool, LabError> {
    let mut trips = Table::new(
        "round trips, beside ping",
        &[
            "between", "set ms", "ping ms", "bench ms", "off", "asked", "as asked",
        ],
    );
    let mut rates = Table::new(
        "rates, beside iperf3 with as many streams",
        &[
            "from",
            "to",
            "streams",
            "iperf3 Mbit/s",
            "bench Mbit/s",
            "off",
            "asked",
            "as asked",
        ],
    );
    let right = each_link(lab, topology, all, &mut trips, &mut rates);
    tables.extend([trips, rates]);
    right
}

fn each_link(
    lab: &Lab,
    topology: &Topology,
    all: &Pushed,
    trips: &mut Table,
    rates: &mut Table,
) -> Result<bool, LabError> {
    let mut right = true;
    let measured = all.events.iter().filter(|event| event.kind() == "link");
    for link in measured.map(|event| &event.value) {
        let (from, to) = (word_of(&link["node"]), word_of(&link["to"]));
        let name = |name: &str| name.parse().map_err(|_| LabError::UnknownNode(name.to_owned()));
        let set = topology
            .route(&name(from)?, &name(to)?)
            .and_then(|route| route.rtt)
            .map(|rtt| rtt.as_secs_f64() * 1e3);
        let ping = median(&lab.ping(from, to, 30)?);
        let seen = link["rtt_seconds"].as_f64().unwrap_or(f64::NAN) * 1e3;
        let is_near = |other: f64| off(seen, other).abs() <= NEAR || (seen - other).abs() <= JITTER * 1e3;
        let fits = is_near(ping) || set.is_some_and(is_near);
        right &= fits;
        trips.add(
            vec![
                format!("{from} and {to}"),
                set.map_or("–".to_owned(), |set| format!("{set}")),
                format!("{ping:.3}"),
                format!("{seen:.3}"),
                percent(off(seen, ping)),
                "of ping or of what is set: 5 % or 0.1 ms".to_owned(),
                yes(fits),
            ],
            json!({ "ping_ms": rounded(ping), "link": link }),
        );
        for (from, to, readings) in [(from, to, &link["forward"]), (to, from, &link["backward"])] {
            let readings = readings.as_array().map_or(&[][..], Vec::as_slice);
            let rate = |reading: &Value| reading["bytes_per_second"].as_f64().unwrap_or(0.0);
            let best = readings.iter().max_by(|a, b| rate(a).total_cmp(&rate(b)));
            let Some(best) = best else {
                right = false;
                rates.add(
                    [from, to, "–", "–", "–", "–", "5 %", "**no**"]
                        .map(str::to_owned)
                        .to_vec(),
                    link.clone(),
                );
                continue;
            };
            let streams = best["streams"]
                .as_u64()
                .and_then(|count| u32::try_from(count).ok());
            let streams = streams.unwrap_or(1);
            // A long path is not full at once, nor is it every moment: BBR leaves it empty for 200 ms of each ten seconds.
            let [start, time] = if ping > 50.0 { [4, 20] } else { [1, 2] }.map(Duration::from_secs);
            let iperf = lab.iperf_streams(from, to, streams, start, time)?;
            let (iperf, seen) = (iperf.bits_per_second() / 1e6, rate(best) * 8.0 / 1e6);
            let fits = off(seen, iperf).abs() <= NEAR;
            right &= fits;
            rates.add(
                vec![
                    from.to_owned(),
                    to.to_owned(),
                    streams.to_string(),
                    format!("{iperf:.1}"),
                    format!("{seen:.1}"),
                    percent(off(seen, iperf)),
                    "5 %".to_owned(),
                    yes(fits),
                ],
                json!({ "iperf_megabits_per_second": rounded(iperf), "readings": readings }),
            );
        }
    }
    Ok(right)
}

/// A disk of set rate, and the real one in turns with fio.
fn disks(
    bench: &Bench,
    cluster: &Cluster<'_>,
    depth: &[&str],
    real: &Path,
    tables: &mut Vec<Table>,
) -> Result<bool, LabError> {
    let mut sick = [Vec::new(), Vec::new()];
    let mut bare = [Vec::new(), Vec::new()];
    let mut other = [Vec::new(), Vec::new()];
    let tool = if is_installed("fio") {
        "fio"
    } else {
        "dd conv=fsync"
    };
    let read = |node: &str, into: &mut [Vec<f64>; 2]| -> Result<(), LabError> {
        let answer = measure(cluster, &[&["--nodes", node], depth].concat())?;
        let mut events = answer.events.iter();
        let found = events.find(|event| event.kind() == "node" && event.value["node"] == node);
        let disk = found.map_or(&Value::Null, |event| &event.value["disks"][0]);
        for (what, into) in ["write_bytes_per_second", "read_bytes_per_second"]
            .iter()
            .zip(into)
        {
            into.extend(disk[*what].as_f64().map(|rate| rate / 1e6));
        }
        Ok(())
    };
    for round in 0..bench.rounds {
        read(SICK, &mut sick)?;
        // A shared disk may be slower after much was written: each goes first as often as the other.
        for turn in [round, round + 1] {
            if turn % 2 == 0 {
                read(REAL, &mut bare)?;
            } else {
                for (rate, into) in written_and_read(real)?.into_iter().zip(&mut other) {
                    into.extend(rate);
                }
            }
        }
    }
    let mut table = Table::new(
        "disks",
        &[
            "disk",
            "direction",
            "set or seen by others MB/s",
            "bench MB/s",
            "off",
            "asked",
            "as asked",
        ],
    );
    let mut right = true;
    for (at, (direction, set, rate)) in SET.into_iter().enumerate() {
        let seen = Spread::of(sick[at].iter().copied()).map_or(f64::NAN, |seen| seen.median);
        let fits = off(seen, rate).abs() <= NEAR;
        right &= fits;
        table.add(
            vec![
                format!("{SICK}: FUSE at a set rate"),
                direction.to_owned(),
                set.to_owned(),
                spread(sick[at].iter().copied(), 1),
                percent(off(seen, rate)),
                "5 %".to_owned(),
                yes(fits),
            ],
            json!({ "bench_megabytes_per_second": sick[at] }),
        );
    }
    for (at, direction) in ["write", "read"].into_iter().enumerate() {
        let middle = |rates: &[f64]| Spread::of(rates.iter().copied()).map_or(f64::NAN, |rate| rate.median);
        let share = off(middle(&bare[at]), middle(&other[at]));
        // dd does not tell of reads.
        let is_told = !other[at].is_empty();
        let fits = share.abs() <= DISK;
        right &= fits || !is_told;
        table.add(
            vec![
                format!("{REAL}: the real one, beside {tool}"),
                direction.to_owned(),
                spread(other[at].iter().copied(), 0),
                spread(bare[at].iter().copied(), 0),
                percent(share),
                "25 %".to_owned(),
                if is_told { yes(fits) } else { String::new() },
            ],
            json!({ "bench_megabytes_per_second": bare[at], "others_megabytes_per_second": other[at] }),
        );
    }
    tables.push(table);
    Ok(right)
}

/// MB/s of another tool: written and durable, and read without the page cache; as much as stage moves, and in one go.
fn written_and_read(dir: &Path) -> Result<[Option<f64>; 2], LabError> {
    let file = dir.join("other");
    let result = if is_installed("fio") {
        fio(&file).map(|rates| rates.map(Some))
    } else {
        dd(&file).map(|write| [Some(write), None])
    };
    // It may not have been made.
    drop(fs::remove_file(&file));
    result
}

fn fio(file: &Path) -> Result<[f64; 2], LabError> {
    let mut fio = Command::new("fio");
    fio.args(["--bs=1M", "--size=2G", "--ioengine=psync", "--invalidate=1"]);
    fio.args(["--runtime=30", "--output-format=json"]);
    fio.arg(format!("--filename={}", word(file)));
    fio.args(["--name=write", "--rw=write", "--end_fsync=1"]);
    fio.args(["--name=read", "--stonewall", "--rw=read"]);
    let missing = |wanted: String| LabError::Answer { tool: "fio", wanted };
    let output = fio.output().map_err(|why| missing(why.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    // Warnings may stand before it.
    let json = text.find('{').map_or("", |at| &text[at..]);
    let answer: Value = serde_json::from_str(json).map_err(|why| missing(why.to_string()))?;
    let rate = |at: usize, direction: &str| {
        let job = &answer["jobs"][at];
        let figure = |name: &str| job[direction][name].as_f64();
        // Its own rate leaves out the sync in some releases: bytes over the job's whole time.
        let time = job["job_runtime"].as_f64().or_else(|| figure("runtime"));
        match (figure("io_bytes"), time) {
            (Some(bytes), Some(ms)) if ms > 0.0 => Ok(bytes / 1e3 / ms),
            _ => Err(missing(format!("jobs[{at}].{direction}"))),
        }
    };
    Ok([rate(0, "write")?, rate(1, "read")?])
}

fn dd(file: &Path) -> Result<f64, LabError> {
    let fault = |source: io::Error| LabError::Directory {
        path: file.to_owned(),
        source,
    };
    let started = std::time::Instant::now();
    let status = Command::new("dd")
        .args(["if=/dev/zero", "bs=1M", "count=512", "conv=fsync", "status=none"])
        .arg(format!("of={}", word(file)))
        .status()
        .map_err(fault)?;
    if !status.success() {
        return Err(fault(io::Error::other("dd failed")));
    }
    Ok(512.0 * f64::from(1 << 20) / 1e6 / started.elapsed().as_secs_f64())
}
