//! The plain life of a target: received, resumed, published, discarded.

use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::{Arc, Mutex};

use stage_core::assignment::SourceSpec;
use stage_core::chunk::{CHUNK, ChunkIndex, ChunkSet};
use stage_core::digest::ChunkHash;
use stage_core::failure::Code;
use stage_core::payload::{Payload, SourcePath, Walk};
use stage_transfer::source::{Pulse, look};
use stage_transfer::store::{Store, Watcher};
use stage_transfer::target::{PublishError, discard_job, held_jobs, sweep};

use crate::bench::{Bench, MODE, MTIME};

#[test]
fn every_size_arrives_whole_with_mode_and_time() {
    for size in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5] {
        let bench = Bench::new(size);
        let target = bench.ready();
        assert!(!target.is_candidate() && !target.store().wants_offers());
        assert_eq!(fs::metadata(bench.partial()).unwrap().mode() & 0o777, 0o600);
        assert_eq!(target.path(), bench.file().to_str().unwrap());
        assert_eq!(bench.receive_rest(&target), bench.count());
        let publication = target.publish(&bench.fin()).unwrap();
        assert!(!publication.already, "{size}");
        bench.assert_published();
        let meta = fs::metadata(bench.file()).unwrap();
        assert_eq!(meta.mode() & 0o7777, MODE);
        assert_eq!((meta.mtime(), meta.mtime_nsec()), (MTIME.0, i64::from(MTIME.1)));
        assert!(
            meta.blocks() * 512 <= size + size / 100 + 16384,
            "{size}: {} blocks",
            meta.blocks()
        );
        assert_eq!(target.store().disk_counters().bytes.0, size);
        // Said again, it says the same; and it goes on serving.
        assert_eq!(target.publish(&bench.fin()).unwrap(), publication);
        if size > 0 {
            let mut byte = [0];
            target.store().read(ChunkIndex(0), 0, &mut byte).unwrap();
            assert_eq!(byte[0], bench.bytes[0]);
        }
        target.release();
        bench.assert_published();
        bench.assert_no_trace();
    }
}

#[test]
fn space_is_reserved_before_a_byte_moves() {
    let bench = Bench::new(8 * CHUNK);
    let target = bench.ready();
    let meta = fs::metadata(bench.partial()).unwrap();
    assert_eq!(meta.len(), 8 * CHUNK);
    assert!(meta.blocks() * 512 >= 8 * CHUNK, "{} blocks", meta.blocks());
    target.discard().unwrap();
}

#[test]
fn a_run_after_a_crash_has_what_was_kept() {
    let bench = Bench::new(9 * CHUNK + 17);
    let target = bench.ready();
    for index in (0..bench.count()).step_by(2) {
        bench.receive(&target, index);
    }
    // Begun, not kept: it counts for nothing.
    let claim = target.store().claim(ChunkIndex(1)).unwrap();
    claim.write(0, &bench.chunk(1)[..1000]).unwrap();
    drop((claim, target));
    assert_eq!(held_jobs(&bench.state), [(bench.job, 5)]);

    let target = bench.ready();
    let have: Vec<_> = target.store().have().iter().map(|i| i.0).collect();
    assert_eq!(have, [0, 2, 4, 6, 8]);
    assert_eq!(bench.receive_rest(&target), 5);
    assert!(!target.publish(&bench.fin()).unwrap().already);
    bench.assert_published();
}

#[test]
fn chunks_have_one_owner_and_watchers_hear_of_each_once() {
    struct Heard(Mutex<Vec<u32>>);
    impl Watcher for Heard {
        fn arrived(&self, index: ChunkIndex) {
            self.0.lock().unwrap().push(index.0);
        }
    }
    let bench = Bench::new(3 * CHUNK);
    let target = bench.ready();
    let store = target.store();
    bench.receive(&target, 1);
    let heard = Arc::new(Heard(Mutex::default()));
    let watcher: Arc<dyn Watcher> = heard.clone();
    let known = store.watch(Arc::downgrade(&watcher));
    assert_eq!(known, ChunkSet::from_runs(3, std::iter::once(1..2)));

    let claim = store.claim(ChunkIndex(0)).unwrap();
    assert!(store.claim(ChunkIndex(0)).is_none(), "it has an owner");
    assert!(store.claim(ChunkIndex(1)).is_none(), "it is here");
    drop(claim);
    assert!(store.claim(ChunkIndex(7)).is_none(), "there is no such chunk");
    bench.receive(&target, 0);
    bench.receive(&target, 2);
    assert_eq!(*heard.0.lock().unwrap(), [0, 2]);
    assert_eq!(store.digest(ChunkIndex(2)), Some(bench.digest(2)));
    assert_eq!(store.digests(1..3).unwrap(), [bench.digest(1), bench.digest(2)]);
    assert!(store.digests(1..4).is_err());
    assert_eq!(store.root().unwrap(), bench.fin().root);
}

