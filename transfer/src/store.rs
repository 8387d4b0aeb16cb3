//! One job's chunks on this node: which are here, where their bytes lie, who is writing which.
//!
//! All calls block at most on the disk; they are made from stream threads, never from the async runtime's.

use std::ops::Range;
use std::sync::{Arc, Weak};

use stage_core::chunk::{ChunkIndex, ChunkSet, Layout};
use stage_core::digest::{ChunkDigest, ChunkHash, RootDigest};
use stage_core::failure::Failure;

use crate::budget::ChunkBuf;

/// Told of each chunk that comes to be here, from the thread that kept it and with no lock held. Must not block.
pub trait Watcher: Send + Sync {
    /// The chunk is whole, checked and kept.
    fn arrived(&self, index: ChunkIndex);
}

/// Whether a chunk of an older copy is the payload's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compared {
    /// It is: the chunk is kept now, and no byte has to come.
    Same,
    /// It is not: its bytes are wanted.
    Different,
}

/// One job's chunks on this node.
#[derive(Debug)]
pub struct Store {}

#[expect(clippy::unimplemented, unused_variables, reason = "being written")]
impl Store {
    /// How the payload is cut.
    pub fn layout(&self) -> Layout {
        unimplemented!()
    }
    /// Which function digests its chunks.
    pub fn hash(&self) -> ChunkHash {
        unimplemented!()
    }
    /// What is here now.
    pub fn have(&self) -> ChunkSet {
        unimplemented!()
    }
    /// Whether this chunk is here.
    pub fn has(&self, index: ChunkIndex) -> bool {
        unimplemented!()
    }
    /// Whether every chunk is here.
    pub fn is_complete(&self) -> bool {
        unimplemented!()
    }
    /// Registers a watcher; it is told of every chunk that is not in the set returned.
    pub fn watch(&self, watcher: Weak<dyn Watcher>) -> ChunkSet {
        unimplemented!()
    }
    /// The digest of a chunk that is here.
    pub fn digest(&self, index: ChunkIndex) -> Option<ChunkDigest> {
        unimplemented!()
    }
    /// The digests of a run of chunks, all of which must be here.
    pub fn digests(&self, run: Range<u32>) -> Result<Vec<ChunkDigest>, Failure> {
        unimplemented!()
    }
    /// The root over the manifest and all digests; every chunk must be here.
    pub fn root(&self) -> Result<RootDigest, Failure> {
        unimplemented!()
    }
    /// The chunk's bytes, if they are still in memory.
    pub fn hot(&self, index: ChunkIndex) -> Option<Arc<ChunkBuf>> {
        unimplemented!()
    }
    /// Reads bytes of a chunk that is here, from `at` within it.
    pub fn read(&self, index: ChunkIndex, at: usize, buf: &mut [u8]) -> Result<(), Failure> {
        unimplemented!()
    }
    /// Makes the caller the one owner of a chunk that is not here; `None` if it is here or has an owner.
    pub fn claim(self: &Arc<Self>, index: ChunkIndex) -> Option<Claim> {
        unimplemented!()
    }
    /// Takes back that these chunks are here: their digests are not the payload's.
    pub fn disown(&self, chunks: &ChunkSet) -> Result<(), Failure> {
        unimplemented!()
    }
    /// Whether an older copy stands at the target, so that digests should come ahead of bytes.
    pub fn wants_offers(&self) -> bool {
        unimplemented!()
    }
    /// Compares the older copy's chunk with the payload's digest.
    ///
    /// # Errors
    /// Other content, where the rule is to leave it: the target is unfit.
    pub fn compare(self: &Arc<Self>, index: ChunkIndex, digest: ChunkDigest) -> Result<Compared, Failure> {
        unimplemented!()
    }
}

/// The right to write one chunk. Dropped without [`Claim::keep`], the chunk is free again.
#[derive(Debug)]
pub struct Claim {}

#[expect(clippy::unimplemented, unused_variables, reason = "being written")]
impl Claim {
    /// Which chunk.
    pub fn index(&self) -> ChunkIndex {
        unimplemented!()
    }
    /// Writes bytes to their place, from `at` within the chunk. At a source, which has its bytes, this is an error.
    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<(), Failure> {
        unimplemented!()
    }
    /// The chunk is whole and its digest was checked: journals it, keeps its bytes hot, tells the watchers.
    pub fn keep(self, digest: ChunkDigest, bytes: Option<Arc<ChunkBuf>>) -> Result<(), Failure> {
        unimplemented!()
    }
}
