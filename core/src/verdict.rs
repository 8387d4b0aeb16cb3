//! What limits a push, in words: from the rates of its hops and from where their threads wait, along disk, interface,
//! switch, interface, disk and processor.
//!
//! A hop names itself as the limit (its child's disk or processor, its parent's, the network between them), or says that
//! its parent has nothing to send: then the same is asked of the parent's own hop, up to the source. So a slow node is
//! named by all who wait for it, however far below.

mod slow;
#[cfg(test)]
mod tests;
pub(crate) mod words;

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::time::Duration;

pub use self::slow::{Fault, SlowHop, slow};
use crate::cost;
use crate::id::NodeName;
use crate::plan::WindowLimits;
use crate::topology::{EdgeId, Topology};
use crate::units::Rate;
use crate::waits::{Reading, Receiving, Sending};

/// Threads that waited and worked for less than this in all have seen too little.
const ENOUGH: Duration = Duration::from_millis(100);
/// This share of the time in which a connection has something to send makes a window its limit.
const WINDOW: f64 = 0.3;
/// Both ways together carry at least this share of what an interface has for each way, where it has only one for both.
const BOTH_WAYS: f64 = 0.75;
/// Threads that are at work so much of their time are held back by nothing else.
const BUSY: f64 = 0.75;
/// Rates that differ by no more than this are the same.
const ALIKE: f64 = 1.05;
/// The slower way is at least this share of the faster one there.
const BALANCED: f64 = 0.5;
/// Of so many hops it is looked up who else uses a link.
const HOPS: usize = 2000;

/// A push as its nodes have told of it, over some time.
#[derive(Debug, Clone, PartialEq)]
pub struct Seen {
    /// Where the payload is.
    pub source: NodeName,
    /// What comes is written into a pipe.
    pub piped: bool,
    /// How fast the source was read.
    pub read: Rate,
    /// Where the reading thread's time went.
    pub reading: Reading,
    /// `--limit`.
    pub limit: Option<Rate>,
    /// `--source-limit`.
    pub source_limit: Option<Rate>,
    /// Those that have begun.
    pub hops: Vec<SeenHop>,
}

/// One of its hops.
#[derive(Debug, Clone, PartialEq)]
pub struct SeenHop {
    /// Who receives.
    pub child: NodeName,
    /// From whom.
    pub parent: NodeName,
    /// It receives at present.
    pub moving: bool,
    /// How fast.
    pub rate: Rate,
    /// Over so many streams.
    pub streams: u16,
    /// Round trip.
    pub rtt: Option<Duration>,
    /// Where the time of the child's threads went.
    pub receiving: Receiving,
    /// And of the parent's, if it says.
    pub sending: Option<Sending>,
}

/// What limits a hop.
#[derive(Debug, Clone, PartialEq)]
pub enum Limit {
    /// The child's disk.
    DiskWrite(NodeName),
    /// The source's disk.
    SourceRead(NodeName),
    /// Who writes into the pipe.
    Pipe(NodeName),
    /// A parent reads from its disk what its child missed.
    ReadBack(NodeName),
    /// A processor.
    Processor(NodeName),
    /// `--limit`.
    SendLimit(NodeName),
    /// `--source-limit`.
    SourceLimit(NodeName),
    /// A link or an interface is full.
    Full(EdgeId),
    /// What a node sends and receives shares what it should have for each.
    HalfDuplex(NodeName),
    /// The receive window of the child, on each stream.
    ReceiveWindow(NodeName),
    /// The send buffer of the parent, on each stream.
    SendWindow(NodeName),
    /// Segments are lost.
    Loss,
    /// The network, and nobody knows why.
    Network,
}

/// What limits a push.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// What.
    pub limit: Limit,
    /// On the hop to this node.
    pub child: NodeName,
    /// For people.
    pub text: String,
}

/// What a hop says of itself.
enum Stop {
    Here(Limit),
    /// Its parent has nothing that it could send.
    Above,
}

/// Judges a push. `windows` gives what a host lets a connection hold, where it has said so. `None`: too little was seen.
pub fn judge(
    topology: &Topology,
    seen: &Seen,
    windows: &dyn Fn(&NodeName) -> Option<WindowLimits>,
) -> Option<Verdict> {
    let judge = Judge::new(topology, seen);
    let any_moves = seen.hops.iter().any(|hop| hop.moving);
    let candidates: Vec<usize> = (0..seen.hops.len())
        .filter(|at| seen.hops[*at].moving || !any_moves)
        .filter(|at| judge.has_seen_enough(*at))
        .collect();
    let rate = |at: usize| seen.hops[at].rate.bytes_per_second();
    let least = candidates.iter().map(|at| rate(*at)).reduce(f64::min)?;
    // Of those that are as slow as the slowest, the lowest: all above it are on its way up.
    let depths = judge.depths();
    let slowest = candidates
        .into_iter()
        .filter(|at| rate(*at) <= least * ALIKE)
        .max_by_key(|at| depths[*at])?;
    let (at, limit) = judge.walk(slowest)?;
    Some(Verdict {
        text: judge.words(at, &limit, windows),
        child: seen.hops[at].child.clone(),
        limit,
    })
}

