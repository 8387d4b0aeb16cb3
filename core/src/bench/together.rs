//! Whether a node takes from the network while it writes to its disk, or takes turns: 11.7 MB/s of network and 17 MB/s of
//! disk, each alone, gave 7.4 MB/s together on a host where they waited for each other.
//!
//! Side by side, both give what the slower gives alone: min(network, disk). In turns, the time of a byte is the sum of
//! both times, and the rate 1 / (1 / network + 1 / disk): half of their harmonic mean.

use std::collections::BTreeMap;

use super::verdict::History;
use super::{LinkReading, Reading, StreamReading, Subject};
use crate::id::NodeName;
use crate::units::Rate;

/// What is nearer than this to the slower of both is side by side, however near the other figure is.
const SIDE_BY_SIDE: f64 = 0.85;

/// What a node was measured to take.
#[derive(Debug, Clone, PartialEq)]
pub struct Together {
    /// From which node it came.
    pub from: NodeName,
    /// The network alone, with as many streams.
    pub network: Rate,
    /// The disk alone, if that was measured.
    pub disk: Option<Rate>,
    /// From the network to the disk.
    pub both: Rate,
    /// When: Unix time in milliseconds.
    pub unix_ms: u64,
}

impl Together {
    /// What both would give side by side.
    pub fn least(&self) -> Option<Rate> {
        Some(self.network.min(self.disk?))
    }

    /// What both would give in turns.
    pub fn in_turns(&self) -> Option<Rate> {
        let (network, disk) = (self.network.bytes_per_second(), self.disk?.bytes_per_second());
        (network > 0.0 && disk > 0.0).then(|| Rate::from_bytes_per_second(network * disk / (network + disk)))
    }

    /// Whether it is nearer to the latter.
    pub fn takes_turns(&self) -> bool {
        let (Some(least), Some(turns)) = (self.least(), self.in_turns()) else {
            return false;
        };
        let (both, least) = (self.both.bytes_per_second(), least.bytes_per_second());
        both < least * SIDE_BY_SIDE && both < (least + turns.bytes_per_second()) / 2.0
    }

    /// Said of a node that takes turns.
    pub fn words(&self, node: &NodeName) -> Option<String> {
        let (least, turns) = (self.least()?, self.in_turns()?);
        self.takes_turns().then(|| {
            format!(
                "{node} takes turns: from the network to the disk {}, where side by side would give {} and in turns {}",
                self.both.in_bytes(),
                least.in_bytes(),
                turns.in_bytes()
            )
        })
    }
}

/// What is known of each node, by the newest reading in which it was measured.
pub fn known(history: &History) -> BTreeMap<NodeName, Together> {
    let mut known: BTreeMap<NodeName, Together> = BTreeMap::new();
    let disk = |node: &NodeName| {
        let readings = history.get(&Subject::Node(node.clone()))?;
        match &readings.last()?.reading {
            Reading::Node(reading) => reading.disk()?.write,
            Reading::Link(_) => None,
        }
    };
    for (subject, readings) in history {
        let Subject::Link(pair) = subject else { continue };
        for measurement in readings.iter().rev() {
            let Reading::Link(link) = &measurement.reading else {
                continue;
            };
            let ways = [
                (&pair.from, &pair.to, &link.forward, &link.forward_kept),
                (&pair.to, &pair.from, &link.backward, &link.backward_kept),
            ];
            for (from, to, alone, kept) in ways {
                let (Some(kept), Some(network)) = (kept, alone_with(alone, kept)) else {
                    continue;
                };
                if known
                    .get(to)
                    .is_some_and(|known| known.unix_ms >= measurement.unix_ms)
                {
                    continue;
                }
                let together = Together {
                    from: from.clone(),
                    network,
                    disk: disk(to),
                    both: kept.rate,
                    unix_ms: measurement.unix_ms,
                };
                known.insert(to.clone(), together);
            }
        }
    }
    known
}

