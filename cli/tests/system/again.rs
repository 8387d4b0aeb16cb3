//! What happens to a job's copies while the job is still open, and after an interruption.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use crate::cluster::{Cluster, Ran, text};
use crate::faults::{Push, kept};

const CHUNK: u64 = 1 << 20;

/// What was removed stays away when an agent starts again; R85: what was lost comes back from a neighbour, unasked, as long
/// as the job is open.
#[test]
fn what_is_lost_comes_again_and_what_was_removed_does_not() {
    let mut cluster = Cluster::start(5);
    // n4 is away, so the job stays open.
    cluster.kill_agent(4);
    let source = cluster.source("genome.db", 8 * CHUNK + 5);
    let ran = cluster
        .push(&source, &["--to", "targets", "--shape", "chain"])
        .expect(5);
    let job = text(&ran.last()["job"]);
    assert_ne!(ran.node("n3")["parent"], "n0", "{}", ran.last());
    assert_eq!(ran.last()["state"], "open");
    cluster.assert_published(1..4, &source);

    cluster.run(&["rm", "genome.db", "--from", "n1"]).expect(0);
    for node in [1, 3] {
        cluster.kill_agent(node);
    }
    // As a tmpfs is after a boot.
    fs::remove_file(cluster.root(3).join("genome.db")).unwrap();
    let read = cluster.status(&job)["source_bytes_read"].clone();
    cluster.start_agent(1);
    cluster.start_agent(3);
    cluster.wait_for("n3 to be filled again", || {
        cluster.root(3).join("genome.db").exists()
    });
    cluster.assert_published([2, 3], &source);
    assert_eq!(
        cluster.status(&job)["source_bytes_read"],
        read,
        "a neighbour sent it"
    );
    // The job ends with n4, and then nothing can come any more.
    cluster.start_agent(4);
    cluster.wait_for("the job to end", || cluster.status(&job)["state"] == "done");
    cluster.wait_clean();
    cluster.assert_published(2..5, &source);
    assert_eq!(cluster.listing(1), [""; 0], "it was removed");
    let ls = cluster.run(&["ls", "--json"]).expect(0);
    let nodes: Vec<_> = ls
        .events
        .iter()
        .filter(|event| event["event"] == "copy")
        .collect();
    assert_eq!(nodes.len(), 3, "{}", ls.stdout);
}

/// Two thousand files of 20 KiB.
fn tree(cluster: &Cluster) -> PathBuf {
    let tree = cluster.path("refdb");
    let bytes = fs::read(cluster.source("bytes", 40 * CHUNK)).unwrap();
    for (at, bytes) in bytes.chunks(20 << 10).take(2000).enumerate() {
        let dir = tree.join((at % 20).to_string());
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(at.to_string()), bytes).unwrap();
    }
    tree
}

#[track_caller]
fn assert_same(one: &Path, other: &Path) {
    let ran = std::process::Command::new("diff")
        .arg("-r")
        .arg(one)
        .arg(other)
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stdout));
}

/// R20: of a directory that was half done, only the rest comes.
#[test]
fn half_a_directory_is_not_begun_anew() {
    let mut cluster = Cluster::start(3);
    let tree = tree(&cluster);
    let size = 2000 * (20 << 10);
    let flags = ["--to", "targets", "--shape", "chain", "--limit", "12 MiB/s"];
    let push = Push::begun(&cluster, &tree, "n2", size / 2, &flags);
    let job = push.job.clone();
    cluster.kill_agent(2);
    cluster.start_agent(2);
    let ran = push.finish();
    assert_eq!(ran.node("n1")["state"], "published");
    cluster.wait_for("n2 to have all", || cluster.status(&job)["state"] == "done");
    let again = kept(&cluster, &job, "n2");
    // What was on its way when the agent died is lost, and no more.
    assert!(
        again > 0 && again <= size / 2 + 8 * CHUNK,
        "{again} bytes came after half of {size} was there"
    );
    for node in [1, 2] {
        assert_same(&tree, &cluster.root(node).join("refdb"));
    }
    cluster.wait_clean();
}

#[test]
fn a_job_that_lost_its_source_goes_on_with_another() {
    let mut cluster = Cluster::start(4);
    let size = 64 * CHUNK;
    let flags = ["--to", "n1,n2", "--shape", "chain", "--limit", "16 MiB/s"];
    let source = cluster.source("genome.db", size);
    let push = Push::begun(&cluster, &source, "n2", size / 4, &flags);
    let job = push.job.clone();
    cluster.kill_agent(0);
    push.finish().expect(6);
    // n3 has the same file under the same path.
    let ran = cluster.run(&["retry", &job, "--from", "n3", "--json"]).expect(0);
    assert_eq!(text(&ran.last()["job"]), job);
    assert_eq!(
        (ran.last()["state"].as_str(), ran.last()["source"].as_str()),
        (Some("done"), Some("n3"))
    );
    for node in ["n1", "n2"] {
        let all = ran.node(node)["bytes_received"].as_u64().unwrap();
        assert!(all <= size + 8 * CHUNK, "{node} received {all} in all");
    }
    cluster.assert_published(1..3, &source);
    cluster.wait_clean();
}

