//! A job and a node as the coordinator shows them: checked once, where the wire ends.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use stage_core::failure::Failure;
use stage_core::id::{JobId, NodeName};
use stage_core::plan::Plan;
use stage_core::units::{ByteCount, Rate};
use stage_proto::convert::{WireError, parse};
use stage_proto::v1;

macro_rules! words {
    ($(#[$doc:meta])* $type:ident, $what:literal { $($(#[$vdoc:meta])* $variant:ident = $word:literal),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum $type { $($(#[$vdoc])* $variant),* }

        impl $type {
            /// The word in JSON and in tables.
            pub(crate) fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word),* }
            }
        }
        impl FromStr for $type {
            type Err = String;
            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($word => Ok(Self::$variant),)*
                    other => Err(format!(concat!("{:?} is not a state of a ", $what), other)),
                }
            }
        }
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }
    };
}

words!(
    /// Where a job stands.
    JobState, "job" {
        /// Accepted.
        Queued = "queued",
        /// Source and targets are asked.
        Preparing = "preparing",
        /// The plan is being made.
        Planning = "planning",
        /// Bytes move.
        Running = "running",
        /// The last targets publish.
        Finishing = "finishing",
        /// All have it.
        Done = "done",
        /// The fit ones have it, others are awaited.
        Open = "open",
        /// It ended, and some do not have it.
        Partial = "partial",
        /// It ended, and none has it.
        Failed = "failed",
        /// Someone cancelled it.
        Cancelled = "cancelled",
    }
);

words!(
    /// Where a target stands.
    NodeState, "node" {
        /// Not asked yet.
        Waiting = "waiting",
        /// Asked.
        Preparing = "preparing",
        /// It can take the payload.
        Ready = "ready",
        /// Bytes arrive.
        Receiving = "receiving",
        /// All arrived and agreed.
        Verified = "verified",
        /// Under its final name.
        Published = "published",
        /// Something stood there and was left.
        Skipped = "skipped",
        /// It cannot take the payload now.
        Unfit = "unfit",
        /// It failed for good.
        Failed = "failed",
        /// A newer job took the path over.
        Superseded = "superseded",
        /// Cancelled here.
        Cancelled = "cancelled",
    }
);

/// From this share of the bound on nobody asks what limited a push.
const EFFICIENT: f64 = 0.9;

impl JobState {
    /// Nothing more will happen.
    pub(crate) fn is_ended(self) -> bool {
        matches!(self, Self::Done | Self::Partial | Self::Failed | Self::Cancelled)
    }

    /// No byte moves yet.
    pub(crate) fn is_before_bytes(self) -> bool {
        matches!(self, Self::Queued | Self::Preparing | Self::Planning)
    }
}

impl NodeState {
    /// It has what was asked for.
    pub(crate) fn is_done(self) -> bool {
        matches!(self, Self::Published | Self::Skipped)
    }

    /// Bytes may still come without anybody's help.
    pub(crate) fn is_moving(self) -> bool {
        matches!(
            self,
            Self::Waiting | Self::Preparing | Self::Ready | Self::Receiving | Self::Verified
        )
    }
}

/// A job, whole, as of one moment.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Job {
    /// Which.
    pub id: JobId,
    /// Where it stands.
    pub state: JobState,
    /// The payload's name.
    pub name: String,
    /// The source's node, once known.
    pub source: Option<NodeName>,
    /// Its apparent size.
    pub size: ByteCount,
    /// Bytes of it that travel: without its holes.
    pub payload: ByteCount,
    /// The order in force, once there is one.
    pub plan: Option<Plan>,
    /// In target order.
    pub nodes: Vec<Node>,
    /// Unix time in milliseconds.
    pub submitted_unix_ms: u64,
    /// From submit to the end, or to now.
    pub elapsed: Duration,
    /// The payload's SHA-256 in hexadecimal, once known.
    pub sha256: Option<String>,
    /// The function by which it agrees with the digest that was expected, once that is known.
    pub agrees: Option<String>,
    /// How many files agree with it.
    pub agreeing: u32,
    /// How far the SHA-256 has come.
    pub sha256_bytes: ByteCount,
    /// What the source read.
    pub source_bytes_read: ByteCount,
    /// Payload bytes that left the source.
    pub source_bytes_sent: ByteCount,
    /// Why the job as a whole failed.
    pub failure: Option<Failure>,
    /// Who watches may go home.
    pub settled: bool,
    /// The exit code of a command that returns now.
    pub exit: u8,
    /// What people should know, newest last.
    pub remarks: Vec<String>,
    /// How many targets there are.
    pub targets: u32,
    /// How many have the payload.
    pub published: u32,
    /// What limits it, or limited it, in words.
    pub verdict: Option<String>,
}

