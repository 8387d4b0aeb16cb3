//! What an agent must be told.

use std::net::SocketAddr;
use std::path::PathBuf;

use stage_core::id::{NodeName, RootName};
use stage_core::units::ByteCount;
use stage_net::grpc::CoordinatorUrl;
use stage_net::{Net, Role};

use crate::Error;

/// Payload bytes that an agent holds in memory unless told otherwise.
pub const DEFAULT_MEMORY: ByteCount = ByteCount(24 << 20);

/// What an agent must be told.
#[derive(Debug, Clone)]
pub struct Config {
    /// Its name in the topology.
    pub node: NodeName,
    /// Whom it dials.
    pub coordinator: CoordinatorUrl,
    /// Where children reach it, best address first. Addresses of this host, none of them a wildcard: they are what
    /// other nodes dial.
    pub data_listen: Vec<SocketAddr>,
    /// Where it may write, the default root first.
    pub roots: Vec<(RootName, PathBuf)>,
    /// Where it keeps its instance id and its journals.
    pub state: PathBuf,
    /// Payload bytes held in memory, over all jobs.
    pub memory: ByteCount,
    /// Where users of this host reach it; `None`: `agent.sock` in the state directory.
    pub socket: Option<PathBuf>,
}

impl Config {
    /// Where users of this host reach it.
    pub fn socket(&self) -> PathBuf {
        self.socket
            .clone()
            .unwrap_or_else(|| self.state.join("agent.sock"))
    }

    pub(crate) fn check(&self, net: &Net) -> Result<(), Error> {
        if self.data_listen.is_empty() {
            return Err(Error::Config(
                "no data address: give --data-listen ADDRESS:PORT".to_owned(),
            ));
        }
        if let Some(wildcard) = self
            .data_listen
            .iter()
            .find(|address| address.ip().is_unspecified())
        {
            return Err(Error::Config(format!(
                "{wildcard} cannot be dialled by others: give --data-listen the address that topology.toml has for {}",
                self.node
            )));
        }
        if self.roots.is_empty() {
            return Err(Error::Config("no root: give --root [NAME=]DIR".to_owned()));
        }
        for (at, (name, _)) in self.roots.iter().enumerate() {
            if self.roots[..at].iter().any(|(other, _)| other == name) {
                return Err(Error::Config(format!("root {name} is given twice")));
            }
        }
        match net.identity() {
            Some(identity) if identity.role != Role::Node(self.node.clone()) => Err(Error::Config(format!(
                "the certificate is for {identity}, not for node {}: use that node's certificate",
                self.node
            ))),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config {
            node: "n1".parse().unwrap(),
            coordinator: "http://127.0.0.1:7700".parse().unwrap(),
            data_listen: vec!["127.0.0.2:7701".parse().unwrap()],
            roots: vec![("main".parse().unwrap(), "/scratch".into())],
            state: "/var/lib/stage".into(),
            memory: DEFAULT_MEMORY,
            socket: None,
        }
    }

    #[test]
    fn what_cannot_work_is_said_at_once() {
        let net = Net::insecure(false);
        assert!(config().check(&net).is_ok());
        let faults: [fn(&mut Config); 4] = [
            |c| c.data_listen.clear(),
            |c| c.data_listen = vec!["0.0.0.0:7701".parse().unwrap()],
            |c| c.roots.clear(),
            |c| c.roots.push(("main".parse().unwrap(), "/nvme".into())),
        ];
        for fault in faults {
            let mut config = config();
            fault(&mut config);
            assert_eq!(config.check(&net).unwrap_err().exit_code(), 78);
        }
    }
}
