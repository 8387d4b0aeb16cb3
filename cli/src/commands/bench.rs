//! `stage bench` and `stage doctor`: what is fast, what is slow, and what holds it back.

use stage_core::failure::{Code, Failure};
use stage_proto::v1;
use stage_proto::version::hello;

use super::follow::interruptible;
use crate::args::{Bench, Connection, Doctor};
use crate::client::Client;
use crate::error::Error;
use crate::render::Form;
use crate::render::bench::Benching;
use crate::render::doctor::Findings;
use crate::{config, exit};

/// Runs `stage bench`. Ctrl-C ends the measuring.
///
/// # Errors
/// No coordinator, unknown nodes, or another bench under way.
pub(crate) async fn bench(flags: Bench, connection: &Connection) -> Result<u8, Error> {
    let depth = match (flags.quick, flags.full) {
        (true, _) => "quick",
        (_, true) => "full",
        _ => "usual",
    };
    let request = v1::BenchRequest {
        hello: Some(hello()),
        nodes: flags.nodes,
        links_only: flags.links,
        depth: depth.to_owned(),
        show: flags.show,
        busy_too: flags.busy_too,
        from: flags.from.map(|node| node.to_string()).unwrap_or_default(),
        sweep_from: flags.sweep.first().map(ToString::to_string).unwrap_or_default(),
        sweep_to: flags.sweep.get(1).map(ToString::to_string).unwrap_or_default(),
    };
    let is_sweep = !flags.sweep.is_empty();
    let (url, net) = config::client(connection)?;
    interruptible(|| None, async {
        let mut events = Client::connect(&net, &url).await?.bench(request).await?;
        let mut benching = Benching::new(Form::of(flags.output.json), is_sweep);
        while let Some(event) = events.next().await? {
            benching.heard(event)?;
        }
        if let (Some(file), Some(drawing)) = (&flags.plot, benching.heat_map()) {
            std::fs::write(file, drawing).map_err(|error| {
                let failure = Failure::new(
                    Code::Io,
                    format!("the drawing cannot be written: {error}"),
                    "name another file with --plot",
                );
                Error::from(failure.at(file.display().to_string()))
            })?;
        }
        let exit = if benching.is_whole() {
            exit::DONE
        } else {
            exit::PARTLY
        };
        benching.finish(exit)?;
        Ok(exit)
    })
    .await
}

/// Runs `stage doctor`.
///
/// # Errors
/// No coordinator, or unknown nodes.
pub(crate) async fn doctor(flags: Doctor, connection: &Connection) -> Result<u8, Error> {
    let request = v1::DoctorRequest {
        hello: Some(hello()),
        nodes: flags.nodes.join(","),
    };
    let (url, net) = config::client(connection)?;
    interruptible(|| None, async {
        let mut told = Client::connect(&net, &url).await?.doctor(request).await?;
        let mut findings = Findings::new(Form::of(flags.output.json));
        while let Some(node) = told.next().await? {
            findings.heard(&node)?;
        }
        let exit = if findings.is_sound() {
            exit::DONE
        } else {
            exit::PARTLY
        };
        findings.finish(exit)?;
        Ok(exit)
    })
    .await
}
