//! One directory of the walk: its names, its entries in order, its extended attributes.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::OwnedFd;

use rustix::fs::{FileType, RawDir, fgetxattr, flistxattr};
use rustix::io::Errno;

use crate::source::seen::Stat;

/// Bytes of names that are asked for at a time.
const NAMES: usize = 64 << 10;
/// The longest value of an extended attribute that Linux has.
const MAX_VALUE: usize = 64 << 10;

/// A directory of which the entries are gone through.
pub(super) struct Level {
    pub(super) dir: OwnedFd,
    /// How long its path is.
    pub(super) path: usize,
    /// Device and inode.
    pub(super) inode: (u64, u64),
    /// Its own entry.
    pub(super) entry: usize,
    /// All that it holds is included.
    pub(super) is_whole: bool,
    pub(super) names: Names,
    /// In the order of their names.
    pub(super) found: Vec<Found>,
    pub(super) next: usize,
}

impl Level {
    pub(super) fn next(&mut self) -> Option<Found> {
        let found = self.found.get(self.next).cloned();
        self.next += 1;
        found
    }
}

/// One entry of a directory.
#[derive(Clone)]
pub(super) struct Found {
    name: Range<usize>,
    pub(super) stat: Stat,
}

/// The names of a directory's entries, each ended by a zero byte, in one piece of memory.
pub(in crate::source) struct Names {
    bytes: Vec<u8>,
    /// Where each name lies, its inode, and what the directory says of its kind.
    each: Vec<(Range<usize>, u64, FileType)>,
}

impl Names {
    /// The entries, of which nothing but the inode is known yet.
    pub(super) fn all(&self) -> Vec<Found> {
        let found = self.each.iter().map(|(name, inode, kind)| Found {
            name: name.clone(),
            stat: Stat::unknown(*kind, *inode),
        });
        found.collect()
    }

    pub(super) fn name(&self, found: &Found) -> &[u8] {
        &self.bytes[found.name.start..found.name.end - 1]
    }

    pub(super) fn c_name(&self, found: &Found) -> &CStr {
        CStr::from_bytes_with_nul(&self.bytes[found.name.clone()]).expect("it was a C string")
    }

    /// Names, with what the directory says of their kind.
    pub(in crate::source) fn iter(&self) -> impl Iterator<Item = (&[u8], FileType)> {
        self.each
            .iter()
            .map(|(name, _, kind)| (&self.bytes[name.start..name.end - 1], *kind))
    }
}

/// Reads a directory to its end.
pub(in crate::source) fn names_of(dir: &OwnedFd) -> rustix::io::Result<Names> {
    let mut buffer = vec![MaybeUninit::uninit(); NAMES];
    let mut names = Names {
        bytes: Vec::new(),
        each: Vec::new(),
    };
    let mut entries = RawDir::new(dir, &mut buffer);
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let name = entry.file_name().to_bytes_with_nul();
        if matches!(name, b".\0" | b"..\0") {
            continue;
        }
        let start = names.bytes.len();
        names.bytes.extend_from_slice(name);
        names
            .each
            .push((start..names.bytes.len(), entry.ino(), entry.file_type()));
    }
    Ok(names)
}

/// The extended attributes that travel, in the order of their names: those of users, and the ACLs.
pub(super) fn xattrs(fd: &OwnedFd) -> rustix::io::Result<super::Xattrs> {
    let mut list = vec![0; MAX_VALUE];
    let len = match flistxattr(fd, &mut list[..]) {
        Ok(len) => len,
        // A file system that has none.
        Err(Errno::OPNOTSUPP) => 0,
        Err(error) => return Err(error),
    };
    let mut all = Vec::new();
    let mut value = Vec::new();
    for name in list[..len].split(|byte| *byte == 0) {
        let travels = name.starts_with(b"user.")
            || matches!(name, b"system.posix_acl_access" | b"system.posix_acl_default");
        if !travels {
            continue;
        }
        value.resize(MAX_VALUE, 0);
        match fgetxattr(fd, name, &mut value[..]) {
            Ok(len) => all.push((name.to_vec(), value[..len].to_vec())),
            // Removed since it was listed.
            Err(Errno::NODATA) => {}
            Err(error) => return Err(error),
        }
    }
    all.sort();
    Ok(all)
}
