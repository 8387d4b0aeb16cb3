//! Star, chain and tree, laid along the walk: each gives every node its parent.
//!
//! All three cut the walk into runs and hang the first node of a run on the parent of them all. A node's branch is
//! thus one run of the walk, so a rack is entered as few times as its runs allow.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::Shape;
use super::ground::SOURCE;
use super::order::{Section, Walk};

/// The parent of each ordinal; the source is its own.
pub(super) type Parents = Vec<usize>;

/// A chain longer than this is cut into several, if that costs next to nothing: a long chain is fragile, and its
/// last node starts late.
pub(super) const LONGEST_CHAIN: usize = 256;

/// A way to lay the walk out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// A shape over all nodes.
    Plain(Shape),
    /// A chain within each rack, and a tree of this width over the first nodes of the racks: each uplink is crossed
    /// once inwards, and the way to the last node is shorter than one chain through all.
    Racks(u16),
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(shape) => shape.fmt(f),
            Self::Racks(width) => write!(f, "chains within racks under tree:{width}"),
        }
    }
}

/// Lays the walk out. In networks that the source is not in, it begins again at the node that leads there: `tree:K` is
/// K children a node and network.
pub(super) fn lay(walk: &Walk, layout: Layout) -> Parents {
    let mut parents = vec![SOURCE; walk.nodes().count() + 1];
    for section in &walk.sections {
        lay_section(section, layout, &mut parents);
    }
    parents
}

/// The same over the nodes that are fit, with the sick ones as leaves beside them: nobody waits behind one, and those
/// that serve one are those of its switch that serve fewest. `None` if none is sick.
pub(super) fn lay_aside(walk: &Walk, layout: Layout) -> Option<Parents> {
    if !walk.sections.iter().any(|section| section.sick.contains(&true)) {
        return None;
    }
    let mut parents = vec![SOURCE; walk.nodes().count() + 1];
    let mut served = vec![0usize; parents.len()];
    let mut all_sick = Vec::with_capacity(walk.sections.len());
    for section in &walk.sections {
        let (fit, sick) = part(section);
        lay_section(&fit, layout, &mut parents);
        for &node in &fit.nodes {
            served[parents[node]] += 1;
        }
        all_sick.push((fit, sick));
    }
    for (fit, sick) in all_sick {
        let mut hosts: BTreeMap<usize, BTreeSet<(usize, Reverse<usize>, usize)>> = BTreeMap::new();
        for (at, (&node, &place)) in fit.nodes.iter().zip(&fit.places).enumerate() {
            hosts
                .entry(place)
                .or_default()
                .insert((served[node], Reverse(at), node));
        }
        for (node, place) in sick {
            let hosts = hosts.get_mut(&place).expect("the fastest at a switch is fit");
            let (serves, at, host) = hosts.pop_first().expect("a host is put back");
            parents[node] = host;
            hosts.insert((serves + 1, at, host));
        }
    }
    Some(parents)
}

/// A section without its sick nodes, and these with their places.
fn part(section: &Section) -> (Section, Vec<(usize, usize)>) {
    let mut fit = Section {
        root: section.root,
        nodes: Vec::new(),
        gaps: Vec::new(),
        places: Vec::new(),
        sick: Vec::new(),
    };
    let mut sick = Vec::new();
    let mut gap = 0;
    for at in 0..section.nodes.len() {
        gap = gap.max(section.gaps[at]);
        if section.sick[at] {
            sick.push((section.nodes[at], section.places[at]));
            continue;
        }
        fit.nodes.push(section.nodes[at]);
        fit.gaps.push(std::mem::take(&mut gap));
        fit.places.push(section.places[at]);
        fit.sick.push(false);
    }
    (fit, sick)
}

