//! A source's life: look at the file, read it once in order, declare FINAL, compute SHA-256 beside it.
//!
//! ```text
//!   reader thread ── claim, read, hash, keep ──► Store ──► children, at most a few chunks behind the reader
//!   sha256 thread ── hot chunk, or read again and checked ──► the file's digest, which may come later
//!   watch task    ── fstat every 2 s: the file must not change while it is sent
//! ```

pub mod files;
mod reader;
mod sha;
mod watch;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use stage_core::assignment::{SourceReport, SourceSpec};
use stage_core::chunk::MAX_PAYLOAD;
use stage_core::digest::ChunkHash;
use stage_core::failure::{Code, Failure, show_path};
use stage_core::id::{JobId, JobKey, NodeName};
use stage_core::manifest::Manifest;
use stage_core::payload::{Expectation, Payload, SourcePath};
use stage_core::units::{ByteCount, Rate};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::outbound::{Member, Served, Serving, ServingCounters};
use crate::pace::Pacer;
use crate::plane::DataPlane;
use crate::sparse::data_runs;
use crate::store::Store;
use crate::sync::lock;

use files::Files;
use watch::Fingerprint;

/// Looks at a path and says what the payload would be, holes left out. Nothing is read. A symbolic link is followed: the
/// user named it.
///
/// # Errors
/// It is missing, not a regular file, or cannot be read.
pub fn look(spec: &SourceSpec) -> Result<Manifest, Failure> {
    let [only] = spec.paths.as_slice() else {
        return Err(Failure::new(
            Code::SourceKind,
            "more than one path cannot be pushed yet",
            "push them one after another",
        ));
    };
    let path = path_of(only);
    let path = path.as_path();
    let meta = fs::metadata(path).map_err(|error| refused(path, &error))?;
    if !meta.is_file() {
        let what = if meta.is_dir() {
            "a directory"
        } else {
            "no regular file"
        };
        return Err(Failure::new(
            Code::SourceKind,
            format!("the source is {what}"),
            "name a regular file; directories cannot be pushed yet",
        )
        .at(shown(path)));
    }
    let file = File::open(path).map_err(|error| refused(path, &error))?;
    // Files of /proc and the like say that they are empty and are not.
    if file
        .read_at(&mut [0], meta.len())
        .map_err(|error| refused(path, &error))?
        > 0
    {
        return Err(Failure::new(
            Code::SourceKind,
            format!("the source holds more than the {} bytes that it says", meta.len()),
            "copy it to a file on disk first",
        )
        .at(shown(path)));
    }
    let runs = data_runs(&file, meta.len()).map_err(|error| refused(path, &error))?;
    let nanos = u32::try_from(meta.mtime_nsec()).unwrap_or(0);
    let (size, mtime) = (ByteCount(meta.len()), (meta.mtime(), nanos));
    let manifest = Manifest::single_sparse_file(&only.name, size, runs, meta.mode(), mtime);
    if manifest.payload_size() >= MAX_PAYLOAD {
        return Err(Failure::new(
            Code::SourceKind,
            format!("the source is larger than {MAX_PAYLOAD}"),
            "split it",
        )
        .at(shown(path)));
    }
    Ok(manifest)
}

fn path_of(path: &SourcePath) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(&path.path))
}

fn shown(path: &Path) -> String {
    show_path(path.as_os_str().as_bytes())
}

fn refused(path: &Path, error: &std::io::Error) -> Failure {
    let failure = match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => Failure::new(
            Code::SourceMissing,
            "the source does not exist",
            "check the path on the source's node, and which node that is (--from)",
        ),
        ErrorKind::PermissionDenied => Failure::new(
            Code::SourceUnreadable,
            format!(
                "the source cannot be read by the agent (user id {})",
                rustix::process::geteuid().as_raw()
            ),
            "let the agent's user read the file and search its directories",
        ),
        _ => Failure::new(
            Code::SourceUnreadable,
            format!("the source cannot be opened: {error}"),
            "look at the file system on the source's node",
        ),
    };
    failure.at(shown(path))
}

/// What a source sends.
#[derive(Debug, Clone)]
pub struct SourceConfig {
    /// The job.
    pub job: JobId,
    /// The proof of membership.
    pub key: JobKey,
    /// Where the payload is, and what is expected of it.
    pub spec: SourceSpec,
    /// What it was when [`look`] looked, in short.
    pub payload: Payload,
    /// And whole; looked at again if it is not at hand.
    pub manifest: Option<Manifest>,
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
    /// Bytes read from the file, those that were read again counted again.
    pub source_bytes_read: u64,
    /// Bytes of the file, holes included, that the SHA-256 lane has passed.
    pub sha256_bytes: u64,
    /// What was sent.
    pub serving: ServingCounters,
}

/// What the source's threads share.
struct Shared {
    store: Arc<Store>,
    served: Arc<Served>,
    path: String,
    place: PathBuf,
    file: File,
    before: Mutex<Fingerprint>,
    expect: Vec<Expectation>,
    begun: Instant,
    pace: Pacer,
    events: mpsc::Sender<SourceReport>,
    bytes_read: AtomicU64,
    sha256_bytes: AtomicU64,
    progress: Mutex<Progress>,
    progressed: Condvar,
    stop: AtomicBool,
    stopping: CancellationToken,
}

