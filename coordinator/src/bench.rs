//! Who conducts `stage bench`: rounds of questions to agents, one after the other, until all is measured or nobody
//! waits for it any more. Beside the driver, which owns what is measured and says who may be asked.

use std::collections::BTreeMap;
use std::sync::Arc;

use stage_core::ask::{Question, Said};
use stage_core::assignment::Peer;
use stage_core::bench::{
    Cover, Depth, HostReport, Keep, LinkProbe, Measurement, Pair, Reading, Side, Subject, capacity, keeps,
    pairs, rounds, route, together, too_busy, verdict,
};
use stage_core::failure::{Code, Failure};
use stage_core::id::{CongestionControl, JobId, JobKey, NodeName, SwitchName};
use stage_core::topology::{EdgeId, Topology};
use stage_core::units::Rate;
use stage_proto::v1;
use stage_proto::v1::bench_event::Event;
use tokio::sync::{mpsc, oneshot};

use crate::driver::{Answers, Begun, Command};

/// Events that wait for who asked.
const EVENTS: usize = 64;

/// What shall be measured.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    /// TARGETS.
    pub(crate) nodes: String,
    pub(crate) links_only: bool,
    pub(crate) depth: Depth,
    /// Nothing is measured, only shown.
    pub(crate) show: bool,
    pub(crate) busy_too: bool,
    pub(crate) from: Option<NodeName>,
    /// Only between these, and not kept.
    pub(crate) sweep: Option<Pair>,
}

/// What is said of it, as it comes.
pub(crate) type Events = mpsc::Receiver<Result<v1::BenchEvent, tonic::Status>>;

/// Nobody waits any more, or the coordinator stops.
struct Over;

/// See the module.
pub(crate) struct Conductor {
    commands: mpsc::Sender<Command>,
    topology: Arc<Topology>,
    wanted: Wanted,
    begun: Begun,
    events: mpsc::Sender<Result<v1::BenchEvent, tonic::Status>>,
    /// Whose disks take what comes over which pair.
    keeps: BTreeMap<Pair, Keep>,
    done: usize,
    total: usize,
}

/// Begins: who may be measured is known, or why nobody is.
pub(crate) async fn begin(
    commands: mpsc::Sender<Command>,
    topology: Arc<Topology>,
    wanted: Wanted,
) -> Result<Option<(Conductor, Events)>, Failure> {
    let (reply, answer) = oneshot::channel();
    let command = Command::Bench {
        wanted: wanted.clone(),
        reply,
    };
    let Ok(begun) = (match commands.send(command).await {
        Ok(()) => answer.await,
        Err(_) => return Ok(None),
    }) else {
        return Ok(None);
    };
    let begun = begun?;
    let (events, heard) = mpsc::channel(EVENTS);
    let conductor = Conductor {
        commands,
        topology,
        wanted,
        begun,
        events,
        keeps: BTreeMap::new(),
        done: 0,
        total: 0,
    };
    Ok(Some((conductor, heard)))
}

impl Conductor {
    /// Until all is measured and told, or nobody waits for it.
    pub(crate) async fn run(mut self) {
        let gone = self.events.clone();
        tokio::select! {
            // What was asked ends with its answers being dropped.
            () = gone.closed() => {}
            _ = self.work() => {}
        }
    }

    async fn work(&mut self) -> Result<(), Over> {
        if let Some(pair) = self.wanted.sweep.clone() {
            let nodes = self.fit().await?;
            if nodes.contains(&pair.from) && nodes.contains(&pair.to) {
                self.total = 1;
                self.links(vec![pair], (1, 1)).await?;
            }
            return Ok(());
        }
        if !self.wanted.show {
            let nodes = self.fit().await?;
            if !self.wanted.links_only {
                self.total = nodes.len();
            }
            let source = self.wanted.from.clone().or_else(|| nodes.first().cloned());
            let cover = if self.wanted.depth == Depth::Quick {
                Cover::Links
            } else {
                Cover::Interfaces
            };
            let pairs = match &source {
                Some(source) if nodes.contains(source) => pairs(&self.topology, &nodes, source, cover),
                _ => Vec::new(),
            };
            self.total += pairs.len();
            if !self.wanted.links_only {
                self.nodes(&nodes).await?;
                self.keeps = keeps(&pairs);
            }
            let rounds = rounds(&self.topology, &pairs);
            let count = rounds.len();
            for (at, round) in rounds.into_iter().enumerate() {
                self.links(round, (at + 1, count)).await?;
            }
        }
        self.show().await
    }

