//! The driver's jobs: what people ask of them, and what follows from their effects.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use stage_core::assignment::{Assignment, Order, Prepared, SourceSpec};
use stage_core::failure::{Code, Failure};
use stage_core::id::{JobId, JobKey, NodeName, PlanVersion};
use stage_core::job::{Effect, Event, Job, Now, Spec, Standing};
use stage_core::plan::{Plan, Request};
use stage_proto::v1;
use stage_proto::v1::coordinator_message::Body;
use tokio::sync::{oneshot, watch};

use super::{After, Asker, Driver, Join, LOOK_DEADLINE, LOOKS, Look, Outbox, Submit, View, judge, submit};
use crate::encode;
use crate::store::{Change, StoredJob};

/// Counters are shown at most this often.
const SHOW_COUNTERS: Duration = Duration::from_millis(200);
/// Changes of state at most this often, the last ones at once.
const SHOW_STATES: Duration = Duration::from_millis(50);
/// Ended jobs that are remembered.
const REMEMBERED: usize = 200;
/// Jobs in a list, unless said.
const LISTED: usize = 50;

/// A job and what the driver keeps beside it.
pub(super) struct Entry {
    pub(super) job: Job,
    pub(super) wake: Option<Duration>,
    view: Option<watch::Sender<Arc<v1::JobView>>>,
    shown_at: Duration,
    /// Watchers should see it then.
    pub(super) show_at: Option<Duration>,
    /// It has settled before, and what it taught is kept.
    pub(super) concluded: bool,
    /// When it was looked for slow hops.
    pub(super) looked_at: Duration,
}

impl Entry {
    fn new(job: Job) -> Self {
        Self {
            job,
            wake: None,
            view: None,
            shown_at: Duration::ZERO,
            show_at: None,
            concluded: false,
            looked_at: Duration::ZERO,
        }
    }
}

impl Driver {
    pub(super) fn restore(&mut self, stored: StoredJob, now: Now) {
        let id = stored.spec.id;
        let standing = self.standing(&stored.spec, now);
        let job = Job::restore(
            stored.spec,
            stored.record,
            stored.plan,
            stored.targets,
            self.epoch,
            standing,
            now,
        );
        self.jobs.insert(id, Entry::new(job));
        self.order.push(id);
    }

    pub(super) fn standing(&self, spec: &Spec, now: Now) -> BTreeMap<NodeName, Standing> {
        std::iter::once(&spec.source)
            .chain(&spec.targets)
            .map(|node| (node.clone(), self.fleet.standing(node, now)))
            .collect()
    }

    /// Applies what agents have reported since the last call, for each job at once.
    pub(super) fn apply_reports(&mut self, now: Now, out: &mut Outbox) {
        for (id, events) in std::mem::take(&mut self.reports) {
            let moved = events.iter().any(|event| matches!(event, Event::Progress(..)));
            self.apply_all(id, events, now, out);
            if moved {
                self.look_for_slow_hops(id, now, out);
            }
        }
    }

    pub(super) fn apply(&mut self, id: JobId, event: Event, now: Now, out: &mut Outbox) {
        self.apply_all(id, vec![event], now, out);
    }