/// A target of a job.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Node {
    /// Which.
    pub name: NodeName,
    /// Where it stands.
    pub state: NodeState,
    /// The final path, once known.
    pub path: String,
    /// Payload bytes that are whole, checked and kept.
    pub kept: ByteCount,
    /// Payload bytes that came over the network.
    pub received: ByteCount,
    /// Since it began to receive, or until it had all.
    pub elapsed: Duration,
    /// Mean rate.
    pub rate: Rate,
    /// Rate over the last second or two.
    pub rate_now: Rate,
    /// What its disk takes.
    pub disk_rate: Rate,
    /// From whom it receives, or received last.
    pub parent: Option<NodeName>,
    /// How many streams.
    pub streams: u32,
    /// Why it is unfit or failed.
    pub failure: Option<Failure>,
    /// It had the content before.
    pub already: bool,
    /// The newer job's id.
    pub superseded_by: Option<String>,
    /// Declared away by the administrator.
    pub drained: bool,
}

impl Job {
    /// Whether `share` (0 to 1) of the targets that count has the payload. Drained targets do not count.
    pub(crate) fn has(&self, share: f64) -> bool {
        let counted: Vec<&Node> = self.nodes.iter().filter(|node| !node.drained).collect();
        let done = counted.iter().filter(|node| node.state.is_done()).count();
        !counted.is_empty() && done as f64 >= share * counted.len() as f64
    }

    /// Whether people should hear what limits it: while bytes move, and afterwards where it took notably longer than the
    /// best plan could.
    pub(crate) fn is_worth_a_verdict(&self) -> bool {
        let bound = self.plan.as_ref().map_or(Duration::ZERO, |plan| plan.bound);
        let efficiency = bound.as_secs_f64() / self.elapsed.as_secs_f64().max(1e-9);
        !(self.settled || self.state.is_ended()) || efficiency < EFFICIENT
    }

    /// How long it takes at the present rates until the last moving target has all; `None` when nothing moves.
    pub(crate) fn remaining(&self) -> Option<Duration> {
        self.nodes
            .iter()
            .filter_map(|node| node.remaining(self.payload))
            .max()
    }
}

impl Node {
    /// How long it takes at the present rate until all is there; `None` when nothing moves, or nobody knows how much
    /// will come.
    pub(crate) fn remaining(&self, payload: ByteCount) -> Option<Duration> {
        (self.state == NodeState::Receiving && self.rate_now > Rate::ZERO && payload.0 > 0)
            .then(|| payload.saturating_sub(self.kept).time_at(self.rate_now))
    }
}

fn optional<T: FromStr<Err: ToString>>(field: &'static str, text: &str) -> Result<Option<T>, WireError> {
    if text.is_empty() {
        Ok(None)
    } else {
        parse(field, text).map(Some)
    }
}

/// Lengths of time and rates are only shown: nonsense becomes zero.
fn time(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}

fn rate(bytes_per_second: f64) -> Rate {
    if bytes_per_second.is_finite() {
        Rate::from_bytes_per_second(bytes_per_second)
    } else {
        Rate::ZERO
    }
}

