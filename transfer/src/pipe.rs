//! The source of a payload that comes through a pipe: read once, sent while it comes, spooled for who lags.
//!
//! ```text
//!   pipe ──► reader thread ── claim, read, hash ──► spool (a file without a name) ──► Store ──► children
//!                 │                                   ▲ who lags is served from here
//!                 └── end of input ──► Tie ──► whoever handed it over ── seen ──► FINAL
//! ```
//!
//! How long it is nobody knows before its end, so its layout is open until then. The end of a pipe looks the same
//! whether its writer had finished or was killed; what can be told is told: a read that fails, and whoever handed the
//! pipe over ([`Tie`]) dying before the end, fail the source, and then nobody publishes anything.

mod input;
mod sha;
pub(crate) mod spool;
mod tie;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use stage_core::assignment::{Final, SourceReport};
use stage_core::chunk::{BLOCK, CHUNK, ChunkIndex};
use stage_core::digest::{ChunkHash, ChunkHasher};
use stage_core::failure::{Code, Failure};
use stage_core::id::{JobId, JobKey, NodeName};
use stage_core::payload::{Expectation, Payload};
use stage_core::units::{ByteCount, Rate};
use tokio::sync::mpsc;

use crate::budget::ChunkBuf;
use crate::clock::Doing;
use crate::drive::{Drive, End, LOOK, no_thread};
use crate::frame::Waits;
use crate::outbound::{Member, Serving};
use crate::plane::DataPlane;
use crate::source::SourceCounters;
use crate::source::files::Files;
use crate::store::Store;
use crate::sync::lock;

use input::Input;
use spool::Spool;
pub use tie::Tie;

/// How long stopping waits for a read that hangs.
const LEAVE: Duration = Duration::from_secs(2);

/// What a pipe's source sends.
#[derive(Debug)]
pub struct PipeConfig {
    /// The job.
    pub job: JobId,
    /// The proof of membership.
    pub key: JobKey,
    /// What it is called.
    pub payload: Payload,
    /// Which function digests its chunks.
    pub hash: ChunkHash,
    /// What may be read a second.
    pub source_limit: Option<Rate>,
    /// FINAL is declared only if it is this.
    pub expect: Vec<Expectation>,
    /// What may be sent a second, over all children.
    pub limit: Option<Rate>,
    /// The agent's state directory, where it is spooled.
    pub state: PathBuf,
    /// Who is planned to ask this node.
    pub children: Vec<NodeName>,
    /// Where it comes from.
    pub input: OwnedFd,
    /// Whoever handed that over.
    pub tie: Arc<Tie>,
}

/// What the threads share.
struct Shared {
    store: Arc<Store>,
    drive: Drive,
    expect: Vec<Expectation>,
    tie: Arc<Tie>,
}

impl Shared {
    /// It cannot go on.
    fn fail(&self, failure: Failure) {
        self.drive.fail(failure);
        self.tie.over();
    }
}

/// A pipe's source at work.
pub struct Pipe {
    shared: Arc<Shared>,
    serving: Serving,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Pipe {
    /// Serves the chunks as they come, and reads.
    ///
    /// # Errors
    /// The state directory cannot take the spool.
    pub async fn start(
        plane: &Arc<DataPlane>,
        config: PipeConfig,
        events: mpsc::Sender<SourceReport>,
    ) -> Result<Self, Failure> {
        let plane = plane.clone();
        let node = plane.node().clone();
        tokio::task::spawn_blocking(move || Self::open(&plane, config, events))
            .await
            .expect("opening a spool does not panic")
            .map_err(|failure| failure.on(&node))
    }

    fn open(
        plane: &Arc<DataPlane>,
        config: PipeConfig,
        events: mpsc::Sender<SourceReport>,
    ) -> Result<Self, Failure> {
        let manifest = config.payload.inline().ok().flatten().ok_or_else(|| {
            Failure::new(
                Code::Internal,
                "a stream came without its name",
                "use the same version of stage on all nodes",
            )
        })?;
        let spool = Spool::make(&config.state)?;
        let store = Store::source(
            Arc::new(Files::spool(spool.reader()?)),
            manifest,
            config.payload,
            config.hash,
            config.job,
            &config.state,
            plane.budget(),
        )?;
        let member = Member {
            job: config.job,
            key: config.key,
            children: config.children,
            limit: config.limit,
        };
        let serving = plane.serve_as(member, store.clone(), true);
        let shared = Arc::new(Shared {
            store,
            drive: Drive::new(serving.served.clone(), config.source_limit, events),
            expect: config.expect,
            tie: config.tie,
        });
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(work)
                .map_err(|error| no_thread(&error))
        };
        let (reading, hashing) = (shared.clone(), shared.clone());
        let input = Input::new(config.input);
        let threads = vec![
            spawn("pipe-read", Box::new(move || run(&reading, input, spool)))?,
            spawn("pipe-sha", Box::new(move || sha::run(&hashing)))?,
        ];
        Ok(Self {
            shared,
            serving,
            threads: Mutex::new(threads),
        })
    }

    /// Its chunks.
    pub fn store(&self) -> &Arc<Store> {
        &self.shared.store
    }

    /// How it is served: planned children, limit.
    pub fn serving(&self) -> &Serving {
        &self.serving
    }

    /// What it has done so far.
    pub fn counters(&self) -> SourceCounters {
        SourceCounters {
            source_bytes_read: self.shared.drive.bytes_read.load(Ordering::Relaxed),
            sha256_bytes: self.shared.drive.sha256_bytes.load(Ordering::Relaxed),
            serving: self.serving.counters(),
        }
    }

