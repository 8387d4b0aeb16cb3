//! A file system that shows another directory: every request is done there at once, but reads and writes are answered by
//! the lanes, which make them wait.

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{DirEntryExt as _, FileExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use rustix::fs::{self as sys, AtFlags, CWD, FallocateFlags, Gid, Mode, OFlags, Timestamps, Uid};

use super::real::{Answer, Result, Through, code, path_of, timespec};

/// Nobody else changes what lies below while it is mounted over.
const VALID: Duration = Duration::from_secs(60);

/// The kernel's largest request; larger ones cost less each.
const WRITE: u32 = 1 << 20;

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
        self.forgotten(ino, times);
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
