//! Plans.

use stage_core::plan::{Hop, Plan};
use stage_core::units::Rate;

use super::{WireError, optional, parse, seconds, streams16, text};
use crate::v1;

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
            streams_least: hop.streams_least.into(),
            congestion_control: text(hop.congestion_control.as_ref()),
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
            streams_least: streams16("hop.streams_least", wire.streams_least)?.max(1),
            congestion_control: optional("hop.congestion_control", &wire.congestion_control)?,
            depth: streams16("hop.depth", wire.depth)?,
            rate: Rate::from_bytes_per_second(wire.bytes_per_second),
            finish: seconds("hop.finish_seconds", wire.finish_seconds)?,
            limited_by: wire.limited_by.clone(),
        })
    }
}