/// The network alone with as many streams as there were with the disk, else at its best.
fn alone_with(alone: &[StreamReading], kept: &Option<StreamReading>) -> Option<Rate> {
    let streams = kept.as_ref()?.streams;
    alone
        .iter()
        .find(|reading| reading.streams == streams)
        .or(LinkReading::best(alone))
        .map(|reading| reading.rate)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{DiskReading, Measurement, NodeReading, Pair};
    use crate::units::ByteCount;

    fn mb(rate: f64) -> Rate {
        Rate::from_bytes_per_second(rate * 1e6)
    }

    fn together(network: f64, disk: f64, both: f64) -> Together {
        Together {
            from: "n0".parse().unwrap(),
            network: mb(network),
            disk: Some(mb(disk)),
            both: mb(both),
            unix_ms: 1,
        }
    }

    #[test]
    fn who_takes_turns_is_told() {
        // The case of nettee's users.
        let turns = together(11.7, 17.0, 7.4);
        assert_eq!(
            turns.words(&"n1".parse().unwrap()).unwrap(),
            "n1 takes turns: from the network to the disk 7.40 MB/s, where side by side would give 11.7 MB/s and in \
             turns 6.93 MB/s"
        );
        assert!(!together(11.7, 17.0, 11.5).takes_turns());
        assert!(
            !together(11.7, 17.0, 9.5).takes_turns(),
            "nearer to the slower of both"
        );
        // With a disk much faster than the network both figures are the same, and noise is no verdict.
        assert!(!together(117.0, 2000.0, 109.0).takes_turns());
        assert!(together(117.0, 2000.0, 60.0).takes_turns());
        let unknown = Together {
            disk: None,
            ..together(11.7, 1.0, 1.0)
        };
        assert_eq!((unknown.least(), unknown.takes_turns()), (None, false));
    }

    fn stream(streams: u16, rate: f64) -> StreamReading {
        StreamReading {
            streams,
            window: ByteCount(0),
            rate: mb(rate),
            bytes: ByteCount(1),
            retransmissions: 0,
        }
    }

    #[test]
    fn the_newest_look_at_a_node_counts() {
        let pair = |from: &str, to: &str| Pair {
            from: from.parse().unwrap(),
            to: to.parse().unwrap(),
        };
        let link = |pair: Pair, unix_ms, forward_kept, backward_kept| Measurement {
            subject: Subject::Link(pair),
            unix_ms,
            reading: Reading::Link(Box::new(LinkReading {
                forward: vec![stream(1, 60.0), stream(2, 110.0), stream(4, 112.0)],
                backward: vec![stream(1, 117.0)],
                forward_kept,
                backward_kept,
                ..LinkReading::default()
            })),
        };
        let disk = Measurement {
            subject: Subject::Node("n1".parse().unwrap()),
            unix_ms: 1,
            reading: Reading::Node(Box::new(NodeReading {
                disks: vec![DiskReading {
                    root: "main".parse().unwrap(),
                    write: Some(mb(200.0)),
                    read: None,
                    skipped: String::new(),
                }],
                ..NodeReading::default()
            })),
        };
        let mut history = History::new();
        for measurement in [
            disk,
            link(
                pair("n0", "n1"),
                10,
                Some(stream(2, 100.0)),
                Some(stream(1, 90.0)),
            ),
            // Links only.
            link(pair("n0", "n1"), 20, None, None),
            link(pair("n1", "n2"), 5, None, Some(stream(1, 50.0))),
        ] {
            history
                .entry(measurement.subject.clone())
                .or_default()
                .push(measurement);
        }
        let known = known(&history);
        let names: Vec<&str> = known.keys().map(NodeName::as_str).collect();
        assert_eq!(names, ["n0", "n1"]);
        let one = &known[&"n1".parse().unwrap()];
        assert_eq!(
            (one.from.as_str(), one.network, one.both),
            ("n0", mb(110.0), mb(100.0))
        );
        assert_eq!((one.disk, one.unix_ms), (Some(mb(200.0)), 10));
        assert_eq!(known[&"n0".parse().unwrap()].disk, None);
    }
}
