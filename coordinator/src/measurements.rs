//! What is known of hosts and paths beside the topology: what agents say of themselves and meet in pushes, in memory
//! only since they bring it again; what `stage bench` measured, with its history, and what finished pushes have taught, of
//! both of which the store has a copy.

use std::collections::BTreeMap;
use std::time::Duration;

use stage_core::assignment::Progress;
use stage_core::bench::{Measurement, Subject, facts, verdict::History};
use stage_core::id::NodeName;
use stage_core::learn::{self, Lesson, Lessons, Past};
use stage_core::plan::{Controls, Facts, WindowLimits};
use stage_core::topology::Topology;

/// RTTs kept at most: a large cluster has more pairs than are worth remembering.
const PAIRS: usize = 100_000;
/// Pushes kept to be looked at.
pub(crate) const PUSHES: u16 = 100;
/// Readings kept of each node and each link.
pub(crate) const READINGS: u16 = 32;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Measurements {
    facts: Facts,
    history: History,
    lessons: Lessons,
    /// Oldest first.
    pushes: Vec<Past>,
}

impl Measurements {
    /// What was measured and learned in earlier lives, oldest first.
    pub(crate) fn restore(readings: Vec<Measurement>, lessons: Vec<Lesson>, pushes: Vec<Past>) -> Self {
        let mut measurements = Self::default();
        for reading in readings {
            measurements.measured(reading);
        }
        for lesson in lessons {
            measurements.learned(lesson);
        }
        measurements.pushes = pushes;
        measurements
    }

    /// What a host says that its kernel lets a connection hold, and ask for.
    pub(crate) fn host(
        &mut self,
        node: &NodeName,
        windows: Option<WindowLimits>,
        controls: Option<Controls>,
    ) {
        let host = self.facts.nodes.entry(node.clone()).or_default();
        (host.windows, host.controls) = (windows, controls);
    }

    /// What this host's kernel lets a connection hold, if it has said so.
    pub(crate) fn windows_of(&self, node: &NodeName) -> Option<WindowLimits> {
        self.facts.nodes.get(node)?.windows
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

    /// A push has taught something: the newest lesson on a subject counts.
    pub(crate) fn learned(&mut self, lesson: Lesson) {
        if self.lessons.len() < PAIRS || self.lessons.contains_key(&lesson.subject) {
            self.lessons.insert(lesson.subject.clone(), lesson);
        }
    }

    /// A push is over.
    pub(crate) fn passed(&mut self, past: Past) {
        self.pushes.push(past);
        let old = self.pushes.len().saturating_sub(PUSHES.into());
        self.pushes.drain(..old);
    }

    /// What pushes have taught, a line each, the newest pushes last.
    pub(crate) fn taught(&self, now: u64) -> Vec<String> {
        let lessons = self.lessons.values().map(|lesson| lesson.words(now));
        lessons
            .chain(self.pushes.iter().map(|past| past.words(now)))
            .collect()
    }

    /// All readings, of each node and link the oldest first.
    pub(crate) fn history(&self) -> &History {
        &self.history
    }

    /// All of it, for the planner. `now` is Unix time in milliseconds.
    pub(crate) fn facts(&self, topology: &Topology, now: u64) -> Facts {
        let mut facts = self.facts.clone();
        facts::lay(&mut facts, topology, &facts::newest(&self.history), now);
        let measured = |node: &NodeName| {
            let readings = self.history.get(&Subject::Node(node.clone()))?;
            Some(readings.last()?.unix_ms)
        };
        learn::lay(&mut facts, &self.lessons, &measured, now);
        facts
    }
}
