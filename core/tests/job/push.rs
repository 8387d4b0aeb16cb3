//! A push whose agents say what a test wants.

use std::collections::BTreeMap;
use std::time::Duration;

use stage_core::assignment::{Assignment, Final, Order, Outcome, Prepared, Run, SourceReport};
use stage_core::digest::{FileDigest, RootDigest};
use stage_core::id::{Epoch, NodeName};
use stage_core::job::{Effect, Event, Job, Now, Phase, Presence, Spec, Standing, TargetState};
use stage_core::manifest::Manifest;
use stage_core::payload::Payload;
use stage_core::plan::{Facts, new_hops, plan};
use stage_core::topology::Topology;
use stage_core::units::ByteCount;

use crate::{node, one_switch, spec};

pub(crate) const CHUNKS: u32 = 8;

/// It is here, under its address.
fn up(i: usize) -> (NodeName, Standing) {
    let standing = Standing {
        presence: Presence::Up,
        drained: false,
        addresses: vec![format!("10.0.0.{}:7701", i + 1).parse().unwrap()],
    };
    (node(i), standing)
}

/// A chain n0 → n1 → … and what its nodes were told last.
pub(crate) struct Push {
    pub(crate) job: Job,
    pub(crate) topology: Topology,
    pub(crate) facts: Facts,
    pub(crate) now: u64,
    pub(crate) told: BTreeMap<NodeName, Assignment>,
}

impl Push {
    /// `n1` to `n{targets}` at one switch, all of whom are up.
    pub(crate) fn new(
        targets: usize,
        change: impl FnOnce(&mut Spec, &mut BTreeMap<NodeName, Standing>),
    ) -> Self {
        Self::over(&one_switch(targets + 1), targets, change)
    }

    /// The same over another network.
    pub(crate) fn over(
        text: &str,
        targets: usize,
        change: impl FnOnce(&mut Spec, &mut BTreeMap<NodeName, Standing>),
    ) -> Self {
        let mut spec = spec(targets);
        let mut standing = (0..=targets).map(up).collect();
        change(&mut spec, &mut standing);
        let now = 60;
        let time = Now {
            up: Duration::from_secs(now),
            unix_ms: now * 1000,
        };
        let mut push = Self {
            job: Job::new(spec, Epoch(1), standing, time),
            topology: Topology::parse("t", text).unwrap(),
            facts: Facts::default(),
            now,
            told: BTreeMap::new(),
        };
        push.apply(Event::Start);
        push
    }

    pub(crate) fn apply(&mut self, event: Event) {
        let time = Now {
            up: Duration::from_secs(self.now),
            unix_ms: self.now * 1000,
        };
        for effect in self.job.apply(event, time) {
            match effect {
                Effect::Send(node, assignment) => {
                    self.told.insert(node, *assignment);
                }
                Effect::Plan(request) => {
                    let answer = plan(&self.topology, &request, &self.facts);
                    self.apply(Event::Planned(answer));
                }
                Effect::NewHops(request, edges) => {
                    let hops = new_hops(&self.topology, &request, &self.facts, &edges).unwrap();
                    self.apply(Event::NewHops(hops));
                }
                Effect::Persist(_) | Effect::Wake(_) | Effect::Notify(_) => {}
            }
        }
    }

    pub(crate) fn later(&mut self, seconds: u64) {
        self.now += seconds;
        self.apply(Event::Tick);
    }

    pub(crate) fn answer(&mut self, i: usize, prepared: Prepared) {
        let version = self.told[&node(i)].version;
        self.apply(Event::Prepared(node(i), version, prepared));
    }

    pub(crate) fn ready(&mut self, i: usize) {
        self.answer(
            i,
            Prepared::Ready {
                path: "/s/x".to_owned(),
                candidate: false,
            },
        );
    }

    /// Source and targets answer, and all run.
    pub(crate) fn run(targets: usize) -> Self {
        let mut push = Self::new(targets, |_, _| ());
        push.all_ready(targets);
        push
    }

    pub(crate) fn all_ready(&mut self, targets: usize) {
        self.look();
        (1..=targets).for_each(|i| self.ready(i));
        assert_eq!(self.job.phase(), Phase::Running);
    }

    pub(crate) fn look(&mut self) {
        let manifest = Manifest::single_file(b"x", ByteCount(u64::from(CHUNKS) << 20), 0o644, (1, 1));
        let payload = Payload::of(&manifest).unwrap();
        self.answer(0, Prepared::Source { payload });
    }

    pub(crate) fn finish(&mut self) {
        self.apply(Event::Source(
            node(0),
            SourceReport::Final(Final {
                root: RootDigest([7; 32]),
                chunks: CHUNKS,
                data: Default::default(),
            }),
        ));
        self.apply(Event::Source(node(0), SourceReport::Sha256(FileDigest([9; 32]))));
    }

    pub(crate) fn publish(&mut self, i: usize) {
        let outcome = Outcome::Published {
            path: "/s/x".to_owned(),
            already: false,
            bytes_received: 1,
            took: Duration::from_secs(1),
        };
        self.apply(Event::Outcome(node(i), outcome));
    }

    pub(crate) fn run_of(&self, i: usize) -> &Run {
        match &self.told[&node(i)].order {
            Order::Run(run) => run,
            other => panic!("n{i} was told {other:?}"),
        }
    }

    pub(crate) fn parents(&self, i: usize) -> Vec<String> {
        self.run_of(i)
            .parents
            .iter()
            .map(|peer| peer.node.to_string())
            .collect()
    }

    pub(crate) fn children(&self, i: usize) -> Vec<String> {
        self.run_of(i).children.iter().map(ToString::to_string).collect()
    }

    /// A retry, with all nodes up.
    pub(crate) fn retry(&mut self, source: Option<usize>) {
        let standing = (0..=9).map(up).collect();
        self.apply(Event::Retry {
            source: source.map(node),
            standing,
        });
    }

    pub(crate) fn state(&self, i: usize) -> TargetState {
        self.job.targets()[i - 1].state
    }
}
