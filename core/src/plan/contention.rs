//! Who gets how much where hops share a link: max-min fairness, which is about what TCP settles on.
//!
//! Progressive filling (Bertsekas, Gallager, "Data Networks", 6.5.2): all hops grow at the same pace; when a resource
//! is full, those that use it stop. One rule more: a child cannot receive faster than its parent does, so a hop that
//! stops stops all below it.
//!
//! All hops carry the same payload, so those that share a full resource with a slower hop end no earlier than it: what
//! is left over when a hop has ended never helps a hop that is still running. The forecast needs this state only.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Lists of small numbers, one for each hop, end to end in one vector.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    ends: Vec<usize>,
    items: Vec<usize>,
}

impl Lists {
    pub(crate) fn push(&mut self, items: impl IntoIterator<Item = usize>) {
        self.items.extend(items);
        self.ends.push(self.items.len());
    }

    pub(crate) fn get(&self, at: usize) -> &[usize] {
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        &self.items[start..self.ends[at]]
    }

    /// For each of `count` items, the lists that hold it.
    fn inverted(&self, count: usize) -> Self {
        let mut ends = vec![0; count];
        for &item in &self.items {
            ends[item] += 1;
        }
        let mut sum = 0;
        for end in &mut ends {
            // The start for now: filling moves it to the end.
            sum += std::mem::replace(end, sum);
        }
        let mut items = vec![0; self.items.len()];
        for list in 0..self.ends.len() {
            for &item in self.get(list) {
                items[ends[item]] = list;
                ends[item] += 1;
            }
        }
        Self { ends, items }
    }
}

/// The problem: hops with a parent each, what each alone can carry, and what they share.
#[derive(Debug)]
pub(crate) struct Contention<'a> {
    /// The parent of each hop; a hop that is its own parent has a complete copy above it.
    pub(crate) parents: &'a [usize],
    /// What each hop could carry alone, in bytes a second; finite.
    pub(crate) alone: &'a [f64],
    /// The shared resources that each hop uses, each once.
    pub(crate) uses: &'a Lists,
    /// What each resource carries, in bytes a second.
    pub(crate) capacities: &'a [f64],
}

/// What stopped a hop from growing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// What a hop (itself, or one above it) can carry alone.
    Alone(usize),
    /// A shared resource.
    Shared(usize),
}

/// A rate as a key of a heap: the bits of floats that are not negative sort like the floats.
fn key(rate: f64) -> u64 {
    rate.max(0.0).to_bits()
}

impl Contention<'_> {
    /// The rate of each hop, and what sets it.
    pub(crate) fn settle(&self) -> Vec<(f64, Stop)> {
        let hops = self.parents.len();
        let users = self.uses.inverted(self.capacities.len());
        let mut children = Lists::default();
        for (hop, &parent) in self.parents.iter().enumerate() {
            children.push((parent != hop).then_some(parent));
        }
        let children = children.inverted(hops);

        let mut settled: Vec<Option<(f64, Stop)>> = vec![None; hops];
        let mut growing: Vec<usize> = (0..self.capacities.len()).map(|r| users.get(r).len()).collect();
        let mut taken = vec![0.0; self.capacities.len()];
        // Resources first, so that of equal levels a shared one is named.
        let shared = (0..self.capacities.len()).filter(|&r| growing[r] > 0);
        let mut events: BinaryHeap<Reverse<(u64, bool, usize)>> = shared
            .map(|r| Reverse((key(self.capacities[r] / growing[r] as f64), false, r)))
            .chain((0..hops).map(|hop| Reverse((key(self.alone[hop]), true, hop))))
            .collect();

        let mut level = 0.0f64;
        let mut stack = Vec::new();
        while let Some(Reverse((due, alone, at))) = events.pop() {
            let due = f64::from_bits(due);
            let stop = if alone {
                stack.push(at);
                Stop::Alone(at)
            } else {
                if growing[at] == 0 {
                    continue;
                }
                // Since this was reckoned some of its hops may have stopped early and left the others more.
                let now = (self.capacities[at] - taken[at]) / growing[at] as f64;
                if now > due * (1.0 + 1e-9) {
                    events.push(Reverse((key(now), false, at)));
                    continue;
                }
                stack.extend_from_slice(users.get(at));
                Stop::Shared(at)
            };
            level = level.max(due);
            while let Some(hop) = stack.pop() {
                // What has stopped has stopped all below it as well.
                if settled[hop].is_some() {
                    continue;
                }
                settled[hop] = Some((level, stop));
                for &resource in self.uses.get(hop) {
                    growing[resource] -= 1;
                    taken[resource] += level;
                }
                stack.extend_from_slice(children.get(hop));
            }
        }
        settled
            .into_iter()
            .map(|rate| rate.expect("what a hop carries alone stops it at last"))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settle(parents: &[usize], alone: &[f64], uses: &[&[usize]], capacities: &[f64]) -> Vec<(f64, Stop)> {
        let mut lists = Lists::default();
        for list in uses {
            lists.push(list.iter().copied());
        }
        Contention {
            parents,
            alone,
            uses: &lists,
            capacities,
        }
        .settle()
    }

    #[test]
    fn a_shared_link_is_shared_evenly() {
        let rates = settle(&[0, 1, 2], &[9.0, 9.0, 9.0], &[&[0], &[0], &[0]], &[9.0]);
        assert_eq!(rates, [(3.0, Stop::Shared(0)); 3]);
    }

    #[test]
    fn what_one_cannot_use_the_others_get() {
        let rates = settle(&[0, 1, 2], &[1.0, 9.0, 9.0], &[&[0], &[0], &[0]], &[9.0]);
        assert_eq!(
            rates,
            [
                (1.0, Stop::Alone(0)),
                (4.0, Stop::Shared(0)),
                (4.0, Stop::Shared(0))
            ]
        );
    }

    #[test]
    fn a_child_is_no_faster_than_its_parent_and_leaves_the_rest_to_others() {
        // Hop 1 hangs on hop 0, which carries 1; hop 2 shares hop 1's link.
        let rates = settle(&[0, 0, 2], &[1.0, 9.0, 9.0], &[&[], &[0], &[0]], &[6.0]);
        assert_eq!(
            rates,
            [
                (1.0, Stop::Alone(0)),
                (1.0, Stop::Alone(0)),
                (5.0, Stop::Shared(0))
            ]
        );
    }

    #[test]
    fn a_slow_child_does_not_hold_its_parent() {
        let rates = settle(&[0, 0], &[5.0, 1.0], &[&[], &[]], &[]);
        assert_eq!(rates[0].0, 5.0);
        assert_eq!(rates[1].0, 1.0);
    }

    #[test]
    fn a_chain_over_one_link_shares_it() {
        let rates = settle(&[0, 0, 1], &[9.0; 3], &[&[0], &[0], &[0]], &[6.0]);
        assert!(
            rates
                .iter()
                .all(|&(rate, stop)| rate == 2.0 && stop == Stop::Shared(0))
        );
    }
}
