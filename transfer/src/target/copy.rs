//! The bytes of a target: older copies under the final names, partials, or both.
//!
//! A file of the payload lies either in the partial (it is *own*), or still in an older copy that has a file of its name,
//! size and dress: a *twin*, which its chunks prove to be the same, or of which one chunk differs and which then becomes
//! own. So what is there already is neither moved nor copied, and what was not understood rightly costs a copy, no more.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rustix::fs::AtFlags;
use rustix::io::Errno;
use stage_core::assignment::{Cache, IfExists};
use stage_core::chunk::BLOCK;
use stage_core::failure::Failure;
use stage_core::manifest::Entry;
use stage_core::payload::UnitKind;

use super::old::{Kin, Old};
use stage_core::units::ByteCount;

use super::behind::Behind;
use super::reserve;
use super::site::Site;
use super::space::Promise;
use super::tree::{self, Tree};
use crate::fault;
use crate::store::map::{Map, data_runs};

/// Where a target's chunks lie.
#[derive(Debug)]
pub(crate) struct Copy {
    pub(super) sites: Vec<Arc<Site>>,
    pub(super) rule: IfExists,
    /// How long a generation stays that it replaces.
    pub(super) keep: Duration,
    pub(super) laid: OnceLock<Laid>,
    pub(super) promise: Mutex<Promise>,
    making: Mutex<()>,
    behind: Behind,
}

/// What is known once the manifest is.
#[derive(Debug)]
pub(crate) struct Laid {
    pub(super) units: Vec<Unit>,
    /// For each entry.
    pub(super) kin: Vec<Kin>,
    /// For each entry, whether its bytes are in the partial although it has a twin.
    pub(super) own: Vec<AtomicBool>,
}

/// One unit of the payload on this node.
#[derive(Debug)]
pub(super) struct Unit {
    pub(super) site: Arc<Site>,
    /// Its entries.
    pub(super) range: Range<u32>,
    pub(super) old: Option<Old>,
    pub(super) partial: OnceLock<Partial>,
    /// By its looks the old copy is the unit.
    pub(super) same: bool,
    /// The rule is to leave what stands there: it is received with the others, and not published.
    pub(super) left: bool,
    /// It lies under its final name already.
    pub(super) placed: bool,
}

/// What is being filled.
#[derive(Debug)]
pub(super) enum Partial {
    File(reserve::Partial),
    Tree(Tree),
}

impl Partial {
    /// The inode that keeps its identity when the partial gets its name.
    pub(super) fn inode(&self) -> rustix::io::Result<(u64, u64)> {
        let stat = match self {
            Self::File(partial) => rustix::fs::fstat(&partial.file)?,
            Self::Tree(tree) => rustix::fs::fstat(&tree.dir)?,
        };
        Ok((stat.st_dev, stat.st_ino))
    }
}

/// What [`Copy::write`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wrote {
    /// The bytes are in their place.
    Done,
    /// The entry's twin has other bytes there: the entry must become own first.
    Differs,
}

impl Copy {
    pub(super) fn new(
        sites: Vec<Arc<Site>>,
        rule: IfExists,
        (keep, cache): (Duration, Cache),
        promise: Promise,
    ) -> Self {
        Self {
            sites,
            rule,
            keep,
            laid: OnceLock::new(),
            promise: Mutex::new(promise),
            making: Mutex::new(()),
            behind: Behind::new(cache),
        }
    }

    /// The final path, for people: of several units their directory's.
    pub(crate) fn shown(&self) -> String {
        match self.sites.as_slice() {
            [only] => only.shown.clone(),
            several => several.first().map_or_else(String::new, |site| {
                stage_core::failure::show_path(&[site.held.path().as_slice(), b"/"].concat())
            }),
        }
    }

    fn laid(&self) -> Result<&Laid, Failure> {
        self.laid.get().ok_or_else(|| {
            Failure::new(
                stage_core::failure::Code::Internal,
                "a target was written before it was laid out",
                "report this as a bug of stage",
            )
        })
    }

    fn unit(&self, entry: u32) -> Result<&Unit, Failure> {
        let units = &self.laid()?.units;
        Ok(&units[units.partition_point(|unit| unit.range.end <= entry)])
    }