/// What limits each hop by itself, in their order; `None` where that lies above it, or too little was seen.
pub fn each(topology: &Topology, seen: &Seen) -> Vec<Option<Limit>> {
    let judge = Judge::new(topology, seen);
    (0..seen.hops.len())
        .map(|at| match judge.stop(at)? {
            Stop::Here(limit) => Some(limit),
            Stop::Above => None,
        })
        .collect()
}

struct Judge<'a> {
    topology: &'a Topology,
    seen: &'a Seen,
    /// The hop by which a node receives.
    of_child: BTreeMap<&'a NodeName, usize>,
    /// What goes over each edge in all, by hops that are at rest and by those that move: reckoned if somebody asks.
    loads: [OnceCell<BTreeMap<EdgeId, f64>>; 2],
}

/// What threads wait for most; their processor, if they hardly wait at all.
fn main_of<T: Copy>(waits: &[(Duration, T)], (cpu, processor): (Duration, T)) -> Option<T> {
    let (most, what) = waits.iter().copied().max_by_key(|(time, _)| *time)?;
    let waited = waits
        .iter()
        .fold(Duration::ZERO, |sum, (time, _)| sum.saturating_add(*time));
    if share(cpu, waited.saturating_add(cpu)) >= BUSY {
        return Some(processor);
    }
    (!most.is_zero()).then_some(what)
}

/// A round trip, as people speak of it.
fn milliseconds(rtt: Duration) -> String {
    let ms = rtt.as_secs_f64() * 1e3;
    if ms < 10.0 {
        format!("{ms:.2} ms")
    } else {
        format!("{ms:.0} ms")
    }
}

