//! What is known of hosts and paths beside the topology. In memory only: agents bring it again.

use std::collections::BTreeMap;
use std::time::Duration;

use stage_core::assignment::Progress;
use stage_core::id::NodeName;
use stage_core::plan::{Facts, WindowLimits};

/// RTTs kept at most: a large cluster has more pairs than are worth remembering.
const PAIRS: usize = 100_000;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Measurements {
    facts: Facts,
}

impl Measurements {
    /// What a host says that its kernel lets a connection hold.
    pub(crate) fn windows(&mut self, node: &NodeName, windows: Option<WindowLimits>) {
        self.facts.nodes.entry(node.clone()).or_default().windows = windows;
    }

    /// The RTT that a child met.
    pub(crate) fn progress(&mut self, child: &NodeName, progress: &Progress) {
        let (Some(parent), Some(rtt)) = (&progress.parent, progress.rtt) else {
            return;
        };
        let pair = (parent.clone(), child.clone());
        if self.facts.rtts.len() < PAIRS || self.facts.rtts.contains_key(&pair) {
            let known: &mut BTreeMap<_, Duration> = &mut self.facts.rtts;
            known.insert(pair, rtt);
        }
    }

    /// All of it, for the planner.
    pub(crate) fn facts(&self) -> Facts {
        self.facts.clone()
    }
}
