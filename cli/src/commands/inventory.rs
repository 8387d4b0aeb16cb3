//! `stage ls`, `verify` and `rm`: what is staged where, and how it goes again.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use stage_core::ask::{Said, State};
use stage_core::failure::show_path;
use stage_proto::v1;
use stage_proto::version::hello;

use super::follow::interruptible;
use super::push::dest;
use crate::args::{Connection, Ls, Rm, Verify, Which};
use crate::client::Client;
use crate::error::Error;
use crate::render::Form;
use crate::render::inventory::{Listing, Removals};
use crate::{config, exit};

/// Runs `stage ls`.
///
/// # Errors
/// No coordinator, or unknown nodes.
pub(crate) async fn ls(flags: Ls, connection: &Connection) -> Result<u8, Error> {
    list(
        &flags.which,
        flags.verify,
        Form::of(flags.output.json),
        connection,
    )
    .await
}

/// Runs `stage verify`.
///
/// # Errors
/// No coordinator, or unknown nodes.
pub(crate) async fn verify(flags: Verify, connection: &Connection) -> Result<u8, Error> {
    list(&flags.which, true, Form::of(flags.output.json), connection).await
}

async fn list(which: &Which, verify: bool, form: Form, connection: &Connection) -> Result<u8, Error> {
    let request = v1::ListRequest {
        hello: Some(hello()),
        nodes: which.nodes.clone(),
        path: which
            .what
            .as_deref()
            .map(wanted)
            .transpose()?
            .unwrap_or_default()
            .into_vec(),
        digest: which.digest.as_ref().map(ToString::to_string).unwrap_or_default(),
        verify,
    };
    let asks = which.what.is_some() || which.digest.is_some();
    let (url, net) = config::client(connection)?;
    interruptible(|| None, async {
        let mut answers = Client::connect(&net, &url).await?.list(request).await?;
        let mut listing = Listing::new(form, verify);
        let mut all_ok = true;
        while let Some((node, said, last)) = answers.next().await? {
            if let Said::Copies(copies) = &said {
                all_ok &= copies.iter().all(|copy| copy.state == State::Ok);
            }
            listing.heard(node, said, last)?;
        }
        // To have checked nothing is no success; and a drained node that says nothing may have it.
        let is_missing = verify && asks && listing.is_empty();
        let exit = if is_missing && listing.has_heard_all() {
            exit::REFUSED
        } else if listing.is_whole() && !is_missing && (all_ok || !verify) {
            exit::DONE
        } else {
            exit::PARTLY
        };
        listing.finish(exit)?;
        Ok(exit)
    })
    .await
}

/// What a person means: a name as it is, and a path that begins with a dot by where the command runs.
fn wanted(what: &OsStr) -> Result<OsString, Error> {
    let bytes = what.as_bytes();
    if bytes.is_empty() {
        return Err(Error::usage("the name is empty", "leave it out to list all"));
    }
    let is_here = bytes == b"." || bytes.starts_with(b"./") || bytes == b".." || bytes.starts_with(b"../");
    if !is_here {
        return Ok(what.to_owned());
    }
    Ok(std::path::absolute(Path::new(what))?.into_os_string())
}

/// Runs `stage rm`.
///
/// # Errors
/// No coordinator, unknown nodes, or a path that can be no copy's.
pub(crate) async fn rm(flags: Rm, connection: &Connection) -> Result<u8, Error> {
    let (dir, name) = place(&flags)?;
    let request = v1::RemoveRequest {
        hello: Some(hello()),
        nodes: flags.from.clone(),
        dest: dir,
        name,
        force: flags.force,
    };
    let (url, net) = config::client(connection)?;
    interruptible(|| None, async {
        let mut answers = Client::connect(&net, &url).await?.remove(request).await?;
        let mut removals = Removals::new(Form::of(flags.output.json));
        while let Some((node, said, _)) = answers.next().await? {
            removals.heard(&node, &said)?;
        }
        let exit = if removals.is_whole() {
            exit::DONE
        } else {
            exit::PARTLY
        };
        removals.finish(exit)?;
        Ok(exit)
    })
    .await
}

/// The directory and the name in it, as the wire has them.
fn place(flags: &Rm) -> Result<(Vec<u8>, Vec<u8>), Error> {
    let what = Path::new(&flags.what);
    let shown = show_path(flags.what.as_bytes());
    if what.is_absolute() {
        if flags.dest.is_some() {
            return Err(Error::usage(
                format!("{shown} is absolute, and --dest gives another place"),
                "give the copy's name with --dest, or its whole path without",
            ));
        }
        // Without a slash at the end; what `..` leads to on the nodes is not known here.
        let path: PathBuf = what.components().collect();
        return match (path.parent(), path.file_name()) {
            (Some(dir), Some(name)) => Ok((dir.as_os_str().as_bytes().to_vec(), name.as_bytes().to_vec())),
            _ => Err(Error::usage(
                format!("{shown} ends in no name that a copy could have"),
                "give the path of a copy as `stage ls` shows it",
            )),
        };
    }
    let name = flags.what.as_bytes();
    let name = name.strip_suffix(b"/").unwrap_or(name);
    if name.is_empty() || name.contains(&b'/') {
        return Err(Error::usage(
            format!("{shown:?} is neither a name nor an absolute path"),
            "give the name alone, with --dest ROOT:DIR where it lies, or the whole path as `stage ls` shows it",
        ));
    }
    Ok((dest(flags.dest.as_deref())?, name.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Command, Stage};
    use clap::Parser as _;

    fn rm(line: &str) -> Result<(Vec<u8>, Vec<u8>), u8> {
        match Stage::try_parse_from(line.split(' ')).unwrap().command {
            Command::Rm(flags) => place(&flags).map_err(|error| error.exit()),
            _ => panic!("not an rm"),
        }
    }

    #[test]
    fn a_copy_is_named_by_its_path_or_by_its_name_and_place() {
        let is = |dir: &str, name: &str| Ok((dir.into(), name.into()));
        assert_eq!(rm("stage rm /a/b/c --from all"), is("/a/b", "c"));
        assert_eq!(rm("stage rm /a/b/c/ --from all"), is("/a/b", "c"));
        assert_eq!(rm("stage rm /c --from all"), is("/", "c"));
        assert_eq!(rm("stage rm c --from all"), is("", "c"));
        assert_eq!(rm("stage rm c/ --from all"), is("", "c"));
        assert_eq!(rm("stage rm c --from all --dest main:b"), is("main:b", "c"));
        for bad in [
            "stage rm b/c --from all",
            "stage rm / --from all",
            "stage rm /a/.. --from all",
            "stage rm /a/c --from all --dest main:b",
            "stage rm c --from all --dest b",
        ] {
            assert_eq!(rm(bad), Err(exit::USAGE), "{bad}");
        }
    }

    #[test]
    fn only_a_path_with_a_dot_is_of_this_directory() {
        let wanted = |text: &str| wanted(OsStr::new(text)).map_err(|error| error.exit());
        assert_eq!(wanted("genome.db"), Ok("genome.db".into()));
        assert_eq!(wanted("db/genome.db"), Ok("db/genome.db".into()));
        assert_eq!(wanted(".hidden"), Ok(".hidden".into()));
        let here = std::env::current_dir().unwrap();
        assert_eq!(wanted("./x"), Ok(here.join("x").into_os_string()));
        assert_eq!(wanted(""), Err(exit::USAGE));
    }
}
