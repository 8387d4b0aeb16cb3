//! Whether somebody on this node reads a generation.
//!
//! Of a file that only this generation has, the kernel says it (`crate::lease`). A file whose inode another generation
//! shares may be open under the other's name, and the kernel does not tell which: there `/proc` decides if it shows all
//! processes of the node with what they have open, which it does to root outside any container; else a file that is open
//! counts as read, and the generation stays until it is not. That keeps what is cheap to keep: shared files take no
//! space, so what waits is only what differed. A directory that somebody holds (by `cd`, or to open files below it) is
//! seen in `/proc` only, as far as that can be read.

use std::collections::HashSet;
use std::fmt;
use std::fs::{self, File};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, StatxFlags};
use rustix::io::Errno;

use crate::lease::is_open_elsewhere;

/// The inode of the PID namespace of the machine itself (`PROC_PID_INIT_INO` of the kernel).
const MACHINES_PIDS: u64 = 0xEFFF_FFFC;

/// Who reads it.
#[derive(Debug)]
pub(crate) enum Usage {
    /// This process.
    Process(String),
    /// Somebody has one of its files open.
    Open,
    /// It cannot be known, so it counts as read.
    Unknown,
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(pid) => write!(f, "process {pid} is in it"),
            Self::Open => f.write_str("a file in it is open"),
            Self::Unknown => f.write_str("whether its files are open cannot be known here"),
        }
    }
}

type Inode = (u64, u64);

/// A generation's inodes.
#[derive(Default)]
struct Inodes {
    dirs: HashSet<Inode>,
    /// Of the files that only it has.
    own: HashSet<Inode>,
    shared: HashSet<Inode>,
}

/// Who reads the generation of this name, if anybody does; `ours`: also this agent, which may still send it to others.
pub(super) fn of(all: BorrowedFd<'_>, generation: &[u8], ours: bool) -> rustix::io::Result<Option<Usage>> {
    let sees_all = sees_all();
    let mut inodes = Inodes::default();
    let mut usage = None;
    walk(all, generation, &mut |dir, name, stat| {
        let inode = (stat.st_dev, stat.st_ino);
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => inodes.dirs.insert(inode),
            FileType::RegularFile if stat.st_nlink > 1 => {
                let new = inodes.shared.insert(inode);
                if new && !sees_all {
                    usage = usage_of_file(dir, name);
                }
                new
            }
            FileType::RegularFile => {
                inodes.own.insert(inode);
                usage = match usage_of_file(dir, name) {
                    Some(Usage::Unknown) if sees_all => None,
                    other => other,
                };
                true
            }
            _ => true,
        };
        usage.is_none()
    })?;
    // Only now: in the walk its directories were open here.
    Ok(usage.or_else(|| in_proc(&inodes, generation, ours)))
}

fn usage_of_file(dir: BorrowedFd<'_>, name: &[u8]) -> Option<Usage> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let open = let_in(dir, name, || rustix::fs::openat(dir, name, flags, Mode::empty()));
    match open.map(File::from).map(|file| is_open_elsewhere(&file)) {
        Ok(Some(false)) => None,
        Ok(Some(true)) => Some(Usage::Open),
        Ok(None) | Err(_) => Some(Usage::Unknown),
    }
}

/// Does something with a file or directory of the agent's own; where its mode keeps the agent out, with a mode for as long
/// as that takes that does not.
fn let_in<T>(
    dir: BorrowedFd<'_>,
    name: &[u8],
    mut act: impl FnMut() -> rustix::io::Result<T>,
) -> rustix::io::Result<T> {
    match act() {
        Err(Errno::ACCESS) => {}
        other => return other,
    }
    let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    if !matches!(kind, FileType::RegularFile | FileType::Directory) {
        return Err(Errno::ACCESS);
    }
    let mode = Mode::from_raw_mode(stat.st_mode);
    rustix::fs::chmodat(dir, name, mode | Mode::RWXU, AtFlags::empty())?;
    let done = act();
    rustix::fs::chmodat(dir, name, mode, AtFlags::empty())?;
    done
}

/// Calls `each` with every entry of a directory and itself; until it says `false`.
fn walk(
    dir: BorrowedFd<'_>,
    name: &[u8],
    each: &mut impl FnMut(BorrowedFd<'_>, &[u8], &Stat) -> bool,
) -> rustix::io::Result<bool> {
    let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if !each(dir, name, &stat) {
        return Ok(false);
    }
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return Ok(true);
    }
    // Once more from the start where its mode keeps the agent out: what was seen is seen again.
    let_in(dir, name, || {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let inner = rustix::fs::openat(dir, name, flags, Mode::empty())?;
        let mut listed = Dir::read_from(&inner)?;
        while let Some(entry) = listed.read() {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." && !walk(inner.as_fd(), name, &mut *each)? {
                return Ok(false);
            }
        }
        Ok(true)
    })
}

/// Whether `/proc` shows what every process of this node has open.
fn sees_all() -> bool {
    rustix::process::geteuid().is_root()
        && fs::metadata("/proc/self/ns/pid").is_ok_and(|meta| meta.ino() == MACHINES_PIDS)
}

/// Looks in `/proc` for who is in one of the directories, or has a file open under a name in this generation.
fn in_proc(inodes: &Inodes, generation: &[u8], ours: bool) -> Option<Usage> {
    let own = std::process::id().to_string();
    let name = [b"/.stage/", generation].concat();
    let by_name = |text: &[u8]| {
        // Of another one the name may go on.
        let ends = |part: &[u8]| matches!(part.get(name.len()), None | Some(b'/' | b' '));
        (0..text.len()).any(|at| text[at..].starts_with(&name) && ends(&text[at..]))
    };
    let leads_in = |link: &Path| {
        // Without asking a server, which may not answer: what matters here is local.
        let flags = AtFlags::STATX_DONT_SYNC;
        let Ok(x) = rustix::fs::statx(rustix::fs::CWD, link, flags, StatxFlags::BASIC_STATS) else {
            return false;
        };
        let inode = (rustix::fs::makedev(x.stx_dev_major, x.stx_dev_minor), x.stx_ino);
        inodes.dirs.contains(&inode)
            || inodes.own.contains(&inode)
            || (inodes.shared.contains(&inode)
                && fs::read_link(link).is_ok_and(|text| by_name(text.as_os_str().as_bytes())))
    };
    // What cannot be read is somebody else's process, or has just ended.
    for process in fs::read_dir("/proc").ok()?.flatten() {
        let pid = process.file_name();
        if !pid.as_bytes().iter().all(u8::is_ascii_digit) || (!ours && pid == *own) {
            continue;
        }
        let path = process.path();
        // What it has mapped, and what a container has mounted.
        let named = || {
            let text = |file| fs::read(path.join(file)).is_ok_and(|text| by_name(&text));
            text("maps") || text("mountinfo")
        };
        let opened = || {
            fs::read_dir(path.join("fd"))
                .is_ok_and(|links| links.flatten().any(|link| leads_in(&link.path())))
        };
        if leads_in(&path.join("cwd")) || leads_in(&path.join("root")) || opened() || named() {
            return Some(Usage::Process(pid.to_string_lossy().into_owned()));
        }
    }
    None
}
