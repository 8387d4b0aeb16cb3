//! What binds a stream to whoever handed it over: who dies before having seen its end has not sent it.
//!
//! A job's script that is killed takes producer and `stage push` with it, and the pipe then ends as if all were said.
//! So the end counts only if the other side lives to say that it has seen it.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use stage_core::failure::{Code, Failure};
use stage_core::units::ByteCount;
use tokio::sync::Notify;

use crate::sync::lock;

/// See the module.
#[derive(Debug, Default)]
pub struct Tie {
    state: Mutex<State>,
    turned: Condvar,
    told: Notify,
}

#[derive(Debug, Default, Clone)]
enum State {
    /// Bytes come, or are awaited.
    #[default]
    Open,
    /// The input has ended.
    Ended(ByteCount),
    /// And that was seen.
    Seen,
    /// The other side has gone before.
    Cut,
    /// Nobody reads any more: all is done, or the job has ended.
    Over,
}

impl Tie {
    fn turn(&self, change: impl FnOnce(&State) -> Option<State>) {
        let mut state = lock(&self.state);
        if let Some(next) = change(&state) {
            *state = next;
        }
        drop(state);
        self.turned.notify_all();
        self.told.notify_waiters();
    }

    /// The input has ended after so many bytes.
    pub(super) fn end(&self, bytes: ByteCount) {
        self.turn(|state| matches!(state, State::Open).then_some(State::Ended(bytes)));
    }

    /// Nothing is read any more.
    pub(super) fn over(&self) {
        self.turn(|_| Some(State::Over));
    }

    /// Why nothing more counts, if the other side has gone.
    pub(super) fn cut_by(&self) -> Option<Failure> {
        matches!(*lock(&self.state), State::Cut).then(gone)
    }

    /// Waits a moment for the other side's word on the end.
    pub(super) fn wait_seen(&self, moment: Duration) -> Option<Result<(), Failure>> {
        let state = lock(&self.state);
        let state = match *state {
            State::Seen | State::Cut | State::Over => state,
            _ => {
                self.turned
                    .wait_timeout(state, moment)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0
            }
        };
        match *state {
            State::Seen => Some(Ok(())),
            State::Cut | State::Over => Some(Err(gone())),
            State::Open | State::Ended(_) => None,
        }
    }

    /// Waits for the end of input: how many bytes came; `None` when the stream is over without one.
    pub async fn ended(&self) -> Option<ByteCount> {
        loop {
            let told = self.told.notified();
            tokio::pin!(told);
            // Before looking, so that no turn is missed in between.
            told.as_mut().enable();
            match *lock(&self.state) {
                State::Ended(bytes) => return Some(bytes),
                State::Seen | State::Cut | State::Over => return None,
                State::Open => {}
            }
            told.await;
        }
    }

    /// The other side has seen the end of input.
    pub fn seen(&self) {
        self.turn(|state| matches!(state, State::Ended(_)).then_some(State::Seen));
    }

    /// The other side has gone. After [`Tie::seen`] this means nothing.
    pub fn cut(&self) {
        self.turn(|state| matches!(state, State::Open | State::Ended(_)).then_some(State::Cut));
    }
}

fn gone() -> Failure {
    Failure::new(
        Code::SourceLost,
        "`stage push` ended before the end of its input was seen",
        "push again: nothing of it was published",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENT: Duration = Duration::from_millis(1);

    #[tokio::test]
    async fn an_end_counts_once_it_is_seen() {
        let tie = Tie::default();
        tie.seen();
        assert!(tie.wait_seen(MOMENT).is_none(), "there was nothing to see");
        tie.end(ByteCount(5));
        assert_eq!(tie.ended().await, Some(ByteCount(5)));
        assert!(tie.wait_seen(MOMENT).is_none());
        tie.seen();
        tie.cut();
        assert!(
            matches!(tie.wait_seen(MOMENT), Some(Ok(()))),
            "who leaves then has done its part"
        );
        assert!(tie.cut_by().is_none());
    }

    #[tokio::test]
    async fn who_leaves_before_has_sent_nothing() {
        for ended in [false, true] {
            let tie = Tie::default();
            if ended {
                tie.end(ByteCount(5));
            }
            tie.cut();
            tie.end(ByteCount(5));
            tie.seen();
            assert_eq!(tie.ended().await, None);
            assert_eq!(tie.cut_by().unwrap().code, Code::SourceLost);
            assert!(matches!(tie.wait_seen(MOMENT), Some(Err(_))));
        }
    }
}
