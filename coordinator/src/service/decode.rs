//! From messages to the driver's words.

use std::time::Duration;

use stage_core::ask::{Question, Removal, Said};
use stage_core::assignment::{KEEP_PREVIOUS, Outcome, Place, Prepared, Progress, SourceReport};
use stage_core::bench::{HostReport, Pair};
use stage_core::failure::{Code, Failure};
use stage_core::id::{AskId, Epoch, JobId, NodeName, PlanVersion};
use stage_core::job::UnfitRule;
use stage_core::plan::Controls;
use stage_core::units::Rate;
use stage_proto::convert::{cache, if_exists, optional, parse, wanted};
use stage_proto::{WireError, v1};

use crate::bench::Wanted;
use crate::driver::{Join, Report, Submit};
use crate::fleet::Registration;

/// Entries of a registration's lists that are read at most.
const ENTRIES: usize = 4096;
/// Longer texts of a peer are cut.
const TEXT: usize = 400;
/// So are paths and messages with paths in them: every byte of one may be written as four characters.
const PATH: usize = 4 * 4096 + TEXT;

/// Roots, and other short lists, that are read at most.
const ROOTS: usize = 64;

fn fault(field: &'static str, why: &str) -> WireError {
    WireError {
        field,
        why: why.to_owned(),
    }
}

fn limit(bytes_per_second: u64) -> Option<Rate> {
    (bytes_per_second > 0).then(|| Rate::from_bytes_per_second(bytes_per_second as f64))
}

/// A job's id as a caller wrote it.
pub(super) fn job(text: &str) -> Result<JobId, Failure> {
    text.parse().map_err(|_| {
        Failure::new(
            Code::UnknownJob,
            format!("{text:?} is not the id of a job"),
            "`stage status` lists the jobs",
        )
    })
}

/// The job, another source, and the id of a new job.
pub(super) fn retry(wire: &v1::RetryRequest) -> Result<(JobId, Option<NodeName>, JobId), Failure> {
    let id = job(&wire.job)?;
    let malformed = |error| super::invalid(&error);
    let from = match wire.from.as_str() {
        "" => None,
        from => Some(parse("from", from).map_err(malformed)?),
    };
    Ok((id, from, parse("new_job", &wire.new_job).map_err(malformed)?))
}

pub(super) fn submit(wire: &v1::SubmitRequest) -> Result<Submit, WireError> {
    Ok(Submit {
        id: parse("job", &wire.job)?,
        paths: wire.paths.iter().map(Into::into).collect(),
        walk: wire.walk.as_ref().map(Into::into).unwrap_or_default(),
        targets: wire.targets.clone(),
        dest: wire.dest.clone(),
        from: optional("from", &wire.from)?,
        client_addresses: wire
            .client_addresses
            .iter()
            .take(ENTRIES)
            .map(|address| parse("client_addresses", address))
            .collect::<Result<_, _>>()?,
        shape: if wire.shape.is_empty() {
            Default::default()
        } else {
            parse("shape", &wire.shape)?
        },
        streams: match wire.streams {
            0 => None,
            streams => Some(u16::try_from(streams).map_err(|_| fault("streams", "are too many"))?),
        },
        limit: limit(wire.limit_bytes_per_second),
        source_limit: limit(wire.source_limit_bytes_per_second),
        unpack: wire.unpack,
        if_exists: match v1::IfExists::try_from(wire.if_exists) {
            Ok(v1::IfExists::Unspecified) => Default::default(),
            _ => if_exists(wire.if_exists)?,
        },
        keep_previous: wire
            .keep_previous_seconds
            .map_or(KEEP_PREVIOUS, Duration::from_secs),
        cache: cache(wire.cache)?,
        unfit: match v1::UnfitRule::try_from(wire.unfit) {
            Ok(v1::UnfitRule::Unspecified | v1::UnfitRule::Wait) => UnfitRule::Wait,
            Ok(v1::UnfitRule::Skip) => UnfitRule::Skip,
            Ok(v1::UnfitRule::Fail) => UnfitRule::Fail,
            Err(_) => return Err(fault("unfit", "is not a rule")),
        },
        wait_for: (wire.wait_for_seconds > 0).then(|| Duration::from_secs(wire.wait_for_seconds)),
        expect: wire
            .expect
            .iter()
            .map(TryInto::try_into)
            .collect::<Result<_, _>>()?,
        join: match v1::Join::try_from(wire.join) {
            Ok(v1::Join::Unspecified) => Join::No,
            Ok(v1::Join::OrMake) => Join::OrMake,
            Ok(v1::Join::Only) => Join::Only,
            Err(_) => return Err(fault("join", "is no way to join")),
        },
    })
}

