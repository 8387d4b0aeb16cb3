//! `stage nodes`: who is there, and who is declared away.

use crate::args::{Connection, Nodes, NodesAction};
use crate::client::Client;
use crate::error::Error;
use crate::render::{self, Form};
use crate::{config, exit};

/// Runs `stage nodes`.
///
/// # Errors
/// No coordinator, or unknown nodes.
pub(crate) async fn run(flags: Nodes, connection: &Connection) -> Result<u8, Error> {
    let (url, net) = config::client(connection)?;
    let mut client = Client::connect(&net, &url).await?;
    let (output, nodes) = match flags.action {
        None => (flags.output, client.nodes().await?),
        Some(NodesAction::Drain { nodes, output }) => (output, client.drain(nodes, true).await?),
        Some(NodesAction::Resume { nodes, output }) => (output, client.drain(nodes, false).await?),
    };
    render::nodes(Form::of(output.json), &nodes)?;
    Ok(exit::DONE)
}
