//! `stage-lab loops`: ways to move the bytes of a hop's data streams, beside each other.
//!
//! What a stream does in `transfer` (the sender writes hot chunks to its socket; the receiver reads a block, hashes it, writes it to
//! its place, and compares the digest of each chunk) is done here in each way over loopback, without TLS, pacing, journal and relay,
//! which cost the same in all of them.

mod ring;
mod runtime;
mod threads;
mod work;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::ValueEnum;
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;
use stage_core::chunk::CHUNK;
use stage_core::digest::ChunkDigest;
use stage_core::units::ByteCount;

use self::work::{Pair, Work};
use crate::bench::{Facts, Table, keep, megabits, rounded, spread};

/// What can be asked for.
#[derive(Debug, clap::Args)]
pub(crate) struct Loops {
    /// How many streams, one number after another.
    #[arg(long, value_name = "N", num_args = 1.., default_values_t = [1, 2, 4])]
    streams: Vec<u16>,
    /// How often each way has its turn.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// What is moved, in whole chunks.
    #[arg(long, default_value = "1 GiB")]
    size: ByteCount,
    /// Where the file is written; of several each gets a table.
    #[arg(long, value_name = "DIR", num_args = 1.., default_values = ["/dev/shm"])]
    dir: Vec<PathBuf>,
    /// Only these ways.
    #[arg(long, value_name = "WAY", num_args = 1..)]
    only: Vec<Way>,
    /// Where the figures go; the table beside them with the suffix md [default: lab/results/DATE-loops.json].
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A way to move bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Way {
    /// Blocking system calls, a thread for each end of a stream.
    Threads,
    /// tokio, with hash and disk on threads of their own.
    Tokio,
    /// tokio, with hash and disk on the runtime's threads.
    TokioInline,
    /// io_uring, a thread with a ring for each end of a stream.
    IoUring,
}

impl Way {
    fn title(self) -> &'static str {
        match self {
            Self::Threads => "blocking threads",
            Self::Tokio => "tokio, hash and disk in `spawn_blocking`",
            Self::TokioInline => "tokio, hash and disk on its own threads",
            Self::IoUring => "io_uring (tokio-uring), a ring per stream",
        }
    }

    /// # Errors
    /// It cannot be used on this machine.
    fn available(self) -> io::Result<()> {
        match self {
            Self::IoUring => ring::available(),
            _ => Ok(()),
        }
    }

    /// Moves all chunks; all threads have ended when this returns.
    fn carry(self, work: &Arc<Work>, pairs: Vec<Pair>) -> io::Result<()> {
        match self {
            Self::Threads => threads::run(work, pairs),
            Self::Tokio => runtime::aside(work, pairs),
            Self::TokioInline => runtime::inline(work, pairs),
            Self::IoUring => ring::run(work, pairs),
        }?;
        work.all_kept()
    }
}

/// What all threads came to.
fn joined(threads: Vec<ScopedJoinHandle<'_, io::Result<()>>>) -> io::Result<()> {
    // All are waited for: what one meets ends its peer as well.
    let ends: Vec<_> = threads.into_iter().map(ScopedJoinHandle::join).collect();
    ends.into_iter()
        .try_for_each(|end| end.unwrap_or_else(|_| Err(io::Error::other("a thread panicked"))))
}

/// Measures, prints the tables, keeps the figures.
///
/// # Errors
/// For people: what was asked for cannot be done.
pub(crate) fn run(loops: &Loops) -> Result<(), String> {
    if loops.size.0 < CHUNK || loops.streams.contains(&0) {
        return Err("it takes a stream and a chunk (1 MiB) at least".to_owned());
    }
    let mut facts = Facts::now();
    facts.machine["stage"] = concat!("stage-lab ", env!("CARGO_PKG_VERSION")).into();
    let mut tables = Vec::new();
    for dir in &loops.dir {
        tables.push(table(loops, dir).map_err(|why| format!("{}: {why}", dir.display()))?);
    }
    keep("loops", &facts, &tables, loops.json.as_deref())
}

/// One transfer.
struct Run {
    seconds: f64,
    /// User and system time of both ends.
    cpu: f64,
}

