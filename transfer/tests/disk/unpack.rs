//! A tar that is published as what it holds.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use rustix::mount::{MountFlags, mount_remount};
use stage_core::ask::{Copy, Kind, Removal, State};
use stage_core::assignment::IfExists;
use stage_core::chunk::CHUNK;
use stage_core::digest::FileDigest;
use stage_core::failure::Code;
use stage_core::id::JobId;
use stage_core::manifest::Manifest;
use stage_core::units::ByteCount;
use stage_transfer::index::Index;
use stage_transfer::root::Roots;
use stage_transfer::target::{Preparation, Publication, PublishError, Target};
use tar::{Builder, EntryType, Header};

use crate::bench::{Bench, MODE, MTIME, content};
use crate::places::Tmpfs;

fn entry(kind: EntryType, path: &str, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    // Past the builder's own checks: what a stranger's tar may say.
    header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
    header.set_mode(mode);
    header.set_mtime(1_500_000_000);
    header.set_size(size);
    header
}

fn add(tar: &mut Builder<Vec<u8>>, mut header: Header, link: &str, bytes: &[u8]) {
    if !link.is_empty() {
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
    }
    header.set_cksum();
    tar.append(&header, bytes).unwrap();
}

/// A directory with a file longer than a chunk, one of a few bytes, a hard and a symbolic link.
fn good() -> Vec<u8> {
    let long = content(CHUNK + 12_345);
    let mut tar = Builder::new(Vec::new());
    add(&mut tar, entry(EntryType::Directory, "refdb/", 0o750, 0), "", b"");
    add(
        &mut tar,
        entry(EntryType::Regular, "refdb/sub/long", 0o4640, long.len() as u64),
        "",
        &long,
    );
    add(
        &mut tar,
        entry(EntryType::Regular, "refdb/short", 0o400, 5),
        "",
        b"hello",
    );
    add(
        &mut tar,
        entry(EntryType::Link, "refdb/same", 0o400, 0),
        "refdb/short",
        b"",
    );
    add(
        &mut tar,
        entry(EntryType::Symlink, "refdb/link", 0o777, 0),
        "../elsewhere",
        b"",
    );
    tar.into_inner().unwrap()
}

fn bench(bytes: Vec<u8>) -> Bench {
    let mut bench = Bench::new(0);
    bench.manifest = Manifest::single_file(b"genome.db", ByteCount(bytes.len() as u64), MODE, MTIME);
    bench.bytes = bytes;
    bench.spec.unpack = true;
    bench
}

fn begun(bench: &Bench) -> Target {
    let target = bench.ready();
    target.begin().unwrap();
    target
}

fn assert_laid_out(dir: &Path) {
    let link = fs::read_link(dir).unwrap();
    assert!(link.starts_with(".stage"), "{link:?}");
    assert_eq!(Bench::names(dir), ["link", "same", "short", "sub"]);
    assert_eq!(fs::read(dir.join("short")).unwrap(), b"hello");
    assert!(fs::read(dir.join("sub/long")).unwrap() == content(CHUNK + 12_345));
    let of = |name: &str| fs::symlink_metadata(dir.join(name)).unwrap();
    assert_eq!(of("sub/long").permissions().mode() & 0o7777, 0o640);
    assert_eq!(of("short").mtime(), 1_500_000_000);
    assert_eq!(of("short").ino(), of("same").ino());
    assert_eq!(
        fs::read_link(dir.join("link")).unwrap(),
        Path::new("../elsewhere")
    );
    assert_eq!(fs::metadata(dir).unwrap().permissions().mode() & 0o7777, 0o750);
    assert_eq!(fs::metadata(dir).unwrap().mtime(), 1_500_000_000);
}

#[test]
fn a_tar_becomes_a_tree_whatever_packs_it_and_in_whatever_order_it_comes() {
    let gzip = |bytes: &[u8]| {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(bytes).unwrap();
        packed.finish().unwrap()
    };
    for bytes in [good(), gzip(&good()), zstd::encode_all(&good()[..], 1).unwrap()] {
        let bench = bench(bytes);
        let target = begun(&bench);
        for index in (0..bench.count()).rev() {
            bench.receive(&target, index);
        }
        let published = target.publish(&bench.fin()).unwrap();
        assert!(published.path.ends_with("/genome.db") && !published.already);
        assert_laid_out(&bench.file());
        target.release();
        assert_eq!(Bench::names(&bench.dir()), [".stage", "genome.db"]);
    }
}

