//! Measurements, and the questions that ask for them.

use std::net::IpAddr;

use stage_core::bench::together::Together;
use stage_core::bench::{
    DiskReading, HostReport, Keep, LinkProbe, LinkReading, Measurement, NodeReading, Pair, Reading,
    RootSpace, Rtt, Side, StreamReading, Subject, Trace,
};
use stage_core::id::JobKey;
use stage_core::units::{ByteCount, Rate};

use super::{WireError, array, fault, optional, parse, required, seconds, streams16, text};
use crate::v1;

impl From<&LinkProbe> for v1::ProbeLink {
    fn from(probe: &LinkProbe) -> Self {
        use v1::probe_link::Side as Wire;
        Self {
            id: probe.id.to_string(),
            key: probe.key.0.to_vec(),
            side: Some(match &probe.side {
                Side::Answer { from } => Wire::AnswerTo(from.to_string()),
                Side::Measure {
                    peer,
                    depth,
                    sweep,
                    keep,
                    control,
                } => Wire::Measure(v1::MeasureLink {
                    peer: Some(peer.into()),
                    depth: depth.to_string(),
                    sweep: *sweep,
                    keep_here: keep.here,
                    keep_there: keep.there,
                    congestion_control: text(control.as_ref()),
                }),
            }),
        }
    }
}

impl TryFrom<&v1::ProbeLink> for LinkProbe {
    type Error = WireError;
    fn try_from(wire: &v1::ProbeLink) -> Result<Self, WireError> {
        use v1::probe_link::Side as Wire;
        Ok(Self {
            id: parse("probe_link.id", &wire.id)?,
            key: JobKey(array("probe_link.key", &wire.key)?),
            side: match required("probe_link.side", wire.side.as_ref())? {
                Wire::AnswerTo(from) => Side::Answer {
                    from: parse("probe_link.answer_to", from)?,
                },
                Wire::Measure(measure) => Side::Measure {
                    peer: required("measure.peer", measure.peer.as_ref())?.try_into()?,
                    depth: parse("measure.depth", &measure.depth)?,
                    sweep: measure.sweep,
                    keep: Keep {
                        here: measure.keep_here,
                        there: measure.keep_there,
                    },
                    control: optional("measure.congestion_control", &measure.congestion_control)?,
                },
            },
        })
    }
}

/// A rate that is 0 where there is none.
fn rate(bytes_per_second: f64) -> Option<Rate> {
    (bytes_per_second > 0.0 && bytes_per_second.is_finite())
        .then(|| Rate::from_bytes_per_second(bytes_per_second))
}

fn rate_out(rate: Option<Rate>) -> f64 {
    rate.map_or(0.0, Rate::bytes_per_second)
}

impl From<&HostReport> for v1::HostReport {
    fn from(host: &HostReport) -> Self {
        Self {
            version: host.version.clone(),
            kernel: host.kernel.clone(),
            cpus: host.cpus,
            load: host.load,
            interface: host.interface.clone(),
            nic_bytes_per_second: rate_out(host.nic),
            mtu: host.mtu,
            windows: Some(host.windows.into()),
            socket_windows: Some(host.socket_windows.into()),
            window_scaling: host.window_scaling,
            backlog_packets: host.backlog,
            congestion_controls: host.congestion_controls.clone(),
            congestion_control: host.congestion_control.clone(),
            descriptors: host.descriptors,
            unix_ms: host.unix_ms,
            resolves_to: host.resolves_to.clone(),
            roots: host.roots.iter().map(Into::into).collect(),
            mtu_probing: host.mtu_probing,
            governor: host.governor.clone(),
        }
    }
}

impl TryFrom<&v1::HostReport> for HostReport {
    type Error = WireError;
    fn try_from(wire: &v1::HostReport) -> Result<Self, WireError> {
        Ok(Self {
            version: wire.version.clone(),
            kernel: wire.kernel.clone(),
            cpus: wire.cpus,
            load: if wire.load.is_finite() { wire.load } else { 0.0 },
            interface: wire.interface.clone(),
            nic: rate(wire.nic_bytes_per_second),
            mtu: wire.mtu,
            windows: required("host.windows", wire.windows.as_ref())?.into(),
            socket_windows: required("host.socket_windows", wire.socket_windows.as_ref())?.into(),
            window_scaling: wire.window_scaling,
            backlog: wire.backlog_packets,
            congestion_controls: wire.congestion_controls.clone(),
            congestion_control: wire.congestion_control.clone(),
            descriptors: wire.descriptors,
            unix_ms: wire.unix_ms,
            resolves_to: wire.resolves_to.clone(),
            mtu_probing: wire.mtu_probing,
            governor: wire.governor.clone(),
            roots: wire
                .roots
                .iter()
                .map(TryInto::try_into)
                .collect::<Result<_, _>>()?,
        })
    }
}

