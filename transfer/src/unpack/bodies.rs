//! The digests of whole chunks of the files that are laid out, taken while they are written: so a long file need not be
//! read again to be known by its chunks.
//!
//! They lie in a file without a name, since a terabyte has 32 MiB of them.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use stage_core::chunk::CHUNK;
use stage_core::digest::{ChunkDigest, ChunkHash, chunk_digest};

use crate::pipe::spool::unnamed;
use crate::target::space::Promise;

/// Bytes of a digest.
const DIGEST: u64 = 32;

/// See the module.
#[derive(Debug)]
pub(super) struct Bodies {
    hash: ChunkHash,
    file: File,
    /// Digests in it.
    count: u64,
    /// By inode, where a file's digests begin, and how many they are.
    of: HashMap<u64, (u64, u64)>,
    buffer: Vec<u8>,
    /// What was promised for what is written.
    promise: Promise,
}

impl Bodies {
    pub(super) fn new(hash: ChunkHash, state: &Path, promise: Promise) -> io::Result<Self> {
        Ok(Self {
            hash,
            file: unnamed(&state.join("jobs"))?,
            count: 0,
            of: HashMap::new(),
            buffer: vec![0; CHUNK as usize],
            promise,
        })
    }

    /// Copies all that is to be read into a new file; gives how much that was.
    pub(super) fn copy(&mut self, from: &mut dyn Read, to: &mut File) -> io::Result<u64> {
        let (first, mut len, mut told) = (self.count, 0, true);
        loop {
            let filled = fill(from, &mut self.buffer)?;
            to.write_all(&self.buffer[..filled])?;
            self.promise.take(filled as u64);
            len += filled as u64;
            if filled < self.buffer.len() {
                break;
            }
            let digest = chunk_digest(self.hash, &self.buffer);
            // What cannot be written down is read again.
            told = told && self.file.write_all_at(&digest.0, self.count * DIGEST).is_ok();
            self.count += u64::from(told);
        }
        let inode = to.metadata()?.ino();
        // The number may have been that of one that an entry further on took the place of.
        self.of.remove(&inode);
        if told && self.count > first {
            self.of.insert(inode, (first, self.count - first));
        }
        Ok(len)
    }

    /// The digest of a file's n-th whole chunk, if it was taken.
    pub(super) fn get(&self, inode: u64, chunk: u64) -> Option<ChunkDigest> {
        let (first, count) = self.of.get(&inode)?;
        let mut digest = [0; DIGEST as usize];
        let at = (chunk < *count).then_some((first + chunk) * DIGEST)?;
        self.file.read_exact_at(&mut digest, at).ok()?;
        Some(ChunkDigest(digest))
    }
}

/// Reads until the buffer is full or nothing is left.
fn fill(from: &mut dyn Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match from.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_chunks_are_known_and_rests_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let mut bodies = Bodies::new(ChunkHash::Blake3, dir.path(), Promise::default()).unwrap();
        let bytes: Vec<u8> = (0..2 * CHUNK + 5).map(|at| (at / 1000) as u8).collect();
        let mut inodes = Vec::new();
        for name in ["a", "b"] {
            let mut file = File::create(dir.path().join(name)).unwrap();
            let len = bodies.copy(&mut &bytes[..], &mut file).unwrap();
            assert_eq!(len, bytes.len() as u64);
            inodes.push(file.metadata().unwrap().ino());
        }
        let digest = |at: usize| chunk_digest(ChunkHash::Blake3, &bytes[at << 20..(at + 1) << 20]);
        for inode in inodes {
            assert_eq!(bodies.get(inode, 0), Some(digest(0)));
            assert_eq!(bodies.get(inode, 1), Some(digest(1)));
            assert_eq!(bodies.get(inode, 2), None);
        }
        assert!(std::fs::read(dir.path().join("b")).unwrap() == bytes);
    }
}
