//! What a shape will do: the rate of each hop, what limits it, and when each node has published.

use std::time::Duration;

use super::contention::{Contention, Lists, Stop};
use super::ground::{Ground, SOURCE};
use super::order::Walk;
use super::shapes::Parents;
use crate::chunk::CHUNK;
use crate::cost::{self, Carry, StreamBound};
use crate::id::CongestionControl;
use crate::topology::EdgeId;
use crate::units::Rate;

/// What limits a hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// An interface or a link, shared by all hops over it.
    Edge(EdgeId),
    /// One member of parallel links, for each stream.
    Member(EdgeId),
    /// How fast the source reads.
    SourceDisk,
    /// The limit put on the source's reading.
    SourceLimit,
    /// How fast a node writes.
    Disk(usize),
    /// The limit put on what a node sends.
    SendLimit(usize),
    /// What a push met on the way of the hop.
    Way { parent: usize, child: usize },
    /// What the hop's streams carry.
    Streams {
        parent: usize,
        child: usize,
        bound: StreamBound,
    },
}

impl Cause {
    /// The cause for people.
    pub(super) fn words(self, ground: &Ground<'_>) -> String {
        match self {
            Self::Edge(edge) => ground.topology.edge_name(edge),
            Self::Member(edge) => format!("one stream's share of {}", ground.topology.edge_name(edge)),
            Self::SourceDisk => format!("disk of {}", ground.name(SOURCE)),
            Self::SourceLimit => format!("read limit of {}", ground.name(SOURCE)),
            Self::Disk(node) => format!("disk of {}", ground.name(node)),
            Self::Way { parent, child } => format!(
                "what a push met from {} to {}",
                ground.name(parent),
                ground.name(child)
            ),
            Self::SendLimit(node) => format!("send limit of {}", ground.name(node)),
            Self::Streams { parent, child, bound } => {
                let (parent, child) = (ground.name(parent), ground.name(child));
                match bound {
                    StreamBound::Window => format!("TCP windows between {parent} and {child}"),
                    StreamBound::Loss => format!("loss between {parent} and {child}"),
                    StreamBound::Thread => format!("processor of {child}"),
                    StreamBound::Measured => {
                        format!("what a stream was measured to carry from {parent} to {child}")
                    }
                }
            }
        }
    }
}

/// The forecast of one hop.
#[derive(Debug, Clone)]
pub(crate) struct HopForecast {
    pub(super) streams: u16,
    pub(super) streams_cap: u16,
    pub(super) streams_least: u16,
    pub(super) control: Option<CongestionControl>,
    pub(super) depth: u16,
    pub(super) rate: Rate,
    pub(super) cause: Cause,
    pub(crate) finish: Duration,
}

/// The forecast of a whole plan.
#[derive(Debug)]
pub(super) struct Forecast {
    /// Of each node but the source: that of ordinal `n` at `n - 1`.
    pub(super) hops: Vec<HopForecast>,
    /// When the last node has published, and what its hop is limited by.
    pub(super) last: Option<(Duration, Cause)>,
    /// The mean of their finishes.
    pub(super) mean: Duration,
    pub(super) depth: u16,
    /// How often links between switches are crossed, by all hops together.
    pub(super) crossings: usize,
}

/// The hops as they lie in the fabric, before they meet.
struct Laid<'a> {
    uses: Lists,
    alone: Vec<(Rate, Cause)>,
    /// What their streams carry.
    carry: Vec<Carry<'a>>,
    streams_cap: Vec<u16>,
    /// Whether loss or a measurement says how many streams are needed.
    told: Vec<bool>,
    controls: Vec<Option<CongestionControl>>,
    rtt: Vec<Duration>,
    /// By edge number, then (under a send limit) one for each sending node.
    capacities: Vec<f64>,
    /// How many hops use each.
    users: Vec<f64>,
    edges: usize,
    crossings: usize,
}

impl Laid<'_> {
    /// What a hop carries, in bytes a second, when only its own way and streams hinder it, and all who use that way
    /// share it evenly.
    fn unhindered(&self, hop: usize, streams: u16) -> f64 {
        let (alone, _) = self.alone[hop];
        let streams = self.carry[hop].rate(streams);
        self.uses
            .get(hop)
            .iter()
            .map(|&resource| self.capacities[resource] / self.users[resource])
            .fold(alone.min(streams).bytes_per_second(), f64::min)
    }
}

