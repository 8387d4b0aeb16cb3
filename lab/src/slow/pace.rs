//! When a disk has taken so many bytes. Pure: the time is an argument, the answer how long to wait.

use std::time::Duration;

use stage_core::units::{ByteCount, Rate};

/// A disk with a cache before it, which empties at the disk's rate.
#[derive(Debug)]
pub(super) struct Pace {
    rate: Rate,
    cache: ByteCount,
    burst: ByteCount,
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
            due: Duration::ZERO,
        }
    }

    /// Takes bytes at `now`. How long whoever wrote them waits: not at all while the cache has room.
    pub(super) fn take(&mut self, now: Duration, bytes: u64) -> Duration {
        // An idle disk saves nothing up.
        self.due = self.due.max(now) + ByteCount(bytes).time_at(self.rate);
        let left = self.due - now;
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
    fn an_idle_disk_saves_nothing_up() {
        let mut pace = pace(0);
        assert_eq!(pace.take(ms(0), 150_000), ms(50));
        assert_eq!(pace.take(ms(10_000), 150_000), ms(50));
        assert_eq!(pace.settle(ms(10_000)), ms(150));
        assert_eq!(pace.settle(ms(10_150)), ms(0));
    }
}
