//! Death at every crash point: a child process runs a target's life with `STAGE_CRASH_AT` set and is killed there;
//! then this process takes up what it left.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;

use stage_core::assignment::IfExists;
use stage_core::chunk::CHUNK;

use crate::bench::Bench;

const DIR: &str = "STAGE_TEST_CRASH_DIR";
const SIZE: u64 = 3 * CHUNK + 11;

fn bench(dir: &std::path::Path, replace: bool) -> Bench {
    let mut bench = Bench::within(dir, SIZE);
    // A mode that would keep its owner from opening the partial again.
    bench.manifest.entries[0].mode = 0o440;
    bench.rule(if replace {
        IfExists::Replace
    } else {
        IfExists::Fail
    })
}

/// Not a test of its own: the life that is cut short.
#[test]
#[ignore = "run by the tests below as a child"]
fn child() {
    let Some(dir) = std::env::var_os(DIR) else {
        return;
    };
    let dir = std::path::PathBuf::from(dir);
    let bench = bench(&dir, dir.join("replace").exists());
    let target = bench.ready();
    bench.receive_rest(&target);
    target.publish(&bench.fin()).unwrap();
}

#[test]
fn every_moment_is_a_good_one_to_die() {
    for replace in [false, true] {
        for (point, kept, named) in [
            ("chunk_written", 0, false),
            ("chunk_kept", 1, false),
            ("before_fsync", 4, false),
            ("after_fsync", 4, false),
            ("before_rename", 4, false),
            ("after_rename", 4, true),
            ("after_dirsync", 4, true),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let bench = bench(dir.path(), replace);
            if replace {
                fs::write(dir.path().join("replace"), "").unwrap();
                bench.put(b"old");
            }
            let status = Command::new(std::env::current_exe().unwrap())
                .args(["--ignored", "--exact", "crash::child", "--quiet"])
                .env("STAGE_CRASH_AT", point)
                .env(DIR, dir.path())
                .stdout(std::process::Stdio::null())
                .status()
                .unwrap();
            assert_eq!(status.signal(), Some(9), "{point}: the child was to be killed");

            // The final name is absent, the whole old or the whole new one.
            match fs::read(bench.file()) {
                Ok(bytes) if named => assert!(bytes == bench.bytes, "{point}"),
                Ok(bytes) => assert!(replace && bytes == b"old", "{point}"),
                Err(_) => assert!(!replace && !named, "{point}"),
            }
            let inode = fs::metadata(bench.file()).map(|meta| meta.ino()).ok();
            let target = bench.ready();
            assert_eq!(target.store().kept(), kept, "{point}");
            assert_eq!(bench.receive_rest(&target), 4 - kept, "{point}");
            let publication = target.publish(&bench.fin()).unwrap();
            assert!(!publication.already, "{point}: this job has put it there");
            bench.assert_published();
            let meta = fs::metadata(bench.file()).unwrap();
            assert_eq!(meta.permissions().mode() & 0o777, 0o440);
            assert_eq!(named, inode == Some(meta.ino()), "{point}");
            // And once more, as after a restart while the job is still served.
            drop(target);
            let target = bench.ready();
            assert!(target.store().is_complete(), "{point}");
            assert!(!target.publish(&bench.fin()).unwrap().already, "{point}");
            target.release();
            bench.assert_no_trace();
        }
    }
}

#[test]
fn a_published_file_that_was_changed_since_is_not_ours() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = bench(dir.path(), false);
    bench.manifest.entries[0].mode = 0o640;
    let target = bench.ready();
    bench.receive_rest(&target);
    target.publish(&bench.fin()).unwrap();
    drop(target);
    let mut bytes = bench.bytes.clone();
    bytes[0] ^= 1;
    fs::write(bench.file(), bytes).unwrap();
    let target = bench.ready();
    assert!(target.is_candidate());
    // What the table claims was hashed again: all but the changed chunk.
    assert_eq!(target.store().kept(), 3);
}
