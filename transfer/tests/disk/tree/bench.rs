//! A tree to push, a node to push it to, and a way to tell whether what lies there is exactly that.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use stage_core::assignment::{Final, IfExists, KEEP_PREVIOUS, Place, TargetSpec};
use stage_core::chunk::{CHUNK, ChunkIndex, Layout};
use stage_core::digest::{ChunkDigest, ChunkHash, RootHasher, chunk_digest};
use stage_core::failure::Failure;
use stage_core::id::JobId;
use stage_core::manifest::{Data, Entry, Kind, Manifest, path_order};
use stage_core::payload::Payload;
use stage_core::units::ByteCount;
use stage_transfer::budget::Budget;
use stage_transfer::root::Roots;
use stage_transfer::store::Compared;
use stage_transfer::target::{Preparation, PublishError, Target, prepare};
use tempfile::TempDir;

use crate::bench::content;

/// What one entry is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) mode: u32,
    pub(crate) mtime: (i64, u32),
    pub(crate) what: What,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum What {
    Dir,
    File {
        bytes: Vec<u8>,
        runs: Option<Vec<Range<u64>>>,
    },
    Symlink(Vec<u8>),
    /// Of the file at that path.
    Link(Vec<u8>),
}

/// A payload: what is at each path.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Tree(pub(crate) BTreeMap<Vec<u8>, Node>);

impl Tree {
    fn put(&mut self, path: &[u8], mode: u32, what: What) -> &mut Self {
        let nanos = (blake3(path) % 1_000_000_000) as u32;
        let node = Node {
            mode,
            mtime: (1_500_000_000 + i64::from(nanos % 1000), nanos),
            what,
        };
        self.0.insert(path.to_vec(), node);
        self
    }

    pub(crate) fn dir(&mut self, path: &str, mode: u32) -> &mut Self {
        self.put(path.as_bytes(), mode, What::Dir)
    }

    pub(crate) fn file(&mut self, path: &[u8], mode: u32, bytes: Vec<u8>) -> &mut Self {
        self.put(path, mode, What::File { bytes, runs: None })
    }

    pub(crate) fn symlink(&mut self, path: &str, to: &str) -> &mut Self {
        self.put(path.as_bytes(), 0o777, What::Symlink(to.into()))
    }

    pub(crate) fn link(&mut self, path: &str, to: &str) -> &mut Self {
        self.put(path.as_bytes(), 0o644, What::Link(to.into()))
    }

    pub(crate) fn sparse(&mut self, path: &str, size: u64, runs: Vec<Range<u64>>) -> &mut Self {
        let mut bytes = vec![0; size as usize];
        for run in &runs {
            let data = content(run.end - run.start);
            bytes[run.start as usize..run.end as usize].copy_from_slice(&data);
        }
        self.put(
            path.as_bytes(),
            0o600,
            What::File {
                bytes,
                runs: Some(runs),
            },
        )
    }

    pub(crate) fn bytes(&mut self, path: &str) -> &mut Vec<u8> {
        match &mut self.0.get_mut(path.as_bytes()).unwrap().what {
            What::File { bytes, .. } => bytes,
            other => panic!("{other:?} has no bytes"),
        }
    }

    /// Of all kinds: three levels, names of any bytes, files of every size that may matter.
    pub(crate) fn rich() -> Self {
        let mut tree = Self::default();
        tree.dir("refdb", 0o555)
            .file(b"refdb/aa", 0o644, content(10))
            .file(b"refdb/big", 0o440, content(2 * CHUNK + 77_777))
            .file(b"refdb/empty", 0o604, vec![])
            .dir("refdb/locked", 0o500)
            .file(b"refdb/locked/in", 0o400, content(300_001))
            .dir("refdb/nothing", 0o711)
            .dir("refdb/sub", 0o750)
            .dir("refdb/sub/deep", 0o700)
            .file(b"refdb/sub/deep/chunk", 0o644, content(CHUNK))
            .file(b"refdb/sub/deep/more", 0o755, content(CHUNK - 5))
            .dir("refdb/sub/deep/hollow", 0o755)
            .link("refdb/sub/other name", "refdb/aa")
            .symlink("refdb/sub/dangling", "/nowhere/at all")
            .symlink("refdb/up", "../refdb/aa")
            .file(b"refdb/odd\n\xff\x1b[31m", 0o644, content(4099))
            .file(b"refdb/-rf", 0o644, content(1))
            .file(b"refdb/.stage-like", 0o644, content(2))
            .sparse(
                "refdb/sparse",
                5 * CHUNK,
                vec![65_536..131_072, 3 * CHUNK..3 * CHUNK + 200_000],
            )
            .sparse("refdb/all hole", 3 * CHUNK, vec![]);
        tree
    }

