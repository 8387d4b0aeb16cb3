//! What cannot be done is said: exit code, node, path, cause, next step; and nothing new is on the disk concerned.

use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};

use crate::cluster::{Cluster, Ran, sha256, text};

const CHUNK: u64 = 1 << 20;

#[track_caller]
fn said(ran: &Ran, words: &[&str]) {
    for word in words {
        assert!(
            ran.stderr.contains(word),
            "{word:?} is missing from stderr:\n{}\nstdout:\n{}",
            ran.stderr,
            ran.stdout
        );
    }
}

#[test]
fn sources_that_cannot_be_sent() {
    let cluster = Cluster::start(3);
    let missing = cluster
        .push(&cluster.path("none.db"), &["--to", "targets"])
        .expect(4);
    assert_eq!(missing.last()["event"], "error");
    assert_eq!(missing.last()["code"], "source_missing");
    said(&missing, &["n0", "none.db"]);

    let fifo = cluster.path("fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RWXU).unwrap();
    let kind = cluster.push(&fifo, &["--to", "targets"]).expect(4);
    assert_eq!(kind.last()["code"], "source_kind");
    said(&kind, &["n0", "fifo", "a FIFO"]);

    // root reads everything, so only another user can be refused.
    if !rustix::process::geteuid().is_root() {
        let secret = cluster.source("secret.db", CHUNK);
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o000)).unwrap();
        let unreadable = cluster.push(&secret, &["--to", "targets"]).expect(4);
        assert_eq!(unreadable.last()["code"], "source_unreadable");
    }
    cluster.wait_clean();
    assert!(cluster.listing(1).is_empty() && cluster.listing(2).is_empty());
}

#[test]
fn requests_that_mean_nothing() {
    let cluster = Cluster::start(2);
    let source = cluster.source("genome.db", CHUNK);
    let unknown = cluster.push(&source, &["--to", "n1,compute7"]).expect(2);
    assert_eq!(unknown.last()["code"], "unknown_target");
    said(&unknown, &["compute7"]);
    cluster.push(&source, &["--to", "n1,!n1"]).expect(2);
    assert_eq!(cluster.push(&source, &["--to", "n1", "--shape", "ring"]).exit, 2);
    cluster
        .push(&source, &["--to", "n1", "--dest", "main:../out"])
        .expect(2);
    assert!(!cluster.path("out").exists());
    assert!(cluster.listing(1).is_empty());
}

#[test]
fn no_coordinator_is_said_within_its_time() {
    let cluster = Cluster::prepare(2);
    let source = cluster.source("genome.db", CHUNK);
    let ran = cluster.push(&source, &["--to", "n1"]).expect(3);
    assert_eq!(ran.last()["code"], "no_coordinator");
    said(&ran, &["7700"]);
}

#[test]
fn a_node_that_is_away_is_filled_when_it_comes_back() {
    let mut cluster = Cluster::prepare(4);
    cluster.start_coordinator();
    for node in [0, 1, 3] {
        cluster.start_agent(node);
    }
    cluster.wait_up(3);
    let source = cluster.source("genome.db", 5 * CHUNK + 1);
    let ran = cluster.push(&source, &["--to", "targets"]).expect(5);
    assert_eq!(ran.last()["state"], "open");
    assert_eq!(ran.node("n2")["state"], "unfit");
    assert_eq!(ran.node("n2")["error"]["code"], "away");
    said(&ran, &["n2"]);
    cluster.assert_published([1, 3], &source);
    let job = text(&ran.last()["job"]);

    cluster.start_agent(2);
    cluster.wait_for("n2 to be filled", || cluster.status(&job)["state"] == "done");
    cluster.assert_published(1..4, &source);
    cluster.wait_clean();

    // The same with the rule to fail: nothing moves.
    cluster.kill_agent(2);
    cluster.wait_for("n2 to be away", || cluster.states()["n2"]["state"] == "away");
    let second = cluster.source("second.db", CHUNK);
    let ran = cluster
        .push(&second, &["--to", "targets", "--unfit", "fail"])
        .expect(4);
    assert_eq!(ran.last()["event"], "error");
    assert!(
        ran.last()["nodes"]
            .as_array()
            .is_some_and(|nodes| !nodes.is_empty()),
        "{}",
        ran.last()
    );
    let skipped = cluster.push(&second, &["--to", "targets", "--unfit", "skip"]);
    assert_eq!(skipped.exit, 5, "{}", skipped.stdout);
    cluster.assert_published([1, 3], &second);
}

