//! The life of a job: a state machine that neither waits nor looks at a clock.
//!
//! [`Job::apply`] takes one [`Event`] and gives the [`Effect`]s that follow, in the order in which they must be
//! performed: persist, then tell agents, then tell watchers. What a node is told is never a delta: after each event
//! the order that each touched node should have is derived anew from the job's state (`orders`), and sent only
//! where it differs from what the node was last told. So a lost, repeated or late message can change nothing, and a
//! coordinator that starts again from the records sends the same orders.
//!
//! | room | holds |
//! |---|---|
//! | `apply` | events, and what each changes at once |
//! | `reports` | those that agents and the planner send |
//! | `advance` | from phase to phase |
//! | `orders` | what each node should be told |
//! | `replan` | new parents while the job runs |
//! | `slow` | new parents for who waits for a slow node |
//! | `retry` | taking up again what waits or has failed |
//! | `view` | what people see, and the exit code |
//! | `seen` | what the nodes have told of rates and waits, for a verdict |

mod advance;
mod apply;
mod orders;
mod record;
mod replan;
mod reports;
mod retry;
mod seen;
mod slow;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use crate::assignment::{Assignment, Order, Outcome, Prepared, Progress, SourceReport};
use crate::failure::Failure;
use crate::id::{Epoch, JobId, NodeName, PlanVersion};
use crate::plan::{Hop, Plan, PlanError, Request};
use crate::verdict::SlowHop;
use crate::waits::Waits;

pub use record::{Changes, Copied, Phase, Record, Spec, TargetRecord, TargetState, UnfitRule};
pub use slow::SLOW_AFTER;
pub use view::{JobView, NodeView};

/// Who says nothing for so long while a job is prepared is away.
pub const PREPARE_DEADLINE: Duration = Duration::from_secs(3);
/// The same for the source, whose file may lie on a slow file system.
pub const SOURCE_DEADLINE: Duration = Duration::from_secs(10);
/// After a start of the coordinator agents get so long to connect before a submit takes them for away.
pub const CONNECT_GRACE: Duration = Duration::from_secs(5);
/// An agent that says nothing for so long is away.
pub const LEASE: Duration = Duration::from_secs(10);
/// A source that was not heard for so long is lost.
pub const SOURCE_LOST: Duration = Duration::from_secs(60);
/// Unfit targets are asked again this often.
pub const PROBE_EVERY: Duration = Duration::from_secs(30);
/// What the targets have of a job that lost its source is kept so long.
pub const KEEP: Duration = Duration::from_secs(24 * 3600);
/// An order that a connected agent has not applied is sent again after this.
pub const RESEND: Duration = Duration::from_secs(5);
/// Remarks kept; older ones are dropped.
const REMARKS: usize = 20;

/// The present, as the caller sees it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Now {
    /// Monotonic, since the coordinator started: all deadlines go by it.
    pub up: Duration,
    /// Wall clock in milliseconds since 1970: for display, and for what must outlive a restart.
    pub unix_ms: u64,
}

/// Where a node's agent is.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// Not heard of since the coordinator started.
    #[default]
    Unknown,
    /// Connected, or its lease still runs.
    Up,
    /// Connected, and about to leave: it gets no new children.
    Leaving,
    /// Its lease ended, or it did not come in time.
    Away,
}

/// What the job knows of a node beside its own part in the job.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Standing {
    /// Where its agent is.
    pub presence: Presence,
    /// The administrator declared it away.
    pub drained: bool,
    /// The data addresses that its agent announced; empty if it did not, yet.
    pub addresses: Vec<SocketAddr>,
}

