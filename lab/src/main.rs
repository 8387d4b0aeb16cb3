//! `stage-lab`: the lab by hand.
//!
//!     stage-lab up topology.toml -- bash
//!     stage-lab up topology.toml --on head -- ping -c 3 10.0.1.7
//!     stage-lab accept --stage target/release/stage

mod accept;
mod bench;
mod compare;
mod disk;
mod foresight;
mod long;
mod loops;
mod shapes;
mod small;

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use stage_core::topology::Topology;
use stage_core::units::{ByteCount, Rate};
use stage_lab::{Lab, SlowDisk, Speed};
use tokio::signal::unix::{SignalKind, signal};

/// Network namespaces and shaped links laid out from a topology.toml (needs root and iproute2).
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Lay out a topology, run a command, take all away again.
    ///
    /// The command finds in STAGE_LAB_PREFIX what the namespaces' names begin with:
    /// `ip netns exec ${STAGE_LAB_PREFIX}node.NAME …`; in STAGE_LAB_DIR the directory (in memory) that has one for each node.
    Up {
        /// The topology.
        file: PathBuf,
        /// Run the command on this node; without, outside of all namespaces.
        #[arg(long, value_name = "NODE")]
        on: Option<String>,
        /// The command.
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Measure what stage promises, on real daemons in labs of its own.
    ///
    /// Needs iperf3 as well, and some 16 GiB of memory. Ends with 1 if a figure is not as asked.
    Accept(accept::Accept),
    /// Measure stage beside the tools that it replaces, in the same labs, in turns.
    ///
    /// A tool that is not installed becomes a row that says so.
    Compare(compare::Compare),
    /// Measure pushes over long fat paths: streams by hand and by stage's own choice, with loss and without.
    Long(long::Long),
    /// Measure how long a small file takes to many nodes, and what that time is made of.
    Small(small::Small),
    /// Measure star, tree and chain, with their forecasts beside.
    Shapes(shapes::Shapes),
    /// Measure a target whose disk is slower than its link.
    Disk(disk::Disk),
    /// Measure ways to move a stream's bytes: blocking threads, tokio, io_uring.
    ///
    /// Over loopback, from memory into a file, every chunk hashed as it comes; without stage's daemons, labs and root. Some 2
    /// minutes. Build it with --release.
    Loops(loops::Loops),
    /// All of compare, long, small, shapes and disk, one after another, as docs/performance.md shows them.
    ///
    /// Takes some 80 minutes on an idle machine, and 14 GiB of memory.
    Measure {
        /// The binary that is measured.
        #[arg(long, default_value = "target/release/stage")]
        stage: PathBuf,
    },
    /// Hold what `stage bench` measures against ping, iperf3, a disk of set rate and fio.
    ///
    /// Two racks with narrow uplinks, a site behind 15 ms and one behind 100 ms. Some 7 minutes. Needs FUSE, ping and iperf3; without
    /// fio, dd stands in. Ends with 1 if a figure is not as asked, as the five after it do.
    Bench(foresight::links::Bench),
    /// Hold the stream count that stage chooses against a sweep of counts, over round trips, loss, windows and congestion controls.
    ///
    /// 16 cells in some 20 minutes, all 54 in some 70. Each cell is kept at once (in lab/results/streams.json unless --json
    /// names another file); a second call goes on with those that are missing.
    Streams(foresight::streams::Streams),
    /// Hold forecasts against what pushes take: shapes, sizes, sites, sick nodes, limits.
    ///
    /// 16 pushes, three times, in the fabric of `bench`: some 9 minutes.
    Forecasts(foresight::forecasts::Forecasts),
    /// Make ten bottlenecks on purpose and see whether the push or `stage bench` names them.
    ///
    /// Some 6 minutes, 8 with --both. Needs FUSE and control groups.
    Bottlenecks(foresight::bottlenecks::Bottlenecks),
    /// Hold the shape that stage chooses against the better of star and chain, for 1 to 16 targets.
    ///
    /// Some 8 minutes.
    Auto(foresight::auto::Auto),
    /// Plan for 64 to 10,000 nodes: how near the forecast comes to what no plan could beat, and how long planning takes.
    ///
    /// Less than a minute; no root, no lab. Build both programs with --release.
    Scale(foresight::scale::Scale),
    /// Make a directory slow, until Ctrl-C or SIGTERM.
    ///
    /// What lies in it is seen through a FUSE file system that reads and writes at a set rate.
    Slowdisk {
        /// The directory.
        dir: PathBuf,
        /// What it writes: "50 MB/s".
        #[arg(long, value_name = "RATE")]
        write: Rate,
        /// What it reads of what is not in the page cache [default: as it writes].
        #[arg(long, value_name = "RATE")]
        read: Option<Rate>,
        /// So much it takes at once; the rate empties it.
        #[arg(long, value_name = "SIZE", default_value = "4 MiB")]
        cache: ByteCount,
        /// A full cache takes nothing until so much of it is free.
        #[arg(long, value_name = "SIZE", default_value = "0 B")]
        burst: ByteCount,
    },
    /// Remove what labs of dead processes left behind.
    Sweep,
}

