//! Wire <-> core. From the wire everything is checked ([`WireError`]); to the wire nothing can fail.

use std::time::Duration;

use stage_core::assignment::{
    Assignment, Final, IfExists, Order, Outcome, Peer, Place, Prepared, Progress, Run, SourceReport,
    SourceSpec, StreamChoice, TargetSpec,
};
use stage_core::digest::{ChunkHash, FileDigest, Md5Digest, RootDigest};
use stage_core::failure::{Code, Failure};
use stage_core::id::{Epoch, JobKey, NodeName, PlanVersion};
use stage_core::manifest::Manifest;
use stage_core::plan::{Hop, Plan, WindowLimits};
use stage_core::units::{ByteCount, Rate};

use crate::v1;

/// A message that does not mean anything.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {why}")]
pub struct WireError {
    /// Which field.
    pub field: &'static str,
    /// What is wrong with it.
    pub why: String,
}

fn fault(field: &'static str, why: impl Into<String>) -> WireError {
    WireError {
        field,
        why: why.into(),
    }
}

/// Reads a text field by its type.
///
/// # Errors
/// [`WireError`] names the field.
pub fn parse<T: std::str::FromStr<Err: ToString>>(field: &'static str, text: &str) -> Result<T, WireError> {
    text.parse()
        .map_err(|error: T::Err| fault(field, error.to_string()))
}

fn required<T>(field: &'static str, value: Option<T>) -> Result<T, WireError> {
    value.ok_or_else(|| fault(field, "is missing"))
}

fn array<const N: usize>(field: &'static str, bytes: &[u8]) -> Result<[u8; N], WireError> {
    bytes
        .try_into()
        .map_err(|_| fault(field, format!("has {} bytes and not {N}", bytes.len())))
}

fn seconds(field: &'static str, value: f64) -> Result<Duration, WireError> {
    Duration::try_from_secs_f64(value).map_err(|error| fault(field, error.to_string()))
}

fn limit(bytes_per_second: u64) -> Option<Rate> {
    (bytes_per_second > 0).then(|| Rate::from_bytes_per_second(bytes_per_second as f64))
}

fn limit_out(limit: Option<Rate>) -> u64 {
    limit.map_or(0, |rate| (rate.bytes_per_second() as u64).max(1))
}

fn manifest(bytes: &[u8]) -> Result<Manifest, WireError> {
    Manifest::decode(bytes).map_err(|error| fault("manifest", error.to_string()))
}

fn streams16(field: &'static str, value: u32) -> Result<u16, WireError> {
    u16::try_from(value).map_err(|error| fault(field, error.to_string()))
}

impl From<&Failure> for v1::Failure {
    fn from(failure: &Failure) -> Self {
        Self {
            code: failure.code.as_str().to_owned(),
            node: failure.node.as_ref().map(ToString::to_string).unwrap_or_default(),
            path: failure.path.clone().unwrap_or_default(),
            message: failure.message.clone(),
            hint: failure.hint.clone(),
            short_by_bytes: failure.short_by.unwrap_or_default().0,
        }
    }
}

/// Never refused: a failure that cannot be read would hide another.
impl From<&v1::Failure> for Failure {
    fn from(wire: &v1::Failure) -> Self {
        Self {
            code: Code::from_word(&wire.code),
            node: wire.node.parse().ok(),
            path: (!wire.path.is_empty()).then(|| wire.path.clone()),
            message: wire.message.clone(),
            hint: wire.hint.clone(),
            short_by: (wire.short_by_bytes > 0).then_some(ByteCount(wire.short_by_bytes)),
        }
    }
}

impl From<WindowLimits> for v1::WindowLimits {
    fn from(limits: WindowLimits) -> Self {
        Self {
            receive_bytes: limits.receive.0,
            send_bytes: limits.send.0,
        }
    }
}

impl From<&v1::WindowLimits> for WindowLimits {
    fn from(wire: &v1::WindowLimits) -> Self {
        Self {
            receive: ByteCount(wire.receive_bytes),
            send: ByteCount(wire.send_bytes),
        }
    }
}

impl From<IfExists> for v1::IfExists {
    fn from(rule: IfExists) -> Self {
        match rule {
            IfExists::Fail => Self::Fail,
            IfExists::Replace => Self::Replace,
            IfExists::Skip => Self::Skip,
        }
    }
}

