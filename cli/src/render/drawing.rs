//! A plan as a drawing: the tree of hops from the source down, over bands for the racks, with the rate of each hop on
//! its edge.
//!
//! One row a node, below its parent. The child with most nodes below it goes straight on, the others branch off to the
//! right: a chain is a straight line however long it is, and a tree of ten thousand is at most 14 columns deep.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use stage_core::id::NodeName;
use stage_core::plan::{Hop, Plan};
use stage_core::topology::Topology;
use stage_core::units::{Rate, show_time};

/// More rows than this, and equal neighbours are folded into one.
const ROWS: usize = 80;

const ROW: usize = 24;
const COLUMN: usize = 34;
/// Where the tree begins: left of it the racks' names.
const LEFT: usize = 150;
const TOP: usize = 84;
/// What the longest text to the right of a dot takes.
const TEXT: usize = 620;

/// A node, or several in a row that are alike.
#[derive(Debug, Clone, PartialEq)]
struct Row<'p> {
    /// `None` for the source.
    hop: Option<&'p Hop>,
    names: Vec<&'p NodeName>,
    rack: &'p str,
    column: usize,
    /// The parent's row.
    above: usize,
    /// How many it serves, the last of them straight on.
    serves: usize,
    /// Those that are folded in serve each other, else the parent serves each.
    is_chain: bool,
}

/// Draws a plan as SVG.
pub(crate) fn drawing(plan: &Plan, topology: &Topology) -> String {
    let mut rows = rows(plan, topology);
    if rows.len() > ROWS {
        rows = fold(rows);
    }
    svg(plan, &rows)
}

fn rack<'t>(topology: &'t Topology, node: &NodeName) -> &'t str {
    topology
        .node(node)
        .and_then(|node| node.interfaces.first())
        .map_or("", |leg| leg.attach.as_str())
}

/// Rows from the source down; the largest branch of each node last, and straight below it.
fn rows<'p>(plan: &'p Plan, topology: &'p Topology) -> Vec<Row<'p>> {
    let mut below: BTreeMap<&NodeName, Vec<&Hop>> = BTreeMap::new();
    for hop in &plan.hops {
        below.entry(&hop.parent).or_default().push(hop);
    }
    let mut sizes: BTreeMap<&NodeName, usize> = BTreeMap::new();
    // The source's own copy has its name, and none below it.
    let is_copy = |hop: &Hop| hop.child == plan.source;
    for hop in plan.order().into_iter().rev().filter(|hop| !is_copy(hop)) {
        let own = 1 + sizes.get(&hop.child).copied().unwrap_or(0);
        sizes.insert(&hop.child, own);
        *sizes.entry(&hop.parent).or_default() += own;
    }
    let size = |hop: &Hop| if is_copy(hop) { 1 } else { sizes[&hop.child] };

    let mut rows = vec![Row {
        hop: None,
        names: vec![&plan.source],
        rack: rack(topology, &plan.source),
        column: 0,
        above: 0,
        serves: 0,
        is_chain: false,
    }];
    // The next to draw is the last: hop, the parent's row, the column.
    let mut open: Vec<(&Hop, usize, usize)> = Vec::new();
    let mut at = 0;
    let mut name = Some(&plan.source);
    loop {
        if let Some(mut children) = name.and_then(|name| below.remove(name)) {
            rows[at].serves = children.len();
            children.sort_by_key(|hop| size(hop));
            let column = rows[at].column;
            let heaviest = children.len() - 1;
            open.extend(
                children
                    .into_iter()
                    .enumerate()
                    .map(|(i, hop)| (hop, at, if i == heaviest { column } else { column + 1 }))
                    .rev(),
            );
        }
        let Some((hop, above, column)) = open.pop() else {
            return rows;
        };
        at = rows.len();
        rows.push(Row {
            hop: Some(hop),
            names: vec![&hop.child],
            rack: rack(topology, &hop.child),
            column,
            above,
            serves: 0,
            is_chain: false,
        });
        name = (!is_copy(hop)).then_some(&hop.child);
    }
}

/// What is written of a hop.
fn words(hop: &Hop) -> (String, &str) {
    (hop.rate.in_bytes().to_string(), &hop.limited_by)
}

