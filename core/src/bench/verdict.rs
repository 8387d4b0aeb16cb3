//! What readings say, in words: what is slower than it was or than its like, and what limits the way from disk to disk.

use std::collections::BTreeMap;

use super::{LinkReading, Measurement, NodeReading, Pair, Reading, Subject};
use crate::id::NodeName;
use crate::topology::Topology;
use crate::units::Rate;
use crate::verdict::words;

/// Below this share of a median something is wrong.
const SUSPECT: f64 = 0.7;
/// So many others make a median.
const ENOUGH: usize = 3;
/// What "its last month" means.
const MONTH_MS: u64 = 31 * 24 * 3600 * 1000;

/// Readings of each subject, oldest first.
pub type History = BTreeMap<Subject, Vec<Measurement>>;

/// One figure of a reading, by name; for a disk with its root.
fn figures(topology: &Topology, measurement: &Measurement) -> Vec<(String, String, Rate)> {
    match (&measurement.subject, &measurement.reading) {
        (Subject::Node(node), Reading::Node(reading)) => {
            let mut figures = Vec::new();
            for disk in &reading.disks {
                for (what, rate) in [("write", disk.write), ("read", disk.read)] {
                    if let Some(rate) = rate {
                        let kind = format!("disk {} {what}", disk.root);
                        figures.push((kind, format!("{node}'s disk ({}, {what})", disk.root), rate));
                    }
                }
            }
            for (what, rate) in [
                ("BLAKE3", reading.blake3),
                ("SHA-256", reading.sha256),
                ("AES-GCM", reading.aes_gcm),
            ] {
                figures.push((what.to_owned(), format!("{node}'s processor ({what})"), rate));
            }
            figures
        }
        (Subject::Link(pair), Reading::Link(reading)) => {
            // Ways of equal length and width are alike.
            let alike = topology
                .route(&pair.from, &pair.to)
                .map(|route| format!("{} {:?}", route.edges.len(), width(topology, pair)))
                .unwrap_or_default();
            [
                (&pair.from, &pair.to, &reading.forward),
                (&pair.to, &pair.from, &reading.backward),
            ]
            .into_iter()
            .filter_map(|(from, to, rates)| {
                let best = LinkReading::best(rates)?;
                Some((
                    format!("way {alike}"),
                    format!("the way from {from} to {to}"),
                    best.rate,
                ))
            })
            .collect()
        }
        _ => Vec::new(),
    }
}

/// The wire rate of the narrowest part of the way.
fn width(topology: &Topology, pair: &Pair) -> Option<Rate> {
    let route = topology.route(&pair.from, &pair.to)?;
    route
        .edges
        .iter()
        .map(|edge| topology.capacity(*edge))
        .reduce(Rate::min)
}

fn median(mut rates: Vec<f64>) -> Option<f64> {
    rates.sort_unstable_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied()
}

/// What is below 70 % of its own median, or of that of its like, one line each.
pub fn flags(topology: &Topology, history: &History) -> Vec<String> {
    let mut like: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut newest = Vec::new();
    for readings in history.values() {
        let Some((last, earlier)) = readings.split_last() else {
            continue;
        };
        for (kind, name, rate) in figures(topology, last) {
            like.entry(kind.clone())
                .or_default()
                .push(rate.bytes_per_second());
            newest.push((kind, name, rate, last.unix_ms, earlier));
        }
    }
    let mut flags = Vec::new();
    for (kind, name, rate, unix_ms, earlier) in newest {
        let own: Vec<f64> = earlier
            .iter()
            .filter(|before| before.unix_ms + MONTH_MS >= unix_ms)
            .flat_map(|before| figures(topology, before))
            .filter(|(_, other, _)| *other == name)
            .map(|(_, _, rate)| rate.bytes_per_second())
            .collect();
        let share = |of: f64| (of > 0.0).then(|| rate.bytes_per_second() / of);
        let percent = |share: f64| (share * 100.0).round();
        if own.len() >= ENOUGH
            && let Some(share) = median(own).and_then(share)
            && share < SUSPECT
        {
            flags.push(format!(
                "{name} is at {} % of its last month: {}",
                percent(share),
                rate.in_bytes()
            ));
            continue;
        }
        let mut others = like[&kind].clone();
        if let Some(at) = others.iter().position(|other| *other == rate.bytes_per_second()) {
            others.swap_remove(at);
        }
        if others.len() >= ENOUGH
            && let Some(usual) = median(others)
            && let Some(share) = share(usual)
            && share < SUSPECT
        {
            flags.push(format!(
                "{name} is at {} % of its like: {}, where others have {}",
                percent(share),
                rate.in_bytes(),
                Rate::from_bytes_per_second(usual).in_bytes()
            ));
        }
    }
    flags
}

