//! `stage status` and `stage wait`: what is known of jobs.

use super::follow::{Until, conclude, follow, interruptible};
use crate::args::{Connection, Status, Wait};
use crate::client::Client;
use crate::error::Error;
use crate::render::{self, Form};
use crate::{config, exit};

/// Runs `stage status`.
///
/// # Errors
/// No coordinator, or no such job.
pub(crate) async fn status(flags: Status, connection: &Connection) -> Result<u8, Error> {
    let form = Form::of(flags.output.json);
    let (url, net) = config::client(connection)?;
    let mut client = Client::connect(&net, &url).await?;
    let Some(name) = flags.job else {
        render::jobs(form, &client.jobs().await?)?;
        return Ok(exit::DONE);
    };
    let id = client.job(&name).await?;
    if !flags.watch {
        let job = client.watch(id).next().await?.ok_or_else(|| {
            Error::other("the coordinator showed no job", "look into the coordinator's log")
        })?;
        render::job(form, &job)?;
        return Ok(exit::DONE);
    }
    interruptible(|| Some(id), async {
        let mut render = form.renderer();
        let end = follow(&mut client.watch(id), Until::Ended, &mut *render).await?;
        conclude(end, Until::Ended, &mut *render)
    })
    .await
}

/// Runs `stage wait`.
///
/// # Errors
/// No coordinator, no such job, or an end of the job that is no `finished`.
pub(crate) async fn wait(flags: Wait, connection: &Connection) -> Result<u8, Error> {
    let form = Form::of(flags.output.json);
    let until = if flags.unfit { Until::Ended } else { Until::Settled };
    let (url, net) = config::client(connection)?;
    let mut client = Client::connect(&net, &url).await?;
    let job = client.job(&flags.job).await?;
    interruptible(|| Some(job), async {
        let mut render = form.renderer();
        let end = follow(&mut client.watch(job), until, &mut *render).await?;
        conclude(end, until, &mut *render)
    })
    .await
}
