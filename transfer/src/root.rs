//! The directories that may be written in, and no way out of them.
//!
//! Each root is opened by its path and held; everything below it is resolved by the kernel from that descriptor
//! (`openat2` with `RESOLVE_BENEATH`, no symbolic links), and what is done in a directory is done through the
//! descriptor of that directory. So no path is checked in one moment and used in another.

mod locate;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use stage_core::assignment::Place;
use stage_core::failure::{Code, Failure, show_path};
use stage_core::id::RootName;
use stage_core::manifest::MAX_NAME;
use stage_core::units::ByteCount;

use crate::fault;
use crate::target::space::Spaces;

pub use locate::{Found, Located};

/// How often `openat2` is asked again after a rename elsewhere raced with it.
const TRIES: usize = 32;

/// The roots of one agent.
#[derive(Debug)]
pub struct Roots {
    roots: Vec<Root>,
    spaces: Arc<Spaces>,
}

#[derive(Debug)]
struct Root {
    name: RootName,
    path: PathBuf,
    held: Mutex<Option<Arc<OwnedFd>>>,
}

/// The state of one root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootReport {
    /// Its name.
    pub name: RootName,
    /// Its path on this node, as text fit for a terminal.
    pub path: String,
    /// What an ordinary user may still write there.
    pub free: ByteCount,
    /// Why nothing can be written there, if so.
    pub failure: Option<Failure>,
}

impl Roots {
    /// The roots, the first being the default. One that is missing is tried again each time it is wanted.
    pub fn open(roots: Vec<(RootName, PathBuf)>) -> Self {
        let roots = roots
            .into_iter()
            .map(|(name, path)| Root {
                name,
                path,
                held: Mutex::new(None),
            })
            .collect();
        Self {
            roots,
            spaces: Arc::default(),
        }
    }

    /// What jobs under way were promised in them.
    pub(crate) fn spaces(&self) -> &Arc<Spaces> {
        &self.spaces
    }

    /// Looks at each root: whether it is there and can be written, for real.
    pub fn report(&self) -> Vec<RootReport> {
        self.roots
            .iter()
            .map(|root| {
                let state = root.directory().and_then(|dir| {
                    root.probe(&dir)?;
                    free_space(dir.as_fd()).map_err(|e| fault::of(e, "asking for free space", &root.shown()))
                });
                let (free, failure) = match state {
                    Ok(free) => (free, None),
                    Err(failure) => (ByteCount(0), Some(failure)),
                };
                RootReport {
                    name: root.name.clone(),
                    path: root.shown(),
                    free,
                    failure,
                }
            })
            .collect()
    }

    /// Each root's name, path as text, and descriptor, the default first.
    pub(crate) fn directories(
        &self,
    ) -> impl Iterator<Item = (&RootName, String, Result<Arc<OwnedFd>, Failure>)> {
        self.roots
            .iter()
            .map(|root| (&root.name, root.shown(), root.directory()))
    }

    /// The roots by name and path, the default first.
    pub fn names(&self) -> Vec<(RootName, Vec<u8>)> {
        self.roots
            .iter()
            .map(|root| (root.name.clone(), root.path.as_os_str().as_bytes().to_vec()))
            .collect()
    }

    /// The directory of a target, held. Missing directories below the root are made.
    pub(crate) fn resolve(&self, place: &Place) -> Result<Held, Failure> {
        let (root, dir) = self.choose(place)?;
        let parts = components(dir)?;
        let top = root.directory()?;
        Held::reach(root, top, parts)
    }

