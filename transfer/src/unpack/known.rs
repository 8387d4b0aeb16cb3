//! What was laid out, as the payload that it would be if it were pushed: so it is listed, verified, compared and removed
//! like any other tree.

use std::convert::Infallible;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, statat};
use stage_core::assignment::{Cache, SourceSpec};
use stage_core::chunk::{CHUNK, ChunkIndex, Layout, Part};
use stage_core::digest::{ChunkDigest, ChunkHash, RootDigest, RootHasher, chunk_digest};
use stage_core::failure::Failure;
use stage_core::id::JobId;
use stage_core::payload::{Payload, SourcePath, Walk};

use super::bodies::Bodies;
use crate::journal::Table;
use crate::source::files::Files;
use crate::source::{Pulse, look};
use crate::store::map::Map;
use crate::store::{digest_by, layout_of};

/// A tree, and the digests of its chunks.
#[derive(Debug)]
pub(crate) struct Known {
    name: Vec<u8>,
    hash: ChunkHash,
    pub(crate) map: Map,
    pub(crate) payload: Payload,
    pub(crate) layout: Layout,
    pub(crate) table: Table,
    pub(crate) root: RootDigest,
}

/// Walks over a tree that is held open.
fn walk(dir: &OwnedFd, name: &[u8]) -> Result<(Map, Payload, Files), Failure> {
    let spec = SourceSpec {
        paths: vec![SourcePath {
            // The very directory, whatever its path leads to by now.
            path: format!("/proc/self/fd/{}", dir.as_raw_fd()).into_bytes(),
            name: name.to_vec(),
        }],
        walk: Walk::default(),
        limit: None,
        expect: Vec::new(),
        cache: Cache::default(),
    };
    let (manifest, payload, files) = look(&spec, &Pulse::default())?.into_parts();
    Ok((Map::new(manifest), payload, files))
}

fn read(hash: ChunkHash, map: &Map, files: &Files, at: u64, len: usize) -> Result<ChunkDigest, Failure> {
    digest_by(hash, len, |from, block| {
        map.pieces(at + from, block.len(), |entry, from, part| {
            files.read(map, entry, from, &mut block[part])
        })
    })
}

impl Known {
    /// Looks at a tree whole, and reads what of it `bodies` do not know. The table lies at `path` and is of `job`.
    pub(super) fn of(
        dir: &OwnedFd,
        name: &[u8],
        hash: ChunkHash,
        (path, job): (&Path, JobId),
        bodies: Option<&Bodies>,
    ) -> Result<Self, Failure> {
        let (map, payload, files) = walk(dir, name)?;
        let layout = layout_of(&payload)?;
        let table = Table::at(path, job, layout.count())?;
        let head = if payload.head().0 > 0 {
            map.manifest().encode()
        } else {
            Vec::new()
        };
        let mut root = RootHasher::new(payload.manifest);
        for index in (0..layout.count()).map(ChunkIndex) {
            let len = layout.len(index);
            let digest = match layout.part(index) {
                Part::Head(at) => {
                    let at = usize::try_from(at).unwrap_or(usize::MAX);
                    chunk_digest(hash, &head[at..at + len])
                }
                Part::Data(at) => match bodies.and_then(|bodies| taken(bodies, dir, &map, at, len)) {
                    Some(digest) => digest,
                    None => read(hash, &map, &files, at, len)?,
                },
            };
            table.put(index, digest)?;
            root.push(digest);
        }
        Ok(Self {
            name: name.to_vec(),
            hash,
            map,
            payload,
            layout,
            table,
            root: root.finish(),
        })
    }

    /// Whether another tree has the same entries with the same modes, times and bytes. All of it is read, unless it
    /// differs by its looks.
    pub(crate) fn is_same(&self, other: &OwnedFd) -> Result<bool, Failure> {
        let (map, payload, files) = walk(other, &self.name)?;
        if payload.manifest != self.payload.manifest {
            return Ok(false);
        }
        for index in (0..self.layout.count()).map(ChunkIndex) {
            if let Part::Data(at) = self.layout.part(index) {
                let digest = read(self.hash, &map, &files, at, self.layout.len(index))?;
                if self.table.get(index) != Some(digest) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}

/// The digest of a chunk that is a whole one of one file, and was taken when that was written.
fn taken(bodies: &Bodies, dir: &OwnedFd, map: &Map, at: u64, len: usize) -> Option<ChunkDigest> {
    let mut only = None;
    let Ok(()) = map.pieces(at, len, |entry, from, part| {
        only = (part.len() as u64 == CHUNK && from % CHUNK == 0).then_some((entry, from / CHUNK));
        Ok::<_, Infallible>(())
    });
    let (entry, chunk) = only?;
    let stat = statat(dir, map.entry(entry).below(), AtFlags::SYMLINK_NOFOLLOW).ok()?;
    bodies.get(stat.st_ino, chunk)
}
