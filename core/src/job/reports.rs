//! What agents and the planner say of the job.

use super::{Copied, Job, PROBE_EVERY, Phase, SOURCE_DEADLINE, TargetState};
use crate::assignment::{Order, Outcome, Prepared, Progress, SourceReport};
use crate::failure::{Code, Failure};
use crate::id::{NodeName, PlanVersion};
use crate::payload::Payload;
use crate::plan::{Plan, PlanError};

impl Job {
    pub(super) fn prepared(&mut self, node: &NodeName, version: PlanVersion, answer: Prepared) {
        let Some(told) = self.told.get_mut(node).filter(|told| told.version == version) else {
            return;
        };
        told.applied = true;
        let for_source = match told.order {
            Order::PrepareSource(_) => true,
            Order::PrepareTarget { .. } => false,
            Order::Run(_) => return self.skipped(node, answer),
            Order::Release { .. } | Order::Cancel => return,
        };
        if for_source {
            if self.record.phase != Phase::Preparing || self.record.payload.is_some() {
                return;
            }
            match answer {
                Prepared::Source { payload } if payload.layout().is_some() => {
                    self.record.payload = Some(payload);
                    self.dirty_record = true;
                    self.note_address(node);
                    self.changed();
                }
                Prepared::Source { .. } => self.refuse(
                    Failure::new(
                        Code::SourceKind,
                        "the payload is larger than 2 PiB",
                        "push it in parts",
                    )
                    .on(node)
                    .at(self.source_path()),
                ),
                Prepared::Unfit(failure) => self.refuse(failure.on(node)),
                // Not an answer to this question.
                Prepared::Ready { .. } | Prepared::Skipped { .. } => {}
            }
            return;
        }
        let Some(at) = self.index.get(node).copied() else {
            return;
        };
        let state = self.targets[at].state;
        let first_round = matches!(self.record.phase, Phase::Preparing | Phase::Planning);
        let late =
            state == TargetState::Unfit && (first_round || self.live[at].probing || self.is_awaited(at));
        if state != TargetState::Preparing && !late {
            return;
        }
        self.live[at].probing = false;
        self.live[at].deadline = None;
        match answer {
            Prepared::Ready { path, candidate } => {
                let exists = self.is_occupied(at);
                self.targets[at].path = path;
                self.targets[at].candidate = candidate;
                self.dirty_targets.insert(at);
                if candidate && exists {
                    // What stands there was compared already and is something else.
                    self.live[at].probe_at = Some(self.now.up + PROBE_EVERY);
                    self.touch(node);
                } else {
                    self.set_state(at, TargetState::Ready, None);
                    self.note_address(node);
                }
            }
            Prepared::Skipped { path } => {
                self.targets[at].path = path;
                self.set_state(at, TargetState::Skipped, None);
            }
            Prepared::Unfit(failure) => self.set_unfit(at, failure),
            Prepared::Source { .. } => {}
        }
    }

    /// A target that came back in mid-job was told to run at once, and found that something stands there by now.
    pub(super) fn skipped(&mut self, node: &NodeName, answer: Prepared) {
        if let (Some(at), Prepared::Skipped { path }) = (self.index.get(node).copied(), answer)
            && self.targets[at].state.is_busy()
        {
            self.targets[at].path = path;
            self.set_state(at, TargetState::Skipped, None);
            self.rehome();
        }
    }

    pub(super) fn planned(&mut self, result: Result<Plan, PlanError>) {
        if self.record.phase != Phase::Planning {
            return;
        }
        match result {
            Ok(mut plan) => {
                if self.record.payload.as_ref().is_some_and(Payload::is_stream) {
                    plan.forget_times();
                }
                self.plan = Some(plan);
                self.dirty_plan = true;
                self.index_children();
                let source = self.spec.source.clone();
                self.note_address(&source);
                self.set_phase(Phase::Running);
            }
            Err(PlanError::UnknownNode(node) | PlanError::Unreachable(node))
                if self.index.contains_key(&node) =>
            {
                let at = self.index[&node];
                let failure = Failure::new(
                    Code::Unreachable,
                    format!("no network joins {node} with the source"),
                    "look at the links of the topology",
                );
                self.set_unfit(at, failure);
                self.set_phase(Phase::Preparing);
            }
            Err(error) => self.refuse(Failure::new(
                Code::Internal,
                format!("there is no plan: {error}"),
                "look at the topology with `stage topology check`",
            )),
        }
    }

