//! Reports: what a node says of a job.

use stage_core::assignment::{Outcome, Prepared, Progress, SourceReport};
use stage_core::digest::FileDigest;
use stage_core::id::NodeName;
use stage_core::units::{ByteCount, Rate};
use stage_core::waits::{MAX_CHILDREN, Reading, Receiving, Sending, Tcp, Waits};

use super::{WireError, array, parse, required, seconds, streams16};
use crate::v1;

impl From<&Prepared> for v1::prepared::Answer {
    fn from(prepared: &Prepared) -> Self {
        match prepared {
            Prepared::Source { payload } => Self::Source(payload.into()),
            Prepared::Ready { path, candidate } => Self::Ready(v1::Ready {
                path: path.clone(),
                candidate: *candidate,
            }),
            Prepared::Skipped { path } => Self::Skipped(v1::Skipped { path: path.clone() }),
            Prepared::Unfit(failure) => Self::Unfit(failure.into()),
        }
    }
}

impl TryFrom<&v1::Prepared> for Prepared {
    type Error = WireError;
    fn try_from(wire: &v1::Prepared) -> Result<Self, WireError> {
        use v1::prepared::Answer;
        Ok(match required("prepared.answer", wire.answer.as_ref())? {
            Answer::Source(payload) => Self::Source {
                payload: payload.try_into()?,
            },
            Answer::Ready(ready) => Self::Ready {
                path: ready.path.clone(),
                candidate: ready.candidate,
            },
            Answer::Skipped(skipped) => Self::Skipped {
                path: skipped.path.clone(),
            },
            Answer::Unfit(failure) => Self::Unfit(failure.into()),
        })
    }
}

impl From<&SourceReport> for v1::source_report::Report {
    fn from(report: &SourceReport) -> Self {
        match report {
            SourceReport::Final(fin) => Self::Final(fin.into()),
            SourceReport::Sha256(digest) => Self::Sha256(digest.0.to_vec()),
            SourceReport::Failed(failure) => Self::Failed(failure.into()),
        }
    }
}

impl TryFrom<&v1::SourceReport> for SourceReport {
    type Error = WireError;
    fn try_from(wire: &v1::SourceReport) -> Result<Self, WireError> {
        use v1::source_report::Report;
        Ok(match required("source_report.report", wire.report.as_ref())? {
            Report::Final(fin) => Self::Final(fin.try_into()?),
            Report::Sha256(digest) => Self::Sha256(FileDigest(array("source_report.sha256", digest)?)),
            Report::Failed(failure) => Self::Failed(failure.into()),
        })
    }
}

impl From<&Outcome> for v1::outcome::Outcome {
    fn from(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Published {
                path,
                already,
                bytes_received,
                took,
            } => Self::Published(v1::Published {
                path: path.clone(),
                already: *already,
                bytes_received: *bytes_received,
                seconds: took.as_secs_f64(),
            }),
            Outcome::Unfit(failure) => Self::Unfit(failure.into()),
            Outcome::Failed(failure) => Self::Failed(failure.into()),
        }
    }
}

impl TryFrom<&v1::Outcome> for Outcome {
    type Error = WireError;
    fn try_from(wire: &v1::Outcome) -> Result<Self, WireError> {
        Ok(match required("outcome.outcome", wire.outcome.as_ref())? {
            v1::outcome::Outcome::Published(published) => Self::Published {
                path: published.path.clone(),
                already: published.already,
                bytes_received: published.bytes_received,
                took: seconds("published.seconds", published.seconds)?,
            },
            v1::outcome::Outcome::Unfit(failure) => Self::Unfit(failure.into()),
            v1::outcome::Outcome::Failed(failure) => Self::Failed(failure.into()),
        })
    }
}

impl v1::JobProgress {
    /// The wire form of a job's counters.
    pub fn of(job: stage_core::id::JobId, progress: &Progress) -> Self {
        Self {
            job: job.to_string(),
            chunks: progress.chunks,
            bytes_kept: progress.bytes_kept,
            bytes_received: progress.bytes_received,
            bytes_sent: progress.bytes_sent,
            source_bytes_read: progress.source_bytes_read,
            sha256_bytes: progress.sha256_bytes,
            disk_bytes: progress.disk_bytes,
            disk_seconds: progress.disk_time.as_secs_f64(),
            parent: progress
                .parent
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default(),
            streams: progress.streams.into(),
            rtt_seconds: progress.rtt.unwrap_or_default().as_secs_f64(),
            children: progress.children.into(),
            walked: progress.walked,
            waits: Some((&progress.waits).into()),
        }
    }
}

