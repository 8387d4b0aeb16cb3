//! The way between two nodes in words, and whether it is another one than before.

use std::net::IpAddr;

use super::{LinkReading, Measurement, Pair, Reading, Trace};

/// "n0 → rack1 → core → rack2 → n3".
fn switches(pair: &Pair, reading: &LinkReading) -> String {
    let switches = reading.switches.iter().map(|switch| switch.as_str());
    let names: Vec<&str> = std::iter::once(pair.from.as_str())
        .chain(switches)
        .chain([pair.to.as_str()])
        .collect();
    names.join(" → ")
}

/// "10.0.0.254, *, 10.0.2.9": the routers and the host itself.
fn routers(trace: &Trace) -> String {
    let mut names: Vec<String> = trace
        .routers
        .iter()
        .map(|router| router.map_or("*".to_owned(), |router| router.to_string()))
        .collect();
    if !trace.reached {
        names.push("…".to_owned());
    }
    names.join(", ")
}

/// What is known of the way: its switches as the topology has them, its routers and its largest packet as they were met.
pub fn words(pair: &Pair, reading: &LinkReading) -> String {
    let mut text = switches(pair, reading);
    let trace = &reading.trace;
    match trace.routers.len() {
        0 => {}
        1 if trace.reached => text += "; no router",
        _ => {
            let from = if trace.from_second { &pair.to } else { &pair.from };
            text += &format!("; by routers from {from}: {}", routers(trace));
        }
    }
    if trace.mtu > 0 {
        text += &format!("; MTU {}", trace.mtu);
        if trace.swallows {
            text += ", larger packets vanish";
        }
    }
    text
}

/// Whether two looks at a way met other routers. One who said nothing may have been any.
fn differ(one: &Trace, other: &Trace) -> bool {
    let is_other =
        |(one, other): (&Option<IpAddr>, &Option<IpAddr>)| one.is_some() && other.is_some() && one != other;
    one.routers.iter().zip(&other.routers).any(is_other)
        || one.reached && other.reached && one.routers.len() != other.routers.len()
}

/// How the way differs from that of the reading before, if it does. `readings` are those of the pair, oldest first.
pub fn changed(pair: &Pair, readings: &[Measurement]) -> Vec<String> {
    let mut links = readings.iter().rev().filter_map(|one| match &one.reading {
        Reading::Link(link) => Some(&**link),
        Reading::Node(_) => None,
    });
    let Some(now) = links.next() else {
        return Vec::new();
    };
    let earlier: Vec<&LinkReading> = links.collect();
    let mut said = Vec::new();
    let before = earlier.iter().find(|before| !before.switches.is_empty());
    if let Some(before) = before
        && !now.switches.is_empty()
        && before.switches != now.switches
    {
        said.push(format!(
            "the way is {} now; when it was measured before, it was {}",
            switches(pair, now),
            switches(pair, before)
        ));
    }
    let seen = |trace: &Trace| !trace.routers.is_empty();
    let before = earlier
        .iter()
        .map(|before| &before.trace)
        .find(|before| seen(before) && before.from_second == now.trace.from_second);
    if let Some(before) = before
        && seen(&now.trace)
        && differ(before, &now.trace)
    {
        let (from, to) = if now.trace.from_second {
            (&pair.to, &pair.from)
        } else {
            (&pair.from, &pair.to)
        };
        said.push(format!(
            "packets from {from} to {to} pass {} now; before, they passed {}",
            routers(&now.trace),
            routers(before)
        ));
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Subject;

    fn pair() -> Pair {
        Pair {
            from: "n0".parse().unwrap(),
            to: "n1".parse().unwrap(),
        }
    }

    fn reading(switches: &[&str], routers: &[&str]) -> LinkReading {
        LinkReading {
            switches: switches.iter().map(|name| name.parse().unwrap()).collect(),
            trace: Trace {
                routers: routers.iter().map(|router| router.parse().ok()).collect(),
                reached: true,
                mtu: 1500,
                ..Trace::default()
            },
            ..LinkReading::default()
        }
    }

    fn said(readings: &[LinkReading]) -> Vec<String> {
        let readings: Vec<Measurement> = readings
            .iter()
            .map(|reading| Measurement {
                subject: Subject::Link(pair()),
                unix_ms: 1,
                reading: Reading::Link(Box::new(reading.clone())),
            })
            .collect();
        changed(&pair(), &readings)
    }

    #[test]
    fn a_way_reads_from_end_to_end() {
        let direct = reading(&["s"], &["10.0.0.2"]);
        assert_eq!(words(&pair(), &direct), "n0 → s → n1; no router; MTU 1500");
        let mut far = reading(&["a", "b"], &["10.0.0.254", "*", "10.9.0.2"]);
        far.trace.swallows = true;
        assert_eq!(
            words(&pair(), &far),
            "n0 → a → b → n1; by routers from n0: 10.0.0.254, *, 10.9.0.2; MTU 1500, larger packets vanish"
        );
        far.trace = Trace {
            routers: vec![Some("10.0.0.254".parse().unwrap())],
            ..Trace::default()
        };
        assert_eq!(
            words(&pair(), &far),
            "n0 → a → b → n1; by routers from n0: 10.0.0.254, …"
        );
        assert_eq!(words(&pair(), &LinkReading::default()), "n0 → n1");
    }

    #[test]
    fn another_way_is_said() {
        let before = reading(&["a", "b"], &["10.0.0.254", "10.1.0.1", "10.9.0.2"]);
        assert_eq!(said(&[before.clone(), before.clone()]), [""; 0]);
        assert_eq!(said(std::slice::from_ref(&before)), [""; 0]);
        let other = reading(&["a", "c"], &["10.0.0.254", "10.2.0.1", "10.9.0.2"]);
        assert_eq!(
            said(&[before.clone(), other.clone()]),
            [
                "the way is n0 → a → c → n1 now; when it was measured before, it was n0 → a → b → n1",
                "packets from n0 to n1 pass 10.0.0.254, 10.2.0.1, 10.9.0.2 now; before, they passed \
                 10.0.0.254, 10.1.0.1, 10.9.0.2"
            ]
        );
        // It has been said; what is so for two readings is no news.
        assert_eq!(said(&[before.clone(), other.clone(), other]), [""; 0]);
        // Who said nothing may have been the same; and where nothing was seen, the one before that counts.
        let quiet = reading(&["a", "b"], &["10.0.0.254", "*", "10.9.0.2"]);
        assert_eq!(said(&[before.clone(), quiet]), [""; 0]);
        let longer = reading(&["a", "b"], &["10.0.0.254", "10.1.0.1", "10.1.0.2", "10.9.0.2"]);
        assert_eq!(said(&[before.clone(), LinkReading::default(), longer]).len(), 1);
        // Seen from the other end it is another list.
        let mut back = before.reversed();
        back.switches = before.switches.clone();
        back.trace.routers.reverse();
        assert_eq!(said(&[before, back]), [""; 0]);
    }
}