    async fn say(&self, event: Event) -> Result<(), Over> {
        let event = v1::BenchEvent { event: Some(event) };
        self.events.send(Ok(event)).await.map_err(|_| Over)
    }

    async fn progress(&self, what: String) -> Result<(), Over> {
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        self.say(Event::Progress(v1::BenchProgress {
            done: count(self.done),
            total: count(self.total),
            what,
        }))
        .await
    }

    async fn skip(
        &self,
        node: &NodeName,
        to: Option<&NodeName>,
        failure: &Failure,
        is_polite: bool,
    ) -> Result<(), Over> {
        self.say(Event::Skipped(v1::BenchSkipped {
            node: node.to_string(),
            to: to.map(ToString::to_string).unwrap_or_default(),
            failure: Some(failure.into()),
            is_polite,
        }))
        .await
    }

    async fn command<T>(&self, make: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, Over> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(make(reply)).await.map_err(|_| Over)?;
        answer.await.map_err(|_| Over)
    }

    /// Puts questions; where not even that can be done, everybody is told why.
    async fn ask(&self, asks: Vec<(NodeName, Question)>) -> Result<Answers, Over> {
        let nodes: Vec<NodeName> = asks.iter().map(|(node, _)| node.clone()).collect();
        match self.command(|reply| Command::AskEach { asks, reply }).await? {
            Ok(answers) => Ok(answers),
            Err(failure) => {
                for node in nodes {
                    self.skip(&node, None, &failure, false).await?;
                }
                // Ends at once.
                Ok(mpsc::channel(1).1)
            }
        }
    }

    /// Those that answer and are not busy.
    async fn fit(&self) -> Result<Vec<NodeName>, Over> {
        let busy = self.busy().await?;
        let mut asks = Vec::new();
        for node in &self.begun.nodes {
            match busy.get(node) {
                Some(why) => self.skip(node, None, why, true).await?,
                None => asks.push((node.clone(), Question::Host)),
            }
        }
        let mut fit = Vec::new();
        let mut answers = self.ask(asks).await?;
        while let Some(part) = answers.recv().await {
            match part.said {
                Said::Host(host) => match self.load(&host) {
                    Some(why) => self.skip(&part.node, None, &why.on(&part.node), true).await?,
                    None => fit.push(part.node),
                },
                Said::Failed(failure) => {
                    let is_polite = failure.code == Code::Drained;
                    self.skip(&part.node, None, &failure, is_polite).await?;
                }
                _ => {}
            }
        }
        // In the order in which they were asked for.
        let order: BTreeMap<&NodeName, usize> = self
            .begun
            .nodes
            .iter()
            .enumerate()
            .map(|(at, node)| (node, at))
            .collect();
        fit.sort_by_key(|node| order.get(node));
        Ok(fit)
    }

    fn load(&self, host: &HostReport) -> Option<Failure> {
        too_busy(host)
            .filter(|_| !self.wanted.busy_too)
            .map(|why| busy_failure(&why))
    }

    /// Who is at work now.
    async fn busy(&self) -> Result<BTreeMap<NodeName, Failure>, Over> {
        if self.wanted.busy_too {
            return Ok(BTreeMap::new());
        }
        self.command(|reply| Command::Busy { reply }).await
    }

    async fn keep(&self, measurement: Measurement) -> Result<(), Over> {
        self.command(|reply| Command::Measured { measurement, reply })
            .await
    }

    /// All at once: no link is in it.
    async fn nodes(&mut self, nodes: &[NodeName]) -> Result<(), Over> {
        self.progress("disks and processors".to_owned()).await?;
        let asks = nodes
            .iter()
            .map(|node| (node.clone(), Question::ProbeNode(self.wanted.depth)))
            .collect();
        let mut answers = self.ask(asks).await?;
        while let Some(part) = answers.recv().await {
            match part.said {
                Said::Node(reading) => {
                    let subject = Subject::Node(part.node.clone());
                    self.keep(measurement(subject, Reading::Node(reading))).await?;
                }
                Said::Failed(failure) => self.skip(&part.node, None, &failure, false).await?,
                _ => continue,
            }
            self.done += 1;
            self.progress(format!("{} is measured", part.node)).await?;
        }
        Ok(())
    }

