//! A slow disk does what a target needs, and keeps what was written when it is one no more.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs::{self, File};
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, Mode, OFlags, RenameFlags, ResolveFlags, fallocate, fstatvfs, openat,
    openat2, renameat_with, statat,
};
use stage_core::units::{ByteCount, Rate};
use stage_lab::{SlowDisk, Speed, need_fuse};

fn speed(write: f64) -> Speed {
    Speed {
        write: Rate::from_bytes_per_second(write),
        read: Rate::UNLIMITED,
        cache: ByteCount(64 << 10),
        burst: ByteCount(0),
    }
}

#[test]
fn it_does_what_a_target_needs() {
    if !need_fuse() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("before"), "old").unwrap();
    let free = fstatvfs(File::open(dir.path()).unwrap()).unwrap().f_blocks;
    let disk = SlowDisk::mount(dir.path(), speed(1e9)).unwrap();
    assert_eq!(fs::read(dir.path().join("before")).unwrap(), b"old");

    let root = openat(CWD, dir.path(), OFlags::DIRECTORY, Mode::empty()).unwrap();
    assert_eq!(fstatvfs(&root).unwrap().f_blocks, free);
    fs::create_dir_all(dir.path().join("a/b")).unwrap();
    let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let inner = openat2(
        &root,
        "a/b",
        OFlags::PATH | OFlags::DIRECTORY,
        Mode::empty(),
        beneath,
    )
    .unwrap();
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
    let partial = openat2(&inner, ".partial", flags, Mode::from_raw_mode(0o600), beneath).unwrap();
    let partial = File::from(partial);
    fallocate(&partial, FallocateFlags::KEEP_SIZE, 0, 3 << 20).unwrap();
    let block = vec![7; 1 << 20];
    partial.write_all_at(&block, 2 << 20).unwrap();
    partial.write_all_at(&block, 0).unwrap();
    partial.set_len((3 << 20) + 5).unwrap();
    partial
        .set_permissions(fs::Permissions::from_mode(0o640))
        .unwrap();
    let then = std::time::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    partial.set_modified(then).unwrap();
    partial.sync_all().unwrap();
    let number = partial.metadata().unwrap().ino();

    renameat_with(&inner, ".partial", &root, "final", RenameFlags::NOREPLACE).unwrap();
    File::open(dir.path()).unwrap().sync_all().unwrap();
    fs::write(dir.path().join("other"), "x").unwrap();
    let refused = renameat_with(&root, "other", &root, "final", RenameFlags::NOREPLACE).unwrap_err();
    assert_eq!(refused, rustix::io::Errno::EXIST);
    renameat_with(&root, "other", &root, "before", RenameFlags::EXCHANGE).unwrap();
    assert_eq!(fs::read(dir.path().join("other")).unwrap(), b"old");
    symlink("final", dir.path().join("link")).unwrap();
    fs::hard_link(dir.path().join("final"), dir.path().join("second")).unwrap();
    assert_eq!(
        fs::read_link(dir.path().join("link")).unwrap().to_str(),
        Some("final")
    );
    let mut names: Vec<_> = fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["a", "before", "final", "link", "other", "second"]);
    fs::remove_file(dir.path().join("other")).unwrap();
    assert_eq!(
        fs::read(dir.path().join("other")).unwrap_err().kind(),
        ErrorKind::NotFound
    );
    drop((partial, inner, root));

    drop(disk);
    let stat = statat(CWD, dir.path().join("final"), AtFlags::empty()).unwrap();
    assert_eq!(
        (stat.st_ino, stat.st_size, stat.st_mode & 0o777),
        (number, (3 << 20) + 5, 0o640)
    );
    assert_eq!((stat.st_mtime, stat.st_nlink), (1_000_000_000, 2));
    let mut bytes = Vec::new();
    File::open(dir.path().join("final"))
        .unwrap()
        .read_to_end(&mut bytes)
        .unwrap();
    assert!(bytes[..1 << 20] == block && bytes[2 << 20..3 << 20] == block);
    assert!(bytes[1 << 20..2 << 20].iter().all(|byte| *byte == 0));
}

/// Other work on the machine can only make it slower still.
#[test]
fn it_is_as_slow_as_asked() {
    if !need_fuse() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = SlowDisk::mount(dir.path(), speed(4e6)).unwrap();
    let started = Instant::now();
    fs::write(dir.path().join("file"), vec![1; 2_000_000]).unwrap();
    File::open(dir.path().join("file")).unwrap().sync_all().unwrap();
    assert!(
        started.elapsed() >= Duration::from_millis(490),
        "{:?}",
        started.elapsed()
    );
    drop(disk);
    assert_eq!(fs::metadata(dir.path().join("file")).unwrap().len(), 2_000_000);
}
