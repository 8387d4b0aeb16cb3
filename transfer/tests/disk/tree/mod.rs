//! Trees at a target: laid out exactly, published by one switch, shared with the generation before.

mod bench;
mod crash;
mod foreign;
mod matrix;
mod retire;
mod reuse;
mod units;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use stage_core::assignment::IfExists;
use stage_core::chunk::CHUNK;
use stage_core::failure::Code;
use stage_transfer::target::{discard_job, held_jobs};

use bench::{Bench, Tree};

#[test]
fn a_tree_is_published_exactly() {
    let bench = Bench::new(Tree::rich());
    let target = bench.ready();
    assert!(!target.is_candidate() && !target.store().wants_offers());
    // Nobody else may enter what is not whole.
    let partial = fs::metadata(bench.partial(0)).unwrap();
    assert_eq!(partial.mode() & 0o777, 0o700);
    assert_eq!(target.path(), bench.name().to_str().unwrap());
    let wanted = bench.receive(&target);
    assert_eq!(wanted.len() as u32, bench.layout().count());
    assert!(!bench.name().exists(), "it is there before it is whole");
    let publication = target.publish(&bench.fin()).unwrap();
    assert!(!publication.already);
    bench.assert_published();
    // It goes on being served.
    let mut first = vec![0; 1000];
    target
        .store()
        .read(stage_core::chunk::ChunkIndex(0), 0, &mut first)
        .unwrap();
    assert_eq!(first, bench.chunks()[0][..1000]);
    target.release();
    bench.assert_no_trace();
    bench.assert_published();

    let link = fs::read_link(bench.name()).unwrap();
    let generations = bench.generations();
    assert_eq!(generations.len(), 1);
    assert_eq!(link.to_str().unwrap(), format!(".stage/{}", generations[0]));
    assert!(generations[0].starts_with("refdb@"));
    let all = fs::metadata(bench.dir().join(".stage")).unwrap();
    assert_eq!(all.mode() & 0o777, 0o755);
}

#[test]
fn what_is_there_already_is_left_as_it_is() {
    let mut bench = Bench::new(Tree::rich());
    bench.push();
    let before = fs::metadata(bench.name()).unwrap();
    for rule in [IfExists::Fail, IfExists::Replace] {
        let target = bench.next(rule).ready();
        assert!(target.is_candidate() && target.store().wants_offers());
        target.discard().unwrap();
        assert_eq!(bench.push(), (vec![], true), "{rule:?}");
        assert_eq!(fs::metadata(bench.name()).unwrap().ino(), before.ino());
        assert_eq!(bench.generations().len(), 1);
    }
    match bench.next(IfExists::Skip).prepare().unwrap() {
        stage_transfer::target::Preparation::Skipped { .. } => {}
        other => panic!("{other:?}"),
    }
    bench.assert_no_trace();
    bench.assert_published();
}

#[test]
fn empty_trees_and_trees_without_bytes() {
    let mut tree = Tree::default();
    tree.dir("refdb", 0o555);
    let mut bench = Bench::new(tree);
    assert_eq!(bench.push(), (vec![], false));
    assert_eq!(bench.next(IfExists::Fail).push(), (vec![], true));
    bench
        .tree
        .file(b"refdb/empty", 0o444, vec![])
        .symlink("refdb/s", "t");
    assert_eq!(bench.next(IfExists::Fail).refused().code, Code::Exists);
    assert_eq!(bench.next(IfExists::Replace).push(), (vec![], false));
    assert_eq!(bench.next(IfExists::Fail).push(), (vec![], true));
}

#[test]
fn a_long_manifest_comes_first_and_a_lost_connection_loses_nothing() {
    let mut bench = Bench::new(Tree::wide());
    assert!(bench.payload().inline.is_none());
    let target = bench.ready();
    assert!(!target.store().is_laid_out() && !target.store().is_complete());
    assert!(!bench.partial(0).exists(), "nothing is made of what is not known");
    // Lost with a part of the head, with all of it, with some of the data, with all of it.
    drop(target);
    let count = bench.chunks().len() as u32;
    let mut have = 0;
    for most in [0, 1, 1, count] {
        let target = bench.ready();
        assert_eq!(target.store().kept(), have);
        assert_eq!(target.store().is_laid_out(), have > 0);
        bench.receive_some(&target, most);
        have = target.store().kept();
        drop(target);
        assert_eq!(held_jobs(&bench.state), [(bench.job, have)]);
    }
    assert_eq!(have, count);
    assert_eq!(bench.push(), (vec![], false));
    bench.assert_no_trace();
    // The same again: only the head has to come.
    assert_eq!(bench.next(IfExists::Fail).push(), (vec![], true));
    // And under the name of another tree.
    bench
        .tree
        .bytes("refdb/a file with a long name, as many have one 0007")[3] ^= 1;
    assert_eq!(bench.next(IfExists::Fail).refused().code, Code::Exists);
    let (wanted, already) = bench.next(IfExists::Replace).push();
    assert!(wanted.len() == 1 && !already, "{wanted:?}");
}