    /// The root of a place, and the directory below it.
    fn choose<'p>(&self, place: &'p Place) -> Result<(&Root, &'p [u8]), Failure> {
        Ok(match place {
            Place::Root { root: None, dir } => {
                let root = self.roots.first().ok_or_else(|| {
                    Failure::new(
                        Code::RootUnusable,
                        "this agent has no root",
                        "start it with --root DIR",
                    )
                })?;
                (root, dir.as_slice())
            }
            Place::Root {
                root: Some(name),
                dir,
            } => {
                let root = self.roots.iter().find(|r| r.name == *name).ok_or_else(|| {
                    Failure::new(
                        Code::RootUnusable,
                        format!("this agent has no root named {name}"),
                        format!("start it with --root {name}=DIR, or push to another root"),
                    )
                })?;
                (root, dir.as_slice())
            }
            Place::Absolute(path) => self.containing(path)?,
        })
    }

    /// Where the roots are.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &std::path::Path> {
        self.roots.iter().map(|root| root.path.as_path())
    }

    /// The directory at an absolute path, if it lies in a root and exists.
    pub(crate) fn find(&self, path: &[u8]) -> Result<Held, Failure> {
        let (root, dir) = self.containing(path)?;
        Held::find(root, root.directory()?, components(dir)?)
    }

    /// The root that an absolute path lies in (the innermost), and the rest of the path.
    fn containing<'p>(&self, path: &'p [u8]) -> Result<(&Root, &'p [u8]), Failure> {
        let outside = || {
            let roots: Vec<_> = self.roots.iter().map(Root::shown).collect();
            Failure::new(
                Code::OutsideRoot,
                format!("{} lies in none of this node's roots", show_path(path)),
                format!("choose a directory below {}", roots.join(" or ")),
            )
            .at(show_path(path))
        };
        if path.first() != Some(&b'/') {
            return Err(outside());
        }
        self.roots
            .iter()
            .filter_map(|root| {
                let prefix = root.path.as_os_str().as_bytes();
                let prefix = prefix.strip_suffix(b"/").unwrap_or(prefix);
                let rest = path.strip_prefix(prefix)?;
                (rest.is_empty() || rest[0] == b'/').then_some((root, rest, prefix.len()))
            })
            .max_by_key(|(_, _, len)| *len)
            .map(|(root, rest, _)| (root, rest))
            .ok_or_else(outside)
    }
}

impl Root {
    fn shown(&self) -> String {
        show_path(self.path.as_os_str().as_bytes())
    }

    /// The root's descriptor: the held one while its path still leads to it, else opened (again).
    fn directory(&self) -> Result<Arc<OwnedFd>, Failure> {
        let fail = |errno| {
            let what = match errno {
                Errno::NOENT => "is missing".to_owned(),
                Errno::NOTDIR => "is not a directory".to_owned(),
                other => format!("cannot be opened: {}", fault::text(other)),
            };
            Failure::new(
                Code::RootUnusable,
                format!("the root {} ({}) {what}", self.name, self.shown()),
                "make or mount the directory, or start the agent with another --root",
            )
            .at(self.shown())
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let now = rustix::fs::open(&self.path, flags, Mode::empty());
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let now = match now {
            Ok(now) => now,
            Err(errno) => {
                *held = None;
                return Err(fail(errno));
            }
        };
        let new = rustix::fs::fstat(&now).map_err(fail)?;
        if let Some(dir) = &*held
            && rustix::fs::fstat(dir).is_ok_and(|old| (old.st_dev, old.st_ino) == (new.st_dev, new.st_ino))
        {
            return Ok(dir.clone());
        }
        let dir = Arc::new(now);
        *held = Some(dir.clone());
        Ok(dir)
    }

    /// Makes a file in the root that never gets a name, or one that loses it at once.
    fn probe(&self, dir: &OwnedFd) -> Result<(), Failure> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let made = match rustix::fs::openat(dir, ".", flags | OFlags::TMPFILE, mode) {
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => {
                let name = format!(".stage-probe-{}", rustix::process::getpid().as_raw_nonzero());
                let flags = flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
                match rustix::fs::openat(dir, &name, flags, mode) {
                    Ok(_) => rustix::fs::unlinkat(dir, &name, AtFlags::empty()),
                    // Another look at this very moment: that it could make the file is the answer.
                    Err(Errno::EXIST) => Ok(()),
                    Err(e) => Err(e),
                }
            }
            other => other.map(drop),
        };
        made.map_err(|errno| {
            let mut failure = fault::of(errno, "writing in the root", &self.shown());
            if failure.code != Code::ReadOnly {
                failure.code = Code::RootUnusable;
            }
            failure.message = format!("the root {} cannot be written: {}", self.name, failure.message);
            failure
        })
    }
}

/// What an ordinary user may still write where this descriptor lies.
pub(crate) fn free_space(fd: BorrowedFd<'_>) -> rustix::io::Result<ByteCount> {
    // An O_PATH descriptor cannot be asked with fstatvfs before Linux 3.12, which is long ago.
    let stat = rustix::fs::fstatvfs(fd)?;
    Ok(ByteCount(stat.f_bavail.saturating_mul(stat.f_frsize)))
}

