//! Payloads as people have them: with holes, of odd names, changing under way.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::fs::{SeekFrom, seek};

use crate::cluster::{Cluster, sha256, text};

const CHUNK: u64 = 1 << 20;

/// A file of this apparent size with a chunk of data at each place.
fn sparse(cluster: &Cluster, name: &str, size: u64, places: &[u64]) -> PathBuf {
    let path = cluster.path(name);
    let file = File::create(&path).unwrap();
    file.set_len(size).unwrap();
    let data = fs::read(cluster.source("data", CHUNK)).unwrap();
    for at in places {
        file.write_all_at(&data, *at).unwrap();
    }
    path
}

/// Where a file has data, as its file system tells.
fn extents(path: &Path) -> Vec<(u64, u64)> {
    let file = File::open(path).unwrap();
    let mut found = Vec::new();
    let mut at = 0;
    while let Ok(start) = seek(&file, SeekFrom::Data(at)) {
        at = seek(&file, SeekFrom::Hole(start)).unwrap();
        found.push((start, at));
    }
    found
}

fn allocated(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

#[test]
fn a_terabyte_of_which_four_chunks_are_real() {
    let cluster = Cluster::start(3);
    let places = [0, 1 << 33, 1 << 39, (1 << 40) - CHUNK];
    let source = sparse(&cluster, "disk.img", 1 << 40, &places);
    // Its SHA-256 takes minutes and is not waited for.
    let ran = cluster
        .push(
            &source,
            &["--to", "targets", "--shape", "chain", "--enough", "100%"],
        )
        .expect(0);
    assert_eq!(ran.last()["bytes"], 1_u64 << 40);
    assert_eq!(ran.last()["payload_bytes"], 4 * CHUNK);
    assert_eq!(ran.last()["source_bytes_read"], 4 * CHUNK);
    for node in 1..3 {
        assert_eq!(ran.node(&format!("n{node}"))["bytes_received"], 4 * CHUNK);
        let copy = cluster.root(node).join("disk.img");
        assert_eq!(fs::metadata(&copy).unwrap().len(), 1 << 40);
        assert!(allocated(&copy) < 10 * CHUNK, "n{node}");
        assert_eq!(extents(&copy), extents(&source), "n{node}");
    }
}

#[test]
fn a_sparse_copy_has_the_digest_of_the_whole_and_is_already_there() {
    let cluster = Cluster::start(3);
    let source = sparse(&cluster, "disk.img", 96 * CHUNK + 5, &[3 * CHUNK + 7, 95 * CHUNK]);
    let first = cluster.push(&source, &["--to", "targets"]).expect(0);
    assert_eq!(text(&first.last()["sha256"]), sha256(&source));
    cluster.assert_published(1..3, &source);
    let again = cluster.push(&source, &["--to", "targets"]).expect(0);
    for node in ["n1", "n2"] {
        assert_eq!(again.node(node)["already"], true);
        assert_eq!(again.node(node)["bytes_received"], 0);
    }
    // A hole that is none any more is other content.
    let copy = File::options()
        .write(true)
        .open(cluster.root(1).join("disk.img"))
        .unwrap();
    copy.write_all_at(b"x", 40 * CHUNK).unwrap();
    let other = cluster.push(&source, &["--to", "targets"]).expect(5);
    assert_eq!(other.node("n1")["error"]["code"], "exists");
    let replaced = cluster
        .push(&source, &["--to", "targets", "--if-exists", "replace"])
        .expect(0);
    assert_eq!(replaced.node("n1")["bytes_received"], 0, "its data was there");
    cluster.assert_published(1..3, &source);
    cluster.wait_clean();
}

#[test]
fn names_of_any_bytes() {
    let cluster = Cluster::start(2);
    let long = "x".repeat(255);
    let names: [&[u8]; 7] = [
        b"two\nlines",
        b"-rf",
        b"gen\xf6m.db",
        b"trailing ",
        b"a..b",
        b"esc\x1b[31m",
        long.as_bytes(),
    ];
    for name in names {
        let name = OsStr::from_bytes(name);
        let source = cluster.path("sources").join(name);
        fs::create_dir_all(source.parent().unwrap()).unwrap();
        fs::write(&source, name.as_bytes()).unwrap();
        let ran = cluster.push(&source, &["--to", "n1"]).expect(0);
        for line in ran.stdout.lines().chain(ran.stderr.lines()) {
            assert!(!line.contains(char::is_control), "{line:?}");
        }
        assert_eq!(fs::read(cluster.root(1).join(name)).unwrap(), name.as_bytes());
    }
    assert_eq!(cluster.root(1).read_dir().unwrap().count(), names.len());
    cluster.wait_clean();
}

// R19, R22: what is there while a push goes on, and what a kill -9 leaves.
#[test]
fn a_push_under_way_takes_no_more_than_the_file_and_hides_it() {
    let mut cluster = Cluster::start(2);
    let size = 64 * CHUNK;
    let source = cluster.source("genome.db", size);
    let mut push = cluster
        .push_command(&source, &["--to", "n1", "--limit", "16 MiB/s"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let state = cluster.path("state-n1");
    let used = |cluster: &Cluster| under(&cluster.root(1)) + under(&state);
    let before = used(&cluster);
    let mut most = 0;
    cluster.wait_for("most of the copy", || {
        most = most.max(used(&cluster).saturating_sub(before));
        assert!(!cluster.root(1).join("genome.db").exists());
        received(&cluster) > size * 6 / 10
    });
    cluster.kill_agent(1);
    assert_eq!(cluster.listing(1).len(), 1);
    assert!(
        cluster.listing(1)[0].starts_with(".stage-"),
        "the partial has a name of ours"
    );
    cluster.start_agent(1);
    cluster.wait_for("the copy", || {
        most = most.max(used(&cluster).saturating_sub(before));
        cluster.root(1).join("genome.db").exists()
    });
    assert!(
        (size..=size + size / 100).contains(&most),
        "at most {most} bytes were taken"
    );
    push.wait().unwrap();
    cluster.assert_published([1], &source);
    cluster.wait_clean();
}

/// What n1 has received in the one job that there is.
fn received(cluster: &Cluster) -> u64 {
    let jobs = cluster.run(&["status", "--json"]);
    let job = jobs.events.iter().find_map(|event| event["job"].as_str());
    job.map_or(0, |job| {
        cluster.status(job)["nodes"][0]["bytes_received"]
            .as_u64()
            .unwrap_or(0)
    })
}

/// Bytes allocated below a directory.
fn under(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => under(&entry.path()),
            Ok(meta) => meta.blocks() * 512,
            // Renamed or removed just now.
            Err(_) => 0,
        })
        .sum()
}

// R15: small files and many streams (loss belongs to the tests in namespaces).
#[test]
fn more_streams_than_there_are_bytes_to_send() {
    let cluster = Cluster::start(3);
    for size in [0, 1, 2 * CHUNK] {
        let source = cluster.source(&format!("small-{size}"), size);
        cluster
            .push(&source, &["--to", "targets", "--streams", "16"])
            .expect(0);
        cluster.assert_published(1..3, &source);
    }
    cluster.wait_clean();
}
