//! `stage-lab scale`: how near plans of many nodes come to what no plan could beat, and how long planning takes. Without any daemon.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use serde_json::{Value, json};
use stage_core::plan::{Facts as Known, Request, ShapeChoice, plan};
use stage_core::topology::Topology;
use stage_core::units::ByteCount;

use super::{parsed, yes};
use crate::bench::{Common, Facts, Spread, Table, binary, rounded, spread, word};

/// Nodes at each switch.
const RACK: u32 = 40;

/// Ten times the nodes may take so many times as long: near linear.
const GROWTH: f64 = 20.0;

/// What can be asked for.
#[derive(Debug, clap::Args)]
pub(crate) struct Scale {
    #[command(flatten)]
    common: Common,
    /// How many targets, in racks of 40.
    #[arg(long, value_name = "N", num_args = 1.., default_values_t = [100, 400, 1000, 4000, 10_000])]
    nodes: Vec<u32>,
    /// How often each is planned.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
}

/// Plans, prints the tables, keeps the figures. Whether all was as asked.
///
/// # Errors
/// For people: what was asked for cannot be done.
pub(crate) fn run(scale: &Scale) -> Result<bool, String> {
    let stage = binary(&scale.common.stage)?;
    let facts = Facts::now().of(&stage);
    let dir = std::env::temp_dir().join(format!("stage-lab-scale-{}", std::process::id()));
    fs::create_dir(&dir).map_err(|why| format!("{}: {why}", dir.display()))?;
    let result = tables(scale, &stage, &dir);
    // What is left there is known by its name.
    drop(fs::remove_dir_all(&dir));
    let (tables, right) = result?;
    scale.common.keep("scale", &facts, &tables)?;
    Ok(right)
}

/// Equal nodes at one switch.
fn equal(nodes: u32) -> String {
    format!(
        "[cluster]\nname = \"lab\"\n[[switch]]\nname = \"core\"\n\
         [[node]]\nname = \"n[0-{nodes}]\"\nattach = \"core\"\nnic = \"10 Gbit/s\"\n"
    )
}

/// Racks with uplinks that carry a tenth of what their nodes could send, and the source beside them.
fn racks(nodes: u32) -> String {
    let racks = nodes.div_ceil(RACK);
    let mut text = format!(
        "[cluster]\nname = \"lab\"\n[[switch]]\nname = \"core\"\n[[switch]]\nname = \"rack[1-{racks}]\"\n\
         [[link]]\nbetween = [\"rack[1-{racks}]\", \"core\"]\ncapacity = \"40 Gbit/s\"\n\
         [[node]]\nname = \"n0\"\nattach = \"core\"\nnic = \"10 Gbit/s\"\n"
    );
    for rack in 1..=racks {
        let (first, last) = ((rack - 1) * RACK + 1, (rack * RACK).min(nodes));
        writeln!(
            text,
            "[[node]]\nname = \"n[{first}-{last}]\"\nattach = \"rack{rack}\"\nnic = \"10 Gbit/s\""
        )
        .expect("a string takes all");
    }
    text
}

/// A plan as `stage plan` makes it.
struct Planned {
    /// Of the whole command, each time.
    command: Vec<f64>,
    /// Of a command that only reads the topology.
    reading: Vec<f64>,
    /// Of planning alone, in this program.
    alone: Vec<f64>,
    plan: Value,
}

impl Planned {
    fn share(&self) -> f64 {
        let figure = |name: &str| self.plan[name].as_f64().unwrap_or(f64::NAN);
        figure("bound_seconds") / figure("predicted_seconds")
    }

    fn middle(&self) -> f64 {
        Spread::of(self.alone.iter().map(|seconds| seconds * 1e3)).map_or(f64::NAN, |all| all.median)
    }
}

fn command(stage: &Path, words: &[&str]) -> Result<(f64, String), String> {
    let started = Instant::now();
    let output = Command::new(stage)
        .args(words)
        .output()
        .map_err(|why| format!("{}: {why}", stage.display()))?;
    let seconds = started.elapsed().as_secs_f64();
    if output.status.success() {
        Ok((seconds, String::from_utf8_lossy(&output.stdout).into_owned()))
    } else {
        Err(format!(
            "stage {}: {}",
            words.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        ))
    }
}

fn planned(scale: &Scale, stage: &Path, dir: &Path, text: &str, size: &str) -> Result<Planned, String> {
    let file: PathBuf = dir.join("topology.toml");
    fs::write(&file, text).map_err(|why| format!("{}: {why}", file.display()))?;
    let topology = parsed("scale", text);
    let request = request(&topology, size);
    let mut made = Planned {
        command: Vec::new(),
        reading: Vec::new(),
        alone: Vec::new(),
        plan: Value::Null,
    };
    for _ in 0..scale.rounds {
        let topology_words = ["topology", "check", word(&file)];
        made.reading.push(command(stage, &topology_words)?.0);
        let words = [
            "plan",
            "--topology",
            word(&file),
            "--from",
            "n0",
            "--to",
            "all,!n0",
            "--size",
            size,
            "--json",
        ];
        let (seconds, lines) = command(stage, &words)?;
        made.command.push(seconds);
        let last = lines.lines().last().unwrap_or_default();
        let event: Value = serde_json::from_str(last).map_err(|why| format!("stage plan: {why}"))?;
        made.plan = event["plan"].clone();
        let started = Instant::now();
        plan(&topology, &request, &Known::default()).map_err(|why| why.to_string())?;
        made.alone.push(started.elapsed().as_secs_f64());
    }
    // Ten thousand hops are no figure.
    if let Some(fields) = made.plan.as_object_mut() {
        fields.remove("hops");
    }
    Ok(made)
}

