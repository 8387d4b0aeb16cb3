//! What a tar holds, laid out below a directory and nowhere else.
//!
//! A tar may name any path and any link. So each name is taken apart here, its directories are opened without following
//! any link, and only files, directories and links are made; of modes, only permissions.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Timespec, Timestamps};
use rustix::io::Errno;
use stage_core::failure::show_path;
use tar::{Archive, EntryType};

use super::bodies::Bodies;

/// Modes that would keep the agent itself from reading, or moving, what it laid out, by inode. They are given once that
/// is known.
pub(super) type HeldBack = HashMap<u64, Mode>;

/// Gives a file or directory its mode, except for the rights of its owner that it is to keep for now.
fn give(file: impl AsFd, mode: Mode, own: Mode, held_back: &mut HeldBack) -> rustix::io::Result<()> {
    let inode = rustix::fs::fstat(&file)?.st_ino;
    if mode.contains(own) {
        // The number may have been that of one that an entry further on took the place of.
        held_back.remove(&inode);
    } else {
        held_back.insert(inode, mode);
    }
    rustix::fs::fchmod(&file, mode | own)
}

/// What a directory gets when all in it is made.
struct Dress {
    path: Vec<u8>,
    mode: Mode,
    times: Timestamps,
}

/// The directories above entries, each with the latest time of what is in it. Those that the tar does not name get that
/// time, so that a tree is the same wherever and whenever it is laid out.
#[derive(Default)]
struct Above(BTreeMap<Vec<u8>, Timespec>);

impl Above {
    fn add(&mut self, above: &[Vec<u8>], times: &Timestamps) {
        let own = times.last_modification;
        for len in 0..=above.len() {
            let latest = self.0.entry(above[..len].join(&b'/')).or_insert(own);
            if (latest.tv_sec, latest.tv_nsec) < (own.tv_sec, own.tv_nsec) {
                *latest = own;
            }
        }
    }

    fn unnamed(self, named: &[Dress]) -> Vec<Dress> {
        let named: HashSet<&[u8]> = named.iter().map(|dress| dress.path.as_slice()).collect();
        self.0
            .into_iter()
            .filter(|(path, _)| !named.contains(path.as_slice()))
            .map(|(path, latest)| Dress {
                path,
                mode: Mode::from_raw_mode(0o755),
                times: modified(latest),
            })
            .collect()
    }
}

/// What may stand before an entry: names, pax headers and lists of holes, all of which come to lie in memory.
const HEAD: u64 = 16 << 20;

/// How a tar is read.
#[derive(Default)]
struct Watch {
    /// How many bytes may still be read, where that is limited.
    room: Cell<Option<u64>>,
    /// All of it was read and more was wanted. A tar that has the mark of its end never comes to that.
    over: Cell<bool>,
}

struct Watched<'r> {
    tar: &'r mut dyn Read,
    watch: &'r Watch,
}

impl Read for Watched<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.tar.read(buffer)?;
        if got == 0 && !buffer.is_empty() {
            self.watch.over.set(true);
        }
        if let Some(room) = self.watch.room.get() {
            let left = room.checked_sub(got as u64).ok_or_else(|| {
                io::Error::other("a name or another header in it is longer than any should be")
            })?;
            self.watch.room.set(Some(left));
        }
        Ok(got)
    }
}