fn lay_section(section: &Section, layout: Layout, parents: &mut Parents) {
    match layout {
        Layout::Plain(Shape::Star) => {
            for &node in &section.nodes {
                parents[node] = section.root;
            }
        }
        Layout::Plain(Shape::Chain) => chain(section, 0..section.nodes.len(), parents),
        Layout::Plain(Shape::Tree(width)) => tree(section, usize::from(width.max(1)), parents),
        Layout::Racks(width) => racks(section, usize::from(width.max(1)), parents),
    }
}

fn racks(section: &Section, width: usize, parents: &mut Parents) {
    let mut heads = Section {
        root: section.root,
        nodes: Vec::new(),
        gaps: Vec::new(),
        places: Vec::new(),
        sick: Vec::new(),
    };
    let mut before = None;
    for at in 0..section.nodes.len() {
        let (node, place) = (section.nodes[at], section.places[at]);
        match before {
            Some((above, same)) if same == place => parents[node] = above,
            _ => {
                heads.nodes.push(node);
                heads.gaps.push(section.gaps[at]);
            }
        }
        before = Some((node, place));
    }
    tree(&heads, width, parents);
}

/// Several chains from the source, none longer than [`LONGEST_CHAIN`]; `None` if one chain does not exceed it.
pub(super) fn lay_short_chains(walk: &Walk) -> Option<Parents> {
    if walk
        .sections
        .iter()
        .all(|section| section.nodes.len() <= LONGEST_CHAIN)
    {
        return None;
    }
    let mut parents = lay(walk, Layout::Plain(Shape::Chain));
    for section in &walk.sections {
        // Both ends of a run may move by a quarter of it: then the longest still fits.
        let runs = section.nodes.len().div_ceil(LONGEST_CHAIN * 2 / 3);
        for run in cut(section, 0..section.nodes.len(), runs) {
            chain(section, run, &mut parents);
        }
    }
    Some(parents)
}

fn chain(section: &Section, run: std::ops::Range<usize>, parents: &mut Parents) {
    let mut before = section.root;
    for &node in &section.nodes[run] {
        parents[node] = before;
        before = node;
    }
}

fn tree(section: &Section, width: usize, parents: &mut Parents) {
    let mut open = vec![(section.root, 0..section.nodes.len())];
    while let Some((parent, run)) = open.pop() {
        for part in cut(section, run, width) {
            let first = section.nodes[part.start];
            parents[first] = parent;
            open.push((first, part.start + 1..part.end));
        }
    }
}

