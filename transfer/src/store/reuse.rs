//! Chunks of an older copy that are the payload's: compared, taken over, and a partial made when one is not.

use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use stage_core::chunk::{ChunkIndex, ChunkSet, Part};
use stage_core::digest::ChunkDigest;
use stage_core::failure::Failure;

use super::Store;
use crate::target::copy::Copy;

/// Whether a chunk of an older copy is the payload's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compared {
    /// It is: the chunk is kept now, and no byte has to come.
    Same,
    /// It is not: its bytes are wanted.
    Different,
}

impl Store {
    /// Whether an older copy stands at the target, so that digests should come ahead of bytes.
    pub fn wants_offers(&self) -> bool {
        self.target().is_some_and(Copy::has_old) && !self.is_complete()
    }

    /// Compares the older copy's chunk with the payload's digest.
    ///
    /// # Errors
    /// Other content, where the rule is to leave it: the target is unfit.
    pub fn compare(self: &Arc<Self>, index: ChunkIndex, digest: ChunkDigest) -> Result<Compared, Failure> {
        let Some(copy) = self.target() else {
            return Ok(Compared::Different);
        };
        let Some(claim) = self.claim(index) else {
            return Ok(if self.has(index) {
                Compared::Same
            } else {
                // Its bytes are on their way already.
                Compared::Different
            });
        };
        // One at a time: a partial that is being made takes over all that was equal so far.
        let _making = copy.making();
        let Part::Data(place) = self.layout().part(index) else {
            return Ok(Compared::Different);
        };
        let len = self.len(index);
        let map = self.map()?;
        let same = copy.old_digest(map, place, len, self.hash) == Some(digest);
        if !same {
            self.make_partial(copy)?;
            return Ok(Compared::Different);
        }
        if let Some(partial) = copy.partial() {
            let started = Instant::now();
            copy.carry(partial, map, place, len)?;
            self.count_write(len, started);
            // The old copy is not ours: what counts is what arrived in the partial.
            if copy.partial_digest(partial, map, place, len, self.hash)? != digest {
                return Ok(Compared::Different);
            }
        }
        claim.keep(digest, None)?;
        Ok(Compared::Same)
    }

    /// The partial file to write into, made now if the old copy sufficed until now.
    pub(super) fn partial<'s>(&'s self, copy: &'s Copy) -> Result<&'s File, Failure> {
        if let Some(partial) = copy.partial() {
            return Ok(partial);
        }
        let _making = copy.making();
        self.make_partial(copy)
    }

    /// Makes the partial, with all the old copy's chunks that are the payload's. The caller holds the lock on making.
    fn make_partial<'s>(&'s self, copy: &'s Copy) -> Result<&'s File, Failure> {
        if let Some(partial) = copy.partial() {
            return Ok(partial);
        }
        let map = self.map()?;
        let partial = copy.create_partial(map)?;
        let mut changed = ChunkSet::empty(self.layout().count());
        for index in self.have().iter() {
            let Part::Data(place) = self.layout().part(index) else {
                continue;
            };
            let len = self.len(index);
            let started = Instant::now();
            let carried = copy
                .carry(&partial.file, map, place, len)
                .and_then(|()| copy.partial_digest(&partial.file, map, place, len, self.hash));
            match carried {
                Ok(digest) if self.table.get(index) == Some(digest) => self.count_write(len, started),
                Ok(_) => {
                    changed.insert(index);
                }
                Err(failure) => {
                    copy.remove_partial();
                    return Err(failure);
                }
            }
        }
        // What the old copy has lost since it was compared is forgotten before the table speaks of the partial.
        self.disown(&changed)?;
        copy.adopt_partial(partial, &self.table)
    }
}
