//! What people ask of a job that is there already: to end it, or to try again what is missing of it.

use std::time::Duration;

use stage_core::failure::{Code, Failure};
use stage_core::id::{JobId, JobKey, NodeName};
use stage_core::job::{Event, Now, Phase, Presence, Spec};
use tokio::sync::oneshot;

use super::jobs::{random, unknown};
use super::{Driver, Outbox, submit};
use crate::store::Change;

/// How long a cancel is waited for: who cancels has the answer within 5 s, also where a node says nothing.
const CANCEL_WAIT: Duration = Duration::from_secs(4);
/// Cancels waited for at once; further ones are answered at once.
const CANCELS: usize = 256;

/// What became of a cancel.
#[derive(Debug, Default)]
pub(crate) struct Cancelled {
    /// The job had ended before, as this.
    pub(crate) ended: Option<Phase>,
    /// Connected nodes that have not said yet that they did it.
    pub(crate) waiting: Vec<NodeName>,
}

/// A cancel that not all connected nodes have applied.
pub(super) struct Cancelling {
    job: JobId,
    /// On these only.
    nodes: Option<Vec<NodeName>>,
    ended: Option<Phase>,
    reply: oneshot::Sender<Result<Cancelled, Failure>>,
    pub(super) until: Duration,
}

/// What a retry came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Retried {
    /// Nothing is missing, or nothing that may be tried again.
    Nothing,
    /// The job is under way: who is awaited is asked again.
    Asked,
    /// It had failed, and goes on from what its targets kept.
    Revived,
    /// There is a new job for what is missing.
    Anew(JobId),
}

impl Driver {
    pub(super) fn cancel(
        &mut self,
        id: JobId,
        nodes: &str,
        reply: oneshot::Sender<Result<Cancelled, Failure>>,
        now: Now,
        out: &mut Outbox,
    ) {
        match self.cancel_on(id, nodes) {
            Ok((nodes, ended)) => {
                self.apply(id, Event::Cancel(nodes.clone()), now, out);
                let wait = if self.cancels.len() < CANCELS {
                    CANCEL_WAIT
                } else {
                    Duration::ZERO
                };
                // Answered in this turn already if nobody has to be waited for.
                self.cancels.push(Cancelling {
                    job: id,
                    nodes,
                    ended,
                    reply,
                    until: now.up + wait,
                });
            }
            Err(failure) => out.answer(reply, Err(failure)),
        }
    }

    fn cancel_on(&self, id: JobId, nodes: &str) -> Result<(Option<Vec<NodeName>>, Option<Phase>), Failure> {
        let entry = self.jobs.get(&id).ok_or_else(|| unknown(id))?;
        let ended = Some(entry.job.phase()).filter(|phase| phase.is_ended());
        if nodes.is_empty() {
            return Ok((None, ended));
        }
        let chosen = submit::select(nodes, &self.setup.topology, &self.answers)?;
        if let Some(stranger) = chosen
            .iter()
            .find(|node| !entry.job.spec().targets.contains(node))
        {
            return Err(Failure::new(
                Code::UnknownTarget,
                format!("{stranger} is no target of job {id}"),
                format!("`stage status {id}` lists its targets"),
            )
            .on(stranger));
        }
        Ok((Some(chosen), ended))
    }

    /// Answers the cancels that are done, or have been waited for long enough.
    pub(super) fn turn_cancels(&mut self, now: Now, out: &mut Outbox) {
        for cancel in std::mem::take(&mut self.cancels) {
            let waiting: Vec<NodeName> = self.jobs.get(&cancel.job).map_or_else(Vec::new, |entry| {
                let meant = |node: &&NodeName| cancel.nodes.as_ref().is_none_or(|nodes| nodes.contains(node));
                entry.job.unapplied().filter(meant).cloned().collect()
            });
            if waiting.is_empty() || cancel.until <= now.up {
                let cancelled = Cancelled {
                    ended: cancel.ended,
                    waiting,
                };
                out.answer(cancel.reply, Ok(cancelled));
            } else {
                self.cancels.push(cancel);
            }
        }
    }

    pub(super) fn retry(
        &mut self,
        id: JobId,
        from: Option<NodeName>,
        new: JobId,
        now: Now,
        out: &mut Outbox,
    ) -> Result<Retried, Failure> {
        if self.jobs.contains_key(&new) {
            // Sent twice is tried once.
            return Ok(Retried::Anew(new));
        }
        let job = &self.jobs.get(&id).ok_or_else(|| unknown(id))?.job;
        if let Some(from) = from
            .as_ref()
            .filter(|from| self.setup.topology.node(from).is_none())
        {
            return Err(Failure::new(
                Code::NoSource,
                format!("the source {from} is not in the topology"),
                "name a node of the topology with --from",
            )
            .on(from));
        }
        let other = from.filter(|from| *from != job.spec().source);
        if !job.phase().is_ended() {
            if let Some(other) = other {
                let source = &job.spec().source;
                return Err(Failure::new(
                    Code::Usage,
                    format!("job {id} is under way from {source}, and cannot go on from {other}"),
                    format!("leave --from out, or end the job first with `stage cancel {id}`"),
                ));
            }
            self.again(id, None, now, out);
            return Ok(Retried::Asked);
        }
        let targets = job.missing();
        if job.phase() == Phase::Done || targets.is_empty() {
            return Ok(Retried::Nothing);
        }
        if job.spec().is_stream() {
            return Err(Failure::new(
                Code::Usage,
                format!("job {id} came through a pipe, of which nothing can be read again"),
                "push it again, or from a node that has a copy (`stage ls` shows where)",
            ));
        }
        let spec = Spec {
            source: other.unwrap_or_else(|| job.spec().source.clone()),
            ..job.spec().clone()
        };
        if job.can_be_revived() {
            let source = &spec.source;
            if self.fleet.standing(source, now).presence != Presence::Up {
                return Err(Failure::new(
                    Code::Away,
                    format!("the agent of the source {source} is not connected"),
                    format!(
                        "start stage-agent on {source}, or name another node that has it with --from; what the targets \
                         have is kept meanwhile"
                    ),
                )
                .on(source));
            }
            tracing::info!(job = %id, %source, "job is tried again");
            self.again(id, Some(spec), now, out);
            return Ok(Retried::Revived);
        }
        let spec = Spec {
            id: new,
            key: JobKey(random()?),
            hash: self.setup.hash,
            encrypted: self.setup.encrypted,
            targets,
            ..spec
        };
        self.begin(spec, now, out);
        Ok(Retried::Anew(new))
    }

    /// Tells the job itself; with the spec that it has from now on, if it is revived.
    fn again(&mut self, id: JobId, spec: Option<Spec>, now: Now, out: &mut Outbox) {
        let (source, standing) = match spec {
            Some(spec) => {
                let (source, standing) = (spec.source.clone(), self.standing(&spec, now));
                out.batch.push(Change::Spec(Box::new(spec)));
                (Some(source), standing)
            }
            None => Default::default(),
        };
        self.apply(id, Event::Retry { source, standing }, now, out);
    }
}