pub(super) fn registration(wire: &v1::Register) -> Result<Registration, WireError> {
    let mut jobs = Vec::new();
    for held in wire.jobs.iter().take(ENTRIES) {
        jobs.push(parse("jobs.job", &held.job)?);
    }
    Ok(Registration {
        node: parse("node", &wire.node)?,
        instance: parse("instance", &wire.instance)?,
        version: wire
            .hello
            .as_ref()
            .map(|hello| text(&hello.version))
            .unwrap_or_default(),
        addresses: wire
            .data_addresses
            .iter()
            .take(64)
            .map(|address| parse("data_addresses", address))
            .collect::<Result<_, _>>()?,
        roots: wire.roots.iter().take(64).cloned().collect(),
        windows: wire.windows.as_ref().map(Into::into),
        controls: controls(wire),
        jobs,
        cluster: optional("cluster_id", &wire.cluster_id)?,
        epoch: Epoch(wire.epoch),
    })
}

/// A name that is none is one that nobody can ask for.
fn controls(wire: &v1::Register) -> Option<Controls> {
    let named = wire.congestion_controls.iter().take(ENTRIES);
    Some(Controls {
        default: wire.congestion_control.parse().ok()?,
        offered: named.filter_map(|name| name.parse().ok()).collect(),
    })
}

