//! From phase to phase: what follows from the state that the events have made, and from the time.

use std::time::Duration;

use super::{
    CONNECT_GRACE, Job, PROBE_EVERY, Phase, Presence, SOURCE_DEADLINE, SOURCE_LOST, TargetState, UnfitRule,
};
use crate::failure::{Code, Failure};
use crate::id::NodeName;

impl Job {
    pub(super) fn settle(&mut self) {
        loop {
            let before = self.record.phase;
            match before {
                Phase::Queued => self.queue(),
                Phase::Preparing => self.prepare(),
                Phase::Planning => {}
                Phase::Running | Phase::Finishing | Phase::Open => self.run(),
                Phase::Done | Phase::Partial | Phase::Failed | Phase::Cancelled => return,
            }
            if self.record.phase == before {
                return;
            }
        }
    }

    fn is_missing(&self, node: &NodeName) -> bool {
        match self.standing(node).presence {
            Presence::Up => false,
            Presence::Unknown => self.now.up >= CONNECT_GRACE,
            Presence::Leaving | Presence::Away => true,
        }
    }

    fn queue(&mut self) {
        let source = self.spec.source.clone();
        if self.is_up(&source) {
            self.source_deadline = Some(self.now.up + SOURCE_DEADLINE);
            self.touch(&source);
            self.set_phase(Phase::Preparing);
        } else if self.is_missing(&source) {
            self.refuse(away(&source));
        }
    }

    fn prepare(&mut self) {
        let source = self.spec.source.clone();
        if self.record.payload.is_none() {
            let silent = self.source_deadline.is_some_and(|at| at <= self.now.up);
            if silent || self.standing(&source).presence == Presence::Away {
                self.refuse(away(&source));
            }
            return;
        }
        for at in 0..self.targets.len() {
            let node = self.spec.targets[at].clone();
            match self.targets[at].state {
                TargetState::Waiting if self.standing(&node).drained => {
                    self.targets[at].drained = true;
                    let failure = Failure::new(
                        Code::Drained,
                        format!("{node} is drained"),
                        format!("`stage nodes resume {node}` takes that back"),
                    );
                    self.set_unfit(at, failure);
                }
                TargetState::Waiting if self.is_missing(&node) => self.set_unfit(at, away(&node)),
                TargetState::Waiting if self.is_up(&node) => {
                    self.set_state(at, TargetState::Preparing, None);
                    self.ask(at);
                }
                TargetState::Preparing
                    if self.live[at].deadline.is_some_and(|end| end <= self.now.up)
                        || self.standing(&node).presence == Presence::Away =>
                {
                    self.set_unfit(at, away(&node));
                }
                _ => {}
            }
        }
        let asking = |state| matches!(state, TargetState::Waiting | TargetState::Preparing);
        if !self.targets.iter().any(|target| asking(target.state)) {
            self.decide();
        }
    }

    /// Every target has answered, or will not.
    fn decide(&mut self) {
        if self.all_withdrawn() {
            return;
        }
        let unfit: Vec<usize> = (0..self.targets.len())
            .filter(|at| self.targets[*at].state == TargetState::Unfit)
            .collect();
        let counted = unfit.iter().find(|at| !self.targets[**at].drained);
        if let (UnfitRule::Fail, Some(at)) = (self.spec.unfit, counted) {
            let failure = self.targets[*at].failure.clone();
            self.refuse(failure.unwrap_or_else(|| away(&self.spec.targets[*at])));
        } else if self.targets.iter().any(|t| t.state == TargetState::Ready) {
            self.want_plan = true;
            self.set_phase(Phase::Planning);
        } else if self.targets.iter().any(|t| t.state == TargetState::Skipped) {
            self.set_phase(Phase::Running);
        } else {
            let failure = counted
                .or(unfit.first())
                .and_then(|at| self.targets[*at].failure.clone());
            self.refuse(match failure {
                Some(failure) if unfit.len() == 1 => failure,
                Some(failure) => Failure {
                    message: format!("no target is fit; the first: {}", failure.message),
                    ..failure
                },
                None => Failure::new(Code::Internal, "no target is left", "report this"),
            });
        }
    }