/// The rule of a wire number.
///
/// # Errors
/// A number without meaning; unspecified is refused too.
pub fn if_exists(wire: i32) -> Result<IfExists, WireError> {
    match v1::IfExists::try_from(wire) {
        Ok(v1::IfExists::Fail) => Ok(IfExists::Fail),
        Ok(v1::IfExists::Replace) => Ok(IfExists::Replace),
        Ok(v1::IfExists::Skip) => Ok(IfExists::Skip),
        Ok(v1::IfExists::Unspecified) | Err(_) => Err(fault("if_exists", "is not a rule")),
    }
}

impl From<ChunkHash> for v1::ChunkHash {
    fn from(hash: ChunkHash) -> Self {
        match hash {
            ChunkHash::Blake3 => Self::Blake3,
            ChunkHash::Sha256 => Self::Sha256,
        }
    }
}

fn chunk_hash(field: &'static str, wire: i32) -> Result<ChunkHash, WireError> {
    match v1::ChunkHash::try_from(wire) {
        Ok(v1::ChunkHash::Blake3) => Ok(ChunkHash::Blake3),
        Ok(v1::ChunkHash::Sha256) => Ok(ChunkHash::Sha256),
        Ok(v1::ChunkHash::Unspecified) | Err(_) => Err(fault(field, "is not known")),
    }
}

impl From<&Plan> for v1::Plan {
    fn from(plan: &Plan) -> Self {
        Self {
            shape: plan.shape.to_string(),
            source: plan.source.to_string(),
            hops: plan.hops.iter().map(Into::into).collect(),
            depth: plan.depth.into(),
            predicted_seconds: plan.predicted.as_secs_f64(),
            bound_seconds: plan.bound.as_secs_f64(),
            reason: plan.reason.clone(),
        }
    }
}

impl From<&Hop> for v1::Hop {
    fn from(hop: &Hop) -> Self {
        Self {
            child: hop.child.to_string(),
            parent: hop.parent.to_string(),
            fallbacks: hop.fallbacks.iter().map(ToString::to_string).collect(),
            streams: hop.streams.into(),
            streams_cap: hop.streams_cap.into(),
            depth: hop.depth.into(),
            bytes_per_second: hop.rate.bytes_per_second(),
            finish_seconds: hop.finish.as_secs_f64(),
            limited_by: hop.limited_by.clone(),
        }
    }
}

impl TryFrom<&v1::Plan> for Plan {
    type Error = WireError;
    fn try_from(wire: &v1::Plan) -> Result<Self, WireError> {
        Ok(Self {
            shape: parse("plan.shape", &wire.shape)?,
            source: parse("plan.source", &wire.source)?,
            hops: wire
                .hops
                .iter()
                .map(TryInto::try_into)
                .collect::<Result<_, _>>()?,
            depth: streams16("plan.depth", wire.depth)?,
            predicted: seconds("plan.predicted_seconds", wire.predicted_seconds)?,
            bound: seconds("plan.bound_seconds", wire.bound_seconds)?,
            reason: wire.reason.clone(),
        })
    }
}

impl TryFrom<&v1::Hop> for Hop {
    type Error = WireError;
    fn try_from(wire: &v1::Hop) -> Result<Self, WireError> {
        Ok(Self {
            child: parse("hop.child", &wire.child)?,
            parent: parse("hop.parent", &wire.parent)?,
            fallbacks: wire
                .fallbacks
                .iter()
                .map(|n| parse("hop.fallbacks", n))
                .collect::<Result<_, _>>()?,
            streams: streams16("hop.streams", wire.streams)?,
            streams_cap: streams16("hop.streams_cap", wire.streams_cap)?,
            depth: streams16("hop.depth", wire.depth)?,
            rate: Rate::from_bytes_per_second(wire.bytes_per_second),
            finish: seconds("hop.finish_seconds", wire.finish_seconds)?,
            limited_by: wire.limited_by.clone(),
        })
    }
}

impl From<&SourceSpec> for v1::SourceSpec {
    fn from(spec: &SourceSpec) -> Self {
        Self {
            path: spec.path.clone(),
            limit_bytes_per_second: limit_out(spec.limit),
            expect_md5: spec.expect_md5.map(|md5| md5.0.to_vec()).unwrap_or_default(),
        }
    }
}

