//! What on a host holds it back or will break, each with the command that mends it. Pure: a [`HostReport`] goes in with
//! what the coordinator knows of the node, findings come out.

use std::net::IpAddr;
use std::time::Duration;

use crate::bench::HostReport;
use crate::cost;
use crate::id::NodeName;
use crate::plan::{Facts, WindowLimits};
use crate::topology::{Route, Topology};
use crate::units::{ByteCount, Rate, show_time};

/// A clock that is off by more than this confuses who reads logs, and certificates that are young.
const CLOCK: Duration = Duration::from_secs(2);
/// Each stream and each file is a descriptor; an agent that serves many children needs thousands.
const DESCRIPTORS: u64 = 8192;
/// Packets that may wait for the kernel; the default of 1000 is short of a burst at 10 Gbit/s.
const BACKLOG: u64 = 10_000;
/// An interface of this rate has such bursts.
const FAST: f64 = 1.0e9;
/// A root with less free is nearly full: of the file system's size, and at least this many bytes.
const NEARLY_FULL: (f64, u64) = (0.05, 10 << 30);
/// From this RTT on, windows matter and jumbo frames are not expected to pass.
const FAR: Duration = Duration::from_millis(1);
/// Where loss is at least this, BBR carries more than what takes loss for congestion.
const LOSSY: f64 = 1e-4;

/// What the coordinator knows of a node beside its report.
#[derive(Debug)]
pub struct Context<'c> {
    /// The fabric.
    pub topology: &'c Topology,
    /// RTTs and rates that were measured.
    pub facts: &'c Facts,
    /// The coordinator's release.
    pub version: &'c str,
    /// How far the node's clock is ahead of the coordinator's, in milliseconds, and how far that may be wrong.
    pub clock_ms: (i64, u64),
    /// The loss that was measured on ways to and from this node, 0 to 1: the largest.
    pub loss: f64,
    /// MTUs of other nodes at the same switches, with their names.
    pub neighbours: &'c [(NodeName, u32)],
    /// What `stage bench` saw of ways to or from this node.
    pub ways: &'c [Way],
}

/// The largest packet on the way to another node.
#[derive(Debug, Clone, PartialEq)]
pub struct Way {
    /// The other node.
    pub other: NodeName,
    /// What its interface has; 0: not known.
    pub other_mtu: u32,
    /// The largest packet that gets through; 0: not known.
    pub mtu: u32,
    /// Larger ones vanish, and no router says so.
    pub swallows: bool,
    /// Round trip.
    pub rtt: Duration,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Which check, in a word for scripts.
    pub check: &'static str,
    /// What is so, and why that is bad: a sentence for people.
    pub message: String,
    /// What mends it: a command, or what a person must do.
    pub mend: String,
}

fn finding(check: &'static str, message: String, mend: impl Into<String>) -> Finding {
    Finding {
        check,
        message,
        mend: mend.into(),
    }
}

/// All checks, in the order in which they are worth mending.
pub fn examine(node: &NodeName, host: &HostReport, context: &Context<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    found.extend(host.roots.iter().filter_map(root));
    found.extend(resolves(node, host));
    found.extend(version(host, context.version));
    found.extend(clock(host, context.clock_ms));
    found.extend(scaling(host));
    found.extend(windows(node, host, context));
    found.extend(nic(node, host, context.topology));
    found.extend(mtu(host, context.neighbours));
    found.extend(path_mtu(host, context.ways));
    found.extend(loss(node, host, context));
    found.extend(backlog(node, host, context.topology));
    found.extend(descriptors(host));
    found.extend(governor(host));
    found
}

fn root(root: &crate::bench::RootSpace) -> Option<Finding> {
    if let Some(failure) = &root.failure {
        return Some(finding("root", failure.message.clone(), failure.hint.clone()));
    }
    let short = (root.total.0 as f64 * NEARLY_FULL.0) as u64;
    let short = short.min(NEARLY_FULL.1);
    (root.free.0 < short).then(|| {
        finding(
            "space",
            format!(
                "the root {} ({}) is nearly full: {} free of {}",
                root.name, root.path, root.free, root.total
            ),
            format!(
                "stage ls; stage rm NAME --from NODE; or: du -xh --max-depth=2 {}",
                root.path
            ),
        )
    })
}

