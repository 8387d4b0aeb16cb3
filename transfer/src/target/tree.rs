//! The partial directory of a tree: files written as their bytes come, all else made at the end.
//!
//! Everything is done below the directory's descriptor. Nobody else may enter it until it is published, so paths in it
//! need no guard; what a manifest may name has been checked (`stage_core::manifest`).

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{AtFlags, Dir, FallocateFlags, FileType, Mode, OFlags, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use stage_core::chunk::CHUNK;
use stage_core::manifest::{Entry, Kind};

use crate::store::map::{Map, is_dense, size_of};
use crate::sync::lock;

/// A tree's directory, being filled.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(super) dir: OwnedFd,
    /// Files that have bytes and not yet their size, mode and time.
    unfinished: Mutex<BTreeSet<u32>>,
    /// Nothing is known of what is finished: an earlier run began.
    taken_up: bool,
    /// Who writes into which large file: the file system lets in one at a time anyway, but there who waits spins.
    turns: [Mutex<()>; 16],
}

/// Opens a file of a tree for reading.
pub(super) fn open_file(dir: BorrowedFd<'_>, entry: &Entry) -> rustix::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    rustix::fs::openat(dir, entry.below(), flags, Mode::empty()).map(File::from)
}

impl Tree {
    /// A directory that is new, or was `taken_up` from an earlier run, with all the directories in it.
    pub(super) fn new<'e>(
        dir: OwnedFd,
        taken_up: bool,
        entries: impl Iterator<Item = &'e Entry>,
    ) -> rustix::io::Result<Self> {
        if taken_up {
            rustix::fs::fchmod(&dir, Mode::RWXU)?;
        }
        for entry in entries.filter(|entry| entry.kind == Kind::Dir && !entry.below().is_empty()) {
            match rustix::fs::mkdirat(&dir, entry.below(), Mode::RWXU) {
                // It may have its final mode already, which may keep us out.
                Err(Errno::EXIST) => rustix::fs::chmodat(&dir, entry.below(), Mode::RWXU, AtFlags::empty())?,
                other => other?,
            }
        }
        Ok(Self {
            dir,
            unfinished: Mutex::default(),
            taken_up,
            turns: Default::default(),
        })
    }

    /// A directory that is whole: nothing is made in it any more.
    pub(super) fn placed(dir: OwnedFd) -> Self {
        Self {
            dir,
            unfinished: Mutex::default(),
            taken_up: false,
            turns: Default::default(),
        }
    }

    /// Writes bytes to their place in a file, which is made if it is not there.
    pub(super) fn write(&self, index: u32, entry: &Entry, at: u64, bytes: &[u8]) -> std::io::Result<()> {
        let size = size_of(entry).0;
        let file = self.open(entry)?;
        if size >= CHUNK {
            let _turn = lock(&self.turns[index as usize % self.turns.len()]);
            size_up(&file, entry)?;
            file.write_all_at(bytes, at)?;
        } else {
            file.write_all_at(bytes, at)?;
        }
        // A file that comes in one piece is done in one go: most of a tree's files are small.
        let whole = bytes.len() as u64 == size && size < CHUNK;
        if whole && entry.xattrs.is_empty() && entry.mode & 0o600 == 0o600 {
            dress(&file, entry)?;
        } else {
            self.is_unfinished(index);
        }
        Ok(())
    }

    /// A file was changed other than by [`Self::write`].
    pub(super) fn is_unfinished(&self, index: u32) {
        self.unfinished
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(index);
    }

    /// A file for writing, made if it is not there.
    pub(super) fn open(&self, entry: &Entry) -> rustix::io::Result<File> {
        let path = entry.below();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(entry.mode | 0o600);
        match rustix::fs::openat(&self.dir, path, flags, mode) {
            // It has its final mode already.
            Err(Errno::ACCESS) => {
                rustix::fs::chmodat(&self.dir, path, Mode::RUSR | Mode::WUSR, AtFlags::empty())?;
                rustix::fs::openat(&self.dir, path, flags, mode)
            }
            other => other,
        }
        .map(File::from)
    }

    /// Makes what has no bytes, and gives everything its mode, time and attributes. `old` gives the older file that an
    /// entry is to share, where it is one.
    ///
    /// # Errors
    /// The file system's, and which entry.
    pub(super) fn finish<'e>(
        &self,
        map: &'e Map,
        range: std::ops::Range<u32>,
        share: impl Fn(u32, &'e Entry) -> rustix::io::Result<bool>,
    ) -> Result<(), (Errno, &'e Entry)> {
        // Not taken out: if this fails, it is done again.
        let unfinished = self
            .unfinished
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        for index in range.clone() {
            let entry = map.entry(index);
            let done = match &entry.kind {
                Kind::Dir => Ok(()),
                Kind::File { .. } => match share(index, entry) {
                    Ok(true) => Ok(()),
                    Ok(false) => {
                        let undone = self.taken_up || unfinished.contains(&index) || entry.data_len() == 0;
                        if undone { self.finish_file(entry) } else { Ok(()) }
                    }
                    Err(e) => Err(e),
                },
                Kind::Symlink { to } => self.link(entry, |dir, path| {
                    rustix::fs::symlinkat(to.as_slice(), dir, path)?;
                    rustix::fs::utimensat(dir, path, &times(entry), AtFlags::SYMLINK_NOFOLLOW)
                }),
                Kind::HardLink { to } => self.link(entry, |dir, path| {
                    rustix::fs::linkat(dir, map.entry(*to).below(), dir, path, AtFlags::empty())
                }),
            };
            done.map_err(|e| (e, entry))?;
        }
        // From within: what is made in a directory changes its time, and its mode may keep us out.
        for entry in range
            .rev()
            .map(|index| map.entry(index))
            .filter(|entry| entry.kind == Kind::Dir)
        {
            let dressed = || {
                let dir = match entry.below() {
                    b"" => self.dir.try_clone().map_err(|_| Errno::MFILE)?,
                    path => {
                        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                        rustix::fs::openat(&self.dir, path, flags, Mode::empty())?
                    }
                };
                // Of the topmost one the owner's rights stay whole: who may not write in a directory cannot move it.
                let mode = if entry.below().is_empty() {
                    entry.mode | 0o700
                } else {
                    entry.mode
                };
                dress_as(&File::from(dir), entry, mode)
            };
            dressed().map_err(|e| (e, entry))?;
        }
        Ok(())
    }

    /// The directory has moved to its last place: gives it the mode that it is to have.
    pub(super) fn settle(&self, entry: &Entry) -> rustix::io::Result<()> {
        rustix::fs::fchmod(&self.dir, Mode::from_raw_mode(entry.mode))?;
        rustix::fs::fsync(&self.dir)
    }

    pub(super) fn finish_file(&self, entry: &Entry) -> rustix::io::Result<()> {
        let file = self.open(entry)?;
        rustix::fs::ftruncate(&file, size_of(entry).0)?;
        dress(&file, entry)
    }

    fn link(
        &self,
        entry: &Entry,
        make: impl Fn(BorrowedFd<'_>, &[u8]) -> rustix::io::Result<()>,
    ) -> rustix::io::Result<()> {
        let path = entry.below();
        match make(self.dir.as_fd(), path) {
            Err(Errno::EXIST) => {
                rustix::fs::unlinkat(&self.dir, path, AtFlags::empty())?;
                make(self.dir.as_fd(), path)
            }
            other => other,
        }
    }
}

