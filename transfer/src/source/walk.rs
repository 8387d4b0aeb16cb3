//! The one walk over the source: each directory is read once, each entry is looked at once, no file is read.
//!
//! A directory is held open while its entries are gone through, and they are reached from its descriptor: a tree may be
//! deeper than a path is long, and no path is resolved twice. What a walk finds is the payload's manifest, and beside it
//! what tells each entry from a changed one ([`Seen`]).

mod directory;
pub(super) mod globs;

use std::collections::HashMap;
use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags, accessat, openat, readlinkat};
use rustix::io::Errno;
use stage_core::assignment::SourceSpec;
use stage_core::failure::{Code, Failure, show_path};
use stage_core::manifest::{Data, Entry, Kind, MAX_MANIFEST, MAX_NAME, MAX_PATH, Manifest};
use stage_core::payload::{SourcePath, Walk};
use stage_core::units::ByteCount;

use super::look::Pulse;
use super::seen::{Seen, Stat};
use crate::sparse::data_runs;
pub(super) use directory::names_of;
use directory::{Found, Level};
use globs::Wanted;

/// A file that is no longer may have holes, but none that is worth a look.
const NO_HOLES: u64 = 64 << 10;
/// No entry of a manifest is encoded in fewer bytes.
const MIN_LINE: u64 = 10;

/// Walks over all that a push names.
pub(super) fn walk(spec: &SourceSpec, pulse: &Pulse) -> Result<(Manifest, Seen), Failure> {
    let mut paths: Vec<_> = spec.paths.iter().collect();
    paths.sort_by(|one, other| one.name.cmp(&other.name));
    let mut walker = Walker::new(&spec.walk, pulse)?;
    for path in &paths {
        walker.unit(path)?;
    }
    let manifest = Manifest {
        entries: walker.entries,
    };
    Ok((manifest, walker.seen))
}

fn path_of(path: &SourcePath) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(&path.path))
}

/// Why something of the source cannot be looked at or opened.
pub(super) fn refused(shown: &str, error: &io::Error) -> Failure {
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
    failure.at(shown)
}

/// Extended attributes, by name.
type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

struct Walker<'a> {
    walk: &'a Walk,
    pulse: &'a Pulse,
    entries: Vec<Entry>,
    seen: Seen,
    /// Of the unit at hand: the first name of each file that has several.
    linked: HashMap<(u64, u64), u32>,
    /// Where the unit at hand is, for messages.
    place: Vec<u8>,
    user: u32,
}

impl<'a> Walker<'a> {
    fn new(walk: &'a Walk, pulse: &'a Pulse) -> Result<Self, Failure> {
        Ok(Self {
            walk,
            pulse,
            entries: Vec::new(),
            seen: Seen::new(walk)?,
            linked: HashMap::new(),
            place: Vec::new(),
            user: rustix::process::geteuid().as_raw(),
        })
    }

    /// One PATH, and all that it holds.
    fn unit(&mut self, path: &SourcePath) -> Result<(), Failure> {
        let place = path_of(path);
        let shown = show_path(&path.path);
        self.place.clone_from(&path.path);
        self.linked.clear();
        let refused = |error: Errno| refused(&shown, &error.into());
        // Not opened before it is known to be something that opening does nothing to.
        let stat = Stat::at(CWD, path.path.as_slice(), true).map_err(refused)?;
        let flags = match stat.kind {
            FileType::Directory => OFlags::DIRECTORY,
            FileType::RegularFile => OFlags::NONBLOCK,
            _ => return Err(special(stat.kind).at(shown)),
        };
        let flags = flags | OFlags::RDONLY | OFlags::CLOEXEC;
        let fd = openat(CWD, &place, flags, Mode::empty()).map_err(refused)?;
        let stat = Stat::of(fd.as_fd()).map_err(refused)?;
        let first = self.entries.len() as u32;
        match stat.kind {
            FileType::Directory => {
                let inner = fd
                    .try_clone()
                    .map_err(|error| super::walk::refused(&shown, &error))?;
                let xattrs = self.xattrs(|| fd.try_clone(), b"")?;
                self.push(path.name.clone(), &stat, xattrs, Kind::Dir, fd.as_fd())?;
                self.seen.add_unit(first, fd, place);
                self.descend(&path.name, inner, &stat)
            }
            FileType::RegularFile => {
                let file = File::from(fd);
                self.is_as_long_as_it_says(&file, &stat, &shown)?;
                let xattrs = self.xattrs(|| file.try_clone().map(OwnedFd::from), b"")?;
                let data = self.data(|| file.try_clone(), &stat, b"")?;
                let size = ByteCount(stat.size);
                self.push(
                    path.name.clone(),
                    &stat,
                    xattrs,
                    Kind::File { size, data },
                    file.as_fd(),
                )?;
                self.seen.add_unit(first, file.into(), place);
                Ok(())
            }
            other => Err(special(other).at(shown)),
        }
    }

