//! The bytes of a target: an older copy under the final name, the partial file, or both.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::io::Errno;
use stage_core::assignment::IfExists;
use stage_core::chunk::BLOCK;
use stage_core::digest::{ChunkDigest, ChunkHash};
use stage_core::failure::Failure;

use super::reserve::Partial;
use super::site::Site;
use crate::fault;
use crate::journal::{FileState, Lies, Phase, Table};
use crate::store::digest_in;
use crate::store::map::Map;

/// Where a target's chunks lie: in the partial once there is one, in the old copy before.
#[derive(Debug)]
pub(crate) struct Copy {
    pub(super) site: Arc<Site>,
    pub(super) rule: IfExists,
    pub(super) old: Option<Old>,
    partial: OnceLock<Partial>,
    making: Mutex<()>,
}

/// An older copy, held open.
#[derive(Debug)]
pub(super) struct Old {
    pub(super) file: File,
    /// Its state when it was opened.
    pub(super) state: FileState,
}

impl Copy {
    pub(super) fn new(site: Arc<Site>, rule: IfExists, old: Option<Old>, partial: Option<Partial>) -> Self {
        Self {
            site,
            rule,
            old,
            partial: partial.map_or_else(OnceLock::new, OnceLock::from),
            making: Mutex::new(()),
        }
    }

    /// The final path, for people.
    pub(crate) fn shown(&self) -> &str {
        &self.site.shown
    }

    pub(crate) fn has_old(&self) -> bool {
        self.old.is_some()
    }

    pub(crate) fn partial(&self) -> Option<&File> {
        self.partial.get().map(|partial| &partial.file)
    }

    /// Why the partial's space could not be taken, once that is known.
    pub(crate) fn no_space(&self) -> Option<&Failure> {
        self.partial.get()?.failure()
    }

    /// No more of the partial's space is wanted.
    pub(super) fn stop_reserving(&self) {
        if let Some(partial) = self.partial.get() {
            partial.stop_reserving();
        }
    }

    /// The lock under which the partial is made and chunks of the old copy are compared.
    pub(crate) fn making(&self) -> MutexGuard<'_, ()> {
        self.making.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads payload bytes that are here.
    pub(crate) fn read(&self, _map: &Map, _entry: u32, at: u64, buf: &mut [u8]) -> Result<(), Failure> {
        let Some(file) = self.partial().or(self.old.as_ref().map(|old| &old.file)) else {
            return Err(fault::of(Errno::NOENT, "reading", self.shown()));
        };
        file.read_exact_at(buf, at)
            .map_err(|e| fault::of_std(&e, "reading", self.shown()))
    }

    /// The digest of the old copy's bytes at a place, `None` if it has none there or cannot be read.
    pub(crate) fn old_digest(
        &self,
        map: &Map,
        place: u64,
        len: usize,
        hash: ChunkHash,
    ) -> Option<ChunkDigest> {
        digest_in(&self.old.as_ref()?.file, map, place, len, hash).ok()
    }

    pub(crate) fn partial_digest(
        &self,
        partial: &File,
        map: &Map,
        place: u64,
        len: usize,
        hash: ChunkHash,
    ) -> Result<ChunkDigest, Failure> {
        digest_in(partial, map, place, len, hash)
            .map_err(|e| fault::of_std(&e, "reading the partial file", self.shown()))
    }

    /// Makes a partial beside an old copy that proved to be different.
    ///
    /// # Errors
    /// The rule is to leave it; or there is no space.
    pub(crate) fn create_partial(&self, map: &Map) -> Result<Partial, Failure> {
        if self.rule != IfExists::Replace {
            return Err(self.site.exists("with other content"));
        }
        self.site.create_partial(map)
    }

    /// From now on chunks lie in the partial.
    pub(crate) fn adopt_partial(&self, partial: Partial, table: &Table) -> Result<&File, Failure> {
        let state =
            FileState::of(&partial.file).map_err(|e| self.site.fault(e, "looking at the partial file"))?;
        table.update(|record| {
            record.lies = Lies::Partial;
            record.file = state;
            record.phase = Phase::Receiving;
        })?;
        Ok(&self.partial.get_or_init(|| partial).file)
    }

    pub(crate) fn remove_partial(&self) {
        if let Err(failure) = self.site.remove_partial() {
            tracing::warn!(path = self.shown(), "{failure}");
        }
    }

    /// Copies bytes from the old copy to the partial, inside the kernel where it can (and without moving them, where
    /// the file system shares blocks).
    pub(crate) fn carry(&self, partial: &File, map: &Map, place: u64, len: usize) -> Result<(), Failure> {
        let Some(old) = &self.old else {
            return Err(fault::of(Errno::NOENT, "copying", self.shown()));
        };
        map.pieces(place, len, |_, at, part| {
            carry(&old.file, partial, at, part.len())
        })
        .map_err(|e| fault::of_std(&e, "copying from the old copy", self.shown()))
    }
}

fn carry(old: &File, partial: &File, at: u64, len: usize) -> std::io::Result<()> {
    let mut done = 0;
    while done < len {
        let (mut from, mut to) = (at + done as u64, at + done as u64);
        match rustix::fs::copy_file_range(old, Some(&mut from), partial, Some(&mut to), len - done) {
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(Errno::INTR) => {}
            Err(Errno::XDEV | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::BADF) => {
                return carry_by_hand(old, partial, at + done as u64, len - done);
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

fn carry_by_hand(old: &File, partial: &File, at: u64, len: usize) -> std::io::Result<()> {
    let mut block = vec![0; BLOCK.min(len)];
    let mut done = 0;
    while done < len {
        let some = BLOCK.min(len - done);
        old.read_exact_at(&mut block[..some], at + done as u64)?;
        partial.write_all_at(&block[..some], at + done as u64)?;
        done += some;
    }
    Ok(())
}
