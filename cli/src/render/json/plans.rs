//! Plans, what was tried for them, and their simulations.

use serde::Serialize;
use stage_core::id::{CongestionControl, NodeName};
use stage_core::plan::{Plan, Tried};

use super::{forecast, seconds};
use crate::event::Simulated;

/// A plan with its hops.
#[derive(Serialize)]
pub(super) struct FullPlan<'a> {
    shape: String,
    source: &'a NodeName,
    depth: u16,
    predicted_seconds: Option<f64>,
    bound_seconds: Option<f64>,
    reason: &'a str,
    hops: Vec<OneHop<'a>>,
}

#[derive(Serialize)]
struct OneHop<'a> {
    child: &'a NodeName,
    parent: &'a NodeName,
    fallbacks: &'a [NodeName],
    streams: u16,
    streams_cap: u16,
    congestion_control: Option<&'a CongestionControl>,
    depth: u16,
    bytes_per_second: u64,
    finish_seconds: Option<f64>,
    limited_by: &'a str,
}

impl<'a> From<&'a Plan> for FullPlan<'a> {
    fn from(plan: &'a Plan) -> Self {
        Self {
            shape: plan.shape.to_string(),
            source: &plan.source,
            depth: plan.depth,
            predicted_seconds: forecast(plan.predicted),
            bound_seconds: forecast(plan.bound),
            reason: &plan.reason,
            hops: plan
                .hops
                .iter()
                .map(|hop| OneHop {
                    child: &hop.child,
                    parent: &hop.parent,
                    fallbacks: &hop.fallbacks,
                    streams: hop.streams,
                    streams_cap: hop.streams_cap,
                    congestion_control: hop.congestion_control.as_ref(),
                    depth: hop.depth,
                    bytes_per_second: hop.rate.bytes_per_second().round() as u64,
                    finish_seconds: forecast(hop.finish),
                    limited_by: &hop.limited_by,
                })
                .collect(),
        }
    }
}

/// A layout that was tried.
#[derive(Serialize)]
pub(super) struct OneTried<'a> {
    layout: &'a str,
    shape: String,
    predicted_seconds: f64,
    mean_seconds: f64,
    depth: u16,
    crossings: usize,
    limited_by: &'a str,
    verdict: &'a str,
}

impl<'a> From<&'a Tried> for OneTried<'a> {
    fn from(tried: &'a Tried) -> Self {
        Self {
            layout: &tried.form,
            shape: tried.shape.to_string(),
            predicted_seconds: seconds(tried.predicted),
            mean_seconds: seconds(tried.mean),
            depth: tried.depth,
            crossings: tried.crossings,
            limited_by: &tried.limited_by,
            verdict: &tried.verdict,
        }
    }
}

/// A simulation.
#[derive(Serialize)]
pub(super) struct Simulation<'a> {
    predicted_seconds: f64,
    /// `null` if a target is never done.
    seconds: Option<f64>,
    mean_seconds: f64,
    nodes: Vec<Finish<'a>>,
    moves: Vec<Move<'a>>,
    edges: Vec<Edge<'a>>,
}

#[derive(Serialize)]
struct Finish<'a> {
    node: &'a NodeName,
    finish_seconds: Option<f64>,
}

#[derive(Serialize)]
struct Move<'a> {
    seconds: f64,
    node: &'a NodeName,
    to: &'a NodeName,
}

#[derive(Serialize)]
struct Edge<'a> {
    edge: &'a str,
    from: &'a str,
    to: &'a str,
    bytes: u64,
}

impl<'a> From<&'a Simulated> for Simulation<'a> {
    fn from(simulated: &'a Simulated) -> Self {
        let outcome = &simulated.outcome;
        let finish = |(node, finish): &'a (NodeName, Option<_>)| Finish {
            node,
            finish_seconds: finish.map(seconds),
        };
        Self {
            predicted_seconds: seconds(simulated.forecast),
            seconds: outcome.last().map(seconds),
            mean_seconds: seconds(outcome.mean()),
            nodes: outcome.finishes.iter().map(finish).collect(),
            moves: outcome
                .moves
                .iter()
                .map(|step| Move {
                    seconds: seconds(step.at),
                    node: &step.node,
                    to: &step.to,
                })
                .collect(),
            edges: simulated
                .edges
                .iter()
                .map(|edge| Edge {
                    edge: &edge.name,
                    from: &edge.from,
                    to: &edge.to,
                    bytes: edge.bytes.0,
                })
                .collect(),
        }
    }
}
