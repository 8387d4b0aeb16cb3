//! Processes die in mid-push.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};

use serde_json::Value;

use crate::cluster::{Cluster, Ran, text};

const CHUNK: u64 = 1 << 20;

/// A push under way, and its job.
pub(crate) struct Push {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    pub(crate) job: String,
}

impl Push {
    /// Begins a push that takes some seconds, whatever the machine, and waits until `node` has a quarter of it.
    pub(crate) fn at_a_quarter(cluster: &Cluster, node: &str, size: u64, more: &[&str]) -> Self {
        let source = cluster.source("genome.db", size);
        let args = [
            &["--to", "targets", "--shape", "chain", "--limit", "16 MiB/s"],
            more,
        ]
        .concat();
        Self::begun(cluster, &source, node, size / 4, &args)
    }

    /// Begins a push and waits until `node` has so many bytes.
    pub(crate) fn begun(cluster: &Cluster, source: &Path, node: &str, bytes: u64, args: &[&str]) -> Self {
        let mut child = cluster
            .push_command(source, args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        let job = text(&first["job"]);
        cluster.wait_for("a part of the push", || kept(cluster, &job, node) >= bytes);
        Self { child, lines, job }
    }

    pub(crate) fn finish(mut self) -> Ran {
        let stdout: Vec<String> = self.lines.by_ref().map(Result::unwrap).collect();
        let mut output = self.child.wait_with_output().unwrap();
        output.stdout = stdout.join("\n").into_bytes();
        Ran::of(output)
    }
}

pub(crate) fn kept(cluster: &Cluster, job: &str, node: &str) -> u64 {
    let status = cluster.status(job);
    let nodes = status["nodes"].as_array().cloned().unwrap_or_default();
    nodes
        .iter()
        .find(|n| n["node"] == node)
        .and_then(|n| n["bytes_received"].as_u64())
        .unwrap_or(0)
}

#[test]
fn the_coordinator_dies_in_mid_push() {
    let mut cluster = Cluster::start(4);
    let size = 64 * CHUNK;
    let push = Push::at_a_quarter(&cluster, "n1", size, &[]);
    cluster.kill_coordinator();
    cluster.start_coordinator();
    let job = push.job.clone();
    let ran = push.finish().expect(0);
    assert_eq!(ran.last()["state"], "done");
    assert_eq!(text(&ran.last()["job"]), job);
    for node in ["n1", "n2", "n3"] {
        assert_eq!(
            ran.node(node)["bytes_received"],
            size,
            "no chunk came twice: {}",
            ran.node(node)
        );
    }
    assert_eq!(cluster.status(&job)["state"], "done");
    cluster.assert_published(1..4, &cluster.path("genome.db"));
    cluster.wait_clean();
}

#[test]
fn a_relay_dies_in_mid_push() {
    let mut cluster = Cluster::start(4);
    let push = Push::at_a_quarter(&cluster, "n2", 64 * CHUNK, &[]);
    cluster.kill_agent(2);
    let ran = push.finish();
    assert_eq!(ran.node("n1")["state"], "published");
    assert_eq!(ran.node("n3")["state"], "published", "{}", ran.last());
    assert_eq!(ran.exit, 5, "n2 is awaited: {}", ran.stdout);
    cluster.assert_published([1, 3], &cluster.path("genome.db"));
    let received = ran.node("n3")["bytes_received"].as_u64().unwrap();
    assert!(
        received <= 64 * CHUNK + 8 * CHUNK,
        "only chunks under way came again, not {received}"
    );

    let job = text(&ran.last()["job"]);
    cluster.start_agent(2);
    cluster.wait_for("n2 to be filled", || cluster.status(&job)["state"] == "done");
    cluster.assert_published(1..4, &cluster.path("genome.db"));
    cluster.wait_clean();
}

#[test]
fn a_relay_dies_while_the_coordinator_is_away() {
    let mut cluster = Cluster::start(4);
    let push = Push::at_a_quarter(&cluster, "n2", 64 * CHUNK, &[]);
    cluster.kill_coordinator();
    cluster.kill_agent(2);
    // n3 gets all that there is, from n1, with nobody to ask; it publishes when FINAL can come.
    let table = cluster.path("state-n3").join("jobs").join(&push.job);
    assert!(table.exists(), "n3 keeps a journal of the job");
    cluster.start_coordinator();
    let ran = push.finish();
    assert_eq!(ran.node("n3")["state"], "published", "{}", ran.last());
    cluster.assert_published([1, 3], &cluster.path("genome.db"));
}

#[test]
fn a_receiver_that_comes_back_resumes() {
    let mut cluster = Cluster::start(3);
    let size = 64 * CHUNK;
    let push = Push::at_a_quarter(&cluster, "n2", size, &[]);
    cluster.kill_agent(2);
    cluster.start_agent(2);
    let job = push.job.clone();
    let ran = push.finish();
    assert_eq!(ran.node("n1")["state"], "published");
    cluster.wait_for("n2 to be filled", || cluster.status(&job)["state"] == "done");
    cluster.assert_published(1..3, &cluster.path("genome.db"));
    let again = kept(&cluster, &job, "n2");
    assert!(
        again <= size * 3 / 4 + 8 * CHUNK,
        "what was kept before did not come again: {again}"
    );
}

#[test]
fn cancelling_leaves_no_file_behind() {
    let cluster = Cluster::start(3);
    let push = Push::at_a_quarter(&cluster, "n2", 64 * CHUNK, &[]);
    assert_eq!(cluster.run(&["cancel", &push.job]).exit, 0);
    let ran = push.finish().expect(7);
    assert_eq!(ran.last()["state"], "cancelled");
    cluster.wait_clean();
    assert!(cluster.listing(1).is_empty() && cluster.listing(2).is_empty());
}

#[test]
fn the_watcher_may_go() {
    let cluster = Cluster::start(3);
    let mut push = Push::at_a_quarter(&cluster, "n2", 32 * CHUNK, &[]);
    push.child.kill().unwrap();
    push.child.wait().unwrap();
    let waited = cluster.run(&["wait", &push.job, "--json"]).expect(0);
    assert_eq!(waited.last()["state"], "done");
    cluster.assert_published(1..3, &cluster.path("genome.db"));
}

#[test]
fn a_source_that_changes_is_published_nowhere() {
    let cluster = Cluster::start(3);
    let push = Push::at_a_quarter(&cluster, "n2", 64 * CHUNK, &[]);
    std::fs::OpenOptions::new()
        .append(true)
        .open(cluster.path("genome.db"))
        .map(|mut f| std::io::Write::write_all(&mut f, b"more"))
        .unwrap()
        .unwrap();
    let ran = push.finish().expect(6);
    assert_eq!(ran.last()["state"], "failed");
    assert!(ran.stderr.contains("changed"), "{}", ran.stderr);
    cluster.wait_clean();
    assert!(cluster.listing(1).is_empty() && cluster.listing(2).is_empty());
}

#[test]
fn a_file_that_appears_in_mid_push_is_left_where_the_rule_says_so() {
    let cluster = Cluster::start(3);
    let push = Push::at_a_quarter(&cluster, "n2", 32 * CHUNK, &["--if-exists", "skip"]);
    let theirs = cluster.root(2).join("genome.db");
    std::fs::write(&theirs, "theirs").unwrap();
    let ran = push.finish().expect(0);
    assert_eq!(ran.node("n2")["state"], "skipped", "{}", ran.last());
    assert_eq!(std::fs::read(&theirs).unwrap(), b"theirs");
    cluster.assert_published([1], &cluster.path("genome.db"));
    cluster.wait_clean();
}

#[test]
fn a_job_that_lost_its_source_goes_on_from_what_was_kept() {
    let mut cluster = Cluster::start(3);
    let size = 64 * CHUNK;
    let push = Push::at_a_quarter(&cluster, "n2", size, &[]);
    cluster.kill_agent(0);
    let job = push.job.clone();
    let lost = push.finish().expect(6);
    assert!(lost.stderr.contains("stage retry"), "{}", lost.stderr);
    assert_eq!(
        cluster.run(&["retry", &job, "--json"]).expect(4).last()["code"],
        "away"
    );

    // From anywhere, and whatever happened to the coordinator meanwhile.
    cluster.kill_coordinator();
    cluster.start_coordinator();
    cluster.start_agent(0);
    cluster.wait_up(3);
    let ran = cluster.run(&["retry", &job, "--json"]).expect(0);
    assert_eq!(
        (text(&ran.last()["job"]), &ran.last()["state"]),
        (job.clone(), &"done".into())
    );
    for node in ["n1", "n2"] {
        // Its agent lived on, and counts what came before too.
        let all = ran.node(node)["bytes_received"].as_u64().unwrap();
        assert!(all <= size + 8 * CHUNK, "{node} received {all} in all");
    }
    cluster.assert_published(1..3, &cluster.path("genome.db"));
    cluster.wait_clean();

    let nothing = cluster.run(&["retry", &job, "--json"]).expect(0);
    assert_eq!(nothing.last()["state"], "done");
    let over = cluster.run(&["cancel", &job]);
    assert_eq!(over.exit, 0);
    assert!(
        over.stderr.contains("had ended before, as done"),
        "{}",
        over.stderr
    );
}
