//! Something stands at the target already.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, symlink};

use stage_core::assignment::IfExists;
use stage_core::chunk::{CHUNK, ChunkIndex};
use stage_core::failure::Code;
use stage_transfer::store::Compared;
use stage_transfer::target::{Preparation, PublishError, Target};

use crate::bench::{Bench, content};

fn compare(bench: &Bench, target: &Target, index: u32) -> Compared {
    target
        .store()
        .compare(ChunkIndex(index), bench.digest(index))
        .unwrap()
}

#[test]
fn the_same_content_is_already_there() {
    for rule in [IfExists::Fail, IfExists::Replace] {
        for size in [0, 1, 2 * CHUNK + 1] {
            let bench = Bench::new(size).rule(rule);
            bench.put(&bench.bytes);
            let inode = fs::metadata(bench.file()).unwrap().ino();
            let target = bench.ready();
            assert!(target.is_candidate());
            assert_eq!(target.store().wants_offers(), size > 0);
            for index in 0..bench.count() {
                assert_eq!(compare(&bench, &target, index), Compared::Same);
                // Asked again, it says so again.
                assert_eq!(compare(&bench, &target, index), Compared::Same);
            }
            assert!(!target.store().wants_offers());
            assert!(!bench.partial().exists(), "nothing was reserved");
            let publication = target.publish(&bench.fin()).unwrap();
            assert!(publication.already);
            assert_eq!(target.publish(&bench.fin()).unwrap(), publication);
            assert_eq!(fs::metadata(bench.file()).unwrap().ino(), inode);
            if size > 0 {
                let mut byte = [0];
                target.store().read(ChunkIndex(0), 0, &mut byte).unwrap();
                assert_eq!(byte[0], bench.bytes[0], "it serves from the old copy");
            }
            target.release();
            bench.assert_published();
            bench.assert_no_trace();
        }
    }
}

#[test]
fn other_content_is_left_alone() {
    let bench = Bench::new(2 * CHUNK);
    let mut theirs = bench.bytes.clone();
    theirs[CHUNK as usize + 5] ^= 1;
    bench.put(&theirs);
    let target = bench.ready();
    assert_eq!(compare(&bench, &target, 0), Compared::Same);
    let failure = target
        .store()
        .compare(ChunkIndex(1), bench.digest(1))
        .unwrap_err();
    assert_eq!(failure.code, Code::Exists);
    assert_eq!(failure.path.as_deref(), bench.file().to_str());
    // Bytes that come without having been asked for change nothing either.
    let claim = target.store().claim(ChunkIndex(1)).unwrap();
    assert_eq!(claim.write(0, bench.chunk(1)).unwrap_err().code, Code::Exists);
    drop(claim);
    target.discard().unwrap();
    assert_eq!(fs::read(bench.file()).unwrap(), theirs);
    assert_eq!(Bench::names(&bench.dir()), ["genome.db"]);
    bench.assert_no_trace();
}

#[test]
fn another_size_is_unfit_at_once() {
    for size in [0, CHUNK - 1, CHUNK + 1] {
        let bench = Bench::new(CHUNK);
        bench.put(&content(size));
        let failure = bench.unfit();
        assert_eq!(failure.code, Code::Exists);
        assert!(failure.hint.contains("--if-exists"), "{}", failure.hint);
        bench.assert_no_trace();
    }
}