impl TryFrom<v1::JobView> for Job {
    type Error = WireError;
    fn try_from(wire: v1::JobView) -> Result<Self, WireError> {
        Ok(Self {
            id: parse("job.job", &wire.job)?,
            state: parse("job.state", &wire.state)?,
            name: wire.name,
            source: optional("job.source", &wire.source)?,
            size: ByteCount(wire.bytes),
            payload: ByteCount(wire.payload_bytes),
            plan: wire.plan.as_ref().map(TryInto::try_into).transpose()?,
            nodes: wire
                .nodes
                .into_iter()
                .map(TryInto::try_into)
                .collect::<Result<_, _>>()?,
            submitted_unix_ms: wire.submitted_unix_ms,
            elapsed: time(wire.seconds),
            sha256: (!wire.sha256.is_empty()).then_some(wire.sha256),
            agrees: (!wire.agrees.is_empty()).then_some(wire.agrees),
            agreeing: wire.agreeing,
            sha256_bytes: ByteCount(wire.sha256_bytes),
            source_bytes_read: ByteCount(wire.source_bytes_read),
            source_bytes_sent: ByteCount(wire.source_bytes_sent),
            failure: wire.failure.as_ref().map(Into::into),
            settled: wire.settled,
            exit: u8::try_from(wire.exit).unwrap_or(crate::exit::OTHER),
            remarks: wire.remarks,
            targets: wire.targets,
            published: wire.published,
            verdict: (!wire.verdict.is_empty()).then_some(wire.verdict),
        })
    }
}

impl TryFrom<v1::NodeView> for Node {
    type Error = WireError;
    fn try_from(wire: v1::NodeView) -> Result<Self, WireError> {
        Ok(Self {
            name: parse("node.node", &wire.node)?,
            state: parse("node.state", &wire.state)?,
            path: wire.path,
            kept: ByteCount(wire.bytes_kept),
            received: ByteCount(wire.bytes_received),
            elapsed: time(wire.seconds),
            rate: rate(wire.bytes_per_second),
            rate_now: rate(wire.bytes_per_second_now),
            disk_rate: rate(wire.disk_bytes_per_second),
            parent: optional("node.parent", &wire.parent)?,
            streams: wire.streams,
            failure: wire.failure.as_ref().map(Into::into),
            already: wire.already,
            superseded_by: (!wire.superseded_by.is_empty()).then_some(wire.superseded_by),
            drained: wire.drained,
        })
    }
}

#[cfg(test)]
pub(crate) mod samples {
    //! Jobs made by hand, for the tests of what shows them.

    use super::*;
    use stage_core::failure::{Code, Shortage};
    use stage_core::plan::{Hop, Shape};

    /// A node that has all.
    pub(crate) fn published(name: &str, parent: &str) -> Node {
        Node {
            name: name.parse().unwrap(),
            state: NodeState::Published,
            path: "/scratch/stage/genome.db".to_owned(),
            kept: ByteCount(1 << 30),
            received: ByteCount(1 << 30),
            elapsed: Duration::from_millis(8800),
            rate: Rate::from_bytes_per_second(122_016_116.4),
            rate_now: Rate::ZERO,
            disk_rate: Rate::from_bytes_per_second(9e8),
            parent: Some(parent.parse().unwrap()),
            streams: 1,
            failure: None,
            already: false,
            superseded_by: None,
            drained: false,
        }
    }

    /// A node in the middle of it.
    pub(crate) fn receiving(name: &str, parent: &str, kept: u64) -> Node {
        Node {
            state: NodeState::Receiving,
            kept: ByteCount(kept),
            received: ByteCount(kept),
            elapsed: Duration::from_secs(4),
            rate: Rate::from_bytes_per_second(1.2e8),
            rate_now: Rate::from_bytes_per_second(1.17e8),
            ..published(name, parent)
        }
    }

    /// A node without room.
    pub(crate) fn unfit(name: &str) -> Node {
        let mut failure = Failure::new(
            Code::NoSpace,
            "too little space: short by 3.00 GiB",
            "free space under /scratch/stage, the push then goes on by itself",
        )
        .on(&name.parse().unwrap())
        .at("/scratch/stage/genome.db");
        failure.space = Some(Box::new(Shortage {
            needs: ByteCount(4 << 30),
            short_by: ByteCount(3 << 30),
        }));
        Node {
            state: NodeState::Unfit,
            kept: ByteCount(0),
            received: ByteCount(0),
            elapsed: Duration::ZERO,
            rate: Rate::ZERO,
            disk_rate: Rate::ZERO,
            parent: None,
            streams: 0,
            failure: Some(failure),
            ..published(name, "n0")
        }
    }

