//! What happens to nodes, and how those below them find somebody else.

use std::time::Duration;

use super::engine::{Engine, Phase, What};
use super::{DETECT, FaultKind, Move, NEXT_DIAL};
use crate::plan::ground::SOURCE;

impl Engine<'_> {
    pub(super) fn strike(&mut self, node: usize, kind: FaultKind) {
        match kind {
            FaultKind::Dies => {
                if self.flows[node].phase != Phase::Complete || node == SOURCE {
                    self.flows[node].complete = None;
                }
                self.lose(node);
            }
            FaultKind::Disk(rate) if node == SOURCE => {
                self.source_disk = rate.bytes_per_second();
                self.seeds.extend_from_slice(&self.below[SOURCE]);
            }
            FaultKind::Disk(rate) => {
                self.flows[node].disk = rate.bytes_per_second();
                self.seeds.push(node);
            }
            FaultKind::Network(share) => {
                let name = self.ground.name(node);
                for interface in 0..self.ground.node(node).interfaces.len() {
                    if let Some(edge) = self.ground.topology.interface_edge(name, interface) {
                        for edge in [edge, edge.reverse()] {
                            let full = self.ground.goodput(edge).bytes_per_second();
                            self.shares.capacities[edge.0 as usize] = full * share.clamp(0.0, 1.0);
                            self.resources.push(edge.0 as usize);
                        }
                    }
                }
            }
        }
    }

    /// A node is gone, or has nobody to ask: those below it find out, and ask others.
    fn lose(&mut self, node: usize) {
        self.stop(node, Phase::Lost);
        self.flows[node].attempt += 1;
        let away = DETECT.as_secs_f64();
        for child in std::mem::take(&mut self.below[node]) {
            if matches!(self.flows[child].phase, Phase::Complete | Phase::Lost) {
                continue;
            }
            self.stop(child, Phase::Away);
            self.book(child);
            let flow = &mut self.flows[child];
            flow.attempt += 1;
            let attempt = flow.attempt;
            self.push(self.now + away, What::Dial, child, attempt);
        }
    }

    pub(super) fn dial(&mut self, node: usize) {
        let Some(parent) = self.flows[node].fallbacks.next() else {
            return self.lose(node);
        };
        if self.flows[parent].phase == Phase::Lost || !self.attach(node, parent, None) {
            let (at, attempt) = (self.now + NEXT_DIAL.as_secs_f64(), self.flows[node].attempt);
            return self.push(at, What::Dial, node, attempt);
        }
        self.moves.push(Move {
            at: Duration::try_from_secs_f64(self.now).unwrap_or(Duration::MAX),
            node: self.ground.name(node).clone(),
            to: self.ground.name(parent).clone(),
        });
        self.connect(node);
    }
}
