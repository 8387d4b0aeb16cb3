//! What of a job is stored, and nothing else: the spec once, the rest when it changed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::assignment::{Final, TargetSpec};
use crate::digest::{ChunkHash, FileDigest};
use crate::failure::Failure;
use crate::id::{JobId, JobKey, NodeName, PlanVersion};
use crate::payload::{Expectation, Payload, SourcePath, Walk};
use crate::plan::{Plan, ShapeChoice};
use crate::units::Rate;

/// `--unfit`: what to do about targets that cannot take the payload now.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum UnfitRule {
    /// Start with the fit ones and fill the others when they become fit.
    #[default]
    Wait,
    /// Leave them out.
    Skip,
    /// Move nothing at all.
    Fail,
}

/// What was asked for. Never changes, but for the source, which a retry may name anew.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// The job's id, made by the client.
    pub id: JobId,
    /// Proves membership.
    pub key: JobKey,
    /// Which function digests chunks.
    pub hash: ChunkHash,
    /// Where the payload is.
    pub source: NodeName,
    /// What of it is sent, and under which names.
    pub paths: Vec<SourcePath>,
    /// What of directories is sent.
    pub walk: Walk,
    /// Where it shall lie on every target.
    pub target: TargetSpec,
    /// The targets, each once, in the order in which results are shown.
    pub targets: Vec<NodeName>,
    /// `--shape`.
    pub shape: ShapeChoice,
    /// `--streams`, `None` for auto.
    pub streams: Option<u16>,
    /// `--limit`.
    #[serde(with = "rate")]
    pub limit: Option<Rate>,
    /// `--source-limit`.
    #[serde(with = "rate")]
    pub source_limit: Option<Rate>,
    /// `--unfit`.
    pub unfit: UnfitRule,
    /// `--wait-for`: how long after the submit, or the last retry, unfit targets are awaited.
    pub wait_for: Duration,
    /// `--expect`: publish only if the files' digests are these.
    pub expect: Vec<Expectation>,
    /// Data travels encrypted.
    pub encrypted: bool,
}

impl Spec {
    /// Whether these paths would be published under the same names, no more and no less.
    pub fn publishes_the_same_names_as(&self, paths: &[SourcePath]) -> bool {
        self.paths
            .iter()
            .map(|path| &path.name)
            .eq(paths.iter().map(|path| &path.name))
    }

    /// Whether both publish something under the same name.
    pub fn shares_a_name_with(&self, other: &Self) -> bool {
        let names = |spec: &Self| {
            spec.paths
                .iter()
                .map(|path| path.name.clone())
                .collect::<BTreeSet<_>>()
        };
        !names(self).is_disjoint(&names(other))
    }

    /// Whether the payload comes through a pipe.
    pub fn is_stream(&self) -> bool {
        self.paths.iter().any(SourcePath::is_stream)
    }

    /// The payload's name as text fit for a terminal.
    pub fn name(&self) -> String {
        let shown = |path: &SourcePath| {
            String::from_utf8_lossy(&path.name)
                .chars()
                .map(|c| if c.is_control() { '\u{fffd}' } else { c })
                .collect::<String>()
        };
        match self.paths.as_slice() {
            [] => String::new(),
            [only] => shown(only),
            [first, others @ ..] => format!("{} and {} more", shown(first), others.len()),
        }
    }
}

mod rate {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::units::Rate;

    pub(super) fn serialize<S: Serializer>(rate: &Option<Rate>, out: S) -> Result<S::Ok, S::Error> {
        rate.map(Rate::bytes_per_second).serialize(out)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Rate>, D::Error> {
        Ok(Option::<f64>::deserialize(input)?.map(Rate::from_bytes_per_second))
    }
}

/// Where a job is in its life.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    /// The source's agent has not come yet.
    #[default]
    Queued,
    /// Source and targets are asked.
    Preparing,
    /// The planner is at work.
    Planning,
    /// Bytes move.
    Running,
    /// Every fit target has ended; the file's SHA-256 is still awaited.
    Finishing,
    /// Every target has it. Ended.
    Done,
    /// The fit ones have it, others are awaited.
    Open,
    /// Some have it, the others will not. Ended.
    Partial,
    /// None has it. Ended.
    Failed,
    /// Someone cancelled it. Ended.
    Cancelled,
}

impl Phase {
    /// Whether nothing will happen any more.
    pub fn is_ended(self) -> bool {
        matches!(self, Self::Done | Self::Partial | Self::Failed | Self::Cancelled)
    }

    /// Whether the job has a plan and nodes at work.
    pub fn is_running(self) -> bool {
        matches!(self, Self::Running | Self::Finishing | Self::Open)
    }

    /// The word for people and scripts.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Preparing => "preparing",
            Self::Planning => "planning",
            Self::Running => "running",
            Self::Finishing => "finishing",
            Self::Done => "done",
            Self::Open => "open",
            Self::Partial => "partial",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Where a target is.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TargetState {
    /// Not asked yet.
    #[default]
    Waiting,
    /// Asked whether it can take the payload.
    Preparing,
    /// It can; space is reserved.
    Ready,
    /// It has been told to receive.
    Receiving,
    /// It has every chunk and waits for FINAL, or is publishing.
    Verified,
    /// It has the file under its final name.
    Published,
    /// Something stands there, and `--if-exists skip` says to leave it.
    Skipped,
    /// It cannot take the payload now.
    Unfit,
    /// It failed for good.
    Failed,
    /// A newer push took the path over.
    Superseded,
    /// Someone cancelled it.
    Cancelled,
}

impl TargetState {
    /// Whether it has what was asked for.
    pub fn is_good(self) -> bool {
        matches!(self, Self::Published | Self::Skipped)
    }