impl TryFrom<&v1::SourceSpec> for SourceSpec {
    type Error = WireError;
    fn try_from(wire: &v1::SourceSpec) -> Result<Self, WireError> {
        if wire.path.first() != Some(&b'/') {
            return Err(fault("source.path", "is not absolute"));
        }
        Ok(Self {
            path: wire.path.clone(),
            limit: limit(wire.limit_bytes_per_second),
            expect_md5: match wire.expect_md5.as_slice() {
                [] => None,
                md5 => Some(Md5Digest(array("source.expect_md5", md5)?)),
            },
        })
    }
}

impl From<&TargetSpec> for v1::TargetSpec {
    fn from(spec: &TargetSpec) -> Self {
        let (root, dir, absolute) = match &spec.place {
            Place::Root { root, dir } => (
                root.as_ref().map(ToString::to_string).unwrap_or_default(),
                dir.clone(),
                false,
            ),
            Place::Absolute(dir) => (String::new(), dir.clone(), true),
        };
        Self {
            root,
            dir,
            absolute,
            name: spec.name.clone(),
            if_exists: v1::IfExists::from(spec.if_exists).into(),
        }
    }
}

impl TryFrom<&v1::TargetSpec> for TargetSpec {
    type Error = WireError;
    fn try_from(wire: &v1::TargetSpec) -> Result<Self, WireError> {
        let place = if wire.absolute {
            Place::Absolute(wire.dir.clone())
        } else {
            let root = if wire.root.is_empty() {
                None
            } else {
                Some(parse("target.root", &wire.root)?)
            };
            Place::Root {
                root,
                dir: wire.dir.clone(),
            }
        };
        Ok(Self {
            place,
            name: wire.name.clone(),
            if_exists: if_exists(wire.if_exists)?,
        })
    }
}

impl From<&Peer> for v1::Peer {
    fn from(peer: &Peer) -> Self {
        Self {
            node: peer.node.to_string(),
            addresses: peer.addresses.iter().map(ToString::to_string).collect(),
        }
    }
}

impl TryFrom<&v1::Peer> for Peer {
    type Error = WireError;
    fn try_from(wire: &v1::Peer) -> Result<Self, WireError> {
        Ok(Self {
            node: parse("peer.node", &wire.node)?,
            addresses: wire
                .addresses
                .iter()
                .map(|a| parse("peer.addresses", a))
                .collect::<Result<_, _>>()?,
        })
    }
}

impl From<&Final> for v1::Final {
    fn from(fin: &Final) -> Self {
        Self {
            root: fin.root.0.to_vec(),
            chunks: fin.chunks,
        }
    }
}

impl TryFrom<&v1::Final> for Final {
    type Error = WireError;
    fn try_from(wire: &v1::Final) -> Result<Self, WireError> {
        Ok(Self {
            root: RootDigest(array("final.root", &wire.root)?),
            chunks: wire.chunks,
        })
    }
}

impl From<&Run> for v1::Run {
    fn from(run: &Run) -> Self {
        let (streams, streams_cap) = match run.streams {
            StreamChoice::Auto { cap } => (0, cap),
            StreamChoice::Fixed(streams) => (streams, streams),
        };
        Self {
            key: run.key.0.to_vec(),
            hash: v1::ChunkHash::from(run.hash).into(),
            manifest: run.manifest.encode(),
            source: run.source.as_ref().map(Into::into),
            target: run.target.as_ref().map(Into::into),
            parents: run.parents.iter().map(Into::into).collect(),
            streams: streams.into(),
            streams_cap: streams_cap.into(),
            children: run.children.iter().map(ToString::to_string).collect(),
            limit_bytes_per_second: limit_out(run.limit),
            r#final: run.fin.as_ref().map(Into::into),
            wanted_bytes_per_second: if run.wanted == Rate::UNLIMITED {
                0.0
            } else {
                run.wanted.bytes_per_second()
            },
        }
    }
}

