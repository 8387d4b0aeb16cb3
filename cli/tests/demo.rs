//! `stage demo`, for real: daemons as processes, TLS, a push, copies compared, and nothing left behind.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn demo(tmp: &Path) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("stage"));
    command.arg("demo").env("TMPDIR", tmp);
    // What a user's own cluster has set must not reach the demo's.
    for variable in [
        "STAGE_COORDINATOR",
        "STAGE_CA",
        "STAGE_CERT",
        "STAGE_KEY",
        "STAGE_LOG",
    ] {
        command.env_remove(variable);
    }
    command
}

fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).unwrap().next().is_none()
}

/// Processes that work in `dir`: it stands on their command lines.
fn processes(dir: &Path) -> usize {
    let dir = dir.to_str().unwrap();
    fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| fs::read(entry.ok()?.path().join("cmdline")).ok())
        .filter(|line| String::from_utf8_lossy(line).contains(dir))
        .count()
}

#[test]
fn every_line_is_as_promised_and_nothing_is_left() {
    let tmp = tempfile::tempdir().unwrap();
    let done = demo(tmp.path())
        .args(["--json", "--nodes", "3", "--size", "8MiB", "--shape", "chain"])
        .output()
        .unwrap();
    let said = String::from_utf8(done.stdout).unwrap();
    let complaint = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(0), "{said}{complaint}");
    let lines: Vec<Value> = said
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let job = lines[0]["job"].as_str().unwrap();
    assert_eq!(lines[0]["event"], "submitted");
    for line in &lines {
        match line["event"].as_str().unwrap() {
            "submitted" | "progress" => assert_eq!(line["job"], job),
            "planned" => {
                assert_eq!(line["plan"]["shape"], "chain");
                assert_eq!(line["plan"]["source"], "n0");
                assert_eq!(line["plan"]["hops"].as_array().unwrap().len(), 3);
            }
            "node" => assert!(line["error"].is_null(), "{line}"),
            "remark" => {}
            "compared" => {
                assert_eq!((&line["copies"], &line["equal"]), (&3.into(), &true.into()));
            }
            "finished" => assert_eq!(line["exit"], 0),
            other => panic!("unknown event {other}"),
        }
    }
    let count = |event: &str| lines.iter().filter(|line| line["event"] == event).count();
    assert!(count("planned") >= 1);
    assert_eq!((count("compared"), count("finished"), count("error")), (1, 1, 0));

    let last = lines.last().unwrap();
    assert_eq!(
        (&last["event"], &last["state"]),
        (&"finished".into(), &"done".into())
    );
    assert_eq!(last["bytes"], 8 << 20);
    assert!(last["source_bytes_read"].as_u64().unwrap() >= 8 << 20);
    let compared = lines.iter().find(|line| line["event"] == "compared").unwrap();
    assert_eq!(last["sha256"], compared["sha256"]);
    let plan = &last["plan"];
    assert!(plan["predicted_seconds"].as_f64().unwrap() >= plan["bound_seconds"].as_f64().unwrap());
    let nodes = last["nodes"].as_array().unwrap();
    let names: Vec<&str> = nodes.iter().map(|node| node["node"].as_str().unwrap()).collect();
    assert_eq!(names, ["n1", "n2", "n3"]);
    for node in nodes {
        assert_eq!(
            (&node["state"], &node["already"]),
            (&"published".into(), &false.into())
        );
        assert!(node["bytes_received"].as_u64().unwrap() >= 8 << 20, "{node}");
        assert!(node["parent"].is_string() && node["streams"].as_u64().unwrap() >= 1);
    }
    assert!(is_empty(tmp.path()), "the demo left something behind");
    assert_eq!(processes(tmp.path()), 0);
}

#[test]
fn a_file_of_ones_own_without_tls_and_kept() {
    let tmp = tempfile::tempdir().unwrap();
    let file = tmp.path().join("odd\nname.db");
    fs::write(&file, b"not much").unwrap();
    let keep = tmp.path().join("kept");
    let done = demo(tmp.path())
        .args(["--nodes", "1", "--insecure", "--keep"])
        .arg(&keep)
        .arg(&file)
        .output()
        .unwrap();
    let said = String::from_utf8(done.stdout).unwrap();
    let complaint = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(0), "{said}{complaint}");
    assert!(said.contains("the copy is equal to the original"), "{said}");
    assert!(
        !said.contains("odd\n") && !said.contains('\u{1b}'),
        "a name reached the output raw: {said:?}"
    );
    assert!(complaint.contains(keep.to_str().unwrap()), "{complaint}");
    let copy = keep.join("n1/scratch/odd\nname.db");
    assert_eq!(fs::read(copy).unwrap(), b"not much");
    assert_eq!(processes(&keep), 0);
}

#[test]
fn a_source_that_is_not_there_is_refused() {
    let tmp = tempfile::tempdir().unwrap();
    let done = demo(tmp.path())
        .args(["--nodes", "1", "--json", "/nonexistent/genome.db"])
        .output()
        .unwrap();
    let said = String::from_utf8(done.stdout).unwrap();
    assert_eq!(done.status.code(), Some(4), "{said}");
    let last: Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
    assert_eq!((&last["event"], &last["exit"]), (&"error".into(), &4.into()));
    assert_eq!(last["code"], "source_missing");
    assert!(is_empty(tmp.path()));
}

/// Waits for a state, not for a time.
fn wait_for(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !reached() {
        assert!(Instant::now() < deadline, "{what}: not within 30 s");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Starts a demo whose push takes its time; comes back when the job exists.
fn under_way(tmp: &Path) -> std::process::Child {
    let mut child = demo(tmp)
        .args([
            "--json",
            "--nodes",
            "2",
            "--size",
            "16MiB",
            "--source-limit",
            "1MB/s",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let first = lines.next().unwrap().unwrap();
    assert!(first.contains("submitted"), "{first}");
    // Its output goes on being read, so that it never meets a closed pipe.
    std::thread::spawn(move || lines.for_each(drop));
    child
}

fn signal(child: &std::process::Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(child.id().cast_signed()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

#[test]
fn ctrl_c_leaves_nothing_behind() {
    let tmp = tempfile::tempdir().unwrap();
    let mut child = under_way(tmp.path());
    assert!(processes(tmp.path()) >= 4, "a coordinator and three agents");
    signal(&child, rustix::process::Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(is_empty(tmp.path()));
    assert_eq!(processes(tmp.path()), 0);
}

#[test]
fn a_reader_that_goes_leaves_nothing_behind() {
    let tmp = tempfile::tempdir().unwrap();
    let mut child = demo(tmp.path())
        .args(["--json", "--nodes", "1", "--size", "1MiB"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(1));
    assert!(is_empty(tmp.path()));
    assert_eq!(processes(tmp.path()), 0);
}

#[test]
fn daemons_die_with_the_demo() {
    let tmp = tempfile::tempdir().unwrap();
    let mut child = under_way(tmp.path());
    signal(&child, rustix::process::Signal::KILL);
    child.wait().unwrap();
    wait_for("the daemons end with their parent", || processes(tmp.path()) == 0);
}
