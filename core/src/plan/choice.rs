//! Which shape: the one asked for, or the best of all.

use std::time::Duration;

use super::forecast::{self, Cause, Forecast};
use super::ground::{Ground, SOURCE};
use super::order::Walk;
use super::shapes::{self, Parents};
use super::{Shape, ShapeChoice};
use crate::units::show_time;

/// What `auto` tries.
const SHAPES: [Shape; 6] = [
    Shape::Star,
    Shape::Chain,
    Shape::Tree(2),
    Shape::Tree(3),
    Shape::Tree(4),
    Shape::Tree(8),
];

/// Plans whose last finish is within this factor of the best are as good: then the shallower is taken.
const AS_GOOD: f64 = 1.02;

/// What cutting a chain that is too long may cost.
const CUT_COST: f64 = 1.03;

/// `time` is at most `factor` times the other. In seconds, because a forecast may be as long as a time can be.
fn within(time: Duration, factor: f64, other: Duration) -> bool {
    time.as_secs_f64() <= other.as_secs_f64() * factor
}

/// A shape laid out, with its forecast.
pub(super) struct Candidate {
    pub(super) shape: Shape,
    pub(super) parents: Parents,
    pub(super) forecast: Forecast,
}

impl Candidate {
    fn new(ground: &Ground<'_>, walk: &Walk, shape: Shape) -> Self {
        let with = |parents: Parents| {
            let forecast = forecast::forecast(ground, walk, &parents);
            Self {
                shape,
                parents,
                forecast,
            }
        };
        let whole = with(shapes::lay(walk, shape));
        if shape == Shape::Chain
            && let Some(cut) = shapes::lay_short_chains(walk)
        {
            let cut = with(cut);
            if within(cut.last(), CUT_COST, whole.last()) {
                return cut;
            }
        }
        whole
    }

    /// When the last node has published; zero if there is none but the source.
    fn last(&self) -> Duration {
        self.forecast.last.map_or(Duration::ZERO, |(finish, _)| finish)
    }

    /// When all is published, the source's own copy too if it is a target (no shape makes that one faster), and what
    /// limits the last.
    fn whole(&self, ground: &Ground<'_>) -> (Duration, Cause) {
        let local = forecast::local_copy(ground);
        let is_target = ground.seats.contains(&SOURCE);
        match self.forecast.last {
            Some((finish, cause)) if !is_target || finish >= local.finish => (finish, cause),
            _ => (local.finish, local.cause),
        }
    }

    fn time(&self, ground: &Ground<'_>) -> impl std::fmt::Display {
        show_time(self.whole(ground).0)
    }
}

/// Chooses, and says why in a sentence for people.
pub(super) fn choose(ground: &Ground<'_>, walk: &Walk) -> (Candidate, String) {
    let (chosen, why) = match ground.request.shape {
        ShapeChoice::Fixed(shape) => {
            let candidate = Candidate::new(ground, walk, shape);
            let why = format!("{shape} as asked: {} forecast", candidate.time(ground));
            (candidate, why)
        }
        ShapeChoice::Auto => best(ground, walk),
    };
    let (_, cause) = chosen.whole(ground);
    let reason = format!("{why}; limited by {}", cause.words(ground));
    (chosen, reason)
}

fn best(ground: &Ground<'_>, walk: &Walk) -> (Candidate, String) {
    let mut candidates: Vec<Candidate> = Vec::with_capacity(SHAPES.len());
    for shape in SHAPES {
        // Few nodes make many shapes the same; the simplest name is the one to show.
        let candidate = Candidate::new(ground, walk, shape);
        if candidates.iter().all(|other| other.parents != candidate.parents) {
            candidates.push(candidate);
        }
    }
    let least = candidates.iter().map(Candidate::last).min().unwrap_or_default();
    let rank = |candidate: &Candidate| {
        // All that is not as good comes behind, by its finish; what is as good, by depth and shared links. The order
        // of nodes decides last: equal in all shapes, it leaves the order of the shapes.
        let last = if within(candidate.last(), AS_GOOD, least) {
            Duration::ZERO
        } else {
            candidate.last()
        };
        (last, candidate.forecast.depth, candidate.forecast.crossings)
    };
    candidates.sort_by_key(rank);
    let mut rest = candidates.into_iter();
    let chosen = rest.next().expect("at least one shape was tried");

    let mut others: Vec<Candidate> = Vec::new();
    for other in rest {
        let kind = std::mem::discriminant(&other.shape);
        let known = |seen: &Candidate| std::mem::discriminant(&seen.shape) == kind;
        if !known(&chosen) && !others.iter().any(known) {
            others.push(other);
        }
    }
    let mut why = format!("{}: {} forecast", chosen.shape, chosen.time(ground));
    let against: Vec<String> = others
        .iter()
        .map(|other| format!("{} for {}", other.time(ground), other.shape))
        .collect();
    if !against.is_empty() {
        why += &format!(" against {}", against.join(" and "));
    }
    if chosen.last() > least {
        why += " (as good as the best within 2 %, and shallower)";
    }
    (chosen, why)
}
