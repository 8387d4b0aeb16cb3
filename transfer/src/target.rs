//! A target's life on disk: prepare, partial, publish, discard.
//!
//! ```text
//!   prepare ── nothing there ──► partial reserved ── chunks ──► publish: fsync, intent, rename, fsync of the directory
//!      │                              ▲
//!      │                              │ first chunk that differs (--if-exists replace)
//!      ├── a file there ──► candidate: its chunks are compared; all the same ──► publish: already there
//!      ├── our own file there (crash after the rename) ──► published
//!      └── else unfit, or skipped
//! ```

pub(crate) mod copy;
mod publish;
mod reserve;
pub(crate) mod site;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use stage_core::assignment::{Final, IfExists, TargetSpec};
use stage_core::chunk::{CHUNK, ChunkIndex, ChunkSet, Layout, Part};
use stage_core::digest::ChunkHash;
use stage_core::failure::{Code, Failure};
use stage_core::id::JobId;
use stage_core::payload::{Payload, UnitKind};
use stage_core::units::ByteCount;

use crate::budget::Budget;
use crate::index::{Index, Note};
use crate::journal::{self, FileState, Lies, Phase, Record, Table};
use crate::root::{Roots, check_component};
use crate::sparse::holes_are_zero;
use crate::store::head::Head;
use crate::store::map::{Map, is_dense, size_of};
use crate::store::{Bytes, Parts, Store, digest_in, layout_of};
use copy::{Copy, Old};
pub use publish::{Publication, PublishError};
use reserve::Partial;
use site::{Seen, Site};

/// A target that can take the payload, or need not.
#[derive(Debug)]
pub enum Preparation {
    /// It can take it; what is there of it already is in its store.
    Ready(Target),
    /// Something stands there, and the rule is to leave it.
    Skipped {
        /// The final path, as text fit for a terminal.
        path: String,
    },
}

/// One job's target on this node.
#[derive(Debug)]
pub struct Target {
    store: Arc<Store>,
    site: Arc<Site>,
    state: PathBuf,
    job: JobId,
    /// Whether it is published, and if so whether it was there already.
    published: Mutex<Option<bool>>,
}

/// Looks whether the payload can be taken, reserves its space and takes up what an earlier run left. May hash again
/// all that an earlier run claimed, so it can take as long as reading the partial. One at a time for a job: the caller
/// keeps the target as long as the job lasts.
///
/// # Errors
/// Why the target is unfit now. Then nothing new is left on the disk.
pub fn prepare(
    roots: &Roots,
    state: &Path,
    job: JobId,
    spec: &TargetSpec,
    payload: &Payload,
    hash: ChunkHash,
    budget: &Arc<Budget>,
) -> Result<Preparation, Failure> {
    let refuse = |why: String| {
        Failure::new(
            Code::Usage,
            format!("the payload cannot be laid out: {why}"),
            "use the same version of stage on all nodes",
        )
    };
    let inline = payload.inline().map_err(|error| refuse(error.to_string()))?;
    let (Some(manifest), [unit]) = (inline, payload.units.as_slice()) else {
        return Err(refuse("it is not one file".to_owned()));
    };
    if unit.kind != UnitKind::File {
        return Err(refuse("it is not one file".to_owned()));
    }
    check_component(&unit.name)?;
    let map = Map::new(manifest);
    let layout = layout_of(payload)?;
    let mut held = roots.resolve(&spec.place)?;
    let before = journal::peek(state, job).filter(|record| record.dir == held.path());
    held.made = held.made.max(before.as_ref().map_or(0, |record| record.made));
    let preparing = Preparing {
        state,
        job,
        rule: spec.if_exists,
        site: Arc::new(Site::new(held, &unit.name, job)),
        map,
        layout,
        payload,
        hash,
        budget,
    };
    let result = preparing.run();
    if !matches!(result, Ok(Preparation::Ready(_))) {
        preparing.clean_up(matches!(result, Ok(Preparation::Skipped { .. })));
    }
    result
}

struct Preparing<'a> {
    state: &'a Path,
    job: JobId,
    rule: IfExists,
    site: Arc<Site>,
    map: Map,
    layout: Layout,
    payload: &'a Payload,
    hash: ChunkHash,
    budget: &'a Arc<Budget>,
}