impl From<&RootSpace> for v1::RootSpace {
    fn from(root: &RootSpace) -> Self {
        Self {
            name: root.name.to_string(),
            path: root.path.clone(),
            free_bytes: root.free.0,
            total_bytes: root.total.0,
            failure: root.failure.as_ref().map(Into::into),
        }
    }
}

impl TryFrom<&v1::RootSpace> for RootSpace {
    type Error = WireError;
    fn try_from(wire: &v1::RootSpace) -> Result<Self, WireError> {
        Ok(Self {
            name: parse("root.name", &wire.name)?,
            path: wire.path.clone(),
            free: ByteCount(wire.free_bytes),
            total: ByteCount(wire.total_bytes),
            failure: wire.failure.as_ref().map(Into::into),
        })
    }
}

impl From<&NodeReading> for v1::NodeReading {
    fn from(reading: &NodeReading) -> Self {
        Self {
            host: Some((&reading.host).into()),
            disks: reading
                .disks
                .iter()
                .map(|disk| v1::DiskReading {
                    root: disk.root.to_string(),
                    write_bytes_per_second: rate_out(disk.write),
                    read_bytes_per_second: rate_out(disk.read),
                    skipped: disk.skipped.clone(),
                })
                .collect(),
            blake3_bytes_per_second: reading.blake3.bytes_per_second(),
            sha256_bytes_per_second: reading.sha256.bytes_per_second(),
            aes_gcm_bytes_per_second: reading.aes_gcm.bytes_per_second(),
        }
    }
}

impl TryFrom<&v1::NodeReading> for NodeReading {
    type Error = WireError;
    fn try_from(wire: &v1::NodeReading) -> Result<Self, WireError> {
        let disk = |disk: &v1::DiskReading| {
            Ok(DiskReading {
                root: parse("disk.root", &disk.root)?,
                write: rate(disk.write_bytes_per_second),
                read: rate(disk.read_bytes_per_second),
                skipped: disk.skipped.clone(),
            })
        };
        Ok(Self {
            host: required("node.host", wire.host.as_ref())?.try_into()?,
            disks: wire.disks.iter().map(disk).collect::<Result<_, _>>()?,
            blake3: rate(wire.blake3_bytes_per_second).unwrap_or_default(),
            sha256: rate(wire.sha256_bytes_per_second).unwrap_or_default(),
            aes_gcm: rate(wire.aes_gcm_bytes_per_second).unwrap_or_default(),
        })
    }
}

impl From<&StreamReading> for v1::StreamReading {
    fn from(reading: &StreamReading) -> Self {
        Self {
            streams: reading.streams.into(),
            bytes_per_second: reading.rate.bytes_per_second(),
            bytes: reading.bytes.0,
            retransmissions: reading.retransmissions,
            window_bytes: reading.window.0,
        }
    }
}

impl TryFrom<&v1::StreamReading> for StreamReading {
    type Error = WireError;
    fn try_from(wire: &v1::StreamReading) -> Result<Self, WireError> {
        Ok(Self {
            streams: streams16("link.streams", wire.streams)?,
            rate: rate(wire.bytes_per_second).unwrap_or_default(),
            bytes: ByteCount(wire.bytes),
            retransmissions: wire.retransmissions,
            window: ByteCount(wire.window_bytes),
        })
    }
}

impl From<&Trace> for v1::LinkTrace {
    fn from(trace: &Trace) -> Self {
        let name = |router: &Option<IpAddr>| router.map(|router| router.to_string()).unwrap_or_default();
        Self {
            routers: trace.routers.iter().map(name).collect(),
            reached: trace.reached,
            mtu: trace.mtu,
            swallows: trace.swallows,
            from_second: trace.from_second,
        }
    }
}

impl TryFrom<&v1::LinkTrace> for Trace {
    type Error = WireError;
    fn try_from(wire: &v1::LinkTrace) -> Result<Self, WireError> {
        let router = |text: &String| match text.as_str() {
            "" => Ok(None),
            text => parse("link.router", text).map(Some),
        };
        Ok(Self {
            routers: wire.routers.iter().map(router).collect::<Result<_, _>>()?,
            reached: wire.reached,
            mtu: wire.mtu,
            swallows: wire.swallows,
            from_second: wire.from_second,
        })
    }
}