/// What can happen to a job.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The job was made, or read back after a start.
    Start,
    /// A node's agent registered.
    Up {
        /// Which node.
        node: NodeName,
        /// Its data addresses, best first.
        addresses: Vec<SocketAddr>,
        /// It has something of this job.
        held: bool,
    },
    /// A node's lease ended, or it did not come back in time after a start.
    Away(NodeName),
    /// A node's agent is about to stop: its children should move.
    Leaving(NodeName),
    /// The administrator declared a node away, or took that back.
    Drained(NodeName, bool),
    /// The free space of a node's roots, or their state, changed.
    Space(NodeName),
    /// A node has taken an order up.
    Applied(NodeName, Epoch, PlanVersion),
    /// A node's answer to a prepare order.
    Prepared(NodeName, PlanVersion, Prepared),
    /// The planner's answer to [`Effect::Plan`].
    Planned(Result<Plan, PlanError>),
    /// The planner's answer to [`Effect::NewHops`].
    NewHops(Vec<Hop>),
    /// A node's counters.
    Progress(NodeName, Progress),
    /// What the source says at the end of its reading.
    Source(NodeName, SourceReport),
    /// How a target ended.
    Outcome(NodeName, Outcome),
    /// A child goes on with another parent.
    Moved {
        /// The child.
        node: NodeName,
        /// The parent that it left.
        from: NodeName,
        /// The one that it asks now.
        to: NodeName,
        /// Why, for people.
        why: String,
    },
    /// A chunk came with bytes that do not fit its digest.
    Corrupt {
        /// Who found it.
        node: NodeName,
        /// Who sent it.
        parent: NodeName,
        /// Which chunk.
        chunk: u32,
    },
    /// The hops that are slow at present ([`crate::verdict::slow`]): said again and again, also that there are none.
    Slow(Vec<SlowHop>),
    /// What limited the job, in words; said when it has settled.
    Judged(String),
    /// Someone cancelled the job, or these nodes' part in it.
    Cancel(Option<Vec<NodeName>>),
    /// Someone wants what is missing tried again now. Of a job that has ended only where [`Job::can_be_revived`].
    Retry {
        /// Another node that has the payload under the same path; only where the job is revived.
        source: Option<NodeName>,
        /// Where all nodes concerned are: one that has ended was not told.
        standing: BTreeMap<NodeName, Standing>,
    },
    /// A newer job took the path over on these nodes.
    Superseded(JobId, Vec<NodeName>),
    /// The time of [`Effect::Wake`] has come.
    Tick,
}

/// What must be done because of an event, in this order.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// Commit this before anything after it.
    Persist(Box<Changes>),
    /// Tell a node. Dropped without harm if its agent is not connected: it is told again when it is.
    Send(NodeName, Box<Assignment>),
    /// Plan this and feed [`Event::Planned`].
    Plan(Request),
    /// Lay these hops, each (parent, child), and feed [`Event::NewHops`].
    NewHops(Request, Vec<(NodeName, NodeName)>),
    /// Feed [`Event::Tick`] at this time (as [`Now::up`]), unless another wake replaced it.
    Wake(Duration),
    /// Watchers should see the job: `true` if a state changed, `false` if only counters did.
    Notify(bool),
}

/// What a node was last told.
#[derive(Debug, Clone, PartialEq)]
struct Told {
    order: Order,
    ask: u32,
    version: PlanVersion,
    applied: bool,
    /// The agent connected anew: it is told again.
    stale: bool,
    at: Duration,
}

/// What is known of a target and not worth storing.
#[derive(Debug, Default, Clone, PartialEq)]
struct Live {
    progress: Progress,
    /// When the first bytes were seen, and a point at most some seconds back for the present rate.
    first: Option<Duration>,
    mark: Option<(Duration, u64)>,
    last: Option<(Duration, u64)>,
    /// Where its threads' time had gone at that point, and what it had received.
    mark_waits: Waits,
    mark_received: u64,
    /// With the first bytes, and with the last that came: what is between has no begin and no end in it.
    began: Option<(Duration, u64)>,
    grew: Option<(Duration, u64)>,
    /// It had more parents than one.
    moved: bool,
    /// When it was asked last.
    asked_at: Option<Duration>,
    /// The answer to a prepare order is awaited until then.
    deadline: Option<Duration>,
    /// An unfit target that is asked again.
    probing: bool,
    probe_at: Option<Duration>,
    /// One more for each prepare order, so that an equal order is sent again.
    ask: u32,
}