    /// So many small files that the manifest travels as a head.
    pub(crate) fn wide() -> Self {
        let mut tree = Self::default();
        tree.dir("refdb", 0o755);
        for i in 0..400u64 {
            let path = format!("refdb/a file with a long name, as many have one {i:04}");
            tree.file(path.as_bytes(), 0o644, content(4001 + i));
        }
        tree
    }

    pub(crate) fn manifest(&self) -> Manifest {
        let mut paths: Vec<_> = self.0.keys().collect();
        paths.sort_by(|a, b| path_order(a, b));
        let mut entries: Vec<Entry> = Vec::new();
        // Of a file with several names, the first one has its bytes: whoever is to be a link must come later.
        for path in &paths {
            let node = &self.0[*path];
            let kind = match &node.what {
                What::Dir => Kind::Dir,
                What::File { bytes, runs } => Kind::File {
                    size: ByteCount(bytes.len() as u64),
                    data: match runs {
                        Some(runs) => Data::of(ByteCount(bytes.len() as u64), runs.clone()),
                        None => Data::Dense,
                    },
                },
                What::Symlink(to) => Kind::Symlink { to: to.clone() },
                What::Link(to) => Kind::HardLink {
                    to: paths.iter().position(|p| *p == to).unwrap() as u32,
                },
            };
            entries.push(Entry {
                path: (*path).clone(),
                mode: node.mode,
                mtime: node.mtime,
                xattrs: Vec::new(),
                kind,
            });
        }
        let manifest = Manifest { entries };
        manifest.check().unwrap();
        manifest
    }

    /// Makes the unit of that name by plain means, as somebody who does not use stage would.
    pub(crate) fn make(&self, unit: &str, at: &Path) {
        let below = |path: &[u8]| match path.get(unit.len() + 1..) {
            None => at.to_path_buf(),
            Some(rest) => at.join(OsStr::from_bytes(rest)),
        };
        let mine = |path: &[u8]| path == unit.as_bytes() || path.starts_with(format!("{unit}/").as_bytes());
        for (path, node) in self.0.iter().filter(|(path, _)| mine(path)) {
            let to = below(path);
            match &node.what {
                What::Dir => fs::create_dir(to).unwrap(),
                What::File { bytes, runs } => {
                    let file = fs::File::create(to).unwrap();
                    file.set_len(bytes.len() as u64).unwrap();
                    let all = vec![0..bytes.len() as u64; 1];
                    for run in runs.as_ref().unwrap_or(&all) {
                        file.write_all_at(&bytes[run.start as usize..run.end as usize], run.start)
                            .unwrap();
                    }
                }
                What::Symlink(text) => {
                    std::os::unix::fs::symlink(OsStr::from_bytes(text), &to).unwrap();
                    let time = rustix::fs::Timespec {
                        tv_sec: node.mtime.0,
                        tv_nsec: node.mtime.1.into(),
                    };
                    let times = rustix::fs::Timestamps {
                        last_access: time,
                        last_modification: time,
                    };
                    let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
                    rustix::fs::utimensat(rustix::fs::CWD, &to, &times, flags).unwrap();
                }
                What::Link(_) => {}
            }
        }
        for (path, node) in self.0.iter().filter(|(path, _)| mine(path)) {
            if let What::Link(first) = &node.what {
                fs::hard_link(below(first), below(path)).unwrap();
            }
        }
        for (path, node) in self.0.iter().rev().filter(|(path, _)| mine(path)) {
            if matches!(node.what, What::Dir | What::File { .. }) {
                let file = fs::File::open(below(path)).unwrap();
                file.set_modified(std::time::UNIX_EPOCH + Duration::new(node.mtime.0 as u64, node.mtime.1))
                    .unwrap();
                file.set_permissions(fs::Permissions::from_mode(node.mode))
                    .unwrap();
            }
        }
    }

