//! `stage path`: one path, for a job's script.

mod ensure;

use std::cell::Cell;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use stage_core::assignment::Place;
use stage_core::failure::{Code, Failure, show_path};
use stage_core::id::RootName;
use stage_proto::local::{Found, Whereabouts};

use super::follow::interruptible;
use crate::args::{self, Connection};
use crate::error::Error;
use crate::exit;
use crate::local::Agent;
use crate::render::{self, Form};

/// Runs `stage path`.
///
/// # Errors
/// The request is wrong; or there is nothing to print and no fallback.
pub(crate) async fn run(flags: args::Path, connection: &Connection) -> Result<u8, Error> {
    let form = Form::of(flags.output.json);
    let payload = Payload::parse(&flags.name, flags.dest.as_deref())?;
    let agent = Agent::at(&connection.agent_socket);
    let job = Cell::new(None);
    let finding = Box::pin(async {
        if flags.ensure {
            ensure::here(&agent, &payload, connection, flags.timeout, &job).await
        } else {
            look(&agent, &payload)
                .await?
                .map_err(|whereabouts| absent(&whereabouts))
        }
    });
    let found = interruptible(|| job.get(), finding).await;
    match found {
        Ok(Here { whereabouts, found }) => {
            let (kind, path, bytes) = match &found {
                Found::File { size } => ("file", &whereabouts.path, Some(size.0)),
                Found::Tree { generation } => ("tree", generation, None),
            };
            render::place(
                form,
                render::Place {
                    node: Some(&whereabouts.node),
                    kind,
                    path,
                    bytes,
                    reason: None,
                },
            )?;
        }
        Err(error) => {
            // A script that mistyped its request learns of it, and is not sent elsewhere for ever.
            let (Some(fallback), false) = (&flags.fallback, error.exit() == exit::USAGE || is_ours(&error))
            else {
                return Err(error);
            };
            let reason = error.failure();
            render::place(
                form,
                render::Place {
                    node: reason.node.as_ref(),
                    kind: "fallback",
                    path: fallback.as_os_str().as_bytes(),
                    bytes: None,
                    reason: Some(&reason),
                },
            )?;
        }
    }
    Ok(exit::DONE)
}

/// Whether the command itself ends, whatever there is on the node.
fn is_ours(error: &Error) -> bool {
    matches!(error, Error::Interrupted(_) | Error::Output(_))
}

/// Something that is here.
struct Here {
    whereabouts: Whereabouts,
    found: Found,
}

/// Asks the agent; where there is nothing, what it told all the same.
async fn look(agent: &Agent, payload: &Payload) -> Result<Result<Here, Whereabouts>, Error> {
    let mut whereabouts = agent.locate(payload.place.clone(), payload.name.clone()).await?;
    Ok(match whereabouts.found.take() {
        Some(found) => Ok(Here { whereabouts, found }),
        None => Err(whereabouts),
    })
}

fn absent(whereabouts: &Whereabouts) -> Error {
    Failure::new(
        Code::NotHere,
        "nothing of this name is published on this node",
        "push it here with `stage push`, have it brought with --ensure, or give --fallback PATH",
    )
    .on(&whereabouts.node)
    .at(show_path(&whereabouts.path))
    .into()
}

/// A payload as `stage path` is asked for it.
#[derive(Debug, PartialEq, Eq)]
struct Payload {
    place: Place,
    name: Vec<u8>,
}

impl Payload {
    fn parse(name: &OsStr, dest: Option<&OsStr>) -> Result<Self, Error> {
        let mut text = name.as_bytes();
        while let Some(rest) = text.strip_suffix(b"/") {
            text = rest;
        }
        let (dest, name) = match dest {
            Some(dest) => (dest.as_bytes().to_vec(), text),
            None => split(text),
        };
        if name.is_empty() || name == b"." || name == b".." || name.contains(&b'/') || name.contains(&0) {
            return Err(Error::usage(
                format!("\"{}\" is not a payload's name", show_path(name)),
                "write NAME, ROOT:DIR/NAME or the absolute path; or NAME with --dest",
            ));
        }
        Ok(Self {
            place: Place::parse(&dest)?,
            name: name.to_vec(),
        })
    }
}

/// Directory and name of `ROOT:DIR/NAME` and of an absolute path; a name alone lies in the first root.
fn split(text: &[u8]) -> (Vec<u8>, &[u8]) {
    if text.starts_with(b"/") {
        let slash = text.iter().rposition(|byte| *byte == b'/').unwrap_or_default();
        return (text[..slash.max(1)].to_vec(), &text[slash + 1..]);
    }
    let root = text.iter().position(|byte| *byte == b':').filter(|colon| {
        std::str::from_utf8(&text[..*colon]).is_ok_and(|name| name.parse::<RootName>().is_ok())
    });
    let Some(colon) = root else {
        return (Vec::new(), text);
    };
    let begin = text
        .iter()
        .rposition(|byte| *byte == b'/')
        .map_or(colon + 1, |slash| slash + 1);
    (text[..begin].to_vec(), &text[begin..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(name: &str, dest: Option<&str>) -> Result<(Place, String), u8> {
        Payload::parse(OsStr::new(name), dest.map(OsStr::new))
            .map(|payload| (payload.place, String::from_utf8(payload.name).unwrap()))
            .map_err(|error| error.exit())
    }

    #[test]
    fn a_payload_is_named_in_three_ways() {
        let place = |dest: &str| Place::parse(dest.as_bytes()).unwrap();
        for (name, dest, at, is) in [
            ("k2", None, "", "k2"),
            ("k2/", None, "", "k2"),
            ("a.fa:1", None, "a.fa:", "1"),
            ("a b:1", None, "", "a b:1"),
            ("a.fa:1", Some("scratch:"), "scratch:", "a.fa:1"),
            ("scratch:k2", None, "scratch:", "k2"),
            ("scratch:db/kraken/k2", None, "scratch:db/kraken", "k2"),
            ("/scratch/db/k2", None, "/scratch/db", "k2"),
            ("/k2", None, "/", "k2"),
            ("k2", Some("/scratch/db/"), "/scratch/db", "k2"),
        ] {
            assert_eq!(
                parsed(name, dest),
                Ok((place(at), is.to_owned())),
                "{name} {dest:?}"
            );
        }
    }

    #[test]
    fn what_names_nothing_is_a_usage_error() {
        for (name, dest) in [
            ("", None),
            ("/", None),
            ("db/k2", None),
            ("scratch:", None),
            ("scratch:../k2", None),
            ("..", None),
            ("a/b", Some("scratch:")),
            ("k2", Some("scratch")),
        ] {
            assert_eq!(parsed(name, dest), Err(exit::USAGE), "{name:?} {dest:?}");
        }
    }
}
