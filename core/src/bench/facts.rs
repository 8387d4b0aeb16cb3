//! From readings to what the planner knows.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{LinkReading, Measurement, Pair, Reading, StreamReading, Subject, capacity};
use crate::plan::{Facts, PathFacts};
use crate::topology::Topology;

/// Older readings tell the planner nothing: disks fill and links are rebuilt.
pub const MAX_AGE: Duration = Duration::from_secs(90 * 24 * 3600);

/// Lays the newest readings over what is known already. `latest` holds one for each subject; `now` is Unix time in
/// milliseconds.
pub fn lay(facts: &mut Facts, topology: &Topology, latest: &[&Measurement], now: u64) {
    let fresh = latest
        .iter()
        .filter(|one| u128::from(now.saturating_sub(one.unix_ms)) <= MAX_AGE.as_millis());
    let mut links = Vec::new();
    for measurement in fresh {
        match (&measurement.subject, &measurement.reading) {
            (Subject::Node(node), Reading::Node(reading)) => {
                let known = facts.nodes.entry(node.clone()).or_default();
                if let Some(disk) = reading.disk() {
                    known.disk_write = disk.write.or(known.disk_write);
                    known.disk_read = disk.read.or(known.disk_read);
                }
                // What an agent has said since it came is newer.
                known.windows = known.windows.or(Some(reading.host.windows));
            }
            (Subject::Link(pair), Reading::Link(reading)) => {
                link(facts, topology, pair, reading);
                links.push((pair, &**reading));
            }
            _ => {}
        }
    }
    for (edge, rate) in capacity::measured(topology, &links) {
        facts.edges.entry(edge).or_insert(rate);
    }
}

fn link(facts: &mut Facts, topology: &Topology, pair: &Pair, reading: &LinkReading) {
    let rtt = reading.rtt.median;
    if rtt.is_zero() {
        return;
    }
    for (from, to, rates) in [
        (&pair.from, &pair.to, &reading.forward),
        (&pair.to, &pair.from, &reading.backward),
    ] {
        // A hop's own RTT is what its child met in a push, where there was one.
        facts.rtts.entry((from.clone(), to.clone())).or_insert(rtt);
        let Some(route) = topology.route(from, to) else {
            continue;
        };
        let (Some(first), Some(last)) = (route.switches.first(), route.switches.last()) else {
            continue;
        };
        let (rising, filled) = LinkReading::rising(rates);
        let seen = PathFacts {
            rtt,
            rates: rising.iter().map(|one| (one.streams, one.rate)).collect(),
            filled,
            loss: LinkReading::best(rates).map_or(0.0, StreamReading::loss),
            control: reading.control.clone(),
        };
        let path = facts
            .paths
            .entry((first.clone(), last.clone()))
            .or_insert_with(|| seen.clone());
        // Of several pairs, what the way allows and not what one of them suffers from.
        path.rtt = path.rtt.min(rtt);
        if single(&seen) > single(path) {
            *path = PathFacts {
                rtt: path.rtt,
                ..seen
            };
        }
    }
}

/// What the fewest streams carried, each.
fn single(path: &PathFacts) -> f64 {
    path.rates.first().map_or(0.0, |(count, rate)| {
        rate.bytes_per_second() / f64::from((*count).max(1))
    })
}

