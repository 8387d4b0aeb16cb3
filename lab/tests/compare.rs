//! The comparison lets each contestant bring the file, checks the copies, and keeps what it counted.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use serde_json::Value;
use stage_lab::{is_installed, need_netns};

fn run(words: &[&str]) -> std::process::Output {
    let mut command = assert_cmd::Command::cargo_bin("stage-lab").unwrap();
    command.arg("compare").args(words).output().unwrap()
}

#[test]
fn a_peer_has_its_turn_in_a_lab() {
    // Without openssl no copy can be checked.
    if !need_netns() || !is_installed("openssl") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("figures.json");
    let output = run(&[
        "--stage",
        "/bin/true",
        "--setting",
        "one-unshaped",
        "--only",
        "cp",
        "rsync",
        "--rounds",
        "2",
        "--size",
        "3 MiB",
        "--json",
        json.to_str().unwrap(),
    ]);
    assert!(output.status.success(), "{output:?}");
    let figures: Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let rows = figures["sheets"][0]["rows"].as_array().unwrap();
    let row = |name: &str| rows.iter().find(|row| row["name"] == name).unwrap();
    assert_eq!(rows.len(), 2);
    for turn in row("cp")["turns"].as_array().unwrap() {
        assert!(turn["verified"].as_f64() > turn["as_it_is"].as_f64(), "{turn}");
        assert!(turn["cpu_verified"].as_f64() > Some(0.0), "{turn}");
        // No network: whatever the namespace says by itself.
        assert!(turn["source_sent"].as_u64().unwrap() < 4096, "{turn}");
    }
    assert_eq!(row("cp")["turns"].as_array().unwrap().len(), 2, "{figures}");
    // What is there brings the file over the network, what is not says so.
    match row("rsync")["trouble"].as_str() {
        None => {
            let sent = row("rsync")["turns"][0]["source_sent"].as_u64().unwrap();
            assert!((3 << 20..4 << 20).contains(&sent), "{figures}");
        }
        Some(why) => assert!(why.contains("not installed (package rsync)"), "{why}"),
    }
    let table = std::fs::read_to_string(json.with_extension("md")).unwrap();
    assert!(
        table.contains("| cp in parallel, without a network (the floor) | "),
        "{table}"
    );
}

#[test]
fn it_lists_what_can_be_asked_for_and_refuses_the_rest() {
    let listed = run(&["--list"]);
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    for name in ["four-unshaped", "stage-insecure", "mbuffer", "aria2"] {
        assert!(text.contains(name), "{text}");
    }
    let refused = run(&["--only", "nobody"]);
    assert!(!refused.status.success());
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        text.contains("there is no \"nobody\": stage, stage-insecure, mbuffer"),
        "{text}"
    );
}