/// How many files and directories may still be made where this descriptor lies; `None` where the file system sets no number.
pub(crate) fn free_inodes(fd: BorrowedFd<'_>) -> rustix::io::Result<Option<u64>> {
    let stat = rustix::fs::fstatvfs(fd)?;
    Ok((stat.f_files > 0).then_some(stat.f_favail))
}

/// Splits a directory below a root; empty components are skipped.
fn components(dir: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
    dir.split(|b| *b == b'/')
        .filter(|part| !part.is_empty())
        .map(|part| {
            check_component(part).map_err(|failure| failure.at(show_path(dir)))?;
            Ok(part.to_vec())
        })
        .collect()
}

/// Refuses what is not a plain name of one file or directory, or is a name that stage keeps for itself.
pub(crate) fn check_component(part: &[u8]) -> Result<(), Failure> {
    let shown = show_path(part);
    let refuse = |why: &str| {
        Err(Failure::new(
            match part.len() {
                ..=MAX_NAME => Code::OutsideRoot,
                _ => Code::NameTooLong,
            },
            format!("{shown:?} {why}").replace("\\\\", "\\"),
            "choose another name or directory",
        )
        .at(shown.clone()))
    };
    match part {
        b"" => refuse("is no name"),
        b"." | b".." => refuse("would lead out of its place: only plain names are allowed"),
        _ if part.len() > MAX_NAME => refuse("is longer than 255 bytes"),
        _ if part.contains(&b'/') => refuse("is more than one name"),
        _ if part.contains(&0) => refuse("contains a NUL byte"),
        _ if part == b".stage" || part.starts_with(b".stage-") => {
            refuse("is a name that stage keeps for itself")
        }
        _ => Ok(()),
    }
}

/// A directory below a root, held.
#[derive(Debug)]
pub(crate) struct Held {
    name: RootName,
    top: Arc<OwnedFd>,
    root: Vec<u8>,
    parts: Vec<Vec<u8>>,
    dir: OwnedFd,
    /// How many of the last components were made.
    pub(crate) made: u32,
}

fn beneath(dir: BorrowedFd<'_>, path: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_SYMLINKS;
    let path = if path.is_empty() { b"." } else { path };
    let mut result = Err(Errno::AGAIN);
    for _ in 0..TRIES {
        result = openat2(dir, path, flags, Mode::empty(), resolve);
        if !matches!(result, Err(Errno::AGAIN | Errno::INTR)) {
            break;
        }
    }
    result
}

impl Held {
    fn find(root: &Root, top: Arc<OwnedFd>, parts: Vec<Vec<u8>>) -> Result<Self, Failure> {
        let (place, dir) = Spot::open(root, top, parts);
        let dir = dir.map_err(|e| place.fail(e, place.parts.len()))?;
        Ok(place.held(dir, 0))
    }

    fn reach(root: &Root, top: Arc<OwnedFd>, parts: Vec<Vec<u8>>) -> Result<Self, Failure> {
        let (place, dir) = Spot::open(root, top, parts);
        match dir {
            Ok(dir) => return Ok(place.held(dir, 0)),
            Err(Errno::NOENT) => {}
            Err(e) => return Err(place.fail(e, place.parts.len())),
        }
        let mut dir = beneath(place.top.as_fd(), b".").map_err(|e| place.fail(e, 0))?;
        let mut made = 0;
        for (depth, part) in place.parts.iter().enumerate() {
            let step = match beneath(dir.as_fd(), part) {
                Err(Errno::NOENT) => make(dir.as_fd(), part).map(|(dir, own)| (dir, u32::from(own))),
                found => found.map(|dir| (dir, 0)),
            };
            match step {
                Ok((next, own)) => {
                    dir = next;
                    // Only an unbroken tail of made ones is counted: the last of them can be removed first.
                    made = if own == 1 { made + 1 } else { 0 };
                }
                Err(e) => {
                    let failure = place.fail(e, depth + 1);
                    place.unmake(depth, made);
                    return Err(failure);
                }
            }
        }
        Ok(place.held(dir, made))
    }

