//! The formulas behind a forecast, each with its source. One pure place: the planner and the child that chooses its
//! stream count apply the same function. What our own programs take stands in `own`.

mod carry;
mod own;

use std::time::Duration;

pub(crate) use self::carry::Carry;
use self::own::HASH_BYTES_PER_SECOND;
pub use self::own::{ENCRYPTED_THREAD_RATE_BYTES_PER_SECOND, SWITCH_RTT, THREAD_RATE_BYTES_PER_SECOND};
pub(crate) use self::own::{INSTRUCT, PUBLISH};
use crate::chunk::{BLOCK, CHUNK};
use crate::id::CongestionControl;
use crate::plan::WindowLimits;
use crate::units::{ByteCount, Rate};

/// The share of a link's bits that is TCP payload: of each 1538 bytes that Ethernet spends on a full frame at MTU
/// 1500 (14 header, 4 check, 8 preamble, 12 gap around 1500) 1448 are payload, after 20 bytes of IPv4 and 32 of TCP
/// with timestamps (RFC 7323). So 1 Gbit/s carries the familiar 941 Mbit/s.
pub const WIRE_EFFICIENCY: f64 = 1448.0 / 1538.0;

/// Payload bytes of a full TCP segment at MTU 1500 with timestamps.
pub const SEGMENT_BYTES: f64 = 1448.0;

/// What a new connection may send before the first answer: 10 segments of 1460 bytes (RFC 6928).
pub(crate) const INITIAL_WINDOW_BYTES: f64 = 14_600.0;

/// The share of its maximal send window (`tcp_wmem`) that a stream has in flight: a stream with 4 MiB holds
/// 3.5 MB (284 Mbit/s at 100 ms), measured.
pub(crate) const SEND_WINDOW_SHARE: f64 = 0.85;

/// The share of its maximal receive window (`tcp_rmem`) that a receiver advertises: Linux reckons the other half
/// with overhead (`tcp_adv_win_scale` = 1).
pub(crate) const RECEIVE_WINDOW_SHARE: f64 = 0.5;

/// The constant of Mathis, Semke, Mahdavi, Ott (1997), "The macroscopic behavior of the TCP congestion avoidance
/// algorithm": √(3/2).
const MATHIS: f64 = 1.22;

/// The factor of RFC 9438, section 5.1, for cubic's mean window in segments, `1.054 × (RTT / s)^¾ / loss^¾`, with C = 0.4
/// and β = 0.7.
const CUBIC_WINDOW: f64 = 1.054;

/// The congestion control that goes by its own model of the path.
pub(crate) const BBR: &str = "bbr";

/// Linux' own congestion control.
pub(crate) const CUBIC: &str = "cubic";

/// Up to this RTT a path holds so little that nobody needs a model of it.
pub(crate) const NEAR: Duration = Duration::from_millis(1);

/// So many streams that slow down at each loss are no burden: only where they do not fill a way, another control is better.
pub(crate) const FEW_STREAMS: f64 = 4.0;

/// Rounds in which a stream whose window is full sends nothing new because a segment is missing: one until the sender
/// hears of it, one until it is there. See [`StreamPath::rate`].
const MISSING_ROUNDS: f64 = 2.0;

/// The least round trip of a stream at work, whatever that of a single packet: hosts send and acknowledge in bursts. Measured
/// over 0.1 ms with 0.1 % loss: 706 Mbit/s, which is Mathis' bound at 0.63 ms; half a millisecond is 64 KiB at 1 Gbit/s.
const BURSTS_RTT: Duration = Duration::from_micros(500);

/// From this share of segments sent again on, loss counts: a burst into a full queue costs a few on any way.
pub(crate) const LOSSY: f64 = 1e-4;

/// How near to the best a stream count must come: more streams for less gain are not worth their threads.
const NEAR_ENOUGH: f64 = 0.97;

/// The most streams where nothing is lost.
pub const MAX_STREAMS: u16 = 32;

/// The most streams where loss is the limit.
pub const MAX_STREAMS_LOSSY: u16 = 64;

/// What a link of this wire rate carries of payload.
pub fn goodput(wire: Rate) -> Rate {
    wire.times(WIRE_EFFICIENCY)
}

