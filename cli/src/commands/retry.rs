//! `stage retry`: tries what is missing of a job again, and watches as a push does.

use std::cell::Cell;

use super::follow::{Until, conclude, follow, interruptible};
use super::push::{detached, new_id};
use crate::args::{Connection, Retry};
use crate::client::{Client, Retried};
use crate::config;
use crate::error::Error;
use crate::event::Event;
use crate::render::{self, Form};

/// Runs `stage retry`.
///
/// # Errors
/// Every end that is not `finished`.
pub(crate) async fn run(flags: Retry, connection: &Connection) -> Result<u8, Error> {
    let form = Form::of(flags.output.json);
    let new = new_id()?;
    let (url, net) = config::client(connection)?;
    let mut client = Client::connect(&net, &url).await?;
    let old = client.job(&flags.job).await?;
    let goes_on = Cell::new(old);
    interruptible(|| Some(goes_on.get()), async {
        let (job, retried) = client.retry(old, flags.from.as_ref(), new).await?;
        goes_on.set(job);
        let mut render = form.renderer();
        match retried {
            Retried::Nothing => {
                render::note(&format!("nothing is left to try of job {job}"));
            }
            Retried::Asked => {
                render::note(&format!("job {job} is under way: who is missing is asked now"));
            }
            Retried::Revived => render::note(&format!("job {job} goes on from what its targets kept")),
            Retried::Anew => render::note(&format!(
                "job {old} has ended: job {job} brings it to the targets that do not have it"
            )),
        }
        if flags.detach && retried != Retried::Nothing {
            return detached(form, job, &mut *render);
        }
        render.event(&Event::Submitted(job))?;
        let end = follow(&mut client.watch(job), Until::Settled, &mut *render).await?;
        conclude(end, Until::Settled, &mut *render)
    })
    .await
}