/// Takes from a partial that was taken up what it shares with an older copy, and the links in it: a file in it is
/// written to, and what is not only its own must not be. All of it is made again at the end.
pub(super) fn unshare(dir: &OwnedFd, map: &Map, range: std::ops::Range<u32>) -> rustix::io::Result<()> {
    let unlink = |entry: &Entry| match rustix::fs::unlinkat(dir, entry.below(), AtFlags::empty()) {
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(()),
        // A directory may have its final mode already, which keeps us out.
        Err(Errno::ACCESS) => {
            let parent = &entry.below()[..entry.below().len() - entry.name().len()];
            let parent = if parent.is_empty() { b"." } else { parent };
            rustix::fs::chmodat(dir, parent, Mode::RWXU, AtFlags::empty())?;
            rustix::fs::unlinkat(dir, entry.below(), AtFlags::empty())
        }
        other => other,
    };
    let of = |range: std::ops::Range<u32>| range.map(|index| map.entry(index));
    for entry in of(range.clone()).filter(|entry| matches!(entry.kind, Kind::HardLink { .. })) {
        unlink(entry)?;
    }
    for entry in of(range).filter(|entry| matches!(entry.kind, Kind::File { .. })) {
        let stat = rustix::fs::statat(dir, entry.below(), AtFlags::SYMLINK_NOFOLLOW);
        if stat.is_ok_and(|stat| stat.st_nlink > 1) {
            unlink(entry)?;
        }
    }
    Ok(())
}

