//! Golden plans: each file in `tests/plans/` holds a topology and requests, each with the plan that it must give.
//!
//! `UPDATE_PLANS=1 cargo test -p stage-core --test plans` writes the plans anew; read the difference before you commit.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test may fail where it stands, and read its cases"
)]

use std::fmt::Write as _;
use std::path::Path;

use stage_core::bench::facts::lay;
use stage_core::bench::{LinkReading, Measurement, Pair, Reading, Rtt, StreamReading, Subject};
use stage_core::id::NodeName;
use stage_core::plan::{Facts, Plan, Request, WindowLimits, plan};
use stage_core::simulate::{Trial, simulate};
use stage_core::topology::Topology;
use stage_core::units::{ByteCount, Rate, parse_time, show_time};

/// Reads a request: one word and its values a line.
fn request(topology: &Topology, text: &str) -> (Request, Facts) {
    let name = |text: &str| text.parse::<NodeName>().unwrap();
    let mut request = Request {
        source: name("n0"),
        targets: Vec::new(),
        size: ByteCount(1 << 30),
        shape: "auto".parse().unwrap(),
        streams: None,
        limit: None,
        source_limit: None,
        encrypted: false,
    };
    let mut facts = Facts::default();
    let mut measured = Vec::new();
    for line in text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
    {
        let (word, value) = line.split_once(' ').unwrap_or((line, ""));
        let of_node = || {
            value
                .split_once(' ')
                .map(|(node, value)| (name(node), value))
                .unwrap()
        };
        match word {
            "from" => request.source = name(value),
            "to" => request.targets = topology.select(value, &Default::default()).unwrap(),
            "size" => request.size = value.parse().unwrap(),
            "shape" => request.shape = value.parse().unwrap(),
            "streams" => request.streams = Some(value.parse().unwrap()),
            "limit" => request.limit = Some(value.parse().unwrap()),
            "source-limit" => request.source_limit = Some(value.parse().unwrap()),
            "encrypted" => request.encrypted = true,
            "disk-write" => {
                let (node, rate) = of_node();
                facts.nodes.entry(node).or_default().disk_write = Some(rate.parse().unwrap());
            }
            "disk-read" => {
                let (node, rate) = of_node();
                facts.nodes.entry(node).or_default().disk_read = Some(rate.parse().unwrap());
            }
            "windows" => {
                let (node, sizes) = of_node();
                let (receive, send) = sizes.split_once(", ").unwrap();
                let windows = WindowLimits {
                    receive: receive.parse().unwrap(),
                    send: send.parse().unwrap(),
                };
                facts.nodes.entry(node).or_default().windows = Some(windows);
            }
            "rtt" => {
                let (parent, rest) = of_node();
                let (child, time) = rest.split_once(' ').unwrap();
                facts
                    .rtts
                    .insert((parent, name(child)), parse_time(time).unwrap());
            }
            // As `stage bench` would have it: the MB/s of 1, 2, 4 … streams each way, what share was sent again.
            "measured" => measured.push(measurement(value)),
            other => panic!("{other:?} is not a word of a request"),
        }
    }
    lay(&mut facts, topology, &measured.iter().collect::<Vec<_>>(), 0);
    (request, facts)
}

/// "n0 n1 100 ms | 60, 110, 112 | 117 | 0.001"
fn measurement(text: &str) -> Measurement {
    let mut parts = text.split('|').map(str::trim);
    let mut head = parts.next().unwrap().splitn(3, ' ');
    let pair = Pair {
        from: head.next().unwrap().parse().unwrap(),
        to: head.next().unwrap().parse().unwrap(),
    };
    let rtt = parse_time(head.next().unwrap()).unwrap();
    let [forward, backward] = [parts.next().unwrap(), parts.next().unwrap()];
    let lost: f64 = parts.next().unwrap().parse().unwrap();
    let rates = |text: &str| -> Vec<StreamReading> {
        let streams = std::iter::successors(Some(1), |count| Some(count * 2));
        text.split(", ")
            .zip(streams)
            .map(|(mb, streams)| StreamReading {
                streams,
                window: ByteCount(0),
                rate: Rate::from_bytes_per_second(mb.parse::<f64>().unwrap() * 1e6),
                bytes: ByteCount(1_448_000_000),
                retransmissions: (lost * 1e6) as u64,
            })
            .collect()
    };
    Measurement {
        subject: Subject::Link(pair),
        unix_ms: 0,
        reading: Reading::Link(Box::new(LinkReading {
            rtt: Rtt::of(vec![rtt]),
            forward: rates(forward),
            backward: rates(backward),
            ..LinkReading::default()
        })),
    }
}

