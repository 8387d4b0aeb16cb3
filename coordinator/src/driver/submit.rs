//! From what a person asked to a job's spec: everything that can be refused before there is a job is refused here.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use stage_core::assignment::{Cache, IfExists, Place, TargetSpec};
use stage_core::digest::ChunkHash;
use stage_core::failure::{Code, Failure};
use stage_core::id::{JobId, JobKey, NodeName};
use stage_core::job::{Spec, UnfitRule};
use stage_core::payload::{Expectation, MAX_EXPECT, MAX_UNITS, SourcePath, Walk};
use stage_core::plan::ShapeChoice;
use stage_core::topology::Topology;
use stage_core::units::Rate;

/// The most streams that a hop may have.
const STREAMS: u16 = 64;
/// `--wait-for` unless said.
const WAIT_FOR: Duration = Duration::from_secs(24 * 3600);

/// A submit as it came, decoded.
#[derive(Debug, Clone)]
pub(crate) struct Submit {
    pub(crate) id: JobId,
    /// Where no name is given, it is the last part of the path.
    pub(crate) paths: Vec<SourcePath>,
    pub(crate) walk: Walk,
    pub(crate) targets: String,
    pub(crate) dest: Vec<u8>,
    pub(crate) from: Option<NodeName>,
    pub(crate) client_addresses: Vec<IpAddr>,
    pub(crate) shape: ShapeChoice,
    pub(crate) streams: Option<u16>,
    pub(crate) limit: Option<Rate>,
    pub(crate) source_limit: Option<Rate>,
    pub(crate) if_exists: IfExists,
    pub(crate) unpack: bool,
    /// How long a generation stays that it replaces.
    pub(crate) keep_previous: Duration,
    pub(crate) cache: Cache,
    pub(crate) unfit: UnfitRule,
    /// `None`: the usual time.
    pub(crate) wait_for: Option<Duration>,
    pub(crate) expect: Vec<Expectation>,
    pub(crate) join: Join,
}

/// Whether a job under way that does the same will do.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Join {
    /// It is superseded.
    #[default]
    No,
    /// It will do.
    OrMake,
    /// Nothing else will do.
    Only,
}

/// A submit that names a source, targets and a place that can be.
#[derive(Debug)]
pub(crate) struct Drafted {
    pub(crate) id: JobId,
    pub(crate) source: NodeName,
    pub(crate) paths: Vec<SourcePath>,
    pub(crate) walk: Walk,
    pub(crate) targets: Vec<NodeName>,
    pub(crate) shape: ShapeChoice,
    pub(crate) streams: Option<u16>,
    pub(crate) limit: Option<Rate>,
    pub(crate) source_limit: Option<Rate>,
    pub(crate) target: TargetSpec,
    unfit: UnfitRule,
    wait_for: Duration,
    expect: Vec<Expectation>,
}

impl Drafted {
    pub(super) fn spec(self, key: JobKey, hash: ChunkHash, encrypted: bool) -> Spec {
        Spec {
            id: self.id,
            key,
            hash,
            source: self.source,
            paths: self.paths,
            walk: self.walk,
            target: self.target,
            targets: self.targets,
            shape: self.shape,
            streams: self.streams,
            limit: self.limit,
            source_limit: self.source_limit,
            unfit: self.unfit,
            wait_for: self.wait_for,
            expect: self.expect,
            encrypted,
        }
    }
}

fn usage(message: impl Into<String>, hint: impl Into<String>) -> Failure {
    Failure::new(Code::Usage, message, hint)
}

fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

/// Checks a submit.
pub(super) fn draft(
    submit: Submit,
    topology: &Topology,
    answers: &BTreeMap<String, Vec<NodeName>>,
) -> Result<Drafted, Failure> {
    let paths = named(submit.paths.clone())?;
    if submit.streams.is_some_and(|streams| streams > STREAMS) {
        return Err(usage(
            format!("{} streams are too many", submit.streams.unwrap_or_default()),
            format!("use 1 to {STREAMS}, or auto"),
        ));
    }
    if submit.expect.len() > MAX_EXPECT {
        return Err(usage(
            format!("{} expected digests are too many", submit.expect.len()),
            format!("expect {MAX_EXPECT} at most, or push in parts"),
        ));
    }
    let place = Place::parse(&submit.dest)?;
    let targets = select(&submit.targets, topology, answers)?;
    if paths.iter().any(SourcePath::is_stream) && submit.from.is_none() {
        return Err(Failure::new(
            Code::NoSource,
            "a stream comes from the node whose agent has it",
            "name that node",
        ));
    }
    let source = source(&submit, topology)?;
    Ok(Drafted {
        id: submit.id,
        source,
        target: TargetSpec {
            place,
            if_exists: submit.if_exists,
            unpack: submit.unpack,
            keep_previous: submit.keep_previous,
            cache: submit.cache,
        },
        paths,
        walk: submit.walk,
        targets,
        shape: submit.shape,
        streams: submit.streams,
        limit: submit.limit,
        source_limit: submit.source_limit,
        unfit: submit.unfit,
        wait_for: submit.wait_for.unwrap_or(WAIT_FOR),
        expect: submit.expect,
    })
}

