//! What `stage bench` and `stage doctor` speak of: what is measured of nodes and of the ways between them.
//!
//! Pure, as all here: agents measure, the coordinator decides whom to ask ([`pairs`], [`rounds`]), remembers, and says
//! what follows ([`verdict`], [`facts`], [`crate::doctor`]).

pub mod capacity;
pub mod facts;
#[cfg(test)]
mod made;
mod pairs;
pub mod route;
pub mod together;
pub mod verdict;

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;
use std::time::Duration;

pub use pairs::{Cover, Pair, keeps, pairs, rounds};

use crate::assignment::Peer;
use crate::failure::Failure;
use crate::id::{CongestionControl, JobId, JobKey, NodeName, RootName, SwitchName};
use crate::plan::WindowLimits;
use crate::units::{ByteCount, Rate};

/// How much is moved for a measurement.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Enough to see what is wrong by a factor.
    Quick,
    /// Enough to plan with.
    #[default]
    Usual,
    /// Long bursts without pauses between them.
    Full,
}

impl Depth {
    /// What is written to and read from each root at most.
    pub fn disk_bytes(self) -> ByteCount {
        ByteCount(match self {
            Self::Quick => 64 << 20,
            Self::Usual => 2 << 30,
            Self::Full => 4 << 30,
        })
    }

    /// How long writing, and again reading, may take.
    pub fn disk_time(self) -> Duration {
        match self {
            Self::Quick => Duration::from_millis(500),
            Self::Usual => Duration::from_secs(3),
            Self::Full => Duration::from_secs(15),
        }
    }

    /// How long each hash and cipher is measured.
    pub fn cpu_time(self) -> Duration {
        match self {
            Self::Quick => Duration::from_millis(30),
            Self::Usual => Duration::from_millis(200),
            Self::Full => Duration::from_millis(500),
        }
    }

    /// How long a rate is measured, after the streams have come up to speed.
    pub fn burst(self) -> Duration {
        match self {
            Self::Quick => Duration::from_millis(200),
            Self::Usual => Duration::from_millis(800),
            Self::Full => Duration::from_secs(3),
        }
    }

    /// How long a root takes what comes from the network.
    pub fn keep_time(self) -> Duration {
        match self {
            Self::Quick => Duration::from_millis(400),
            Self::Usual => Duration::from_millis(1500),
            Self::Full => Duration::from_secs(10),
        }
    }

    /// For each second at full rate, so many without: others want the link too.
    pub fn rest(self) -> u32 {
        match self {
            Self::Quick | Self::Usual => 4,
            Self::Full => 0,
        }
    }

    /// Small messages there and back.
    pub fn echoes(self) -> u32 {
        match self {
            Self::Quick => 20,
            Self::Usual => 60,
            Self::Full => 200,
        }
    }

    /// The stream counts and windows of a sweep; a window of 0 leaves it to the kernel.
    pub fn grid(self) -> (&'static [u16], &'static [ByteCount]) {
        const KIB: u64 = 1 << 10;
        const QUICK: [ByteCount; 3] = [ByteCount(256 * KIB), ByteCount(4096 * KIB), ByteCount(0)];
        const ALL: [ByteCount; 6] = [
            ByteCount(64 * KIB),
            ByteCount(256 * KIB),
            ByteCount(1024 * KIB),
            ByteCount(4096 * KIB),
            ByteCount(16384 * KIB),
            ByteCount(0),
        ];
        match self {
            Self::Quick => (&[1, 4], &QUICK),
            Self::Usual | Self::Full => (&[1, 2, 4, 8, 16, 32], &ALL),
        }
    }

    /// The most streams that are tried.
    pub fn most_streams(self) -> u16 {
        match self {
            Self::Quick => 4,
            Self::Usual | Self::Full => crate::cost::MAX_STREAMS,
        }
    }
}

impl fmt::Display for Depth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Quick => "quick",
            Self::Usual => "usual",
            Self::Full => "full",
        })
    }
}

