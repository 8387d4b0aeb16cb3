//! The lab stands as its topology says, carries what it says, and leaves nothing.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use stage_core::topology::{EdgeId, Topology};
use stage_core::units::ByteCount;
use stage_lab::{Group, Lab, Options, Quota, Way, is_demanded, need_iperf, need_long_links, need_netns};

const TWO_RACKS: &str = r#"
[cluster]
name = "lab"

[[switch]]
name = "core"
[[switch]]
name = "rack[1-2]"
[[link]]
between = ["rack[1-2]", "core"]
capacity = "200 Mbit/s"

[[switch]]
name = "wan"

[[node]]
name = "head"
address = "10.77.0.1"
attach = "core"
nic = "1 Gbit/s"

[[node]]
name = "a[1-2]"
address = "10.77.1.[1-2]"
attach = "rack1"
nic = "500 Mbit/s"

[[node]]
name = "b[1-2]"
address = "10.77.2.[1-2]"
attach = "rack2"
nic = "500 Mbit/s"

[[node]]
name = "six1"
address = "fd77::1"
attach = "rack1"
nic = "500 Mbit/s"

[[node]]
name = "six2"
address = "fd77::2"
attach = "rack2"
nic = "500 Mbit/s"

[[node]]
name = "dtn"
[[node.interface]]
name = "lan0"
address = "10.77.0.9"
attach = "core"
nic = "1 Gbit/s"
[[node.interface]]
name = "wan0"
address = "192.0.2.9"
attach = "wan"
nic = "1 Gbit/s"

[[node]]
name = "far"
address = "192.0.2.20"
attach = "wan"
nic = "1 Gbit/s"
"#;

fn topology() -> Topology {
    Topology::parse("two-racks.toml", TWO_RACKS).unwrap()
}

/// The edges from one node to another.
fn way(topology: &Topology, from: &str, to: &str) -> Vec<EdgeId> {
    topology
        .route(&from.parse().unwrap(), &to.parse().unwrap())
        .unwrap()
        .edges
}

fn ping(lab: &Lab, from: &str, to: &str) -> bool {
    // bash's own TCP device needs no ping program: a refused connection is an answer from the other node.
    let script = format!("exec 3<>/dev/tcp/{}/9", lab.address(to).unwrap());
    let output = lab
        .command(from, "timeout")
        .unwrap()
        .args(["3", "bash", "-c", &script])
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stderr).contains("Connection refused")
}

#[test]
fn every_node_reaches_every_other_and_nothing_is_left() {
    if !need_netns() {
        return;
    }
    let topology = topology();
    let lab = Lab::up(&topology).unwrap();
    let prefix = lab.prefix().to_owned();
    for (from, to) in [
        ("a1", "a2"),
        ("a1", "b2"),
        ("b1", "head"),
        ("head", "dtn"),
        ("dtn", "far"),
    ] {
        assert!(ping(&lab, from, to), "{from} to {to}");
        assert!(ping(&lab, to, from), "{to} to {from}");
    }
    assert!(ping(&lab, "six1", "six2"));
    // Through the relay: the control network spans what no route of the planner does.
    assert!(ping(&lab, "far", "a1"));
    assert!(ping(&lab, "b2", "far"));
    let own = lab
        .command("a1", "ip")
        .unwrap()
        .args(["-br", "address"])
        .output()
        .unwrap();
    assert!(String::from_utf8_lossy(&own.stdout).contains("10.77.1.1/32"));
    std::fs::write(lab.dir("a1").join("file"), "x").unwrap();
    let dir = lab.root_dir().to_owned();
    // A process that outlives its test must not outlive the lab.
    let mut stray = lab
        .command("a2", "sleep")
        .unwrap()
        .arg("1000")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();

    drop(lab);
    assert!(!stray.wait().unwrap().success());
    let left = Command::new("ip").args(["netns", "list"]).output().unwrap();
    assert!(!String::from_utf8_lossy(&left.stdout).contains(&prefix));
    assert!(!dir.exists());
}

#[test]
fn a_black_hole_swallows_one_direction() {
    if !need_netns() {
        return;
    }
    let lab = Lab::up(&topology()).unwrap();
    for (from, to) in [("a1", "a2"), ("dtn", "head")] {
        assert!(ping(&lab, from, to), "{from} to {to}");
        lab.black_hole(to, from).unwrap();
        // The request arrives, no answer comes.
        assert!(!ping(&lab, from, to), "{from} to {to}");
    }
    assert!(ping(&lab, "a1", "b1"));
    assert!(lab.black_hole("a1", "nobody").is_err());
}