fn table(loops: &Loops, dir: &Path) -> io::Result<Table> {
    let chunks = loops.size.0 / CHUNK;
    let bytes = (chunks * CHUNK) as f64;
    let hot = work::hot();
    let asked = |way: &Way| loops.only.is_empty() || loops.only.contains(way);
    let ways: Vec<(Way, io::Result<()>)> = Way::value_variants()
        .iter()
        .filter(|way| asked(way))
        .map(|way| (*way, way.available()))
        .collect();
    let turns: Vec<(u16, Way)> = loops
        .streams
        .iter()
        .flat_map(|streams| ways.iter().map(move |(way, here)| (*streams, *way, here)))
        .filter_map(|(streams, way, here)| here.is_ok().then_some((streams, way)))
        .collect();
    let mut runs: Vec<Vec<Run>> = turns.iter().map(|_| Vec::new()).collect();
    // The first touch of a virtual machine's memory is dear, and nobody's fault.
    turn(Way::Threads, 1, &hot, chunks, dir)?;
    for _ in 0..loops.rounds {
        for ((streams, way), runs) in turns.iter().zip(&mut runs) {
            runs.push(turn(*way, *streams, &hot, chunks, dir)?);
        }
    }
    let size = ByteCount(chunks * CHUNK);
    let mut table = Table::new(
        format!("{size} over loopback into {}, each chunk hashed", dir.display()),
        &["streams", "way", "s", "Gbit/s", "CPU s per GB, both ends"],
    );
    for ((streams, way), runs) in turns.iter().zip(&runs) {
        let all = |of: &dyn Fn(&Run) -> f64, digits| spread(runs.iter().map(of), digits);
        let cells = vec![
            streams.to_string(),
            way.title().to_owned(),
            all(&|run| run.seconds, 3),
            all(&|run| megabits(bytes, run.seconds) / 1e3, 2),
            all(&|run| run.cpu / (bytes / 1e9), 3),
        ];
        let figures = runs.iter().map(|run| {
            json!({
                "seconds": rounded(run.seconds),
                "cpu_seconds": rounded(run.cpu),
            })
        });
        table.add(cells, figures.collect());
    }
    for (way, here) in &ways {
        if let Err(why) = here {
            let gone = || "–".to_owned();
            let title = format!("{}: not on this machine ({why})", way.title());
            table.add(vec![gone(), title, gone(), gone(), gone()], json!([]));
        }
    }
    Ok(table)
}

fn turn(way: Way, streams: u16, hot: &[(Bytes, ChunkDigest)], chunks: u64, dir: &Path) -> io::Result<Run> {
    let work = Arc::new(Work::new(hot, chunks, unnamed(dir)?));
    let pairs = work::connect(usize::from(streams))?;
    let (cpu, started) = (cpu(), Instant::now());
    way.carry(&work, pairs)?;
    work.file().sync_data()?;
    Ok(Run {
        seconds: started.elapsed().as_secs_f64(),
        cpu: self::cpu().saturating_sub(cpu).as_secs_f64(),
    })
}

/// A file that nobody else sees, and that is gone when it is closed.
fn unnamed(dir: &Path) -> io::Result<File> {
    let path = dir.join(format!(".stage-lab-loops-{}", std::process::id()));
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

/// User and system time of all threads of this process, ended ones and the kernel's workers for its rings among them.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Seek as _, Write as _};

    use super::*;

    fn here() -> Vec<Way> {
        let here = |way: &Way| match way.available() {
            Ok(()) => true,
            Err(why) => {
                drop(writeln!(io::stderr(), "left out: {}: {why}", way.title()));
                false
            }
        };
        Way::value_variants().iter().copied().filter(here).collect()
    }

    fn file() -> File {
        tempfile::tempfile().unwrap()
    }

    #[test]
    fn every_way_brings_the_same_bytes() {
        let hot = work::hot();
        let sent: Vec<u8> = hot[..3].iter().flat_map(|(bytes, _)| bytes.to_vec()).collect();
        for way in here() {
            // More streams than chunks: some have nothing to do.
            for streams in [1, 2, 4] {
                let work = Arc::new(Work::new(&hot, 3, file()));
                way.carry(&work, work::connect(streams).unwrap()).unwrap();
                let mut came = Vec::new();
                let mut file = work.file();
                file.rewind().unwrap();
                file.read_to_end(&mut came).unwrap();
                assert!(
                    blake3::hash(&came) == blake3::hash(&sent) && came.len() == sent.len(),
                    "{way:?} over {streams}"
                );
            }
        }
    }

    #[test]
    fn no_way_takes_what_is_damaged() {
        let mut hot = work::hot();
        hot[2].1 = hot[1].1;
        for way in here() {
            let work = Arc::new(Work::new(&hot, 8, file()));
            let why = way.carry(&work, work::connect(2).unwrap()).unwrap_err();
            assert!(work.all_kept().is_err(), "{way:?}: {why}");
        }
    }
}