    /// Whether digests should come ahead of bytes: something here may be the payload's.
    pub(crate) fn has_old(&self) -> bool {
        match self.laid.get() {
            Some(laid) => laid.units.iter().any(|unit| unit.old.is_some() && !unit.left),
            None => true,
        }
    }

    /// Why nothing more need be written, if that is known: the partial's space could not be taken, or what was written did not
    /// reach the disk.
    pub(crate) fn failure(&self) -> Option<&Failure> {
        let units = self.laid.get()?.units.iter();
        let mut no_space = units.filter_map(|unit| match unit.partial.get()? {
            Partial::File(partial) => partial.failure(),
            Partial::Tree(_) => None,
        });
        no_space.next().or_else(|| self.behind.failure())
    }

    /// What was written and did not reach the disk: the kernel has said so once, and would not say it to the last fsync.
    pub(super) fn lost(&self) -> Option<&Failure> {
        self.behind.failure()
    }

    /// The file system is full, although the space had been there: so much of so large a payload is still wanted.
    pub(crate) fn full(&self, size: ByteCount, left: ByteCount) -> Failure {
        reserve::full(&self.sites[0], size, left)
    }

    /// What was promised for it.
    pub(super) fn promise(&self) -> Promise {
        self.promise
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// No more of the partials' space is wanted.
    pub(super) fn stop_reserving(&self) {
        for unit in self.laid.get().into_iter().flat_map(|laid| &laid.units) {
            if let Some(Partial::File(partial)) = unit.partial.get() {
                partial.stop_reserving();
            }
        }
    }

    /// The lock under which partials are made and chunks of the old copy are compared.
    pub(crate) fn making(&self) -> MutexGuard<'_, ()> {
        self.making.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether an entry's bytes lie in an older copy.
    pub(crate) fn is_twin(&self, entry: u32) -> bool {
        self.laid.get().is_some_and(|laid| laid.is_twin(entry))
    }

    /// Reads bytes of an entry that are here.
    pub(crate) fn read(&self, map: &Map, index: u32, at: u64, buf: &mut [u8]) -> Result<(), Failure> {
        let unit = self.unit(index)?;
        let entry = map.entry(index);
        let read = if self.is_twin(index) {
            match &unit.old {
                Some(old) => old.read(entry, at, buf),
                None => Err(Errno::NOENT.into()),
            }
        } else {
            match unit.partial.get() {
                Some(Partial::File(partial)) => partial.file.read_exact_at(buf, at),
                Some(Partial::Tree(tree)) => tree::open_file(tree.dir.as_fd(), entry)
                    .map_err(Into::into)
                    .and_then(|file| file.read_exact_at(buf, at)),
                None => Err(Errno::NOENT.into()),
            }
        };
        read.map_err(|e| self.fault(&e, "reading", unit, entry))
    }

    /// Reads bytes of an entry as the older copy has them; an error where it has none.
    pub(crate) fn read_old(&self, map: &Map, index: u32, at: u64, buf: &mut [u8]) -> Result<(), Failure> {
        let unit = self.unit(index)?;
        let entry = map.entry(index);
        let read = match (&unit.old, self.laid()?.kin[index as usize]) {
            (Some(old), Kin::Cousin | Kin::Twin(_)) => old.read(entry, at, buf),
            _ => Err(Errno::NOENT.into()),
        };
        read.map_err(|e| self.fault(&e, "reading", unit, entry))
    }

    /// Whether the older copy has a file for this entry.
    pub(crate) fn has_kin(&self, index: u32) -> bool {
        self.laid
            .get()
            .is_some_and(|laid| laid.kin[index as usize] != Kin::None)
    }

    /// Writes bytes to their place in an entry.
    ///
    /// # Errors
    /// The disk's.
    pub(crate) fn write(&self, map: &Map, index: u32, at: u64, bytes: &[u8]) -> Result<Wrote, Failure> {
        let unit = self.unit(index)?;
        let entry = map.entry(index);
        if self.is_twin(index) {
            let mut there = vec![0; bytes.len()];
            let same = unit
                .old
                .as_ref()
                .is_some_and(|old| old.read(entry, at, &mut there).is_ok() && there == bytes);
            return Ok(if same { Wrote::Done } else { Wrote::Differs });
        }
        let written = match unit.partial.get() {
            Some(Partial::File(partial)) => partial.write(bytes, at),
            Some(Partial::Tree(tree)) => tree.write(index, entry, at, bytes),
            None => Err(Errno::NOENT.into()),
        };
        written.map_err(|e| self.fault(&e, "writing", unit, entry))?;
        self.behind.wrote(bytes.len(), || {
            let file = match unit.partial.get() {
                Some(Partial::File(partial)) => partial.file.try_clone()?,
                Some(Partial::Tree(tree)) => tree.open(entry)?,
                None => return Err(Errno::NOENT.into()),
            };
            Ok((file, unit.shown(entry)))
        });
        if unit.site.kind == UnitKind::Tree {
            self.promise
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take(bytes.len() as u64);
        }
        Ok(Wrote::Done)
    }

    /// Makes the partial of an entry's unit, if there is none.
    ///
    /// # Errors
    /// The rule is to leave what stands there; or there is no space.
    pub(crate) fn make_partial(&self, map: &Map, index: u32) -> Result<(), Failure> {
        let unit = self.unit(index)?;
        if unit.partial.get().is_some() {
            return Ok(());
        }
        if self.rule != IfExists::Replace {
            return Err(unit.site.exists("with other content"));
        }
        let partial = unit.create(map, &self.promise())?;
        unit.partial
            .set(partial)
            .expect("partials are made under one lock");
        Ok(())
    }

    /// From now on the entry's bytes lie in the partial.
    pub(crate) fn set_own(&self, index: u32) {
        if let Some(laid) = self.laid.get() {
            laid.own[index as usize].store(true, Ordering::Release);
        }
    }

    /// Copies bytes from an entry's older file to the partial, inside the kernel where it can (and without moving them,
    /// where the file system shares blocks).
    pub(crate) fn carry(&self, map: &Map, index: u32, at: u64, len: usize) -> Result<(), Failure> {
        let unit = self.unit(index)?;
        let entry = map.entry(index);
        let carried = || -> std::io::Result<()> {
            let old = unit.old.as_ref().ok_or(Errno::NOENT)?.file(entry)?;
            match unit.partial.get() {
                Some(Partial::File(partial)) => carry(&old, &partial.file, at, len),
                Some(Partial::Tree(tree)) => {
                    tree.is_unfinished(index);
                    carry(&old, &tree.open(entry)?, at, len)
                }
                None => Err(Errno::NOENT.into()),
            }
        };
        carried().map_err(|e| self.fault(&e, "copying from the old copy", unit, entry))
    }

    /// For each unit what is published of it, the file or the tree's directory, and whether it stood there already; `None`
    /// where something else was left standing.
    pub(super) fn published(&self) -> impl Iterator<Item = rustix::io::Result<Option<(File, bool)>>> {
        let units = self.laid.get().into_iter().flat_map(|laid| &laid.units);
        units.map(|unit| {
            let again = |file: std::io::Result<File>| file.map_err(|_| Errno::MFILE);
            let dir = |dir: &rustix::fd::OwnedFd| again(dir.try_clone().map(File::from));
            Ok(match (unit.partial.get(), &unit.old) {
                _ if unit.left => None,
                (Some(Partial::File(partial)), _) => Some((again(partial.file.try_clone())?, false)),
                (Some(Partial::Tree(tree)), _) => Some((dir(&tree.dir)?, false)),
                (None, Some(Old::File { file, .. })) => Some((again(file.try_clone())?, true)),
                (None, Some(old @ Old::Tree(_))) => Some((dir(&*old.dir().ok_or(Errno::NOENT)?)?, true)),
                (None, None) => None,
            })
        })
    }

    /// How long the partial of a payload that is one file is.
    pub(super) fn len_of_partial(&self) -> Option<u64> {
        match self.laid.get()?.units.first()?.partial.get()? {
            Partial::File(partial) => partial.file.metadata().ok().map(|meta| meta.len()),
            Partial::Tree(_) => None,
        }
    }

    /// Gives the partials' space back, whoever still holds them.
    pub(super) fn empty_partials(&self) {
        for unit in self.laid.get().into_iter().flat_map(|laid| &laid.units) {
            if let (Some(Partial::File(partial)), false) = (unit.partial.get(), unit.placed) {
                // Of a file that is about to go.
                let _ = rustix::fs::ftruncate(&partial.file, 0);
            }
        }
    }

    pub(crate) fn remove_partials(&self) {
        for site in &self.sites {
            if let Err(failure) = site.remove_partial() {
                tracing::warn!(path = site.shown, "{failure}");
            }
        }
    }

    fn fault(&self, error: &std::io::Error, doing: &str, unit: &Unit, entry: &Entry) -> Failure {
        fault::of_std(error, doing, &unit.shown(entry))
    }
}

impl Laid {
    pub(super) fn is_twin(&self, entry: u32) -> bool {
        matches!(self.kin[entry as usize], Kin::Twin(_)) && !self.own[entry as usize].load(Ordering::Acquire)
    }
}

impl Unit {
    /// An entry's final path, for people.
    pub(super) fn shown(&self, entry: &Entry) -> String {
        match entry.below() {
            b"" => self.site.shown.clone(),
            below => format!("{}/{}", self.site.shown, stage_core::failure::show_path(below)),
        }
    }

