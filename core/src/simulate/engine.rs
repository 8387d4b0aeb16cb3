//! Events, and what they do to hops. A hop goes by its child.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use super::shares::Shares;
use super::{Move, Trial, draw};
use crate::chunk::CHUNK;
use crate::cost;
use crate::plan::forecast::lay_hop;
use crate::plan::ground::{Ground, SOURCE};
use crate::topology::EdgeId;
use crate::units::{ByteCount, Rate};

/// Where a hop stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Not connected.
    Away,
    /// Connected; the parent has nothing whole yet.
    Waiting,
    /// The first bytes are on the way.
    Starting,
    /// Bytes arrive.
    Running,
    /// The last bytes are on the way.
    Ending,
    /// All is here.
    Complete,
    /// The node is gone, or has nobody left to ask.
    Lost,
}

/// One node's way to the payload.
#[derive(Debug)]
pub(super) struct Flow {
    pub(super) parent: usize,
    /// Resources that it uses while it runs: edges, and the sender's limit if there is one.
    pub(super) uses: Vec<usize>,
    /// Bytes a second; 0 unless running.
    pub(super) rate: f64,
    edges: Vec<EdgeId>,
    pub(super) fallbacks: std::vec::IntoIter<usize>,
    streams: u16,
    /// What it could carry alone, in bytes a second.
    alone: f64,
    /// What its disk does since a fault.
    pub(super) disk: f64,
    /// Where slow start stands.
    grown: f64,
    rtt: f64,
    /// From the parent's hand to the child's.
    latency: f64,
    pub(super) phase: Phase,
    /// Here, at `since`.
    bytes: f64,
    since: f64,
    /// What had come when it went to this parent.
    brought: f64,
    /// How far it stays behind an incomplete parent.
    lag: f64,
    pub(super) complete: Option<f64>,
    /// Events of an earlier attempt, or looks ahead from before a rate changed, are void.
    pub(super) attempt: u32,
    look: u32,
}

impl Flow {
    pub(super) fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }
}

/// What happens at a time. Of equal times in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum What {
    Fault,
    Dial,
    Connected,
    /// The first byte is here.
    Begin,
    /// Slow start has doubled.
    Grow,
    /// Something ends, or catches up.
    Look,
    /// The last byte is here.
    End,
}

/// The time in bits, which sort as the floats do; what; whom (for a fault: which); in which attempt or look.
type Event = Reverse<(u64, What, usize, u32)>;

/// The simulation as it stands.
pub(super) struct Engine<'a> {
    pub(super) flows: Vec<Flow>,
    /// Whom each node serves.
    pub(super) below: Vec<Vec<usize>>,
    pub(super) shares: Shares,
    pub(super) ground: &'a Ground<'a>,
    trial: &'a Trial<'a>,
    size: f64,
    /// Fewer bytes than this are none: floats end somewhere.
    none: f64,
    pub(super) source_disk: f64,
    edge_count: usize,
    carried: BTreeMap<EdgeId, f64>,
    pub(super) moves: Vec<Move>,
    queue: BinaryHeap<Event>,
    pub(super) now: f64,
    pub(super) seeds: Vec<usize>,
    pub(super) resources: Vec<usize>,
    faulty: Vec<usize>,
}