/// R118: a damaged copy is named by node, file and chunk, and mended by that chunk.
#[test]
fn one_damaged_chunk_is_named_and_only_it_comes_again() {
    let cluster = Cluster::start(4);
    let tree = cluster.path("refdb");
    fs::create_dir_all(tree.join("vol")).unwrap();
    for (name, chunks) in [("vol/a.nsq", 5), ("vol/b.nsq", 7)] {
        fs::rename(cluster.source("volume", chunks * CHUNK + 77), tree.join(name)).unwrap();
    }
    cluster.push(&tree, &["--to", "targets"]).expect(0);
    cluster.wait_clean();
    let file = fs::File::options()
        .write(true)
        .open(cluster.root(2).join("refdb/vol/b.nsq"))
        .unwrap();
    file.write_all_at(b"damage", 3 * CHUNK + 5).unwrap();
    drop(file);
    let said = cluster.run(&["verify", "refdb", "--json"]).expect(5);
    let bad: Vec<_> = said
        .events
        .iter()
        .filter(|event| event["event"] == "copy" && event["state"] != "ok")
        .collect();
    assert_eq!(bad.len(), 1, "{}", said.stdout);
    assert_eq!(
        (&bad[0]["node"], &bad[0]["state"]),
        (&"n2".into(), &"damaged".into())
    );
    // Five whole chunks of the first volume come before those of the second.
    assert_eq!(bad[0]["detail"], "chunk 8 of 13 (in refdb/vol/b.nsq) differs");
    let mended = cluster
        .push(&tree, &["--to", "targets", "--if-exists", "replace"])
        .expect(0);
    let received = |node: &str| mended.node(node)["bytes_received"].as_u64().unwrap();
    assert!(
        (1..=CHUNK + (64 << 10)).contains(&received("n2")),
        "{}",
        mended.last()
    );
    assert_eq!((received("n1"), received("n3")), (0, 0));
    cluster.run(&["verify", "refdb"]).expect(0);
    for node in 1..4 {
        assert_same(&tree, &cluster.root(node).join("refdb"));
    }
}

/// R84: who wants what is there gets its path, and no byte moves.
#[test]
fn the_same_again_on_one_node_is_one_copy() {
    let cluster = Cluster::start(2);
    let source = cluster.source("k2_std", 8 * CHUNK + 1);
    let flags = ["--to", "n1", "--dest", "main:db"];
    let spawned: Vec<_> = (0..2)
        .map(|_| {
            let mut command = cluster.push_command(&source, &flags);
            command.stdout(std::process::Stdio::piped());
            command.stderr(std::process::Stdio::piped());
            command.spawn().unwrap()
        })
        .collect();
    let copy = cluster.root(1).join("db/k2_std");
    // Two at once: the later one takes the place over, or finds it done.
    let both: Vec<_> = spawned
        .into_iter()
        .map(|child| Ran::of(child.wait_with_output().unwrap()))
        .collect();
    assert!(both.iter().any(|ran| ran.exit == 0), "{}", both[0].stdout);
    let third = cluster.push(&source, &flags).expect(0);
    let node = third.node("n1");
    assert_eq!(
        (&node["already"], &node["bytes_received"]),
        (&true.into(), &0.into())
    );
    assert_eq!(node["path"], copy.to_str().unwrap());
    cluster.wait_clean();
    let jobs = cluster.run(&["status", "--json"]).events.len();
    for _ in 0..2 {
        let mut ensure = cluster.command(&["path", "--ensure", "main:db/k2_std"]);
        ensure.env("STAGE_AGENT_SOCKET", cluster.socket(1));
        let ran = Ran::of(ensure.output().unwrap());
        assert_eq!((ran.exit, ran.stdout), (0, format!("{}\n", copy.display())));
    }
    assert_eq!(cluster.run(&["status", "--json"]).events.len(), jobs);
    assert_eq!(fs::read_dir(cluster.root(1).join("db")).unwrap().count(), 1);
}

/// R99: nodes that have another generation than the others are seen.
#[test]
fn what_is_not_the_same_everywhere_is_called_mixed() {
    let cluster = Cluster::start(4);
    let tree = cluster.path("refdb");
    fs::create_dir_all(&tree).unwrap();
    fs::write(tree.join("version"), "one").unwrap();
    cluster.push(&tree, &["--to", "targets"]).expect(0);
    cluster.wait_clean();
    let same = cluster.run(&["ls", "--json"]).expect(0);
    assert_eq!(same.last().get("mixed"), None, "{}", same.last());
    fs::write(tree.join("version"), "two").unwrap();
    cluster
        .push(&tree, &["--to", "n[1-2]", "--if-exists", "replace"])
        .expect(0);
    cluster.wait_clean();
    let ls = cluster.run(&["ls", "--json"]).expect(0);
    let mixed = &ls.last()["mixed"];
    assert_eq!(mixed[0]["place"], "main:refdb", "{mixed}");
    let mut nodes: Vec<_> = mixed[0]["contents"]
        .as_array()
        .unwrap()
        .iter()
        .map(|content| content["nodes"].clone())
        .collect();
    nodes.sort_by_key(ToString::to_string);
    assert_eq!(
        nodes,
        [serde_json::json!(["n1", "n2"]), serde_json::json!(["n3"])]
    );
    let table = cluster.run(&["ls"]).expect(0).stdout;
    assert!(
        table.contains("mixed: main:refdb is not the same everywhere: ") && table.contains(" on n[1-2]"),
        "{table}"
    );
    cluster
        .push(&tree, &["--to", "n3", "--if-exists", "replace"])
        .expect(0);
    cluster.wait_clean();
    assert!(!cluster.run(&["ls"]).expect(0).stdout.contains("mixed"));
}
