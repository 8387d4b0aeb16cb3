//! The one task that owns all state. Commands come in, each is applied at once and without waiting; then, for all that
//! came together, one commit, and only after it agents, callers and watchers are told.

mod asks;
mod bench;
mod command;
mod jobs;
mod judge;
mod retry;
mod submit;

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use stage_core::digest::ChunkHash;
use stage_core::failure::{Code, Failure};
use stage_core::id::{ClusterId, Epoch, JobId, NodeName};
use stage_core::job::{Event, Now};
use stage_core::plan::{Plan, PlanError};
use stage_core::topology::Topology;
use stage_proto::v1;
use stage_proto::v1::coordinator_message::Body;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::error::Error;
use crate::fleet::{Fleet, Session};
use crate::measurements::Measurements;
use crate::state::Opened;
use crate::store::{Change, Writer};

pub(crate) use asks::Answers;
pub(crate) use bench::Begun;
pub(crate) use command::{Command, Report, View};
pub(crate) use retry::{Cancelled, Retried};
pub(crate) use submit::{Join, Submit};

use asks::Asks;
use jobs::Entry;
use retry::Cancelling;

/// Commands taken together at most, for one commit.
const TOGETHER: usize = 256;
/// Leases are looked at this often.
const LEASE_TURN: Duration = Duration::from_secs(1);
/// A dry run's source must say what the payload is, or that it still finds more of it, within this.
const LOOK_DEADLINE: Duration = Duration::from_secs(10);
/// Dry runs at once.
const LOOKS: usize = 32;

/// What the driver is set up with.
pub(crate) struct Setup {
    pub(crate) topology: Arc<Topology>,
    pub(crate) hash: ChunkHash,
    pub(crate) encrypted: bool,
}

/// What must be done once everything is committed.
enum After {
    Send(NodeName, Box<Body>),
    Answer(Box<dyn FnOnce() + Send>),
    Watch(JobId, oneshot::Sender<Result<View, Failure>>),
    Jobs(usize, oneshot::Sender<Vec<v1::JobView>>),
    Nodes(oneshot::Sender<Vec<v1::FleetNode>>),
}

/// What follows from the commands taken together.
#[derive(Default)]
struct Outbox {
    batch: Vec<Change>,
    after: Vec<After>,
}

impl Outbox {
    /// Answers a caller once all is committed. A caller that has gone away misses nothing.
    fn answer<T: Send + 'static>(&mut self, to: oneshot::Sender<T>, value: T) {
        self.after
            .push(After::Answer(Box::new(move || drop(to.send(value)))));
    }
}

/// For whom a plan is made.
enum Asker {
    Job(JobId),
    Person(oneshot::Sender<Result<Plan, Failure>>),
}

/// A dry run that waits for the source's answer.
struct Look {
    submit: submit::Drafted,
    reply: oneshot::Sender<Result<Plan, Failure>>,
    until: Duration,
    /// How far the source's walk has come.
    walked: u64,
}

/// See the module.
pub(crate) struct Driver {
    setup: Setup,
    cluster: ClusterId,
    epoch: Epoch,
    begun: Instant,
    inbox: mpsc::Receiver<Command>,
    writer: Writer,
    /// Held until the last write is done.
    _lock: File,
    fleet: Fleet,
    measurements: Measurements,
    answers: BTreeMap<String, Vec<NodeName>>,
    jobs: BTreeMap<JobId, Entry>,
    /// In the order of their submits.
    order: Vec<JobId>,
    looks: BTreeMap<JobId, Look>,
    asks: Asks,
    cancels: Vec<Cancelling>,
    /// The bench that is under way, if one is.
    benching: Weak<()>,
    /// What agents said of each job among the commands taken together.
    reports: BTreeMap<JobId, Vec<Event>>,
    planning: JoinSet<(Asker, Result<Plan, PlanError>)>,
    leases_at: Duration,
    fatal: Option<Error>,
}

