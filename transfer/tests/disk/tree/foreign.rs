//! What else may stand under a tree's name.

use std::fs;
use std::os::unix::fs::symlink;

use stage_core::assignment::IfExists;
use stage_core::failure::Code;

use super::bench::{Bench, Tree};

#[test]
fn a_directory_that_is_the_same_stays_as_it_is() {
    for rule in [IfExists::Fail, IfExists::Replace] {
        let mut bench = Bench::new(Tree::rich());
        fs::create_dir_all(bench.dir()).unwrap();
        bench.tree.make("refdb", &bench.name());
        assert_eq!(bench.tree.differences("refdb", &bench.name()), [""; 0]);
        assert_eq!(bench.next(rule).push(), (vec![], true), "{rule:?}");
        assert!(!bench.name().is_symlink());
        assert_eq!(bench.generations().len(), 0);
        assert!(!bench.dir().join(".stage").exists());
    }
}

#[test]
fn another_directory_is_refused_or_exchanged() {
    let mut bench = Bench::new(Tree::rich());
    fs::create_dir_all(bench.dir()).unwrap();
    let mut foreign = Tree::rich();
    foreign.bytes("refdb/sub/deep/chunk")[9] ^= 1;
    foreign.file(b"refdb/notes", 0o644, b"mine".to_vec());
    foreign.0.get_mut(b"refdb".as_slice()).unwrap().mode = 0o555;
    foreign.make("refdb", &bench.name());
    assert_eq!(bench.refused().code, Code::Exists);
    assert_eq!(foreign.differences("refdb", &bench.name()), [""; 0]);
    bench.assert_no_trace();
    let (wanted, already) = bench.next(IfExists::Replace).push();
    assert!(!already);
    assert_eq!(wanted.len(), 1, "what the directory had is taken from it");
    assert!(bench.name().is_symlink());
    // It is kept as a generation.
    let generations = bench.generations();
    assert_eq!(generations.len(), 2, "{generations:?}");
    let kept = generations.iter().find(|name| name.contains("@before-")).unwrap();
    assert_eq!(
        fs::read(bench.dir().join(".stage").join(kept).join("notes")).unwrap(),
        b"mine"
    );
}

#[test]
fn what_is_no_directory_is_never_replaced_by_one() {
    for rule in [IfExists::Fail, IfExists::Replace] {
        let bench = |make: &dyn Fn(&Bench)| {
            let mut bench = Bench::new(Tree::rich());
            bench.rule = rule;
            fs::create_dir_all(bench.dir()).unwrap();
            make(&bench);
            let failure = bench.unfit();
            assert_eq!(failure.code, Code::WrongKind, "{failure}");
            bench.assert_no_trace();
            bench
        };
        let file = bench(&|bench| fs::write(bench.name(), "a file").unwrap());
        assert_eq!(fs::read(file.name()).unwrap(), b"a file");
        bench(&|bench| {
            fs::create_dir(bench.dir().join("else")).unwrap();
            symlink("else", bench.name()).unwrap();
        });
        bench(&|bench| symlink("nowhere", bench.name()).unwrap());
        // Not ours, for all it looks like: it leads to another name's generations, or out.
        bench(&|bench| symlink(".stage/other@0123456789abcdef", bench.name()).unwrap());
        bench(&|bench| symlink(".stage/refdb@/../../..", bench.name()).unwrap());
    }
}

#[test]
fn a_link_of_ours_to_a_generation_that_is_gone_counts_as_nothing() {
    for rule in [IfExists::Fail, IfExists::Replace, IfExists::Skip] {
        let mut bench = Bench::new(Tree::rich());
        bench.push();
        let old = bench.dir().join(".stage").join(&bench.generations()[0]);
        let aside = bench.dir().join(".stage/aside");
        fs::rename(&old, &aside).unwrap();
        bench.tree.bytes("refdb/big")[0] ^= 1;
        let (wanted, already) = bench.next(rule).push();
        assert_eq!(wanted.len() as u32, bench.layout().count(), "{rule:?}");
        assert!(!already);
    }
}

#[test]
fn what_appears_during_the_transfer_is_not_overwritten() {
    let bench = Bench::new(Tree::rich());
    let target = bench.ready();
    bench.receive(&target);
    fs::create_dir(bench.name()).unwrap();
    fs::write(bench.name().join("notes"), "mine").unwrap();
    let failure = match target.publish(&bench.fin()) {
        Err(stage_transfer::target::PublishError::Unfit(failure)) => failure,
        other => panic!("{other:?}"),
    };
    assert_eq!(failure.code, Code::Exists);
    target.discard().unwrap();
    assert_eq!(fs::read(bench.name().join("notes")).unwrap(), b"mine");
    bench.assert_no_trace();
    assert_eq!(bench.generations(), [""; 0]);
}