/// Gives a large file its size, and its blocks where it has no holes and the file system can.
fn size_up(file: &File, entry: &Entry) -> rustix::io::Result<()> {
    let size = size_of(entry).0;
    if rustix::fs::fstat(file)?.st_size.cast_unsigned() >= size {
        return Ok(());
    }
    if is_dense(entry) {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, size) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INTR) => {}
            other => return other,
        }
    }
    rustix::fs::ftruncate(file, size)
}

/// Gives an open file or directory its attributes, mode and time, in this order.
fn dress(file: &File, entry: &Entry) -> rustix::io::Result<()> {
    dress_as(file, entry, entry.mode)
}

fn dress_as(file: &File, entry: &Entry, mode: u32) -> rustix::io::Result<()> {
    for (name, value) in &entry.xattrs {
        rustix::fs::fsetxattr(file, name.as_slice(), value, XattrFlags::empty())?;
    }
    rustix::fs::fchmod(file, Mode::from_raw_mode(mode))?;
    rustix::fs::futimens(file, &times(entry))
}

fn times(entry: &Entry) -> Timestamps {
    Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: rustix::fs::UTIME_OMIT,
        },
        last_modification: Timespec {
            tv_sec: entry.mtime.0,
            tv_nsec: entry.mtime.1.into(),
        },
    }
}

/// The bytes on disk that a partial holds already, a file or a directory with all in it, and how many entries that is; what
/// cannot be looked at counts as nothing.
pub(super) fn held(dir: BorrowedFd<'_>, name: &[u8]) -> (u64, u64) {
    let Ok(stat) = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) else {
        return (0, 0);
    };
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => (u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512), 1),
        FileType::Directory => {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let Ok(inner) = rustix::fs::openat(dir, name, flags, Mode::empty()) else {
                return (0, 1);
            };
            let Ok(listed) = Dir::read_from(&inner) else {
                return (0, 1);
            };
            listed
                .flatten()
                .filter(|entry| !matches!(entry.file_name().to_bytes(), b"." | b".."))
                .map(|entry| held(inner.as_fd(), entry.file_name().to_bytes()))
                .fold((0, 1), |(bytes, entries), (more, inner)| {
                    (bytes.saturating_add(more), entries + inner)
                })
        }
        _ => (0, 1),
    }
}

/// Removes what is under a name, with all that is in it; nothing there is no error. No link is followed.
pub(crate) fn remove(dir: BorrowedFd<'_>, name: &[u8]) -> rustix::io::Result<()> {
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(e) => return Err(e),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let inner = match rustix::fs::openat(dir, name, flags, Mode::empty()) {
        Err(Errno::ACCESS) => {
            rustix::fs::chmodat(dir, name, Mode::RWXU, AtFlags::empty())?;
            rustix::fs::openat(dir, name, flags, Mode::empty())?
        }
        other => other?,
    };
    let mut listed = Dir::read_from(&inner)?;
    while let Some(entry) = listed.read() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        if entry.file_type() == FileType::Directory {
            remove(inner.as_fd(), name)?;
            continue;
        }
        match rustix::fs::unlinkat(&inner, name, AtFlags::empty()) {
            // A directory without the right to write in it, or a file system that tells no types.
            Err(Errno::ACCESS) => {
                rustix::fs::fchmod(&inner, Mode::RWXU)?;
                remove(inner.as_fd(), name)?;
            }
            Err(Errno::ISDIR | Errno::PERM) => remove(inner.as_fd(), name)?,
            Err(Errno::NOENT) => {}
            other => other?,
        }
    }
    match rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOENT) => Ok(()),
        other => other,
    }
}
