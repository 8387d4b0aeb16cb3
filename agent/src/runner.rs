//! The jobs on this node: one task each, found by id.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use stage_core::assignment::{Assignment, Progress};
use stage_core::id::{Epoch, JobId, NodeName, PlanVersion};
use stage_transfer::budget::Budget;
use stage_transfer::index::Index;
use stage_transfer::plane::DataPlane;
use stage_transfer::root::Roots;
use stage_transfer::target::{retired, sweep};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::{interval, sleep};
use tokio_util::sync::CancellationToken;

use crate::blocking;
use crate::job::{Job, Live};
use crate::outbox::Outbox;
use crate::streams::Streams;

/// Orders waiting for one job. The session waits when they are more: orders are few and whole.
const ORDERS: usize = 16;

/// How long the partial of a job that the coordinator does not know is kept.
const KEPT: Duration = Duration::from_secs(24 * 3600);

/// How long the index remembers a copy that is missing.
const MISSED: Duration = Duration::from_secs(7 * 24 * 3600);

/// How long until generations that were replaced are looked at again at the latest.
const RETIRE: Duration = Duration::from_secs(3600);

/// Ended jobs whose rank is remembered, so that an order that comes late does not wake them.
const ENDED: usize = 4096;

/// What every job on this node works with.
pub(crate) struct Context {
    pub(crate) node: NodeName,
    pub(crate) state: PathBuf,
    pub(crate) plane: Arc<DataPlane>,
    pub(crate) roots: Arc<Roots>,
    pub(crate) index: Arc<Index>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) streams: Arc<Streams>,
    /// Something was published, or removed: an older generation may have to go.
    pub(crate) replaced: Notify,
    pub(crate) outbox: Arc<Outbox>,
}

/// The jobs on this node.
pub(crate) struct Runner {
    context: Arc<Context>,
    jobs: Mutex<Jobs>,
    stop: CancellationToken,
}

#[derive(Default)]
struct Jobs {
    running: BTreeMap<JobId, Handle>,
    ended: BTreeMap<JobId, (Epoch, PlanVersion)>,
    /// The same jobs, first ended first.
    ended_order: VecDeque<JobId>,
}

impl Jobs {
    /// Remembers that a job ended, and forgets the one that ended first when they are too many.
    fn end(&mut self, job: JobId, rank: (Epoch, PlanVersion)) {
        if self.ended.insert(job, rank).is_none() {
            self.ended_order.push_back(job);
        }
        if self.ended_order.len() > ENDED
            && let Some(first) = self.ended_order.pop_front()
        {
            self.ended.remove(&first);
        }
    }
}

struct Handle {
    orders: mpsc::Sender<Assignment>,
    live: Arc<Live>,
    task: JoinHandle<()>,
    rank: (Epoch, PlanVersion),
}

impl Runner {
    pub(crate) fn new(context: Context) -> Self {
        Self {
            context: Arc::new(context),
            jobs: Mutex::default(),
            stop: CancellationToken::new(),
        }
    }

    /// What every job works with.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    fn jobs(&self) -> MutexGuard<'_, Jobs> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands an order to its job; one that is not above what the job has seen only gets its answer again.
    pub(crate) async fn assign(&self, assignment: Assignment) {
        let job = assignment.job;
        let rank = assignment.rank();
        let orders = {
            let mut jobs = self.jobs();
            if jobs.ended.get(&job).is_some_and(|ended| *ended >= rank) {
                drop(jobs);
                self.context.outbox.applied(job, rank);
                return;
            }
            let known = jobs
                .running
                .get_mut(&job)
                .filter(|handle| !handle.orders.is_closed());
            let handle = if let Some(handle) = known {
                if rank < handle.rank {
                    return;
                }
                handle
            } else {
                let handle = self.spawn(job, rank);
                jobs.running.insert(job, handle);
                jobs.running.get_mut(&job).expect("it was just put in")
            };
            handle.rank = rank;
            if assignment.order.ends() {
                jobs.end(job, rank);
            }
            jobs.running[&job].orders.clone()
        };
        if orders.send(assignment).await.is_err() {
            tracing::warn!(%job, "the job ended while an order was on its way; the coordinator will repeat it");
        }
    }

