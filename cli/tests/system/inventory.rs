//! What is staged where: listed, verified, repaired, removed.

use std::fs;
use std::os::unix::fs::FileExt as _;

use serde_json::Value;

use crate::cluster::{Cluster, Ran, sha256, text};

const CHUNK: u64 = 1 << 20;

/// The copies that were listed, as (node, state), by node.
fn copies(ran: &Ran) -> Vec<(String, String)> {
    let mut copies: Vec<_> = ran
        .events
        .iter()
        .filter(|event| event["event"] == "copy")
        .map(|copy| (text(&copy["node"]), text(&copy["state"])))
        .collect();
    copies.sort();
    copies
}

fn of(states: &[(&str, &str)]) -> Vec<(String, String)> {
    states
        .iter()
        .map(|(node, state)| ((*node).to_owned(), (*state).to_owned()))
        .collect()
}

fn copy<'a>(ran: &'a Ran, node: &str) -> &'a Value {
    ran.events
        .iter()
        .find(|event| event["event"] == "copy" && event["node"] == node)
        .unwrap_or_else(|| panic!("no copy on {node}: {}", ran.stdout))
}

/// R91, R93: who has it is known, by its digest too; what was lost or damaged since is found, and a push mends it.
#[test]
fn the_inventory_follows_what_happens() {
    let mut cluster = Cluster::start(4);
    let source = cluster.source("genome.db", 4 * CHUNK + 5);
    let pushed = cluster.push(&source, &["--to", "targets"]).expect(0);
    cluster.wait_clean();
    let digest = sha256(&source);
    let all_ok = of(&[("n1", "ok"), ("n2", "ok"), ("n3", "ok")]);
    let job = pushed.last()["job"].as_str().unwrap();
    let status = cluster.run(&["wait", &job[..6], "--json"]).expect(0);
    assert_eq!(status.last()["job"], job);
    let none = cluster.run(&["status", "ffffffff-ffff-4fff"]).expect(2);
    assert!(none.stderr.contains("no job that begins with"), "{}", none.stderr);

    let ls = cluster.run(&["ls", "--json"]).expect(0);
    assert_eq!(copies(&ls), all_ok);
    let n2 = copy(&ls, "n2");
    assert_eq!(n2["path"], cluster.root(2).join("genome.db").to_str().unwrap());
    assert_eq!(
        (&n2["kind"], &n2["bytes"]),
        (&"file".into(), &(4 * CHUNK + 5).into())
    );
    assert_eq!(
        (&n2["sha256"], &n2["job"]),
        (&digest.clone().into(), &pushed.last()["job"])
    );
    assert!(n2["published"].as_u64().is_some() && n2["root"].as_str().unwrap().len() == 64);
    assert_eq!(
        (&ls.last()["event"], &ls.last()["copies"]),
        (&"finished".into(), &3.into())
    );

    for (args, nodes) in [
        (vec!["--digest", &digest[..10]], 3),
        (vec!["--digest", "0000000000"], 0),
        (vec!["genome.db", "--nodes", "n[1-2]"], 2),
        (vec!["other.db"], 0),
        (vec![cluster.root(3).to_str().unwrap()], 1),
    ] {
        let ls = cluster
            .run(&[&["ls", "--json"], args.as_slice()].concat())
            .expect(0);
        assert_eq!(copies(&ls).len(), nodes, "{args:?}: {}", ls.stdout);
    }
    let table = cluster.run(&["ls"]).expect(0);
    assert_eq!(
        table.stdout.lines().count(),
        4,
        "each root is a path of its own: {}",
        table.stdout
    );
    assert!(table.stdout.contains(&digest[..12]), "{}", table.stdout);
    assert!(
        cluster
            .run(&["ls", "other.db"])
            .expect(0)
            .stdout
            .contains("no copies")
    );
    assert_eq!(copies(&cluster.run(&["verify", "--json"]).expect(0)), all_ok);
    for typo in [&["verify", "other.db"][..], &["ls", "--verify", "other.db"]] {
        assert!(
            cluster.run(typo).expect(4).stdout.contains("no copies"),
            "{typo:?}"
        );
    }

    // kill -9 forgets nothing.
    cluster.kill_agent(1);
    cluster.wait_for("the agent to be missed", || {
        cluster.run(&["ls", "--nodes", "n1"]).exit == 5
    });
    let ls = cluster.run(&["ls", "--json"]).expect(5);
    assert_eq!(copies(&ls), of(&[("n2", "ok"), ("n3", "ok")]));
    assert_eq!(ls.last()["unanswered"][0]["node"], "n1");
    assert_eq!(ls.last()["unanswered"][0]["error"]["code"], "away");
    assert!(ls.stderr.contains("n1 did not answer"), "{}", ls.stderr);
    // A drained node need not answer; but it may have what nobody else has.
    cluster.run(&["nodes", "drain", "n1"]).expect(0);
    cluster.run(&["verify", "genome.db"]).expect(0);
    cluster.run(&["verify", "other.db"]).expect(5);
    cluster.run(&["nodes", "resume", "n1"]).expect(0);
    cluster.start_agent(1);
    cluster.wait_for("the agent to be back", || {
        copies(&cluster.run(&["ls", "--json"])) == all_ok
    });

    // One is deleted by hand, one is damaged.
    fs::remove_file(cluster.root(1).join("genome.db")).unwrap();
    let damaged = fs::File::options()
        .write(true)
        .open(cluster.root(2).join("genome.db"))
        .unwrap();
    damaged.write_all_at(b"damage", 3 * CHUNK).unwrap();
    let ls = cluster.run(&["ls", "--json"]).expect(0);
    assert_eq!(
        copies(&ls),
        of(&[("n1", "missing"), ("n2", "changed"), ("n3", "ok")])
    );
    let verified = cluster.run(&["ls", "--verify", "--json"]).expect(5);
    assert_eq!(
        copies(&verified),
        of(&[("n1", "missing"), ("n2", "damaged"), ("n3", "ok")])
    );
    assert_eq!(copy(&verified, "n2")["detail"], "chunk 3 of 5 differs");
    let said = cluster.run(&["verify"]).expect(5);
    assert!(
        said.stdout.contains("damaged: chunk 3 of 5 differs"),
        "{}",
        said.stdout
    );

    let ls = cluster.run(&["ls", "--json"]).expect(0);
    let known = of(&[("n1", "missing"), ("n2", "damaged"), ("n3", "ok")]);
    assert_eq!(copies(&ls), known, "what was found is known from now on");

    let mended = cluster
        .push(&source, &["--to", "targets", "--if-exists", "replace"])
        .expect(0);
    assert!(
        mended.node("n2")["bytes_received"].as_u64().unwrap() <= CHUNK,
        "only what differs"
    );
    cluster.wait_clean();
    assert_eq!(copies(&cluster.run(&["verify", "--json"]).expect(0)), all_ok);
}

