//! What each node should be told, and the effects that make it so.

use std::time::Duration;

use super::{Changes, Effect, Job, KEEP, Phase, RESEND, TargetState, Told};
use crate::assignment::{Assignment, Order, Peer, Run, SourceSpec, StreamChoice};
use crate::id::NodeName;
use crate::plan::{Hop, Request};
use crate::units::Rate;

impl Job {
    /// The order that the node should have by the job's present state, with the number of the question that it
    /// belongs to. `None`: leave it as it is.
    fn wanted(&self, node: &NodeName) -> Option<(Order, u32)> {
        let is_source = *node == self.spec.source;
        let at = self.index.get(node).copied();
        let state = at.map(|at| self.targets[at].state);
        if !is_source && at.is_none() {
            // Another took its place.
            return Some((Order::Cancel, 0));
        }
        let prepare = |at: usize| {
            let payload = self.record.payload.clone()?;
            let order = Order::PrepareTarget {
                target: self.spec.target.clone(),
                payload,
                hash: self.spec.hash,
            };
            Some((order, self.live[at].ask))
        };
        match self.record.phase {
            Phase::Queued => None,
            Phase::Preparing | Phase::Planning => match (at, state) {
                _ if self.record.payload.is_none() => {
                    is_source.then(|| (Order::PrepareSource(self.source_spec()), 0))
                }
                (Some(at), Some(TargetState::Preparing | TargetState::Ready)) => prepare(at),
                (_, Some(TargetState::Cancelled | TargetState::Superseded)) if !is_source => {
                    Some((Order::Cancel, 0))
                }
                _ => None,
            },
            Phase::Running | Phase::Finishing | Phase::Open => match (at, state) {
                (Some(at), Some(TargetState::Unfit)) if self.live[at].probing => prepare(at),
                // What was reserved for it is of no use, and its next answer must look at the disk anew.
                (Some(at), Some(TargetState::Unfit)) if !is_source && self.is_occupied(at) => {
                    Some((Order::Cancel, 0))
                }
                (_, Some(TargetState::Cancelled | TargetState::Superseded)) if !is_source => {
                    Some((Order::Cancel, 0))
                }
                _ if is_source || state.is_some_and(TargetState::is_member) => {
                    self.run_order(node).map(|run| (Order::Run(run), 0))
                }
                _ => None,
            },
            Phase::Done | Phase::Partial => {
                let sha256 = self.record.sha256;
                Some((Order::Release { sha256 }, 0))
            }
            Phase::Cancelled => Some((Order::Cancel, 0)),
            // What the targets have is kept for some time: a retry goes on from there.
            Phase::Failed if self.record.kept && !self.kept_long_enough() => None,
            Phase::Failed => Some((Order::Cancel, 0)),
        }
    }

    /// Until when the partials of a job that failed for now are kept, as [`super::Now::up`].
    pub(super) fn keep_until(&self) -> Option<Duration> {
        let ended = self.record.ended_unix_ms.filter(|_| self.record.kept)?;
        let since = Duration::from_millis(self.now.unix_ms.saturating_sub(ended));
        Some(self.now.up + KEEP.saturating_sub(since))
    }

    pub(super) fn kept_long_enough(&self) -> bool {
        self.keep_until().is_some_and(|until| until <= self.now.up)
    }

    fn source_spec(&self) -> SourceSpec {
        SourceSpec {
            paths: self.spec.paths.clone(),
            walk: self.spec.walk.clone(),
            limit: self.spec.source_limit,
            expect: self.spec.expect.clone(),
            cache: self.spec.target.cache,
        }
    }

