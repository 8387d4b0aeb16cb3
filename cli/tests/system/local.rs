//! The agent's socket: `stage path` for job scripts.

use std::fs;
use std::os::unix::net::UnixListener;

use std::process::Stdio;

use crate::cluster::{Cluster, Ran, sha256, text};

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

/// Pushes a tree of one file through a pipe to n1.
fn push_tree(cluster: &Cluster, content: &str, more: &[&str]) {
    let tree = cluster.path("tree/k2");
    fs::create_dir_all(&tree).unwrap();
    fs::write(tree.join("hash.k2d"), content).unwrap();
    let tar = cluster.path("k2.tar");
    let packed = std::process::Command::new("tar")
        .arg("cf")
        .arg(&tar)
        .arg("-C")
        .args([tree.as_os_str(), ".".as_ref()])
        .status();
    assert!(packed.unwrap().success());
    let mut push = cluster.command(&["push", "-", "--as", "k2", "--unpack", "--to", "n1", "--json"]);
    push.args(more)
        .env("STAGE_AGENT_SOCKET", cluster.socket(0))
        .stdin(fs::File::open(&tar).unwrap());
    Ran::of(push.output().unwrap()).expect(0);
}

#[test]
fn who_resolves_a_tree_once_sees_one_generation_whole() {
    let cluster = Cluster::start(2);
    push_tree(&cluster, "one", &[]);
    let before = path(&cluster, 1, &["k2/"]);
    let generation = before.stdout.trim_end().to_owned();
    assert!(
        generation.contains("/.stage/k2@"),
        "{generation} is not the generation itself; {}",
        before.stderr
    );
    push_tree(&cluster, "two", &["--if-exists", "replace"]);
    let after = path(&cluster, 1, &["k2", "--json"]).expect(0);
    assert_eq!(after.last()["kind"], "tree");
    let newer = text(&after.last()["path"]);
    assert_ne!(newer, generation);
    let read = |dir: &str| fs::read_to_string(format!("{dir}/hash.k2d")).unwrap();
    assert_eq!(
        (read(&generation), read(&newer)),
        ("one".to_owned(), "two".to_owned())
    );
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

/// A command of an operator's script on this node.
fn ensure(cluster: &Cluster, node: usize, args: &[&str]) -> std::process::Command {
    let args = [&["path", "--ensure"][..], args].concat();
    let mut command = cluster.command(&args);
    command
        .env("STAGE_AGENT_SOCKET", cluster.socket(node))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Jobs that ended or run, newest first.
fn jobs(cluster: &Cluster) -> Vec<serde_json::Value> {
    cluster.run(&["status", "--json"]).events
}

// R92.
#[test]
fn fifty_scripts_that_want_it_at_once_are_one_transfer() {
    let cluster = Cluster::start(3);
    let source = cluster.source("k2_std", 24 * CHUNK + 5);
    cluster
        .push(&source, &["--to", "n1", "--dest", "main:db"])
        .expect(0);
    let copy = format!("{}\n", cluster.root(2).join("db/k2_std").display());
    let mut scripts: Vec<_> = (0..50)
        .map(|_| ensure(&cluster, 2, &["main:db/k2_std"]).spawn().unwrap())
        .collect();
    // Some of them are killed in the middle of it: nobody waits for the dead.
    for script in scripts.iter_mut().step_by(10) {
        script.kill().unwrap();
    }
    for (at, script) in scripts.into_iter().enumerate() {
        let ran = Ran::of(script.wait_with_output().unwrap());
        if at % 10 != 0 {
            assert_eq!(
                (ran.exit, ran.stdout.as_str()),
                (0, copy.as_str()),
                "{}",
                ran.stderr
            );
        }
    }
    let moved: Vec<_> = jobs(&cluster)
        .iter()
        .map(|job| cluster.status(&text(&job["job"])))
        .filter(|job| job["nodes"][0]["node"] == "n2" && job["nodes"][0]["bytes_received"] != 0)
        .collect();
    assert_eq!(moved.len(), 1, "{moved:#?}");
    assert_eq!(moved[0]["source"], "n1");
    assert_eq!(moved[0]["nodes"][0]["bytes_received"], 24 * CHUNK + 5);
    assert_eq!(sha256(&cluster.root(2).join("db/k2_std")), sha256(&source));
    // What is there is not brought again, and needs no coordinator.
    let before = jobs(&cluster).len();
    let ran = path(
        &cluster,
        2,
        &["k2_std", "--dest", "main:db", "--ensure", "--json"],
    );
    assert_eq!(ran.expect(0).last()["kind"], "file");
    assert_eq!(jobs(&cluster).len(), before);
    cluster.wait_clean();
}

#[test]
fn a_tree_is_brought_by_a_node_that_has_it() {
    let cluster = Cluster::start(3);
    let tree = cluster.path("k2");
    fs::create_dir_all(tree.join("sub")).unwrap();
    fs::write(tree.join("hash.k2d"), vec![7; 3 << 20]).unwrap();
    fs::write(tree.join("sub/taxo.k2d"), "taxa").unwrap();
    cluster
        .push(&tree, &["--to", "n1", "--dest", "main:db"])
        .expect(0);
    let ran = Ran::of(ensure(&cluster, 2, &["main:db/k2", "--json"]).output().unwrap()).expect(0);
    assert_eq!(
        (&ran.last()["kind"], &ran.last()["node"]),
        (&"tree".into(), &"n2".into())
    );
    let generation = text(&ran.last()["path"]);
    assert!(generation.starts_with(&cluster.root(2).join("db/.stage/k2@").display().to_string()));
    assert_eq!(
        fs::read_to_string(format!("{generation}/sub/taxo.k2d")).unwrap(),
        "taxa"
    );
    // Both have one generation of the same content under the same name.
    let own = path(&cluster, 1, &["main:db/k2"]).stdout;
    let last = |path: &str| path.trim_end().rsplit('/').next().map(str::to_owned);
    assert_eq!(last(&own), last(&generation));
}

#[test]
fn a_push_under_way_is_joined_and_not_superseded() {
    let cluster = Cluster::start(3);
    let source = cluster.source("k2_std", 24 * CHUNK);
    let push = cluster
        .push_command(&source, &["--to", "targets", "--source-limit", "8 MB/s"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    cluster.wait_for("bytes", || {
        cluster.listing(2).iter().any(|name| name.starts_with(".stage-"))
    });
    // Written another way, it is the same place.
    let ran = Ran::of(ensure(&cluster, 2, &["main:k2_std", "--json"]).output().unwrap()).expect(0);
    assert_eq!(
        text(&ran.last()["path"]),
        cluster.root(2).join("k2_std").display().to_string()
    );
    let pushed = Ran::of(push.wait_with_output().unwrap()).expect(0);
    assert_eq!(pushed.node("n2")["state"], "published");
    assert_eq!(jobs(&cluster).len(), 1);
}

#[test]
fn what_nobody_has_or_nobody_can_bring_is_said_so() {
    let mut cluster = Cluster::start(3);
    let ran = Ran::of(ensure(&cluster, 2, &["k2_std", "--json"]).output().unwrap()).expect(4);
    assert_eq!(ran.last()["code"], "not_here");
    let source = cluster.source("k2_std", 2 * CHUNK);
    cluster.push(&source, &["--to", "n1"]).expect(0);

    let ran = Ran::of(
        ensure(&cluster, 2, &["k2_std", "--json", "--timeout", "0s"])
            .output()
            .unwrap(),
    )
    .expect(4);
    assert!(ran.stderr.contains("within 0 s"), "{}", ran.stderr);

    // Where a directory of somebody stands it cannot come.
    fs::create_dir(cluster.root(2).join("k2_std")).unwrap();
    let ran = Ran::of(ensure(&cluster, 2, &["k2_std", "--json"]).output().unwrap()).expect(4);
    assert_eq!(ran.last()["code"], "wrong_kind");
    fs::remove_dir(cluster.root(2).join("k2_std")).unwrap();

    cluster.kill_coordinator();
    let ran = Ran::of(ensure(&cluster, 2, &["k2_std", "--json"]).output().unwrap()).expect(3);
    assert_eq!(ran.last()["code"], "no_coordinator");
    let ran = Ran::of(
        ensure(&cluster, 2, &["k2_std", "--fallback", "/lustre/k2_std"])
            .output()
            .unwrap(),
    );
    assert_eq!((ran.exit, ran.stdout.as_str()), (0, "/lustre/k2_std\n"));
    assert!(ran.stderr.contains("coordinator"), "{}", ran.stderr);
}
