//! One job's chunks on this node: which are here, where their bytes lie, who is writing which.
//!
//! All calls block at most on the disk; they are made from stream threads, never from the async runtime's.

mod claim;
pub(crate) mod head;
pub(crate) mod map;
mod reuse;

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};
use std::time::Duration;

use stage_core::chunk::{BLOCK, ChunkIndex, ChunkSet, Layout, Part};
use stage_core::digest::{ChunkDigest, ChunkHash, ChunkHasher, RootDigest, RootHasher};
use stage_core::failure::{Code, Failure};
use stage_core::id::JobId;
use stage_core::manifest::Manifest;
use stage_core::payload::Payload;
use stage_core::units::ByteCount;

use crate::budget::{Budget, ChunkBuf, Owner};
use crate::journal::Table;
use crate::source::files::Files;
use crate::target::copy::Copy;
use crate::target::lay::Laying;
pub use claim::Claim;
use head::Head;
use map::Map;
pub use reuse::Compared;

/// Told of each chunk that comes to be here, from the thread that kept it and with no lock held. Must not block.
pub trait Watcher: Send + Sync {
    /// The chunk is whole, checked and kept.
    fn arrived(&self, index: ChunkIndex);
}

/// What was written to disk so far.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct DiskCounters {
    /// Payload bytes written.
    pub bytes: ByteCount,
    /// Time spent in writing them, over all threads.
    pub time: Duration,
}

/// One job's chunks on this node.
pub struct Store {
    cut: RwLock<Cut>,
    hash: ChunkHash,
    payload: Payload,
    /// Known once the head is here, and what it speaks of is laid out.
    map: OnceLock<Map>,
    head: Head,
    table: Table,
    bytes: Bytes,
    /// At a target.
    laying: Option<Laying>,
    budget: Arc<Budget>,
    owner: Owner,
    state: Mutex<State>,
    written: AtomicU64,
    writing_nanos: AtomicU64,
    /// How often chunks were taken back.
    disowned: AtomicU64,
}

/// Where the bytes lie.
#[derive(Debug)]
pub(crate) enum Bytes {
    /// In the source's files, which are never written.
    Source(Arc<Files>),
    /// At a target.
    Target(Box<Copy>),
}

/// How the payload is cut, as far as that is known.
#[derive(Debug, Clone, Copy)]
struct Cut {
    layout: Layout,
    /// Of a stream whose end is not known: a chunk that came and is shorter than others, and its length. It can only be
    /// the last one.
    tail: Option<(ChunkIndex, u32)>,
}

struct State {
    have: ChunkSet,
    claimed: ChunkSet,
    watchers: Vec<Weak<dyn Watcher>>,
}

/// What a store is made of: see [`Store::assemble`].
pub(crate) struct Parts {
    pub(crate) payload: Payload,
    pub(crate) map: Option<Map>,
    pub(crate) head: Head,
    pub(crate) hash: ChunkHash,
    pub(crate) table: Table,
    pub(crate) bytes: Bytes,
    pub(crate) laying: Option<Laying>,
    pub(crate) have: ChunkSet,
    /// Of a stream, the shorter chunk among them.
    pub(crate) tail: Option<(ChunkIndex, u32)>,
    pub(crate) budget: Arc<Budget>,
}

/// How a payload is cut, if it is not too large.
pub(crate) fn layout_of(payload: &Payload) -> Result<Layout, Failure> {
    payload.layout().ok_or_else(|| {
        Failure::new(
            Code::Usage,
            "the payload is larger than stage can move (2 PiB)",
            "split it",
        )
    })
}