    fn run_order(&self, node: &NodeName) -> Option<Run> {
        self.plan.as_ref()?;
        let hop = self.hop(node).filter(|_| {
            self.index
                .get(node)
                .is_some_and(|at| self.targets[*at].state.is_member())
        });
        let serves = !self.record.quarantined.contains(node);
        Some(Run {
            key: self.spec.key.clone(),
            hash: self.spec.hash,
            payload: self.record.payload.clone()?,
            source: (*node == self.spec.source).then(|| self.source_spec()),
            target: hop.map(|_| self.spec.target.clone()),
            parents: hop.map(|hop| self.peers(hop)).unwrap_or_default(),
            streams: match (self.spec.streams, hop) {
                (Some(streams), _) => StreamChoice::Fixed(streams),
                (None, Some(hop)) => StreamChoice::Auto {
                    least: hop.streams_least.max(1),
                    cap: hop.streams_cap.max(1),
                },
                (None, None) => StreamChoice::Auto { least: 1, cap: 1 },
            },
            congestion_control: hop.and_then(|hop| hop.congestion_control.clone()),
            wanted: hop
                .map(|hop| hop.rate)
                .filter(|rate| *rate > Rate::ZERO)
                .unwrap_or(Rate::UNLIMITED),
            children: self
                .children
                .get(node)
                .into_iter()
                .flatten()
                .filter(|child| serves && self.targets[self.index[*child]].state.is_member())
                .cloned()
                .collect(),
            limit: self.spec.limit,
            fin: self.record.fin.clone(),
        })
    }

    fn peers(&self, hop: &Hop) -> Vec<Peer> {
        std::iter::once(&hop.parent)
            .chain(&hop.fallbacks)
            .filter(|node| !self.record.quarantined.contains(*node))
            .map(|node| Peer {
                node: node.clone(),
                addresses: self.record.addresses.get(node).cloned().unwrap_or_default(),
            })
            .collect()
    }

    /// Keeps the address that the node's agent announced, so that orders name it after a restart too; those who
    /// ask this node are told.
    pub(super) fn note_address(&mut self, node: &NodeName) {
        let addresses = self.standing(node).addresses.clone();
        if !self.concerns(node) || addresses.is_empty() || self.record.addresses.get(node) == Some(&addresses)
        {
            return;
        }
        self.record.addresses.insert(node.clone(), addresses);
        self.dirty_record = true;
        let askers: Vec<NodeName> = self
            .plan
            .iter()
            .flat_map(|plan| &plan.hops)
            .filter(|hop| hop.parent == *node || hop.fallbacks.contains(node))
            .map(|hop| hop.child.clone())
            .collect();
        for asker in &askers {
            self.touch(asker);
        }
    }

    pub(super) fn index_children(&mut self) {
        self.children.clear();
        self.hops.clear();
        for (at, hop) in self.plan.iter().flat_map(|plan| &plan.hops).enumerate() {
            self.hops.insert(hop.child.clone(), at);
            self.children
                .entry(hop.parent.clone())
                .or_default()
                .push(hop.child.clone());
        }
    }

    /// What is asked of the planner for the targets in these states.
    fn request(&self, wanted: impl Fn(TargetState) -> bool) -> Option<Request> {
        Some(Request {
            source: self.spec.source.clone(),
            targets: self
                .spec
                .targets
                .iter()
                .zip(&self.targets)
                .filter(|(_, target)| wanted(target.state))
                .map(|(node, _)| node.clone())
                .collect(),
            size: self.record.payload.as_ref()?.planned(),
            shape: self.spec.shape,
            streams: self.spec.streams,
            limit: self.spec.limit,
            source_limit: self.spec.source_limit,
            encrypted: self.spec.encrypted,
        })
    }

    /// When the first order that a connected agent has not applied is sent again.
    pub(super) fn resend_at(&self) -> Option<Duration> {
        self.told
            .iter()
            .filter(|(node, told)| !told.applied && self.is_up(node))
            .map(|(_, told)| told.at + RESEND)
            .min()
    }