impl<'a> Engine<'a> {
    pub(super) fn new(ground: &'a Ground<'a>, trial: &'a Trial<'a>) -> Self {
        let nodes = ground.len();
        let edge_count = ground.topology.edge_count();
        let spread = trial.spread.clamp(0.0, 0.99);
        let part = |index: usize| 1.0 - spread * draw(trial.seed, index as u64);
        let mut capacities: Vec<f64> = (0u32..)
            .take(edge_count)
            .map(|edge| ground.goodput(EdgeId(edge)).bytes_per_second() * part(edge as usize))
            .collect();
        if ground.send_limit() < Rate::UNLIMITED {
            capacities.extend(std::iter::repeat_n(ground.send_limit().bytes_per_second(), nodes));
        }
        let flows = (0..nodes)
            .map(|node| Flow {
                parent: SOURCE,
                uses: Vec::new(),
                rate: 0.0,
                edges: Vec::new(),
                fallbacks: Vec::new().into_iter(),
                streams: 1,
                alone: 0.0,
                disk: ground.disk_write(node).bytes_per_second() * part(edge_count + node),
                grown: f64::INFINITY,
                rtt: 0.0,
                latency: 0.0,
                phase: if node == SOURCE {
                    Phase::Complete
                } else {
                    Phase::Lost
                },
                bytes: 0.0,
                since: 0.0,
                brought: 0.0,
                lag: 0.0,
                complete: None,
                attempt: 0,
                look: 0,
            })
            .collect();
        let size = ground.request.size.0 as f64;
        Self {
            flows,
            below: vec![Vec::new(); nodes],
            shares: Shares::new(capacities, nodes),
            ground,
            trial,
            size,
            none: (size * 1e-12).max(1.0),
            source_disk: f64::INFINITY,
            edge_count,
            carried: BTreeMap::new(),
            moves: Vec::new(),
            queue: BinaryHeap::new(),
            now: 0.0,
            seeds: Vec::new(),
            resources: Vec::new(),
            faulty: vec![SOURCE; trial.faults.len()],
        }
    }

    /// Takes a hop of the plan; false if there is no way for it.
    pub(super) fn plan_hop(
        &mut self,
        child: usize,
        parent: usize,
        fallbacks: Vec<usize>,
        streams: u16,
    ) -> bool {
        if !self.attach(child, parent, Some(streams)) {
            return false;
        }
        self.flows[child].fallbacks = fallbacks.into_iter();
        self.now = cost::INSTRUCT.as_secs_f64();
        self.connect(child);
        self.now = 0.0;
        true
    }

    /// Takes a fault.
    pub(super) fn expect(&mut self, fault: usize, node: usize, at: Duration) {
        self.faulty[fault] = node;
        self.push(at.as_secs_f64(), What::Fault, fault, 0);
    }

    /// When a node has published.
    pub(super) fn finish(&self, node: usize) -> Option<Duration> {
        let seconds = self.flows[node].complete? + cost::PUBLISH.as_secs_f64();
        Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }

    /// What each edge carried, and who moved.
    pub(super) fn account(mut self) -> (BTreeMap<EdgeId, ByteCount>, Vec<Move>) {
        for node in 1..self.flows.len() {
            self.book(node);
        }
        let whole = |(edge, bytes): (EdgeId, f64)| (edge, ByteCount(bytes.round() as u64));
        (
            self.carried
                .into_iter()
                .map(whole)
                .filter(|(_, bytes)| bytes.0 > 0)
                .collect(),
            self.moves,
        )
    }

    /// Runs until nothing happens any more.
    pub(super) fn run(&mut self) {
        while let Some(Reverse((bits, ..))) = self.queue.peek() {
            self.now = f64::from_bits(*bits);
            // What is due at the same time but for rounding is one step.
            let until = (self.now + self.now * 1e-12 + 1e-10).to_bits();
            while let Some(&Reverse((due, what, whom, number))) = self.queue.peek()
                && due <= until
            {
                self.queue.pop();
                self.happen(what, whom, number);
            }
            let seeds = std::mem::take(&mut self.seeds);
            let resources = std::mem::take(&mut self.resources);
            if !seeds.is_empty() || !resources.is_empty() {
                self.settle(&seeds, &resources);
            }
        }
    }

    pub(super) fn push(&mut self, at: f64, what: What, whom: usize, number: u32) {
        if at.is_finite() {
            self.queue
                .push(Reverse((at.max(0.0).to_bits(), what, whom, number)));
        }
    }

    fn happen(&mut self, what: What, whom: usize, number: u32) {
        if what == What::Fault {
            return self.strike(self.faulty[whom], self.trial.faults[whom].kind);
        }
        let flow = &mut self.flows[whom];
        let current = if what == What::Look {
            flow.look
        } else {
            flow.attempt
        };
        if number != current {
            return;
        }
        match what {
            What::Fault => {}
            What::Dial => self.dial(whom),
            What::Connected => {
                flow.phase = Phase::Waiting;
                self.wait(whom);
            }
            What::Begin => self.begin(whom),
            What::Grow => {
                // Where something else holds it back, its window grows no further, nor need it.
                let held = flow.rate < flow.grown * (1.0 - 1e-9);
                flow.grown = if held { f64::INFINITY } else { flow.grown * 2.0 };
                self.grow_on(whom);
                self.seeds.push(whom);
            }
            What::Look => self.look(whom),
            What::End => self.end(whom),
        }
    }

