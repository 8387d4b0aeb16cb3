//! What is measured: who may be, what is known, and what is kept.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use stage_core::bench::Measurement;
use stage_core::failure::{Code, Failure};
use stage_core::id::NodeName;
use stage_core::job::Phase;
use stage_core::plan::Facts;

use super::{Driver, Outbox, submit, unix_ms};
use crate::bench::{Wanted, busy_failure};
use crate::store::Change;

/// Nodes of this group are busy with something that stage does not see.
const BUSY: &str = "busy";

/// A bench that has begun.
pub(crate) struct Begun {
    /// Who is asked, in the order of TARGETS.
    pub(crate) nodes: Vec<NodeName>,
    pub(crate) addresses: BTreeMap<NodeName, Vec<SocketAddr>>,
    /// What was known before.
    pub(crate) facts: Facts,
    /// As long as it is held, no other bench measures.
    _turn: Option<Arc<()>>,
}

impl Driver {
    pub(super) fn begin_bench(&mut self, wanted: &Wanted) -> Result<Begun, Failure> {
        let mut nodes = submit::select(&wanted.nodes, &self.setup.topology, &self.answers)?;
        if let Some(from) = &wanted.from {
            if self.setup.topology.node(from).is_none() {
                return Err(Failure::new(
                    Code::UnknownTarget,
                    format!("{from} is not in the topology"),
                    "`stage nodes` lists the nodes",
                ));
            }
            if !nodes.contains(from) {
                nodes.insert(0, from.clone());
            }
        }
        let turn = if wanted.show {
            None
        } else if self.benching.strong_count() > 0 {
            return Err(Failure::new(
                Code::Busy,
                "another `stage bench` is under way: two would measure each other",
                "wait for it, or look at what is known with `stage bench --show`",
            ));
        } else {
            let turn = Arc::new(());
            self.benching = Arc::downgrade(&turn);
            Some(turn)
        };
        let addresses = nodes
            .iter()
            .map(|node| (node.clone(), self.fleet.addresses(node)))
            .collect();
        Ok(Begun {
            nodes,
            addresses,
            facts: self.facts(),
            _turn: turn,
        })
    }

    /// Who is not to be disturbed, and why.
    pub(super) fn busy(&self) -> BTreeMap<NodeName, Failure> {
        let mut busy = BTreeMap::new();
        let mut add = |node: &NodeName, why: &str| {
            busy.entry(node.clone())
                .or_insert_with(|| busy_failure(why).on(node));
        };
        for node in self.fleet.drained() {
            add(node, "it is drained");
        }
        if self.setup.topology.groups().contains_key(BUSY) {
            // A group that selects nobody now says that nobody is.
            let listed = self
                .setup
                .topology
                .select(BUSY, &self.answers)
                .unwrap_or_default();
            for node in listed {
                add(&node, "the topology's group `busy` lists it");
            }
        }
        for entry in self.jobs.values() {
            let job = &entry.job;
            let phase = job.phase();
            // One that is open only waits for who is unfit.
            if phase.is_ended() || phase == Phase::Open || phase == Phase::Queued {
                continue;
            }
            let spec = job.spec();
            for node in std::iter::once(&spec.source).chain(&spec.targets) {
                add(node, &format!("job {} is under way there", spec.id));
            }
        }
        busy
    }

    pub(super) fn measured(&mut self, measurement: Measurement, out: &mut Outbox) {
        self.measurements.measured(measurement.clone());
        out.batch.push(Change::Measured(Box::new(measurement)));
    }

    /// All that plans are made from.
    pub(super) fn facts(&self) -> Facts {
        self.measurements.facts(&self.setup.topology, unix_ms())
    }
}
