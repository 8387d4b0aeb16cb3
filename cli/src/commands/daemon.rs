//! What both daemons do alike: logs, signals, and what the service manager is told.

use std::future::Future;
use std::io::{self, IsTerminal as _};
use std::os::fd::AsFd as _;
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Interval, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

use crate::error::Error;

/// A runtime for control messages: bytes are moved by threads of their own, so a few are enough on any host.
///
/// # Errors
/// The kernel gives no threads.
pub(crate) fn runtime() -> Result<Runtime, Error> {
    let threads = std::thread::available_parallelism().map_or(2, usize::from).min(4);
    Ok(Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()?)
}

/// Takes all descriptors that the hard limit allows: 64 streams to each of several parents and children need more than
/// the usual soft limit leaves.
pub(crate) fn raise_descriptors() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit of open files cannot be raised");
    }
    if let Some(few) = limit.maximum.filter(|files| *files < FILES) {
        tracing::warn!(
            limit = few,
            "few open files are allowed: raise LimitNOFILE to {FILES} or more"
        );
    }
}

/// Open files that a daemon may need: two for each of 64 streams, for a few jobs at once.
const FILES: u64 = 1024;

/// Logs go to standard error, where the journal or whoever started us collects them. STAGE_LOG chooses.
///
/// # Errors
/// STAGE_LOG makes no sense.
pub(crate) fn log() -> Result<(), Error> {
    let filter = match std::env::var("STAGE_LOG") {
        Ok(directives) => EnvFilter::try_new(&directives).map_err(|error| {
            Error::config(format!(
                "STAGE_LOG={directives:?}: {error}: write for example \"info\" or \"stage_agent=debug,info\""
            ))
        })?,
        Err(_) => EnvFilter::new("info"),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .init();
    Ok(())
}

/// Runs a daemon that is ready, until it ends by itself or was told to stop and has drained.
pub(crate) async fn serve<T>(
    exit_with_stdin: bool,
    stop: CancellationToken,
    work: impl Future<Output = T>,
) -> Result<T, Error> {
    let mut asked = Asked::new(exit_with_stdin)?;
    tell(NotifyState::Ready);
    let mut watchdog = sd_notify::watchdog_enabled().map(|period| {
        let mut ticks = interval(period / 2);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks
    });
    tokio::pin!(work);
    loop {
        tokio::select! {
            done = &mut work => return Ok(done),
            why = asked.wait(), if !stop.is_cancelled() => {
                tracing::info!(why, "stopping");
                tell(NotifyState::Stopping);
                stop.cancel();
            }
            // In the same task as the work: a loop that hangs feeds no watchdog.
            () = tick(&mut watchdog) => tell(NotifyState::Watchdog),
        }
    }
}

async fn tick(watchdog: &mut Option<Interval>) {
    match watchdog {
        Some(ticks) => drop(ticks.tick().await),
        None => std::future::pending().await,
    }
}

fn tell(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "the service manager cannot be told");
    }
}

/// All that asks a daemon to stop.
struct Asked {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    stdin: Option<pipe::Receiver>,
    /// Only to be caught: a write past a limit of file size is then an error with a node and a path, and no death.
    _file_size: tokio::signal::unix::Signal,
}

impl Asked {
    fn new(exit_with_stdin: bool) -> Result<Self, Error> {
        let stdin = exit_with_stdin
            .then(|| {
                let fd = io::stdin().as_fd().try_clone_to_owned()?;
                pipe::Receiver::from_owned_fd(fd)
            })
            .transpose()
            .map_err(|error| Error::config(format!("--exit-with-stdin: {error}")))?;
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            stdin,
            _file_size: signal(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw()))?,
        })
    }

    async fn wait(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            () = ended(&mut self.stdin) => "end of standard input",
        }
    }
}

/// Comes back when the pipe's other end is closed.
async fn ended(stdin: &mut Option<pipe::Receiver>) {
    let Some(pipe) = stdin else {
        return std::future::pending().await;
    };
    let mut ignored = [0; 64];
    while pipe.read(&mut ignored).await.is_ok_and(|count| count > 0) {}
}

/// How long a runtime may take to end once the daemon has drained: a thread that waits for a dead disk must not hold
/// up the service manager.
pub(crate) const LEAVE: Duration = Duration::from_secs(2);
