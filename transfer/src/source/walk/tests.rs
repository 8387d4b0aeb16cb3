use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::time::{Duration, SystemTime};

use rustix::fs::{XattrFlags, mkfifoat, setxattr};
use tempfile::TempDir;

use super::*;
use crate::source::{Look, Pulse};

/// A push of these paths, each under its last name.
pub(in crate::source) fn spec_of(paths: &[&Path]) -> SourceSpec {
    let paths = paths.iter().map(|path| SourcePath {
        path: path.as_os_str().as_bytes().to_vec(),
        name: path.file_name().unwrap().as_bytes().to_vec(),
    });
    SourceSpec {
        paths: paths.collect(),
        walk: Walk::default(),
        limit: None,
        expect: Vec::new(),
        cache: Default::default(),
    }
}

fn look(spec: &SourceSpec) -> Result<Look, Failure> {
    crate::source::look(spec, &Pulse::default())
}

fn follow(path: &Path) -> Result<Look, Failure> {
    let mut spec = spec_of(&[path]);
    spec.walk.follow = true;
    look(&spec)
}

fn tree() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("db");
    fs::create_dir(&tree).unwrap();
    (dir, tree)
}

/// Path and kind of each entry.
fn kinds(look: &Look) -> Vec<(String, Kind)> {
    let entries = look.manifest.entries.iter();
    entries
        .map(|entry| (show_path(&entry.path), entry.kind.clone()))
        .collect()
}

fn paths(look: &Look) -> Vec<String> {
    kinds(look).into_iter().map(|(path, _)| path).collect()
}

fn file(size: u64) -> Kind {
    Kind::File {
        size: ByteCount(size),
        data: Data::Dense,
    }
}

fn link(to: &str) -> Kind {
    Kind::Symlink { to: to.into() }
}

#[test]
fn a_file_is_looked_at_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a");
    fs::write(&file, b"12345").unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o4640)).unwrap();
    let link = dir.path().join("b");
    symlink(&file, &link).unwrap();
    for path in [&file, &link] {
        let look = look(&spec_of(&[path])).unwrap();
        assert_eq!(look.payload.data, ByteCount(5));
        assert_eq!(look.manifest.entries[0].mode, 0o640);
    }
    let code = |path: &Path| look(&spec_of(&[path])).unwrap_err().code;
    assert_eq!(code(&dir.path().join("none")), Code::SourceMissing);
    assert_eq!(code(&file.join("below")), Code::SourceMissing);
    assert_eq!(code(Path::new("/dev/null")), Code::SourceKind);
    assert_eq!(code(Path::new("/proc/self/status")), Code::SourceKind);
    // Root reads whatever the mode says.
    if !rustix::process::geteuid().is_root() {
        fs::set_permissions(&file, Permissions::from_mode(0o000)).unwrap();
        assert_eq!(code(&file), Code::SourceUnreadable);
    }
}

// R46, R50.
#[test]
fn a_tree_is_its_entries_in_order() {
    let (dir, tree) = tree();
    fs::create_dir_all(tree.join("a/b/c")).unwrap();
    fs::create_dir(tree.join("empty")).unwrap();
    fs::write(tree.join("a/b/x"), b"x").unwrap();
    fs::write(tree.join("a/b/c/deep"), b"deep").unwrap();
    fs::write(tree.join("a!"), b"").unwrap();
    fs::write(tree.join("z"), b"zz").unwrap();
    fs::hard_link(tree.join("z"), tree.join("a/b/z1")).unwrap();
    fs::hard_link(tree.join("z"), tree.join("z2")).unwrap();
    symlink("../z", tree.join("a/l")).unwrap();
    symlink("nowhere", tree.join("dangling")).unwrap();
    fs::set_permissions(tree.join("a"), Permissions::from_mode(0o2750)).unwrap();
    let time = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789);
    let opened = File::options().write(true).open(tree.join("a!")).unwrap();
    opened.set_modified(time).unwrap();
    // Another name of a file in another unit is a file of its own there.
    let more = dir.path().join("more.fa");
    fs::hard_link(tree.join("z"), &more).unwrap();

    let look = look(&spec_of(&[&more, &tree])).unwrap();
    let expected = [
        ("db", Kind::Dir),
        ("db/a", Kind::Dir),
        ("db/a/b", Kind::Dir),
        ("db/a/b/c", Kind::Dir),
        ("db/a/b/c/deep", file(4)),
        ("db/a/b/x", file(1)),
        ("db/a/b/z1", file(2)),
        ("db/a/l", link("../z")),
        ("db/a!", file(0)),
        ("db/dangling", link("nowhere")),
        ("db/empty", Kind::Dir),
        ("db/z", Kind::HardLink { to: 6 }),
        ("db/z2", Kind::HardLink { to: 6 }),
        ("more.fa", file(2)),
    ];
    assert_eq!(kinds(&look), expected.map(|(path, kind)| (path.to_owned(), kind)));
    assert_eq!(look.manifest.entries[1].mode, 0o750);
    assert_eq!(look.manifest.entries[8].mtime, (1_000_000_000, 123_456_789));
    assert_eq!(look.payload.units.len(), 2);
    assert_eq!(look.payload.data, ByteCount(4 + 1 + 2 + 2));
}

