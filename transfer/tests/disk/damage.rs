//! A damaged chunk table never refuses a resume, never makes a wrong chunk count, never panics.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, SystemTime};

use proptest::prelude::*;
use stage_core::chunk::{CHUNK, ChunkIndex};
use stage_core::id::JobId;

use crate::bench::Bench;

const HEAD: usize = 8 << 10;
const SLOT: usize = 36;
const COUNT: u32 = 4;

/// A bench whose earlier run has kept all but the last chunk.
fn begun() -> Bench {
    let bench = Bench::new(u64::from(COUNT - 1) * CHUNK + 3);
    let target = bench.ready();
    (0..COUNT - 1).for_each(|index| bench.receive(&target, index));
    bench
}

/// Damages the table, resumes, checks what is still here, and publishes.
fn resume(bench: &Bench, damage: impl FnOnce(&mut Vec<u8>)) -> Vec<u32> {
    let mut table = fs::read(bench.table()).unwrap();
    damage(&mut table);
    fs::write(bench.table(), table).unwrap();
    let target = bench.ready();
    let store = target.store();
    let have: Vec<_> = store.have().iter().map(|i| i.0).collect();
    for index in &have {
        let mut bytes = vec![0; bench.chunk(*index).len()];
        store.read(ChunkIndex(*index), 0, &mut bytes).unwrap();
        assert!(bytes == bench.chunk(*index), "chunk {index} is wrong");
        assert_eq!(store.digest(ChunkIndex(*index)), Some(bench.digest(*index)));
    }
    bench.receive_rest(&target);
    target.publish(&bench.fin()).unwrap();
    bench.assert_published();
    have
}

#[test]
fn undamaged_it_is_believed() {
    assert_eq!(resume(&begun(), |_| {}), [0, 1, 2]);
}

#[test]
fn a_partial_that_others_wrote_to_is_hashed_again() {
    let bench = begun();
    let partial = fs::File::options().write(true).open(bench.partial()).unwrap();
    partial.write_all_at(b"not ours", CHUNK + 9).unwrap();
    // Long after the table's last entry, as while the agent was down.
    partial
        .set_modified(SystemTime::now() + Duration::from_secs(60))
        .unwrap();
    assert_eq!(resume(&bench, |_| {}), [0, 2]);
}

#[test]
fn a_damaged_head_only_costs_hashing() {
    for at in [0, 8, 12, 20, 60] {
        assert_eq!(
            resume(&begun(), |table| table[at] ^= 0x40),
            [0, 1, 2],
            "byte {at}"
        );
    }
    assert_eq!(resume(&begun(), |table| table[..HEAD].fill(0xa5)), [0, 1, 2]);
    assert_eq!(resume(&begun(), |table| table[..HEAD].fill(0)), [0, 1, 2]);
}

#[test]
fn a_damaged_slot_is_one_chunk_not_here() {
    assert_eq!(resume(&begun(), |table| table[HEAD + SLOT + 7] ^= 1), [0, 2]);
    assert_eq!(resume(&begun(), |table| table[HEAD + SLOT + 33] ^= 1), [0, 2]);
    assert_eq!(resume(&begun(), |table| table[HEAD..HEAD + SLOT].fill(0)), [1, 2]);
}

#[test]
fn slots_do_not_pass_for_one_another() {
    let have = resume(&begun(), |table| {
        table.copy_within(HEAD..HEAD + SLOT, HEAD + 3 * SLOT);
        table.copy_within(HEAD + SLOT..HEAD + 2 * SLOT, HEAD);
    });
    assert_eq!(have, [1, 2]);
}

#[test]
fn cut_short_or_lengthened_it_says_what_is_left() {
    assert_eq!(resume(&begun(), |table| table.truncate(HEAD + SLOT + 20)), [0]);
    assert_eq!(resume(&begun(), |table| table.truncate(100)), [0; 0]);
    assert_eq!(resume(&begun(), Vec::clear), [0; 0]);
    assert_eq!(resume(&begun(), |table| table.extend([0x5a; 1000])), [0, 1, 2]);
    assert_eq!(resume(&begun(), |table| table.fill(0x5a)), [0; 0]);
}

#[test]
fn another_jobs_table_says_nothing() {
    let mut other = begun();
    let theirs = fs::read(other.table()).unwrap();
    other.job = JobId::from_random([9; 16]);
    let target = other.ready();
    other.receive(&target, 0);
    drop(target);
    // The partial of this job has chunk 0, but the slots are the other's.
    assert_eq!(resume_beside(&other, &theirs), [0; 0]);
}

/// As [`resume`], without looking at what else lies in the directory.
fn resume_beside(bench: &Bench, table: &[u8]) -> Vec<u32> {
    fs::write(bench.table(), table).unwrap();
    let target = bench.ready();
    let have = target.store().have().iter().map(|i| i.0).collect();
    bench.receive_rest(&target);
    target.publish(&bench.fin()).unwrap();
    assert!(fs::read(bench.file()).unwrap() == bench.bytes);
    have
}

#[test]
fn a_table_of_another_payload_is_forgotten() {
    let mut bench = begun();
    bench.manifest.entries[0].mode = 0o600;
    let target = bench.ready();
    assert!(target.store().have().is_empty());
    bench.receive_rest(&target);
    target.publish(&bench.fin()).unwrap();
    bench.assert_published();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn no_damage_does_harm(
        cut in 0usize..HEAD + 5 * SLOT,
        noise in prop::collection::vec((0usize..HEAD + 4 * SLOT, any::<u8>()), 0..40),
    ) {
        let have = resume(&begun(), |table| {
            for (at, byte) in noise {
                table[at] = byte;
            }
            // Half of the time, so that the noise is not always cut off.
            if cut % 2 == 0 {
                table.truncate(cut);
            }
        });
        prop_assert!(have.len() < COUNT as usize);
    }
}
