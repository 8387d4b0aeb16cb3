//! Laying out: from a manifest and what is on the disk to where each chunk lies, or will.

use std::collections::HashSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock, PoisonError};

use rustix::fs::AtFlags;
use stage_core::assignment::IfExists;
use stage_core::chunk::{ChunkIndex, ChunkSet, Layout, Part};
use stage_core::digest::{ChunkDigest, ChunkHash};
use stage_core::failure::Failure;
use stage_core::id::JobId;
use stage_core::manifest::Kind;
use stage_core::payload::{Payload, UnitKind};
use stage_core::units::ByteCount;

use super::copy::{Copy, Laid, Partial, Unit};
use super::intent::Intent;
use super::old::{Kin, Old};
use super::reserve;
use super::site::{Seen, Site};
use super::space::{Promise, Spaces};
use super::tree::Tree;
use crate::fault;
use crate::journal::{self, FileState, Lies, Phase, Record, Table};
use crate::root::free_inodes;
use crate::store::map::{Map, is_dense};
use crate::store::{digest_by, layout_of};

/// The names of units are told in a table's head up to so many bytes.
const NAMES: usize = 2048;

/// What laying out goes by.
#[derive(Debug)]
pub(crate) struct Laying {
    pub(super) state: PathBuf,
    pub(super) job: JobId,
    pub(super) payload: Payload,
    pub(super) hash: ChunkHash,
    pub(super) spaces: Arc<Spaces>,
    /// What is wanted beside the payload itself: room for what a tar holds.
    pub(super) beside: ByteCount,
}

/// What laying out found.
pub(crate) struct Found {
    /// Data chunks that are here.
    pub(super) have: ChunkSet,
    /// An earlier run of the job has given all of it its final names.
    pub(super) published: bool,
    /// Of a stream that lies under its final name: how long it is.
    pub(super) ended: Option<ByteCount>,
}

/// Promises space where a unit lies, for something of this size.
pub(super) fn promise(spaces: &Spaces, site: &Site, need: u64, size: ByteCount) -> Result<Promise, Failure> {
    match spaces.promise(site.held.fd(), ByteCount(need)) {
        Ok(Ok(promise)) => Ok(promise),
        Ok(Err(short)) => Err(reserve::no_space(site, size, ByteCount(need), short)),
        Err(e) => Err(site.fault(e, "asking for free space")),
    }
}

/// Whether by its looks the old copy is the unit, so that nothing need be made.
fn twins_suffice(unit: &Unit, laid: &Laid, map: &Map) -> bool {
    unit.same
        && unit.range.clone().all(|index| {
            let file = map.entry(index).data_len() > 0 || unit.site.kind == UnitKind::File;
            !file || laid.is_twin(index)
        })
}

/// Whether so many files and directories can still be made where a unit lies. Other jobs may want some of them too.
pub(super) fn check_inodes(site: &Site, needs: u64) -> Result<(), Failure> {
    match free_inodes(site.held.fd()) {
        Ok(Some(free)) if needs > free => Err(reserve::no_inodes(site, Some((needs, free)))),
        Ok(_) => Ok(()),
        Err(e) => Err(site.fault(e, "asking for free inodes")),
    }
}

