//! Which part of the fabric carries less than the topology promises, seen from ways that were measured across it.
//!
//! A way is full when more streams bring nothing; what it carried then is what its narrowest part carries. If that is less
//! than the topology gives any part, some part is slower than it says. Which one, other ways tell: a part over which
//! another way carried more is not it. Where several are left, it is
//!
//! - an interface over which other ways carried no more either: its host can do no better;
//! - else the links between switches, which only a way across tells of;
//! - else, at one switch, the interfaces of both.
//!
//! Where a link between switches is the narrowest part and nearly carries what it promises, it counts with what it carried.

use std::collections::BTreeMap;

use super::verdict::History;
use super::{LinkReading, Pair, Reading, Subject};
use crate::cost;
use crate::topology::{EdgeId, End, Topology};
use crate::units::Rate;

/// A way that carried this share of what its narrowest part promises is as it should be.
const AS_PROMISED: f64 = 0.9;
/// Nearer to its promise than this is the spread of measuring.
const EXACTLY: f64 = 0.97;
/// Rates that differ by less than this factor are the same.
const SAME: f64 = 1.15;

struct Way {
    edges: Vec<EdgeId>,
    rate: Rate,
    /// More streams brought nothing.
    filled: bool,
}

/// What edges were measured to carry of payload where that is less than the topology promises.
pub(super) fn measured(topology: &Topology, links: &[(&Pair, &LinkReading)]) -> BTreeMap<EdgeId, Rate> {
    let mut ways = Vec::new();
    for (pair, reading) in links {
        for (from, to, rates) in [
            (&pair.from, &pair.to, &reading.forward),
            (&pair.to, &pair.from, &reading.backward),
        ] {
            if let Some(route) = topology.route(from, to)
                && let Some(best) = LinkReading::best(rates)
            {
                let (_, filled) = LinkReading::rising(rates);
                ways.push(Way {
                    edges: route.edges,
                    rate: best.rate,
                    filled,
                });
            }
        }
    }
    let interfaces: Vec<bool> = topology
        .links()
        .map(|link| {
            matches!(
                (link.from, link.to),
                (End::Node { .. }, _) | (_, End::Node { .. })
            )
        })
        .collect();
    let is_interface = |edge: &EdgeId| interfaces[edge.0 as usize / 2];

    let mut slow: BTreeMap<EdgeId, Rate> = BTreeMap::new();
    for (at, way) in ways.iter().enumerate() {
        let promised = way
            .edges
            .iter()
            .map(|edge| cost::goodput(topology.capacity(*edge)))
            .reduce(Rate::min);
        let Some(promised) = promised.filter(|_| way.filled) else {
            continue;
        };
        if way.rate >= promised.times(EXACTLY) {
            continue;
        }
        // What other ways carried over an edge; none: nobody else passed it.
        let elsewhere = |edge: &EdgeId| {
            ways.iter()
                .enumerate()
                .filter(|(other, way)| *other != at && way.edges.contains(edge))
                .map(|(_, way)| way.rate)
                .reduce(|a, b| if a < b { b } else { a })
        };
        let no_more = |edge: &EdgeId| elsewhere(edge).is_some_and(|rate| rate < way.rate.times(SAME));
        let unknown = |edge: &EdgeId| elsewhere(edge).is_none();
        let of = |wanted: &dyn Fn(&EdgeId) -> bool| -> Vec<EdgeId> {
            way.edges.iter().filter(|edge| wanted(edge)).copied().collect()
        };
        let blamed = if way.rate >= promised.times(AS_PROMISED) {
            let is_narrowest = |edge: &EdgeId| cost::goodput(topology.capacity(*edge)) <= promised;
            of(&|edge| is_narrowest(edge) && !is_interface(edge))
        } else {
            let suspects = [
                of(&|edge| is_interface(edge) && no_more(edge)),
                of(&|edge| !is_interface(edge) && (no_more(edge) || unknown(edge))),
                of(&|edge| is_interface(edge) && unknown(edge)),
            ];
            suspects
                .into_iter()
                .find(|some| !some.is_empty())
                .unwrap_or_default()
        };
        for edge in blamed {
            let best =
                elsewhere(&edge).map_or(way.rate, |rate| if rate < way.rate { way.rate } else { rate });
            slow.entry(edge).or_insert(best);
        }
    }
    slow
}

