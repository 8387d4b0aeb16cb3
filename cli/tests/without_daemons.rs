//! `stage topology check` and other commands that need no daemon, as a person types them.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::path::Path;

use assert_cmd::Command;

fn stage(line: &[&str]) -> assert_cmd::assert::Assert {
    let mut command = Command::cargo_bin("stage").unwrap();
    for variable in ["STAGE_COORDINATOR", "STAGE_CA", "STAGE_CERT", "STAGE_KEY"] {
        command.env_remove(variable);
    }
    command.args(line).assert()
}

fn stdout(done: &assert_cmd::assert::Assert) -> String {
    String::from_utf8(done.get_output().stdout.clone()).unwrap()
}

fn stderr(done: &assert_cmd::assert::Assert) -> String {
    String::from_utf8(done.get_output().stderr.clone()).unwrap()
}

const GOOD: &str = r#"
[cluster]
name = "small"

[[switch]]
name = "core"

[[node]]
name = "n[0-3]"
address = "10.0.0.[1-4]"
attach = "core"
nic = "10 Gbit/s"

[groups]
workers = "n[1-3]"
"#;

fn write(dir: &Path, text: &str) -> String {
    let file = dir.join("topology.toml");
    fs::write(&file, text).unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn a_sound_topology_is_summed_up() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), GOOD);
    let done = stage(&["topology", "check", &file]).success();
    assert!(stdout(&done).starts_with(&format!("{file}: cluster small: 4 nodes, 1 switch")));
    let done = stage(&["topology", "check", &file, "--json"]).success();
    let line: serde_json::Value = serde_json::from_str(&stdout(&done)).unwrap();
    assert_eq!((&line["event"], &line["nodes"]), (&"topology".into(), &4.into()));
}

#[test]
fn every_error_has_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let text = GOOD.replace("\"10 Gbit/s\"", "\"10\"") + "idle = \"m[1-3]\"\n";
    let file = write(dir.path(), &text);
    let done = stage(&["topology", "check", &file]).code(2);
    let said = stderr(&done);
    assert_eq!(stdout(&done), "");
    for line in [12, 16] {
        assert!(said.contains(&format!("{file}:{line}: ")), "{said}");
    }
    let done = stage(&["topology", "check", &file, "--json"]).code(2);
    let text = stdout(&done);
    let line: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!((&line["event"], &line["exit"]), (&"error".into(), &2.into()));
    assert_eq!(line["code"], "config");
}

#[test]
fn a_topology_that_is_not_there_is_named() {
    let done = stage(&["topology", "check", "/nonexistent/topology.toml"]).code(2);
    assert!(stderr(&done).contains("/nonexistent/topology.toml"));
}

#[test]
fn a_plan_needs_no_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), GOOD);
    let line = [
        "plan",
        "--topology",
        &file,
        "--from",
        "n0",
        "--to",
        "workers",
        "--size",
        "1 GiB",
        "--shape",
        "chain",
    ];
    let done = stage(&line).success();
    assert!(
        stdout(&done).starts_with("plan: chain from n0 to 3 nodes, depth 3"),
        "{}",
        stdout(&done)
    );
    let done = stage(&[&line[..], &["--json"]].concat()).success();
    let text = stdout(&done);
    let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(
        (&last["event"], &last["plan"]["shape"]),
        (&"planned".into(), &"chain".into())
    );
    assert_eq!(last["plan"]["hops"].as_array().unwrap().len(), 3);
}

#[test]
fn a_plan_says_what_was_tried_and_is_tried_itself() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), GOOD);
    let drawing = dir.path().join("plan.svg");
    let line = [
        "plan",
        "--topology",
        &file,
        "--from",
        "n0",
        "--to",
        "workers",
        "--size",
        "10 GiB",
    ];
    let more = ["--explain", "--simulate", "--plot", drawing.to_str().unwrap()];
    let text = stdout(&stage(&[&line[..], &more].concat()).success());
    for part in [
        "tried, from best to worst",
        "chosen",
        "simulated: 3 of 3 targets done",
    ] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    let svg = fs::read_to_string(&drawing).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));

    let line = [
        &line[..],
        &more[..2],
        &["--shape", "chain", "--fail", "n2@1s", "--json"],
    ]
    .concat();
    let text = stdout(&stage(&line).success());
    let events: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let names: Vec<&str> = events
        .iter()
        .map(|event| event["event"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["planned", "explained", "simulated"]);
    assert_eq!(events[1]["tried"][0]["verdict"], "chosen");
    let simulated = &events[2];
    assert!(simulated["seconds"].is_null(), "n2 is never done");
    let finishes = simulated["nodes"].as_array().unwrap();
    assert_eq!(
        finishes
            .iter()
            .filter(|node| node["finish_seconds"].is_null())
            .count(),
        1
    );
    // Detected after three seconds.
    assert_eq!(
        (&simulated["moves"][0]["node"], &simulated["moves"][0]["seconds"]),
        (&"n3".into(), &4.0.into())
    );
}

#[test]
fn a_plan_for_nobody_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = write(dir.path(), GOOD);
    let line = [
        "plan",
        "--topology",
        &file,
        "--from",
        "n0",
        "--size",
        "1 GiB",
        "--to",
    ];
    let done = stage(&[&line[..], &["m1", "--json"]].concat()).code(2);
    let last: serde_json::Value = serde_json::from_str(&stdout(&done)).unwrap();
    assert_eq!(
        (&last["event"], &last["code"]),
        (&"error".into(), &"unknown_target".into())
    );
    assert!(!stderr(&done).is_empty(), "people are told too");
}

#[test]
fn a_bad_flag_is_an_error_for_scripts_too() {
    let done = stage(&["push", "--json", "a.db"]).code(2);
    let last: serde_json::Value = serde_json::from_str(&stdout(&done)).unwrap();
    assert_eq!((&last["event"], &last["exit"]), (&"error".into(), &2.into()));
}

#[test]
fn an_empty_name_is_none_that_was_left_out() {
    let done = stage(&["push", "a.db", "--as", "", "--to", "all"]).code(2);
    assert!(stderr(&done).contains("\"\" names no file"), "{}", stderr(&done));
}

#[test]
fn without_a_coordinator_the_command_says_what_is_missing() {
    let done = stage(&["push", "a.db", "--to", "all"]).code(2);
    assert!(stderr(&done).contains("STAGE_COORDINATOR"));
    // Nothing listens on port 1 of the loopback.
    let done = stage(&["--coordinator", "http://127.0.0.1:1", "nodes", "--json"]).code(3);
    let last: serde_json::Value = serde_json::from_str(&stdout(&done)).unwrap();
    assert_eq!(
        (&last["event"], &last["code"]),
        (&"error".into(), &"no_coordinator".into())
    );
}

#[test]
fn a_daemon_with_a_bad_configuration_ends_with_78() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("agent.toml");
    fs::write(&file, "node = \"n1\"\nrots = \"/x\"\n").unwrap();
    let done = stage(&["agent", "--config", file.to_str().unwrap()]).code(78);
    assert!(stderr(&done).contains("agent.toml:2: unknown field `rots`"));
}

#[test]
fn completions_are_printed() {
    let done = stage(&["completions", "bash"]).success();
    assert!(stdout(&done).contains("_stage"));
}