#[test]
fn only_what_stage_published_is_removed() {
    let mut cluster = Cluster::start(4);
    let source = cluster.source("genome.db", 2 * CHUNK);
    // On n3 somebody else had it already.
    fs::copy(&source, cluster.root(3).join("genome.db")).unwrap();
    let dest = ["--to", "targets", "--dest", "main:"];
    cluster.push(&source, &dest).expect(0);
    cluster.wait_clean();
    fs::write(cluster.root(1).join("theirs"), "x").unwrap();

    let unknown = cluster
        .run(&["rm", "genome.db", "--from", "n9", "--json"])
        .expect(2);
    assert_eq!(unknown.last()["code"], "unknown_target");
    let refused = cluster.run(&["rm", "theirs", "--from", "n1", "--json"]).expect(5);
    assert_eq!(refused.events[0]["state"], "failed");
    assert_eq!(refused.events[0]["error"]["code"], "exists");
    assert!(
        refused.stderr.contains("not published by stage"),
        "{}",
        refused.stderr
    );
    assert_eq!(cluster.listing(1), ["genome.db", "theirs"]);

    // Changed on n2: left there.
    fs::write(cluster.root(2).join("genome.db"), "changed").unwrap();
    let partly = cluster
        .run(&["rm", "genome.db", "--from", "targets", "--json"])
        .expect(5);
    let states: Vec<_> = {
        let mut states: Vec<_> = partly
            .events
            .iter()
            .filter(|event| event["event"] == "removed")
            .map(|event| (text(&event["node"]), text(&event["state"])))
            .collect();
        states.sort();
        states
    };
    assert_eq!(
        states,
        of(&[("n1", "removed"), ("n2", "failed"), ("n3", "failed")])
    );
    assert_eq!(
        (&partly.last()["removed"], &partly.last()["failed"]),
        (&1.into(), &2.into())
    );
    assert_eq!(cluster.listing(1), ["theirs"]);
    assert_eq!(fs::read(cluster.root(2).join("genome.db")).unwrap(), b"changed");
    assert_eq!(sha256(&cluster.root(3).join("genome.db")), sha256(&source));

    let path = cluster.root(2).join("genome.db");
    let forced = cluster
        .run(&["rm", path.to_str().unwrap(), "--from", "n2", "--force"])
        .expect(0);
    assert!(forced.stdout.contains("n2: removed"), "{}", forced.stdout);
    assert!(cluster.listing(2).is_empty());
    cluster
        .run(&["rm", "genome.db", "--dest", "main:", "--from", "n3", "--force"])
        .expect(0);
    let again = cluster.run(&["rm", "genome.db", "--from", "targets"]).expect(0);
    assert!(again.stdout.contains("was not there"), "{}", again.stdout);
    assert!(copies(&cluster.run(&["ls", "--json"]).expect(0)).is_empty());

    cluster.kill_agent(3);
    cluster.wait_for("the agent to be missed", || {
        cluster.run(&["rm", "genome.db", "--from", "n3"]).exit == 5
    });
    let drained = cluster.run(&["nodes", "drain", "n3"]);
    assert_eq!(drained.exit, 0);
    cluster.run(&["rm", "genome.db", "--from", "targets"]).expect(0);
}

