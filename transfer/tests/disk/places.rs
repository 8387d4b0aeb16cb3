//! Roots, directories and names: what is allowed, and no way out.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use rustix::mount::{MountFlags, UnmountFlags, mount, mount_remount, unmount};
use stage_core::assignment::Place;
use stage_core::chunk::CHUNK;
use stage_core::failure::Code;
use stage_core::manifest::{Data, Entry, Kind};
use stage_core::payload::Payload;
use stage_core::units::ByteCount;
use stage_transfer::root::Roots;
use stage_transfer::target::PublishError;

use crate::bench::{Bench, MTIME};

fn below(root: Option<&str>, dir: &[u8]) -> Place {
    Place::Root {
        root: root.map(|name| name.parse().unwrap()),
        dir: dir.to_vec(),
    }
}

#[test]
fn no_directory_leads_out_of_its_root() {
    let mut bench = Bench::new(3);
    let outside = tempfile::tempdir().unwrap();
    symlink(outside.path(), bench.root.join("link")).unwrap();
    // Not even a link that stays inside is followed: it may lead elsewhere a moment later.
    fs::create_dir(bench.root.join("real")).unwrap();
    symlink("real", bench.root.join("inside")).unwrap();
    for dir in [
        "..",
        "../x",
        "a/../../x",
        "./a",
        "a/..",
        "link",
        "link/deep/er",
        "inside",
        ".stage",
        "a/.stage-x/b",
    ] {
        bench.spec.place = below(None, dir.as_bytes());
        let failure = bench.unfit();
        assert_eq!(failure.code, Code::OutsideRoot, "{dir}: {failure}");
        bench.assert_no_trace();
    }
    assert_eq!(Bench::names(outside.path()), [""; 0]);
    assert_eq!(Bench::names(&bench.root), ["inside", "link", "real"]);
}

#[test]
fn names_are_plain() {
    let mut bench = Bench::new(3);
    let long = vec![b'x'; 256];
    for name in [
        &b""[..],
        b".",
        b"..",
        b"a/b",
        b"a\0b",
        b".stage",
        b".stage-1",
        &long,
    ] {
        bench.manifest.entries[0].path = name.to_vec();
        let failure = bench.unfit();
        let code = if name.starts_with(b".stage") {
            Code::OutsideRoot
        } else {
            // No manifest has such a name.
            Code::Usage
        };
        assert_eq!(failure.code, code, "{failure}");
    }
    assert_eq!(Bench::names(&bench.root), [""; 0]);
    for name in [
        &b"two\nlines"[..],
        b"\xff\xfe",
        b" ",
        "Größe".as_bytes(),
        b".staged",
        &long[..255],
    ] {
        bench.manifest.entries[0].path = name.to_vec();
        let target = bench.ready();
        bench.receive_rest(&target);
        let shown = target.publish(&bench.fin()).unwrap().path;
        assert!(!shown.contains('\n'), "{shown}");
        let file = bench.dir().join(OsStr::from_bytes(name));
        assert_eq!(fs::read(file).unwrap(), bench.bytes);
        target.release();
    }
}

#[test]
fn an_absolute_place_must_lie_in_a_root() {
    let mut bench = Bench::new(3);
    let inner = bench.root.join("inner");
    fs::create_dir(&inner).unwrap();
    bench.roots = Roots::open(vec![
        ("scratch".parse().unwrap(), bench.root.clone()),
        ("inner".parse().unwrap(), inner.clone()),
    ]);
    for (path, fits) in [
        (bench.root.clone(), true),
        (bench.root.join("a/b"), true),
        (inner.join("c"), true),
        (bench.root.parent().unwrap().to_owned(), false),
        (bench.root.with_file_name("root2"), false),
        (bench.root.join("../root2"), false),
        (Path::new("relative").to_owned(), false),
        (Path::new("/").to_owned(), false),
    ] {
        bench.spec.place = Place::Absolute(path.as_os_str().as_bytes().to_vec());
        if fits {
            let target = bench.ready();
            assert_eq!(target.path(), path.join("genome.db").to_str().unwrap());
            bench.receive_rest(&target);
            target.publish(&bench.fin()).unwrap();
            target.release();
            assert!(path.join("genome.db").exists());
        } else {
            let failure = bench.unfit();
            assert_eq!(failure.code, Code::OutsideRoot, "{}", path.display());
            assert!(failure.path.is_some());
        }
    }
}

