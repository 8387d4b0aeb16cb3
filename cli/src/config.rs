//! Settings of the two daemons: `/etc/stage/coordinator.toml` and `/etc/stage/agent.toml`, overlaid by flags.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use stage_agent::config::DEFAULT_MEMORY;
use stage_core::digest::ChunkHash;
use stage_core::id::{NodeName, RootName};
use stage_core::units::ByteCount;
use stage_net::Net;
use stage_net::grpc::CoordinatorUrl;

use crate::args::{self, Connection, Root};
use crate::error::Error;

/// `/etc/stage/coordinator.toml`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct CoordinatorFile {
    topology: Option<PathBuf>,
    #[serde(default, deserialize_with = "listen")]
    listen: Option<SocketAddr>,
    state: Option<PathBuf>,
    chunk_digest: Option<ChunkHash>,
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    insecure: Option<bool>,
}

/// `/etc/stage/agent.toml`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct AgentFile {
    node: Option<NodeName>,
    #[serde(default, deserialize_with = "url")]
    coordinator: Option<CoordinatorUrl>,
    #[serde(default, deserialize_with = "data_listen")]
    data_listen: Vec<SocketAddr>,
    #[serde(default, deserialize_with = "roots")]
    roots: Vec<Root>,
    state: Option<PathBuf>,
    socket: Option<PathBuf>,
    memory: Option<ByteCount>,
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    insecure: Option<bool>,
}

fn listen<'de, D: Deserializer<'de>>(input: D) -> Result<Option<SocketAddr>, D::Error> {
    args::parse_listen(&String::deserialize(input)?)
        .map(Some)
        .map_err(serde::de::Error::custom)
}

fn url<'de, D: Deserializer<'de>>(input: D) -> Result<Option<CoordinatorUrl>, D::Error> {
    String::deserialize(input)?
        .parse()
        .map(Some)
        .map_err(serde::de::Error::custom)
}

/// One text or several.
#[derive(Deserialize)]
#[serde(untagged, expecting = "a text or a list of texts")]
enum Texts {
    One(String),
    Many(Vec<String>),
}

impl Texts {
    fn parse<T, E: serde::de::Error>(self, parse: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, E> {
        let texts = match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        };
        texts
            .iter()
            .map(|text| parse(text).map_err(|why| E::custom(format!("{text:?}: {why}"))))
            .collect()
    }
}

fn data_listen<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<SocketAddr>, D::Error> {
    Texts::deserialize(input)?.parse(args::parse_data_listen)
}

fn roots<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<Root>, D::Error> {
    Texts::deserialize(input)?.parse(|text| text.parse())
}

/// Where settings come from: a file that was named must be there, the usual one may be missing.
fn read<T: DeserializeOwned + Default>(named: Option<&Path>, usual: &str) -> Result<(T, String), Error> {
    let path = named.unwrap_or(Path::new(usual));
    let shown = path.display().to_string();
    match fs::read_to_string(path) {
        Ok(text) => parse(&shown, &text).map(|file| (file, shown)),
        Err(error) if named.is_none() && error.kind() == io::ErrorKind::NotFound => Ok((T::default(), shown)),
        Err(error) => Err(Error::config(format!("cannot read {shown}: {error}"))),
    }
}

fn parse<T: DeserializeOwned>(file: &str, text: &str) -> Result<T, Error> {
    toml::from_str(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        let line = 1 + text.as_bytes()[..at.min(text.len())]
            .iter()
            .filter(|byte| **byte == b'\n')
            .count();
        Error::config(format!("{file}:{line}: {}", error.message()))
    })
}

fn missing(what: &str, flag: &str, key: &str, file: &str) -> Error {
    Error::config(format!(
        "no {what}: give {flag}, or write `{key} = …` into {file}"
    ))
}

/// A coordinator, ready to start.
pub(crate) fn coordinator(
    flags: args::Coordinator,
    connection: &Connection,
) -> Result<(stage_coordinator::Config, Net), Error> {
    let (file, name): (CoordinatorFile, _) =
        read(flags.daemon.config.as_deref(), "/etc/stage/coordinator.toml")?;
    let config = stage_coordinator::Config {
        topology: flags
            .topology
            .or(file.topology)
            .ok_or_else(|| missing("topology", "--topology FILE", "topology", &name))?,
        listen: flags
            .listen
            .or(file.listen)
            .ok_or_else(|| missing("address to listen on", "--listen ADDR", "listen", &name))?,
        state: flags
            .daemon
            .state
            .or(file.state)
            .ok_or_else(|| missing("state directory", "--state DIR", "state", &name))?,
        chunk_hash: file.chunk_digest.unwrap_or_default(),
    };
    let net = Security {
        ca: file.ca,
        cert: file.cert,
        key: file.key,
        insecure: file.insecure.unwrap_or_default(),
    }
    .overlay(connection)
    .net(None)
    .map_err(Error::config)?;
    Ok((config, net))
}

