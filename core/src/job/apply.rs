//! Events, and the advance from phase to phase.

use std::time::Duration;

use super::{
    CONNECT_GRACE, Effect, Event, Job, Now, PREPARE_DEADLINE, PROBE_EVERY, Phase, Presence, SOURCE_DEADLINE,
    SOURCE_LOST, TargetState, UnfitRule,
};
use crate::assignment::{Order, Outcome, Prepared, Progress, SourceReport};
use crate::chunk::Layout;
use crate::failure::{Code, Failure};
use crate::id::{NodeName, PlanVersion};
use crate::job::Copied;
use crate::plan::{Plan, PlanError};

/// Two questions to an unfit target are at least so far apart, however often its free space changes.
const PROBE_PAUSE: Duration = Duration::from_secs(5);

impl Job {
    /// Takes an event in. The effects must be performed in their order.
    pub fn apply(&mut self, event: Event, now: Now) -> Vec<Effect> {
        self.now = now;
        // These come often and seldom change a state.
        let quiet = matches!(event, Event::Progress(..) | Event::Applied(..) | Event::Space(..));
        self.take(event);
        if !quiet || self.notify == Some(true) {
            self.settle();
        }
        let full = !quiet || self.notify == Some(true);
        self.effects(full)
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Start => {
                self.want_plan = self.record.phase == Phase::Planning;
                self.changed();
            }
            Event::Up {
                node,
                addresses,
                held,
            } => self.came_up(&node, addresses, held),
            Event::Away(node) => self.went_away(&node),
            Event::Leaving(node) => {
                self.standing.entry(node).or_default().presence = Presence::Leaving;
                self.rehome();
            }
            Event::Drained(node, drained) => self.was_drained(&node, drained),
            Event::Space(node) => {
                if let Some(at) = self.index.get(&node).copied()
                    && self.targets[at].failure.as_ref().is_some_and(|failure| {
                        matches!(
                            failure.code,
                            Code::NoSpace | Code::RootUnusable | Code::ReadOnly | Code::Quota
                        )
                    })
                {
                    let pause_ends = self.live[at]
                        .asked_at
                        .map_or(self.now.up, |asked| asked + PROBE_PAUSE);
                    self.live[at].probe_at = Some(pause_ends.max(self.now.up));
                    self.changed();
                }
            }
            Event::Applied(node, epoch, version) => {
                if let Some(told) = self.told.get_mut(&node)
                    && epoch == self.epoch
                    && version >= told.version
                {
                    told.applied = true;
                }
            }
            Event::Prepared(node, version, answer) => self.prepared(&node, version, answer),
            Event::Planned(result) => self.planned(result),
            Event::Progress(node, progress) => self.progressed(&node, progress),
            Event::Source(node, report) => {
                if node == self.spec.source && !self.record.phase.is_ended() {
                    self.source_said(report);
                }
            }
            Event::Outcome(node, outcome) => self.ended(&node, outcome),
            Event::Moved { node, from, to, why } => self.moved(&node, &from, &to, &why),
            Event::Corrupt { node, parent, chunk } => self.corrupt(&node, &parent, chunk),
            Event::Cancel(None) => {
                if !self.record.phase.is_ended() {
                    for at in 0..self.targets.len() {
                        self.withdraw(at, TargetState::Cancelled);
                    }
                    self.set_phase(Phase::Cancelled);
                }
            }
            Event::Cancel(Some(nodes)) => self.withdraw_all(&nodes, TargetState::Cancelled),
            Event::Superseded(by, nodes) => {
                for node in &nodes {
                    if let Some(at) = self.index.get(node).copied()
                        && !self.targets[at].state.is_ended()
                    {
                        self.targets[at].superseded_by = Some(by);
                    }
                }
                self.withdraw_all(&nodes, TargetState::Superseded);
            }
            Event::Tick => {
                if self.kept_long_enough() {
                    self.touch_all();
                }
            }
        }
    }

    fn came_up(&mut self, node: &NodeName, addresses: Vec<std::net::SocketAddr>, held: bool) {
        let standing = self.standing.entry(node.clone()).or_default();
        standing.presence = Presence::Up;
        if standing.addresses != addresses {
            standing.addresses = addresses;
            self.note_address(node);
        }
        if let Some(told) = self.told.get_mut(node) {
            told.stale = true;
        }
        if held {
            self.holds.insert(node.clone());
        }
        if !self.record.phase.is_ended() || held {
            self.touch(node);
        }
        if *node == self.spec.source {
            self.source_gone_since = None;
        }
        let Some(at) = self.index.get(node).copied() else {
            return;
        };
        let away = self.targets[at]
            .failure
            .as_ref()
            .is_some_and(|f| f.code == Code::Away);
        match self.targets[at].state {
            TargetState::Unfit if self.record.phase.is_running() => {
                if away && held && self.plan.is_some() {
                    // It was prepared before and has gone on by itself meanwhile: asking again would disturb it.
                    self.set_state(at, TargetState::Ready, None);
                } else {
                    self.live[at].probe_at = Some(self.now.up);
                }
            }
            TargetState::Unfit if away && matches!(self.record.phase, Phase::Queued | Phase::Preparing) => {
                self.set_state(at, TargetState::Waiting, None);
            }
            TargetState::Receiving | TargetState::Verified if !held && self.record.phase.is_running() => {
                let failure = Failure::new(
                    Code::Away,
                    "the agent came back without what it had of this job",
                    "nothing: the node is prepared again",
                );
                self.set_state(at, TargetState::Unfit, Some(failure));
                if *node != self.spec.source {
                    self.ask(at);
                    self.live[at].probing = true;
                }
                self.rehome();
            }
            _ => {}
        }
    }

    fn went_away(&mut self, node: &NodeName) {
        self.standing.entry(node.clone()).or_default().presence = Presence::Away;
        if *node == self.spec.source && self.source_gone_since.is_none() {
            self.source_gone_since = Some(self.now.up);
            if self.record.phase.is_running() {
                self.remark(format!("contact with the source {node} is lost"));
            }
        }
        if let Some(at) = self.index.get(node).copied()
            && self.record.phase.is_running()
            && matches!(
                self.targets[at].state,
                TargetState::Ready | TargetState::Receiving | TargetState::Verified
            )
        {
            self.set_unfit(at, away(node));
            self.remark(format!("{node} is away"));
        }
        self.rehome();
    }

    fn was_drained(&mut self, node: &NodeName, drained: bool) {
        self.standing.entry(node.clone()).or_default().drained = drained;
        if let Some(at) = self.index.get(node).copied()
            && !self.targets[at].state.is_ended()
            && !self.record.phase.is_ended()
        {
            self.targets[at].drained = drained;
            self.dirty_targets.insert(at);
            if !drained {
                self.live[at].probe_at = Some(self.now.up);
            }
            self.changed();
        }
    }

    fn prepared(&mut self, node: &NodeName, version: PlanVersion, answer: Prepared) {
        let Some(told) = self.told.get_mut(node).filter(|told| told.version == version) else {
            return;
        };
        told.applied = true;
        let for_source = match told.order {
            Order::PrepareSource(_) => true,
            Order::PrepareTarget { .. } => false,
            Order::Run(_) => return self.skipped(node, answer),
            Order::Release | Order::Cancel => return,
        };
        if for_source {
            if self.record.phase != Phase::Preparing || self.record.manifest.is_some() {
                return;
            }
            match answer {
                Prepared::Source { manifest } if Layout::new(manifest.payload_size()).is_some() => {
                    self.record.manifest = Some(manifest);
                    self.dirty_record = true;
                    self.note_address(node);
                    self.changed();
                }
                Prepared::Source { .. } => self.refuse(
                    Failure::new(
                        Code::SourceKind,
                        "the payload is larger than 4 PiB",
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
    fn skipped(&mut self, node: &NodeName, answer: Prepared) {
        if let (Some(at), Prepared::Skipped { path }) = (self.index.get(node).copied(), answer)
            && self.targets[at].state.is_busy()
        {
            self.targets[at].path = path;
            self.set_state(at, TargetState::Skipped, None);
            self.rehome();
        }
    }

    fn planned(&mut self, result: Result<Plan, PlanError>) {
        if self.record.phase != Phase::Planning {
            return;
        }
        match result {
            Ok(plan) => {
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

    fn progressed(&mut self, node: &NodeName, progress: Progress) {
        if self.notify.is_none() {
            self.notify = Some(false);
        }
        if *node == self.spec.source {
            self.record.source_bytes_read = progress.source_bytes_read;
            self.record.source_bytes_sent = progress.bytes_sent;
            self.record.sha256_bytes = progress.sha256_bytes;
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

    fn source_said(&mut self, report: SourceReport) {
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
                match self.spec.expect {
                    Some(expected) if expected != digest => {
                        let source = self.spec.source.clone();
                        self.fail(
                            Failure::new(
                                Code::Unexpected,
                                format!("the source's SHA-256 is {digest}, expected was {expected}"),
                                "check the source file, or the file given with --expect",
                            )
                            .on(&source)
                            .at(self.source_path()),
                        );
                    }
                    _ => self.allow_publishing(),
                }
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

    /// FINAL is in force once it is declared and, with `--expect`, the SHA-256 is known to agree.
    fn allow_publishing(&mut self) {
        if self.record.fin.is_some() || (self.spec.expect.is_some() && self.record.sha256.is_none()) {
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

    fn ended(&mut self, node: &NodeName, outcome: Outcome) {
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

    fn corrupt(&mut self, node: &NodeName, parent: &NodeName, chunk: u32) {
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

    fn withdraw(&mut self, at: usize, state: TargetState) {
        if !self.targets[at].state.is_ended() {
            self.live[at].probing = false;
            self.set_state(at, state, None);
        }
    }

    fn withdraw_all(&mut self, nodes: &[NodeName], state: TargetState) {
        if self.record.phase.is_ended() {
            return;
        }
        for node in nodes {
            if let Some(at) = self.index.get(node).copied() {
                self.withdraw(at, state);
            }
        }
        self.rehome();
    }

    pub(super) fn set_unfit(&mut self, at: usize, failure: Failure) {
        self.live[at].probing = false;
        self.live[at].deadline = None;
        self.live[at].probe_at = Some(self.now.up + PROBE_EVERY);
        self.targets[at].copied = None;
        self.set_state(at, TargetState::Unfit, Some(failure));
    }

    fn ask(&mut self, at: usize) {
        let live = &mut self.live[at];
        live.ask += 1;
        live.asked_at = Some(self.now.up);
        live.deadline = Some(self.now.up + PREPARE_DEADLINE);
        let node = self.spec.targets[at].clone();
        self.touch(&node);
    }

    /// Whether the target is unfit because of other content there.
    pub(super) fn is_occupied(&self, at: usize) -> bool {
        self.targets[at]
            .failure
            .as_ref()
            .is_some_and(|failure| failure.code == Code::Exists)
    }

    /// Whether the job waits for this unfit target to become fit.
    pub(super) fn is_awaited(&self, at: usize) -> bool {
        let node = &self.spec.targets[at];
        self.targets[at].state == TargetState::Unfit
            && self.spec.unfit == UnfitRule::Wait
            && self.now.up < self.wait_until
            && !self.standing(node).drained
            // The source's node has one order for the job: asking it as a target would end its being the source.
            && *node != self.spec.source
    }

    fn layout_count(&self) -> Option<u32> {
        let manifest = self.record.manifest.as_ref()?;
        Layout::new(manifest.payload_size()).map(|layout| layout.count())
    }

    pub(super) fn source_path(&self) -> String {
        String::from_utf8_lossy(&self.spec.path)
            .chars()
            .map(|c| if c.is_control() { '\u{fffd}' } else { c })
            .collect()
    }

    fn settle(&mut self) {
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
        if self.record.manifest.is_none() {
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
    fn all_withdrawn(&mut self) -> bool {
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

    fn run(&mut self) {
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
                "start its agent and push again: what the targets have is kept for 24 h",
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
                "start the source's agent and push again",
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

    /// The job ends before a byte moved.
    fn refuse(&mut self, failure: Failure) {
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
    fn fail(&mut self, failure: Failure) {
        for at in 0..self.targets.len() {
            if self.targets[at].state.is_busy() {
                self.set_state(at, TargetState::Failed, Some(failure.clone()));
            }
        }
        self.record.failure = Some(failure);
        self.set_phase(Phase::Failed);
    }

    /// When something will happen without another event.
    pub(super) fn next_wake(&self) -> Option<Duration> {
        let mut times: Vec<Duration> = Vec::new();
        match self.record.phase {
            Phase::Queued => times.push(CONNECT_GRACE),
            Phase::Preparing => {
                if self.record.manifest.is_none() {
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

fn away(node: &NodeName) -> Failure {
    Failure::new(
        Code::Away,
        format!("the agent of {node} is not connected"),
        format!("start stage-agent on {node}, or look at `stage nodes`"),
    )
    .on(node)
}
