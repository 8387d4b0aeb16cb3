//! `stage plan`: from a topology file alone, or by the coordinator with what its agents report.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use stage_core::failure::{Code, Failure};
use stage_core::plan::{Facts, Plan, PlanError, Request, Tried, plan_explained};
use stage_core::simulate::{Fault, FaultKind, Trial, simulate};
use stage_core::topology::{End, Topology};
use stage_core::units::ByteCount;

use super::{block_on, push, source, topology};
use crate::args::{self, Connection};
use crate::client::Client;
use crate::error::Error;
use crate::event::{Carried, Event, Simulated};
use crate::render::Form;
use crate::{config, exit, render};

/// Runs `stage plan`.
///
/// # Errors
/// There is no plan, or no coordinator.
pub(crate) fn run(flags: &args::Plan, connection: &Connection) -> Result<u8, Error> {
    let form = Form::of(flags.output.json);
    if flags.topology.is_none() {
        let plan = block_on(asked(flags, connection))?;
        form.renderer().event(&Event::Planned { job: None, plan })?;
        return Ok(exit::DONE);
    }
    let is_tls = connection.coordinator.as_ref().is_none_or(|url| url.is_tls());
    let Alone {
        topology,
        request,
        plan,
        tried,
    } = alone(flags, is_tls)?;
    let simulated = flags
        .simulate
        .then(|| simulated(flags, &topology, &request, &plan))
        .transpose()?;
    if let Some(file) = &flags.plot {
        fs::write(file, render::drawing(&plan, &topology)).map_err(|error| {
            Failure::new(
                Code::Io,
                format!("cannot write the drawing: {error}"),
                "give a path that you can write to",
            )
            .at(source::show(file))
        })?;
    }
    let mut renderer = form.renderer();
    renderer.event(&Event::Planned { job: None, plan })?;
    if flags.explain {
        renderer.event(&Event::Explained(tried))?;
    }
    if let Some(simulated) = simulated {
        renderer.event(&Event::Simulated(Box::new(simulated)))?;
    }
    Ok(exit::DONE)
}

/// Tries a plan in the topology that it was made from.
fn simulated(
    flags: &args::Plan,
    topology: &Topology,
    request: &Request,
    plan: &Plan,
) -> Result<Simulated, Error> {
    let faults: Vec<Fault> = flags
        .fail
        .iter()
        .map(|death| Fault {
            node: death.node.clone(),
            at: death.at,
            kind: FaultKind::Dies,
        })
        .collect();
    let trial = Trial {
        topology,
        request,
        facts: &Facts::default(),
        faults: &faults,
        spread: 0.0,
        seed: 0,
    };
    // The plan came from this topology, so what is unknown stands in --fail.
    let outcome = simulate(plan, &trial).map_err(|error| {
        Failure::new(
            Code::UnknownTarget,
            format!("--fail: {error} or not in the plan"),
            "name the source or a target",
        )
    })?;
    let end = |end: End<'_>| match end {
        End::Node { node, .. } => node.name.to_string(),
        End::Switch(switch) => switch.to_string(),
    };
    let edges = topology
        .links()
        .flat_map(|link| {
            [
                (link.edge, link.from, link.to),
                (link.edge.reverse(), link.to, link.from),
            ]
            .map(|way| (link.is_interface, way))
        })
        .filter_map(|(is_interface, (edge, from, to))| {
            Some(Carried {
                name: topology.edge_name(edge),
                from: end(from),
                to: end(to),
                is_interface,
                bytes: *outcome.edges.get(&edge)?,
            })
        })
        .collect();
    Ok(Simulated {
        forecast: plan.predicted,
        outcome,
        edges,
    })
}

async fn asked(flags: &args::Plan, connection: &Connection) -> Result<Plan, Error> {
    let given = flags
        .path
        .as_deref()
        .expect("clap asks for it without a topology");
    let path = source::path(given)?;
    let request = push::bare(&path, flags.from.as_ref(), &flags.to, &flags.travel)?;
    let (url, net) = config::client(connection)?;
    Client::connect(&net, &url).await?.plan(request).await
}

/// A plan, and what it was made from.
struct Alone {
    topology: Topology,
    request: Request,
    plan: Plan,
    tried: Vec<Tried>,
}

/// Without any daemon.
fn alone(flags: &args::Plan, encrypted: bool) -> Result<Alone, Error> {
    let file = flags.topology.as_deref().expect("the caller looked");
    let (name, topology) = topology::load(file)?;
    let refused = |code, why: String, hint: &str| Error::from(Failure::new(code, why, hint).at(&name));
    // Answers of command groups belong to the coordinator: here such a group has none.
    let targets = topology.select(&flags.to, &BTreeMap::new()).map_err(|error| {
        refused(
            Code::UnknownTarget,
            error.to_string(),
            "`stage topology check` shows what the file holds",
        )
    })?;
    let request = Request {
        source: flags
            .from
            .clone()
            .ok_or_else(|| Error::usage("no source was named", "give --from NODE"))?,
        targets,
        size: size(flags)?,
        shape: flags.travel.shape,
        streams: flags.travel.streams.0,
        limit: flags.travel.limit,
        source_limit: flags.travel.source_limit,
        encrypted,
    };
    let (plan, tried) = plan_explained(&topology, &request, &Facts::default()).map_err(|error| {
        let code = match &error {
            PlanError::UnknownNode(_) | PlanError::NoTarget => Code::UnknownTarget,
            PlanError::Unreachable(_) => Code::Config,
        };
        refused(
            code,
            error.to_string(),
            "see --from, --to and the topology's links",
        )
    })?;
    Ok(Alone {
        topology,
        request,
        plan,
        tried,
    })
}

fn size(flags: &args::Plan) -> Result<ByteCount, Error> {
    match (flags.size, &flags.path) {
        (Some(size), _) => Ok(size),
        (None, Some(path)) => {
            let mut linked = HashSet::new();
            let meta = fs::metadata(path).map_err(|error| no_size(path, &error))?;
            Ok(ByteCount(size_of(path, &meta, &mut linked)?))
        }
        (None, None) => Err(Error::usage("no size was given", "give --size SIZE or PATH")),
    }
}

fn no_size(path: &Path, error: &io::Error) -> Error {
    Failure::new(
        Code::SourceMissing,
        error.to_string(),
        "give a file or directory that is here, or --size SIZE",
    )
    .at(source::show(path))
    .into()
}

/// What of a path would be sent, about: files of several names once.
fn size_of(path: &Path, meta: &fs::Metadata, linked: &mut HashSet<(u64, u64)>) -> Result<u64, Error> {
    if meta.is_symlink() {
        return Ok(0);
    }
    if meta.is_file() {
        let is_first = meta.nlink() < 2 || linked.insert((meta.dev(), meta.ino()));
        return Ok(if is_first { meta.len() } else { 0 });
    }
    if !meta.is_dir() {
        return Err(Failure::new(
            Code::SourceKind,
            "is neither file nor directory",
            "give one of these, or --size SIZE",
        )
        .at(source::show(path))
        .into());
    }
    let mut sum: u64 = 0;
    for entry in fs::read_dir(path).map_err(|error| no_size(path, &error))? {
        let entry = entry.map_err(|error| no_size(path, &error))?;
        let inner = entry.path();
        let meta = entry.metadata().map_err(|error| no_size(&inner, &error))?;
        sum = sum.saturating_add(size_of(&inner, &meta, linked)?);
    }
    Ok(sum)
}
