//! Events: what each changes at once. What follows from it is for `advance`.

use std::time::Duration;

use super::advance::away;
use super::{
    Effect, Event, Job, LEASE, Now, PREPARE_DEADLINE, PROBE_EVERY, Phase, Presence, SOURCE_LOST, TargetState,
    UnfitRule,
};
use crate::failure::{Code, Failure};
use crate::id::NodeName;

/// Two questions to an unfit target are at least so far apart, however often its free space changes.
const PROBE_PAUSE: Duration = Duration::from_secs(5);

impl Job {
    /// Takes an event in. The effects must be performed in their order.
    pub fn apply(&mut self, event: Event, now: Now) -> Vec<Effect> {
        self.apply_all([event], now)
    }

    /// Takes events in that came together: what follows is derived once, so that ten thousand answers at a time cost
    /// little more than one.
    pub fn apply_all(&mut self, events: impl IntoIterator<Item = Event>, now: Now) -> Vec<Effect> {
        self.now = now;
        let mut full = false;
        for event in events {
            // These come often and seldom change a state.
            full |= !matches!(
                event,
                Event::Progress(..) | Event::Applied(..) | Event::Space(..) | Event::Slow(..)
            );
            self.take(event);
        }
        full |= self.notify == Some(true);
        if full {
            self.settle();
        }
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
            Event::NewHops(hops) => self.laid(hops),
            Event::Progress(node, progress) => self.progressed(&node, progress),
            Event::Source(node, report) => {
                if node == self.spec.source && !self.record.phase.is_ended() {
                    self.source_said(report);
                }
            }
            Event::Outcome(node, outcome) => self.ended(&node, outcome),
            Event::Moved { node, from, to, why } => self.moved(&node, &from, &to, &why),
            Event::Corrupt { node, parent, chunk } => self.corrupt(&node, &parent, chunk),
            Event::Slow(hops) => self.slow_now(&hops),
            Event::Judged(verdict) => {
                if self.record.verdict != verdict {
                    self.record.verdict = verdict;
                    self.dirty_record = true;
                    self.changed();
                }
            }
            Event::Cancel(None) => {
                if !self.record.phase.is_ended() {
                    for at in 0..self.targets.len() {
                        self.withdraw(at, TargetState::Cancelled);
                    }
                    self.set_phase(Phase::Cancelled);
                } else if std::mem::take(&mut self.record.kept) {
                    // Nobody will try it again: what its targets keep goes.
                    self.dirty_record = true;
                    self.touch_all();
                }
            }
            Event::Retry { source, standing } => self.retry(source, standing),
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
        if *node == self.spec.source
            && self.source_gone_since.take().is_some()
            && self.record.phase.is_running()
        {
            self.remark(format!("the source {node} is here again"));
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
            // It has been silent for a lease already.
            self.source_gone_since = Some(self.now.up.saturating_sub(LEASE));
            if self.record.phase.is_running() {
                let then = match self.record.fin {
                    // Whoever has everything is a source now.
                    Some(_) => String::new(),
                    None => format!(
                        ": if it stays away for {} s the job fails, and `stage retry` can take it up from there",
                        SOURCE_LOST.as_secs()
                    ),
                };
                self.remark(format!("contact with the source {node} is lost{then}"));
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

    pub(super) fn withdraw(&mut self, at: usize, state: TargetState) {
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

    pub(super) fn ask(&mut self, at: usize) {
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

    /// How many chunks the payload has; of a stream, once FINAL tells.
    pub(super) fn layout_count(&self) -> Option<u32> {
        let payload = self.record.payload.as_ref()?;
        if payload.is_stream() {
            return self.record.fin.as_ref().map(|fin| fin.chunks);
        }
        payload.layout().map(|layout| layout.count())
    }

    pub(super) fn source_path(&self) -> String {
        let path = self.spec.paths.first().map_or(&b""[..], |first| &first.path);
        String::from_utf8_lossy(path)
            .chars()
            .map(|c| if c.is_control() { '\u{fffd}' } else { c })
            .collect()
    }
}