    /// Files of /proc and the like say that they are empty and are not.
    fn is_as_long_as_it_says(&self, file: &File, stat: &Stat, shown: &str) -> Result<(), Failure> {
        match file.read_at(&mut [0], stat.size) {
            Ok(0) => Ok(()),
            Ok(_) => Err(Failure::new(
                Code::SourceKind,
                format!("the source holds more than the {} bytes that it says", stat.size),
                "copy it to a file on disk first",
            )
            .at(shown)),
            Err(error) => Err(refused(shown, &error)),
        }
    }

    /// All that a unit's directory holds, in the order of the manifest.
    fn descend(&mut self, name: &[u8], dir: OwnedFd, stat: &Stat) -> Result<(), Failure> {
        let mut path = name.to_vec();
        let unit = name.len();
        let mut levels = vec![self.level(dir, stat, &path, unit)?];
        while let Some(level) = levels.last_mut() {
            path.truncate(level.path);
            let Some(found) = level.next() else {
                let (entry, is_whole) = (level.entry, level.is_whole);
                levels.pop();
                // Nothing in it was included, nor was it itself.
                if !is_whole && entry + 1 == self.entries.len() && !levels.is_empty() {
                    self.entries.pop();
                    self.seen.pop();
                }
                continue;
            };
            path.push(b'/');
            path.extend_from_slice(level.names.name(&found));
            if let Some(dir) = self.entry(level, &found, &path, unit)? {
                if self.walk.follow {
                    self.is_no_circle(&levels, &found, &path, unit)?;
                }
                levels.push(self.level(dir, &found.stat, &path, unit)?);
            }
        }
        Ok(())
    }

