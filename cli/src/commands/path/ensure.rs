//! `stage path --ensure`: has a payload brought to this node by one that has it.

use std::cell::Cell;
use std::time::Duration;

use stage_core::ask::{Said, State};
use stage_core::failure::{Code, Failure, read_shown, show_path};
use stage_core::id::{JobId, NodeName, RootName};
use stage_proto::local::Whereabouts;
use stage_proto::v1;
use stage_proto::version::hello;
use tokio::time::{Instant, timeout_at};

use super::{Here, Payload, look};
use crate::args::{Connection, Travel};
use crate::client::Client;
use crate::commands::push;
use crate::config;
use crate::error::Error;
use crate::local::Agent;
use crate::view::NodeState;

/// How much longer than the first holder's answer the others' are waited for: one is enough, but with several the work
/// can be shared out.
const OTHERS: Duration = Duration::from_millis(200);

/// A place on this node in words that mean the same on every node.
#[derive(Debug, PartialEq, Eq)]
struct Everywhere {
    root: RootName,
    /// Below the root, the payload's name last.
    below: Vec<u8>,
}

impl Everywhere {
    fn of(whereabouts: &Whereabouts) -> Result<Self, Error> {
        whereabouts
            .roots
            .iter()
            .filter_map(|(root, path)| {
                let path = path.strip_suffix(b"/").unwrap_or(path);
                let below = whereabouts.path.strip_prefix(path)?.strip_prefix(b"/")?;
                Some((path.len(), root, below))
            })
            .max_by_key(|(len, _, _)| *len)
            .map(|(_, root, below)| Self {
                root: root.clone(),
                below: below.to_vec(),
            })
            .ok_or_else(|| {
                Error::other(
                    "the agent told of a place in none of its roots",
                    "restart the agent",
                )
            })
    }

    fn name(&self) -> &[u8] {
        self.below.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
    }

    /// As a push has it in `--dest`.
    fn dest(&self) -> Vec<u8> {
        let dir = &self.below[..self.below.len() - self.name().len()];
        [self.root.as_str().as_bytes(), b":", dir].concat()
    }

    /// Whether a copy on a node with these roots lies there; paths as they are shown.
    fn is_at(&self, roots: &[v1::RootReport], path: &str) -> bool {
        let root = roots.iter().find(|root| root.name == self.root.as_str());
        root.and_then(|root| path.strip_prefix(root.path.trim_end_matches('/')))
            .and_then(|below| below.strip_prefix('/'))
            .is_some_and(|below| below == show_path(&self.below))
    }
}

/// Finds the payload, or has it brought here and finds it then; gives up when `patience` has passed. `job` is what
/// brings it, once there is something.
///
/// # Errors
/// Nobody has it, it cannot be had here, it took too long, or there is no coordinator.
pub(super) async fn here(
    agent: &Agent,
    payload: &Payload,
    connection: &Connection,
    patience: Option<Duration>,
    job: &Cell<Option<JobId>>,
) -> Result<Here, Error> {
    let whereabouts = match look(agent, payload).await? {
        Ok(here) => return Ok(here),
        Err(whereabouts) => whereabouts,
    };
    let bringing = Box::pin(async {
        bring(agent, payload, connection, &whereabouts, job).await?;
        match look(agent, payload).await? {
            Ok(here) => Ok(here),
            Err(whereabouts) => Err(absent(&whereabouts, "it was brought here and is gone again")),
        }
    });
    let Some(patience) = patience else {
        return bringing.await;
    };
    match tokio::time::timeout(patience, bringing).await {
        Ok(done) => done,
        Err(_) => {
            let goes_on = match job.get() {
                Some(job) => format!("; job {job} goes on"),
                None => String::new(),
            };
            let why = format!("it did not come within {} s{goes_on}", patience.as_secs_f64());
            Err(absent(&whereabouts, &why))
        }
    }
}

fn absent(whereabouts: &Whereabouts, why: &str) -> Error {
    Failure::new(
        Code::NotHere,
        format!("nothing of this name is published on this node, and {why}"),
        "look at `stage ls` and `stage status`",
    )
    .on(&whereabouts.node)
    .at(show_path(&whereabouts.path))
    .into()
}

async fn bring(
    agent: &Agent,
    payload: &Payload,
    connection: &Connection,
    whereabouts: &Whereabouts,
    job: &Cell<Option<JobId>>,
) -> Result<(), Error> {
    let place = Everywhere::of(whereabouts)?;
    let (url, net) = config::client(connection)?;
    let mut client = Client::connect(&net, &url).await?;
    let request = |from: &NodeName, path: Vec<u8>, join: v1::Join| {
        Ok::<_, Error>(v1::SubmitRequest {
            paths: vec![v1::SourcePath {
                path,
                name: place.name().to_vec(),
            }],
            dest: place.dest(),
            unfit: v1::UnfitRule::Skip.into(),
            join: join.into(),
            ..push::bare(
                std::path::Path::new(""),
                Some(from),
                whereabouts.node.as_str(),
                &Travel::default(),
            )?
        })
    };
    // Somebody's push may be about to bring it, and then nobody need have it yet.
    let own = whereabouts.path.clone();
    let joined = client
        .submit(request(&whereabouts.node, own, v1::Join::Only)?)
        .await;
    let mut now = match joined {
        Ok(job) => job,
        Err(Error::Failure(failure)) if failure.code == Code::UnknownJob => {
            let Some((holder, path)) = holder(&mut client, &place, &whereabouts.node).await? else {
                return Err(absent(whereabouts, "no node that answers has it there"));
            };
            // Others may have brought it meanwhile.
            if look(agent, payload).await?.is_ok() {
                return Ok(());
            }
            client.submit(request(&holder, path, v1::Join::OrMake)?).await?
        }
        Err(error) => return Err(error),
    };
    loop {
        job.set(Some(now));
        match brought(client.clone(), now, &whereabouts.node).await? {
            None => return Ok(()),
            // A newer push took the path over: what that brings is as good.
            Some(newer) => now = newer,
        }
    }
}

