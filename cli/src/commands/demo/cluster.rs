//! The demo's cluster: a coordinator and agents, each a process of this host. They end with us: at the latest when
//! the pipe on their standard input closes, which the kernel sees to.

use std::fs;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Stdio;
use std::task::Poll;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use stage_core::id::NodeName;
use stage_net::authority::{Authority, Files};
use stage_net::grpc::CoordinatorUrl;
use stage_net::{Net, Role};
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::{Instant, sleep, timeout_at};

use crate::client::Client;
use crate::commands::source::show;
use crate::error::Error;

/// What node names begin with.
pub(crate) const NAME: &str = "n";
/// Also the cluster's name in its certificates.
const CLUSTER: &str = "demo";
/// How long the daemons may take to start: a loaded machine is slow, a broken one says so earlier.
const START: Duration = Duration::from_secs(60);
/// How long they may take to stop: longer than a drain lasts.
const STOP: Duration = Duration::from_secs(15);
/// How often a state is looked at that nobody announces.
const LOOK: Duration = Duration::from_millis(20);

/// A node's name.
pub(crate) fn name(node: u8) -> NodeName {
    format!("{NAME}{node}")
        .parse()
        .expect("it keeps to the rule for names")
}

/// Where a node's payloads lie.
pub(crate) fn root(place: &Path, node: u8) -> PathBuf {
    place.join(format!("{NAME}{node}")).join("scratch")
}

/// Where the daemons' logs lie.
pub(crate) fn logs(place: &Path) -> PathBuf {
    place.join("logs")
}

/// A cluster, started or not.
pub(crate) struct Cluster {
    place: PathBuf,
    tls: bool,
    daemons: Vec<Daemon>,
}

struct Daemon {
    name: String,
    log: PathBuf,
    child: Child,
    /// Held apart: waiting for a child closes what it still has of this.
    stdin: Option<ChildStdin>,
}

impl Cluster {
    /// Not started yet.
    pub(crate) fn new(place: PathBuf, tls: bool) -> Self {
        Self {
            place,
            tls,
            daemons: Vec::new(),
        }
    }

    /// Whether its daemons speak TLS.
    pub(crate) fn is_tls(&self) -> bool {
        self.tls
    }

    /// Starts the coordinator and `nodes` + 1 agents; comes back when all are up.
    ///
    /// # Errors
    /// One of them ended, or they are not up in time.
    pub(crate) async fn start(&mut self, nodes: u8) -> Result<Client, Error> {
        let deadline = Instant::now() + START;
        let place = self.place.clone();
        let made = |error: io::Error| {
            Error::other(
                format!("{}: {error}", show(&place)),
                "set TMPDIR to a directory of yours, or give --keep DIR",
            )
        };
        fs::create_dir(logs(&place)).map_err(made)?;
        fs::create_dir(place.join("tls")).map_err(made)?;
        fs::write(place.join("topology.toml"), topology(nodes)).map_err(made)?;
        let authority = self
            .tls
            .then(|| Authority::new(CLUSTER))
            .transpose()
            .map_err(io::Error::other)
            .map_err(made)?;
        let files = |role: Role| {
            authority
                .as_ref()
                .map(|authority| authority.write(&place.join("tls"), role))
                .transpose()
                .map_err(made)
        };

        // All before the first daemon starts: each writing rewrites the CA's file, which daemons read.
        let coordinator = files(Role::Coordinator)?;
        let agents = (0..=nodes)
            .map(|node| files(Role::Node(name(node))))
            .collect::<Result<Vec<_>, _>>()?;
        let operator = files(Role::Operator("demo".to_owned()))?;

        let address_file = place.join("coordinator.address");
        let mut command = stage("coordinator", coordinator.as_ref())?;
        command
            .arg("--topology")
            .arg(place.join("topology.toml"))
            .args(["--listen", "127.0.0.1:0"])
            .arg("--address-file")
            .arg(&address_file)
            .arg("--state")
            .arg(place.join("coordinator"));
        self.spawn("coordinator", command)?;
        let address = self.address(&address_file, deadline).await?;
        let scheme = if self.tls { "https" } else { "http" };
        let url: CoordinatorUrl = format!("{scheme}://{address}")
            .parse()
            .expect("an address makes a URL");

        for (node, files) in (0..=nodes).zip(&agents) {
            let name = name(node);
            fs::create_dir_all(root(&place, node)).map_err(made)?;
            let mut command = stage("agent", files.as_ref())?;
            let mut root_flag = std::ffi::OsString::from("scratch=");
            root_flag.push(root(&place, node));
            command
                .args(["--node", name.as_str(), "--coordinator", &url.to_string()])
                // Any free port: the agent announces the one it got.
                .args(["--data-listen", &format!("127.0.0.{}:0", u16::from(node) + 2)])
                .arg("--root")
                .arg(root_flag)
                .arg("--state")
                .arg(place.join(name.as_str()).join("state"));
            self.spawn(name.as_str(), command)?;
        }

        let net = match operator {
            Some(files) => {
                Net::tls(&files.ca, &files.cert, &files.key).map_err(|error| made(io::Error::other(error)))?
            }
            None => Net::insecure(false),
        };
        let mut client = Client::connect(&net, &url).await?;
        self.wait_until_up(&mut client, usize::from(nodes) + 1, deadline)
            .await?;
        Ok(client)
    }