fn show(plan: &Plan) -> String {
    let mut text = String::new();
    let (predicted, bound) = (show_time(plan.predicted), show_time(plan.bound));
    writeln!(
        text,
        "{}, depth {}, forecast {predicted}, bound {bound}",
        plan.shape, plan.depth
    )
    .unwrap();
    writeln!(text, "{}", plan.reason).unwrap();
    for hop in &plan.hops {
        let fallbacks: Vec<&str> = hop.fallbacks.iter().map(NodeName::as_str).collect();
        let fallbacks = if fallbacks.is_empty() {
            String::new()
        } else {
            format!(" (or {})", fallbacks.join(", "))
        };
        writeln!(
            text,
            "{} <- {}{fallbacks}: {}/{} streams, {}, {}, {}",
            hop.child,
            hop.parent,
            hop.streams,
            hop.streams_cap,
            hop.rate.in_bytes(),
            show_time(hop.finish),
            hop.limited_by,
        )
        .unwrap();
    }
    text
}

/// Checks one file; gives it as it ought to be.
fn replay(path: &Path) -> (String, String) {
    let text = std::fs::read_to_string(path).unwrap();
    let mut parts = text.split("\n=== request\n");
    let head = parts.next().unwrap();
    let topology =
        Topology::parse(&path.display().to_string(), head).unwrap_or_else(|errors| panic!("{errors:?}"));
    let mut anew = head.to_owned();
    for part in parts {
        let (asked, _) = part.split_once("\n=== plan\n").unwrap_or((part.trim_end(), ""));
        let (request, facts) = request(&topology, asked);
        let outcome = match plan(&topology, &request, &facts) {
            Ok(plan) => show(&plan),
            Err(error) => format!("{error}\n"),
        };
        write!(anew, "\n=== request\n{asked}\n=== plan\n{outcome}").unwrap();
    }
    (text, anew)
}

#[test]
fn plans_are_as_written() {
    let update = std::env::var_os("UPDATE_PLANS").is_some();
    let mut paths: Vec<_> = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plans"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    assert!(!paths.is_empty(), "the plans are gone");
    for path in paths {
        let (text, anew) = replay(&path);
        if update {
            std::fs::write(&path, anew).unwrap();
        } else {
            assert_eq!(text, anew, "{} gives another plan now", path.display());
        }
    }
}

/// Every hop of every plan, against the same plan tried flow by flow.
#[test]
fn forecasts_come_true_in_simulation() {
    let mut wrong = String::new();
    let mut tried = 0;
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plans")).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let mut parts = text.split("\n=== request\n");
        let topology = Topology::parse("golden.toml", parts.next().unwrap()).unwrap();
        for part in parts {
            let (request, facts) = request(&topology, part.split_once("\n=== plan\n").unwrap().0);
            let Ok(plan) = plan(&topology, &request, &facts) else {
                continue;
            };
            let trial = Trial {
                topology: &topology,
                request: &request,
                facts: &facts,
                faults: &[],
                spread: 0.0,
                seed: 0,
            };
            let outcome = simulate(&plan, &trial).unwrap();
            for (hop, (_, finish)) in plan.hops.iter().zip(&outcome.finishes) {
                tried += 1;
                let (forecast, tried) = (hop.finish.as_secs_f64(), finish.unwrap().as_secs_f64());
                if (forecast / tried - 1.0).abs() > 0.03 {
                    writeln!(
                        wrong,
                        "{}: {} {} of {}: forecast {forecast:.3} s, simulated {tried:.3} s",
                        path.display(),
                        plan.shape,
                        hop.child,
                        request.size
                    )
                    .unwrap();
                }
            }
        }
    }
    assert!(tried > 50, "{tried} hops only");
    assert!(wrong.is_empty(), "{wrong}");
}
