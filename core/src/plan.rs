//! Who gets the payload from whom, and when it will be there.
//!
//! [`plan`] is a function of its arguments: equal input, equal plan. The way through it: names become ordinals
//! (`ground`), the fabric is walked depth first from the source (`order`), each shape is laid along that walk (`shapes`),
//! hops that share a link are given their fair shares (`contention`), which makes a forecast (`forecast`), and the best
//! one is taken (`choice`).

mod choice;
pub(crate) mod contention;
mod facts;
pub(crate) mod forecast;
pub(crate) mod ground;
mod order;
mod shapes;

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use self::choice::Choice;
pub use self::facts::{Controls, Facts, HopFacts, NodeFacts, PathFacts, WindowLimits};
use self::ground::{Ground, SOURCE};
use self::order::Walk;
use crate::id::{CongestionControl, NodeName};
use crate::topology::Topology;
use crate::units::{ByteCount, Rate};

/// What shall be planned.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Where the payload is.
    pub source: NodeName,
    /// Who shall have it, in the order in which results are shown; no duplicates. The source may be among them
    /// (a local copy): it is then a leaf child of itself.
    pub targets: Vec<NodeName>,
    /// Bytes in the payload.
    pub size: ByteCount,
    /// The shape, or `auto`.
    pub shape: ShapeChoice,
    /// Streams on each hop, or `None` for auto.
    pub streams: Option<u16>,
    /// What each node may send.
    pub limit: Option<Rate>,
    /// What the source may read.
    pub source_limit: Option<Rate>,
    /// Data travels encrypted.
    pub encrypted: bool,
}

/// `--shape`.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum ShapeChoice {
    /// The planner chooses.
    #[default]
    Auto,
    /// This one.
    Fixed(Shape),
}

/// The form of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Shape {
    /// The source serves every target.
    Star,
    /// Each target serves the next.
    Chain,
    /// Each node serves so many (2 unless said).
    Tree(u16),
}

/// A text that names no shape.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a shape: use auto, star, chain, tree or tree:K with K from 1 to 64")]
pub struct ShapeError(String);

impl FromStr for Shape {
    type Err = ShapeError;
    fn from_str(text: &str) -> Result<Self, ShapeError> {
        match text {
            "star" => Ok(Self::Star),
            "chain" => Ok(Self::Chain),
            "tree" => Ok(Self::Tree(2)),
            _ => text
                .strip_prefix("tree:")
                .and_then(|k| k.parse().ok())
                .filter(|k| (1..=64).contains(k))
                .map(Self::Tree)
                .ok_or_else(|| ShapeError(text.to_owned())),
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Star => f.pad("star"),
            Self::Chain => f.pad("chain"),
            Self::Tree(k) => f.pad(&format!("tree:{k}")),
        }
    }
}

impl FromStr for ShapeChoice {
    type Err = ShapeError;
    fn from_str(text: &str) -> Result<Self, ShapeError> {
        if text == "auto" {
            Ok(Self::Auto)
        } else {
            text.parse().map(Self::Fixed)
        }
    }
}

impl fmt::Display for ShapeChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.pad("auto"),
            Self::Fixed(shape) => shape.fmt(f),
        }
    }
}

macro_rules! text_form {
    ($type:ty) => {
        impl TryFrom<String> for $type {
            type Error = ShapeError;
            fn try_from(text: String) -> Result<Self, ShapeError> {
                text.parse()
            }
        }
        impl From<$type> for String {
            fn from(shape: $type) -> Self {
                shape.to_string()
            }
        }
    };
}
text_form!(Shape);
text_form!(ShapeChoice);

/// The plan: for each target, whom it asks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Its shape.
    pub shape: Shape,
    /// Where the payload is.
    pub source: NodeName,
    /// One for each target, in the request's order.
    pub hops: Vec<Hop>,
    /// The longest way from the source, in hops.
    pub depth: u16,
    /// When the last target will have published, from the start of the push; zero where nobody knows.
    #[serde(with = "seconds")]
    pub predicted: Duration,
    /// The time that no plan could beat; zero where nobody knows.
    #[serde(with = "seconds")]
    pub bound: Duration,
    /// Why this one: a sentence for people.
    pub reason: String,
}

