//! Several units in one payload, each of which may stand there already, or something else, or nothing.

use std::fs;

use stage_core::assignment::IfExists;
use stage_core::chunk::CHUNK;
use stage_core::failure::Code;
use stage_transfer::target::Preparation;

use super::bench::{Bench, Tree};
use crate::bench::content;

/// Three units: a tree, a file and another tree.
fn three() -> Tree {
    let mut tree = Tree::rich();
    tree.file(b"more.fa", 0o640, content(CHUNK + 3))
        .dir("tools", 0o755)
        .file(b"tools/run", 0o755, content(5000));
    tree
}

#[test]
fn all_are_published_under_their_names() {
    let mut bench = Bench::new(three());
    let (wanted, already) = bench.push();
    assert_eq!((wanted.len() as u32, already), (bench.layout().count(), false));
    bench.assert_no_trace();
    assert_eq!(bench.next(IfExists::Fail).push(), (vec![], true));
    assert_eq!(bench.next(IfExists::Replace).push(), (vec![], true));
    assert!(matches!(
        bench.next(IfExists::Skip).prepare(),
        Ok(Preparation::Skipped { .. })
    ));
}

/// `refdb` is the same, `more.fa` another, `tools` is not there.
fn mixed() -> Bench {
    let mut bench = Bench::new(three());
    bench.tree.bytes("more.fa")[5] ^= 1;
    bench.tree.0.retain(|path, _| !path.starts_with(b"tools"));
    bench.push();
    bench.tree = three();
    bench
}

#[test]
fn one_there_one_different_one_absent() {
    let mut bench = mixed();
    let other = fs::read(bench.dir().join("more.fa")).unwrap();
    assert_eq!(bench.next(IfExists::Fail).refused().code, Code::Exists);
    assert!(!bench.dir().join("tools").exists());
    assert!(fs::read(bench.dir().join("more.fa")).unwrap() == other);
    bench.assert_no_trace();
    assert_eq!(bench.generations().len(), 1);

    let (wanted, already) = bench.next(IfExists::Replace).push();
    assert!(!already);
    // The changed chunk, and the pack with `tools`.
    assert!(wanted.len() <= 2, "{wanted:?}");
    assert_eq!(bench.generations().len(), 2);
}

#[test]
fn what_stands_there_is_left_and_what_is_absent_comes() {
    let mut bench = mixed();
    let other = fs::read(bench.dir().join("more.fa")).unwrap();
    let target = bench.next(IfExists::Skip).ready();
    bench.receive(&target);
    assert!(!target.publish(&bench.fin()).unwrap().already);
    target.release();
    assert!(fs::read(bench.dir().join("more.fa")).unwrap() == other);
    assert!(bench.dir().join("tools/run").exists());
    bench.assert_no_trace();
    assert_eq!(bench.generations().len(), 2);
}

#[test]
fn one_of_another_kind_keeps_all_away() {
    let bench = Bench::new(three());
    fs::create_dir_all(bench.dir().join("more.fa")).unwrap();
    assert_eq!(bench.unfit().code, Code::WrongKind);
    bench.assert_no_trace();
    assert!(!bench.name().exists());
}

#[test]
fn units_are_taken_up_where_they_were_left() {
    let bench = Bench::new(three());
    let count = bench.chunks().len() as u32;
    for most in [1, 2, 1] {
        let target = bench.ready();
        bench.receive_some(&target, most);
    }
    let target = bench.ready();
    assert_eq!(target.store().kept(), 4);
    assert_eq!(bench.receive(&target).len() as u32, count - 4);
    target.publish(&bench.fin()).unwrap();
    target.release();
    bench.assert_published();
}