fn resolves(node: &NodeName, host: &HostReport) -> Option<Finding> {
    let loopback = host
        .resolves_to
        .iter()
        .find(|text| text.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback()))?;
    Some(finding(
        "name",
        format!(
            "{node} resolves to {loopback} on itself: what asks for its address by name announces one that nobody else reaches"
        ),
        format!("sed -i '/^127\\..*\\b{node}\\b/d' /etc/hosts; getent hosts {node}"),
    ))
}

fn version(host: &HostReport, ours: &str) -> Option<Finding> {
    (host.version != ours).then(|| {
        finding(
            "version",
            format!("it runs stage {}, the coordinator {ours}", host.version),
            "install the coordinator's release there; systemctl restart stage-agent",
        )
    })
}

fn clock(host: &HostReport, (ahead, slack): (i64, u64)) -> Option<Finding> {
    // An agent that says no time has none to be wrong.
    let off = ahead.unsigned_abs().saturating_sub(slack);
    (host.unix_ms > 0 && u128::from(off) > CLOCK.as_millis()).then(|| {
        let by = show_time(Duration::from_millis(ahead.unsigned_abs()));
        let side = if ahead > 0 { "ahead of" } else { "behind" };
        finding(
            "clock",
            format!(
                "its clock is {by} {side} the coordinator's: logs mislead, and young certificates are refused"
            ),
            "chronyc makestep || systemctl restart systemd-timesyncd",
        )
    })
}

fn scaling(host: &HostReport) -> Option<Finding> {
    (!host.window_scaling).then(|| {
        finding(
            "window_scaling",
            "TCP window scaling is off: no connection has more than 64 KiB under way".to_owned(),
            sysctl("net.ipv4.tcp_window_scaling=1"),
        )
    })
}

fn sysctl(setting: &str) -> String {
    format!("sysctl -w {setting}  # and in /etc/sysctl.d/90-stage.conf to keep it")
}

/// The ways to other nodes. One node at each switch will do: the way there is the same for all.
fn ways<'t>(node: &'t NodeName, topology: &'t Topology) -> impl Iterator<Item = (&'t NodeName, Route)> {
    let mut seen = std::collections::BTreeSet::new();
    topology.nodes().iter().filter_map(move |other| {
        let interface = other.interfaces.first()?;
        if other.name == *node || !seen.insert(&interface.attach) {
            return None;
        }
        Some((&other.name, topology.route(node, &other.name)?))
    })
}

/// The longest fat path to another node: what its windows must hold.
fn fattest(node: &NodeName, context: &Context<'_>) -> Option<(NodeName, Rate, Duration)> {
    let mut fattest: Option<(NodeName, Rate, Duration)> = None;
    for (other, route) in ways(node, context.topology) {
        let rtt = context.facts.rtt(node, other, &route);
        let rate = route
            .edges
            .iter()
            .map(|edge| context.topology.member_capacity(*edge))
            .reduce(Rate::min)?;
        let held = |rate: Rate, rtt: Duration| rate.bytes_per_second() * rtt.as_secs_f64();
        if fattest
            .as_ref()
            .is_none_or(|(_, before, long)| held(rate, rtt) > held(*before, *long))
        {
            fattest = Some((other.clone(), rate, rtt));
        }
    }
    fattest
}

