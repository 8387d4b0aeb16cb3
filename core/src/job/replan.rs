//! New parents while the job runs: for children of a node that cannot serve any more, for targets that join late, and
//! for children that have already gone on by themselves.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{Job, Presence, TargetState};
use crate::id::NodeName;
use crate::plan::Hop;
use crate::units::Rate;

/// Ancestors above the parent that a child may ask, before the source.
const ANCESTORS: usize = 3;
/// The most streams that a late joiner may choose until the planner has said.
const CAP: u16 = 8;

impl Job {
    /// Whether the node can be given children: it is a member of the job and nothing speaks against it.
    pub(super) fn can_serve(&self, node: &NodeName) -> bool {
        let here = !matches!(self.standing(node).presence, Presence::Away | Presence::Leaving);
        let member = (*node == self.spec.source && !self.record.source_ended)
            || self
                .index
                .get(node)
                .is_some_and(|at| self.targets[*at].state.is_member());
        here && member && !self.record.quarantined.contains(node)
    }

    /// Whether the node is slow at receiving, so that others go before it; who has it all can serve.
    pub(super) fn is_slow(&self, node: &NodeName) -> bool {
        let receives = |at: &usize| self.targets[*at].state == TargetState::Receiving;
        self.record.slow.contains(node) && self.index.get(node).is_some_and(receives)
    }

    pub(super) fn parent_of(&self, child: &NodeName) -> Option<&NodeName> {
        self.hop(child)
            .map(|hop| &hop.parent)
            .filter(|parent| *parent != child)
    }

    /// The chain of parents above a node, nearest first, as the plan has it now.
    pub(super) fn ancestors(
        &self,
        parents: &BTreeMap<NodeName, NodeName>,
        child: &NodeName,
    ) -> Vec<NodeName> {
        let mut above: Vec<NodeName> = Vec::new();
        let mut at = child;
        while let Some(parent) = parents.get(at) {
            // The source may be a child of itself, and no report may turn the plan into a ring.
            if parent == at || above.contains(parent) || above.len() > ANCESTORS + 8 {
                break;
            }
            above.push(parent.clone());
            at = parent;
        }
        above
    }

    pub(super) fn parents(&self) -> BTreeMap<NodeName, NodeName> {
        self.plan
            .iter()
            .flat_map(|plan| &plan.hops)
            .map(|hop| (hop.child.clone(), hop.parent.clone()))
            .collect()
    }

    /// Whether `node` still needs, directly or not, what `root` sends. Who has all needs nobody.
    fn needs(&self, node: &NodeName, root: &NodeName) -> bool {
        let whole = |node: &NodeName| {
            self.index
                .get(node)
                .is_some_and(|at| self.targets[*at].state == TargetState::Published)
        };
        self.way_up(node)
            .take_while(|(at, _)| !whole(at))
            .any(|(_, parent)| parent == root)
    }

    /// Whether `node` lies below `root` in the plan.
    fn is_below(&self, node: &NodeName, root: &NodeName) -> bool {
        self.way_up(node).any(|(_, parent)| parent == root)
    }