/// A peer's text: short, and fit for a terminal.
pub(super) fn text(text: &str) -> String {
    text.chars()
        .take(TEXT)
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

/// What an agent says is shown to people: its texts must be fit for a terminal.
fn said(said: Said) -> Said {
    let clean = |text: &str| -> String {
        text.chars()
            .take(PATH)
            .map(|c| if c.is_control() { '\u{fffd}' } else { c })
            .collect()
    };
    match said {
        Said::Copies(mut copies) => {
            for copy in &mut copies {
                copy.path = clean(&copy.path);
                copy.detail = text(&copy.detail);
            }
            Said::Copies(copies)
        }
        Said::Removed(mut removed) => {
            removed.path = clean(&removed.path);
            Said::Removed(removed)
        }
        Said::Failed(mut failure) => {
            failure.message = clean(&failure.message);
            failure.hint = clean(&failure.hint);
            failure.path = failure.path.as_deref().map(clean);
            Said::Failed(failure)
        }
        Said::Progress(progress) => Said::Progress(progress),
        Said::Host(mut reported) => {
            host(&mut reported);
            Said::Host(reported)
        }
        Said::Node(mut reading) => {
            host(&mut reading.host);
            reading.disks.truncate(ROOTS);
            for disk in &mut reading.disks {
                disk.skipped = text(&disk.skipped);
            }
            Said::Node(reading)
        }
        Said::Link(mut reading) => {
            reading.forward.truncate(ROOTS);
            reading.backward.truncate(ROOTS);
            reading.trace.routers.truncate(ROOTS);
            // The way as the topology has it is the coordinator's to say.
            reading.switches.clear();
            Said::Link(reading)
        }
    }
}

fn host(host: &mut HostReport) {
    for words in [
        &mut host.version,
        &mut host.kernel,
        &mut host.interface,
        &mut host.congestion_control,
        &mut host.governor,
    ] {
        *words = text(words);
    }
    host.roots.truncate(ROOTS);
    for root in &mut host.roots {
        root.path = text(&root.path);
        if let Some(failure) = &mut root.failure {
            failure.message = text(&failure.message);
            failure.hint = text(&failure.hint);
            failure.path = failure.path.as_deref().map(text);
        }
    }
    for list in [&mut host.congestion_controls, &mut host.resolves_to] {
        list.truncate(ROOTS);
        for words in list {
            *words = text(words);
        }
    }
}

/// What a person wants measured.
pub(super) fn bench(wire: &v1::BenchRequest) -> Result<Wanted, WireError> {
    let sweep = match (
        optional("bench.sweep_from", &wire.sweep_from)?,
        optional("bench.sweep_to", &wire.sweep_to)?,
    ) {
        (Some(from), Some(to)) if from == to => return Err(fault("bench.sweep_to", "is the same node")),
        (Some(from), Some(to)) => Some(Pair { from, to }),
        _ => None,
    };
    Ok(Wanted {
        nodes: match &sweep {
            Some(pair) => format!("{},{}", pair.from, pair.to),
            None => all_unless_said(&wire.nodes),
        },
        sweep,
        links_only: wire.links_only,
        depth: optional("bench.depth", &wire.depth)?.unwrap_or_default(),
        show: wire.show,
        busy_too: wire.busy_too,
        from: optional("bench.from", &wire.from)?,
    })
}

/// TARGETS, or every node.
pub(super) fn all_unless_said(nodes: &str) -> String {
    if nodes.is_empty() { "all" } else { nodes }.to_owned()
}

/// Which copies a person wants listed.
pub(super) fn list(wire: &v1::ListRequest) -> Result<Question, WireError> {
    wanted(&wire.path, &wire.digest, wire.verify).map(Question::List)
}

/// Which copy a person wants removed.
pub(super) fn removal(wire: &v1::RemoveRequest) -> Result<Question, Failure> {
    Ok(Question::Remove(Removal {
        place: Place::parse(&wire.dest)?,
        name: wire.name.clone(),
        force: wire.force,
    }))
}

pub(super) fn report(body: v1::agent_message::Body) -> Result<Report, WireError> {
    use v1::agent_message::Body;
    Ok(match body {
        Body::Register(_) => return Err(fault("register", "came twice")),
        Body::Heartbeat(beat) => Report::Heartbeat {
            count: beat.count,
            roots: beat.roots.into_iter().take(64).collect(),
        },
        Body::Draining(_) => Report::Draining,
        Body::Applied(applied) => Report::Applied(
            parse("applied.job", &applied.job)?,
            Epoch(applied.epoch),
            PlanVersion(applied.version),
        ),
        Body::Prepared(prepared) => Report::Prepared(
            parse("prepared.job", &prepared.job)?,
            PlanVersion(prepared.version),
            Prepared::try_from(&prepared)?,
        ),
        Body::Progress(progress) => Report::Progress(
            parse("progress.job", &progress.job)?,
            Progress::try_from(&progress)?,
        ),
        Body::Source(source) => Report::Source(
            parse("source.job", &source.job)?,
            SourceReport::try_from(&source)?,
        ),
        Body::Outcome(outcome) => {
            Report::Outcome(parse("outcome.job", &outcome.job)?, Outcome::try_from(&outcome)?)
        }
        Body::Moved(moved) => Report::Moved {
            job: parse("moved.job", &moved.job)?,
            from: parse("moved.from", &moved.from)?,
            to: parse("moved.to", &moved.to)?,
            why: text(&moved.why),
        },
        Body::Answer(answer) => {
            let wire = answer.said.ok_or_else(|| fault("answer.said", "is missing"))?;
            Report::Said {
                id: AskId(answer.id),
                said: said(Said::try_from(&wire)?),
                last: wire.last,
            }
        }
        Body::Corrupt(corrupt) => Report::Corrupt {
            job: parse("corrupt.job", &corrupt.job)?,
            parent: parse("corrupt.parent", &corrupt.parent)?,
            chunk: corrupt.chunk,
        },
    })
}