#[test]
fn names_of_any_bytes_and_of_any_depth() {
    let (_dir, tree) = tree();
    let names: [&[u8]; 5] = [b"two\nlines", b"\xff\xfe", b"-rf", b" ", b"esc\x1b[31m"];
    for name in names {
        fs::write(tree.join(OsStr::from_bytes(name)), b"").unwrap();
    }
    let found = look(&spec_of(&[&tree])).unwrap();
    for name in names {
        assert!(found.manifest.entries.iter().any(|entry| entry.name() == name));
    }
    // As deep as a path may be long, and one deeper.
    let mut at: OwnedFd = File::open(&tree).unwrap().into();
    let name = "d".repeat(250);
    for depth in 1..=17 {
        rustix::fs::mkdirat(&at, &name, Mode::RWXU).unwrap();
        at = openat(&at, &name, OFlags::RDONLY, Mode::empty()).unwrap();
        let found = look(&spec_of(&[&tree]));
        if 2 + depth * 251 <= MAX_PATH {
            assert_eq!(found.unwrap().manifest.entries.len(), 1 + names.len() + depth);
        } else {
            assert!(found.unwrap_err().message.contains("longer"));
        }
    }
}

// R33.
#[test]
fn links_are_followed_only_when_asked_and_never_in_a_circle() {
    let (dir, tree) = tree();
    fs::create_dir_all(tree.join("sub/deep")).unwrap();
    symlink("..", tree.join("sub/deep/up")).unwrap();
    assert_eq!(
        kinds(&look(&spec_of(&[&tree])).unwrap())[3],
        ("db/sub/deep/up".to_owned(), link(".."))
    );
    let failure = follow(&tree).unwrap_err();
    assert_eq!(failure.code, Code::SourceKind);
    assert!(failure.message.contains("circle"), "{failure}");
    assert!(failure.message.contains("db/sub,"), "{failure}");
    assert!(failure.path.unwrap().ends_with("db/sub/deep/up"));
    assert!(failure.hint.contains("--follow"));

    fs::remove_file(tree.join("sub/deep/up")).unwrap();
    symlink("itself", tree.join("sub/itself")).unwrap();
    let failure = follow(&tree).unwrap_err();
    assert!(failure.message.contains("circle"), "{failure}");
    assert!(failure.path.unwrap().ends_with("db/sub/itself"));

    fs::remove_file(tree.join("sub/itself")).unwrap();
    symlink("nowhere", tree.join("sub/dangling")).unwrap();
    let failure = follow(&tree).unwrap_err();
    assert_eq!(failure.code, Code::SourceMissing);
    assert!(failure.path.unwrap().ends_with("db/sub/dangling"));
    let mut spec = spec_of(&[&tree]);
    spec.walk.follow = true;
    spec.walk.exclude = vec!["dangling".to_owned()];
    look(&spec).unwrap();

    // What links lead to is there as if it were itself, twice if need be.
    fs::remove_file(tree.join("sub/dangling")).unwrap();
    let outside = dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("x"), b"123").unwrap();
    symlink(&outside, tree.join("one")).unwrap();
    symlink(&outside, tree.join("two")).unwrap();
    symlink(outside.join("x"), tree.join("three")).unwrap();
    let found: BTreeMap<_, _> = kinds(&follow(&tree).unwrap()).into_iter().collect();
    assert_eq!(found["db/one"], Kind::Dir);
    for path in ["db/one/x", "db/two/x", "db/three"] {
        assert_eq!(found[path], file(3), "{path}");
    }
}

