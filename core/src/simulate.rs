//! A plan tried out on paper: when each node would finish, and what each edge would carry.
//!
//! A flow-level simulation. Hops are fluids that share the fabric max-min fairly (`shares`); what changes a rate is an
//! event (`engine`): a hop that begins, grows through slow start, catches up with its parent or ends, a node that gets
//! slow or dies (`faults`). Between events nothing is reckoned, so a terabyte costs no more than a megabyte. Relays store and
//! forward: a child's bytes begin when its parent holds a whole chunk on each stream, and stay that far behind.
//!
//! It shares with the planner the formulas for a single hop ([`crate::cost`]) and nothing of how the planner adds them
//! up: that is what it is there to check. What a plan was made from may differ from what it is tried on: the facts
//! given here are taken for the truth.

mod engine;
mod faults;
mod shares;

use std::collections::BTreeMap;
use std::time::Duration;

use self::engine::Engine;
use crate::id::NodeName;
use crate::plan::forecast::local_copy;
use crate::plan::ground::{Ground, SOURCE};
use crate::plan::{Facts, Plan, PlanError, Request};
use crate::topology::{EdgeId, Topology};
use crate::units::{ByteCount, Rate};

/// How long children take to see that their parent is gone: no frame for 3 s.
pub const DETECT: Duration = Duration::from_secs(3);

/// How long a child waits after one fallback before it dials the next.
pub const NEXT_DIAL: Duration = Duration::from_millis(250);

/// What happens to a node on the way.
#[derive(Debug, Clone, PartialEq)]
pub struct Fault {
    /// Which one.
    pub node: NodeName,
    /// When, from the start of the push.
    pub at: Duration,
    /// What.
    pub kind: FaultKind,
}

/// What may happen to a node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum FaultKind {
    /// It is gone, and does not come back.
    Dies,
    /// Its disk (the source's: in reading) does no more than this from now on.
    Disk(Rate),
    /// Its interfaces carry this share of what they did at first, from 0 to 1, both ways.
    Network(f64),
}

/// What a plan is tried on.
#[derive(Debug, Clone, Copy)]
pub struct Trial<'a> {
    /// The fabric.
    pub topology: &'a Topology,
    /// What was asked for.
    pub request: &'a Request,
    /// How fast disks, windows and paths really are.
    pub facts: &'a Facts,
    /// What happens on the way.
    pub faults: &'a [Fault],
    /// How much slower than it should an edge or a disk may turn out, from 0 (none) to below 1: each by a part of it
    /// that the seed draws.
    pub spread: f64,
    /// Equal seeds, equal draws.
    pub seed: u64,
}

/// What became of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// When each target has published, in the order of the plan's hops; `None`: never.
    pub finishes: Vec<(NodeName, Option<Duration>)>,
    /// What each edge carried; those that carried nothing are left out.
    pub edges: BTreeMap<EdgeId, ByteCount>,
    /// Who went to another parent, in order.
    pub moves: Vec<Move>,
}

impl Outcome {
    /// When the last target has published; `None` if one never does.
    pub fn last(&self) -> Option<Duration> {
        self.finishes
            .iter()
            .map(|(_, finish)| *finish)
            .collect::<Option<Vec<_>>>()
            .and_then(|all| all.into_iter().max())
    }

    /// The mean finish of those that do finish; zero if none does.
    pub fn mean(&self) -> Duration {
        let done: Vec<f64> = self
            .finishes
            .iter()
            .filter_map(|(_, finish)| finish.map(|finish| finish.as_secs_f64()))
            .collect();
        let mean = done.iter().sum::<f64>() / done.len().max(1) as f64;
        Duration::try_from_secs_f64(mean).unwrap_or(Duration::MAX)
    }
}

/// A node that changed its parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Move {
    /// When it dialled the new one.
    pub at: Duration,
    /// Who.
    pub node: NodeName,
    /// Whom it asks now.
    pub to: NodeName,
}

/// Tries a plan.
///
/// # Errors
/// [`PlanError`] when a node of the request, the plan or a fault is not in the topology or not in the plan, or a hop
/// has no way.
pub fn simulate(plan: &Plan, trial: &Trial<'_>) -> Result<Outcome, PlanError> {
    let ground = Ground::survey(trial.topology, trial.request, trial.facts)?;
    let ordinals: BTreeMap<&NodeName, usize> =
        (0..ground.len()).map(|node| (ground.name(node), node)).collect();
    let find = |name: &NodeName| {
        ordinals
            .get(name)
            .copied()
            .ok_or_else(|| PlanError::UnknownNode(name.clone()))
    };
    let mut engine = Engine::new(&ground, trial);
    for hop in &plan.hops {
        let (child, parent) = (find(&hop.child)?, find(&hop.parent)?);
        if child == SOURCE {
            continue;
        }
        let fallbacks = hop.fallbacks.iter().map(find).collect::<Result<Vec<_>, _>>()?;
        if !engine.plan_hop(child, parent, fallbacks, hop.streams) {
            return Err(PlanError::Unreachable(hop.child.clone()));
        }
    }
    for (index, fault) in trial.faults.iter().enumerate() {
        engine.expect(index, find(&fault.node)?, fault.at);
    }
    engine.run();

    let local = local_copy(&ground).finish;
    let finishes = plan
        .hops
        .iter()
        .map(|hop| {
            let finish = match find(&hop.child)? {
                SOURCE => Some(local),
                child => engine.finish(child),
            };
            Ok((hop.child.clone(), finish))
        })
        .collect::<Result<Vec<_>, PlanError>>()?;
    let (edges, moves) = engine.account();
    Ok(Outcome {
        finishes,
        edges,
        moves,
    })
}

/// A number from 0 to below 1 that depends on the seed and the index alone (splitmix64: Steele, Lea, Flood 2014).
fn draw(seed: u64, index: u64) -> f64 {
    let mut bits = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    (bits >> 11) as f64 / (1u64 << 53) as f64
}
