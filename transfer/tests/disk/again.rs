//! A job that is still open, on a node whose agent starts again after the copy was published: what was lost comes again,
//! what was removed or replaced does not.

use std::fs;

use stage_core::ask::Removal;
use stage_core::assignment::IfExists;
use stage_core::chunk::CHUNK;
use stage_core::failure::Code;
use stage_transfer::index::Index;
use stage_transfer::target::was_removed;

use crate::bench::Bench;

/// A copy that was published by a job that nobody has released.
fn published(rule: IfExists) -> (Bench, Index) {
    let bench = Bench::new(3 * CHUNK + 5).rule(rule);
    let index = Index::open(&bench.state);
    let target = bench.ready();
    bench.receive_rest(&target);
    target.publish(&bench.fin()).unwrap();
    target.note(&index, &bench.fin()).unwrap();
    (bench, index)
}

fn remove(bench: &Bench, index: &Index) {
    let removal = Removal {
        place: bench.spec.place.clone(),
        name: b"genome.db".to_vec(),
        force: false,
    };
    index
        .remove(&bench.roots, &bench.state, &removal, |job| job == bench.job)
        .unwrap();
}

// R85.
#[test]
fn what_was_lost_comes_again() {
    for rule in [IfExists::Fail, IfExists::Replace, IfExists::Skip] {
        let (bench, _) = published(rule);
        fs::remove_dir_all(bench.dir()).unwrap();
        assert!(!was_removed(&bench.state, bench.job));
        let target = bench.ready();
        assert_eq!(bench.receive_rest(&target), 4, "{rule:?}");
        assert!(!target.publish(&bench.fin()).unwrap().already);
        bench.assert_published();
        // And what is there is taken for what it is.
        drop(target);
        assert_eq!(bench.receive_rest(&bench.ready()), 0);
    }
}

#[test]
fn what_was_removed_is_known_to_be() {
    let (bench, index) = published(IfExists::Replace);
    remove(&bench, &index);
    assert!(!bench.file().exists());
    assert!(was_removed(&bench.state, bench.job));
    // Also one that was lost before it was removed.
    let (bench, index) = published(IfExists::Replace);
    fs::remove_file(bench.file()).unwrap();
    remove(&bench, &index);
    assert!(was_removed(&bench.state, bench.job));
    // Who asks for it again by an order of its own gets it.
    bench.receive_rest(&bench.ready());
    assert!(!was_removed(&bench.state, bench.job));
}

#[test]
fn what_was_replaced_since_is_not_rolled_back() {
    let (bench, _) = published(IfExists::Replace);
    bench.put(b"newer");
    for _ in 0..2 {
        // Not even when it is tried twice.
        assert_eq!(bench.unfit().code, Code::Exists);
        assert_eq!(fs::read(bench.file()).unwrap(), b"newer");
    }
}