    fn spawn(&self, job: JobId, rank: (Epoch, PlanVersion)) -> Handle {
        let (orders, mailbox) = mpsc::channel(ORDERS);
        let live = Arc::new(Live::default());
        let work = Job::new(job, self.context.clone(), live.clone());
        let task = tokio::spawn(work.run(mailbox, self.stop.child_token()));
        Handle {
            orders,
            live,
            task,
            rank,
        }
    }

    /// Counters of the jobs that move bytes.
    pub(crate) fn progress(&self) -> Vec<(JobId, Progress)> {
        let mut jobs = self.jobs();
        jobs.running.retain(|_, handle| !handle.task.is_finished());
        jobs.running
            .iter()
            .filter_map(|(job, handle)| handle.live.progress().map(|p| (*job, p)))
            .collect()
    }

    /// The jobs of which this node has something, with the highest rank seen.
    pub(crate) fn held(&self) -> BTreeMap<JobId, (Epoch, PlanVersion)> {
        self.jobs()
            .running
            .iter()
            .map(|(job, handle)| (*job, handle.rank))
            .collect()
    }

    /// Every hour: drops what is left of jobs that no coordinator has asked for in [`KEPT`], and forgets copies that
    /// were missed for [`MISSED`].
    pub(crate) async fn sweep(&self) -> Infallible {
        let mut hourly = interval(Duration::from_secs(3600));
        loop {
            hourly.tick().await;
            let (context, known) = (self.context.clone(), self.held().into_keys().collect());
            let gone = blocking(move || {
                context.index.sweep(&context.roots, MISSED);
                sweep(&context.roots, &context.state, &known, KEPT)
            })
            .await;
            for job in gone {
                tracing::warn!(%job, "no coordinator has asked for this job for a day; its partial is dropped");
            }
        }
    }

    /// Removes generations that were replaced when their time is over and nobody reads them: looked at after every
    /// publish, when the next one's time is over, and every hour.
    pub(crate) async fn retire(&self) -> Infallible {
        loop {
            let context = self.context.clone();
            let swept =
                blocking(move || retired::sweep(&context.roots, &context.state, SystemTime::now())).await;
            for path in swept.removed {
                tracing::info!(path, "a generation that was replaced has gone");
            }
            let next = swept.next.unwrap_or(RETIRE).min(RETIRE);
            // What is over at this very moment would be looked at again and again.
            let next = sleep(next.max(Duration::from_millis(100)));
            tokio::select! {
                () = next => {}
                () = self.context.replaced.notified() => {}
            }
        }
    }

    /// Returns when no job serves a child any more.
    pub(crate) async fn children_gone(&self) {
        while self.progress().iter().any(|(_, progress)| progress.children > 0) {
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Stops every job; partials and journals stay for the next start.
    pub(crate) async fn stop(&self) {
        self.stop.cancel();
        let tasks: Vec<_> = std::mem::take(&mut self.jobs().running)
            .into_values()
            .map(|handle| handle.task)
            .collect();
        for task in tasks {
            if let Err(error) = task.await {
                tracing::error!(%error, "a job's task did not end well");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_too_many_ended_jobs_the_first_one_is_forgotten() {
        let mut jobs = Jobs::default();
        let id = |n: u64| JobId::from_bytes(u128::from(u64::MAX - n).to_be_bytes());
        let rank = (Epoch(1), PlanVersion(1));
        for n in 0..=ENDED as u64 {
            jobs.end(id(n), rank);
            jobs.end(id(n), (Epoch(1), PlanVersion(2)));
        }
        assert_eq!(jobs.ended.len(), ENDED);
        assert!(
            !jobs.ended.contains_key(&id(0)),
            "the first, although its id is the highest"
        );
        assert_eq!(
            jobs.ended.get(&id(ENDED as u64)),
            Some(&(Epoch(1), PlanVersion(2)))
        );
    }
}
