//! An older copy under the final name, held open: what of it the payload may share.

use std::collections::HashSet;
use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, PoisonError, RwLock};

use rustix::fs::{AtFlags, Dir, FileType, Stat};
use rustix::io::Errno;
use stage_core::manifest::{Entry, Kind};

use super::site::{Seen, Site};
use super::tree::open_file;
use crate::journal::FileState;
use crate::sparse::holes_are_zero;
use crate::store::map::{Map, is_dense, size_of};

/// See the module.
#[derive(Debug)]
pub(crate) enum Old {
    /// A file.
    File {
        /// Itself.
        file: File,
        /// Its state when it was opened.
        state: FileState,
    },
    /// A directory, ours or not; until [`Old::let_go`].
    Tree(RwLock<Option<Arc<OwnedFd>>>),
}

/// How an entry of the payload stands to the old copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kin {
    /// The old copy has no file there.
    None,
    /// It has a file there, with other bytes or another dress.
    Cousin,
    /// It has a file of this size and dress there, which may prove to be the same; with what tells it from a changed one.
    Twin(u64),
}

/// What tells a file from a changed one without reading it.
fn print(stat: &Stat) -> u64 {
    let words = [
        stat.st_dev,
        stat.st_ino,
        stat.st_size.cast_unsigned(),
        stat.st_mtime.cast_unsigned(),
        u64::from(stat.st_mtime_nsec as u32),
        stat.st_ctime.cast_unsigned(),
        u64::from(stat.st_ctime_nsec as u32),
    ];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    u64::from_le_bytes(*blake3::hash(&bytes).as_bytes().first_chunk().expect("32 bytes"))
}

impl Old {
    /// Opens what was seen under the name, if it may be compared with the payload.
    pub(super) fn open(site: &Site, seen: &Seen) -> rustix::io::Result<Option<Self>> {
        Ok(match seen {
            Seen::File(_) => {
                let file = site.open_final()?;
                let state = FileState::of(&file)?;
                Some(Self::File { file, state })
            }
            Seen::Generation | Seen::Dir => {
                let dir = Arc::new(site.open_final_dir()?);
                Some(Self::Tree(RwLock::new(Some(dir))))
            }
            Seen::Absent | Seen::Other(_) => None,
        })
    }