/// What limits the way from the disk of the one to the disk of the other, in a line.
pub fn way(
    topology: &Topology,
    pair: &Pair,
    rates: &[super::StreamReading],
    from: Option<&NodeReading>,
    to: Option<&NodeReading>,
) -> Option<String> {
    let best = LinkReading::best(rates)?;
    let carried = best.rate;
    let Pair { from: a, to: b } = pair;
    let reads = from.and_then(|node| node.disk()?.read);
    let writes = to.and_then(|node| node.disk()?.write);
    let checks = |node: Option<&NodeReading>| node.map(|node| node.blake3).filter(|rate| *rate > Rate::ZERO);
    // What is slower than the network, the slowest first.
    let mut slower: Vec<(Rate, String)> = [
        (reads, words::reads(a)),
        (writes, words::writes(b)),
        (checks(from), format!("{a}: a core hashes")),
        (checks(to), format!("{b}: a core hashes")),
    ]
    .into_iter()
    .filter_map(|(rate, what)| Some((rate?, what)))
    .filter(|(rate, _)| *rate < carried)
    .collect();
    slower.sort_by(|one, other| one.0.bytes_per_second().total_cmp(&other.0.bytes_per_second()));
    if let Some((rate, what)) = slower.first() {
        return Some(format!(
            "{what} {}{}",
            rate.in_bytes(),
            words::could_carry(a, b, carried)
        ));
    }
    let end = match (reads, writes) {
        (Some(reads), Some(writes)) => {
            format!("; their disks do {}", reads.min(writes).in_bytes())
        }
        _ => String::new(),
    };
    Some(format!(
        "{}, {}{end}",
        words::carries(a, b, carried),
        why(topology, pair, best)
    ))
}

/// What holds the network back.
fn why(topology: &Topology, pair: &Pair, best: &super::StreamReading) -> String {
    if topology.route(&pair.from, &pair.to).is_none() {
        return "no way known to the topology".to_owned();
    }
    match words::narrowest(topology, &pair.from, &pair.to) {
        Some(edge) => words::of_edge(topology, edge, best.rate, best.loss()),
        None => "within one host".to_owned(),
    }
}