impl Laying {
    /// See the module. Under the lock on making, or before anyone else has the copy.
    ///
    /// # Errors
    /// Why the target is unfit.
    pub(crate) fn lay_out(&self, copy: &Copy, table: &Table, map: &Map) -> Result<Found, Failure> {
        let layout = layout_of(&self.payload)?;
        let intent = Intent::read(&self.state, self.job).filter(|_| {
            table
                .record()
                .is_some_and(|record| record.phase >= Phase::Intent && self.is_ours(&record))
        });
        let mut laid = Laid {
            units: Vec::new(),
            kin: vec![Kin::None; map.entries().len()],
            own: map.entries().iter().map(|_| AtomicBool::new(false)).collect(),
        };
        let fresh = table.record().is_none() && table.claimed()?.is_empty();
        let mut from = 0;
        let mut begun = Vec::new();
        // Before space is taken, which looks like a write.
        let mut found = None;
        for (at, site) in copy.sites.iter().enumerate() {
            let len = map.entries()[from..]
                .iter()
                .take_while(|entry| entry.unit() == self.payload.units[at].name)
                .count();
            let range = from as u32..(from + len) as u32;
            from += len;
            let inode = intent.as_ref().and_then(|intent| *intent.inodes.get(at)?);
            let root = intent.as_ref().map(|intent| intent.root);
            let mut unit = Unit {
                site: site.clone(),
                range,
                old: None,
                partial: OnceLock::new(),
                same: false,
                left: false,
                placed: false,
            };
            let taken = match inode.zip(root) {
                Some((inode, root)) => take_placed(&mut unit, inode, &root, map, &self.state)?,
                None => None,
            };
            let taken = match taken {
                Some(taken) => Some(taken),
                None => self.look(copy, &mut unit, &mut laid, fresh, map, &mut found)?,
            };
            begun.push(taken);
            laid.units.push(unit);
        }
        let published = intent.is_some() && laid.units.iter().all(|unit| unit.placed || unit.left);
        self.take_space(copy, &laid, map)?;
        for (unit, taken) in laid.units.iter().zip(begun) {
            self.begin(copy, unit, &laid, taken, map)?;
        }
        let lies = if laid.units.iter().any(|unit| unit.partial.get().is_some()) {
            Lies::Partial
        } else {
            Lies::OldCopy
        };
        let now = self.state_of(&laid);
        let believed = self.is_believed(
            table,
            &laid,
            lies,
            match lies {
                // One that is new has nothing, even under the inode of the one before.
                Lies::Partial => found.as_ref(),
                Lies::OldCopy => now.as_ref(),
            },
        );
        copy.laid
            .set(laid)
            .map_err(|_| ())
            .expect("a copy is laid out once");
        let mut have = if fresh {
            ChunkSet::empty(layout.count())
        } else if published || believed {
            table.claimed()?
        } else {
            self.hash_again(copy, table, map, layout)?
        };
        let ended = self.end_of_stream(copy, layout, published);
        if let Some(ended) = ended {
            have.set_limit(ended.count());
        }
        let published = published && {
            let mut data = have.clone();
            data.insert_run(0..layout.head_count());
            data.is_full()
        };
        let mut record = self.record(copy, lies, now);
        if intent.is_some() {
            record.phase = Phase::Intent;
        }
        table.set_record(record)?;
        Ok(Found {
            have,
            published,
            ended: ended.map(|layout| layout.data()),
        })
    }

    pub(super) fn record(&self, copy: &Copy, lies: Lies, file: Option<FileState>) -> Record {
        let held = &copy.sites[0].held;
        Record {
            job: self.job,
            manifest: self.payload.manifest,
            hash: self.hash,
            boot: journal::boot_id(),
            lies,
            file: file.unwrap_or_default(),
            phase: Phase::Receiving,
            doubt: false,
            dir: held.path(),
            // One more for what a tar is unpacked into.
            units: copy.sites.len() as u16 + 1,
            names: if self
                .payload
                .units
                .iter()
                .map(|unit| unit.name.len() + 8)
                .sum::<usize>()
                < NAMES
            {
                self.payload.units.iter().map(|unit| unit.name.clone()).collect()
            } else {
                Vec::new()
            },
            made: held.made,
        }
    }

    /// How a stream is cut that an earlier run of the job has given its final name.
    fn end_of_stream(&self, copy: &Copy, layout: Layout, published: bool) -> Option<Layout> {
        let [unit] = copy.laid.get()?.units.as_slice() else {
            return None;
        };
        let Some(Partial::File(partial)) = unit.partial.get().filter(|_| layout.is_open() && published)
        else {
            return None;
        };
        Layout::new(ByteCount(partial.file.metadata().ok()?.len()))
    }

