//! Questions to agents, beside the jobs: one is sent to many nodes at once, and what each answers is passed on to
//! whoever asked. Each node's last word is one that always comes: its answer's end, or why there is none.

use std::collections::BTreeMap;
use std::time::Duration;

use stage_core::ask::{Question, Said};
use stage_core::failure::{Code, Failure};
use stage_core::id::{AskId, NodeName};
use stage_core::job::{Now, Record};
use stage_proto::v1;
use stage_proto::v1::coordinator_message::Body;
use tokio::sync::mpsc;

use super::{After, Driver, Outbox, submit};
use crate::fleet::SessionId;

/// Questions that may be open at once, over all who ask.
const OPEN: usize = 1 << 16;
/// Parts of answers that wait for who asked, beside one for each node.
const PARTS: usize = 64;

/// A part of a node's answer.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) node: NodeName,
    pub(crate) said: Said,
    /// The node says no more.
    pub(crate) last: bool,
}

/// The answers of all nodes that were asked: ends when each has said its last. Dropped, nobody is asked any more.
pub(crate) type Answers = mpsc::Receiver<Part>;

/// The questions that are not answered yet.
#[derive(Default)]
pub(super) struct Asks {
    last: AskId,
    open: BTreeMap<AskId, Open>,
}

struct Open {
    node: NodeName,
    session: SessionId,
    question: Question,
    /// By then it must have said something.
    until: Duration,
    to: mpsc::Sender<Part>,
    /// The place of its last word.
    end: mpsc::OwnedPermit<Part>,
}

impl Open {
    fn end(self, said: Said) {
        self.end.send(Part {
            node: self.node,
            said,
            last: true,
        });
    }
}

impl Asks {
    /// When somebody's patience ends first.
    pub(super) fn next(&self) -> Option<Duration> {
        self.open.values().map(|open| open.until).min()
    }

    /// Takes the questions out of which this holds.
    fn take(&mut self, holds: impl Fn(&Open) -> bool) -> Vec<Open> {
        let ids: Vec<AskId> = self
            .open
            .iter()
            .filter(|(_, open)| holds(open))
            .map(|(id, _)| *id)
            .collect();
        ids.into_iter().filter_map(|id| self.open.remove(&id)).collect()
    }
}

impl Driver {
    /// Asks the nodes of a TARGETS text.
    pub(super) fn ask(
        &mut self,
        nodes: &str,
        question: &Question,
        now: Now,
        out: &mut Outbox,
    ) -> Result<Answers, Failure> {
        let nodes = submit::select(nodes, &self.setup.topology, &self.answers)?;
        let asks = nodes.into_iter().map(|node| (node, question.clone())).collect();
        self.ask_each(asks, now, out)
    }

    /// Asks each of some nodes something of its own.
    pub(super) fn ask_each(
        &mut self,
        asks: Vec<(NodeName, Question)>,
        now: Now,
        out: &mut Outbox,
    ) -> Result<Answers, Failure> {
        let busy = || {
            Failure::new(
                Code::Unreachable,
                "too many questions are under way",
                "try again in a moment",
            )
        };
        if self.asks.open.len() + asks.len() > OPEN {
            return Err(busy());
        }
        let (to, answers) = mpsc::channel(2 * asks.len() + PARTS);
        for (node, question) in asks {
            let end = to.clone().try_reserve_owned().map_err(|_| busy())?;
            let Some(session) = self.fleet.session(&node) else {
                let failure = self.fleet.why_silent(&node);
                end.send(Part {
                    node,
                    said: Said::Failed(failure),
                    last: true,
                });
                continue;
            };
            let id = self.asks.last.next();
            self.asks.last = id;
            let ask = v1::Ask::of(id, &question);
            out.after
                .push(After::Send(node.clone(), Box::new(Body::Ask(ask))));
            let open = Open {
                node,
                session,
                until: now.up + question.patience(),
                question,
                to: to.clone(),
                end,
            };
            self.asks.open.insert(id, open);
        }
        Ok(answers)
    }

    /// A part of an answer came.
    pub(super) fn answered(
        &mut self,
        node: &NodeName,
        id: AskId,
        mut said: Said,
        last: bool,
        now: Now,
        out: &mut Outbox,
    ) {
        // One that was withdrawn, or an agent that answers for another.
        let Some(open) = self.asks.open.get_mut(&id).filter(|open| open.node == *node) else {
            return;
        };
        open.until = now.up + open.question.patience();
        if let (Said::Copies(copies), Question::List(wanted)) = (&mut said, &open.question) {
            // A job that is still open has told its targets nothing of the digest yet.
            for copy in copies.iter_mut().filter(|copy| copy.sha256.is_none()) {
                let record = self.jobs.get(&copy.job).map(|entry| entry.job.record());
                // Of several parts the digest is that of all together.
                let is_one = |record: &&Record| {
                    record
                        .payload
                        .as_ref()
                        .is_some_and(|payload| payload.units.len() == 1)
                };
                copy.sha256 = record.filter(is_one).and_then(|record| record.sha256);
            }
            copies.retain(|copy| wanted.is(copy.sha256, copy.root));
        }
        if last {
            if let Some(open) = self.asks.open.remove(&id) {
                open.end(said);
            }
            return;
        }
        let is_progress = matches!(said, Said::Progress(_));
        let part = Part {
            node: node.clone(),
            said,
            last,
        };
        match open.to.try_send(part) {
            Ok(()) => {}
            // The next one says more.
            Err(mpsc::error::TrySendError::Full(_)) if is_progress => {}
            Err(_) => {
                let failure = Failure::new(
                    Code::Unreachable,
                    "the answers came faster than they were read",
                    "ask fewer nodes, or for fewer copies",
                );
                self.withdraw(id, Some(failure), out);
            }
        }
    }

    /// Nobody waits for the answer any more.
    fn withdraw(&mut self, id: AskId, failure: Option<Failure>, out: &mut Outbox) {
        let Some(open) = self.asks.open.remove(&id) else {
            return;
        };
        let withdraw = Body::Withdraw(v1::Withdraw { id: id.0 });
        out.after.push(After::Send(open.node.clone(), Box::new(withdraw)));
        if let Some(failure) = failure {
            let failure = failure.on(&open.node);
            open.end(Said::Failed(failure));
        }
    }

    /// The node's session ended (`None`: all but a new one), and with it its answers.
    pub(super) fn asks_lost(&mut self, node: &NodeName, session: Option<SessionId>) {
        let lost = self
            .asks
            .take(|open| open.node == *node && session.is_none_or(|session| session == open.session));
        for open in lost {
            let failure = self.fleet.why_silent(node);
            open.end(Said::Failed(failure));
        }
    }

    /// Ends what nobody waits for, and what nobody should wait for any longer.
    pub(super) fn turn_asks(&mut self, now: Now, out: &mut Outbox) {
        let due: Vec<(AskId, Option<Failure>)> = self
            .asks
            .open
            .iter()
            .filter_map(|(id, open)| {
                if open.to.is_closed() {
                    return Some((*id, None));
                }
                let failure = Failure::new(
                    Code::Unreachable,
                    format!(
                        "the agent said nothing for {} s",
                        open.question.patience().as_secs()
                    ),
                    "look at `stage nodes` and at the agent's log",
                );
                (open.until <= now.up).then_some((*id, Some(failure)))
            })
            .collect();
        for (id, failure) in due {
            self.withdraw(id, failure, out);
        }
    }
}
