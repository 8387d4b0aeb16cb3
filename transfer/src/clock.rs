//! Where a data thread's time goes: sums of its waits, taken around calls that block anyway, and what the kernel says of
//! its turns on a processor, which is asked for only at a sample.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What a thread of a stream does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Doing {
    /// Reads from, or writes to, its socket.
    Network,
    /// Reads from, or writes to, the disk.
    Disk,
    /// Waits for a limit.
    Limit,
    /// Has nothing to do.
    Idle,
    /// Hashes.
    Work,
}

/// The time of one thread. A few words that only the thread writes, so that no two threads share a cache line for it.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    /// The thread's number while it runs; 0 before.
    thread: AtomicI32,
    nanos: [AtomicU64; 5],
    /// What the processor had of it in the end.
    ended: OnceLock<Option<Duration>>,
}

/// Ends the clock with its thread.
#[must_use]
pub(crate) struct Running<'a>(&'a Clock);

impl Clock {
    /// The calling thread is the one, until the result is dropped.
    pub(crate) fn enter(&self) -> Running<'_> {
        self.thread
            .store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::Relaxed);
        Running(self)
    }

    /// Does something and counts the time.
    pub(crate) fn time<T>(&self, part: Doing, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let done = work();
        self.add(part, began.elapsed());
        done
    }

    /// Counts time.
    pub(crate) fn add(&self, part: Doing, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.nanos[part as usize].fetch_add(nanos, Ordering::Relaxed);
    }

    /// What was counted.
    pub(crate) fn of(&self, part: Doing) -> Duration {
        Duration::from_nanos(self.nanos[part as usize].load(Ordering::Relaxed))
    }

    /// How long the thread was on a processor, or waited for one; `None` where the kernel does not say.
    pub(crate) fn cpu(&self) -> Option<Duration> {
        if let Some(ended) = self.ended.get() {
            return *ended;
        }
        match self.thread.load(Ordering::Relaxed) {
            0 => None,
            // A thread that ends now has said it meanwhile, or its file is gone.
            thread => read(thread).or_else(|| self.ended.get().copied().flatten()),
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        // Said before the thread's number can become another's.
        let _ = self.0.ended.set(read(self.0.thread.load(Ordering::Relaxed)));
    }
}

/// Time on a processor and time waiting for one: the first two figures of the thread's `schedstat`, in nanoseconds.
fn read(thread: i32) -> Option<Duration> {
    let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?;
    let mut figures = text.split_ascii_whitespace().map(str::parse::<u64>);
    let (on, waited) = (figures.next()?.ok()?, figures.next()?.ok()?);
    Some(Duration::from_nanos(on.saturating_add(waited)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn work_is_the_processors_and_waiting_is_not() {
        let clock = Arc::new(Clock::default());
        assert_eq!(clock.cpu(), None);
        let its = clock.clone();
        std::thread::spawn(move || {
            let _running = its.enter();
            its.time(Doing::Work, || {
                let begun = Instant::now();
                while begun.elapsed() < Duration::from_millis(50) {
                    std::hint::spin_loop();
                }
            });
            its.time(Doing::Idle, || {
                std::thread::park_timeout(Duration::from_millis(200));
            });
        })
        .join()
        .unwrap();
        assert!(clock.of(Doing::Work) >= Duration::from_millis(50));
        assert_eq!(clock.of(Doing::Disk), Duration::ZERO);
        // Where the kernel says it at all.
        if std::path::Path::new("/proc/thread-self/schedstat").exists() {
            let cpu = clock.cpu().unwrap();
            assert!(cpu >= Duration::from_millis(40), "{cpu:?}");
        }
    }
}