#[test]
fn what_is_no_file_is_refused_by_name_unless_it_is_excluded() {
    let (_dir, tree) = tree();
    fs::create_dir(tree.join("run")).unwrap();
    let _socket = UnixListener::bind(tree.join("run/sock")).unwrap();
    let failure = look(&spec_of(&[&tree])).unwrap_err();
    assert_eq!(failure.code, Code::SourceKind);
    assert!(failure.message.contains("socket"), "{failure}");
    assert!(failure.hint.contains("--exclude"));
    assert!(failure.path.unwrap().ends_with("db/run/sock"));
    mkfifoat(CWD, tree.join("fifo"), Mode::RWXU).unwrap();
    let failure = look(&spec_of(&[&tree])).unwrap_err();
    assert!(failure.message.contains("FIFO"), "{failure}");
    let mut spec = spec_of(&[&tree]);
    spec.walk.exclude = vec!["fifo".to_owned(), "run/".to_owned()];
    assert_eq!(paths(&look(&spec).unwrap()), ["db"]);
}

#[test]
fn what_is_excluded_is_not_even_walked() {
    let (_dir, tree) = tree();
    for dir in ["vol1/old", "vol2", "empty"] {
        fs::create_dir_all(tree.join(dir)).unwrap();
    }
    for file in ["vol1/a.fa", "vol1/a.txt", "vol1/old/b.fa", "vol2/c.txt", "d.fa"] {
        fs::write(tree.join(file), file).unwrap();
    }
    let found = |include: &[&str], exclude: &[&str]| {
        let mut spec = spec_of(&[&tree]);
        spec.walk.include = include.iter().map(|text| (*text).to_owned()).collect();
        spec.walk.exclude = exclude.iter().map(|text| (*text).to_owned()).collect();
        look(&spec).map(|look| paths(&look).join(" "))
    };
    assert_eq!(
        found(&[], &["old", "*.txt"]).unwrap(),
        "db db/d.fa db/empty db/vol1 db/vol1/a.fa db/vol2"
    );
    assert_eq!(
        found(&["*.fa"], &[]).unwrap(),
        "db db/d.fa db/vol1 db/vol1/a.fa db/vol1/old db/vol1/old/b.fa"
    );
    assert_eq!(
        found(&["vol2", "empty"], &[]).unwrap(),
        "db db/empty db/vol2 db/vol2/c.txt"
    );
    assert_eq!(
        found(&["vol1/*.fa"], &["old"]).unwrap(),
        "db db/vol1 db/vol1/a.fa"
    );
    let failure = found(&["*.fasta"], &[]).unwrap_err();
    assert_eq!(failure.code, Code::SourceMissing);
    assert!(failure.message.contains("--include"), "{failure}");
    assert_eq!(found(&["["], &[]).unwrap_err().code, Code::Usage);
}

#[test]
fn extended_attributes_come_along_when_asked() {
    let (_dir, tree) = tree();
    fs::write(tree.join("x"), b"").unwrap();
    fs::write(tree.join("y"), b"").unwrap();
    fs::hard_link(tree.join("x"), tree.join("z")).unwrap();
    let set = |path: &Path, name: &str, value: &[u8]| setxattr(path, name, value, XattrFlags::empty());
    if set(&tree, "user.about", b"a tree").is_err() {
        // This file system has none: then none come along.
        let mut spec = spec_of(&[&tree]);
        spec.walk.xattrs = true;
        assert!(
            look(&spec)
                .unwrap()
                .manifest
                .entries
                .iter()
                .all(|e| e.xattrs.is_empty())
        );
        return;
    }
    set(&tree.join("x"), "user.b", b"\0\xff").unwrap();
    set(&tree.join("x"), "user.a", b"").unwrap();
    // user::rw-, user:1234:r--, group::r--, mask::r--, other::---
    let acl = [
        &2_u32.to_le_bytes()[..],
        &acl_entry(1, 6, u32::MAX),
        &acl_entry(2, 4, 1234),
        &acl_entry(4, 4, u32::MAX),
        &acl_entry(16, 4, u32::MAX),
        &acl_entry(32, 0, u32::MAX),
    ]
    .concat();
    set(&tree.join("y"), "system.posix_acl_access", &acl).unwrap();
    let without = look(&spec_of(&[&tree])).unwrap();
    assert!(
        without
            .manifest
            .entries
            .iter()
            .all(|entry| entry.xattrs.is_empty())
    );
    let mut spec = spec_of(&[&tree]);
    spec.walk.xattrs = true;
    let with = look(&spec).unwrap().manifest;
    let pair = |name: &str, value: &[u8]| (name.as_bytes().to_vec(), value.to_vec());
    assert_eq!(with.entries[0].xattrs, [pair("user.about", b"a tree")]);
    assert_eq!(
        with.entries[1].xattrs,
        [pair("user.a", b""), pair("user.b", b"\0\xff")]
    );
    assert_eq!(with.entries[2].xattrs, [pair("system.posix_acl_access", &acl)]);
    assert_eq!(
        with.entries[3].xattrs,
        [],
        "another name of x has nothing of its own"
    );
}

