//! The source's files as they are read, each held against what the walk saw of it.
//!
//! A PATH that is a file is held open from the first look on, so that it arrives even if it is removed meanwhile. A
//! tree's files are opened when they are read, from the descriptor of their unit's directory.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::fs::{Advice, CWD, FileType, Mode, OFlags, openat, readlinkat};
use rustix::io::Errno;
use stage_core::assignment::Cache;
use stage_core::failure::{Code, Failure, show_path};
use stage_core::manifest::{Entry, Kind};

use super::seen::{Differs, Fingerprint, Seen, Stat, Unit};
use super::walk::globs::Wanted;
use super::walk::{names_of, refused, shown_below};
use crate::fault;
use crate::store::map::Map;
use crate::sync::lock;

/// Files of trees that are kept open: bodies are read chunk by chunk, by a few threads at a time.
const OPEN: usize = 16;

/// The files of a payload at its source.
#[derive(Debug)]
pub struct Files {
    seen: Seen,
    /// Nothing else than what was seen is taken for the source.
    is_watched: bool,
    begun: Instant,
    /// What is known of entries whose times changed while their content did not.
    renewed: Mutex<HashMap<u32, Fingerprint>>,
    /// The last ones used, the latest first.
    open: Mutex<VecDeque<(u32, Arc<File>)>>,
    /// Reading them is to push nothing out of memory.
    read_once: AtomicBool,
}

/// How an entry differs from what was seen of it.
#[derive(Debug)]
pub(super) enum Change {
    None,
    /// By its times alone: its content is to be compared before this is taken for what is known of it.
    Perhaps(Fingerprint),
}

impl Files {
    pub(super) fn new(seen: Seen) -> Self {
        Self {
            seen,
            is_watched: true,
            begun: Instant::now(),
            renewed: Mutex::default(),
            open: Mutex::default(),
            read_once: AtomicBool::new(false),
        }
    }

    /// What becomes of the pages that are read. Other people's pages of the same files stay where they are.
    pub(super) fn treat(&self, cache: Cache) {
        self.read_once.store(cache == Cache::Drop, Ordering::Relaxed);
        for unit in self.seen.units() {
            self.is_read_once(&unit.file);
        }
    }

    fn is_read_once(&self, file: &File) {
        if self.read_once.load(Ordering::Relaxed) {
            // A hint, which kernels before 6.3 do not take.
            let _ = rustix::fs::fadvise(file, 0, None, Advice::NoReuse);
        }
    }

    /// One file of our own, which is written while it is read.
    pub(crate) fn spool(file: File) -> Self {
        let mut seen = Seen::default();
        seen.add_unit(0, file.into(), PathBuf::new());
        Self {
            is_watched: false,
            ..Self::new(seen)
        }
    }

    /// Reads bytes of an entry's file.
    pub(crate) fn read(&self, map: &Map, entry: u32, at: u64, buf: &mut [u8]) -> Result<(), Failure> {
        let file = self.file(map, entry)?;
        file.read_exact_at(buf, at).map_err(|error| {
            if !self.is_watched {
                return fault::of_source(&error);
            }
            // A file that was cut short reads as an error; what it was is more to the point.
            let failed = || fault::of_source(&error).at(self.shown(map, entry));
            self.change(map, entry).err().unwrap_or_else(failed)
        })
    }

    /// An entry's file, open, and the one that was seen.
    pub(super) fn file(&self, map: &Map, entry: u32) -> Result<Arc<File>, Failure> {
        let unit = self.seen.unit_of(entry);
        if unit.first == entry {
            return Ok(unit.file.clone());
        }
        {
            let mut open = lock(&self.open);
            if let Some(at) = open.iter().position(|(of, _)| *of == entry) {
                let found = open.remove(at).expect("it was found there");
                let file = found.1.clone();
                open.push_front(found);
                return Ok(file);
            }
        }
        let file = Arc::new(self.open(map, entry, unit)?);
        self.is_read_once(&file);
        let mut open = lock(&self.open);
        open.truncate(OPEN - 1);
        open.push_front((entry, file.clone()));
        Ok(file)
    }