impl TryFrom<&v1::JobProgress> for Progress {
    type Error = WireError;
    fn try_from(wire: &v1::JobProgress) -> Result<Self, WireError> {
        let parent: Option<NodeName> = if wire.parent.is_empty() {
            None
        } else {
            Some(parse("progress.parent", &wire.parent)?)
        };
        let rtt = seconds("progress.rtt_seconds", wire.rtt_seconds)?;
        Ok(Self {
            chunks: wire.chunks,
            bytes_kept: wire.bytes_kept,
            bytes_received: wire.bytes_received,
            bytes_sent: wire.bytes_sent,
            source_bytes_read: wire.source_bytes_read,
            sha256_bytes: wire.sha256_bytes,
            disk_bytes: wire.disk_bytes,
            disk_time: seconds("progress.disk_seconds", wire.disk_seconds)?,
            parent,
            streams: streams16("progress.streams", wire.streams)?,
            rtt: (!rtt.is_zero()).then_some(rtt),
            children: streams16("progress.children", wire.children)?,
            walked: wire.walked,
            waits: wire
                .waits
                .as_ref()
                .map(TryInto::try_into)
                .transpose()?
                .unwrap_or_default(),
        })
    }
}

impl From<&Waits> for v1::Waits {
    fn from(waits: &Waits) -> Self {
        let Waits {
            receiving,
            reading,
            sending,
        } = waits;
        Self {
            receive_upstream: receiving.upstream.as_secs_f64(),
            receive_disk: receiving.disk.as_secs_f64(),
            receive_cpu: receiving.cpu.as_secs_f64(),
            read_disk: reading.disk.as_secs_f64(),
            read_limit: reading.limit.as_secs_f64(),
            read_idle: reading.idle.as_secs_f64(),
            read_cpu: reading.cpu.as_secs_f64(),
            sending: sending
                .iter()
                .map(|(child, sending)| v1::SendWaits {
                    child: child.to_string(),
                    idle: sending.idle.as_secs_f64(),
                    network: sending.network.as_secs_f64(),
                    disk: sending.disk.as_secs_f64(),
                    limit: sending.limit.as_secs_f64(),
                    cpu: sending.cpu.as_secs_f64(),
                    tcp_busy: sending.tcp.busy.as_secs_f64(),
                    tcp_receiver_limited: sending.tcp.receiver.as_secs_f64(),
                    tcp_buffer_limited: sending.tcp.buffer.as_secs_f64(),
                    tcp_bytes_sent: sending.tcp.sent.0,
                    tcp_bytes_again: sending.tcp.again.0,
                    tcp_rtt: sending.tcp.rtt.as_secs_f64(),
                    tcp_delivery_bytes_per_second: sending.tcp.delivery.bytes_per_second(),
                })
                .collect(),
        }
    }
}

impl TryFrom<&v1::Waits> for Waits {
    type Error = WireError;
    fn try_from(wire: &v1::Waits) -> Result<Self, WireError> {
        Ok(Self {
            receiving: Receiving {
                upstream: seconds("waits.receive_upstream", wire.receive_upstream)?,
                disk: seconds("waits.receive_disk", wire.receive_disk)?,
                cpu: seconds("waits.receive_cpu", wire.receive_cpu)?,
            },
            reading: Reading {
                disk: seconds("waits.read_disk", wire.read_disk)?,
                limit: seconds("waits.read_limit", wire.read_limit)?,
                idle: seconds("waits.read_idle", wire.read_idle)?,
                cpu: seconds("waits.read_cpu", wire.read_cpu)?,
            },
            sending: wire
                .sending
                .iter()
                .take(MAX_CHILDREN)
                .map(sending)
                .collect::<Result<_, _>>()?,
        })
    }
}

fn sending(wire: &v1::SendWaits) -> Result<(NodeName, Sending), WireError> {
    let delivery = wire.tcp_delivery_bytes_per_second;
    let sending = Sending {
        idle: seconds("sending.idle", wire.idle)?,
        network: seconds("sending.network", wire.network)?,
        disk: seconds("sending.disk", wire.disk)?,
        limit: seconds("sending.limit", wire.limit)?,
        cpu: seconds("sending.cpu", wire.cpu)?,
        tcp: Tcp {
            busy: seconds("sending.tcp_busy", wire.tcp_busy)?,
            receiver: seconds("sending.tcp_receiver_limited", wire.tcp_receiver_limited)?,
            buffer: seconds("sending.tcp_buffer_limited", wire.tcp_buffer_limited)?,
            sent: ByteCount(wire.tcp_bytes_sent),
            again: ByteCount(wire.tcp_bytes_again),
            rtt: seconds("sending.tcp_rtt", wire.tcp_rtt)?,
            delivery: Rate::from_bytes_per_second(if delivery.is_finite() { delivery } else { 0.0 }),
        },
    };
    Ok((parse("sending.child", &wire.child)?, sending))
}