    /// One entry of a directory; the descriptor of one that is a directory itself.
    fn entry(
        &mut self,
        level: &Level,
        found: &Found,
        path: &[u8],
        unit: usize,
    ) -> Result<Option<OwnedFd>, Failure> {
        let below = &path[unit + 1..];
        let is_dir = found.stat.kind == FileType::Directory;
        if self.seen.globs.wanted(below, is_dir, level.is_whole) == Wanted::No {
            return Ok(None);
        }
        let name = level.names.c_name(found);
        if path.len() > MAX_PATH || name.to_bytes().len() > MAX_NAME {
            return Err(Failure::new(
                Code::SourceKind,
                "its path is longer than Linux takes",
                "leave it out with --exclude, or push a directory further down",
            )
            .at(self.shown(below)));
        }
        let refused = |walker: &Self, error: Errno| refused(&walker.shown(below), &error.into());
        let open = |flags: OFlags| {
            let follow = match self.walk.follow {
                true => OFlags::empty(),
                false => OFlags::NOFOLLOW,
            };
            let flags = flags | follow | OFlags::RDONLY | OFlags::CLOEXEC;
            openat(&level.dir, name, flags, Mode::empty())
        };
        let stat = &found.stat;
        match stat.kind {
            FileType::Directory => {
                let dir = open(OFlags::DIRECTORY).map_err(|error| refused(self, error))?;
                let xattrs = self.xattrs(|| dir.try_clone(), below)?;
                self.push(path.to_vec(), stat, xattrs, Kind::Dir, dir.as_fd())?;
                Ok(Some(dir))
            }
            FileType::RegularFile => {
                if stat.links > 1 {
                    let entry = self.entries.len() as u32;
                    if let Some(first) = self.linked.get(&stat.inode) {
                        let kind = Kind::HardLink { to: *first };
                        self.push(path.to_vec(), stat, Vec::new(), kind, level.dir.as_fd())?;
                        return Ok(None);
                    }
                    self.linked.insert(stat.inode, entry);
                }
                let file = || Ok(File::from(open(OFlags::NONBLOCK)?));
                if !self.surely_readable(stat) {
                    let flags = AtFlags::EACCESS;
                    accessat(&level.dir, name, Access::READ_OK, flags).map_err(|e| refused(self, e))?;
                }
                let xattrs = self.xattrs(|| file().map(OwnedFd::from), below)?;
                let data = self.data(file, stat, below)?;
                let size = ByteCount(stat.size);
                self.push(
                    path.to_vec(),
                    stat,
                    xattrs,
                    Kind::File { size, data },
                    level.dir.as_fd(),
                )?;
                Ok(None)
            }
            FileType::Symlink => {
                let to = readlinkat(&level.dir, name, Vec::new()).map_err(|error| refused(self, error))?;
                let to = to.into_bytes();
                self.push(
                    path.to_vec(),
                    stat,
                    Vec::new(),
                    Kind::Symlink { to },
                    level.dir.as_fd(),
                )?;
                Ok(None)
            }
            other => Err(special(other).at(self.shown(below))),
        }
    }

    fn push(
        &mut self,
        path: Vec<u8>,
        stat: &Stat,
        xattrs: Xattrs,
        kind: Kind,
        near: BorrowedFd<'_>,
    ) -> Result<(), Failure> {
        if self.entries.len() as u64 >= MAX_MANIFEST.0 / MIN_LINE {
            return Err(Failure::new(
                Code::SourceKind,
                format!("the source has more than {} entries", self.entries.len()),
                "push it in parts",
            )
            .at(show_path(&self.place)));
        }
        self.seen.push(stat, near);
        self.entries.push(Entry {
            path,
            mode: match kind {
                Kind::Symlink { .. } => 0o777,
                _ => stat.mode & 0o777,
            },
            mtime: stat.mtime,
            xattrs,
            kind,
        });
        Ok(())
    }

    /// A directory, read and looked through.
    fn level(&self, dir: OwnedFd, stat: &Stat, path: &[u8], unit: usize) -> Result<Level, Failure> {
        let below = path.get(unit + 1..).unwrap_or_default();
        let names = names_of(&dir).map_err(|error| refused(&self.shown(below), &error.into()))?;
        let mut all = names.all();
        // In the order of inodes, so that a disk that holds their tables is read forwards.
        all.sort_unstable_by_key(|found| found.stat.inode.1);
        let mut found = Vec::with_capacity(all.len());
        for mut one in all {
            if !self.pulse.beat() {
                return Err(Failure::new(
                    Code::Cancelled,
                    "the walk over the source was stopped",
                    "push again",
                ));
            }
            match Stat::at(&dir, names.c_name(&one), self.walk.follow) {
                Ok(stat) => {
                    one.stat = stat;
                    found.push(one);
                }
                Err(error) => self.unseen(&dir, names.c_name(&one), below, error)?,
            }
        }
        found.sort_unstable_by(|one, other| names.name(one).cmp(names.name(other)));
        Ok(Level {
            dir,
            path: path.len(),
            inode: stat.inode,
            entry: self.entries.len() - 1,
            is_whole: self.seen.globs.is_whole(below),
            names,
            found,
            next: 0,
        })
    }

