//! Under their final names: in an order in which every crash leaves each name absent, whole old or whole new.

use std::sync::PoisonError;

use rustix::fs::{Mode, Timespec, Timestamps};
use rustix::io::Errno;
use stage_core::assignment::{Final, IfExists};
use stage_core::chunk::{ChunkSet, Part};
use stage_core::digest::RootDigest;
use stage_core::failure::{Code, Failure};
use stage_core::manifest::Entry;
use stage_core::payload::UnitKind;
use stage_core::units::ByteCount;

use super::copy::{Copy, Partial, Unit};
use super::intent::Intent;
use super::lay::{chunks_of, digest};
use super::old::{Kin, Old};
use super::site::{Seen, Site};
use super::tree::Tree;
use super::{Target, reserve, retired};
use crate::crash::crash_point;
use crate::fault;
use crate::journal::{FileState, Phase};
use crate::store::map::{Map, size_of};
use crate::unpack::Unpacking;

/// What [`Target::publish`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publication {
    /// The final path, as text fit for a terminal.
    pub path: String,
    /// The payload stood there already: nothing was renamed.
    pub already: bool,
}

/// Why a target was not published.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The chunks here are not the declared ones: some have to be disowned and fetched elsewhere.
    #[error("the digests of the chunks here do not make the declared root")]
    RootDiffers,
    /// Somebody put other content there meanwhile, or moved the directory: the target is unfit.
    #[error("{0}")]
    Unfit(Failure),
    /// It failed for good.
    #[error("{0}")]
    Failed(Failure),
}

impl Target {
    /// Publishes the payload, if all of it is here and agrees with what the source declared. Again after success it
    /// says the same again.
    ///
    /// # Errors
    /// See [`PublishError`].
    pub fn publish(&self, fin: &Final) -> Result<Publication, PublishError> {
        let mut published = self.published.lock().unwrap_or_else(PoisonError::into_inner);
        self.store.close(fin.data).map_err(PublishError::Failed)?;
        if self.store.layout().count() != fin.chunks {
            return Err(PublishError::RootDiffers);
        }
        if !self.store.is_complete() {
            return Err(PublishError::Failed(Failure::new(
                Code::Internal,
                "not all chunks are here",
                "report this as a bug of stage",
            )));
        }
        if self.store.root().map_err(PublishError::Failed)? != fin.root {
            return Err(PublishError::RootDiffers);
        }
        let already = match *published {
            Some(already) => already,
            None => {
                let already = self.place(&fin.root)?;
                *published = Some(already);
                already
            }
        };
        Ok(Publication {
            path: self.path(),
            already,
        })
    }

    /// Gives every unit its final name; `true` if all stood there already.
    fn place(&self, root: &RootDigest) -> Result<bool, PublishError> {
        if let (Some(unpacking), Some(site)) = (&self.unpacking, self.sites.last()) {
            return self.place_unpacked(unpacking, site, root);
        }
        let copy = self.copy();
        let map = self.store.map().map_err(PublishError::Failed)?;
        let laid = copy.laid.get().expect("a complete target is laid out");
        self.check_place(copy)?;
        copy.stop_reserving();
        let units: Vec<&Unit> = laid.units.iter().filter(|unit| !unit.left).collect();
        for unit in &units {
            match unit.partial.get() {
                None => self.confirm_old(copy, unit, map)?,
                Some(_) if unit.placed => {}
                Some(partial) => self.complete(copy, unit, partial, map)?,
            }
        }
        crash_point!("before_fsync");
        for unit in &units {
            self.make_durable(copy, unit)?;
        }
        crash_point!("after_fsync");
        let already = units.iter().all(|unit| unit.partial.get().is_none());
        let table = self.store.table();
        if already {
            table
                .update(|record| record.phase = Phase::Published)
                .map_err(PublishError::Failed)?;
            return Ok(true);
        }
        for unit in &units {
            self.check_names(copy, unit, root)?;
        }
        let intent = self.intent(copy, root)?;
        intent
            .write(&self.state, self.job)
            .map_err(PublishError::Failed)?;
        let state = match (
            laid.units.as_slice(),
            units.first().and_then(|unit| unit.partial.get()),
        ) {
            ([_], Some(Partial::File(partial))) => FileState::of(&partial.file).ok(),
            _ => None,
        };
        table
            .update(|record| {
                record.phase = Phase::Intent;
                if let Some(state) = state {
                    record.file = state;
                }
            })
            .and_then(|()| table.sync())
            .map_err(PublishError::Failed)?;
        crash_point!("before_rename");
        for (unit, inode) in laid.units.iter().zip(&intent.inodes) {
            if let (Some(inode), false) = (inode, unit.placed) {
                self.name(copy, map, unit, *inode, root)?;
            }
            crash_point!("after_rename");
        }
        for unit in laid.units.iter().filter(|unit| unit.left) {
            if let Err(failure) = unit.site.remove_partial() {
                tracing::warn!("{failure}");
            }
        }
        self.finish()?;
        // What was shared lies in the new generation too.
        for unit in units {
            if let (Some(Partial::Tree(_)), Some(old)) = (unit.partial.get(), &unit.old) {
                unit.range.clone().for_each(|index| copy.set_own(index));
                old.let_go();
            }
        }
        Ok(false)
    }