/// Lays out a tar below `dir`. Gives the name of the one directory that holds all of it, if there is one.
///
/// # Errors
/// The disk's; or what the tar holds cannot be laid out.
pub(super) fn lay_out(
    dir: &OwnedFd,
    tar: &mut dyn Read,
    bodies: &mut Bodies,
    held_back: &mut HeldBack,
) -> io::Result<Option<Vec<u8>>> {
    let watch = Watch::default();
    let mut archive = Archive::new(Watched { tar, watch: &watch });
    let mut dirs: Vec<Dress> = Vec::new();
    let mut above_all = Above::default();
    let mut tops: Vec<Vec<u8>> = Vec::new();
    let mut any = false;
    let mut entries = archive.entries()?;
    loop {
        watch.room.set(Some(HEAD));
        let Some(entry) = entries.next() else { break };
        watch.room.set(None);
        let mut entry = entry?;
        let kind = entry.header().entry_type();
        // What a tar says of itself, such as the commit that `git archive` made it from, or its label (`tar -V`).
        if kind == EntryType::XGlobalHeader || kind.as_byte() == b'V' {
            io::copy(&mut entry, &mut io::sink())?;
            continue;
        }
        any = true;
        if is_pax_sparse(&mut entry)? {
            return Err(refused(
                "it holds a sparse file in the form of pax, which is not read (tar --format=gnu makes another)",
                &entry.path_bytes(),
            ));
        }
        let path = plain(&entry.path_bytes())?;
        let mode = Mode::from_raw_mode(entry.header().mode()? & 0o777);
        let times = times(&mut entry)?;
        let Some((name, above)) = path.split_last() else {
            // The top itself, as "./".
            dirs.push(Dress {
                path: Vec::new(),
                mode,
                times,
            });
            continue;
        };
        if !tops.contains(&path[0]) && tops.len() < 2 {
            tops.push(path[0].clone());
        }
        above_all.add(above, &times);
        let parent = reach(dir, above)?;
        match kind {
            EntryType::Directory => {
                match rustix::fs::mkdirat(&parent, name.as_slice(), Mode::RWXU) {
                    Err(Errno::EXIST) => {}
                    other => other?,
                }
                dirs.push(Dress {
                    path: path.join(&b'/'),
                    mode,
                    times,
                });
            }
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                make_room(&parent, name)?;
                let flags =
                    OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let file = rustix::fs::openat(&parent, name.as_slice(), flags, Mode::RUSR | Mode::WUSR)?;
                let mut file = File::from(file);
                let wanted = entry.size();
                if bodies.copy(&mut entry, &mut file)? != wanted {
                    return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
                }
                give(&file, mode, Mode::RUSR, held_back)?;
                rustix::fs::futimens(&file, &times)?;
            }
            EntryType::Symlink => {
                make_room(&parent, name)?;
                let to = entry.link_name_bytes().unwrap_or_default();
                rustix::fs::symlinkat(to.as_ref(), &parent, name.as_slice())?;
                rustix::fs::utimensat(&parent, name.as_slice(), &times, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            EntryType::Link => {
                make_room(&parent, name)?;
                let to = plain(&entry.link_name_bytes().unwrap_or_default())?;
                let Some((first, above)) = to.split_last() else {
                    return Err(refused("a hard link leads nowhere", &entry.path_bytes()));
                };
                let other = reach(dir, above)?;
                let (first, name) = (first.as_slice(), name.as_slice());
                match rustix::fs::linkat(&other, first, &parent, name, AtFlags::empty()) {
                    Err(Errno::NOENT) => {
                        return Err(refused(
                            "a hard link is to what does not come before it",
                            &entry.path_bytes(),
                        ));
                    }
                    other => other?,
                }
            }
            other => return Err(refused(&no_file(other), &entry.path_bytes())),
        }
        // Some tars repeat a file's bytes with its hard links.
        io::copy(&mut entry, &mut io::sink())?;
    }
    if !any {
        return Err(io::Error::other("it holds nothing, or is no tar"));
    }
    if watch.over.get() {
        return Err(io::Error::other(
            "it ends without the mark of its end, as if who wrote it had died",
        ));
    }
    dirs.extend(above_all.unnamed(&dirs));
    // From within, since what is made in a directory changes its time.
    dirs.sort_by(|one, other| other.path.cmp(&one.path));
    for dress in &dirs {
        let opened = open_dir(dir, if dress.path.is_empty() { b"." } else { &dress.path })?;
        give(&opened, dress.mode, Mode::RWXU, held_back)?;
        rustix::fs::futimens(&opened, &dress.times)?;
    }
    let only = match tops.as_slice() {
        [only] if open_dir(dir, only).is_ok() => Some(only.clone()),
        _ => None,
    };
    Ok(only)
}

/// Why an entry of a type is none that can be laid out.
fn no_file(kind: EntryType) -> String {
    match (kind, kind.as_byte()) {
        (EntryType::Char, _) => "it holds a character device".to_owned(),
        (EntryType::Block, _) => "it holds a block device".to_owned(),
        (EntryType::Fifo, _) => "it holds a FIFO".to_owned(),
        (_, b'M') => "it goes on with a file of another volume (tar -M), which is not read".to_owned(),
        (_, b'D') => "it is an incremental backup (tar -g), which is not read".to_owned(),
        (_, byte) => format!(
            "it holds an entry of type {}, which is not known",
            show_path(&[b'\'', byte, b'\''])
        ),
    }
}

fn refused(why: &str, path: &[u8]) -> io::Error {
    io::Error::other(format!("{why}: {}", show_path(path)))
}

/// The names of a path, none of which leads out.
fn plain(path: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    if path.first() == Some(&b'/') {
        return Err(refused("a path is absolute", path));
    }
    path.split(|byte| *byte == b'/')
        .filter(|name| !name.is_empty() && *name != b".")
        .map(|name| {
            if name == b".." {
                return Err(refused("a path leads out of the tar", path));
            }
            if name.len() > 255 || name.contains(&0) {
                return Err(refused("a name is none of a file", path));
            }
            Ok(name.to_vec())
        })
        .collect()
}

fn open_dir(dir: &OwnedFd, path: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_SYMLINKS;
    rustix::fs::openat2(dir, path, flags, Mode::empty(), resolve)
}

/// The directory of these names, made as far as it is missing.
fn reach(dir: &OwnedFd, names: &[Vec<u8>]) -> io::Result<OwnedFd> {
    if names.is_empty() {
        return dir.try_clone();
    }
    match open_dir(dir, &names.join(&b'/')) {
        Err(Errno::NOENT) => {}
        Err(Errno::LOOP | Errno::NOTDIR) => {
            return Err(refused(
                "a path goes through what is no directory",
                &names.join(&b'/'),
            ));
        }
        other => return Ok(other?),
    }
    for end in 1..=names.len() {
        let parent = match end {
            1 => dir.try_clone()?,
            _ => open_dir(dir, &names[..end - 1].join(&b'/'))?,
        };
        match rustix::fs::mkdirat(
            parent.as_fd(),
            names[end - 1].as_slice(),
            Mode::from_raw_mode(0o755),
        ) {
            Err(Errno::EXIST) => {}
            other => other?,
        }
    }
    Ok(open_dir(dir, &names.join(&b'/'))?)
}

/// A later entry of a path takes the place of an earlier one, unless that is a directory.
fn make_room(parent: &OwnedFd, name: &[u8]) -> rustix::io::Result<()> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(()),
        other => other,
    }
}