    /// Stops reading and serving, and waits until no thread is left. One that hangs in a read of somebody's file (a pipe
    /// cannot do that to it, a file system of the user's own can) is left behind: it ends when that read does.
    pub async fn stop(&self) {
        self.halt();
        let threads = std::mem::take(&mut *lock(&self.threads));
        let until = tokio::time::Instant::now() + LEAVE;
        while !threads.iter().all(JoinHandle::is_finished) {
            if tokio::time::Instant::now() >= until {
                tracing::warn!(job = %self.shared.drive.served.job, "a read of a stream hangs; it is left behind");
                break;
            }
            tokio::time::sleep(LOOK / 10).await;
        }
        for thread in threads.into_iter().filter(JoinHandle::is_finished) {
            if thread.join().is_err() {
                tracing::error!("a thread of a stream panicked");
            }
        }
    }

    fn halt(&self) {
        self.shared.tie.over();
        self.shared.drive.halt();
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        self.halt();
    }
}

impl std::fmt::Debug for Pipe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pipe({})", self.shared.drive.served.job)
    }
}

fn run(shared: &Shared, mut input: Input, mut spool: Spool) {
    let done = read_all(shared, &mut input, &mut spool).and_then(|bytes| {
        // Nobody writes to a pipe that nobody reads.
        drop(input);
        declare(shared, bytes)
    });
    match done {
        Ok(fin) => {
            // In this order: whoever waits for the declaration must find it said.
            shared.drive.say(SourceReport::Final(fin));
            shared.drive.advance(|progress| progress.declared = true);
        }
        Err(End::Stopped) => {}
        Err(End::Failed(failure)) => shared.fail(failure),
    }
}

/// Reads to the end; gives how many bytes came.
fn read_all(shared: &Shared, input: &mut Input, spool: &mut Spool) -> Result<ByteCount, End> {
    let clock = &shared.drive.served.reader;
    let _running = clock.enter();
    let store = &shared.store;
    let mut hasher = ChunkHasher::new(store.hash());
    let mut own = Vec::new();
    let mut bytes = 0;
    for index in (0..).map(ChunkIndex) {
        shared.drive.wait_as(Waits::Nothing);
        let wanted = || shared.drive.served.wait_for_demand(index.0, shared.drive.stop());
        if shared.drive.is_over() || !clock.time(Doing::Idle, wanted) {
            return Err(End::Stopped);
        }
        let claim = store.claim(index).ok_or_else(|| {
            End::Failed(Failure::new(
                Code::Internal,
                format!("chunk {index} of the stream has another owner, or it is too long"),
                "split it",
            ))
        })?;
        let mut buffer = shared.drive.served.budget.take();
        let mut len = 0;
        while len < CHUNK as usize {
            shared.drive.wait_as(Waits::Source);
            let block = match &mut buffer {
                Some(buffer) => &mut buffer.resize(len + BLOCK)[len..],
                None => {
                    own.resize(BLOCK, 0);
                    &mut own[..]
                }
            };
            let got = clock.time(Doing::Disk, || fill(shared, input, block))?;
            let block = &block[..got];
            clock.time(Doing::Work, || hasher.update(block));
            spool.write(bytes + len as u64, block).map_err(End::Failed)?;
            len += got;
            shared.drive.bytes_read.fetch_add(got as u64, Ordering::Relaxed);
            shared.drive.pause(got)?;
            if got < BLOCK {
                break;
            }
        }
        bytes += len as u64;
        if len < CHUNK as usize {
            store.close(ByteCount(bytes)).map_err(End::Failed)?;
        }
        if len > 0 {
            let buffer = buffer.map(|mut buffer: ChunkBuf| {
                buffer.resize(len);
                Arc::new(buffer)
            });
            claim.keep(hasher.finish(), buffer).map_err(End::Failed)?;
            shared.drive.advance(|progress| progress.read = index.0 + 1);
        }
        if len < CHUNK as usize {
            break;
        }
    }
    shared.drive.wait_as(Waits::Nothing);
    shared.drive.advance(|progress| progress.ended = true);
    Ok(ByteCount(bytes))
}

/// Fills the block; less than that only at the end of input.
fn fill(shared: &Shared, input: &mut Input, block: &mut [u8]) -> Result<usize, End> {
    let mut at = 0;
    while at < block.len() {
        if shared.drive.is_over() {
            return Err(End::Stopped);
        }
        if let Some(failure) = shared.tie.cut_by() {
            return Err(End::Failed(failure));
        }
        match input.read(&mut block[at..], LOOK) {
            Ok(None) => {}
            Ok(Some(0)) => break,
            Ok(Some(got)) => at += got,
            Err(error) => {
                return Err(End::Failed(Failure::new(
                    Code::SourceIo,
                    format!("reading the input failed: {error}"),
                    "look at what writes into it, then push again",
                )));
            }
        }
    }
    Ok(at)
}

/// All is read: what it was, provided that whoever handed it over has seen its end too.
fn declare(shared: &Shared, bytes: ByteCount) -> Result<Final, End> {
    shared.tie.end(bytes);
    loop {
        if shared.drive.is_over() {
            return Err(End::Stopped);
        }
        match shared.tie.wait_seen(LOOK) {
            Some(Ok(())) => break,
            Some(Err(failure)) => return Err(End::Failed(failure)),
            None => {}
        }
    }
    if !shared.expect.is_empty() && !shared.drive.wait(|progress| progress.digested) {
        return Err(End::Stopped);
    }
    Ok(Final {
        root: shared.store.root().map_err(End::Failed)?,
        chunks: shared.store.layout().count(),
        data: bytes,
    })
}
