//! `stage push -`: the standard input goes to this host's agent as a descriptor, and this command stays with it until
//! its end was seen.

use std::cell::Cell;
use std::ffi::OsStr;
use std::io::{IsTerminal as _, stdin};
use std::path::Path;

use rustix::fs::{FileType, Mode};
use rustix::process::umask;
use stage_core::failure::{Code, Failure};
use stage_core::id::JobId;

use super::{Named, request};
use crate::args::{Connection, Push};
use crate::client::Client;
use crate::commands::follow::{Until, conclude, follow, interruptible};
use crate::config;
use crate::error::Error;
use crate::event::Event;
use crate::local::Agent;
use crate::render::Form;

/// Whether a push is of the standard input.
pub(super) fn is_meant(push: &Push) -> bool {
    matches!(push.paths.as_slice(), [only] if only.as_os_str() == "-")
}

/// Runs `stage push -`.
///
/// # Errors
/// Every end that is not `finished`.
pub(super) async fn run(push: &Push, form: Form, connection: &Connection) -> Result<u8, Error> {
    let name = check(push, Input::look())?;
    let named = Named {
        path: Path::new("-"),
        name: Some(name),
    };
    let mut request = request(push, &[named])?;
    let (url, net) = config::client(connection)?;
    let job: JobId = request.job.parse().expect("it was made from an id");
    let submitted = Cell::new(None);
    let seen = Cell::new(false);
    let work = async {
        let mut client = Client::connect(&net, &url).await?;
        let mut stream = Agent::at(&connection.agent_socket).hand_over(job, mode()).await?;
        if let Some(from) = push.from.as_ref().filter(|from| **from != stream.node) {
            return Err(Error::usage(
                format!("--from {from}, but the standard input is on {}", stream.node),
                "leave --from out: what comes through a pipe comes from here",
            ));
        }
        request.from = stream.node.to_string();
        request.client_addresses.clear();
        submitted.set(Some(job));
        let job = client.submit(request).await?;
        let mut render = form.renderer();
        render.event(&Event::Submitted(job))?;
        let until = push.enough.map_or(Until::Settled, Until::Enough);
        let mut watch = client.watch(job);
        let end = {
            let mut feeding = std::pin::pin!(async {
                let until_its_end = stream.until_its_end().await;
                seen.set(until_its_end);
            });
            let mut following = std::pin::pin!(follow(&mut watch, until, &mut *render));
            let mut fed = false;
            let end = tokio::select! {
                end = &mut following => end,
                () = &mut feeding => {
                    fed = true;
                    following.await
                }
            };
            if end.as_ref().is_err_and(is_lost) && !fed {
                // The job goes on without a coordinator, and so does its input.
                feeding.await;
            }
            end?
        };
        conclude(end, until, &mut *render)
    };
    let done = interruptible(|| submitted.get(), Box::pin(work)).await;
    done.map_err(|error| match error {
        Error::Interrupted(Some(job)) if !seen.get() => Error::Cut(job),
        other => other,
    })
}

fn is_lost(error: &Error) -> bool {
    matches!(error, Error::Failure(failure) if failure.code == Code::NoCoordinator)
}

/// What the standard input is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Input {
    /// Something that may be sent.
    Open,
    Terminal,
    /// `/dev/null`, which the language's runtime puts in the place of a standard input that is closed.
    Null,
}

impl Input {
    fn look() -> Self {
        let is_null = |stat: rustix::fs::Stat| {
            FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
                && stat.st_rdev == rustix::fs::makedev(1, 3)
        };
        if stdin().is_terminal() {
            Self::Terminal
        } else if rustix::fs::fstat(stdin()).is_ok_and(is_null) {
            Self::Null
        } else {
            Self::Open
        }
    }
}

/// Refuses what cannot be; gives the name.
fn check(push: &Push, input: Input) -> Result<&OsStr, Error> {
    let Some(name) = push.name.as_deref() else {
        let hint = match push.unpack {
            true => "give the directory that it holds one with --as NAME",
            false => "give it one with --as NAME; a file named '-' is ./-",
        };
        return Err(Error::usage("what comes through a pipe has no name", hint));
    };
    if push.detach || push.dry_run {
        let flag = if push.detach { "--detach" } else { "--dry-run" };
        return Err(Error::usage(
            format!("{flag} cannot be had of a pipe: it is read by nobody but this push"),
            "leave the flag out, or write the pipe into a file and push that",
        ));
    }
    if input == Input::Null {
        return Err(Error::usage(
            "the standard input is closed or /dev/null",
            "pipe something into it; an empty file is pushed by its path",
        ));
    }
    if input == Input::Terminal {
        return Err(Failure::new(
            Code::SourceKind,
            "the standard input is a terminal",
            "pipe something into it, such as `tar c DIR | stage push - --as DIR.tar --to TARGETS`",
        )
        .into());
    }
    Ok(name)
}

/// What a shell would give a new file.
fn mode() -> u32 {
    let mask = umask(Mode::RWXG | Mode::RWXO);
    umask(mask);
    0o666 & !mask.bits()
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Command, Stage};

    fn push(line: &str) -> Push {
        match Stage::try_parse_from(line.split_whitespace()).unwrap().command {
            Command::Push(push) => *push,
            _ => panic!("not a push"),
        }
    }

    #[test]
    fn a_pipe_needs_a_name_and_somebody_who_stays() {
        let exit = |line: &str, input| {
            check(&push(line), input)
                .map(OsStr::to_owned)
                .map_err(|e| e.exit())
        };
        assert_eq!(exit("stage push - --to all", Input::Open), Err(2));
        assert_eq!(exit("stage push - --as x --to all --detach", Input::Open), Err(2));
        assert_eq!(
            exit("stage push - --as x --to all --dry-run", Input::Open),
            Err(2)
        );
        assert_eq!(exit("stage push - --as x --to all", Input::Terminal), Err(4));
        assert_eq!(exit("stage push - --as x --to all", Input::Null), Err(2));
        assert_eq!(exit("stage push - --as x --to all", Input::Open), Ok("x".into()));
        assert!(is_meant(&push("stage push - --to all")));
        assert!(!is_meant(&push("stage push ./- --to all")));
        assert!(!is_meant(&push("stage push - b --to all")));
    }
}
