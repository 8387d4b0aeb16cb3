//! The agent's socket: `stage path` for job scripts.

use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

use crate::cluster::{Cluster, Ran, text};

const CHUNK: u64 = 1 << 20;

fn path(cluster: &Cluster, node: usize, args: &[&str]) -> Ran {
    let args = [&["path"][..], args].concat();
    Ran::of(cluster.local(node, &args).output().unwrap())
}

#[test]
fn a_script_asks_its_node_where_a_payload_lies() {
    let cluster = Cluster::start(2);
    let source = cluster.source("genome.db", 2 * CHUNK + 1);
    cluster
        .push(&source, &["--to", "n1", "--dest", "main:db"])
        .expect(0);
    let copy = cluster.root(1).join("db/genome.db").display().to_string();

    for args in [
        &["main:db/genome.db"][..],
        &["genome.db", "--dest", "main:db"],
        &[&copy, "--fallback", "/lustre/genome.db"],
    ] {
        let ran = path(&cluster, 1, args);
        assert_eq!((ran.exit, ran.stdout), (0, format!("{copy}\n")), "{args:?}");
        assert!(ran.stderr.is_empty(), "{}", ran.stderr);
    }
    let ran = path(&cluster, 1, &["main:db/genome.db", "--json"]).expect(0);
    assert_eq!(ran.last()["kind"], "file");
    assert_eq!(ran.last()["node"], "n1");
    assert_eq!(ran.last()["bytes"], 2 * CHUNK + 1);
    assert_eq!(text(&ran.last()["path"]), copy);

    // The other node has none.
    let ran = path(&cluster, 0, &["main:db/genome.db"]);
    assert_eq!((ran.exit, ran.stdout.as_str()), (4, ""));
    assert!(ran.stderr.contains("not"), "{}", ran.stderr);
    let ran = path(&cluster, 0, &["main:db/genome.db", "--json"]).expect(4);
    assert_eq!(ran.last()["code"], "not_here");
    let ran = path(
        &cluster,
        0,
        &["main:db/genome.db", "--fallback", "/lustre/genome.db", "--json"],
    )
    .expect(0);
    assert_eq!(
        (&ran.last()["kind"], &ran.last()["reason"]["code"]),
        (&"fallback".into(), &"not_here".into())
    );
    assert!(
        ran.stderr.contains("/lustre/genome.db") && ran.stderr.contains("n0"),
        "{}",
        ran.stderr
    );
    // What is mistyped is not answered with a fallback.
    assert_eq!(path(&cluster, 1, &["db/genome.db", "--fallback", "/x"]).exit, 2);
}

#[test]
fn who_resolves_a_tree_once_sees_one_generation_whole() {
    let mut cluster = Cluster::prepare(2);
    cluster.start_agent(1);
    cluster.wait_for("the agent's socket", || cluster.socket(1).exists());
    let root = cluster.root(1);
    for generation in ["k2@a", "k2@b"] {
        fs::create_dir_all(root.join(".stage").join(generation)).unwrap();
    }
    symlink(".stage/k2@a", root.join("k2")).unwrap();
    let before = path(&cluster, 1, &["k2/"]);
    assert_eq!(before.stdout, format!("{}\n", root.join(".stage/k2@a").display()));
    symlink(".stage/k2@b", root.join("new")).unwrap();
    fs::rename(root.join("new"), root.join("k2")).unwrap();
    let after = path(&cluster, 1, &["k2", "--json"]).expect(0);
    assert_eq!(after.last()["kind"], "tree");
    assert!(text(&after.last()["path"]).ends_with("/.stage/k2@b"));
}

#[test]
fn without_an_agent_the_socket_is_named_and_the_fallback_used() {
    let cluster = Cluster::prepare(2);
    let ran = path(&cluster, 1, &["k2", "--json"]).expect(4);
    assert_eq!(ran.last()["code"], "no_agent");
    assert!(ran.stderr.contains("agent.sock") && ran.stderr.contains("--agent-socket"));
    let ran = path(&cluster, 1, &["k2", "--fallback", "/lustre/k2"]);
    assert_eq!((ran.exit, ran.stdout.as_str()), (0, "/lustre/k2\n"));
}

#[test]
fn a_dead_agents_socket_is_replaced_and_a_live_ones_is_not() {
    let mut cluster = Cluster::start(2);
    let socket = cluster.socket(1);
    let rival = |state: &str, port: u16| {
        let mut command = cluster.agent_command(1, state, port);
        command.arg("--socket").arg(&socket);
        command
    };
    let mut second = rival("state-rival", 7702).spawn().unwrap();
    assert_eq!(second.wait().unwrap().code(), Some(78));
    assert!(cluster.logs().contains("another agent listens there"));
    assert_eq!(path(&cluster, 1, &["x"]).exit, 4, "the first one still answers");

    cluster.kill_agent(1);
    assert!(socket.exists(), "nobody took its name along");
    cluster.start_agent(1);
    cluster.wait_for("the new agent to answer", || {
        path(&cluster, 1, &["x", "--json"]).last()["code"] == "not_here"
    });

    // What is no agent's stays, and the agent says what is in its way.
    cluster.kill_agent(1);
    fs::remove_file(&socket).unwrap();
    let foreign = UnixListener::bind(&socket).unwrap();
    let mut third = cluster.agent_command(1, "state-n1", 7701).spawn().unwrap();
    assert_eq!(third.wait().unwrap().code(), Some(78));
    drop(foreign);
}