    /// Ends a job whose targets were all cancelled or superseded.
    pub(super) fn all_withdrawn(&mut self) -> bool {
        if !self.targets.iter().all(|target| target.state.is_withdrawn()) {
            return false;
        }
        let newer = self.targets.iter().find_map(|target| target.superseded_by);
        match newer {
            Some(by) => self.fail(Failure::new(
                Code::Superseded,
                format!("the newer push {by} took its place"),
                format!("`stage status {by}` shows it"),
            )),
            None => self.set_phase(Phase::Cancelled),
        }
        true
    }

    pub(super) fn run(&mut self) {
        self.watch_source();
        if self.record.phase.is_ended() {
            return;
        }
        self.probe();
        if self.plan.is_none() && self.targets.iter().any(|t| t.state == TargetState::Ready) {
            // Nobody was fit but for those that were skipped: the first plan comes only now.
            self.want_plan = true;
            self.set_phase(Phase::Planning);
            return;
        }
        let ready: Vec<usize> = (0..self.targets.len())
            .filter(|at| self.targets[*at].state == TargetState::Ready)
            .collect();
        if !ready.is_empty() {
            for at in ready {
                self.join(at);
            }
            self.refresh();
        }
        self.complete();
    }

    fn watch_source(&mut self) {
        let lost = self
            .source_gone_since
            .is_some_and(|since| since + SOURCE_LOST <= self.now.up);
        let source = self.spec.source.clone();
        if lost && !self.record.source_ended {
            let failure = Failure::new(
                Code::SourceLost,
                format!(
                    "the source {source} has been away for {} s",
                    SOURCE_LOST.as_secs()
                ),
                format!(
                    "start its agent, then `stage retry {}`: what the targets have is kept for 24 h",
                    self.spec.id
                ),
            )
            .on(&source)
            .at(self.source_path());
            if self.record.fin.is_none() {
                self.fail(failure);
                return;
            }
            self.record.source_ended = true;
            self.remark(failure.message);
            self.rehome();
        }
        if self.record.source_ended && !self.has_holder() {
            let failure = Failure::new(
                Code::SourceLost,
                "no node that has the whole payload can be reached",
                format!("start the source's agent, then `stage retry {}`", self.spec.id),
            );
            for at in 0..self.targets.len() {
                if self.targets[at].state.is_busy() {
                    self.set_state(at, TargetState::Failed, Some(failure.clone()));
                }
            }
        }
    }

    /// Whether a complete copy beside the source's can be reached.
    fn has_holder(&self) -> bool {
        self.spec.targets.iter().zip(&self.targets).any(|(node, target)| {
            matches!(target.state, TargetState::Published | TargetState::Verified)
                && self.standing(node).presence != Presence::Away
                && !self.record.quarantined.contains(node)
        })
    }

    fn probe(&mut self) {
        for at in 0..self.targets.len() {
            if self.live[at].probing && self.live[at].deadline.is_none_or(|end| end <= self.now.up) {
                self.live[at].probing = false;
                self.live[at].probe_at = Some(self.now.up + PROBE_EVERY);
            }
            if !self.is_awaited(at) || self.live[at].probing {
                continue;
            }
            let due = *self.live[at].probe_at.get_or_insert(self.now.up + PROBE_EVERY);
            if due <= self.now.up && self.standing(&self.spec.targets[at]).presence == Presence::Up {
                self.live[at].probing = true;
                self.ask(at);
            }
        }
    }