    pub(super) fn progressed(&mut self, node: &NodeName, progress: Progress) {
        if self.notify.is_none() {
            self.notify = Some(false);
        }
        if *node == self.spec.source {
            if progress.walked != self.source_progress.walked {
                // A walk over many files takes its time; only one that stands still is no answer.
                self.source_deadline = Some(self.now.up + SOURCE_DEADLINE);
            }
            self.record.source_bytes_read = progress.source_bytes_read;
            self.record.source_bytes_sent = progress.bytes_sent;
            self.record.sha256_bytes = progress.sha256_bytes;
            let mut read = progress.clone();
            read.bytes_kept = progress.source_bytes_read;
            self.source_live.note(read, self.now.up);
            self.source_progress = progress.clone();
        }
        let Some(at) = self.index.get(node).copied() else {
            return;
        };
        let count = self.layout_count();
        let state = self.targets[at].state;
        let whole = count.is_some_and(|count| progress.chunks >= count);
        self.live[at].note(progress, self.now.up);
        match (state, whole) {
            (TargetState::Receiving, true) => self.set_state(at, TargetState::Verified, None),
            (TargetState::Verified, false) if self.targets[at].copied.is_none() => {
                self.set_state(at, TargetState::Receiving, None);
            }
            _ => {}
        }
    }

    pub(super) fn source_said(&mut self, report: SourceReport) {
        match report {
            SourceReport::Final(fin) => match &self.record.declared {
                None => {
                    self.record.declared = Some(fin);
                    self.dirty_record = true;
                    self.allow_publishing();
                }
                Some(known) if *known == fin => {}
                Some(_) => self.remark("the source declared another content than before".to_owned()),
            },
            SourceReport::Sha256(digest) => {
                if self.record.sha256.is_some() {
                    return;
                }
                self.record.sha256 = Some(digest);
                self.dirty_record = true;
                self.changed();
            }
            SourceReport::Failed(failure) => {
                let source = self.spec.source.clone();
                if self.record.fin.is_none() {
                    self.fail(failure.on(&source));
                } else if !self.record.source_ended {
                    self.remark(format!(
                        "the source {source} cannot go on after its last chunk: {}",
                        failure.message
                    ));
                    self.record.source_ended = true;
                    self.rehome();
                }
            }
        }
    }

    /// FINAL is in force once it is declared. With `--expect`, the source declares it only when all digests agree.
    fn allow_publishing(&mut self) {
        if self.record.fin.is_some() {
            return;
        }
        self.record.fin.clone_from(&self.record.declared);
        if self.record.fin.is_some() {
            self.dirty_record = true;
            self.changed();
            self.touch_all();
            for at in 0..self.targets.len() {
                if self.targets[at].state == TargetState::Verified && self.targets[at].copied.is_some() {
                    self.set_state(at, TargetState::Published, None);
                }
            }
        }
    }

    pub(super) fn ended(&mut self, node: &NodeName, outcome: Outcome) {
        let Some(at) = self.index.get(node).copied() else {
            return;
        };
        let state = self.targets[at].state;
        match outcome {
            Outcome::Published {
                path,
                already,
                bytes_received,
                took,
            } => {
                // What lies on the disk is the truth, also where the job had given this target up.
                if state.is_good() || state == TargetState::Superseded {
                    return;
                }
                self.targets[at].path = path;
                self.targets[at].copied = Some(Copied {
                    already,
                    bytes_received,
                    took,
                });
                self.dirty_targets.insert(at);
                if self.record.fin.is_some() {
                    self.live[at].probing = false;
                    self.set_state(at, TargetState::Published, None);
                    self.correct_the_end();
                } else if state.is_member() {
                    // Only agreement with FINAL makes it a copy of this payload.
                    self.set_state(at, TargetState::Verified, None);
                }
            }
            Outcome::Unfit(failure) if state.is_member() && state != TargetState::Published => {
                self.set_unfit(at, failure);
                self.rehome();
            }
            Outcome::Failed(failure) if !state.is_ended() => {
                self.live[at].probing = false;
                self.set_state(at, TargetState::Failed, Some(failure));
                self.rehome();
            }
            Outcome::Unfit(failure) if state == TargetState::Unfit => {
                self.set_state(at, TargetState::Unfit, Some(failure));
            }
            Outcome::Unfit(_) | Outcome::Failed(_) => {}
        }
    }

    /// A copy that was published while its node was out of reach turns an end for the better.
    fn correct_the_end(&mut self) {
        if matches!(self.record.phase, Phase::Partial | Phase::Failed) {
            let ended_at = self.record.ended_unix_ms;
            self.record.failure = None;
            self.set_phase(if self.is_whole() {
                Phase::Done
            } else {
                Phase::Partial
            });
            self.record.ended_unix_ms = ended_at;
        }
    }

    pub(super) fn corrupt(&mut self, node: &NodeName, parent: &NodeName, chunk: u32) {
        if self.record.phase.is_ended() || !self.concerns(node) || !self.concerns(parent) {
            return;
        }
        let reporters = self.record.corrupt.entry(parent.clone()).or_default();
        if !reporters.insert(node.clone()) {
            return;
        }
        let second = reporters.len() >= 2;
        self.remark(format!("{node} received a damaged chunk ({chunk}) from {parent}"));
        // Without its source the job could not go on: there the children's own checks must do.
        if second && *parent != self.spec.source && self.record.quarantined.insert(parent.clone()) {
            self.remark(format!(
                "{parent} serves nobody any more: two nodes received damaged chunks from it"
            ));
            self.touch(parent);
            self.rehome();
        }
    }
}