fn request(topology: &Topology, size: &str) -> Request {
    let mut names = topology.nodes().iter().map(|node| node.name.clone());
    let source = "n0".parse().expect("a plain name");
    Request {
        targets: names.by_ref().filter(|name| *name != source).collect(),
        source,
        size: size
            .parse::<ByteCount>()
            .expect("the bench's own sizes are right"),
        shape: ShapeChoice::Auto,
        streams: None,
        limit: None,
        source_limit: None,
        encrypted: true,
    }
}

fn tables(scale: &Scale, stage: &Path, dir: &Path) -> Result<(Vec<Table>, bool), String> {
    let mut near = Table::new(
        "how near plans come to what no plan could beat",
        &[
            "fabric",
            "size",
            "shape",
            "bound s",
            "forecast s",
            "bound / forecast",
            "asked",
            "as asked",
        ],
    );
    let mut times = Table::new(
        "how long planning takes",
        &[
            "targets",
            "planning alone, ms",
            "µs for each target",
            "stage plan --json as a whole, ms",
            "of it stage topology check, ms",
            "asked",
            "as asked",
        ],
    );
    let mut right = true;
    let mut compare = |fabric: String, size: &str, made: &Planned, asked: Option<f64>| {
        let share = made.share();
        let fits = asked.is_none_or(|asked| share >= asked);
        right &= fits;
        let figure = |name: &str| format!("{:.1}", made.plan[name].as_f64().unwrap_or(f64::NAN));
        near.add(
            vec![
                fabric,
                size.to_owned(),
                made.plan["shape"].as_str().unwrap_or("?").to_owned(),
                figure("bound_seconds"),
                figure("predicted_seconds"),
                format!("{share:.4}"),
                asked.map_or("–".to_owned(), |asked| format!(">= {asked}")),
                if asked.is_some() { yes(fits) } else { String::new() },
            ],
            made.plan.clone(),
        );
    };
    let made = planned(scale, stage, dir, &equal(64), "100 GB")?;
    compare(
        "64 equal nodes at one switch".to_owned(),
        "100 GB",
        &made,
        Some(0.97),
    );
    let mut seen = Vec::new();
    for nodes in &scale.nodes {
        let made = planned(scale, stage, dir, &racks(*nodes), "1 TB")?;
        let asked = (*nodes == 10_000).then_some(0.9);
        let fabric = format!("{nodes} nodes in racks of {RACK}, uplinks 1 : 10");
        compare(fabric, "1 TB", &made, asked);
        seen.push((*nodes, made));
    }
    for (nodes, made) in &seen {
        let ms = |times: &[f64]| spread(times.iter().map(|seconds| seconds * 1e3), 1);
        let limit = (*nodes <= 10_000).then_some(1e3);
        let fits = limit.is_none_or(|limit| made.middle() < limit);
        right &= fits;
        times.add(
            vec![
                nodes.to_string(),
                ms(&made.alone),
                format!("{:.1}", made.middle() * 1e3 / f64::from(*nodes)),
                ms(&made.command),
                ms(&made.reading),
                "< 1 s".to_owned(),
                yes(fits),
            ],
            json!({
                "planning_seconds": made.alone.iter().copied().map(rounded).collect::<Vec<_>>(),
                "command_seconds": made.command.iter().copied().map(rounded).collect::<Vec<_>>(),
                "reading_seconds": made.reading.iter().copied().map(rounded).collect::<Vec<_>>(),
            }),
        );
    }
    let at = |wanted: u32| {
        seen.iter()
            .find(|(nodes, _)| *nodes == wanted)
            .map(|(_, made)| made.middle())
    };
    for (few, many) in [(100, 1000), (1000, 10_000)] {
        let (Some(least), Some(most)) = (at(few), at(many)) else {
            continue;
        };
        let growth = most / least;
        let fits = growth <= GROWTH;
        right &= fits;
        times.add(
            vec![
                format!("{few} to {many}"),
                format!("× {growth:.1}"),
                "–".to_owned(),
                "–".to_owned(),
                "–".to_owned(),
                format!("near linear: × 10, × {GROWTH} at most"),
                yes(fits),
            ],
            json!({ "growth": rounded(growth) }),
        );
    }
    Ok((vec![near, times], right))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fabrics_have_as_many_nodes_as_asked() {
        for nodes in [1, 40, 41, 100] {
            assert_eq!(parsed("racks", &racks(nodes)).nodes().len() as u32, nodes + 1);
        }
        let topology = parsed("equal", &equal(64));
        let request = request(&topology, "100 GB");
        assert_eq!(request.targets.len(), 64);
        assert!(!request.targets.contains(&request.source));
    }
}