    /// A chain over these nodes.
    pub(crate) fn plan(names: &[&str]) -> Plan {
        let hops: Vec<Hop> = names
            .iter()
            .enumerate()
            .map(|(i, name)| Hop {
                child: name.parse().unwrap(),
                parent: if i == 0 { "n0" } else { names[i - 1] }.parse().unwrap(),
                fallbacks: (0..i.min(1)).map(|_| "n0".parse().unwrap()).collect(),
                streams: 1,
                streams_cap: 4,
                streams_least: 1,
                congestion_control: None,
                depth: i as u16 + 1,
                rate: Rate::from_bytes_per_second(1.25e8),
                finish: Duration::from_millis(8600 + 100 * i as u64),
                limited_by: format!("interface of {name}"),
            })
            .collect();
        Plan {
            shape: Shape::Chain,
            source: "n0".parse().unwrap(),
            depth: hops.len() as u16,
            hops,
            predicted: Duration::from_millis(8900),
            bound: Duration::from_millis(8600),
            reason: "every node sends to one other, so each has its whole interface".to_owned(),
        }
    }

    /// A job with these nodes, running.
    pub(crate) fn job(nodes: Vec<Node>) -> Job {
        let names: Vec<String> = nodes.iter().map(|node| node.name.to_string()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        Job {
            id: JobId::from_bytes([0x11; 16]),
            state: JobState::Running,
            name: "genome.db".to_owned(),
            source: Some("n0".parse().unwrap()),
            size: ByteCount(1 << 30),
            payload: ByteCount(1 << 30),
            plan: Some(plan(&names)),
            targets: nodes.len() as u32,
            published: nodes.iter().filter(|node| node.state.is_done()).count() as u32,
            nodes,
            submitted_unix_ms: 1_700_000_000_000,
            elapsed: Duration::from_millis(4000),
            sha256: None,
            agrees: None,
            agreeing: 0,
            sha256_bytes: ByteCount(1 << 29),
            source_bytes_read: ByteCount(1 << 29),
            source_bytes_sent: ByteCount(1 << 29),
            failure: None,
            settled: false,
            exit: 5,
            remarks: Vec::new(),
            verdict: None,
        }
    }

    /// A job that is over.
    pub(crate) fn finished(nodes: Vec<Node>) -> Job {
        let all = nodes.iter().all(|node| node.state.is_done());
        Job {
            state: if all { JobState::Done } else { JobState::Open },
            elapsed: Duration::from_millis(9100),
            sha256: Some("0123456789abcdef".repeat(4)),
            sha256_bytes: ByteCount(1 << 30),
            source_bytes_read: ByteCount(1 << 30),
            source_bytes_sent: ByteCount(1 << 30),
            settled: true,
            exit: if all { 0 } else { 5 },
            ..job(nodes)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_leaves_drained_targets_out() {
        let mut job = samples::finished(vec![
            samples::published("n1", "n0"),
            samples::unfit("n2"),
            samples::published("n3", "n1"),
        ]);
        assert!(!job.has(1.0));
        assert!(job.has(0.66));
        job.nodes[1].drained = true;
        assert!(job.has(1.0));
        job.nodes.iter_mut().for_each(|node| node.drained = true);
        assert!(!job.has(0.5), "a share of nothing is not reached");
    }

    #[test]
    fn an_unknown_state_is_named() {
        let wire = v1::NodeView {
            node: "n1".to_owned(),
            state: "dreaming".to_owned(),
            ..v1::NodeView::default()
        };
        let error = Node::try_from(wire).unwrap_err();
        assert_eq!(
            error.to_string(),
            "node.state: \"dreaming\" is not a state of a node"
        );
    }
}