impl TryFrom<&v1::Run> for Run {
    type Error = WireError;
    fn try_from(wire: &v1::Run) -> Result<Self, WireError> {
        let bounded = |field, value| match streams16(field, value)? {
            count @ 1..=64 => Ok(count),
            other => Err(fault(field, format!("{other} is not between 1 and 64"))),
        };
        Ok(Self {
            key: JobKey(array("run.key", &wire.key)?),
            hash: chunk_hash("run.hash", wire.hash)?,
            manifest: manifest(&wire.manifest)?,
            source: wire.source.as_ref().map(TryInto::try_into).transpose()?,
            target: wire.target.as_ref().map(TryInto::try_into).transpose()?,
            parents: wire
                .parents
                .iter()
                .map(TryInto::try_into)
                .collect::<Result<_, _>>()?,
            streams: match wire.streams {
                0 => StreamChoice::Auto {
                    cap: bounded("run.streams_cap", wire.streams_cap)?,
                },
                fixed => StreamChoice::Fixed(bounded("run.streams", fixed)?),
            },
            children: wire
                .children
                .iter()
                .map(|n| parse("run.children", n))
                .collect::<Result<_, _>>()?,
            limit: limit(wire.limit_bytes_per_second),
            wanted: match wire.wanted_bytes_per_second {
                rate if rate > 0.0 => Rate::from_bytes_per_second(rate),
                _ => Rate::UNLIMITED,
            },
            fin: wire.r#final.as_ref().map(TryInto::try_into).transpose()?,
        })
    }
}

impl From<&Assignment> for v1::Assignment {
    fn from(assignment: &Assignment) -> Self {
        use v1::assignment::Order as Wire;
        Self {
            job: assignment.job.to_string(),
            epoch: assignment.epoch.0,
            version: assignment.version.0,
            order: Some(match &assignment.order {
                Order::PrepareSource(source) => Wire::PrepareSource(source.into()),
                Order::PrepareTarget {
                    target,
                    manifest,
                    hash,
                } => Wire::PrepareTarget(v1::PrepareTarget {
                    target: Some(target.into()),
                    manifest: manifest.encode(),
                    hash: v1::ChunkHash::from(*hash).into(),
                }),
                Order::Run(run) => Wire::Run(run.into()),
                Order::Release => Wire::Release(v1::Release {}),
                Order::Cancel => Wire::Cancel(v1::CancelJob {}),
            }),
        }
    }
}

impl TryFrom<&v1::Assignment> for Assignment {
    type Error = WireError;
    fn try_from(wire: &v1::Assignment) -> Result<Self, WireError> {
        use v1::assignment::Order as Wire;
        Ok(Self {
            job: parse("assignment.job", &wire.job)?,
            epoch: Epoch(wire.epoch),
            version: PlanVersion(wire.version),
            order: match required("assignment.order", wire.order.as_ref())? {
                Wire::PrepareSource(source) => Order::PrepareSource(source.try_into()?),
                Wire::PrepareTarget(prepare) => Order::PrepareTarget {
                    target: required("prepare_target.target", prepare.target.as_ref())?.try_into()?,
                    manifest: manifest(&prepare.manifest)?,
                    hash: chunk_hash("prepare_target.hash", prepare.hash)?,
                },
                Wire::Run(run) => Order::Run(run.try_into()?),
                Wire::Release(v1::Release {}) => Order::Release,
                Wire::Cancel(v1::CancelJob {}) => Order::Cancel,
            },
        })
    }
}

impl From<&Prepared> for v1::prepared::Answer {
    fn from(prepared: &Prepared) -> Self {
        match prepared {
            Prepared::Source { manifest } => Self::Manifest(manifest.encode()),
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
            Answer::Manifest(bytes) => Self::Source {
                manifest: manifest(bytes)?,
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
        })
    }
}

#[cfg(test)]
mod tests {
    use stage_core::id::JobId;

    use super::*;

    fn run() -> Run {
        Run {
            key: JobKey([3; 32]),
            hash: ChunkHash::Blake3,
            manifest: Manifest::single_file(ByteCount(77), 0o644, (5, 6)),
            source: Some(SourceSpec {
                path: b"/data/genome.db".to_vec(),
                limit: Some(Rate::from_bytes_per_second(1e6)),
                expect_md5: Some(Md5Digest([9; 16])),
            }),
            target: Some(TargetSpec {
                place: Place::Root {
                    root: Some("scratch".parse().unwrap()),
                    dir: b"db".to_vec(),
                },
                name: b"genome.db".to_vec(),
                if_exists: IfExists::Replace,
            }),
            parents: vec![Peer {
                node: "n0".parse().unwrap(),
                addresses: vec!["[::1]:7701".parse().unwrap()],
            }],
            streams: StreamChoice::Auto { cap: 8 },
            wanted: Rate::from_bytes_per_second(1.25e9),
            children: vec!["n2".parse().unwrap()],
            limit: None,
            fin: Some(Final {
                root: RootDigest([9; 32]),
                chunks: 1,
            }),
        }
    }

