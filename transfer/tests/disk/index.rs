//! What was published is in the index, what became of it is seen, and nothing else is ever removed.

use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use stage_core::ask::{Copy, Removal, Removed, State};
use stage_core::assignment::{IfExists, Place};
use stage_core::chunk::{CHUNK, ChunkIndex};
use stage_core::digest::FileDigest;
use stage_core::failure::{Code, Failure};
use stage_core::id::JobId;
use stage_core::manifest::Manifest;
use stage_core::units::ByteCount;
use stage_transfer::index::{Entry, Index};

use crate::bench::Bench;

/// Publishes the bench's payload and ends the job.
fn publish(bench: &Bench) -> Index {
    let index = Index::open(&bench.state);
    let target = bench.ready();
    bench.receive_rest(&target);
    target.publish(&bench.fin()).unwrap();
    target.note(&index, &bench.fin()).unwrap();
    index
        .settle(&bench.state, bench.job, Some(FileDigest([5; 32])))
        .unwrap();
    target.release();
    index
}

fn only(index: &Index) -> Entry {
    let mut entries = index.entries();
    assert_eq!(entries.len(), 1);
    entries.remove(0)
}

fn look(bench: &Bench, index: &Index) -> (State, String) {
    index.look(&bench.roots, &only(index))
}

fn verify(bench: &Bench, index: &Index) -> (State, String) {
    index.verify(&bench.roots, &only(index), &mut |_| true).unwrap()
}

fn shown(index: &Index) -> Copy {
    only(index).show(State::Ok, String::new())
}

/// Returns once the file system's clock has gone on since the copy was touched last, so that the next touch has a time
/// of its own.
fn tick(bench: &Bench) {
    let probe = bench.state.join("probe");
    let meta = fs::metadata(bench.file()).unwrap();
    let touched = (meta.ctime(), meta.ctime_nsec());
    loop {
        fs::write(&probe, "").unwrap();
        let meta = fs::metadata(&probe).unwrap();
        if (meta.mtime(), meta.mtime_nsec()) > touched {
            return;
        }
    }
}

fn removal(bench: &Bench) -> Removal {
    Removal {
        place: bench.spec.place.clone(),
        name: b"genome.db".to_vec(),
        force: false,
    }
}

fn remove(bench: &Bench, index: &Index, removal: &Removal) -> Result<Removed, Failure> {
    index.remove(&bench.roots, &bench.state, removal, |_| true)
}

#[test]
fn what_is_published_is_known_for_good() {
    for size in [0, 7, 3 * CHUNK + 9] {
        let bench = Bench::new(size);
        let before = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        publish(&bench);
        // Another start.
        let index = Index::open(&bench.state);
        let copy = shown(&index);
        assert_eq!(copy.path, bench.file().to_str().unwrap());
        assert_eq!((copy.bytes.0, copy.root), (size, bench.fin().root));
        assert_eq!((copy.sha256, copy.job), (Some(FileDigest([5; 32])), bench.job));
        assert!(!copy.found && copy.published >= before.as_secs());
        assert_eq!(look(&bench, &index), (State::Ok, String::new()));
        let mut hashed = 0;
        let verified = index.verify(&bench.roots, &only(&index), &mut |bytes| {
            hashed += bytes;
            true
        });
        assert_eq!((verified.unwrap().0, hashed), (State::Ok, size));
        bench.assert_published();
        bench.assert_no_trace();
        assert_eq!(
            index.find(bench.file().to_str().unwrap().as_bytes()),
            Some(only(&index))
        );
        assert_eq!(index.find(b"/elsewhere"), None);
    }
}