impl FromStr for Depth {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "quick" => Ok(Self::Quick),
            "usual" => Ok(Self::Usual),
            "full" => Ok(Self::Full),
            _ => Err(format!("{text:?} is not known: use quick, usual or full")),
        }
    }
}

/// Doubling the streams goes on while it brings more than this.
pub const WORTH_DOUBLING: f64 = 1.03;

/// One end of the way between two nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkProbe {
    /// Tells one measurement from another; drawn at random.
    pub id: JobId,
    /// Whoever holds it may connect.
    pub key: JobKey,
    /// What this end does.
    pub side: Side,
}

/// What an end does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Side {
    /// It lets `from` in, and does what it asks, until nobody waits for it any more.
    Answer {
        /// Who dials.
        from: NodeName,
    },
    /// It dials, and measures.
    Measure {
        /// Whom.
        peer: Peer,
        /// How much.
        depth: Depth,
        /// Not until more streams bring nothing, but each count of the grid with each of its windows.
        sweep: bool,
        /// At which ends what comes is written to disk, too.
        keep: Keep,
        /// What both ends' connections ask for; `None`: each host's own.
        control: Option<CongestionControl>,
    },
}

/// At which ends of a way what comes over it is written to disk, too.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Keep {
    /// At that of the one who dials.
    pub here: bool,
    /// At that of the one who answers.
    pub there: bool,
}

/// What a host says of itself.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct HostReport {
    /// Release of stage.
    pub version: String,
    /// Release of the kernel.
    pub kernel: String,
    /// Processors.
    pub cpus: u32,
    /// Load average over a minute.
    pub load: f64,
    /// The interface that carries the first data address.
    pub interface: String,
    /// What the interface says of its speed; virtual ones say nothing.
    pub nic: Option<Rate>,
    /// Its MTU in bytes; 0: not known.
    pub mtu: u32,
    /// What autotuning may reach: the third figures of `tcp_rmem` and `tcp_wmem`.
    pub windows: WindowLimits,
    /// `rmem_max`, `wmem_max`: what a socket may ask for.
    pub socket_windows: WindowLimits,
    /// `tcp_window_scaling`.
    pub window_scaling: bool,
    /// `netdev_max_backlog`, packets; 0: not known.
    pub backlog: u64,
    /// Congestion controls that sockets may ask for.
    pub congestion_controls: Vec<String>,
    /// The one that they have unless they ask.
    pub congestion_control: String,
    /// Files that the agent may have open.
    pub descriptors: u64,
    /// `tcp_mtu_probing`: its connections find out by themselves that large packets vanish on the way.
    pub mtu_probing: bool,
    /// How processors save power, where that costs speed ("powersave"); empty: they do not, or nobody says.
    pub governor: String,
    /// Its clock: Unix time in milliseconds, when it answered.
    pub unix_ms: u64,
    /// The addresses to which the node's own name resolves there; empty: it does not.
    pub resolves_to: Vec<String>,
    /// Its roots.
    pub roots: Vec<RootSpace>,
}

/// A root and its space.
#[derive(Debug, Clone, PartialEq)]
pub struct RootSpace {
    /// Its name.
    pub name: RootName,
    /// Its path, as text fit for a terminal.
    pub path: String,
    /// What an ordinary user may still write.
    pub free: ByteCount,
    /// All of the file system.
    pub total: ByteCount,
    /// Why it cannot be used, if so.
    pub failure: Option<Failure>,
}

/// What was measured on a node.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct NodeReading {
    /// The host.
    pub host: HostReport,
    /// Its disks.
    pub disks: Vec<DiskReading>,
    /// What one core hashes with BLAKE3.
    pub blake3: Rate,
    /// What one core hashes with SHA-256.
    pub sha256: Rate,
    /// What one core encrypts with AES-256-GCM, record by record as TLS has it.
    pub aes_gcm: Rate,
}

/// What was measured on a root.
#[derive(Debug, Clone, PartialEq)]
pub struct DiskReading {
    /// The root.
    pub root: RootName,
    /// Sequential, and on disk.
    pub write: Option<Rate>,
    /// Sequential, not from memory.
    pub read: Option<Rate>,
    /// Why it was not measured; may be empty.
    pub skipped: String,
}