    fn open(&self, map: &Map, entry: u32, unit: &Unit) -> Result<File, Failure> {
        let follow = match self.seen.follow {
            true => OFlags::empty(),
            false => OFlags::NOFOLLOW,
        };
        // What was put in a file's place must not make us wait.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY | follow;
        let opened = openat(&unit.file, map.entry(entry).below(), flags, Mode::empty());
        let file = opened.map_err(|error| self.lost(map, entry, error))?;
        let stat = Stat::of(&file).map_err(|error| self.lost(map, entry, error))?;
        let before = self.known(map.entries(), entry);
        match before.now(&stat).differs(&before) {
            Differs::Surely(what) => Err(self.changed(map, entry, &what)),
            Differs::No | Differs::Perhaps => Ok(file.into()),
        }
    }

    /// What is known of an entry.
    fn known(&self, entries: &[Entry], entry: u32) -> Fingerprint {
        let renewed = lock(&self.renewed).get(&entry).copied();
        renewed.unwrap_or_else(|| self.seen.fingerprint(entries, entry))
    }

    /// The entry was found to have the same content, and now looks like this.
    pub(super) fn renew(&self, entry: u32, now: Fingerprint) {
        lock(&self.renewed).insert(entry, now);
    }

    /// Entries that are worth a look at any time: the units, and what is being read.
    pub(super) fn in_use(&self) -> Vec<u32> {
        let units = self.seen.units().iter().map(|unit| unit.first);
        units
            .chain(lock(&self.open).iter().map(|(entry, _)| *entry))
            .collect()
    }

    /// Whether an entry still is what was seen, as far as can be told without reading its content.
    ///
    /// # Errors
    /// It is not, or cannot be looked at.
    pub(super) fn change(&self, map: &Map, entry: u32) -> Result<Change, Failure> {
        let before = self.known(map.entries(), entry);
        let unit = self.seen.unit_of(entry);
        let it = map.entry(entry);
        let stat = if unit.first == entry {
            self.unit(map, unit)?
        } else {
            let stat = Stat::at(&unit.file, it.below(), self.seen.follow);
            stat.map_err(|error| self.lost(map, entry, error))?
        };
        let now = before.now(&stat);
        let differs = match &it.kind {
            Kind::File { .. } | Kind::HardLink { .. } if stat.kind == FileType::RegularFile => {
                now.differs(&before)
            }
            Kind::Dir if stat.kind == FileType::Directory => {
                if now.inode != before.inode {
                    Differs::Surely("another directory was put in its place".to_owned())
                } else if now.has_other_times(&before) {
                    // Its names are all that its content is.
                    match self.other_names(map, entry, unit)? {
                        Some(what) => Differs::Surely(what),
                        None => {
                            self.renew(entry, now);
                            Differs::No
                        }
                    }
                } else {
                    Differs::No
                }
            }
            Kind::Symlink { to } if stat.kind == FileType::Symlink => {
                if now.inode == before.inode && !now.has_other_times(&before) {
                    Differs::No
                } else {
                    let says = readlinkat(&unit.file, it.below(), Vec::new());
                    let says = says.map_err(|error| self.lost(map, entry, error))?;
                    match says.as_bytes() == to {
                        true => Differs::No,
                        false => Differs::Surely("the link leads elsewhere".to_owned()),
                    }
                }
            }
            _ => Differs::Surely("something else was put in its place".to_owned()),
        };
        match differs {
            Differs::No => Ok(Change::None),
            Differs::Perhaps => Ok(Change::Perhaps(now)),
            Differs::Surely(what) => Err(self.changed(map, entry, &what)),
        }
    }

