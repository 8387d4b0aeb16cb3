//! Directories as people have them, pushed whole.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use rustix::fs::{XattrFlags, lgetxattr, llistxattr, setxattr};
use serde_json::Value;

use crate::cluster::{Cluster, Ran, sha256, text};

const CHUNK: u64 = 1 << 20;

/// What is told of an entry; files of several names by the first of these.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    kind: &'static str,
    mode: u32,
    mtime: (i64, i64),
    content: Vec<u8>,
    first_name: PathBuf,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// All that lies below a directory, and the directory itself.
fn seen(top: &Path) -> BTreeMap<PathBuf, Seen> {
    let mut all = BTreeMap::new();
    let mut inodes = BTreeMap::new();
    look(&top.canonicalize().unwrap(), Path::new(""), &mut inodes, &mut all);
    all
}

fn look(top: &Path, below: &Path, inodes: &mut BTreeMap<u64, PathBuf>, all: &mut BTreeMap<PathBuf, Seen>) {
    let path = top.join(below);
    let meta = fs::symlink_metadata(&path).unwrap();
    let (kind, content) = if meta.is_symlink() {
        (
            "link",
            fs::read_link(&path)
                .unwrap()
                .into_os_string()
                .into_encoded_bytes(),
        )
    } else if meta.is_dir() {
        ("directory", Vec::new())
    } else {
        ("file", fs::read(&path).unwrap())
    };
    let first_name = match meta.is_dir() {
        true => PathBuf::new(),
        false => inodes
            .entry(meta.ino())
            .or_insert_with(|| below.to_owned())
            .clone(),
    };
    let seen = Seen {
        kind,
        mode: meta.mode() & 0o7777,
        mtime: (meta.mtime(), meta.mtime_nsec()),
        content,
        first_name,
        xattrs: xattrs(&path),
    };
    all.insert(below.to_owned(), seen);
    if meta.is_dir() {
        let mut names: Vec<_> = fs::read_dir(&path)
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        names.sort();
        for name in names {
            look(top, &below.join(name), inodes, all);
        }
    }
}

fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut list = vec![0; 64 << 10];
    let len = llistxattr(path, &mut list[..]).unwrap_or(0);
    let names = list[..len].split(|byte| *byte == 0);
    names
        .filter(|name| name.starts_with(b"user.") || name.starts_with(b"system.posix_acl"))
        .map(|name| {
            let mut value = vec![0; 64 << 10];
            let len = lgetxattr(path, name, &mut value[..]).unwrap();
            (name.to_vec(), value[..len].to_vec())
        })
        .collect()
}

#[track_caller]
fn assert_same(source: &Path, copy: &Path) {
    let (source, copy) = (seen(source), seen(copy));
    assert!(
        source.keys().eq(copy.keys()),
        "{:?}\n{:?}",
        source.keys(),
        copy.keys()
    );
    for (path, theirs) in &source {
        assert!(copy[path] == *theirs, "{}", path.display());
    }
}

/// What rsync would do to make the copy what the source is; nothing where it is not installed.
fn rsync(source: &Path, copy: &Path) -> String {
    let mut command = Command::new("rsync");
    command.args(["-nirlptcHAX", "--delete"]);
    command.arg(source.join("")).arg(copy.join(""));
    match command.output() {
        Ok(output) => String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned(),
        Err(_) => String::new(),
    }
}

/// What the usual tools make of directories.
fn listing(dir: &Path, units: &str) -> String {
    let command =
        format!("find {units} -type f -print0 | LC_ALL=C sort -z | xargs -0r sha256sum | sha256sum");
    let output = Command::new("sh")
        .args(["-c", &command])
        .current_dir(dir)
        .output();
    let text = String::from_utf8(output.unwrap().stdout).unwrap();
    text.split(' ').next().unwrap().to_owned()
}