#[test]
fn drift_is_seen() {
    let bench = Bench::new(3 * CHUNK + 9);
    let index = publish(&bench);
    let file = bench.file();
    let kept = bench.root.join("kept");

    tick(&bench);
    // Only touched: nobody knows, until it is hashed.
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    let (state, why) = look(&bench, &index);
    assert_eq!(state, State::Changed);
    assert!(why.contains("mode"), "{why}");
    assert_eq!(verify(&bench, &index).0, State::Ok);
    assert_eq!(look(&bench, &index).0, State::Ok, "that is how it looks now");

    tick(&bench);
    // A flipped bit under the old time.
    fs::copy(&file, &kept).unwrap();
    let time = fs::metadata(&file).unwrap().modified().unwrap();
    let open = fs::File::options().write(true).open(&file).unwrap();
    open.write_all_at(&[bench.bytes[2 << 20] ^ 1], 2 << 20).unwrap();
    open.set_modified(time).unwrap();
    assert_eq!(look(&bench, &index).0, State::Changed);
    let (state, why) = verify(&bench, &index);
    assert_eq!((state, why.as_str()), (State::Damaged, "chunk 2 of 4 differs"));
    assert_eq!(
        look(&bench, &index),
        (state, why),
        "that is known until it is touched"
    );
    tick(&bench);
    open.write_all_at(&[bench.bytes[9] ^ 1], 9).unwrap();
    let (_, why) = verify(&bench, &index);
    assert_eq!(why, "2 of 4 chunks differ, the first is chunk 0");

    tick(&bench);
    // Another length, another file, another kind, nothing.
    open.set_len(5).unwrap();
    assert!(look(&bench, &index).1.contains("written"));
    let (state, why) = verify(&bench, &index);
    assert_eq!(state, State::Damaged);
    assert!(why.contains("5 bytes"), "{why}");
    fs::rename(&kept, &file).unwrap();
    assert_eq!(
        look(&bench, &index),
        (State::Changed, "another file lies there".to_owned())
    );
    assert_eq!(verify(&bench, &index).0, State::Ok, "with the same content");
    fs::remove_file(&file).unwrap();
    symlink("/etc/passwd", &file).unwrap();
    for state in [look(&bench, &index), verify(&bench, &index)] {
        assert_eq!(state, (State::Changed, "a symbolic link lies there".to_owned()));
    }
    fs::remove_file(&file).unwrap();
    assert_eq!(look(&bench, &index), (State::Missing, String::new()));
    fs::remove_dir(bench.dir()).unwrap();
    for state in [look(&bench, &index), verify(&bench, &index)] {
        assert_eq!(state.0, State::Missing);
    }
    fs::remove_dir(&bench.root).unwrap();
    assert_eq!(
        look(&bench, &index).0,
        State::Unreadable,
        "the root itself is gone"
    );
}

#[test]
fn a_forged_time_is_no_alibi() {
    let bench = Bench::new(CHUNK);
    let index = publish(&bench);
    let (seconds, nanos) = (
        bench.manifest.entries[0].mtime.0,
        bench.manifest.entries[0].mtime.1,
    );
    let forged = SystemTime::UNIX_EPOCH + Duration::new(seconds as u64, nanos);
    tick(&bench);
    fs::write(bench.file(), vec![0; CHUNK as usize]).unwrap();
    fs::File::open(bench.file())
        .unwrap()
        .set_modified(forged)
        .unwrap();
    assert_eq!(look(&bench, &index).0, State::Changed, "the change time tells");
    assert_eq!(verify(&bench, &index).0, State::Damaged);
}

#[test]
fn holes_are_part_of_what_was_published() {
    let mut bench = Bench::new(2 * CHUNK);
    let runs = [0..CHUNK, 5 * CHUNK..6 * CHUNK];
    bench.manifest =
        Manifest::single_sparse_file(b"genome.db", ByteCount(9 * CHUNK), runs.to_vec(), 0o644, (1, 2));
    let index = publish(&bench);
    assert_eq!(shown(&index).bytes, ByteCount(9 * CHUNK));
    assert_eq!(verify(&bench, &index).0, State::Ok);
    let open = fs::File::options().write(true).open(bench.file()).unwrap();
    open.write_all_at(b"x", 8 * CHUNK).unwrap();
    let (state, why) = verify(&bench, &index);
    assert_eq!(state, State::Damaged);
    assert!(why.contains("holes"), "{why}");
}