    /// Gives what a tar holds its final name; `true` if the same tree stood there already.
    fn place_unpacked(
        &self,
        unpacking: &Unpacking,
        site: &Site,
        root: &RootDigest,
    ) -> Result<bool, PublishError> {
        let copy = self.copy();
        self.check_place(copy)?;
        let fail = |doing: &str| {
            let doing = doing.to_owned();
            move |e: Errno| PublishError::Failed(site.fault(e, &doing))
        };
        let before = Intent::read(&self.state, self.job).and_then(|intent| {
            let inode = intent.inodes.last().copied().flatten()?;
            let generation = (intent.root == *root).then(|| site.generation_of(inode, root))??;
            // One that was published and replaced since has had its time.
            (!retired::is_noted(&self.state, site, &generation)).then_some(generation)
        });
        let generation = match before {
            // An earlier run died after it had made it.
            Some(generation) => generation,
            None => {
                let dir = unpacking.finish().map_err(PublishError::Failed)?;
                if self.stood_there(unpacking, site, &dir)? {
                    site.remove_partial().map_err(PublishError::Failed)?;
                    let table = self.store.table();
                    table
                        .update(|record| record.phase = Phase::Published)
                        .map_err(PublishError::Failed)?;
                    return Ok(true);
                }
                unpacking.settle(&dir).map_err(PublishError::Failed)?;
                rustix::fs::syncfs(&dir).map_err(fail("making the copy durable"))?;
                let stat = rustix::fs::fstat(&dir).map_err(fail("looking at the tree"))?;
                let intent = Intent {
                    root: *root,
                    inodes: vec![None, Some((stat.st_dev, stat.st_ino))],
                    units: vec![(false, b"-".to_vec()), (true, site.name.clone())],
                };
                intent
                    .write(&self.state, self.job)
                    .map_err(PublishError::Failed)?;
                let table = self.store.table();
                table
                    .update(|record| record.phase = Phase::Intent)
                    .and_then(|()| table.sync())
                    .map_err(PublishError::Failed)?;
                crash_point!("before_rename");
                // Who may not write in a directory cannot move it.
                let mode = Mode::from_raw_mode(stat.st_mode);
                rustix::fs::fchmod(&dir, mode | Mode::RWXU).map_err(fail("setting the mode"))?;
                let generation = self
                    .make_generation(site, root)
                    .map_err(fail("keeping the tree"))?;
                rustix::fs::fchmod(&dir, mode).map_err(fail("setting the mode"))?;
                rustix::fs::fsync(&dir).map_err(fail("making the copy durable"))?;
                generation
            }
        };
        crash_point!("after_generation");
        if !matches!(site.generation_now(), Ok(Some(now)) if now == generation) {
            match self.lead(copy, site, &generation)? {
                Ok(()) => {}
                Err(Errno::EXIST) => {
                    return Err(PublishError::Unfit(
                        site.exists("now: somebody put it there during the transfer"),
                    ));
                }
                Err(e) => return Err(fail("giving the tree its final name")(e)),
            }
        }
        crash_point!("after_rename");
        self.finish()?;
        Ok(false)
    }