/// Forecasts a shape.
pub(super) fn forecast(ground: &Ground<'_>, walk: &Walk, parents: &Parents) -> Forecast {
    let laid = lay_out(ground, parents);
    // A hop goes by its child: hop `n - 1` feeds node `n`, one from the source has no hop above it.
    let above: Vec<usize> =
        (1..parents.len()).map(|child| if parents[child] == SOURCE { child } else { parents[child] } - 1).collect();
    let alone: Vec<f64> = laid
        .alone
        .iter()
        .map(|(rate, _)| rate.bytes_per_second())
        .collect();
    let rates = Contention {
        parents: &above,
        alone: &alone,
        uses: &laid.uses,
        capacities: &laid.capacities,
    }
    .settle();
    time(ground, walk, parents, &laid, &rates)
}

fn lay_out<'a>(ground: &Ground<'a>, parents: &Parents) -> Laid<'a> {
    let hops = parents.len() - 1;
    let send_limit = ground.send_limit();
    let limited = send_limit < Rate::UNLIMITED;
    let mut laid = Laid {
        uses: Lists::default(),
        alone: Vec::with_capacity(hops),
        carry: Vec::with_capacity(hops),
        streams_cap: Vec::with_capacity(hops),
        told: Vec::with_capacity(hops),
        controls: Vec::with_capacity(hops),
        rtt: Vec::with_capacity(hops),
        capacities: Vec::new(),
        users: Vec::new(),
        edges: 0,
        crossings: 0,
    };
    let mut edge_lists = Lists::default();
    for (child, &parent) in parents.iter().enumerate().skip(1) {
        let hop = lay_hop(ground, parent, child).expect("nodes of one section have a route");
        laid.crossings += hop.crossings;
        edge_lists.push(hop.edges.iter().map(|edge| edge.0 as usize));
        laid.rtt.push(hop.rtt);
        laid.carry.push(hop.carry);
        laid.streams_cap.push(hop.streams_cap);
        laid.told.push(hop.told);
        laid.controls.push(hop.control);
        laid.alone.push(hop.alone);
    }

    laid.edges = (0..hops)
        .flat_map(|hop| edge_lists.get(hop))
        .max()
        .map_or(0, |last| last + 1);
    let mut used = vec![false; laid.edges];
    for hop in 0..hops {
        for &edge in edge_lists.get(hop) {
            used[edge] = true;
        }
    }
    laid.capacities = used
        .iter()
        .zip(0u32..)
        .map(|(&used, edge)| {
            if used {
                ground.goodput(EdgeId(edge)).bytes_per_second()
            } else {
                0.0
            }
        })
        .collect();
    if limited {
        laid.capacities
            .extend(std::iter::repeat_n(send_limit.bytes_per_second(), parents.len()));
    }
    laid.users = vec![0.0; laid.capacities.len()];
    for hop in 0..hops {
        let sender = limited.then_some(laid.edges + parents[hop + 1]);
        laid.uses.push(edge_lists.get(hop).iter().copied().chain(sender));
        for &resource in laid.uses.get(hop) {
            laid.users[resource] += 1.0;
        }
    }
    laid
}

/// One hop as it lies in the fabric, by itself.
pub(crate) struct LaidHop<'a> {
    pub(crate) edges: Vec<EdgeId>,
    /// Links between switches on the way.
    pub(crate) crossings: usize,
    pub(crate) rtt: Duration,
    /// What its streams carry.
    pub(crate) carry: Carry<'a>,
    pub(crate) streams_cap: u16,
    /// Whether loss or a measurement says how many streams are needed.
    pub(crate) told: bool,
    /// What they ask for; `None`: their host's own.
    pub(crate) control: Option<CongestionControl>,
    /// What the hop could carry if nobody else used its way, and what stops it then.
    pub(crate) alone: (Rate, Cause),
}

/// Lays one hop; `None` if no network joins both.
pub(crate) fn lay_hop<'a>(ground: &Ground<'a>, parent: usize, child: usize) -> Option<LaidHop<'a>> {
    let route = ground.route(parent, child)?;
    let control = ground.control(parent, child, &route);
    let path = ground.stream_path(parent, child, &route, control.as_ref());
    let (mut carry, bound) = Carry::new(&path, ground.measured(parent, &route, control.as_ref()));
    let mut cause = Cause::Streams { parent, child, bound };
    for &edge in &route.edges {
        if carry.limit(cost::goodput(ground.topology.member_capacity(edge))) {
            cause = Cause::Member(edge);
        }
    }
    let met = ground.met(parent, child);
    let with = |met: &CongestionControl| ground.resolved(parent, control.as_ref()).as_ref() == Some(met);
    let one = met.one.filter(|_| met.one_with.as_ref().is_none_or(with));
    if one.is_some_and(|one| carry.limit(one)) {
        cause = Cause::Way { parent, child };
    }
    let streams_cap = streams_cap(ground, path.loss);
    let mut alone = (carry.rate(streams_cap), cause);
    let mut also = |rate: Rate, cause: Cause| {
        if rate < alone.0 {
            alone = (rate, cause);
        }
    };
    if parent == SOURCE {
        also(ground.source_disk(), Cause::SourceDisk);
        also(ground.source_limit(), Cause::SourceLimit);
    }
    also(ground.disk_write(child), Cause::Disk(child));
    if let Some(carries) = met.carries {
        also(carries, Cause::Way { parent, child });
    }
    Some(LaidHop {
        crossings: route.switches.len().saturating_sub(1),
        edges: route.edges,
        rtt: path.rtt,
        told: path.loss > 0.0 || carry.is_measured(),
        control,
        carry,
        streams_cap,
        alone,
    })
}