    /// Applies events to a job. Those for a job that is not known are dropped: its agents keep what they have.
    fn apply_all(&mut self, id: JobId, events: Vec<Event>, now: Now, out: &mut Outbox) {
        let Some(entry) = self.jobs.get_mut(&id) else {
            return;
        };
        if entry.wake.is_some_and(|at| at <= now.up) {
            entry.wake = None;
        }
        let had_ended = entry.job.phase().is_ended();
        let had_settled = entry.job.is_settled();
        let mut laid = Vec::new();
        for effect in entry.job.apply_all(events, now) {
            match effect {
                Effect::Persist(changes) => out.batch.push(Change::Job(id, changes)),
                Effect::Send(node, assignment) => {
                    out.after.push(After::Send(node, assign(&assignment)));
                }
                Effect::Plan(request) => {
                    let topology = self.setup.topology.clone();
                    let facts = self.measurements.facts(&topology, now.unix_ms);
                    self.planning.spawn_blocking(move || {
                        let plan = stage_core::plan::plan(&topology, &request, &facts);
                        (Asker::Job(id), plan)
                    });
                }
                Effect::NewHops(request, edges) => {
                    let facts = self.measurements.facts(&self.setup.topology, now.unix_ms);
                    match stage_core::plan::new_hops(&self.setup.topology, &request, &facts, &edges) {
                        Ok(hops) => laid.extend(hops),
                        // Its hops stay as they were planned for other parents.
                        Err(error) => tracing::warn!(job = %id, %error, "hops cannot be laid anew"),
                    }
                }
                Effect::Wake(at) => entry.wake = Some(at),
                Effect::Notify(state) => {
                    let pause = if state { SHOW_STATES } else { SHOW_COUNTERS };
                    let at = if entry.job.is_settled() {
                        now.up
                    } else {
                        (entry.shown_at + pause).max(now.up)
                    };
                    entry.show_at = Some(entry.show_at.map_or(at, |due| due.min(at)));
                }
            }
        }
        let ended = entry.job.phase().is_ended();
        let settled = entry.job.is_settled();
        if ended && !had_ended {
            tracing::info!(job = %id, state = entry.job.phase().as_str(), exit = entry.job.exit(), "job ended");
            self.forget(out);
        }
        if settled && !had_settled {
            self.conclude(id, now, out);
        }
        if !laid.is_empty() {
            self.apply(id, Event::NewHops(laid), now, out);
        }
    }

    /// Applies an event to every job that is not over and in which the node has a part.
    pub(super) fn each_job(
        &mut self,
        node: &NodeName,
        now: Now,
        out: &mut Outbox,
        event: impl Fn() -> Event,
    ) {
        for id in self.order.clone() {
            let concerned = self
                .jobs
                .get(&id)
                .is_some_and(|entry| !entry.job.phase().is_ended() && entry.job.concerns(node));
            if concerned {
                self.apply(id, event(), now, out);
            }
        }
    }

    /// Drops the oldest ended jobs over the number that is remembered.
    fn forget(&mut self, out: &mut Outbox) {
        let ended: Vec<JobId> = self
            .order
            .iter()
            .filter(|id| {
                self.jobs
                    .get(id)
                    .is_some_and(|entry| entry.job.phase().is_ended())
            })
            .copied()
            .collect();
        for id in &ended[..ended.len().saturating_sub(REMEMBERED)] {
            self.jobs.remove(id);
            self.order.retain(|other| other != id);
            out.batch.push(Change::Forget(*id));
        }
    }

    pub(super) fn submit(&mut self, submit: Submit, now: Now, out: &mut Outbox) -> Result<JobId, Failure> {
        let id = submit.id;
        if let Some(entry) = self.jobs.get(&id) {
            let spec = entry.job.spec();
            // Sent twice is one job; the same id for something else is a mistake of the client.
            if submit::named(submit.paths).is_ok_and(|paths| paths == spec.paths) {
                return Ok(id);
            }
            return Err(Failure::new(
                Code::Usage,
                format!("job {id} exists and is another push"),
                "push again: every push needs an id of its own",
            ));
        }
        let join = submit.join;
        let drafted = submit::draft(submit, &self.setup.topology, &self.answers)?;
        if join != Join::No
            && let Some(same) = self.under_way(&drafted)
        {
            return Ok(same);
        }
        if join == Join::Only {
            return Err(Failure::new(
                Code::UnknownJob,
                "no job under way brings that there",
                "push it there",
            ));
        }
        let spec = drafted.spec(JobKey(random()?), self.setup.hash, self.setup.encrypted);
        self.begin(spec, now, out);
        Ok(id)
    }