/// What holds a single stream back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamBound {
    /// Window over RTT.
    Window,
    /// What is lost on the way.
    Loss,
    /// The thread that moves its bytes.
    Thread,
    /// Whatever it was, a measurement met it.
    Measured,
}

/// What a congestion control makes of loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Control {
    /// A sign of a full queue: it slows down at each (cubic, reno).
    Loss,
    /// Nothing: it goes by its model of the path (BBR).
    Model,
}

impl Control {
    /// What one of this name does; one that nobody knows slows down.
    pub fn of(name: &CongestionControl) -> Self {
        if name.as_str().starts_with(BBR) {
            Self::Model
        } else {
            Self::Loss
        }
    }
}

/// The path of one stream, as far as its rate depends on it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StreamPath {
    /// Round trip.
    pub rtt: Duration,
    /// The sender's window limits.
    pub sender: WindowLimits,
    /// The receiver's window limits.
    pub receiver: WindowLimits,
    /// Loss from 0 to 1.
    pub loss: f64,
    /// What the sender makes of it.
    pub control: Control,
    /// The bytes are encrypted.
    pub encrypted: bool,
}

fn thread_rate(encrypted: bool) -> f64 {
    if encrypted {
        ENCRYPTED_THREAD_RATE_BYTES_PER_SECOND
    } else {
        THREAD_RATE_BYTES_PER_SECOND
    }
}

impl StreamPath {
    /// What one stream carries, and what stops it from carrying more: the least of window over RTT, what loss allows, and
    /// what a thread moves.
    ///
    /// A control that slows down at each loss has the larger of two mean windows: Reno's by Mathis' bound
    /// (1.22 / √loss segments), which cubic never falls below, and cubic's own (RFC 9438, section 5.1). With one that does
    /// not, a full window still stands still from a lost segment on until it was sent again and acknowledged: with
    /// `lost = 1 - exp(-loss × segments of a window)`, the chance that a window loses any, a window takes
    /// `1 + 2 × lost` round trips. Measured at 100 ms with 3.5 MB in flight and 0.01 %: 189 Mbit/s for 284 without loss,
    /// where this says 198. Several losses in one window are mended together: at 0.1 % a stream carries up to twice as
    /// much as this says.
    pub fn rate(&self) -> (Rate, StreamBound) {
        let rtt = self.rtt.as_secs_f64();
        let window = (SEND_WINDOW_SHARE * self.sender.send.0 as f64)
            .min(RECEIVE_WINDOW_SHARE * self.receiver.receive.0 as f64)
            .max(SEGMENT_BYTES);
        let thread = thread_rate(self.encrypted);
        let mut rate = thread;
        let mut bound = StreamBound::Thread;
        if rtt > 0.0 {
            if window / rtt < rate {
                (rate, bound) = (window / rtt, StreamBound::Window);
            }
            let loss = self.loss.clamp(0.0, 1.0);
            let with_loss = match self.control {
                Control::Loss => {
                    let rtt = rtt.max(BURSTS_RTT.as_secs_f64());
                    let reno = MATHIS / loss.sqrt();
                    let cubic = CUBIC_WINDOW * (rtt / loss).powf(0.75);
                    SEGMENT_BYTES / rtt * reno.max(cubic)
                }
                Control::Model => {
                    let lost = 1.0 - (-loss * window / SEGMENT_BYTES).exp();
                    window / rtt / (1.0 + MISSING_ROUNDS * lost)
                }
            };
            if loss > 0.0 && with_loss < rate {
                (rate, bound) = (with_loss, StreamBound::Loss);
            }
        }
        (Rate::from_bytes_per_second(rate), bound)
    }
}

/// How many streams a hop needs to carry `wanted`: the smallest count within 3 % of the best, `cap` at most, and
/// never more than [`MAX_STREAMS`] ([`MAX_STREAMS_LOSSY`] with loss); at least one.
///
/// A thread is reckoned at its encrypted rate, which is the usual case: at worst that is one stream too many.
pub fn streams(wanted: Rate, path: &StreamPath, cap: u16) -> u16 {
    let path = StreamPath {
        encrypted: true,
        ..*path
    };
    streams_of(path.rate().0, wanted, cap.min(most_streams(path.loss)))
}

