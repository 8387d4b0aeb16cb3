//! Lines for people: one for each change, and the table at the end. No colours and nothing that moves, so that it
//! reads the same in a log.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::Duration;

use stage_core::failure::{Code, Failure};
use stage_core::plan::Plan;
use stage_core::topology::hostlist;
use stage_core::units::{ByteCount, show_time};

use super::{Render, table};
use crate::event::{Event, Simulated};
use crate::exit;
use crate::view::{Job, JobState, Node, NodeState};

/// Writes events as lines.
pub(crate) struct Lines<W> {
    out: W,
    /// Whether the changes of single nodes are told.
    each: bool,
}

impl<W: Write> Lines<W> {
    /// Every change a line.
    pub(crate) fn new(out: W) -> Self {
        Self { out, each: true }
    }

    /// Plan and end only: what happens between is shown by somebody else.
    pub(crate) fn ends(out: W) -> Self {
        Self {
            each: false,
            ..Self::new(out)
        }
    }
}

impl<W: Write> Render for Lines<W> {
    fn event(&mut self, event: &Event) -> io::Result<()> {
        match event {
            Event::Submitted(job) => writeln!(self.out, "job {job}")?,
            Event::Planned { job, plan } => {
                summary(&mut self.out, plan)?;
                if job.is_none() {
                    table::hops(&mut self.out, plan)?;
                }
            }
            Event::Explained(tried) => table::tried(&mut self.out, tried)?,
            Event::Simulated(simulated) => simulation(&mut self.out, simulated)?,
            Event::Node { node, .. } if self.each && !is_dull(node.state) => {
                writeln!(self.out, "{}", change(node))?;
            }
            Event::Remark { text, .. } if self.each => writeln!(self.out, "{text}")?,
            Event::Node { .. } | Event::Remark { .. } | Event::Progress(_) => {}
            Event::Finished { job, exit } => {
                end(&mut self.out, job)?;
                // Else it is an error, which is told on standard error in every form.
                if *exit == exit::DONE {
                    shortfall(&mut self.out, job)?;
                }
            }
            Event::Compared(compared) => writeln!(
                self.out,
                "compared by {}: {} equal to the original",
                compared.by,
                copies(compared.copies)
            )?,
            // People are told on standard error.
            Event::Error { .. } => {}
        }
        self.out.flush()
    }
}

/// Every target passes through these, and they say nothing of it.
fn is_dull(state: NodeState) -> bool {
    matches!(
        state,
        NodeState::Waiting | NodeState::Preparing | NodeState::Ready
    )
}

fn copies(count: usize) -> String {
    if count == 1 {
        "the copy is".to_owned()
    } else {
        format!("all {count} copies are")
    }
}

/// "1 node", "3 nodes".
pub(crate) fn count(number: usize, what: &str) -> String {
    if number == 1 {
        format!("1 {what}")
    } else {
        format!("{number} {what}s")
    }
}

/// A cause with its place: "n2: /scratch/x: no space".
pub(crate) fn cause(failure: &Failure) -> String {
    let mut text = String::new();
    // Messages often name their place already.
    for place in [
        failure.node.as_ref().map(ToString::to_string),
        failure.path.clone(),
    ]
    .into_iter()
    .flatten()
    {
        if !failure.message.contains(&place) {
            text.push_str(&place);
            text.push_str(": ");
        }
    }
    text + &failure.message
}

/// A plan in two lines.
fn summary(out: &mut impl Write, plan: &Plan) -> io::Result<()> {
    let forecast = if plan.predicted.is_zero() {
        "no forecast".to_owned()
    } else {
        format!(
            "forecast {}, no plan could beat {}",
            show_time(plan.predicted),
            show_time(plan.bound)
        )
    };
    writeln!(
        out,
        "plan: {} from {} to {}, depth {}; {forecast}",
        plan.shape,
        plan.source,
        count(plan.hops.len(), "node"),
        plan.depth,
    )?;
    if plan.reason.is_empty() {
        Ok(())
    } else {
        writeln!(out, "  why: {}", plan.reason)
    }
}