#[test]
fn counters_tell_each_edge_and_direction_apart() {
    if !need_iperf() {
        return;
    }
    let topology = topology();
    let lab = Lab::up(&topology).unwrap();
    let bytes = |edges: &[EdgeId]| -> Vec<f64> {
        edges
            .iter()
            .map(|edge| lab.counters(*edge).unwrap().bytes.0 as f64)
            .collect()
    };
    let forth = way(&topology, "a1", "b1");
    assert_eq!(forth.len(), 4);
    let back = way(&topology, "b1", "a1");
    let elsewhere = way(&topology, "a2", "b2");
    let rate = lab.iperf("a1", "b1").unwrap();

    // Two measured seconds; the counters have the start-up second too.
    let payload = rate.bytes_per_second() * 2.0;
    assert!(payload > 1e6, "{payload}");
    assert!(
        bytes(&forth).iter().all(|edge| *edge > payload),
        "{:?} {payload}",
        bytes(&forth)
    );
    // Acknowledgements alone, or nothing but what the kernel says to itself.
    assert!(
        bytes(&back).iter().all(|edge| *edge < payload * 0.1),
        "{:?} {payload}",
        bytes(&back)
    );
    let own = [elsewhere[0], elsewhere[3]];
    assert!(
        bytes(&own).iter().all(|edge| *edge < payload * 0.01),
        "{:?} {payload}",
        bytes(&own)
    );
    assert!(lab.counters(EdgeId(9999)).is_err());
}

/// The lab's calibration: what TCP carries is what the topology says, less headers. Other work on the machine can only
/// slow a measurement down, so the best of three counts.
#[test]
fn links_carry_what_the_topology_says() {
    if !is_demanded() || !need_iperf() {
        return;
    }
    let lab = Lab::up(&topology()).unwrap();
    for (from, to, mbit) in [("a1", "b1", 200.0), ("a1", "a2", 500.0), ("dtn", "head", 1000.0)] {
        let mut measured = Vec::new();
        while measured.len() < 3 && measured.last().is_none_or(|last| *last < mbit * 0.9) {
            measured.push(lab.iperf(from, to).unwrap().bits_per_second() / 1e6);
        }
        let last = *measured.last().unwrap();
        assert!(
            (mbit * 0.9..=mbit).contains(&last),
            "{from} to {to}: {measured:?} of {mbit} Mbit/s"
        );
    }
}

#[test]
fn a_lab_that_fails_half_way_leaves_nothing() {
    if !need_netns() {
        return;
    }
    // A name that the topology lets pass and the kernel refuses.
    let text = TWO_RACKS.replace("\"wan0\"", "\"..\"");
    let message = Lab::up(&Topology::parse("broken.toml", &text).unwrap())
        .unwrap_err()
        .to_string();
    // The message begins with the call, which names the namespace.
    let name = message
        .split_whitespace()
        .find(|word| word.starts_with("stage-lab-"))
        .expect("a namespace");
    let left = Command::new("ip").args(["netns", "list"]).output().unwrap();
    let prefix = name.trim_end_matches("fabric");
    assert!(prefix.ends_with('-'), "{message}");
    assert!(
        !String::from_utf8_lossy(&left.stdout).contains(prefix),
        "{message}"
    );
}

#[test]
fn the_program_runs_a_command_in_a_lab() {
    if !need_netns() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("lab.toml");
    std::fs::write(&file, TWO_RACKS).unwrap();
    let run = |words: &[&str]| {
        let mut command = assert_cmd::Command::cargo_bin("stage-lab").unwrap();
        command.arg("up").arg(&file).args(words).output().unwrap()
    };
    let output = run(&["--on", "b2", "--", "ip", "-br", "address"]);
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("10.77.2.2/32"),
        "{output:?}"
    );
    let output = run(&[
        "--",
        "sh",
        "-c",
        "ip netns exec ${STAGE_LAB_PREFIX}node.b1 ip -br address; exit 7",
    ]);
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("10.77.2.1/32"),
        "{output:?}"
    );
    assert_eq!(output.status.code(), Some(7));
    let output = run(&["--on", "nobody", "--", "true"]);
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("nobody is no node of the lab"),
        "{output:?}"
    );
}