    /// A round: none of them meets another.
    async fn links(&mut self, round: Vec<Pair>, (at, count): (usize, usize)) -> Result<(), Over> {
        self.progress(format!("links, round {at} of {count}")).await?;
        let busy = self.busy().await?;
        let mut asks = Vec::new();
        let mut waiting = BTreeMap::new();
        for pair in round {
            if let Some(why) = busy.get(&pair.from).or_else(|| busy.get(&pair.to)) {
                self.skip(&pair.from, Some(&pair.to), why, true).await?;
                self.done += 1;
                continue;
            }
            let Some((id, key)) = secret() else {
                let failure = Failure::new(Code::Internal, "no random numbers", "look at the host");
                self.skip(&pair.from, Some(&pair.to), &failure, false).await?;
                continue;
            };
            let probe = |side| {
                Question::ProbeLink(LinkProbe {
                    id,
                    key: key.clone(),
                    side,
                })
            };
            let from = pair.from.clone();
            asks.push((pair.to.clone(), probe(Side::Answer { from })));
            let peer = Peer {
                node: pair.to.clone(),
                addresses: self.begun.addresses.get(&pair.to).cloned().unwrap_or_default(),
            };
            let side = Side::Measure {
                peer,
                depth: self.wanted.depth,
                sweep: self.wanted.sweep.is_some(),
                keep: self.keeps.get(&pair).copied().unwrap_or_default(),
                control: self.control(&pair),
            };
            asks.push((pair.from.clone(), probe(side)));
            waiting.insert(pair.from.clone(), pair.to.clone());
        }
        let mut answers = self.ask(asks).await?;
        // Who answers goes on until it is told that nobody measures it: by dropping the answers.
        while !waiting.is_empty()
            && let Some(part) = answers.recv().await
        {
            if !part.last {
                continue;
            }
            // The side that answers says a last word only where it cannot.
            let from = if waiting.contains_key(&part.node) {
                part.node.clone()
            } else if let Some((from, _)) = waiting.iter().find(|(_, to)| **to == part.node) {
                from.clone()
            } else {
                continue;
            };
            let Some(to) = waiting.remove(&from) else { continue };
            match part.said {
                Said::Link(reading) if self.wanted.sweep.is_some() => {
                    let pair = Pair { from, to };
                    let link = measurement(Subject::Link(pair.clone()), Reading::Link(reading));
                    let mut shown = v1::Measured::from(&link);
                    self.describe(&pair, &mut shown);
                    self.done += 1;
                    self.say(Event::Measured(shown)).await?;
                }
                Said::Link(mut reading) => {
                    reading.switches = self.switches(&from, &to);
                    // One history for both directions.
                    let (pair, reading) = if from <= to {
                        (Pair { from, to }, *reading)
                    } else {
                        (Pair { from: to, to: from }, reading.reversed())
                    };
                    let what = format!("{} to {} is measured", pair.from, pair.to);
                    self.keep(measurement(Subject::Link(pair), Reading::Link(Box::new(reading))))
                        .await?;
                    self.done += 1;
                    self.progress(what).await?;
                }
                Said::Failed(failure) => {
                    self.done += 1;
                    self.skip(&from, Some(&to), &failure, false).await?;
                }
                _ => self.done += 1,
            }
        }
        Ok(())
    }

    /// What a push's connections over this way would ask for, in one direction or the other: both are measured with it, so
    /// only one that both hosts have.
    fn control(&self, pair: &Pair) -> Option<CongestionControl> {
        let facts = &self.begun.facts;
        let of = |parent, child| {
            let route = self.topology.route(parent, child)?;
            let control = facts.control(&self.topology, parent, child, &route)?;
            facts.offers(child, &control).then_some(control)
        };
        of(&pair.from, &pair.to).or_else(|| of(&pair.to, &pair.from))
    }

