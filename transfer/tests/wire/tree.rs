//! Trees at their source: read once, digested as the usual tools digest them, held against what they were.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use md5::Md5;
use sha2::{Digest as _, Sha256};
use stage_core::assignment::SourceSpec;
use stage_core::chunk::{CHUNK, ChunkIndex};
use stage_core::digest::{Expected, FileDigest, Md5Digest};
use stage_core::failure::{Code, Failure};
use stage_core::manifest::{Kind, Manifest};
use stage_core::payload::{Expectation, SourcePath, Walk};
use stage_core::units::Rate;
use stage_transfer::source::{Pulse, look};

use crate::bench::{Bench, Node, Running, content, until};

fn spec(paths: &[&Path]) -> SourceSpec {
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

/// A tree whose manifest is too long for an order, and that is read before anybody asks for it.
fn grow(dir: &Path) -> PathBuf {
    let tree = dir.join("refdb");
    fs::create_dir_all(tree.join("vol/deep")).unwrap();
    fs::create_dir(tree.join("empty")).unwrap();
    fs::create_dir(tree.join("many")).unwrap();
    for at in 0..500 {
        fs::write(tree.join(format!("many/{at:03}.fa")), content(1 + at * 7)).unwrap();
    }
    for (name, size) in [
        ("a.nsq", 2 * CHUNK + 77),
        ("vol/b.nsq", CHUNK),
        ("vol/deep/c.nsq", CHUNK + 1),
        ("vol/deep/none", 0),
        ("z", 5),
    ] {
        fs::write(tree.join(name), content(size)).unwrap();
    }
    let sparse = File::create(tree.join("vol/sparse")).unwrap();
    sparse.set_len(40 * CHUNK + 5).unwrap();
    sparse.write_all_at(&content(CHUNK + 9), 9 * CHUNK).unwrap();
    sparse.write_all_at(&content(99), 30 * CHUNK).unwrap();
    fs::hard_link(tree.join("z"), tree.join("vol/z")).unwrap();
    symlink("../z", tree.join("vol/link")).unwrap();
    tree
}

/// What the usual tools make of a tree.
fn listing(dir: &Path, units: &str) -> FileDigest {
    let command =
        format!("find {units} -type f -print0 | LC_ALL=C sort -z | xargs -0r sha256sum | sha256sum");
    let output = Command::new("sh")
        .args(["-c", &command])
        .current_dir(dir)
        .output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    text.split(' ').next().unwrap().parse().unwrap()
}

/// Reads a file back out of the source's chunks.
fn read_back(source: &Running, manifest: &Manifest, entry: u32, size: u64) -> Vec<u8> {
    let store = source.source.store();
    let mut bytes = vec![0; size as usize];
    for piece in manifest.pieces().iter().filter(|piece| piece.entry == entry) {
        let mut done = 0;
        while done < piece.len {
            let at = piece.in_payload + done;
            let some = (piece.len - done).min(CHUNK - at % CHUNK);
            let chunk = ChunkIndex(store.layout().head_count() + (at / CHUNK) as u32);
            let to = (piece.in_file + done) as usize;
            let part = &mut bytes[to..to + some as usize];
            store.read(chunk, (at % CHUNK) as usize, part).unwrap();
            done += some;
        }
    }
    bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_is_read_once_and_has_the_digest_of_its_listing() {
    let bench = Bench::insecure(3);
    let tree = grow(bench.dir());
    let spec = spec(&[&tree, &bench.file]);
    let looked = look(&spec, &Pulse::default()).unwrap();
    let (manifest, payload) = (looked.manifest.clone(), looked.payload.clone());
    assert!(payload.head().0 > 0, "its manifest is too long to ride along");
    let node = bench.node("n0");
    let running = bench.source_as(&node, spec, payload.clone(), Some(looked)).await;
    let mut source = running.unwrap();
    let fin = source.fin().await;
    assert_eq!(fin.chunks, payload.layout().unwrap().count());
    assert_eq!(source.sha256().await, listing(bench.dir(), "refdb genome.db"));
    let counters = source.source.counters();
    assert_eq!(counters.source_bytes_read, payload.data.0);
    assert_eq!(counters.sha256_bytes, payload.size.0);

    let mut head = vec![0; payload.head().0 as usize];
    source.source.store().read(ChunkIndex(0), 0, &mut head).unwrap();
    assert_eq!(Manifest::decode(&head).unwrap(), manifest);
    for (entry, index) in manifest.entries.iter().zip(0..) {
        if let Kind::File { size, .. } = entry.kind {
            let path = bench.dir().join(OsStr::from_bytes(&entry.path));
            let bytes = read_back(&source, &manifest, index, size.0);
            assert!(bytes == fs::read(&path).unwrap(), "{}", path.display());
        }
    }
    source.source.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn trees_without_any_data_are_payloads_too() {
    let bench = Bench::insecure(3);
    let tree = bench.dir().join("refdb");
    fs::create_dir_all(tree.join("empty")).unwrap();
    let node = bench.node("n0");
    for name in [None, Some("a"), Some("b")] {
        if let Some(name) = name {
            fs::write(tree.join(name), b"").unwrap();
        }
        let mut source = bench.source_of(&node, spec(&[&tree])).await.unwrap();
        assert_eq!(source.fin().await.chunks, 0);
        assert_eq!(source.sha256().await, listing(bench.dir(), "refdb"));
        source.source.stop().await;
    }
}

/// Does something to a tree once a chunk of it was read and more is to be; lets it go on with all.
async fn meanwhile(change: &dyn Fn(&Path), walk: Walk) -> (Bench, Node, Running) {
    let bench = Bench::insecure(3);
    let tree = bench.dir().join("refdb");
    fs::create_dir_all(tree.join("sub/deep")).unwrap();
    // Read first; then what is read last.
    fs::write(tree.join("first"), content(CHUNK)).unwrap();
    fs::write(tree.join("large"), content(4 * CHUNK + 3)).unwrap();
    fs::write(tree.join("sub/deep/last"), b"last").unwrap();
    symlink("last", tree.join("sub/deep/link")).unwrap();
    let node = bench.node("n0");
    let spec = SourceSpec {
        limit: Some(Rate::from_bytes_per_second(2e6)),
        walk,
        ..spec(&[&tree])
    };
    let source = bench.source_of(&node, spec).await.unwrap();
    until("a chunk", || source.source.store().has(ChunkIndex(0))).await;
    change(&tree);
    source.source.set_source_limit(None);
    (bench, node, source)
}

async fn fails(at: &str, words: &str, change: impl Fn(&Path)) {
    let (bench, _node, mut source) = meanwhile(&change, Walk::default()).await;
    let failure = source.failure().await;
    assert_eq!(failure.code, Code::SourceChanged, "{failure}");
    assert!(failure.message.contains(words), "{failure}");
    let path = bench.dir().join(at);
    assert_eq!(failure.path.as_deref(), path.to_str(), "{failure}");
    source.source.stop().await;
}

async fn arrives(walk: Walk, change: impl Fn(&Path)) {
    let (bench, _node, mut source) = meanwhile(&change, walk).await;
    source.fin().await;
    source.sha256().await;
    source.source.stop().await;
    drop(bench);
}

fn append(path: &Path) {
    let mut file = OpenOptions::new().append(true).open(path).unwrap();
    file.write_all(b"more").unwrap();
}

// R30, in trees: files that were read, are being read, and are to be read.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_a_tree_that_changes_is_named() {
    fails("refdb/first", "size", |tree| append(&tree.join("first"))).await;
    fails("refdb/large", "size", |tree| append(&tree.join("large"))).await;
    fails("refdb/sub/deep/last", "size", |tree| {
        append(&tree.join("sub/deep/last"));
    })
    .await;
    fails("refdb/large", "size", |tree| {
        let file = OpenOptions::new().write(true).open(tree.join("large")).unwrap();
        file.set_len(9).unwrap();
    })
    .await;
    fails("refdb/first", "reads differently", |tree| {
        let file = OpenOptions::new().write(true).open(tree.join("first")).unwrap();
        let mtime = file.metadata().unwrap().modified().unwrap();
        file.write_all_at(b"other", 7).unwrap();
        file.set_modified(mtime).unwrap();
    })
    .await;
    fails("refdb/first", "another file", |tree| {
        fs::write(tree.join("new"), content(CHUNK)).unwrap();
        fs::rename(tree.join("new"), tree.join("first")).unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_entry_that_comes_or_goes_is_named() {
    fails("refdb/sub/deep", "new was added", |tree| {
        fs::write(tree.join("sub/deep/new"), b"").unwrap();
    })
    .await;
    fails("refdb/sub", "two\\x0alines was added", |tree| {
        fs::create_dir(tree.join("sub/two\nlines")).unwrap();
    })
    .await;
    fails("refdb/sub/deep/last", "gone", |tree| {
        fs::remove_file(tree.join("sub/deep/last")).unwrap();
    })
    .await;
    fails("refdb/sub/deep/link", "leads elsewhere", |tree| {
        fs::remove_file(tree.join("sub/deep/link")).unwrap();
        symlink("first", tree.join("sub/deep/link")).unwrap();
    })
    .await;
    fails("refdb/sub/deep/link", "something else", |tree| {
        fs::remove_file(tree.join("sub/deep/link")).unwrap();
        fs::write(tree.join("sub/deep/link"), b"last").unwrap();
    })
    .await;
    fails("refdb", "another directory", |tree| {
        fs::rename(tree, tree.with_extension("old")).unwrap();
        fs::create_dir(tree).unwrap();
    })
    .await;
}

// R31: what changes no content is no change.
#[tokio::test(flavor = "multi_thread")]
async fn times_modes_and_passing_guests_are_no_change() {
    arrives(Walk::default(), |tree| {
        for path in ["first", "large", "sub/deep/last"] {
            fs::set_permissions(tree.join(path), Permissions::from_mode(0o600)).unwrap();
        }
        let file = OpenOptions::new().write(true).open(tree.join("first")).unwrap();
        let mtime = file.metadata().unwrap().modified().unwrap();
        file.set_modified(mtime + Duration::from_millis(1999)).unwrap();
    })
    .await;
    arrives(Walk::default(), |tree| {
        fs::write(tree.join("sub/guest"), b"").unwrap();
        fs::remove_file(tree.join("sub/guest")).unwrap();
        fs::remove_file(tree.join("sub/deep/link")).unwrap();
        symlink("last", tree.join("sub/deep/link")).unwrap();
        fs::rename(tree, tree.with_extension("elsewhere")).unwrap();
    })
    .await;
    let walk = Walk {
        exclude: vec!["*.tmp".to_owned()],
        ..Walk::default()
    };
    arrives(walk, |tree| fs::write(tree.join("sub/x.tmp"), b"").unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_that_changed_since_it_was_looked_at_is_not_begun() {
    let bench = Bench::insecure(3);
    let tree = bench.dir().join("refdb");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("a"), b"1").unwrap();
    let node = bench.node("n0");
    let looked = look(&spec(&[&tree]), &Pulse::default()).unwrap();
    let payload = looked.payload.clone();
    fs::write(tree.join("b"), b"2").unwrap();
    for look in [Some(looked), None] {
        let source = bench
            .source_as(&node, spec(&[&tree]), payload.clone(), look)
            .await;
        let failure = source.err().expect("refused");
        assert_eq!(failure.code, Code::SourceChanged, "{failure}");
    }
}

async fn expecting(bench: &Bench, tree: &Path, expect: &[(&str, Expected)]) -> Result<(), Failure> {
    let expect = expect.iter().map(|(path, digest)| Expectation {
        path: path.as_bytes().to_vec(),
        digest: *digest,
    });
    let spec = SourceSpec {
        expect: expect.collect(),
        ..spec(&[tree])
    };
    let mut source = bench.source_of(&bench.node("n0"), spec).await?;
    let report = source.reports.recv().await.unwrap();
    source.source.stop().await;
    match report {
        stage_core::assignment::SourceReport::Failed(failure) => Err(failure),
        stage_core::assignment::SourceReport::Final(_) => Ok(()),
        other => panic!("{other:?} before FINAL"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_wrong_digest_of_many_stops_it_and_is_named() {
    let bench = Bench::insecure(3);
    let tree = grow(bench.dir());
    let read = |path: &str| fs::read(tree.join(path)).unwrap();
    let sha = |path: &str| Expected::Sha256(FileDigest(Sha256::digest(read(path)).into()));
    let md5 = |path: &str| Expected::Md5(Md5Digest(Md5::digest(read(path)).into()));
    let right = [
        ("a.nsq", sha("a.nsq")),
        ("./vol/sparse", sha("vol/sparse")),
        ("refdb/vol/z", sha("z")),
        ("many/007.fa", md5("many/007.fa")),
        ("a.nsq", md5("a.nsq")),
        ("vol/deep/none", md5("vol/deep/none")),
    ];
    expecting(&bench, &tree, &right).await.unwrap();
    for wrong in 0..right.len() {
        let mut lines = right;
        lines[wrong].1 = match lines[wrong].1 {
            Expected::Sha256(_) => Expected::Sha256(FileDigest([7; 32])),
            Expected::Md5(_) => Expected::Md5(Md5Digest([7; 16])),
        };
        let failure = expecting(&bench, &tree, &lines).await.unwrap_err();
        assert_eq!(failure.code, Code::Unexpected, "{failure}");
        let name = lines[wrong].0.rsplit('/').next().unwrap();
        assert!(failure.path.unwrap().ends_with(name));
    }
    let unknown = [("vol/none", sha("z"))];
    let failure = expecting(&bench, &tree, &unknown).await.unwrap_err();
    assert_eq!(failure.code, Code::Usage);
    assert!(failure.message.contains("names no file"), "{failure}");
}