fn main() -> ExitCode {
    match run(Args::parse().command) {
        Ok(code) => code,
        Err(message) => {
            drop(writeln!(io::stderr(), "stage-lab: {message}"));
            ExitCode::FAILURE
        }
    }
}

fn run(what: What) -> Result<ExitCode, String> {
    match what {
        What::Up { file, on, command } => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime
                .map_err(|why| why.to_string())?
                .block_on(up(&file, on.as_deref(), &command))
        }
        What::Compare(compare) => compare::run(&compare).map(|()| ExitCode::SUCCESS),
        What::Long(long) => long::run(&long).map(|()| ExitCode::SUCCESS),
        What::Small(small) => small::run(&small).map(|()| ExitCode::SUCCESS),
        What::Shapes(shapes) => shapes::run(&shapes).map(|()| ExitCode::SUCCESS),
        What::Loops(loops) => loops::run(&loops).map(|()| ExitCode::SUCCESS),
        What::Disk(disk) => disk::run(&disk).map(|()| ExitCode::SUCCESS),
        What::Bench(bench) => foresight::links::run(&bench).map(exit),
        What::Streams(streams) => foresight::streams::run(&streams).map(exit),
        What::Forecasts(forecasts) => foresight::forecasts::run(&forecasts).map(exit),
        What::Bottlenecks(bottlenecks) => foresight::bottlenecks::run(&bottlenecks).map(exit),
        What::Auto(auto) => foresight::auto::run(&auto).map(exit),
        What::Scale(scale) => foresight::scale::run(&scale).map(exit),
        What::Measure { stage } => measure(&stage),
        What::Slowdisk {
            dir,
            write,
            read,
            cache,
            burst,
        } => {
            let read = read.unwrap_or(write);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let speed = Speed {
                write,
                read,
                cache,
                burst,
            };
            let wait = slow(&dir, speed);
            runtime.map_err(|why| why.to_string())?.block_on(wait)
        }
        What::Accept(accept) => accept::run(&accept).map(exit),
        What::Sweep => {
            for name in stage_lab::sweep() {
                drop(writeln!(io::stdout(), "removed {name}"));
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Whether all was as asked.
fn exit(right: bool) -> ExitCode {
    if right {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Each with its usual rounds and sizes; the others are made even if one cannot be.
fn measure(stage: &Path) -> Result<ExitCode, String> {
    let mut trouble = Vec::new();
    let calls: [&[&str]; 6] = [
        &["compare"],
        &["long"],
        &["small"],
        &["small", "--insecure"],
        &["shapes"],
        &["disk"],
    ];
    for call in calls {
        let words = [&["stage-lab"], call, &["--stage"]].concat();
        let words = words.iter().map(std::ffi::OsStr::new).chain([stage.as_os_str()]);
        if let Err(why) = run(Args::parse_from(words).command) {
            trouble.push(format!("{}: {why}", call.join(" ")));
        }
    }
    if trouble.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    Err(trouble.join("\n"))
}

async fn slow(dir: &Path, speed: Speed) -> Result<ExitCode, String> {
    let mut interrupt = signal(SignalKind::interrupt()).map_err(|why| why.to_string())?;
    let mut terminate = signal(SignalKind::terminate()).map_err(|why| why.to_string())?;
    let disk = SlowDisk::mount(dir, speed).map_err(|why| format!("{}: {why}", dir.display()))?;
    drop(writeln!(io::stdout(), "{} is slow", dir.display()));
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    drop(disk);
    Ok(ExitCode::SUCCESS)
}

async fn up(file: &Path, on: Option<&str>, command: &[String]) -> Result<ExitCode, String> {
    let text = std::fs::read_to_string(file).map_err(|why| format!("{}: {why}", file.display()))?;
    let topology = Topology::parse(&file.display().to_string(), &text).map_err(|errors| {
        errors
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join("\n")
    })?;
    // From here on a signal must not end this process before it has cleared up; Ctrl-C reaches the command as well.
    let mut interrupt = signal(SignalKind::interrupt()).map_err(|why| why.to_string())?;
    let mut terminate = signal(SignalKind::terminate()).map_err(|why| why.to_string())?;
    let lab = Lab::up(&topology).map_err(|why| why.to_string())?;
    let (program, words) = command.split_first().ok_or("no command")?;
    let mut command = match on {
        Some(node) => lab.command(node, program).map_err(|why| why.to_string())?,
        None => std::process::Command::new(program),
    };
    command
        .args(words)
        .env("STAGE_LAB_PREFIX", lab.prefix())
        .env("STAGE_LAB_DIR", lab.root_dir());
    let mut child = tokio::process::Command::from(command)
        .kill_on_drop(true)
        .spawn()
        .map_err(|why| format!("{program}: {why}"))?;
    let status = loop {
        tokio::select! {
            status = child.wait() => break status.map_err(|why| why.to_string())?,
            // The command decides what Ctrl-C means to it.
            _ = interrupt.recv() => {}
            _ = terminate.recv() => child.start_kill().map_err(|why| why.to_string())?,
        }
    };
    drop(lab);
    Ok(status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .map_or(ExitCode::FAILURE, ExitCode::from))
}
