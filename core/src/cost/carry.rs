//! What the streams of a hop carry together.

use super::{NEAR_ENOUGH, StreamBound, StreamPath, streams_of, thread_rate};
use crate::plan::PathFacts;
use crate::units::Rate;

/// What the streams of a hop carry together, by their count, if nobody else is on the way: by formula, or as measured
/// between these switches, which beats it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Carry<'m> {
    /// What none of them exceeds: the thread that moves its bytes, one member of parallel links.
    most: Rate,
    /// What one of them carries where nothing was measured.
    one: Rate,
    /// So many together carried so much, the counts and the rates ascending.
    measured: &'m [(u16, Rate)],
    /// More than the last count brought nothing: it was not the streams that limited it.
    filled: bool,
}

impl<'m> Carry<'m> {
    /// What a hop's streams carry, and what stops one of them from carrying more.
    ///
    /// What was measured moves bytes and does nothing with them, so that the thread of a push is a bound all the same.
    pub(crate) fn new(path: &StreamPath, measured: Option<&'m PathFacts>) -> (Self, StreamBound) {
        let (one, bound) = path.rate();
        let thread = Rate::from_bytes_per_second(thread_rate(path.encrypted));
        let (rates, filled) = measured.map_or((&[][..], false), |path| (path.rates.as_slice(), path.filled));
        let mut carry = Self {
            most: thread,
            one,
            measured: rates,
            filled,
        };
        let bound = match rates {
            [] => bound,
            // One filled the way: it carries no less than that, and how much more the formula says.
            [(count, rate)] if filled => {
                carry.measured = &[];
                let least = rate.times(1.0 / f64::from((*count).max(1)));
                if least > one {
                    carry.one = least.min(thread);
                    if thread < least {
                        StreamBound::Thread
                    } else {
                        StreamBound::Measured
                    }
                } else {
                    bound
                }
            }
            _ if carry.rate(1) < thread => StreamBound::Measured,
            _ => StreamBound::Thread,
        };
        (carry, bound)
    }

    /// No stream exceeds this either; whether one would have.
    pub(crate) fn limit(&mut self, most: Rate) -> bool {
        let exceeds = self.rate(1) > most;
        self.most = self.most.min(most);
        exceeds
    }

    /// Whether a measurement says how many carry how much.
    pub(crate) fn is_measured(&self) -> bool {
        !self.measured.is_empty()
    }

    /// What so many carry together.
    pub(crate) fn rate(&self, streams: u16) -> Rate {
        let count = f64::from(streams);
        let together = if self.measured.is_empty() {
            self.one.times(count)
        } else {
            self.as_measured(count)
        };
        together.min(self.most.times(count))
    }

    /// Between two counts in proportion; above the last as the last that the streams limited.
    fn as_measured(&self, count: f64) -> Rate {
        let mut below = (0.0, 0.0);
        for &(streams, rate) in self.measured {
            let at = (f64::from(streams), rate.bytes_per_second());
            if count <= at.0 {
                let share = (count - below.0) / (at.0 - below.0).max(f64::MIN_POSITIVE);
                return Rate::from_bytes_per_second(below.1 + (at.1 - below.1) * share);
            }
            below = at;
        }
        // The last may have met the way's end rather than its own: then those before it say what a stream carries.
        let limited = match self.measured {
            [.., before, _] if self.filled => (f64::from(before.0), before.1.bytes_per_second()),
            _ => below,
        };
        Rate::from_bytes_per_second((limited.1 / limited.0.max(1.0) * count).max(below.1))
    }

    /// The smallest count of streams that comes within 3 % of `wanted`, or of what `cap` of them carry.
    pub(crate) fn enough(&self, wanted: Rate, cap: u16) -> u16 {
        if self.measured.is_empty() {
            return streams_of(self.one.min(self.most), wanted, cap);
        }
        let cap = cap.max(1);
        let needed = wanted.min(self.rate(cap)).times(NEAR_ENOUGH * (1.0 - 1e-9));
        (1..cap).find(|count| self.rate(*count) >= needed).unwrap_or(cap)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::path;
    use super::*;

    fn measured(rates: &[(u16, f64)], filled: bool) -> PathFacts {
        PathFacts {
            rtt: Duration::from_millis(100),
            rates: rates
                .iter()
                .map(|(streams, mb)| (*streams, Rate::from_bytes_per_second(mb * 1e6)))
                .collect(),
            filled,
            loss: 0.0,
            control: None,
        }
    }

    fn mega(rate: Rate) -> f64 {
        rate.bytes_per_second() / 1e6
    }

    #[test]
    fn measured_streams_beat_the_formula() {
        let lossy = path(100, 0.001);
        let (formula, bound) = Carry::new(&lossy, None);
        assert_eq!(
            (formula.rate(4), bound),
            (lossy.rate().0.times(4.0), StreamBound::Loss)
        );
        // What was measured goes before it: the formula would ask for 63 streams.
        let wanted = Rate::from_bytes_per_second(117e6);
        assert_eq!(formula.enough(wanted, 64), 63);
        let bbr = measured(&[(1, 60.0), (2, 100.0), (4, 116.0)], true);
        let (carry, bound) = Carry::new(&lossy, Some(&bbr));
        assert_eq!(bound, StreamBound::Measured);
        assert!((mega(carry.rate(1)) - 60.0).abs() < 1e-9 && (mega(carry.rate(3)) - 108.0).abs() < 1e-9);
        assert_eq!(carry.enough(wanted, 64), 4);
        // Where it was not the streams that stopped it, more of them carry what each of them did.
        assert!((mega(carry.rate(8)) - 400.0).abs() < 1e-9);
        // Each count adds less than the one before: that too is as measured.
        let tired = measured(&[(1, 10.0), (2, 16.0), (4, 24.0), (8, 32.0)], false);
        let (carry, _) = Carry::new(&lossy, Some(&tired));
        assert!((mega(carry.rate(16)) - 64.0).abs() < 1e-9);
        assert_eq!(carry.enough(Rate::from_bytes_per_second(24e6), 64), 4);
        assert_eq!(carry.enough(wanted, 8), 8);
        for count in 1..64 {
            assert!(carry.rate(count) < carry.rate(count + 1), "{count}");
        }
    }

    #[test]
    fn a_stream_that_filled_the_way_carries_no_less() {
        let filled = measured(&[(1, 80.0)], true);
        let (carry, bound) = Carry::new(&path(100, 0.0), Some(&filled));
        assert!(
            (mega(carry.rate(1)) - 80.0).abs() < 1e-9,
            "the formula has 36 MB/s"
        );
        assert_eq!(bound, StreamBound::Measured);
        // In a rack the formula says more than a slow pair showed.
        let (carry, bound) = Carry::new(&path(0, 0.0), Some(&filled));
        assert_eq!((mega(carry.rate(1)), bound), (1000.0, StreamBound::Thread));
        // A measurement does nothing with its bytes; a push checks and writes them.
        let bare = measured(&[(1, 3500.0), (2, 7000.0)], false);
        let (mut carry, bound) = Carry::new(&path(0, 0.0), Some(&bare));
        assert_eq!((mega(carry.rate(2)), bound), (2000.0, StreamBound::Thread));
        assert!(carry.limit(Rate::from_bytes_per_second(1e8)));
        assert!((mega(carry.rate(2)) - 200.0).abs() < 1e-9);
        assert!(!carry.limit(Rate::from_bytes_per_second(2e8)));
    }
}