    fn is_ours(&self, record: &Record) -> bool {
        record.is_of(self.job, self.payload.manifest, self.hash)
    }

    /// Looks at a unit's name: what of an older copy may be shared, and what an earlier run left.
    fn look(
        &self,
        copy: &Copy,
        unit: &mut Unit,
        laid: &mut Laid,
        fresh: bool,
        map: &Map,
        found: &mut Option<FileState>,
    ) -> Result<Option<Partial>, Failure> {
        let site = unit.site.clone();
        let seen = site.look()?;
        if copy.rule == IfExists::Skip && !matches!(seen, Seen::Absent) {
            unit.left = true;
        }
        let mut same = false;
        if !unit.left {
            let fits = matches!(
                (site.kind, &seen),
                (UnitKind::File, Seen::File(_)) | (UnitKind::Tree, Seen::Generation | Seen::Dir)
            );
            // A stream's chunks are told by nobody before they come.
            let old = if fits && !self.payload.is_stream() {
                Old::open(&site, &seen).ok().flatten()
            } else {
                None
            };
            if let Some(old) = &old {
                let mut shared = HashSet::new();
                for index in unit.range.clone() {
                    laid.kin[index as usize] = old.kin(map.entry(index), &mut shared);
                }
                same = old.has_structure(map, unit.range.clone())
                    && unit.range.clone().all(|index| {
                        let has_bytes = map.entry(index).data_len() > 0;
                        !has_bytes || matches!(laid.kin[index as usize], Kin::Twin(_))
                    })
                    && (site.kind == UnitKind::Tree
                        || matches!(laid.kin[unit.range.start as usize], Kin::Twin(_)));
            }
            if copy.rule == IfExists::Fail && !matches!(seen, Seen::Absent) {
                if self.payload.is_stream() {
                    return Err(site.exists("and cannot be compared with what comes through a pipe"));
                }
                match (&old, same) {
                    (None, _) => return Err(site.exists("and cannot be compared with the payload")),
                    (Some(_), false) => return Err(site.exists("with other content")),
                    // A copy came there since the partial was begun; if it is the payload, that is as good.
                    (Some(_), true) => site.remove_partial()?,
                }
            }
            unit.old = old;
            unit.same = same;
        }
        if same && !site.has_partial() {
            return Ok(None);
        }
        if site.kind == UnitKind::File {
            // With a partial, the file is written into it from the first byte that differs, so nothing is a twin.
            laid.own[unit.range.start as usize] = AtomicBool::new(true);
        }
        if fresh {
            return Ok(None);
        }
        let promise = Promise::default();
        match site.kind {
            UnitKind::File => site
                .reopen_file()
                .filter(|file| {
                    // One that another payload was written into has bytes where this one may have holes.
                    let entry = map.entry(unit.range.start);
                    is_dense(entry) || crate::sparse::holes_are_zero(file, entry).unwrap_or(false)
                })
                .map(|file| {
                    *found = FileState::of(&file).ok();
                    unit.file_partial(file, map, &promise)
                })
                .transpose(),
            UnitKind::Tree => match site.reopen_tree() {
                Some(dir) => {
                    super::tree::unshare(&dir, map, unit.range.clone())
                        .map_err(|e| site.fault(e, "taking up the partial"))?;
                    for index in unit.range.clone() {
                        // What an earlier run has in its partial was not the old copy's, or was copied from there.
                        let there =
                            rustix::fs::statat(&dir, map.entry(index).below(), AtFlags::SYMLINK_NOFOLLOW);
                        if there.is_ok() {
                            laid.own[index as usize] = AtomicBool::new(true);
                        }
                    }
                    *found = dir
                        .try_clone()
                        .ok()
                        .and_then(|dir| FileState::of(&File::from(dir)).ok());
                    unit.tree_partial(dir, true, map).map(Some)
                }
                None => Ok(None),
            },
        }
    }