/// One line for each direction of a measured way.
pub fn verdicts(topology: &Topology, pair: &Pair, link: &LinkReading, history: &History) -> Vec<String> {
    let node = |name: &NodeName| {
        history
            .get(&Subject::Node(name.clone()))
            .and_then(|readings| match &readings.last()?.reading {
                Reading::Node(reading) => Some(&**reading),
                Reading::Link(_) => None,
            })
    };
    let back = Pair {
        from: pair.to.clone(),
        to: pair.from.clone(),
    };
    [(pair, &link.forward), (&back, &link.backward)]
        .into_iter()
        .filter_map(|(pair, rates)| way(topology, pair, rates, node(&pair.from), node(&pair.to)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{DiskReading, StreamReading};
    use crate::units::ByteCount;

    const FABRIC: &str = "[cluster]\nname = \"c\"\n[[switch]]\nname = \"s\"\n[[node]]\nname = \"n[0-4]\"\n\
                          attach = \"s\"\nnic = \"10 Gbit/s\"\n";
    const DAY: u64 = 24 * 3600 * 1000;

    fn mb(rate: f64) -> Rate {
        Rate::from_bytes_per_second(rate * 1e6)
    }

    fn node(write: f64, read: f64) -> NodeReading {
        NodeReading {
            disks: vec![DiskReading {
                root: "main".parse().unwrap(),
                write: Some(mb(write)),
                read: Some(mb(read)),
                skipped: String::new(),
            }],
            blake3: mb(4000.0),
            sha256: mb(1500.0),
            aes_gcm: mb(3000.0),
            ..NodeReading::default()
        }
    }

    fn of(name: &str, unix_ms: u64, reading: NodeReading) -> Measurement {
        Measurement {
            subject: Subject::Node(name.parse().unwrap()),
            unix_ms,
            reading: Reading::Node(Box::new(reading)),
        }
    }

    fn history(measurements: Vec<Measurement>) -> History {
        let mut history = History::new();
        for measurement in measurements {
            history
                .entry(measurement.subject.clone())
                .or_default()
                .push(measurement);
        }
        history
    }

    fn topology() -> Topology {
        Topology::parse("t", FABRIC).unwrap()
    }

    #[test]
    fn a_disk_far_below_its_own_past_is_flagged() {
        let mut past: Vec<_> = (40..45)
            .map(|day| of("n1", day * DAY, node(1000.0, 1000.0)))
            .collect();
        past.push(of("n1", 46 * DAY, node(120.0, 990.0)));
        assert_eq!(
            flags(&topology(), &history(past.clone())),
            ["n1's disk (main, write) is at 12 % of its last month: 120 MB/s"]
        );
        // What was two months ago does not count.
        past.last_mut().unwrap().unix_ms = 100 * DAY;
        assert_eq!(flags(&topology(), &history(past)), [""; 0]);
    }

    #[test]
    fn a_disk_far_below_its_like_is_flagged() {
        let mut all: Vec<_> = (0..4)
            .map(|n| of(&format!("n{n}"), DAY, node(1000.0 + f64::from(n), 1000.0)))
            .collect();
        all.push(of("n4", DAY, node(400.0, 1000.0)));
        let found = flags(&topology(), &history(all));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].starts_with("n4's disk (main, write) is at 40 % of its like"),
            "{}",
            found[0]
        );
        // Two are no like.
        let two = vec![of("n0", DAY, node(1000.0, 1.0)), of("n1", DAY, node(10.0, 1.0))];
        assert_eq!(flags(&topology(), &history(two)), [""; 0]);
    }

    fn rates(mb_per_second: f64, retransmissions: u64) -> Vec<StreamReading> {
        vec![StreamReading {
            streams: 1,
            window: ByteCount(0),
            rate: mb(mb_per_second),
            bytes: ByteCount(1_448_000_000),
            retransmissions,
        }]
    }

    fn verdict(rate: f64, lost: u64, from: &NodeReading, to: &NodeReading) -> String {
        let pair = Pair {
            from: "n0".parse().unwrap(),
            to: "n1".parse().unwrap(),
        };
        way(&topology(), &pair, &rates(rate, lost), Some(from), Some(to)).unwrap()
    }

    #[test]
    fn the_verdict_names_the_slowest_from_disk_to_disk() {
        let (fast, slow) = (node(2000.0, 2000.0), node(180.0, 1500.0));
        assert_eq!(
            verdict(1100.0, 0, &fast, &slow),
            "n1: its disk writes 180 MB/s; the way from n0 to n1 could carry 1.10 GB/s"
        );
        let source = node(2000.0, 90.0);
        assert!(verdict(1100.0, 0, &source, &slow).starts_with("n0: its disk reads 90.0 MB/s"));
        let hashes = NodeReading {
            blake3: mb(300.0),
            ..fast.clone()
        };
        assert!(verdict(1100.0, 0, &fast, &hashes).starts_with("n1: a core hashes 300 MB/s"));
        let full = verdict(1150.0, 0, &fast, &fast);
        assert!(
            full.contains("which is what the interface of n0 has (10.0 Gbit/s)"),
            "{full}"
        );
        let half = verdict(588.0, 5000, &fast, &fast);
        assert!(half.contains("50 % of what the interface of n0 should"), "{half}");
        assert!(half.contains("0.50 % of it was sent again"), "{half}");
    }
}