/// More moves or links than these are counted only.
const LINES: usize = 20;

/// A simulation: when it ends, who moved, who gets nothing, what the links between switches carried.
fn simulation(out: &mut impl Write, simulated: &Simulated) -> io::Result<()> {
    let outcome = &simulated.outcome;
    let targets = outcome.finishes.len();
    let done: Vec<Duration> = outcome
        .finishes
        .iter()
        .filter_map(|(_, finish)| *finish)
        .collect();
    match done.iter().max() {
        Some(last) => {
            let off = last.as_secs_f64() / simulated.forecast.as_secs_f64() - 1.0;
            writeln!(
                out,
                "simulated: {} of {} done after {} (forecast {}, {:+.1} %), the mean after {}",
                done.len(),
                count(targets, "target"),
                show_time(*last),
                show_time(simulated.forecast),
                off * 100.0,
                show_time(outcome.mean()),
            )?;
        }
        None => writeln!(
            out,
            "simulated: none of {} is ever done",
            count(targets, "target")
        )?,
    }
    for step in outcome.moves.iter().take(LINES) {
        writeln!(
            out,
            "  after {}: {} goes to {}",
            show_time(step.at),
            step.node,
            step.to
        )?;
    }
    more(out, outcome.moves.len(), "move")?;
    if done.len() < targets {
        let never = outcome.finishes.iter().filter(|(_, finish)| finish.is_none());
        let names = hostlist::fold(never.map(|(node, _)| node.as_str()));
        writeln!(out, "  never done: {names}")?;
    }
    let links: Vec<_> = simulated.edges.iter().filter(|edge| !edge.is_interface).collect();
    for link in links.iter().take(LINES) {
        writeln!(
            out,
            "  {} carries {} from {} to {}",
            link.name, link.bytes, link.from, link.to
        )?;
    }
    more(out, links.len(), "link")
}

fn more(out: &mut impl Write, all: usize, what: &str) -> io::Result<()> {
    if all > LINES {
        writeln!(
            out,
            "  and {}: see --json",
            count(all - LINES, &format!("more {what}"))
        )?;
    }
    Ok(())
}

/// What became of a node, in a line.
fn change(node: &Node) -> String {
    let Node { name, state, .. } = node;
    match state {
        NodeState::Receiving => match &node.parent {
            Some(parent) => format!(
                "{name}: receiving from {parent}, {}",
                count(node.streams as usize, "stream")
            ),
            None => format!("{name}: receiving"),
        },
        NodeState::Published if node.already => format!("{name}: already there: {}", node.path),
        NodeState::Published => format!(
            "{name}: published in {} at {}: {}",
            show_time(node.elapsed),
            node.rate.in_bytes(),
            node.path
        ),
        NodeState::Superseded => match &node.superseded_by {
            Some(job) => format!("{name}: superseded by job {job}"),
            None => format!("{name}: superseded"),
        },
        _ => match &node.failure {
            Some(failure) => format!("{name}: {state}: {}", cause_on(failure, node)),
            None => format!("{name}: {state}"),
        },
    }
}

/// A node's cause in a line that begins with the node.
fn cause_on(failure: &Failure, node: &Node) -> String {
    let mut failure = failure.clone();
    failure.node = failure.node.filter(|other| *other != node.name);
    cause(&failure)
}

/// How large a payload is, and how much of a sparse one travels.
fn size(job: &Job) -> String {
    if job.payload < job.size {
        format!("{}, of which {} are data", job.size, job.payload)
    } else {
        job.size.to_string()
    }
}

