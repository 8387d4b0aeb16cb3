//! What a node is told to be for a job: whole, never a delta, so that any assignment repeated in any order
//! ends in the state of the highest (epoch, plan version).

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::digest::{ChunkHash, FileDigest, RootDigest};
use crate::id::{CongestionControl, Epoch, JobId, JobKey, NodeName, PlanVersion, RootName};
use crate::payload::{Expectation, Payload, SourcePath, Walk};
use crate::units::{ByteCount, Rate};
use crate::waits::Waits;

/// One order of the coordinator to one node about one job.
#[derive(Debug, Clone, PartialEq)]
pub struct Assignment {
    /// The job.
    pub job: JobId,
    /// The coordinator's incarnation.
    pub epoch: Epoch,
    /// The job's n-th order.
    pub version: PlanVersion,
    /// What the node is to be.
    pub order: Order,
}

impl Assignment {
    /// What orders decisions: of two assignments for one job the higher counts.
    pub fn rank(&self) -> (Epoch, PlanVersion) {
        (self.epoch, self.version)
    }
}

/// What the node is to be.
#[derive(Debug, Clone, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "one at a time on each job, never in a list"
)]
pub enum Order {
    /// Look at the source and say what it is; nothing is read yet. Answered by [`Prepared`].
    PrepareSource(SourceSpec),
    /// Look whether the payload can be taken, reserve its space. Answered by [`Prepared`].
    PrepareTarget {
        /// Where it shall lie.
        target: TargetSpec,
        /// What it is.
        payload: Payload,
        /// Which function digests its chunks.
        hash: ChunkHash,
    },
    /// Move bytes.
    Run(Run),
    /// Nobody needs the chunks from here any more: stop serving, drop journal and partial. What is published stays.
    Release {
        /// The whole file's SHA-256, for the index of what lies here.
        sha256: Option<FileDigest>,
    },
    /// The job is cancelled here: stop, remove the partial and the journal. What is published stays.
    Cancel,
}

impl Order {
    /// Whether nothing of the job goes on at this node after it.
    pub fn ends(&self) -> bool {
        matches!(self, Self::Release { .. } | Self::Cancel)
    }
}

/// The job at work on one node. A node may be source and target at once (a local copy).
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// Proves membership of the job.
    pub key: JobKey,
    /// Which function digests chunks.
    pub hash: ChunkHash,
    /// What it is.
    pub payload: Payload,
    /// Set on the source's node.
    pub source: Option<SourceSpec>,
    /// Set on a target.
    pub target: Option<TargetSpec>,
    /// For a target: whom to ask, the parent first, then its fallbacks nearest first, the source last.
    pub parents: Vec<Peer>,
    /// For a target: how many streams to the parent.
    pub streams: StreamChoice,
    /// For a target: the rate that the plan expects of this hop, [`Rate::UNLIMITED`] where it does not say. With
    /// [`StreamChoice::Auto`] the streams together should carry it.
    pub wanted: Rate,
    /// For a target: the congestion control that the parent's data connections ask for; `None`: its host's own.
    pub congestion_control: Option<CongestionControl>,
    /// Who is planned to ask this node: these always find a place.
    pub children: Vec<NodeName>,
    /// What this node may send, over all its children.
    pub limit: Option<Rate>,
    /// Set once the source has declared it and the coordinator has committed it: publish what agrees.
    pub fin: Option<Final>,
}

/// How many streams a hop gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamChoice {
    /// By the RTT that the child meets and both hosts' window limits, within the plan's bounds.
    Auto {
        /// At least so many: what loss or a measurement asks for.
        least: u16,
        /// At most so many.
        cap: u16,
    },
    /// By hand.
    Fixed(u16),
}

/// Where the payload is read.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceSpec {
    /// What is sent, and under which names.
    pub paths: Vec<SourcePath>,
    /// What of directories is sent.
    pub walk: Walk,
    /// What may be read a second.
    pub limit: Option<Rate>,
    /// FINAL is declared only if the files are these; no MD5 is computed where none is expected.
    pub expect: Vec<Expectation>,
    /// What becomes of the pages that are read.
    pub cache: Cache,
}

/// What a push does with the page cache of its nodes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cache {
    /// As the kernel does it: who reads the copy next finds it in memory as far as there is room, and other files may go for that.
    #[default]
    Keep,
    /// Pages of the payload go once they are on the disk; what else is in memory stays.
    Drop,
}