fn windows(node: &NodeName, host: &HostReport, context: &Context<'_>) -> Option<Finding> {
    let (other, rate, rtt) = fattest(node, context)?;
    if rtt < FAR {
        return None;
    }
    let product = ByteCount((rate.bytes_per_second() * rtt.as_secs_f64()) as u64);
    let wanted = WindowLimits {
        receive: ByteCount((product.0 as f64 / cost::RECEIVE_WINDOW_SHARE) as u64),
        send: ByteCount((product.0 as f64 / cost::SEND_WINDOW_SHARE) as u64),
    };
    // Many streams fill the path as well: a window that needs more than half of the most of them is too small.
    let streams = u64::from(cost::MAX_STREAMS) / 2;
    let receives = host.windows.receive.0.saturating_mul(streams) < wanted.receive.0;
    let sends = host.windows.send.0.saturating_mul(streams) < wanted.send.0;
    let usual = WindowLimits::default();
    let low = host.windows.receive < usual.receive || host.windows.send < usual.send;
    let one = host.windows.receive < wanted.receive || host.windows.send < wanted.send;
    (receives || sends || low && one).then(|| {
        let next = |bytes: u64| bytes.max(1).next_power_of_two().clamp(16 << 20, 1 << 30);
        let (receive, send) = (next(wanted.receive.0 / 4), next(wanted.send.0 / 4));
        finding(
            "windows",
            format!(
                "a connection may hold {} to receive and {} to send; {other} is {} away at {}, which holds {product}",
                host.windows.receive,
                host.windows.send,
                show_time(rtt),
                rate.in_bits(),
            ),
            sysctl(&format!(
                "net.ipv4.tcp_rmem=\"4096 131072 {receive}\" net.ipv4.tcp_wmem=\"4096 16384 {send}\""
            )),
        )
    })
}

fn nic(node: &NodeName, host: &HostReport, topology: &Topology) -> Option<Finding> {
    let says = host.nic?;
    let wanted = topology.node(node)?.interfaces.first()?.nic;
    // Links are rated in round figures.
    (says < wanted.times(0.95)).then(|| {
        finding(
            "nic",
            format!(
                "the interface {} runs at {}, the topology says {}: a cable, a port or a negotiation is at fault",
                host.interface,
                says.in_bits(),
                wanted.in_bits()
            ),
            format!("ethtool {0}; ethtool -r {0}  # or correct `nic` in the topology", host.interface),
        )
    })
}

fn mtu(host: &HostReport, neighbours: &[(NodeName, u32)]) -> Option<Finding> {
    if host.mtu == 0 {
        return None;
    }
    let mut counts: std::collections::BTreeMap<u32, usize> = std::collections::BTreeMap::new();
    for (_, mtu) in neighbours.iter().filter(|(_, mtu)| *mtu > 0) {
        *counts.entry(*mtu).or_default() += 1;
    }
    let others: usize = counts.values().sum();
    let (usual, count) = counts.into_iter().max_by_key(|(_, count)| *count)?;
    // A minority is told that it is one; two nodes that differ have no majority, and the larger is told.
    let differs = host.mtu != usual && (2 * count > others) && (others > 1 || host.mtu > usual);
    differs.then(|| {
        finding(
            "mtu",
            format!(
                "the interface {} has an MTU of {}, its neighbours have {usual}: large packets are lost or cut",
                host.interface, host.mtu
            ),
            format!("ip link set dev {} mtu {usual}", host.interface),
        )
    })
}