/// A job as it is: table, forecast against actual, digest, what the source had to do.
pub(crate) fn end(out: &mut impl Write, job: &Job) -> io::Result<()> {
    writeln!(
        out,
        "{}: {} ({}), {} of {} published, after {}",
        job.state,
        job.name,
        size(job),
        job.published,
        count(job.targets as usize, "target"),
        show_time(job.elapsed)
    )?;
    if !job.nodes.is_empty() {
        table::outcome(out, job)?;
    }
    if let Some(left) = job.remaining() {
        writeln!(out, "about {} left", show_time(left))?;
    }
    if !job.state.is_ended() {
        // A push has said it when it happened; who looks later reads it here.
        for remark in job.remarks.iter().skip(job.remarks.len().saturating_sub(3)) {
            writeln!(out, "lately: {remark}")?;
        }
    }
    if let Some(verdict) = &job.verdict
        && job.is_worth_a_verdict()
    {
        writeln!(out, "limited by {verdict}")?;
    }
    let moved = job.nodes.iter().any(|node| node.received > ByteCount(0));
    if let Some(plan) = &job.plan
        && moved
    {
        let (actual, forecast) = (job.elapsed.as_secs_f64(), plan.predicted.as_secs_f64());
        // A copy to the source itself has no bound: nothing crosses a network.
        let is_bounded = plan.bound > Duration::ZERO;
        if job.state == JobState::Done && actual > 0.0 && forecast > 0.0 && is_bounded {
            writeln!(
                out,
                "forecast {}, actual {} ({:+.0} %); no plan could beat {}: efficiency {:.0} %",
                show_time(plan.predicted),
                show_time(job.elapsed),
                (actual / forecast - 1.0) * 100.0,
                show_time(plan.bound),
                plan.bound.as_secs_f64() / actual * 100.0,
            )?;
        }
    }
    match &job.sha256 {
        Some(sha256) => writeln!(out, "sha256 {sha256}")?,
        None if job.sha256_bytes > ByteCount(0) => writeln!(
            out,
            "sha256 not known yet: {} of {} are hashed",
            job.sha256_bytes, job.size
        )?,
        None => {}
    }
    if let Some(function) = &job.agrees {
        match job.agreeing {
            0 | 1 => writeln!(out, "agrees with the {function} that was expected")?,
            files => writeln!(out, "{files} files agree with the {function} that was expected")?,
        }
    }
    if let Some(source) = &job.source
        && (moved || job.source_bytes_read > ByteCount(0))
    {
        writeln!(
            out,
            "source {source} read {} and sent {}",
            job.source_bytes_read, job.source_bytes_sent
        )?;
    }
    Ok(())
}

/// What is missing from a job, why, and what to do about it.
pub(crate) fn shortfall(out: &mut impl Write, job: &Job) -> io::Result<()> {
    why(out, job)?;
    missing(out, job)
}

/// Why the job failed as a whole, if it did.
pub(crate) fn why(out: &mut impl Write, job: &Job) -> io::Result<()> {
    if let Some(failure) = &job.failure {
        writeln!(out, "why: {}", cause(failure))?;
        if !failure.hint.is_empty() {
            writeln!(out, "  next: {}", failure.hint)?;
        }
    }
    Ok(())
}

/// Who does not have it, why, and whether the job still waits for them.
pub(crate) fn missing(out: &mut impl Write, job: &Job) -> io::Result<()> {
    reasons(out, &job.nodes)?;
    if job.state == JobState::Open {
        writeln!(
            out,
            "the job stays open and fills what is missing: follow it with `stage status {0} --watch`, end it with `stage cancel {0}`",
            job.id
        )?;
    }
    Ok(())
}