    /// What has to be taken: all that is no twin, less what is in partials already.
    fn take_space(&self, copy: &Copy, laid: &Laid, map: &Map) -> Result<(), Failure> {
        let mut promised = copy.promise.lock().unwrap_or_else(PoisonError::into_inner);
        // What was promised for the whole before its parts were known.
        *promised = Promise::default();
        let mut need: u64 = self.beside.0;
        let mut inodes: u64 = 0;
        let made = |unit: &&Unit| !unit.placed && !twins_suffice(unit, laid, map);
        for unit in laid.units.iter().filter(made) {
            let new = unit.range.clone().filter(|index| {
                let shared = matches!(map.entry(*index).kind, Kind::HardLink { .. }) || laid.is_twin(*index);
                !shared
            });
            let beside = unit.site.inodes_beside();
            inodes += (new.count() as u64).saturating_sub(unit.site.inodes_of_partial()) + beside;
        }
        check_inodes(&copy.sites[0], inodes)?;
        // Of a stream nobody knows what it needs.
        let units = laid.units.iter().filter(|_| !self.payload.is_stream());
        for unit in units.filter(|unit| !unit.placed) {
            let mut of_unit: u64 = 0;
            for index in unit.range.clone().filter(|index| !laid.is_twin(*index)) {
                of_unit = of_unit.saturating_add(stage_core::payload::allocated_by(map.entry(index)));
            }
            let held = unit.site.held_by_partial();
            need = need.saturating_add(of_unit.saturating_sub(held));
        }
        let size = match self.beside.0 {
            0 => self.payload.data,
            _ => ByteCount(need),
        };
        *promised = promise(&self.spaces, &copy.sites[0], need, size)?;
        Ok(())
    }

    /// Takes up or makes a unit's partial, where it is known that it needs one.
    fn begin(
        &self,
        copy: &Copy,
        unit: &Unit,
        laid: &Laid,
        taken: Option<Partial>,
        map: &Map,
    ) -> Result<(), Failure> {
        let partial = match taken {
            Some(partial) => partial,
            None if twins_suffice(unit, laid, map) => return Ok(()),
            None => unit.create(map, &copy.promise())?,
        };
        unit.partial
            .set(partial)
            .map_err(|_| ())
            .expect("a unit is begun once");
        Ok(())
    }

    /// The state of the one file or directory that the table speaks of; of several units none.
    fn state_of(&self, laid: &Laid) -> Option<FileState> {
        let [unit] = laid.units.as_slice() else {
            return None;
        };
        let of = |file: &File| FileState::of(file).ok();
        match (unit.partial.get(), &unit.old) {
            (Some(Partial::File(partial)), _) => of(&partial.file),
            (Some(Partial::Tree(tree)), _) => of(&File::from(tree.dir.try_clone().ok()?)),
            (None, Some(Old::File { state, .. })) => Some(state.clone()),
            (None, _) => None,
        }
    }

    /// Whether the table's slots count as they are.
    fn is_believed(&self, table: &Table, laid: &Laid, lies: Lies, now: Option<&FileState>) -> bool {
        let (Some(record), Some(now)) = (table.record(), now) else {
            return false;
        };
        let [unit] = laid.units.as_slice() else {
            return false;
        };
        if !journal::is_this_boot(record.boot) || record.doubt || record.lies != lies {
            return false;
        }
        match (lies, unit.partial.get()) {
            (Lies::OldCopy, None) => record.file == *now,
            (Lies::Partial, Some(Partial::File(_))) => {
                record.file.same_file(now)
                    && (now.size == record.file.size || self.payload.is_stream())
                    && !table.is_outlived_by(now)
            }
            (Lies::Partial, Some(Partial::Tree(_))) => {
                // Chunks may lie in the old copy, and of files nothing is known: only where there is none.
                unit.old.is_none() && record.file.same_file(now)
            }
            _ => false,
        }
    }

