//! Orders: what a node is told to be for a job.

use std::time::Duration;

use stage_core::assignment::{Assignment, Final, Order, Peer, Run, SourceSpec, StreamChoice, TargetSpec};
use stage_core::digest::RootDigest;
use stage_core::id::{Epoch, JobKey, PlanVersion};
use stage_core::payload::SourcePath;
use stage_core::units::{ByteCount, Rate};

use super::{
    WireError, array, cache, chunk_hash, fault, file_digest, if_exists, limit, limit_out, optional, parse,
    place, place_out, required, streams16, text,
};
use crate::v1;

impl From<&SourceSpec> for v1::SourceSpec {
    fn from(spec: &SourceSpec) -> Self {
        Self {
            paths: spec.paths.iter().map(Into::into).collect(),
            walk: Some((&spec.walk).into()),
            limit_bytes_per_second: limit_out(spec.limit),
            expect: spec.expect.iter().map(Into::into).collect(),
            cache: v1::Cache::from(spec.cache).into(),
        }
    }
}

impl TryFrom<&v1::SourceSpec> for SourceSpec {
    type Error = WireError;
    fn try_from(wire: &v1::SourceSpec) -> Result<Self, WireError> {
        let strange =
            |path: &v1::SourcePath| path.path.first() != Some(&b'/') && path.path != SourcePath::STREAM;
        if wire.paths.iter().any(strange) {
            return Err(fault("source.paths", "has one that is not absolute"));
        }
        Ok(Self {
            paths: wire.paths.iter().map(Into::into).collect(),
            walk: wire.walk.as_ref().map(Into::into).unwrap_or_default(),
            limit: limit(wire.limit_bytes_per_second),
            expect: wire
                .expect
                .iter()
                .map(TryInto::try_into)
                .collect::<Result<_, _>>()?,
            cache: cache(wire.cache)?,
        })
    }
}

impl From<&TargetSpec> for v1::TargetSpec {
    fn from(spec: &TargetSpec) -> Self {
        let (root, dir, absolute) = place_out(&spec.place);
        Self {
            root,
            dir,
            absolute,
            if_exists: v1::IfExists::from(spec.if_exists).into(),
            unpack: spec.unpack,
            keep_previous_seconds: spec.keep_previous.as_secs(),
            cache: v1::Cache::from(spec.cache).into(),
        }
    }
}

impl TryFrom<&v1::TargetSpec> for TargetSpec {
    type Error = WireError;
    fn try_from(wire: &v1::TargetSpec) -> Result<Self, WireError> {
        let place = place("target.root", &wire.root, &wire.dir, wire.absolute)?;
        Ok(Self {
            place,
            if_exists: if_exists(wire.if_exists)?,
            unpack: wire.unpack,
            keep_previous: Duration::from_secs(wire.keep_previous_seconds),
            cache: cache(wire.cache)?,
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
            data_bytes: fin.data.0,
        }
    }
}

impl TryFrom<&v1::Final> for Final {
    type Error = WireError;
    fn try_from(wire: &v1::Final) -> Result<Self, WireError> {
        Ok(Self {
            root: RootDigest(array("final.root", &wire.root)?),
            chunks: wire.chunks,
            data: ByteCount(wire.data_bytes),
        })
    }
}

impl From<&Run> for v1::Run {
    fn from(run: &Run) -> Self {
        let (streams, streams_least, streams_cap) = match run.streams {
            StreamChoice::Auto { least, cap } => (0, least, cap),
            StreamChoice::Fixed(streams) => (streams, streams, streams),
        };
        Self {
            key: run.key.0.to_vec(),
            hash: v1::ChunkHash::from(run.hash).into(),
            payload: Some((&run.payload).into()),
            source: run.source.as_ref().map(Into::into),
            target: run.target.as_ref().map(Into::into),
            parents: run.parents.iter().map(Into::into).collect(),
            streams: streams.into(),
            streams_least: streams_least.into(),
            streams_cap: streams_cap.into(),
            congestion_control: text(run.congestion_control.as_ref()),
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
            payload: required("run.payload", wire.payload.as_ref())?.try_into()?,
            source: wire.source.as_ref().map(TryInto::try_into).transpose()?,
            target: wire.target.as_ref().map(TryInto::try_into).transpose()?,
            parents: wire
                .parents
                .iter()
                .map(TryInto::try_into)
                .collect::<Result<_, _>>()?,
            streams: match wire.streams {
                0 => StreamChoice::Auto {
                    least: streams16("run.streams_least", wire.streams_least)?.max(1),
                    cap: bounded("run.streams_cap", wire.streams_cap)?,
                },
                fixed => StreamChoice::Fixed(bounded("run.streams", fixed)?),
            },
            congestion_control: optional("run.congestion_control", &wire.congestion_control)?,
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
                    payload,
                    hash,
                } => Wire::PrepareTarget(v1::PrepareTarget {
                    target: Some(target.into()),
                    payload: Some(payload.into()),
                    hash: v1::ChunkHash::from(*hash).into(),
                }),
                Order::Run(run) => Wire::Run(run.into()),
                Order::Release { sha256 } => Wire::Release(v1::Release {
                    sha256: sha256.map(|digest| digest.0.to_vec()).unwrap_or_default(),
                }),
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
                    payload: required("prepare_target.payload", prepare.payload.as_ref())?.try_into()?,
                    hash: chunk_hash("prepare_target.hash", prepare.hash)?,
                },
                Wire::Run(run) => Order::Run(run.try_into()?),
                Wire::Release(release) => Order::Release {
                    sha256: file_digest("release.sha256", &release.sha256)?,
                },
                Wire::Cancel(v1::CancelJob {}) => Order::Cancel,
            },
        })
    }
}
