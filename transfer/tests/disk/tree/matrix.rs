//! Holes, resumes and replaced copies in every combination. Space is reserved in all of them: that is no option here.

use std::fs;

use stage_core::assignment::IfExists;
use stage_core::chunk::CHUNK;

use super::bench::{Bench, Tree};
use crate::bench::content;

const SIZE: u64 = 4 * CHUNK + 12_345;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Bytes {
    Dense,
    /// Data in runs of which none begins or ends with a chunk.
    Holes,
    /// The same length, and data where the other has holes.
    OtherHoles,
    Longer,
    None,
}

/// A tree with one file, and a file beside it.
fn tree(bytes: Bytes) -> Option<Tree> {
    let mut tree = Tree::default();
    tree.dir("refdb", 0o755);
    for (path, shift) in [("refdb/volume", 0), ("single", 4096)] {
        match bytes {
            Bytes::Dense => tree.file(path.as_bytes(), 0o600, content(SIZE + shift)),
            Bytes::Longer => tree.file(path.as_bytes(), 0o600, content(SIZE + CHUNK)),
            Bytes::Holes => tree.sparse(
                path,
                SIZE + shift,
                vec![0..70_000, 2 * CHUNK + 65_536..4 * CHUNK + 1000],
            ),
            Bytes::OtherHoles => tree.sparse(path, SIZE + shift, std::iter::once(CHUNK..3 * CHUNK).collect()),
            Bytes::None => return None,
        };
    }
    Some(tree)
}

// R35.
#[test]
fn every_combination_ends_with_the_right_bytes() {
    let mut cases = 0;
    for new in [Bytes::Dense, Bytes::Holes] {
        for old in [
            Bytes::None,
            Bytes::Dense,
            Bytes::Holes,
            Bytes::OtherHoles,
            Bytes::Longer,
        ] {
            for lost_after in [None, Some(0), Some(1), Some(3)] {
                let case = format!("{new:?} over {old:?}, lost after {lost_after:?}");
                let first = tree(old).unwrap_or_default();
                let mut bench = Bench::new(first);
                if old != Bytes::None {
                    bench.push();
                }
                bench.tree = tree(new).unwrap();
                bench.next(IfExists::Replace);
                if let Some(chunks) = lost_after {
                    let target = bench.ready();
                    bench.receive_some(&target, chunks);
                }
                let target = bench.ready();
                bench.receive(&target);
                let publication = target.publish(&bench.fin()).unwrap();
                assert_eq!(publication.already, new == old, "{case}");
                target.release();
                bench.assert_published();
                let single = fs::read(bench.dir().join("single")).unwrap();
                assert!(single == *bench.tree.bytes("single"), "{case}");
                cases += 1;
            }
        }
    }
    assert_eq!(cases, 40);
}