/// A database of some volumes, with all that a directory can hold.
fn database(cluster: &Cluster) -> PathBuf {
    let tree = cluster.path("refdb");
    fs::create_dir_all(tree.join("vol/deep/deeper")).unwrap();
    fs::create_dir_all(tree.join("empty/too")).unwrap();
    fs::copy(cluster.source("large", 2 * CHUNK + 7), tree.join("vol/a.nsq")).unwrap();
    fs::copy(cluster.source("whole", CHUNK), tree.join("vol/b.nsq")).unwrap();
    fs::write(tree.join("refdb.nal"), b"TITLE refdb\n").unwrap();
    fs::write(tree.join("vol/deep/deeper/none"), b"").unwrap();
    for at in 0..400 {
        fs::write(
            tree.join(format!("vol/deep/{at:03}.txt")),
            format!("{at}").repeat(at),
        )
        .unwrap();
    }
    let odd: [&[u8]; 6] = [
        b"two\nlines",
        b"\xff\xfe.fa",
        b"-rf",
        b" ",
        b"esc\x1b[31m",
        b"back\\slash",
    ];
    for name in odd {
        fs::write(tree.join(OsStr::from_bytes(name)), name).unwrap();
    }
    let sparse = File::create(tree.join("vol/sparse")).unwrap();
    sparse.set_len(1 << 30).unwrap();
    sparse.write_all_at(b"data", 1 << 29).unwrap();
    fs::hard_link(tree.join("vol/a.nsq"), tree.join("a.again")).unwrap();
    fs::hard_link(tree.join("vol/a.nsq"), tree.join("vol/deep/a.thrice")).unwrap();
    symlink("../refdb.nal", tree.join("vol/alias")).unwrap();
    symlink("nowhere", tree.join("dangling")).unwrap();
    symlink("..", tree.join("vol/up")).unwrap();
    fs::set_permissions(tree.join("vol/b.nsq"), Permissions::from_mode(0o440)).unwrap();
    fs::set_permissions(tree.join("vol/deep"), Permissions::from_mode(0o750)).unwrap();
    fs::set_permissions(tree.join("empty"), Permissions::from_mode(0o700)).unwrap();
    let named = |path: &str, name: &str| setxattr(tree.join(path), name, b"\0of mine", XattrFlags::empty());
    // Where the file system has none, none come along.
    let _ = named("vol/b.nsq", "user.about");
    let _ = named("vol", "user.volume");
    for (path, second) in [("refdb.nal", 1), ("vol/deep", 2), ("", 3)] {
        let time = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000 + second, 123_456_789);
        File::open(tree.join(path)).unwrap().set_modified(time).unwrap();
    }
    tree
}

// R46, R50.
#[test]
fn a_directory_arrives_as_it_is() {
    let cluster = Cluster::start(4);
    let tree = database(&cluster);
    // With a slash at its end it is the same.
    let ran = cluster
        .push(
            &tree.join(""),
            &["--to", "targets", "--shape", "chain", "--xattrs"],
        )
        .expect(0);
    let end = ran.last();
    assert_eq!(text(&end["sha256"]), listing(&cluster.path(""), "refdb"));
    let data = 3 * CHUNK;
    assert!(end["payload_bytes"].as_u64().unwrap() < data + (1 << 20), "{end}");
    for node in 1..4 {
        let copy = cluster.root(node).join("refdb");
        assert_same(&tree, &copy);
        assert_eq!(rsync(&tree, &copy), "", "n{node}");
        assert!(fs::metadata(copy.join("vol/sparse")).unwrap().blocks() < 1000);
        let received = ran.node(&format!("n{node}"))["bytes_received"].as_u64();
        assert_eq!(received, end["payload_bytes"].as_u64(), "each byte once");
    }
    for line in ran.stdout.lines().chain(ran.stderr.lines()) {
        assert!(!line.contains(char::is_control), "{line:?}");
    }
}

// R75: whoever shall have it, the source's directories are read once, and its entries looked at once before anything is
// read and once after.
#[test]
fn the_source_is_walked_once_whoever_shall_have_it() {
    let mut cluster = Cluster::prepare(4);
    let tree = cluster.path("refdb");
    const FILES: usize = 2000;
    for dir in 0..20 {
        fs::create_dir_all(tree.join(dir.to_string())).unwrap();
        for file in 0..FILES / 20 {
            fs::write(tree.join(format!("{dir}/{file}")), file.to_string()).unwrap();
        }
    }
    cluster.start_coordinator();
    (1..4).for_each(|node| cluster.start_agent(node));
    let calls = cluster.path("calls");
    let Some(agent) = cluster.start_traced(0, "getdents64,newfstatat", &calls) else {
        return;
    };
    cluster.wait_up(4);
    cluster.push(&tree, &["--to", "targets"]).expect(0);
    drop(agent);
    let calls = fs::read_to_string(calls).unwrap();
    let count = |call: &str| calls.lines().filter(|line| line.contains(call)).count();
    // The end of each directory is an answer of its own; a few calls are the agent's own.
    let lists = count("getdents64(");
    assert!(
        (2 * 21..2 * 21 + 30).contains(&lists),
        "{lists} calls for 21 directories"
    );
    let looks = count("newfstatat(");
    // And some of them every two seconds.
    let twice = 2 * (FILES + 21);
    assert!(
        (twice..2 * twice).contains(&looks),
        "{looks} calls for {FILES} files"
    );
}

