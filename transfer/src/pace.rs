//! A limit on a rate, as a delay to wait before the next bytes.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use stage_core::units::{ByteCount, Rate};

use crate::sync::lock;

/// What may pass at once after a pause: a tenth of a second's worth, so that a limit is kept in every second.
const BURST: Duration = Duration::from_millis(100);
/// How late a new limit or an end may be noticed.
const LOOK: Duration = Duration::from_millis(100);

/// Shared by all who together must keep to one limit.
#[derive(Debug)]
pub struct Pacer(Mutex<State>);

#[derive(Debug)]
struct State {
    limit: Option<Rate>,
    /// Which limit it is, counted: a wait under an older one is over.
    turn: u64,
    /// When what was let pass so far would have passed at exactly the limit.
    due: Option<Instant>,
}

impl Pacer {
    /// A pacer with this limit, or none.
    pub fn new(limit: Option<Rate>) -> Self {
        Self(Mutex::new(State {
            limit,
            turn: 0,
            due: None,
        }))
    }

    /// Changes the limit for what comes next.
    pub fn set(&self, limit: Option<Rate>) {
        let mut state = lock(&self.0);
        if state.limit != limit {
            *state = State {
                limit,
                turn: state.turn + 1,
                due: None,
            };
        }
    }

    /// Blocks until `bytes` may pass, or another limit is set, or `over` says that nobody waits for them any more;
    /// looks at both ten times a second. `true` if they may pass.
    pub fn wait(&self, bytes: usize, over: impl Fn() -> bool) -> bool {
        let turn = lock(&self.0).turn;
        let until = Instant::now() + self.take(bytes, Instant::now());
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || lock(&self.0).turn != turn {
                return true;
            }
            if over() {
                return false;
            }
            std::thread::sleep(left.min(LOOK));
        }
    }

    /// Counts `bytes` that shall pass and says how long to wait before they may.
    pub fn take(&self, bytes: usize, now: Instant) -> Duration {
        let mut state = lock(&self.0);
        let Some(limit) = state.limit else {
            return Duration::ZERO;
        };
        // A limit of nothing would be a wait for ever; an hour a block is as good and can be taken back.
        let cost = ByteCount(bytes as u64)
            .time_at(limit)
            .min(Duration::from_secs(3600));
        let floor = now.checked_sub(BURST).unwrap_or(now);
        let begin = state.due.map_or(now, |due| due.max(floor));
        state.due = Some(begin + cost);
        begin.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_long_run_rate_is_the_limit() {
        let pacer = Pacer::new(Some(Rate::from_bytes_per_second(1e6)));
        let begin = Instant::now();
        let mut now = begin;
        for _ in 0..100 {
            now += pacer.take(100_000, now);
        }
        // A hundred times 0.1 s, the first of which passes at once.
        let took = (now - begin).as_secs_f64();
        assert!((9.8..=9.91).contains(&took), "{took}");
    }

    #[test]
    fn a_pause_saves_up_no_more_than_the_burst() {
        let pacer = Pacer::new(Some(Rate::from_bytes_per_second(1e6)));
        let begin = Instant::now();
        pacer.take(1000, begin);
        let later = begin + Duration::from_secs(60);
        assert_eq!(pacer.take(1_000_000, later), Duration::ZERO);
        assert_eq!(pacer.take(1, later), Duration::from_millis(900));
    }

    #[test]
    fn no_limit_no_wait_and_a_new_limit_forgets_the_old_debt() {
        let pacer = Pacer::new(None);
        assert_eq!(pacer.take(usize::MAX, Instant::now()), Duration::ZERO);
        pacer.set(Some(Rate::ZERO));
        let now = Instant::now();
        pacer.take(1, now);
        assert!(pacer.take(1, now) >= Duration::from_secs(3600));
        pacer.set(Some(Rate::from_bytes_per_second(10.0)));
        assert_eq!(pacer.take(1, now), Duration::ZERO);
    }
}