impl NodeReading {
    /// The disk of the first root: where payloads land unless told otherwise.
    pub fn disk(&self) -> Option<&DiskReading> {
        self.disks.first()
    }
}

/// What was measured between two nodes.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct LinkReading {
    /// Round trips of small messages.
    pub rtt: Rtt,
    /// From the one that dialled, by streams.
    pub forward: Vec<StreamReading>,
    /// Towards it.
    pub backward: Vec<StreamReading>,
    /// From the network to the disk of the second, durable; `None` if that was not measured.
    pub forward_kept: Option<StreamReading>,
    /// From the network to the disk of the first.
    pub backward_kept: Option<StreamReading>,
    /// The switches passed, as the topology had it then.
    pub switches: Vec<SwitchName>,
    /// What was seen of the way by its packets.
    pub trace: Trace,
    /// The congestion control that connections asked for; `None`: each host's own.
    pub control: Option<CongestionControl>,
}

/// The way of packets between two nodes.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Trace {
    /// Who answered from which distance, the other node last if it was reached; `None`: nobody.
    pub routers: Vec<Option<IpAddr>>,
    /// The other node answered.
    pub reached: bool,
    /// The largest packet that gets there, IP's header included; 0: not known.
    pub mtu: u32,
    /// Larger ones vanish, and no router says so.
    pub swallows: bool,
    /// It was the second of the pair who looked, and the routers stand in the order from there.
    pub from_second: bool,
}

/// Round trips.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Rtt {
    /// The shortest.
    pub min: Duration,
    /// The middle one.
    pub median: Duration,
    /// From the first quarter to the third.
    pub spread: Duration,
}

impl Rtt {
    /// From single measurements, in any order. None: all zero.
    pub fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let at = |share: usize| times.get(times.len() * share / 4).copied();
        match (times.first(), at(1), at(2), at(3)) {
            (Some(min), Some(first), Some(median), Some(third)) => Self {
                min: *min,
                median,
                spread: third - first,
            },
            _ => Self::default(),
        }
    }
}

/// The rate of so many streams together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StreamReading {
    /// How many.
    pub streams: u16,
    /// What each was told to hold at most; 0: as the kernel finds right.
    pub window: ByteCount,
    /// Payload that arrived.
    pub rate: Rate,
    /// All that was sent, the run-up included.
    pub bytes: ByteCount,
    /// Segments that were sent again.
    pub retransmissions: u64,
}

impl StreamReading {
    /// The share of segments that were sent again, reckoned with 1448 bytes each.
    pub fn loss(&self) -> f64 {
        let segments = self.bytes.0 as f64 / 1448.0;
        if segments > 0.0 {
            self.retransmissions as f64 / segments
        } else {
            0.0
        }
    }
}

impl LinkReading {
    /// The fastest of a direction.
    pub fn best(readings: &[StreamReading]) -> Option<&StreamReading> {
        readings
            .iter()
            .reduce(|best, next| if next.rate > best.rate { next } else { best })
    }

    /// The smallest count of streams that comes within 3 % of the fastest.
    pub fn enough(readings: &[StreamReading]) -> Option<u16> {
        let best = Self::best(readings)?.rate;
        readings
            .iter()
            .find(|reading| reading.rate.times(WORTH_DOUBLING) >= best)
            .map(|reading| reading.streams)
    }

    /// The readings of a direction up to the last that carried more than those with fewer streams, and whether doubling
    /// it once more brought nothing: then the way is full, not the streams.
    pub fn rising(readings: &[StreamReading]) -> (&[StreamReading], bool) {
        let gains = |pair: &&[StreamReading]| pair[1].rate > pair[0].rate.times(WORTH_DOUBLING);
        let count = readings.windows(2).take_while(gains).count() + 1;
        (&readings[..count.min(readings.len())], count < readings.len())
    }