#[test]
fn what_no_tree_can_hold_is_refused_and_nothing_is_left() {
    let tar = |fill: &dyn Fn(&mut Builder<Vec<u8>>)| {
        let mut tar = Builder::new(Vec::new());
        fill(&mut tar);
        tar.into_inner().unwrap()
    };
    let file = |tar: &mut Builder<Vec<u8>>, path: &str| {
        add(tar, entry(EntryType::Regular, path, 0o644, 1), "", b"x");
    };
    let outside = tempfile::tempdir().unwrap();
    let cases = [
        tar(&|tar| file(tar, "../out")),
        tar(&|tar| file(tar, "/tmp/out")),
        tar(&|tar| {
            let to = outside.path().to_str().unwrap();
            add(tar, entry(EntryType::Symlink, "a", 0o777, 0), to, b"");
            file(tar, "a/out");
        }),
        tar(&|tar| {
            add(
                tar,
                entry(EntryType::Link, "a", 0o644, 0),
                "../../etc/hostname",
                b"",
            );
        }),
        tar(&|tar| add(tar, entry(EntryType::Char, "null", 0o644, 0), "", b"")),
        b"this is no tar at all".repeat(100),
        b"\x1b[31mnor is \\ this\n".repeat(100),
        // Cut off between two entries.
        tar(&|tar| file(tar, "a"))[..1024].to_vec(),
        tar(&|tar| add(tar, entry(EntryType::Link, "a", 0o644, 0), "later", b"")),
        // A file with holes, as pax has them.
        tar(&|tar| {
            let told = [("GNU.sparse.major", b"1".as_slice()), ("GNU.sparse.minor", b"0")];
            tar.append_pax_extensions(told).unwrap();
            file(tar, "GNUSparseFile.1/a");
        }),
        // A name that no memory should hold.
        tar(&|tar| {
            let name = vec![b'n'; 17 << 20];
            add(
                tar,
                entry(EntryType::GNULongName, "long", 0, name.len() as u64),
                "",
                &name,
            );
            file(tar, "a");
        }),
        good()[..CHUNK as usize / 2].to_vec(),
    ];
    for bytes in cases {
        let bench = bench(bytes);
        let target = begun(&bench);
        bench.receive_rest(&target);
        let Err(PublishError::Failed(failure)) = target.publish(&bench.fin()) else {
            panic!("nothing of this may be published")
        };
        assert_eq!(failure.code, Code::SourceKind, "{failure}");
        assert!(!failure.message.chars().any(char::is_control), "{failure}");
        target.discard().unwrap();
        assert_eq!(Bench::names(&bench.root), [""; 0]);
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    }
}

#[test]
fn what_cannot_be_unpacked_is_called_by_its_name() {
    let typed = |kind: u8| {
        let mut tar = Builder::new(Vec::new());
        add(&mut tar, entry(EntryType::new(kind), "odd", 0o644, 0), "", b"");
        tar.into_inner().unwrap()
    };
    let then = |magic: &[u8]| [magic, &[7; 2000]].concat();
    for (bytes, words) in [
        (
            then(b"\xfd7zXZ\0"),
            "packed by xz, which is not read: use gzip, zstd",
        ),
        (then(b"BZh91AY&SY"), "packed by bzip2"),
        (then(b"PK\x03\x04"), "packed by zip"),
        (typed(b'3'), "a character device: odd"),
        (typed(b'6'), "a FIFO: odd"),
        (typed(b'M'), "another volume"),
        (typed(b'D'), "incremental"),
        (typed(b'\x1b'), "type '\\x1b', which is not known: odd"),
    ] {
        let bench = bench(bytes);
        let target = begun(&bench);
        bench.receive_rest(&target);
        let Err(PublishError::Failed(failure)) = target.publish(&bench.fin()) else {
            panic!("nothing of this may be published")
        };
        assert_eq!(failure.code, Code::SourceKind);
        assert!(failure.message.contains(words), "{failure}");
    }
}

