//! Where the payload's sequence lies in its files.

use std::ops::Range;
use std::sync::Arc;

use stage_core::manifest::{Entry, Kind, Manifest, Piece};
use stage_core::units::ByteCount;

/// A manifest, and the places of its sequence. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Map {
    manifest: Arc<Manifest>,
    pieces: Arc<[Piece]>,
}

impl Map {
    /// The map of a payload.
    pub(crate) fn new(manifest: Manifest) -> Self {
        Self {
            pieces: manifest.pieces().into(),
            manifest: Arc::new(manifest),
        }
    }

    /// What it is the map of.
    pub(crate) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// All entries.
    pub(crate) fn entries(&self) -> &[Entry] {
        &self.manifest.entries
    }

    /// One entry.
    pub(crate) fn entry(&self, index: u32) -> &Entry {
        &self.manifest.entries[index as usize]
    }

    /// The pieces of one entry.
    pub(crate) fn pieces_of(&self, entry: u32) -> impl Iterator<Item = &Piece> {
        self.pieces.iter().filter(move |piece| piece.entry == entry)
    }

    /// Calls `each` with the entry and the place in its file of every piece of `len` bytes of the sequence from `at`, and
    /// with the part of the `len` bytes that lies there.
    pub(crate) fn pieces<E>(
        &self,
        at: u64,
        len: usize,
        mut each: impl FnMut(u32, u64, Range<usize>) -> Result<(), E>,
    ) -> Result<(), E> {
        let first = self.pieces.partition_point(|p| p.in_payload + p.len <= at);
        let mut done = 0;
        for piece in &self.pieces[first..] {
            if done == len {
                break;
            }
            let skip = at + done as u64 - piece.in_payload;
            let take = usize::try_from(piece.len - skip)
                .unwrap_or(usize::MAX)
                .min(len - done);
            each(piece.entry, piece.in_file + skip, done..done + take)?;
            done += take;
        }
        debug_assert_eq!(done, len, "asked for bytes past the payload's end");
        Ok(())
    }
}

/// A file's apparent size; nothing else has any.
pub(crate) fn size_of(entry: &Entry) -> ByteCount {
    match entry.kind {
        Kind::File { size, .. } => size,
        _ => ByteCount(0),
    }
}

/// A file's data, as runs of bytes.
pub(crate) fn data_runs(entry: &Entry) -> Vec<Range<u64>> {
    let mut runs = Vec::new();
    entry.each_run(|run| runs.push(run));
    runs
}

/// Whether a file has no hole.
pub(crate) fn is_dense(entry: &Entry) -> bool {
    entry.data_len() == size_of(entry).0
}

/// What of a file no data lies in, as runs of bytes.
pub(crate) fn holes(entry: &Entry) -> Vec<Range<u64>> {
    let mut at = 0;
    let mut holes = Vec::new();
    entry.each_run(|run| {
        holes.push(at..run.start);
        at = run.end;
    });
    holes.push(at..size_of(entry).0);
    holes.retain(|hole| !hole.is_empty());
    holes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_holes_is_read_and_written_around_them() {
        let runs = vec![10..15, 50..60, 90..100];
        let map = Map::new(Manifest::single_sparse_file(
            b"a",
            ByteCount(100),
            runs.clone(),
            0o644,
            (0, 0),
        ));
        let entry = map.entry(0);
        assert!(!is_dense(entry));
        assert_eq!(data_runs(entry), runs);
        assert_eq!(holes(entry), [0..10, 15..50, 60..90]);
        let mut pieces = Vec::new();
        map.pieces(3, 14, |entry, at, part| {
            pieces.push((entry, at, part));
            Ok::<(), ()>(())
        })
        .unwrap();
        assert_eq!(pieces, [(0, 13, 0..2), (0, 50, 2..12), (0, 90, 12..14)]);
    }
}
