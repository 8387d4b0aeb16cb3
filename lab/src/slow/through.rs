//! A file system that shows another directory: every request is done there at once, but reads and writes are answered by
//! the lanes, which make them wait.
//!
//! An inode is a descriptor of the real one (O_PATH), so renames need no bookkeeping. Inode numbers are the real ones.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirEntryExt as _, FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use rustix::fs::{self as sys, AtFlags, CWD, FallocateFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid};

/// Nobody else changes what lies below while it is mounted over.
const VALID: Duration = Duration::from_secs(60);

/// The kernel's largest request; larger ones cost less each.
const WRITE: u32 = 1 << 20;

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
    writes: SyncSender<Answer>,
    reads: SyncSender<Answer>,
}

type Result<T> = std::result::Result<T, Errno>;

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

    fn files(&self) -> MutexGuard<'_, HashMap<u64, Arc<File>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn real(&self, ino: INodeNo) -> Result<Arc<OwnedFd>> {
        let inodes = self.inodes();
        inodes
            .get(&ino.0)
            .map(|inode| Arc::clone(&inode.real))
            .ok_or(Errno::ESTALE)
    }

    fn file(&self, handle: FileHandle) -> Result<Arc<File>> {
        self.files().get(&handle.0).map(Arc::clone).ok_or(Errno::EBADF)
    }

    fn keep(&self, file: File) -> FileHandle {
        let handle = self.next_file.fetch_add(1, Ordering::Relaxed);
        self.files().insert(handle, Arc::new(file));
        FileHandle(handle)
    }

    fn attributes(&self, real: &OwnedFd) -> Result<FileAttr> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
        let stat = sys::statat(real, "", flags).map_err(code)?;
        let mut attributes = attributes(&stat);
        if attributes.ino.0 == self.root {
            attributes.ino = INodeNo::ROOT;
        }
        Ok(attributes)
    }

    /// The inode of a name, which the kernel is then told of.
    fn find(&self, parent: &OwnedFd, name: &OsStr) -> Result<FileAttr> {
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

    /// Gives what was made to who asked for it.
    fn made(&self, request: &Request, parent: &OwnedFd, name: &OsStr) -> Result<FileAttr> {
        let owner = (
            Some(Uid::from_raw(request.uid())),
            Some(Gid::from_raw(request.gid())),
        );
        sys::chownat(parent, name, owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW).map_err(code)?;
        self.find(parent, name)
    }
}

fn code(why: rustix::io::Errno) -> Errno {
    Errno::from_i32(why.raw_os_error())
}

