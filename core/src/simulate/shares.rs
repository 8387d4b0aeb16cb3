//! Who gets how much, reckoned anew only where something changed.
//!
//! A change reaches those that share a resource with the hop that changed, and through them on; and those that follow
//! a hop whose rate changed. In most fabrics that is a handful, so ten thousand hops that begin one after the other
//! cost little more than ten thousand.

use super::engine::Engine;
use crate::plan::contention::{Contention, Lists};

/// Marks that are all wiped at once.
#[derive(Debug, Default)]
pub(super) struct Marks {
    round: u32,
    of: Vec<u32>,
}

impl Marks {
    pub(super) fn new(count: usize) -> Self {
        Self {
            round: 0,
            of: vec![0; count],
        }
    }

    fn wipe(&mut self) {
        self.round += 1;
    }

    /// Marks; false if it was marked already.
    fn mark(&mut self, at: usize) -> bool {
        std::mem::replace(&mut self.of[at], self.round) != self.round
    }

    fn is_marked(&self, at: usize) -> bool {
        self.of[at] == self.round
    }
}

/// What the hops share, and who shares it now.
#[derive(Debug)]
pub(super) struct Shares {
    /// In bytes a second.
    pub(super) capacities: Vec<f64>,
    /// The running hops on each, by their children.
    users: Vec<Vec<usize>>,
    seen: Marks,
    members: Marks,
    /// Where a member stands in the list being settled.
    place: Vec<usize>,
    /// The same for resources.
    resource_place: Vec<usize>,
}

impl Shares {
    pub(super) fn new(capacities: Vec<f64>, nodes: usize) -> Self {
        let resources = capacities.len();
        Self {
            users: vec![Vec::new(); resources],
            seen: Marks::new(resources),
            members: Marks::new(nodes),
            place: vec![0; nodes],
            resource_place: vec![0; resources],
            capacities,
        }
    }

    pub(super) fn enter(&mut self, hop: usize, uses: &[usize]) {
        for &resource in uses {
            self.users[resource].push(hop);
        }
    }

    pub(super) fn leave(&mut self, hop: usize, uses: &[usize]) {
        for &resource in uses {
            let users = &mut self.users[resource];
            if let Some(at) = users.iter().position(|&user| user == hop) {
                users.swap_remove(at);
            }
        }
    }
}

/// Rates nearer than this are the same.
const SAME: f64 = 1e-9;

fn differ(a: f64, b: f64) -> bool {
    (a - b).abs() > SAME * a.max(b)
}

impl Engine<'_> {
    /// Settles what the hops of `seeds` and the users of `resources` get from now on, and all that depends on them.
    pub(super) fn settle(&mut self, seeds: &[usize], resources: &[usize]) {
        self.shares.seen.wipe();
        self.shares.members.wipe();
        let mut members = Vec::new();
        self.gather(seeds.to_vec(), resources, false, &mut members);
        let mut rates = self.solve(&members);
        // Those that follow one whose rate changed follow it into a second reckoning, with all below them.
        let mut followers = Vec::new();
        for (&member, &rate) in members.iter().zip(&rates) {
            if differ(rate, self.flows[member].rate) {
                let outside = |&&child: &&usize| {
                    !self.shares.members.is_marked(child)
                        && self.flows[child].is_running()
                        && self.follows(child)
                };
                followers.extend(self.below[member].iter().filter(outside));
            }
        }
        if !followers.is_empty() {
            self.gather(followers, &[], true, &mut members);
            // Of those known before, the ones below them were not gathered yet.
            let below: Vec<usize> = members
                .iter()
                .flat_map(|&member| self.below[member].iter().copied())
                .filter(|&child| self.follows(child))
                .collect();
            self.gather(below, &[], true, &mut members);
            rates = self.solve(&members);
        }
        let mut changed = Vec::new();
        for (&member, &rate) in members.iter().zip(&rates) {
            self.advance(member);
            if differ(rate, self.flows[member].rate) {
                changed.push(member);
            }
            self.flows[member].rate = rate;
        }
        for &member in &members {
            self.look_ahead(member);
        }
        for member in changed {
            for at in 0..self.below[member].len() {
                let child = self.below[member][at];
                if !self.shares.members.is_marked(child) {
                    self.look_ahead(child);
                }
            }
        }
    }

    /// Adds to `members` the running ones of `open` and all that share something with them, and with `followers` those
    /// that follow them.
    fn gather(
        &mut self,
        mut open: Vec<usize>,
        resources: &[usize],
        followers: bool,
        members: &mut Vec<usize>,
    ) {
        for &resource in resources {
            if self.shares.seen.mark(resource) {
                open.extend_from_slice(&self.shares.users[resource]);
            }
        }
        while let Some(hop) = open.pop() {
            if !self.flows[hop].is_running() || !self.shares.members.mark(hop) {
                continue;
            }
            members.push(hop);
            for &resource in &self.flows[hop].uses {
                if self.shares.seen.mark(resource) {
                    open.extend_from_slice(&self.shares.users[resource]);
                }
            }
            if followers {
                open.extend(self.below[hop].iter().filter(|&&child| self.follows(child)));
            }
        }
    }

    fn solve(&mut self, members: &[usize]) -> Vec<f64> {
        for (at, &member) in members.iter().enumerate() {
            self.shares.place[member] = at;
        }
        let mut parents = Vec::with_capacity(members.len());
        let mut alone = Vec::with_capacity(members.len());
        let mut uses = Lists::default();
        let mut capacities = Vec::new();
        let mut numbered: Vec<usize> = Vec::new();
        for (at, &member) in members.iter().enumerate() {
            let flow = &self.flows[member];
            let mut most = self.most(member);
            let mut parent = at;
            if self.follows(member) {
                if self.shares.members.is_marked(flow.parent) {
                    parent = self.shares.place[flow.parent];
                } else {
                    most = most.min(self.flows[flow.parent].rate);
                }
            }
            parents.push(parent);
            alone.push(most);
            for &resource in &flow.uses {
                // Zero: not numbered yet.
                if self.shares.resource_place[resource] == 0 {
                    capacities.push(self.shares.capacities[resource]);
                    numbered.push(resource);
                    self.shares.resource_place[resource] = capacities.len();
                }
            }
            uses.push(
                flow.uses
                    .iter()
                    .map(|&resource| self.shares.resource_place[resource] - 1),
            );
        }
        for resource in numbered {
            self.shares.resource_place[resource] = 0;
        }
        let settled = Contention {
            parents: &parents,
            alone: &alone,
            uses: &uses,
            capacities: &capacities,
        }
        .settle();
        settled.into_iter().map(|(rate, _)| rate).collect()
    }
}
