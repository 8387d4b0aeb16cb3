//! Slow nodes: who waits for one is given to its parent, so that one sick disk or interface does not set the pace of all
//! below it.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Job, TargetState};
use crate::chunk::CHUNK;
use crate::id::NodeName;
use crate::verdict::{Fault, SlowHop};

/// A hop that has been slow for so long will be.
pub const SLOW_AFTER: Duration = Duration::from_secs(10);
/// What is over sooner than this is left as it is.
const WORTHWHILE: Duration = Duration::from_secs(5);

impl Job {
    /// These hops are slow now, and no others are.
    pub(super) fn slow_now(&mut self, slow: Vec<SlowHop>) {
        let now = self.now.up;
        let before = std::mem::take(&mut self.slow_since);
        for hop in slow {
            if self.parent_of(&hop.child) != Some(&hop.parent) {
                continue;
            }
            let since = before
                .get(&hop.child)
                .filter(|(parent, _)| *parent == hop.parent)
                .map_or(now, |(_, since)| *since);
            if now < since + SLOW_AFTER || !self.is_worthwhile(&hop.child) {
                self.slow_since.insert(hop.child, (hop.parent, since));
                continue;
            }
            match hop.fault {
                Fault::Child => self.make_leaf(&hop),
                Fault::Way => self.go_up(&hop),
            }
        }
    }

    /// Whether the node receives, and will for some time.
    fn is_worthwhile(&self, child: &NodeName) -> bool {
        let Some(at) = self.index.get(child).copied() else {
            return false;
        };
        let live = &self.live[at];
        let missing = self
            .layout_count()
            .map(|count| u64::from(count.saturating_sub(live.progress.chunks)) * CHUNK);
        let rate = live.received_now().bytes_per_second();
        let is_far = missing.is_none_or(|missing| missing as f64 > rate * WORTHWHILE.as_secs_f64());
        self.targets[at].state == TargetState::Receiving && is_far
    }

    /// Its children go to its parent; it stays, and gets no others while it receives.
    fn make_leaf(&mut self, hop: &SlowHop) {
        if self.record.slow.insert(hop.child.clone()) {
            self.dirty_record = true;
        }
        let children: Vec<NodeName> = self
            .children
            .get(&hop.child)
            .into_iter()
            .flatten()
            .filter(|child| {
                let state = self.targets[self.index[*child]].state;
                state.is_member() && state != TargetState::Published
            })
            .cloned()
            .collect();
        if children.is_empty() || !self.can_serve(&hop.parent) {
            return;
        }
        for child in &children {
            self.set_parent(child, &hop.parent);
        }
        let names: Vec<&str> = children.iter().map(NodeName::as_str).collect();
        self.remark(format!(
            "{} is slow, and who waited for it now asks {}: {} ({})",
            hop.child,
            hop.parent,
            names.join(", "),
            hop.text
        ));
        self.refresh();
    }

    /// It asks its parent's parent.
    fn go_up(&mut self, hop: &SlowHop) {
        let Some(above) = self.parent_of(&hop.parent).cloned() else {
            return;
        };
        if !self.can_serve(&above) {
            return;
        }
        self.set_parent(&hop.child, &above);
        self.remark(format!(
            "{} now asks {above}: from {} it came slowly ({})",
            hop.child, hop.parent, hop.text
        ));
        self.refresh();
    }
}

/// Since when which hops are slow: by child, with its parent.
pub(super) type SlowSince = BTreeMap<NodeName, (NodeName, Duration)>;