/// One push.
#[derive(Debug, Clone)]
pub struct Job {
    spec: Spec,
    record: Record,
    plan: Option<Plan>,
    targets: Vec<TargetRecord>,

    index: BTreeMap<NodeName, usize>,
    live: Vec<Live>,
    standing: BTreeMap<NodeName, Standing>,
    epoch: Epoch,
    now: Now,
    told: BTreeMap<NodeName, Told>,
    /// Who said at registration that it has something of the job.
    holds: BTreeSet<NodeName>,
    source_progress: Progress,
    /// The source's reading, in the same form: what it has read counts as kept.
    source_live: Live,
    source_deadline: Option<Duration>,
    source_gone_since: Option<Duration>,
    slowness: slow::Slowness,
    wait_until: Duration,
    children: BTreeMap<NodeName, Vec<NodeName>>,
    /// Where in the plan each child's hop is.
    hops: BTreeMap<NodeName, usize>,

    touched: BTreeSet<NodeName>,
    dirty_record: bool,
    dirty_plan: bool,
    dirty_targets: BTreeSet<usize>,
    /// Whose parent is another than the plan had for it.
    new_hops: BTreeSet<NodeName>,
    want_plan: bool,
    notify: Option<bool>,
}

impl Job {
    /// A new job. Nothing happens before [`Event::Start`].
    pub fn new(spec: Spec, epoch: Epoch, standing: BTreeMap<NodeName, Standing>, now: Now) -> Self {
        let record = Record::new(now.unix_ms);
        let targets = vec![TargetRecord::default(); spec.targets.len()];
        let mut job = Self::build(spec, record, None, targets, epoch, standing, now);
        job.dirty_record = true;
        job.dirty_targets = (0..job.targets.len()).collect();
        job
    }

    /// A job as it was committed last, under the new epoch. Nothing happens before [`Event::Start`].
    /// `targets` are in the order of the spec's.
    pub fn restore(
        spec: Spec,
        record: Record,
        plan: Option<Plan>,
        targets: Vec<TargetRecord>,
        epoch: Epoch,
        standing: BTreeMap<NodeName, Standing>,
        now: Now,
    ) -> Self {
        let mut job = Self::build(spec, record, plan, targets, epoch, standing, now);
        for (node, addresses) in job.record.addresses.clone() {
            let standing = job.standing.entry(node).or_default();
            if standing.addresses.is_empty() {
                standing.addresses = addresses;
            }
        }
        if matches!(job.record.phase, Phase::Queued | Phase::Preparing) {
            // Nobody moved a byte yet: the round begins again.
            for target in &mut job.targets {
                if !target.state.is_withdrawn() {
                    *target = TargetRecord {
                        drained: target.drained,
                        ..TargetRecord::default()
                    };
                }
            }
            job.record.phase = Phase::Queued;
            job.record.payload = None;
        }
        if !job.record.phase.is_ended() {
            // Agents say their answers again: none may be taken for the answer to a question of this epoch.
            job.record.version = job.record.version.next();
            job.dirty_record = true;
        }
        job.index_children();
        job
    }

    fn build(
        spec: Spec,
        record: Record,
        plan: Option<Plan>,
        targets: Vec<TargetRecord>,
        epoch: Epoch,
        standing: BTreeMap<NodeName, Standing>,
        now: Now,
    ) -> Self {
        let index = spec
            .targets
            .iter()
            .enumerate()
            .map(|(i, n)| (n.clone(), i))
            .collect();
        let waited = Duration::from_millis(now.unix_ms.saturating_sub(record.awaited_unix_ms));
        Self {
            wait_until: now.up + spec.wait_for.saturating_sub(waited),
            index,
            live: vec![Live::default(); targets.len()],
            standing,
            epoch,
            now,
            told: BTreeMap::new(),
            holds: BTreeSet::new(),
            source_progress: Progress {
                source_bytes_read: record.source_bytes_read,
                bytes_sent: record.source_bytes_sent,
                sha256_bytes: record.sha256_bytes,
                ..Progress::default()
            },
            source_live: Live::default(),
            source_deadline: None,
            source_gone_since: None,
            slowness: slow::Slowness::default(),
            children: BTreeMap::new(),
            hops: BTreeMap::new(),
            touched: BTreeSet::new(),
            dirty_record: false,
            dirty_plan: false,
            dirty_targets: BTreeSet::new(),
            new_hops: BTreeSet::new(),
            want_plan: false,
            notify: None,
            spec,
            record,
            plan,
            targets,
        }
    }