#[test]
fn what_a_killed_lab_leaves_is_swept() {
    if !need_netns() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("lab.toml");
    std::fs::write(&file, TWO_RACKS).unwrap();
    let mut killed = Command::new(assert_cmd::cargo::cargo_bin("stage-lab"))
        .arg("up")
        .arg(&file)
        .args([
            "--on",
            "a1",
            "--",
            "sh",
            "-c",
            "echo $STAGE_LAB_PREFIX; exec sleep 1000",
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(killed.stdout.take().unwrap());
    let mut prefix = String::new();
    output.read_line(&mut prefix).unwrap();
    killed.kill().unwrap();
    killed.wait().unwrap();

    // Another test's lab may have swept already; whoever did, nothing of it stays, and its process ends.
    stage_lab::sweep();
    let left = Command::new("ip").args(["netns", "list"]).output().unwrap();
    assert!(prefix.starts_with("stage-lab-"), "{prefix:?}");
    assert!(!String::from_utf8_lossy(&left.stdout).contains(prefix.trim()));
    assert_eq!(output.read_line(&mut prefix).unwrap(), 0, "its output is closed");
}

const FAR: &str = r#"
[cluster]
name = "lab"

[[switch]]
name = "here"
[[switch]]
name = "there"
[[link]]
between = ["here", "there"]
capacity = "1 Gbit/s"
rtt = "RTT"

[[node]]
name = "near"
address = "10.77.0.1"
attach = "here"
nic = "10 Gbit/s"

[[node]]
name = "far"
address = "10.77.0.2"
attach = "there"
nic = "10 Gbit/s"
"#;

/// Other work on the machine can only make an answer later: the fastest counts.
#[test]
fn a_link_with_an_rtt_has_it() {
    if !need_long_links() {
        return;
    }
    for asked in [15.0, 100.0] {
        let text = FAR.replace("RTT", &format!("{asked} ms"));
        let lab = Lab::up(&Topology::parse("far.toml", &text).unwrap()).unwrap();
        let mut command = lab.command("near", "ping").unwrap();
        let address = lab.address("far").unwrap().to_string();
        let output = command
            .args(["-n", "-i", "0.05", "-c", "10", &address])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let summary = text
            .lines()
            .find_map(|line| line.strip_prefix("rtt min/avg/max/mdev = "));
        let fastest: f64 = summary
            .and_then(|figures| figures.split('/').next())
            .unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)))
            .parse()
            .unwrap();
        assert!((asked..asked * 1.05).contains(&fastest), "{asked} ms: {text}");
    }
}

#[test]
fn a_link_that_loses_carries_super_packets_whole_and_cut() {
    if !need_long_links() {
        return;
    }
    let text = FAR.replace("rtt = \"RTT\"", "rtt = \"2 ms\"\nloss = 0.01");
    let lab = Lab::up(&Topology::parse("far.toml", &text).unwrap()).unwrap();
    let sent = ByteCount(16 << 20);
    let carried = lab.iperf_bytes("near", "far", sent, 2).unwrap();
    assert!(carried.received.0 > sent.0 / 2, "{carried:?}");
    let [segments] = lab.segments()[..] else {
        panic!("{:?}", lab.segments())
    };
    assert!(
        segments.carried > carried.received.0 / 1448,
        "{segments:?} {carried:?}"
    );
    // A hundred and more are to be expected, in segments of which most came in super-packets.
    let share = segments.lost as f64 / (segments.lost + segments.carried) as f64;
    assert!((0.005..0.02).contains(&share), "{segments:?}");
}

#[test]
fn on_a_half_duplex_link_both_directions_share_the_rate() {
    if !is_demanded() || !need_long_links() {
        return;
    }
    let text = FAR.replace("RTT", "1 ms").replace("1 Gbit/s", "100 Mbit/s");
    let options = Options {
        half_duplex: true,
        ..Options::default()
    };
    let lab = Lab::with(&Topology::parse("far.toml", &text).unwrap(), &options).unwrap();
    let mbit = |from: &str, to: &str| lab.iperf(from, to).unwrap().bits_per_second() / 1e6;
    let alone = mbit("near", "far");
    let (there, back) = std::thread::scope(|scope| {
        let there = scope.spawn(|| mbit("near", "far"));
        let back = mbit("far", "near");
        (there.join().unwrap(), back)
    });
    // They need not share it fairly, nor begin at the same moment.
    assert!(
        there.min(back) < alone * 0.8,
        "{alone}; {there} and {back} Mbit/s"
    );
}

