//! `stage demo`: the real daemons as children of this process, on this host's loopback, and a push through the same
//! code as `stage push`. What a newcomer tries is what production runs.

mod cluster;
mod compare;
mod workplace;

use std::path::{Path, PathBuf};

use stage_core::id::NodeName;
use tokio::signal::unix::{SignalKind, signal};

use super::follow::{Until, conclude, follow};
use super::{push, source};
use crate::args::{Connection, Demo};
use crate::error::Error;
use crate::event::Event;
use crate::exit;
use crate::render::{self, Form};
use cluster::Cluster;
use workplace::Workplace;

/// Runs `stage demo`.
///
/// # Errors
/// The daemons do not start, the push does not end well, or a copy differs.
pub(crate) async fn run(flags: Demo, connection: &Connection) -> Result<u8, Error> {
    let form = Form::of(flags.output.json);
    let workplace = Workplace::new(flags.keep.as_deref())?;
    let mut cluster = Cluster::new(workplace.path().to_owned(), !connection.insecure);
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let done = tokio::select! {
        done = show(&flags, form, &workplace, &mut cluster) => done,
        _ = tokio::signal::ctrl_c() => Err(Error::Interrupted(None)),
        _ = terminate.recv() => Err(Error::Interrupted(None)),
        _ = hangup.recv() => Err(Error::Interrupted(None)),
    };
    cluster.stop().await;
    // After a refusal there is nothing in the logs that the error does not say.
    let good = match &done {
        Ok(exit) => *exit == exit::DONE,
        Err(error) => {
            error.is_closed_pipe() || matches!(error.exit(), exit::USAGE | exit::REFUSED | exit::INTERRUPTED)
        }
    };
    match workplace.leave(good) {
        Ok(Some(kept)) => render::note(&format!("demo: {kept}")),
        Ok(None) => {}
        Err(error) => render::note(&format!("demo: {error}")),
    }
    done
}

async fn show(flags: &Demo, form: Form, workplace: &Workplace, cluster: &mut Cluster) -> Result<u8, Error> {
    let payload = payload(flags, workplace).await?;
    say(
        form,
        &format!(
            "demo: a coordinator and {} agents as processes of this host, on 127.0.0.1 to 127.0.0.{}, {}",
            u16::from(flags.nodes) + 1,
            u16::from(flags.nodes) + 2,
            if cluster.is_tls() {
                "TLS with a throw-away CA"
            } else {
                "without TLS"
            },
        ),
    )?;
    say(
        form,
        "demo: all share this host's loopback, processors and disk; the forecast takes each for a node with a 10 Gbit/s link.\n\
         demo: it shows that the copies arrive and are right, not how fast a cluster is",
    )?;
    let mut client = cluster.start(flags.nodes).await?;
    let head: NodeName = cluster::name(0);
    let targets = format!("{}[1-{}]", cluster::NAME, flags.nodes);
    let request = push::bare(&payload, Some(&head), &targets, &flags.travel)?;
    let job = client.submit(request).await?;
    let mut render = form.renderer();
    render.event(&Event::Submitted(job))?;
    let mut watch = client.watch(job);
    let ended = tokio::select! {
        ended = follow(&mut watch, Until::Settled, &mut *render) => ended?,
        died = cluster.death() => return Err(died),
    };
    let exit = Until::Settled.exit(&ended);
    if exit != exit::DONE {
        return conclude(ended, Until::Settled, &mut *render);
    }
    let copies: Vec<PathBuf> = (1..=flags.nodes)
        .map(|node| workplace.copy(node, &payload))
        .collect();
    let reported = ended.sha256.clone();
    let compare = compare::all(&payload, &copies, reported.as_deref());
    if form == Form::Json {
        // `finished` is the last word, so what it rests on comes before.
        render.event(&Event::Compared(compare.await?))?;
        return conclude(ended, Until::Settled, &mut *render);
    }
    conclude(ended, Until::Settled, &mut *render)?;
    render.event(&Event::Compared(compare.await?))?;
    Ok(exit)
}

/// What stands before the push: on standard output for people, beside it where a script reads.
fn say(form: Form, text: &str) -> Result<(), Error> {
    match form {
        Form::Human => render::line(text)?,
        Form::Json | Form::Quiet => render::note(text),
    }
    Ok(())
}

/// The file to send: the one that was named, or a new one of random bytes.
async fn payload(flags: &Demo, workplace: &Workplace) -> Result<PathBuf, Error> {
    let copies = u64::from(flags.nodes);
    match &flags.file {
        Some(file) => {
            let path = source::path(file)?;
            // A file that is not there is for the agent to report, as in any push.
            if let Ok(meta) = std::fs::metadata(&path) {
                workplace.need(meta.len().saturating_mul(copies))?;
            }
            Ok(path)
        }
        None => {
            let path = workplace.path().join("payload.bin");
            workplace.need(flags.size.0.saturating_mul(copies + 1))?;
            let (file, size) = (path.clone(), flags.size.0);
            tokio::task::spawn_blocking(move || write_random(&file, size))
                .await
                .map_err(std::io::Error::other)
                .and_then(|written| written)
                .map_err(|error| {
                    Error::other(
                        format!("{}: {error}", source::show(&path)),
                        "set TMPDIR to a directory with room, or give --keep DIR",
                    )
                })?;
            Ok(path)
        }
    }
}

fn write_random(path: &Path, size: u64) -> std::io::Result<()> {
    use std::io::Write as _;
    let mut file = std::fs::File::create_new(path)?;
    let mut block = vec![0; 1 << 20];
    let mut left = size;
    while left > 0 {
        let part = &mut block[..left.min(1 << 20) as usize];
        getrandom::fill(part).map_err(std::io::Error::other)?;
        file.write_all(part)?;
        left -= part.len() as u64;
    }
    Ok(())
}
