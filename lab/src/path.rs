//! A long path in user space: delay, rate, queue and loss between two bridges, for kernels without netem.
//!
//! A pair of TAP devices takes what either bridge sends there, one thread carries it to the other. The devices take
//! super-packets (one header for up to 64 KiB of TCP), so that a gigabit costs a fraction of a core; what happens to a
//! packet is decided for each MTU-sized segment inside, and a super-packet is cut where one is lost.
//!
//! [`frame`] reads and cuts packets, [`way`] decides, both pure; [`carrier`] does it.

mod carrier;
mod frame;
mod way;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use stage_core::units::{ByteCount, Rate};

pub(crate) use self::carrier::Carrier;

/// What a path does, in each direction alike.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Path {
    /// What it carries, with Ethernet's headers and gaps: "1 Gbit/s" is what Gigabit Ethernet carries.
    pub(crate) rate: Rate,
    /// From one end to the other: half of an RTT.
    pub(crate) delay: Duration,
    /// What waits at most before it; more is dropped.
    pub(crate) queue: ByteCount,
    /// The share of segments that is lost on the way, 0 to 1.
    pub(crate) loss: f64,
    /// Half duplex: what goes one way waits for what goes the other.
    pub(crate) takes_turns: bool,
}

impl Path {
    /// A path whose queue holds as much as is under way at full rate, so that one stream can fill it.
    pub(crate) fn new(rate: Rate, rtt: Duration, loss: f64) -> Self {
        let under_way = rate.bytes_per_second() * rtt.as_secs_f64();
        Self {
            rate,
            delay: rtt / 2,
            queue: ByteCount((under_way as u64).max(SHORTEST_QUEUE)),
            loss,
            takes_turns: false,
        }
    }
}

/// Some super-packets: a queue that does not hold one cuts all.
const SHORTEST_QUEUE: u64 = 512 << 10;

/// What has become of the segments on a path, both directions together.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    carried: AtomicU64,
    lost: AtomicU64,
    dropped: AtomicU64,
}

impl Tally {
    fn add(&self, fate: &way::Fate) {
        self.carried.fetch_add(fate.carried, Ordering::Relaxed);
        self.lost.fetch_add(fate.lost, Ordering::Relaxed);
        self.dropped.fetch_add(fate.dropped, Ordering::Relaxed);
    }

    pub(crate) fn counts(&self) -> Segments {
        Segments {
            carried: self.carried.load(Ordering::Relaxed),
            lost: self.lost.load(Ordering::Relaxed),
            dropped: self.dropped.load(Ordering::Relaxed),
        }
    }
}

/// Segments that a path has seen since it came up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Segments {
    /// Those that arrived, or will.
    pub carried: u64,
    /// Those that the path lost, as it was told to.
    pub lost: u64,
    /// Those that found the queue full.
    pub dropped: u64,
}
