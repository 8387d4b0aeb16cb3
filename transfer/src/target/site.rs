//! The place of one unit of a target: its directory, held, with the final name and the partial's name in it.

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::Arc;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Stat, readlinkat};
use rustix::io::Errno;
use stage_core::digest::RootDigest;
use stage_core::failure::{Code, Failure, show_path};
use stage_core::id::JobId;
use stage_core::payload::UnitKind;

use crate::fault;
use crate::root::Held;

/// Where the generations of trees lie, beside their names.
pub(crate) const GENERATIONS: &str = ".stage";
/// How many generations of one content may lie beside each other.
const TWINS: u32 = 100;
/// How often the directory of generations is made again after somebody removed it because it was empty.
const TRIES: u32 = 8;

/// See the module.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) held: Arc<Held>,
    pub(super) name: Vec<u8>,
    pub(super) kind: UnitKind,
    partial: String,
    /// The final path, for people.
    pub(crate) shown: String,
}

/// What stands under a name.
pub(crate) enum Seen {
    Absent,
    File(Stat),
    /// A generation of ours; a link to one that is gone counts as [`Seen::Absent`].
    Generation,
    Dir,
    Other(&'static str),
}

/// The name of a unit's partial.
pub(super) fn partial_name(job: JobId, unit: usize) -> String {
    format!(".stage-{job}-{unit}")
}

/// What is after the `@` of a generation's name: enough of the root to tell contents apart.
fn mark(root: &RootDigest) -> String {
    root.to_string()[..16].to_owned()
}

/// This name, and others like it.
fn twins(name: Vec<u8>) -> impl Iterator<Item = Vec<u8>> {
    (1..=TWINS).map(move |twin| match twin {
        1 => name.clone(),
        _ => [name.as_slice(), format!(".{twin}").as_bytes()].concat(),
    })
}

/// What a final name says that leads to a generation.
fn link_to(generation: &[u8]) -> Vec<u8> {
    [GENERATIONS.as_bytes(), b"/", generation].concat()
}

impl Site {
    pub(crate) fn new(held: Arc<Held>, name: &[u8], kind: UnitKind, job: JobId, unit: usize) -> Self {
        let mut path = held.path();
        path.push(b'/');
        path.extend(name);
        Self {
            held,
            name: name.to_vec(),
            kind,
            partial: partial_name(job, unit),
            shown: show_path(&path),
        }
    }

    /// The place of a tar that is published as what it holds: it has a partial, and no final name but one of stage's own,
    /// under which nothing ever lies.
    pub(super) fn of_tar(held: Arc<Held>, job: JobId) -> Self {
        Self::new(
            held,
            format!(".stage-{job}-tar").as_bytes(),
            UnitKind::File,
            job,
            0,
        )
    }

    /// The final name.
    pub(crate) fn name(&self) -> &[u8] {
        &self.name
    }

    pub(crate) fn fault(&self, errno: Errno, doing: &str) -> Failure {
        if errno == Errno::NOSPC && super::reserve::is_out_of_inodes(self) {
            return super::reserve::no_inodes(self, None);
        }
        fault::of(errno, doing, &self.shown)
    }

    fn stat(&self, name: impl rustix::path::Arg) -> rustix::io::Result<Option<Stat>> {
        match rustix::fs::statat(self.held.fd(), name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            other => other.map(Some),
        }
    }

    /// What stands under the final name.
    pub(crate) fn look(&self) -> Result<Seen, Failure> {
        let fail = |e| self.fault(e, "looking at the target");
        let Some(stat) = self.stat(self.name.as_slice()).map_err(fail)? else {
            return Ok(Seen::Absent);
        };
        Ok(match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Seen::File(stat),
            FileType::Directory => Seen::Dir,
            FileType::Symlink => match self.generation_now().map_err(fail)? {
                None => Seen::Other("a symbolic link"),
                Some(generation) => match self.open_generation(&generation) {
                    Ok(_) => Seen::Generation,
                    Err(Errno::NOENT) => Seen::Absent,
                    Err(e) => return Err(fail(e)),
                },
            },
            _ => Seen::Other("a special file"),
        })
    }

    /// The name of the generation that the final name leads to, if it leads to one of ours.
    pub(crate) fn generation_now(&self) -> rustix::io::Result<Option<Vec<u8>>> {
        let text = match readlinkat(self.held.fd(), self.name.as_slice(), Vec::new()) {
            Ok(text) => text,
            Err(Errno::INVAL | Errno::NOENT) => return Ok(None),
            Err(e) => return Err(e),
        };
        let generation = text
            .as_bytes()
            .strip_prefix(GENERATIONS.as_bytes())
            .and_then(|rest| rest.strip_prefix(b"/"));
        let ours = |generation: &&[u8]| {
            let mark = generation.strip_prefix(self.name.as_slice());
            mark.is_some_and(|mark| mark.first() == Some(&b'@')) && !generation.contains(&b'/')
        };
        Ok(generation.filter(ours).map(<[u8]>::to_vec))
    }