#[test]
fn roots_are_told_apart_and_one_that_is_missing_is_tried_again() {
    let mut bench = Bench::new(3);
    let late = bench.root.with_file_name("late");
    let file = bench.root.with_file_name("file");
    fs::write(&file, "").unwrap();
    bench.roots = Roots::open(vec![
        ("good".parse().unwrap(), bench.root.clone()),
        ("late".parse().unwrap(), late.clone()),
        ("file".parse().unwrap(), file),
    ]);
    let codes = |bench: &Bench| -> Vec<_> {
        let reports = bench.roots.report();
        reports.into_iter().map(|r| r.failure.map(|f| f.code)).collect()
    };
    let unusable = Some(Code::RootUnusable);
    assert_eq!(codes(&bench), [None, unusable, unusable]);
    assert!(bench.roots.report()[0].free > ByteCount(0));
    for (root, says) in [
        ("late", "missing"),
        ("file", "not a directory"),
        ("none", "no root named"),
    ] {
        bench.spec.place = below(Some(root), b"");
        let failure = bench.unfit();
        assert_eq!(failure.code, Code::RootUnusable);
        assert!(failure.message.contains(says), "{failure}");
    }
    bench.spec.place = below(Some("late"), b"x");
    fs::create_dir(&late).unwrap();
    assert_eq!(codes(&bench), [None, None, unusable]);
    drop(bench.ready());
    // Made anew under the same path, as by a mount: the new one counts.
    fs::rename(&late, late.with_extension("old")).unwrap();
    assert_eq!(codes(&bench)[1], unusable);
    fs::create_dir(&late).unwrap();
    assert_eq!(codes(&bench)[1], None);
    let target = bench.ready();
    assert!(late.join("x").exists());
    target.discard().unwrap();
    assert_eq!(Bench::names(&late), [""; 0]);
    assert_eq!(Bench::names(&bench.root), [""; 0], "looking leaves nothing");
}

#[test]
fn a_directory_that_was_moved_away_gets_no_copy_and_its_successor_does() {
    let bench = Bench::new(CHUNK);
    let target = bench.ready();
    bench.receive_rest(&target);
    let away = bench.root.join("away");
    fs::rename(bench.dir(), &away).unwrap();
    for _ in 0..2 {
        let Err(PublishError::Unfit(failure)) = target.publish(&bench.fin()) else {
            panic!("nobody finds a copy at the path that was asked for")
        };
        assert_eq!(failure.code, Code::RootUnusable, "{failure}");
        assert_eq!(Bench::names(&away), [""; 0]);
        fs::create_dir_all(bench.dir()).unwrap();
    }
    drop(target);
    let target = bench.ready();
    assert_eq!(bench.receive_rest(&target), 1);
    target.publish(&bench.fin()).unwrap();
    bench.assert_published();
}

#[test]
fn a_directory_that_may_not_be_written_is_unfit() {
    if rustix::process::geteuid().is_root() {
        eprintln!("skipped: root may write everywhere, so this test needs an ordinary user");
        return;
    }
    let bench = Bench::new(3);
    fs::create_dir(bench.dir()).unwrap();
    fs::set_permissions(bench.dir(), fs::Permissions::from_mode(0o555)).unwrap();
    let failure = bench.unfit();
    assert_eq!(failure.code, Code::RootUnusable, "{failure}");
    bench.assert_no_trace();
    fs::set_permissions(&bench.root, fs::Permissions::from_mode(0o555)).unwrap();
    assert!(bench.roots.report()[0].failure.is_some());
    // So that the temporary directory can be removed.
    for dir in [&bench.dir(), &bench.root] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    }
}

/// A file system of its own for one test.
pub(crate) struct Tmpfs<'a>(&'a Path);

impl<'a> Tmpfs<'a> {
    /// `None`, with a visible line, where tests may not mount.
    pub(crate) fn mount(at: &'a Path, options: &str) -> Option<Self> {
        let wanted = std::env::var_os("STAGE_TEST_NETNS").is_some_and(|v| v == "1");
        if !wanted {
            eprintln!("skipped: mounting a small tmpfs needs root and STAGE_TEST_NETNS=1");
            return None;
        }
        let options = std::ffi::CString::new(options).unwrap();
        mount(
            "tmpfs",
            at,
            "tmpfs",
            MountFlags::empty(),
            Some(options.as_c_str()),
        )
        .unwrap();
        Some(Self(at))
    }
}

impl Drop for Tmpfs<'_> {
    fn drop(&mut self) {
        unmount(self.0, UnmountFlags::DETACH).unwrap();
    }
}