impl Preparing<'_> {
    fn run(&self) -> Result<Preparation, Failure> {
        let site = &self.site;
        let seen = site.look()?;
        if let Seen::File(stat) = &seen
            && let Some(target) = self.published_before(stat.st_ino)?
        {
            return Ok(Preparation::Ready(target));
        }
        let skip = self.rule == IfExists::Skip;
        let target = match seen {
            Seen::Absent => self.with_partial(None)?,
            Seen::File(_) | Seen::Other(_) if skip => {
                return Ok(Preparation::Skipped {
                    path: site.shown.clone(),
                });
            }
            Seen::Other(kind) => return Err(site.wrong_kind(kind)),
            Seen::File(stat) => {
                let same_size = stat.st_size.cast_unsigned() == size_of(self.map.entry(0)).0;
                let old = self.open_old();
                match (self.rule, old) {
                    (IfExists::Replace, Ok(old))
                        if same_size && !site.has_partial() && self.has_our_holes(&old.file) =>
                    {
                        self.with_old_only(old)?
                    }
                    // A stream's chunks are told by nobody before they come.
                    (IfExists::Replace, _) if self.payload.is_stream() => self.with_partial(None)?,
                    _ if self.payload.is_stream() => {
                        return Err(site.exists("and cannot be compared with what comes through a pipe"));
                    }
                    (IfExists::Replace, old) => self.with_partial(old.ok())?,
                    _ if !same_size => return Err(site.exists("with another size")),
                    (_, Ok(old)) if self.has_our_holes(&old.file) => {
                        // A file came there since the partial was begun; if it is the payload, that is as good.
                        site.remove_partial()?;
                        self.with_old_only(old)?
                    }
                    (_, Ok(_)) => return Err(site.exists("with other content")),
                    _ => return Err(site.exists("and cannot be compared with the payload")),
                }
            }
        };
        Ok(Preparation::Ready(target))
    }

    /// Leaves nothing of a target that is not ready, unless it is an earlier run's partial that may yet be of use.
    fn clean_up(&self, skipped: bool) {
        if skipped && let Err(failure) = self.site.remove_partial() {
            tracing::warn!("{failure}");
        }
        if self.site.has_partial() {
            return;
        }
        if let Err(failure) = journal::remove(self.state, self.job) {
            tracing::warn!("{failure}");
        }
        self.site.held.unmake();
    }

    /// Whether a file reads as zeros where the payload has holes; its data is compared chunk by chunk later.
    fn has_our_holes(&self, file: &File) -> bool {
        // One that cannot be read is compared with nothing.
        is_dense(self.map.entry(0)) || holes_are_zero(file, self.map.entry(0)).unwrap_or(false)
    }

    fn open_old(&self) -> rustix::io::Result<Old> {
        let file = self.site.open_final()?;
        let state = FileState::of(&file)?;
        Ok(Old { file, state })
    }

    fn record(&self, lies: Lies, file: FileState) -> Record {
        Record {
            job: self.job,
            manifest: self.payload.manifest,
            hash: self.hash,
            boot: journal::boot_id(),
            lies,
            file,
            phase: Phase::Receiving,
            doubt: false,
            dir: self.site.held.path(),
            name: self.site.name.clone(),
            made: self.site.held.made,
        }
    }

    fn open_table(&self) -> Result<Table, Failure> {
        let table = Table::open(self.state, self.job, self.layout.count())?;
        let foreign = |record: &Record| !record.is_of(self.job, self.payload.manifest, self.hash);
        if table.record().as_ref().is_some_and(foreign) {
            table.reset()?;
        }
        Ok(table)
    }

    fn target(
        &self,
        table: Table,
        have: ChunkSet,
        old: Option<Old>,
        partial: Option<Partial>,
    ) -> Result<Target, Failure> {
        let tail = partial
            .as_ref()
            .and_then(|partial| self.tail(&have, &partial.file));
        let copy = Copy::new(self.site.clone(), self.rule, old, partial);
        let store = Store::assemble(Parts {
            tail,
            map: Some(self.map.clone()),
            head: Head::open(self.state, self.job, self.payload)?,
            payload: self.payload.clone(),
            hash: self.hash,
            table,
            bytes: Bytes::Target(Box::new(copy)),
            have,
            budget: self.budget.clone(),
        })?;
        Ok(Target {
            store,
            site: self.site.clone(),
            state: self.state.to_owned(),
            job: self.job,
            published: Mutex::new(None),
        })
    }

    /// Of a stream, the chunk here that is shorter than the others: where the partial ends.
    fn tail(&self, have: &ChunkSet, partial: &File) -> Option<(ChunkIndex, u32)> {
        let len = partial.metadata().ok()?.len();
        let index = ChunkIndex(u32::try_from(len / CHUNK).ok()?);
        let short = u32::try_from(len % CHUNK).ok()?;
        (self.layout.is_open() && short > 0 && have.contains(index)).then_some((index, short))
    }

    /// The target of a run that had published, or had begun to: what lies under the final name decides.
    fn published_before(&self, inode: u64) -> Result<Option<Target>, Failure> {
        let ours = |record: &Record| {
            record.is_of(self.job, self.payload.manifest, self.hash)
                && record.name == self.site.name
                && record.phase >= Phase::Intent
                && record.lies == Lies::Partial
                && record.file.ino == inode
        };
        let Some(record) = journal::peek(self.state, self.job).filter(ours) else {
            return Ok(None);
        };
        let Ok(old) = self.open_old() else { return Ok(None) };
        // The mount may be another one after a boot, the inode and its time are not.
        let untouched = (old.state.dev, old.state.ino, old.state.size, old.state.mtime)
            == (
                record.file.dev,
                record.file.ino,
                record.file.size,
                record.file.mtime,
            );
        if !untouched {
            return Ok(None);
        }
        let table = self.open_table()?;
        let mut have = table.claimed()?;
        if let (true, Some(layout)) = (self.layout.is_open(), Layout::new(ByteCount(old.state.size))) {
            have.set_limit(layout.count());
        }
        if !have.is_full() {
            // Some digests were lost with the power: the file is compared as any other.
            return Ok(None);
        }
        // Where a link made the name, the partial's may be left.
        if self.site.partial_inode().is_some_and(|(_, ino)| ino == inode) {
            self.site.remove_partial()?;
        }
        let size = ByteCount(old.state.size);
        let target = self.target(table, have, None, Some(Partial::whole(old.file)))?;
        target.store.close(size)?;
        target.finish(target.copy()).map_err(|error| match error {
            PublishError::Unfit(failure) | PublishError::Failed(failure) => failure,
            PublishError::RootDiffers => unreachable!("finishing compares no root"),
        })?;
        *target.published.lock().unwrap_or_else(PoisonError::into_inner) = Some(false);
        Ok(Some(target))
    }

    /// The old copy is compared first; nothing is reserved yet.
    fn with_old_only(&self, old: Old) -> Result<Target, Failure> {
        let table = self.open_table()?;
        let claimed = table.claimed()?;
        let believed = table.record().is_some_and(|record| {
            journal::is_this_boot(record.boot)
                && !record.doubt
                && record.lies == Lies::OldCopy
                && record.file == old.state
        });
        let have = if believed {
            claimed
        } else {
            self.hash_again(&table, &claimed, &old.file)?
        };
        table.set_record(self.record(Lies::OldCopy, old.state.clone()))?;
        self.target(table, have, Some(old), None)
    }

    /// Into a partial, with an old copy to take chunks from or without.
    fn with_partial(&self, old: Option<Old>) -> Result<Target, Failure> {
        let table = self.open_table()?;
        let fail = |e| self.site.fault(e, "looking at the partial file");
        // One that another payload was written into has bytes where this one may have holes.
        let partial = self.site.reopen_partial();
        let (partial, have) = match partial.filter(|partial| self.has_our_holes(partial)) {
            Some(partial) => {
                let found = FileState::of(&partial).map_err(fail)?;
                let claimed = table.claimed()?;
                let believed = table.record().is_some_and(|record| {
                    journal::is_this_boot(record.boot)
                        && !record.doubt
                        && record.lies == Lies::Partial
                        && record.file.same_file(&found)
                        && (found.size == size_of(self.map.entry(0)).0 || self.layout.is_open())
                        && !table.is_outlived_by(&found)
                });
                let have = if believed {
                    claimed
                } else {
                    self.hash_again(&table, &claimed, &partial)?
                };
                (Partial::reserve(partial, &self.site, &self.map)?, have)
            }
            None => {
                table.reset()?;
                let partial = self.site.create_partial(&self.map)?;
                (partial, ChunkSet::empty(self.layout.count()))
            }
        };
        let now = FileState::of(&partial.file).map_err(fail)?;
        table.set_record(self.record(Lies::Partial, now))?;
        self.target(table, have, old, Some(partial))
    }

    /// The claimed chunks whose bytes in the file still have the digest that the table tells; the others' slots are
    /// emptied.
    fn hash_again(&self, table: &Table, claimed: &ChunkSet, file: &File) -> Result<ChunkSet, Failure> {
        let mut good = ChunkSet::empty(self.layout.count());
        for index in claimed.iter() {
            let Part::Data(place) = self.layout.part(index) else {
                continue;
            };
            let len = self.layout.len(index);
            let found = digest_in(file, &self.map, place, len, self.hash).ok();
            if found.is_some() && found == table.get(index) {
                good.insert(index);
            } else {
                table.clear(index)?;
            }
        }
        if !claimed.is_empty() {
            tracing::info!(
                job = %self.job,
                path = self.site.shown,
                claimed = claimed.len(),
                good = good.len(),
                "hashed again what the chunk table claimed"
            );
        }
        Ok(good)
    }
}

