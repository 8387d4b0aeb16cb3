//! `stage push`: one request, then watching.

mod stream;

use std::cell::Cell;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use stage_core::id::{JobId, NodeName};
use stage_core::units::Rate;
use stage_proto::v1;
use stage_proto::version::hello;

use super::follow::{Until, conclude, follow, interruptible};
use super::{source, sums};
use crate::args::{Cache, Connection, IfExists, Push, Travel, Unfit};
use crate::client::Client;
use crate::error::Error;
use crate::event::Event;
use crate::render::{self, Form, Render};
use crate::{config, exit};

/// Runs `stage push`.
///
/// # Errors
/// Every end that is not `finished`.
pub(crate) async fn run(push: Push, connection: &Connection) -> Result<u8, Error> {
    let form = if push.quiet {
        Form::Quiet
    } else {
        Form::of(push.output.json)
    };
    if stream::is_meant(&push) {
        return Box::pin(stream::run(&push, form, connection)).await;
    }
    let paths = source::paths(&push.paths)?;
    if push.name.as_deref().is_some_and(OsStr::is_empty) {
        // As a script says it whose variable is not set.
        return Err(Error::usage(
            "\"\" names no file",
            "what --as says is the payload's name on every node; leave it out for the last part of the path",
        ));
    }
    if push.name.is_some() && paths.len() > 1 {
        return Err(Error::usage(
            format!("--as is one name, and there are {} paths", paths.len()),
            "push them one after another, or leave --as out",
        ));
    }
    let unpacked = match push.name {
        None if push.unpack => Some(name_of_tree(&paths)?),
        _ => None,
    };
    let name = push.name.as_deref().or(unpacked);
    let named: Vec<_> = paths.iter().map(|path| Named { path, name }).collect();
    let request = request(&push, &named)?;
    let (url, net) = config::client(connection)?;
    let job: JobId = request.job.parse().expect("it was made from an id");
    let submitted = Cell::new(None);
    interruptible(|| submitted.get(), async {
        let mut client = Client::connect(&net, &url).await?;
        let mut render = form.renderer();
        if push.dry_run {
            let plan = client.plan(request).await?;
            render.event(&Event::Planned { job: None, plan })?;
            return Ok(exit::DONE);
        }
        // From the first attempt on the job may exist, whatever becomes of the answer.
        submitted.set(Some(job));
        let job = client.submit(request).await?;
        if push.detach {
            return detached(form, job, &mut *render);
        }
        render.event(&Event::Submitted(job))?;
        let until = push.enough.map_or(Until::Settled, Until::Enough);
        let end = follow(&mut client.watch(job), until, &mut *render).await?;
        conclude(end, until, &mut *render)
    })
    .await
}

/// What a tar is called once it is unpacked: its own name, without what says that it is one.
fn name_of_tree(paths: &[PathBuf]) -> Result<&OsStr, Error> {
    let [path] = paths else {
        return Err(Error::usage(
            format!("--unpack takes one tar, and there are {} paths", paths.len()),
            "push them one after another",
        ));
    };
    let name = path.file_name().unwrap_or_default().as_bytes();
    let suffixes: [&[u8]; 5] = [b".tar", b".tar.gz", b".tgz", b".tar.zst", b".tzst"];
    let stem = suffixes.iter().find_map(|suffix| name.strip_suffix(*suffix));
    match stem.filter(|stem| !stem.is_empty()) {
        Some(stem) => Ok(OsStr::from_bytes(stem)),
        None => Err(Error::usage(
            format!(
                "what is in {} has no name once it is unpacked",
                stage_core::failure::show_path(path.as_os_str().as_bytes())
            ),
            "give the directory one with --as NAME",
        )),
    }
}

/// The id alone on standard output, so that a script can take it; the rest beside it.
pub(super) fn detached(form: Form, job: JobId, render: &mut dyn Render) -> Result<u8, Error> {
    match form {
        Form::Json => render.event(&Event::Submitted(job))?,
        Form::Quiet => {}
        Form::Human => {
            render::line(&job.to_string())?;
            render::note(&format!(
                "follow it with `stage status {job} --watch`, end it with `stage cancel {job}`"
            ));
        }
    }
    Ok(exit::DONE)
}

/// What is pushed.
struct Named<'a> {
    /// Where it is, as the source's node shall open it.
    path: &'a Path,
    /// What it shall be called, if not as there.
    name: Option<&'a OsStr>,
}