    #[test]
    fn assignments_survive_the_wire() {
        let orders = [
            Order::PrepareSource(run().source.unwrap()),
            Order::PrepareTarget {
                target: run().target.unwrap(),
                manifest: run().manifest,
                hash: ChunkHash::Sha256,
            },
            Order::Run(run()),
            Order::Run(Run {
                streams: StreamChoice::Fixed(4),
                source: None,
                target: None,
                fin: None,
                ..run()
            }),
            Order::Release,
            Order::Cancel,
        ];
        for order in orders {
            let assignment = Assignment {
                job: JobId::from_random([1; 16]),
                epoch: Epoch(4),
                version: PlanVersion(2),
                order,
            };
            assert_eq!(
                Assignment::try_from(&v1::Assignment::from(&assignment)).unwrap(),
                assignment
            );
        }
    }

    #[test]
    fn what_a_peer_may_not_choose_is_refused() {
        let assignment = |change: fn(&mut v1::Run)| {
            let mut wire = v1::Run::from(&run());
            change(&mut wire);
            Run::try_from(&wire).unwrap_err().field
        };
        assert_eq!(assignment(|run| run.streams_cap = 0), "run.streams_cap");
        assert_eq!(assignment(|run| run.streams = 65), "run.streams");
        assert_eq!(assignment(|run| run.key.truncate(31)), "run.key");
        assert_eq!(assignment(|run| run.hash = 0), "run.hash");
        assert_eq!(assignment(|run| run.manifest.clear()), "manifest");
        assert_eq!(
            assignment(|run| run.source.as_mut().unwrap().path = b"x".to_vec()),
            "source.path"
        );
        assert_eq!(
            assignment(|run| run.target.as_mut().unwrap().if_exists = 0),
            "if_exists"
        );
    }

    #[test]
    fn reports_survive_the_wire() {
        let failure = Failure::new(Code::NoSpace, "short", "free some")
            .on(&"n1".parse().unwrap())
            .at("/scratch/x");
        let failure = Failure {
            short_by: Some(ByteCount(9)),
            ..failure
        };
        for outcome in [
            Outcome::Published {
                path: "/scratch/x".to_owned(),
                already: false,
                bytes_received: 7,
                took: Duration::from_millis(1500),
            },
            Outcome::Unfit(failure.clone()),
            Outcome::Failed(failure.clone()),
        ] {
            let wire = v1::Outcome {
                job: String::new(),
                outcome: Some((&outcome).into()),
            };
            assert_eq!(Outcome::try_from(&wire).unwrap(), outcome);
        }
        for prepared in [
            Prepared::Source {
                manifest: run().manifest,
            },
            Prepared::Ready {
                path: "/scratch/x".to_owned(),
                candidate: true,
            },
            Prepared::Skipped {
                path: "/scratch/x".to_owned(),
            },
            Prepared::Unfit(failure.clone()),
        ] {
            let wire = v1::Prepared {
                job: String::new(),
                version: 0,
                answer: Some((&prepared).into()),
            };
            assert_eq!(Prepared::try_from(&wire).unwrap(), prepared);
        }
        for report in [
            SourceReport::Final(run().fin.unwrap()),
            SourceReport::Sha256(FileDigest([8; 32])),
            SourceReport::Failed(failure),
        ] {
            let wire = v1::SourceReport {
                job: String::new(),
                report: Some((&report).into()),
            };
            assert_eq!(SourceReport::try_from(&wire).unwrap(), report);
        }
        let progress = Progress {
            chunks: 3,
            disk_time: Duration::from_millis(250),
            parent: Some("n0".parse().unwrap()),
            rtt: Some(Duration::from_millis(1)),
            ..Progress::default()
        };
        let wire = v1::JobProgress::of(JobId::from_random([1; 16]), &progress);
        assert_eq!(Progress::try_from(&wire).unwrap(), progress);
    }
}
