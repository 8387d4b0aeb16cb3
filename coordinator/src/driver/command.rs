//! What the services ask of the driver, decoded.

use std::collections::BTreeMap;
use std::sync::Arc;

use stage_core::ask::{Question, Said};
use stage_core::assignment::{Outcome, Prepared, Progress, SourceReport};
use stage_core::bench::{Measurement, verdict::History};
use stage_core::failure::Failure;
use stage_core::id::{AskId, Epoch, JobId, NodeName, PlanVersion};
use stage_core::plan::{Facts, Plan};
use stage_proto::v1;
use tokio::sync::{oneshot, watch};

use super::asks::Answers;
use super::bench::Begun;
use super::{Cancelled, Retried, Submit};
use crate::bench::Wanted;
use crate::fleet::{Registration, Session, SessionId};

/// A job as watchers see it: always the latest, whoever is slow misses what is in between.
pub(crate) type View = watch::Receiver<Arc<v1::JobView>>;

/// One request.
pub(crate) enum Command {
    Submit {
        submit: Box<Submit>,
        reply: oneshot::Sender<Result<JobId, Failure>>,
    },
    Plan {
        submit: Box<Submit>,
        reply: oneshot::Sender<Result<Plan, Failure>>,
    },
    Watch {
        job: JobId,
        reply: oneshot::Sender<Result<View, Failure>>,
    },
    Jobs {
        limit: usize,
        reply: oneshot::Sender<Vec<v1::JobView>>,
    },
    Cancel {
        job: JobId,
        /// TARGETS; empty for the whole job.
        nodes: String,
        reply: oneshot::Sender<Result<Cancelled, Failure>>,
    },
    Retry {
        job: JobId,
        from: Option<NodeName>,
        /// The id of the new job, if there must be one.
        new: JobId,
        reply: oneshot::Sender<Result<Retried, Failure>>,
    },
    Nodes {
        reply: oneshot::Sender<Vec<v1::FleetNode>>,
    },
    Drain {
        nodes: String,
        drain: bool,
        reply: oneshot::Sender<Result<Vec<v1::FleetNode>, Failure>>,
    },
    /// A question to nodes, beside their orders.
    Ask {
        /// TARGETS.
        nodes: String,
        question: Question,
        reply: oneshot::Sender<Result<Answers, Failure>>,
    },
    /// A question to each of some nodes.
    AskEach {
        asks: Vec<(NodeName, Question)>,
        reply: oneshot::Sender<Result<Answers, Failure>>,
    },
    /// A bench wants to begin.
    Bench {
        wanted: Wanted,
        reply: oneshot::Sender<Result<Begun, Failure>>,
    },
    /// Who is not to be disturbed now.
    Busy {
        reply: oneshot::Sender<BTreeMap<NodeName, Failure>>,
    },
    /// A reading, answered when it is kept.
    Measured {
        measurement: Measurement,
        reply: oneshot::Sender<()>,
    },
    /// What pushes have taught, for people.
    Taught {
        reply: oneshot::Sender<Vec<String>>,
    },
    /// Every reading.
    History {
        reply: oneshot::Sender<History>,
    },
    /// The nodes of a TARGETS text, and what plans are made from.
    Known {
        nodes: String,
        reply: oneshot::Sender<Result<(Vec<NodeName>, Facts), Failure>>,
    },
    /// A command group's answer.
    Group {
        name: String,
        nodes: Vec<NodeName>,
    },
    /// An agent that was refused before it could be asked anything.
    Refuse {
        node: String,
        version: String,
        failure: Failure,
    },
    Register {
        registration: Box<Registration>,
        session: Session,
        reply: oneshot::Sender<Result<(), Failure>>,
    },
    Report {
        node: NodeName,
        session: SessionId,
        report: Report,
    },
    Closed {
        node: NodeName,
        session: SessionId,
    },
}

/// What an agent says.
pub(crate) enum Report {
    Heartbeat {
        count: u64,
        roots: Vec<v1::RootReport>,
    },
    Draining,
    Applied(JobId, Epoch, PlanVersion),
    Prepared(JobId, PlanVersion, Prepared),
    Progress(JobId, Progress),
    Source(JobId, SourceReport),
    Outcome(JobId, Outcome),
    Moved {
        job: JobId,
        from: NodeName,
        to: NodeName,
        why: String,
    },
    /// A part of an answer.
    Said {
        id: AskId,
        said: Said,
        last: bool,
    },
    Corrupt {
        job: JobId,
        parent: NodeName,
        chunk: u32,
    },
}