/// Cuts a run into at most `parts` parts of about equal length, none empty. A cut moves by up to a quarter of a part to
/// where the walk passes most links, so that a rack falls into one part.
fn cut(section: &Section, run: std::ops::Range<usize>, parts: usize) -> Vec<std::ops::Range<usize>> {
    let length = run.len();
    let parts = parts.min(length);
    let mut cuts = Vec::with_capacity(parts);
    let mut start = run.start;
    for part in 1..=parts {
        let end = if part == parts {
            run.end
        } else {
            let even = run.start + length * part / parts;
            let play = (length / parts).div_ceil(4);
            let first = even.saturating_sub(play).max(start + 1);
            let last = (even + play).min(run.end - (parts - part));
            (first..=last)
                .max_by_key(|&at| (section.gaps[at], Reverse(at.abs_diff(even)), Reverse(at)))
                .unwrap_or(first)
        };
        cuts.push(start..end);
        start = end;
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(racks: &[usize]) -> Section {
        let gaps: Vec<usize> = racks
            .iter()
            .flat_map(|&rack| (0..rack).map(|i| if i == 0 { 2 } else { 0 }))
            .collect();
        let places = racks
            .iter()
            .enumerate()
            .flat_map(|(place, &rack)| std::iter::repeat_n(place, rack));
        Section {
            root: 0,
            nodes: (1..=gaps.len()).collect(),
            places: places.collect(),
            sick: vec![false; gaps.len()],
            gaps,
        }
    }

    fn walk(section: Section) -> Walk {
        Walk {
            sections: vec![section],
            latency: Default::default(),
            one_network: true,
        }
    }

    fn parents(section: Section, shape: Shape) -> Parents {
        lay(&walk(section), Layout::Plain(shape))
    }

    #[test]
    fn racks_are_chains_under_a_tree() {
        let walk = walk(section(&[3, 2, 2]));
        assert_eq!(lay(&walk, Layout::Racks(1)), [0, 0, 1, 2, 1, 4, 4, 6]);
        assert_eq!(lay(&walk, Layout::Racks(2)), [0, 0, 1, 2, 0, 4, 4, 6]);
    }

    #[test]
    fn sick_nodes_hang_beside_those_that_serve_fewest() {
        let mut section = section(&[4, 3]);
        assert_eq!(
            lay_aside(&walk(section.clone()), Layout::Plain(Shape::Chain)),
            None
        );
        // The last two of the first rack, the last one of the second.
        for at in [2, 3, 6] {
            section.sick[at] = true;
        }
        let chain = lay_aside(&walk(section.clone()), Layout::Plain(Shape::Chain)).unwrap();
        assert_eq!(chain, [0, 0, 1, 2, 1, 2, 5, 6]);
        let tree = lay_aside(&walk(section), Layout::Plain(Shape::Tree(2))).unwrap();
        assert_eq!(tree, [0, 0, 1, 2, 2, 0, 5, 6]);
    }

    #[test]
    fn shapes_are_what_they_are_called() {
        assert_eq!(parents(section(&[4]), Shape::Star), [0, 0, 0, 0, 0]);
        assert_eq!(parents(section(&[4]), Shape::Chain), [0, 0, 1, 2, 3]);
        assert_eq!(parents(section(&[6]), Shape::Tree(2)), [0, 0, 1, 1, 0, 4, 4]);
        assert_eq!(
            parents(section(&[4]), Shape::Tree(1)),
            parents(section(&[4]), Shape::Chain)
        );
        assert_eq!(
            parents(section(&[4]), Shape::Tree(8)),
            parents(section(&[4]), Shape::Star)
        );
    }

    #[test]
    fn a_cut_falls_between_racks() {
        assert_eq!(cut(&section(&[7, 9]), 0..16, 2), [0..7, 7..16]);
        assert_eq!(cut(&section(&[9, 7]), 0..16, 2), [0..9, 9..16]);
        assert_eq!(cut(&section(&[3, 4]), 0..7, 2), [0..3, 3..7]);
        // Too far away to be worth an uneven tree.
        assert_eq!(cut(&section(&[2, 14]), 0..16, 2), [0..8, 8..16]);
    }

    #[test]
    fn cuts_cover_the_run_without_an_empty_part() {
        let section = section(&[3, 1, 1, 9, 2, 5, 1]);
        for parts in 1..30 {
            for start in 0..22 {
                let cuts = cut(&section, start..22, parts);
                assert_eq!(cuts.len(), parts.min(22 - start));
                assert!(cuts.iter().all(|part| !part.is_empty()));
                let covered: Vec<usize> = cuts.into_iter().flatten().collect();
                assert_eq!(covered, (start..22).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn no_short_chain_is_long() {
        for racks in [vec![257], vec![1000, 3, 255], vec![40; 300]] {
            let count: usize = racks.iter().sum();
            let walk = Walk {
                sections: vec![section(&racks)],
                latency: Default::default(),
                one_network: true,
            };
            let parents = lay_short_chains(&walk).unwrap();
            let mut depth = vec![0; count + 1];
            for node in walk.nodes() {
                depth[node] = depth[parents[node]] + 1;
            }
            assert!(
                depth.iter().all(|&d| d <= LONGEST_CHAIN),
                "{:?}",
                depth.iter().max()
            );
        }
        let short = Walk {
            sections: vec![section(&[256])],
            latency: Default::default(),
            one_network: true,
        };
        assert_eq!(lay_short_chains(&short), None);
    }
}
