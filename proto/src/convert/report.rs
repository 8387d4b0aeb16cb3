//! Reports: what a node says of a job.

use stage_core::assignment::{Outcome, Prepared, Progress, SourceReport};
use stage_core::digest::FileDigest;
use stage_core::id::NodeName;

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
        })
    }
}
