//! What limits a push: while it runs, from the last seconds; when it has settled, from all of it. Then its lessons are
//! kept, too.

use std::time::Duration;

use stage_core::id::{JobId, NodeName};
use stage_core::job::{Event, Job, Now, Phase};
use stage_core::learn;
use stage_core::topology::Topology;
use stage_core::verdict::{self, judge};
use stage_proto::v1;

use super::{Driver, Outbox};
use crate::encode;
use crate::measurements::Measurements;
use crate::store::Change;

/// A job as people see it.
pub(super) fn view(job: &Job, topology: &Topology, measurements: &Measurements, now: Now) -> v1::JobView {
    let mut view = job.view(now);
    if view.phase.is_running() && !view.settled {
        let windows = |node: &NodeName| measurements.windows_of(node);
        view.verdict = judge(topology, &job.seen_of_late(), &windows)
            .map(|verdict| verdict.text)
            .unwrap_or_default();
    }
    encode::job(&view)
}

/// A job is looked at for slow hops this often.
const LOOK: Duration = Duration::from_secs(2);

impl Driver {
    /// Tells a job which of its hops are slow at present.
    pub(super) fn look_for_slow_hops(&mut self, id: JobId, now: Now, out: &mut Outbox) {
        let Some(entry) = self.jobs.get_mut(&id) else {
            return;
        };
        let job = &entry.job;
        if !job.phase().is_running() || job.is_settled() || now.up < entry.looked_at + LOOK {
            return;
        }
        entry.looked_at = now.up;
        let windows = |node: &NodeName| self.measurements.windows_of(node);
        let planned = |child: &NodeName| job.planned_rate(child);
        let slow = verdict::slow(&self.setup.topology, &job.seen_of_late(), &planned, &windows);
        self.apply(id, Event::Slow(slow), now, out);
    }

    /// A job has settled: what limited it is kept with it.
    pub(super) fn conclude(&mut self, id: JobId, now: Now, out: &mut Outbox) {
        let Some(entry) = self.jobs.get_mut(&id) else {
            return;
        };
        let again = std::mem::replace(&mut entry.concluded, true);
        let job = &self.jobs[&id].job;
        let seen = job.seen_whole();
        let windows = |node: &NodeName| self.measurements.windows_of(node);
        let verdict =
            judge(&self.setup.topology, &seen, &windows).map_or_else(String::new, |verdict| verdict.text);
        // One that was open for a while had waited, not worked.
        if let Some(plan) = job.plan().filter(|_| !again) {
            let finished: Vec<_> = seen.hops.iter().map(|hop| job.finished(&hop.child)).collect();
            let alone = !self
                .jobs
                .iter()
                .any(|(other, entry)| *other != id && job.meets(&entry.job));
            let push = learn::Push {
                job: id,
                unix_ms: now.unix_ms,
                alone,
                plan,
                seen: &seen,
                finished: &finished,
            };
            let lessons = learn::lessons(&self.setup.topology, &push, &self.facts());
            let past =
                learn::past(&push, job.summary(now).took, &verdict).filter(|_| job.phase() == Phase::Done);
            for lesson in lessons {
                tracing::info!(job = %id, lesson = lesson.words(now.unix_ms), "learned");
                self.measurements.learned(lesson.clone());
                out.batch.push(Change::Learned(Box::new(lesson)));
            }
            if let Some(past) = past {
                self.measurements.passed(past.clone());
                out.batch.push(Change::Passed(Box::new(past)));
            }
        }
        if !verdict.is_empty() {
            tracing::info!(job = %id, verdict, "what limited it");
            self.apply(id, Event::Judged(verdict), now, out);
        }
    }
}