/// How long a replaced generation stays if nobody says otherwise.
pub const KEEP_PREVIOUS: Duration = Duration::from_secs(24 * 3600);

/// Where the payload shall lie on a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetSpec {
    /// A root by name, or the absolute path that must lie in one.
    pub place: Place,
    /// What to do about other content there.
    pub if_exists: IfExists,
    /// The payload is a tar, and what it holds is published in its place.
    pub unpack: bool,
    /// How long a generation of a tree stays after it was replaced, in whole seconds; it stays longer while it is read.
    pub keep_previous: Duration,
    /// What becomes of the pages that are written.
    pub cache: Cache,
}

/// The directory of a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Place {
    /// Below a root; without a name, the agent's first root.
    Root {
        /// The root.
        root: Option<RootName>,
        /// Relative directory below it, empty for the root itself; made if absent.
        dir: Vec<u8>,
    },
    /// An absolute directory that must lie in a root.
    Absolute(Vec<u8>),
}

/// What to do where other content stands under the final name.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum IfExists {
    /// The target is unfit.
    #[default]
    Fail,
    /// Replace it atomically.
    Replace,
    /// Leave it: the target counts as done.
    Skip,
}

/// A member of the job that may be asked for chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Its name, which its certificate must bear.
    pub node: NodeName,
    /// Its agent's data addresses, best first.
    pub addresses: Vec<SocketAddr>,
}

/// What the source declares when it has read all: only who agrees with it publishes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Final {
    /// Over the manifest's digest and all chunk digests.
    pub root: RootDigest,
    /// Chunks in the payload.
    pub chunks: u32,
    /// Bytes of data in it: of a stream nobody knows them before.
    pub data: ByteCount,
}

/// A node's answer to [`Order::PrepareSource`] or [`Order::PrepareTarget`].
#[derive(Debug, Clone, PartialEq)]
pub enum Prepared {
    /// The source is there and readable.
    Source {
        /// What it is.
        payload: Payload,
    },
    /// The target can take it.
    Ready {
        /// The final path, as text fit for a terminal.
        path: String,
        /// A file of the same size stands there: it may prove to be the same content.
        candidate: bool,
    },
    /// `--if-exists skip`, and something stands there.
    Skipped {
        /// The final path.
        path: String,
    },
    /// It cannot be taken (or, from a source, cannot be sent) now.
    Unfit(crate::failure::Failure),
}

/// How a target ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// Under its final name, durable, and every chunk agreed.
    Published {
        /// The final path.
        path: String,
        /// It was there already: no payload byte moved.
        already: bool,
        /// Payload bytes received over the network.
        bytes_received: u64,
        /// From the first `Run` to the publish.
        took: Duration,
    },
    /// It cannot take the payload now; it may become fit again.
    Unfit(crate::failure::Failure),
    /// It failed for good.
    Failed(crate::failure::Failure),
}

/// What the source reports at the end of its reading.
#[derive(Debug, Clone, PartialEq)]
pub enum SourceReport {
    /// All is read and the source did not change meanwhile.
    Final(Final),
    /// The whole file's SHA-256, which may come later.
    Sha256(FileDigest),
    /// It cannot go on.
    Failed(crate::failure::Failure),
}

/// Counters of one job on one node, sampled.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Progress {
    /// Chunks that are whole, checked and kept.
    pub chunks: u32,
    /// Payload bytes in those chunks.
    pub bytes_kept: u64,
    /// Payload bytes received over the network, chunks that were fetched again counted again.
    pub bytes_received: u64,
    /// Payload bytes sent to children.
    pub bytes_sent: u64,
    /// Bytes read from the source file, re-reads counted again (source only).
    pub source_bytes_read: u64,
    /// Bytes that the SHA-256 lane has passed (source only).
    pub sha256_bytes: u64,
    /// Bytes written to disk.
    pub disk_bytes: u64,
    /// Time spent in writing them, over all streams.
    pub disk_time: Duration,
    /// From whom it receives at present.
    pub parent: Option<NodeName>,
    /// Streams to the parent at present.
    pub streams: u16,
    /// RTT to the parent.
    pub rtt: Option<Duration>,
    /// Children it serves at present.
    pub children: u16,
    /// Entries that the walk over the source has looked at, before anything moves (source only).
    pub walked: u64,
    /// Where the time of its threads went.
    pub waits: Waits,
}