/// One hop by itself, whatever else a plan lays; `None` for a local copy, and where no network joins both.
pub(super) fn new_hop(ground: &Ground<'_>, parent: usize, child: usize) -> Option<HopForecast> {
    if parent == child || child == SOURCE {
        return None;
    }
    let laid = lay_hop(ground, parent, child)?;
    let narrowest = laid
        .edges
        .iter()
        .map(|edge| ground.goodput(*edge))
        .reduce(Rate::min);
    let wanted = narrowest.map_or(laid.alone.0, |narrowest| narrowest.min(laid.alone.0));
    let streams = match ground.request.streams {
        Some(_) => laid.streams_cap,
        None => laid.carry.enough(wanted, laid.streams_cap),
    };
    Some(HopForecast {
        streams,
        streams_cap: laid.streams_cap,
        streams_least: if laid.told { streams } else { 1 },
        control: laid.control,
        depth: 1,
        rate: laid.carry.rate(streams).min(wanted),
        cause: laid.alone.1,
        finish: Duration::ZERO,
    })
}

/// The most streams a hop may have: those asked for, else what loss makes worth while; no more than there are chunks.
fn streams_cap(ground: &Ground<'_>, loss: f64) -> u16 {
    let most = ground.request.streams.map_or(cost::most_streams(loss), |asked| {
        asked.min(cost::MAX_STREAMS_LOSSY)
    });
    let chunks = u16::try_from(ground.request.size.0.div_ceil(CHUNK)).unwrap_or(u16::MAX);
    most.min(chunks).max(1)
}

/// What a node hands down to those below it.
#[derive(Clone, Copy)]
struct Above {
    rate: Rate,
    cause: Option<Cause>,
    streams: u16,
    depth: u16,
    /// When the first byte is here, from when all hops are connected.
    first: Duration,
    /// When the last byte is here, likewise; slow start is reckoned apart.
    end: Duration,
    handshake: Duration,
    ramp: Duration,
}

fn time(
    ground: &Ground<'_>,
    walk: &Walk,
    parents: &Parents,
    laid: &Laid<'_>,
    rates: &[(f64, Stop)],
) -> Forecast {
    let size = ground.request.size;
    let encrypted = ground.request.encrypted;
    let source = Above {
        rate: Rate::UNLIMITED,
        cause: None,
        streams: 1,
        depth: 0,
        first: Duration::ZERO,
        end: Duration::ZERO,
        handshake: Duration::ZERO,
        ramp: Duration::ZERO,
    };
    let mut reached = vec![source; parents.len()];
    let mut hops: Vec<Option<HopForecast>> = vec![None; parents.len() - 1];
    let mut last: Option<(Duration, Cause)> = None;
    let mut deepest = 0;
    let mut sum = 0.0;
    for child in walk.nodes() {
        let hop = child - 1;
        let parent = parents[child];
        let above = reached[parent];
        let (fair, stop) = rates[hop];
        let fair = Rate::from_bytes_per_second(fair);
        let streams_cap = laid.streams_cap[hop];
        let streams = match ground.request.streams {
            Some(_) => streams_cap,
            None => laid.carry[hop].enough(fair, streams_cap),
        };
        // The smallest count may be up to 3 % short of the fair share, and those below get no more than that.
        let carried = laid.carry[hop].rate(streams).min(fair);
        let (rate, cause) = match above.cause {
            Some(cause) if above.rate <= carried => (above.rate, cause),
            _ => (carried, cause_of(stop, laid)),
        };

        let rtt = laid.rtt[hop];
        let held = if parent == SOURCE {
            Duration::ZERO
        } else {
            cost::relay_delay(above.rate, above.streams, size)
        };
        let first = above.first.saturating_add(held).saturating_add(rtt / 2);
        let follows = above.cause.is_some() && above.rate <= carried;
        let end = if follows {
            // It has all but the last chunks when its parent has all, and these travel as fast as its own hop can: at
            // least as it went until then, so a slow hop far above costs its delay once and not at every hop.
            let own = laid.unhindered(hop, streams).max(rate.bytes_per_second());
            let rest = cost::relay_delay(Rate::from_bytes_per_second(own), above.streams, size);
            above.end.saturating_add(rest).saturating_add(rtt / 2)
        } else {
            first.saturating_add(size.time_at(rate))
        };
        let here = Above {
            rate,
            cause: Some(cause),
            streams,
            depth: above.depth.saturating_add(1),
            first,
            end,
            handshake: above.handshake.max(cost::handshake(rtt, encrypted)),
            ramp: above.ramp.max(cost::ramp(rate, rtt, streams, size)),
        };
        reached[child] = here;
        let finish = [cost::INSTRUCT, here.handshake, here.end, here.ramp, cost::PUBLISH]
            .into_iter()
            .fold(Duration::ZERO, Duration::saturating_add);
        if last.is_none_or(|(latest, _)| finish > latest) {
            last = Some((finish, cause));
        }
        deepest = deepest.max(here.depth);
        sum += finish.as_secs_f64();
        hops[hop] = Some(HopForecast {
            streams,
            streams_cap,
            streams_least: if laid.told[hop] { streams } else { 1 },
            control: laid.controls[hop].clone(),
            depth: here.depth,
            rate,
            cause,
            finish,
        });
    }
    let mean = sum / hops.len().max(1) as f64;
    Forecast {
        mean: Duration::try_from_secs_f64(mean).unwrap_or(Duration::MAX),
        hops: hops
            .into_iter()
            .map(|hop| hop.expect("the walk comes by every node"))
            .collect(),
        last,
        depth: deepest,
        crossings: laid.crossings,
    }
}

