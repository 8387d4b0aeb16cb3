//! Star, chain and tree, laid along the walk: each gives every node its parent.
//!
//! All three cut the walk into runs and hang the first node of a run on the parent of them all. A node's branch is
//! thus one run of the walk, so a rack is entered as few times as its runs allow.

use super::Shape;
use super::ground::SOURCE;
use super::order::{Section, Walk};

/// The parent of each ordinal; the source is its own.
pub(super) type Parents = Vec<usize>;

/// A chain longer than this is cut into several, if that costs next to nothing: a long chain is fragile, and its
/// last node starts late.
pub(super) const LONGEST_CHAIN: usize = 256;

/// Lays a shape along the walk. In networks that the source is not in, it begins again at the node that leads there:
/// `tree:K` is K children a node and network.
pub(super) fn lay(walk: &Walk, shape: Shape) -> Parents {
    let count = walk.nodes().count() + 1;
    let mut parents = vec![SOURCE; count];
    for section in &walk.sections {
        match shape {
            Shape::Star => {
                for &node in &section.nodes {
                    parents[node] = section.root;
                }
            }
            Shape::Chain => chain(section, 0..section.nodes.len(), &mut parents),
            Shape::Tree(width) => tree(section, usize::from(width.max(1)), &mut parents),
        }
    }
    parents
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
    let mut parents = lay(walk, Shape::Chain);
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
                .max_by_key(|&at| {
                    (
                        section.gaps[at],
                        std::cmp::Reverse(at.abs_diff(even)),
                        std::cmp::Reverse(at),
                    )
                })
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
        Section {
            root: 0,
            nodes: (1..=gaps.len()).collect(),
            gaps,
        }
    }

    fn parents(section: Section, shape: Shape) -> Parents {
        lay(
            &Walk {
                sections: vec![section],
                latency: Default::default(),
                one_network: true,
            },
            shape,
        )
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
