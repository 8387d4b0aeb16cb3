//! `stage-lab bottlenecks`: bottlenecks made on purpose, and whether what a push or `stage bench` says names the right one.

mod cases;

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stage_core::units::{ByteCount, Rate};
use stage_lab::cluster::{Cluster, Setup};
use stage_lab::{Lab, LabError, Options, Quota, Speed};

use self::cases::{CASES, Case};
use super::{measure, parsed, slow, verdicts, yes};
use crate::bench::{Common, Facts, PUSH, Table, binary, copies, random_file, remove, word, word_of};

/// So many must be named.
const ASKED: (usize, usize) = (9, 10);

/// A push is asked what holds it up so long after its start, again and again.
const ASK: Duration = Duration::from_millis(1500);

/// What can be asked for.
#[derive(Debug, clap::Args)]
pub(crate) struct Bottlenecks {
    #[command(flatten)]
    common: Common,
    /// Only cases with such a part in their name.
    #[arg(long, value_name = "NAME", num_args = 1..)]
    only: Vec<String>,
    /// Ask pushes alone, not `stage bench`: some 2 minutes.
    #[arg(long)]
    pushes_only: bool,
    /// Ask `stage bench` also where the push has named it: some 8 minutes.
    #[arg(long, conflicts_with = "pushes_only")]
    both: bool,
    /// Let `stage bench` measure little: one pair at each switch only, so that not every node's interface is seen.
    #[arg(long, conflicts_with = "pushes_only")]
    quick: bool,
}

/// Measures, prints the table, keeps the figures. Whether as many were named as asked.
///
/// # Errors
/// For people: what was asked for cannot be done.
pub(crate) fn run(bottlenecks: &Bottlenecks) -> Result<bool, String> {
    super::unknown(&bottlenecks.only, CASES.iter().map(|case| case.name))?;
    let stage = binary(&bottlenecks.common.stage)?;
    let facts = Facts::now().of(&stage);
    let mut table = Table::new(
        "bottlenecks made on purpose",
        &[
            "bottleneck",
            "made by",
            "what the push said",
            "what bench said",
            "named by",
            "as asked",
        ],
    );
    let (mut named, mut tried) = (0, 0);
    for case in CASES
        .iter()
        .filter(|case| super::is_wanted(&bottlenecks.only, case.name))
    {
        tried += 1;
        let said = said(bottlenecks, &stage, case);
        named += usize::from(tell(&mut table, case, &said));
        let so_far = std::slice::from_ref(&table);
        bottlenecks.common.keep_so_far("bottlenecks", &facts, so_far)?;
    }
    let right = named * ASKED.1 >= ASKED.0 * tried;
    table.add(
        vec![
            format!("{named} of {tried} named"),
            String::new(),
            String::new(),
            String::new(),
            format!("asked: {} of {}", ASKED.0, ASKED.1),
            yes(right),
        ],
        json!({ "named": named, "tried": tried }),
    );
    bottlenecks.common.keep("bottlenecks", &facts, &[table])?;
    Ok(right)
}

/// What was said in one case.
#[derive(Debug, Default)]
struct Said {
    push: Vec<String>,
    bench: Vec<String>,
    finished: Value,
    trouble: Option<String>,
}

fn said(bottlenecks: &Bottlenecks, stage: &Path, case: &Case) -> Said {
    let mut said = Said::default();
    if let Err(why) = hear(bottlenecks, stage, case, &mut said) {
        said.trouble = Some(why.to_string());
    }
    for list in [&mut said.push, &mut said.bench] {
        // The last word first, each once.
        list.reverse();
        let mut seen = std::collections::BTreeSet::new();
        list.retain(|text| seen.insert(text.clone()));
    }
    said
}

