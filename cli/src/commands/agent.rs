//! `stage agent`: runs a node's agent.

use stage_agent::Agent;
use tokio_util::sync::CancellationToken;

use super::daemon;
use crate::args::{self, Connection};
use crate::error::Error;
use crate::{config, exit};

/// Runs the agent until it is told to stop.
///
/// # Errors
/// It cannot start.
pub(crate) fn run(flags: args::Agent, connection: &Connection) -> Result<u8, Error> {
    daemon::log()?;
    daemon::raise_descriptors();
    let runtime = daemon::runtime()?;
    let done = runtime.block_on(serve(flags, connection));
    runtime.shutdown_timeout(daemon::LEAVE);
    done
}

async fn serve(flags: args::Agent, connection: &Connection) -> Result<u8, Error> {
    let exit_with_stdin = flags.daemon.exit_with_stdin;
    let (config, net) = config::agent(flags, connection)?;
    let node = config.node.clone();
    let agent = Agent::start(config, net).await.map_err(ended)?;
    tracing::info!(%node, data = ?agent.data_addresses(), version = env!("CARGO_PKG_VERSION"), "agent listens");
    let stop = CancellationToken::new();
    Box::pin(daemon::serve(exit_with_stdin, stop.clone(), agent.run(stop)))
        .await?
        .map_err(ended)?;
    Ok(exit::DONE)
}

#[expect(clippy::needless_pass_by_value, reason = "it stands where errors are mapped")]
fn ended(error: stage_agent::Error) -> Error {
    Error::Daemon {
        message: error.to_string(),
        exit: error.exit_code(),
    }
}