/// An agent, ready to start.
pub(crate) fn agent(
    flags: args::Agent,
    connection: &Connection,
) -> Result<(stage_agent::Config, Net), Error> {
    let (file, name): (AgentFile, _) = read(flags.daemon.config.as_deref(), "/etc/stage/agent.toml")?;
    let or = |flag: Vec<SocketAddr>, file| if flag.is_empty() { file } else { flag };
    let coordinator = connection
        .coordinator
        .clone()
        .or(file.coordinator)
        .ok_or_else(|| missing("coordinator", "--coordinator URL", "coordinator", &name))?;
    let data_listen = or(flags.data_listen, file.data_listen);
    if data_listen.is_empty() {
        return Err(missing(
            "address to listen on",
            "--data-listen ADDR",
            "data_listen",
            &name,
        ));
    }
    let roots = if flags.roots.is_empty() {
        file.roots
    } else {
        flags.roots
    };
    let net = Security {
        ca: file.ca,
        cert: file.cert,
        key: file.key,
        insecure: file.insecure.unwrap_or_default(),
    }
    .overlay(connection)
    .net(Some(&coordinator))
    .map_err(Error::config)?;
    let config = stage_agent::Config {
        node: match flags.node.or(file.node) {
            Some(node) => node,
            None => host_name()?,
        },
        coordinator,
        data_listen,
        roots: name_roots(roots)?,
        state: flags
            .daemon
            .state
            .or(file.state)
            .ok_or_else(|| missing("state directory", "--state DIR", "state", &name))?,
        memory: flags.memory.or(file.memory).unwrap_or(DEFAULT_MEMORY),
        socket: flags.socket.or(file.socket).or_else(runtime_socket),
    };
    Ok((config, net))
}

/// The socket's usual place where a service manager made a directory for such things.
fn runtime_socket() -> Option<PathBuf> {
    let directories = std::env::var_os("RUNTIME_DIRECTORY")?;
    // Several are separated by colons; ours is the first.
    let first = directories.as_bytes().split(|byte| *byte == b':').next()?;
    (!first.is_empty()).then(|| Path::new(OsStr::from_bytes(first)).join("agent.sock"))
}

fn host_name() -> Result<NodeName, Error> {
    let uname = rustix::system::uname();
    let full = uname.nodename().to_string_lossy();
    let short = full.split('.').next().unwrap_or_default();
    short.parse().map_err(|_| {
        Error::config(format!(
            "the host's name {full:?} is no node name: give --node NAME"
        ))
    })
}

/// The first root is `main` unless it has a name; every other one needs one, and none may come twice.
fn name_roots(roots: Vec<Root>) -> Result<Vec<(RootName, PathBuf)>, Error> {
    let mut named: Vec<(RootName, PathBuf)> = Vec::with_capacity(roots.len());
    for Root { name, dir } in roots {
        let name = match name {
            Some(name) => name,
            None if named.is_empty() => "main".parse().expect("it keeps to the rule for names"),
            None => {
                return Err(Error::config(format!(
                    "the root {} has no name: only the first may do without; write NAME={0}",
                    dir.display()
                )));
            }
        };
        if named.iter().any(|(other, _)| *other == name) {
            return Err(Error::config(format!("two roots are named {name}")));
        }
        named.push((name, dir));
    }
    Ok(named)
}

/// How to speak: with which certificate, or insecure.
#[derive(Debug, Default, Clone)]
struct Security {
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    insecure: bool,
}

impl Security {
    /// What was typed wins over what was read.
    fn overlay(self, connection: &Connection) -> Self {
        let typed = connection.clone();
        Self {
            ca: typed.ca.or(self.ca),
            cert: typed.cert.or(self.cert),
            key: typed.key.or(self.key),
            insecure: typed.insecure || self.insecure,
        }
    }

