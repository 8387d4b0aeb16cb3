//! `stage-lab disk`: a target whose disk is slower than its link, or as fast, in smooth and in rough pieces. Who reads the
//! network while the disk writes needs as long as the slower of both; who takes turns needs as long as both together.

use serde_json::json;
use stage_core::topology::Topology;
use stage_core::units::{ByteCount, Rate};
use stage_lab::cluster::{Cluster, Setup};
use stage_lab::{Lab, LabError, Speed};

use crate::bench::{
    Common, Facts, PUSH, Spread, Table, binary, copies, good, one_switch, random_file, remove, rounded,
    spread, word,
};

/// What can be asked for.
#[derive(Debug, clap::Args)]
pub(crate) struct Disk {
    #[command(flatten)]
    common: Common,
    /// Seconds that a push takes if network and disk work at the same time; its file is as large.
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// How often each push is done.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
}

/// A link, a disk, its cache, and how much of that must be free until it takes more.
const CASES: [(&str, &str, &str, &str); 6] = [
    ("1 Gbit/s", "60 MB/s", "4 MiB", "0 B"),
    ("1 Gbit/s", "60 MB/s", "16 MiB", "16 MiB"),
    ("1 Gbit/s", "110 MB/s", "4 MiB", "0 B"),
    ("1 Gbit/s", "110 MB/s", "16 MiB", "16 MiB"),
    // nettee's: 11.7 and 17 MB/s alone, 7.4 together.
    ("98 Mbit/s", "17 MB/s", "4 MiB", "0 B"),
    ("98 Mbit/s", "17 MB/s", "4 MiB", "4 MiB"),
];

const COLUMNS: [&str; 8] = [
    "link",
    "disk",
    "its cache",
    "free until it goes on",
    "MB/s to published",
    "min(disk, link) MB/s",
    "of it",
    "taking turns would give MB/s",
];

/// Measures, prints the table, keeps the figures.
///
/// # Errors
/// For people: what was asked for cannot be done.
pub(crate) fn run(disk: &Disk) -> Result<(), String> {
    let stage = binary(&disk.common.stage)?;
    let facts = Facts::now().of(&stage);
    let mut table = Table::new("a target's disk beside its link", &COLUMNS);
    for case in CASES {
        measure(disk, &stage, &mut table, case).map_err(|why| why.to_string())?;
    }
    disk.common.keep("disk", &facts, &[table])
}

fn measure(
    disk: &Disk,
    stage: &std::path::Path,
    table: &mut Table,
    (link, rate, cache, burst): (&str, &str, &str, &str),
) -> Result<(), LabError> {
    let text = one_switch(1, link);
    let topology = Topology::parse("disk", &text).expect("the bench's own topologies are right");
    let write: Rate = rate.parse().expect("the bench's own rates are right");
    let speed = Speed {
        write,
        read: Rate::UNLIMITED,
        cache: cache.parse().expect("the bench's own sizes are right"),
        burst: burst.parse().expect("the bench's own sizes are right"),
    };
    let lab = Lab::up(&topology)?;
    let setup = Setup {
        slow_roots: &[("n1", speed)],
        ..Setup::new(stage, &text, disk.common.security())
    };
    let cluster = Cluster::up(&lab, &setup)?;
    let goodput = lab.iperf("n0", "n1")?;
    let least = write.min(goodput).bytes_per_second();
    let size = ByteCount((least * disk.seconds) as u64);
    let turns = 1.0 / (1.0 / write.bytes_per_second() + 1.0 / goodput.bytes_per_second());
    let mut seen = Vec::new();
    for _ in 0..disk.rounds {
        let file = random_file(&lab, "n0", "payload", size)?;
        let pushed = good(cluster.push(&[word(&file), "--to", "n1"], PUSH)?)?;
        remove(&copies(&pushed));
        seen.push((
            pushed.last_published().unwrap_or(pushed.wall).as_secs_f64(),
            pushed,
        ));
    }
    let rates = || seen.iter().map(|(seconds, _)| size.0 as f64 / seconds / 1e6);
    let share = Spread::of(rates()).map_or(f64::NAN, |rate| rate.median * 1e6 / least);
    let cells = vec![
        link.to_owned(),
        rate.to_owned(),
        cache.to_owned(),
        burst.to_owned(),
        spread(rates(), 1),
        format!("{:.1}", least / 1e6),
        format!("{share:.3}"),
        format!("{:.1}", turns / 1e6),
    ];
    let figures = seen.iter().map(
        |(seconds, pushed)| json!({ "bytes": size, "seconds": rounded(*seconds), "finished": pushed.end() }),
    );
    table.add(cells, figures.collect());
    Ok(())
}