impl Driver {
    pub(crate) fn new(setup: Setup, opened: Opened, inbox: mpsc::Receiver<Command>) -> Self {
        let begun = Instant::now();
        let now = Now {
            up: Duration::ZERO,
            unix_ms: unix_ms(),
        };
        let mut driver = Self {
            fleet: Fleet::new(opened.drained, now),
            setup,
            cluster: opened.cluster,
            epoch: opened.epoch,
            begun,
            inbox,
            writer: opened.writer,
            _lock: opened.lock,
            measurements: Measurements::restore(opened.readings, opened.lessons, opened.pushes),
            answers: BTreeMap::new(),
            jobs: BTreeMap::new(),
            order: Vec::new(),
            looks: BTreeMap::new(),
            asks: Asks::default(),
            cancels: Vec::new(),
            benching: Weak::new(),
            reports: BTreeMap::new(),
            planning: JoinSet::new(),
            leases_at: Duration::ZERO,
            fatal: None,
        };
        for stored in opened.jobs {
            driver.restore(stored, now);
        }
        driver
    }

    fn now(&self) -> Now {
        Now {
            up: self.begun.elapsed(),
            unix_ms: unix_ms(),
        }
    }

    /// Works until `stop`.
    pub(crate) async fn run(mut self, stop: CancellationToken) -> Result<(), Error> {
        let mut out = Outbox::default();
        let now = self.now();
        for id in self.order.clone() {
            self.apply(id, Event::Start, now, &mut out);
        }
        self.perform(out).await?;
        loop {
            let wake = self.begun + self.next_wake();
            let mut commands = Vec::new();
            let mut planned = None;
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                count = self.inbox.recv_many(&mut commands, TOGETHER) => {
                    if count == 0 {
                        return Ok(());
                    }
                }
                Some(plan) = self.planning.join_next() => planned = Some(plan),
                () = tokio::time::sleep_until(wake) => {}
            }
            let now = self.now();
            let mut out = Outbox::default();
            if let Some(planned) = planned {
                let (asker, plan) = planned.map_err(|error| Error::Internal(error.to_string()))?;
                match asker {
                    Asker::Job(id) => self.apply(id, Event::Planned(plan), now, &mut out),
                    Asker::Person(reply) => out.answer(reply, plan.map_err(|error| no_plan(&error))),
                }
            }
            for command in commands {
                if !matches!(command, Command::Report { .. }) {
                    self.apply_reports(now, &mut out);
                }
                self.take(command, now, &mut out);
            }
            self.apply_reports(now, &mut out);
            self.turn(now, &mut out);
            self.perform(out).await?;
            if let Some(error) = self.fatal.take() {
                return Err(error);
            }
        }
    }

    fn take(&mut self, command: Command, now: Now, out: &mut Outbox) {
        match command {
            Command::Submit { submit, reply } => {
                let result = self.submit(*submit, now, out);
                out.answer(reply, result);
            }
            Command::Plan { submit, reply } => self.look(*submit, reply, now, out),
            Command::Watch { job, reply } => out.after.push(After::Watch(job, reply)),
            Command::Jobs { limit, reply } => out.after.push(After::Jobs(limit, reply)),
            Command::Nodes { reply } => out.after.push(After::Nodes(reply)),
            Command::Cancel { job, nodes, reply } => self.cancel(job, &nodes, reply, now, out),
            Command::Retry {
                job,
                from,
                new,
                reply,
            } => {
                let result = self.retry(job, from, new, now, out);
                out.answer(reply, result);
            }
            Command::Drain { nodes, drain, reply } => match self.drain(&nodes, drain, now, out) {
                Ok(()) => {
                    let (to, from) = oneshot::channel();
                    out.after.push(After::Nodes(to));
                    out.after.push(After::Answer(Box::new(move || {
                        let mut from = from;
                        if let Ok(nodes) = from.try_recv() {
                            drop(reply.send(Ok(nodes)));
                        }
                    })));
                }
                Err(failure) => out.answer(reply, Err(failure)),
            },
            Command::Ask {
                nodes,
                question,
                reply,
            } => {
                let result = self.ask(&nodes, &question, now, out);
                out.answer(reply, result);
            }
            Command::AskEach { asks, reply } => {
                let result = self.ask_each(asks, now, out);
                out.answer(reply, result);
            }
            Command::Bench { wanted, reply } => {
                let result = self.begin_bench(&wanted);
                out.answer(reply, result);
            }
            Command::Busy { reply } => out.answer(reply, self.busy()),
            Command::Measured { measurement, reply } => {
                self.measured(measurement, out);
                out.answer(reply, ());
            }
            Command::Taught { reply } => out.answer(reply, self.measurements.taught(now.unix_ms)),
            Command::History { reply } => out.answer(reply, self.measurements.history().clone()),
            Command::Known { nodes, reply } => {
                let known = submit::select(&nodes, &self.setup.topology, &self.answers)
                    .map(|nodes| (nodes, self.facts()));
                out.answer(reply, known);
            }
            Command::Group { name, nodes } => {
                self.answers.insert(name, nodes);
            }
            Command::Refuse {
                node,
                version,
                failure,
            } => self.fleet.refuse(&node, &version, failure, now),
            Command::Register {
                registration,
                session,
                reply,
            } => self.register(&registration, session, reply, now, out),
            Command::Report {
                node,
                session,
                report,
            } => {
                if self.fleet.heard(&node, session, now) {
                    self.report(node, report, now, out);
                }
            }
            Command::Closed { node, session } => {
                self.asks_lost(&node, Some(session));
                if self.fleet.closed(&node, session, now) {
                    self.each_job(&node, now, out, || Event::Away(node.clone()));
                }
            }
        }
    }

    fn register(
        &mut self,
        registration: &crate::fleet::Registration,
        session: Session,
        reply: oneshot::Sender<Result<(), Failure>>,
        now: Now,
        out: &mut Outbox,
    ) {
        if let Err(failure) = self.fleet.admit(registration, &self.setup.topology, self.cluster) {
            tracing::warn!(node = %registration.node, code = %failure.code, %failure, "an agent was refused");
            self.fleet.refuse(
                registration.node.as_str(),
                &registration.version,
                failure.clone(),
                now,
            );
            out.answer(reply, Err(failure));
            return;
        }
        if registration.epoch > self.epoch {
            // Nothing that this coordinator says would be heeded, and it must not go on as if it were.
            self.fatal = Some(Error::Fenced {
                ours: self.epoch,
                theirs: registration.epoch,
            });
            return;
        }
        let node = registration.node.clone();
        tracing::info!(%node, version = registration.version, jobs = registration.jobs.len(), "agent registered");
        self.fleet.register(registration, session, now);
        self.asks_lost(&node, None);
        self.measurements
            .host(&node, registration.windows, registration.controls.clone());
        out.answer(reply, Ok(()));
        let welcome = v1::Welcome {
            hello: Some(stage_proto::version::hello()),
            cluster_id: self.cluster.to_string(),
            epoch: self.epoch.0,
        };
        out.after
            .push(After::Send(node.clone(), Box::new(Body::Welcome(welcome))));
        for id in self.order.clone() {
            let holds = registration.jobs.contains(&id);
            let Some(entry) = self.jobs.get(&id) else { continue };
            if entry.job.concerns(&node) && (holds || !entry.job.phase().is_ended()) {
                let event = Event::Up {
                    node: node.clone(),
                    addresses: registration.addresses.clone(),
                    held: holds,
                };
                self.apply(id, event, now, out);
            }
        }
    }

    fn report(&mut self, node: NodeName, report: Report, now: Now, out: &mut Outbox) {
        match report {
            Report::Heartbeat { count, roots } => {
                if self.fleet.set_roots(&node, roots) {
                    self.apply_reports(now, out);
                    self.each_job(&node, now, out, || Event::Space(node.clone()));
                }
                let beat = v1::Heartbeat {
                    count,
                    roots: Vec::new(),
                };
                out.after.push(After::Send(node, Box::new(Body::Heartbeat(beat))));
            }
            Report::Draining => {
                self.apply_reports(now, out);
                tracing::info!(%node, "agent is about to stop");
                self.fleet.set_leaving(&node);
                self.each_job(&node, now, out, || Event::Leaving(node.clone()));
            }
            Report::Applied(job, epoch, version) => self.said(job, Event::Applied(node, epoch, version)),
            Report::Prepared(job, version, answer) => {
                if self.looks.contains_key(&job) {
                    self.seen(job, answer, out);
                } else {
                    self.said(job, Event::Prepared(node, version, answer));
                }
            }
            Report::Progress(job, progress) => {
                if let Some(look) = self.looks.get_mut(&job)
                    && progress.walked > look.walked
                {
                    (look.walked, look.until) = (progress.walked, now.up + LOOK_DEADLINE);
                }
                self.measurements.progress(&node, &progress);
                self.said(job, Event::Progress(node, progress));
            }
            Report::Source(job, report) => self.said(job, Event::Source(node, report)),
            Report::Outcome(job, outcome) => self.said(job, Event::Outcome(node, outcome)),
            Report::Moved { job, from, to, why } => {
                self.said(job, Event::Moved { node, from, to, why });
            }
            Report::Said { id, said, last } => self.answered(&node, id, said, last, now, out),
            Report::Corrupt { job, parent, chunk } => {
                self.said(job, Event::Corrupt { node, parent, chunk });
            }
        }
    }

    fn said(&mut self, job: JobId, event: Event) {
        self.reports.entry(job).or_default().push(event);
    }

    /// What is due by time alone.
    fn turn(&mut self, now: Now, out: &mut Outbox) {
        if self.leases_at <= now.up {
            self.leases_at = now.up + LEASE_TURN;
            for node in self.fleet.expired(&self.setup.topology, now) {
                tracing::warn!(%node, "agent is away");
                self.each_job(&node, now, out, || Event::Away(node.clone()));
            }
        }
        self.turn_asks(now, out);
        self.turn_cancels(now, out);
        let due: Vec<JobId> = self
            .jobs
            .iter()
            .filter(|(_, entry)| entry.wake.is_some_and(|at| at <= now.up))
            .map(|(id, _)| *id)
            .collect();
        for id in due {
            self.apply(id, Event::Tick, now, out);
        }
        let late: Vec<JobId> = self
            .looks
            .iter()
            .filter(|(_, look)| look.until <= now.up)
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            if let Some(look) = self.looks.remove(&id) {
                let failure = Failure::new(
                    Code::Unreachable,
                    format!(
                        "the agent of {} did not say what the payload is",
                        look.submit.source
                    ),
                    "look at `stage nodes`",
                );
                out.answer(look.reply, Err(failure.on(&look.submit.source)));
            }
        }
    }

    fn next_wake(&self) -> Duration {
        let jobs = self
            .jobs
            .values()
            .flat_map(|entry| [entry.wake, entry.show_at])
            .flatten();
        let looks = self.looks.values().map(|look| look.until);
        jobs.chain(looks)
            .chain(self.asks.next())
            .chain(self.cancels.iter().map(|cancel| cancel.until))
            .fold(self.leases_at, Duration::min)
    }

    /// Commits, then tells. Nothing is told if the commit failed: the process ends, and what was not told did not
    /// happen.
    async fn perform(&mut self, out: Outbox) -> Result<(), Error> {
        if !out.batch.is_empty() {
            self.writer.commit(out.batch).await?;
        }
        for after in out.after {
            match after {
                After::Send(node, body) => self.fleet.send(&node, *body),
                After::Answer(answer) => answer(),
                After::Watch(job, reply) => {
                    let now = self.now();
                    drop(reply.send(self.watch(job, now)));
                }
                After::Jobs(limit, reply) => {
                    let now = self.now();
                    drop(reply.send(self.summaries(limit, now)));
                }
                After::Nodes(reply) => drop(reply.send(self.fleet.view(&self.setup.topology))),
            }
        }
        self.show();
        Ok(())
    }
}

fn no_plan(error: &PlanError) -> Failure {
    Failure::new(
        Code::Unreachable,
        format!("there is no plan: {error}"),
        "look at the topology with `stage topology check`",
    )
}

pub(crate) fn unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}
