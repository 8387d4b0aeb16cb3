//! `stage doctor`: each host says what it is like, and what follows is told.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use stage_core::ask::Said;
use stage_core::bench::{HostReport, LinkReading, Reading, Subject, verdict::History};
use stage_core::doctor::{Context, Way, examine};
use stage_core::failure::Failure;
use stage_core::id::NodeName;
use stage_core::plan::Facts;
use stage_core::topology::Topology;
use stage_proto::v1;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::driver::Answers;

/// Hosts that were asked.
pub(crate) struct Asked {
    pub(crate) topology: Arc<Topology>,
    pub(crate) facts: Facts,
    pub(crate) history: History,
    /// When they were asked, by our clock and by the wall's.
    pub(crate) begun: Instant,
    pub(crate) unix_ms: u64,
}

impl Asked {
    /// Until all have answered and been told, or nobody waits for it.
    pub(crate) async fn run(
        self,
        mut answers: Answers,
        events: mpsc::Sender<Result<v1::NodeFindings, tonic::Status>>,
    ) {
        let mut hosts: BTreeMap<NodeName, (Box<HostReport>, Duration)> = BTreeMap::new();
        let mut silent: Vec<(NodeName, Failure)> = Vec::new();
        let all = async {
            while let Some(part) = answers.recv().await {
                match part.said {
                    Said::Host(host) => {
                        hosts.insert(part.node, (host, self.begun.elapsed()));
                    }
                    Said::Failed(failure) => silent.push((part.node, failure)),
                    _ => {}
                }
            }
        };
        tokio::select! {
            () = events.closed() => return,
            () = all => {}
        }
        let mut told: Vec<v1::NodeFindings> = silent
            .into_iter()
            .map(|(node, failure)| v1::NodeFindings {
                node: node.to_string(),
                failure: Some((&failure).into()),
                findings: Vec::new(),
            })
            .collect();
        for (node, (host, took)) in &hosts {
            told.push(self.findings(node, host, *took, &hosts));
        }
        told.sort_by(|one, other| one.node.cmp(&other.node));
        for findings in told {
            if events.send(Ok(findings)).await.is_err() {
                return;
            }
        }
    }

    fn findings(
        &self,
        node: &NodeName,
        host: &HostReport,
        took: Duration,
        hosts: &BTreeMap<NodeName, (Box<HostReport>, Duration)>,
    ) -> v1::NodeFindings {
        let neighbours: Vec<(NodeName, u32)> = hosts
            .iter()
            .filter(|(other, _)| *other != node && self.are_neighbours(node, other))
            .map(|(other, (host, _))| (other.clone(), host.mtu))
            .collect();
        // It said its time somewhere between the question and the answer.
        let half = u64::try_from(took.as_millis() / 2).unwrap_or(u64::MAX);
        let ours = self.unix_ms.saturating_add(half);
        let ahead = host.unix_ms.cast_signed().saturating_sub(ours.cast_signed());
        let context = Context {
            topology: &self.topology,
            facts: &self.facts,
            version: env!("CARGO_PKG_VERSION"),
            clock_ms: (ahead, half),
            loss: self.loss(node),
            neighbours: &neighbours,
            ways: &self.ways(node, hosts),
        };
        v1::NodeFindings {
            node: node.to_string(),
            failure: None,
            findings: examine(node, host, &context)
                .into_iter()
                .map(|found| v1::Finding {
                    check: found.check.to_owned(),
                    message: found.message,
                    mend: found.mend,
                })
                .collect(),
        }
    }

    fn are_neighbours(&self, one: &NodeName, other: &NodeName) -> bool {
        let switch = |name: &NodeName| {
            let interface = self.topology.node(name)?.interfaces.first()?;
            Some(&interface.attach)
        };
        switch(one).is_some_and(|here| switch(other) == Some(here))
    }

    /// What was seen of the largest packets on ways to and from the node.
    fn ways(&self, node: &NodeName, hosts: &BTreeMap<NodeName, (Box<HostReport>, Duration)>) -> Vec<Way> {
        let mtu = |other: &NodeName| {
            let now = hosts.get(other).map(|(host, _)| host.mtu);
            now.or_else(
                || match &self.history.get(&Subject::Node(other.clone()))?.last()?.reading {
                    Reading::Node(reading) => Some(reading.host.mtu),
                    Reading::Link(_) => None,
                },
            )
        };
        self.history
            .iter()
            .filter_map(|(subject, readings)| match (subject, &readings.last()?.reading) {
                (Subject::Link(pair), Reading::Link(link)) if pair.from == *node || pair.to == *node => {
                    let other = if pair.from == *node { &pair.to } else { &pair.from };
                    Some(Way {
                        other: other.clone(),
                        other_mtu: mtu(other).unwrap_or(0),
                        mtu: link.trace.mtu,
                        swallows: link.trace.swallows,
                        rtt: link.rtt.median,
                    })
                }
                _ => None,
            })
            .collect()
    }

    /// The loss that was measured last on a way to or from the node: the largest.
    fn loss(&self, node: &NodeName) -> f64 {
        self.history
            .iter()
            .filter_map(|(subject, readings)| match (subject, &readings.last()?.reading) {
                (Subject::Link(pair), Reading::Link(link)) if pair.from == *node || pair.to == *node => {
                    Some(link)
                }
                _ => None,
            })
            .flat_map(|link| [&link.forward, &link.backward])
            .filter_map(|rates| LinkReading::best(rates))
            .map(|best| best.loss())
            .fold(0.0, f64::max)
    }
}
