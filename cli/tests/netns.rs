//! The real binary in network namespaces with shaped links (root and iproute2; else each test skips with one line).

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use stage_core::topology::{EdgeId, Topology};
use stage_core::units::{ByteCount, Rate};
use stage_lab::cluster::{Cluster, Event, Pushed, Running, Security, Setup};
use stage_lab::{Lab, Speed, need_fuse, need_netns, sha256sum};

/// Nothing here takes as long on a machine that is alive.
const DEADLINE: Duration = Duration::from_secs(120);

/// One cluster at a time: they share the machine's processors, and links are to be the bottleneck.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A source `n0` and targets from `n1` on, at one switch.
fn one_switch(targets: u32, rate: &str) -> String {
    let last = targets + 1;
    format!(
        r#"
[cluster]
name = "lab"
[[switch]]
name = "core"
[[node]]
name = "n[0-{targets}]"
address = "10.78.0.[1-{last}]"
attach = "core"
nic = "{rate}"
"#
    )
}

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
[[node]]
name = "head"
address = "10.78.0.1"
attach = "core"
nic = "500 Mbit/s"
[[node]]
name = "a[1-2]"
address = "10.78.1.[1-2]"
attach = "rack1"
nic = "500 Mbit/s"
[[node]]
name = "b[1-2]"
address = "10.78.2.[1-2]"
attach = "rack2"
nic = "500 Mbit/s"
"#;

fn lab(topology: &str) -> Lab {
    Lab::up(&Topology::parse("lab.toml", topology).unwrap()).unwrap()
}

fn cluster<'l>(
    lab: &'l Lab,
    topology: &str,
    security: Security,
    small_roots: &[(&str, ByteCount)],
) -> Cluster<'l> {
    let setup = Setup {
        small_roots,
        ..Setup::new(Path::new(env!("CARGO_BIN_EXE_stage")), topology, security)
    };
    Cluster::up(lab, &setup).unwrap()
}

/// A file on the source in which no two chunks are equal, and its digest.
fn payload(lab: &Lab, source: &str, mib: u32) -> (String, String) {
    let path = lab.dir(source).join("payload");
    let bytes: Vec<u8> = (0..mib << 18)
        .flat_map(|word| word.wrapping_mul(0x9e37_79b1).to_le_bytes())
        .collect();
    std::fs::write(&path, bytes).unwrap();
    let digest = sha256sum(std::slice::from_ref(&path)).unwrap().remove(0);
    (path.to_str().unwrap().to_owned(), digest)
}

/// Every target has a right copy, as `sha256sum` sees it.
fn assert_all_right(pushed: &Pushed, targets: usize, digest: &str) {
    assert_eq!(pushed.exit, Some(0), "{pushed:#?}");
    let paths: Vec<PathBuf> = pushed
        .nodes()
        .iter()
        .map(|node| node["path"].as_str().unwrap().into())
        .collect();
    assert_eq!(sha256sum(&paths).unwrap(), vec![digest; targets]);
    assert_eq!(pushed.end()["sha256"], digest);
}

