//! Taking up again what waits or has failed: at once, for whoever has made room, or has brought a node back.

use std::collections::BTreeMap;

use super::slow::Slowness;
use super::{Job, Live, Phase, Standing, TargetState, UnfitRule};
use crate::id::NodeName;

impl Job {
    /// Whether the job has failed in a way that it can go on from: its targets still have what they received, and an
    /// agent drops that only when this has become false.
    pub fn can_be_revived(&self) -> bool {
        self.record.phase == Phase::Failed && self.record.kept && !self.kept_long_enough()
    }

    /// The targets that do not have it and that nobody took out, of a job that has ended.
    pub fn missing(&self) -> Vec<NodeName> {
        // Who is cancelled with the whole job, or because it was refused, was not meant by anybody.
        let all = matches!(self.record.phase, Phase::Cancelled | Phase::Failed);
        self.spec
            .targets
            .iter()
            .zip(&self.targets)
            .filter(|(_, target)| match target.state {
                TargetState::Published | TargetState::Skipped | TargetState::Superseded => false,
                TargetState::Cancelled => all,
                _ => true,
            })
            .map(|(node, _)| node.clone())
            .collect()
    }

    pub(super) fn retry(&mut self, source: Option<NodeName>, standing: BTreeMap<NodeName, Standing>) {
        match self.record.phase {
            phase if phase.is_running() => self.look_again(),
            Phase::Failed if self.can_be_revived() => self.revive(source, standing),
            // The others are asked anyway, or have ended in a way from which there is no going on.
            _ => {}
        }
    }

    /// Asks all awaited targets now, and those that failed once more.
    fn look_again(&mut self) {
        self.record.awaited_unix_ms = self.now.unix_ms;
        self.wait_until = self.now.up + self.spec.wait_for;
        self.dirty_record = true;
        for at in 0..self.targets.len() {
            if self.targets[at].state == TargetState::Failed
                && self.spec.unfit == UnfitRule::Wait
                && self.spec.targets[at] != self.spec.source
            {
                let failure = self.targets[at].failure.clone();
                self.targets[at].copied = None;
                self.set_state(at, TargetState::Unfit, failure);
            }
            if self.is_awaited(at) && !self.live[at].probing {
                self.live[at].probe_at = Some(self.now.up);
            }
        }
        self.changed();
    }

    /// The job begins again from its preparation, with what its targets kept.
    fn revive(&mut self, source: Option<NodeName>, standing: BTreeMap<NodeName, Standing>) {
        self.standing = standing;
        self.told.values_mut().for_each(|told| told.stale = true);
        if let Some(source) = source.filter(|source| *source != self.spec.source) {
            let former = std::mem::replace(&mut self.spec.source, source.clone());
            self.record.former.insert(former);
            self.record.former.remove(&source);
            // A new round asks it, and only with it can there be a plan.
            self.record.quarantined.remove(&source);
        }
        let record = &mut self.record;
        record.version = record.version.next();
        record.revived += 1;
        record.kept = false;
        record.failure = None;
        record.ended_unix_ms = None;
        record.awaited_unix_ms = self.now.unix_ms;
        record.payload = None;
        record.declared = None;
        record.fin = None;
        record.sha256 = None;
        record.sha256_bytes = 0;
        record.source_ended = false;
        record.slow.clear();
        self.dirty_record = true;
        self.wait_until = self.now.up + self.spec.wait_for;
        self.source_gone_since = None;
        self.source_deadline = None;
        self.plan = None;
        self.slowness = Slowness::default();
        self.index_children();
        for at in 0..self.targets.len() {
            if self.targets[at].state.is_good() || self.targets[at].state.is_withdrawn() {
                continue;
            }
            self.live[at] = Live {
                ask: self.live[at].ask,
                ..Live::default()
            };
            self.targets[at].copied = None;
            self.set_state(at, TargetState::Waiting, None);
        }
        self.set_phase(Phase::Queued);
        self.remark(format!("tried again, from {}", self.spec.source));
    }
}