/// Folds neighbours that are alike: links of a chain within a rack, or leaves of one parent.
fn fold(rows: Vec<Row<'_>>) -> Vec<Row<'_>> {
    let mut folded: Vec<Row<'_>> = Vec::new();
    // Where each row went.
    let mut places = Vec::with_capacity(rows.len());
    for (at, row) in rows.into_iter().enumerate() {
        let above = places.get(row.above).copied().unwrap_or(0);
        if let (Some(last), Some(hop)) = (folded.last_mut(), row.hop)
            && let Some(before) = last.hop
            && (last.rack, words(before)) == (row.rack, words(hop))
            && last.column == row.column
        {
            let goes_on = row.above + 1 == at && last.serves == 1;
            let is_sibling = last.above == above && last.serves == 0 && row.serves == 0;
            let is_one = last.names.len() == 1;
            if goes_on && (is_one || last.is_chain) || is_sibling && (is_one || !last.is_chain) {
                last.names.push(&hop.child);
                // The last of them is what is done last, and what those below hang on.
                last.hop = Some(hop);
                last.serves = row.serves;
                last.is_chain = goes_on;
                places.push(folded.len() - 1);
                continue;
            }
        }
        places.push(folded.len());
        folded.push(Row { above, ..row });
    }
    folded
}

/// The colour and width of a hop, by its rate against the fastest.
fn pen(rate: Rate, fastest: f64) -> (&'static str, f64) {
    let share = rate.bytes_per_second() / fastest;
    let colour = match share {
        share if share >= 0.5 => "#1b7837",
        share if share >= 0.15 => "#b35806",
        _ => "#b2182b",
    };
    (colour, 1.0 + 3.0 * share.clamp(0.0, 1.0).sqrt())
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

fn svg(plan: &Plan, rows: &[Row<'_>]) -> String {
    let x = |row: &Row<'_>| LEFT + 20 + row.column * COLUMN;
    let y = |at: usize| TOP + at * ROW + ROW / 2;
    let deepest = rows.iter().map(|row| row.column).max().unwrap_or(0);
    let (width, height) = (LEFT + 20 + deepest * COLUMN + TEXT, TOP + rows.len() * ROW + 16);
    let fastest = plan
        .hops
        .iter()
        .map(|hop| hop.rate.bytes_per_second())
        .fold(0.0, f64::max);

    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
        font-family=\"DejaVu Sans, Verdana, sans-serif\" font-size=\"12\">\n\
        <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    let mut add = |text: String| {
        out.push_str(&text);
        out.push('\n');
    };
    add(format!(
        "<text x=\"12\" y=\"24\" font-size=\"15\" font-weight=\"bold\">{} from {} to {} nodes, depth {}</text>",
        plan.shape,
        plan.source,
        plan.hops.len(),
        plan.depth
    ));
    add(format!(
        "<text x=\"12\" y=\"44\">forecast {}, no plan could beat {}</text>",
        show_time(plan.predicted),
        show_time(plan.bound)
    ));
    add("<text x=\"12\" y=\"62\" fill=\"#555555\">on each edge its rate: \
        <tspan fill=\"#1b7837\">at least half of the fastest hop</tspan>, <tspan fill=\"#b35806\">at least 15 %</tspan>, \
        <tspan fill=\"#b2182b\">less</tspan></text>"
        .to_owned());

    // Bands for racks.
    let mut start = 0;
    let mut shade = false;
    for end in 1..=rows.len() {
        if end < rows.len() && rows[end].rack == rows[start].rack {
            continue;
        }
        let colour = if shade { "#eef2f7" } else { "#f8f9fb" };
        let (top, tall) = (TOP + start * ROW, (end - start) * ROW);
        add(format!(
            "<rect x=\"0\" y=\"{top}\" width=\"{width}\" height=\"{tall}\" fill=\"{colour}\"/>\
            <text x=\"12\" y=\"{}\" fill=\"#334155\" font-weight=\"bold\">{}</text>",
            top + 16,
            escape(rows[start].rack)
        ));
        shade = !shade;
        start = end;
    }

    // Edges below, dots and texts above them.
    for (at, row) in rows.iter().enumerate() {
        let Some(hop) = row.hop else { continue };
        let (colour, thick) = pen(hop.rate, fastest);
        let from = (x(&rows[row.above]), y(row.above));
        let to = (x(row), y(at));
        let path = if from.0 == to.0 {
            format!("M{} {}V{}", from.0, from.1, to.1)
        } else {
            // It leaves the line of the straight child, which passes here: two colours on one line would mix.
            format!("M{} {}q0 10 10 10H{}", from.0, to.1.saturating_sub(10), to.0)
        };
        add(format!(
            "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"{thick:.1}\"/>"
        ));
    }
    for (at, row) in rows.iter().enumerate() {
        let (x, y) = (x(row), y(at));
        let mut text = String::new();
        match row.hop {
            None => {
                write!(
                    text,
                    "<tspan font-weight=\"bold\">{}</tspan> has it",
                    row.names[0]
                )
                .expect("a string takes all");
            }
            Some(hop) => {
                let (colour, _) = pen(hop.rate, fastest);
                let who = match row.names.as_slice() {
                    [one] => one.to_string(),
                    [first, .., last] if row.is_chain => {
                        format!("{first} → {last} ({} in a chain)", row.names.len())
                    }
                    [first, .., last] => format!("{first} … {last} ({}, each)", row.names.len()),
                    [] => String::new(),
                };
                write!(
                    text,
                    "<tspan fill=\"{colour}\">{}</tspan> <tspan font-weight=\"bold\">{who}</tspan> \
                    <tspan fill=\"#555555\">done after {}, limited by {}</tspan>",
                    hop.rate.in_bytes(),
                    show_time(hop.finish),
                    escape(&hop.limited_by)
                )
                .expect("a string takes all");
            }
        }
        let fill = if row.names.len() > 1 { "#334155" } else { "#ffffff" };
        add(format!(
            "<circle cx=\"{x}\" cy=\"{y}\" r=\"4.5\" fill=\"{fill}\" stroke=\"#334155\" stroke-width=\"1.5\"/>\
            <text x=\"{}\" y=\"{}\">{text}</text>",
            x + 12,
            y + 4
        ));
    }
    out.push_str("</svg>\n");
    out
}

#[cfg(test)]
mod tests {
    use stage_core::plan::{Facts, Request, plan};

    use super::*;

    fn racks(racks: usize, each: usize) -> Topology {
        let mut text = format!(
            "[cluster]\nname = \"c\"\n[[switch]]\nname = \"core\"\n[[switch]]\nname = \"rack[1-{racks}]\"\n\
            [[link]]\nbetween = [\"rack[1-{racks}]\", \"core\"]\ncapacity = \"10 Gbit/s\"\n\
            [[node]]\nname = \"head\"\nattach = \"core\"\nnic = \"10 Gbit/s\"\n"
        );
        for rack in 1..=racks {
            let (first, last) = ((rack - 1) * each + 1, rack * each);
            writeln!(
                text,
                "[[node]]\nname = \"n[{first}-{last}]\"\nattach = \"rack{rack}\"\nnic = \"10 Gbit/s\""
            )
            .unwrap();
        }
        Topology::parse("c.toml", &text).unwrap()
    }

    fn planned(topology: &Topology, shape: &str) -> Plan {
        let names: Vec<NodeName> = topology.nodes().iter().map(|node| node.name.clone()).collect();
        let request = Request {
            source: names[0].clone(),
            // The source too: a local copy.
            targets: names,
            size: "10 GiB".parse().unwrap(),
            shape: shape.parse().unwrap(),
            streams: None,
            limit: None,
            source_limit: None,
            encrypted: true,
        };
        plan(topology, &request, &Facts::default()).unwrap()
    }

    #[test]
    fn every_node_is_a_row_below_its_parent() {
        let topology = racks(2, 4);
        for shape in ["chain", "star", "tree:2"] {
            let plan = planned(&topology, shape);
            let rows = rows(&plan, &topology);
            assert_eq!(rows.len(), 10, "eight nodes, the source and its own copy");
            for (at, row) in rows.iter().enumerate().skip(1) {
                let hop = row.hop.unwrap();
                assert!(row.above < at);
                assert_eq!(*rows[row.above].names[0], hop.parent);
                assert!(row.column - rows[row.above].column <= 1);
            }
        }
        let chain = planned(&topology, "chain");
        let columns: Vec<usize> = rows(&chain, &topology).iter().map(|row| row.column).collect();
        assert_eq!(
            columns.iter().sum::<usize>(),
            1,
            "straight, but for the source's own copy: {columns:?}"
        );
    }

    #[test]
    fn a_large_plan_is_folded_and_loses_nobody() {
        let topology = racks(10, 40);
        for (shape, most) in [("chain", 30), ("star", 30), ("tree:2", 400)] {
            let plan = planned(&topology, shape);
            let rows = fold(rows(&plan, &topology));
            assert!(rows.len() <= most, "{shape}: {}", rows.len());
            assert_eq!(rows.iter().map(|row| row.names.len()).sum::<usize>(), 402);
        }
    }

    #[test]
    fn the_drawing_names_racks_nodes_and_rates() {
        let topology = racks(2, 3);
        let plan = planned(&topology, "tree:2");
        let svg = drawing(&plan, &topology);
        for hop in &plan.hops {
            assert!(svg.contains(&format!(">{}</tspan>", hop.rate.in_bytes())));
            assert!(svg.contains(&format!("<tspan font-weight=\"bold\">{}</tspan>", hop.child)));
        }
        for rack in ["core", "rack1", "rack2"] {
            assert!(svg.contains(&format!(">{rack}</text>")), "{rack}");
        }
        assert_eq!(svg.matches("<path").count(), plan.hops.len());
    }
}