    /// The same as seen from the other end.
    #[must_use]
    pub fn reversed(&self) -> Self {
        Self {
            rtt: self.rtt,
            forward: self.backward.clone(),
            backward: self.forward.clone(),
            forward_kept: self.backward_kept,
            backward_kept: self.forward_kept,
            switches: self.switches.iter().rev().cloned().collect(),
            trace: Trace {
                from_second: !self.trace.from_second,
                ..self.trace.clone()
            },
            control: self.control.clone(),
        }
    }
}

/// What is measured: one of the things that have a history.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// A node.
    Node(NodeName),
    /// The way from the first to the second, both directions.
    Link(Pair),
}

/// Of what, when, and what.
#[derive(Debug, Clone, PartialEq)]
pub enum Reading {
    /// Of a node.
    Node(Box<NodeReading>),
    /// Of a way.
    Link(Box<LinkReading>),
}

/// A reading with its time.
#[derive(Debug, Clone, PartialEq)]
pub struct Measurement {
    /// Of what.
    pub subject: Subject,
    /// When: Unix time in milliseconds.
    pub unix_ms: u64,
    /// What.
    pub reading: Reading,
}

/// Whether a host is too busy to be measured, and why.
pub fn too_busy(host: &HostReport) -> Option<String> {
    // One runnable thread for each processor: what a measurement adds would wait, and what works there too.
    let most = f64::from(host.cpus.max(1));
    (host.load > most).then(|| format!("its load is {:.1} on {} processors", host.load, host.cpus.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(streams: u16, mb: f64) -> StreamReading {
        StreamReading {
            streams,
            window: ByteCount(0),
            rate: Rate::from_bytes_per_second(mb * 1e6),
            bytes: ByteCount(1_448_000),
            retransmissions: 2,
        }
    }

    #[test]
    fn round_trips_are_told_by_their_quarters() {
        let times: Vec<Duration> = [5, 1, 4, 2, 3, 100, 6, 7].map(Duration::from_millis).to_vec();
        let rtt = Rtt::of(times);
        assert_eq!(rtt.min, Duration::from_millis(1));
        assert_eq!(rtt.median, Duration::from_millis(5));
        assert_eq!(rtt.spread, Duration::from_millis(4));
        assert_eq!(Rtt::of(Vec::new()), Rtt::default());
        assert_eq!(
            Rtt::of(vec![Duration::from_millis(3)]).median,
            Duration::from_millis(3)
        );
    }

    #[test]
    fn the_fewest_streams_near_the_best_are_enough() {
        let rates = [reading(1, 100.0), reading(2, 190.0), reading(4, 194.0)];
        assert_eq!(LinkReading::best(&rates).unwrap().streams, 4);
        assert_eq!(LinkReading::enough(&rates), Some(2));
        assert_eq!(LinkReading::enough(&[]), None);
        assert!((rates[0].loss() - 0.002).abs() < 1e-9);
    }

    #[test]
    fn the_way_is_full_when_doubling_brings_nothing() {
        let rates = [reading(1, 100.0), reading(2, 190.0), reading(4, 194.0)];
        assert_eq!(LinkReading::rising(&rates), (&rates[..2], true));
        assert_eq!(LinkReading::rising(&rates[..2]), (&rates[..2], false));
        assert_eq!(LinkReading::rising(&rates[..1]), (&rates[..1], false));
        assert_eq!(LinkReading::rising(&[]), (&[][..], false));
    }

    #[test]
    fn a_busy_host_says_so() {
        let host = |load, cpus| HostReport {
            load,
            cpus,
            ..HostReport::default()
        };
        assert_eq!(too_busy(&host(0.9, 1)), None);
        assert!(too_busy(&host(4.5, 2)).unwrap().contains("4.5 on 2"));
    }

    #[test]
    fn depths_survive_their_words() {
        for depth in [Depth::Quick, Depth::Usual, Depth::Full] {
            assert_eq!(depth.to_string().parse(), Ok(depth));
        }
        assert!("deep".parse::<Depth>().is_err());
    }
}