    /// What differs between the tree's unit of that name and what lies at a path.
    pub(crate) fn differences(&self, unit: &str, at: &Path) -> Vec<String> {
        let mut found = BTreeMap::new();
        look(at, unit.as_bytes(), &mut found);
        let mine = |path: &[u8]| path == unit.as_bytes() || path.starts_with(format!("{unit}/").as_bytes());
        let wanted: BTreeSet<_> = self.0.keys().filter(|path| mine(path)).cloned().collect();
        let there: BTreeSet<_> = found.keys().cloned().collect();
        let show = |path: &Vec<u8>| String::from_utf8_lossy(path).into_owned();
        let mut wrong: Vec<String> = wanted
            .symmetric_difference(&there)
            .map(|path| format!("{} is missing or too much", show(path)))
            .collect();
        let inode = |path: &Vec<u8>| found.get(path).map(|(_, meta)| meta.ino());
        for path in wanted.intersection(&there) {
            let (node, (real, meta)) = (&self.0[path], &found[path]);
            let mut say = |what: &str| wrong.push(format!("{}: {what}", show(path)));
            let dressed =
                meta.mode() & 0o7777 == node.mode && (meta.mtime(), meta.mtime_nsec() as u32) == node.mtime;
            match &node.what {
                What::Dir => {
                    if !meta.is_dir() || !dressed {
                        say(&format!(
                            "is no such directory: {:o} {}",
                            meta.mode(),
                            meta.mtime()
                        ));
                    }
                }
                What::File { bytes, runs } => {
                    if !meta.is_file() || !dressed {
                        say("is no such file");
                    } else if fs::read(real).unwrap() != *bytes {
                        say("has other bytes");
                    }
                    let data: u64 = match runs {
                        Some(runs) => runs.iter().map(|run| run.end - run.start).sum(),
                        None => bytes.len() as u64,
                    };
                    if meta.blocks() * 512 > data + 16_384 {
                        say(&format!("takes {} blocks", meta.blocks()));
                    }
                    let names = 1 + self
                        .0
                        .values()
                        .filter(|n| n.what == What::Link(path.clone()))
                        .count();
                    let inner = found.values().filter(|(_, m)| m.ino() == meta.ino()).count();
                    if inner != names {
                        say(&format!("has {inner} names and not {names}"));
                    }
                }
                What::Symlink(text) => {
                    let to = fs::read_link(real).map(|to| to.into_os_string().into_vec()).ok();
                    if to.as_ref() != Some(text) {
                        say("is no such link");
                    }
                    if (meta.mtime(), meta.mtime_nsec() as u32) != node.mtime {
                        say("has another time");
                    }
                }
                What::Link(first) => {
                    if inode(first) != inode(path) {
                        say("is another file");
                    }
                }
            }
        }
        wrong
    }
}