    pub(super) fn attach(&mut self, child: usize, parent: usize, streams: Option<u16>) -> bool {
        let Some(laid) = lay_hop(self.ground, parent, child) else {
            return false;
        };
        let flow = &mut self.flows[child];
        flow.streams = streams.unwrap_or_else(|| laid.carry.enough(laid.alone.0, laid.streams_cap));
        flow.alone = laid.alone.0.min(laid.carry.rate(flow.streams)).bytes_per_second();
        flow.uses = laid.edges.iter().map(|edge| edge.0 as usize).collect();
        if self.ground.send_limit() < Rate::UNLIMITED {
            flow.uses.push(self.edge_count + parent);
        }
        flow.edges = laid.edges;
        flow.rtt = laid.rtt.as_secs_f64();
        flow.latency = flow.rtt / 2.0;
        if parent != SOURCE {
            flow.latency += cost::check_delay().as_secs_f64();
        }
        flow.parent = parent;
        flow.brought = flow.bytes;
        flow.phase = Phase::Away;
        self.below[parent].push(child);
        true
    }

    pub(super) fn connect(&mut self, child: usize) {
        let flow = &self.flows[child];
        let rtt = Duration::try_from_secs_f64(flow.rtt).unwrap_or(Duration::MAX);
        let time = cost::handshake(rtt, self.ground.request.encrypted).as_secs_f64();
        self.push(self.now + time, What::Connected, child, flow.attempt);
    }

    /// What a node has now.
    fn holds(&self, node: usize) -> f64 {
        let flow = &self.flows[node];
        if flow.phase == Phase::Complete {
            return self.size;
        }
        (flow.bytes + flow.rate * (self.now - flow.since)).min(self.size)
    }

    /// Writes down what has come until now.
    pub(super) fn advance(&mut self, node: usize) {
        self.flows[node].bytes = self.holds(node);
        self.flows[node].since = self.now;
    }

    /// What a running hop may carry, the shared resources and its parent aside.
    pub(super) fn most(&self, node: usize) -> f64 {
        let flow = &self.flows[node];
        let most = flow.alone.min(flow.disk).min(flow.grown);
        if flow.parent == SOURCE {
            most.min(self.source_disk)
        } else {
            most
        }
    }

    /// How many bytes the parent has that the child could have and has not; `None` if the parent has all.
    fn gap(&self, node: usize) -> Option<f64> {
        let flow = &self.flows[node];
        (self.flows[flow.parent].phase != Phase::Complete)
            .then(|| self.holds(flow.parent) - flow.lag - self.holds(node))
    }

    /// Whether a child has all that its parent could have sent: then it is no faster than its parent.
    pub(super) fn follows(&self, node: usize) -> bool {
        self.gap(node).is_some_and(|gap| gap <= self.none)
    }

    /// What the parent must have before the child gets its first byte: a whole chunk on each stream.
    fn need(&self, node: usize) -> f64 {
        let flow = &self.flows[node];
        if self.flows[flow.parent].phase == Phase::Complete {
            return 0.0;
        }
        (flow.bytes + self.first_chunks(flow.parent)).min(self.size)
    }

    fn first_chunks(&self, parent: usize) -> f64 {
        f64::from(self.flows[parent].streams) * CHUNK as f64
    }

    /// Enters the next time at which this hop needs a look, from the rates as they are.
    pub(super) fn look_ahead(&mut self, node: usize) {
        let flow = &self.flows[node];
        let above = &self.flows[flow.parent];
        let at = match flow.phase {
            Phase::Waiting => {
                let missing = self.need(node) - self.holds(flow.parent);
                if missing <= self.none {
                    self.now
                } else {
                    self.now + missing / above.rate
                }
            }
            Phase::Running => {
                let left = self.size - self.holds(node);
                let end = if left <= self.none {
                    self.now
                } else {
                    self.now + left / flow.rate
                };
                match self.gap(node) {
                    Some(gap) if gap > self.none && flow.rate > above.rate * (1.0 + 1e-9) => {
                        end.min(self.now + gap / (flow.rate - above.rate))
                    }
                    _ => end,
                }
            }
            _ => return,
        };
        let flow = &mut self.flows[node];
        flow.look += 1;
        let look = flow.look;
        self.push(at, What::Look, node, look);
    }

