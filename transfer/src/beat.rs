//! Waiting is not silence: the count that the source, or a holder of everything, advances once a second, and that
//! flows down every hop.
//!
//! A count that stands still means that nobody above has all the bytes or a way to them. Counts of one origin are
//! compared as they are, whichever way they came: in a circle of parents the highest count comes round once and then
//! stands still, so a circle finds out by itself.

use std::sync::Mutex;

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
pub(crate) struct Pulse(Mutex<(Beat, Heard)>);

impl Pulse {
    /// What goes down the hops now.
    pub(crate) fn now(&self) -> Beat {
        lock(&self.0).0
    }

    /// A beat from a parent: it goes on down if it is an advance.
    pub(crate) fn heard(&self, beat: Beat) -> bool {
        let mut state = lock(&self.0);
        let advances = state.1.advances(beat);
        // Where the source receives from itself, its own count comes back late and must not set it back.
        let back = state.0.origin == beat.origin && state.0.count >= beat.count;
        if advances && !back {
            state.0 = beat;
        }
        advances
    }

    /// Counts a second, as the one who has everything.
    pub(crate) fn count(&self, origin: u64, waits: Waits) -> Beat {
        let now = &mut lock(&self.0).0;
        let count = if now.origin == origin { now.count + 1 } else { 1 };
        *now = Beat { origin, count, waits };
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
        // Both came from parents of their own, and now have only each other.
        assert!(a.heard(beat(1, 5)));
        assert!(b.heard(beat(2, 7)));
        let mut advances = 0;
        for _ in 0..100 {
            let (from_a, from_b) = (a.now(), b.now());
            advances += u32::from(a.heard(from_b)) + u32::from(b.heard(from_a));
        }
        assert!(advances <= 2, "{advances}");
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