impl Store {
    /// The store of a source: its reader claims each chunk, hashes it and keeps it, and the bytes stay where they are.
    /// Digests are held in a table without a name, so that a restarted agent reads the source again.
    ///
    /// # Errors
    /// The state directory cannot take the table, or the payload is of a form that is not known.
    pub fn source(
        files: Arc<Files>,
        manifest: Manifest,
        payload: Payload,
        hash: ChunkHash,
        job: JobId,
        state: &Path,
        budget: &Arc<Budget>,
    ) -> Result<Arc<Self>, Failure> {
        let layout = layout_of(&payload)?;
        let table = Table::unnamed(state, job, layout.count())?;
        Self::assemble(Parts {
            head: match payload.inline {
                Some(_) => Head::None,
                None => Head::Bytes(manifest.encode()),
            },
            payload,
            map: Some(Map::new(manifest)),
            hash,
            table,
            bytes: Bytes::Source(files),
            laying: None,
            have: ChunkSet::empty(layout.count()),
            tail: None,
            budget: budget.clone(),
        })
    }

    pub(crate) fn assemble(parts: Parts) -> Result<Arc<Self>, Failure> {
        static OWNERS: AtomicU64 = AtomicU64::new(0);
        let layout = layout_of(&parts.payload)?;
        let tail = parts.tail;
        Ok(Arc::new(Self {
            cut: RwLock::new(Cut { layout, tail }),
            hash: parts.hash,
            payload: parts.payload,
            map: parts.map.map_or_else(OnceLock::new, OnceLock::from),
            head: parts.head,
            table: parts.table,
            bytes: parts.bytes,
            laying: parts.laying,
            budget: parts.budget,
            owner: Owner(OWNERS.fetch_add(1, Ordering::Relaxed)),
            state: Mutex::new(State {
                have: parts.have,
                claimed: ChunkSet::empty(layout.count()),
                watchers: Vec::new(),
            }),
            written: AtomicU64::new(0),
            writing_nanos: AtomicU64::new(0),
            disowned: AtomicU64::new(0),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every section below leaves the state whole, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it is of.
    pub(crate) fn payload(&self) -> &Payload {
        &self.payload
    }

    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    /// Where the data lies; an error until the head is here, when there is no data to ask for.
    pub(crate) fn map(&self) -> Result<&Map, Failure> {
        self.map.get().ok_or_else(|| {
            Failure::new(
                Code::Internal,
                "the payload's manifest is not here yet",
                "report this as a bug of stage",
            )
        })
    }

    /// Whether the manifest is here, and what it speaks of is laid out: before, only the head may come.
    pub fn is_laid_out(&self) -> bool {
        self.map.get().is_some()
    }

    pub(crate) fn target(&self) -> Option<&Copy> {
        match &self.bytes {
            Bytes::Source(_) => None,
            Bytes::Target(copy) => Some(copy),
        }
    }

    fn cut(&self) -> Cut {
        *self.cut.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// How the payload is cut. That of a stream is open until [`Store::close`].
    pub fn layout(&self) -> Layout {
        self.cut().layout
    }

    /// Whether its size was not known from the beginning.
    pub fn is_stream(&self) -> bool {
        self.payload.is_stream()
    }

    /// Bytes in a chunk: as the layout says, and of an open stream what came of it.
    pub fn len(&self, index: ChunkIndex) -> usize {
        let cut = self.cut();
        match cut.tail {
            Some((tail, len)) if cut.layout.is_open() && tail == index => len as usize,
            _ => cut.layout.len(index),
        }
    }

    /// Whether a chunk that a parent sends can be of this length. The first one of an open stream that is shorter than
    /// others is taken for its last: FINAL will say whether it was.
    pub(crate) fn admits(&self, index: ChunkIndex, len: usize) -> bool {
        let cut = self.cut();
        if !cut.layout.is_open() || len == cut.layout.len(index) {
            return self.len(index) == len;
        }
        let mut cut = self.cut.write().unwrap_or_else(PoisonError::into_inner);
        let new = (index, len as u32);
        cut.layout.is_open() && *cut.tail.get_or_insert(new) == new
    }

    /// The end of a stream is known: it has so many bytes. What is here and cannot be of it is here no more. Again, or for
    /// what is no stream, it does nothing.
    ///
    /// # Errors
    /// The chunk table cannot be written; or so many bytes can be no payload.
    pub fn close(&self, data: ByteCount) -> Result<(), Failure> {
        let closed = Layout::new(data)
            .filter(|layout| !layout.is_open())
            .ok_or_else(|| {
                Failure::new(
                    Code::Internal,
                    format!("a stream cannot have {data}"),
                    "report this as a bug of stage",
                )
            })?;
        let mut wrong = ChunkSet::empty(Layout::open().count());
        {
            let mut cut = self.cut.write().unwrap_or_else(PoisonError::into_inner);
            if !cut.layout.is_open() {
                return Ok(());
            }
            let have = self.have();
            let last = closed.count().checked_sub(1).map(ChunkIndex);
            for index in last.into_iter().chain(cut.tail.map(|(tail, _)| tail)) {
                let here = match cut.tail {
                    Some((tail, len)) if tail == index => len as usize,
                    _ => cut.layout.len(index),
                };
                if have.contains(index) && here != closed.len(index) {
                    wrong.insert(index);
                }
            }
            let past = ChunkIndex(closed.count());
            let mut next = have.first_from(past);
            while let Some(index) = next {
                wrong.insert(index);
                next = have.first_from(ChunkIndex(index.0 + 1));
            }
            cut.layout = closed;
        }
        let disowned = self.disown(&wrong);
        let mut state = self.state();
        state.have.set_limit(closed.count());
        state.claimed.set_limit(closed.count());
        disowned
    }

    /// Which function digests its chunks.
    pub fn hash(&self) -> ChunkHash {
        self.hash
    }

    /// What is here now.
    pub fn have(&self) -> ChunkSet {
        self.state().have.clone()
    }

    /// How many chunks are here now.
    pub fn kept(&self) -> u32 {
        self.state().have.len()
    }

    /// Whether this chunk is here.
    pub fn has(&self, index: ChunkIndex) -> bool {
        self.state().have.contains(index)
    }

    /// Whether every chunk is here.
    pub fn is_complete(&self) -> bool {
        self.is_laid_out() && self.state().have.is_full()
    }

    /// What was written to disk so far.
    pub fn disk_counters(&self) -> DiskCounters {
        DiskCounters {
            bytes: ByteCount(self.written.load(Ordering::Relaxed)),
            time: Duration::from_nanos(self.writing_nanos.load(Ordering::Relaxed)),
        }
    }

    /// Registers a watcher; it is told of every chunk that is not in the set returned.
    pub fn watch(&self, watcher: Weak<dyn Watcher>) -> ChunkSet {
        let mut state = self.state();
        state.watchers.retain(|w| w.strong_count() > 0);
        state.watchers.push(watcher);
        state.have.clone()
    }

    /// The digest of a chunk that is here.
    pub fn digest(&self, index: ChunkIndex) -> Option<ChunkDigest> {
        if !self.has(index) {
            return None;
        }
        self.table.get(index)
    }

    /// The digests of a run of chunks, all of which must be here.
    ///
    /// # Errors
    /// One is not here, or the chunk table was damaged under us.
    pub fn digests(&self, run: Range<u32>) -> Result<Vec<ChunkDigest>, Failure> {
        let mut digests = Vec::with_capacity(run.len().min(self.layout().count() as usize));
        self.each_digest(run, |digest| digests.push(digest))?;
        Ok(digests)
    }

    fn each_digest(&self, run: Range<u32>, mut each: impl FnMut(ChunkDigest)) -> Result<(), Failure> {
        let missing = |index: u32| {
            Failure::new(
                Code::State,
                format!("chunk {index} is not here or its entry in the chunk table is damaged"),
                "push again; if it comes back, look at the disk of the agent's state directory",
            )
        };
        if run.end > self.layout().count() {
            return Err(missing(run.end - 1));
        }
        {
            let state = self.state();
            if let Some(gap) = run.clone().find(|i| !state.have.contains(ChunkIndex(*i))) {
                return Err(missing(gap));
            }
        }
        let mut damaged = None;
        self.table.each(run, |index, digest| match digest {
            Some(digest) => each(digest),
            None => damaged = damaged.or(Some(index.0)),
        })?;
        damaged.map_or(Ok(()), |index| Err(missing(index)))
    }

    /// The root over the manifest and all digests; every chunk must be here.
    ///
    /// # Errors
    /// As [`Store::digests`].
    pub fn root(&self) -> Result<RootDigest, Failure> {
        let mut root = RootHasher::new(self.payload.manifest);
        self.each_digest(0..self.layout().count(), |digest| root.push(digest))?;
        Ok(root.finish())
    }

    /// The chunk's bytes, if they are still in memory.
    pub fn hot(&self, index: ChunkIndex) -> Option<Arc<ChunkBuf>> {
        self.has(index).then(|| self.budget.hot(self.owner, index))?
    }

    /// Reads bytes of a chunk that is here, from `at` within it.
    ///
    /// # Errors
    /// The disk's. At a target the chunk is then not here any more.
    pub fn read(&self, index: ChunkIndex, at: usize, buf: &mut [u8]) -> Result<(), Failure> {
        self.check_range(index, at, buf.len())?;
        let read = self.read_raw(index, at, buf);
        if read.is_err() && self.target().is_some() {
            tracing::warn!(%index, "a kept chunk cannot be read back; it will be fetched again");
            let mut lost = ChunkSet::empty(self.layout().count());
            lost.insert(index);
            self.disown(&lost)?;
        }
        read
    }

    fn check_range(&self, index: ChunkIndex, at: usize, len: usize) -> Result<(), Failure> {
        if at.checked_add(len).is_some_and(|end| end <= self.len(index)) {
            return Ok(());
        }
        Err(Failure::new(
            Code::Internal,
            format!("{len} bytes at {at} do not lie in chunk {index}"),
            "report this as a bug of stage",
        ))
    }

    fn read_raw(&self, index: ChunkIndex, at: usize, buf: &mut [u8]) -> Result<(), Failure> {
        let place = match self.layout().part(index) {
            Part::Head(place) => return self.head.read(place + at as u64, buf),
            Part::Data(place) => place + at as u64,
        };
        let map = self.map()?;
        map.pieces(place, buf.len(), |entry, from, part| match &self.bytes {
            Bytes::Source(files) => files.read(map, entry, from, &mut buf[part]),
            Bytes::Target(copy) => copy.read(map, entry, from, &mut buf[part]),
        })
    }

    /// Takes back that these chunks are here: their digests are not the payload's.
    ///
    /// # Errors
    /// The chunk table cannot be written. The chunks are not here all the same.
    pub fn disown(&self, chunks: &ChunkSet) -> Result<(), Failure> {
        let mut result = Ok(());
        {
            // Under the lock, so that no slot is emptied that a new owner of its chunk has just written.
            let mut state = self.state();
            for index in chunks.iter() {
                if state.have.remove(index)
                    && let Err(failure) = self.table.clear(index)
                {
                    result = Err(failure);
                }
            }
        }
        if !chunks.is_empty() {
            self.disowned.fetch_add(1, Ordering::Release);
        }
        self.budget.forget(self.owner);
        result
    }

    /// How often chunks that were here were taken back: what was made of them then is doubted.
    pub(crate) fn disowned(&self) -> u64 {
        self.disowned.load(Ordering::Acquire)
    }

    /// Nothing of it can be relied on any more.
    pub(crate) fn lose_all(&self) {
        let all = self.have();
        // What the table says is doubted anyway after a write error.
        let _ = self.disown(&all);
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Store({:?})", self.state().have)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.budget.forget(self.owner);
    }
}

/// The digest of so many bytes, read a block at a time by `read`, which is told from where on.
pub(crate) fn digest_by<E>(
    hash: ChunkHash,
    len: usize,
    mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
) -> Result<ChunkDigest, E> {
    let mut hasher = ChunkHasher::new(hash);
    let mut block = vec![0; BLOCK.min(len)];
    let mut done = 0;
    while done < len {
        let some = BLOCK.min(len - done);
        read(done as u64, &mut block[..some])?;
        hasher.update(&block[..some]);
        done += some;
    }
    Ok(hasher.finish())
}