/// Waits until a node has received so many bytes.
fn wait_for_bytes(cluster: &Cluster<'_>, node: &str, bytes: u64, running: &Running) {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let received = cluster.link_bytes(node).unwrap().received.0;
        if received >= bytes {
            return;
        }
        assert!(
            Instant::now() < deadline && !running.has_ended(),
            "{node} has {received} of {bytes} bytes; {}{}",
            running.state(),
            cluster.last_words()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The chain that the push has planned, without the source.
fn chain(running: &Running) -> Vec<String> {
    let planned = running
        .wait_for("a plan", DEADLINE, |event| event.kind() == "planned")
        .unwrap();
    let plan = &planned.value["plan"];
    let hops = plan["hops"].as_array().unwrap();
    let mut chain = vec![plan["source"].as_str().unwrap().to_owned()];
    while let Some(hop) = hops.iter().find(|hop| hop["parent"] == *chain.last().unwrap()) {
        chain.push(hop["child"].as_str().unwrap().to_owned());
        assert!(chain.len() <= hops.len() + 1, "a circle: {plan}");
    }
    chain.split_off(1)
}

#[test]
fn a_chain_delivers_and_the_source_sends_once() {
    if !need_netns() {
        return;
    }
    let _alone = alone();
    let topology = one_switch(4, "200 Mbit/s");
    let lab = lab(&topology);
    let cluster = cluster(&lab, &topology, Security::Tls, &[]);
    let (file, digest) = payload(&lab, "n0", 64);
    let before = cluster.link_bytes("n0").unwrap().sent.0;
    let pushed = cluster
        .push(&[&file, "--to", "n[1-4]", "--shape", "chain"], DEADLINE)
        .unwrap();
    let sent = cluster.link_bytes("n0").unwrap().sent.0 - before;
    assert_all_right(&pushed, 4, &digest);
    let size = f64::from(64 << 20);
    let told = pushed.figure("source_bytes_sent").unwrap();
    assert!(told <= size * 1.02, "{}", pushed.end());
    assert!(sent as f64 <= size * 1.02, "{sent}");
    for node in pushed.nodes() {
        assert_eq!(node["bytes_received"], 64 << 20, "{node}");
    }
}

#[test]
fn an_uplink_is_crossed_once() {
    if !need_netns() {
        return;
    }
    let _alone = alone();
    let lab = lab(TWO_RACKS);
    let cluster = cluster(&lab, TWO_RACKS, Security::Insecure, &[]);
    let (file, digest) = payload(&lab, "head", 48);
    // Each uplink into its rack and out of it.
    let edges: Vec<EdgeId> = ["a1", "b1"]
        .iter()
        .flat_map(|to| {
            let route = lab
                .topology()
                .route(&"head".parse().unwrap(), &to.parse().unwrap());
            let uplink = route.unwrap().edges[1];
            [uplink, uplink.reverse()]
        })
        .collect();
    let count = |edge: &EdgeId| lab.counters(*edge).unwrap().bytes.0 as f64;
    let before: Vec<f64> = edges.iter().map(count).collect();
    let pushed = cluster.push(&[&file, "--to", "a[1-2],b[1-2]"], DEADLINE).unwrap();
    assert_all_right(&pushed, 4, &digest);
    for (at, edge) in edges.iter().enumerate() {
        let crossed = (count(edge) - before[at]) / f64::from(48 << 20);
        let name = lab.topology().edge_name(*edge);
        assert!(crossed <= 1.02, "{name}: {crossed}");
        assert!(at % 2 == 1 || crossed >= 1.0, "{name}: {crossed}");
    }
}

/// What the kernel says of the connections of a node that have more under way than a message.
fn controls_of_streams(lab: &Lab, node: &str) -> Vec<String> {
    let out = lab.command(node, "ss").unwrap().arg("-tinOH").output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    text.lines()
        .filter(|line| {
            let sent = line
                .split_whitespace()
                .find_map(|word| word.strip_prefix("bytes_sent:"));
            sent.is_some_and(|bytes| bytes.parse::<u64>().unwrap() > 1 << 20)
        })
        .map(|line| {
            let known = ["reno", "cubic", "bbr"];
            let mut words = line.split_whitespace();
            words.find(|word| known.contains(word)).unwrap_or(line).to_owned()
        })
        .collect()
}

#[test]
fn connections_over_a_link_have_the_congestion_control_that_it_asks_for() {
    if !need_netns() {
        return;
    }
    let _alone = alone();
    let topology = TWO_RACKS.replace(
        "capacity = \"200 Mbit/s\"",
        "capacity = \"200 Mbit/s\"\ncongestion_control = \"reno\"",
    );
    let lab = lab(&topology);
    for node in ["head", "a1"] {
        lab.congestion_control(node, "cubic").unwrap();
    }
    let cluster = cluster(&lab, &topology, Security::Tls, &[]);
    let (file, digest) = payload(&lab, "head", 96);
    let running = cluster
        .start_command(&[
            "push",
            &file,
            "--to",
            "a1,a2",
            "--shape",
            "chain",
            "--streams",
            "2",
        ])
        .unwrap();
    let planned = running
        .wait_for("a plan", DEADLINE, |event| event.kind() == "planned")
        .unwrap();
    assert_eq!(planned.value["plan"]["hops"][0]["congestion_control"], "reno");
    wait_for_bytes(&cluster, "a2", 32 << 20, &running);
    assert_eq!(controls_of_streams(&lab, "head"), ["reno", "reno"]);
    // Within a rack cubic has nobody to ask, or is asked for.
    assert_eq!(controls_of_streams(&lab, "a1"), ["cubic", "cubic"]);
    assert_all_right(&running.finish(DEADLINE).unwrap(), 2, &digest);
}

#[test]
fn below_a_killed_relay_bytes_go_on() {
    if !need_netns() {
        return;
    }
    let _alone = alone();
    let topology = one_switch(4, "100 Mbit/s");
    let lab = lab(&topology);
    let mut cluster = cluster(&lab, &topology, Security::Tls, &[]);
    let (file, digest) = payload(&lab, "n0", 96);
    let running = cluster
        .start_command(&["push", &file, "--to", "n[1-4]", "--shape", "chain"])
        .unwrap();
    let chain = chain(&running);
    let (relay, last) = (&chain[1], &chain[3]);
    wait_for_bytes(&cluster, last, 24 << 20, &running);
    cluster.kill_agent(relay);
    // More than its neighbours can have had in their buffers, while the relay is dead.
    wait_for_bytes(&cluster, last, 72 << 20, &running);
    cluster.start_agent(relay).unwrap();
    let pushed = running.finish(DEADLINE).unwrap();
    assert_all_right(&pushed, 4, &digest);
}

// R101, F50: one sick disk does not set the pace of all below it.
#[test]
fn below_a_slow_disk_bytes_go_on() {
    if !need_netns() || !need_fuse() {
        return;
    }
    let _alone = alone();
    let topology = one_switch(4, "200 Mbit/s");
    let lab = lab(&topology);
    let sick = Speed {
        write: Rate::from_bytes_per_second(1e6),
        read: Rate::UNLIMITED,
        cache: ByteCount(1 << 20),
        burst: ByteCount(0),
    };
    let setup = Setup {
        slow_roots: &[("n2", sick)],
        ..Setup::new(Path::new(env!("CARGO_BIN_EXE_stage")), &topology, Security::Tls)
    };
    let cluster = Cluster::up(&lab, &setup).unwrap();
    let (file, digest) = payload(&lab, "n0", 192);
    let running = cluster
        .start_command(&["push", &file, "--to", "n[1-4]", "--shape", "chain"])
        .unwrap();
    let chain = chain(&running);
    let sick = chain.iter().position(|node| node == "n2").unwrap();
    let (parent, child) = (&chain[sick - 1], &chain[sick + 1]);
    // At the pace of its disk those below it would take minutes.
    let published = |node: &str| {
        let there = |event: &Event| event.value["node"] == node && event.value["state"] == "published";
        running.wait_for("a copy", DEADLINE, there).unwrap();
    };
    chain[sick + 1..].iter().for_each(|node| published(node));
    let job = running.job(DEADLINE).unwrap();
    let status = cluster.status(&job).unwrap();
    let node = |name: &str| {
        status["nodes"]
            .as_array()
            .unwrap()
            .iter()
            .find(|node| node["node"] == name)
    };
    assert_eq!(node("n2").unwrap()["state"], "receiving", "{status}");
    assert_eq!(node(child).unwrap()["parent"], parent.as_str(), "{status}");
    let remark =
        format!("n2 is slow, and who waited for it now asks {parent}: {child} (n2: its disk writes ");
    let is_told = |event: &Event| {
        event.value["text"]
            .as_str()
            .is_some_and(|text| text.starts_with(&remark))
    };
    running.wait_for(&remark, DEADLINE, is_told).unwrap();
    let copy = PathBuf::from(node(child).unwrap()["path"].as_str().unwrap());
    assert_eq!(sha256sum(&[copy]).unwrap(), [digest]);
    cluster.run(&["cancel", &job], DEADLINE).unwrap();
    assert_eq!(running.finish(DEADLINE).unwrap().exit, Some(7));
}

#[test]
fn a_silent_parent_is_left() {
    if !need_netns() {
        return;
    }
    let _alone = alone();
    let topology = one_switch(3, "100 Mbit/s");
    let lab = lab(&topology);
    let cluster = cluster(&lab, &topology, Security::Tls, &[]);
    let (file, digest) = payload(&lab, "n0", 96);
    let running = cluster
        .start_command(&["push", &file, "--to", "n[1-3]", "--shape", "chain"])
        .unwrap();
    let chain = chain(&running);
    let (parent, child) = (&chain[1], &chain[2]);
    wait_for_bytes(&cluster, child, 16 << 20, &running);
    lab.black_hole(parent, child).unwrap();
    // Only an ancestor can bring the rest. The parent is well, and ends as all others do.
    let pushed = running.finish(DEADLINE).unwrap();
    assert_all_right(&pushed, 3, &digest);
    assert_ne!(pushed.node(child)["parent"], parent.as_str(), "{}", pushed.end());
}

#[test]
fn a_full_node_is_unfit_and_says_by_how_much() {
    if !need_netns() {
        return;
    }
    let _alone = alone();
    let topology = one_switch(2, "500 Mbit/s");
    let lab = lab(&topology);
    let small = ByteCount(8 << 20);
    let cluster = cluster(&lab, &topology, Security::Tls, &[("n2", small)]);
    let (file, digest) = payload(&lab, "n0", 32);
    let pushed = cluster.push(&[&file, "--to", "n[1-2]"], DEADLINE).unwrap();
    assert_eq!(pushed.exit, Some(5), "{pushed:#?}");
    assert_eq!(pushed.end()["state"], "open");
    let path = PathBuf::from(pushed.node("n1")["path"].as_str().unwrap());
    assert_eq!(sha256sum(&[path]).unwrap(), [digest]);

    let node = pushed.node("n2");
    assert_eq!(node["state"], "unfit", "{node}");
    assert_eq!(node["error"]["code"], "no_space", "{node}");
    let short = node["error"]["short_by_bytes"].as_u64().unwrap();
    assert!((24 << 20..=32 << 20).contains(&short), "{node}");
    assert!(!node["error"]["hint"].as_str().unwrap().is_empty(), "{node}");
    let root = cluster.seen("n2", &cluster.root("n2"));
    let left: Vec<_> = std::fs::read_dir(root).unwrap().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
}

// R32: a link that swallows everything holds up neither a cancel nor those who must let go.
#[test]
fn a_cancel_does_not_wait_for_a_dead_link() {
    if !need_netns() {
        return;
    }
    let _alone = alone();
    let topology = one_switch(3, "100 Mbit/s");
    let lab = lab(&topology);
    let cluster = cluster(&lab, &topology, Security::Tls, &[]);
    let (file, _) = payload(&lab, "n0", 96);
    let running = cluster
        .start_command(&["push", &file, "--to", "n[1-3]", "--shape", "chain"])
        .unwrap();
    let job = running.job(DEADLINE).unwrap();
    let chain = chain(&running);
    let (parent, child) = (&chain[0], &chain[1]);
    wait_for_bytes(&cluster, child, 48 << 20, &running);
    lab.black_hole(parent, child).unwrap();
    let cancelled = cluster.run(&["cancel", &job], Duration::from_secs(5)).unwrap();
    assert_eq!(cancelled.exit, Some(0), "{cancelled:#?}");
    let pushed = running.finish(Duration::from_secs(5)).unwrap();
    assert_eq!(pushed.exit, Some(7), "{pushed:#?}");
    let deadline = Instant::now() + DEADLINE;
    for node in &chain {
        let root = cluster.seen(node, &cluster.root(node));
        while std::fs::read_dir(&root).unwrap().next().is_some() {
            assert!(Instant::now() < deadline, "{node} has kept its part");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