#[test]
fn a_root_that_is_missing_or_closed_makes_its_node_unfit() {
    let mut cluster = Cluster::prepare(4);
    fs::remove_dir(cluster.root(2)).unwrap();
    fs::set_permissions(cluster.root(3), fs::Permissions::from_mode(0o500)).unwrap();
    cluster.start_coordinator();
    (0..4).for_each(|node| cluster.start_agent(node));
    cluster.wait_up(4);
    let source = cluster.source("genome.db", 2 * CHUNK);
    let ran = cluster.push(&source, &["--to", "targets"]).expect(5);
    assert_eq!(ran.node("n1")["state"], "published");
    assert_eq!(
        ran.node("n2")["error"]["code"],
        "root_unusable",
        "{}",
        ran.node("n2")
    );
    said(&ran, &["n2", &cluster.root(2).display().to_string()]);
    // root writes everywhere.
    if !rustix::process::geteuid().is_root() {
        assert_eq!(ran.node("n3")["state"], "unfit");
        assert!(cluster.listing(3).is_empty());
    }
}

#[test]
fn other_content_at_the_target() {
    let cluster = Cluster::start(4);
    let source = cluster.source("genome.db", 4 * CHUNK);
    let other = cluster.root(2).join("genome.db");
    fs::write(&other, "something else").unwrap();
    // Of the same size, so that only its bytes tell.
    let twin = cluster.root(3).join("genome.db");
    let mut bytes = fs::read(&source).unwrap();
    bytes[3 << 20] ^= 1;
    fs::write(&twin, &bytes).unwrap();

    let ran = cluster.push(&source, &["--to", "targets"]).expect(5);
    assert_eq!(ran.node("n1")["state"], "published");
    for node in ["n2", "n3"] {
        assert_eq!(ran.node(node)["state"], "unfit", "{}", ran.node(node));
        assert_eq!(ran.node(node)["error"]["code"], "exists");
    }
    said(&ran, &["n2", "--if-exists"]);
    assert_eq!(fs::read_to_string(&other).unwrap(), "something else");
    assert_eq!(fs::read(&twin).unwrap(), bytes);

    let skipped = cluster
        .push(&source, &["--to", "n2", "--if-exists", "skip"])
        .expect(0);
    assert_eq!(skipped.node("n2")["state"], "skipped");

    let before = fs::metadata(&other).unwrap().ino();
    let replaced = cluster
        .push(&source, &["--to", "targets", "--if-exists", "replace"])
        .expect(0);
    cluster.assert_published(1..4, &source);
    assert_ne!(
        fs::metadata(&other).unwrap().ino(),
        before,
        "swapped, not written over"
    );
    assert!(
        replaced.node("n3")["bytes_received"].as_u64().unwrap() <= CHUNK,
        "one chunk differed: {}",
        replaced.node("n3")
    );
    cluster.wait_clean();
}

#[test]
fn too_little_space_is_said_before_a_byte_moves() {
    let cluster = Cluster::start(3);
    let huge = cluster.path("huge.db");
    let file = fs::File::create(&huge).unwrap();
    file.set_len(1 << 43).unwrap();
    // More runs of data than a manifest holds: half of the holes between them travel as zeros, and need space.
    for at in 0..1 << 14 {
        file.write_all_at(b"x", at << 29).unwrap();
    }
    let ran = cluster.push(&huge, &["--to", "targets"]).expect(4);
    assert_eq!(ran.last()["event"], "error");
    assert_eq!(ran.node("n1")["error"]["code"], "no_space", "{}", ran.last());
    said(&ran, &["n1", "short"]);
    cluster.wait_clean();
    assert!(cluster.listing(1).is_empty());
}

#[test]
fn two_agents_cannot_have_one_name() {
    let cluster = Cluster::start(2);
    let mut second = cluster.agent_command(1, "state-impostor", 7702).spawn().unwrap();
    cluster.wait_for("the second one to be refused", || {
        fs::read_to_string(cluster.path("n1.log")).is_ok_and(|log| log.contains("name_taken"))
    });
    let nodes = cluster.run(&["nodes", "--json"]).events;
    let states: Vec<_> = nodes
        .iter()
        .filter(|n| n["node"] == "n1")
        .map(|n| text(&n["state"]))
        .collect();
    assert_eq!(states, ["up", "refused"], "the first one keeps its name");
    second.kill().unwrap();
    second.wait().unwrap();
    let source = cluster.source("genome.db", CHUNK);
    cluster.push(&source, &["--to", "n1"]).expect(0);
    assert_eq!(sha256(&cluster.root(1).join("genome.db")), sha256(&source));
}

#[test]
fn a_malformed_topology_is_refused_with_its_line() {
    let mut cluster = Cluster::prepare(2);
    let path = cluster.path("topology.toml");
    let text = fs::read_to_string(&path).unwrap().replace("10 Gbit/s", "10");
    fs::write(&path, text).unwrap();
    let checked = cluster.run(&["topology", "check", "topology.toml"]);
    assert_eq!(checked.exit, 2, "{}", checked.stderr);
    assert!(checked.stderr.contains("topology.toml:11:"), "{}", checked.stderr);
    cluster.start_coordinator();
    cluster.wait_for("the coordinator to refuse it", || {
        fs::read_to_string(cluster.path("coordinator.log")).is_ok_and(|log| log.contains("topology.toml:11:"))
    });
}
