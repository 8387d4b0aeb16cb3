//! Trees, and several parts of one push, in the index: known one by one, verified, removed whole.

use std::fs;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, symlink};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use stage_core::ask::{Kind as Shown, Removal, Removed, State};
use stage_core::assignment::{Final, IfExists, KEEP_PREVIOUS, Place, TargetSpec};
use stage_core::chunk::{CHUNK, ChunkIndex};
use stage_core::digest::{ChunkHash, FileDigest, RootHasher, chunk_digest};
use stage_core::failure::{Code, Failure};
use stage_core::id::JobId;
use stage_core::manifest::{Data, Entry, Kind, Manifest};
use stage_core::payload::Payload;
use stage_core::units::ByteCount;
use stage_transfer::budget::Budget;
use stage_transfer::index::Index;
use stage_transfer::root::Roots;
use stage_transfer::target::{Preparation, prepare, retired};
use tempfile::TempDir;

use crate::bench::content;

/// A node, and what is pushed to it.
struct Node {
    dir: Option<TempDir>,
    root: PathBuf,
    state: PathBuf,
    roots: Roots,
    index: Index,
    manifest: Manifest,
    /// Of each entry.
    bytes: Vec<Vec<u8>>,
    /// The name of the first file in the tree: the others are its like.
    job: JobId,
}

fn entry(path: &str, kind: Kind) -> Entry {
    Entry {
        path: path.into(),
        mode: if kind == Kind::Dir { 0o755 } else { 0o644 },
        mtime: (1_600_000_000, 7),
        xattrs: Vec::new(),
        kind,
    }
}

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut node = Self::within(dir.path());
        node.dir = Some(dir);
        node
    }

    /// A tree of a few files and links, and a file beside it that shares a chunk with it.
    fn within(dir: &Path) -> Self {
        let root = dir.join("root");
        fs::create_dir_all(&root).unwrap();
        let state = dir.join("state");
        let mut node = Self {
            dir: None,
            roots: Roots::open(vec![("scratch".parse().unwrap(), root.clone())]),
            root,
            index: Index::open(&state),
            state,
            manifest: Manifest { entries: Vec::new() },
            bytes: Vec::new(),
            job: JobId::from_random([7; 16]),
        };
        node.put("refdb", Kind::Dir, 0);
        node.file("refdb/big", 2 * CHUNK + 9);
        node.put("refdb/link", Kind::Symlink { to: b"big".to_vec() }, 0);
        node.put("refdb/name", Kind::HardLink { to: 1 }, 0);
        node.file("refdb/small", 100);
        node.put("refdb/sub", Kind::Dir, 0);
        node.file("refdb/sub/empty", 0);
        node.file("three", 300);
        node
    }

    fn put(&mut self, path: &str, kind: Kind, size: u64) {
        self.manifest.entries.push(entry(path, kind));
        self.bytes.push(content(size));
    }

    fn file(&mut self, path: &str, size: u64) {
        let (size, data) = (ByteCount(size), Data::Dense);
        self.put(path, Kind::File { size, data }, size.0);
    }

    /// The whole push to its end.
    fn publish(&self) {
        let payload = Payload::of(&self.manifest).unwrap();
        let layout = payload.layout().unwrap();
        let mut sequence = self.manifest.encode();
        sequence.truncate(payload.head().0 as usize);
        let head = sequence.len();
        for piece in self.manifest.pieces() {
            let from = piece.in_file as usize;
            sequence.extend(&self.bytes[piece.entry as usize][from..from + piece.len as usize]);
        }
        let (head, data) = sequence.split_at(head);
        let chunks: Vec<&[u8]> = head
            .chunks(CHUNK as usize)
            .chain(data.chunks(CHUNK as usize))
            .collect();
        let digests: Vec<_> = chunks
            .iter()
            .map(|bytes| chunk_digest(ChunkHash::Blake3, bytes))
            .collect();
        let mut root = RootHasher::new(payload.manifest);
        digests.iter().for_each(|digest| root.push(*digest));
        let fin = Final {
            root: root.finish(),
            chunks: layout.count(),
            data: payload.data,
        };
        let spec = TargetSpec {
            place: self.place(),
            if_exists: IfExists::Replace,
            unpack: false,
            keep_previous: KEEP_PREVIOUS,
            cache: Default::default(),
        };
        let budget = Budget::new(ByteCount(4 * CHUNK));
        let prepared = prepare(
            &self.roots,
            &self.state,
            self.job,
            &spec,
            &payload,
            ChunkHash::Blake3,
            &budget,
        );
        let Preparation::Ready(target) = prepared.unwrap() else {
            panic!("skipped")
        };
        for ((bytes, digest), at) in chunks.iter().zip(&digests).zip(0..) {
            let compared = target.store().compare(ChunkIndex(at), *digest).unwrap();
            if compared == stage_transfer::store::Compared::Same {
                continue;
            }
            let claim = target.store().claim(ChunkIndex(at)).unwrap();
            claim.write(0, bytes).unwrap();
            claim.keep(*digest, None).unwrap();
        }
        target.publish(&fin).unwrap();
        target.note(&self.index, &fin).unwrap();
        let sha256 = Some(FileDigest([5; 32]));
        self.index.settle(&self.state, self.job, sha256).unwrap();
        target.release();
    }

    fn place(&self) -> Place {
        Place::Root {
            root: None,
            dir: Vec::new(),
        }
    }

    /// State and detail of each entry, by name.
    fn each(&self, verify: bool) -> Vec<(String, State, String)> {
        self.index
            .entries()
            .iter()
            .map(|entry| {
                let (state, detail) = if verify {
                    self.index.verify(&self.roots, entry, &mut |_| true).unwrap()
                } else {
                    self.index.look(&self.roots, entry)
                };
                let shown = entry.show(state, String::new()).path;
                (shown.rsplit('/').next().unwrap().to_owned(), state, detail)
            })
            .collect()
    }

    fn assert_states(&self, refdb: State, three: State) {
        for verify in [false, true] {
            let found: Vec<_> = self
                .each(verify)
                .into_iter()
                .map(|(name, state, _)| (name, state))
                .collect();
            assert_eq!(
                found,
                [("refdb".to_owned(), refdb), ("three".to_owned(), three)],
                "verified: {verify}; {:?}",
                self.each(verify)
            );
        }
    }

    fn detail(&self, name: &str) -> (State, String) {
        let found = self.each(true).into_iter().find(|(found, _, _)| found == name);
        let (_, state, detail) = found.unwrap();
        (state, detail)
    }

    fn remove(&self, name: &str, force: bool) -> Result<Removed, Failure> {
        let removal = Removal {
            place: self.place(),
            name: name.into(),
            force,
        };
        self.index.remove(&self.roots, &self.state, &removal, |_| true)
    }

    fn names(&self) -> Vec<String> {
        crate::bench::Bench::names(&self.root)
    }
}

