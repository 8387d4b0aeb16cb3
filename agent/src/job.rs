//! One job on this node: source, target, or both. One task owns all of it and handles one thing at a time, so that
//! cancel and publish can never race.
//!
//! ```text
//!   PrepareSource ──► look ──► Prepared::Source              (a stream was handed over before, or is not there)
//!   PrepareTarget ──► target::prepare ──► Prepared::Ready | Skipped | Unfit
//!   Run ──► source: Source + Serving                  ──► SourceReport
//!       └─► target: Serving + Inbound ──► Complete ──┬──► publish ──► Outcome
//!   Run with FINAL ──────────────────────────────────┘
//!   Release | Cancel ──► all of it stops; what is published stays
//! ```

mod target;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use stage_core::assignment::{Assignment, Final, Order, Prepared, Progress, Run, SourceReport, SourceSpec};
use stage_core::digest::FileDigest;
use stage_core::failure::Failure;
use stage_core::id::{Epoch, JobId, PlanVersion};
use stage_core::payload::Payload;
use stage_transfer::inbound::{HopEvent, Inbound};
use stage_transfer::outbound::Serving;
use stage_transfer::pipe::{Pipe, PipeConfig};
use stage_transfer::source::{Look, Pulse, Source, SourceConfig, look};
use stage_transfer::store::Store;
use stage_transfer::target::{Target, discard_job};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::blocking;
use crate::origin::Origin;
use crate::runner::Context;

/// Events waiting for the job's task: more make the data plane wait.
const EVENTS: usize = 64;

/// What a sampler may look at while the job's task is busy.
#[derive(Default)]
pub(crate) struct Live(Mutex<Parts>);

#[derive(Default)]
struct Parts {
    store: Option<Arc<Store>>,
    serving: Option<Arc<Serving>>,
    inbound: Option<Arc<Inbound>>,
    source: Option<Arc<Origin>>,
    /// The walk over the source, while it goes on.
    walk: Option<Arc<Pulse>>,
}

impl Live {
    fn parts(&self) -> MutexGuard<'_, Parts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The counters, or `None` while nothing moves.
    pub(crate) fn progress(&self) -> Option<Progress> {
        let parts = self.parts();
        if parts.store.is_none() && parts.source.is_none() && parts.walk.is_none() {
            return None;
        }
        let mut progress = Progress {
            walked: parts.walk.as_ref().map_or(0, |walk| walk.entries()),
            ..Progress::default()
        };
        if let Some(store) = &parts.store {
            progress.chunks = store.kept();
            progress.bytes_kept = store.layout().bytes_in(&store.have());
            let disk = store.disk_counters();
            (progress.disk_bytes, progress.disk_time) = (disk.bytes.0, disk.time);
        }
        if let Some(inbound) = &parts.inbound {
            let counters = inbound.counters();
            progress.bytes_received = counters.bytes_received;
            progress.parent = counters.parent;
            progress.streams = counters.streams;
            progress.rtt = counters.rtt;
            progress.waits.receiving = counters.receiving;
        }
        let mut serving = parts.serving.as_deref();
        if let Some(source) = &parts.source {
            let counters = source.counters();
            progress.source_bytes_read = counters.source_bytes_read;
            progress.sha256_bytes = counters.sha256_bytes;
            serving = Some(source.serving());
        }
        if let Some(serving) = serving {
            let counters = serving.counters();
            (progress.waits.reading, progress.waits.sending) = serving.waits();
            progress.bytes_sent = counters.bytes_sent;
            progress.children = counters.children;
        }
        Some(progress)
    }
}

/// What a walk for an order came to.
type Looked = (PlanVersion, Result<Look, Failure>);

/// The job's task.
pub(crate) struct Job {
    id: JobId,
    context: Arc<Context>,
    live: Arc<Live>,
    rank: (Epoch, PlanVersion),
    target: Option<Arc<Target>>,
    source: Option<Arc<Origin>>,
    serving: Option<Arc<Serving>>,
    inbound: Option<Arc<Inbound>>,
    /// When this node began to run.
    begun: Option<Instant>,
    fin: Option<Final>,
    /// The last order to run.
    run: Option<Run>,
    /// What the target was prepared for last.
    payload: Option<Payload>,
    /// Of a source, between looking and sending.
    look: Option<Look>,
    /// The order that a walk goes on for.
    looking: Option<(PlanVersion, Arc<Pulse>)>,
    looks: (mpsc::Sender<Looked>, mpsc::Receiver<Looked>),
    complete: bool,
    /// The target's outcome was said: published, or not to be.
    ended: bool,
    /// It was: published.
    published: bool,
    hop_events: (mpsc::Sender<HopEvent>, mpsc::Receiver<HopEvent>),
    source_events: (mpsc::Sender<SourceReport>, mpsc::Receiver<SourceReport>),
}

