//! The index: what stage published on this node, one directory for each path.
//!
//! ```text
//!   index/<id of the path>/entry          what was published there, by whom, and the key of the file
//!                          <job>.table    the chunk digests: the job's own table, under a second name
//!                          <job>.manifest what the payload is made of, if that is too long for the entry
//! ```
//!
//! An entry is written beside its place and renamed there, so it is whole or not there; one that is damaged is dropped
//! with a warning. It is a hint and never a proof: a listing looks at each file, a verification hashes it, and what is
//! published is checked as if there were no index. So nothing waits for the disk when an entry is made: kill -9 leaves
//! it, and what a power cut takes is found again by the next push.

mod look;
mod remove;
mod verify;

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use stage_core::ask::{Copy, Kind, State};
use stage_core::assignment::Place;
use stage_core::chunk::Layout;
use stage_core::digest::{ChunkHash, FileDigest, RootDigest};
use stage_core::failure::{Failure, show_path};
use stage_core::id::JobId;
use stage_core::manifest::Manifest;
use stage_core::payload::{Payload, UnitKind};
use stage_core::units::ByteCount;

use crate::fault;
use crate::journal::{self, FileState, Kept, Table};
use crate::root::Roots;
use crate::store::head;
pub use verify::Hashing;

const MAGIC: &[u8; 8] = b"stageI\r\n";
const VERSION: u32 = 2;
/// An entry's file in its directory.
const ENTRY: &str = "entry";

/// The index of one agent.
#[derive(Debug)]
pub struct Index {
    /// The agent's state directory.
    state: PathBuf,
    dir: PathBuf,
    /// Held while an entry is changed.
    changing: Mutex<()>,
}

/// What was published at one path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The directory, by its root's name.
    pub(crate) place: Place,
    /// The name in it.
    pub(crate) name: Vec<u8>,
    /// The absolute path as it was then.
    pub(crate) path: Vec<u8>,
    pub(crate) kind: EntryKind,
    /// Of a tree of ours, the generation that its name leads to.
    pub(crate) generation: Option<Vec<u8>>,
    /// By which job; its table's slots are bound to it.
    pub(crate) job: JobId,
    pub(crate) hash: ChunkHash,
    /// Of which it is a unit.
    pub(crate) payload: Payload,
    /// Which one.
    pub(crate) unit: u32,
    pub(crate) root: RootDigest,
    /// Known once the job is over.
    pub(crate) sha256: Option<FileDigest>,
    /// How the payload is cut; of a stream only FINAL told that.
    pub(crate) layout: Layout,
    /// Apparent size.
    pub(crate) size: ByteCount,
    /// The file, or the tree's directory, that it was. [`FileState`] has device, inode, size and times.
    pub(crate) key: FileState,
    /// The boot in which it was looked at: devices and mounts have other numbers in another one.
    pub(crate) boot: [u8; 16],
    /// Seconds since 1970.
    pub(crate) published: u64,
    /// It stood there before, and was found to be the payload.
    pub(crate) found: bool,
    /// A verification found the file in this state to be something else: in which way.
    pub(crate) damage: Option<(FileState, String)>,
    /// When it was first seen to be missing: seconds since 1970.
    pub(crate) missing: Option<u64>,
    /// The inode that is being removed, if an agent died while it did that.
    pub(crate) removing: Option<u64>,
    /// Of a tree that was laid out from a tar, the tar's root: people know it by the tar's digests.
    pub(crate) tar: Option<RootDigest>,
}

/// What an entry is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum EntryKind {
    /// A regular file.
    File,
    /// A directory with all that is in it.
    Tree,
}

impl Entry {
    /// The absolute path at which it was published, as bytes.
    pub fn path(&self) -> &[u8] {
        &self.path
    }

    /// The root of the payload that was pushed.
    pub fn root(&self) -> RootDigest {
        self.tar.unwrap_or(self.root)
    }

    /// The file's SHA-256, if it is known.
    pub fn sha256(&self) -> Option<FileDigest> {
        self.sha256
    }

