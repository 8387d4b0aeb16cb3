//! `stage plan`: from a topology file alone, or by the coordinator with what its agents report.

use std::collections::BTreeMap;
use std::fs;

use stage_core::failure::{Code, Failure};
use stage_core::plan::{Facts, PlanError, Request, plan};
use stage_core::units::ByteCount;

use super::{block_on, push, source, topology};
use crate::args::{self, Connection};
use crate::client::Client;
use crate::error::Error;
use crate::event::Event;
use crate::render::Form;
use crate::{config, exit};

/// Runs `stage plan`.
///
/// # Errors
/// There is no plan, or no coordinator.
pub(crate) fn run(flags: &args::Plan, connection: &Connection) -> Result<u8, Error> {
    let form = Form::of(flags.output.json);
    let plan = if flags.topology.is_some() {
        alone(
            flags,
            connection.coordinator.as_ref().is_none_or(|url| url.is_tls()),
        )?
    } else {
        block_on(asked(flags, connection))?
    };
    form.renderer().event(&Event::Planned { job: None, plan })?;
    Ok(exit::DONE)
}

async fn asked(flags: &args::Plan, connection: &Connection) -> Result<stage_core::plan::Plan, Error> {
    let path = source::path(flags.path.as_slice())?;
    let request = push::bare(&path, flags.from.as_ref(), &flags.to, &flags.travel)?;
    let (url, net) = config::client(connection)?;
    Client::connect(&net, &url).await?.plan(request).await
}

/// Without any daemon.
fn alone(flags: &args::Plan, encrypted: bool) -> Result<stage_core::plan::Plan, Error> {
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
    plan(&topology, &request, &Facts::default()).map_err(|error| {
        let code = match &error {
            PlanError::UnknownNode(_) | PlanError::NoTarget => Code::UnknownTarget,
            PlanError::Unreachable(_) => Code::Config,
        };
        refused(
            code,
            error.to_string(),
            "see --from, --to and the topology's links",
        )
    })
}

fn size(flags: &args::Plan) -> Result<ByteCount, Error> {
    match (flags.size, &flags.path) {
        (Some(size), _) => Ok(size),
        (None, Some(path)) => match fs::metadata(path) {
            Ok(meta) if meta.is_file() => Ok(ByteCount(meta.len())),
            Ok(_) => Err(Failure::new(
                Code::SourceKind,
                "is no regular file",
                "give a regular file, or --size SIZE",
            )
            .at(source::show(path))
            .into()),
            Err(error) => Err(Failure::new(
                Code::SourceMissing,
                error.to_string(),
                "give a file that is here, or --size SIZE",
            )
            .at(source::show(path))
            .into()),
        },
        (None, None) => Err(Error::usage("no size was given", "give --size SIZE or PATH")),
    }
}