/// The nodes that a TARGETS text selects.
pub(super) fn select(
    targets: &str,
    topology: &Topology,
    answers: &BTreeMap<String, Vec<NodeName>>,
) -> Result<Vec<NodeName>, Failure> {
    topology.select(targets, answers).map_err(|error| {
        Failure::new(
            Code::UnknownTarget,
            error.to_string(),
            "`stage nodes` lists the nodes, the topology's [groups] the groups",
        )
    })
}

/// The paths in the order of their names, each with one.
pub(super) fn named(paths: Vec<SourcePath>) -> Result<Vec<SourcePath>, Failure> {
    if paths.is_empty() {
        return Err(usage("no PATH to push", "name a file or a directory"));
    }
    if paths.len() > MAX_UNITS {
        return Err(usage(
            format!("{} paths are too many for one push", paths.len()),
            format!("push {MAX_UNITS} at most, or a directory that holds them"),
        ));
    }
    let mut named = paths
        .into_iter()
        .map(|given| {
            let own = if given.is_stream() {
                Vec::new()
            } else {
                last_part(&given.path)?
            };
            let name = if given.name.is_empty() { own } else { given.name };
            check_name(&name)?;
            Ok(SourcePath {
                path: given.path,
                name,
            })
        })
        .collect::<Result<Vec<_>, Failure>>()?;
    if named.len() > 1 && named.iter().any(SourcePath::is_stream) {
        return Err(usage(
            "a stream is pushed alone",
            "push the files in a command of their own",
        ));
    }
    named.sort_by(|one, other| one.name.cmp(&other.name));
    if let Some(pair) = named.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(usage(
            format!(
                "{:?} and {:?} would have one name",
                shown(&pair[0].path),
                shown(&pair[1].path)
            ),
            "push them one after another, into different directories (--dest)",
        ));
    }
    Ok(named)
}

/// The last component of the source's path, which is the payload's name everywhere unless another is given.
fn last_part(path: &[u8]) -> Result<Vec<u8>, Failure> {
    if path.first() != Some(&b'/') || path.contains(&0) {
        return Err(usage(
            format!("{:?} is not an absolute path", shown(path)),
            "give the path from the root of the source's file system",
        ));
    }
    let name = path
        .rsplit(|byte| *byte == b'/')
        .find(|part| !part.is_empty())
        .unwrap_or_default();
    Ok(name.to_vec())
}

fn check_name(name: &[u8]) -> Result<(), Failure> {
    if name.is_empty() || name == b"." || name == b".." || name.contains(&b'/') || name.contains(&0) {
        return Err(usage(
            format!("{:?} names no file", shown(name)),
            "the last part of the path, or what --as says, is the payload's name on every node",
        ));
    }
    if name.starts_with(b".stage") {
        return Err(usage(
            format!(
                "{:?} cannot be pushed: names that begin with .stage are stage's own",
                shown(name)
            ),
            "rename the file, or push a link to it under another name",
        ));
    }
    if name.len() > 255 {
        return Err(usage(
            "the file's name is longer than 255 bytes",
            "no file system of a target could hold it",
        ));
    }
    Ok(())
}