    /// Whether what a tar holds stands there already, byte for byte. Anything else may only be replaced.
    fn stood_there(
        &self,
        unpacking: &Unpacking,
        site: &Site,
        dir: &rustix::fd::OwnedFd,
    ) -> Result<bool, PublishError> {
        if matches!(site.look().map_err(PublishError::Failed)?, Seen::Absent) {
            return Ok(false);
        }
        let compared = site
            .open_final_dir()
            .map_err(|e| site.fault(e, "opening what stands there"))
            .and_then(|old| unpacking.known(dir)?.is_same(&old));
        let differs = match compared {
            Ok(true) => return Ok(true),
            Ok(false) => "with other content",
            Err(failure) => {
                tracing::info!("what stands there cannot be compared: {failure}");
                "and cannot be compared with what the tar holds"
            }
        };
        if self.copy().rule == IfExists::Replace {
            return Ok(false);
        }
        Err(PublishError::Unfit(site.exists(differs)))
    }

    fn intent(&self, copy: &Copy, root: &RootDigest) -> Result<Intent, PublishError> {
        let laid = copy.laid.get().expect("looked for before");
        let inodes = laid.units.iter().map(|unit| match unit.partial.get() {
            Some(partial) if !unit.left => partial
                .inode()
                .map(Some)
                .map_err(|e| PublishError::Failed(unit.site.fault(e, "looking at the partial"))),
            _ => Ok(None),
        });
        Ok(Intent {
            root: *root,
            inodes: inodes.collect::<Result<_, _>>()?,
            units: copy
                .sites
                .iter()
                .map(|site| (site.kind == UnitKind::Tree, site.name.clone()))
                .collect(),
        })
    }

    /// The old copy was the unit, chunk by chunk: it must still be what the name leads to, untouched.
    fn confirm_old(&self, copy: &Copy, unit: &Unit, map: &Map) -> Result<(), PublishError> {
        let laid = copy.laid.get().expect("looked for before");
        let Some(old) = &unit.old else {
            return Err(PublishError::Unfit(
                unit.site.exists("and cannot be compared with the payload"),
            ));
        };
        let named = match old {
            Old::File { state, .. } => unit
                .site
                .open_final()
                .and_then(|file| FileState::of(&file))
                .is_ok_and(|now| now.same_file(state)),
            Old::Tree(_) => {
                let inode =
                    |dir: &rustix::fd::OwnedFd| rustix::fs::fstat(dir).map(|stat| (stat.st_dev, stat.st_ino));
                let now = unit.site.open_final_dir().and_then(|now| inode(&now));
                let was = old.dir().ok_or(Errno::NOENT).and_then(|was| inode(&was));
                now.is_ok() && now == was && old.has_structure(map, unit.range.clone())
            }
        };
        let untouched = named
            && unit.range.clone().all(|index| match laid.kin[index as usize] {
                Kin::Twin(twin) => {
                    old.is_still(map.entry(index), twin) || self.same_again(old, map, index).is_some()
                }
                _ => true,
            });
        if untouched {
            return Ok(());
        }
        Err(PublishError::Unfit(
            unit.site.exists("and was changed while it was compared"),
        ))
    }

