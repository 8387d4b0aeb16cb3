//! A tar that is published as what it holds.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use stage_core::assignment::IfExists;
use stage_core::chunk::CHUNK;
use stage_core::failure::Code;
use stage_core::manifest::Manifest;
use stage_core::units::ByteCount;
use stage_transfer::target::{Preparation, PublishError, Target};
use tar::{Builder, EntryType, Header};

use crate::bench::{Bench, MODE, MTIME, content};

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
        target.discard().unwrap();
        assert_eq!(Bench::names(&bench.root), [""; 0]);
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    }
}

#[test]
fn rules_hold_and_a_newer_one_is_switched_to() {
    let first = bench(good());
    let target = begun(&first);
    first.receive_rest(&target);
    target.publish(&first.fin()).unwrap();
    target.release();
    let mut second = bench(good());
    second.root.clone_from(&first.root);
    second.roots = stage_transfer::root::Roots::open(vec![("scratch".parse().unwrap(), first.root.clone())]);
    assert_eq!(second.unfit().code, Code::Exists);
    second.spec.if_exists = IfExists::Skip;
    assert!(matches!(second.prepare().unwrap(), Preparation::Skipped { .. }));
    second.spec.if_exists = IfExists::Replace;
    let before = fs::read_link(first.file()).unwrap();
    let target = begun(&second);
    second.receive_rest(&target);
    target.publish(&second.fin()).unwrap();
    assert_ne!(fs::read_link(first.file()).unwrap(), before);
    assert_laid_out(&first.file());
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