/// The newest of each history.
pub fn newest(history: &BTreeMap<Subject, Vec<Measurement>>) -> Vec<&Measurement> {
    history.values().filter_map(|readings| readings.last()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::made::rates;
    use crate::bench::{DiskReading, NodeReading, Rtt};
    use crate::plan::{Request, ShapeChoice, plan};
    use crate::units::{ByteCount, Rate};

    const FABRIC: &str = "[cluster]\nname = \"c\"\n[[switch]]\nname = \"s\"\n[[node]]\nname = \"n[0-3]\"\n\
                          attach = \"s\"\nnic = \"10 Gbit/s\"\n";

    fn disk(node: &str, write_mb: f64, unix_ms: u64) -> Measurement {
        Measurement {
            subject: Subject::Node(node.parse().unwrap()),
            unix_ms,
            reading: Reading::Node(Box::new(NodeReading {
                disks: vec![DiskReading {
                    root: "main".parse().unwrap(),
                    write: Some(Rate::from_bytes_per_second(write_mb * 1e6)),
                    read: None,
                    skipped: String::new(),
                }],
                ..NodeReading::default()
            })),
        }
    }

    fn between(from: &str, to: &str, rtt_us: u64, forward: &[f64], backward: &[f64]) -> Measurement {
        Measurement {
            subject: Subject::Link(Pair {
                from: from.parse().unwrap(),
                to: to.parse().unwrap(),
            }),
            unix_ms: 1000,
            reading: Reading::Link(Box::new(LinkReading {
                rtt: Rtt {
                    median: Duration::from_micros(rtt_us),
                    ..Rtt::default()
                },
                forward: rates(forward),
                backward: rates(backward),
                ..LinkReading::default()
            })),
        }
    }

    fn request(targets: &[&str]) -> Request {
        Request {
            source: "n0".parse().unwrap(),
            targets: targets.iter().map(|name| name.parse().unwrap()).collect(),
            size: ByteCount(10 << 30),
            shape: ShapeChoice::Auto,
            streams: None,
            limit: None,
            source_limit: None,
            encrypted: false,
        }
    }

    #[test]
    fn the_next_plan_uses_a_measured_disk_until_it_is_old() {
        let topology = Topology::parse("t", FABRIC).unwrap();
        let slow = disk("n1", 50.0, 1000);
        let mut facts = Facts::default();
        lay(&mut facts, &topology, &[&slow], 2000);
        let planned = plan(&topology, &request(&["n1", "n2"]), &facts).unwrap();
        let hop = planned.hop(&"n1".parse().unwrap()).unwrap();
        assert_eq!(hop.rate.in_bytes().to_string(), "50.0 MB/s");
        assert!(hop.limited_by.contains("disk of n1"), "{}", hop.limited_by);

        let mut facts = Facts::default();
        let old = 1000 + MAX_AGE.as_millis() as u64 + 1;
        lay(&mut facts, &topology, &[&slow], old);
        assert_eq!(facts, Facts::default());
    }

    #[test]
    fn others_at_the_same_switch_will_meet_what_two_have_met() {
        let topology = Topology::parse("t", FABRIC).unwrap();
        let measured = between("n0", "n1", 350, &[200.0, 400.0, 405.0], &[900.0, 910.0]);
        let mut facts = Facts::default();
        lay(&mut facts, &topology, &[&measured], 2000);
        let rtt = Duration::from_micros(350);
        let pair = |from: &str, to: &str| (from.parse().unwrap(), to.parse().unwrap());
        assert_eq!(facts.rtts[&pair("n0", "n1")], rtt);
        assert_eq!(facts.rtts[&pair("n1", "n0")], rtt);
        let path = facts.paths.values().next().unwrap();
        assert_eq!(path.rtt, rtt);
        assert_eq!(
            path.rates.len(),
            1,
            "the way back needs one stream only: {path:?}"
        );
        assert!(
            path.filled && facts.edges.len() == 4,
            "each way is full below what it should carry: {facts:?}"
        );

        let both = between("n0", "n1", 350, &[200.0, 400.0], &[210.0, 400.0]);
        let mut facts = Facts::default();
        lay(&mut facts, &topology, &[&both], 2000);
        let planned = plan(&topology, &request(&["n2"]), &facts).unwrap();
        let hop = planned.hop(&"n2".parse().unwrap()).unwrap();
        assert_eq!(hop.streams, 6, "of 200 MB/s each, for 1177 MB/s");

        // A measurement moves bytes and does nothing with them: a push has to check and write as well.
        let bare = between("n0", "n1", 30, &[3500.0, 7000.0], &[3500.0, 7000.0]);
        let mut facts = Facts::default();
        lay(&mut facts, &topology, &[&bare], 2000);
        let planned = plan(&topology, &request(&["n2"]), &facts).unwrap();
        assert_eq!(planned.hop(&"n2".parse().unwrap()).unwrap().streams, 2);
    }

    const RACKS: &str = "[cluster]\nname = \"c\"\n[[switch]]\nname = \"core\"\n[[switch]]\nname = \"rack[1-2]\"\n\
        [[link]]\nbetween = [\"rack[1-2]\", \"core\"]\ncapacity = \"40 Gbit/s\"\n\
        [[node]]\nname = \"n[0-3]\"\nattach = \"rack1\"\nnic = \"10 Gbit/s\"\n\
        [[node]]\nname = \"n[4-7]\"\nattach = \"rack2\"\nnic = \"10 Gbit/s\"\n";

    #[test]
    fn an_uplink_that_carries_less_than_it_should_is_crossed_once() {
        let topology = Topology::parse("t", RACKS).unwrap();
        let wanted = request(&["n1", "n2", "n3", "n4", "n5", "n6", "n7"]);
        let limits = |facts: &Facts| {
            let planned = plan(&topology, &wanted, facts).unwrap();
            let into = planned
                .hops
                .iter()
                .find(|hop| hop.child.as_str() == "n4")
                .unwrap()
                .clone();
            (
                into.rate.in_bytes().to_string(),
                into.limited_by,
                planned.predicted,
            )
        };
        let before = limits(&Facts::default());
        let fine = [1170.0, 1172.0];
        let local = [
            between("n0", "n1", 100, &fine, &fine),
            between("n4", "n5", 100, &fine, &fine),
        ];
        let across = between("n0", "n4", 300, &[118.0, 118.2], &[1150.0, 1160.0]);
        let all: Vec<&Measurement> = local.iter().chain([&across]).collect();
        let mut facts = Facts::default();
        lay(&mut facts, &topology, &all, 2000);
        let (rate, limited_by, predicted) = limits(&facts);
        assert_eq!(
            (rate.as_str(), limited_by.as_str()),
            ("118 MB/s", "link rack1-core"),
            "{before:?}"
        );
        assert!(predicted > before.2 * 5);
        // All of the sum goes over it: a star would take so many times as long.
        let star = Request {
            shape: "star".parse().unwrap(),
            ..wanted.clone()
        };
        let planned = plan(&topology, &star, &facts).unwrap();
        assert!(planned.predicted > predicted * 3, "{planned:?}");

        let mut old = Facts::default();
        lay(&mut old, &topology, &all, 1001 + MAX_AGE.as_millis() as u64);
        assert_eq!(old, Facts::default(), "what is that old says nothing");
    }

    #[test]
    fn a_lossy_way_gets_the_streams_that_were_measured_to_be_enough() {
        let far = RACKS.replace("40 Gbit/s", "1 Gbit/s");
        let topology = Topology::parse("t", &far).unwrap();
        let mut lossy = between("n0", "n4", 100_000, &[20.0, 38.0, 70.0, 100.0], &[]);
        if let Reading::Link(link) = &mut lossy.reading {
            for reading in &mut link.forward {
                (reading.bytes, reading.retransmissions) = (ByteCount(1_448_000_000), 1000);
            }
        }
        let mut facts = Facts::default();
        lay(&mut facts, &topology, &[&lossy], 2000);
        let planned = plan(&topology, &request(&["n4"]), &facts).unwrap();
        let hop = &planned.hops[0];
        // 8 carried 100 MB/s, and more were not tried: 12.5 MB/s each, for 117.7 less 3 %.
        assert_eq!((hop.streams, hop.streams_cap), (10, 64), "{hop:?}");
        assert_eq!(
            hop.streams_least, 10,
            "the child sees neither loss nor measurements in its round trip"
        );
        let unmeasured = plan(&topology, &request(&["n4"]), &Facts::default()).unwrap();
        assert_eq!(unmeasured.hops[0].streams_least, 1);
    }

    #[test]
    fn what_a_push_met_counts_more_than_what_a_probe_met() {
        let topology = Topology::parse("t", FABRIC).unwrap();
        let mut facts = Facts::default();
        let key = ("n0".parse().unwrap(), "n1".parse().unwrap());
        facts.rtts.insert(key.clone(), Duration::from_millis(7));
        lay(
            &mut facts,
            &topology,
            &[&between("n0", "n1", 350, &[], &[])],
            2000,
        );
        assert_eq!(facts.rtts[&key], Duration::from_millis(7));
    }
}
