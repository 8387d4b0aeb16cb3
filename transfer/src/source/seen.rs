//! What the walk saw: where the units are, and what tells each entry from a changed one without reading it.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, fstat, statat};
use stage_core::failure::Failure;
use stage_core::manifest::{Entry, Kind};
use stage_core::payload::Walk;

use super::walk::globs::Globs;

/// What the system says of an entry.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stat {
    pub(super) kind: FileType,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) links: u64,
    /// Device and inode.
    pub(super) inode: (u64, u64),
    /// In bytes.
    pub(super) size: u64,
    /// Bytes that it takes on disk.
    pub(super) allocated: u64,
    pub(super) mtime: (i64, u32),
    pub(super) ctime: (i64, u32),
}

impl Stat {
    /// Of what lies at a path.
    pub(super) fn at(dir: impl AsFd, path: impl rustix::path::Arg, follow: bool) -> rustix::io::Result<Self> {
        let flags = match follow {
            true => AtFlags::empty(),
            false => AtFlags::SYMLINK_NOFOLLOW,
        };
        statat(dir, path, flags).map(|stat| Self::from(&stat))
    }

    /// Of what is open.
    pub(super) fn of(file: impl AsFd) -> rustix::io::Result<Self> {
        fstat(file).map(|stat| Self::from(&stat))
    }

    /// Of what was not looked at yet.
    pub(super) fn unknown(kind: FileType, inode: u64) -> Self {
        Self {
            kind,
            mode: 0,
            uid: 0,
            links: 0,
            inode: (0, inode),
            size: 0,
            allocated: 0,
            mtime: (0, 0),
            ctime: (0, 0),
        }
    }
}

#[allow(
    clippy::useless_conversion,
    clippy::unnecessary_fallible_conversions,
    reason = "the fields' types differ between architectures"
)]
impl From<&rustix::fs::Stat> for Stat {
    fn from(stat: &rustix::fs::Stat) -> Self {
        let nanos = |nanos| u32::try_from(nanos).unwrap_or(0);
        Self {
            kind: FileType::from_raw_mode(stat.st_mode),
            mode: stat.st_mode,
            uid: stat.st_uid,
            links: stat.st_nlink.into(),
            inode: (stat.st_dev, stat.st_ino),
            size: u64::try_from(stat.st_size).unwrap_or(0),
            allocated: u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512),
            mtime: (stat.st_mtime, nanos(stat.st_mtime_nsec)),
            ctime: (stat.st_ctime, nanos(stat.st_ctime_nsec)),
        }
    }
}

/// One PATH, held open.
#[derive(Debug)]
pub(super) struct Unit {
    /// Its own entry; those of a directory follow.
    pub(super) first: u32,
    pub(super) file: Arc<File>,
    pub(super) place: PathBuf,
}

/// What the walk saw.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) globs: Globs,
    pub(super) follow: bool,
    units: Vec<Unit>,
    ids: Vec<Id>,
    devices: Vec<Device>,
}

/// What is not in the manifest, 24 bytes for each entry.
#[derive(Debug, Clone, Copy)]
struct Id {
    inode: u64,
    ctime: i64,
    ctime_nanos: u32,
    device: u32,
}

#[derive(Debug, Clone, Copy)]
struct Device {
    number: u64,
    remote: bool,
}

impl Seen {
    pub(super) fn new(walk: &Walk) -> Result<Self, Failure> {
        Ok(Self {
            globs: Globs::new(walk)?,
            follow: walk.follow,
            units: Vec::new(),
            ids: Vec::new(),
            devices: Vec::new(),
        })
    }

    /// The next entry of the manifest; `near` is open and lies on its file system.
    pub(super) fn push(&mut self, stat: &Stat, near: BorrowedFd<'_>) {
        let number = stat.inode.0;
        let known = self.devices.iter().rposition(|device| device.number == number);
        let device = known.unwrap_or_else(|| {
            self.devices.push(Device {
                number,
                remote: is_remote(near),
            });
            self.devices.len() - 1
        });
        self.ids.push(Id {
            inode: stat.inode.1,
            ctime: stat.ctime.0,
            ctime_nanos: stat.ctime.1,
            device: device as u32,
        });
    }

    /// The last entry is none after all.
    pub(super) fn pop(&mut self) {
        self.ids.pop();
    }

    pub(super) fn add_unit(&mut self, first: u32, fd: OwnedFd, place: PathBuf) {
        self.units.push(Unit {
            first,
            file: Arc::new(fd.into()),
            place,
        });
    }

    pub(super) fn units(&self) -> &[Unit] {
        &self.units
    }

    /// Whose an entry is.
    pub(super) fn unit_of(&self, entry: u32) -> &Unit {
        let after = self.units.partition_point(|unit| unit.first <= entry);
        &self.units[after - 1]
    }