/// What is well below its promise, one line each, by the newest readings.
pub fn flags(topology: &Topology, history: &History) -> Vec<String> {
    let links: Vec<(&Pair, &LinkReading)> = history
        .iter()
        .filter_map(|(subject, readings)| match (subject, &readings.last()?.reading) {
            (Subject::Link(pair), Reading::Link(link)) => Some((pair, &**link)),
            _ => None,
        })
        .collect();
    let name = |end: End<'_>| match end {
        End::Switch(switch) => switch.to_string(),
        End::Node { node, .. } => node.name.to_string(),
    };
    let ends: Vec<_> = topology
        .links()
        .map(|link| (name(link.from), name(link.to)))
        .collect();
    measured(topology, &links)
        .into_iter()
        .filter_map(|(edge, rate)| {
            let wire = topology.capacity(edge);
            let share = rate.bytes_per_second() / cost::goodput(wire).bytes_per_second();
            let (from, to) = &ends[edge.0 as usize / 2];
            let (from, to) = if edge.0 % 2 == 0 { (from, to) } else { (to, from) };
            (share < AS_PROMISED).then(|| {
                format!(
                    "the {} carries {} from {from} to {to}, {:.0} % of what it should ({})",
                    topology.edge_name(edge),
                    rate.in_bytes(),
                    share * 100.0,
                    wire.in_bits()
                )
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Measurement;
    use crate::bench::made::rates;

    const FABRIC: &str = "[cluster]\nname = \"c\"\n[[switch]]\nname = \"rack[1-2]\"\n[[switch]]\nname = \"core\"\n\
        [[link]]\nbetween = [\"rack[1-2]\", \"core\"]\ncapacity = \"40 Gbit/s\"\n\
        [[node]]\nname = \"a[0-2]\"\nattach = \"rack1\"\nnic = \"10 Gbit/s\"\n\
        [[node]]\nname = \"b[0-2]\"\nattach = \"rack2\"\nnic = \"10 Gbit/s\"\n";

    /// Names and MB/s of what is slower than promised, with the direction of links between switches.
    fn slow(measured_ways: &[(&str, &str, &[f64], &[f64])]) -> Vec<String> {
        slow_in(FABRIC, measured_ways)
    }

    fn slow_in(fabric: &str, measured_ways: &[(&str, &str, &[f64], &[f64])]) -> Vec<String> {
        let topology = Topology::parse("t", fabric).unwrap();
        let links: Vec<(Pair, LinkReading)> = measured_ways
            .iter()
            .map(|(from, to, forward, backward)| {
                let pair = Pair {
                    from: from.parse().unwrap(),
                    to: to.parse().unwrap(),
                };
                let reading = LinkReading {
                    forward: rates(forward),
                    backward: rates(backward),
                    ..LinkReading::default()
                };
                (pair, reading)
            })
            .collect();
        let links: Vec<_> = links.iter().map(|(pair, reading)| (pair, reading)).collect();
        measured(&topology, &links)
            .into_iter()
            .map(|(edge, rate)| {
                let way = if edge.0 % 2 == 0 { "there" } else { "back" };
                format!("{} {way} {}", topology.edge_name(edge), rate.in_bytes())
            })
            .collect()
    }

    const FINE: &[f64] = &[1170.0, 1171.0];

    #[test]
    fn what_is_as_promised_is_no_news() {
        assert_eq!(
            slow(&[("a0", "a1", FINE, FINE), ("a0", "b0", FINE, &[1100.0, 1110.0])]),
            [""; 0]
        );
        // More streams might have carried more.
        assert_eq!(slow(&[("a0", "a1", &[300.0, 600.0], FINE)]), [""; 0]);
        assert_eq!(slow(&[("a0", "a1", &[300.0], &[])]), [""; 0]);
    }

    #[test]
    fn a_link_that_nearly_carries_its_promise_counts_with_what_it_carries() {
        let narrow = FABRIC.replace("40 Gbit/s", "1 Gbit/s");
        let across = ("a0", "b0", &[60.0, 110.0, 112.0][..], &[117.0, 117.4][..]);
        assert_eq!(
            slow_in(&narrow, &[across]),
            ["link rack1-core there 112 MB/s", "link rack2-core back 112 MB/s"]
        );
        // Another way over one of them carried more.
        let better = ("a1", "b1", &[116.0, 116.1][..], &[117.0, 117.4][..]);
        assert_eq!(
            slow_in(&narrow, &[across, better])[0],
            "link rack1-core there 116 MB/s"
        );
    }

    #[test]
    fn a_sick_uplink_is_told_from_hosts_that_are_well() {
        let across = ("a0", "b0", &[118.0, 118.2][..], FINE);
        let found = slow(&[("a0", "a1", FINE, FINE), ("b0", "b1", FINE, FINE), across]);
        assert_eq!(
            found,
            ["link rack1-core there 118 MB/s", "link rack2-core back 118 MB/s"],
            "from rack1 to rack2, and either of both may be it"
        );
        // Even where nothing else is known of the hosts.
        assert_eq!(slow(&[across]), found);
    }

    #[test]
    fn what_is_far_below_its_promise_is_said() {
        let topology = Topology::parse("t", FABRIC).unwrap();
        let pair = Pair {
            from: "a0".parse().unwrap(),
            to: "b0".parse().unwrap(),
        };
        let reading = LinkReading {
            forward: rates(FINE),
            backward: rates(&[118.0, 118.2]),
            ..LinkReading::default()
        };
        let measurement = Measurement {
            subject: Subject::Link(pair.clone()),
            unix_ms: 1,
            reading: Reading::Link(Box::new(reading)),
        };
        let history = History::from([(Subject::Link(pair), vec![measurement])]);
        assert_eq!(
            flags(&topology, &history),
            [
                "the link rack1-core carries 118 MB/s from core to rack1, 3 % of what it should (40.0 Gbit/s)",
                "the link rack2-core carries 118 MB/s from rack2 to core, 3 % of what it should (40.0 Gbit/s)"
            ]
        );
    }

    #[test]
    fn a_host_that_does_no_better_anywhere_is_it() {
        let found = slow(&[
            ("a0", "a1", &[600.0, 605.0], FINE),
            ("b0", "b1", FINE, FINE),
            ("a0", "b0", &[610.0, 611.0], FINE),
        ]);
        assert_eq!(found, ["interface of a0 there 611 MB/s"]);
    }

    #[test]
    fn of_two_neighbours_that_nobody_else_measured_it_may_be_either() {
        let found = slow(&[("a0", "a1", &[600.0, 605.0], FINE)]);
        assert_eq!(
            found,
            ["interface of a0 there 605 MB/s", "interface of a1 back 605 MB/s"]
        );
        // One of them did better with a third: then it is the other.
        let found = slow(&[("a0", "a1", &[600.0, 605.0], FINE), ("a0", "a2", FINE, FINE)]);
        assert_eq!(found, ["interface of a1 back 605 MB/s"]);
    }
}