impl Target {
    /// The final path, as text fit for a terminal.
    pub fn path(&self) -> &str {
        &self.site.shown
    }

    /// Whether an older copy stands there, which may prove to be the same content.
    pub fn is_candidate(&self) -> bool {
        self.copy().has_old()
    }

    /// Whether other content there is left, and counts as done.
    pub fn skips(&self) -> bool {
        self.copy().rule == IfExists::Skip
    }

    /// Its chunks.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    fn copy(&self) -> &Copy {
        self.store.target().expect("a target's store is of a target")
    }

    fn is_published(&self) -> bool {
        self.published
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }

    /// Enters the copy in the index. To be called once it is published.
    ///
    /// # Errors
    /// The state directory cannot be written. The copy is published all the same.
    pub fn note(&self, index: &Index, fin: &Final) -> Result<(), Failure> {
        let copy = self.copy();
        let file = copy.partial().or(copy.old.as_ref().map(|old| &old.file));
        let Some(file) = file else { return Ok(()) };
        let key = FileState::of(file).map_err(|e| self.site.fault(e, "looking at the copy"))?;
        let map = self.store.map()?;
        let held = &self.site.held;
        let already = *self.published.lock().unwrap_or_else(PoisonError::into_inner) == Some(true);
        index.note(Note {
            place: held.place(),
            name: &self.site.name,
            path: [held.path().as_slice(), &self.site.name].join(&b'/'),
            job: self.job,
            hash: self.store.hash(),
            root: fin.root,
            payload: self.store.payload(),
            manifest: map.manifest(),
            layout: self.store.layout(),
            table: self.store.table(),
            key,
            already,
        })
    }

    /// The job is cancelled here: partial, reservation and journal go, and directories made for it as far as they are
    /// empty. What is published stays.
    ///
    /// # Errors
    /// Something of it could not be removed.
    pub fn discard(self) -> Result<(), Failure> {
        if !self.is_published() {
            self.site.remove_partial()?;
            self.copy().stop_reserving();
            if let Some(partial) = self.copy().partial() {
                // Whoever still holds the store must not hold the space.
                let _ = rustix::fs::ftruncate(partial, 0);
            }
        }
        journal::remove(&self.state, self.job)?;
        self.site.held.unmake();
        Ok(())
    }

    /// Nobody needs the job here any more: the journal goes, and a partial that was never published. What is published
    /// stays, and goes on being served as long as its store is held.
    pub fn release(self) {
        if !self.is_published() {
            self.copy().remove_partial();
        }
        if let Err(failure) = journal::remove(&self.state, self.job) {
            tracing::warn!("{failure}");
        }
        self.site.held.unmake();
    }
}