/// Why nodes do not have it, nodes with the same reason in one line.
pub(crate) fn reasons(out: &mut impl Write, nodes: &[Node]) -> io::Result<()> {
    let mut groups: BTreeMap<(&str, Code), Vec<(&Node, &Failure)>> = BTreeMap::new();
    for node in nodes {
        if let Some(failure) = node.failure.as_ref().filter(|_| !node.state.is_done()) {
            groups
                .entry((node.state.as_str(), failure.code))
                .or_default()
                .push((node, failure));
        }
    }
    for ((state, code), members) in groups {
        let (first, failure) = members[0];
        let names = hostlist::fold(members.iter().map(|(node, _)| node.name.as_str()));
        let same = members.iter().all(|(_, other)| other.message == failure.message);
        let short = members
            .iter()
            .filter_map(|(_, other)| Some(other.space.as_ref()?.short_by));
        let why = match (short.clone().min(), short.max()) {
            (Some(least), Some(most)) if !same && code == Code::NoSpace => {
                format!("too little space: short by {least} to {most}")
            }
            _ if same => cause_on(failure, first),
            _ => format!("{} (and others: see --json)", cause_on(failure, first)),
        };
        writeln!(out, "{state}: {names}: {why}")?;
        if code == Code::NoSpace {
            table::space(out, &members)?;
        }
        if !failure.hint.is_empty() {
            writeln!(out, "  next: {}", failure.hint)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Compared;
    use crate::view::samples::{finished, job, plan, published, receiving, unfit};

    fn shown(events: &[Event]) -> String {
        let mut out = Vec::new();
        let mut lines = Lines::new(&mut out);
        for event in events {
            lines.event(event).unwrap();
        }
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_push_reads_as_a_story() {
        let view = job(vec![receiving("n1", "n0", 5), unfit("n2")]);
        let mut already = published("n2", "n1");
        already.already = true;
        already.received = ByteCount(0);
        let nodes = vec![published("n1", "n0"), already.clone()];
        insta::assert_snapshot!(shown(&[
            Event::Submitted(view.id),
            Event::Planned { job: Some(view.id), plan: plan(&["n1", "n2"]) },
            Event::Node { job: view.id, node: view.nodes[0].clone() },
            Event::Node { job: view.id, node: view.nodes[1].clone() },
            Event::Node { job: view.id, node: nodes[0].clone() },
            Event::Node { job: view.id, node: already },
            Event::Finished { job: Box::new(finished(nodes)), exit: 0 },
            Event::Compared(Compared { by: "sha256sum", sha256: String::new(), copies: 2 }),
        ]), @"
        job 11111111-1111-1111-1111-111111111111
        plan: chain from n0 to 2 nodes, depth 2; forecast 8.90 s, no plan could beat 8.60 s
          why: every node sends to one other, so each has its whole interface
        n1: receiving from n0, 1 stream
        n2: unfit: /scratch/stage/genome.db: too little space: short by 3.00 GiB
        n1: published in 8.80 s at 122 MB/s: /scratch/stage/genome.db
        n2: already there: /scratch/stage/genome.db
        done: genome.db (1.00 GiB), 2 of 2 targets published, after 9.10 s
         node  state              rate  parent  streams  seconds  checksum
         n1    published      122 MB/s  n0            1     8.80  ok 0123456789ab
         n2    already there         -  -             -        -  ok 0123456789ab
        forecast 8.90 s, actual 9.10 s (+2 %); no plan could beat 8.60 s: efficiency 95 %
        sha256 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
        source n0 read 1.00 GiB and sent 1.00 GiB
        compared by sha256sum: all 2 copies are equal to the original
        ");
    }

    #[test]
    fn an_open_job_says_who_is_missing_and_why() {
        let mut worse = unfit("n3");
        let failure = worse.failure.as_mut().unwrap();
        failure.space = Some(Box::new(stage_core::failure::Shortage {
            needs: ByteCount(9 << 30),
            short_by: ByteCount(9 << 30),
        }));
        failure.message = "too little space: short by 9.00 GiB".to_owned();
        let open = finished(vec![published("n1", "n0"), unfit("n2"), worse]);
        let mut out = shown(&[Event::Finished {
            job: Box::new(open.clone()),
            exit: 5,
        }])
        .into_bytes();
        out.extend(b"-- and on standard error:\n");
        shortfall(&mut out, &open).unwrap();
        insta::assert_snapshot!(String::from_utf8(out).unwrap(), @"
        open: genome.db (1.00 GiB), 1 of 3 targets published, after 9.10 s
         node  state          rate  parent  streams  seconds  checksum
         n1    published  122 MB/s  n0            1     8.80  ok 0123456789ab
         n2    unfit             -  -             -        -  -
         n3    unfit             -  -             -        -  -
        sha256 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef
        source n0 read 1.00 GiB and sent 1.00 GiB
        -- and on standard error:
        unfit: n[2-3]: too little space: short by 3.00 GiB to 9.00 GiB
          node     needs      free  short by
          n3    9.00 GiB       0 B  9.00 GiB
          n2    4.00 GiB  1.00 GiB  3.00 GiB
          next: free space under /scratch/stage, the push then goes on by itself
        the job stays open and fills what is missing: follow it with `stage status 11111111-1111-1111-1111-111111111111 --watch`, end it with `stage cancel 11111111-1111-1111-1111-111111111111`
        ");
    }

    #[test]
    fn a_running_job_says_how_far_it_is() {
        let view = job(vec![receiving("n1", "n0", 1 << 29), published("n2", "n1")]);
        let mut out = Vec::new();
        end(&mut out, &view).unwrap();
        insta::assert_snapshot!(String::from_utf8(out).unwrap(), @"
        running: genome.db (1.00 GiB), 1 of 2 targets published, after 4.00 s
         node  state               rate  parent  streams  seconds  checksum
         n1    receiving 50 %  120 MB/s  n0            1     4.00  -
         n2    published       122 MB/s  n1            1     8.80  ok
        about 4.59 s left
        sha256 not known yet: 512.00 MiB of 1.00 GiB are hashed
        source n0 read 512.00 MiB and sent 512.00 MiB
        ");
    }

    #[test]
    fn who_looks_at_a_running_job_reads_what_was_said_lately() {
        let mut running = job(vec![receiving("n1", "n0", 5)]);
        running.remarks = ["a", "b", "n1 moved", "contact with the source n0 is lost"]
            .map(str::to_owned)
            .into();
        let mut out = Vec::new();
        end(&mut out, &running).unwrap();
        let shown = String::from_utf8(out).unwrap();
        let lately: Vec<_> = shown
            .lines()
            .filter(|line| line.starts_with("lately: "))
            .collect();
        assert_eq!(
            lately,
            [
                "lately: b",
                "lately: n1 moved",
                "lately: contact with the source n0 is lost"
            ]
        );
    }

    #[test]
    fn what_limits_a_push_is_said_while_it_matters() {
        let says = |job: &Job| {
            let mut out = Vec::new();
            end(&mut out, job).unwrap();
            String::from_utf8(out)
                .unwrap()
                .contains("limited by n1: its disk writes 20.0 MB/s\n")
        };
        let verdict = Some("n1: its disk writes 20.0 MB/s".to_owned());
        let mut running = job(vec![receiving("n1", "n0", 5)]);
        assert!(!says(&running), "nobody knows");
        running.verdict.clone_from(&verdict);
        assert!(says(&running));
        let mut over = finished(vec![published("n1", "n0")]);
        over.verdict = verdict;
        assert!(!says(&over), "95 % of the best plan's time is as good as it gets");
        over.elapsed *= 2;
        assert!(says(&over));
    }

    #[test]
    fn a_plan_alone_shows_its_hops() {
        insta::assert_snapshot!(shown(&[Event::Planned { job: None, plan: plan(&["n1", "n2"]) }]), @"
        plan: chain from n0 to 2 nodes, depth 2; forecast 8.90 s, no plan could beat 8.60 s
          why: every node sends to one other, so each has its whole interface
         node  parent  depth  streams      rate  done after  limited by
         n1    n0          1        1  125 MB/s      8.60 s  interface of n1
         n2    n1          2        1  125 MB/s      8.70 s  interface of n2
        ");
    }
}