/// A path to what a descriptor stands for.
fn path_of(real: &OwnedFd) -> PathBuf {
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

fn timespec(time: Option<TimeOrNow>) -> Timespec {
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

/// Answers a request: what was found out, or why not.
macro_rules! answer {
    ($reply:expr, $found:expr, |$value:pat_param| $then:expr) => {
        match $found {
            Ok($value) => $then,
            Err(why) => $reply.error(why),
        }
    };
}

impl Filesystem for Through {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // An older kernel says what it can do instead, which is taken.
        let _ = config
            .set_max_write(WRITE)
            .or_else(|most| config.set_max_write(most));
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.real(parent).and_then(|parent| self.find(&parent, name));
        answer!(reply, found, |found| reply.entry(&VALID, &found, Generation(0)));
    }

    fn forget(&self, _request: &Request, ino: INodeNo, times: u64) {
        let mut inodes = self.inodes();
        if let Some(inode) = inodes.get_mut(&ino.0) {
            inode.known = inode.known.saturating_sub(times);
            if inode.known == 0 && ino != INodeNo::ROOT {
                inodes.remove(&ino.0);
            }
        }
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        let found = self.real(ino).and_then(|real| self.attributes(&real));
        answer!(reply, found, |found| reply.attr(&VALID, &found));
    }

    fn setattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let set = || -> Result<FileAttr> {
            let real = self.real(ino)?;
            if uid.is_some() || gid.is_some() {
                let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
                sys::chownat(&*real, "", uid, gid, AtFlags::EMPTY_PATH).map_err(code)?;
            }
            if let Some(mode) = mode {
                fs::set_permissions(path_of(&real), Permissions::from_mode(mode & 0o7777))?;
            }
            if let Some(size) = size {
                File::options().write(true).open(path_of(&real))?.set_len(size)?;
            }
            if atime.is_some() || mtime.is_some() {
                let times = Timestamps {
                    last_access: timespec(atime),
                    last_modification: timespec(mtime),
                };
                sys::utimensat(&*real, "", &times, AtFlags::EMPTY_PATH).map_err(code)?;
            }
            self.attributes(&real)
        };
        answer!(reply, set(), |found| reply.attr(&VALID, &found));
    }

    fn readlink(&self, _request: &Request, ino: INodeNo, reply: ReplyData) {
        let found = self
            .real(ino)
            .and_then(|real| sys::readlinkat(&*real, "", Vec::new()).map_err(code));
        answer!(reply, found, |target| reply.data(target.as_bytes()));
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let make = || {
            let parent = self.real(parent)?;
            sys::mkdirat(&*parent, name, Mode::from_raw_mode(mode & !umask)).map_err(code)?;
            self.made(request, &parent, name)
        };
        answer!(reply, make(), |made| reply.entry(&VALID, &made, Generation(0)));
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let parent = self.real(parent);
        let gone = parent.and_then(|parent| sys::unlinkat(&*parent, name, AtFlags::empty()).map_err(code));
        answer!(reply, gone, |()| reply.ok());
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let parent = self.real(parent);
        let gone = parent.and_then(|parent| sys::unlinkat(&*parent, name, AtFlags::REMOVEDIR).map_err(code));
        answer!(reply, gone, |()| reply.ok());
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let make = || {
            let parent = self.real(parent)?;
            sys::symlinkat(target, &*parent, name).map_err(code)?;
            self.made(request, &parent, name)
        };
        answer!(reply, make(), |made| reply.entry(&VALID, &made, Generation(0)));
    }

    fn link(&self, _request: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let make = || {
            let (real, parent) = (self.real(ino)?, self.real(parent)?);
            sys::linkat(CWD, path_of(&real), &*parent, name, AtFlags::SYMLINK_FOLLOW).map_err(code)?;
            self.find(&parent, name)
        };
        answer!(reply, make(), |made| reply.entry(&VALID, &made, Generation(0)));
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: fuser::RenameFlags,
        reply: ReplyEmpty,
    ) {
        let rename = || {
            let (from, to) = (self.real(parent)?, self.real(new_parent)?);
            let flags = sys::RenameFlags::from_bits_retain(flags.bits());
            sys::renameat_with(&*from, name, &*to, new_name, flags).map_err(code)
        };
        answer!(reply, rename(), |()| reply.ok());
    }

    fn open(&self, _request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let open = || {
            let real = self.real(ino)?;
            let file = sys::openat(CWD, path_of(&real), access(flags.0), Mode::empty()).map_err(code)?;
            Ok(self.keep(File::from(file)))
        };
        answer!(reply, open(), |handle| reply
            .opened(handle, FopenFlags::FOPEN_KEEP_CACHE));
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let create = || {
            let parent = self.real(parent)?;
            let exclusive = OFlags::from_bits_retain(flags as u32) & OFlags::EXCL;
            let all = access(flags) | OFlags::CREATE | OFlags::NOFOLLOW | exclusive;
            let mode = Mode::from_raw_mode(mode & !umask & 0o7777);
            let file = sys::openat(&*parent, name, all, mode).map_err(code)?;
            let made = self.made(request, &parent, name)?;
            Ok((made, self.keep(File::from(file))))
        };
        answer!(reply, create(), |(made, handle)| reply.created(
            &VALID,
            &made,
            Generation(0),
            handle,
            FopenFlags::FOPEN_KEEP_CACHE
        ));
    }

    fn read(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let read = || {
            let file = self.file(handle)?;
            let mut bytes = vec![0; size as usize];
            let mut filled = 0;
            while filled < bytes.len() {
                match file.read_at(&mut bytes[filled..], offset + filled as u64)? {
                    0 => break,
                    more => filled += more,
                }
            }
            bytes.truncate(filled);
            Ok(bytes)
        };
        // Lanes end with this file system: they are there.
        answer!(reply, read(), |bytes| drop(
            self.reads.send(Answer::Read(reply, bytes))
        ));
    }

    fn write(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self
            .file(handle)
            .and_then(|file| Ok(file.write_all_at(data, offset)?));
        let bytes = data.len() as u32;
        answer!(reply, written, |()| drop(
            self.writes.send(Answer::Written(reply, bytes))
        ));
    }

    fn flush(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.files().remove(&handle.0);
        reply.ok();
    }

    fn fsync(&self, _request: &Request, _ino: INodeNo, handle: FileHandle, _data: bool, reply: ReplyEmpty) {
        let synced = self.file(handle).and_then(|file| Ok(file.sync_all()?));
        answer!(reply, synced, |()| drop(self.writes.send(Answer::Synced(reply))));
    }

    fn fsyncdir(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _data: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let list = || -> Result<Vec<_>> {
            let real = self.real(ino)?;
            let mut entries = vec![
                (ino.0, FileType::Directory, OsStr::new(".").to_owned()),
                (ino.0, FileType::Directory, OsStr::new("..").to_owned()),
            ];
            for entry in fs::read_dir(path_of(&real))? {
                let entry = entry?;
                let kind = FileType::from_std(entry.file_type()?).ok_or(Errno::EIO)?;
                entries.push((entry.ino(), kind, entry.file_name()));
            }
            Ok(entries)
        };
        answer!(reply, list(), |entries| {
            // A directory that changes between two calls may show an entry twice or not at all.
            for (at, (ino, kind, name)) in entries.into_iter().enumerate().skip(offset as usize) {
                if reply.add(INodeNo(ino), at as u64 + 1, kind, name) {
                    break;
                }
            }
            reply.ok();
        });
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let found = self
            .real(INodeNo::ROOT)
            .and_then(|root| sys::fstatvfs(&*root).map_err(code));
        answer!(reply, found, |found| reply.statfs(
            found.f_blocks,
            found.f_bfree,
            found.f_bavail,
            found.f_files,
            found.f_ffree,
            found.f_bsize as u32,
            found.f_namemax as u32,
            found.f_frsize as u32
        ));
    }

    fn fallocate(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let mode = FallocateFlags::from_bits_retain(mode as u32);
        let file = self.file(handle);
        let taken = file.and_then(|file| sys::fallocate(&*file, mode, offset, length).map_err(code));
        answer!(reply, taken, |()| reply.ok());
    }

    fn lseek(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        const SEEK_DATA: i32 = 3;
        const SEEK_HOLE: i32 = 4;
        let seek = || {
            let file = self.file(handle)?;
            let from = match whence {
                SEEK_DATA => sys::SeekFrom::Data(offset as u64),
                SEEK_HOLE => sys::SeekFrom::Hole(offset as u64),
                _ => return Err(Errno::EINVAL),
            };
            sys::seek(&*file, from).map_err(code)
        };
        answer!(reply, seek(), |at| reply.offset(at as i64));
    }
}

/// Whether a file is opened to read or to write; the kernel does the rest.
fn access(flags: i32) -> OFlags {
    (OFlags::from_bits_retain(flags as u32) & OFlags::ACCMODE) | OFlags::CLOEXEC
}