    /// The claimed data chunks whose bytes still have the digest that the table tells; the others' slots are emptied.
    fn hash_again(&self, copy: &Copy, table: &Table, map: &Map, layout: Layout) -> Result<ChunkSet, Failure> {
        let claimed = table.claimed()?;
        let mut good = ChunkSet::empty(layout.count());
        for index in claimed.iter() {
            let Part::Data(place) = layout.part(index) else {
                continue;
            };
            let found = digest(copy, map, self.hash, place, layout.len(index)).ok();
            if found.is_some() && found == table.get(index) {
                good.insert(index);
            } else {
                table.clear(index)?;
            }
        }
        if !claimed.is_empty() {
            tracing::info!(
                job = %self.job,
                path = copy.shown(),
                claimed = claimed.len(),
                good = good.len(),
                "hashed again what the chunk table claimed"
            );
        }
        Ok(good)
    }
}

/// The digest of payload bytes as they lie here; reads a block at a time.
pub(crate) fn digest(
    copy: &Copy,
    map: &Map,
    hash: ChunkHash,
    place: u64,
    len: usize,
) -> Result<ChunkDigest, Failure> {
    digest_by(hash, len, |at, block| {
        map.pieces(place + at, block.len(), |entry, from, part| {
            copy.read(map, entry, from, &mut block[part])
        })
    })
}

/// The same of the older copies' bytes.
pub(crate) fn digest_old(
    copy: &Copy,
    map: &Map,
    hash: ChunkHash,
    place: u64,
    len: usize,
) -> Result<ChunkDigest, Failure> {
    digest_by(hash, len, |at, block| {
        map.pieces(place + at, block.len(), |entry, from, part| {
            copy.read_old(map, entry, from, &mut block[part])
        })
    })
}

/// Which chunks have bytes of an entry.
pub(crate) fn chunks_of(map: &Map, layout: Layout, entry: u32) -> Vec<ChunkIndex> {
    let mut chunks: Vec<_> = map
        .pieces_of(entry)
        .flat_map(|piece| {
            let first = piece.in_payload / stage_core::chunk::CHUNK;
            let last = (piece.in_payload + piece.len - 1) / stage_core::chunk::CHUNK;
            (first..=last).map(|index| ChunkIndex(index as u32 + layout.head_count()))
        })
        .collect();
    chunks.dedup();
    chunks
}

/// Finds a unit that an earlier run had begun to publish: under its final name, among the generations, or still a partial.
fn take_placed(
    unit: &mut Unit,
    inode: (u64, u64),
    root: &stage_core::digest::RootDigest,
    map: &Map,
    state: &Path,
) -> Result<Option<Partial>, Failure> {
    let site = unit.site.clone();
    if site.kind == UnitKind::File {
        let Ok(file) = site.open_final() else {
            return Ok(None);
        };
        let fail = |e| fault::of(e, "looking at the target", &site.shown);
        let stat = rustix::fs::fstat(&file).map_err(fail)?;
        let entry = map.entry(unit.range.start);
        let size = crate::store::map::size_of(entry);
        let untouched = (stat.st_dev, stat.st_ino) == inode
            && (size == stage_core::chunk::UNKNOWN || stat.st_size.cast_unsigned() == size.0)
            && (stat.st_mtime, stat.st_mtime_nsec as u32) == entry.mtime;
        if !untouched {
            return Ok(None);
        }
        // Where a link made the name, the partial's may be left.
        if site.partial_inode() == Some(inode) {
            site.remove_partial()?;
        }
        unit.placed = true;
        return Ok(Some(Partial::File(reserve::Partial::whole(file))));
    }
    let Some(generation) = site.generation_of(inode, root) else {
        return Ok(None);
    };
    unit.placed = matches!(site.generation_now(), Ok(Some(now)) if now == generation);
    if !unit.placed && super::retired::is_noted(state, &site, &generation) {
        // It was published, and a later push has replaced it.
        return Ok(None);
    }
    let dir = site
        .open_generation(&generation)
        .map_err(|e| site.fault(e, "opening the generation"))?;
    Ok(Some(Partial::Tree(Tree::placed(dir))))
}