#[test]
fn too_little_space_is_said_with_numbers_and_leaves_nothing() {
    let bench = Bench::new(5 * CHUNK);
    let root = bench.root.clone();
    let Some(tmpfs) = Tmpfs::mount(&root, "size=4m") else {
        return;
    };
    let failure = bench.unfit();
    assert_eq!(failure.code, Code::NoSpace);
    assert_eq!(
        failure.space.as_ref().unwrap().short_by,
        ByteCount(CHUNK),
        "{failure}"
    );
    assert_eq!(Bench::names(&root), [""; 0]);
    bench.assert_no_trace();
    // With room made it fits, and takes no more than its size.
    mount_remount(&root, MountFlags::empty(), "size=5200k").unwrap();
    let target = bench.ready();
    bench.receive_rest(&target);
    target.publish(&bench.fin()).unwrap();
    bench.assert_published();
    drop((target, tmpfs));
}

#[test]
fn too_few_inodes_are_named_before_a_byte_moves() {
    for name in ["", " with a name so long that its manifest comes ahead of it"] {
        let mut bench = Bench::new(0);
        let entry = |path: String, kind| Entry {
            path: path.into_bytes(),
            mode: 0o644,
            mtime: MTIME,
            xattrs: Vec::new(),
            kind,
        };
        let file = |at| {
            let (size, data) = (ByteCount(3), Data::Dense);
            entry(format!("genome.db/{at:03}{name}"), Kind::File { size, data })
        };
        bench.manifest.entries = vec![entry("genome.db".to_owned(), Kind::Dir)];
        bench.manifest.entries.extend((0..100).map(file));
        let payload = Payload::of(&bench.manifest).unwrap();
        assert_eq!(payload.inline.is_some(), name.is_empty());
        let root = bench.root.clone();
        let Some(_tmpfs) = Tmpfs::mount(&root, "size=4m,nr_inodes=30") else {
            return;
        };
        let failure = bench.unfit();
        assert_eq!(failure.code, Code::NoSpace);
        // Its own directory and the one above it are made, and the link that is its name.
        assert_eq!(failure.message, "no inodes left: needs 103, free 28");
        assert_eq!(Bench::names(&root), [""; 0]);
        bench.assert_no_trace();
        mount_remount(&root, MountFlags::empty(), "nr_inodes=200").unwrap();
        drop(bench.ready());
    }
}

#[test]
fn space_is_reserved_once_over_a_resume() {
    let bench = Bench::new(3 * CHUNK);
    let root = bench.root.clone();
    let Some(_tmpfs) = Tmpfs::mount(&root, "size=4m") else {
        return;
    };
    let target = bench.ready();
    bench.receive(&target, 0);
    drop(target);
    let target = bench.ready();
    assert_eq!(bench.receive_rest(&target), 2);
    target.publish(&bench.fin()).unwrap();
    bench.assert_published();
}

#[test]
fn a_read_only_file_system_is_named() {
    let bench = Bench::new(3);
    let root = bench.root.clone();
    let Some(_tmpfs) = Tmpfs::mount(&root, "size=4m") else {
        return;
    };
    mount_remount(&root, MountFlags::RDONLY, "").unwrap();
    assert_eq!(bench.unfit().code, Code::ReadOnly);
    let failure = bench.roots.report()[0].failure.clone().unwrap();
    assert_eq!(failure.code, Code::ReadOnly);
    bench.assert_no_trace();
}

fn run(program: &str, args: &[&str]) {
    let status = std::process::Command::new(program).args(args).status();
    assert!(status.unwrap().success(), "{program} {args:?}");
}

/// A disk that takes writes and then cannot keep them: ext4 in a file that is larger than the file system it lies in.
#[test]
fn a_failed_fsync_is_final_for_the_partial() {
    let bench = Bench::new(24 * CHUNK);
    let backing = tempfile::tempdir().unwrap();
    let Some(_tmpfs) = Tmpfs::mount(backing.path(), "size=16m") else {
        return;
    };
    let image = backing.path().join("image");
    fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
    let (image, root) = (image.to_str().unwrap(), bench.root.to_str().unwrap());
    run("mkfs.ext4", &["-q", "-O", "^has_journal", image]);
    run("mount", &["-o", "loop", image, root]);
    let _mounted = Tmpfs(&bench.root);

    let target = bench.ready();
    bench.receive_rest(&target);
    let Err(PublishError::Failed(failure)) = target.publish(&bench.fin()) else {
        panic!("it was not to be believed")
    };
    assert!(matches!(failure.code, Code::Io | Code::NoSpace), "{failure}");
    assert_eq!(Bench::names(&bench.dir()), [""; 0], "the partial is dropped");
    assert!(target.store().have().is_empty(), "no child is served from it");
    // Asked again it does not succeed, as a second fsync would.
    assert!(target.publish(&bench.fin()).is_err());
    drop(target);
    assert!(bench.ready().store().have().is_empty());
}