    /// Makes the partial anew.
    pub(super) fn create(&self, map: &Map, promise: &Promise) -> Result<Partial, Failure> {
        let made = match self.site.kind {
            UnitKind::File => self
                .site
                .create_file()
                .and_then(|file| self.file_partial(file, map, promise)),
            UnitKind::Tree => self
                .site
                .create_tree()
                .and_then(|dir| self.tree_partial(dir, false, map)),
        };
        made.inspect_err(|_| {
            let _ = self.site.remove_partial();
        })
    }

    pub(super) fn file_partial(&self, file: File, map: &Map, promise: &Promise) -> Result<Partial, Failure> {
        reserve::Partial::reserve(file, &self.site, map.entry(self.range.start), promise).map(Partial::File)
    }

    pub(super) fn tree_partial(
        &self,
        dir: rustix::fd::OwnedFd,
        taken_up: bool,
        map: &Map,
    ) -> Result<Partial, Failure> {
        let entries = self.range.clone().map(|index| map.entry(index));
        Tree::new(dir, taken_up, entries)
            .map(Partial::Tree)
            .map_err(|e| self.site.fault(e, "making directories"))
    }

    /// Makes a twin part of the partial, by another name for its file where that can be, else by a copy of it.
    pub(super) fn share(&self, map: &Map, index: u32, twin: u64) -> rustix::io::Result<()> {
        let entry = map.entry(index);
        let (Some(old), Some(Partial::Tree(tree))) = (&self.old, self.partial.get()) else {
            return Err(Errno::NOENT);
        };
        if !old.is_still(entry, twin) {
            return Err(Errno::STALE);
        }
        if let Some(dir) = old.dir() {
            let link = || rustix::fs::linkat(&dir, entry.below(), &tree.dir, entry.below(), AtFlags::empty());
            let linked = match link() {
                Err(Errno::EXIST) => {
                    rustix::fs::unlinkat(&tree.dir, entry.below(), AtFlags::empty())?;
                    link()
                }
                other => other,
            };
            match linked {
                Err(Errno::XDEV | Errno::PERM | Errno::MLINK | Errno::OPNOTSUPP) => {}
                other => return other,
            }
        }
        let error = |e: std::io::Error| Errno::from_io_error(&e).unwrap_or(Errno::IO);
        let from = old.file(entry).map_err(error)?;
        let to = tree.open(entry)?;
        for run in data_runs(entry) {
            let len = usize::try_from(run.end - run.start).map_err(|_| Errno::FBIG)?;
            carry(&from, &to, run.start, len).map_err(error)?;
        }
        tree.finish_file(entry)
    }
}

fn carry(old: &File, partial: &File, at: u64, len: usize) -> std::io::Result<()> {
    let mut done = 0;
    while done < len {
        let (mut from, mut to) = (at + done as u64, at + done as u64);
        match rustix::fs::copy_file_range(old, Some(&mut from), partial, Some(&mut to), len - done) {
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(Errno::XDEV | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::BADF) => {
                return carry_by_hand(old, partial, at + done as u64, len - done);
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn carry_by_hand(old: &File, partial: &File, at: u64, len: usize) -> std::io::Result<()> {
    let mut block = vec![0; BLOCK.min(len)];
    let mut done = 0;
    while done < len {
        let some = BLOCK.min(len - done);
        old.read_exact_at(&mut block[..some], at + done as u64)?;
        partial.write_all_at(&block[..some], at + done as u64)?;
        done += some;
    }
    Ok(())
}
