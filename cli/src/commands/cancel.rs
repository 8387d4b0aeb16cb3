//! `stage cancel`: ends a job, everywhere or on some nodes.

use stage_core::topology::hostlist;

use crate::args::{Cancel, Connection};
use crate::client::Client;
use crate::config;
use crate::error::Error;
use crate::exit;
use crate::render::{self, Form};

/// Runs `stage cancel`.
///
/// # Errors
/// No coordinator, or no such job.
pub(crate) async fn run(flags: Cancel, connection: &Connection) -> Result<u8, Error> {
    let (url, net) = config::client(connection)?;
    let mut client = Client::connect(&net, &url).await?;
    let id = client.job(&flags.job).await?;
    let cancelled = client.cancel(id, flags.node.clone()).await?;
    // It is cancelled now, or was over before: what became of it is worth a line.
    let job = client.watch(id).next().await?;
    if let Some(job) = job {
        render::job(Form::of(flags.output.json), &job)?;
    }
    if let Some(state) = cancelled.ended {
        render::note(&format!(
            "nothing was cancelled: job {id} had ended before, as {state}"
        ));
    }
    if !cancelled.waiting.is_empty() {
        let nodes = hostlist::fold(cancelled.waiting.iter().map(String::as_str));
        render::note(&format!(
            "{nodes}: not confirmed yet; what lies there of the job goes as soon as the order arrives"
        ));
    }
    Ok(exit::DONE)
}
