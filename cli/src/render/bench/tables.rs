//! What was measured, for people: a table of nodes and one of links.

use std::io::{self, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use stage_core::bench::{LinkReading, Measurement, Reading, StreamReading, Subject};
use stage_core::units::{Rate, show_time};
use stage_proto::v1;

use super::lines::product;

/// All of it; ages are reckoned from `now`.
pub(super) fn tables(
    out: &mut impl Write,
    measured: &[(Measurement, v1::Measured)],
    now: SystemTime,
) -> io::Result<()> {
    let age = |measurement: &Measurement| {
        let then = UNIX_EPOCH + Duration::from_millis(measurement.unix_ms);
        let age = now.duration_since(then).unwrap_or_default();
        if age < Duration::from_secs(1) {
            return "now".to_owned();
        }
        show_time(age).to_string()
    };
    let or_dash = |rate: Option<Rate>| rate.map_or("-".to_owned(), |rate| rate.in_bytes().to_string());
    let mut nodes = super::super::table::plain(
        &[
            "node",
            "age",
            "load",
            "root",
            "write",
            "read",
            "BLAKE3",
            "SHA-256",
            "AES-GCM",
            "interface",
            "MTU",
            "windows",
        ],
        &[1, 2, 4, 5, 6, 7, 8, 10],
    );
    let mut links = super::super::table::plain(
        &[
            "from",
            "to",
            "age",
            "RTT",
            "spread",
            "there",
            "streams",
            "back",
            "streams",
            "sent again",
            "BW x delay",
        ],
        &[2, 3, 4, 5, 6, 7, 8, 9, 10],
    );
    let mut counts = [0, 0];
    for (measurement, wire) in measured {
        match (&measurement.subject, &measurement.reading) {
            (Subject::Node(node), Reading::Node(reading)) => {
                counts[0] += 1;
                let host = &reading.host;
                for (at, disk) in reading.disks.iter().enumerate() {
                    let first = |text: String| if at == 0 { text } else { String::new() };
                    let speed = host
                        .nic
                        .map_or(String::new(), |nic| format!(" {}", nic.in_bits()));
                    nodes.add_row([
                        first(node.to_string()),
                        first(age(measurement)),
                        first(format!("{:.2}", host.load)),
                        disk.root.to_string(),
                        or_dash(disk.write),
                        or_dash(disk.read),
                        first(reading.blake3.in_bytes().to_string()),
                        first(reading.sha256.in_bytes().to_string()),
                        first(reading.aes_gcm.in_bytes().to_string()),
                        first(format!("{}{speed}", host.interface)),
                        first(host.mtu.to_string()),
                        first(format!("{} / {}", host.windows.receive, host.windows.send)),
                    ]);
                }
            }
            (Subject::Link(pair), Reading::Link(reading)) => {
                counts[1] += 1;
                let best = |readings| or_dash(LinkReading::best(readings).map(|best| best.rate));
                let enough = |readings| {
                    LinkReading::enough(readings).map_or("-".to_owned(), |count| count.to_string())
                };
                let lost = [&reading.forward, &reading.backward]
                    .into_iter()
                    .filter_map(|readings| LinkReading::best(readings))
                    .map(StreamReading::loss)
                    .fold(0.0, f64::max);
                links.add_row([
                    pair.from.to_string(),
                    pair.to.to_string(),
                    age(measurement),
                    show_time(reading.rtt.median).to_string(),
                    show_time(reading.rtt.spread).to_string(),
                    best(&reading.forward),
                    enough(&reading.forward),
                    best(&reading.backward),
                    enough(&reading.backward),
                    format!("{:.2} %", lost * 100.0),
                    product(reading, wire).to_string(),
                ]);
            }
            _ => {}
        }
    }
    if counts == [0, 0] {
        return writeln!(out, "nothing is known");
    }
    if counts[0] > 0 {
        super::super::table::write(out, &nodes)?;
    }
    if counts[0] > 0 && counts[1] > 0 {
        writeln!(out)?;
    }
    if counts[1] > 0 {
        super::super::table::write(out, &links)?;
    }
    for (measurement, _) in measured {
        if let (Subject::Node(node), Reading::Node(reading)) = (&measurement.subject, &measurement.reading) {
            for disk in reading.disks.iter().filter(|disk| !disk.skipped.is_empty()) {
                writeln!(
                    out,
                    "{node}: root {} was not measured: {}",
                    disk.root, disk.skipped
                )?;
            }
        }
    }
    Ok(())
}