    /// The edges from a node towards the source, each as (child, parent).
    fn way_up<'a>(&'a self, node: &'a NodeName) -> impl Iterator<Item = (&'a NodeName, &'a NodeName)> {
        let mut at = node;
        std::iter::from_fn(move || {
            let edge = (at, self.parent_of(at)?);
            at = edge.1;
            Some(edge)
        })
        // A tree is no deeper than it has nodes.
        .take(self.targets.len() + 1)
    }

    /// Gives every child of a node that cannot serve another parent, and brings the fallbacks up to date.
    pub(super) fn rehome(&mut self) {
        let Some(plan) = &self.plan else { return };
        if !self.record.phase.is_running() {
            return;
        }
        let orphans: Vec<NodeName> = plan
            .hops
            .iter()
            .filter(|hop| {
                let state = self.targets[self.index[&hop.child]].state;
                state.is_member() && state != TargetState::Published && !self.can_serve(&hop.parent)
            })
            .map(|hop| hop.child.clone())
            .collect();
        for child in orphans {
            if let Some(parent) = self.next_parent(&child) {
                self.remark(format!("{child} now asks {parent}"));
                self.set_parent(&child, &parent);
            }
        }
        self.refresh();
    }

    /// The nearest ancestor that can serve; else a holder.
    fn next_parent(&self, child: &NodeName) -> Option<NodeName> {
        let parents = self.parents();
        self.ancestors(&parents, child)
            .into_iter()
            .find(|node| self.can_serve(node) && !self.is_slow(node))
            .or_else(|| {
                self.can_serve(&self.spec.source)
                    .then(|| self.spec.source.clone())
            })
            .or_else(|| self.best_holder(child))
    }

    /// The one with the fewest children among those that have it all, else among those that still receive.
    fn best_holder(&self, child: &NodeName) -> Option<NodeName> {
        let load = |node: &NodeName| {
            self.children.get(node).map_or(0, |children| {
                children
                    .iter()
                    .filter(|c| {
                        let state = self.targets[self.index[*c]].state;
                        state.is_member() && state != TargetState::Published
                    })
                    .count()
            })
        };
        self.spec
            .targets
            .iter()
            .enumerate()
            .filter(|(_, node)| *node != child && self.can_serve(node) && !self.needs(node, child))
            .filter(|(_, node)| self.hop(node).is_some())
            .min_by_key(|(at, node)| {
                let whole = self.targets[*at].state == TargetState::Published;
                (self.is_slow(node), !whole, load(node), *at)
            })
            .map(|(_, node)| node.clone())
    }

    pub(super) fn set_parent(&mut self, child: &NodeName, parent: &NodeName) {
        if self.is_below(parent, child) {
            // It has all and needs nobody, but a plan is a tree: it takes the child's place.
            let above = self.parent_of(child).cloned();
            self.set_edge(parent, &above.unwrap_or_else(|| self.spec.source.clone()));
        }
        self.set_edge(child, parent);
    }

    fn set_edge(&mut self, child: &NodeName, parent: &NodeName) {
        let Some(plan) = &mut self.plan else { return };
        let Some(hop) = plan.hops.iter_mut().find(|hop| hop.child == *child) else {
            return;
        };
        let old = std::mem::replace(&mut hop.parent, parent.clone());
        self.new_hops.insert(child.clone());
        self.dirty_plan = true;
        for node in [child, parent, &old] {
            self.touch(node);
        }
        self.index_children();
        self.changed();
    }

    /// Derives fallbacks and depths anew from the parents; children whose list changed are told.
    pub(super) fn refresh(&mut self) {
        let parents = self.parents();
        let depths = self.depths();
        let mut fresh: Vec<(NodeName, Vec<NodeName>, u16)> = Vec::new();
        let Some(plan) = &self.plan else { return };
        for hop in &plan.hops {
            let mut fallbacks: Vec<NodeName> = Vec::new();
            if hop.parent != self.spec.source && hop.parent != hop.child {
                fallbacks = self.ancestors(&parents, &hop.parent);
                fallbacks
                    .retain(|node| *node != self.spec.source && *node != hop.child && self.can_serve(node));
                fallbacks.sort_by_key(|node| self.is_slow(node));
                fallbacks.truncate(ANCESTORS);
                if !self.record.source_ended {
                    fallbacks.push(self.spec.source.clone());
                }
            }
            let depth = depths.get(&hop.child).copied().unwrap_or(hop.depth);
            if fallbacks != hop.fallbacks || depth != hop.depth {
                fresh.push((hop.child.clone(), fallbacks, depth));
            }
        }
        if fresh.is_empty() {
            return;
        }
        for (child, fallbacks, depth) in fresh {
            self.touch(&child);
            if let (Some(plan), Some(at)) = (&mut self.plan, self.hops.get(&child)) {
                let hop = &mut plan.hops[*at];
                hop.fallbacks = fallbacks;
                hop.depth = depth;
            }
        }
        if let Some(plan) = &mut self.plan {
            plan.depth = plan.hops.iter().map(|hop| hop.depth).max().unwrap_or(0);
        }
        self.dirty_plan = true;
    }

    fn depths(&self) -> BTreeMap<NodeName, u16> {
        let mut depths = BTreeMap::new();
        let mut seen = BTreeSet::from([self.spec.source.clone()]);
        let mut queue = VecDeque::from([(self.spec.source.clone(), 0u16)]);
        while let Some((node, depth)) = queue.pop_front() {
            for child in self.children.get(&node).into_iter().flatten() {
                depths.insert(child.clone(), depth.saturating_add(1));
                if seen.insert(child.clone()) {
                    queue.push_back((child.clone(), depth.saturating_add(1)));
                }
            }
        }
        depths
    }

    /// A fit target that has no part in the transfer yet gets one; [`Self::refresh`] must follow.
    pub(super) fn join(&mut self, at: usize) {
        let child = self.spec.targets[at].clone();
        let planned = self.hop(&child);
        let good = planned.is_some_and(|hop| {
            self.can_serve(&hop.parent) && !self.is_slow(&hop.parent) && !self.needs(&hop.parent, &child)
        });
        if !good {
            let parent = if child == self.spec.source {
                child.clone()
            } else {
                self.best_holder(&child)
                    .unwrap_or_else(|| self.spec.source.clone())
            };
            if planned.is_some() {
                self.set_parent(&child, &parent);
            } else {
                self.add_hop(&child, &parent);
            }
        }
        self.set_state(at, TargetState::Receiving, None);
        self.note_address(&child);
        let parent = self.parent_of(&child).cloned();
        if let Some(parent) = parent {
            self.note_address(&parent);
            self.touch(&parent);
        }
    }

    fn add_hop(&mut self, child: &NodeName, parent: &NodeName) {
        let Some(plan) = &mut self.plan else { return };
        // What it can carry, and how, the planner says next.
        let hop = Hop {
            child: child.clone(),
            parent: parent.clone(),
            fallbacks: Vec::new(),
            streams: self.spec.streams.unwrap_or(1),
            streams_cap: CAP,
            streams_least: 1,
            congestion_control: None,
            depth: 1,
            rate: Rate::ZERO,
            finish: plan.predicted,
            limited_by: "joined later".to_owned(),
        };
        plan.hops.push(hop);
        self.new_hops.insert(child.clone());
        let index = &self.index;
        plan.hops.sort_by_key(|hop| index.get(&hop.child).copied());
        self.dirty_plan = true;
        self.index_children();
        self.changed();
    }

    /// What hops are that the plan did not foresee.
    pub(super) fn laid(&mut self, hops: Vec<Hop>) {
        let Some(plan) = &mut self.plan else { return };
        for new in hops {
            let Some(at) = self.hops.get(&new.child).copied() else {
                continue;
            };
            let hop = &mut plan.hops[at];
            if hop.parent != new.parent {
                continue;
            }
            self.touched.insert(new.child.clone());
            // Where it hangs and until when it lasts is the job's to know.
            *hop = Hop {
                fallbacks: std::mem::take(&mut hop.fallbacks),
                depth: hop.depth,
                finish: hop.finish,
                ..new
            };
            self.dirty_plan = true;
        }
    }

    /// A child has gone on with another parent: the plan follows it.
    pub(super) fn moved(&mut self, child: &NodeName, from: &NodeName, to: &NodeName, why: &str) {
        let member = self
            .index
            .get(child)
            .is_some_and(|at| self.targets[*at].state.is_member());
        if !self.record.phase.is_running() || !member || child == to || !self.concerns(to) {
            return;
        }
        if self.parent_of(child) == Some(to) {
            return;
        }
        self.remark(format!("{child} moved from {from} to {to}: {why}"));
        // Two that wait for each other would wait for ever; the child finds out by itself and moves on.
        if !self.needs(to, child) {
            self.set_parent(child, to);
            self.refresh();
        }
    }
}