#[derive(Default)]
struct Progress {
    /// Chunks that are here, from the first on.
    read: u32,
    /// The digests of the whole file are known.
    digested: bool,
    /// FINAL is declared.
    declared: bool,
    failed: bool,
}

impl Shared {
    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Says something, from a thread; gives up when stopped.
    fn say(&self, report: SourceReport) {
        let mut report = report;
        while !self.is_stopped() {
            match self.events.try_send(report) {
                Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => return,
                Err(mpsc::error::TrySendError::Full(back)) => report = back,
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The source cannot go on: said once, and nothing more is read.
    fn fail(&self, failure: Failure) {
        let first = {
            let mut progress = lock(&self.progress);
            !std::mem::replace(&mut progress.failed, true)
        };
        self.progressed.notify_all();
        if first {
            self.say(SourceReport::Failed(
                failure.at(self.path.clone()).on(&self.served.node),
            ));
        }
    }

    fn has_failed(&self) -> bool {
        lock(&self.progress).failed
    }

    /// Changes what is known of the progress, and wakes who waits for it.
    fn advance(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut lock(&self.progress));
        self.progressed.notify_all();
    }

    /// Blocks until `ready` says so; `false` if the source has stopped or failed before.
    fn wait(&self, ready: impl Fn(&Progress) -> bool) -> bool {
        let mut progress = lock(&self.progress);
        loop {
            if self.is_stopped() || progress.failed {
                return false;
            }
            if ready(&progress) {
                return true;
            }
            let wait = self.progressed.wait_timeout(progress, Duration::from_millis(100));
            progress = wait.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
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
    /// Opens the file, serves its chunks as they are read, and reads. Where the node is a target of the same job too,
    /// only the source is to be served.
    ///
    /// # Errors
    /// The file is gone, or is not what it was when it was looked at, or the state directory cannot be written.
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
        let place = config.spec.paths.first().map(path_of).unwrap_or_default();
        let path = shown(&place);
        let manifest = match config.manifest {
            Some(manifest) => manifest,
            None => look(&config.spec)?,
        };
        let file = File::open(&place).map_err(|error| refused(&place, &error))?;
        let read = |file: &File| Fingerprint::of(file).map_err(|error| refused(&place, &error));
        let before = read(&file)?;
        before
            .is_of(&manifest)
            .map_err(|what| watch::changed(&what, "since it was looked at").at(path.clone()))?;
        let own = file.try_clone().map_err(|error| refused(&place, &error))?;
        let store = Store::source(
            Arc::new(Files::new(vec![own])),
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
            served: serving.served.clone(),
            path,
            place,
            file,
            before: Mutex::new(before),
            expect: config.spec.expect,
            begun: Instant::now(),
            pace: Pacer::new(config.spec.limit),
            events,
            bytes_read: AtomicU64::new(0),
            sha256_bytes: AtomicU64::new(0),
            progress: Mutex::default(),
            progressed: Condvar::new(),
            stop: AtomicBool::new(false),
            stopping: CancellationToken::new(),
        });
        let thread = |name: &str, run: fn(&Shared)| {
            let shared = shared.clone();
            let built = std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(move || run(&shared));
            built.map_err(|error| {
                Failure::new(
                    Code::Internal,
                    format!("no thread for the source: {error}"),
                    "raise the agent's limit of tasks",
                )
            })
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
        self.shared.pace.set(limit);
    }

    /// What it has done so far.
    pub fn counters(&self) -> SourceCounters {
        let again = self.shared.served.bytes_read_back.load(Ordering::Relaxed);
        SourceCounters {
            source_bytes_read: self.shared.bytes_read.load(Ordering::Relaxed) + again,
            sha256_bytes: self.shared.sha256_bytes.load(Ordering::Relaxed),
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
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.stopping.cancel();
        self.shared.progressed.notify_all();
        self.shared.served.end();
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn spec(path: &Path) -> SourceSpec {
        SourceSpec {
            paths: vec![SourcePath {
                path: path.as_os_str().as_bytes().to_vec(),
                name: b"a".to_vec(),
            }],
            walk: Default::default(),
            limit: None,
            expect: Vec::new(),
        }
    }

    #[test]
    fn a_look_says_what_it_is_or_why_not() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a");
        fs::write(&file, b"12345").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        let link = dir.path().join("b");
        symlink(&file, &link).unwrap();
        for path in [&file, &link] {
            let manifest = look(&spec(path)).unwrap();
            assert_eq!(manifest.payload_size(), ByteCount(5));
            assert_eq!(manifest.entries[0].mode, 0o640);
        }
        let code = |path: &Path| look(&spec(path)).unwrap_err().code;
        assert_eq!(code(&dir.path().join("none")), Code::SourceMissing);
        assert_eq!(code(&file.join("below")), Code::SourceMissing);
        assert_eq!(code(dir.path()), Code::SourceKind);
        assert_eq!(code(Path::new("/dev/null")), Code::SourceKind);
        assert_eq!(code(Path::new("/proc/self/status")), Code::SourceKind);
        // Root reads whatever the mode says.
        if !rustix::process::geteuid().is_root() {
            fs::set_permissions(&file, fs::Permissions::from_mode(0o000)).unwrap();
            assert_eq!(code(&file), Code::SourceUnreadable);
        }
    }
}
