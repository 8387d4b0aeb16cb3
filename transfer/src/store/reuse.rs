//! Chunks of an older copy that are the payload's: compared, and left where they are or copied to the partial.

use std::sync::Arc;
use std::time::Instant;

use stage_core::chunk::{ChunkIndex, ChunkSet, Part};
use stage_core::digest::ChunkDigest;
use stage_core::failure::Failure;

use super::Store;
use super::map::Map;
use crate::target::copy::{Copy, Wrote};
use crate::target::lay::{chunks_of, digest, digest_old};

/// Whether a chunk of an older copy is the payload's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compared {
    /// It is: the chunk is kept now, and no byte has to come.
    Same,
    /// It is not: its bytes are wanted.
    Different,
}

impl Store {
    /// Whether digests should come ahead of bytes: an older copy stands at the target, or nobody knows yet.
    pub fn wants_offers(&self) -> bool {
        self.target().is_some_and(Copy::has_old) && !self.is_complete()
    }

    /// Whether an older copy stands at the target, as far as is known.
    pub(crate) fn has_old(&self) -> bool {
        self.target().is_some_and(Copy::has_old)
    }

    /// Compares the older copy's chunk with the payload's digest.
    ///
    /// # Errors
    /// Other content, where the rule is to leave it: the target is unfit.
    pub fn compare(self: &Arc<Self>, index: ChunkIndex, offered: ChunkDigest) -> Result<Compared, Failure> {
        let (Some(copy), Part::Data(place)) = (self.target(), self.layout().part(index)) else {
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
        // One at a time: a file that becomes own takes over all that was equal so far.
        let _making = copy.making();
        let map = self.map()?;
        let len = self.len(index);
        let mut entries = Vec::new();
        let mut has_kin = true;
        map.pieces(place, len, |entry, at, part| {
            has_kin &= copy.has_kin(entry);
            entries.push((entry, at, part.len()));
            Ok::<(), Failure>(())
        })?;
        let same = has_kin && digest_old(copy, map, self.hash, place, len).is_ok_and(|old| old == offered);
        if !same {
            // Where the whole chunk is of one file, it is that one that differs; else its bytes will tell.
            if let [(entry, _, _)] = entries[..]
                && copy.is_twin(entry)
            {
                self.make_own(copy, map, entry)?;
            }
            return Ok(Compared::Different);
        }
        let started = Instant::now();
        let mut carried = 0;
        for (entry, at, len) in entries.iter().filter(|(entry, ..)| !copy.is_twin(*entry)) {
            copy.carry(map, *entry, *at, *len)?;
            carried += len;
        }
        if carried > 0 {
            self.count_write(carried, started);
            // The old copy is not ours: what counts is what arrived in the partial.
            if digest(copy, map, self.hash, place, len)? != offered {
                return Ok(Compared::Different);
            }
        }
        claim.keep(offered, None)?;
        Ok(Compared::Same)
    }

    /// Writes bytes of an entry, into the partial unless its twin has the same.
    pub(super) fn write_piece(
        &self,
        copy: &Copy,
        map: &Map,
        entry: u32,
        at: u64,
        bytes: &[u8],
    ) -> Result<(), Failure> {
        if copy.write(map, entry, at, bytes)? == Wrote::Done {
            return Ok(());
        }
        {
            let _making = copy.making();
            self.make_own(copy, map, entry)?;
        }
        copy.write(map, entry, at, bytes).map(drop)
    }

    /// From now on an entry's bytes lie in the partial: those that were equal in the old copy are copied there. The caller
    /// holds the lock on making.
    fn make_own(&self, copy: &Copy, map: &Map, entry: u32) -> Result<(), Failure> {
        if !copy.is_twin(entry) {
            return Ok(());
        }
        copy.make_partial(map, entry)?;
        let kept: Vec<_> = chunks_of(map, self.layout(), entry)
            .into_iter()
            .filter(|index| self.has(*index))
            .collect();
        for index in &kept {
            let Part::Data(place) = self.layout().part(*index) else {
                continue;
            };
            let started = Instant::now();
            let mut carried = 0;
            map.pieces(place, self.len(*index), |of, at, part| {
                if of == entry {
                    carried += part.len();
                    copy.carry(map, of, at, part.len())?;
                }
                Ok(())
            })?;
            self.count_write(carried, started);
        }
        copy.set_own(entry);
        // What the old copy has lost since it was compared is forgotten.
        let mut changed = ChunkSet::empty(self.layout().count());
        for index in kept {
            let Part::Data(place) = self.layout().part(index) else {
                continue;
            };
            let now = digest(copy, map, self.hash, place, self.len(index))?;
            if self.table.get(index) != Some(now) {
                changed.insert(index);
            }
        }
        self.disown(&changed)
    }
}
