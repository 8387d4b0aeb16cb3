//! Tables: the outcome of a job, the hops of a plan.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::{self, Write};

use comfy_table::{CellAlignment, Table};
use stage_core::failure::{Code, Failure};
use stage_core::plan::{Plan, Tried};
use stage_core::topology::hostlist;
use stage_core::units::{ByteCount, Rate, show_time};

use crate::view::{Job, Node, NodeState};

/// More rows than this are folded: nobody reads a thousand.
const ROWS: usize = 40;

/// A table without lines: it survives copy and paste, `grep` and `awk`.
pub(crate) fn plain(header: &[&str], right: &[usize]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header(header.iter().copied());
    for at in right {
        if let Some(column) = table.column_mut(*at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Writes a table without blanks at the ends of lines.
pub(crate) fn write(out: &mut impl Write, table: &Table) -> io::Result<()> {
    for line in table.to_string().lines() {
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

/// What became of each target.
pub(crate) fn outcome(out: &mut impl Write, job: &Job) -> io::Result<()> {
    let mut table = plain(
        &[
            "node", "state", "rate", "parent", "streams", "seconds", "checksum",
        ],
        &[2, 4, 5],
    );
    let shown = worth_showing(&job.nodes);
    for node in &shown {
        let moved = node.received.0 > 0;
        let or_dash = |text: String| if moved { text } else { "-".to_owned() };
        table.add_row([
            node.name.to_string(),
            state(job, node),
            or_dash(node.rate.in_bytes().to_string()),
            or_dash(node.parent.as_ref().map_or("-".to_owned(), ToString::to_string)),
            or_dash(node.streams.to_string()),
            or_dash(format!("{:.2}", node.elapsed.as_secs_f64())),
            checksum(job, node),
        ]);
    }
    write(out, &table)?;
    let more = job.nodes.len() - shown.len();
    if more > 0 {
        writeln!(out, " and {more} more published, faster than these")?;
    }
    Ok(())
}

/// Where a target stands; how far, while bytes arrive.
fn state(job: &Job, node: &Node) -> String {
    match node.state {
        NodeState::Published if node.already => "already there".to_owned(),
        NodeState::Receiving if job.payload.0 > 0 => {
            format!("receiving {} %", node.kept.0.saturating_mul(100) / job.payload.0)
        }
        NodeState::Superseded => match &node.superseded_by {
            // As much of it as `stage status` needs.
            Some(job) => format!("superseded by {}", job.get(..8).unwrap_or(job)),
            None => node.state.to_string(),
        },
        state => state.to_string(),
    }
}

/// All, or else those that do not have it and the slowest of those that do, in target order.
fn worth_showing(nodes: &[Node]) -> Vec<&Node> {
    if nodes.len() <= ROWS {
        return nodes.iter().collect();
    }
    let mut order: Vec<usize> = (0..nodes.len()).collect();
    order.sort_by_key(|at| {
        let node = &nodes[*at];
        (node.state.is_done(), Reverse(node.elapsed), *at)
    });
    let missing = nodes.iter().filter(|node| !node.state.is_done()).count();
    order.truncate(ROWS.max(missing));
    order.sort_unstable();
    order.into_iter().map(|at| &nodes[at]).collect()
}

/// What is known of a copy: whose digest it bears, by proof.
fn checksum(job: &Job, node: &Node) -> String {
    let corrupt = |node: &Node| {
        node.failure
            .as_ref()
            .is_some_and(|failure| matches!(failure.code, Code::Corrupt | Code::Unexpected))
    };
    match node.state {
        NodeState::Published => match &job.sha256 {
            Some(sha256) => format!("ok {}", short(sha256)),
            None => "ok".to_owned(),
        },
        _ if corrupt(node) => "WRONG".to_owned(),
        _ => "-".to_owned(),
    }
}

/// Who is short of space by how much; nodes alike are one line, the one that is short by most first.
pub(super) fn space(out: &mut impl Write, nodes: &[(&Node, &Failure)]) -> io::Result<()> {
    let mut alike: BTreeMap<(Reverse<u64>, u64), Vec<&str>> = BTreeMap::new();
    for (node, failure) in nodes {
        if let Some(space) = &failure.space {
            let names = alike
                .entry((Reverse(space.short_by.0), space.needs.0))
                .or_default();
            names.push(node.name.as_str());
        }
    }
    if alike.is_empty() {
        return Ok(());
    }
    let mut table = plain(&["node", "needs", "free", "short by"], &[1, 2, 3]);
    let lines = alike.len();
    for ((Reverse(short), needs), names) in alike.into_iter().take(ROWS) {
        table.add_row([
            hostlist::fold(names),
            ByteCount(needs).to_string(),
            ByteCount(needs.saturating_sub(short)).to_string(),
            ByteCount(short).to_string(),
        ]);
    }
    for line in table.to_string().lines() {
        writeln!(out, " {}", line.trim_end())?;
    }
    if lines > ROWS {
        writeln!(out, "  and {} lines more: see --json", lines - ROWS)?;
    }
    Ok(())
}

/// The first digits of a digest: enough to tell two apart at a glance.
pub(super) fn short(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}

/// Who would receive from whom.
pub(crate) fn hops(out: &mut impl Write, plan: &Plan) -> io::Result<()> {
    let mut table = plain(
        &[
            "node",
            "parent",
            "depth",
            "streams",
            "rate",
            "done after",
            "limited by",
        ],
        &[2, 3, 4, 5],
    );
    for hop in &plan.hops {
        table.add_row([
            hop.child.to_string(),
            hop.parent.to_string(),
            hop.depth.to_string(),
            match &hop.congestion_control {
                Some(control) => format!("{} ({control})", hop.streams),
                None => hop.streams.to_string(),
            },
            if hop.rate == Rate::UNLIMITED {
                "-".to_owned()
            } else {
                hop.rate.in_bytes().to_string()
            },
            show_time(hop.finish).to_string(),
            hop.limited_by.clone(),
        ]);
    }
    write(out, &table)
}

/// What the planner tried.
pub(crate) fn tried(out: &mut impl Write, tried: &[Tried]) -> io::Result<()> {
    let mut table = plain(
        &[
            "layout",
            "forecast",
            "mean",
            "depth",
            "crossings",
            "limited by",
            "verdict",
        ],
        &[1, 2, 3, 4],
    );
    for one in tried {
        table.add_row([
            one.form.clone(),
            show_time(one.predicted).to_string(),
            show_time(one.mean).to_string(),
            one.depth.to_string(),
            one.crossings.to_string(),
            one.limited_by.clone(),
            one.verdict.clone(),
        ]);
    }
    writeln!(
        out,
        "tried, from best to worst (crossings: of links between switches, by all hops):"
    )?;
    write(out, &table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::samples::{finished, published, unfit};

    #[test]
    fn a_large_job_shows_who_is_missing_and_the_slowest() {
        let mut nodes: Vec<Node> = (0..100).map(|i| published(&format!("n{i}"), "n0")).collect();
        nodes[7] = unfit("n7");
        nodes[70].elapsed *= 2;
        let shown = worth_showing(&nodes);
        assert_eq!(shown.len(), ROWS);
        for name in ["n7", "n70"] {
            assert!(shown.iter().any(|node| node.name.as_str() == name));
        }
        let mut out = Vec::new();
        outcome(&mut out, &finished(nodes)).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(
            text.ends_with(" and 60 more published, faster than these\n"),
            "{text}"
        );
    }

    #[test]
    fn who_was_superseded_says_by_what() {
        let node = Node {
            state: NodeState::Superseded,
            superseded_by: Some("0a1b2c3d-0000-4000-8000-000000000000".to_owned()),
            ..unfit("n1")
        };
        let mut out = Vec::new();
        outcome(&mut out, &finished(vec![node])).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("superseded by 0a1b2c3d "), "{text}");
    }
}