/// Follows the job until the node has the payload; gives the job that took over, if one did.
async fn brought(client: Client, job: JobId, node: &NodeName) -> Result<Option<JobId>, Error> {
    let mut watch = client.watch(job);
    while let Some(view) = watch.next().await? {
        let Some(target) = view.nodes.iter().find(|target| target.name == *node) else {
            continue;
        };
        if target.state.is_done() {
            return Ok(None);
        }
        let newer = target
            .superseded_by
            .as_deref()
            .and_then(|newer| newer.parse().ok());
        if let Some(newer) = newer.filter(|_| target.state == NodeState::Superseded) {
            return Ok(Some(newer));
        }
        let is_out = !target.state.is_moving() && !view.state.is_before_bytes();
        if is_out || view.settled || view.state.is_ended() {
            let failure = target.failure.clone().or(view.failure.clone());
            return Err(match failure {
                Some(failure) => failure.into(),
                None => Error::Job(Box::new(view)),
            });
        }
    }
    Err(Error::other(
        format!("job {job} ended without a word about {node}"),
        "look into the coordinator's log",
    ))
}

/// A node that has the payload at the same place, untouched, and the path there.
async fn holder(
    client: &mut Client,
    place: &Everywhere,
    here: &NodeName,
) -> Result<Option<(NodeName, Vec<u8>)>, Error> {
    let nodes = client.nodes().await?;
    let request = v1::ListRequest {
        hello: Some(hello()),
        nodes: String::new(),
        path: place.below.clone(),
        digest: String::new(),
        verify: false,
    };
    let mut answers = client.clone().list(request).await?;
    let mut found: Vec<(NodeName, Vec<u8>)> = Vec::new();
    let mut until = None;
    loop {
        let next = match until {
            None => answers.next().await,
            Some(until) => match timeout_at(until, answers.next()).await {
                Ok(next) => next,
                Err(_) => break,
            },
        };
        let Some((node, said, _)) = next? else { break };
        let Said::Copies(copies) = said else { continue };
        let roots = nodes.iter().find(|other| other.node == node.as_str());
        let roots = roots.map(|node| node.roots.as_slice()).unwrap_or_default();
        let path = copies
            .iter()
            .find(|copy| copy.state == State::Ok && place.is_at(roots, &copy.path))
            .and_then(|copy| read_shown(&copy.path));
        if let Some(path) = path.filter(|_| node != *here) {
            until.get_or_insert_with(|| Instant::now() + OTHERS);
            found.push((node, path));
        }
    }
    found.sort();
    let turn = share(here, found.len());
    Ok((!found.is_empty()).then(|| found.swap_remove(turn)))
}

/// Which of so many holders a node asks: nodes that ask at once should not all ask the same.
fn share(here: &NodeName, holders: usize) -> usize {
    let sum = here.as_str().bytes().fold(0_usize, |sum, byte| {
        sum.wrapping_mul(31).wrapping_add(byte.into())
    });
    sum.checked_rem(holders).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whereabouts(path: &str) -> Whereabouts {
        Whereabouts {
            node: "n1".parse().unwrap(),
            roots: vec![
                ("main".parse().unwrap(), b"/scratch/".to_vec()),
                ("fast".parse().unwrap(), b"/scratch/nvme".to_vec()),
            ],
            path: path.into(),
            found: None,
        }
    }

    #[test]
    fn a_place_means_the_same_on_every_node() {
        for (path, dest, name) in [
            ("/scratch/k2", "main:", "k2"),
            ("/scratch/db/x/k2", "main:db/x/", "k2"),
            ("/scratch/nvme/k2", "fast:", "k2"),
        ] {
            let place = Everywhere::of(&whereabouts(path)).unwrap();
            assert_eq!(place.dest(), dest.as_bytes());
            assert_eq!(place.name(), name.as_bytes());
            assert!(stage_core::assignment::Place::parse(&place.dest()).is_ok());
        }
        assert!(Everywhere::of(&whereabouts("/lustre/k2")).is_err());
    }

    #[test]
    fn a_holder_has_it_at_the_same_place() {
        let place = Everywhere {
            root: "main".parse().unwrap(),
            below: b"db/k\n2".to_vec(),
        };
        let root = |name: &str, path: &str| v1::RootReport {
            name: name.to_owned(),
            path: path.to_owned(),
            ..v1::RootReport::default()
        };
        let roots = [root("fast", "/nvme"), root("main", "/data/stage/")];
        assert!(place.is_at(&roots, "/data/stage/db/k\\x0a2"));
        for path in [
            "/nvme/db/k\\x0a2",
            "/data/stage/k\\x0a2",
            "/data/stage/x/db/k\\x0a2",
            "/data/stagedb/k\\x0a2",
        ] {
            assert!(!place.is_at(&roots, path), "{path}");
        }
    }

    #[test]
    fn the_work_is_shared_out() {
        let asked: std::collections::BTreeSet<_> = (0..20)
            .map(|node| share(&format!("n{node}").parse().unwrap(), 4))
            .collect();
        assert_eq!(asked.len(), 4);
        assert_eq!(share(&"n1".parse().unwrap(), 0), 0);
    }
}