/// The most streams that a hop with this loss may have.
pub fn most_streams(loss: f64) -> u16 {
    if loss > 0.0 {
        MAX_STREAMS_LOSSY
    } else {
        MAX_STREAMS
    }
}

/// The smallest count of streams of `one` each that comes within 3 % of `wanted`, or of what `cap` of them carry.
pub(crate) fn streams_of(one: Rate, wanted: Rate, cap: u16) -> u16 {
    let cap = cap.max(1);
    let one = one.bytes_per_second();
    let best = wanted.bytes_per_second().min(one * f64::from(cap));
    // Less a hair, so that an exact multiple is not rounded up to one more.
    let needed = (NEAR_ENOUGH * best / one - 1e-9).ceil();
    // A quotient that is no number (nothing can be carried at all) casts to 0.
    (needed as u16).clamp(1, cap)
}

/// How long a hop takes until data can flow. The control connection comes first, then all data streams at once; each
/// needs a TCP handshake and a hello, and encrypted one round more (TLS 1.3).
pub(crate) fn handshake(rtt: Duration, encrypted: bool) -> Duration {
    rtt.saturating_mul(if encrypted { 6 } else { 4 })
}

/// How long slow start takes to reach `rate`: RTT × log2(bytes in flight / initial windows of all streams). A payload
/// smaller than what the path holds never gets that far.
pub(crate) fn ramp(rate: Rate, rtt: Duration, streams: u16, size: ByteCount) -> Duration {
    let in_flight = (rate.bytes_per_second() * rtt.as_secs_f64()).min(size.0 as f64);
    let doublings = (in_flight / (f64::from(streams) * INITIAL_WINDOW_BYTES)).log2();
    Duration::try_from_secs_f64(rtt.as_secs_f64() * doublings.max(0.0)).unwrap_or(Duration::MAX)
}

/// How long a relay holds the first bytes back: until a chunk on each of its streams is whole, and the last block of
/// it is hashed.
pub(crate) fn relay_delay(rate: Rate, streams: u16, size: ByteCount) -> Duration {
    let first = ByteCount(size.0.min(u64::from(streams) * CHUNK));
    first.time_at(rate).saturating_add(check_delay())
}