    /// Apparent size.
    pub fn size(&self) -> ByteCount {
        self.size
    }

    /// As it is shown, in this state.
    pub fn show(&self, state: State, detail: String) -> Copy {
        Copy {
            path: show_path(&self.path),
            kind: match self.kind {
                EntryKind::File => Kind::File,
                EntryKind::Tree => Kind::Tree,
            },
            sha256: self.sha256,
            root: self.root(),
            content: self.root,
            unpacked: self.tar.is_some(),
            place: self.shown_place(),
            bytes: self.size,
            published: self.published,
            job: self.job,
            found: self.found,
            state,
            detail,
        }
    }

    /// Its place as people write it, which is the same on every node: `ROOT:DIR/NAME`.
    fn shown_place(&self) -> String {
        let (root, dir) = match &self.place {
            Place::Root { root, dir } => (root.as_ref(), dir.as_slice()),
            Place::Absolute(dir) => (None, dir.as_slice()),
        };
        let mut below = dir.to_vec();
        if !below.is_empty() {
            below.push(b'/');
        }
        below.extend(&self.name);
        let below = show_path(&below);
        root.map_or_else(|| below.clone(), |root| format!("{root}:{below}"))
    }

    /// Whether a file is the one that was published, untouched since.
    pub(crate) fn is_untouched(&self, now: &FileState) -> bool {
        self.key.looks_like(now) && (self.key.dev == now.dev || !journal::is_this_boot(self.boot))
    }

    fn encode(&self) -> io::Result<Vec<u8>> {
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        let mut out = postcard::to_extend(self, out).map_err(io::Error::other)?;
        let crc = crc32c::crc32c(&out);
        out.extend(crc.to_le_bytes());
        Ok(out)
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (body, crc) = bytes.split_last_chunk::<4>()?;
        if crc32c::crc32c(body).to_le_bytes() != *crc {
            return None;
        }
        let body = body.strip_prefix(MAGIC)?.strip_prefix(&VERSION.to_le_bytes())?;
        postcard::from_bytes(body).ok()
    }
}

/// What is where an entry would be.
enum Load {
    Entry(Box<Entry>),
    Absent,
    Unreadable(io::Error),
    Damaged(&'static str),
}

/// What [`Index::note`] is told of a copy that was just published.
pub(crate) struct Note<'a> {
    pub(crate) place: Place,
    pub(crate) name: &'a [u8],
    pub(crate) path: Vec<u8>,
    pub(crate) job: JobId,
    pub(crate) hash: ChunkHash,
    pub(crate) root: RootDigest,
    pub(crate) tar: Option<RootDigest>,
    pub(crate) payload: &'a Payload,
    pub(crate) unit: u32,
    pub(crate) generation: Option<Vec<u8>>,
    /// The agent's state directory, where the job's manifest lies if it is long.
    pub(crate) state: &'a Path,
    pub(crate) manifest: &'a Manifest,
    pub(crate) layout: Layout,
    pub(crate) table: &'a Table,
    pub(crate) key: FileState,
    /// It was there already.
    pub(crate) already: bool,
}

impl Index {
    /// The index in an agent's state directory.
    pub fn open(state: &Path) -> Self {
        Self {
            state: state.to_owned(),
            dir: state.join("index"),
            changing: Mutex::new(()),
        }
    }

    fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The directory of a path's entry.
    fn place(&self, path: &[u8]) -> PathBuf {
        let id = blake3::hash(path).to_hex();
        self.dir.join(&id[..32])
    }

    /// Every entry, by path. Those that are damaged are dropped.
    pub fn entries(&self) -> Vec<Entry> {
        let Ok(places) = fs::read_dir(&self.dir) else {
            return Vec::new();
        };
        let mut entries: Vec<Entry> = places
            .flatten()
            .filter_map(|place| self.read(&place.path()))
            .collect();
        entries.sort_by(|a, b| a.path.cmp(&b.path));
        entries
    }

    /// The entry of an absolute path.
    pub fn find(&self, path: &[u8]) -> Option<Entry> {
        self.read(&self.place(path))
    }