    /// A job begins; those that still bring something to the same place on its targets are superseded there.
    pub(super) fn begin(&mut self, spec: Spec, now: Now, out: &mut Outbox) {
        let id = spec.id;
        tracing::info!(job = %id, name = spec.name(), source = %spec.source, targets = spec.targets.len(), "job submitted");
        let older: Vec<(JobId, Vec<NodeName>)> = self
            .jobs
            .iter()
            .filter(|(_, entry)| {
                let other = entry.job.spec();
                other.target.place == spec.target.place && other.shares_a_name_with(&spec)
            })
            .map(|(other, entry)| {
                let open = entry.job.open_targets();
                (
                    *other,
                    open.filter(|node| spec.targets.contains(node)).cloned().collect(),
                )
            })
            .filter(|(_, nodes): &(_, Vec<NodeName>)| !nodes.is_empty())
            .collect();
        out.batch.push(Change::Spec(Box::new(spec.clone())));
        // Before the new job's own orders: an agent must let go of the path first.
        for (other, nodes) in older {
            self.apply(other, Event::Superseded(id, nodes), now, out);
        }
        let standing = self.standing(&spec, now);
        let job = Job::new(spec, self.epoch, standing, now);
        self.jobs.insert(id, Entry::new(job));
        self.order.push(id);
        self.apply(id, Event::Start, now, out);
    }

    /// The newest job that still brings the same name to the same place on all of these targets.
    fn under_way(&self, wanted: &submit::Drafted) -> Option<JobId> {
        let lands_there = |job: &Job, node: &NodeName| {
            let place = |place| self.fleet.landing(node, place);
            let (theirs, ours) = (&job.spec().target.place, &wanted.target.place);
            theirs == ours || place(theirs).is_some_and(|landing| place(ours) == Some(landing))
        };
        self.order.iter().rev().copied().find(|id| {
            self.jobs.get(id).is_some_and(|entry| {
                let open: Vec<&NodeName> = entry.job.open_targets().collect();
                entry.job.spec().publishes_the_same_names_as(&wanted.paths)
                    && wanted
                        .targets
                        .iter()
                        .all(|node| open.contains(&node) && lands_there(&entry.job, node))
            })
        })
    }

    /// A dry run: the source is asked what the payload is, nothing else happens.
    pub(super) fn look(
        &mut self,
        submit: Submit,
        reply: oneshot::Sender<Result<Plan, Failure>>,
        now: Now,
        out: &mut Outbox,
    ) {
        let drafted = match submit::draft(submit, &self.setup.topology, &self.answers) {
            Ok(drafted) => drafted,
            Err(failure) => return out.answer(reply, Err(failure)),
        };
        // An id of its own: agents remember ended jobs, and the client may push under its id afterwards.
        let id = match random::<16>() {
            Ok(bytes) if self.looks.len() < LOOKS => JobId::from_random(bytes),
            Ok(_) => {
                let failure = Failure::new(
                    Code::Usage,
                    "too many dry runs are under way",
                    "try again in a moment",
                );
                return out.answer(reply, Err(failure));
            }
            Err(failure) => return out.answer(reply, Err(failure)),
        };
        let assignment = Assignment {
            job: id,
            epoch: self.epoch,
            version: PlanVersion(1),
            order: Order::PrepareSource(SourceSpec {
                paths: drafted.paths.clone(),
                walk: drafted.walk.clone(),
                limit: None,
                expect: Vec::new(),
                cache: drafted.target.cache,
            }),
        };
        let source = drafted.source.clone();
        out.after.push(After::Send(source, assign(&assignment)));
        let look = Look {
            submit: drafted,
            reply,
            until: now.up + LOOK_DEADLINE,
            walked: 0,
        };
        self.looks.insert(id, look);
    }

