//! What was laid out, as the payload that it would be if it were pushed: so it is listed, verified, compared and removed
//! like any other tree.

use std::convert::Infallible;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags, fchmod, openat, statat};
use stage_core::assignment::{Cache, SourceSpec};
use stage_core::chunk::{CHUNK, ChunkIndex, Layout, Part};
use stage_core::digest::{ChunkDigest, ChunkHash, RootDigest, RootHasher, chunk_digest};
use stage_core::failure::Failure;
use stage_core::id::JobId;
use stage_core::manifest::{Kind, Manifest};
use stage_core::payload::{Payload, SourcePath, Walk};

use super::bodies::Bodies;
use super::entries::HeldBack;
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
    /// Files and directories that are still to get the mode that their entry has.
    undressed: Vec<u32>,
}

/// Walks over a tree that is held open.
fn walk(dir: &OwnedFd, name: &[u8]) -> Result<(Manifest, Payload, Files), Failure> {
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
    Ok(look(&spec, &Pulse::default())?.into_parts())
}

/// Gives the entries the modes that they are yet to get; says which files and directories those are.
fn dress(manifest: &mut Manifest, dir: &OwnedFd, held_back: &HeldBack) -> Vec<u32> {
    let mut undressed = Vec::new();
    for (entry, index) in manifest.entries.iter_mut().zip(0..) {
        if matches!(entry.kind, Kind::Symlink { .. }) {
            continue;
        }
        let inode = statat(dir, or_top(entry.below()), AtFlags::SYMLINK_NOFOLLOW).map(|stat| stat.st_ino);
        if let Some(mode) = inode.ok().and_then(|inode| held_back.get(&inode)) {
            entry.mode = mode.bits() & 0o777;
            if !matches!(entry.kind, Kind::HardLink { .. }) {
                undressed.push(index);
            }
        }
    }
    undressed
}

/// A path below a tree's directory, as a system call takes it.
fn or_top(below: &[u8]) -> &[u8] {
    if below.is_empty() { b"." } else { below }
}

fn read(hash: ChunkHash, map: &Map, files: &Files, at: u64, len: usize) -> Result<ChunkDigest, Failure> {
    digest_by(hash, len, |from, block| {
        map.pieces(at + from, block.len(), |entry, from, part| {
            files.read(map, entry, from, &mut block[part])
        })
    })
}

impl Known {
    /// Looks at a tree whole, and reads what of it `bodies` do not know. The table lies at `path` and is of `job`. What
    /// has a mode `held_back` is known by that.
    pub(super) fn of(
        dir: &OwnedFd,
        name: &[u8],
        hash: ChunkHash,
        (path, job): (&Path, JobId),
        bodies: Option<&Bodies>,
        held_back: &HeldBack,
    ) -> Result<Self, Failure> {
        let (mut manifest, mut payload, files) = walk(dir, name)?;
        let mut undressed = Vec::new();
        if !held_back.is_empty() {
            undressed = dress(&mut manifest, dir, held_back);
            payload = Payload::of(&manifest).expect("modes make no difference to what it holds");
        }
        let map = Map::new(manifest);
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
            undressed,
        })
    }

    /// Gives what was laid out the modes that keep the agent out.
    pub(super) fn settle(&self, dir: &OwnedFd) -> rustix::io::Result<()> {
        // From within: who may not search a directory reaches nothing in it.
        for entry in self.undressed.iter().rev().map(|index| self.map.entry(*index)) {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let file = openat(dir, or_top(entry.below()), flags, Mode::empty())?;
            fchmod(&file, Mode::from_raw_mode(entry.mode))?;
        }
        Ok(())
    }

    /// Whether its topmost directory keeps the agent out.
    pub(super) fn is_shut(&self) -> bool {
        self.undressed.first() == Some(&0) && self.map.entry(0).mode & 0o500 != 0o500
    }

    /// Whether another tree has the same entries with the same modes, times and bytes. All of it is read, unless it
    /// differs by its looks.
    pub(crate) fn is_same(&self, other: &OwnedFd) -> Result<bool, Failure> {
        let (manifest, payload, files) = walk(other, &self.name)?;
        if payload.manifest != self.payload.manifest {
            return Ok(false);
        }
        let map = Map::new(manifest);
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