fn acl_entry(tag: u16, may: u16, id: u32) -> Vec<u8> {
    [&tag.to_le_bytes()[..], &may.to_le_bytes(), &id.to_le_bytes()].concat()
}

#[test]
fn holes_are_found_and_dense_files_are_not_asked() {
    let (_dir, tree) = tree();
    let sparse = File::create(tree.join("sparse")).unwrap();
    sparse.set_len(1 << 40).unwrap();
    sparse.write_all_at(&[7; 4096], 1 << 30).unwrap();
    fs::write(tree.join("dense"), vec![7; 100_000]).unwrap();
    let found = look(&spec_of(&[&tree])).unwrap();
    assert_eq!(found.manifest.entries[1].kind, file(100_000));
    let Kind::File {
        data: Data::Runs(runs),
        ..
    } = &found.manifest.entries[2].kind
    else {
        panic!("{found:?}");
    };
    assert_eq!((runs.len(), runs[0].start), (1, 1 << 30));
    assert_eq!(found.payload.size, ByteCount((1 << 40) + 100_000));
}

#[test]
fn what_cannot_be_read_is_named_before_a_byte_moves() {
    if rustix::process::geteuid().is_root() {
        // Root reads whatever the mode says: as somebody else there is nothing to test.
        return;
    }
    let (_dir, tree) = tree();
    fs::create_dir(tree.join("closed")).unwrap();
    fs::write(tree.join("secret"), b"").unwrap();
    fs::set_permissions(tree.join("secret"), Permissions::from_mode(0o000)).unwrap();
    let failure = look(&spec_of(&[&tree])).unwrap_err();
    assert_eq!(failure.code, Code::SourceUnreadable);
    assert!(failure.path.unwrap().ends_with("db/secret"));
    fs::remove_file(tree.join("secret")).unwrap();
    fs::set_permissions(tree.join("closed"), Permissions::from_mode(0o000)).unwrap();
    let failure = look(&spec_of(&[&tree])).unwrap_err();
    assert_eq!(failure.code, Code::SourceUnreadable);
    assert!(failure.path.unwrap().ends_with("db/closed"));
    fs::set_permissions(tree.join("closed"), Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn a_walk_tells_how_far_it_is_and_can_be_stopped() {
    let (_dir, tree) = tree();
    for at in 0..10 {
        fs::write(tree.join(at.to_string()), b"").unwrap();
    }
    let pulse = Pulse::default();
    crate::source::look(&spec_of(&[&tree]), &pulse).unwrap();
    assert_eq!(pulse.entries(), 10);
    pulse.stop();
    let failure = crate::source::look(&spec_of(&[&tree]), &pulse).unwrap_err();
    assert_eq!((failure.code, pulse.entries()), (Code::Cancelled, 11));
}

/// How long a walk over so many files takes; run with `--release -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn a_hundred_thousand_files() {
    let (_dir, tree) = tree();
    for dir in 0..100 {
        let dir = tree.join(format!("{dir:03}"));
        fs::create_dir(&dir).unwrap();
        for file in 0..1000 {
            fs::write(dir.join(format!("{file:04}.fa")), b"").unwrap();
        }
    }
    assert!(fs::metadata(&tree).unwrap().nlink() > 1);
    for _ in 0..3 {
        let begun = std::time::Instant::now();
        let found = look(&spec_of(&[&tree])).unwrap();
        eprintln!("{} entries in {:?}", found.payload.entries, begun.elapsed());
    }
}