impl Job {
    pub(crate) fn new(id: JobId, context: Arc<Context>, live: Arc<Live>) -> Self {
        Self {
            id,
            context,
            live,
            rank: (Epoch(0), PlanVersion(0)),
            target: None,
            source: None,
            serving: None,
            inbound: None,
            begun: None,
            fin: None,
            run: None,
            look: None,
            payload: None,
            looking: None,
            looks: mpsc::channel(1),
            complete: false,
            ended: false,
            published: false,
            hop_events: mpsc::channel(EVENTS),
            source_events: mpsc::channel(EVENTS),
        }
    }

    /// Until released, cancelled or stopped.
    #[tracing::instrument(name = "job", skip_all, fields(id = %self.id))]
    pub(crate) async fn run(mut self, mut mailbox: mpsc::Receiver<Assignment>, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                order = mailbox.recv() => match order {
                    None => break,
                    Some(assignment) => {
                        if self.apply(assignment).await {
                            return;
                        }
                    }
                },
                Some(event) = self.hop_events.1.recv() => self.hop_event(event).await,
                Some((version, looked)) = self.looks.1.recv() => self.looked(version, looked),
                Some(report) = self.source_events.1.recv() => {
                    let report = match report {
                        SourceReport::Failed(failure) => SourceReport::Failed(failure.on(&self.context.node)),
                        other => other,
                    };
                    self.context.outbox.source(self.id, &report);
                }
            }
        }
        self.halt().await;
    }

    /// Makes the job what the assignment says; `true` when that is the end of it.
    async fn apply(&mut self, assignment: Assignment) -> bool {
        let rank = assignment.rank();
        if rank < self.rank {
            return false;
        }
        self.rank = rank;
        let version = assignment.version;
        let ends = assignment.order.ends();
        match assignment.order {
            Order::PrepareSource(source) => self.prepare_source(version, source).await,
            Order::PrepareTarget {
                target,
                payload,
                hash,
            } => {
                self.prepare_target(version, target, payload, hash).await;
            }
            Order::Run(run) => self.be(run).await,
            Order::Release { sha256 } => self.leave(sha256).await,
            Order::Cancel => self.leave(None).await,
        }
        if ends {
            self.context.outbox.forget(self.id);
        }
        self.context.outbox.applied(self.id, rank);
        ends
    }

    async fn prepare_source(&mut self, version: PlanVersion, spec: SourceSpec) {
        let node = self.context.node.clone();
        // Of a job that is taken up again: what it read counts no more.
        self.end_files().await;
        if let [stream] = spec.paths.as_slice()
            && stream.is_stream()
        {
            let prepared = match self.context.streams.look(self.id, &stream.name) {
                Ok(payload) => Prepared::Source { payload },
                Err(failure) => Prepared::Unfit(failure.on(&node)),
            };
            self.context.outbox.prepared(self.id, version, true, &prepared);
            return;
        }
        if self.looking.as_ref().is_some_and(|(of, _)| *of == version) {
            return;
        }
        self.stop_looking();
        let pulse = Arc::new(Pulse::default());
        self.live.parts().walk = Some(pulse.clone());
        self.looking = Some((version, pulse.clone()));
        // Beside this task, so that a cancel need not wait for it; it ends by its pulse.
        let done = self.looks.0.clone();
        tokio::task::spawn_blocking(move || {
            let looked = look(&spec, &pulse);
            // Nobody is there to hear of a walk that was stopped.
            let _ = done.blocking_send((version, looked));
        });
    }

    /// The walk over the source is over.
    fn looked(&mut self, version: PlanVersion, looked: Result<Look, Failure>) {
        if self.looking.as_ref().is_none_or(|(of, _)| *of != version) {
            return;
        }
        self.stop_looking();
        let prepared = match looked {
            Ok(look) => {
                let payload = look.payload.clone();
                self.look = Some(look);
                Prepared::Source { payload }
            }
            Err(failure) => Prepared::Unfit(failure.on(&self.context.node)),
        };
        self.context.outbox.prepared(self.id, version, true, &prepared);
    }

    fn stop_looking(&mut self) {
        if let Some((_, pulse)) = self.looking.take() {
            pulse.stop();
        }
        self.live.parts().walk = None;
    }

    /// The running state: starts what is missing, adjusts what runs.
    async fn be(&mut self, run: Run) {
        self.run = Some(run.clone());
        self.begun.get_or_insert_with(Instant::now);
        match &run.source {
            Some(spec) => self.be_source(&run, spec).await,
            // A retry named another one.
            None => self.end_files().await,
        }
        if let Some(spec) = &run.target {
            self.be_target(&run, spec).await;
        }
        if let Some(serving) = self
            .source
            .as_ref()
            .map(|source| source.serving())
            .or(self.serving.as_deref())
        {
            serving.set_children(run.children.clone());
            serving.set_limit(run.limit);
        }
        if run.fin.is_some() {
            self.fin = run.fin;
            self.publish_if_due().await;
        }
    }

    async fn be_source(&mut self, run: &Run, spec: &SourceSpec) {
        if self.source.is_some() {
            return;
        }
        let started = match spec.paths.as_slice() {
            [stream] if stream.is_stream() => self.start_stream(run, spec).await.map(Origin::Stream),
            _ => self.start_source(run, spec).await.map(Origin::Files),
        };
        match started {
            Ok(source) => {
                let source = Arc::new(source);
                self.live.parts().source = Some(source.clone());
                self.source = Some(source);
            }
            Err(failure) => {
                self.context
                    .outbox
                    .source(self.id, &SourceReport::Failed(failure.on(&self.context.node)));
            }
        }
    }

    async fn start_stream(&self, run: &Run, spec: &SourceSpec) -> Result<Pipe, Failure> {
        let (input, tie) = self.context.streams.take(self.id)?;
        let config = PipeConfig {
            job: self.id,
            key: run.key.clone(),
            payload: run.payload.clone(),
            hash: run.hash,
            source_limit: spec.limit,
            expect: spec.expect.clone(),
            limit: run.limit,
            state: self.context.state.clone(),
            children: run.children.clone(),
            input,
            tie,
        };
        Pipe::start(&self.context.plane, config, self.source_events.0.clone()).await
    }

    async fn start_source(&mut self, run: &Run, spec: &SourceSpec) -> Result<Source, Failure> {
        let config = SourceConfig {
            job: self.id,
            key: run.key.clone(),
            spec: spec.clone(),
            payload: run.payload.clone(),
            look: self.look.take(),
            hash: run.hash,
            limit: run.limit,
            state: self.context.state.clone(),
            children: run.children.clone(),
        };
        Source::start(&self.context.plane, config, self.source_events.0.clone()).await
    }

    /// A source that reads files ends, and what it said is taken back.
    async fn end_files(&mut self) {
        if !matches!(self.source.as_deref(), Some(Origin::Files(_))) {
            return;
        }
        if let Some(source) = self.source.take() {
            self.live.parts().source = None;
            source.stop().await;
            // What it said while it was stopped.
            while self.source_events.1.try_recv().is_ok() {}
            self.context.outbox.retract_source(self.id);
        }
    }

    /// All that moves stops; what is on disk stays.
    async fn halt(&mut self) {
        self.stop_looking();
        self.halt_target().await;
        *self.live.parts() = Parts::default();
        self.serving = None;
        if let Some(source) = self.source.take() {
            source.stop().await;
        }
    }

    /// The job is over here. What is published stays, and is in the index with what is known of it.
    async fn leave(&mut self, sha256: Option<FileDigest>) {
        self.halt().await;
        let (context, job) = (self.context.clone(), self.id);
        if let Err(failure) = blocking(move || context.index.settle(&context.state, job, sha256)).await {
            tracing::warn!("{failure}");
        }
        self.clear(self.published).await;
    }

    /// The journal goes; the partial goes too, unless the copy is published.
    async fn clear(&mut self, published: bool) {
        let (context, job, target) = (self.context.clone(), self.id, self.target.take());
        let cleared = blocking(move || match target.map(Arc::into_inner) {
            Some(Some(target)) if published => {
                target.release();
                Ok(())
            }
            Some(Some(target)) => target.discard(),
            // Of an earlier start of this agent, or of a source.
            Some(None) | None => discard_job(&context.roots, &context.state, job),
        })
        .await;
        if let Err(failure) = cleared {
            tracing::error!(hint = failure.hint, "could not clear up: {failure}");
        }
    }
}