    /// The source's answer to a dry run.
    pub(super) fn seen(&mut self, id: JobId, answer: Prepared, out: &mut Outbox) {
        let Some(look) = self.looks.remove(&id) else {
            return;
        };
        let done = Assignment {
            job: id,
            epoch: self.epoch,
            version: PlanVersion(2),
            order: Order::Release { sha256: None },
        };
        let source = look.submit.source.clone();
        out.after.push(After::Send(source.clone(), assign(&done)));
        let size = match answer {
            Prepared::Source { payload } if payload.layout().is_some() => payload.travels(),
            Prepared::Unfit(failure) => return out.answer(look.reply, Err(failure.on(&source))),
            _ => {
                let failure = Failure::new(
                    Code::Internal,
                    "the source's agent gave no usable answer",
                    "report this with the agent's log",
                );
                return out.answer(look.reply, Err(failure.on(&source)));
            }
        };
        let request = Request {
            source,
            targets: look.submit.targets.clone(),
            size,
            shape: look.submit.shape,
            streams: look.submit.streams,
            limit: look.submit.limit,
            source_limit: look.submit.source_limit,
            encrypted: self.setup.encrypted,
        };
        let topology = self.setup.topology.clone();
        let facts = self.facts();
        self.planning.spawn_blocking(move || {
            let plan = stage_core::plan::plan(&topology, &request, &facts);
            (Asker::Person(look.reply), plan)
        });
    }

    pub(super) fn drain(
        &mut self,
        nodes: &str,
        drain: bool,
        now: Now,
        out: &mut Outbox,
    ) -> Result<(), Failure> {
        for node in submit::select(nodes, &self.setup.topology, &self.answers)? {
            if self.fleet.drain(&node, drain, now) {
                out.batch.push(Change::Drained(node.clone(), drain));
                self.each_job(&node, now, out, || Event::Drained(node.clone(), drain));
            }
        }
        Ok(())
    }

    pub(super) fn watch(&mut self, id: JobId, now: Now) -> Result<View, Failure> {
        let entry = self.jobs.get_mut(&id).ok_or_else(|| unknown(id))?;
        let fresh = Arc::new(judge::view(
            &entry.job,
            &self.setup.topology,
            &self.measurements,
            now,
        ));
        let view = match &entry.view {
            Some(view) => {
                view.send_replace(fresh);
                view
            }
            None => entry.view.insert(watch::channel(fresh).0),
        };
        Ok(view.subscribe())
    }

    pub(super) fn summaries(&self, limit: usize, now: Now) -> Vec<v1::JobView> {
        let limit = if limit == 0 { LISTED } else { limit };
        self.order
            .iter()
            .rev()
            .filter_map(|id| self.jobs.get(id))
            .take(limit)
            .map(|entry| encode::job(&entry.job.summary(now)))
            .collect()
    }

    /// Shows watchers what is due to be shown.
    pub(super) fn show(&mut self) {
        let now = self.now();
        for entry in self.jobs.values_mut() {
            if entry.show_at.is_none_or(|at| at > now.up) {
                continue;
            }
            entry.show_at = None;
            entry.shown_at = now.up;
            if let Some(view) = &entry.view {
                if view.receiver_count() > 0 {
                    let fresh = judge::view(&entry.job, &self.setup.topology, &self.measurements, now);
                    view.send_replace(Arc::new(fresh));
                } else {
                    entry.view = None;
                }
            }
        }
    }
}

pub(super) fn random<const N: usize>() -> Result<[u8; N], Failure> {
    let mut bytes = [0; N];
    match getrandom::fill(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(error) => Err(Failure::new(
            Code::Internal,
            format!("no random numbers: {error}"),
            "look at the coordinator's host",
        )),
    }
}

fn assign(assignment: &Assignment) -> Box<Body> {
    Box::new(Body::Assignment(assignment.into()))
}

pub(super) fn unknown(id: JobId) -> Failure {
    Failure::new(
        Code::UnknownJob,
        format!("there is no job {id}"),
        "`stage status` lists the jobs; ended ones are forgotten after some time",
    )
}