/// Whether it is a file whose holes are told by pax headers: what is in the tar in its place is not what is in the file.
fn is_pax_sparse<R: Read>(entry: &mut tar::Entry<'_, R>) -> io::Result<bool> {
    Ok(entry.pax_extensions()?.is_some_and(|extensions| {
        extensions
            .flatten()
            .any(|extension| extension.key_bytes().starts_with(b"GNU.sparse."))
    }))
}

/// The modification time, to the nanosecond where the tar tells it.
fn times<R: Read>(entry: &mut tar::Entry<'_, R>) -> io::Result<Timestamps> {
    let mut seconds = entry.header().mtime()?.cast_signed();
    let mut nanos = 0;
    if let Some(extensions) = entry.pax_extensions()? {
        for extension in extensions
            .flatten()
            .filter(|extension| extension.key_bytes() == b"mtime")
        {
            let text = extension.value().unwrap_or_default();
            let (whole, part) = text.split_once('.').unwrap_or((text, ""));
            if let Ok(whole) = whole.parse::<i64>() {
                seconds = whole;
                let digits: String = part.chars().chain("000000000".chars()).take(9).collect();
                nanos = digits.parse().unwrap_or(0);
                if text.starts_with('-') && nanos > 0 {
                    seconds -= 1;
                    nanos = 1_000_000_000 - nanos;
                }
            }
        }
    }
    Ok(modified(Timespec {
        tv_sec: seconds,
        tv_nsec: nanos,
    }))
}

fn modified(time: Timespec) -> Timestamps {
    Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: rustix::fs::UTIME_OMIT,
        },
        last_modification: time,
    }
}
