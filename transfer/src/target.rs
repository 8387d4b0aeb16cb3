//! A target's life on disk: prepare, lay out, partial, publish, discard.
//!
//! ```text
//!   prepare ── looks at the names, promises space ──► manifest at hand (in the order, or when the head is here)
//!                                                          │
//!   lay out ──┬── nothing there, or another ──► partial ◄──┘── chunks ──► publish: durable, intent, rename, durable
//!             │                                   ▲
//!             │                                   │ first chunk that differs (--if-exists replace)
//!             ├── the same by its looks ──► twins: chunks are compared; all the same ──► publish: already there
//!             └── our own (crash after the rename) ──► published
//! ```

mod behind;
pub(crate) mod copy;
mod intent;
pub(crate) mod lay;
mod naming;
pub(crate) mod old;
mod prepare;
mod publish;
pub(crate) mod reserve;
pub mod retired;
pub(crate) mod site;
pub(crate) mod space;
mod stray;
#[cfg(test)]
mod tests;
pub(crate) mod tree;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::io::Errno;
use stage_core::assignment::{Final, IfExists};
use stage_core::failure::Failure;
use stage_core::id::JobId;
use stage_core::payload::UnitKind;

use crate::index::{Index, Note};
use crate::journal::{self, FileState};
use crate::root::Roots;
use crate::store::Store;
use crate::unpack::Unpacking;
use copy::Copy;
use intent::Intent;
pub use prepare::prepare;
pub use publish::{Publication, PublishError};
use site::Site;

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
    sites: Vec<Arc<Site>>,
    /// A tar that is published as what it holds.
    unpacking: Option<Box<Unpacking>>,
    is_candidate: bool,
    state: PathBuf,
    job: JobId,
    /// Whether it is published, and if so whether it was there already.
    published: Mutex<Option<bool>>,
}

impl Target {
    /// The final path, as text fit for a terminal: of several units their directory's.
    pub fn path(&self) -> String {
        match self.sites.last() {
            Some(site) if self.unpacking.is_some() => site.shown.clone(),
            _ => self.copy().shown(),
        }
    }

    /// Begins to lay out a tar that is to be unpacked; does nothing for any other payload.
    ///
    /// # Errors
    /// There is no thread for it.
    pub fn begin(&self) -> Result<(), Failure> {
        self.unpacking.as_deref().map_or(Ok(()), Unpacking::start)
    }

    /// Whether an older copy stands there, which may prove to be the same content.
    pub fn is_candidate(&self) -> bool {
        self.is_candidate
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
        if let (Some(unpacking), Some(site)) = (&self.unpacking, self.sites.last()) {
            return self.note_unpacked(unpacking, site, index, fin);
        }
        let map = self.store.map()?;
        for (at, (site, unit)) in self.sites.iter().zip(self.copy().published()).enumerate() {
            let Some((file, already)) = unit.map_err(|e| site.fault(e, "looking at the copy"))? else {
                continue;
            };
            let fail = |e| site.fault(e, "looking at the copy");
            self.remember(site, index)?;
            index.note(Note {
                place: site.held.place(),
                name: &site.name,
                path: [site.held.path().as_slice(), &site.name].join(&b'/'),
                job: self.job,
                hash: self.store.hash(),
                root: fin.root,
                tar: None,
                payload: self.store.payload(),
                unit: at as u32,
                generation: site.generation_now().map_err(fail)?,
                state: &self.state,
                manifest: map.manifest(),
                layout: self.store.layout(),
                table: self.store.table(),
                key: FileState::of(&file).map_err(fail)?,
                already,
            })?;
        }
        Ok(())
    }

    /// Whose name was removed by hand, and that this copy took the place of, is written down for removal: the index is about
    /// to forget it, and nobody else knows of it.
    fn remember(&self, site: &Site, index: &Index) -> Result<(), Failure> {
        let path = [site.held.path().as_slice(), &site.name].join(&b'/');
        let Some((generation, inode)) = index.generation_at(&path) else {
            return Ok(());
        };
        let fail = |e| site.fault(e, "looking at the old generation");
        let is_left = site.generation_now().map_err(fail)? != Some(generation.clone())
            && site
                .inode_of_generation(&generation)
                .is_some_and(|now| now.1 == inode)
            && !retired::is_noted(&self.state, site, &generation)
            && !site.is_named_otherwise(&generation).map_err(fail)?;
        if is_left {
            retired::note(&self.state, site, &generation, inode, self.copy().keep, self.job)?;
        }
        Ok(())
    }

