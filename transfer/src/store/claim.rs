//! Writing: a chunk is claimed, written and kept, and with the last of the head the payload is laid out.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Instant;

use stage_core::chunk::{ChunkIndex, Part};
use stage_core::digest::ChunkDigest;
use stage_core::failure::{Code, Failure};
use stage_core::units::ByteCount;

use super::Store;
use super::map::Map;
use crate::budget::ChunkBuf;
use crate::crash::crash_point;

impl Store {
    /// Makes the caller the one owner of a chunk that is not here; `None` if it is here or has an owner.
    pub fn claim(self: &Arc<Self>, index: ChunkIndex) -> Option<Claim> {
        let mut state = self.state();
        if state.have.contains(index) || !state.claimed.insert(index) {
            return None;
        }
        drop(state);
        Some(Claim {
            store: self.clone(),
            index,
            kept: false,
        })
    }

    pub(super) fn count_write(&self, len: usize, started: Instant) {
        self.written.fetch_add(len as u64, Ordering::Relaxed);
        let nanos = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.writing_nanos.fetch_add(nanos, Ordering::Relaxed);
    }

    pub(super) fn write(&self, index: ChunkIndex, at: usize, bytes: &[u8]) -> Result<(), Failure> {
        self.check_range(index, at, bytes.len())?;
        let Some(copy) = self.target() else {
            return Err(Failure::new(
                Code::Internal,
                "a source is never written",
                "report this as a bug of stage",
            ));
        };
        let place = match self.layout().part(index) {
            Part::Head(place) => return self.head.write(place + at as u64, bytes),
            Part::Data(place) => place + at as u64,
        };
        if let Some(failure) = copy.failure() {
            return Err(failure.clone());
        }
        let started = Instant::now();
        let map = self.map()?;
        let written = map.pieces(place, bytes.len(), |entry, to, part| {
            self.write_piece(copy, map, entry, to, &bytes[part])
        });
        if let Err(mut failure) = written {
            if failure.code == Code::NoSpace && failure.space.is_none() && !self.payload.is_stream() {
                let here = self.layout().bytes_in(&self.have());
                failure = copy.full(
                    self.payload.data,
                    ByteCount(self.payload.data.0.saturating_sub(here)),
                );
            }
            if failure.code != Code::Exists {
                // Other writes may have been lost with this one: nothing is believed unseen at the next start.
                let _ = self.table.update(|record| record.doubt = true);
            }
            return Err(failure);
        }
        self.count_write(bytes.len(), started);
        Ok(())
    }

    /// The head is whole: reads the manifest, and lays out what it speaks of.
    pub(super) fn lay_out(&self) -> Result<(), Failure> {
        let (Some(copy), Some(laying)) = (self.target(), &self.laying) else {
            return Ok(());
        };
        let _making = copy.making();
        if self.is_laid_out() {
            return Ok(());
        }
        let mut bytes = vec![0; self.payload.head().0 as usize];
        self.head.read(0, &mut bytes)?;
        let manifest = self.payload.decode(&bytes).map_err(|error| {
            Failure::new(
                Code::Corrupt,
                format!("the payload's manifest came whole and is not right: {error}"),
                "push again; if it comes back, report this as a bug of stage",
            )
        })?;
        drop(bytes);
        let map = Map::new(manifest);
        laying.lay_out(copy, &self.table, &map)?;
        self.map.set(map).expect("a manifest is taken in under one lock");
        Ok(())
    }

    pub(super) fn keep(
        &self,
        index: ChunkIndex,
        digest: ChunkDigest,
        bytes: Option<Arc<ChunkBuf>>,
    ) -> Result<(), Failure> {
        crash_point!("chunk_written");
        self.table.put(index, digest)?;
        if let Some(bytes) = bytes {
            self.budget.keep_hot(self.owner, index, bytes);
        }
        let (watchers, head_is_whole): (Vec<_>, _) = {
            let mut state = self.state();
            state.have.insert(index);
            state.claimed.remove(index);
            let head = self.layout().head_count();
            let whole = index.0 < head && (0..head).all(|index| state.have.contains(ChunkIndex(index)));
            (state.watchers.iter().filter_map(Weak::upgrade).collect(), whole)
        };
        if head_is_whole {
            self.lay_out()?;
        }
        for watcher in watchers {
            watcher.arrived(index);
        }
        crash_point!("chunk_kept");
        Ok(())
    }
}

/// The right to write one chunk. Dropped without [`Claim::keep`], the chunk is free again.
#[derive(Debug)]
pub struct Claim {
    store: Arc<Store>,
    index: ChunkIndex,
    kept: bool,
}

impl Claim {
    /// Which chunk.
    pub fn index(&self) -> ChunkIndex {
        self.index
    }

    /// Writes bytes to their place, from `at` within the chunk. At a source, which has its bytes, this is an error.
    ///
    /// # Errors
    /// The disk's; or other content stands at the target and the rule is to leave it.
    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<(), Failure> {
        self.store.write(self.index, at, bytes)
    }

    /// The chunk is whole and its digest was checked: journals it, keeps its bytes hot, tells the watchers.
    ///
    /// # Errors
    /// The chunk table cannot be written; the chunk is free again.
    pub fn keep(mut self, digest: ChunkDigest, bytes: Option<Arc<ChunkBuf>>) -> Result<(), Failure> {
        self.store.keep(self.index, digest, bytes)?;
        self.kept = true;
        Ok(())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // A kept chunk may have been disowned and claimed by somebody else since.
        if !self.kept {
            self.store.state().claimed.remove(self.index);
        }
    }
}