fn blake3(path: &[u8]) -> u64 {
    path.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

fn look(at: &Path, path: &[u8], found: &mut BTreeMap<Vec<u8>, (PathBuf, fs::Metadata)>) {
    let Ok(meta) = fs::symlink_metadata(at) else {
        return;
    };
    let is_dir = meta.is_dir();
    found.insert(path.to_vec(), (at.to_path_buf(), meta));
    if is_dir {
        for entry in fs::read_dir(at).unwrap() {
            let name = entry.unwrap().file_name();
            look(&at.join(&name), &[path, b"/", name.as_bytes()].concat(), found);
        }
    }
}

/// One node, and what is pushed to it.
pub(crate) struct Bench {
    /// Kept while the test runs; `None` where somebody else owns the directory.
    _dir: Option<TempDir>,
    pub(crate) root: PathBuf,
    pub(crate) state: PathBuf,
    pub(crate) roots: Roots,
    budget: Arc<Budget>,
    pub(crate) job: JobId,
    pub(crate) tree: Tree,
    pub(crate) rule: IfExists,
    pub(crate) keep: Duration,
}

impl Bench {
    pub(crate) fn new(tree: Tree) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut bench = Self::within(dir.path(), tree);
        bench._dir = Some(dir);
        bench
    }

    pub(crate) fn within(dir: &Path, tree: Tree) -> Self {
        let root = dir.join("root");
        fs::create_dir_all(&root).unwrap();
        Self {
            _dir: None,
            roots: Roots::open(vec![("scratch".parse().unwrap(), root.clone())]),
            root,
            state: dir.join("state"),
            budget: Budget::new(ByteCount(4 * CHUNK)),
            job: JobId::from_random([7; 16]),
            tree,
            rule: IfExists::Fail,
            keep: KEEP_PREVIOUS,
        }
    }

    /// Another push of what the tree is now.
    pub(crate) fn next(&mut self, rule: IfExists) -> &mut Self {
        let n = self.job.as_bytes()[0];
        self.job = JobId::from_random([n.wrapping_add(1); 16]);
        self.rule = rule;
        self
    }

    pub(crate) fn dir(&self) -> PathBuf {
        self.root.join("db")
    }

    pub(crate) fn name(&self) -> PathBuf {
        self.dir().join("refdb")
    }

    pub(crate) fn partial(&self, unit: usize) -> PathBuf {
        self.dir().join(format!(".stage-{}-{unit}", self.job))
    }

    /// The generations that lie there.
    pub(crate) fn generations(&self) -> Vec<String> {
        match fs::read_dir(self.dir().join(".stage")) {
            Ok(_) => crate::bench::Bench::names(&self.dir().join(".stage")),
            Err(_) => Vec::new(),
        }
    }

    pub(crate) fn payload(&self) -> Payload {
        Payload::of(&self.tree.manifest()).unwrap()
    }

    pub(crate) fn layout(&self) -> Layout {
        self.payload().layout().unwrap()
    }

    pub(crate) fn prepare(&self) -> Result<Preparation, Failure> {
        let spec = TargetSpec {
            place: Place::Root {
                root: None,
                dir: b"db".to_vec(),
            },
            if_exists: self.rule,
            unpack: false,
            keep_previous: self.keep,
            cache: Default::default(),
        };
        prepare(
            &self.roots,
            &self.state,
            self.job,
            &spec,
            &self.payload(),
            ChunkHash::Blake3,
            &self.budget,
        )
    }

    pub(crate) fn ready(&self) -> Target {
        match self.prepare().unwrap() {
            Preparation::Ready(target) => target,
            Preparation::Skipped { path } => panic!("{path} was skipped"),
        }
    }

    pub(crate) fn unfit(&self) -> Failure {
        match self.prepare() {
            Err(failure) => failure,
            Ok(other) => panic!("not unfit: {other:?}"),
        }
    }

    /// The payload's sequence, chunk by chunk: what a source would send.
    pub(crate) fn chunks(&self) -> Vec<Vec<u8>> {
        let manifest = self.tree.manifest();
        let payload = self.payload();
        let mut data = Vec::new();
        for piece in manifest.pieces() {
            let What::File { bytes, .. } = &self.tree.0[&manifest.entries[piece.entry as usize].path].what
            else {
                panic!("only files have bytes");
            };
            assert_eq!(piece.in_payload, data.len() as u64);
            data.extend(&bytes[piece.in_file as usize..(piece.in_file + piece.len) as usize]);
        }
        let head = match payload.inline {
            Some(_) => Vec::new(),
            None => manifest.encode(),
        };
        let cut = |bytes: &[u8]| {
            bytes
                .chunks(CHUNK as usize)
                .map(<[u8]>::to_vec)
                .collect::<Vec<_>>()
        };
        [cut(&head), cut(&data)].concat()
    }

    pub(crate) fn fin(&self) -> Final {
        let chunks = self.chunks();
        let mut root = RootHasher::new(self.payload().manifest);
        chunks.iter().for_each(|chunk| root.push(digest(chunk)));
        Final {
            root: root.finish(),
            chunks: chunks.len() as u32,
            data: self.payload().data,
        }
    }

    /// Receives as a child does: the head first; then where there may be an older copy digests come ahead, and only what
    /// differs is wanted. Returns which data chunks had to come.
    pub(crate) fn receive(&self, target: &Target) -> Vec<u32> {
        self.receive_some(target, u32::MAX)
    }

    /// The same, but the connection is lost after so many chunks.
    pub(crate) fn receive_some(&self, target: &Target, most: u32) -> Vec<u32> {
        let chunks = self.chunks();
        let head = self.layout().head_count();
        let mut wanted = Vec::new();
        let mut came = 0;
        for (index, bytes) in (0..).zip(&chunks) {
            let store = target.store();
            if store.has(ChunkIndex(index)) {
                continue;
            }
            if index >= head && store.wants_offers() {
                let compared = store.compare(ChunkIndex(index), digest(bytes)).unwrap();
                if compared == Compared::Same {
                    continue;
                }
            }
            if came == most {
                return wanted;
            }
            came += 1;
            let claim = store.claim(ChunkIndex(index)).unwrap();
            let mut at = 0;
            for block in bytes.chunks(300_000) {
                claim.write(at, block).unwrap();
                at += block.len();
            }
            claim.keep(digest(bytes), None).unwrap();
            if index >= head {
                wanted.push(index - head);
            }
        }
        wanted
    }

    /// Pushes the tree; what had to come, and whether it was there already.
    pub(crate) fn push(&self) -> (Vec<u32>, bool) {
        let target = self.ready();
        let wanted = self.receive(&target);
        let publication = target.publish(&self.fin()).unwrap();
        assert_eq!(target.publish(&self.fin()).unwrap(), publication);
        target.release();
        self.assert_published();
        (wanted, publication.already)
    }

    /// Pushes the tree, which is not taken.
    pub(crate) fn refused(&self) -> Failure {
        match self.prepare() {
            Err(failure) => failure,
            Ok(Preparation::Skipped { path }) => panic!("{path} was skipped"),
            Ok(Preparation::Ready(target)) => {
                let failure = self.received_or_refused(&target).err().unwrap_or_else(|| {
                    match target.publish(&self.fin()) {
                        Err(PublishError::Unfit(failure)) => failure,
                        other => panic!("not refused: {other:?}"),
                    }
                });
                target.discard().unwrap();
                failure
            }
        }
    }

    fn received_or_refused(&self, target: &Target) -> Result<(), Failure> {
        for (index, bytes) in (0..).zip(&self.chunks()) {
            let index = ChunkIndex(index);
            let store = target.store();
            if store.has(index) || store.compare(index, digest(bytes))? == Compared::Same {
                continue;
            }
            let claim = store.claim(index).unwrap();
            claim.write(0, bytes)?;
            claim.keep(digest(bytes), None)?;
        }
        Ok(())
    }

    pub(crate) fn assert_published(&self) {
        for unit in &self.payload().units {
            let name = std::str::from_utf8(&unit.name).unwrap();
            let mut at = self.dir().join(name);
            if at.is_symlink() {
                at = self.dir().join(fs::read_link(&at).unwrap());
            }
            assert_eq!(self.tree.differences(name, &at), [""; 0]);
        }
        let left: Vec<_> = crate::bench::Bench::names(&self.dir())
            .into_iter()
            .filter(|name| name.starts_with(".stage-"))
            .collect();
        assert_eq!(left, [""; 0], "partials are left");
    }

    /// Nothing of the job is on the disk.
    pub(crate) fn assert_no_trace(&self) {
        assert!((0..4).all(|unit| fs::symlink_metadata(self.partial(unit)).is_err()));
        assert!(!self.state.join("jobs").join(self.job.to_string()).exists());
    }
}

pub(crate) fn digest(bytes: &[u8]) -> ChunkDigest {
    chunk_digest(ChunkHash::Blake3, bytes)
}
