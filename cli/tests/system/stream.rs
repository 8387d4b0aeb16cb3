//! `stage push -`: what comes through a pipe.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::cluster::{Cluster, Ran, sha256, text};

const CHUNK: u64 = 1 << 20;

/// A push of its standard input from n0.
struct Push {
    child: Child,
    stdin: Option<ChildStdin>,
}

impl Push {
    fn start(cluster: &Cluster, more: &[&str]) -> Self {
        let mut command = command(cluster, more);
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        Self {
            stdin: child.stdin.take(),
            child,
        }
    }

    fn write(&mut self, bytes: &[u8]) {
        self.stdin.as_mut().unwrap().write_all(bytes).unwrap();
    }

    /// Closes the pipe, if it is open, and waits for the end.
    fn end(mut self) -> Ran {
        self.stdin = None;
        Ran::of(self.child.wait_with_output().unwrap())
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().try_into().unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }
}

fn command(cluster: &Cluster, more: &[&str]) -> Command {
    let mut command = cluster.command(&["push", "-", "--json"]);
    command
        .args(more)
        .env("STAGE_AGENT_SOCKET", cluster.socket(0))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Bytes of the partial in a node's root.
fn partial(cluster: &Cluster, node: usize) -> u64 {
    let names = cluster.listing(node);
    let partial = names.iter().find(|name| name.starts_with(".stage-"));
    partial
        .and_then(|name| fs::metadata(cluster.root(node).join(name)).ok())
        .map_or(0, |meta| meta.len())
}

fn failed_job(cluster: &Cluster) -> Option<serde_json::Value> {
    let ran = cluster.run(&["status", "--json"]);
    ran.events.into_iter().find(|job| job["state"] == "failed")
}

#[test]
fn a_pipe_arrives_while_it_comes() {
    let cluster = Cluster::start(4);
    let source = cluster.source("refdb.tar", 9 * CHUNK + 321);
    let bytes = fs::read(&source).unwrap();
    let mut push = Push::start(
        &cluster,
        &["--as", "refdb.tar", "--to", "targets", "--shape", "chain"],
    );
    push.write(&bytes[..4 << 20]);
    for node in 1..4 {
        cluster.wait_for("bytes before the pipe ends", || partial(&cluster, node) >= CHUNK);
    }
    push.write(&bytes[4 << 20..]);
    let ran = push.end().expect(0);
    let last = ran.last();
    assert_eq!(last["state"], "done");
    assert!(
        last["plan"]["predicted_seconds"].is_null(),
        "nobody knew how much would come"
    );
    assert_eq!(
        (&last["bytes"], &last["payload_bytes"]),
        (&(9 * CHUNK + 321).into(), &(9 * CHUNK + 321).into())
    );
    assert_eq!(
        last["source_bytes_read"],
        9 * CHUNK + 321,
        "the pipe is read once"
    );
    assert_eq!(text(&last["sha256"]), sha256(&source));
    assert_eq!(last["source"], "n0");
    for node in ["n1", "n2", "n3"] {
        assert_eq!(ran.node(node)["bytes_received"], 9 * CHUNK + 321);
    }
    cluster.assert_published(1..4, &source);
    let copy = fs::metadata(cluster.root(1).join("refdb.tar")).unwrap();
    assert_eq!(copy.permissions().mode() & 0o600, 0o600);
    cluster.wait_clean();
    // It is a copy like any other from now on.
    for command in ["ls", "verify"] {
        let ran = cluster.run(&[command, "refdb.tar", "--json"]).expect(0);
        let copies: Vec<_> = ran.events.iter().filter(|e| e["event"] == "copy").collect();
        assert_eq!(copies.len(), 3, "{}", ran.stdout);
        for copy in copies {
            assert_eq!(
                (&copy["state"], &copy["bytes"]),
                (&"ok".into(), &(9 * CHUNK + 321).into())
            );
        }
    }
    let again = cluster.push(&source, &["--to", "targets"]).expect(0);
    assert_eq!(again.node("n1")["already"], true);
}

#[test]
fn odd_pipes_and_what_stands_there() {
    let cluster = Cluster::start(2);
    let empty = cluster.source("empty", 0);
    Push::start(&cluster, &["--as", "empty", "--to", "n1"])
        .end()
        .expect(0);
    cluster.assert_published([1], &empty);

    // A file is as good a standard input as a pipe, and whole chunks have no shorter last one.
    let whole = cluster.source("whole", 3 * CHUNK);
    let push = || {
        let mut command = command(&cluster, &["--as", "whole", "--to", "all"]);
        command.stdin(fs::File::open(&whole).unwrap());
        command
    };
    Ran::of(push().output().unwrap()).expect(0);
    cluster.assert_published(0..2, &whole);

    let again = Ran::of(push().output().unwrap()).expect(4);
    assert_eq!(again.last()["code"], "exists", "nobody knows what will come");
    let mut other = Push::start(
        &cluster,
        &["--as", "whole", "--to", "n1", "--if-exists", "replace"],
    );
    other.write(b"other");
    other.end().expect(0);
    assert_eq!(fs::read(cluster.root(1).join("whole")).unwrap(), b"other");
    cluster.wait_clean();

    fs::write(cluster.path("SUMS"), format!("{}  sum\n", "0".repeat(64))).unwrap();
    let mut wrong = Push::start(&cluster, &["--as", "sum", "--to", "n1", "--expect", "SUMS"]);
    wrong.write(b"something");
    wrong.end().expect(6);
    cluster.wait_clean();
    assert_eq!(cluster.listing(1), ["empty", "whole"]);
}

#[test]
fn who_dies_before_the_end_has_pushed_nothing() {
    let cluster = Cluster::start(3);
    let bytes = vec![7; 3 << 20];
    for signal in [Signal::KILL, Signal::INT, Signal::TERM] {
        let mut push = Push::start(&cluster, &["--as", "x", "--to", "targets"]);
        push.write(&bytes);
        cluster.wait_for("bytes", || partial(&cluster, 2) >= CHUNK);
        push.signal(signal);
        // The pipe's other end stays open until it has gone: what ends the push is its own death.
        let stdin = push.stdin.take();
        let ran = Ran::of(push.child.wait_with_output().unwrap());
        drop(stdin);
        if signal != Signal::KILL {
            assert_eq!(ran.exit, 130);
            assert!(
                ran.stderr.contains("nothing of it is published"),
                "{}",
                ran.stderr
            );
        }
        cluster.wait_for("the job to fail", || failed_job(&cluster).is_some());
        let job = failed_job(&cluster).unwrap();
        assert_eq!(job["error"]["code"], "source_lost", "{job}");
        cluster.wait_clean();
        assert!(cluster.listing(1).is_empty() && cluster.listing(2).is_empty());
    }
}

#[test]
fn an_agent_that_dies_takes_its_pipes_along() {
    let mut cluster = Cluster::start(2);
    let mut push = Push::start(&cluster, &["--as", "x", "--to", "n1"]);
    push.write(&vec![7; 2 << 20]);
    cluster.wait_for("bytes", || partial(&cluster, 1) >= CHUNK);
    cluster.kill_agent(0);
    cluster.start_agent(0);
    let ran = push.end();
    assert_eq!(ran.exit, 6, "{} {}", ran.stdout, ran.stderr);
    assert_eq!(ran.last()["error"]["code"], "source_lost", "{}", ran.last());
    cluster.wait_clean();
    assert!(cluster.listing(1).is_empty());
}

#[test]
fn what_cannot_be_is_said_before_anything_is_read() {
    let cluster = Cluster::start(2);
    let refused = |more: &[&str], exit: i32, code: &str| {
        let mut command = command(&cluster, more);
        let ran = Ran::of(command.stdin(Stdio::piped()).output().unwrap()).expect(exit);
        assert_eq!(ran.last()["code"], code, "{}", ran.last());
    };
    // The tests' commands have /dev/null for an input, as has one whose input is closed.
    let nothing = command(&cluster, &["--to", "n1", "--as", "x"]).output().unwrap();
    let ran = Ran::of(nothing).expect(2);
    assert!(ran.stderr.contains("closed or /dev/null"), "{}", ran.stderr);
    refused(&["--to", "n1"], 2, "usage");
    refused(&["--to", "n1", "--as", "a/b"], 2, "usage");
    refused(&["--to", "nobody", "--as", "x"], 2, "unknown_target");
    refused(&["--to", "n1", "--as", "x", "--from", "n1"], 2, "usage");
    let mut without = command(&cluster, &["--to", "n1", "--as", "x"]);
    without.env("STAGE_AGENT_SOCKET", Path::new("/nonexistent/agent.sock"));
    let ran = Ran::of(without.stdin(Stdio::piped()).output().unwrap()).expect(4);
    assert_eq!(ran.last()["code"], "no_agent");
    assert!(
        cluster.run(&["status", "--json"]).events.is_empty(),
        "no job was made"
    );
}

#[test]
fn a_pipe_outlives_its_relay_and_the_coordinator() {
    let mut cluster = Cluster::start(3);
    let source = cluster.source("refdb.tar", 12 * CHUNK + 9);
    let bytes = fs::read(&source).unwrap();
    let mut push = Push::start(
        &cluster,
        &["--as", "refdb.tar", "--to", "n1,n2", "--shape", "chain"],
    );
    push.write(&bytes[..6 << 20]);
    cluster.wait_for("bytes at the end of the chain", || partial(&cluster, 2) >= CHUNK);
    // n2 goes on with the source, from the spool where it lags.
    cluster.kill_agent(1);
    push.write(&bytes[6 << 20..10 << 20]);
    cluster.wait_for("n2 to go on", || partial(&cluster, 2) >= 9 * CHUNK);
    cluster.kill_coordinator();
    cluster.start_agent(1);
    push.write(&bytes[10 << 20..]);
    cluster.start_coordinator();
    // n1 goes on with what it has kept, and both learn of the end.
    let ran = push.end().expect(0);
    assert_eq!(ran.last()["bytes"], 12 * CHUNK + 9);
    cluster.assert_published(1..3, &source);
    cluster.wait_clean();
}

#[test]
fn a_tar_through_a_pipe_becomes_a_tree() {
    let cluster = Cluster::start(4);
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("refdb");
    fs::create_dir_all(tree.join("vol")).unwrap();
    fs::write(tree.join("vol/one"), vec![7; 3 * CHUNK as usize + 5]).unwrap();
    fs::write(tree.join("index"), b"index").unwrap();
    std::os::unix::fs::symlink("vol/one", tree.join("link")).unwrap();
    let tar = Command::new("tar")
        .args(["cz", "refdb"])
        .current_dir(dir.path())
        .output()
        .unwrap();
    assert!(tar.status.success());
    let mut push = Push::start(
        &cluster,
        &["--as", "refdb", "--unpack", "--to", "targets", "--shape", "chain"],
    );
    push.write(&tar.stdout);
    let ran = push.end().expect(0);
    for node in 1..4 {
        let copy = cluster.root(node).join("refdb");
        assert_eq!(
            text(&ran.node(&format!("n{node}"))["path"]),
            copy.to_str().unwrap()
        );
        assert!(fs::read(copy.join("vol/one")).unwrap() == vec![7; 3 * CHUNK as usize + 5]);
        assert_eq!(fs::read(copy.join("index")).unwrap(), b"index");
        assert_eq!(fs::read_link(copy.join("link")).unwrap(), Path::new("vol/one"));
        assert!(fs::read_link(&copy).unwrap().starts_with(".stage"));
    }
    // It is known like any other, by the digest of the tar.
    let listed = |ran: &Ran| {
        let copies = ran.events.iter().filter(|event| event["event"] == "copy");
        copies
            .map(|copy| {
                (
                    text(&copy["state"]),
                    copy["unpacked"] == true,
                    text(&copy["kind"]),
                )
            })
            .collect::<Vec<_>>()
    };
    let digest = text(&ran.last()["sha256"]);
    cluster.wait_clean();
    let ok = vec![("ok".to_owned(), true, "tree".to_owned()); 3];
    let ls = cluster.run(&["ls", "--digest", &digest, "--json"]).expect(0);
    assert_eq!(listed(&ls), ok);
    assert_eq!(listed(&cluster.run(&["verify", "--json"]).expect(0)), ok);
    let mut again = Push::start(&cluster, &["--as", "refdb", "--unpack", "--to", "targets"]);
    again.write(&tar.stdout);
    let again = again.end().expect(0);
    for node in ["n1", "n2", "n3"] {
        assert_eq!(again.node(node)["already"], true, "{}", again.last());
    }
    cluster.wait_clean();
    assert_eq!(listed(&cluster.run(&["verify", "--json"]).expect(0)), ok);
    // Brought by a node that has it, it is the same, though it came as a tree.
    let mut ensure = cluster.command(&["path", "--ensure", "refdb"]);
    ensure.env("STAGE_AGENT_SOCKET", cluster.socket(0));
    let ensured = Ran::of(ensure.output().unwrap());
    assert_eq!(ensured.exit, 0, "{}", ensured.stderr);
    cluster.wait_clean();
    let ls = cluster.run(&["ls", "--json"]).expect(0);
    assert_eq!(
        (listed(&ls).len(), ls.last().get("mixed")),
        (4, None),
        "{}",
        ls.stdout
    );
    // The tar goes with the job.
    cluster.wait_for("no tar any more", || {
        (1..4).all(|node| {
            !cluster
                .listing(node)
                .iter()
                .any(|name| name.starts_with(".stage-"))
        })
    });
    cluster.run(&["rm", "refdb", "--from", "all"]).expect(0);
    for node in 0..4 {
        assert!(cluster.listing(node).is_empty(), "{:?}", cluster.listing(node));
    }
}