#[test]
fn an_interface_can_be_slower_than_its_topology_says() {
    if !is_demanded() || !need_iperf() {
        return;
    }
    let lab = Lab::up(&topology()).unwrap();
    let mbit = |from: &str, to: &str| lab.iperf(from, to).unwrap().bits_per_second() / 1e6;
    lab.reshape("a1", Way::Sends, "50 Mbit/s".parse().unwrap())
        .unwrap();
    assert!(mbit("a1", "a2") < 50.0);
    assert!(mbit("a2", "a1") > 60.0, "the other direction is as it was");
    lab.reshape("a2", Way::Receives, "20 Mbit/s".parse().unwrap())
        .unwrap();
    assert!(mbit("a1", "a2") < 20.0);
}

#[test]
fn connections_use_what_their_node_is_told() {
    if !need_netns() {
        return;
    }
    let lab = Lab::up(&topology()).unwrap();
    let routes = |node: &str| {
        let output = lab.command(node, "ip").unwrap().args(["route"]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let before = routes("dtn");
    lab.congestion_control("dtn", "reno").unwrap();
    let after = routes("dtn");
    assert_eq!(before.lines().count(), after.lines().count(), "{after}");
    assert!(after.lines().all(|line| line.contains("congctl reno")), "{after}");
    assert!(lab.congestion_control("dtn", "none-such").is_err());
    lab.windows("dtn", ByteCount(256 << 10)).unwrap();
    let cat = ["/proc/sys/net/ipv4/tcp_rmem", "/proc/sys/net/ipv4/tcp_wmem"];
    let output = lab.command("dtn", "cat").unwrap().args(cat).output().unwrap();
    let figures = String::from_utf8(output.stdout).unwrap();
    let most = figures.lines().filter(|line| line.ends_with("\t262144"));
    assert_eq!(most.count(), 2, "{figures}");
}

#[test]
fn who_has_a_quota_is_in_its_group_until_that_ends() {
    if !need_netns() {
        return;
    }
    let mut idle = Command::new("sleep").arg("1000").spawn().unwrap();
    let groups = || std::fs::read_to_string(format!("/proc/{}/cgroup", idle.id())).unwrap();
    let before = groups();
    let mut quota = Quota::new(0.1).unwrap();
    quota.keep_busy().unwrap();
    quota.take(idle.id()).unwrap();
    assert_ne!(groups(), before);
    drop(quota);
    let after = groups();
    idle.kill().unwrap();
    idle.wait().unwrap();
    assert!(!after.contains("stage-lab"), "{after}");
}

#[test]
fn a_group_counts_what_ran_in_it_and_ends_with_it() {
    if !need_netns() {
        return;
    }
    let lab = Lab::up(&topology()).unwrap();
    let group = Group::new().unwrap();
    let idle = group.cpu().unwrap();
    let script = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo $i; exec sleep 1000";
    let mut busy = group.command(&lab, "a1", "sh").unwrap();
    let busy = busy.args(["-c", script]).stdout(Stdio::piped());
    let mut busy = busy.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(busy.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    assert_eq!(line, "200000\n");
    let taken = group.cpu().unwrap() - idle;
    assert!(taken.as_millis() >= 10, "{taken:?}");
    group.end_all();
    assert!(!busy.wait().unwrap().success(), "it was ended");
    let ended = group.cpu().unwrap();
    assert!(ended >= idle + taken, "what has ended still counts");
}

#[test]
fn nodes_know_each_other_by_name() {
    if !need_netns() {
        return;
    }
    let lab = Lab::up(&topology()).unwrap();
    let output = lab
        .command("a1", "getent")
        .unwrap()
        .args(["hosts", "b2"])
        .output()
        .unwrap();
    assert!(
        String::from_utf8_lossy(&output.stdout).starts_with("10.77.2.2 "),
        "{output:?}"
    );
    lab.set("a1", "net.ipv4.tcp_rmem", "4096 65536 262144").unwrap();
    let output = lab
        .command("a1", "cat")
        .unwrap()
        .arg("/proc/sys/net/ipv4/tcp_rmem")
        .output();
    assert_eq!(
        String::from_utf8_lossy(&output.unwrap().stdout)
            .split_whitespace()
            .last(),
        Some("262144")
    );
    let output = lab
        .command("a2", "cat")
        .unwrap()
        .arg("/proc/sys/net/ipv4/tcp_rmem")
        .output();
    assert_ne!(
        String::from_utf8_lossy(&output.unwrap().stdout)
            .split_whitespace()
            .last(),
        Some("262144")
    );
}