/// A way on which packets must be smaller than both interfaces would have them.
fn path_mtu(host: &HostReport, ways: &[Way]) -> Option<Finding> {
    let is_narrow = |way: &&Way| {
        let both = host.mtu.min(way.other_mtu);
        // IP has no packets above 65,535 bytes, although loopback's MTU is 65,536.
        way.mtu > 0 && way.mtu < both.min(u16::MAX.into())
    };
    let narrow: Vec<&Way> = ways.iter().filter(is_narrow).collect();
    // The worst first: packets that vanish, then the smallest.
    let swallowed = narrow.iter().filter(|way| way.swallows && !host.mtu_probing);
    if let Some(way) = swallowed.min_by_key(|way| way.mtu) {
        return Some(finding(
            "path_mtu",
            format!(
                "packets of more than {} bytes to or from {} vanish and nobody says so; the interface {} sends {}: \
                 connections stand still",
                way.mtu, way.other, host.interface, host.mtu
            ),
            format!(
                "{}; or: ip link set dev {} mtu {}; or mend the MTU on the way, or let ICMP through",
                sysctl("net.ipv4.tcp_mtu_probing=1"),
                host.interface,
                way.mtu
            ),
        ));
    }
    // Over long ways jumbo frames are not expected to pass, and each connection finds that out from the routers.
    let told = narrow.iter().filter(|way| !way.swallows && way.rtt < FAR);
    told.min_by_key(|way| way.mtu).map(|way| {
        finding(
            "path_mtu",
            format!(
                "the way to {} takes packets of {} bytes, the interfaces at both ends have {}: something between them \
                 is set up for less",
                way.other,
                way.mtu,
                host.mtu.min(way.other_mtu)
            ),
            format!(
                "raise the MTU of the switches and routers between them; or: ip link set dev {} mtu {}",
                host.interface, way.mtu
            ),
        )
    })
}

fn governor(host: &HostReport) -> Option<Finding> {
    (host.governor == "powersave").then(|| {
        finding(
            "governor",
            "its processors stay at their lowest frequency (governor powersave): hashes and ciphers are slow"
                .to_owned(),
            "cpupower frequency-set -g performance",
        )
    })
}

fn loss(node: &NodeName, host: &HostReport, context: &Context<'_>) -> Option<Finding> {
    let told = ways(node, context.topology)
        .map(|(_, route)| route.loss)
        .fold(0.0, f64::max);
    let loss = told.max(context.loss);
    let has = |name: &str| host.congestion_controls.iter().any(|control| control == name);
    // What a link of the topology asks for, else what helps against loss.
    let asked = ways(node, context.topology)
        .filter_map(|(_, route)| route.congestion_control)
        .find(|control| !has(control.as_str()));
    let offered = host.congestion_controls.join(", ");
    if let Some(asked) = asked {
        return Some(finding(
            "congestion_control",
            format!(
                "the topology asks for {asked} on a way from here, and the kernel lets the agent have only {offered}"
            ),
            allow(asked.as_str(), host),
        ));
    }
    (loss >= LOSSY && !has("bbr")).then(|| {
        finding(
            "congestion_control",
            format!(
                "ways from here lose {:.2} % of their packets, and the kernel lets the agent have only {offered}: bbr does not slow down at each of them",
                loss * 100.0,
            ),
            allow("bbr", host),
        )
    })
}

/// What lets an agent that is not root ask for a congestion control: it is there, and everybody may have it.
fn allow(control: &str, host: &HostReport) -> String {
    let others = host.congestion_controls.join(" ");
    format!(
        "modprobe tcp_{control} && sysctl -w net.ipv4.tcp_allowed_congestion_control=\"{others} {control}\"  # and \
         restart the agent; /etc/modules-load.d/stage.conf and /etc/sysctl.d/90-stage.conf keep it"
    )
}

fn backlog(node: &NodeName, host: &HostReport, topology: &Topology) -> Option<Finding> {
    let nic = topology.node(node)?.interfaces.first()?.nic;
    (nic.bytes_per_second() >= FAST && (1..BACKLOG).contains(&host.backlog)).then(|| {
        finding(
            "backlog",
            format!(
                "{} packets may wait for the kernel; at {} a burst is longer, and the rest is dropped",
                host.backlog,
                nic.in_bits()
            ),
            sysctl(&format!("net.core.netdev_max_backlog={BACKLOG}")),
        )
    })
}

fn descriptors(host: &HostReport) -> Option<Finding> {
    (1..DESCRIPTORS).contains(&host.descriptors).then(|| {
        finding(
            "descriptors",
            format!("the agent may have {} files and connections open", host.descriptors),
            "systemctl edit stage-agent  # [Service] LimitNOFILE=65536; or, without the unit: ulimit -n 65536",
        )
    })
}

#[cfg(test)]
mod tests;
