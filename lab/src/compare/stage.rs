//! stage's own turn: `stage push` on a cluster that stands.

use std::path::Path;

use serde_json::Value;
use stage_lab::LabError;
use stage_lab::cluster::{Cluster, Security, Setup};

use super::Turn;
use super::field::Field;
use crate::bench::{PUSH, copies, good, remove, rounded, word};

pub(super) fn turn(
    field: &Field<'_>,
    stage: &Path,
    words: &[String],
    topology: &str,
    security: Security,
) -> Result<Turn, LabError> {
    let setup = Setup {
        group: Some(field.group),
        ..Setup::new(stage, topology, security)
    };
    let cluster = Cluster::up(field.lab, &setup)?;
    let mut pushed = None;
    let seen = field.count(|| {
        let to = field.targets.join(",");
        let mut push = vec![word(field.file), "--to", &to];
        push.extend(words.iter().map(String::as_str));
        pushed = Some(cluster.push(&push, PUSH)?);
        Ok(())
    })?;
    let pushed = pushed.expect("it was counted");
    let nodes = field.lab.topology().nodes().iter();
    let anonymous = nodes
        .map(|node| cluster.agent_usage(node.name.as_str()).rss_anon_peak.0)
        .max();
    let pushed = good(pushed)?;
    // Not counted: it has checked them itself.
    let nodes = pushed.nodes().iter();
    let place = |node: &Value| Some((node["node"].as_str()?.to_owned(), node["path"].as_str()?.into()));
    field.check_at(nodes.filter_map(place).collect())?;
    remove(&copies(&pushed));
    let published = pushed.last_published().unwrap_or(pushed.wall);
    let to_the_last = rounded(published.as_secs_f64());
    let cpu = rounded(seen.cpu.as_secs_f64());
    Ok(Turn {
        as_it_is: to_the_last,
        verified: to_the_last,
        done: Some(rounded(pushed.wall.as_secs_f64())),
        cpu_as_it_is: cpu,
        cpu_verified: cpu,
        peak_rss: seen.peak_rss.0,
        agent_rss_anon: anonymous,
        source_sent: seen.sent.0,
        forecast: pushed.end()["plan"]["predicted_seconds"].as_f64(),
        finished: pushed.end().clone(),
        ..Turn::default()
    })
}