    /// There is no silent fall-back: without certificates and without a word for insecure there is no connection.
    fn net(self, url: Option<&CoordinatorUrl>) -> Result<Net, String> {
        let insecure = match url {
            Some(url) if url.is_tls() && self.insecure => {
                return Err(format!(
                    "--insecure contradicts {url}: write http:// to speak without TLS"
                ));
            }
            Some(url) => !url.is_tls(),
            None => self.insecure,
        };
        if insecure {
            return Ok(Net::insecure(args::insecure_anywhere()));
        }
        let need = |file: Option<PathBuf>, flag: &str, variable: &str| {
            file.ok_or_else(|| {
                format!("TLS needs {flag} FILE (or {variable}); without TLS, in a lab: --insecure")
            })
        };
        let ca = need(self.ca, "--ca", "STAGE_CA")?;
        let cert = need(self.cert, "--cert", "STAGE_CERT")?;
        let key = need(self.key, "--key", "STAGE_KEY")?;
        Net::tls(&ca, &cert, &key).map_err(|error| error.to_string())
    }
}

/// How a command reaches the coordinator.
pub(crate) fn client(connection: &Connection) -> Result<(CoordinatorUrl, Net), Error> {
    let url = connection.coordinator.clone().ok_or_else(|| {
        Error::usage(
            "no coordinator was named",
            "give --coordinator URL, or set STAGE_COORDINATOR",
        )
    })?;
    let net = Security::default()
        .overlay(connection)
        .net(Some(&url))
        .map_err(|why| Error::usage(why, "see `stage --help` under Connection"))?;
    Ok((url, net))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault<T: DeserializeOwned>(text: &str) -> String {
        match parse::<T>("x.toml", text) {
            Ok(_) => panic!("{text} was taken"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn files_read() {
        let file: CoordinatorFile = parse(
            "c",
            "topology = '/t'\nlisten = '10.0.0.1'\nstate = '/s'\nchunk_digest = 'sha256'",
        )
        .unwrap();
        assert_eq!(file.listen.unwrap().to_string(), "10.0.0.1:7700");
        assert_eq!(file.chunk_digest, Some(ChunkHash::Sha256));
        let file: AgentFile = parse(
            "a",
            "node = 'n1'\ncoordinator = 'https://head'\ndata_listen = '10.0.1.1'\nroots = ['/a', 'x=/b']\nmemory = '8 MiB'",
        )
        .unwrap();
        assert_eq!(file.data_listen[0].port(), 7701);
        let roots = name_roots(file.roots).unwrap();
        assert_eq!(roots[0].0.as_str(), "main");
        assert_eq!(roots[1].0.as_str(), "x");
    }

    #[test]
    fn the_packaged_examples_read() {
        let agent = include_str!("../../packaging/etc/agent.toml");
        let file: AgentFile = parse("agent.toml", agent).unwrap();
        assert_eq!(file.roots.len(), 1);
        assert!(file.ca.is_some() && file.cert.is_some() && file.key.is_some());
        let coordinator = include_str!("../../packaging/etc/coordinator.toml");
        let file: CoordinatorFile = parse("coordinator.toml", coordinator).unwrap();
        assert!(file.topology.is_some() && file.ca.is_some());
    }

    #[test]
    fn errors_name_file_and_line() {
        let error = fault::<CoordinatorFile>("state = '/s'\n\ntopologie = '/t'\n");
        assert!(
            error.starts_with("x.toml:3: unknown field `topologie`"),
            "{error}"
        );
        let error = fault::<AgentFile>("node = 'n1'\ndata_listen = ['head']\n");
        assert!(
            error.starts_with("x.toml:2: \"head\": write an address"),
            "{error}"
        );
        let error = fault::<AgentFile>("\n\nmemory = '8'\n");
        assert!(error.starts_with("x.toml:3: \"8\" has no unit"), "{error}");
    }

    #[test]
    fn only_the_first_root_may_do_without_a_name() {
        let roots = |texts: &[&str]| name_roots(texts.iter().map(|text| text.parse().unwrap()).collect());
        assert!(roots(&["/a", "/b"]).is_err());
        assert!(roots(&["x=/a", "x=/b"]).is_err());
        assert!(roots(&["/a", "main=/b"]).is_err());
        assert!(roots(&[]).unwrap().is_empty());
    }

    #[test]
    fn without_certificates_there_is_no_silent_fall_back() {
        let https: CoordinatorUrl = "https://head".parse().unwrap();
        let http: CoordinatorUrl = "http://127.0.0.1".parse().unwrap();
        let none = Security::default();
        assert!(none.clone().net(None).unwrap_err().contains("--ca"));
        assert!(none.clone().net(Some(&https)).unwrap_err().contains("--ca"));
        assert!(!none.net(Some(&http)).unwrap().is_tls());
        let insecure = Security {
            insecure: true,
            ..Security::default()
        };
        assert!(!insecure.clone().net(None).unwrap().is_tls());
        assert!(insecure.net(Some(&https)).unwrap_err().contains("contradicts"));
    }
}