    /// Gives a partial all that its bytes have not given it: size, mode, time, links, what it shares with the old copy.
    fn complete(&self, copy: &Copy, unit: &Unit, partial: &Partial, map: &Map) -> Result<(), PublishError> {
        let laid = copy.laid.get().expect("looked for before");
        let file = match partial {
            Partial::File(reserve::Partial { file, .. }) => file,
            Partial::Tree(tree) => {
                if self.is_generation(unit, tree) {
                    return Ok(());
                }
                let share = |index: u32, _: &Entry| match laid.kin[index as usize] {
                    Kin::Twin(twin) if laid.is_twin(index) => {
                        let shared = match (unit.share(map, index, twin), &unit.old) {
                            (Err(Errno::STALE), Some(old)) => match self.same_again(old, map, index) {
                                Some(now) => unit.share(map, index, now),
                                None => Err(Errno::STALE),
                            },
                            (other, _) => other,
                        };
                        shared.map(|()| true)
                    }
                    _ => Ok(false),
                };
                return match tree.finish(map, unit.range.clone(), share) {
                    Ok(()) => Ok(()),
                    Err((Errno::STALE, entry)) => Err(self.lost_twin(unit, entry, map)),
                    // For what has no bytes: a block of a directory at the least.
                    Err((Errno::NOSPC, _)) => Err(PublishError::Failed(reserve::full(
                        &unit.site,
                        self.store.payload().data,
                        ByteCount(4 << 10),
                    ))),
                    Err((e, entry)) => Err(PublishError::Failed(fault::of(
                        e,
                        "completing the tree",
                        &unit.shown(entry),
                    ))),
                };
            }
        };
        let entry = map.entry(unit.range.start);
        let fail = |doing: &str| {
            let doing = doing.to_owned();
            move |e: Errno| PublishError::Failed(unit.site.fault(e, &doing))
        };
        let size = if self.store.is_stream() {
            self.store.layout().data()
        } else {
            size_of(entry)
        };
        rustix::fs::ftruncate(file, size.0).map_err(fail("setting the size"))?;
        for (name, value) in &entry.xattrs {
            rustix::fs::fsetxattr(file, name.as_slice(), value, rustix::fs::XattrFlags::empty())
                .map_err(fail("setting an extended attribute"))?;
        }
        rustix::fs::fchmod(file, Mode::from_raw_mode(entry.mode)).map_err(fail("setting the mode"))?;
        let times = Timestamps {
            last_access: Timespec {
                tv_sec: 0,
                tv_nsec: rustix::fs::UTIME_OMIT,
            },
            last_modification: Timespec {
                tv_sec: entry.mtime.0,
                tv_nsec: entry.mtime.1.into(),
            },
        };
        rustix::fs::futimens(file, &times).map_err(fail("setting the time"))
    }

    /// Whether a file of the old copy that does not look as it did (another name of it may only have come or gone) still
    /// has the bytes that its chunks were compared by; then what tells it from a changed one now.
    fn same_again(&self, old: &Old, map: &Map, index: u32) -> Option<u64> {
        let now = old.print_of(map.entry(index))?;
        let layout = self.store.layout();
        let same = chunks_of(map, layout, index).into_iter().all(|chunk| {
            let Part::Data(place) = layout.part(chunk) else {
                return true;
            };
            let found = digest(self.copy(), map, self.store.hash(), place, layout.len(chunk)).ok();
            found.is_some() && found == self.store.table().get(chunk)
        });
        (same && old.is_still(map.entry(index), now)).then_some(now)
    }

    /// A file of the old copy is not what it was when its chunks were compared: they are to come over the network.
    fn lost_twin(&self, unit: &Unit, entry: &Entry, map: &Map) -> PublishError {
        let index = unit.range.clone().find(|index| map.entry(*index) == entry);
        let mut lost = ChunkSet::empty(self.store.layout().count());
        for index in index
            .into_iter()
            .flat_map(|index| chunks_of(map, self.store.layout(), index))
        {
            lost.insert(index);
        }
        if let Some(index) = index {
            self.copy().set_own(index);
        }
        if let Err(failure) = self.store.disown(&lost) {
            tracing::warn!("{failure}");
        }
        PublishError::Failed(
            Failure::new(
                Code::Io,
                "a file of the older copy was changed while it was compared",
                "find out who writes there, then push again",
            )
            .at(unit.shown(entry)),
        )
    }

