//! Facts on their way to the coordinator. Each is kept until its job is forgotten and said again after every
//! reconnect, so that no session's end can lose one; the coordinator takes a repeated fact as one.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use stage_core::assignment::{Outcome, Prepared, SourceReport};
use stage_core::chunk::ChunkIndex;
use stage_core::id::{Epoch, JobId, NodeName, PlanVersion};
use stage_proto::v1;
use tokio::sync::Notify;

/// Incidents kept for a coordinator that is away: the newest ones tell enough.
const INCIDENTS: u64 = 64;

/// What is to be said of one job: of each kind the newest counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Prepared { source: bool },
    Final,
    Sha256,
    SourceFailed,
    Incident(u64),
    Outcome,
    Applied,
}

struct Entry {
    body: v1::agent_message::Body,
    said: bool,
    /// Its job is over: once said, nobody needs it again.
    last: bool,
}

impl Entry {
    fn new(kind: Kind, body: v1::agent_message::Body) -> Self {
        Self {
            body,
            said: false,
            last: kind == Kind::Applied,
        }
    }
}

/// Facts by job and kind.
#[derive(Default)]
pub(crate) struct Outbox {
    entries: Mutex<BTreeMap<(JobId, Kind), Entry>>,
    changed: Notify,
}

impl Outbox {
    fn entries(&self) -> MutexGuard<'_, BTreeMap<(JobId, Kind), Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, job: JobId, kind: Kind, body: v1::agent_message::Body) {
        self.entries().insert((job, kind), Entry::new(kind, body));
        self.changed.notify_one();
    }

    pub(crate) fn applied(&self, job: JobId, (epoch, version): (Epoch, PlanVersion)) {
        let applied = v1::Applied {
            job: job.to_string(),
            epoch: epoch.0,
            version: version.0,
        };
        self.put(job, Kind::Applied, v1::agent_message::Body::Applied(applied));
    }

    pub(crate) fn prepared(&self, job: JobId, version: PlanVersion, source: bool, prepared: &Prepared) {
        let body = v1::Prepared {
            job: job.to_string(),
            version: version.0,
            answer: Some(prepared.into()),
        };
        self.put(
            job,
            Kind::Prepared { source },
            v1::agent_message::Body::Prepared(body),
        );
    }

    pub(crate) fn source(&self, job: JobId, report: &SourceReport) {
        let kind = match report {
            SourceReport::Final(_) => Kind::Final,
            SourceReport::Sha256(_) => Kind::Sha256,
            SourceReport::Failed(_) => Kind::SourceFailed,
        };
        let body = v1::SourceReport {
            job: job.to_string(),
            report: Some(report.into()),
        };
        self.put(job, kind, v1::agent_message::Body::Source(body));
    }

    pub(crate) fn outcome(&self, job: JobId, outcome: &Outcome) {
        let body = v1::Outcome {
            job: job.to_string(),
            outcome: Some(outcome.into()),
        };
        self.put(job, Kind::Outcome, v1::agent_message::Body::Outcome(body));
    }

    /// Takes an outcome back: the target goes on after all.
    pub(crate) fn retract_outcome(&self, job: JobId) {
        self.entries().remove(&(job, Kind::Outcome));
    }

    /// Takes back what a source said: it begins anew.
    pub(crate) fn retract_source(&self, job: JobId) {
        self.entries().retain(|(of, kind), _| {
            *of != job || !matches!(kind, Kind::Final | Kind::Sha256 | Kind::SourceFailed)
        });
    }

    pub(crate) fn moved(&self, job: JobId, from: &NodeName, to: &NodeName, why: String) {
        let body = v1::Moved {
            job: job.to_string(),
            from: from.to_string(),
            to: to.to_string(),
            why,
        };
        self.incident(job, v1::agent_message::Body::Moved(body));
    }

    pub(crate) fn corrupt(&self, job: JobId, parent: &NodeName, chunk: ChunkIndex) {
        let body = v1::CorruptChunk {
            job: job.to_string(),
            parent: parent.to_string(),
            chunk: chunk.0,
        };
        self.incident(job, v1::agent_message::Body::Corrupt(body));
    }

    fn incident(&self, job: JobId, body: v1::agent_message::Body) {
        let mut entries = self.entries();
        let range = (job, Kind::Incident(0))..=(job, Kind::Incident(u64::MAX));
        let next = entries
            .range(range)
            .next_back()
            .map_or(0, |((_, kind), _)| match kind {
                Kind::Incident(n) => n + 1,
                _ => 0,
            });
        if let Some(old) = next.checked_sub(INCIDENTS) {
            entries.remove(&(job, Kind::Incident(old)));
        }
        let kind = Kind::Incident(next);
        entries.insert((job, kind), Entry::new(kind, body));
        drop(entries);
        self.changed.notify_one();
    }

    /// The job is over: nothing is left to say, except that the last order was applied, and an outcome that the
    /// coordinator could not know when it gave that order. A copy that was published just before a cancel is one.
    pub(crate) fn forget(&self, job: JobId) {
        self.entries().retain(|(of, kind), entry| {
            if *of != job || *kind == Kind::Applied {
                return true;
            }
            entry.last = *kind == Kind::Outcome && !entry.said;
            entry.last
        });
    }

    /// A new session: everything is to be said again, except incidents that were said once.
    pub(crate) fn say_again(&self) {
        let mut entries = self.entries();
        entries.retain(|(_, kind), entry| !(entry.said && matches!(kind, Kind::Incident(_))));
        entries.values_mut().for_each(|entry| entry.said = false);
        drop(entries);
        self.changed.notify_one();
    }

    /// What has not been said in this session, in the order in which a job happens.
    pub(crate) fn unsaid(&self) -> Vec<v1::agent_message::Body> {
        let mut unsaid = Vec::new();
        self.entries().retain(|_, entry| {
            if !entry.said {
                entry.said = true;
                unsaid.push(entry.body.clone());
            }
            !entry.last
        });
        unsaid
    }

    /// Returns when there may be something unsaid.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_outlive_a_session_and_end_with_their_job() {
        let outbox = Outbox::default();
        let (a, b) = (JobId::from_random([1; 16]), JobId::from_random([2; 16]));
        let unfit = stage_core::failure::Failure::new(stage_core::failure::Code::Away, "x", "y");
        outbox.outcome(a, &Outcome::Failed(unfit.clone()));
        outbox.prepared(a, PlanVersion(1), false, &Prepared::Unfit(unfit.clone()));
        outbox.prepared(a, PlanVersion(3), false, &Prepared::Unfit(unfit.clone()));
        outbox.outcome(b, &Outcome::Unfit(unfit));
        assert_eq!(
            outbox.unsaid().len(),
            3,
            "the newer answer took the older one's place"
        );
        assert!(outbox.unsaid().is_empty());
        outbox.say_again();
        let again = outbox.unsaid();
        assert!(matches!(&again[0], v1::agent_message::Body::Prepared(p) if p.version == 3));
        outbox.forget(a);
        outbox.say_again();
        assert_eq!(outbox.unsaid().len(), 1);
    }

    #[test]
    fn a_cancel_does_not_swallow_an_outcome_that_was_not_said_yet() {
        let outbox = Outbox::default();
        let job = JobId::from_random([1; 16]);
        let published = Outcome::Published {
            path: "/scratch/x".to_owned(),
            already: false,
            bytes_received: 1,
            took: std::time::Duration::ZERO,
        };
        outbox.outcome(job, &published);
        outbox.forget(job);
        outbox.applied(job, (Epoch(1), PlanVersion(5)));
        let said = outbox.unsaid();
        assert!(matches!(
            said[..],
            [
                v1::agent_message::Body::Outcome(_),
                v1::agent_message::Body::Applied(_)
            ]
        ));
        assert!(
            outbox.entries().is_empty(),
            "an agent that runs for years keeps nothing of ended jobs"
        );

        outbox.outcome(job, &published);
        assert_eq!(outbox.unsaid().len(), 1);
        outbox.forget(job);
        outbox.say_again();
        assert!(outbox.unsaid().is_empty(), "it was said before the order came");
    }

    #[test]
    fn incidents_are_bounded() {
        let outbox = Outbox::default();
        let job = JobId::from_random([1; 16]);
        for chunk in 0..1000 {
            outbox.corrupt(job, &"n1".parse().unwrap(), ChunkIndex(chunk));
        }
        let said = outbox.unsaid();
        assert_eq!(said.len() as u64, INCIDENTS);
        assert!(matches!(said.last(), Some(v1::agent_message::Body::Corrupt(c)) if c.chunk == 999));
    }
}