impl Plan {
    /// The hop by which this target receives.
    pub fn hop(&self, child: &NodeName) -> Option<&Hop> {
        self.hops.iter().find(|hop| hop.child == *child)
    }

    /// Takes back all that was said of times: how much comes is not known.
    pub fn forget_times(&mut self) {
        self.predicted = Duration::ZERO;
        self.bound = Duration::ZERO;
        for hop in &mut self.hops {
            hop.finish = Duration::ZERO;
        }
        self.reason = format!("how much comes is not known; for a long stream, {}", self.reason);
    }

    /// The hops from the source down: each after its parent's, and all below a node behind it. With its depth as
    /// indentation this draws the plan. A local copy comes first.
    pub fn order(&self) -> Vec<&Hop> {
        let mut below: BTreeMap<&NodeName, Vec<&Hop>> = BTreeMap::new();
        for hop in self.hops.iter().rev() {
            below.entry(&hop.parent).or_default().push(hop);
        }
        let mut stack = below.remove(&self.source).unwrap_or_default();
        stack.sort_by_key(|hop| hop.child == self.source);
        let mut order = Vec::with_capacity(self.hops.len());
        while let Some(hop) = stack.pop() {
            order.push(hop);
            stack.extend(below.remove(&hop.child).unwrap_or_default());
        }
        order
    }

    /// Whom this node serves, in plan order.
    pub fn children<'a>(&'a self, parent: &'a NodeName) -> impl Iterator<Item = &'a NodeName> + 'a {
        self.hops
            .iter()
            .filter(move |hop| hop.parent == *parent)
            .map(|hop| &hop.child)
    }
}

/// One parent → child edge of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hop {
    /// Who receives.
    pub child: NodeName,
    /// Whom it asks first.
    pub parent: NodeName,
    /// Whom it asks when the parent fails: up to three ancestors above the parent, nearest first, then the source;
    /// none twice, never a descendant. Empty for a child of the source.
    pub fallbacks: Vec<NodeName>,
    /// Streams: the number by hand, or the expected one under auto.
    pub streams: u16,
    /// With auto: the most that the child may choose.
    pub streams_cap: u16,
    /// With auto: the fewest. 1, unless loss or a measurement says how many are needed, which the child cannot see in its
    /// round trip.
    pub streams_least: u16,
    /// The congestion control that the parent's connections ask for; `None`: its host's own.
    #[serde(default)]
    pub congestion_control: Option<CongestionControl>,
    /// Hops from the source.
    pub depth: u16,
    /// The steady rate expected on this hop.
    #[serde(with = "bytes_per_second")]
    pub rate: Rate,
    /// When this target will have published.
    #[serde(with = "seconds")]
    pub finish: Duration,
    /// What limits this hop, in a few words: "link rack1-core", "disk of n3", "interface of n1".
    pub limited_by: String,
}

/// One layout that the planner tried.
#[derive(Debug, Clone, PartialEq)]
pub struct Tried {
    /// The layout in words: "chain", "chains within racks under tree:2", "tree:4, slow nodes beside it".
    pub form: String,
    /// What a plan of it is called.
    pub shape: Shape,
    /// When the last target would have published.
    pub predicted: Duration,
    /// When the mean node would have.
    pub mean: Duration,
    /// The longest way from the source, in hops.
    pub depth: u16,
    /// How often links between switches are crossed, by all hops together.
    pub crossings: usize,
    /// What limits the last target.
    pub limited_by: String,
    /// "chosen", or why not: a few words for people.
    pub verdict: String,
}

mod seconds {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(time: &Duration, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_f64(time.as_secs_f64())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<Duration, D::Error> {
        Duration::try_from_secs_f64(f64::deserialize(input)?).map_err(serde::de::Error::custom)
    }
}

mod bytes_per_second {
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::units::Rate;

