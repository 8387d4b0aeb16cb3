//! A source's life: walk over its files and directories, read them once in order, declare FINAL, compute SHA-256 beside.
//!
//! ```text
//!   reader thread ── claim, read, hash, keep ──► Store ──► children, at most a few chunks behind the reader
//!   sha256 thread ── hot chunk, or read again and checked ──► the files' digests, which may come later
//!   watch task    ── stat every 2 s: the source must not change while it is sent
//! ```

mod expect;
pub mod files;
mod listing;
mod look;
mod reader;
mod seen;
mod sha;
mod walk;
mod watch;

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use stage_core::assignment::{SourceReport, SourceSpec};
use stage_core::digest::ChunkHash;
use stage_core::failure::Failure;
use stage_core::id::{JobId, JobKey, NodeName};
use stage_core::payload::Payload;
use stage_core::units::Rate;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::drive::{Drive, no_thread};
use crate::outbound::{Member, Serving, ServingCounters};
use crate::plane::DataPlane;
use crate::store::Store;
use crate::sync::lock;

use expect::Wanted;
use files::Files;
use look::paths_shown;
pub use look::{Look, Pulse, look};

/// What a source sends.
#[derive(Debug)]
pub struct SourceConfig {
    /// The job.
    pub job: JobId,
    /// The proof of membership.
    pub key: JobKey,
    /// Where the payload is, and what is expected of it.
    pub spec: SourceSpec,
    /// What it was when [`look`] looked, in short.
    pub payload: Payload,
    /// And whole, with its files held open; looked at again if that is not at hand.
    pub look: Option<Look>,
    /// Which function digests its chunks.
    pub hash: ChunkHash,
    /// What may be sent a second, over all children.
    pub limit: Option<Rate>,
    /// The agent's state directory.
    pub state: PathBuf,
    /// Who is planned to ask this node.
    pub children: Vec<NodeName>,
}

/// What a source has done, sampled.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct SourceCounters {
    /// Bytes read from the files, those that were read again counted again.
    pub source_bytes_read: u64,
    /// Bytes of the files, holes included, that the SHA-256 lane has passed.
    pub sha256_bytes: u64,
    /// What was sent.
    pub serving: ServingCounters,
}

/// What the source's threads share.
struct Shared {
    store: Arc<Store>,
    drive: Drive,
    /// What is sent, as text.
    path: String,
    files: Arc<Files>,
    expect: Vec<Wanted>,
    stopping: CancellationToken,
}

impl Shared {
    /// The source cannot go on.
    fn fail(&self, failure: Failure) {
        let failure = match failure.path {
            Some(_) => failure,
            None => failure.at(self.path.clone()),
        };
        self.drive.fail(failure);
    }

    fn has_read_all(&self) -> bool {
        self.drive
            .look(|progress| progress.read == self.store.layout().count())
    }
}

/// One source at work.
pub struct Source {
    shared: Arc<Shared>,
    serving: Serving,
    work: Mutex<Option<Work>>,
}

struct Work {
    threads: Vec<JoinHandle<()>>,
    watch: tokio::task::JoinHandle<()>,
}

impl Source {
    /// Serves the payload's chunks as they are read, and reads. Where the node is a target of the same job too, only the
    /// source is to be served.
    ///
    /// # Errors
    /// It is gone, or is not what it was when it was looked at, or the state directory cannot be written.
    pub async fn start(
        plane: &Arc<DataPlane>,
        config: SourceConfig,
        events: mpsc::Sender<SourceReport>,
    ) -> Result<Self, Failure> {
        let plane = plane.clone();
        let node = plane.node().clone();
        tokio::task::spawn_blocking(move || Self::open(&plane, config, events))
            .await
            .expect("opening a source does not panic")
            .map_err(|failure| failure.on(&node))
    }

    fn open(
        plane: &Arc<DataPlane>,
        config: SourceConfig,
        events: mpsc::Sender<SourceReport>,
    ) -> Result<Self, Failure> {
        let look = match config.look {
            Some(look) => look,
            None => look(&config.spec, &Pulse::default())?,
        };
        let path = paths_shown(&config.spec.paths);
        if look.payload != config.payload {
            return Err(files::changed("it is not what it was", "since it was looked at").at(path));
        }
        let expect = expect::resolve(&look.manifest, &config.spec)?;
        let (manifest, payload, files) = look.into_parts();
        let files = Arc::new(files);
        files.treat(config.spec.cache);
        let store = Store::source(
            files.clone(),
            manifest,
            payload,
            config.hash,
            config.job,
            &config.state,
            plane.budget(),
        )?;
        let map = store.map()?;
        for unit in files.in_use() {
            files.change(map, unit)?;
        }
        let member = Member {
            job: config.job,
            key: config.key,
            children: config.children,
            limit: config.limit,
        };
        let serving = plane.serve_as(member, store.clone(), true);
        let shared = Arc::new(Shared {
            store,
            drive: Drive::new(serving.served.clone(), config.spec.limit, events),
            path,
            files,
            expect,
            stopping: CancellationToken::new(),
        });
        let thread = |name: &str, run: fn(&Shared)| {
            let shared = shared.clone();
            let built = std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(move || run(&shared));
            built.map_err(|error| no_thread(&error))
        };
        let threads = vec![
            thread("source-read", reader::run)?,
            thread("source-sha", sha::run)?,
        ];
        let watch = tokio::spawn(watch::run(shared.clone()));
        Ok(Self {
            shared,
            serving,
            work: Mutex::new(Some(Work { threads, watch })),
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

    /// What may be read a second from now on.
    pub fn set_source_limit(&self, limit: Option<Rate>) {
        self.shared.drive.pace.set(limit);
    }

    /// What it has done so far.
    pub fn counters(&self) -> SourceCounters {
        let again = self.shared.drive.served.bytes_read_back.load(Ordering::Relaxed);
        SourceCounters {
            source_bytes_read: self.shared.drive.bytes_read.load(Ordering::Relaxed) + again,
            sha256_bytes: self.shared.drive.sha256_bytes.load(Ordering::Relaxed),
            serving: self.serving.counters(),
        }
    }

    /// Stops reading and serving, and waits until no thread is left.
    pub async fn stop(&self) {
        self.halt();
        let work = lock(&self.work).take();
        let Some(work) = work else { return };
        let joined = tokio::task::spawn_blocking(move || work.threads.into_iter().all(|t| t.join().is_ok()));
        if !matches!(joined.await, Ok(true)) || work.watch.await.is_err() {
            tracing::error!(path = self.shared.path, "a source thread panicked");
        }
    }

    fn halt(&self) {
        self.shared.stopping.cancel();
        self.shared.drive.halt();
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.halt();
    }
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Source({})", self.shared.path)
    }
}
