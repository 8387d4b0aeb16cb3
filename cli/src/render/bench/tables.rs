//! What was measured, for people: a table of nodes, one of links, one of network and disk at once, and each link's way.

use std::io::{self, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use comfy_table::Table;
use stage_core::bench::together::Together;
use stage_core::bench::{
    LinkReading, Measurement, NodeReading, Pair, Reading, StreamReading, Subject, route,
};
use stage_core::id::NodeName;
use stage_core::units::{Rate, show_time};
use stage_proto::v1;

use super::super::table::{plain, write};
use super::lines::product;

/// All of it; ages are reckoned from `now`.
pub(super) fn tables(
    out: &mut impl Write,
    measured: &[(Measurement, v1::Measured)],
    now: SystemTime,
) -> io::Result<()> {
    let (mut nodes, mut links, mut together) = (node_table(), link_table(), together_table());
    let (mut ways, mut skipped) = (Vec::new(), Vec::new());
    for (measurement, wire) in measured {
        let age = age(now, measurement.unix_ms);
        match (&measurement.subject, &measurement.reading) {
            (Subject::Node(node), Reading::Node(reading)) => {
                add_node(&mut nodes, node, reading, &age);
                // What this release cannot read it does not show.
                if let Some(Ok(both)) = wire.together.as_ref().map(Together::try_from) {
                    add_together(&mut together, node, &both, now);
                }
                for disk in reading.disks.iter().filter(|disk| !disk.skipped.is_empty()) {
                    skipped.push(format!(
                        "{node}: root {} was not measured: {}",
                        disk.root, disk.skipped
                    ));
                }
            }
            (Subject::Link(pair), Reading::Link(reading)) => {
                add_link(&mut links, pair, reading, wire, &age);
                ways.push(route::words(pair, reading));
            }
            _ => {}
        }
    }
    let mut is_first = true;
    for table in [nodes, together, links] {
        if table.row_count() == 0 {
            continue;
        }
        if !is_first {
            writeln!(out)?;
        }
        is_first = false;
        write(out, &table)?;
    }
    if is_first {
        return writeln!(out, "nothing is known");
    }
    for lines in [ways, skipped] {
        if !lines.is_empty() {
            writeln!(out)?;
        }
        for line in lines {
            writeln!(out, "{line}")?;
        }
    }
    Ok(())
}

fn age(now: SystemTime, unix_ms: u64) -> String {
    let then = UNIX_EPOCH + Duration::from_millis(unix_ms);
    let age = now.duration_since(then).unwrap_or_default();
    if age < Duration::from_secs(1) {
        return "now".to_owned();
    }
    show_time(age).to_string()
}

fn or_dash(rate: Option<Rate>) -> String {
    rate.map_or("-".to_owned(), |rate| rate.in_bytes().to_string())
}

fn node_table() -> Table {
    plain(
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
    )
}

fn add_node(table: &mut Table, node: &NodeName, reading: &NodeReading, age: &str) {
    let host = &reading.host;
    for (at, disk) in reading.disks.iter().enumerate() {
        let first = |text: String| if at == 0 { text } else { String::new() };
        let speed = host
            .nic
            .map_or(String::new(), |nic| format!(" {}", nic.in_bits()));
        table.add_row([
            first(node.to_string()),
            first(age.to_owned()),
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

fn together_table() -> Table {
    plain(
        &[
            "node",
            "age",
            "from",
            "network",
            "disk",
            "network to disk",
            "side by side",
            "in turns",
        ],
        &[1, 3, 4, 5, 6, 7],
    )
}

fn add_together(table: &mut Table, node: &NodeName, both: &Together, now: SystemTime) {
    table.add_row([
        node.to_string(),
        age(now, both.unix_ms),
        both.from.to_string(),
        or_dash(Some(both.network)),
        or_dash(both.disk),
        or_dash(Some(both.both)),
        or_dash(both.least()),
        or_dash(both.in_turns()),
    ]);
}

fn link_table() -> Table {
    plain(
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
    )
}

fn add_link(table: &mut Table, pair: &Pair, reading: &LinkReading, wire: &v1::Measured, age: &str) {
    let best = |readings| or_dash(LinkReading::best(readings).map(|best| best.rate));
    let enough = |readings| LinkReading::enough(readings).map_or("-".to_owned(), |count| count.to_string());
    let lost = [&reading.forward, &reading.backward]
        .into_iter()
        .filter_map(|readings| LinkReading::best(readings))
        .map(StreamReading::loss)
        .fold(0.0, f64::max);
    table.add_row([
        pair.from.to_string(),
        pair.to.to_string(),
        age.to_owned(),
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
