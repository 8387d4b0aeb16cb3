//! How the data of all files is laid out as one sequence of chunks.
//!
//! First come the bodies: of each file, in path order, as many whole chunks as it has, so that a body's chunk is of one
//! file and lies on a chunk's boundary there. Then comes the pack: the rest of each file, and all smaller files, end to
//! end. So the sequence has no gaps, its length alone says how it is cut, and a hundred thousand tiny files are as
//! many chunks as one file of their size.

use super::Manifest;
use crate::chunk::CHUNK;

/// A run of the payload's sequence that lies in one piece in one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Where in the sequence, in bytes.
    pub in_payload: u64,
    /// Where in the file, in bytes.
    pub in_file: u64,
    /// How many bytes.
    pub len: u64,
    /// Whose.
    pub entry: u32,
}

impl Manifest {
    /// The sequence, piece by piece, without gaps.
    pub fn pieces(&self) -> Vec<Piece> {
        let mut pieces = Pieces::default();
        for pack in [false, true] {
            for (entry, index) in self.entries.iter().zip(0..) {
                let body = entry.data_len() / CHUNK * CHUNK;
                let mut passed = 0;
                entry.each_run(|run| {
                    let len = run.end - run.start;
                    let cut = body.clamp(passed, passed + len) - passed;
                    passed += len;
                    if pack {
                        pieces.push(index, run.start + cut, len - cut);
                    } else {
                        pieces.push(index, run.start, cut);
                    }
                });
            }
        }
        pieces.all
    }
}

#[derive(Default)]
struct Pieces {
    all: Vec<Piece>,
    end: u64,
}

impl Pieces {
    fn push(&mut self, entry: u32, in_file: u64, len: u64) {
        if len == 0 {
            return;
        }
        match self.all.last_mut() {
            Some(last) if last.entry == entry && last.in_file + last.len == in_file => last.len += len,
            _ => self.all.push(Piece {
                in_payload: self.end,
                in_file,
                len,
                entry,
            }),
        }
        self.end += len;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Data, Entry, Kind};
    use super::*;
    use crate::units::ByteCount;

    fn manifest(files: Vec<Vec<(u64, u64)>>) -> Manifest {
        let entries = files.into_iter().enumerate().map(|(at, pairs)| {
            let mut end = 0;
            let runs: Vec<_> = pairs
                .into_iter()
                .map(|(hole, len)| {
                    let start = end + hole;
                    end = start + len;
                    start..end
                })
                .collect();
            Entry {
                path: format!("{at:08}").into_bytes(),
                mode: 0,
                mtime: (0, 0),
                xattrs: Vec::new(),
                kind: Kind::File {
                    size: ByteCount(end),
                    data: Data::of(ByteCount(end), runs),
                },
            }
        });
        Manifest {
            entries: entries.collect(),
        }
    }

    #[test]
    fn one_file_is_one_piece() {
        let pieces = manifest(vec![vec![(0, 5 * CHUNK + 7)]]).pieces();
        assert_eq!(pieces.len(), 1);
        assert_eq!((pieces[0].in_payload, pieces[0].len), (0, 5 * CHUNK + 7));
    }

    #[test]
    fn bodies_lie_before_the_pack() {
        let sizes = [10, CHUNK + 3, 20, 2 * CHUNK];
        let pieces = manifest(sizes.iter().map(|size| vec![(0, *size)]).collect()).pieces();
        let seen: Vec<_> = pieces.iter().map(|p| (p.entry, p.in_file, p.len)).collect();
        assert_eq!(
            seen,
            [
                (1, 0, CHUNK),
                (3, 0, 2 * CHUNK),
                (0, 0, 10),
                (1, CHUNK, 3),
                (2, 0, 20)
            ]
        );
    }

    proptest! {
        #[test]
        fn every_byte_of_data_has_one_place(
            files in prop::collection::vec(
                prop::collection::vec((1..3 * CHUNK, 1..3 * CHUNK), 0..4), 0..8)
        ) {
            let manifest = manifest(files);
            let pieces = manifest.pieces();
            let mut end = 0;
            for piece in &pieces {
                prop_assert_eq!(piece.in_payload, end);
                end += piece.len;
            }
            prop_assert_eq!(end, manifest.payload_size().0);
            for (entry, index) in manifest.entries.iter().zip(0..) {
                let mut placed: Vec<_> = pieces.iter().filter(|p| p.entry == index)
                    .map(|p| p.in_file..p.in_file + p.len).collect();
                placed.sort_by_key(|run| run.start);
                let mut runs = Vec::new();
                entry.each_run(|run| runs.push(run));
                let joined = placed.into_iter().fold(Vec::<std::ops::Range<u64>>::new(), |mut all, run| {
                    match all.last_mut() {
                        Some(last) if last.end == run.start => last.end = run.end,
                        _ => all.push(run),
                    }
                    all
                });
                prop_assert_eq!(joined, runs);
            }
        }
    }
}