    /// A unit, as it is open and as its path leads to it.
    fn unit(&self, map: &Map, unit: &Unit) -> Result<Stat, Failure> {
        let stat = Stat::of(&unit.file).map_err(|error| self.lost(map, unit.first, error))?;
        // A file that was removed still arrives; one that another was put in the place of is not what was meant.
        if let Ok(there) = Stat::at(CWD, &*unit.place, true)
            && there.inode != stat.inode
        {
            let what = match stat.kind {
                FileType::Directory => "another directory was put in its place",
                _ => "another file was put in its place",
            };
            return Err(self.changed(map, unit.first, what));
        }
        Ok(stat)
    }

    /// What of a directory's names differs from the manifest's, if anything does.
    fn other_names(&self, map: &Map, entry: u32, unit: &Unit) -> Result<Option<String>, Failure> {
        let lost = |error| self.lost(map, entry, error);
        let below = map.entry(entry).below();
        let path = match below {
            b"" => b".",
            below => below,
        };
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECTORY;
        let dir = openat(&unit.file, path, flags, Mode::empty()).map_err(lost)?;
        let names = names_of(&dir).map_err(lost)?;
        let mut expected: HashSet<&[u8]> = children(map.entries(), entry).collect();
        let is_whole = self.seen.globs.is_whole(below);
        for (name, kind) in names.iter() {
            if expected.remove(name) {
                continue;
            }
            let kind = match kind {
                FileType::Unknown | FileType::Symlink => match Stat::at(&dir, name, self.seen.follow) {
                    Ok(stat) => stat.kind,
                    Err(_) => continue,
                },
                kind => kind,
            };
            let new = match below {
                b"" => name.to_vec(),
                below => [below, b"/", name].concat(),
            };
            // What only perhaps holds something was left out when it held nothing.
            if self
                .seen
                .globs
                .wanted(&new, kind == FileType::Directory, is_whole)
                == Wanted::Yes
            {
                return Ok(Some(format!("{} was added to it", show_path(name))));
            }
        }
        let gone = expected.into_iter().min();
        Ok(gone.map(|name| format!("{} is gone from it", show_path(name))))
    }

    /// An entry cannot be looked at any more.
    fn lost(&self, map: &Map, entry: u32, error: Errno) -> Failure {
        match error {
            Errno::NOENT | Errno::NOTDIR | Errno::LOOP => self.changed(map, entry, "it is gone"),
            Errno::ACCESS | Errno::PERM => refused(&self.shown(map, entry), &error.into()),
            other => fault::of_source(&other.into()).at(self.shown(map, entry)),
        }
    }

    /// The source is not what it was.
    pub(super) fn changed(&self, map: &Map, entry: u32, what: &str) -> Failure {
        let passed = self.begun.elapsed().as_secs();
        changed(what, &format!("noticed {passed} s after the push began")).at(self.shown(map, entry))
    }

    /// An entry's path on the source's node, as text.
    pub(super) fn shown(&self, map: &Map, entry: u32) -> String {
        shown_below(&self.seen.unit_of(entry).place, map.entry(entry).below())
    }

    /// How long ago the push began, in seconds.
    pub(super) fn since_begun(&self) -> u64 {
        self.begun.elapsed().as_secs()
    }
}

/// The names of what lies right in a directory. Its entries follow it in the manifest, each with its own behind it.
fn children(entries: &[Entry], dir: u32) -> impl Iterator<Item = &[u8]> {
    let depth = entries[dir as usize].path.len() + 1;
    let path = &entries[dir as usize].path;
    let mut rest = &entries[dir as usize + 1..];
    std::iter::from_fn(move || {
        let (first, after) = rest.split_first()?;
        let name = first.path.strip_prefix(path.as_slice())?.strip_prefix(b"/")?;
        let inner = after.partition_point(|entry| {
            entry.path.starts_with(&first.path) && entry.path.get(first.path.len()) == Some(&b'/')
        });
        rest = &after[inner..];
        debug_assert_eq!(first.path.len(), depth + name.len());
        Some(name)
    })
}

/// The source is not what it was.
pub(super) fn changed(what: &str, when: &str) -> Failure {
    Failure::new(
        Code::SourceChanged,
        format!("the source changed while it was sent: {what}, {when}"),
        "push again once nothing writes to it",
    )
}