fn share(part: Duration, of: Duration) -> f64 {
    if of.is_zero() {
        0.0
    } else {
        part.as_secs_f64() / of.as_secs_f64()
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Of {
    Upstream,
    Disk,
    Processor,
    Network,
    Limit,
    Idle,
}

impl<'a> Judge<'a> {
    fn new(topology: &'a Topology, seen: &'a Seen) -> Self {
        Self {
            topology,
            seen,
            of_child: seen
                .hops
                .iter()
                .enumerate()
                .map(|(at, hop)| (&hop.child, at))
                .collect(),
            loads: Default::default(),
        }
    }

    /// How many hops are above each.
    fn depths(&self) -> Vec<usize> {
        let hops = &self.seen.hops;
        let mut depths: Vec<Option<usize>> = vec![None; hops.len()];
        for from in 0..hops.len() {
            let mut way = Vec::new();
            let mut at = Some(from);
            let above = loop {
                match at {
                    None => break 0,
                    Some(hop) if depths[hop].is_some() => break depths[hop].unwrap_or(0) + 1,
                    // Two that ask each other, for a moment.
                    Some(hop) if way.contains(&hop) => break 0,
                    Some(hop) => {
                        way.push(hop);
                        at = self.of_child.get(&hops[hop].parent).copied();
                    }
                }
            };
            for (more, hop) in way.into_iter().rev().enumerate() {
                depths[hop] = Some(above + more);
            }
        }
        depths.into_iter().map(|depth| depth.unwrap_or(0)).collect()
    }

    fn has_seen_enough(&self, at: usize) -> bool {
        self.seen.hops[at].receiving.total() >= ENOUGH
    }

    /// Up from a hop to the one that is the limit.
    fn walk(&self, from: usize) -> Option<(usize, Limit)> {
        let mut at = from;
        for _ in 0..=self.seen.hops.len() {
            match self.stop(at)? {
                Stop::Here(limit) => return Some((at, limit)),
                Stop::Above => at = *self.of_child.get(&self.seen.hops[at].parent)?,
            }
        }
        None
    }

    fn stop(&self, at: usize) -> Option<Stop> {
        if !self.has_seen_enough(at) {
            return None;
        }
        let hop = &self.seen.hops[at];
        let here = |limit| Some(Stop::Here(limit));
        let receiving = &hop.receiving;
        match main_of(
            &[(receiving.upstream, Of::Upstream), (receiving.disk, Of::Disk)],
            (receiving.cpu, Of::Processor),
        )? {
            Of::Disk => return here(Limit::DiskWrite(hop.child.clone())),
            Of::Processor => return here(Limit::Processor(hop.child.clone())),
            _ => {}
        }
        let Some(sending) = &hop.sending else {
            return here(self.network(at, &Sending::default()));
        };
        let waits = [
            (sending.idle, Of::Idle),
            (sending.network, Of::Network),
            (sending.disk, Of::Disk),
            (sending.limit, Of::Limit),
        ];
        match main_of(&waits, (sending.cpu, Of::Processor))? {
            Of::Disk => here(if hop.parent == self.seen.source && !self.seen.piped {
                Limit::SourceRead(hop.parent.clone())
            } else {
                Limit::ReadBack(hop.parent.clone())
            }),
            Of::Limit => here(Limit::SendLimit(hop.parent.clone())),
            Of::Processor => here(Limit::Processor(hop.parent.clone())),
            Of::Idle if hop.parent != self.seen.source => Some(Stop::Above),
            Of::Idle => Some(Stop::Here(self.source()?)),
            _ => here(self.network(at, sending)),
        }
    }

    /// What holds the source's reading back.
    fn source(&self) -> Option<Limit> {
        let (seen, node) = (self.seen, self.seen.source.clone());
        let reading = &seen.reading;
        let waits = [
            (reading.disk, Of::Disk),
            (reading.limit, Of::Limit),
            (reading.idle, Of::Idle),
        ];
        match main_of(&waits, (reading.cpu, Of::Processor))? {
            Of::Disk if seen.piped => Some(Limit::Pipe(node)),
            Of::Disk => Some(Limit::SourceRead(node)),
            Of::Limit => Some(Limit::SourceLimit(node)),
            Of::Processor => Some(Limit::Processor(node)),
            // It would read more, and those below would take more: too short a time to say.
            _ => None,
        }
    }

    /// What is wrong with the network of a hop.
    fn network(&self, at: usize, sending: &Sending) -> Limit {
        let hop = &self.seen.hops[at];
        if let Some((edge, _)) = self.fullest(at).filter(|(_, share)| *share >= words::FULL) {
            return Limit::Full(edge);
        }
        let tcp = &sending.tcp;
        if share(tcp.receiver, tcp.busy) >= WINDOW {
            // Its child waits for bytes, so it does read: the window is full of what is under way.
            return Limit::ReceiveWindow(hop.child.clone());
        }
        if share(tcp.buffer, tcp.busy) >= WINDOW {
            return Limit::SendWindow(hop.parent.clone());
        }
        if let Some(node) = self.half_duplex(at) {
            return Limit::HalfDuplex(node);
        }
        if tcp.loss() > words::LOSSY {
            return Limit::Loss;
        }
        Limit::Network
    }

    /// The fullest edge of a hop's way, with all that the push sends over it, and its share of what the edge carries.
    fn fullest(&self, at: usize) -> Option<(EdgeId, f64)> {
        let hop = &self.seen.hops[at];
        let route = self.topology.route(&hop.parent, &hop.child)?;
        let loads = self.loads[usize::from(hop.moving)].get_or_init(|| self.load(hop.moving));
        // The first of equals: it is passed first.
        route
            .edges
            .into_iter()
            .map(|edge| {
                let others = loads.get(&edge).copied().unwrap_or(0.0);
                let rate = Rate::from_bytes_per_second(others.max(hop.rate.bytes_per_second()));
                (edge, words::share_of(self.topology, edge, rate))
            })
            .reduce(|most, next| if next.1 > most.1 { next } else { most })
    }

    /// What the hops that move, or those that do not, send over each edge, in bytes a second.
    fn load(&self, moving: bool) -> BTreeMap<EdgeId, f64> {
        let mut loads = BTreeMap::new();
        if self.seen.hops.len() > HOPS {
            return loads;
        }
        for hop in self.seen.hops.iter().filter(|hop| hop.moving == moving) {
            let way = self.topology.route(&hop.parent, &hop.child);
            for edge in way.into_iter().flat_map(|way| way.edges) {
                *loads.entry(edge).or_insert(0.0) += hop.rate.bytes_per_second();
            }
        }
        loads
    }

    /// Whether the hop waits for the network between its nodes.
    fn is_held_by_network(&self, at: usize) -> bool {
        let hop = &self.seen.hops[at];
        let upstream = share(hop.receiving.upstream, hop.receiving.total()) > 0.5;
        let network = |sending: &Sending| share(sending.network, sending.total()) > 0.5;
        upstream && hop.sending.as_ref().is_some_and(network)
    }

    /// The end of this hop that receives and sends at once, both held back by the network, and together no more than it
    /// should have for each way.
    fn half_duplex(&self, at: usize) -> Option<NodeName> {
        let hop = &self.seen.hops[at];
        [&hop.parent, &hop.child].into_iter().find_map(|node| {
            let into = *self.of_child.get(node)?;
            let out: Vec<usize> = (0..self.seen.hops.len())
                .filter(|other| self.seen.hops[*other].parent == *node)
                .collect();
            if !self.is_held_by_network(into) || !out.iter().any(|out| self.is_held_by_network(*out)) {
                return None;
            }
            let rate = |hop: &usize| self.seen.hops[*hop].rate.bytes_per_second();
            let (received, sent) = (rate(&into), out.iter().map(rate).sum::<f64>());
            // Who relays sends as fast as it receives, once it is its interface that holds both. One that got all of it long
            // before it could send it on is only slow at sending.
            if received.min(sent) < BALANCED * received.max(sent) {
                return None;
            }
            let sum = received + sent;
            let nic = self
                .topology
                .node(node)?
                .interfaces
                .iter()
                .map(|leg| cost::goodput(leg.nic).bytes_per_second())
                .fold(0.0, f64::max);
            (BOTH_WAYS..=1.1).contains(&(sum / nic)).then(|| node.clone())
        })
    }

    fn words(&self, at: usize, limit: &Limit, windows: &dyn Fn(&NodeName) -> Option<WindowLimits>) -> String {
        let hop = &self.seen.hops[at];
        let (parent, child) = (&hop.parent, &hop.child);
        let edge = words::narrowest(self.topology, parent, child);
        let rate = hop.rate.in_bytes();
        let could = edge.map_or_else(String::new, |edge| {
            words::could_carry(parent, child, cost::goodput(self.topology.capacity(edge)))
        });
        let limit_of = |limit: Option<Rate>| limit.unwrap_or(hop.rate).in_bytes();
        match limit {
            Limit::DiskWrite(node) => format!("{} {rate}{could}", words::writes(node)),
            Limit::SourceRead(node) => {
                let read = if self.seen.read > Rate::ZERO {
                    self.seen.read
                } else {
                    hop.rate
                };
                format!("{} {}{could}", words::reads(node), read.in_bytes())
            }
            Limit::Pipe(node) => format!("{node}: what writes into its pipe brings {rate}{could}"),
            Limit::ReadBack(node) => {
                format!("{node}: it reads back from its disk what {child} missed, {rate}{could}")
            }
            Limit::Processor(node) => format!("{node}: CPU-bound at {rate}{could}"),
            Limit::SendLimit(node) => {
                format!(
                    "{node}: sends at its limit of {} (--limit){could}",
                    limit_of(self.seen.limit)
                )
            }
            Limit::SourceLimit(node) => format!(
                "{node}: reads at its limit of {} (--source-limit){could}",
                limit_of(self.seen.source_limit)
            ),
            Limit::Full(edge) => {
                let share = self.fullest(at).map_or(1.0, |(_, share)| share);
                format!(
                    "{}: full, it carries {:.0} % of what it has ({})",
                    self.topology.edge_name(*edge),
                    (share * 100.0).min(100.0),
                    self.topology.capacity(*edge).in_bits()
                )
            }
            Limit::HalfDuplex(node) => format!(
                "{node}: what it sends and what it receives share its interface, {rate} each way{could}: is it half-duplex?"
            ),
            Limit::ReceiveWindow(node) => {
                let held = windows(node).map(|windows| {
                    let held = windows.receive;
                    (held, held.0 as f64 * cost::RECEIVE_WINDOW_SHARE)
                });
                format!("{node}: its receive window{}{could}", self.window(hop, held))
            }
            Limit::SendWindow(node) => {
                let held = windows(node).map(|windows| {
                    let held = windows.send;
                    (held, held.0 as f64 * cost::SEND_WINDOW_SHARE)
                });
                format!("{node}: its send window{}{could}", self.window(hop, held))
            }
            Limit::Loss | Limit::Network => {
                let carries = words::carries(parent, child, hop.rate);
                let loss = hop.sending.as_ref().map_or(0.0, |sending| sending.tcp.loss());
                match edge {
                    Some(edge) => {
                        format!(
                            "{carries}, {}",
                            words::of_edge(self.topology, edge, hop.rate, loss)
                        )
                    }
                    None => format!("{carries} within one host"),
                }
            }
        }
    }

    /// " of 4.00 MiB over 100 ms allows 284 Mbit/s".
    fn window(&self, hop: &SeenHop, held: Option<(crate::units::ByteCount, f64)>) -> String {
        let streams = match hop.streams {
            0 | 1 => String::new(),
            streams => format!(" on {streams} streams"),
        };
        let rtt = hop.rtt.filter(|rtt| !rtt.is_zero());
        match (held, rtt) {
            (Some((window, in_flight)), Some(rtt)) => {
                let allows = in_flight / rtt.as_secs_f64() * f64::from(hop.streams.max(1));
                format!(
                    " of {window} over {}{streams} allows {}",
                    milliseconds(rtt),
                    Rate::from_bytes_per_second(allows).in_bits()
                )
            }
            _ => format!(" is full{streams} at {}", hop.rate.in_bits()),
        }
    }
}
