//! What an agent keeps across starts: which installation it is, which cluster it belongs to, the highest epoch seen.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use stage_core::id::{ClusterId, Epoch, InstanceId};

use crate::Error;

/// The state directory, locked against a second agent.
pub(crate) struct Identity {
    dir: PathBuf,
    pub(crate) instance: InstanceId,
    /// The cluster that welcomed this agent first.
    pub(crate) cluster: Option<ClusterId>,
    /// The highest epoch seen: lower ones have no effect.
    pub(crate) epoch: Epoch,
    /// Held for the life of the process.
    _lock: File,
}

impl Identity {
    pub(crate) fn open(dir: &Path) -> Result<Self, Error> {
        fs::create_dir_all(dir).map_err(|error| Error::state(dir, &error))?;
        let lock_path = dir.join("lock");
        let lock = File::create(&lock_path).map_err(|error| Error::state(&lock_path, &error))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| Error::State {
            path: dir.to_owned(),
            why: "another agent uses it: give each agent a --state directory of its own".to_owned(),
        })?;
        let instance = if let Some(instance) = read(dir, "instance")? {
            instance
        } else {
            let mut bytes = [0; 16];
            getrandom::fill(&mut bytes).map_err(|error| Error::State {
                path: dir.to_owned(),
                why: error.to_string(),
            })?;
            let instance = InstanceId::from_random(bytes);
            write(dir, "instance", &instance.to_string())?;
            instance
        };
        let cluster = read(dir, "cluster-id")?;
        let epoch: Option<EpochText> = read(dir, "epoch")?;
        Ok(Self {
            dir: dir.to_owned(),
            instance,
            cluster,
            epoch: epoch.map_or(Epoch(0), |e| e.0),
            _lock: lock,
        })
    }

    /// Belongs to this cluster from now on, at this epoch.
    pub(crate) fn joined(&mut self, cluster: ClusterId, epoch: Epoch) -> Result<(), Error> {
        if self.cluster != Some(cluster) {
            write(&self.dir, "cluster-id", &cluster.to_string())?;
            self.cluster = Some(cluster);
        }
        if epoch > self.epoch {
            write(&self.dir, "epoch", &epoch.to_string())?;
            self.epoch = epoch;
        }
        Ok(())
    }
}

struct EpochText(Epoch);

impl std::str::FromStr for EpochText {
    type Err = std::num::ParseIntError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(|number| Self(Epoch(number)))
    }
}

fn read<T: std::str::FromStr<Err: std::fmt::Display>>(dir: &Path, name: &str) -> Result<Option<T>, Error> {
    let path = dir.join(name);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::state(path, &error)),
    };
    text.trim()
        .parse()
        .map(Some)
        .map_err(|error: T::Err| Error::State {
            path,
            why: format!("is damaged ({error}): remove the state directory to start this agent as a new one"),
        })
}

/// Whole or not at all: a new file, durable, renamed over the old one.
fn write(dir: &Path, name: &str, text: &str) -> Result<(), Error> {
    let (path, new) = (dir.join(name), dir.join(format!("{name}.new")));
    let attempt = || {
        let mut file = File::create(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        File::open(dir)?.sync_all()
    };
    attempt().map_err(|error| Error::state(&path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_stays_itself() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("made/if/absent");
        let cluster = ClusterId::from_random([4; 16]);
        let first = {
            let mut identity = Identity::open(&state).unwrap();
            assert_eq!((identity.cluster, identity.epoch), (None, Epoch(0)));
            identity.joined(cluster, Epoch(7)).unwrap();
            identity.joined(cluster, Epoch(6)).unwrap();
            assert!(
                matches!(Identity::open(&state), Err(Error::State { .. })),
                "a second agent is refused"
            );
            identity.instance
        };
        let again = Identity::open(&state).unwrap();
        assert_eq!(
            (again.instance, again.cluster, again.epoch),
            (first, Some(cluster), Epoch(7))
        );
    }

    #[test]
    fn damage_is_named_and_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        drop(Identity::open(dir.path()).unwrap());
        fs::write(dir.path().join("instance"), "garbage").unwrap();
        assert!(
            Identity::open(dir.path())
                .err()
                .unwrap()
                .to_string()
                .contains("instance")
        );
        assert_eq!(
            fs::read_to_string(dir.path().join("instance")).unwrap(),
            "garbage"
        );
    }
}