    /// Comes back when a daemon has ended by itself, with what it said last.
    pub(crate) async fn death(&mut self) -> Error {
        let dead = poll_fn(|context| {
            for (at, daemon) in self.daemons.iter_mut().enumerate() {
                if pin!(daemon.child.wait()).poll(context).is_ready() {
                    return Poll::Ready(at);
                }
            }
            Poll::Pending
        })
        .await;
        died(&self.daemons[dead])
    }

    /// Stops all: SIGTERM, and SIGKILL for who does not listen in time.
    pub(crate) async fn stop(&mut self) {
        for daemon in &mut self.daemons {
            drop(daemon.stdin.take());
            if let Some(pid) = daemon.child.id().and_then(|id| Pid::from_raw(id.cast_signed())) {
                // It may have ended just now.
                let _ = kill_process(pid, Signal::TERM);
            }
        }
        let deadline = Instant::now() + STOP;
        for daemon in &mut self.daemons {
            if timeout_at(deadline, daemon.child.wait()).await.is_err() {
                tracing::warn!(name = daemon.name, "a daemon did not stop in time");
                drop(daemon.child.kill().await);
            }
        }
        self.daemons.clear();
    }

    fn spawn(&mut self, name: &str, mut command: Command) -> Result<(), Error> {
        let log = logs(&self.place).join(format!("{name}.log"));
        let fault = |error: io::Error| {
            Error::other(
                format!("cannot start the {name}: {error}"),
                "see that this program's file may be run and the machine has room for more processes",
            )
        };
        let file = fs::File::create_new(&log).map_err(fault)?;
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()
            .map_err(fault)?;
        self.daemons.push(Daemon {
            name: name.to_owned(),
            log,
            stdin: child.stdin.take(),
            child,
        });
        Ok(())
    }

    /// An error for the first daemon that has ended.
    fn check(&mut self) -> Result<(), Error> {
        for daemon in &mut self.daemons {
            if !matches!(daemon.child.try_wait(), Ok(None)) {
                return Err(died(daemon));
            }
        }
        Ok(())
    }

    async fn address(&mut self, file: &Path, deadline: Instant) -> Result<SocketAddr, Error> {
        loop {
            if let Ok(text) = fs::read_to_string(file)
                && let Ok(address) = text.trim().parse()
            {
                return Ok(address);
            }
            self.check()?;
            if Instant::now() >= deadline {
                return Err(late("the coordinator does not listen"));
            }
            sleep(LOOK).await;
        }
    }

    async fn wait_until_up(
        &mut self,
        client: &mut Client,
        want: usize,
        deadline: Instant,
    ) -> Result<(), Error> {
        loop {
            let nodes = client.nodes().await?;
            let up = nodes.iter().filter(|node| node.state == "up").count();
            if up >= want {
                return Ok(());
            }
            self.check()?;
            if Instant::now() >= deadline {
                return Err(late(&format!("{up} of {want} agents are up")));
            }
            sleep(LOOK).await;
        }
    }
}

fn late(what: &str) -> Error {
    Error::other(
        format!("{what} after {} s", START.as_secs()),
        "look into the daemons' logs",
    )
}

fn died(daemon: &Daemon) -> Error {
    let text = fs::read_to_string(&daemon.log).unwrap_or_default();
    let last = text.lines().rev().find(|line| !line.trim().is_empty());
    Error::other(
        format!(
            "the demo's {} ended by itself: {}",
            daemon.name,
            stage_core::failure::show_path(last.unwrap_or("without a word").trim().as_bytes())
        ),
        "look into the daemons' logs",
    )
}

/// A daemon of this very program. It gets no settings but these: neither from /etc nor from our environment.
fn stage(daemon: &str, files: Option<&Files>) -> Result<Command, Error> {
    let program = std::env::current_exe()?;
    let mut command = Command::new(program);
    command
        .arg(daemon)
        .args(["--config", "/dev/null", "--exit-with-stdin"])
        // A Ctrl-C is for us, who then stop them in order.
        .process_group(0)
        .kill_on_drop(true);
    for variable in ["STAGE_COORDINATOR", "STAGE_CA", "STAGE_CERT", "STAGE_KEY"] {
        command.env_remove(variable);
    }
    // Several agents on one host: each has its socket in its own state directory.
    command.env_remove("RUNTIME_DIRECTORY");
    match files {
        Some(files) => {
            command
                .arg("--ca")
                .arg(&files.ca)
                .arg("--cert")
                .arg(&files.cert)
                .arg("--key")
                .arg(&files.key);
        }
        None => {
            command.arg("--insecure");
        }
    }
    Ok(command)
}

/// A fabric of one switch.
fn topology(nodes: u8) -> String {
    let mut text = format!("[cluster]\nname = \"{CLUSTER}\"\n\n[[switch]]\nname = \"loopback\"\n");
    for node in 0..=nodes {
        let address = u16::from(node) + 2;
        text += &format!(
            "\n[[node]]\nname = \"{NAME}{node}\"\naddress = \"127.0.0.{address}\"\nattach = \"loopback\"\nnic = \"10 Gbit/s\"\n"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fabric_is_sound() {
        for nodes in [1, 64] {
            let fabric = stage_core::topology::Topology::parse("demo", &topology(nodes)).unwrap();
            assert_eq!(fabric.nodes().len(), usize::from(nodes) + 1);
            assert_eq!(fabric.cluster().as_str(), CLUSTER);
        }
    }
}