    /// Whether it was taken out of the job by someone.
    pub fn is_withdrawn(self) -> bool {
        matches!(self, Self::Superseded | Self::Cancelled)
    }

    /// Whether nothing will happen to it any more. An unfit one may become fit.
    pub fn is_ended(self) -> bool {
        self.is_good() || self.is_withdrawn() || self == Self::Failed
    }

    /// Whether the job waits for it to end.
    pub fn is_busy(self) -> bool {
        matches!(
            self,
            Self::Waiting | Self::Preparing | Self::Ready | Self::Receiving | Self::Verified
        )
    }

    /// Whether it has, or is getting, chunks that others may ask for.
    pub fn is_member(self) -> bool {
        matches!(
            self,
            Self::Ready | Self::Receiving | Self::Verified | Self::Published
        )
    }

    /// The word for people and scripts.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Preparing => "preparing",
            Self::Ready => "ready",
            Self::Receiving => "receiving",
            Self::Verified => "verified",
            Self::Published => "published",
            Self::Skipped => "skipped",
            Self::Unfit => "unfit",
            Self::Failed => "failed",
            Self::Superseded => "superseded",
            Self::Cancelled => "cancelled",
        }
    }
}

/// What a published target reported.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copied {
    /// No payload byte moved.
    pub already: bool,
    /// Payload bytes received over the network.
    pub bytes_received: u64,
    /// From the first order to the publish.
    pub took: Duration,
}

/// The stored part of a target.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetRecord {
    /// Where it is.
    pub state: TargetState,
    /// The final path there, as text.
    pub path: String,
    /// A file of the same size stands there.
    pub candidate: bool,
    /// Why it is unfit or failed.
    pub failure: Option<Failure>,
    /// What it reported when it published; also one that came before FINAL and counts with it.
    pub copied: Option<Copied>,
    /// The newer job.
    pub superseded_by: Option<JobId>,
    /// The administrator declared the node away while this target was open.
    pub drained: bool,
}

/// The stored part of a job beside spec, plan and targets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Where it is in its life.
    pub phase: Phase,
    /// The last order's number.
    pub version: PlanVersion,
    /// What the payload is made of.
    pub payload: Option<Payload>,
    /// What the source declared.
    pub declared: Option<Final>,
    /// What targets may publish by.
    pub fin: Option<Final>,
    /// The file's SHA-256.
    pub sha256: Option<FileDigest>,
    /// The source will say nothing more: it failed or was lost after FINAL.
    pub source_ended: bool,
    /// Why the job failed as a whole.
    pub failure: Option<Failure>,
    /// It failed before any byte moved.
    pub refused: bool,
    /// It failed, and what the targets have of it is kept for some time: `stage retry` goes on from there.
    pub kept: bool,
    /// How often it was taken up again after it had failed.
    pub revived: u32,
    /// Nodes that were its source before a retry named another.
    pub former: BTreeSet<NodeName>,
    /// What people should know, newest last.
    pub remarks: Vec<String>,
    /// Nodes that serve nobody any more.
    pub quarantined: BTreeSet<NodeName>,
    /// Nodes that were slow: others go before them as parents while they receive.
    pub slow: BTreeSet<NodeName>,
    /// Who reported damaged chunks, by the parent that sent them.
    pub corrupt: BTreeMap<NodeName, BTreeSet<NodeName>>,
    /// Data addresses as last announced.
    pub addresses: BTreeMap<NodeName, Vec<SocketAddr>>,
    /// Wall clock of the submit.
    pub submitted_unix_ms: u64,
    /// Wall clock from which `--wait-for` counts: of the submit, or of the last retry.
    pub awaited_unix_ms: u64,
    /// Wall clock of the end; for an open job, of when it settled.
    pub ended_unix_ms: Option<u64>,
    /// The source's counters as of the last commit.
    pub source_bytes_read: u64,
    /// See `source_bytes_read`.
    pub source_bytes_sent: u64,
    /// See `source_bytes_read`.
    pub sha256_bytes: u64,
    /// What limited it, in words; empty before it settled, and where too little was seen.
    pub verdict: String,
}

impl Record {
    pub(super) fn new(unix_ms: u64) -> Self {
        Self {
            phase: Phase::Queued,
            version: PlanVersion(1),
            payload: None,
            declared: None,
            fin: None,
            sha256: None,
            source_ended: false,
            failure: None,
            refused: false,
            kept: false,
            revived: 0,
            former: BTreeSet::new(),
            remarks: Vec::new(),
            quarantined: BTreeSet::new(),
            slow: BTreeSet::new(),
            corrupt: BTreeMap::new(),
            addresses: BTreeMap::new(),
            submitted_unix_ms: unix_ms,
            awaited_unix_ms: unix_ms,
            ended_unix_ms: None,
            source_bytes_read: 0,
            source_bytes_sent: 0,
            sha256_bytes: 0,
            verdict: String::new(),
        }
    }
}

/// What of a job must be committed: whole values that replace older ones.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Changes {
    /// The job's own record.
    pub record: Option<Record>,
    /// The plan in force.
    pub plan: Option<Plan>,
    /// Targets with their place in the spec and their node.
    pub targets: Vec<(usize, NodeName, TargetRecord)>,
}

impl Changes {
    /// Whether there is nothing to commit.
    pub fn is_empty(&self) -> bool {
        self.record.is_none() && self.plan.is_none() && self.targets.is_empty()
    }
}