/// The jobs that an agent has something of, and how many chunks each claims to have.
pub fn held_jobs(state: &Path) -> Vec<(JobId, u32)> {
    journal::tables(state)
        .into_iter()
        .map(|(job, _, kept)| (job, kept))
        .collect()
}

/// As [`Target::discard`], for a job that was not prepared since the agent started.
///
/// # Errors
/// Something of it could not be removed.
pub fn discard_job(roots: &Roots, state: &Path, job: JobId) -> Result<(), Failure> {
    if !journal::job_dir(state, job).exists() {
        // Of a source nothing is kept that has a name, and of a target that was never ready neither.
        return Ok(());
    }
    // Without a head nobody knows the place; and in no case is anything touched outside the roots.
    if let Some(record) = journal::peek(state, job) {
        match roots.find(&record.dir) {
            Ok(mut held) => {
                held.made = record.made;
                let site = Site::new(held, &record.name, job);
                site.remove_partial()?;
                site.held.unmake();
            }
            Err(failure) => tracing::warn!(%job, "the partial's directory is gone: {failure}"),
        }
    } else {
        tracing::warn!(%job, "the job's chunk table is damaged; a partial of it may be left in a root");
    }
    journal::remove(state, job)
}

/// Discards the jobs that the coordinator does not know and that nothing was written of for so long. Returns them.
pub fn sweep(roots: &Roots, state: &Path, known: &BTreeSet<JobId>, age: Duration) -> Vec<JobId> {
    let now = SystemTime::now();
    let mut gone = Vec::new();
    for (job, touched, _) in journal::tables(state) {
        // A time in the future is no age at all.
        let old = now.duration_since(touched).is_ok_and(|idle| idle >= age);
        if known.contains(&job) || !old {
            continue;
        }
        match discard_job(roots, state, job) {
            Ok(()) => gone.push(job),
            Err(failure) => tracing::warn!(%job, "{failure}"),
        }
    }
    gone
}