    /// An entry as it was seen.
    pub(super) fn fingerprint(&self, entries: &[Entry], entry: u32) -> Fingerprint {
        let id = self.ids[entry as usize];
        let device = self.devices[id.device as usize];
        let it = &entries[entry as usize];
        let size = match it.kind {
            Kind::File { size, .. } => size.0,
            Kind::HardLink { to } => match entries[to as usize].kind {
                Kind::File { size, .. } => size.0,
                _ => 0,
            },
            Kind::Dir | Kind::Symlink { .. } => 0,
        };
        Fingerprint {
            size,
            mtime: it.mtime,
            ctime: (id.ctime, id.ctime_nanos),
            inode: (device.number, id.inode),
            remote: device.remote,
        }
    }
}

/// What tells a file from a changed one without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fingerprint {
    pub(super) size: u64,
    pub(super) mtime: (i64, u32),
    pub(super) ctime: (i64, u32),
    pub(super) inode: (u64, u64),
    remote: bool,
}

/// Whether an entry has changed, as far as can be told without reading it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Differs {
    No,
    /// Its times did, which mode, owner, links and the jitter of network file systems explain as well as a write.
    Perhaps,
    Surely(String),
}

impl Fingerprint {
    /// The same entry as it is now.
    pub(super) fn now(&self, stat: &Stat) -> Self {
        Self {
            size: stat.size,
            mtime: stat.mtime,
            ctime: stat.ctime,
            inode: stat.inode,
            remote: self.remote,
        }
    }

    /// What of a file has changed since `before`, if anything has.
    pub(super) fn differs(&self, before: &Self) -> Differs {
        if self.size != before.size {
            Differs::Surely(format!(
                "its size went from {} to {} bytes",
                before.size, self.size
            ))
        } else if self.inode != before.inode {
            Differs::Surely("it is another file now".to_owned())
        } else if self.mtime != before.mtime && (self.was_written() || !is_jitter(self.mtime, before.mtime)) {
            // What was not read before cannot be compared with what it was then.
            Differs::Surely("it was written to".to_owned())
        } else if self.has_other_times(before) {
            Differs::Perhaps
        } else {
            Differs::No
        }
    }

    pub(super) fn has_other_times(&self, before: &Self) -> bool {
        (self.mtime, self.ctime) != (before.mtime, before.ctime)
    }

    /// A write sets both times to the same moment, and only there is a file system's word on them exact.
    fn was_written(&self) -> bool {
        !self.remote && self.mtime == self.ctime
    }
}

/// Network file systems keep times in grains of up to two seconds, and tell now the exact, now the rounded one.
fn is_jitter(one: (i64, u32), other: (i64, u32)) -> bool {
    let nanos = |(s, ns): (i64, u32)| i128::from(s) * 1_000_000_000 + i128::from(ns);
    (nanos(one) - nanos(other)).abs() <= 2_000_000_000
}

/// Whether a file lies on another host or behind a daemon, whose clocks and caches have a say in its times: NFS, AFS,
/// FUSE, the SMBs, Ceph, 9p, Lustre, BeeGFS, GPFS, GFS2, OCFS2.
fn is_remote(file: BorrowedFd<'_>) -> bool {
    const REMOTE: [u32; 13] = [
        0x6969,
        0x5346_414f,
        0x6573_5546,
        0x517b,
        0xff53_4d42,
        0xfe53_4d42,
        0x00c3_6400,
        0x0102_1997,
        0x0bd0_0bd0,
        0x1983_0326,
        0x4750_4653,
        0x0116_1970,
        0x7461_636f,
    ];
    rustix::fs::fstatfs(file).is_ok_and(|stat| REMOTE.contains(&(stat.f_type as u32)))
}

#[cfg(test)]
mod tests {
    use super::*;

    // R30, R31.
    #[test]
    fn a_write_is_told_from_times_that_jitter() {
        let before = Fingerprint {
            size: 9,
            mtime: (100, 500_000_000),
            ctime: (100, 500_000_000),
            inode: (1, 2),
            remote: false,
        };
        assert_eq!(before.differs(&before), Differs::No);
        let surely = |now: Fingerprint| matches!(now.differs(&before), Differs::Surely(_));
        let perhaps = |now: Fingerprint| now.differs(&before) == Differs::Perhaps;
        let times = |mtime, ctime, remote| Fingerprint {
            mtime,
            ctime,
            remote,
            ..before
        };
        // A mode, a name, a time that was set.
        assert!(perhaps(times(before.mtime, (160, 0), false)));
        assert!(perhaps(times((101, 0), (160, 0), false)));
        // A write, however soon after the last one; and how rounding looks.
        assert!(surely(times((101, 0), (101, 0), false)));
        assert!(perhaps(times((101, 0), (101, 0), true)));
        assert!(perhaps(times((98, 500_000_000), (98, 500_000_000), true)));
        assert!(surely(times((103, 0), (103, 0), true)));
        assert!(surely(times((160, 0), (170, 0), false)));
        assert!(surely(Fingerprint { size: 8, ..before }));
    }
}