    /// What was measured last of the nodes that were asked for, and what follows from it.
    async fn show(&self) -> Result<(), Over> {
        let history = self.command(|reply| Command::History { reply }).await?;
        let is_wanted = |subject: &Subject| match subject {
            Subject::Node(node) => !self.wanted.links_only && self.begun.nodes.contains(node),
            Subject::Link(pair) => {
                self.begun.nodes.contains(&pair.from) && self.begun.nodes.contains(&pair.to)
            }
        };
        let remark = |kind: &str, text| {
            Event::Remark(v1::BenchRemark {
                kind: kind.to_owned(),
                text,
            })
        };
        let mut remarks = Vec::new();
        let mut flagged = verdict::History::new();
        let known = together::known(&history);
        for (subject, readings) in history.iter().filter(|(subject, _)| is_wanted(subject)) {
            let Some(last) = readings.last() else { continue };
            let mut shown = v1::Measured::from(last);
            shown.readings = u32::try_from(readings.len()).unwrap_or(u32::MAX);
            match (subject, &last.reading) {
                (Subject::Link(pair), Reading::Link(link)) => {
                    self.describe(pair, &mut shown);
                    let said = verdict::verdicts(&self.topology, pair, link, &history);
                    remarks.extend(said.into_iter().map(|text| ("verdict", text)));
                    let other = route::changed(pair, readings);
                    remarks.extend(other.into_iter().map(|text| ("route", text)));
                }
                (Subject::Node(node), _) => {
                    let together = known.get(node);
                    shown.together = together.map(Into::into);
                    let said = together.and_then(|together| together.words(node));
                    remarks.extend(said.map(|text| ("verdict", text)));
                }
                _ => {}
            }
            flagged.insert(subject.clone(), readings.clone());
            self.say(Event::Measured(shown)).await?;
        }
        if self.wanted.show {
            let taught = self.command(|reply| Command::Taught { reply }).await?;
            remarks.extend(taught.into_iter().map(|text| ("taught", text)));
        }
        let mut flags = verdict::flags(&self.topology, &flagged);
        flags.extend(capacity::flags(&self.topology, &flagged));
        remarks.extend(flags.into_iter().map(|text| ("flag", text)));
        // Of one kind together, each in the order of what it is about.
        let order = |kind: &str| {
            let kinds = ["verdict", "route", "taught", "flag"];
            kinds.iter().position(|one| *one == kind)
        };
        remarks.sort_by_key(|(kind, _)| order(kind));
        for (kind, text) in remarks {
            self.say(remark(kind, text)).await?;
        }
        Ok(())
    }

    /// The switches that the topology has between two.
    fn switches(&self, from: &NodeName, to: &NodeName) -> Vec<SwitchName> {
        self.topology
            .route(from, to)
            .map(|route| route.switches)
            .unwrap_or_default()
    }

    /// What the way passes.
    fn describe(&self, pair: &Pair, shown: &mut v1::Measured) {
        let Some(route) = self.topology.route(&pair.from, &pair.to) else {
            return;
        };
        let capacity = |edge: &EdgeId| self.topology.capacity(*edge);
        let narrowest = route.edges.iter().map(capacity).reduce(Rate::min);
        shown.wire_bytes_per_second = narrowest.map_or(0.0, Rate::bytes_per_second);
        shown.hops = route
            .edges
            .iter()
            .map(|edge| self.topology.edge_name(*edge))
            .collect();
    }
}

/// Why a node is left in peace.
pub(crate) fn busy_failure(why: &str) -> Failure {
    Failure::new(
        Code::Busy,
        format!("left in peace: {why}"),
        "try again later, or measure all the same with --busy-too",
    )
}

fn measurement(subject: Subject, reading: Reading) -> Measurement {
    Measurement {
        subject,
        unix_ms: crate::driver::unix_ms(),
        reading,
    }
}

fn secret() -> Option<(JobId, JobKey)> {
    let (mut id, mut key) = ([0; 16], [0; 32]);
    getrandom::fill(&mut id).ok()?;
    getrandom::fill(&mut key).ok()?;
    Some((JobId::from_random(id), JobKey(key)))
}