fn cause_of(stop: Stop, laid: &Laid<'_>) -> Cause {
    match stop {
        Stop::Alone(hop) => laid.alone[hop].1,
        Stop::Shared(at) if at < laid.edges => {
            Cause::Edge(EdgeId(u32::try_from(at).expect("it was an edge's number")))
        }
        Stop::Shared(at) => Cause::SendLimit(at - laid.edges),
    }
}

/// The source's own copy under another path, when it is a target itself: one thread, no network.
pub(crate) fn local_copy(ground: &Ground<'_>) -> HopForecast {
    let thread = Rate::from_bytes_per_second(cost::THREAD_RATE_BYTES_PER_SECOND);
    let bound = StreamBound::Thread;
    let limits = [
        (ground.source_disk(), Cause::SourceDisk),
        (ground.source_limit(), Cause::SourceLimit),
        (ground.disk_write(SOURCE), Cause::Disk(SOURCE)),
    ];
    let (mut rate, mut cause) = (
        thread,
        Cause::Streams {
            parent: SOURCE,
            child: SOURCE,
            bound,
        },
    );
    for (limit, why) in limits {
        if limit < rate {
            (rate, cause) = (limit, why);
        }
    }
    let finish = ground
        .request
        .size
        .time_at(rate)
        .saturating_add(cost::INSTRUCT)
        .saturating_add(cost::PUBLISH);
    HopForecast {
        streams: 1,
        streams_cap: 1,
        streams_least: 1,
        control: None,
        depth: 1,
        rate,
        cause,
        finish,
    }
}

/// The time that no plan could beat: each target needs the whole payload through its own interface onto its own disk,
/// and all of it leaves the source at least once, over one of its interfaces; nothing comes sooner than `latency`.
///
/// What our own programs take (planning, handshakes, publishing) is not in it: a better program could beat that.
pub(super) fn bound(ground: &Ground<'_>, latency: Duration) -> Duration {
    // The fastest leg, sending or receiving.
    let interface = |ordinal: usize, sends: bool| {
        (0..ground.node(ordinal).interfaces.len())
            .filter_map(|leg| ground.topology.interface_edge(ground.name(ordinal), leg))
            .map(|edge| ground.goodput(if sends { edge } else { edge.reverse() }))
            .reduce(|a, b| if a < b { b } else { a })
            .unwrap_or(Rate::UNLIMITED)
    };
    let read = ground.source_disk().min(ground.source_limit());
    let leaving = read.min(interface(SOURCE, true)).min(ground.send_limit());
    let mut bound = Duration::ZERO;
    for &seat in &ground.seats {
        let (rate, latency) = if seat == SOURCE {
            (read.min(ground.disk_write(SOURCE)), Duration::ZERO)
        } else {
            (
                leaving.min(interface(seat, false)).min(ground.disk_write(seat)),
                latency,
            )
        };
        bound = bound.max(ground.request.size.time_at(rate).saturating_add(latency));
    }
    bound
}