    /// Enters what a tar held, as the tree that it is; people know it by the tar's digests.
    fn note_unpacked(
        &self,
        unpacking: &Unpacking,
        site: &Site,
        index: &Index,
        fin: &Final,
    ) -> Result<(), Failure> {
        let fail = |e| site.fault(e, "looking at the copy");
        // Its own mode may keep the agent out by now.
        let dir = match (site.open_final_dir(), unpacking.take_shut()) {
            (Err(Errno::ACCESS), Some(dir)) => dir,
            (dir, _) => dir.map_err(fail)?,
        };
        self.remember(site, index)?;
        let known = unpacking.known(&dir)?;
        index.note(Note {
            place: site.held.place(),
            name: &site.name,
            path: [site.held.path().as_slice(), &site.name].join(&b'/'),
            job: self.job,
            hash: self.store.hash(),
            root: known.root,
            tar: Some(fin.root),
            payload: &known.payload,
            unit: 0,
            generation: site.generation_now().map_err(fail)?,
            state: &self.state,
            manifest: known.map.manifest(),
            layout: known.layout,
            table: &known.table,
            key: FileState::of(&dir.into()).map_err(fail)?,
            already: self.was_there(),
        })
    }

    fn was_there(&self) -> bool {
        *self.published.lock().unwrap_or_else(PoisonError::into_inner) == Some(true)
    }

    /// The job is cancelled here: partials, reservation and journal go, and directories made for it as far as they are
    /// empty. What is published stays.
    ///
    /// # Errors
    /// Something of it could not be removed.
    pub fn discard(self) -> Result<(), Failure> {
        if let Some(unpacking) = &self.unpacking {
            unpacking.stop();
        }
        if !self.is_published() {
            self.copy().stop_reserving();
            // Whoever still holds the store must not hold the space.
            self.copy().empty_partials();
            for site in &self.sites {
                site.remove_partial()?;
            }
            remove_generations(&self.sites, &self.state, self.job);
        }
        journal::remove(&self.state, self.job)?;
        self.sites.iter().for_each(|site| site.unmake());
        Ok(())
    }

    /// Nobody needs the job here any more: the journal goes, and partials that were never published. What is published
    /// stays, and goes on being served as long as its store is held.
    pub fn release(self) {
        if let Some(unpacking) = &self.unpacking {
            unpacking.stop();
        }
        // A tar that was unpacked has done its service.
        if !self.is_published() || self.unpacking.is_some() {
            self.copy().remove_partials();
            remove_generations(&self.sites, &self.state, self.job);
        }
        if let Err(failure) = journal::remove(&self.state, self.job) {
            tracing::warn!("{failure}");
        }
        self.sites.iter().for_each(|site| site.unmake());
    }
}

/// Removes trees that moved to where generations lie, and that no name leads to.
fn remove_generations(sites: &[Arc<Site>], state: &Path, job: JobId) {
    let Some(intent) = Intent::read(state, job) else {
        return;
    };
    for (site, inode) in sites.iter().zip(&intent.inodes) {
        let generation = inode.and_then(|inode| site.generation_of(inode, &intent.root));
        let Some(generation) = generation.filter(|_| site.kind == UnitKind::Tree) else {
            continue;
        };
        // One that was published and replaced since has its time to stay.
        let stays = matches!(site.generation_now(), Ok(Some(now)) if now == generation)
            || retired::is_noted(state, site, &generation);
        if stays {
            continue;
        }
        let removed = site.generations().and_then(|all| {
            use std::os::fd::AsFd as _;
            tree::remove(all.as_fd(), &generation)
        });
        if let Err(e) = removed {
            tracing::warn!(
                path = site.shown,
                "a generation that was not published stays: {e}"
            );
        }
    }
}

/// Whether somebody removed what the job had published here (`stage rm`), so that it must not come again by itself.
pub fn was_removed(state: &Path, job: JobId) -> bool {
    journal::removed::is_marked(state, job)
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
    if std::fs::symlink_metadata(journal::job_dir(state, job)).is_err() {
        // Of a source nothing is kept that has a name, and of a target that was never ready neither.
        return Ok(());
    }
    // Without a head nobody knows the place; and in no case is anything touched outside the roots.
    if let Some(record) = journal::peek(state, job) {
        match roots.find(&record.dir) {
            Ok(mut held) => {
                held.made = record.made;
                let held = Arc::new(held);
                let intent = Intent::read(state, job);
                let sites: Vec<_> = (0..usize::from(record.units))
                    .map(|at| {
                        let (tree, name) = intent
                            .as_ref()
                            .and_then(|intent| intent.units.get(at).cloned())
                            .unwrap_or((true, b"-".to_vec()));
                        let kind = if tree { UnitKind::Tree } else { UnitKind::File };
                        Arc::new(Site::new(held.clone(), &name, kind, job, at))
                    })
                    .collect();
                for site in &sites {
                    site.remove_partial()?;
                }
                remove_generations(&sites, state, job);
                sites.iter().for_each(|site| site.unmake());
            }
            Err(failure) => tracing::warn!(%job, "the partial's directory is gone: {failure}"),
        }
    } else {
        tracing::warn!(%job, "the job's chunk table is damaged: its partials are looked for in the roots");
        stray::remove(roots, job);
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