#[test]
fn replacing_takes_over_what_is_equal_and_swaps_at_the_end() {
    let bench = Bench::new(4 * CHUNK + 9).rule(IfExists::Replace);
    let mut old = bench.bytes.clone();
    old[2 * CHUNK as usize] ^= 1;
    bench.put(&old);
    let target = bench.ready();
    assert_eq!(compare(&bench, &target, 0), Compared::Same);
    assert_eq!(compare(&bench, &target, 4), Compared::Same);
    assert!(
        !bench.partial().exists(),
        "no space is taken before the first difference"
    );
    assert_eq!(compare(&bench, &target, 2), Compared::Different);
    assert!(bench.partial().exists());
    assert_eq!(compare(&bench, &target, 1), Compared::Same);
    let mut read = vec![0; 9];
    target.store().read(ChunkIndex(4), 0, &mut read).unwrap();
    assert_eq!(read, bench.chunk(4));

    // A crash here loses nothing.
    drop(target);
    let target = bench.ready();
    let have: Vec<_> = target.store().have().iter().map(|i| i.0).collect();
    assert_eq!(have, [0, 1, 4]);
    assert_eq!(compare(&bench, &target, 3), Compared::Same);
    assert_eq!(bench.receive_rest(&target), 1);
    assert_eq!(
        fs::read(bench.file()).unwrap(),
        old,
        "the old one stands to the end"
    );
    assert!(!target.publish(&bench.fin()).unwrap().already);
    bench.assert_published();
}

#[test]
fn replacing_another_size_reserves_at_once() {
    for size in [0, CHUNK / 2, 3 * CHUNK - 1, 3 * CHUNK + 1] {
        let bench = Bench::new(3 * CHUNK).rule(IfExists::Replace);
        let mut old = bench.bytes.clone();
        old.resize(size as usize, 7);
        bench.put(&old);
        let target = bench.ready();
        assert!(bench.partial().exists() && target.is_candidate());
        let same = (0..3)
            .filter(|i| compare(&bench, &target, *i) == Compared::Same)
            .count();
        assert_eq!(same as u64, (size / CHUNK).min(3), "{size}");
        bench.receive_rest(&target);
        assert!(!target.publish(&bench.fin()).unwrap().already);
        bench.assert_published();
    }
}

#[test]
fn skip_leaves_whatever_stands_there() {
    let bench = Bench::new(CHUNK).rule(IfExists::Skip);
    // What an earlier run of the job left goes; what it waited for has come otherwise.
    drop(bench.ready());
    bench.put(b"theirs");
    let Preparation::Skipped { path } = bench.prepare().unwrap() else {
        panic!("not skipped")
    };
    assert_eq!(path, bench.file().to_str().unwrap());
    assert_eq!(fs::read(bench.file()).unwrap(), b"theirs");
    assert_eq!(Bench::names(&bench.dir()), ["genome.db"]);
    bench.assert_no_trace();
}

#[test]
fn what_is_no_file_is_of_the_wrong_kind() {
    for rule in [IfExists::Fail, IfExists::Replace, IfExists::Skip] {
        let bench = Bench::new(6).rule(rule);
        fs::create_dir_all(bench.dir()).unwrap();
        let elsewhere = bench.root.join("elsewhere");
        fs::write(&elsewhere, &bench.bytes).unwrap();
        let check = |kind: &str| {
            match bench.prepare() {
                Err(failure) if rule != IfExists::Skip => {
                    assert_eq!(failure.code, Code::WrongKind);
                    assert!(failure.message.contains(kind), "{failure}");
                }
                Ok(Preparation::Skipped { .. }) if rule == IfExists::Skip => {}
                other => panic!("{kind}, {rule:?}: {other:?}"),
            }
            bench.assert_no_trace();
        };
        fs::create_dir(bench.file()).unwrap();
        check("directory");
        fs::remove_dir(bench.file()).unwrap();
        // Even one that leads to the very content.
        symlink(&elsewhere, bench.file()).unwrap();
        check("symbolic link");
        fs::remove_file(bench.file()).unwrap();
        let _listener = std::os::unix::net::UnixListener::bind(bench.file()).unwrap();
        check("special");
        assert_eq!(fs::read(&elsewhere).unwrap(), bench.bytes);
    }
}