fn overwrite(path: &Path, at: u64) {
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let time = file.metadata().unwrap().modified().unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    file.set_modified(time).unwrap();
}

#[test]
fn a_tree_and_a_file_are_known_each() {
    let node = Node::new();
    node.publish();
    node.assert_states(State::Ok, State::Ok);
    let shown: Vec<_> = node
        .index
        .entries()
        .iter()
        .map(|entry| entry.show(State::Ok, String::new()))
        .map(|copy| (copy.kind, copy.bytes.0, copy.sha256, copy.found))
        .collect();
    let tree = 2 * CHUNK + 109;
    assert_eq!(
        shown,
        [(Shown::Tree, tree, None, false), (Shown::File, 300, None, false)],
        "the digest of all is none of its parts'"
    );
}

#[test]
fn damage_in_a_tree_is_named() {
    let node = Node::new();
    node.publish();
    let tree = node.root.join("refdb");
    overwrite(&tree.join("big"), CHUNK + 5);
    let (state, why) = node.detail("refdb");
    assert_eq!(
        (state, why.as_str()),
        (State::Damaged, "chunk 1 of 3 (in refdb/big) differs")
    );
    assert_eq!(node.detail("three").0, State::Ok);
    overwrite(&tree.join("big"), CHUNK + 5);
    assert_eq!(node.detail("refdb").0, State::Ok);

    // A chunk that both have bytes of: whose fault it is cannot be told from it alone.
    overwrite(&tree.join("small"), 3);
    let (state, why) = node.detail("refdb");
    assert_eq!(state, State::Damaged);
    assert!(why.contains("shared with other parts"), "{why}");
    overwrite(&tree.join("small"), 3);
    assert_eq!(node.detail("refdb").0, State::Ok);
    node.assert_states(State::Ok, State::Ok);
    fs::remove_file(node.root.join("three")).unwrap();
    let (state, why) = node.detail("refdb");
    assert_eq!(state, State::Unreadable, "{why}");
    assert!(why.contains("shared with other parts"), "{why}");
}

