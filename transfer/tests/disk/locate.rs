//! Asking where something is published: by name, without making or changing anything.

use std::fs;
use std::os::unix::fs::symlink;

use stage_core::assignment::Place;
use stage_core::failure::Code;
use stage_core::units::ByteCount;
use stage_transfer::root::{Found, Located, Roots};

fn roots(dir: &std::path::Path) -> Roots {
    Roots::open(vec![
        ("main".parse().unwrap(), dir.join("main")),
        ("gone".parse().unwrap(), dir.join("gone")),
    ])
}

fn at(dest: &str) -> Place {
    Place::parse(dest.as_bytes()).unwrap()
}

fn bytes(path: &std::path::Path) -> Vec<u8> {
    path.as_os_str().as_encoded_bytes().to_vec()
}

#[test]
fn a_file_is_its_name_and_a_tree_its_generation() {
    let dir = tempfile::tempdir().unwrap();
    let main = dir.path().join("main");
    fs::create_dir_all(main.join("db/.stage/k2@d1")).unwrap();
    fs::create_dir_all(main.join("db/.stage/k2@d2")).unwrap();
    fs::write(main.join("db/x.fa"), "acgt").unwrap();
    symlink(".stage/k2@d1", main.join("db/k2")).unwrap();
    let roots = roots(dir.path());

    let file = Located {
        name: bytes(&main.join("db/x.fa")),
        found: Some(Found::File { size: ByteCount(4) }),
    };
    for dest in ["main:db", "main:/db/", main.join("db").to_str().unwrap()] {
        assert_eq!(roots.locate(&at(dest), b"x.fa").unwrap(), file, "{dest}");
    }
    let tree = |digest: &str| Located {
        name: bytes(&main.join("db/k2")),
        found: Some(Found::Tree {
            path: bytes(&main.join(format!("db/.stage/k2@{digest}"))),
        }),
    };
    assert_eq!(roots.locate(&at("main:db"), b"k2").unwrap(), tree("d1"));
    symlink(".stage/k2@d2", main.join("db/new")).unwrap();
    fs::rename(main.join("db/new"), main.join("db/k2")).unwrap();
    assert_eq!(roots.locate(&at("main:db"), b"k2").unwrap(), tree("d2"));
    fs::remove_dir(main.join("db/.stage/k2@d2")).unwrap();
    assert_eq!(roots.locate(&at("main:db"), b"k2").unwrap().found, None);
}

#[test]
fn what_is_not_there_has_a_path_and_is_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let main = dir.path().join("main");
    fs::create_dir(&main).unwrap();
    let roots = roots(dir.path());
    for (dest, path) in [("", "k2"), ("main:", "k2"), ("main:a/b", "a/b/k2")] {
        let located = roots.locate(&at(dest), b"k2").unwrap();
        assert_eq!(located.name, bytes(&main.join(path)));
        assert_eq!(located.found, None);
    }
    assert!(fs::read_dir(&main).unwrap().next().is_none());
}

#[test]
fn what_stage_did_not_put_there_is_said_to_be_so() {
    let dir = tempfile::tempdir().unwrap();
    let main = dir.path().join("main");
    fs::create_dir_all(main.join("own")).unwrap();
    fs::create_dir_all(main.join(".stage/k2@d1/sub")).unwrap();
    fs::write(main.join("file"), "").unwrap();
    for (link, to) in [
        ("away", "/etc"),
        ("up", "../main/own"),
        ("k2", ".stage/k2@d1/sub"),
        ("other", ".stage/k2@d1"),
        ("climb", ".stage/climb@/../../own"),
    ] {
        symlink(to, main.join(link)).unwrap();
    }
    let roots = roots(dir.path());
    let code = |dest: &str, name: &str| roots.locate(&at(dest), name.as_bytes()).unwrap_err().code;
    for name in ["own", "away", "up", "k2", "other", "climb"] {
        assert_eq!(code("", name), Code::WrongKind, "{name}");
    }
    assert_eq!(code("main:file", "x"), Code::WrongKind);
    assert_eq!(
        code("main:away", "x"),
        Code::OutsideRoot,
        "a link is never followed"
    );
    for name in ["", "..", "a/b", ".stage", ".stage-1"] {
        assert_eq!(code("", name), Code::OutsideRoot, "{name:?}");
    }
    assert_eq!(code("gone:", "x"), Code::RootUnusable);
    assert_eq!(code("nvme:", "x"), Code::RootUnusable);
    assert_eq!(code("/etc", "passwd"), Code::OutsideRoot);
}