    /// An entry that cannot be looked at: an error, unless it is gone by now, or would not be sent.
    fn unseen(&self, dir: &OwnedFd, name: &CStr, below: &[u8], error: Errno) -> Result<(), Failure> {
        let path = match below {
            b"" => name.to_bytes().to_vec(),
            below => [below, b"/", name.to_bytes()].concat(),
        };
        let globs = &self.seen.globs;
        let link = Stat::at(dir, name, false);
        if link.is_err_and(|error| error == Errno::NOENT)
            || globs.wanted(&path, false, globs.is_whole(below)) == Wanted::No
        {
            return Ok(());
        }
        if link.is_ok_and(|stat| stat.kind == FileType::Symlink) {
            return Err(self.leads_nowhere(&path, error));
        }
        Err(refused(&self.shown(&path), &error.into()))
    }

    fn leads_nowhere(&self, below: &[u8], error: Errno) -> Failure {
        let hint = "push without --follow, which keeps links as links, or leave it out with --exclude";
        let failure = match error {
            Errno::LOOP => Failure::new(Code::SourceKind, "this link leads in a circle", hint),
            Errno::NOENT | Errno::NOTDIR => Failure::new(
                Code::SourceMissing,
                "this link leads to nothing, and links are to be followed",
                hint,
            ),
            other => refused("", &other.into()),
        };
        failure.at(self.shown(below))
    }

    fn is_no_circle(&self, levels: &[Level], found: &Found, path: &[u8], unit: usize) -> Result<(), Failure> {
        let Some(above) = levels.iter().find(|level| level.inode == found.stat.inode) else {
            return Ok(());
        };
        let above = path[..above.path].get(unit + 1..).unwrap_or_default();
        Err(Failure::new(
            Code::SourceKind,
            format!(
                "this link leads in a circle: it is {}, which it lies in",
                self.shown(above)
            ),
            "push without --follow, which keeps links as links, or leave it out with --exclude",
        )
        .at(self.shown(&path[unit + 1..])))
    }

    /// Whether the mode alone says that the agent's user may read; else the system is asked.
    fn surely_readable(&self, stat: &Stat) -> bool {
        stat.mode & 0o444 == 0o444 || (stat.uid == self.user && stat.mode & 0o400 != 0)
    }

    /// Where a file has data. Only one that has less on disk than it is long is asked.
    fn data(&self, file: impl Fn() -> io::Result<File>, stat: &Stat, below: &[u8]) -> Result<Data, Failure> {
        if stat.size <= NO_HOLES || stat.allocated >= stat.size {
            return Ok(Data::Dense);
        }
        let runs = file().and_then(|file| data_runs(&file, stat.size));
        let runs = runs.map_err(|error| refused(&self.shown(below), &error))?;
        Ok(Data::of(ByteCount(stat.size), runs))
    }

    fn xattrs(&self, open: impl Fn() -> io::Result<OwnedFd>, below: &[u8]) -> Result<Xattrs, Failure> {
        if !self.walk.xattrs {
            return Ok(Vec::new());
        }
        let read = open().and_then(|fd| Ok(directory::xattrs(&fd)?));
        read.map_err(|error| refused(&self.shown(below), &error))
    }

    /// An entry's whole path as text.
    fn shown(&self, below: &[u8]) -> String {
        shown_below(Path::new(OsStr::from_bytes(&self.place)), below)
    }
}

/// The path of an entry as text, from its unit's place and its path below.
pub(super) fn shown_below(place: &Path, below: &[u8]) -> String {
    let place = place.as_os_str().as_bytes();
    match below {
        b"" => show_path(place),
        below => show_path(&[place, b"/", below].concat()),
    }
}

/// What is neither file, directory nor link.
fn special(kind: FileType) -> Failure {
    let what = match kind {
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::BlockDevice | FileType::CharacterDevice => "a device file",
        _ => "no regular file",
    };
    Failure::new(
        Code::SourceKind,
        format!("{what} cannot be sent"),
        "leave it out with --exclude; files, directories and links can be sent",
    )
}

#[cfg(test)]
pub(super) mod tests;