fn hear(bottlenecks: &Bottlenecks, stage: &Path, case: &Case, said: &mut Said) -> Result<(), LabError> {
    let truth = (case.truth)();
    let told = case.told.map_or_else(|| truth.clone(), |told| told());
    let options = Options {
        half_duplex: case.half_duplex,
        ..Options::default()
    };
    let lab = Lab::with(&parsed("bottlenecks", &truth), &options)?;
    for (node, way, rate) in case.reshaped {
        let rate: Rate = rate.parse().expect("the bench's own rates are right");
        lab.reshape(node, *way, rate)?;
    }
    let nodes: Vec<String> = lab
        .topology()
        .nodes()
        .iter()
        .map(|node| node.name.to_string())
        .collect();
    for node in &nodes {
        if let Some(most) = case.window {
            lab.windows(node, ByteCount(most))?;
        }
        if let Some(control) = case.control {
            lab.congestion_control(node, control)?;
        }
    }
    let slow_roots: Vec<(&str, Speed)> = case
        .slow
        .iter()
        .map(|(node, write, read)| (*node, slow(write, read)))
        .collect();
    // Below the root, so that a slow one has it to read; before there is one, so that no page of it is in the cache.
    let root = lab.dir("n0").join("root");
    std::fs::create_dir_all(&root).map_err(|source| LabError::Directory { path: root, source })?;
    let file = random_file(&lab, "n0", "root/payload", ByteCount(case.mebibytes << 20))?;
    let setup = Setup {
        slow_roots: &slow_roots,
        ..Setup::new(stage, &told, bottlenecks.common.security())
    };
    let cluster = Cluster::up(&lab, &setup)?;
    // Dropped before the cluster: it lets the agent go.
    let mut quotas = Vec::new();
    for (node, share) in case.quotas {
        let mut quota = Quota::new(*share)?;
        quota.keep_busy()?;
        if let Some(agent) = cluster.agent_pid(node) {
            quota.take(agent)?;
        }
        quotas.push(quota);
    }
    // First: a plan that knows what bench has found makes way for it.
    push(&cluster, word(&file), case, said)?;
    // Its measurements take longer than all else: it need not say again what is said.
    let is_named = found(&said.push, case.push).is_some();
    if bottlenecks.both || !bottlenecks.pushes_only && !is_named {
        let depth: &[&str] = if bottlenecks.quick { &["--quick"] } else { &[] };
        let answer = measure(&cluster, depth)?;
        let remarks = answer
            .events
            .iter()
            .filter(|event| matches!(event.kind(), "verdict" | "flag"));
        said.bench
            .extend(remarks.map(|event| word_of(&event.value["text"]).to_owned()));
    }
    Ok(())
}

fn push(cluster: &Cluster<'_>, file: &str, case: &Case, said: &mut Said) -> Result<(), LabError> {
    let running = cluster.start_command(&[&["push", file, "--to", case.to], case.words].concat())?;
    let job = running.job(PUSH)?;
    let mut next = Instant::now() + ASK;
    let deadline = Instant::now() + PUSH;
    while !running.has_ended() && Instant::now() < deadline {
        if Instant::now() >= next {
            verdicts(&cluster.status(&job)?, &mut said.push);
            next = Instant::now() + ASK;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let pushed = running.finish(PUSH)?;
    pushed
        .events
        .iter()
        .for_each(|event| verdicts(&event.value, &mut said.push));
    remove(&copies(&pushed));
    said.finished = pushed.end().clone();
    if pushed.exit != Some(0) {
        said.trouble = Some(format!(
            "the push ended with {:?}: {}",
            pushed.exit,
            pushed.errors.trim()
        ));
    }
    Ok(())
}

/// The first text that has all words of one of the alternatives.
fn found<'t>(texts: &'t [String], wanted: &[&[&str]]) -> Option<&'t str> {
    let has = |text: &String| {
        let text = text.to_lowercase();
        wanted
            .iter()
            .any(|words| words.iter().all(|word| text.contains(&word.to_lowercase())))
    };
    texts.iter().find(|text| has(text)).map(String::as_str)
}

fn tell(table: &mut Table, case: &Case, said: &Said) -> bool {
    let (push, bench) = (found(&said.push, case.push), found(&said.bench, case.bench));
    let by = match (push, bench) {
        (Some(_), Some(_)) => "both",
        (Some(_), None) => "the push",
        (None, Some(_)) => "bench",
        (None, None) => "nobody",
    };
    let first = |texts: &[String]| texts.first().cloned().unwrap_or_else(|| "–".to_owned());
    let mut push_said = push.map_or_else(|| first(&said.push), str::to_owned);
    if let Some(trouble) = &said.trouble {
        push_said = format!("{push_said} ({trouble})");
    }
    let named = push.is_some() || bench.is_some();
    table.add(
        vec![
            case.name.to_owned(),
            case.made_by.to_owned(),
            push_said,
            bench.map_or_else(|| first(&said.bench), str::to_owned),
            by.to_owned(),
            yes(named),
        ],
        json!({
            "push_asked": case.push,
            "push_said": said.push,
            "bench_asked": case.bench,
            "bench_said": said.bench,
            "finished": said.finished,
        }),
    );
    named
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_must_have_all_words_of_one_alternative() {
        let texts = ["n1: its disk writes 20 MB/s", "The link"].map(str::to_owned);
        assert_eq!(
            found(&texts, &[&["N1", "disk"]]),
            Some("n1: its disk writes 20 MB/s")
        );
        assert_eq!(found(&texts, &[&["n1", "link"], &["the link"]]), Some("The link"));
        assert_eq!(found(&texts, &[&["n2", "disk"]]), None);
        assert_eq!(found(&texts, &[]), None);
    }
}