#[test]
fn what_a_tar_says_of_itself_is_no_part_of_the_tree() {
    let mut tar = Builder::new(Vec::new());
    add(&mut tar, entry(EntryType::new(b'V'), "a label", 0, 0), "", b"");
    let comment = b"26 comment=0123456789abcd\n";
    let global = entry(
        EntryType::XGlobalHeader,
        "pax_global_header",
        0,
        comment.len() as u64,
    );
    add(&mut tar, global, "", comment);
    let mut bytes = tar.into_inner().unwrap();
    // Without the mark of its end.
    bytes.truncate(bytes.len() - 1024);
    bytes.extend(good());
    let bench = bench(bytes);
    let target = begun(&bench);
    bench.receive_rest(&target);
    target.publish(&bench.fin()).unwrap();
    assert_laid_out(&bench.file());
}

/// Another push to where the first one went.
fn again(first: &Bench, bytes: Vec<u8>, rule: IfExists, job: u8) -> Bench {
    let mut bench = bench(bytes);
    bench.root.clone_from(&first.root);
    bench.state.clone_from(&first.state);
    bench.roots = Roots::open(vec![("scratch".parse().unwrap(), first.root.clone())]);
    bench.job = JobId::from_random([job; 16]);
    bench.spec.if_exists = rule;
    bench
}

/// The whole push to its end, and what the index knows of it.
fn push(bench: &Bench) -> (Publication, Index) {
    let target = begun(bench);
    bench.receive_rest(&target);
    let published = target.publish(&bench.fin()).unwrap();
    let index = Index::open(&bench.state);
    target.note(&index, &bench.fin()).unwrap();
    let sha256 = Some(FileDigest([5; 32]));
    index.settle(&bench.state, bench.job, sha256).unwrap();
    target.release();
    (published, index)
}

fn other() -> Vec<u8> {
    let mut tar = Builder::new(Vec::new());
    add(
        &mut tar,
        entry(EntryType::Regular, "refdb/short", 0o400, 5),
        "",
        b"world",
    );
    tar.into_inner().unwrap()
}

#[test]
fn rules_hold_and_what_is_the_same_is_already_there() {
    let first = bench(good());
    assert!(!push(&first).0.already);
    let link = || fs::read_link(first.file()).unwrap();
    let before = link();

    for (rule, job) in [(IfExists::Fail, 11), (IfExists::Replace, 12)] {
        let same = again(&first, zstd::encode_all(&good()[..], 1).unwrap(), rule, job);
        assert!(same.ready().is_candidate());
        assert!(push(&same).0.already, "{rule:?}");
        assert_eq!(link(), before);
        assert_eq!(Bench::names(&first.dir()), [".stage", "genome.db"]);
    }
    let different = again(&first, other(), IfExists::Fail, 13);
    let target = begun(&different);
    different.receive_rest(&target);
    match target.publish(&different.fin()) {
        Err(PublishError::Unfit(failure)) => assert_eq!(failure.code, Code::Exists),
        published => panic!("{published:?}"),
    }
    target.discard().unwrap();
    let left = again(&first, other(), IfExists::Skip, 14);
    assert!(matches!(left.prepare().unwrap(), Preparation::Skipped { .. }));
    assert_eq!(link(), before);
    assert_laid_out(&first.file());

    assert!(!push(&again(&first, other(), IfExists::Replace, 15)).0.already);
    assert_ne!(link(), before);
    assert_eq!(fs::read(first.file().join("short")).unwrap(), b"world");
    assert_eq!(Bench::names(&first.file()), ["short"]);
}

/// The index's one entry, looked at and verified.
fn states(bench: &Bench, index: &Index) -> (Copy, [(State, String); 2]) {
    let entries = index.entries();
    let [entry] = entries.as_slice() else {
        panic!("{entries:?}")
    };
    let seen = index.look(&bench.roots, entry);
    let verified = index.verify(&bench.roots, entry, &mut |_| true).unwrap();
    (entry.show(State::Ok, String::new()), [seen, verified])
}