#[test]
fn several_paths_are_one_push() {
    let cluster = Cluster::start(3);
    let tree = database(&cluster);
    let more = cluster.source("more.fa", CHUNK + 5);
    let ran = cluster
        .push(&tree, &["more.fa", "--to", "targets", "--exclude", "vol/"])
        .expect(0);
    let [one, other] = [cluster.root(1), cluster.root(2)];
    for root in [one, other] {
        assert_eq!(sha256(&root.join("more.fa")), sha256(&more));
        assert!(!root.join("refdb/vol").exists());
        assert_eq!(fs::read(root.join("refdb/refdb.nal")).unwrap(), b"TITLE refdb\n");
    }
    assert_eq!(ran.last()["state"], "done");
    let named = cluster
        .push(&tree, &["--to", "n1", "--as", "k2", "--include", "*.nal"])
        .expect(0);
    assert_eq!(named.node("n1")["state"], "published");
    let found: Vec<_> = seen(&cluster.root(1).join("k2")).into_keys().collect();
    assert_eq!(found, [PathBuf::new(), "refdb.nal".into()]);
    cluster
        .push(&tree, &["more.fa", "--to", "n1", "--as", "x"])
        .expect(2);
    cluster.push(&tree, &["-", "--to", "n1"]).expect(2);
}

#[track_caller]
fn error<'a>(ran: &'a Ran, code: &str, at: &str, words: &str) -> &'a Value {
    let last = ran.last();
    assert_eq!(last["code"], code, "{last}");
    assert!(text(&last["path"]).ends_with(at), "{last}");
    assert!(text(&last["message"]).contains(words), "{last}");
    last
}

// R33.
#[test]
fn links_that_lead_in_a_circle_are_kept_or_refused() {
    let cluster = Cluster::start(2);
    let tree = database(&cluster);
    let begun = std::time::Instant::now();
    let circle = cluster
        .push(&tree, &["--to", "n1", "--follow", "--exclude", "dangling"])
        .expect(4);
    error(&circle, "source_kind", "refdb/vol/up", "circle");
    let nowhere = cluster.push(&tree, &["--to", "n1", "--follow"]).expect(4);
    error(&nowhere, "source_missing", "refdb/dangling", "leads to nothing");
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "nothing was walked without end"
    );
    assert!(cluster.listing(1).is_empty(), "{:?}", cluster.listing(1));
    cluster
        .push(
            &tree,
            &[
                "--to",
                "n1",
                "--follow",
                "--exclude",
                "dangling",
                "--exclude",
                "up",
            ],
        )
        .expect(0);
    let copy = cluster.root(1).join("refdb/vol/alias");
    assert!(fs::symlink_metadata(&copy).unwrap().is_file());
    assert_eq!(fs::read(copy).unwrap(), b"TITLE refdb\n");
}