    /// What was asked for.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The job's own state.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// The plan in force.
    pub fn plan(&self) -> Option<&Plan> {
        self.plan.as_ref()
    }

    /// The targets' states, in target order.
    pub fn targets(&self) -> &[TargetRecord] {
        &self.targets
    }

    /// Where the job is in its life.
    pub fn phase(&self) -> Phase {
        self.record.phase
    }

    /// Whether the node has a part in the job.
    pub fn concerns(&self, node: &NodeName) -> bool {
        *node == self.spec.source || self.index.contains_key(node) || self.record.former.contains(node)
    }

    /// The connected nodes that were told something and have not said yet that they did it.
    pub fn unapplied(&self) -> impl Iterator<Item = &NodeName> {
        self.told
            .iter()
            .filter(|(node, told)| !told.applied && self.is_up(node))
            .map(|(node, _)| node)
    }

    /// The nodes on which the job would still write under this job's path: those that a newer push supersedes.
    pub fn open_targets(&self) -> impl Iterator<Item = &NodeName> {
        let ended = self.record.phase.is_ended();
        self.spec
            .targets
            .iter()
            .zip(&self.targets)
            .filter(move |(_, target)| !ended && !target.state.is_ended())
            .map(|(node, _)| node)
    }

    fn standing(&self, node: &NodeName) -> &Standing {
        static NOBODY: Standing = Standing {
            presence: Presence::Unknown,
            drained: false,
            addresses: Vec::new(),
        };
        self.standing.get(node).unwrap_or(&NOBODY)
    }

    fn hop(&self, child: &NodeName) -> Option<&Hop> {
        self.plan.as_ref()?.hops.get(*self.hops.get(child)?)
    }

    fn is_up(&self, node: &NodeName) -> bool {
        matches!(self.standing(node).presence, Presence::Up | Presence::Leaving)
    }

    fn remark(&mut self, text: String) {
        self.record.remarks.push(text);
        let surplus = self.record.remarks.len().saturating_sub(REMARKS);
        self.record.remarks.drain(..surplus);
        self.dirty_record = true;
        self.changed();
    }

    fn changed(&mut self) {
        self.notify = Some(true);
    }

    fn touch(&mut self, node: &NodeName) {
        if !self.touched.contains(node) {
            self.touched.insert(node.clone());
        }
    }

    fn touch_all(&mut self) {
        self.touched.insert(self.spec.source.clone());
        self.touched.extend(self.spec.targets.iter().cloned());
        self.touched.extend(self.record.former.iter().cloned());
    }

    fn set_phase(&mut self, phase: Phase) {
        if self.record.phase != phase {
            self.record.phase = phase;
            self.dirty_record = true;
            self.changed();
            if phase.is_ended() {
                self.record.ended_unix_ms = Some(self.now.unix_ms);
            }
            self.touch_all();
        }
    }

    fn set_state(&mut self, at: usize, state: TargetState, failure: Option<Failure>) {
        let failure = failure.map(|failure| failure.on(&self.spec.targets[at]));
        let target = &mut self.targets[at];
        if target.state != state || target.failure != failure {
            target.state = state;
            target.failure = failure;
            self.dirty_targets.insert(at);
            self.changed();
            let node = self.spec.targets[at].clone();
            self.touch(&node);
            if let Some(parent) = self.hop(&node).map(|hop| hop.parent.clone()) {
                self.touch(&parent);
            }
        }
    }
}
