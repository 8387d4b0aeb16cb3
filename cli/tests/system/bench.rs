//! Measuring nodes and links, and looking for what is wrong with hosts.

use serde_json::Value;

use crate::cluster::{Cluster, Ran, text};

fn events<'a>(ran: &'a Ran, kind: &str) -> Vec<&'a Value> {
    ran.events.iter().filter(|event| event["event"] == kind).collect()
}

fn rate(value: &Value) -> f64 {
    value.as_f64().unwrap_or_default()
}

#[test]
fn a_bench_is_measured_kept_and_shown_again() {
    let mut cluster = Cluster::start(3);
    // Other tests keep this machine busy.
    let bench = cluster
        .run(&["bench", "--quick", "--busy-too", "--json"])
        .expect(0);
    let nodes = events(&bench, "node");
    let names: Vec<String> = nodes.iter().map(|node| text(&node["node"])).collect();
    assert_eq!(names, ["n0", "n1", "n2"]);
    for node in &nodes {
        let disk = &node["disks"][0];
        // A machine that is short of space measures no disk, and says so.
        assert!(
            rate(&disk["write_bytes_per_second"]) > 0.0 || text(&disk["skipped"]).contains("free"),
            "{disk}"
        );
        assert!(
            rate(&node["blake3_bytes_per_second"]) > 0.0 && rate(&node["aes_gcm_bytes_per_second"]) > 0.0
        );
        assert_eq!((&node["interface"], &node["readings"]), (&"lo".into(), &1.into()));
    }
    let links = events(&bench, "link");
    assert_eq!(
        links.len(),
        1,
        "one pair tells all of one switch: {}",
        bench.stdout
    );
    let link = links[0];
    assert_eq!((&link["node"], &link["to"]), (&"n0".into(), &"n1".into()));
    assert!(rate(&link["rtt_seconds"]) > 0.0 && rate(&link["bandwidth_delay_bytes"]) > 0.0);
    for way in ["forward", "backward"] {
        assert_eq!(link[way][0]["streams"], 1);
        assert!(rate(&link[way][0]["bytes_per_second"]) > 0.0, "{link}");
    }
    assert_eq!(link["hops"].as_array().unwrap().len(), 2);
    assert_eq!(events(&bench, "verdict").len(), 2, "one for each direction");
    let progress = events(&bench, "progress");
    assert_eq!(progress.last().unwrap()["done"], 4);
    assert_eq!(bench.last()["exit"], 0);
    assert_eq!(cluster.listing(1), [""; 0], "nothing is left in a root");

    // It is kept, and its age is known, whatever becomes of the coordinator.
    cluster.kill_coordinator();
    cluster.start_coordinator();
    cluster.wait_up(3);
    let shown = cluster.run(&["bench", "--show", "--json"]).expect(0);
    for kind in ["node", "link"] {
        assert_eq!(events(&shown, kind), events(&bench, kind));
    }
    let table = cluster
        .run(&["bench", "--show", "--nodes", "n1"])
        .expect(0)
        .stdout;
    assert!(
        table.contains("BLAKE3") && table.contains("n1") && !table.contains("n2"),
        "{table}"
    );
}

#[test]
fn who_is_away_or_drained_is_named_and_not_measured() {
    let mut cluster = Cluster::start(3);
    cluster.kill_agent(2);
    cluster.run(&["nodes", "drain", "n1"]).expect(0);
    let bench = cluster
        .run(&["bench", "--quick", "--json", "--nodes", "n[1-2]"])
        .expect(5);
    let skipped = events(&bench, "skipped");
    let of = |node: &str| skipped.iter().find(|event| event["node"] == node).unwrap();
    assert_eq!(of("n1")["busy"], true);
    assert_eq!(of("n2")["error"]["code"], "away");
    assert!(events(&bench, "node").is_empty());
    assert!(
        bench.stderr.contains("n1") && bench.stderr.contains("drained"),
        "{}",
        bench.stderr
    );
    cluster.run(&["bench", "--nodes", "n9"]).expect(2);
}

#[test]
fn a_doctor_finds_what_is_wrong_and_says_what_mends_it() {
    let mut cluster = Cluster::start(3);
    let told = cluster.run(&["doctor", "--json"]);
    assert!([0, 5].contains(&told.exit), "{}", told.stderr);
    assert_eq!(events(&told, "node").len(), 3);
    for node in events(&told, "node") {
        for finding in node["findings"].as_array().unwrap() {
            assert!(!text(&finding["mend"]).is_empty(), "{finding}");
            assert_ne!(finding["check"], "root", "{finding}");
            assert_ne!(finding["check"], "clock", "one clock for all: {finding}");
        }
    }
    std::fs::remove_dir(cluster.root(1)).unwrap();
    cluster.kill_agent(2);
    cluster.wait_for("the agent to be missed", || {
        cluster
            .run(&["doctor", "n2"])
            .stderr
            .contains("n2 did not answer")
    });
    let told = cluster.run(&["doctor", "n1", "n2", "--json"]).expect(5);
    let nodes = events(&told, "node");
    let root = nodes[0]["findings"].as_array().unwrap();
    assert!(
        root.iter().any(|finding| finding["check"] == "root"),
        "{}",
        told.stdout
    );
    assert_eq!(nodes[1]["error"]["code"], "away");
    let people = cluster.run(&["doctor", "n1"]).expect(5);
    assert!(people.stdout.contains("is missing"), "{}", people.stdout);
    assert!(
        people.stdout.contains("make or mount the directory"),
        "{}",
        people.stdout
    );
}

#[test]
fn a_sweep_is_a_matrix_and_a_drawing_and_is_not_kept() {
    let cluster = Cluster::start(3);
    let drawing = cluster.path("sweep.svg");
    let sweep = cluster
        .run(&[
            "bench",
            "--sweep",
            "n2",
            "n0",
            "--quick",
            "--busy-too",
            "--json",
            "--plot",
            "sweep.svg",
        ])
        .expect(0);
    let links = events(&sweep, "link");
    assert_eq!(links.len(), 1, "{}", sweep.stdout);
    assert_eq!((&links[0]["node"], &links[0]["to"]), (&"n2".into(), &"n0".into()));
    let cells = links[0]["forward"].as_array().unwrap();
    assert_eq!(cells.len(), 6);
    assert_eq!(cells[0]["window_bytes"], 256 << 10);
    let svg = std::fs::read_to_string(drawing).unwrap();
    assert_eq!(svg.matches("<rect x=").count(), 12);
    assert!(svg.contains("n2 to n0") && svg.contains("n0 to n2"));
    let known = cluster.run(&["bench", "--show"]).expect(0);
    assert!(known.stdout.contains("nothing is known"), "{}", known.stdout);
    cluster.run(&["bench", "--sweep", "n1", "n1"]).expect(2);
    cluster.run(&["bench", "--sweep", "n1"]).expect(2);
}
