//! What agents hold in memory, by its formula.

use std::fs;

use crate::cluster::{Cluster, Ran};

const MIB: u64 = 1 << 20;

/// The byte budget; for each stream a block at either side of a relay, and what TLS holds of it; and what an agent is by itself.
const fn most(streams: u64) -> u64 {
    const BUDGET: u64 = 24 * MIB;
    const BLOCKS: u64 = 2 * (32 << 10);
    const TLS: u64 = 2 * (64 << 10);
    const AGENT: u64 = 12 * MIB;
    BUDGET + streams * (BLOCKS + TLS) + AGENT
}

/// Anonymous memory of a process, bytes; 0 when it has ended.
fn rss_anon(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

#[test]
fn memory_is_one_budget_and_a_little_for_each_stream() {
    assert!(most(64) <= 48 * MIB);
    let cluster = Cluster::start(3);
    let source = cluster.source("genome.db", 300 * MIB + 7);
    let before: Vec<u64> = (0..3).map(|node| rss_anon(cluster.agent_pid(node))).collect();
    let mut push = cluster.push_command(
        &source,
        &["--to", "targets", "--shape", "chain", "--streams", "64"],
    );
    let mut push = push.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut peaks = [0; 3];
    while push.try_wait().unwrap().is_none() {
        for (node, peak) in peaks.iter_mut().enumerate() {
            *peak = rss_anon(cluster.agent_pid(node)).max(*peak);
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let ran = Ran::of(push.wait_with_output().unwrap()).expect(0);
    assert_eq!(ran.node("n1")["streams"], 64);
    cluster.assert_published(1..3, &source);
    for (before, peak) in before.into_iter().zip(peaks) {
        assert!(before > 0 && before <= 12 * MIB, "idle {before}");
        assert!(peak > 0 && peak <= most(64), "at work {peak}");
    }
}