#[test]
fn what_is_wrong_with_a_trees_entries_is_seen() {
    let check = |change: &dyn Fn(&Path), said: &str| {
        let node = Node::new();
        node.publish();
        change(&node.root.join("refdb"));
        let (state, why) = node.detail("refdb");
        assert_eq!((state, why.as_str()), (State::Damaged, said));
    };
    check(
        &|tree| fs::remove_file(tree.join("small")).unwrap(),
        "refdb/small is missing",
    );
    check(
        &|tree| fs::remove_dir_all(tree.join("sub")).unwrap(),
        "refdb/sub is missing",
    );
    check(
        &|tree| fs::write(tree.join("small"), "x").unwrap(),
        "refdb/small has 1 bytes and not 100",
    );
    check(
        &|tree| fs::write(tree.join("sub/more"), "x").unwrap(),
        "there is more in it than was published",
    );
    let relink = |tree: &Path, name: &str, to: &str| {
        fs::remove_file(tree.join(name)).unwrap();
        symlink(to, tree.join(name)).unwrap();
    };
    check(
        &|tree| relink(tree, "link", "/etc/passwd"),
        "refdb/link is something else",
    );
    check(
        &|tree| relink(tree, "small", "big"),
        "refdb/small is something else",
    );
    check(
        &|tree| {
            fs::remove_file(tree.join("name")).unwrap();
            fs::copy(tree.join("big"), tree.join("name")).unwrap();
        },
        "refdb/name is something else",
    );
}

#[test]
fn what_the_name_leads_to_counts() {
    let mut node = Node::new();
    node.publish();
    let name = node.root.join("refdb");
    let generation = fs::read_link(&name).unwrap();
    fs::remove_file(&name).unwrap();
    assert_eq!(node.each(false)[0].1, State::Missing);
    symlink("/etc", &name).unwrap();
    assert_eq!(node.each(false)[0].1, State::Changed);
    assert_eq!(node.remove("refdb", true).unwrap_err().code, Code::WrongKind);
    fs::remove_file(&name).unwrap();
    symlink(&generation, &name).unwrap();
    assert_eq!(node.each(false)[0].1, State::Ok);
    // The next generation takes the entry over.
    node.job = JobId::from_random([8; 16]);
    node.bytes[4][3] ^= 1;
    node.publish();
    node.assert_states(State::Ok, State::Ok);
    let jobs: Vec<_> = node
        .index
        .entries()
        .iter()
        .map(|entry| entry.show(State::Ok, String::new()).job)
        .collect();
    assert_eq!(jobs, [node.job, node.job]);
    assert_ne!(fs::read_link(&name).unwrap(), generation);
}

#[test]
fn a_tree_is_removed_whole() {
    let node = Node::new();
    node.publish();
    let reader = fs::File::open(node.root.join("refdb/small")).unwrap();
    // Changed deep inside: not without force.
    fs::write(node.root.join("refdb/sub/empty"), "not any more").unwrap();
    let failure = node.remove("refdb", false).unwrap_err();
    assert_eq!(failure.code, Code::Exists, "{failure}");
    assert!(failure.message.contains("refdb/sub/empty"), "{failure}");
    // A directory that lets nobody in is no obstacle.
    fs::set_permissions(node.root.join("refdb/sub"), fs::Permissions::from_mode(0o500)).unwrap();
    let removed = node.remove("refdb", true).unwrap();
    assert!(removed.was_there);
    // Whoever reads it keeps all of it until then.
    assert_eq!(node.names(), [".stage", "three"]);
    let sweep = || {
        retired::sweep(
            &node.roots,
            &node.state,
            SystemTime::now() + Duration::from_secs(5),
        )
        .removed
    };
    assert_eq!(sweep(), [""; 0]);
    let mut byte = [0];
    reader.read_exact_at(&mut byte, 3).unwrap();
    assert_eq!(byte[0], node.bytes[4][3]);
    drop(reader);
    assert_eq!(sweep().len(), 1);
    assert_eq!(node.names(), ["three"], "with the directory of generations");
    assert!(node.remove("three", false).unwrap().was_there);
    assert_eq!(node.names(), [""; 0]);
    assert!(node.index.entries().is_empty());
    assert!(!node.remove("refdb", false).unwrap().was_there);
}

#[test]
fn a_tree_whose_name_somebody_removed_takes_no_room_once_it_is_removed() {
    let node = Node::new();
    node.publish();
    fs::remove_file(node.root.join("refdb")).unwrap();
    assert!(!node.remove("refdb", false).unwrap().was_there);
    assert_eq!(node.names(), ["three"], "its generation went too");
}

#[test]
fn those_before_it_go_with_it_and_without_it() {
    let mut node = Node::new();
    node.publish();
    let replace = |node: &mut Node, n: u8| {
        node.job = JobId::from_random([n; 16]);
        node.bytes[4][3] ^= n;
        node.publish();
    };
    let sweep = |node: &Node, hours: u64| {
        let time = Duration::from_secs(hours * 3600 + 5);
        retired::sweep(&node.roots, &node.state, SystemTime::now() + time)
            .removed
            .len()
    };
    let generations = |node: &Node| fs::read_dir(node.root.join(".stage")).map_or(0, Iterator::count);
    replace(&mut node, 8);
    // What the old one shared with the new one looks other than before once it has gone, and is not.
    assert_eq!((sweep(&node, 0), sweep(&node, 24)), (0, 1));
    node.assert_states(State::Ok, State::Ok);
    replace(&mut node, 16);
    assert_eq!(generations(&node), 2);
    assert!(node.remove("refdb", false).unwrap().was_there);
    assert_eq!(generations(&node), 1);
    assert_eq!(sweep(&node, 0), 1, "its time is over too");
    assert_eq!(node.names(), ["three"]);
}

