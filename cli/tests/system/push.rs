//! Pushes that go well.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use crate::cluster::{Cluster, sha256, text};

const CHUNK: u64 = 1 << 20;

#[test]
fn every_shape_brings_every_copy() {
    let cluster = Cluster::start(5);
    let mode = fs::Permissions::from_mode(0o640);
    for shape in ["chain", "star", "tree:2", "auto"] {
        let source = cluster.source(&format!("genome-{shape}.db").replace(':', "-"), 12 * CHUNK + 345);
        fs::set_permissions(&source, mode.clone()).unwrap();
        let ran = cluster
            .push(&source, &["--to", "targets", "--shape", shape])
            .expect(0);

        assert_eq!(ran.events[0]["event"], "submitted");
        assert!(
            ran.events.iter().any(|e| e["event"] == "planned"),
            "{}",
            ran.stdout
        );
        let last = ran.last();
        assert_eq!(
            (&last["event"], &last["state"]),
            (&"finished".into(), &"done".into())
        );
        assert_eq!(text(&last["sha256"]), sha256(&source));
        assert_eq!(last["bytes"], 12 * CHUNK + 345);
        assert_eq!(
            last["source_bytes_read"],
            12 * CHUNK + 345,
            "the source is read once"
        );
        let children = match shape {
            "chain" => Some(1),
            "star" => Some(4),
            _ => None,
        };
        if let Some(children) = children {
            assert_eq!(
                last["source_bytes_sent"],
                children * (12 * CHUNK + 345),
                "{shape}"
            );
        }
        for node in ["n1", "n2", "n3", "n4"] {
            assert_eq!(ran.node(node)["state"], "published");
            assert_eq!(ran.node(node)["bytes_received"], 12 * CHUNK + 345);
        }
        cluster.assert_published(1..5, &source);
        let copy = fs::metadata(cluster.root(3).join(source.file_name().unwrap())).unwrap();
        let original = fs::metadata(&source).unwrap();
        assert_eq!(copy.permissions().mode() & 0o777, 0o640);
        assert_eq!(copy.modified().unwrap(), original.modified().unwrap());
    }
    cluster.wait_clean();
}

#[test]
fn sizes_around_nothing_and_around_a_chunk() {
    let cluster = Cluster::start(3);
    for size in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1] {
        let source = cluster.source(&format!("size-{size}"), size);
        let ran = cluster
            .push(&source, &["--to", "targets", "--shape", "chain"])
            .expect(0);
        assert_eq!(text(&ran.last()["sha256"]), sha256(&source), "{size}");
        cluster.assert_published(1..3, &source);
    }
    cluster.wait_clean();
}

#[test]
fn the_second_push_moves_no_payload_byte() {
    let cluster = Cluster::start(4);
    let source = cluster.source("genome.db", 9 * CHUNK + 7);
    cluster.push(&source, &["--to", "targets"]).expect(0);
    let again = cluster.push(&source, &["--to", "targets"]).expect(0);
    for node in ["n1", "n2", "n3"] {
        assert_eq!(again.node(node)["already"], true, "{}", again.node(node));
        assert_eq!(again.node(node)["bytes_received"], 0);
        assert_eq!(again.node(node)["state"], "published");
    }
    cluster.assert_published(1..4, &source);
    cluster.wait_clean();
}

#[test]
fn a_dest_below_the_root_is_made_and_the_source_may_be_a_target() {
    let cluster = Cluster::start(3);
    let source = cluster.source("genome.db", 3 * CHUNK);
    let ran = cluster
        .push(&source, &["--to", "all", "--dest", "main:db/2026"])
        .expect(0);
    for node in 0..3 {
        let copy = cluster.root(node).join("db/2026/genome.db");
        assert_eq!(sha256(&copy), sha256(&source), "n{node}");
        assert_eq!(
            text(&ran.node(&format!("n{node}"))["path"]),
            copy.display().to_string()
        );
    }
    cluster.wait_clean();
}

#[test]
fn expected_digests_decide_about_publishing() {
    let cluster = Cluster::start(3);
    let source = cluster.source("genome.db", 3 * CHUNK + 1);
    fs::write(cluster.path("GOOD"), format!("{}  genome.db\n", sha256(&source))).unwrap();
    fs::write(cluster.path("BAD"), format!("{}  genome.db\n", "0".repeat(64))).unwrap();
    let bad = cluster
        .push(&source, &["--to", "targets", "--expect", "BAD"])
        .expect(6);
    assert_eq!(bad.last()["state"], "failed");
    assert!(
        bad.stderr.contains("unexpected") || bad.stderr.contains("expect"),
        "{}",
        bad.stderr
    );
    cluster.wait_clean();
    assert!(cluster.listing(1).is_empty() && cluster.listing(2).is_empty());
    let good = cluster
        .push(&source, &["--to", "targets", "--expect", "GOOD"])
        .expect(0);
    assert_eq!(good.last()["agrees"], "sha256");
    cluster.assert_published(1..3, &source);
}

#[test]
fn md5_sums_as_publishers_ship_them_count_too() {
    let cluster = Cluster::start(2);
    let source = cluster.path("abc.txt");
    fs::write(&source, "abc").unwrap();
    let other = "0".repeat(32);
    let right = "900150983cd24fb0d6963f7d28e17f72";
    fs::write(
        cluster.path("BAD"),
        format!("{right}  other.txt\n{other}  abc.txt\n"),
    )
    .unwrap();
    let bad = cluster
        .push(&source, &["--to", "n1", "--expect", "BAD"])
        .expect(6);
    assert!(bad.stderr.contains("MD5"), "{}", bad.stderr);
    cluster.wait_clean();
    assert!(cluster.listing(1).is_empty());
    for (at, sums) in [
        format!("{other}  other.txt\n{right} *./abc.txt\n"),
        format!("MD5 (abc.txt) = {right}\n"),
    ]
    .iter()
    .enumerate()
    {
        fs::write(cluster.path("SUMS"), sums).unwrap();
        let dest = format!("main:{at}");
        let good = cluster
            .push(&source, &["--to", "n1", "--expect", "SUMS", "--dest", &dest])
            .expect(0);
        assert_eq!(good.last()["agrees"], "md5", "{}", good.last());
        assert_eq!(
            fs::read(cluster.root(1).join(format!("{at}/abc.txt"))).unwrap(),
            b"abc"
        );
    }
}

#[test]
fn a_dry_run_plans_and_leaves_nothing() {
    let cluster = Cluster::start(3);
    let source = cluster.source("genome.db", 3 * CHUNK);
    let ran = cluster.push(&source, &["--to", "targets", "--shape", "chain", "--dry-run"]);
    assert_eq!(ran.exit, 0, "{}", ran.stderr);
    let planned = ran.events.iter().find(|e| e["event"] == "planned").unwrap();
    assert_eq!(planned["plan"]["shape"], "chain");
    assert!(cluster.listing(1).is_empty() && cluster.listing(2).is_empty());
}
