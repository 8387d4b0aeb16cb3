//! When a disk has taken so many bytes. Pure: the time is an argument, the answer how long to wait.

use std::time::Duration;

use stage_core::units::{ByteCount, Rate};

/// A disk with a cache before it, which empties at the disk's rate.
#[derive(Debug)]
pub(super) struct Pace {
    rate: Rate,
    cache: ByteCount,
    burst: ByteCount,
    /// Bytes that it has read before they are asked for.
    ahead: ByteCount,
    /// When all that was taken will be on the disk.
    due: Duration,
}

impl Pace {
    /// A cache that is full takes nothing until `burst` bytes of it are free, all of it at most.
    pub(super) fn new(rate: Rate, cache: ByteCount, burst: ByteCount) -> Self {
        Self {
            rate,
            cache,
            burst: burst.min(cache),
            ahead: ByteCount(0),
            due: Duration::ZERO,
        }
    }

    /// One that reads on while nobody asks, so many bytes at most: else it would stand still from each answer to the next
    /// question, which disks do not.
    pub(super) fn reading_ahead(rate: Rate, ahead: ByteCount) -> Self {
        Self {
            ahead,
            ..Self::new(rate, ByteCount(0), ByteCount(0))
        }
    }

    /// Takes bytes at `now`. How long whoever wrote them waits: not at all while the cache has room.
    pub(super) fn take(&mut self, now: Duration, bytes: u64) -> Duration {
        // Beyond that an idle disk saves nothing up.
        let idle = now.saturating_sub(self.ahead.time_at(self.rate));
        self.due = self.due.max(idle) + ByteCount(bytes).time_at(self.rate);
        let left = self.due.saturating_sub(now);
        if left <= self.cache.time_at(self.rate) {
            return Duration::ZERO;
        }
        left.saturating_sub(self.cache.saturating_sub(self.burst).time_at(self.rate))
    }

    /// How long until all that was taken is on the disk.
    pub(super) fn settle(&self, now: Duration) -> Duration {
        self.due.saturating_sub(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// 1 MB a second, 100 kB in the cache.
    fn pace(burst: u64) -> Pace {
        Pace::new(
            Rate::from_bytes_per_second(1e6),
            ByteCount(100_000),
            ByteCount(burst),
        )
    }

    #[test]
    fn what_the_cache_holds_is_free_and_then_the_rate_holds() {
        let mut pace = pace(0);
        assert_eq!(pace.take(ms(0), 60_000), ms(0));
        assert_eq!(pace.take(ms(10), 60_000), ms(10), "50 kB are still in it");
        let mut now = ms(20);
        for _ in 0..50 {
            now += pace.take(now, 20_000);
        }
        assert_eq!(now, ms(20 + 1000), "a megabyte takes a second, however it comes");
    }

    #[test]
    fn a_rough_disk_stops_and_takes_a_burst() {
        let mut rough = pace(80_000);
        assert_eq!(rough.take(ms(0), 100_000), ms(0));
        assert_eq!(rough.take(ms(0), 10_000), ms(90), "20 kB are left in it");
        assert_eq!(rough.take(ms(90), 80_000), ms(0));
        // More than the cache is as much as the cache.
        assert_eq!(pace(u64::MAX).take(ms(0), 110_000), ms(110));
    }

    #[test]
    fn a_disk_reads_on_between_two_questions() {
        let mut pace = Pace::reading_ahead(Rate::from_bytes_per_second(1e6), ByteCount(20_000));
        assert_eq!(pace.take(ms(100), 10_000), ms(0), "it lies ready");
        let mut now = ms(100);
        for _ in 0..100 {
            // Each question comes 2 ms after the last answer.
            now += pace.take(now, 10_000) + ms(2);
        }
        assert_eq!(now, ms(100 + 1000 - 10 + 2));
    }

    #[test]
    fn an_idle_disk_saves_nothing_up() {
        let mut pace = pace(0);
        assert_eq!(pace.take(ms(0), 150_000), ms(50));
        assert_eq!(pace.take(ms(10_000), 150_000), ms(50));
        assert_eq!(pace.settle(ms(10_000)), ms(150));
        assert_eq!(pace.settle(ms(10_150)), ms(0));
    }
}