    pub(super) fn serialize<S: Serializer>(rate: &Rate, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_f64(rate.bytes_per_second())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<Rate, D::Error> {
        f64::deserialize(input).map(Rate::from_bytes_per_second)
    }
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A node of the request is not in the topology.
    #[error("{0} is not in the topology")]
    UnknownNode(NodeName),
    /// No target at all.
    #[error("there is no target")]
    NoTarget,
    /// A target that no network joins with the source or with any other target.
    #[error("no network joins {0} with the source")]
    Unreachable(NodeName),
}

/// Plans a distribution.
///
/// Where neither the topology nor the facts say, a disk is not a limit, the RTT is 0.1 ms for each switch on the way, and
/// a host has Linux's default windows. Links carry [`crate::cost::WIRE_EFFICIENCY`] of their capacity as payload.
///
/// # Errors
/// [`PlanError`] names the node that stands in the way.
pub fn plan(topology: &Topology, request: &Request, facts: &Facts) -> Result<Plan, PlanError> {
    plan_explained(topology, request, facts).map(|(plan, _)| plan)
}

/// What hops, each (parent, child), would be that a plan did not foresee, each alone on its way and below the source; without
/// those that no network joins, and those to or from nodes that are not in the request.
///
/// # Errors
/// As [`plan`].
pub fn new_hops(
    topology: &Topology,
    request: &Request,
    facts: &Facts,
    edges: &[(NodeName, NodeName)],
) -> Result<Vec<Hop>, PlanError> {
    let ground = Ground::survey(topology, request, facts)?;
    let seats: BTreeMap<&NodeName, usize> = (0..ground.len()).map(|at| (ground.name(at), at)).collect();
    let new_hop = |(parent, child): &(NodeName, NodeName)| {
        let (parent, child) = (*seats.get(parent)?, *seats.get(child)?);
        let forecast = forecast::new_hop(&ground, parent, child)?;
        Some(hop(&ground, parent, child, &forecast, Vec::new()))
    };
    Ok(edges.iter().filter_map(new_hop).collect())
}

fn hop(
    ground: &Ground<'_>,
    parent: usize,
    child: usize,
    forecast: &forecast::HopForecast,
    fallbacks: Vec<NodeName>,
) -> Hop {
    Hop {
        child: ground.name(child).clone(),
        parent: ground.name(parent).clone(),
        fallbacks,
        streams: forecast.streams,
        streams_cap: forecast.streams_cap,
        streams_least: forecast.streams_least,
        congestion_control: forecast.control.clone(),
        depth: forecast.depth,
        rate: forecast.rate,
        finish: forecast.finish,
        limited_by: forecast.cause.words(ground),
    }
}

/// [`plan`] with all that was tried: the plan's layout first, then the others from best to worst.
///
/// # Errors
/// As [`plan`].
pub fn plan_explained(
    topology: &Topology,
    request: &Request,
    facts: &Facts,
) -> Result<(Plan, Vec<Tried>), PlanError> {
    let ground = Ground::survey(topology, request, facts)?;
    let walk = Walk::new(&ground)?;
    let Choice {
        chosen,
        reason,
        tried,
    } = choice::choose(&ground, &walk);

    let local = forecast::local_copy(&ground);
    let hops: Vec<Hop> = ground
        .seats
        .iter()
        .map(|&seat| {
            let (forecast, parent, fallbacks) = if seat == SOURCE {
                (&local, SOURCE, Vec::new())
            } else {
                let fallbacks = fallbacks(&ground, &walk, &chosen.parents, seat);
                (&chosen.forecast.hops[seat - 1], chosen.parents[seat], fallbacks)
            };
            hop(&ground, parent, seat, forecast, fallbacks)
        })
        .collect();
    let plan = Plan {
        shape: chosen.shape,
        source: request.source.clone(),
        depth: hops.iter().map(|hop| hop.depth).max().unwrap_or(0),
        predicted: hops.iter().map(|hop| hop.finish).max().unwrap_or_default(),
        bound: forecast::bound(&ground, walk.latency),
        hops,
        reason,
    };
    Ok((plan, tried))
}

/// Up to three ancestors above the parent, nearest first, then the source: those that the child can reach.
fn fallbacks(ground: &Ground<'_>, walk: &Walk, parents: &[usize], child: usize) -> Vec<NodeName> {
    const ANCESTORS: usize = 3;
    let mut ancestors = Vec::with_capacity(ANCESTORS + 1);
    let mut at = parents[child];
    while at != SOURCE && ancestors.len() < ANCESTORS {
        at = parents[at];
        ancestors.push(at);
    }
    if at != SOURCE {
        ancestors.push(SOURCE);
    }
    ancestors
        .into_iter()
        .filter(|&ancestor| walk.one_network || ground.route(ancestor, child).is_some())
        .map(|ancestor| ground.name(ancestor).clone())
        .collect()
}