#[test]
fn what_is_damaged_in_the_index_is_not_believed() {
    let bench = Bench::new(3 * CHUNK);
    let index = publish(&bench);
    let place = bench
        .state
        .join("index")
        .join(&Bench::names(&bench.state.join("index"))[0]);
    let table = place.join(format!("{}.table", bench.job));
    let mut torn = fs::read(&table).unwrap();

    // A digest that is gone: the root still tells that something differs, and that nothing does.
    let slots = torn.len() - 3 * 36;
    torn[slots + 36..slots + 72].fill(0);
    fs::write(&table, &torn).unwrap();
    assert_eq!(verify(&bench, &index).0, State::Ok);
    let open = fs::File::options().write(true).open(bench.file()).unwrap();
    open.write_all_at(&[bench.bytes[CHUNK as usize] ^ 1], CHUNK)
        .unwrap();
    let (state, why) = verify(&bench, &index);
    assert_eq!(state, State::Damaged);
    assert!(why.contains("root"), "{why}");
    // A wrong one that fits its checksum cannot be made by accident; a flipped one reads as gone.
    torn[slots] ^= 1;
    fs::write(&table, &torn).unwrap();
    open.write_all_at(&[bench.bytes[CHUNK as usize]], CHUNK).unwrap();
    assert_eq!(verify(&bench, &index).0, State::Ok);

    // What it should be is lost: nobody says ok.
    fs::remove_file(&table).unwrap();
    assert_eq!(verify(&bench, &index).0, State::Unreadable);

    // An entry that is damaged goes, whole.
    let entry = place.join("entry");
    let mut bytes = fs::read(&entry).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&entry, bytes).unwrap();
    assert!(index.entries().is_empty());
    assert!(!place.exists());
    bench.assert_published();
}

#[test]
fn a_newer_copy_takes_the_place_of_an_older_one() {
    let mut bench = Bench::new(3 * CHUNK).rule(IfExists::Replace);
    let index = publish(&bench);
    bench.job = JobId::from_random([8; 16]);
    bench.bytes[7] ^= 1;
    publish(&bench);
    assert_eq!(
        (shown(&index).job, shown(&index).root),
        (bench.job, bench.fin().root)
    );
    assert_eq!(verify(&bench, &index).0, State::Ok);
    let place = bench
        .state
        .join("index")
        .join(&Bench::names(&bench.state.join("index"))[0]);
    let job = bench.job;
    assert_eq!(Bench::names(&place), [format!("{job}.table"), "entry".to_owned()]);
    // An order of the older job that comes late changes nothing.
    index
        .settle(
            &bench.state,
            JobId::from_random([7; 16]),
            Some(FileDigest([1; 32])),
        )
        .unwrap();
    assert_eq!(shown(&index).sha256, Some(FileDigest([5; 32])));
}

#[test]
fn who_was_there_first_is_remembered() {
    let again = |bench: &mut Bench, job: u8| {
        bench.job = JobId::from_random([job; 16]);
        let index = Index::open(&bench.state);
        let target = bench.ready();
        for chunk in 0..bench.count() {
            target
                .store()
                .compare(ChunkIndex(chunk), bench.digest(chunk))
                .unwrap();
        }
        assert!(target.publish(&bench.fin()).unwrap().already);
        target.note(&index, &bench.fin()).unwrap();
        index.settle(&bench.state, bench.job, None).unwrap();
        target.release();
    };
    let mut bench = Bench::new(2 * CHUNK);
    let index = publish(&bench);
    let first = shown(&index);
    again(&mut bench, 8);
    let found = shown(&index);
    assert_eq!(
        (found.found, found.published, found.sha256),
        (false, first.published, first.sha256)
    );
    assert_eq!(found.job, bench.job);
    assert_eq!(verify(&bench, &index).0, State::Ok);

    let mut bench = Bench::new(2 * CHUNK);
    bench.put(&bench.bytes);
    let index = Index::open(&bench.state);
    for job in [8, 9] {
        again(&mut bench, job);
        assert!(shown(&index).found);
        assert_eq!(verify(&bench, &index).0, State::Ok);
    }
    let failure = remove(&bench, &index, &removal(&bench)).unwrap_err();
    assert!(failure.hint.contains("--force"), "{}", failure.hint);
    bench.assert_published();
}

#[test]
fn a_verification_can_be_ended() {
    let bench = Bench::new(5 * CHUNK);
    let index = publish(&bench);
    let mut chunks = 0;
    let ended = index.verify(&bench.roots, &only(&index), &mut |_| {
        chunks += 1;
        chunks < 2
    });
    assert_eq!((ended, chunks), (None, 2));
}