    /// A generation's directory, for reading.
    pub(crate) fn open_generation(&self, generation: &[u8]) -> rustix::io::Result<OwnedFd> {
        self.open_dir(&[GENERATIONS.as_bytes(), b"/", generation].concat())
    }

    /// The directory under the final name, or that it leads to.
    pub(crate) fn open_final_dir(&self) -> rustix::io::Result<OwnedFd> {
        match self.generation_now()? {
            Some(generation) => self.open_generation(&generation),
            None => self.open_dir(&self.name),
        }
    }

    fn open_dir(&self, path: &[u8]) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_SYMLINKS;
        rustix::fs::openat2(self.held.fd(), path, flags, Mode::empty(), resolve)
    }

    /// What the partial's name leads to, as device and inode.
    pub(super) fn partial_inode(&self) -> Option<(u64, u64)> {
        let stat = self.stat(self.partial.as_bytes()).ok()??;
        let kind = match self.kind {
            UnitKind::File => FileType::RegularFile,
            UnitKind::Tree => FileType::Directory,
        };
        (FileType::from_raw_mode(stat.st_mode) == kind).then_some((stat.st_dev, stat.st_ino))
    }

    /// The bytes on disk that the partial holds already.
    pub(crate) fn held_by_partial(&self) -> u64 {
        super::tree::held(self.held.fd(), self.partial.as_bytes()).0
    }

    /// The files, directories and links that the partial consists of already.
    pub(super) fn inodes_of_partial(&self) -> u64 {
        super::tree::held(self.held.fd(), self.partial.as_bytes()).1
    }

    /// What is made once for a tree beside what is in it: its name, and the directory of generations.
    pub(super) fn inodes_beside(&self) -> u64 {
        match self.kind {
            UnitKind::File => 0,
            UnitKind::Tree => 1 + u64::from(self.generations().is_err()),
        }
    }

    /// The bytes on disk that the copy under the final name holds.
    pub(super) fn held_by_final(&self) -> u64 {
        let path = match self.generation_now() {
            Ok(Some(generation)) => link_to(&generation),
            _ => self.name.clone(),
        };
        super::tree::held(self.held.fd(), &path).0
    }

    pub(super) fn has_partial(&self) -> bool {
        !matches!(self.stat(self.partial.as_bytes()), Ok(None))
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

    /// The partial file that an earlier run of this job left, if it is really ours.
    pub(super) fn reopen_file(&self) -> Option<File> {
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

    /// The partial directory that an earlier run of this job left, if it is really ours; it may have moved to where
    /// generations lie already.
    pub(super) fn reopen_tree(&self) -> Option<OwnedFd> {
        let dir = self.open_dir(self.partial.as_bytes()).ok()?;
        let stat = rustix::fs::fstat(&dir).ok()?;
        (stat.st_uid == rustix::process::geteuid().as_raw()).then_some(dir)
    }

    /// Makes the partial file anew. No space is taken yet.
    pub(super) fn create_file(&self) -> Result<File, Failure> {
        self.remove_partial()?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(self.held.fd(), &self.partial, flags, Mode::RUSR | Mode::WUSR)
            .map(File::from)
            .map_err(|e| self.fault(e, "making the partial file"))
    }

    /// Makes the partial directory anew, which nobody else may enter.
    pub(crate) fn create_tree(&self) -> Result<OwnedFd, Failure> {
        self.remove_partial()?;
        rustix::fs::mkdirat(self.held.fd(), &self.partial, Mode::RWXU)
            .and_then(|()| self.open_dir(self.partial.as_bytes()))
            .map_err(|e| self.fault(e, "making the partial directory"))
    }

    /// The one directory that the partial directory holds takes its place.
    pub(crate) fn raise(&self, only: &[u8]) -> rustix::io::Result<OwnedFd> {
        let dir = self.held.fd();
        let aside = format!("{}.top", self.partial);
        super::tree::remove(dir, aside.as_bytes())?;
        let inner = [self.partial.as_bytes(), b"/", only].concat();
        rustix::fs::renameat(dir, inner.as_slice(), dir, &aside)?;
        rustix::fs::unlinkat(dir, &self.partial, AtFlags::REMOVEDIR)?;
        rustix::fs::renameat(dir, &aside, dir, &self.partial)?;
        self.open_dir(self.partial.as_bytes())
    }

    /// Removes the partial, if there is one.
    pub(crate) fn remove_partial(&self) -> Result<(), Failure> {
        let aside = format!("{}.top", self.partial);
        super::tree::remove(self.held.fd(), self.partial.as_bytes())
            .and_then(|()| match self.kind {
                UnitKind::File => Ok(()),
                UnitKind::Tree => super::tree::remove(self.held.fd(), aside.as_bytes()),
            })
            .map_err(|e| self.fault(e, "removing the partial"))
    }

    /// Gives the partial file its final name. With `replace`, what stands there goes; else it stays.
    ///
    /// # Errors
    /// `EEXIST` if something stands there and stays.
    pub(super) fn rename(&self, replace: bool) -> rustix::io::Result<()> {
        let (dir, from, to) = (self.held.fd(), self.partial.as_str(), self.name.as_slice());
        if replace {
            return rustix::fs::renameat(dir, from, dir, to);
        }
        match rustix::fs::renameat_with(dir, from, dir, to, RenameFlags::NOREPLACE) {
            // File systems without it (NFS): a link is as exclusive.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                rustix::fs::linkat(dir, from, dir, to, AtFlags::empty())?;
                rustix::fs::unlinkat(dir, from, AtFlags::empty())
            }
            other => other,
        }
    }

    /// Moves the partial directory to where generations lie, under a name that tells its content; gives that name.
    /// `fresh` is told of the name before, when nothing lies there.
    pub(super) fn make_generation(
        &self,
        root: &RootDigest,
        fresh: impl Fn(&[u8]),
    ) -> rustix::io::Result<Vec<u8>> {
        let dir = self.held.fd();
        for tries in (0..TRIES).rev() {
            let all = match self.make_generations() {
                Err(Errno::NOENT) if tries > 0 => continue,
                other => other?,
            };
            for name in self.generation_names(root) {
                if rustix::fs::statat(&all, name.as_slice(), AtFlags::SYMLINK_NOFOLLOW).is_ok() {
                    continue;
                }
                fresh(&name);
                let (from, to) = (self.partial.as_str(), name.as_slice());
                let moved = match rustix::fs::renameat_with(dir, from, &all, to, RenameFlags::NOREPLACE) {
                    // File systems without it (NFS): the name is ours alone, and free.
                    Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                        rustix::fs::renameat(dir, from, &all, to)
                    }
                    other => other,
                };
                match moved {
                    Ok(()) => {
                        rustix::fs::fsync(&all)?;
                        return Ok(name);
                    }
                    Err(Errno::EXIST | Errno::NOTEMPTY) => {}
                    // Somebody has just removed the directory of generations because it was empty.
                    Err(Errno::NOENT) if tries > 0 && self.has_partial() => break,
                    Err(e) => return Err(e),
                }
            }
        }
        Err(Errno::EXIST)
    }

    /// The directory where generations lie, made if it is not there.
    fn make_generations(&self) -> rustix::io::Result<OwnedFd> {
        let dir = self.held.fd();
        match rustix::fs::mkdirat(dir, GENERATIONS, Mode::from_raw_mode(0o755)) {
            Ok(()) => {
                // The umask is no rule of who may pass.
                rustix::fs::chmodat(dir, GENERATIONS, Mode::from_raw_mode(0o755), AtFlags::empty())?;
            }
            Err(Errno::EXIST) => {}
            Err(e) => return Err(e),
        }
        self.generations()
    }

    /// The names that a generation of this content may have.
    fn generation_names(&self, root: &RootDigest) -> impl Iterator<Item = Vec<u8>> {
        twins([self.name.as_slice(), b"@", mark(root).as_bytes()].concat())
    }

    /// The generation whose directory this is, if it has moved there already.
    pub(crate) fn generation_of(&self, inode: (u64, u64), root: &RootDigest) -> Option<Vec<u8>> {
        // One of a lower number may have gone since, so all are looked at while this costs nothing.
        self.generation_names(root)
            .find(|name| self.inode_of_generation(name) == Some(inode))
    }

    /// Whether another name beside the final one leads to a generation: somebody renamed or copied the link, and means to
    /// keep it.
    pub(super) fn is_named_otherwise(&self, generation: &[u8]) -> rustix::io::Result<bool> {
        let text = link_to(generation);
        let dir = rustix::fs::openat(
            self.held.fd(),
            ".",
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        for entry in Dir::read_from(&dir)? {
            let entry = entry?;
            let may_be_one = matches!(entry.file_type(), FileType::Symlink | FileType::Unknown);
            if may_be_one
                && readlinkat(&dir, entry.file_name(), Vec::new())
                    .is_ok_and(|leads| leads.as_bytes() == text.as_slice())
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Device and inode of a generation's directory.
    pub(crate) fn inode_of_generation(&self, generation: &[u8]) -> Option<(u64, u64)> {
        let stat = self
            .open_generation(generation)
            .and_then(rustix::fs::fstat)
            .ok()?;
        Some((stat.st_dev, stat.st_ino))
    }

    /// Device and inode of a directory that is not ours under the final name.
    pub(super) fn inode_of_foreign(&self) -> Option<(u64, u64)> {
        let stat = self.open_dir(&self.name).and_then(rustix::fs::fstat).ok()?;
        Some((stat.st_dev, stat.st_ino))
    }

    /// Lets the final name lead to a generation, by one rename. With `replace`, what stands there goes, if it is no
    /// directory.
    ///
    /// # Errors
    /// `EEXIST` if something stands there and stays; `EISDIR` or the like if it is a directory.
    pub(super) fn switch(&self, generation: &[u8], replace: bool) -> rustix::io::Result<()> {
        let dir = self.held.fd();
        super::tree::remove(dir, self.partial.as_bytes())?;
        rustix::fs::symlinkat(link_to(generation), dir, &self.partial)?;
        let stale = matches!(self.generation_now(), Ok(Some(old)) if self.open_generation(&old).is_err());
        let renamed = self.rename(replace || stale);
        if renamed.is_err() {
            let _ = rustix::fs::unlinkat(dir, &self.partial, AtFlags::empty());
        }
        renamed
    }

    /// The name under which a directory that is not ours is kept when it makes way for a generation.
    pub(super) fn name_of_foreign(&self, job: JobId) -> rustix::io::Result<Vec<u8>> {
        let all = self.generations()?;
        let job: String = job.to_string().chars().filter(|c| *c != '-').take(12).collect();
        let free = |name: &Vec<u8>| {
            let stat = rustix::fs::statat(&all, name.as_slice(), AtFlags::SYMLINK_NOFOLLOW);
            // A link is what was to be exchanged when an earlier run died.
            !stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
        };
        twins([self.name.as_slice(), b"@before-", job.as_bytes()].concat())
            .find(free)
            .ok_or(Errno::EXIST)
    }

    /// Lets the final name, where a directory that is not ours stands, lead to a generation, and that directory become a
    /// generation of its own of the name `kept`: by one exchange.
    pub(super) fn exchange(&self, generation: &[u8], kept: &[u8]) -> rustix::io::Result<()> {
        let dir = self.held.fd();
        let all = self.generations()?;
        match rustix::fs::unlinkat(&all, kept, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(e) => return Err(e),
        }
        // It says what it has to say once it lies under the final name.
        rustix::fs::symlinkat(link_to(generation), &all, kept)?;
        let name = self.name.as_slice();
        let exchange = || rustix::fs::renameat_with(&all, kept, dir, name, RenameFlags::EXCHANGE);
        let exchanged = match exchange() {
            // Who may not write in a directory cannot move it, not even its owner.
            Err(Errno::ACCESS) => self.open_dir(&self.name).and_then(|foreign| {
                let mode = Mode::from_raw_mode(rustix::fs::fstat(&foreign)?.st_mode);
                rustix::fs::fchmod(&foreign, mode | Mode::RWXU)?;
                let exchanged = exchange();
                rustix::fs::fchmod(&foreign, mode)?;
                exchanged
            }),
            other => other,
        };
        if exchanged.is_err() {
            let _ = rustix::fs::unlinkat(&all, kept, AtFlags::empty());
        }
        exchanged?;
        rustix::fs::fsync(&all)
    }

    /// The directory where generations lie.
    pub(crate) fn generations(&self) -> rustix::io::Result<OwnedFd> {
        self.open_dir(GENERATIONS.as_bytes())
    }

    /// Removes the directory of generations if nothing is in it.
    pub(super) fn unmake_generations(&self) {
        let _ = rustix::fs::unlinkat(self.held.fd().as_fd(), GENERATIONS, AtFlags::REMOVEDIR);
    }

    /// Removes what was made for the payload, as far as it is empty.
    pub(crate) fn unmake(&self) {
        if self.kind == UnitKind::Tree {
            self.unmake_generations();
        }
        self.held.unmake();
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

    /// Something of another kind stands at the target.
    pub(super) fn wrong_kind(&self, kind: &str) -> Failure {
        let wanted = match self.kind {
            UnitKind::File => "a file",
            UnitKind::Tree => "a directory",
        };
        Failure::new(
            Code::WrongKind,
            format!("{} is {kind}, {wanted} should come there", self.shown),
            "move it away, or push to another directory",
        )
        .at(self.shown.clone())
    }
}