#[test]
fn what_cannot_be_sent_is_named_before_a_byte_moves() {
    let cluster = Cluster::start(2);
    let tree = cluster.path("refdb");
    fs::create_dir_all(tree.join("run")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(tree.join("run/sock")).unwrap();
    let ran = cluster.push(&tree, &["--to", "n1"]).expect(4);
    let last = error(&ran, "source_kind", "refdb/run/sock", "a socket");
    assert!(text(&last["hint"]).contains("--exclude"));
    let glob = cluster.push(&tree, &["--to", "n1", "--exclude", "["]).expect(2);
    assert_eq!(glob.last()["code"], "usage");
    let nothing = cluster
        .push(&tree, &["--to", "n1", "--include", "*.fa"])
        .expect(4);
    assert!(text(&nothing.last()["message"]).contains("--include"));
    assert!(cluster.listing(1).is_empty());
}

#[test]
fn a_list_of_digests_decides_for_all_files() {
    let cluster = Cluster::start(3);
    let tree = database(&cluster);
    let list = |text: &[u8]| fs::write(cluster.path("SUMS"), text).unwrap();
    let push = |more: &[&str]| {
        let flags = [&["--to", "targets", "--expect", "SUMS"], more].concat();
        cluster.push(&tree, &flags)
    };
    let made = Command::new("sh")
        .args([
            "-c",
            "find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum",
        ])
        .current_dir(&tree)
        .output()
        .unwrap();
    let right = made.stdout;

    let none = format!("{}  vol/none.nsq\n", "0".repeat(64));
    list(&[&right, none.as_bytes()].concat());
    let unknown = push(&[]).expect(2);
    assert!(
        text(&unknown.last()["message"]).contains("names no file"),
        "{}",
        unknown.last()
    );
    let ours = sha256(&tree.join("vol/b.nsq"));
    let at = right.windows(64).position(|hex| hex == ours.as_bytes()).unwrap();
    let mut other = right.clone();
    other[at] = if other[at] == b'0' { b'1' } else { b'0' };
    list(&other);
    let wrong = push(&[]).expect(6);
    assert_eq!(wrong.last()["error"]["code"], "unexpected");
    assert!(
        text(&wrong.last()["error"]["path"]).ends_with("refdb/vol/b.nsq"),
        "{}",
        wrong.last()
    );
    for node in 1..3 {
        assert!(!cluster.root(node).join("refdb").exists(), "n{node}");
    }
    list(&right);
    let ran = push(&[]).expect(0);
    assert_eq!(ran.last()["agrees"], "sha256");
    let files = right.iter().filter(|byte| **byte == b'\n').count();
    assert_eq!(ran.last()["agreeing_files"], files);
    let job = text(&ran.last()["job"]);
    let status = cluster.run(&["status", &job[..8]]);
    let words = format!("{files} files agree with the sha256 that was expected");
    assert!(status.stdout.contains(&words), "{}", status.stdout);
}

// R30.
#[test]
fn a_file_that_changes_under_way_is_named_and_nothing_is_published() {
    let cluster = Cluster::start(2);
    let tree = database(&cluster);
    let log = cluster.path("changing.json");
    let mut push = cluster
        .push_command(&tree, &["--to", "n1", "--source-limit", "1 MB/s"])
        .stdout(File::create(&log).unwrap())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    cluster.wait_for("the first bytes", || {
        let jobs = cluster.run(&["status", "--json"]);
        let job = jobs.events.iter().find_map(|event| event["job"].as_str());
        job.is_some_and(|job| cluster.status(job)["source_bytes_read"].as_u64() > Some(0))
    });
    let mut file = File::options().append(true).open(tree.join("refdb.nal")).unwrap();
    file.write_all(b"more").unwrap();
    assert_eq!(push.wait().unwrap().code(), Some(6));
    let said = fs::read_to_string(&log).unwrap();
    let last: Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "source_changed");
    assert!(
        text(&last["error"]["path"]).ends_with("refdb/refdb.nal"),
        "{last}"
    );
    assert!(!cluster.root(1).join("refdb").exists());
}

#[test]
fn a_directory_can_be_planned() {
    let cluster = Cluster::start(3);
    let tree = database(&cluster);
    let mut plan = cluster.command(&["plan", "--from", "n0", "--to", "targets", "--json"]);
    let asked = Ran::of(plan.arg(&tree).output().unwrap());
    assert_eq!((asked.exit, &asked.last()["event"]), (0, &Value::from("planned")));
    let alone = [
        "plan",
        "--topology",
        "topology.toml",
        "--from",
        "n0",
        "--to",
        "targets",
        "--json",
    ];
    let mut plan = cluster.command(&alone);
    let alone = Ran::of(plan.arg(&tree).output().unwrap());
    assert_eq!((alone.exit, &alone.last()["event"]), (0, &Value::from("planned")));
    let dry = cluster.push(&tree, &["--to", "targets", "--dry-run"]);
    assert_eq!((dry.exit, &dry.last()["event"]), (0, &Value::from("planned")));
    assert!(cluster.listing(1).is_empty());
}