    fn read(&self, place: &Path) -> Option<Entry> {
        match self.load(place) {
            Load::Entry(entry) => Some(*entry),
            Load::Absent => None,
            Load::Unreadable(e) => {
                tracing::warn!(place = %place.display(), "an entry of the index cannot be read: {e}");
                None
            }
            Load::Damaged(why) => {
                tracing::warn!(place = %place.display(), "an entry of the index is damaged and is dropped: {why}");
                let _changing = self.changing();
                // One that was written meanwhile stays.
                if matches!(self.load(place), Load::Damaged(_)) {
                    discard(place);
                }
                None
            }
        }
    }

    fn load(&self, place: &Path) -> Load {
        match fs::read(place.join(ENTRY)) {
            Ok(bytes) => match Entry::decode(&bytes) {
                Some(entry) if self.place(&entry.path) == place => Load::Entry(Box::new(entry)),
                Some(_) => Load::Damaged("it is of another path"),
                None => Load::Damaged("its checksum is wrong"),
            },
            // Being made, or being dropped.
            Err(e) if e.kind() == io::ErrorKind::NotFound => Load::Absent,
            Err(e) => Load::Unreadable(e),
        }
    }

    /// The generation that is entered for an absolute path, and its directory's inode.
    pub(crate) fn generation_at(&self, path: &[u8]) -> Option<(Vec<u8>, u64)> {
        let entry = self.find(path)?;
        Some((entry.generation?, entry.key.ino))
    }