    fn wait(&mut self, node: usize) {
        let flow = &self.flows[node];
        if self.need(node) - self.holds(flow.parent) <= self.none {
            let (at, attempt) = (self.now + flow.latency, flow.attempt);
            self.flows[node].phase = Phase::Starting;
            self.push(at, What::Begin, node, attempt);
        } else {
            self.look_ahead(node);
        }
    }

    fn begin(&mut self, node: usize) {
        let flow = &self.flows[node];
        let above = &self.flows[flow.parent];
        let ahead = self.holds(flow.parent) - flow.bytes;
        let lag = ahead.min(self.first_chunks(flow.parent) + above.rate * flow.latency);
        let initial = f64::from(flow.streams) * cost::INITIAL_WINDOW_BYTES / flow.rtt;
        let now = self.now;
        let flow = &mut self.flows[node];
        flow.phase = Phase::Running;
        flow.since = now;
        flow.lag = lag;
        flow.grown = if flow.rtt > 0.0 { initial } else { f64::INFINITY };
        self.shares.enter(node, &self.flows[node].uses);
        self.grow_on(node);
        self.seeds.push(node);
    }

    /// Slow start: doubles again after a round trip, until it holds nothing back.
    fn grow_on(&mut self, node: usize) {
        let flow = &mut self.flows[node];
        if flow.grown >= flow.alone.min(flow.disk) {
            flow.grown = f64::INFINITY;
            return;
        }
        let (at, attempt) = (self.now + flow.rtt, flow.attempt);
        self.push(at, What::Grow, node, attempt);
    }

    fn look(&mut self, node: usize) {
        match self.flows[node].phase {
            Phase::Waiting => self.wait(node),
            Phase::Running => {
                self.advance(node);
                let flow = &self.flows[node];
                // What a nanosecond brings is none, too: times end somewhere as well.
                if self.size - flow.bytes <= self.none.max(flow.rate * 1e-9) {
                    let above = &self.flows[flow.parent];
                    // The parent's last chunk takes its time to travel.
                    let earliest = above
                        .complete
                        .map_or(self.now, |complete| complete + flow.latency);
                    let attempt = flow.attempt;
                    self.stop(node, Phase::Ending);
                    self.flows[node].bytes = self.size;
                    self.push(earliest.max(self.now), What::End, node, attempt);
                } else {
                    self.seeds.push(node);
                }
            }
            _ => {}
        }
    }

    fn end(&mut self, node: usize) {
        self.book(node);
        let flow = &mut self.flows[node];
        flow.phase = Phase::Complete;
        flow.complete = Some(self.now);
        for at in 0..self.below[node].len() {
            let child = self.below[node][at];
            match self.flows[child].phase {
                Phase::Waiting => self.wait(child),
                Phase::Running => self.seeds.push(child),
                _ => {}
            }
        }
    }

    /// Takes a hop off the fabric.
    pub(super) fn stop(&mut self, node: usize, phase: Phase) {
        self.advance(node);
        let flow = &mut self.flows[node];
        if flow.phase == Phase::Running {
            self.shares.leave(node, &flow.uses);
            self.resources.extend_from_slice(&flow.uses);
        }
        let was_moving = flow.rate > 0.0;
        flow.rate = 0.0;
        flow.phase = phase;
        if was_moving {
            // Those that wait for it or follow it see it stand still.
            for at in 0..self.below[node].len() {
                let child = self.below[node][at];
                match self.flows[child].phase {
                    Phase::Running => self.seeds.push(child),
                    Phase::Waiting => self.look_ahead(child),
                    _ => {}
                }
            }
        }
    }

    /// Books what came over the edges of this parent.
    pub(super) fn book(&mut self, node: usize) {
        self.advance(node);
        let flow = &mut self.flows[node];
        let moved = flow.bytes - flow.brought;
        flow.brought = flow.bytes;
        for &edge in &flow.edges {
            *self.carried.entry(edge).or_default() += moved;
        }
    }
}