    /// The directory's descriptor (`O_PATH`).
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }

    /// The absolute path of the directory, as it was asked for.
    pub(crate) fn path(&self) -> Vec<u8> {
        path_below(&self.root, &self.parts)
    }

    /// Its place, by the root's name.
    pub(crate) fn place(&self) -> Place {
        Place::Root {
            root: Some(self.name.clone()),
            dir: self.parts.join(&b'/'),
        }
    }

    /// Whether its path still leads to it: nobody moved, replaced or unmounted it since.
    pub(crate) fn is_in_place(&self) -> bool {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let same = || -> rustix::io::Result<bool> {
            let there = rustix::fs::fstat(rustix::fs::open(self.path(), flags, Mode::empty())?)?;
            let held = rustix::fs::fstat(&self.dir)?;
            Ok((there.st_dev, there.st_ino) == (held.st_dev, held.st_ino))
        };
        same().unwrap_or(false)
    }

    /// Makes the directory's entries durable.
    pub(crate) fn sync(&self) -> rustix::io::Result<()> {
        sync_directory(self.fd())
    }

    /// Removes the directories that were made for this, the last first, as far as they are empty.
    pub(crate) fn unmake(&self) {
        unmake(self.top.as_fd(), &self.parts, self.made);
    }
}

fn path_below(root: &[u8], parts: &[Vec<u8>]) -> Vec<u8> {
    let mut path = root.to_vec();
    for part in parts {
        path.push(b'/');
        path.extend(part);
    }
    path
}

/// A directory's place without its descriptor.
struct Spot {
    name: RootName,
    top: Arc<OwnedFd>,
    root: Vec<u8>,
    parts: Vec<Vec<u8>>,
}

impl Spot {
    fn held(self, dir: OwnedFd, made: u32) -> Held {
        Held {
            name: self.name,
            top: self.top,
            root: self.root,
            parts: self.parts,
            dir,
            made,
        }
    }

    /// A directory below a root, not made if absent.
    fn open(root: &Root, top: Arc<OwnedFd>, parts: Vec<Vec<u8>>) -> (Self, rustix::io::Result<OwnedFd>) {
        let dir = beneath(top.as_fd(), &parts.join(&b'/'));
        let name = root.name.clone();
        let root = root.path.as_os_str().as_bytes();
        let root = root.strip_suffix(b"/").unwrap_or(root).to_vec();
        let spot = Self {
            name,
            top,
            root,
            parts,
        };
        (spot, dir)
    }

    /// The path of its first `depth` components.
    fn path(&self, depth: usize) -> Vec<u8> {
        path_below(&self.root, &self.parts[..depth])
    }

    fn unmake(&self, depth: usize, made: u32) {
        unmake(self.top.as_fd(), &self.parts[..depth], made);
    }

    fn fail(&self, errno: Errno, depth: usize) -> Failure {
        let path = show_path(&self.path(depth));
        match errno {
            Errno::LOOP | Errno::XDEV => Failure::new(
                Code::OutsideRoot,
                "a part of the directory is a symbolic link, which is never followed below a root",
                "name the real directory, or make the place it leads to a root of its own",
            )
            .at(path),
            Errno::NOTDIR => Failure::new(
                Code::WrongKind,
                "a part of the directory is not a directory",
                "move it away or choose another directory",
            )
            .at(path),
            Errno::NOSYS => Failure::new(
                Code::RootUnusable,
                "the kernel has no openat2, which keeps targets inside their roots",
                "use Linux 5.6 or newer",
            )
            .at(path),
            other => fault::of(other, "opening the directory", &path),
        }
    }
}

/// Makes one directory, durable in its parent; `false` if somebody else just made it.
fn make(parent: BorrowedFd<'_>, name: &[u8]) -> rustix::io::Result<(OwnedFd, bool)> {
    let own = match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o755)) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(e) => return Err(e),
    };
    if own {
        sync_directory(parent)?;
    }
    Ok((beneath(parent, name)?, own))
}

fn unmake(top: BorrowedFd<'_>, parts: &[Vec<u8>], made: u32) {
    for depth in (0..parts.len()).rev().take(made as usize) {
        let gone = beneath(top, &parts[..depth].join(&b'/'))
            .and_then(|parent| rustix::fs::unlinkat(parent, parts[depth].as_slice(), AtFlags::REMOVEDIR));
        if gone.is_err() {
            // Somebody has put something there: it is theirs now.
            return;
        }
    }
}

/// Makes a directory's entries durable; the descriptor may be one that is only a place.
fn sync_directory(dir: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match rustix::fs::openat(dir, ".", flags, Mode::empty()).and_then(rustix::fs::fsync) {
        // File systems whose directories cannot be synced keep them in order by themselves.
        Err(Errno::INVAL) => Ok(()),
        other => other,
    }
}
