//! What was measured, for scripts: an object a line, with plain numbers.

use serde_json::{Value, json};
use stage_core::bench::together::Together;
use stage_core::bench::{
    DiskReading, LinkReading, Measurement, NodeReading, Reading, StreamReading, Subject,
};
use stage_core::units::{ByteCount, Rate};
use stage_proto::v1;

/// What was measured of one thing.
pub(super) fn object(measurement: &Measurement, wire: &v1::Measured) -> Value {
    let mut object = match (&measurement.subject, &measurement.reading) {
        (Subject::Node(node), Reading::Node(reading)) => {
            let mut object = node_object(node.as_str(), reading);
            let known = wire
                .together
                .as_ref()
                .and_then(|both| Together::try_from(both).ok());
            object["network_to_disk"] = known.as_ref().map_or(Value::Null, together);
            object
        }
        (Subject::Link(pair), Reading::Link(reading)) => json!({
            "event": "link",
            "node": pair.from,
            "to": pair.to,
            "rtt_min_seconds": reading.rtt.min.as_secs_f64(),
            "rtt_seconds": reading.rtt.median.as_secs_f64(),
            "rtt_spread_seconds": reading.rtt.spread.as_secs_f64(),
            "forward": streams(&reading.forward),
            "backward": streams(&reading.backward),
            "wire_bytes_per_second": wire.wire_bytes_per_second,
            "bandwidth_delay_bytes": product(reading, wire).0,
            "hops": wire.hops,
            "switches": reading.switches,
            "routers": reading.trace.routers,
            "routers_from": if reading.trace.from_second { &pair.to } else { &pair.from },
            "reached": reading.trace.reached,
            "path_mtu": (reading.trace.mtu > 0).then_some(reading.trace.mtu),
            "larger_vanish": reading.trace.swallows,
            "congestion_control": reading.control,
            "forward_to_disk": reading.forward_kept.as_ref().map(stream),
            "backward_to_disk": reading.backward_kept.as_ref().map(stream),
        }),
        _ => json!({}),
    };
    object["measured_unix_ms"] = measurement.unix_ms.into();
    object["readings"] = wire.readings.into();
    object
}

fn node_object(node: &str, reading: &NodeReading) -> Value {
    let host = &reading.host;
    let rate = |rate: Rate| rate.bytes_per_second();
    let disk = |disk: &DiskReading| {
        json!({
            "root": disk.root,
            "write_bytes_per_second": disk.write.map(rate),
            "read_bytes_per_second": disk.read.map(rate),
            "skipped": (!disk.skipped.is_empty()).then_some(&disk.skipped),
        })
    };
    json!({
        "event": "node",
        "node": node,
        "disks": reading.disks.iter().map(disk).collect::<Vec<_>>(),
        "blake3_bytes_per_second": rate(reading.blake3),
        "sha256_bytes_per_second": rate(reading.sha256),
        "aes_gcm_bytes_per_second": rate(reading.aes_gcm),
        "cpus": host.cpus,
        "load": host.load,
        "interface": host.interface,
        "nic_bits_per_second": host.nic.map(Rate::bits_per_second),
        "mtu": host.mtu,
        "tcp_rmem_bytes": host.windows.receive.0,
        "tcp_wmem_bytes": host.windows.send.0,
        "rmem_max_bytes": host.socket_windows.receive.0,
        "wmem_max_bytes": host.socket_windows.send.0,
        "congestion_control": host.congestion_control,
        "congestion_controls": host.congestion_controls,
        "mtu_probing": host.mtu_probing,
        "version": host.version,
        "kernel": host.kernel,
    })
}

/// Network and disk, alone and at once.
fn together(both: &Together) -> Value {
    let rate = |rate: Option<Rate>| rate.map(Rate::bytes_per_second);
    json!({
        "from": both.from,
        "network_bytes_per_second": both.network.bytes_per_second(),
        "disk_bytes_per_second": rate(both.disk),
        "bytes_per_second": both.both.bytes_per_second(),
        "least_bytes_per_second": rate(both.least()),
        "in_turns_bytes_per_second": rate(both.in_turns()),
        "takes_turns": both.takes_turns(),
        "measured_unix_ms": both.unix_ms,
    })
}

fn streams(readings: &[StreamReading]) -> Vec<Value> {
    readings.iter().map(stream).collect()
}

fn stream(reading: &StreamReading) -> Value {
    json!({
        "streams": reading.streams,
        "bytes_per_second": reading.rate.bytes_per_second(),
        "window_bytes": (reading.window.0 > 0).then_some(reading.window.0),
        "retransmissions": reading.retransmissions,
        "loss": reading.loss(),
    })
}

/// Bandwidth × delay: what must be under way to fill the way.
pub(super) fn product(reading: &LinkReading, wire: &v1::Measured) -> ByteCount {
    ByteCount((wire.wire_bytes_per_second * reading.rtt.median.as_secs_f64()) as u64)
}