#[test]
fn what_appears_meanwhile_stays_unless_it_shall_be_replaced() {
    for (rule, kind) in [
        (IfExists::Fail, "file"),
        (IfExists::Skip, "file"),
        (IfExists::Replace, "file"),
        (IfExists::Replace, "directory"),
        (IfExists::Replace, "link"),
    ] {
        let bench = Bench::new(CHUNK + 1).rule(rule);
        let target = bench.ready();
        bench.receive_rest(&target);
        match kind {
            "file" => fs::write(bench.file(), "theirs").unwrap(),
            "link" => symlink("/etc/passwd", bench.file()).unwrap(),
            _ => fs::create_dir(bench.file()).unwrap(),
        }
        match (rule, kind, target.publish(&bench.fin())) {
            (IfExists::Replace, "file", Ok(_)) => bench.assert_published(),
            (IfExists::Fail | IfExists::Skip, "file", Err(PublishError::Unfit(failure))) => {
                assert_eq!(failure.code, Code::Exists);
                assert_eq!(fs::read(bench.file()).unwrap(), b"theirs");
                // Once it is gone, all that was received is still good.
                fs::remove_file(bench.file()).unwrap();
                drop(target);
                let target = bench.ready();
                assert!(target.store().is_complete());
                target.publish(&bench.fin()).unwrap();
                bench.assert_published();
            }
            (IfExists::Replace, _, Err(PublishError::Unfit(failure))) => {
                assert_eq!(failure.code, Code::WrongKind);
                assert!(
                    fs::symlink_metadata(bench.file()).unwrap().file_type().is_file() == (kind == "file")
                );
            }
            (_, _, other) => panic!("{rule:?} {kind}: {other:?}"),
        }
    }
}

#[test]
fn an_old_copy_that_changes_while_it_is_compared_is_not_already_there() {
    for rule in [IfExists::Fail, IfExists::Replace] {
        let bench = Bench::new(2 * CHUNK).rule(rule);
        bench.put(&bench.bytes);
        let target = bench.ready();
        for index in 0..2 {
            assert_eq!(compare(&bench, &target, index), Compared::Same);
        }
        let mut changed = bench.bytes.clone();
        changed[3] ^= 1;
        fs::write(bench.file(), &changed).unwrap();
        let Err(PublishError::Unfit(failure)) = target.publish(&bench.fin()) else {
            panic!("it must be unfit")
        };
        assert_eq!(failure.code, Code::Exists);
        // The next look does not believe the table.
        drop(target);
        let target = bench.ready();
        assert!(!target.store().has(ChunkIndex(0)) && target.store().has(ChunkIndex(1)));
    }
}

#[test]
fn what_the_old_copy_lost_since_is_not_taken_over() {
    let bench = Bench::new(3 * CHUNK).rule(IfExists::Replace);
    let mut old = bench.bytes.clone();
    old[2 * CHUNK as usize] ^= 1;
    bench.put(&old);
    let target = bench.ready();
    assert_eq!(compare(&bench, &target, 0), Compared::Same);
    assert_eq!(compare(&bench, &target, 1), Compared::Same);
    old[7] ^= 1;
    fs::write(bench.file(), &old).unwrap();
    assert_eq!(compare(&bench, &target, 2), Compared::Different);
    assert!(!target.store().has(ChunkIndex(0)) && target.store().has(ChunkIndex(1)));
    assert_eq!(bench.receive_rest(&target), 2);
    target.publish(&bench.fin()).unwrap();
    bench.assert_published();
}

#[test]
fn what_was_compared_is_not_compared_again_after_a_crash() {
    let bench = Bench::new(3 * CHUNK);
    bench.put(&bench.bytes);
    let target = bench.ready();
    assert_eq!(compare(&bench, &target, 1), Compared::Same);
    drop(target);
    let target = bench.ready();
    assert_eq!(target.store().have().iter().collect::<Vec<_>>(), [ChunkIndex(1)]);
    assert!(target.store().wants_offers());
}

#[test]
fn a_file_that_came_since_the_partial_was_begun_is_compared() {
    let bench = Bench::new(2 * CHUNK);
    let target = bench.ready();
    bench.receive(&target, 0);
    drop(target);
    bench.put(&bench.bytes);
    let target = bench.ready();
    assert!(!bench.partial().exists());
    assert!(
        target.store().has(ChunkIndex(0)),
        "it was hashed again in the file that came"
    );
    assert_eq!(compare(&bench, &target, 1), Compared::Same);
    assert!(target.publish(&bench.fin()).unwrap().already);
}