    /// All that follows from what changed since the last call.
    pub(super) fn effects(&mut self, wake: bool) -> Vec<Effect> {
        let sends = self.sends(wake);
        let mut effects = Vec::new();
        let changes = Changes {
            record: std::mem::take(&mut self.dirty_record).then(|| self.record.clone()),
            plan: std::mem::take(&mut self.dirty_plan)
                .then(|| self.plan.clone())
                .flatten(),
            targets: std::mem::take(&mut self.dirty_targets)
                .into_iter()
                .map(|at| (at, self.spec.targets[at].clone(), self.targets[at].clone()))
                .collect(),
        };
        if !changes.is_empty() {
            effects.push(Effect::Persist(Box::new(changes)));
        }
        effects.extend(
            sends
                .into_iter()
                .map(|(node, assignment)| Effect::Send(node, Box::new(assignment))),
        );
        if std::mem::take(&mut self.want_plan)
            && let Some(request) = self.request(|state| state == TargetState::Ready)
        {
            effects.push(Effect::Plan(request));
        }
        let is_member = |child: &NodeName| {
            let at = self.index.get(child);
            at.is_some_and(|at| self.targets[*at].state.is_member())
        };
        let new: Vec<(NodeName, NodeName)> = std::mem::take(&mut self.new_hops)
            .into_iter()
            .filter(is_member)
            .filter_map(|child| Some((self.parent_of(&child)?.clone(), child)))
            .collect();
        if !new.is_empty()
            && let Some(request) = self.request(TargetState::is_member)
        {
            effects.push(Effect::NewHops(request, new));
        }
        if (wake || !effects.is_empty())
            && let Some(at) = self.next_wake()
        {
            effects.push(Effect::Wake(at));
        }
        if let Some(state) = self.notify.take() {
            effects.push(Effect::Notify(state));
        }
        effects
    }

    fn sends(&mut self, again: bool) -> Vec<(NodeName, Assignment)> {
        let mut sends = Vec::new();
        if again {
            let due: Vec<NodeName> = self
                .told
                .iter_mut()
                .filter(|(_, told)| !told.applied && told.at + RESEND <= self.now.up)
                .map(|(node, told)| {
                    told.stale = true;
                    node.clone()
                })
                .collect();
            self.touched.extend(due);
        }
        for node in std::mem::take(&mut self.touched) {
            if !self.is_up(&node) {
                continue;
            }
            let told = self.told.get(&node);
            let Some((order, ask)) = self.wanted(&node) else {
                continue;
            };
            // Who was never told of the job need not hear that it ended, but after a restart nobody knows who was.
            if matches!(order, Order::Release { .. } | Order::Cancel)
                && told.is_none()
                && !self.may_hold(&node)
            {
                continue;
            }
            let version = match told {
                Some(told) if told.order == order && told.ask == ask => {
                    if !told.stale {
                        continue;
                    }
                    told.version
                }
                // Two orders to one node never bear one number.
                Some(told) if told.version == self.record.version => {
                    self.record.version = self.record.version.next();
                    self.dirty_record = true;
                    self.record.version
                }
                _ => self.record.version,
            };
            self.told.insert(
                node.clone(),
                Told {
                    order: order.clone(),
                    ask,
                    version,
                    applied: false,
                    stale: false,
                    at: self.now.up,
                },
            );
            let assignment = Assignment {
                job: self.spec.id,
                epoch: self.epoch,
                version,
                order,
            };
            sends.push((node, assignment));
        }
        sends
    }

    /// Whether the node may have something of the job: it got orders in this or an earlier life of the coordinator.
    fn may_hold(&self, node: &NodeName) -> bool {
        let fresh = |state| {
            matches!(
                state,
                TargetState::Waiting | TargetState::Unfit | TargetState::Skipped
            )
        };
        if self.holds.contains(node) {
            return true;
        }
        self.record.payload.is_some()
            && (*node == self.spec.source
                || self.record.former.contains(node)
                || self
                    .index
                    .get(node)
                    .is_some_and(|at| !fresh(self.targets[*at].state) || self.targets[*at].failure.is_some()))
    }
}