fn request(push: &Push, named: &[Named<'_>]) -> Result<v1::SubmitRequest, Error> {
    let first = named.first().expect("clap asks for a path");
    let expect = match &push.expect {
        Some(file) => {
            // A pipe has nothing but the name that it is given.
            let piped = first.name.filter(|_| stream::is_meant(push)).map(Path::new);
            let is_file = |named: &&Named<'_>| named.path.metadata().is_ok_and(|meta| meta.is_file());
            let only = piped.or_else(|| match named {
                [only] => Some(only).filter(is_file).map(|only| only.path),
                _ => None,
            });
            sums::read(file, only)?
        }
        None => Vec::new(),
    };
    Ok(v1::SubmitRequest {
        if_exists: match push.if_exists {
            IfExists::Fail => v1::IfExists::Fail,
            IfExists::Replace => v1::IfExists::Replace,
            IfExists::Skip => v1::IfExists::Skip,
        }
        .into(),
        unfit: match push.unfit {
            Unfit::Wait => v1::UnfitRule::Wait,
            Unfit::Skip => v1::UnfitRule::Skip,
            Unfit::Fail => v1::UnfitRule::Fail,
        }
        .into(),
        unpack: push.unpack,
        cache: match push.cache {
            Cache::Keep => v1::Cache::Keep,
            Cache::Drop => v1::Cache::Drop,
        }
        .into(),
        wait_for_seconds: push.wait_for.as_secs(),
        keep_previous_seconds: Some(
            push.keep_previous
                .as_millis()
                .div_ceil(1000)
                .try_into()
                .unwrap_or(u64::MAX),
        ),
        expect: expect.iter().map(Into::into).collect(),
        dest: dest(push.dest.as_deref())?,
        paths: named
            .iter()
            .map(|named| v1::SourcePath {
                path: named.path.as_os_str().as_bytes().to_vec(),
                name: named
                    .name
                    .map(|name| name.as_bytes().to_vec())
                    .unwrap_or_default(),
            })
            .collect(),
        walk: Some(v1::Walk {
            follow: push.selection.follow,
            xattrs: push.selection.xattrs,
            include: push.selection.include.clone(),
            exclude: push.selection.exclude.clone(),
        }),
        ..bare(first.path, push.from.as_ref(), &push.to, &push.travel)?
    })
}

/// A request with what a plan depends on, and the gentlest rules for the rest.
///
/// # Errors
/// This host's addresses are not to be had.
pub(crate) fn bare(
    path: &Path,
    from: Option<&NodeName>,
    to: &str,
    travel: &Travel,
) -> Result<v1::SubmitRequest, Error> {
    let job = new_id()?;
    let client_addresses = match from {
        Some(_) => Vec::new(),
        None => source::host_addresses()?,
    };
    Ok(v1::SubmitRequest {
        hello: Some(hello()),
        job: job.to_string(),
        paths: vec![v1::SourcePath {
            path: path.as_os_str().as_bytes().to_vec(),
            name: Vec::new(),
        }],
        targets: to.to_owned(),
        from: from.map(ToString::to_string).unwrap_or_default(),
        client_addresses,
        shape: travel.shape.to_string(),
        streams: travel.streams.0.unwrap_or(0).into(),
        limit_bytes_per_second: limit(travel.limit),
        source_limit_bytes_per_second: limit(travel.source_limit),
        if_exists: v1::IfExists::Fail.into(),
        unfit: v1::UnfitRule::Wait.into(),
        ..v1::SubmitRequest::default()
    })
}

/// An id for a job that does not exist yet.
pub(super) fn new_id() -> Result<JobId, Error> {
    let mut id = [0; 16];
    match getrandom::fill(&mut id) {
        Ok(()) => Ok(JobId::from_random(id)),
        Err(error) => Err(Error::other(
            format!("the kernel gives no random bytes: {error}"),
            "look into the kernel's log",
        )),
    }
}

fn limit(limit: Option<Rate>) -> u64 {
    limit.map_or(0, |rate| (rate.bytes_per_second() as u64).max(1))
}

/// `ROOT:DIR` or an absolute directory, as the wire has it.
pub(super) fn dest(dest: Option<&OsStr>) -> Result<Vec<u8>, Error> {
    let bytes = dest.map(OsStr::as_bytes).unwrap_or_default();
    let named = bytes
        .split(|byte| *byte == b':')
        .next()
        .filter(|root| root.len() < bytes.len());
    let is_root = |name: &[u8]| {
        std::str::from_utf8(name).is_ok_and(|name| name.parse::<stage_core::id::RootName>().is_ok())
    };
    if dest.is_none() || bytes.starts_with(b"/") || named.is_some_and(is_root) {
        return Ok(bytes.to_vec());
    }
    Err(Error::usage(
        format!(
            "--dest {} is neither ROOT:DIR nor an absolute path",
            stage_core::failure::show_path(bytes)
        ),
        "write for example --dest scratch:db or --dest /scratch/stage/db",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Command, Stage};
    use clap::Parser as _;

    fn push(line: &str) -> Push {
        match Stage::try_parse_from(line.split_whitespace()).unwrap().command {
            Command::Push(push) => *push,
            _ => panic!("not a push"),
        }
    }

    fn request_of(push: &Push) -> Result<v1::SubmitRequest, Error> {
        let paths = source::paths(&push.paths)?;
        let name = push.name.as_deref();
        let named: Vec<_> = paths.iter().map(|path| Named { path, name }).collect();
        request(push, &named)
    }

    #[test]
    fn flags_become_a_request() {
        let wire = request_of(&push(
            "stage push /data/a.db --to all --from n0 --dest scratch:db --shape chain --streams 2 --limit 1MB/s \
             --if-exists replace --unfit skip --wait-for 2min --keep-previous 1500ms",
        ))
        .unwrap();
        assert_eq!(wire.paths[0].path, b"/data/a.db");
        assert_eq!(wire.dest, b"scratch:db");
        assert_eq!((wire.from.as_str(), wire.targets.as_str()), ("n0", "all"));
        assert_eq!((wire.shape.as_str(), wire.streams), ("chain", 2));
        assert_eq!(wire.limit_bytes_per_second, 1_000_000);
        assert_eq!(wire.source_limit_bytes_per_second, 0);
        assert_eq!(wire.if_exists(), v1::IfExists::Replace);
        assert_eq!(wire.unfit(), v1::UnfitRule::Skip);
        assert_eq!(wire.wait_for_seconds, 120);
        assert_eq!(wire.keep_previous_seconds, Some(2));
        assert!(wire.client_addresses.is_empty(), "the source is named");
        assert!(wire.job.parse::<JobId>().is_ok());
    }

    #[test]
    fn what_of_directories_is_sent_is_asked_for() {
        let wire = request_of(&push(
            "stage push /data/db/ /data/x --to all --from n0 --follow --xattrs --include *.fa --exclude a --exclude b/",
        ))
        .unwrap();
        let paths: Vec<_> = wire.paths.iter().map(|path| path.path.as_slice()).collect();
        assert_eq!(paths, [b"/data/db", b"/data/x".as_slice()]);
        let walk = wire.walk.unwrap();
        assert!(walk.follow && walk.xattrs);
        assert_eq!(
            (walk.include, walk.exclude),
            (vec!["*.fa".to_owned()], vec!["a".to_owned(), "b/".to_owned()])
        );
    }

    #[test]
    fn a_list_goes_along_whole_unless_the_one_path_is_a_file_here() {
        let dir = tempfile::tempdir().unwrap();
        let (file, list) = (dir.path().join("a"), dir.path().join("SUMS"));
        let sha = "a".repeat(64);
        std::fs::write(&file, b"").unwrap();
        std::fs::write(&list, format!("{sha}  a\n{sha}  b\n")).unwrap();
        let expect = |path: &Path| {
            let line = format!(
                "stage push {} --to all --from n0 --expect {}",
                path.display(),
                list.display()
            );
            let lines = request_of(&push(&line)).unwrap().expect;
            lines.into_iter().map(|line| line.path).collect::<Vec<_>>()
        };
        assert_eq!(expect(&file), [b""]);
        for path in [dir.path(), Path::new("/elsewhere/a")] {
            assert_eq!(expect(path), [b"a", b"b"]);
        }
    }

    #[test]
    fn an_unpacked_tar_has_its_name_without_what_says_that_it_is_one() {
        let name = |path: &str| {
            let paths = [PathBuf::from(path)];
            name_of_tree(&paths)
                .map(OsStr::to_owned)
                .map_err(|error| error.exit())
        };
        for tar in [
            "/d/refdb.tar",
            "refdb.tar.gz",
            "refdb.tgz",
            "refdb.tar.zst",
            "refdb.tzst",
        ] {
            assert_eq!(name(tar), Ok("refdb".into()), "{tar}");
        }
        for other in ["/d/refdb", "/d/.tar", "/d/refdb.zip"] {
            assert_eq!(name(other), Err(2), "{other}");
        }
        assert_eq!(
            name_of_tree(&["a.tar".into(), "b.tar".into()])
                .unwrap_err()
                .exit(),
            2
        );
    }

    #[test]
    fn without_a_source_the_host_says_who_it_is() {
        let wire = request_of(&push("stage push /data/a.db --to all")).unwrap();
        assert!(!wire.client_addresses.is_empty());
        assert_eq!((wire.shape.as_str(), wire.streams), ("auto", 0));
        assert_eq!(wire.wait_for_seconds, 24 * 3600);
        assert_eq!(wire.keep_previous_seconds, Some(24 * 3600));
    }

    #[test]
    fn a_destination_is_a_root_or_absolute() {
        for good in ["scratch:db", "scratch:", "/scratch/stage/db"] {
            assert_eq!(dest(Some(OsStr::new(good))).unwrap(), good.as_bytes());
        }
        for bad in ["", "db", "db/x", ":db", "a/b:c"] {
            assert_eq!(dest(Some(OsStr::new(bad))).unwrap_err().exit(), 2, "{bad}");
        }
    }
}