    fn complete(&mut self) {
        if self.all_withdrawn() {
            return;
        }
        let open = self.record.phase == Phase::Open;
        let asked = !open && self.live.iter().any(|live| live.probing);
        if asked || self.targets.iter().any(|target| target.state.is_busy()) {
            if !open {
                self.set_phase(Phase::Running);
            }
            return;
        }
        let awaited = (0..self.targets.len()).any(|at| self.is_awaited(at));
        let good = self.targets.iter().any(|target| target.state.is_good());
        if !good && !awaited {
            let failure = self.targets.iter().find_map(|target| target.failure.clone());
            self.fail(failure.unwrap_or_else(|| {
                Failure::new(
                    Code::Internal,
                    "no target has the payload",
                    "`stage status` shows why",
                )
            }));
            return;
        }
        let moved = self
            .targets
            .iter()
            .any(|target| target.state == TargetState::Published);
        if moved && self.record.sha256.is_none() && !self.record.source_ended {
            if !open {
                self.set_phase(Phase::Finishing);
            }
        } else if awaited {
            self.record.ended_unix_ms.get_or_insert(self.now.unix_ms);
            self.set_phase(Phase::Open);
        } else if self.is_whole() {
            self.set_phase(Phase::Done);
        } else {
            self.set_phase(Phase::Partial);
        }
    }

    /// Whether every target that counts has what was asked for.
    pub(super) fn is_whole(&self) -> bool {
        self.targets
            .iter()
            .all(|target| target.state.is_good() || (target.drained && target.state == TargetState::Unfit))
    }

    /// The job ends before a byte moved. Of one that was taken up again, bytes did move, and are kept for the next try.
    pub(super) fn refuse(&mut self, failure: Failure) {
        if self.record.revived > 0 {
            self.record.kept = true;
            return self.fail(failure);
        }
        self.record.refused = true;
        for at in 0..self.targets.len() {
            if self.targets[at].state.is_busy() {
                self.set_state(at, TargetState::Cancelled, None);
            }
        }
        self.record.failure = Some(failure);
        self.set_phase(Phase::Failed);
    }

    /// The job ends without a copy.
    pub(super) fn fail(&mut self, failure: Failure) {
        for at in 0..self.targets.len() {
            if self.targets[at].state.is_busy() {
                self.set_state(at, TargetState::Failed, Some(failure.clone()));
            }
        }
        // With its source the job could go on; but what came through a pipe comes never again.
        self.record.kept |= failure.code == Code::SourceLost && !self.spec.is_stream();
        self.record.failure = Some(failure);
        self.set_phase(Phase::Failed);
    }

    /// When something will happen without another event.
    pub(super) fn next_wake(&self) -> Option<Duration> {
        let mut times: Vec<Duration> = Vec::new();
        match self.record.phase {
            Phase::Queued => times.push(CONNECT_GRACE),
            Phase::Preparing => {
                if self.record.payload.is_none() {
                    times.extend(self.source_deadline);
                } else {
                    times.extend(self.live.iter().filter_map(|live| live.deadline).min());
                    if self.targets.iter().any(|t| t.state == TargetState::Waiting) {
                        times.push(CONNECT_GRACE);
                    }
                }
            }
            phase if phase.is_running() => {
                if !self.record.source_ended {
                    times.extend(self.source_gone_since.map(|since| since + SOURCE_LOST));
                }
                for at in 0..self.targets.len() {
                    let live = &self.live[at];
                    if live.probing {
                        times.extend(live.deadline);
                    } else if self.is_awaited(at) {
                        times.push(self.wait_until);
                        if self.is_up(&self.spec.targets[at]) {
                            times.extend(live.probe_at);
                        }
                    }
                }
            }
            _ => times.extend(self.keep_until().filter(|at| *at > self.now.up)),
        }
        times.extend(self.resend_at());
        times.into_iter().min()
    }
}

pub(super) fn away(node: &NodeName) -> Failure {
    Failure::new(
        Code::Away,
        format!("the agent of {node} is not connected"),
        format!("start stage-agent on {node}, or look at `stage nodes`"),
    )
    .on(node)
}