#[test]
fn a_head_that_is_not_what_was_said_is_refused() {
    let bench = Bench::new(Tree::wide());
    let target = bench.ready();
    let mut head = bench.chunks()[0].clone();
    head[20] ^= 1;
    let claim = target.store().claim(stage_core::chunk::ChunkIndex(0)).unwrap();
    claim.write(0, &head).unwrap();
    let failure = claim.keep(bench::digest(&head), None).unwrap_err();
    assert_eq!(failure.code, Code::Corrupt);
    assert!(!target.store().is_laid_out());
    target.discard().unwrap();
    bench.assert_no_trace();
}

#[test]
fn a_tree_is_taken_up_where_it_was_left() {
    let bench = Bench::new(Tree::rich());
    let count = bench.chunks().len() as u32;
    let mut have = 0;
    for most in [0, 1, 2, count] {
        let target = bench.ready();
        assert_eq!(target.store().kept(), have);
        bench.receive_some(&target, most);
        have = target.store().kept();
    }
    // Its chunk table is a hint: what the partial lost since is fetched again.
    fs::remove_file(bench.partial(0).join("sub/deep/chunk")).unwrap();
    let table = bench.state.join("jobs").join(bench.job.to_string()).join("table");
    let file = fs::OpenOptions::new().write(true).open(&table).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0xff; 16], 0).unwrap();
    let target = bench.ready();
    assert!(target.store().kept() < count);
    bench.receive(&target);
    target.publish(&bench.fin()).unwrap();
    target.release();
    bench.assert_published();
}

#[test]
fn cancelled_at_any_stage_nothing_is_left() {
    for stage in 0..4 {
        for restarted in [false, true] {
            let bench = Bench::new(if stage % 2 == 0 {
                Tree::rich()
            } else {
                Tree::wide()
            });
            let target = bench.ready();
            match stage {
                0 => {}
                1 => drop(bench.receive_some(&target, 1)),
                2 => drop(bench.receive_some(&target, 3)),
                _ => drop(bench.receive(&target)),
            }
            if restarted {
                drop(target);
                discard_job(&bench.roots, &bench.state, bench.job).unwrap();
            } else {
                target.discard().unwrap();
            }
            bench.assert_no_trace();
            assert!(!bench.dir().exists(), "{stage} {restarted}");
        }
    }
}

#[test]
fn published_it_stays_whatever_becomes_of_the_job() {
    let bench = Bench::new(Tree::rich());
    let target = bench.ready();
    bench.receive(&target);
    target.publish(&bench.fin()).unwrap();
    drop(target);
    discard_job(&bench.roots, &bench.state, bench.job).unwrap();
    bench.assert_published();
    bench.assert_no_trace();
}

#[test]
fn names_that_leave_no_room_for_a_mark_are_refused() {
    let mut tree = Tree::default();
    let name = "n".repeat(240);
    tree.dir(&name, 0o755);
    let bench = Bench::new(tree);
    assert_eq!(bench.unfit().code, Code::NameTooLong);
    bench.assert_no_trace();
    assert!(!bench.dir().exists());
}

#[test]
fn who_reads_one_generation_sees_only_that_one() {
    let mut tree = Tree::default();
    tree.dir("refdb", 0o755)
        .file(b"refdb/a", 0o644, b"one".to_vec())
        .file(b"refdb/b", 0o644, b"one".to_vec());
    let mut bench = Bench::new(tree);
    bench.push();
    let opened = fs::canonicalize(bench.name()).unwrap();
    let file = fs::read(opened.join("a")).unwrap();
    bench.tree.bytes("refdb/a").copy_from_slice(b"two");
    bench.tree.bytes("refdb/b").copy_from_slice(b"two");
    bench.next(IfExists::Replace).push();
    assert_eq!(fs::read(opened.join("b")).unwrap(), file);
    assert_eq!(fs::read(bench.name().join("b")).unwrap(), b"two");
    assert_ne!(fs::canonicalize(bench.name()).unwrap(), opened);
}

#[test]
fn a_file_of_many_chunks_and_its_neighbours_are_whole() {
    let mut tree = Tree::default();
    tree.dir("refdb", 0o755);
    for (i, size) in [
        0,
        1,
        CHUNK - 1,
        CHUNK,
        CHUNK + 1,
        256 << 10,
        (256 << 10) + 1,
        3 * CHUNK - 1,
    ]
    .into_iter()
    .enumerate()
    {
        tree.file(
            format!("refdb/{i}").as_bytes(),
            0o640,
            crate::bench::content(size),
        );
    }
    let bench = Bench::new(tree);
    bench.push();
    let meta = fs::metadata(bench.name().join("3")).unwrap();
    assert_eq!(meta.permissions().mode() & 0o7777, 0o640);
}
