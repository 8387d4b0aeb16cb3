//! Which shape: the one asked for, or the best of all.

use std::time::Duration;

use super::forecast::{self, Cause, Forecast};
use super::ground::{Ground, SOURCE};
use super::order::Walk;
use super::shapes::{self, Layout, Parents};
use super::{Shape, ShapeChoice, Tried};
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

/// Widths of the tree over racks that `auto` tries.
const RACK_TREES: [u16; 3] = [1, 2, 4];

/// The widest fan-out that has a name.
const WIDEST: usize = 64;

/// A layout with its forecast.
pub(super) struct Candidate {
    pub(super) shape: Shape,
    /// The layout in words.
    form: String,
    pub(super) parents: Parents,
    pub(super) forecast: Forecast,
}

impl Candidate {
    fn new(ground: &Ground<'_>, walk: &Walk, shape: Shape, form: String, parents: Parents) -> Self {
        let forecast = forecast::forecast(ground, walk, &parents);
        Self {
            shape,
            form,
            parents,
            forecast,
        }
    }

    /// A shape as it is called.
    fn plain(ground: &Ground<'_>, walk: &Walk, shape: Shape) -> Self {
        let with = |parents| Self::new(ground, walk, shape, shape.to_string(), parents);
        let whole = with(shapes::lay(walk, Layout::Plain(shape)));
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

    /// A layout that has no name of its own: it is called a tree of the width that it has.
    fn unnamed(ground: &Ground<'_>, walk: &Walk, form: String, parents: Parents) -> Option<Self> {
        let mut served = vec![0usize; parents.len()];
        for &parent in &parents[1..] {
            served[parent] += 1;
        }
        let width = served.into_iter().max().filter(|width| *width <= WIDEST)?;
        let shape = match u16::try_from(width) {
            Ok(width) if width > 1 => Shape::Tree(width),
            _ => Shape::Chain,
        };
        Some(Self::new(ground, walk, shape, form, parents))
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

/// What was chosen, why in a sentence for people, and all that was tried, the chosen first and then from best to worst.
pub(super) struct Choice {
    pub(super) chosen: Candidate,
    pub(super) reason: String,
    pub(super) tried: Vec<Tried>,
}

/// Chooses.
pub(super) fn choose(ground: &Ground<'_>, walk: &Walk) -> Choice {
    let mut candidates = match ground.request.shape {
        ShapeChoice::Fixed(shape) => vec![Candidate::plain(ground, walk, shape)],
        ShapeChoice::Auto => all(ground, walk),
    };
    let ranks = rank(&candidates);
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    // The order in which they were tried decides last.
    order.sort_by_key(|&at| (ranks[at], at));
    let chosen = &candidates[order[0]];
    let mut reason = match ground.request.shape {
        ShapeChoice::Fixed(shape) => format!("{shape} as asked: {} forecast", chosen.time(ground)),
        ShapeChoice::Auto => why(ground, &candidates, &order),
    };
    let (_, cause) = chosen.whole(ground);
    reason += &format!("; limited by {}", cause.words(ground));
    let tried = order
        .iter()
        .map(|&at| {
            let candidate = &candidates[at];
            let (predicted, cause) = candidate.whole(ground);
            let verdict = if at == order[0] {
                "chosen".to_owned()
            } else {
                verdict(candidate, &ranks[at], chosen, &ranks[order[0]])
            };
            Tried {
                form: candidate.form.clone(),
                shape: candidate.shape,
                predicted,
                mean: candidate.forecast.mean,
                depth: candidate.forecast.depth,
                crossings: candidate.forecast.crossings,
                limited_by: cause.words(ground),
                verdict,
            }
        })
        .collect();
    let chosen = candidates.swap_remove(order[0]);
    Choice {
        chosen,
        reason,
        tried,
    }
}

/// All that `auto` tries, none twice.
fn all(ground: &Ground<'_>, walk: &Walk) -> Vec<Candidate> {
    let mut candidates: Vec<Candidate> = Vec::new();
    // Few nodes make many shapes the same; the simplest name, which comes first, is the one to show.
    let is_new = |candidates: &[Candidate], parents: &Parents| {
        candidates.iter().all(|other| other.parents != *parents)
    };
    for shape in SHAPES {
        let candidate = Candidate::plain(ground, walk, shape);
        if is_new(&candidates, &candidate.parents) {
            candidates.push(candidate);
        }
    }
    let racks = RACK_TREES.map(Layout::Racks);
    let aside = SHAPES[1..].iter().copied().map(Layout::Plain).chain(racks);
    let more = racks
        .into_iter()
        .map(|layout| (layout.to_string(), Some(shapes::lay(walk, layout))))
        .chain(aside.map(|layout| {
            (
                format!("{layout}, slow nodes beside it"),
                shapes::lay_aside(walk, layout),
            )
        }));
    for (form, parents) in more {
        if let Some(parents) = parents.filter(|parents| is_new(&candidates, parents)) {
            candidates.extend(Candidate::unnamed(ground, walk, form, parents));
        }
    }
    candidates
}

/// The less, the better: whether it is slower than the best (and its finish), whether its mean node is later than need
/// be, depth, links crossed.
///
/// The mean comes before the depth, lest one slow node, which makes every shape end late, make all others wait.
type Rank = (Duration, Duration, u16, usize);

fn rank(candidates: &[Candidate]) -> Vec<Rank> {
    let least = candidates.iter().map(Candidate::last).min().unwrap_or_default();
    let as_fast = |candidate: &&Candidate| within(candidate.last(), AS_GOOD, least);
    let mean = candidates
        .iter()
        .filter(as_fast)
        .map(|candidate| candidate.forecast.mean)
        .min()
        .unwrap_or_default();
    let zero_within = |time: Duration, best: Duration| {
        if within(time, AS_GOOD, best) {
            Duration::ZERO
        } else {
            time
        }
    };
    candidates
        .iter()
        .map(|candidate| {
            (
                zero_within(candidate.last(), least),
                zero_within(candidate.forecast.mean, mean),
                candidate.forecast.depth,
                candidate.forecast.crossings,
            )
        })
        .collect()
}

/// Why a candidate was not chosen.
fn verdict(candidate: &Candidate, rank: &Rank, chosen: &Candidate, best: &Rank) -> String {
    let more = |time: Duration, than: Duration| {
        let factor = time.as_secs_f64() / than.as_secs_f64();
        if factor < 2.0 {
            format!("{:.0} % later", (factor - 1.0) * 100.0)
        } else {
            format!("{factor:.1} times as late")
        }
    };
    if rank.0 != best.0 {
        format!("ends {}", more(candidate.last(), chosen.last()))
    } else if rank.1 != best.1 {
        format!(
            "as fast, but its mean node is done {}",
            more(candidate.forecast.mean, chosen.forecast.mean)
        )
    } else if rank.2 != best.2 {
        "as good, but deeper".to_owned()
    } else if rank.3 != best.3 {
        "as good, but crosses more links".to_owned()
    } else {
        "as good in all, but less simple".to_owned()
    }
}

fn why(ground: &Ground<'_>, candidates: &[Candidate], order: &[usize]) -> String {
    let chosen = &candidates[order[0]];
    let mut others: Vec<&Candidate> = Vec::new();
    for other in order[1..].iter().map(|&at| &candidates[at]) {
        let kind = std::mem::discriminant(&other.shape);
        let known = |seen: &Candidate| std::mem::discriminant(&seen.shape) == kind;
        if !known(chosen) && !others.iter().any(|seen| known(seen)) {
            others.push(other);
        }
    }
    let mut why = format!("{}: {} forecast", chosen.form, chosen.time(ground));
    let against: Vec<String> = others
        .iter()
        .map(|other| format!("{} for {}", other.time(ground), other.form))
        .collect();
    if !against.is_empty() {
        why += &format!(" against {}", against.join(" and "));
    }
    let fastest = candidates
        .iter()
        .min_by_key(|candidate| candidate.last())
        .unwrap_or(chosen);
    if chosen.last() > fastest.last() {
        let better = if within(fastest.forecast.mean, AS_GOOD, chosen.forecast.mean) {
            "shallower"
        } else {
            "the mean node is done earlier"
        };
        why += &format!(" (as good as the best within 2 %, and {better})");
    }
    why
}
