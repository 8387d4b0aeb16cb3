//! Death at every crash point of a tree's life: what the name leads to is whole, old or new, and the next run publishes.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Command;

use stage_core::assignment::IfExists;
use stage_transfer::target::discard_job;

use super::bench::{Bench, Tree};

const DIR: &str = "STAGE_TEST_CRASH_DIR";

/// What stands there before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Before {
    Nothing,
    Generation,
    Foreign,
}

const POINTS: [&str; 9] = [
    "chunk_written",
    "chunk_kept",
    "before_fsync",
    "after_fsync",
    "before_rename",
    "after_generation",
    "after_retire",
    "after_rename",
    "after_dirsync",
];

fn old() -> Tree {
    let mut tree = Tree::rich();
    tree.bytes("refdb/big")[7] ^= 1;
    tree.bytes("refdb/aa")[7] ^= 1;
    tree
}

/// A node on which `before` stands there, and a push of another tree to it.
fn bench(dir: &Path, before: Before) -> Bench {
    let mut bench = Bench::within(dir, Tree::rich());
    if before != Before::Nothing {
        bench.next(IfExists::Replace);
    }
    bench
}

fn set_up(dir: &Path, before: Before) {
    let bench = Bench::within(dir, old());
    match before {
        Before::Nothing => {}
        Before::Generation => drop(bench.push()),
        Before::Foreign => {
            fs::create_dir_all(bench.dir()).unwrap();
            bench.tree.make("refdb", &bench.name());
        }
    }
    fs::write(dir.join("before"), format!("{before:?}")).unwrap();
}

/// Not a test of its own: the life that is cut short.
#[test]
#[ignore = "run by the tests below as a child"]
fn child() {
    let Some(dir) = std::env::var_os(DIR) else {
        return;
    };
    let dir = Path::new(&dir);
    let before = match fs::read_to_string(dir.join("before")).unwrap().as_str() {
        "Nothing" => Before::Nothing,
        "Generation" => Before::Generation,
        _ => Before::Foreign,
    };
    let bench = bench(dir, before);
    let target = bench.ready();
    bench.receive(&target);
    target.publish(&bench.fin()).unwrap();
}

fn die_at(point: &str, dir: &Path) {
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "tree::crash::child", "--quiet"])
        .env("STAGE_CRASH_AT", point)
        .env(DIR, dir)
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap();
    assert_eq!(status.signal(), Some(9), "{point}: the child was to be killed");
}

/// The name leads to all of the old or all of the new; `true`: the new.
fn assert_whole(bench: &Bench, before: Before, what: &str) -> bool {
    let at = fs::canonicalize(bench.name());
    let Ok(at) = at else {
        assert_eq!(before, Before::Nothing, "{what}: what stood there is gone");
        assert!(fs::symlink_metadata(bench.name()).is_err(), "{what}");
        return false;
    };
    let new = bench.tree.differences("refdb", &at);
    if new.is_empty() {
        return true;
    }
    assert_ne!(before, Before::Nothing, "{what}: {new:?}");
    assert_eq!(old().differences("refdb", &at), [""; 0], "{what}");
    false
}

#[test]
fn every_moment_is_a_good_one_to_die() {
    for before in [Before::Nothing, Before::Generation, Before::Foreign] {
        for point in POINTS {
            if point == "after_retire" && before == Before::Nothing {
                continue;
            }
            let what = format!("{before:?} {point}");
            let dir = tempfile::tempdir().unwrap();
            set_up(dir.path(), before);
            die_at(point, dir.path());
            let bench = bench(dir.path(), before);
            let named = assert_whole(&bench, before, &what);
            assert_eq!(named, matches!(point, "after_rename" | "after_dirsync"), "{what}");
            let inode = fs::metadata(bench.name()).map(|meta| meta.ino()).ok();
            let target = bench.ready();
            bench.receive(&target);
            let publication = target.publish(&bench.fin()).unwrap();
            assert!(!publication.already, "{what}: this job has put it there");
            assert_eq!(
                named,
                inode == Some(fs::metadata(bench.name()).unwrap().ino()),
                "{what}"
            );
            // And once more, as after a restart while the job is still served.
            drop(target);
            let target = bench.ready();
            assert!(target.store().is_complete(), "{what}");
            assert!(!target.publish(&bench.fin()).unwrap().already, "{what}");
            target.release();
            bench.assert_published();
            bench.assert_no_trace();
            let generations = bench.generations();
            let kept = usize::from(before != Before::Nothing);
            assert_eq!(generations.len(), 1 + kept, "{what}: {generations:?}");
            let now = fs::read_link(bench.name()).unwrap();
            for name in generations.iter().filter(|name| !now.ends_with(name.as_str())) {
                let differences = old().differences("refdb", &bench.dir().join(".stage").join(name));
                assert_eq!(differences, [""; 0], "{what}");
            }
        }
    }
}

#[test]
fn cancelled_after_every_death_nothing_is_left() {
    for before in [Before::Nothing, Before::Generation, Before::Foreign] {
        for point in POINTS {
            if point == "after_retire" && before == Before::Nothing {
                continue;
            }
            for prepared in [false, true] {
                let what = format!("{before:?} {point} {prepared}");
                let dir = tempfile::tempdir().unwrap();
                set_up(dir.path(), before);
                die_at(point, dir.path());
                let bench = bench(dir.path(), before);
                let named = assert_whole(&bench, before, &what);
                if prepared {
                    bench.ready().discard().unwrap();
                } else {
                    discard_job(&bench.roots, &bench.state, bench.job).unwrap();
                }
                assert_eq!(assert_whole(&bench, before, &what), named);
                bench.assert_no_trace();
                let generations = bench.generations();
                let expected = match (before, named) {
                    (Before::Nothing | Before::Foreign, false) => 0,
                    (Before::Generation, false) | (Before::Nothing, true) => 1,
                    (_, true) => 2,
                };
                assert_eq!(generations.len(), expected, "{what}: {generations:?}");
                if before == Before::Nothing && !named {
                    assert!(!bench.dir().exists(), "{what}");
                }
            }
        }
    }
}
