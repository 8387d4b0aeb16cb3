//! What is known of hosts and paths beside the topology: what agents say of themselves and meet in pushes, in memory
//! only since they bring it again; and what `stage bench` measured, with its history, of which the store has a copy.

use std::collections::BTreeMap;
use std::time::Duration;

use stage_core::assignment::Progress;
use stage_core::bench::{Measurement, Subject, facts, verdict::History};
use stage_core::id::NodeName;
use stage_core::plan::{Facts, WindowLimits};
use stage_core::topology::Topology;

/// RTTs kept at most: a large cluster has more pairs than are worth remembering.
const PAIRS: usize = 100_000;
/// Readings kept of each node and each link.
pub(crate) const READINGS: u16 = 32;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Measurements {
    facts: Facts,
    history: History,
}

impl Measurements {
    /// What was measured in earlier lives, oldest first.
    pub(crate) fn restore(readings: Vec<Measurement>) -> Self {
        let mut measurements = Self::default();
        for reading in readings {
            measurements.measured(reading);
        }
        measurements
    }

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

    /// A new reading.
    pub(crate) fn measured(&mut self, measurement: Measurement) {
        if let Subject::Link(pair) = &measurement.subject {
            // What a push met before is older than this.
            self.facts.rtts.remove(&(pair.from.clone(), pair.to.clone()));
            self.facts.rtts.remove(&(pair.to.clone(), pair.from.clone()));
        }
        let readings = self.history.entry(measurement.subject.clone()).or_default();
        readings.push(measurement);
        let old = readings.len().saturating_sub(READINGS.into());
        readings.drain(..old);
    }

    /// All readings, of each node and link the oldest first.
    pub(crate) fn history(&self) -> &History {
        &self.history
    }

    /// All of it, for the planner. `now` is Unix time in milliseconds.
    pub(crate) fn facts(&self, topology: &Topology, now: u64) -> Facts {
        let mut facts = self.facts.clone();
        facts::lay(&mut facts, topology, &facts::newest(&self.history), now);
        facts
    }
}
