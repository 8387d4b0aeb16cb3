//! One direction of a path: which segments arrive, and when. Pure: the time is an argument, chance has a seed.

use std::ops::Range;

use super::Path;

/// Nanoseconds since the path came up.
pub(super) type Moment = u64;

/// A direction at work.
#[derive(Debug)]
pub(super) struct Way {
    path: Path,
    /// Nanoseconds that a byte takes.
    per_byte: f64,
    /// When all that is in the queue has left. Not a whole number: a minimal packet at 100 Gbit/s takes 7 ns.
    free_at: f64,
    chance: Chance,
}

/// Neighbouring segments that travel on together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) segments: Range<usize>,
    /// When its last byte is there.
    pub(super) arrives: Moment,
}

/// What became of a packet's segments.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Fate {
    pub(super) pieces: Vec<Piece>,
    pub(super) carried: u64,
    pub(super) lost: u64,
    pub(super) dropped: u64,
}

impl Way {
    pub(super) fn new(path: Path, seed: u64) -> Self {
        Self {
            path,
            per_byte: 1e9 / path.rate.bytes_per_second(),
            free_at: 0.0,
            chance: Chance(seed),
        }
    }

    /// When all that it has taken has left.
    pub(super) fn free_at(&self) -> f64 {
        self.free_at
    }

    /// The wire is another's until then, if both take turns.
    pub(super) fn yield_to(&mut self, other: f64) {
        if self.path.takes_turns {
            self.free_at = self.free_at.max(other);
        }
    }

    /// Takes a packet of so many segments, of which `wire` says how many bytes each is on the wire.
    pub(super) fn take(&mut self, now: Moment, segments: usize, wire: impl Fn(usize) -> u64) -> Fate {
        let mut fate = Fate::default();
        for segment in 0..segments {
            let takes = wire(segment) as f64 * self.per_byte;
            let starts = self.free_at.max(now as f64);
            let waiting = (starts - now as f64) / self.per_byte;
            if waiting + wire(segment) as f64 > self.path.queue.0 as f64 {
                fate.dropped += 1;
                continue;
            }
            self.free_at = starts + takes;
            // What is lost has been sent: it takes its time on the wire like any other.
            if self.chance.strikes(self.path.loss) {
                fate.lost += 1;
                continue;
            }
            fate.carried += 1;
            let arrives = (self.free_at + self.path.delay.as_nanos() as f64).ceil() as Moment;
            match fate.pieces.last_mut() {
                Some(piece) if piece.segments.end == segment => {
                    piece.segments.end += 1;
                    piece.arrives = arrives;
                }
                _ => fate.pieces.push(Piece {
                    segments: segment..segment + 1,
                    arrives,
                }),
            }
        }
        fate
    }
}

/// Chance that is the same in each run: Steele, Lea and Flood's SplitMix64.
#[derive(Debug)]
struct Chance(u64);

impl Chance {
    fn strikes(&mut self, share: f64) -> bool {
        if share <= 0.0 {
            return false;
        }
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        ((mixed >> 11) as f64) < share * (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use stage_core::units::{ByteCount, Rate};

    use super::*;

    /// 1000 bytes take 8 µs.
    fn path(queue: u64, loss: f64) -> Path {
        Path {
            rate: Rate::from_bits_per_second(1e9),
            delay: Duration::from_millis(5),
            queue: ByteCount(queue),
            loss,
            takes_turns: false,
        }
    }

    fn piece(segments: Range<usize>, arrives: Moment) -> Piece {
        Piece { segments, arrives }
    }

    #[test]
    fn a_packet_arrives_when_its_last_byte_has() {
        let mut way = Way::new(path(100_000, 0.0), 1);
        let fate = way.take(1_000_000, 3, |_| 1000);
        assert_eq!(fate.pieces, [piece(0..3, 6_024_000)]);
        // The next waits for it; one that comes when nothing waits does not.
        assert_eq!(way.take(1_000_000, 1, |_| 500).pieces, [piece(0..1, 6_028_000)]);
        assert_eq!(way.take(9_000_000, 1, |_| 500).pieces, [piece(0..1, 14_004_000)]);
    }

    #[test]
    fn on_a_half_duplex_wire_both_ways_take_turns() {
        let shared = Path {
            takes_turns: true,
            ..path(100_000, 0.0)
        };
        let (mut there, mut back) = (Way::new(shared, 1), Way::new(shared, 2));
        assert_eq!(there.take(0, 1, |_| 1000).pieces, [piece(0..1, 5_008_000)]);
        back.yield_to(there.free_at());
        assert_eq!(back.take(0, 1, |_| 1000).pieces, [piece(0..1, 5_016_000)]);
        // Any other wire carries both at once.
        let mut full = Way::new(path(100_000, 0.0), 2);
        full.yield_to(there.free_at());
        assert_eq!(full.take(0, 1, |_| 1000).pieces, [piece(0..1, 5_008_000)]);
    }

    #[test]
    fn what_the_queue_does_not_hold_is_dropped_segment_by_segment() {
        let mut way = Way::new(path(2500, 0.0), 1);
        let fate = way.take(0, 5, |at| if at == 4 { 400 } else { 1000 });
        // 2000 wait already when the third comes; the last still finds room: a super-packet in two pieces.
        assert_eq!(fate.pieces, [piece(0..2, 5_016_000), piece(4..5, 5_019_200)]);
        assert_eq!((fate.carried, fate.dropped, fate.lost), (3, 2, 0));
        // Room comes back at the path's rate.
        assert_eq!(way.take(3_000, 1, |_| 1000).dropped, 1);
        assert_eq!(way.take(8_000, 1, |_| 1000).carried, 1);
    }

    #[test]
    fn what_is_lost_takes_its_time_and_cuts_the_packet() {
        let mut way = Way::new(path(u64::MAX >> 1, 0.2), 7);
        let fate = way.take(0, 1000, |_| 1000);
        assert!((150..250).contains(&fate.lost), "{}", fate.lost);
        assert_eq!(fate.carried + fate.lost, 1000);
        assert!(fate.pieces.len() > 100);
        for piece in &fate.pieces {
            assert_eq!(piece.arrives, 5_000_000 + piece.segments.end as u64 * 8_000);
        }
        assert!(
            fate.pieces
                .windows(2)
                .all(|two| two[0].segments.end < two[1].segments.start)
        );
        let again = Way::new(path(u64::MAX >> 1, 0.2), 7).take(0, 1000, |_| 1000);
        assert_eq!(again, fate, "the same seed, the same losses");
        assert_ne!(
            Way::new(path(u64::MAX >> 1, 0.2), 8).take(0, 1000, |_| 1000),
            fate
        );
    }

    #[test]
    fn rare_losses_are_as_rare_as_asked() {
        let mut way = Way::new(path(u64::MAX >> 1, 1e-4), 3);
        let lost = way.take(0, 1_000_000, |_| 1).lost;
        assert!((60..150).contains(&lost), "{lost}");
        assert_eq!(Way::new(path(u64::MAX >> 1, 1.0), 3).take(0, 9, |_| 1).lost, 9);
    }
}