#[test]
fn trees_are_listed_verified_and_removed() {
    let cluster = Cluster::start(3);
    let refdb = cluster.path("refdb");
    fs::create_dir(&refdb).unwrap();
    for (name, size) in [("refdb.nin", 100), ("refdb.nsq", 3 * CHUNK + 7), ("refdb.nal", 0)] {
        fs::rename(cluster.source(name, size), refdb.join(name)).unwrap();
    }
    cluster.push(&refdb, &["--to", "targets"]).expect(0);
    cluster.wait_clean();

    let ls = cluster.run(&["ls", "--json"]).expect(0);
    assert_eq!(copies(&ls), of(&[("n1", "ok"), ("n2", "ok")]));
    let n1 = copy(&ls, "n1");
    assert_eq!(
        (&n1["kind"], &n1["bytes"]),
        (&"tree".into(), &(3 * CHUNK + 107).into())
    );
    assert_eq!(n1["path"], cluster.root(1).join("refdb").to_str().unwrap());
    let digest = text(&n1["sha256"]);
    assert_eq!(
        copies(&cluster.run(&["ls", "--digest", &digest, "--json"]).expect(0)).len(),
        2
    );

    let inside = cluster.root(2).join("refdb/refdb.nsq");
    let file = fs::File::options().write(true).open(&inside).unwrap();
    file.write_all_at(b"damage", CHUNK).unwrap();
    // Who has a file of a tree open keeps the tree.
    drop(file);
    let verified = cluster.run(&["verify", "refdb", "--json"]).expect(5);
    assert_eq!(copies(&verified), of(&[("n1", "ok"), ("n2", "damaged")]));
    assert!(text(&copy(&verified, "n2")["detail"]).contains("refdb/refdb.nsq"));

    let removed = cluster.run(&["rm", "refdb", "--from", "targets"]).expect(5);
    assert!(removed.stdout.contains("n1: removed"), "{}", removed.stdout);
    assert!(removed.stderr.contains("n2"), "{}", removed.stderr);
    assert!(cluster.listing(1).is_empty());
    cluster.run(&["rm", "refdb", "--from", "n2", "--force"]).expect(0);
    assert!(cluster.listing(2).is_empty());
}