#[test]
fn an_unpacked_tree_is_in_the_index_like_any_other() {
    let ok = || [(State::Ok, String::new()), (State::Ok, String::new())];
    let bench = bench(good());
    let (_, index) = push(&bench);
    let (copy, found) = states(&bench, &index);
    assert_eq!(found, ok());
    assert_eq!(
        (copy.place.as_str(), copy.kind, copy.unpacked),
        ("scratch:db/genome.db", Kind::Tree, true)
    );
    assert_eq!(copy.root, bench.fin().root, "people know it by the tar's digests");
    assert_ne!(copy.content, copy.root, "and it is the tree that it is");
    assert_eq!(copy.sha256, Some(FileDigest([5; 32])));
    assert_eq!(copy.bytes, ByteCount(CHUNK + 12_345 + 5));
    // Of an agent that starts again after the rename: what it wrote before, it reads.
    let later = again(&bench, other(), IfExists::Replace, 2);
    let target = begun(&later);
    later.receive_rest(&target);
    target.publish(&later.fin()).unwrap();
    drop(target);
    let target = begun(&later);
    let published = target.publish(&later.fin()).unwrap();
    assert!(!published.already);
    target.note(&index, &later.fin()).unwrap();
    target.release();
    assert_eq!(states(&bench, &index).1, ok());
    let (_, index) = push(&again(&bench, good(), IfExists::Replace, 3));
    assert_eq!(states(&bench, &index).1, ok());

    // Damage is found in the file and the chunk; what was changed is not removed, unless it is forced.
    let file = fs::File::options()
        .write(true)
        .open(bench.file().join("sub/long"))
        .unwrap();
    file.write_all_at(b"damage", 17).unwrap();
    drop(file);
    let [(seen, _), (verified, detail)] = states(&bench, &index).1;
    assert_eq!((seen, verified), (State::Ok, State::Damaged), "{detail}");
    assert_eq!(detail, "chunk 0 of 2 (in genome.db/sub/long) differs");
    let mut removal = Removal {
        place: bench.spec.place.clone(),
        name: b"genome.db".to_vec(),
        force: false,
    };
    let remove = |removal: &Removal| index.remove(&bench.roots, &bench.state, removal, |_| false);
    assert_eq!(remove(&removal).unwrap_err().code, Code::Exists);
    removal.force = true;
    assert!(remove(&removal).unwrap().was_there);
    assert!(index.entries().is_empty());
    assert!(fs::symlink_metadata(bench.file()).is_err());
}

/// Room for what a tar holds is asked for before it comes, as far as that can be known; and what is too large all the same is
/// said with numbers.
#[test]
fn too_little_space_for_what_a_tar_holds_is_said_with_numbers() {
    let large = |size: u64| {
        let mut tar = Builder::new(Vec::new());
        add(
            &mut tar,
            entry(EntryType::Regular, "refdb/a", 0o644, size),
            "",
            &vec![7; size as usize],
        );
        tar.into_inner().unwrap()
    };
    let plain = bench(large(3 * CHUNK));
    {
        let Some(_tmpfs) = Tmpfs::mount(&plain.root, "size=5m") else {
            return;
        };
        let failure = plain.unfit();
        assert_eq!(failure.code, Code::NoSpace);
        let short = failure.space.as_ref().unwrap().short_by.0;
        assert!((CHUNK..2 * CHUNK).contains(&short), "{failure}");
        plain.assert_no_trace();
    }
    let packed = bench(zstd::encode_all(&large(12 * CHUNK)[..], 1).unwrap());
    let Some(_tmpfs) = Tmpfs::mount(&packed.root, "size=5m") else {
        return;
    };
    let target = begun(&packed);
    packed.receive_rest(&target);
    let Err(PublishError::Failed(failure)) = target.publish(&packed.fin()) else {
        panic!("it cannot have been published")
    };
    assert_eq!(failure.code, Code::NoSpace, "{failure}");
    assert!(failure.message.contains("short by"), "{failure}");
    assert!(failure.space.is_some());
    assert_eq!(Bench::names(&packed.dir()), [format!(".stage-{}-0", packed.job)]);
    drop(target);
    let failure = packed.unfit();
    assert!(
        failure.space.is_some(),
        "it is not tried again for nothing: {failure}"
    );
    // With room made what was received counts.
    mount_remount(&packed.root, MountFlags::empty(), "size=20m").unwrap();
    let target = begun(&packed);
    assert_eq!(packed.receive_rest(&target), 0);
    target.publish(&packed.fin()).unwrap();
    assert_eq!(fs::metadata(packed.file().join("a")).unwrap().len(), 12 * CHUNK);
}

