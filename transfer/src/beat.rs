//! Waiting is not silence: the count that the source, or a holder of everything, advances once a second, and that
//! flows down every hop.
//!
//! A count that stands still means that nobody above has all the bytes or a way to them. Counts of one origin are
//! compared as they are, whichever way they came: in a circle of parents the highest count comes round once and then
//! stands still, so a circle finds out by itself.
//!
//! A count goes on down as soon as it comes. Were it taken along only once a second, each hop would hold it back by up to
//! that, and the tenth node of a chain would take its parent for dead before the first count had come.

use std::sync::Mutex;

use tokio::sync::watch;

use crate::frame::{Beat, Waits};
use crate::sync::lock;

/// How many origins are remembered: the source, and holders of everything that were parents.
const ORIGINS: usize = 32;

/// The highest counts heard, by origin.
#[derive(Debug, Default)]
pub(crate) struct Heard(Vec<(u64, u64)>);

impl Heard {
    /// Whether this beat is an advance over all that was heard before.
    pub(crate) fn advances(&mut self, beat: Beat) -> bool {
        if let Some(at) = self.0.iter().position(|(origin, _)| *origin == beat.origin) {
            if beat.count <= self.0[at].1 {
                return false;
            }
            self.0.remove(at);
        } else if self.0.len() == ORIGINS {
            self.0.remove(0);
        }
        self.0.push((beat.origin, beat.count));
        true
    }
}

/// One job's count on this node.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    state: Mutex<(Beat, Heard)>,
    /// What goes down the hops was changed.
    moved: watch::Sender<()>,
}

impl Pulse {
    /// What goes down the hops now.
    pub(crate) fn now(&self) -> Beat {
        lock(&self.state).0
    }

    /// Sees each change of what goes down.
    pub(crate) fn watch(&self) -> watch::Receiver<()> {
        self.moved.subscribe()
    }

    /// A beat from a parent: it goes on down if it is an advance.
    pub(crate) fn heard(&self, beat: Beat) -> bool {
        let mut state = lock(&self.state);
        let advances = state.1.advances(beat);
        // Where the source receives from itself, its own count comes back late and must not set it back.
        let back = state.0.origin == beat.origin && state.0.count >= beat.count;
        if advances && !back {
            state.0 = beat;
            self.moved.send_replace(());
        }
        advances
    }

    /// Counts a second, as the one who has everything.
    pub(crate) fn count(&self, origin: u64, waits: Waits) -> Beat {
        let now = &mut lock(&self.state).0;
        let count = if now.origin == origin { now.count + 1 } else { 1 };
        *now = Beat { origin, count, waits };
        self.moved.send_replace(());
        *now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beat(origin: u64, count: u64) -> Beat {
        Beat {
            origin,
            count,
            waits: Waits::Nothing,
        }
    }

    #[test]
    fn a_circle_stands_still() {
        let (a, b) = (Pulse::default(), Pulse::default());
        let seen = a.watch();
        assert!(!seen.has_changed().unwrap());
        // Both came from parents of their own, and now have only each other.
        assert!(a.heard(beat(1, 5)));
        assert!(b.heard(beat(2, 7)));
        let mut advances = 0;
        for _ in 0..100 {
            let (from_a, from_b) = (a.now(), b.now());
            advances += u32::from(a.heard(from_b)) + u32::from(b.heard(from_a));
        }
        assert!(advances <= 2, "{advances}");
        // Nor does it go round for ever.
        let mut seen = seen;
        seen.mark_unchanged();
        assert!(!a.heard(b.now()));
        assert!(!seen.has_changed().unwrap());
    }

    #[test]
    fn a_new_origin_is_an_advance_and_an_old_count_is_none() {
        let pulse = Pulse::default();
        assert!(pulse.heard(beat(1, 100)));
        assert!(!pulse.heard(beat(1, 100)));
        assert!(pulse.heard(beat(2, 1)));
        assert!(!pulse.heard(beat(1, 99)));
        assert_eq!(pulse.now(), beat(2, 1));
        assert!(pulse.heard(beat(1, 101)));
        assert_eq!(pulse.count(9, Waits::Nothing), beat(9, 1));
        assert_eq!(pulse.count(9, Waits::Limit).count, 2);
    }
}
