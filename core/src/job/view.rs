//! What people see of a job, and the exit code of a command that returns now.

use std::time::Duration;

use super::{Job, Live, Now, Phase, TargetState};
use crate::assignment::Progress;
use crate::digest::FileDigest;
use crate::failure::{Code, Failure};
use crate::id::{JobId, NodeName};
use crate::payload::Payload;
use crate::plan::Plan;
use crate::units::{ByteCount, Rate};

/// The present rate is taken over at least this long.
const WINDOW: Duration = Duration::from_secs(1);

/// A job, whole, as of now.
#[derive(Debug, Clone, PartialEq)]
pub struct JobView {
    /// The job.
    pub job: JobId,
    /// Where it is in its life.
    pub phase: Phase,
    /// The payload's name as text.
    pub name: String,
    /// Where the payload is.
    pub source: NodeName,
    /// Its apparent size, once known.
    pub size: ByteCount,
    /// Bytes of it that travel: without its holes.
    pub payload: ByteCount,
    /// The plan in force.
    pub plan: Option<Plan>,
    /// In target order; empty in a summary.
    pub nodes: Vec<NodeView>,
    /// Wall clock of the submit.
    pub submitted_unix_ms: u64,
    /// From submit to the end, or to now.
    pub took: Duration,
    /// The file's SHA-256.
    pub sha256: Option<FileDigest>,
    /// The function of the digests that it agrees with, of those which `--expect` asked for, once that is known.
    pub agrees: Option<&'static str>,
    /// How many files agree with it.
    pub agreeing: usize,
    /// Bytes of the apparent size that the SHA-256 lane has passed.
    pub sha256_bytes: u64,
    /// Bytes read from the source file.
    pub source_bytes_read: u64,
    /// Payload bytes that left the source.
    pub source_bytes_sent: u64,
    /// Why the job failed as a whole.
    pub failure: Option<Failure>,
    /// A command that watches may return now.
    pub settled: bool,
    /// With this exit code.
    pub exit: u8,
    /// What people should know, newest last.
    pub remarks: Vec<String>,
    /// How many targets there are.
    pub targets: usize,
    /// How many have the file (or had something that was to be left).
    pub published: usize,
    /// What limits it, in words; empty where nobody knows.
    pub verdict: String,
}

/// A target as of now.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeView {
    /// Its name.
    pub node: NodeName,
    /// Where it is.
    pub state: TargetState,
    /// The final path, once known.
    pub path: String,
    /// Payload bytes that it keeps.
    pub bytes_kept: u64,
    /// Payload bytes received over the network.
    pub bytes_received: u64,
    /// Since it began to receive, or how long it took.
    pub took: Duration,
    /// Average since it began.
    pub rate: Rate,
    /// Over the last second or two.
    pub rate_now: Rate,
    /// Average of its disk while it writes.
    pub disk_rate: Rate,
    /// From whom it receives.
    pub parent: Option<NodeName>,
    /// Streams to the parent.
    pub streams: u16,
    /// RTT to the parent.
    pub rtt: Option<Duration>,
    /// Why it is unfit or failed.
    pub failure: Option<Failure>,
    /// No payload byte moved.
    pub already: bool,
    /// The newer job.
    pub superseded_by: Option<JobId>,
    /// Declared away: does not count against the exit code.
    pub drained: bool,
}

impl Live {
    pub(super) fn note(&mut self, progress: Progress, now: Duration) {
        if self.first.is_none() && progress.bytes_kept > 0 {
            // What was there before this job's first report was not received since.
            self.first = Some(now);
        }
        let last = (now, progress.bytes_kept);
        if progress.bytes_kept > 0 {
            self.began.get_or_insert(last);
            if self.grew.is_none_or(|(_, bytes)| bytes < progress.bytes_kept) {
                self.grew = Some(last);
            }
        }
        if let (Some(before), Some(parent)) = (&self.progress.parent, &progress.parent) {
            self.moved |= before != parent;
        }
        if self.mark.is_none_or(|(at, _)| at + WINDOW * 2 <= now) {
            let there = if self.last.is_some() {
                &self.progress
            } else {
                &progress
            };
            (self.mark_waits, self.mark_received) = (there.waits.clone(), there.bytes_received);
            self.mark = self.last.or(Some(last));
        }
        self.last = Some(last);
        self.progress = progress;
    }

    /// How fast chunks are kept.
    pub(super) fn rate_now(&self) -> Rate {
        let [before, after] = [self.mark, self.last].map(|point| point.map_or(0, |(_, bytes)| bytes));
        self.since_mark(after.saturating_sub(before))
    }

    /// How fast bytes come: of a slow hop long before a chunk is whole.
    pub(super) fn received_now(&self) -> Rate {
        self.since_mark(self.progress.bytes_received.saturating_sub(self.mark_received))
    }

    fn since_mark(&self, bytes: u64) -> Rate {
        match (self.mark, self.last) {
            (Some((from, _)), Some((to, _))) if to > from => rate(bytes, to - from),
            _ => Rate::ZERO,
        }
    }
}

pub(super) fn rate(bytes: u64, time: Duration) -> Rate {
    if time.is_zero() {
        Rate::ZERO
    } else {
        Rate::from_bytes_per_second(bytes as f64 / time.as_secs_f64())
    }
}

