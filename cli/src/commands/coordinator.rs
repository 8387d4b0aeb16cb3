//! `stage coordinator`: runs the coordinator.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use stage_coordinator::Coordinator;
use tokio_util::sync::CancellationToken;

use super::daemon;
use crate::args::{self, Connection};
use crate::error::Error;
use crate::{config, exit};

/// Runs the coordinator until it is told to stop.
///
/// # Errors
/// It cannot start, or was fenced.
pub(crate) fn run(flags: args::Coordinator, connection: &Connection) -> Result<u8, Error> {
    daemon::log()?;
    daemon::raise_descriptors();
    let runtime = daemon::runtime()?;
    let done = runtime.block_on(serve(flags, connection));
    runtime.shutdown_timeout(daemon::LEAVE);
    done
}

async fn serve(flags: args::Coordinator, connection: &Connection) -> Result<u8, Error> {
    let address_file = flags.address_file.clone();
    let exit_with_stdin = flags.daemon.exit_with_stdin;
    let (config, net) = config::coordinator(flags, connection)?;
    let coordinator = Coordinator::start(config, net).await.map_err(ended)?;
    tracing::info!(address = %coordinator.address(), version = env!("CARGO_PKG_VERSION"), "coordinator listens");
    if let Some(file) = address_file {
        publish(&file, coordinator.address())
            .map_err(|error| Error::config(format!("{}: {error}", file.display())))?;
    }
    let stop = CancellationToken::new();
    daemon::serve(exit_with_stdin, stop.clone(), coordinator.run(stop))
        .await?
        .map_err(ended)?;
    Ok(exit::DONE)
}

#[expect(clippy::needless_pass_by_value, reason = "it stands where errors are mapped")]
fn ended(error: stage_coordinator::Error) -> Error {
    let mut message = error.to_string();
    if let stage_coordinator::Error::Topology(errors) = &error {
        for error in errors {
            message += &format!("\n{}:{}: {}", error.file, error.line, error.message);
        }
    }
    Error::Daemon {
        message,
        exit: error.exit_code(),
    }
}

/// Whole or not at all: whoever waits for the file never reads half an address.
fn publish(file: &Path, address: SocketAddr) -> std::io::Result<()> {
    let mut beside = file.as_os_str().to_owned();
    beside.push(".new");
    fs::write(&beside, format!("{address}\n"))?;
    fs::rename(&beside, file)
}