/// The name is a link, which somebody removes by hand, and pushes anew.
#[test]
fn what_lost_its_name_by_hand_goes_once_the_name_is_pushed_again() {
    let sweep = |node: &Node, hours: u64| {
        let time = Duration::from_secs(hours * 3600 + 5);
        let swept = retired::sweep(&node.roots, &node.state, SystemTime::now() + time);
        swept.removed.len()
    };
    for other_name in [false, true] {
        let mut node = Node::new();
        node.publish();
        let name = node.root.join("refdb");
        let before = node.root.join(fs::read_link(&name).unwrap());
        if other_name {
            fs::rename(&name, node.root.join("kept")).unwrap();
        } else {
            fs::remove_file(&name).unwrap();
        }
        node.job = JobId::from_random([8; 16]);
        node.bytes[4][3] ^= 1;
        node.publish();
        assert_eq!(sweep(&node, 0), 0, "it stays as long as one that is replaced");
        assert!(before.exists());
        assert_eq!(sweep(&node, 24), usize::from(!other_name));
        assert_eq!(
            before.exists(),
            other_name,
            "a link that somebody renamed is meant to be kept"
        );
        node.assert_states(State::Ok, State::Ok);
    }
}

#[test]
fn a_directory_that_was_there_before_is_not_ours() {
    let node = Node::new();
    node.publish();
    // The same, but as a directory of somebody's own.
    let name = node.root.join("refdb");
    let generation = node.root.join(fs::read_link(&name).unwrap());
    node.index.entries();
    fs::remove_file(&name).unwrap();
    fs::rename(&generation, &name).unwrap();
    fs::remove_dir_all(node.root.join(".stage")).unwrap();
    let other = Node {
        job: JobId::from_random([9; 16]),
        index: Index::open(&node.root.join("../other")),
        state: node.root.join("../other"),
        roots: Roots::open(vec![("scratch".parse().unwrap(), node.root.clone())]),
        ..Node::within(node.root.parent().unwrap())
    };
    other.publish();
    other.assert_states(State::Ok, State::Ok);
    assert!(fs::symlink_metadata(&name).unwrap().is_dir(), "nothing was moved");
    assert!(other.remove("refdb", false).unwrap_err().hint.contains("--force"));
    assert!(other.remove("refdb", true).unwrap().was_there);
    assert_eq!(node.names(), ["three"]);
}

#[test]
fn a_long_manifest_is_kept_too() {
    let mut node = Node::new();
    for at in 0..400 {
        node.file(&format!("wide-{at:04}/with a long name as many have one"), 0);
    }
    let names: Vec<_> = (0..400)
        .map(|at| format!("refdb/z{at:04} with a long name, as many have one"))
        .collect();
    node.manifest.entries.truncate(7);
    node.bytes.truncate(7);
    for (at, name) in names.iter().enumerate() {
        node.file(name, at as u64);
    }
    node.publish();
    let found = node.each(true);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].1, State::Ok, "{}", found[0].2);
    overwrite(&node.root.join(&names[399]), 3);
    let (state, why) = node.detail("refdb");
    assert_eq!(state, State::Damaged);
    assert!(why.contains("(in refdb/"), "{why}");
    let sha256 = node.index.entries()[0].sha256();
    assert_eq!(sha256, Some(FileDigest([5; 32])));
}

const DIR: &str = "STAGE_TEST_INDEXED_TREES_DIR";

/// Not a test of its own: the removal that is cut short.
#[test]
#[ignore = "run by the test below as a child"]
fn child() {
    let Some(dir) = std::env::var_os(DIR) else {
        return;
    };
    let node = Node::within(dir.as_ref());
    node.publish();
    node.remove("refdb", false).unwrap();
}

#[test]
fn a_removal_that_was_cut_short_is_ended() {
    for point in ["before_away", "after_away", "after_name", "after_unlink"] {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "indexed_trees::child", "--quiet"])
            .env("STAGE_CRASH_AT", point)
            .env(DIR, dir.path())
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.signal(), Some(9), "{point}: the child was to be killed");
        let node = Node::within(dir.path());
        node.index.recover(&node.roots);
        if point == "before_away" {
            node.assert_states(State::Ok, State::Ok);
        } else {
            assert_eq!(node.names(), ["three"], "{point}");
            assert_eq!(node.index.entries().len(), 1, "{point}");
        }
    }
}
