//! The rule for tests that need root: skip with one visible line, unless `STAGE_TEST_NETNS=1` says that they must run.

use std::fs::File;
use std::io::Write as _;

use crate::{names, tools};

/// Whether namespaces and shaped links can be made here. Without, one line says why (past the test harness, which
/// would swallow it).
///
/// # Panics
/// If `STAGE_TEST_NETNS=1` is set and they cannot: then what is missing is a failure.
pub fn need_netns() -> bool {
    rule("network namespaces", missing_netns())
}

/// As [`need_netns`], and iperf3 is there.
///
/// # Panics
/// As [`need_netns`].
pub fn need_iperf() -> bool {
    let missing = missing_netns()
        .or_else(|| (!tools::is_installed("iperf3")).then(|| "iperf3 is not installed".to_owned()));
    rule("iperf3 in network namespaces", missing)
}

/// As [`need_netns`], and links with an RTT can be made and measured: `/dev/net/tun`, ping and iperf3 are there.
///
/// # Panics
/// As [`need_netns`].
pub fn need_long_links() -> bool {
    let missing = missing_netns()
        .or_else(|| missing_device("/dev/net/tun"))
        .or_else(|| {
            let tool = ["ping", "iperf3"]
                .into_iter()
                .find(|tool| !tools::is_installed(tool));
            tool.map(|tool| format!("{tool} is not installed"))
        });
    rule("links with an RTT", missing)
}

/// Whether a slow disk can be mounted here; else as [`need_netns`].
///
/// # Panics
/// As [`need_netns`].
pub fn need_fuse() -> bool {
    let missing = if rustix::process::geteuid().is_root() {
        missing_device("/dev/fuse")
    } else {
        Some("this is not root".to_owned())
    };
    rule("FUSE", missing)
}

fn missing_device(device: &str) -> Option<String> {
    let opened = File::options().read(true).write(true).open(device);
    opened.err().map(|why| format!("{device}: {why}"))
}

/// Whether `STAGE_TEST_NETNS=1` is set.
pub fn is_demanded() -> bool {
    std::env::var_os("STAGE_TEST_NETNS").is_some_and(|value| value == "1")
}

fn rule(what: &str, missing: Option<String>) -> bool {
    let Some(missing) = missing else { return true };
    assert!(!is_demanded(), "STAGE_TEST_NETNS=1 demands {what}, but {missing}");
    let test = std::thread::current().name().unwrap_or("a test").to_owned();
    // Not eprintln: the harness shows what a test prints with it only if the test fails.
    drop(writeln!(
        std::io::stderr(),
        "skipped {test}: it needs {what}, and {missing}"
    ));
    false
}

fn missing_netns() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("this is not root".to_owned());
    }
    if let Some(tool) = ["ip", "tc"].into_iter().find(|tool| !tools::is_installed(tool)) {
        return Some(format!("{tool} is not installed (package iproute2)"));
    }
    // Root in a container may lack what it takes, a kernel may lack tbf: try.
    let name = format!("{}probe", names::prefix());
    let tried = tools::ip(&["netns", "add", &name], "").and_then(|_| {
        let made = tools::ip(
            &[
                "-n", &name, "link", "add", "name", "v0", "type", "veth", "peer", "name", "v1",
            ],
            "",
        )
        .and_then(|_| tools::ip(&["-n", &name, "link", "add", "name", "br0", "type", "bridge"], ""))
        .and_then(|_| {
            let tbf = ["-n", &name, "qdisc", "add", "dev", "v0", "root", "tbf"];
            let values = ["rate", "1gbit", "burst", "131072", "limit", "524288"];
            tools::tc(&[&tbf[..], &values[..]].concat(), "")
        });
        let removed = names::remove_namespace(&name);
        made.and(removed)
    });
    tried.err().map(|why| why.to_string())
}
