//! When a disk has taken so many bytes. Pure: the time is an argument, the answer how long to wait.

use std::time::Duration;

use stage_core::units::{ByteCount, Rate};

/// A disk's state: what it has taken since it last stood still.
#[derive(Debug)]
pub(super) struct Pace {
    rate: Rate,
    burst: ByteCount,
    since: Duration,
    taken: u64,
}

impl Pace {
    pub(super) fn new(rate: Rate, burst: ByteCount) -> Self {
        Self {
            rate,
            burst,
            since: Duration::ZERO,
            taken: 0,
        }
    }

    /// Takes bytes at `now`. How long the disk then stands still: not at all within a burst.
    pub(super) fn take(&mut self, now: Duration, bytes: u64) -> Duration {
        if self.taken == 0 {
            // An idle disk saves nothing up.
            self.since = self.since.max(now);
        }
        self.taken += bytes;
        if self.taken < self.burst.0 {
            return Duration::ZERO;
        }
        self.settle(now)
    }

    /// All that was taken is to be on the disk.
    pub(super) fn settle(&mut self, now: Duration) -> Duration {
        let due = self.since + ByteCount(self.taken).time_at(self.rate);
        self.taken = 0;
        self.since = due.max(now);
        due.saturating_sub(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// 1 MB a second, 100 kB at once.
    fn pace() -> Pace {
        Pace::new(Rate::from_bytes_per_second(1e6), ByteCount(100_000))
    }

    #[test]
    fn bursts_are_free_and_the_rate_holds_over_all() {
        let mut pace = pace();
        assert_eq!(pace.take(ms(0), 60_000), ms(0));
        assert_eq!(
            pace.take(ms(10), 60_000),
            ms(110),
            "120 kB since 0 are due at 120"
        );
        let mut now = ms(120);
        for _ in 0..50 {
            now += pace.take(now, 20_000);
        }
        assert_eq!(now, ms(120 + 1000), "a megabyte takes a second, however it comes");
    }

    #[test]
    fn an_idle_disk_saves_nothing_up() {
        let mut pace = pace();
        pace.take(ms(0), 100_000);
        assert_eq!(pace.take(ms(10_000), 100_000), ms(100));
        // A burst that took its time has been paid.
        assert_eq!(pace.take(ms(20_000), 50_000), ms(0));
        assert_eq!(pace.take(ms(20_200), 50_000), ms(0));
    }

    #[test]
    fn what_is_synced_is_on_the_disk() {
        let mut pace = pace();
        assert_eq!(pace.take(ms(5), 50_000), ms(0));
        assert_eq!(pace.settle(ms(5)), ms(50));
        assert_eq!(pace.settle(ms(55)), ms(0), "nothing new");
    }
}