/// Where the agent is not root, modes keep it out of what it laid out itself.
#[test]
fn modes_that_keep_the_agent_out_keep_nothing_out_of_the_index() {
    let long = content(CHUNK + 5);
    let mut tar = Builder::new(Vec::new());
    for (kind, path, mode, bytes) in [
        (EntryType::Directory, "refdb/", 0o555, &b""[..]),
        (EntryType::Directory, "refdb/shut/", 0, b""),
        (EntryType::Regular, "refdb/shut/in", 0o040, b"hello"),
        (EntryType::Regular, "refdb/none", 0, &long),
        // Another takes its place, with a mode of its own.
        (EntryType::Regular, "refdb/twice", 0, b"x"),
        (EntryType::Regular, "refdb/twice", 0o640, b"y"),
        (EntryType::Regular, "refdb/plain", 0o644, b"z"),
    ] {
        add(&mut tar, entry(kind, path, mode, bytes.len() as u64), "", bytes);
    }
    add(
        &mut tar,
        entry(EntryType::Link, "refdb/same", 0, 0),
        "refdb/none",
        b"",
    );
    let bench = bench(tar.into_inner().unwrap());
    let modes = || {
        ["", "shut", "shut/in", "none", "same", "twice", "plain"].map(|path| {
            let stat = fs::symlink_metadata(bench.file().join(path)).unwrap();
            stat.permissions().mode() & 0o7777
        })
    };
    let index = as_nobody_special(|| push(&bench).1);
    // Looked at by root, if it is root who tests; the name is a link.
    assert_eq!(modes()[1..], [0, 0o040, 0, 0, 0o640, 0o644]);
    assert_eq!(fs::metadata(bench.file()).unwrap().mode() & 0o7777, 0o555);
    let entries = index.entries();
    assert_eq!(entries.len(), 1, "it is not in the index");
    assert_eq!(index.look(&bench.roots, &entries[0]), (State::Ok, String::new()));
    // What it is known by are the modes that it has, and not those that it had for a while.
    if rustix::process::geteuid().is_root() {
        assert_eq!(states(&bench, &index).1[1], (State::Ok, String::new()));
        let same = again(&bench, bench.bytes.clone(), IfExists::Fail, 2);
        assert!(push(&same).0.already);
    }
    let removal = Removal {
        place: bench.spec.place.clone(),
        name: b"genome.db".to_vec(),
        // Whether anything was added in the directory that is shut cannot be seen.
        force: true,
    };
    let remove = || index.remove(&bench.roots, &bench.state, &removal, |_| false);
    assert!(as_nobody_special(remove).unwrap().was_there);
    assert_eq!(Bench::names(&bench.dir()), [""; 0], "its generation went too");
}

/// Without root's right to pass every mode, which the threads that this one starts do not have either.
fn as_nobody_special<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let mut sets = capabilities(None).unwrap();
            sets.effective
                .remove(CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH);
            set_capabilities(None, sets).unwrap();
            run()
        });
        thread.join().unwrap()
    })
}

#[test]
fn directories_that_a_tar_does_not_name_are_the_same_everywhere() {
    let bytes = || {
        let mut tar = Builder::new(Vec::new());
        for (path, later) in [("sub/deep/x", 0), ("sub/y", 9), ("z", 3)] {
            let mut header = entry(EntryType::Regular, path, 0o644, 1);
            header.set_mtime(1_500_000_000 + later);
            add(&mut tar, header, "", b"x");
        }
        tar.into_inner().unwrap()
    };
    let roots: Vec<_> = (0..2)
        .map(|_| {
            let bench = bench(bytes());
            let (_, index) = push(&bench);
            for (path, time) in [("", 9), ("sub", 9), ("sub/deep", 0)] {
                let meta = fs::metadata(bench.file().join(path)).unwrap();
                assert_eq!(
                    (meta.mode() & 0o777, meta.mtime()),
                    (0o755, 1_500_000_000 + time),
                    "{path}"
                );
            }
            index.entries()[0].show(State::Ok, String::new()).content
        })
        .collect();
    assert_eq!(roots[0], roots[1]);
}

#[test]
fn a_chunk_that_was_taken_back_is_laid_out_anew() {
    let bench = bench(good());
    let target = begun(&bench);
    bench.receive_rest(&target);
    let mut wrong = stage_core::chunk::ChunkSet::empty(bench.count());
    wrong.insert(stage_core::chunk::ChunkIndex(0));
    target.store().disown(&wrong).unwrap();
    bench.receive_rest(&target);
    target.publish(&bench.fin()).unwrap();
    assert_laid_out(&bench.file());
}