/// How long the last block of a chunk takes to hash.
pub(crate) fn check_delay() -> Duration {
    Duration::from_secs_f64(BLOCK as f64 / HASH_BYTES_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULTS: (u64, u64) = (6 << 20, 4 << 20);

    fn windows((receive, send): (u64, u64)) -> WindowLimits {
        WindowLimits {
            receive: ByteCount(receive),
            send: ByteCount(send),
        }
    }

    fn mbit(rate: Rate) -> f64 {
        rate.bits_per_second() / 1e6
    }

    pub(super) fn path(rtt_ms: u64, loss: f64) -> StreamPath {
        let wide = windows((32 << 20, 4 << 20));
        StreamPath {
            rtt: Duration::from_millis(rtt_ms),
            sender: wide,
            receiver: wide,
            loss,
            control: Control::Loss,
            encrypted: false,
        }
    }

    #[test]
    fn a_gigabit_link_carries_941_megabit() {
        let wire: Rate = "1 Gbit/s".parse().unwrap();
        assert_eq!(goodput(wire).in_bits().to_string(), "941 Mbit/s");
    }

    #[test]
    fn the_window_bounds_a_stream_on_a_long_path() {
        // Measured: 284 Mbit/s at 100 ms with 4 MiB to send and 32 MiB to receive.
        let (rate, bound) = path(100, 0.0).rate();
        assert!((mbit(rate) - 284.0).abs() < 3.0, "{}", mbit(rate));
        assert_eq!(bound, StreamBound::Window);
        // Linux defaults: half of 6 MiB is less than 0.85 of 4 MiB.
        let usual = windows(DEFAULTS);
        let (rate, _) = StreamPath {
            sender: usual,
            receiver: usual,
            ..path(100, 0.0)
        }
        .rate();
        assert!((rate.bytes_per_second() - f64::from(3 << 20) * 10.0).abs() < 1.0);
        // Each end counts with its own side only.
        let (swapped, _) = StreamPath {
            receiver: usual,
            ..path(100, 0.0)
        }
        .rate();
        assert_eq!(rate, swapped);
    }

    #[test]
    fn the_bounds_by_loss_are_the_published_ones() {
        // Mathis: MSS/RTT × 1.22/√p with 1448 bytes, 100 ms and 0.1 %: 4.47 Mbit/s.
        let (rate, bound) = path(100, 0.001).rate();
        assert!((mbit(rate) - 4.469).abs() < 0.01, "{}", mbit(rate));
        assert_eq!(bound, StreamBound::Loss);
        // Four times the loss, half the rate; half the RTT, twice.
        assert!((mbit(path(100, 0.004).rate().0) * 2.0 - mbit(rate)).abs() < 1e-9);
        assert!((mbit(path(50, 0.001).rate().0) / 2.0 - mbit(rate)).abs() < 1e-9);
        // RFC 9438, table 2 (RTT of 0.1 s, C = 0.4): mean windows of 187, 1054 and 5926 segments.
        for (loss, segments) in [(1e-4, 187.0), (1e-5, 1054.0)] {
            let (rate, bound) = path(100, loss).rate();
            let window = rate.bytes_per_second() * 0.1 / SEGMENT_BYTES;
            assert!((window / segments - 1.0).abs() < 0.01, "{loss}: {window}");
            assert_eq!(bound, StreamBound::Loss);
        }
        assert_eq!(
            path(100, 1e-6).rate().1,
            StreamBound::Window,
            "5926 segments are more"
        );
    }

    #[test]
    fn loss_costs_a_model_based_control_two_rounds_a_window() {
        let bbr = |loss| StreamPath {
            control: Control::Model,
            ..path(100, loss)
        };
        // Measured at 0.01 %: 189 Mbit/s each with 4 streams, 178 with 5.
        let (rate, bound) = bbr(1e-4).rate();
        assert!((mbit(rate) - 198.0).abs() < 1.0, "{}", mbit(rate));
        assert_eq!(bound, StreamBound::Loss);
        // Every window loses some: a third.
        let (none, bound) = bbr(0.0).rate();
        assert_eq!(bound, StreamBound::Window);
        assert!((mbit(bbr(0.5).rate().0) * 3.0 - mbit(none)).abs() < 1e-9);
        // Where the window is not the limit, loss is none either.
        assert_eq!(
            StreamPath {
                rtt: SWITCH_RTT,
                ..bbr(1e-4)
            }
            .rate()
            .1,
            StreamBound::Thread
        );
        let gigabit = goodput("1 Gbit/s".parse().unwrap());
        assert_eq!(streams(gigabit, &bbr(1e-4), 64), 5);
        assert_eq!(
            streams(gigabit, &path(100, 1e-4), 64),
            43,
            "cubic has 21.7 Mbit/s"
        );
    }

    #[test]
    fn over_a_short_way_bursts_make_the_round_trip() {
        let near = StreamPath {
            rtt: Duration::from_micros(100),
            ..path(0, 0.001)
        };
        let (rate, bound) = near.rate();
        assert!((mbit(rate) - 894.0).abs() < 1.0, "{}", mbit(rate));
        assert_eq!(bound, StreamBound::Loss);
        assert_eq!(streams(goodput("1 Gbit/s".parse().unwrap()), &near, 64), 2);
    }

    #[test]
    fn inside_a_cluster_the_thread_is_the_bound() {
        let (rate, bound) = StreamPath {
            rtt: SWITCH_RTT,
            ..path(0, 0.0)
        }
        .rate();
        assert_eq!((rate.bytes_per_second(), bound), (1e9, StreamBound::Thread));
        let (rate, _) = StreamPath {
            encrypted: true,
            ..path(0, 0.0)
        }
        .rate();
        assert_eq!(rate.bytes_per_second(), 0.8e9);
    }

    #[test]
    fn streams_fill_a_long_fat_path() {
        let count =
            |rate: &str, rtt_ms, loss, cap| streams(goodput(rate.parse().unwrap()), &path(rtt_ms, loss), cap);
        assert_eq!(count("1 Gbit/s", 0, 0.0, 32), 1);
        // 941 Mbit/s over 285: 3.3, of which 97 % are 3.2.
        assert_eq!(count("1 Gbit/s", 100, 0.0, 32), 4);
        assert_eq!(count("1 Gbit/s", 10, 0.0, 32), 1);
        assert_eq!(
            count("10 Gbit/s", 100, 0.0, 64),
            32,
            "33 would be needed: capped without loss"
        );
        assert_eq!(
            count("1 Gbit/s", 100, 0.001, 64),
            63,
            "64 is the cap, 63 come within 3 % of it"
        );
        assert_eq!(count("1 Gbit/s", 100, 0.001, 8), 8);
        assert_eq!(count("1 Gbit/s", 100, 0.0, 0), 1);
        // FDT reports 9.2 Gbit/s from memory to memory with 35 streams of 2 MB buffers at 93 ms: about 1.3 times the
        // buffer was in flight. The same window here asks for as many, and stops at the cap.
        let fdt = windows(((2e6 * 1.3 / 0.5) as u64, (2e6 * 1.3 / 0.85) as u64));
        let there = StreamPath {
            sender: fdt,
            receiver: fdt,
            ..path(93, 0.0)
        };
        let wanted = "9.2 Gbit/s".parse().unwrap();
        let uncapped = streams_of(there.rate().0, wanted, 100);
        assert!((30..=42).contains(&uncapped), "{uncapped}");
        assert_eq!(streams(wanted, &there, 64), MAX_STREAMS);
    }

    #[test]
    fn stream_counts_are_smallest_and_near_enough() {
        let usual = windows(DEFAULTS);
        for rtt_ms in [0, 1, 5, 20, 100, 300] {
            for loss in [0.0, 1e-6, 1e-4, 0.01, 1.0] {
                for wanted in [0.0, 1e3, 1e6, 1.17e8, 1.17e9, 1e11, f64::INFINITY] {
                    let wanted = Rate::from_bytes_per_second(wanted);
                    let there = StreamPath {
                        sender: usual,
                        receiver: usual,
                        encrypted: true,
                        ..path(rtt_ms, loss)
                    };
                    let (one, _) = there.rate();
                    let k = streams(wanted, &there, 64);
                    let carries = |k: u16| one.times(f64::from(k)).min(wanted).bytes_per_second();
                    let best = carries(most_streams(loss));
                    assert!((1..=64).contains(&k));
                    assert!(
                        carries(k) >= 0.97 * best * (1.0 - 1e-6),
                        "{k} streams at {rtt_ms} ms, loss {loss}"
                    );
                    assert!(
                        k == 1 || carries(k - 1) < 0.97 * best,
                        "{k} streams at {rtt_ms} ms, loss {loss}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_ramp_is_for_paths_that_hold_more_than_the_first_windows() {
        let gigabit = Rate::from_bytes_per_second(117.7e6);
        let big = ByteCount(1 << 30);
        assert_eq!(ramp(gigabit, SWITCH_RTT, 1, big), Duration::ZERO);
        // 11.77 MB in flight over 14.6 kB: 9.65 doublings.
        let long = ramp(gigabit, Duration::from_millis(100), 1, big);
        assert!((long.as_secs_f64() - 0.965).abs() < 0.002, "{long:?}");
        assert!(ramp(gigabit, Duration::from_millis(100), 8, big) < long);
        assert_eq!(
            ramp(gigabit, Duration::from_millis(100), 1, ByteCount(14_000)),
            Duration::ZERO
        );
        assert_eq!(
            ramp(gigabit, Duration::from_millis(100), 1, ByteCount(0)),
            Duration::ZERO
        );
    }

    #[test]
    fn a_relay_waits_for_a_chunk_on_each_stream() {
        // 0.8 ms a chunk at 10 Gbit/s.
        let rate: Rate = "10 Gbit/s".parse().unwrap();
        let one = relay_delay(rate, 1, ByteCount(1 << 30)).as_secs_f64();
        assert!((one - 0.000_839 - 0.000_066).abs() < 2e-6, "{one}");
        let tiny = relay_delay(rate, 8, ByteCount(1000)).as_secs_f64();
        assert!(tiny < 1e-4, "{tiny}");
    }
}