    /// Whether a tree is where generations lie already: an earlier run died after that.
    fn is_generation(&self, unit: &Unit, tree: &Tree) -> bool {
        let own = rustix::fs::fstat(&tree.dir)
            .map(|stat| (stat.st_dev, stat.st_ino))
            .ok();
        own.is_some() && unit.site.partial_inode() != own
    }

    fn make_durable(&self, copy: &Copy, unit: &Unit) -> Result<(), PublishError> {
        let synced = match unit.partial.get() {
            None => Ok(()),
            Some(_) if unit.placed => Ok(()),
            Some(Partial::File(partial)) => rustix::fs::fsync(&partial.file),
            // One call for all of it, whatever the number of files.
            Some(Partial::Tree(tree)) => rustix::fs::syncfs(&tree.dir),
        };
        let failed = match (synced, copy.lost()) {
            (Ok(()), None) => return Ok(()),
            (_, Some(failure)) => failure.clone(),
            (Err(e), None) => unit.site.fault(e, "making the copy durable"),
        };
        // The kernel has dropped what it could not write, and a second fsync would succeed without it.
        self.store.lose_all();
        copy.remove_partials();
        let _ = self.store.table().reset();
        Err(PublishError::Failed(failed))
    }

    /// Makes the new names durable and journals that.
    pub(super) fn finish(&self) -> Result<(), PublishError> {
        if let Some(site) = self.sites.first() {
            site.held
                .sync()
                .map_err(|e| PublishError::Failed(site.fault(e, "making the name durable")))?;
        }
        crash_point!("after_dirsync");
        let table = self.store.table();
        if let Err(failure) = table.update(|record| record.phase = Phase::Published) {
            // It is published all the same: at the next start what lies under the name decides.
            tracing::warn!(path = self.path(), "{failure}");
        }
        Ok(())
    }

    /// A copy in a directory that was moved away, or unmounted while it was held, is none at the path that was asked
    /// for. The target begins anew there once it is asked again.
    fn check_place(&self, copy: &Copy) -> Result<(), PublishError> {
        if self.sites.iter().all(|site| site.held.is_in_place()) {
            return Ok(());
        }
        copy.remove_partials();
        Err(PublishError::Unfit(
            Failure::new(
                Code::RootUnusable,
                "the directory was removed, moved or unmounted during the transfer",
                "put it back; the push fills whatever directory stands there",
            )
            .at(self.path()),
        ))
    }

    /// The partial's name must still lead to our partial, and the final name to nothing but what may go.
    fn check_names(&self, copy: &Copy, unit: &Unit, root: &RootDigest) -> Result<(), PublishError> {
        let site = &unit.site;
        let Some(partial) = unit.partial.get().filter(|_| !unit.placed) else {
            return Ok(());
        };
        let ours = partial.inode().ok();
        let moved = ours
            .is_some_and(|inode| site.kind == UnitKind::Tree && site.generation_of(inode, root).is_some());
        if site.partial_inode() != ours && !moved {
            return Err(PublishError::Failed(
                Failure::new(
                    Code::Io,
                    "the partial file was removed or replaced by somebody else",
                    "find out who cleans up there, then push again",
                )
                .at(site.shown.clone()),
            ));
        }
        let unfit = |failure| Err(PublishError::Unfit(failure));
        match (site.kind, site.look().map_err(PublishError::Failed)?) {
            (_, Seen::Absent) => Ok(()),
            (_, Seen::Other(kind)) => unfit(site.wrong_kind(kind)),
            (UnitKind::Tree, Seen::File(_)) => unfit(site.wrong_kind("a file")),
            (UnitKind::File, Seen::Dir | Seen::Generation) => unfit(site.wrong_kind("a directory")),
            _ if copy.rule != IfExists::Replace => unfit(appeared(unit)),
            _ => Ok(()),
        }
    }
}

pub(super) fn appeared(unit: &Unit) -> Failure {
    unit.site.exists("now: somebody put it there during the transfer")
}
