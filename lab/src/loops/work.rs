//! What all ways have in common: the chunks, who sends which, the file, and the check of what came.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use stage_core::chunk::CHUNK;
use stage_core::digest::{ChunkDigest, ChunkHash, ChunkHasher, chunk_digest};

/// So many different chunks are sent again and again: as much as a node that is up to date holds in memory.
const HOT: u64 = 16;

/// Stands where an index would: nothing more comes over this stream.
const END: u64 = u64::MAX;

/// One transfer.
pub(super) struct Work {
    hot: Vec<(Bytes, ChunkDigest)>,
    count: u64,
    next: AtomicU64,
    kept: AtomicU64,
    file: File,
}

impl Work {
    /// So many chunks into an empty file.
    pub(super) fn new(hot: &[(Bytes, ChunkDigest)], count: u64, file: File) -> Self {
        Self {
            hot: hot.to_vec(),
            count,
            next: AtomicU64::new(0),
            kept: AtomicU64::new(0),
            file,
        }
    }

    /// The next chunk for whoever can send: its header and its bytes. `None`: all are taken.
    pub(super) fn take(&self) -> Option<(Header, Bytes)> {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        let (bytes, digest) = &self.hot[(index % self.hot.len() as u64) as usize];
        (index < self.count).then(|| {
            let digest = *digest;
            (Header { index, digest }, bytes.clone())
        })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn write(&self, block: &[u8], at: u64) -> io::Result<()> {
        self.file.write_all_at(block, at)
    }

    /// A chunk is whole and written.
    ///
    /// # Errors
    /// Its digest is not what was announced.
    pub(super) fn keep(&self, header: &Header, digest: ChunkDigest) -> io::Result<()> {
        if digest != header.digest {
            return Err(io::Error::other(format!("chunk {} came damaged", header.index)));
        }
        self.kept.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// # Errors
    /// Not all chunks have come.
    pub(super) fn all_kept(&self) -> io::Result<()> {
        let (kept, count) = (self.kept.load(Ordering::Relaxed), self.count);
        if kept == count {
            return Ok(());
        }
        Err(io::Error::other(format!("{kept} of {count} chunks came")))
    }
}

/// Different chunks of random bytes with their digests.
pub(super) fn hot() -> Vec<(Bytes, ChunkDigest)> {
    (0..HOT)
        .map(|index| {
            let mut bytes = vec![0; CHUNK as usize];
            blake3::Hasher::new()
                .update(&index.to_le_bytes())
                .finalize_xof()
                .fill(&mut bytes);
            let digest = chunk_digest(ChunkHash::Blake3, &bytes);
            (Bytes::from(bytes), digest)
        })
        .collect()
}

pub(super) fn hasher() -> ChunkHasher {
    ChunkHasher::new(ChunkHash::Blake3)
}

/// What comes before a chunk's bytes.
pub(super) struct Header {
    pub(super) index: u64,
    digest: ChunkDigest,
}

impl Header {
    pub(super) const LEN: usize = 8 + 32;

    /// What is sent behind the last chunk of a stream.
    pub(super) const LAST: [u8; Self::LEN] = [0xff; Self::LEN];

    pub(super) fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&self.index.to_le_bytes());
        bytes[8..].copy_from_slice(&self.digest.0);
        bytes
    }

    /// `None`: the stream is over.
    pub(super) fn decode(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let (index, digest) = bytes.split_first_chunk().expect("longer than an index");
        let index = u64::from_le_bytes(*index);
        let digest = ChunkDigest(digest.try_into().expect("the rest is a digest"));
        (index != END).then_some(Self { index, digest })
    }

    /// Where a part of the chunk belongs in the file.
    pub(super) fn place(&self, at: usize) -> u64 {
        self.index * CHUNK + at as u64
    }
}

/// Both ends of a connection.
pub(super) struct Pair {
    pub(super) out: TcpStream,
    pub(super) into: TcpStream,
}

/// Connections over loopback.
pub(super) fn connect(streams: usize) -> io::Result<Vec<Pair>> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let address = listener.local_addr()?;
    let one = |_| {
        let out = TcpStream::connect(address)?;
        out.set_nodelay(true)?;
        let (into, from) = listener.accept()?;
        if from != out.local_addr()? {
            return Err(io::Error::other("somebody else connected"));
        }
        Ok(Pair { out, into })
    };
    (0..streams).map(one).collect()
}