#[test]
fn kept_chunks_are_hot_until_disowned() {
    let bench = Bench::new(CHUNK);
    let target = bench.ready();
    let store = target.store();
    let mut buffer = bench.budget.take().unwrap();
    buffer.resize(CHUNK as usize).copy_from_slice(&bench.bytes);
    let claim = store.claim(ChunkIndex(0)).unwrap();
    claim.write(0, &buffer).unwrap();
    claim.keep(bench.digest(0), Some(Arc::new(buffer))).unwrap();
    assert!(
        store
            .hot(ChunkIndex(0))
            .is_some_and(|hot| hot[..] == bench.bytes[..])
    );
    store.disown(&ChunkSet::full(1)).unwrap();
    assert!(store.hot(ChunkIndex(0)).is_none() && !store.has(ChunkIndex(0)));
    assert_eq!(store.digest(ChunkIndex(0)), None);
    drop(target);
    assert!(
        bench.ready().store().have().is_empty(),
        "the journal must forget it too"
    );
}

#[test]
fn what_does_not_agree_is_not_published_until_it_does() {
    let bench = Bench::new(2 * CHUNK);
    let target = bench.ready();
    let wrong = vec![9; CHUNK as usize];
    let claim = target.store().claim(ChunkIndex(1)).unwrap();
    claim.write(0, &wrong).unwrap();
    claim
        .keep(stage_core::digest::chunk_digest(ChunkHash::Blake3, &wrong), None)
        .unwrap();
    bench.receive(&target, 0);
    assert!(matches!(
        target.publish(&bench.fin()),
        Err(PublishError::RootDiffers)
    ));
    assert!(!bench.file().exists());
    target
        .store()
        .disown(&ChunkSet::from_runs(2, std::iter::once(1..2)))
        .unwrap();
    assert!(matches!(
        target.publish(&bench.fin()),
        Err(PublishError::Failed(_))
    ));
    bench.receive_rest(&target);
    target.publish(&bench.fin()).unwrap();
    bench.assert_published();
}

#[test]
fn cancel_leaves_nothing_not_even_directories_that_it_made() {
    let mut bench = Bench::new(CHUNK);
    let stage_core::assignment::Place::Root { dir, .. } = &mut bench.spec.place else {
        unreachable!()
    };
    *dir = b"a/b/c".to_vec();
    fs::create_dir(bench.root.join("a")).unwrap();
    let target = bench.ready();
    assert!(bench.root.join("a/b/c").exists());
    // Made by the run before: a restarted agent still knows.
    drop(target);
    bench.ready().discard().unwrap();
    assert_eq!(Bench::names(&bench.root), ["a"]);
    assert_eq!(Bench::names(&bench.root.join("a")), [""; 0]);
    bench.assert_no_trace();

    // And one that was never prepared again.
    drop(bench.ready());
    discard_job(&bench.roots, &bench.state, bench.job).unwrap();
    assert_eq!(Bench::names(&bench.root.join("a")), [""; 0]);
    bench.assert_no_trace();

    // What others put into such a directory keeps it.
    let target = bench.ready();
    fs::write(bench.root.join("a/b/theirs"), "x").unwrap();
    target.discard().unwrap();
    assert_eq!(Bench::names(&bench.root.join("a/b")), ["theirs"]);
}

#[test]
fn a_journal_that_somebody_replaced_by_a_file_hides_no_partial() {
    let mut bench = Bench::new(CHUNK);
    let stage_core::assignment::Place::Root { dir, .. } = &mut bench.spec.place else {
        unreachable!()
    };
    *dir = b"a/b".to_vec();
    drop(bench.ready());
    let journal = bench.state.join("jobs").join(bench.job.to_string());
    let replace = || {
        fs::remove_dir_all(&journal).unwrap();
        fs::write(&journal, "not a directory").unwrap();
    };
    replace();
    assert_eq!(
        held_jobs(&bench.state),
        [(bench.job, 0)],
        "the coordinator is told"
    );
    discard_job(&bench.roots, &bench.state, bench.job).unwrap();
    assert_eq!(Bench::names(&bench.root.join("a/b")), [""; 0]);
    assert!(fs::symlink_metadata(&journal).is_err());

    // The job itself goes on, with a journal made anew.
    drop(bench.ready());
    replace();
    let target = bench.ready();
    bench.receive_rest(&target);
    target.publish(&bench.fin()).unwrap();
    assert_eq!(Bench::names(&bench.root.join("a/b")).len(), 1);
}

#[test]
fn cancel_after_publish_leaves_the_file() {
    let bench = Bench::new(5);
    let target = bench.ready();
    bench.receive_rest(&target);
    target.publish(&bench.fin()).unwrap();
    target.discard().unwrap();
    bench.assert_published();
    bench.assert_no_trace();
}