#[test]
fn what_stage_published_can_be_removed() {
    let bench = Bench::new(2 * CHUNK);
    let index = publish(&bench);
    let reader = fs::File::open(bench.file()).unwrap();
    let absolute = Removal {
        place: Place::Absolute(bench.dir().to_str().unwrap().into()),
        ..removal(&bench)
    };
    let removed = remove(&bench, &index, &absolute).unwrap();
    assert!(removed.was_there);
    assert_eq!(removed.path, bench.file().to_str().unwrap());
    assert_eq!(removed.bytes.0, 2 * CHUNK);
    assert_eq!(Bench::names(&bench.dir()), [""; 0]);
    assert!(index.entries().is_empty());
    assert_eq!(Bench::names(&bench.state.join("index")), [""; 0]);
    let mut byte = [0];
    reader.read_exact_at(&mut byte, CHUNK).unwrap();
    assert_eq!(byte[0], bench.bytes[CHUNK as usize], "who has it open keeps it");
    // Again, and where its directory is gone: no error.
    assert!(!remove(&bench, &index, &absolute).unwrap().was_there);
    fs::remove_dir(bench.dir()).unwrap();
    assert!(!remove(&bench, &index, &removal(&bench)).unwrap().was_there);
    assert!(!bench.dir().exists(), "a removal makes nothing");
}

#[test]
fn a_copy_that_is_gone_already_leaves_the_index() {
    let bench = Bench::new(7);
    let index = publish(&bench);
    fs::remove_file(bench.file()).unwrap();
    assert!(!remove(&bench, &index, &removal(&bench)).unwrap().was_there);
    assert!(index.entries().is_empty());
}

#[test]
fn what_is_about_to_come_is_not_called_gone() {
    let bench = Bench::new(7);
    let target = bench.ready();
    target.begin().unwrap();
    let index = Index::open(&bench.state);
    let failure = remove(&bench, &index, &removal(&bench)).unwrap_err();
    assert_eq!(failure.code, Code::Exists, "{failure}");
    assert!(failure.message.contains("is being written by job"), "{failure}");
    target.discard().unwrap();
    assert!(!remove(&bench, &index, &removal(&bench)).unwrap().was_there);
}

#[test]
fn nothing_else_is_removed() {
    let bench = Bench::new(2 * CHUNK);
    let index = publish(&bench);
    let mut force = removal(&bench);
    force.force = true;
    let refused = |removal: &Removal, code: Code| {
        let failure = remove(&bench, &index, removal).unwrap_err();
        assert_eq!(failure.code, code, "{failure}");
        failure.to_string()
    };

    // Somebody else's.
    fs::write(bench.dir().join("theirs"), "x").unwrap();
    let theirs = Removal {
        name: b"theirs".to_vec(),
        ..force.clone()
    };
    assert!(refused(&theirs, Code::Exists).contains("not published by stage"));
    assert_eq!(fs::read(bench.dir().join("theirs")).unwrap(), b"x");

    // Outside, or a name of stage's own.
    for (place, name) in [
        (Place::Absolute(b"/etc".to_vec()), &b"passwd"[..]),
        (bench.spec.place.clone(), b".."),
        (bench.spec.place.clone(), b"../root/db/genome.db"),
        (bench.spec.place.clone(), b".stage-x"),
    ] {
        let removal = Removal {
            place,
            name: name.to_vec(),
            force: true,
        };
        refused(&removal, Code::OutsideRoot);
    }
    bench_is_whole(&bench);

    // Written to since.
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_500_000_000);
    fs::File::open(bench.file()).unwrap().set_modified(time).unwrap();
    let why = refused(&removal(&bench), Code::Exists);
    assert!(why.contains("changed since"), "{why}");
    bench_is_whole(&bench);

    // Of another kind: not even by force.
    let aside = bench.root.join("aside");
    fs::rename(bench.file(), &aside).unwrap();
    fs::create_dir(bench.file()).unwrap();
    refused(&force, Code::WrongKind);
    fs::remove_dir(bench.file()).unwrap();
    symlink(&aside, bench.file()).unwrap();
    refused(&force, Code::WrongKind);
    assert!(aside.exists());
    fs::remove_file(bench.file()).unwrap();
    fs::rename(&aside, bench.file()).unwrap();

    assert!(remove(&bench, &index, &force).unwrap().was_there);
    assert_eq!(Bench::names(&bench.dir()), ["theirs"]);
}

fn bench_is_whole(bench: &Bench) {
    assert!(fs::read(bench.file()).unwrap() == bench.bytes);
}

