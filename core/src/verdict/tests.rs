//! Bottlenecks made by hand, each with what its nodes would tell: the verdict must name the right one.

use super::*;
use crate::units::ByteCount;
use crate::waits::Tcp;

/// Two racks, a gigabit for each node and for the link between the switches.
const FABRIC: &str = "[cluster]\nname = \"c\"\n\
    [[switch]]\nname = \"core\"\n[[switch]]\nname = \"rack1\"\n\
    [[node]]\nname = \"head\"\nattach = \"core\"\nnic = \"10 Gbit/s\"\n\
    [[node]]\nname = \"n[1-4]\"\nattach = \"rack1\"\nnic = \"10 Gbit/s\"\n\
    [[link]]\nbetween = [\"rack1\", \"core\"]\ncapacity = \"10 Gbit/s\"\n";

pub(super) fn topology(uplink: &str) -> Topology {
    let text = FABRIC.replace("capacity = \"10 Gbit/s\"", &format!("capacity = \"{uplink}\""));
    Topology::parse("t", &text).unwrap()
}

pub(super) fn mb(rate: f64) -> Rate {
    Rate::from_bytes_per_second(rate * 1e6)
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Times of a second, in its hundredths.
pub(super) fn receiving(upstream: u64, disk: u64, cpu: u64) -> Receiving {
    Receiving {
        upstream: ms(upstream * 10),
        disk: ms(disk * 10),
        cpu: ms(cpu * 10),
    }
}

pub(super) fn sending(idle: u64, network: u64, disk: u64, limit: u64, cpu: u64) -> Sending {
    Sending {
        idle: ms(idle * 10),
        network: ms(network * 10),
        disk: ms(disk * 10),
        limit: ms(limit * 10),
        cpu: ms(cpu * 10),
        tcp: Tcp {
            busy: ms(network * 10),
            sent: ByteCount(100_000_000),
            ..Tcp::default()
        },
    }
}

fn reading(disk: u64, limit: u64, idle: u64, cpu: u64) -> Reading {
    Reading {
        disk: ms(disk * 10),
        limit: ms(limit * 10),
        idle: ms(idle * 10),
        cpu: ms(cpu * 10),
    }
}

pub(super) fn hop(parent: &str, child: &str, rate: f64, receiving: Receiving, sending: Sending) -> SeenHop {
    SeenHop {
        child: child.parse().unwrap(),
        parent: parent.parse().unwrap(),
        moving: true,
        rate: mb(rate),
        streams: 1,
        rtt: Some(ms(1)),
        receiving,
        sending: Some(sending),
    }
}

/// Waits for bytes that its parent does not have either.
pub(super) fn starved(parent: &str, child: &str, rate: f64) -> SeenHop {
    hop(
        parent,
        child,
        rate,
        receiving(80, 5, 15),
        sending(85, 5, 0, 0, 10),
    )
}

pub(super) fn seen(hops: Vec<SeenHop>) -> Seen {
    Seen {
        source: "head".parse().unwrap(),
        piped: false,
        read: mb(90.0),
        reading: reading(5, 0, 85, 10),
        limit: None,
        source_limit: None,
        hops,
    }
}

fn verdict_in(topology: &Topology, seen: &Seen) -> Verdict {
    let windows = |_: &NodeName| {
        Some(WindowLimits {
            receive: ByteCount(8 << 20),
            send: ByteCount(4 << 20),
        })
    };
    judge(topology, seen, &windows).unwrap()
}

fn verdict(seen: &Seen) -> Verdict {
    verdict_in(&topology("10 Gbit/s"), seen)
}

pub(super) fn name(name: &str) -> NodeName {
    name.parse().unwrap()
}

#[test]
fn a_slow_disk() {
    let full = hop("head", "n1", 180.0, receiving(4, 88, 8), sending(0, 90, 0, 0, 10));
    let judged = verdict(&seen(vec![full]));
    assert_eq!(judged.limit, Limit::DiskWrite(name("n1")));
    assert_eq!(
        judged.text,
        "n1: its disk writes 180 MB/s; the way from head to n1 could carry 1.18 GB/s"
    );
}

#[test]
fn a_slow_relay_is_named_by_those_below_it() {
    let judged = verdict(&seen(vec![
        hop(
            "head",
            "n1",
            400.0,
            receiving(90, 2, 8),
            sending(80, 10, 0, 0, 10),
        ),
        hop("n1", "n2", 181.0, receiving(4, 88, 8), sending(0, 92, 0, 0, 8)),
        starved("n2", "n3", 180.5),
        starved("n3", "n4", 180.0),
    ]));
    assert_eq!(judged.limit, Limit::DiskWrite(name("n2")));
    assert_eq!(judged.child, name("n2"));
}

#[test]
fn a_slow_source_disk() {
    let mut push = seen(vec![starved("head", "n1", 90.0), starved("n1", "n2", 89.0)]);
    push.reading = reading(85, 0, 5, 10);
    let judged = verdict(&push);
    assert_eq!(judged.limit, Limit::SourceRead(name("head")));
    assert_eq!(
        judged.text,
        "head: its disk reads 90.0 MB/s; the way from head to n1 could carry 1.18 GB/s"
    );
    // The same through a pipe is the fault of who writes into it.
    push.piped = true;
    assert_eq!(verdict(&push).limit, Limit::Pipe(name("head")));
}

#[test]
fn a_busy_processor() {
    let judged = verdict(&seen(vec![
        hop(
            "head",
            "n1",
            300.0,
            receiving(10, 10, 80),
            sending(0, 80, 0, 0, 20),
        ),
        starved("n1", "n2", 299.0),
    ]));
    assert_eq!(judged.limit, Limit::Processor(name("n1")));
    assert!(
        judged.text.starts_with("n1: CPU-bound at 300 MB/s; "),
        "{}",
        judged.text
    );
    // That of the sender counts as well.
    let judged = verdict(&seen(vec![hop(
        "head",
        "n1",
        300.0,
        receiving(70, 10, 20),
        sending(5, 15, 0, 0, 80),
    )]));
    assert_eq!(judged.limit, Limit::Processor(name("head")));
    // One that has much to do, and waits all the same, is not the limit.
    let mut push = seen(vec![hop(
        "head",
        "n1",
        100.0,
        receiving(40, 5, 55),
        sending(45, 5, 0, 0, 50),
    )]);
    push.reading = reading(5, 40, 0, 55);
    assert_eq!(verdict(&push).limit, Limit::SourceLimit(name("head")));
}

#[test]
fn a_full_link_counts_all_that_goes_over_it() {
    let narrow = topology("1 Gbit/s");
    // A star over the uplink: neither hop fills it, together they do.
    let half = |child| hop("head", child, 58.0, receiving(90, 2, 8), sending(0, 92, 0, 0, 8));
    let judged = verdict_in(&narrow, &seen(vec![half("n1"), half("n2")]));
    let Limit::Full(edge) = judged.limit else {
        panic!("{judged:?}")
    };
    assert!(narrow.edge_name(edge).starts_with("link "), "{}", judged.text);
    assert!(
        judged
            .text
            .contains(": full, it carries 99 % of what it has (1.00 Gbit/s)"),
        "{}",
        judged.text
    );
}

#[test]
fn a_link_slower_than_the_topology_says() {
    let judged = verdict(&seen(vec![hop(
        "head",
        "n1",
        117.7,
        receiving(90, 2, 8),
        sending(0, 92, 0, 0, 8),
    )]));
    assert_eq!(judged.limit, Limit::Network);
    assert!(
        judged
            .text
            .starts_with("head to n1: the network carries 118 MB/s, 10 % of what the "),
        "{}",
        judged.text
    );
}

#[test]
fn a_small_window() {
    let mut far = hop("head", "n2", 41.0, receiving(95, 1, 4), sending(0, 96, 0, 0, 4));
    far.rtt = Some(ms(100));
    far.sending.as_mut().unwrap().tcp.receiver = ms(700);
    let judged = verdict(&seen(vec![far.clone()]));
    assert_eq!(judged.limit, Limit::ReceiveWindow(name("n2")));
    assert!(
        judged
            .text
            .starts_with("n2: its receive window of 8.00 MiB over 100 ms allows 336 Mbit/s; "),
        "{}",
        judged.text
    );
    let tcp = &mut far.sending.as_mut().unwrap().tcp;
    (tcp.receiver, tcp.buffer) = (ms(0), ms(800));
    assert_eq!(verdict(&seen(vec![far])).limit, Limit::SendWindow(name("head")));
}

#[test]
fn a_lossy_way() {
    let mut lossy = hop("head", "n1", 20.0, receiving(95, 1, 4), sending(0, 96, 0, 0, 4));
    lossy.sending.as_mut().unwrap().tcp.again = ByteCount(500_000);
    let judged = verdict(&seen(vec![lossy]));
    assert_eq!(judged.limit, Limit::Loss);
    assert!(
        judged.text.ends_with("and 0.50 % of it was sent again"),
        "{}",
        judged.text
    );
}

#[test]
fn half_duplex_is_seen_at_a_relay() {
    let held = || (receiving(92, 2, 6), sending(0, 94, 0, 0, 6));
    let both = |parent, child, rate| {
        let (receiving, sending) = held();
        hop(parent, child, rate, receiving, sending)
    };
    let judged = verdict(&seen(vec![
        both("head", "n1", 590.0),
        both("n1", "n2", 585.0),
        starved("n2", "n3", 584.0),
    ]));
    assert_eq!(judged.limit, Limit::HalfDuplex(name("n1")));
    // Nor is a relay that received fast and then sends slowly, though the sum of both is what an interface has.
    let judged = verdict(&seen(vec![both("head", "n1", 900.0), both("n1", "n2", 200.0)]));
    assert_eq!(judged.limit, Limit::Network);
    // The same rates where the relay's parent has nothing more are no such thing.
    let judged = verdict(&seen(vec![starved("head", "n1", 590.0), both("n1", "n2", 585.0)]));
    assert_eq!(judged.limit, Limit::Network);
}

#[test]
fn a_limit_that_somebody_set() {
    let mut push = seen(vec![hop(
        "head",
        "n1",
        10.0,
        receiving(95, 1, 4),
        sending(1, 3, 0, 95, 1),
    )]);
    push.limit = Some(mb(10.0));
    let judged = verdict(&push);
    assert_eq!(judged.limit, Limit::SendLimit(name("head")));
    assert!(
        judged
            .text
            .starts_with("head: sends at its limit of 10.0 MB/s (--limit)"),
        "{}",
        judged.text
    );
    let mut push = seen(vec![starved("head", "n1", 5.0)]);
    push.reading = reading(1, 95, 2, 2);
    push.source_limit = Some(mb(5.0));
    assert_eq!(verdict(&push).limit, Limit::SourceLimit(name("head")));
}

#[test]
fn a_parent_that_reads_back_slowly() {
    let judged = verdict(&seen(vec![
        hop(
            "head",
            "n1",
            400.0,
            receiving(90, 2, 8),
            sending(80, 10, 0, 0, 10),
        ),
        hop("n1", "n2", 60.0, receiving(90, 2, 8), sending(2, 5, 88, 0, 5)),
    ]));
    assert_eq!(judged.limit, Limit::ReadBack(name("n1")));
    assert!(
        judged.text.contains("what n2 missed, 60.0 MB/s"),
        "{}",
        judged.text
    );
}

#[test]
fn too_little_says_nothing() {
    let windows = |_: &NodeName| None;
    let fabric = topology("10 Gbit/s");
    assert_eq!(judge(&fabric, &seen(Vec::new()), &windows), None);
    let short = hop("head", "n1", 180.0, receiving(0, 5, 1), sending(0, 5, 0, 0, 1));
    assert_eq!(judge(&fabric, &seen(vec![short]), &windows), None);
    // Two that ask each other, for a moment: no end, and no verdict.
    let circle = seen(vec![starved("n1", "n2", 1.0), starved("n2", "n1", 1.0)]);
    assert_eq!(judge(&fabric, &circle, &windows), None);
}

#[test]
fn each_hop_speaks_for_itself_only() {
    let push = seen(vec![
        hop("head", "n1", 180.0, receiving(4, 88, 8), sending(0, 90, 0, 0, 10)),
        starved("n1", "n2", 180.0),
    ]);
    let limits = each(&topology("10 Gbit/s"), &push);
    assert_eq!(limits, [Some(Limit::DiskWrite(name("n1"))), None]);
}