#[test]
fn unknown_jobs_go_when_they_are_old() {
    let bench = Bench::new(CHUNK);
    drop(bench.ready());
    let day = std::time::Duration::from_secs(24 * 3600);
    let known = [bench.job].into();
    let none = std::collections::BTreeSet::new();
    assert_eq!(sweep(&bench.roots, &bench.state, &none, day), []);
    let table = File::options().write(true).open(bench.table()).unwrap();
    table
        .set_modified(std::time::SystemTime::now() - 2 * day)
        .unwrap();
    assert_eq!(sweep(&bench.roots, &bench.state, &known, day), []);
    assert!(bench.partial().exists());
    assert_eq!(sweep(&bench.roots, &bench.state, &none, day), [bench.job]);
    bench.assert_no_trace();
}

#[test]
fn a_source_keeps_digests_but_no_bytes_and_no_trace() {
    let bench = Bench::new(2 * CHUNK + 1);
    bench.put(&bench.bytes);
    let make = || {
        let spec = SourceSpec {
            paths: vec![SourcePath {
                path: bench.file().as_os_str().as_bytes().to_vec(),
                name: b"genome.db".to_vec(),
            }],
            walk: Walk::default(),
            limit: None,
            expect: Vec::new(),
            cache: Default::default(),
        };
        let (_, _, files) = look(&spec, &Pulse::default()).unwrap().into_parts();
        Store::source(
            Arc::new(files),
            bench.manifest.clone(),
            Payload::of(&bench.manifest).unwrap(),
            ChunkHash::Blake3,
            bench.job,
            &bench.state,
            &bench.budget,
        )
        .unwrap()
    };
    let store = make();
    for index in 0..3 {
        let claim = store.claim(ChunkIndex(index)).unwrap();
        assert_eq!(claim.write(0, b"x").unwrap_err().code, Code::Internal);
        claim.keep(bench.digest(index), None).unwrap();
    }
    assert!(store.is_complete() && !store.wants_offers());
    assert_eq!(store.root().unwrap(), bench.fin().root);
    let mut read = vec![0; 10];
    store.read(ChunkIndex(1), 77, &mut read).unwrap();
    assert_eq!(read, bench.chunk(1)[77..87]);
    assert_eq!(
        store.read(ChunkIndex(2), 1, &mut [0]).unwrap_err().code,
        Code::Internal
    );
    assert_eq!(Bench::names(&bench.state.join("jobs")), [""; 0]);
    assert!(make().have().is_empty(), "a source is read again");
}

#[test]
fn a_chunk_that_cannot_be_read_back_is_not_here() {
    let bench = Bench::new(2 * CHUNK);
    let target = bench.ready();
    bench.receive_rest(&target);
    File::options()
        .write(true)
        .open(bench.partial())
        .unwrap()
        .set_len(CHUNK)
        .unwrap();
    let mut bytes = vec![0; CHUNK as usize];
    assert_eq!(
        target
            .store()
            .read(ChunkIndex(1), 0, &mut bytes)
            .unwrap_err()
            .code,
        Code::Io
    );
    assert!(target.store().has(ChunkIndex(0)) && !target.store().has(ChunkIndex(1)));
    bench.receive(&target, 1);
    target.publish(&bench.fin()).unwrap();
    bench.assert_published();
}

#[test]
fn a_partial_that_somebody_removed_is_not_published() {
    let bench = Bench::new(CHUNK);
    let target = bench.ready();
    bench.receive_rest(&target);
    fs::remove_file(bench.partial()).unwrap();
    let Err(PublishError::Failed(failure)) = target.publish(&bench.fin()) else {
        panic!("it must fail")
    };
    assert_eq!(failure.code, Code::Io);
    assert!(!bench.file().exists());
    drop(target);
    // The next run begins anew: its partial is another file.
    let target = bench.ready();
    assert!(target.store().have().is_empty());
    assert_eq!(bench.receive_rest(&target), 1);
    target.publish(&bench.fin()).unwrap();
    bench.assert_published();
}

#[test]
fn a_stranger_at_the_partials_name_is_not_written_through() {
    let bench = Bench::new(CHUNK);
    fs::create_dir_all(bench.dir()).unwrap();
    let theirs = bench.root.join("theirs");
    fs::write(&theirs, "precious").unwrap();
    for link in [true, false] {
        if link {
            std::os::unix::fs::symlink(&theirs, bench.partial()).unwrap();
        } else {
            fs::hard_link(&theirs, bench.partial()).unwrap();
        }
        let target = bench.ready();
        bench.receive_rest(&target);
        let mut byte = [0];
        File::open(bench.partial())
            .unwrap()
            .read_at(&mut byte, 0)
            .unwrap();
        assert_eq!(byte[0], bench.bytes[0]);
        target.discard().unwrap();
        assert_eq!(fs::read(&theirs).unwrap(), b"precious");
        fs::create_dir_all(bench.dir()).unwrap();
    }
}