/// The node that is told, or the one that has an address of the client's host.
fn source(submit: &Submit, topology: &Topology) -> Result<NodeName, Failure> {
    if let Some(from) = &submit.from {
        return match topology.node(from) {
            Some(node) => Ok(node.name.clone()),
            None => Err(Failure::new(
                Code::NoSource,
                format!("the source {from} is not in the topology"),
                "name a node of the topology with --from",
            )
            .on(from)),
        };
    }
    topology
        .nodes()
        .iter()
        .find(|node| {
            node.interfaces
                .iter()
                .filter_map(|interface| interface.address)
                .any(|address| submit.client_addresses.contains(&address))
        })
        .map(|node| node.name.clone())
        .ok_or_else(|| {
            Failure::new(
                Code::NoSource,
                "no node of the topology has an address of this host",
                "name the node that has the file with --from",
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOPOLOGY: &str = r#"
[cluster]
name = "c1"
[[switch]]
name = "s"
[[node]]
name = "n[0-3]"
address = "127.0.0.[10-13]"
attach = "s"
nic = "10 Gbit/s"
[roots]
scratch = "/scratch"
[groups]
some = "n[1-2]"
"#;

    fn submit() -> Submit {
        Submit {
            id: JobId::from_random([1; 16]),
            paths: paths("/data/genome.db"),
            walk: Walk::default(),
            targets: "some".to_owned(),
            dest: Vec::new(),
            from: Some("n0".parse().unwrap()),
            client_addresses: Vec::new(),
            shape: ShapeChoice::Auto,
            streams: None,
            limit: None,
            source_limit: None,
            if_exists: IfExists::Fail,
            unpack: false,
            keep_previous: stage_core::assignment::KEEP_PREVIOUS,
            cache: Default::default(),
            unfit: UnfitRule::Wait,
            wait_for: None,
            expect: Vec::new(),
            join: Join::No,
        }
    }

    fn paths(path: &str) -> Vec<SourcePath> {
        vec![SourcePath {
            path: path.into(),
            name: Vec::new(),
        }]
    }

    fn draft(change: impl Fn(&mut Submit)) -> Result<Drafted, Failure> {
        let topology = Topology::parse("t.toml", TOPOLOGY).unwrap();
        let mut submit = submit();
        change(&mut submit);
        super::draft(submit, &topology, &BTreeMap::new())
    }

    fn code(change: impl Fn(&mut Submit)) -> Code {
        draft(change).unwrap_err().code
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_code() {
        for path in ["", "genome.db", "/", "//", "/data/..", "/data/.stage-x", "/a\0b"] {
            assert_eq!(code(|s| s.paths = paths(path)), Code::Usage, "{path:?}");
        }
        for dest in [
            "scratch",
            ":x",
            "a b:x",
            "scratch:../x",
            "/a/../b",
            "scratch:.stage",
        ] {
            assert_eq!(code(|s| s.dest = dest.into()), Code::Usage, "{dest:?}");
        }
        let double = |s: &mut Submit| s.paths = [paths("/a/x"), paths("/b/x/")].concat();
        assert_eq!(code(double), Code::Usage);
        assert_eq!(code(|s| s.paths.clear()), Code::Usage);
        for name in ["a/b", "..", ".stage", "a\0"] {
            assert_eq!(code(|s| s.paths[0].name = name.into()), Code::Usage, "{name:?}");
        }
        let stream = |name: &str| {
            vec![SourcePath {
                path: SourcePath::STREAM.to_vec(),
                name: name.into(),
            }]
        };
        assert_eq!(code(|s| s.paths = stream("")), Code::Usage);
        assert_eq!(
            code(|s| s.paths = [stream("a"), paths("/b")].concat()),
            Code::Usage
        );
        let nowhere = |s: &mut Submit| {
            s.paths = stream("a");
            s.from = None;
            s.client_addresses = vec!["127.0.0.12".parse().unwrap()];
        };
        assert_eq!(code(nowhere), Code::NoSource);
        assert!(draft(|s| s.paths = stream("a")).is_ok());
        assert_eq!(code(|s| s.streams = Some(65)), Code::Usage);
        assert_eq!(code(|s| s.targets = "n9".to_owned()), Code::UnknownTarget);
        assert_eq!(code(|s| s.targets = String::new()), Code::UnknownTarget);
        assert_eq!(code(|s| s.from = Some("x".parse().unwrap())), Code::NoSource);
        assert_eq!(code(|s| s.from = None), Code::NoSource);
    }

    #[test]
    fn a_good_one_is_spelled_out() {
        let drafted = draft(|s| s.dest = b"scratch:/db//x/./y/".to_vec()).unwrap();
        assert_eq!(drafted.paths[0].name, b"genome.db");
        assert_eq!(
            drafted.target.place,
            Place::Root {
                root: Some("scratch".parse().unwrap()),
                dir: b"db/x/y".to_vec()
            }
        );
        assert_eq!(drafted.targets.len(), 2);
        let drafted = draft(|s| {
            s.dest = b"/scratch/db/".to_vec();
            s.paths = paths("/data/model/");
            s.from = None;
            s.client_addresses = vec!["127.0.0.12".parse().unwrap()];
        })
        .unwrap();
        assert_eq!(drafted.target.place, Place::Absolute(b"/scratch/db".to_vec()));
        assert_eq!(drafted.paths[0].name, b"model");
        assert_eq!(drafted.source.as_str(), "n2");
    }
}
