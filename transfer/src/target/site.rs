//! The place of a target: its directory, held, with the final name and the partial's name in it.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use stage_core::failure::{Code, Failure, show_path};
use stage_core::id::JobId;

use super::reserve::Partial;
use crate::fault;
use crate::root::Held;
use crate::store::map::Map;

/// See the module.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) held: Held,
    pub(super) name: Vec<u8>,
    partial: String,
    /// The final path, for people.
    pub(crate) shown: String,
}

/// What stands under a name.
pub(crate) enum Seen {
    Absent,
    File(Stat),
    Other(&'static str),
}

/// The name of a job's partial file.
pub(super) fn partial_name(job: JobId) -> String {
    format!(".stage-{job}-0")
}

impl Site {
    pub(crate) fn new(held: Held, name: &[u8], job: JobId) -> Self {
        let mut path = held.path();
        path.push(b'/');
        path.extend(name);
        Self {
            held,
            name: name.to_vec(),
            partial: partial_name(job),
            shown: show_path(&path),
        }
    }

    pub(super) fn fault(&self, errno: Errno, doing: &str) -> Failure {
        fault::of(errno, doing, &self.shown)
    }

    fn look_at(&self, name: &[u8]) -> rustix::io::Result<Seen> {
        match rustix::fs::statat(self.held.fd(), name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(Seen::Absent),
            Err(e) => Err(e),
            Ok(stat) => Ok(match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => Seen::File(stat),
                FileType::Directory => Seen::Other("a directory"),
                FileType::Symlink => Seen::Other("a symbolic link"),
                _ => Seen::Other("a special file"),
            }),
        }
    }

    /// What stands under the final name.
    pub(crate) fn look(&self) -> Result<Seen, Failure> {
        self.look_at(&self.name)
            .map_err(|e| self.fault(e, "looking at the target"))
    }

    /// The inode under the partial's name, if there is a regular file.
    pub(super) fn partial_inode(&self) -> Option<(u64, u64)> {
        match self.look_at(self.partial.as_bytes()) {
            Ok(Seen::File(stat)) => Some((stat.st_dev, stat.st_ino)),
            _ => None,
        }
    }

    pub(super) fn has_partial(&self) -> bool {
        !matches!(self.look_at(self.partial.as_bytes()), Ok(Seen::Absent))
    }

    /// The file under the final name, for reading. It is looked at through the descriptor, so nothing is raced with.
    pub(crate) fn open_final(&self) -> rustix::io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(self.held.fd(), self.name.as_slice(), flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Errno::INVAL);
        }
        Ok(File::from(file))
    }

    /// The partial that an earlier run of this job left, if it is really ours.
    pub(super) fn reopen_partial(&self) -> Option<File> {
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let open = |flags| {
            let file = rustix::fs::openat(self.held.fd(), &self.partial, flags, Mode::empty())?;
            let stat = rustix::fs::fstat(&file)?;
            let ours = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
                && stat.st_uid == rustix::process::geteuid().as_raw()
                && stat.st_nlink == 1;
            if ours { Ok(file) } else { Err(Errno::PERM) }
        };
        match open(flags | OFlags::RDWR) {
            Err(Errno::ACCESS) => {
                // It died between taking its final mode, which may be read-only, and the rename. A descriptor that is
                // only a place takes no new mode; its entry in /proc, which leads to that very inode, does.
                let place = open(flags | OFlags::PATH).ok()?;
                let entry = format!("/proc/self/fd/{}", place.as_raw_fd());
                rustix::fs::chmod(entry, Mode::RUSR | Mode::WUSR).ok()?;
                open(flags | OFlags::RDWR).ok().map(File::from)
            }
            other => other.ok().map(File::from),
        }
    }

    /// Makes the partial anew, with its space reserved. On failure nothing of it is left.
    pub(super) fn create_partial(self: &Arc<Self>, map: &Map) -> Result<Partial, Failure> {
        self.remove_partial()?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(self.held.fd(), &self.partial, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|e| self.fault(e, "making the partial file"))?;
        Partial::reserve(File::from(file), self, map).inspect_err(|_| {
            let _ = self.remove_partial();
        })
    }

    /// Removes the partial, if there is one.
    pub(super) fn remove_partial(&self) -> Result<(), Failure> {
        match rustix::fs::unlinkat(self.held.fd(), &self.partial, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(e) => Err(self.fault(e, "removing the partial file")),
        }
    }

    /// Gives the partial its final name. With `replace`, what stands there goes; else it stays.
    ///
    /// # Errors
    /// `EEXIST` if something stands there and stays.
    pub(super) fn rename(&self, replace: bool) -> rustix::io::Result<()> {
        let (dir, from, to) = (self.held.fd(), self.partial.as_str(), self.name.as_slice());
        if replace {
            return rustix::fs::renameat(dir, from, dir, to);
        }
        match rustix::fs::renameat_with(dir, from, dir, to, rustix::fs::RenameFlags::NOREPLACE) {
            // File systems without it (NFS): a link is as exclusive.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                rustix::fs::linkat(dir, from, dir, to, AtFlags::empty())?;
                rustix::fs::unlinkat(dir, from, AtFlags::empty())
            }
            other => other,
        }
    }

    /// Other content stands at the target.
    pub(super) fn exists(&self, what: &str) -> Failure {
        Failure::new(
            Code::Exists,
            format!("{} exists {what}", self.shown),
            "push with --if-exists replace to swap it atomically, or skip to leave it",
        )
        .at(self.shown.clone())
    }

    /// Something that is not a file stands at the target.
    pub(super) fn wrong_kind(&self, kind: &str) -> Failure {
        Failure::new(
            Code::WrongKind,
            format!("{} is {kind}, a file should come there", self.shown),
            "move it away, or push to another directory",
        )
        .at(self.shown.clone())
    }
}
