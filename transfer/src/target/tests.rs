//! What of a chunk table is believed unseen: these tests change its head as another boot, mount or error would.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use stage_core::assignment::TargetSpec;
use stage_core::assignment::{KEEP_PREVIOUS, Place};
use stage_core::chunk::{CHUNK, ChunkIndex};
use stage_core::digest::ChunkHash;
use stage_core::digest::chunk_digest;
use stage_core::manifest::Manifest;
use stage_core::payload::Payload;
use stage_core::units::ByteCount;

use super::*;
use crate::budget::Budget;
use crate::journal::{Lies, Record};

/// Keeps both chunks of a payload, flips a bit of the second in the partial, changes the head, and says what a new
/// run has.
fn kept_after(change: impl FnOnce(&mut Record)) -> Vec<u32> {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    fs::create_dir(&root).unwrap();
    let roots = Roots::open(vec![("main".parse().unwrap(), root.clone())]);
    let state = dir.path().join("state");
    let job = JobId::from_random([3; 16]);
    let spec = TargetSpec {
        place: Place::Root {
            root: None,
            dir: Vec::new(),
        },
        if_exists: IfExists::Fail,
        unpack: false,
        keep_previous: KEEP_PREVIOUS,
        cache: Default::default(),
    };
    let manifest = Manifest::single_file(b"x", ByteCount(2 * CHUNK), 0o644, (1, 0));
    let payload = Payload::of(&manifest).unwrap();
    let budget = Budget::new(ByteCount(2 * CHUNK));
    let hash = ChunkHash::Blake3;
    let ready = || match prepare(&roots, &state, job, &spec, &payload, hash, &budget).unwrap() {
        Preparation::Ready(target) => target,
        Preparation::Skipped { .. } => unreachable!("nothing stands there"),
    };
    let target = ready();
    let bytes = vec![5; CHUNK as usize];
    for index in 0..2 {
        let claim = target.store().claim(ChunkIndex(index)).unwrap();
        claim.write(0, &bytes).unwrap();
        claim.keep(chunk_digest(hash, &bytes), None).unwrap();
    }
    target.store().table().update(change).unwrap();
    drop(target);
    let partial = root.join(site::partial_name(job, 0));
    File::options()
        .write(true)
        .open(partial)
        .unwrap()
        .write_all_at(&[4], CHUNK + 9)
        .unwrap();
    ready().store().have().iter().map(|i| i.0).collect()
}

#[test]
fn in_the_same_boot_it_is_believed_unseen() {
    // The flipped bit, which stands for nothing that happens, is only the proof that nothing was hashed.
    assert_eq!(kept_after(|_| {}), [0, 1]);
}

#[test]
fn after_any_surprise_it_is_hashed_again() {
    assert_eq!(kept_after(|record| record.boot[0] ^= 1), [0], "another boot");
    assert_eq!(kept_after(|record| record.boot = [0; 16]), [0], "an unknown boot");
    assert_eq!(kept_after(|record| record.doubt = true), [0], "a write error");
    assert_eq!(kept_after(|record| record.file.ino += 1), [0], "another inode");
    assert_eq!(kept_after(|record| record.file.mount += 1), [0], "another mount");
    assert_eq!(
        kept_after(|record| record.lies = Lies::OldCopy),
        [0],
        "another file"
    );
}