    /// Enters a copy that was just published; what was published at its path before is forgotten.
    pub(crate) fn note(&self, note: Note<'_>) -> Result<(), Failure> {
        let place = self.place(&note.path);
        let _changing = self.changing();
        let before = match self.load(&place) {
            Load::Entry(before) => Some(*before),
            _ => None,
        };
        // What stage put there itself and finds again is still its own, and as old as it was.
        let own = before.filter(|before| {
            note.already
                && (before.key.ino, before.key.size, before.key.mtime)
                    == (note.key.ino, note.key.size, note.key.mtime)
        });
        let (kind, size) = match note.payload.units.get(note.unit as usize) {
            Some(unit) if unit.kind == UnitKind::Tree => (EntryKind::Tree, unit.size),
            _ => (EntryKind::File, ByteCount(note.key.size)),
        };
        let entry = Entry {
            place: note.place,
            name: note.name.to_vec(),
            path: note.path,
            kind,
            generation: note.generation,
            job: note.job,
            hash: note.hash,
            payload: note.payload.clone(),
            unit: note.unit,
            root: note.root,
            sha256: own
                .as_ref()
                .filter(|own| own.root == note.root)
                .and_then(|own| own.sha256),
            layout: note.layout,
            size,
            key: note.key,
            boot: journal::boot_id(),
            published: own.as_ref().map_or_else(now, |own| own.published),
            found: own.map_or(note.already, |own| own.found),
            damage: None,
            missing: None,
            removing: None,
            tar: note.tar,
        };
        let fail = |e: &io::Error| fault::state(e, "entering a copy in the index", &place);
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&place)
            .map_err(|e| fail(&e))?;
        note.table.keep_as(&table_of(&place, entry.job))?;
        let manifest = manifest_of(&place, entry.job);
        if note.payload.inline.is_none() {
            let came = journal::job_dir(note.state, note.job).join(head::NAME);
            let new = place.join("manifest.new");
            let kept = || {
                // The manifest of a tree may have hundreds of megabytes.
                if note.tar.is_some() || fs::hard_link(&came, &manifest).is_err() {
                    fs::write(&new, note.manifest.encode())?;
                    fs::rename(&new, &manifest)?;
                }
                Ok(())
            };
            kept().map_err(|e: io::Error| fail(&e))?;
        }
        write(&place, &entry, false)?;
        // What belonged to earlier jobs.
        let ours = [table_of(&place, entry.job), manifest, place.join(ENTRY)];
        for file in fs::read_dir(&place).map_err(|e| fail(&e))?.flatten() {
            if !ours.contains(&file.path()) {
                fs::remove_file(file.path()).map_err(|e| fail(&e))?;
            }
        }
        Ok(())
    }

    /// A job is over here: its copy, if it published one, gets its SHA-256, and its entry becomes durable. To be called
    /// while the job's table is still there.
    ///
    /// # Errors
    /// The state directory cannot be written.
    pub fn settle(&self, state: &Path, job: JobId, sha256: Option<FileDigest>) -> Result<(), Failure> {
        let Some(record) = journal::peek(state, job) else {
            return Ok(());
        };
        for name in &record.names {
            let path = [record.dir.as_slice(), name].join(&b'/');
            if self.find(&path).is_none_or(|entry| entry.job != job) {
                continue;
            }
            self.change(&path, |entry| {
                // Of several units the digest is that of all together.
                if entry.job == job && entry.payload.units.len() == 1 {
                    entry.sha256 = sha256.or(entry.sha256);
                }
            })?;
        }
        Ok(())
    }

    /// Changes an entry, if there is one, durably.
    fn change(&self, path: &[u8], change: impl FnOnce(&mut Entry)) -> Result<(), Failure> {
        let place = self.place(path);
        let _changing = self.changing();
        let Load::Entry(mut entry) = self.load(&place) else {
            return Ok(());
        };
        change(&mut entry);
        write(&place, &entry, true)
    }

    /// Forgets the copies that have been missing for so long. To be called now and then.
    pub fn sweep(&self, roots: &Roots, age: Duration) {
        for entry in self.entries() {
            let is_missing = self.look(roots, &entry).0 == State::Missing;
            let now = now();
            let done = match (is_missing, entry.missing) {
                (false, None) => Ok(()),
                (false, Some(_)) => self.change(&entry.path, |entry| entry.missing = None),
                (true, None) => self.change(&entry.path, |entry| entry.missing = Some(now)),
                (true, Some(since)) => {
                    if now.saturating_sub(since) >= age.as_secs() {
                        tracing::info!(
                            path = show_path(&entry.path),
                            "a copy that is long gone is forgotten"
                        );
                        self.forget(&entry.path);
                    }
                    Ok(())
                }
            };
            if let Err(failure) = done {
                tracing::warn!("{failure}");
            }
        }
    }

    /// Forgets what was published at a path.
    fn forget(&self, path: &[u8]) {
        let _changing = self.changing();
        discard(&self.place(path));
    }

    /// The chunk digests of an entry, and what its payload is made of.
    pub(crate) fn digests(&self, entry: &Entry) -> io::Result<(Kept, Manifest)> {
        let place = self.place(&entry.path);
        let manifest = match entry.payload.inline().map_err(io::Error::other)? {
            Some(manifest) => manifest,
            None => {
                let encoded = fs::read(manifest_of(&place, entry.job))?;
                entry.payload.decode(&encoded).map_err(io::Error::other)?
            }
        };
        Ok((Kept::open(&table_of(&place, entry.job), entry.job)?, manifest))
    }
}

fn table_of(place: &Path, job: JobId) -> PathBuf {
    place.join(format!("{job}.table"))
}

fn manifest_of(place: &Path, job: JobId) -> PathBuf {
    place.join(format!("{job}.manifest"))
}

fn write(place: &Path, entry: &Entry, durable: bool) -> Result<(), Failure> {
    let new = place.join("entry.new");
    let attempt = || {
        let mut file = File::create(&new)?;
        file.write_all(&entry.encode()?)?;
        if durable {
            file.sync_data()?;
        }
        fs::rename(&new, place.join(ENTRY))?;
        if durable {
            File::open(place)?.sync_all()?;
        }
        Ok(())
    };
    attempt().map_err(|e: io::Error| fault::state(&e, "writing an entry of the index", place))
}

/// The entry first: what is left without one is nothing.
fn discard(place: &Path) {
    let gone = match fs::remove_file(place.join(ENTRY)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => fs::remove_dir_all(place),
    };
    if let Err(e) = gone
        && e.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(place = %place.display(), "an entry of the index cannot be dropped: {e}");
    }
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
