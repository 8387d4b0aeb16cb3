//! What the tests stand on: a node with one root and a state directory, and a payload.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use stage_core::assignment::{Final, IfExists, KEEP_PREVIOUS, Place, TargetSpec};
use stage_core::chunk::{CHUNK, ChunkIndex};
use stage_core::digest::{ChunkDigest, ChunkHash, RootHasher, chunk_digest};
use stage_core::failure::Failure;
use stage_core::id::JobId;
use stage_core::manifest::Manifest;
use stage_core::payload::Payload;
use stage_core::units::ByteCount;
use stage_transfer::budget::Budget;
use stage_transfer::root::Roots;
use stage_transfer::target::{Preparation, Target, prepare};
use tempfile::TempDir;

pub(crate) const MODE: u32 = 0o640;
pub(crate) const MTIME: (i64, u32) = (1_600_000_000, 123_456_789);

/// Bytes that no two chunks share.
pub(crate) fn content(size: u64) -> Vec<u8> {
    let mut bytes = vec![0; size as usize];
    let mut x = size | 1;
    for word in bytes.chunks_mut(8) {
        x = x
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let random = (x ^ (x >> 31)).to_le_bytes();
        word.copy_from_slice(&random[..word.len()]);
    }
    bytes
}

/// One node.
pub(crate) struct Bench {
    /// Kept while the test runs; `None` where somebody else owns the directory.
    _dir: Option<TempDir>,
    pub(crate) root: PathBuf,
    pub(crate) state: PathBuf,
    pub(crate) roots: Roots,
    pub(crate) budget: Arc<Budget>,
    pub(crate) job: JobId,
    pub(crate) manifest: Manifest,
    pub(crate) bytes: Vec<u8>,
    pub(crate) spec: TargetSpec,
}

impl Bench {
    pub(crate) fn new(size: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut bench = Self::within(dir.path(), size);
        bench._dir = Some(dir);
        bench
    }

    pub(crate) fn within(dir: &Path, size: u64) -> Self {
        let root = dir.join("root");
        fs::create_dir_all(&root).unwrap();
        Self {
            _dir: None,
            roots: Roots::open(vec![("scratch".parse().unwrap(), root.clone())]),
            root,
            state: dir.join("state"),
            budget: Budget::new(ByteCount(4 * CHUNK)),
            job: JobId::from_random([7; 16]),
            manifest: Manifest::single_file(b"genome.db", ByteCount(size), MODE, MTIME),
            bytes: content(size),
            spec: TargetSpec {
                place: Place::Root {
                    root: None,
                    dir: b"db".to_vec(),
                },
                if_exists: IfExists::Fail,
                unpack: false,
                keep_previous: KEEP_PREVIOUS,
                cache: Default::default(),
            },
        }
    }

    pub(crate) fn rule(mut self, rule: IfExists) -> Self {
        self.spec.if_exists = rule;
        self
    }

    pub(crate) fn dir(&self) -> PathBuf {
        self.root.join("db")
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.dir().join("genome.db")
    }

    pub(crate) fn partial(&self) -> PathBuf {
        self.dir().join(format!(".stage-{}-0", self.job))
    }

    pub(crate) fn table(&self) -> PathBuf {
        self.state.join("jobs").join(self.job.to_string()).join("table")
    }

    /// Puts a file at the target.
    pub(crate) fn put(&self, bytes: &[u8]) {
        fs::create_dir_all(self.dir()).unwrap();
        fs::write(self.file(), bytes).unwrap();
    }

    pub(crate) fn prepare(&self) -> Result<Preparation, Failure> {
        prepare(
            &self.roots,
            &self.state,
            self.job,
            &self.spec,
            &Payload::of(&self.manifest).unwrap(),
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

    pub(crate) fn chunk(&self, index: u32) -> &[u8] {
        let at = u64::from(index) * CHUNK;
        &self.bytes[at as usize..(at + CHUNK).min(self.bytes.len() as u64) as usize]
    }

    pub(crate) fn digest(&self, index: u32) -> ChunkDigest {
        chunk_digest(ChunkHash::Blake3, self.chunk(index))
    }

    pub(crate) fn count(&self) -> u32 {
        (self.bytes.len() as u64).div_ceil(CHUNK) as u32
    }

    pub(crate) fn fin(&self) -> Final {
        let mut root = RootHasher::new(self.manifest.digest());
        (0..self.count()).for_each(|i| root.push(self.digest(i)));
        Final {
            root: root.finish(),
            chunks: self.count(),
            data: self.manifest.payload_size(),
        }
    }

    /// Writes and keeps a chunk, in pieces as a stream does.
    pub(crate) fn receive(&self, target: &Target, index: u32) {
        let claim = target.store().claim(ChunkIndex(index)).unwrap();
        let mut at = 0;
        for block in self.chunk(index).chunks(300_000) {
            claim.write(at, block).unwrap();
            at += block.len();
        }
        claim.keep(self.digest(index), None).unwrap();
    }

    /// Receives all that is not there yet; returns how many chunks that were.
    pub(crate) fn receive_rest(&self, target: &Target) -> u32 {
        let missing = target.store().have().complement();
        missing.iter().for_each(|index| self.receive(target, index.0));
        missing.len()
    }

    /// What lies in a directory, by name.
    pub(crate) fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// The payload lies whole under its name and nothing else does.
    pub(crate) fn assert_published(&self) {
        assert!(fs::read(self.file()).unwrap() == self.bytes, "the copy differs");
        assert_eq!(Self::names(&self.dir()), ["genome.db"]);
    }

    /// Nothing of the job is on the disk.
    pub(crate) fn assert_no_trace(&self) {
        assert!(!self.partial().exists());
        assert!(!self.table().parent().unwrap().exists());
    }
}