impl Job {
    /// Whether a command that watches may return: every fit target has ended and the digest is known.
    pub fn is_settled(&self) -> bool {
        // Of an open job: not while some that it waited for are asked, or receive after all.
        let at_rest = || {
            !self.targets.iter().any(|target| target.state.is_busy())
                && !self.live.iter().any(|live| live.probing)
        };
        self.record.phase.is_ended() || (self.record.phase == Phase::Open && at_rest())
    }

    /// The exit code of a command that returns now.
    pub fn exit(&self) -> u8 {
        let code = self.record.failure.as_ref().map(|failure| failure.code);
        match self.record.phase {
            Phase::Done => 0,
            Phase::Cancelled => 7,
            Phase::Failed if self.record.refused && code == Some(Code::Internal) => 1,
            // A pattern or a list that only the source could hold against what is there.
            Phase::Failed if self.record.refused && code == Some(Code::Usage) => 2,
            Phase::Failed if self.record.refused => 4,
            Phase::Failed => 6,
            Phase::Open | Phase::Partial => 5,
            _ if self.is_whole() => 0,
            _ => 5,
        }
    }

    /// The job as of now.
    pub fn view(&self, now: Now) -> JobView {
        let nodes: Vec<_> = (0..self.targets.len())
            .map(|at| self.node_view(at, now))
            .collect();
        let mut view = self.summary(now);
        // The source's own count is a sample, and the job may end before the next one. What its children say that they
        // received is exact, as long as none of them had another parent.
        if self.record.remarks.is_empty() {
            let from_source = nodes.iter().filter(|node| {
                self.hop(&node.node)
                    .is_some_and(|hop| hop.parent == self.spec.source)
            });
            let received = from_source.map(|node| node.bytes_received).sum();
            view.source_bytes_sent = view.source_bytes_sent.max(received);
        }
        JobView {
            nodes,
            plan: self.plan.clone(),
            ..view
        }
    }

    /// The job as of now without its nodes and its plan.
    pub fn summary(&self, now: Now) -> JobView {
        let record = &self.record;
        let end = record.ended_unix_ms.unwrap_or(now.unix_ms);
        let agreed = match record.fin {
            Some(_) => self.spec.expect.as_slice(),
            None => &[],
        };
        JobView {
            job: self.spec.id,
            phase: record.phase,
            name: self.spec.name(),
            source: self.spec.source.clone(),
            size: self.bytes_of(|payload| payload.size),
            payload: self.bytes_of(Payload::travels),
            plan: None,
            nodes: Vec::new(),
            submitted_unix_ms: record.submitted_unix_ms,
            took: Duration::from_millis(end.saturating_sub(record.submitted_unix_ms)),
            sha256: record.sha256,
            // FINAL is in force only then.
            agrees: agreed.first().map(|expected| expected.digest.function()),
            agreeing: match record.payload.as_ref() {
                // A list may speak of other files too.
                Some(payload) if payload.is_single_file() => agreed.len().min(1),
                _ => agreed.len(),
            },
            sha256_bytes: record.sha256_bytes,
            source_bytes_read: record.source_bytes_read,
            source_bytes_sent: record.source_bytes_sent,
            failure: record.failure.clone(),
            settled: self.is_settled(),
            exit: self.exit(),
            remarks: record.remarks.clone(),
            targets: self.targets.len(),
            published: self
                .targets
                .iter()
                .filter(|target| target.state.is_good())
                .count(),
            verdict: record.verdict.clone(),
        }
    }

    /// Bytes of the payload, as far as they are known: of a stream none before FINAL.
    fn bytes_of(&self, of: impl Fn(&Payload) -> ByteCount) -> ByteCount {
        match (&self.record.payload, &self.record.fin) {
            (Some(payload), Some(fin)) if payload.is_stream() => fin.data,
            (Some(payload), None) if payload.is_stream() => ByteCount(0),
            (Some(payload), _) => of(payload),
            (None, _) => ByteCount(0),
        }
    }

    fn node_view(&self, at: usize, now: Now) -> NodeView {
        let target = &self.targets[at];
        let live = &self.live[at];
        let node = &self.spec.targets[at];
        let hop = self.hop(node);
        let copied = target.copied.unwrap_or_default();
        let size = self.bytes_of(Payload::travels).0;
        let published = target.state == TargetState::Published;
        let ended = target.state.is_ended();
        let took = if published {
            copied.took
        } else {
            // For one that receives no more, time stands still at its last word.
            let until = match live.last {
                Some((last, _)) if ended => last,
                _ => now.up,
            };
            live.first
                .map_or(Duration::ZERO, |first| until.saturating_sub(first))
        };
        let received = if published {
            copied.bytes_received
        } else {
            live.progress.bytes_received
        };
        NodeView {
            node: node.clone(),
            state: target.state,
            path: target.path.clone(),
            bytes_kept: if published { size } else { live.progress.bytes_kept },
            bytes_received: received,
            took,
            rate: rate(received, took),
            rate_now: if ended { Rate::ZERO } else { live.rate_now() },
            disk_rate: rate(live.progress.disk_bytes, live.progress.disk_time),
            parent: live
                .progress
                .parent
                .clone()
                .or_else(|| hop.map(|hop| hop.parent.clone())),
            streams: match live.progress.streams {
                0 => hop.map_or(0, |hop| hop.streams),
                streams => streams,
            },
            rtt: live.progress.rtt,
            failure: target.failure.clone(),
            already: published && copied.already,
            superseded_by: target.superseded_by,
            drained: target.drained,
        }
    }
}