#[test]
fn what_a_job_writes_is_left_to_it() {
    let mut bench = Bench::new(2 * CHUNK).rule(IfExists::Replace);
    let index = publish(&bench);
    bench.job = JobId::from_random([8; 16]);
    bench.bytes[7] ^= 1;
    let target = bench.ready();
    let inode = fs::metadata(bench.file()).unwrap().ino();
    let mut force = removal(&bench);
    force.force = true;
    let failure = remove(&bench, &index, &force).unwrap_err();
    assert!(failure.hint.contains(&bench.job.to_string()), "{}", failure.hint);
    assert_eq!(fs::metadata(bench.file()).unwrap().ino(), inode);
    // What a dead job left is in nobody's way.
    let removed = index
        .remove(&bench.roots, &bench.state, &force, |_| false)
        .unwrap();
    assert!(removed.was_there && !bench.file().exists());
    bench.receive_rest(&target);
    target.publish(&bench.fin()).unwrap();
    bench.assert_published();
}

#[test]
fn what_is_long_gone_is_forgotten() {
    let bench = Bench::new(7);
    let index = publish(&bench);
    let aside = bench.root.join("aside");
    let day = Duration::from_secs(24 * 3600);
    index.sweep(&bench.roots, Duration::ZERO);
    fs::rename(bench.file(), &aside).unwrap();
    index.sweep(&bench.roots, day);
    index.sweep(&bench.roots, day);
    assert_eq!(look(&bench, &index).0, State::Missing, "not for long");
    fs::rename(&aside, bench.file()).unwrap();
    index.sweep(&bench.roots, day);
    fs::remove_file(bench.file()).unwrap();
    index.sweep(&bench.roots, Duration::ZERO);
    assert_eq!(index.entries().len(), 1, "it is missing since now only");
    index.sweep(&bench.roots, Duration::ZERO);
    assert!(index.entries().is_empty());
}

const DIR: &str = "STAGE_TEST_INDEX_DIR";

/// Not a test of its own: the removal that is cut short.
#[test]
#[ignore = "run by the test below as a child"]
fn child() {
    let Some(dir) = std::env::var_os(DIR) else {
        return;
    };
    let bench = Bench::within(dir.as_ref(), 7);
    remove(&bench, &publish(&bench), &removal(&bench)).unwrap();
}

/// The directory of the one entry is named by its path.
fn id_of(bench: &Bench) -> String {
    Bench::names(&bench.state.join("index")).remove(0)
}

#[test]
fn a_removal_that_was_cut_short_is_ended() {
    for (point, is_there) in [
        ("before_away", true),
        ("after_away", false),
        ("after_unlink", false),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let bench = Bench::within(dir.path(), 7);
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "index::child", "--quiet"])
            .env("STAGE_CRASH_AT", point)
            .env(DIR, dir.path())
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.signal(), Some(9), "{point}: the child was to be killed");
        let index = Index::open(&bench.state);
        if point == "after_away" {
            // Meanwhile somebody else's file came under the name: it is theirs.
            bench.put(b"theirs");
        }
        if point == "before_away" {
            // And had it been another file that was caught, it would get its name back.
            let away = format!(".stage-gone-{}", &id_of(&bench)[..16]);
            fs::rename(bench.file(), bench.dir().join("aside")).unwrap();
            bench.put(b"theirs");
            fs::rename(bench.file(), bench.dir().join(&away)).unwrap();
            index.recover(&bench.roots);
            assert_eq!(fs::read(bench.file()).unwrap(), b"theirs");
            fs::rename(bench.dir().join("aside"), bench.file()).unwrap();
            assert_eq!(verify(&bench, &index).0, State::Ok);
        }
        index.recover(&bench.roots);
        match point {
            "before_away" => assert_eq!(look(&bench, &index).0, State::Ok),
            _ => assert!(index.entries().is_empty(), "{point}"),
        }
        assert_eq!(
            fs::read(bench.file()).is_ok_and(|bytes| bytes == bench.bytes),
            is_there
        );
        if point == "after_away" {
            assert_eq!(fs::read(bench.file()).unwrap(), b"theirs");
        } else {
            assert_eq!(Bench::names(&bench.dir()).len(), usize::from(is_there), "{point}");
        }
        index.recover(&bench.roots);
    }
}
