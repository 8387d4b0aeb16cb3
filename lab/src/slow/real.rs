//! The directory below a slow disk: its inodes and open files, as descriptors, and what is said of them.
//!
//! An inode is a descriptor of the real one (O_PATH), so renames need no bookkeeping. Inode numbers are the real ones.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, INodeNo, ReplyData, ReplyEmpty, ReplyWrite, Request, TimeOrNow,
};
use rustix::fs::{self as sys, AtFlags, CWD, Gid, Mode, OFlags, Timespec, Uid};

/// What is said to the kernel once the disk is so far.
#[derive(Debug)]
pub(super) enum Answer {
    Written(ReplyWrite, u32),
    Read(ReplyData, Vec<u8>),
    Synced(ReplyEmpty),
}

impl Answer {
    /// What the disk has to move for it.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Written(_, bytes) => u64::from(*bytes),
            Self::Read(_, bytes) => bytes.len() as u64,
            Self::Synced(_) => 0,
        }
    }

    pub(super) fn give(self) {
        match self {
            Self::Written(reply, bytes) => reply.written(bytes),
            Self::Read(reply, bytes) => reply.data(&bytes),
            Self::Synced(reply) => reply.ok(),
        }
    }
}

#[derive(Debug)]
struct Inode {
    real: Arc<OwnedFd>,
    /// How often the kernel was told of it, and has not forgotten.
    known: u64,
}

/// The file system.
#[derive(Debug)]
pub(super) struct Through {
    root: u64,
    inodes: Mutex<HashMap<u64, Inode>>,
    files: Mutex<HashMap<u64, Arc<File>>>,
    next_file: AtomicU64,
    pub(super) writes: SyncSender<Answer>,
    pub(super) reads: SyncSender<Answer>,
}

pub(super) type Result<T> = std::result::Result<T, Errno>;

impl Through {
    pub(super) fn over(
        dir: &Path,
        writes: SyncSender<Answer>,
        reads: SyncSender<Answer>,
    ) -> io::Result<Self> {
        // A descriptor for each inode that the kernel knows: trees have many.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let all = rustix::process::Rlimit {
            current: limit.maximum,
            ..limit
        };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, all)?;
        let real = sys::openat(
            CWD,
            dir,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let root = fs::metadata(path_of(&real))?.ino();
        let inode = Inode {
            real: Arc::new(real),
            known: 1,
        };
        Ok(Self {
            root,
            inodes: Mutex::new(HashMap::from([(INodeNo::ROOT.0, inode)])),
            files: Mutex::default(),
            next_file: AtomicU64::new(1),
            writes,
            reads,
        })
    }

    fn inodes(&self) -> MutexGuard<'_, HashMap<u64, Inode>> {
        self.inodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn files(&self) -> MutexGuard<'_, HashMap<u64, Arc<File>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn real(&self, ino: INodeNo) -> Result<Arc<OwnedFd>> {
        let inodes = self.inodes();
        inodes
            .get(&ino.0)
            .map(|inode| Arc::clone(&inode.real))
            .ok_or(Errno::ESTALE)
    }

    pub(super) fn file(&self, handle: FileHandle) -> Result<Arc<File>> {
        self.files().get(&handle.0).map(Arc::clone).ok_or(Errno::EBADF)
    }

    pub(super) fn keep(&self, file: File) -> FileHandle {
        let handle = self.next_file.fetch_add(1, Ordering::Relaxed);
        self.files().insert(handle, Arc::new(file));
        FileHandle(handle)
    }

    pub(super) fn attributes(&self, real: &OwnedFd) -> Result<FileAttr> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
        let stat = sys::statat(real, "", flags).map_err(code)?;
        let mut attributes = attributes(&stat);
        if attributes.ino.0 == self.root {
            attributes.ino = INodeNo::ROOT;
        }
        Ok(attributes)
    }

    /// The inode of a name, which the kernel is then told of.
    pub(super) fn find(&self, parent: &OwnedFd, name: &OsStr) -> Result<FileAttr> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let real = sys::openat(parent, name, flags, Mode::empty()).map_err(code)?;
        let attributes = self.attributes(&real)?;
        let mut inodes = self.inodes();
        let inode = inodes.entry(attributes.ino.0).or_insert_with(|| Inode {
            real: Arc::new(real),
            known: 0,
        });
        inode.known += 1;
        Ok(attributes)
    }

    /// The kernel has forgotten an inode so many times.
    pub(super) fn forgotten(&self, ino: INodeNo, times: u64) {
        let mut inodes = self.inodes();
        if let Some(inode) = inodes.get_mut(&ino.0) {
            inode.known = inode.known.saturating_sub(times);
            if inode.known == 0 && ino != INodeNo::ROOT {
                inodes.remove(&ino.0);
            }
        }
    }

    /// Gives what was made to who asked for it.
    pub(super) fn made(&self, request: &Request, parent: &OwnedFd, name: &OsStr) -> Result<FileAttr> {
        let owner = (
            Some(Uid::from_raw(request.uid())),
            Some(Gid::from_raw(request.gid())),
        );
        sys::chownat(parent, name, owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW).map_err(code)?;
        self.find(parent, name)
    }
}

pub(super) fn code(why: rustix::io::Errno) -> Errno {
    Errno::from_i32(why.raw_os_error())
}

/// A path to what a descriptor stands for.
pub(super) fn path_of(real: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", real.as_raw_fd()))
}

fn time(seconds: i64, nanoseconds: u64) -> SystemTime {
    let whole = Duration::from_secs(seconds.unsigned_abs());
    let whole = if seconds < 0 {
        SystemTime::UNIX_EPOCH - whole
    } else {
        SystemTime::UNIX_EPOCH + whole
    };
    whole + Duration::from_nanos(nanoseconds)
}

fn kind(mode: u32) -> FileType {
    match sys::FileType::from_raw_mode(mode) {
        sys::FileType::Directory => FileType::Directory,
        sys::FileType::Symlink => FileType::Symlink,
        sys::FileType::Fifo => FileType::NamedPipe,
        sys::FileType::Socket => FileType::Socket,
        sys::FileType::CharacterDevice => FileType::CharDevice,
        sys::FileType::BlockDevice => FileType::BlockDevice,
        _ => FileType::RegularFile,
    }
}

fn attributes(stat: &sys::Stat) -> FileAttr {
    FileAttr {
        ino: INodeNo(stat.st_ino),
        size: stat.st_size as u64,
        blocks: stat.st_blocks as u64,
        atime: time(stat.st_atime, stat.st_atime_nsec),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        ctime: time(stat.st_ctime, stat.st_ctime_nsec),
        crtime: SystemTime::UNIX_EPOCH,
        kind: kind(stat.st_mode),
        perm: (stat.st_mode & 0o7777) as u16,
        nlink: stat.st_nlink as u32,
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev: stat.st_rdev as u32,
        blksize: stat.st_blksize as u32,
        flags: 0,
    }
}

pub(super) fn timespec(time: Option<TimeOrNow>) -> Timespec {
    let (tv_sec, tv_nsec) = match time {
        None => (0, sys::UTIME_OMIT),
        Some(TimeOrNow::Now) => (0, sys::UTIME_NOW),
        Some(TimeOrNow::SpecificTime(time)) => match time.duration_since(SystemTime::UNIX_EPOCH) {
            Ok(after) => (after.as_secs() as i64, i64::from(after.subsec_nanos())),
            Err(before) => (-(before.duration().as_secs() as i64), 0),
        },
    };
    Timespec { tv_sec, tv_nsec }
}