    /// How an entry stands to it. `shared` are the files that are twins of entries before: what are two files in the
    /// payload cannot share one.
    pub(super) fn kin(&self, entry: &Entry, shared: &mut HashSet<u64>) -> Kin {
        let Kind::File { size, .. } = entry.kind else {
            return Kin::None;
        };
        match self {
            Self::File { file, state } => {
                let same = state.size == size.0 && has_its_holes(file, entry);
                match rustix::fs::fstat(file) {
                    Ok(stat) if same => Kin::Twin(print(&stat)),
                    _ => Kin::Cousin,
                }
            }
            Self::Tree(_) => {
                let Some(dir) = self.dir() else { return Kin::None };
                let Ok(stat) = rustix::fs::statat(&dir, entry.below(), AtFlags::SYMLINK_NOFOLLOW) else {
                    return Kin::None;
                };
                if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                    return Kin::None;
                }
                let same = stat.st_size.cast_unsigned() == size.0
                    && dressed(&stat, entry)
                    && entry.xattrs.is_empty()
                    && (is_dense(entry)
                        || open_file(dir.as_fd(), entry).is_ok_and(|file| has_its_holes(&file, entry)));
                if same && shared.insert(stat.st_ino) {
                    Kin::Twin(print(&stat))
                } else {
                    Kin::Cousin
                }
            }
        }
    }

    /// What tells an entry's older file from a changed one now.
    pub(super) fn print_of(&self, entry: &Entry) -> Option<u64> {
        let stat = match self {
            Self::File { file, .. } => rustix::fs::fstat(file),
            Self::Tree(_) => rustix::fs::statat(self.dir()?, entry.below(), AtFlags::SYMLINK_NOFOLLOW),
        };
        stat.ok().map(|stat| print(&stat))
    }

    /// Whether the file that a twin was seen in is still that very file, unchanged.
    pub(super) fn is_still(&self, entry: &Entry, twin: u64) -> bool {
        match self {
            // The modification time tells of writes, not the change time: a chmod makes no other content.
            Self::File { file, state } => FileState::of(file)
                .is_ok_and(|now| now.same_file(state) && now.size == state.size && now.mtime == state.mtime),
            Self::Tree(_) => self.print_of(entry) == Some(twin),
        }
    }

    /// Reads bytes of an entry's older file.
    pub(super) fn read(&self, entry: &Entry, at: u64, buf: &mut [u8]) -> std::io::Result<()> {
        match self {
            Self::File { file, .. } => file.read_exact_at(buf, at),
            Self::Tree(_) => self.file(entry)?.read_exact_at(buf, at),
        }
    }

    /// Calls `with` with an entry's older file.
    pub(super) fn file(&self, entry: &Entry) -> std::io::Result<File> {
        match self {
            Self::File { file, .. } => file.try_clone(),
            Self::Tree(_) => Ok(open_file(self.dir().ok_or(Errno::NOENT)?.as_fd(), entry)?),
        }
    }

    /// The directory, while it is held.
    pub(super) fn dir(&self) -> Option<Arc<OwnedFd>> {
        match self {
            Self::File { .. } => None,
            Self::Tree(dir) => dir.read().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }

    /// It is of no use any more: who holds the directory keeps it from being removed.
    pub(super) fn let_go(&self) {
        if let Self::Tree(dir) = self {
            *dir.write().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }

    /// Whether it has exactly the entries of the payload's unit, as far as can be told without reading files: names,
    /// kinds, links, modes and times, and nothing more.
    pub(super) fn has_structure(&self, map: &Map, range: std::ops::Range<u32>) -> bool {
        let dir = match (self, self.dir()) {
            (Self::File { .. }, _) => return true,
            (Self::Tree(_), None) => return false,
            (Self::Tree(_), Some(dir)) => dir,
        };
        let mut expected = 0usize;
        let mut files = HashSet::new();
        for index in range {
            let entry = map.entry(index);
            let path: &[u8] = match entry.below() {
                b"" => b".",
                below => {
                    expected += 1;
                    below
                }
            };
            let Ok(stat) = rustix::fs::statat(&dir, path, AtFlags::SYMLINK_NOFOLLOW) else {
                return false;
            };
            let kind = FileType::from_raw_mode(stat.st_mode);
            let same = match &entry.kind {
                Kind::Dir => kind == FileType::Directory && dressed(&stat, entry),
                Kind::File { size, .. } => {
                    kind == FileType::RegularFile
                        && stat.st_size.cast_unsigned() == size.0
                        && dressed(&stat, entry)
                        // Two files are not two names of one.
                        && files.insert(stat.st_ino)
                }
                Kind::Symlink { to } => rustix::fs::readlinkat(&dir, path, Vec::new())
                    .is_ok_and(|text| text.as_bytes() == to.as_slice()),
                Kind::HardLink { to } => {
                    let first = rustix::fs::statat(&dir, map.entry(*to).below(), AtFlags::SYMLINK_NOFOLLOW);
                    first.is_ok_and(|first| (first.st_dev, first.st_ino) == (stat.st_dev, stat.st_ino))
                }
            };
            if !same || !entry.xattrs.is_empty() {
                return false;
            }
        }
        count(dir.as_fd(), expected).is_ok_and(|found| found == expected)
    }
}

/// Whether mode and modification time are the entry's.
fn dressed(stat: &Stat, entry: &Entry) -> bool {
    stat.st_mode & 0o7777 == entry.mode && (stat.st_mtime, stat.st_mtime_nsec as u32) == entry.mtime
}

fn has_its_holes(file: &File, entry: &Entry) -> bool {
    // One that cannot be read is compared with nothing.
    is_dense(entry) || (size_of(entry).0 > 0 && holes_are_zero(file, entry).unwrap_or(false))
}

/// How many entries a directory holds, at all depths; counted no further than `most` + 1.
pub(crate) fn count(dir: BorrowedFd<'_>, most: usize) -> rustix::io::Result<usize> {
    let mut found = 0;
    let mut listed = Dir::read_from(dir)?;
    while let Some(entry) = listed.read() {
        let entry = entry?;
        let name = entry.file_name();
        if name.to_bytes() == b"." || name.to_bytes() == b".." {
            continue;
        }
        found += 1;
        let kind = match entry.file_type() {
            FileType::Unknown => {
                FileType::from_raw_mode(rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?.st_mode)
            }
            kind => kind,
        };
        if kind == FileType::Directory {
            let flags = rustix::fs::OFlags::RDONLY
                | rustix::fs::OFlags::DIRECTORY
                | rustix::fs::OFlags::NOFOLLOW
                | rustix::fs::OFlags::CLOEXEC;
            let inner = rustix::fs::openat(dir, name, flags, rustix::fs::Mode::empty())?;
            found += count(inner.as_fd(), most.saturating_sub(found))?;
        }
        if found > most {
            return Err(Errno::TOOBIG);
        }
    }
    Ok(found)
}