impl From<&LinkReading> for v1::LinkReading {
    fn from(reading: &LinkReading) -> Self {
        let streams = |readings: &[StreamReading]| readings.iter().map(Into::into).collect();
        Self {
            rtt_min_seconds: reading.rtt.min.as_secs_f64(),
            rtt_median_seconds: reading.rtt.median.as_secs_f64(),
            rtt_spread_seconds: reading.rtt.spread.as_secs_f64(),
            forward: streams(&reading.forward),
            backward: streams(&reading.backward),
            forward_kept: reading.forward_kept.as_ref().map(Into::into),
            backward_kept: reading.backward_kept.as_ref().map(Into::into),
            switches: reading.switches.iter().map(ToString::to_string).collect(),
            trace: Some((&reading.trace).into()),
            congestion_control: text(reading.control.as_ref()),
        }
    }
}

impl TryFrom<&v1::LinkReading> for LinkReading {
    type Error = WireError;
    fn try_from(wire: &v1::LinkReading) -> Result<Self, WireError> {
        let streams = |readings: &[v1::StreamReading]| {
            readings
                .iter()
                .map(TryInto::try_into)
                .collect::<Result<Vec<_>, _>>()
        };
        let kept = |reading: &Option<v1::StreamReading>| reading.as_ref().map(TryInto::try_into).transpose();
        Ok(Self {
            rtt: Rtt {
                min: seconds("link.rtt_min", wire.rtt_min_seconds)?,
                median: seconds("link.rtt_median", wire.rtt_median_seconds)?,
                spread: seconds("link.rtt_spread", wire.rtt_spread_seconds)?,
            },
            forward: streams(&wire.forward)?,
            backward: streams(&wire.backward)?,
            forward_kept: kept(&wire.forward_kept)?,
            backward_kept: kept(&wire.backward_kept)?,
            switches: wire
                .switches
                .iter()
                .map(|name| parse("link.switch", name))
                .collect::<Result<_, _>>()?,
            trace: wire
                .trace
                .as_ref()
                .map(TryInto::try_into)
                .transpose()?
                .unwrap_or_default(),
            control: optional("link.congestion_control", &wire.congestion_control)?,
        })
    }
}

impl From<&Together> for v1::Together {
    fn from(together: &Together) -> Self {
        Self {
            from: together.from.to_string(),
            network_bytes_per_second: together.network.bytes_per_second(),
            disk_bytes_per_second: rate_out(together.disk),
            both_bytes_per_second: together.both.bytes_per_second(),
            unix_ms: together.unix_ms,
        }
    }
}

impl TryFrom<&v1::Together> for Together {
    type Error = WireError;
    fn try_from(wire: &v1::Together) -> Result<Self, WireError> {
        Ok(Self {
            from: parse("together.from", &wire.from)?,
            network: rate(wire.network_bytes_per_second).unwrap_or_default(),
            disk: rate(wire.disk_bytes_per_second),
            both: rate(wire.both_bytes_per_second).unwrap_or_default(),
            unix_ms: wire.unix_ms,
        })
    }
}

impl From<&Measurement> for v1::Measured {
    fn from(measurement: &Measurement) -> Self {
        let (node, to) = match &measurement.subject {
            Subject::Node(node) => (node.to_string(), String::new()),
            Subject::Link(pair) => (pair.from.to_string(), pair.to.to_string()),
        };
        let (reading, link) = match &measurement.reading {
            Reading::Node(reading) => (Some((&**reading).into()), None),
            Reading::Link(reading) => (None, Some((&**reading).into())),
        };
        Self {
            node,
            to,
            unix_ms: measurement.unix_ms,
            reading,
            link,
            ..Self::default()
        }
    }
}

impl TryFrom<&v1::Measured> for Measurement {
    type Error = WireError;
    fn try_from(wire: &v1::Measured) -> Result<Self, WireError> {
        let node = parse("measured.node", &wire.node)?;
        let (subject, reading) = match (&wire.reading, &wire.link) {
            (Some(reading), None) => (Subject::Node(node), Reading::Node(Box::new(reading.try_into()?))),
            (None, Some(link)) => {
                let pair = Pair {
                    from: node,
                    to: parse("measured.to", &wire.to)?,
                };
                (Subject::Link(pair), Reading::Link(Box::new(link.try_into()?)))
            }
            _ => return Err(fault("measured", "is neither of a node nor of a link")),
        };
        Ok(Self {
            subject,
            unix_ms: wire.unix_ms,
            reading,
        })
    }
}
