//! A real cluster in a lab: a coordinator and an agent on every node, all from one `stage` binary, each in its node's
//! namespace and with its directories in memory.
//!
//! The first node of the topology is the source: the coordinator and the command line run there as well.

mod push;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use serde_json::Value;
use stage_core::units::ByteCount;
use stage_net::Role;
use stage_net::authority::{Authority, Files};

pub use self::push::{Event, Pushed, Running};
use crate::group::Door;
use crate::usage::{Sampler, Usage};
use crate::{Group, Lab, LabError, SlowDisk, Speed};

/// The name under which the coordinator's memory and processor time are kept; agents have their node's.
pub const COORDINATOR: &str = "coordinator";

/// How long daemons may take until all nodes are up.
const UP: Duration = Duration::from_secs(30);

/// Whether connections are encrypted and authenticated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Security {
    /// Mutual TLS, with a CA made for this cluster.
    Tls,
    /// Neither.
    Insecure,
}

/// How a cluster is to be.
#[derive(Debug, Clone)]
pub struct Setup<'a> {
    /// The binary.
    pub stage: &'a Path,
    /// The text that the lab's topology was read from.
    pub topology: &'a str,
    /// Whether connections are encrypted.
    pub security: Security,
    /// Nodes whose root is a file system of its own of this size; it is there for the node's agent only.
    pub small_roots: &'a [(&'a str, ByteCount)],
    /// Nodes whose root is this directory, on a real disk; at its place it is there for the node's agent only.
    pub real_roots: &'a [(&'a str, &'a Path)],
    /// Nodes whose root is a slow disk.
    pub slow_roots: &'a [(&'a str, Speed)],
    /// Where the daemons' logs go; `None`: below the lab's directory, gone with it.
    pub logs: Option<&'a Path>,
    /// All its programs run in this control group.
    pub group: Option<&'a Group>,
}

impl<'a> Setup<'a> {
    /// A plain cluster: each root is a directory in memory.
    pub fn new(stage: &'a Path, topology: &'a str, security: Security) -> Self {
        Self {
            stage,
            topology,
            security,
            small_roots: &[],
            real_roots: &[],
            slow_roots: &[],
            logs: None,
            group: None,
        }
    }
}

/// What has gone through a node's interfaces, with headers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LinkBytes {
    /// What came in.
    pub received: ByteCount,
    /// What went out.
    pub sent: ByteCount,
}

/// Daemons that run. Dropping it ends them.
#[derive(Debug)]
pub struct Cluster<'l> {
    lab: &'l Lab,
    group: Option<Door>,
    stage: PathBuf,
    security: Security,
    source: String,
    dir: PathBuf,
    logs: PathBuf,
    files: BTreeMap<String, Files>,
    small_roots: BTreeMap<String, ByteCount>,
    real_roots: BTreeMap<String, PathBuf>,
    daemons: BTreeMap<String, Child>,
    sampler: Arc<Sampler>,
    /// Below the roots of running agents: dropped when those have ended.
    slow_disks: Vec<SlowDisk>,
}

impl<'l> Cluster<'l> {
    /// Starts the daemons and waits until the coordinator shows every node as up.
    ///
    /// # Errors
    /// A program that cannot be started, or a node that does not come up: what the coordinator and the logs say of it
    /// is in the error.
    pub fn up(lab: &'l Lab, setup: &Setup<'_>) -> Result<Self, LabError> {
        let nodes = lab.topology().nodes();
        let source = nodes
            .first()
            .map(|node| node.name.to_string())
            .unwrap_or_default();
        let dir = lab.root_dir().join("cluster");
        let logs = setup.logs.map_or_else(|| dir.join("logs"), Path::to_owned);
        for dir in [&dir, &logs] {
            make_dir(dir)?;
        }

        let mut cluster = Self {
            lab,
            group: setup.group.map(Group::door),
            stage: setup.stage.to_owned(),
            security: setup.security,
            source,
            files: BTreeMap::new(),
            small_roots: setup
                .small_roots
                .iter()
                .map(|(node, size)| ((*node).to_owned(), *size))
                .collect(),
            real_roots: setup
                .real_roots
                .iter()
                .map(|(node, dir)| ((*node).to_owned(), (*dir).to_owned()))
                .collect(),
            daemons: BTreeMap::new(),
            sampler: Arc::new(Sampler::start()),
            slow_disks: Vec::new(),
            dir,
            logs,
        };
        write(&cluster.topology_file(), setup.topology)?;
        if setup.security == Security::Tls {
            cluster.issue()?;
        }
        for (node, speed) in setup.slow_roots {
            let root = cluster.root(node);
            make_dir(&root)?;
            let disk = SlowDisk::mount(&root, *speed).map_err(|why| fault(&root, why))?;
            cluster.slow_disks.push(disk);
        }
        cluster.start_coordinator()?;
        for node in nodes {
            cluster.start_agent(node.name.as_str())?;
        }
        cluster.wait_until_up(UP)?;
        Ok(cluster)
    }

    fn issue(&mut self) -> Result<(), LabError> {
        let fault = |why: &dyn std::fmt::Display| LabError::Certificates(why.to_string());
        let authority = Authority::new(self.lab.topology().cluster().as_str()).map_err(|why| fault(&why))?;
        let nodes = self.lab.topology().nodes().iter();
        let roles = [
            (COORDINATOR.to_owned(), Role::Coordinator),
            ("operator".to_owned(), Role::Operator("lab".to_owned())),
        ];
        let nodes = nodes.map(|node| (agent_name(node.name.as_str()), Role::Node(node.name.clone())));
        for (name, role) in roles.into_iter().chain(nodes) {
            let files = authority.write(&self.dir, role).map_err(|why| fault(&why))?;
            self.files.insert(name, files);
        }
        Ok(())
    }

    fn command(&self, node: &str, program: impl AsRef<OsStr>) -> Result<Command, LabError> {
        match &self.group {
            Some(group) => group.command(self.lab, node, program),
            None => self.lab.command(node, program),
        }
    }

    /// The node that pushes start from.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The topology that the coordinator reads.
    pub fn topology_file(&self) -> PathBuf {
        self.dir.join("topology.toml")
    }

    /// Where the daemons write what they have to say, a file each.
    pub fn logs(&self) -> &Path {
        &self.logs
    }

    /// A node's root.
    pub fn root(&self, node: &str) -> PathBuf {
        self.lab.dir(node).join("root")
    }

    /// A node's file as this process can open it: a small or a real root is seen by its agent alone.
    pub fn seen(&self, node: &str, path: &Path) -> PathBuf {
        match self.daemons.get(&agent_name(node)) {
            Some(daemon) if self.small_roots.contains_key(node) || self.real_roots.contains_key(node) => {
                let inside = path.strip_prefix("/").unwrap_or(path);
                PathBuf::from(format!("/proc/{}/root", daemon.id())).join(inside)
            }
            _ => path.to_owned(),
        }
    }

    /// Starts the coordinator, on what an earlier one has left.
    ///
    /// # Errors
    /// The binary cannot be started.
    pub fn start_coordinator(&mut self) -> Result<(), LabError> {
        let listen = SocketAddr::new(self.lab.address(&self.source)?, 7700);
        let mut command = self.command(&self.source, &self.stage)?;
        command
            .arg("coordinator")
            .args(["--listen", &listen.to_string(), "--topology"])
            .arg(self.topology_file())
            .arg("--state")
            .arg(self.dir.join("coordinator"));
        if self.security == Security::Insecure {
            command.arg("--insecure");
        }
        self.start(COORDINATOR, command)
    }

    /// Starts a node's agent, on what an earlier one has left.
    ///
    /// # Errors
    /// An unknown node, or the binary cannot be started.
    pub fn start_agent(&mut self, node: &str) -> Result<(), LabError> {
        let root = self.root(node);
        make_dir(&root)?;
        // `ip netns exec` has made a mount namespace: what is mounted in it ends with the agent.
        let mount = match (self.small_roots.get(node), self.real_roots.get(node)) {
            (Some(size), _) => Some((
                r#"mount -t tmpfs -o size="$1" stage-lab "$2" && shift 2 && exec "$@""#,
                size.0.to_string().into(),
            )),
            (None, Some(dir)) => Some((
                r#"mount --bind "$1" "$2" && shift 2 && exec "$@""#,
                dir.clone().into_os_string(),
            )),
            (None, None) => None,
        };
        let mut command = match mount {
            None => self.command(node, &self.stage)?,
            Some((script, what)) => {
                let mut command = self.command(node, "sh")?;
                command
                    .args(["-c", script, "sh"])
                    .arg(what)
                    .arg(&root)
                    .arg(&self.stage);
                command
            }
        };
        command.args(["agent", "--node", node, "--coordinator", &self.url()?]);
        let name = node.parse().map_err(|_| LabError::UnknownNode(node.to_owned()))?;
        let node_of = self.lab.topology().node(&name);
        for interface in node_of.into_iter().flat_map(|node| &node.interfaces) {
            let address = interface
                .address
                .ok_or_else(|| LabError::NoAddress(name.clone()))?;
            command.args(["--data-listen", &SocketAddr::new(address, 7701).to_string()]);
        }
        command
            .arg("--root")
            .arg(root)
            .arg("--state")
            .arg(self.lab.dir(node).join("state"));
        self.start(&agent_name(node), command)
    }

    fn start(&mut self, name: &str, mut command: Command) -> Result<(), LabError> {
        self.identify(&mut command, name);
        let log = self.logs.join(format!("{name}.log"));
        let log = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .map_err(|source| LabError::Directory { path: log, source })?;
        // A daemon whose owner is no more sees its input end, and ends.
        command.arg("--exit-with-stdin").stdin(Stdio::piped());
        command.stdout(Stdio::null()).stderr(log);
        let child = self.spawn(&mut command)?;
        self.sampler.add(name, child.id());
        self.daemons.insert(name.to_owned(), child);
        Ok(())
    }

    fn spawn(&self, command: &mut Command) -> Result<Child, LabError> {
        command.spawn().map_err(|why| LabError::Tool {
            command: self.stage.display().to_string(),
            message: why.to_string(),
        })
    }

    /// Says who the program is, and takes away what this process's environment says.
    fn identify(&self, command: &mut Command, name: &str) {
        for variable in ["STAGE_COORDINATOR", "STAGE_CA", "STAGE_CERT", "STAGE_KEY"] {
            command.env_remove(variable);
        }
        command.env_remove("STAGE_ALLOW_INSECURE");
        // Several agents on one host: each has its socket in its own state directory.
        command.env_remove("RUNTIME_DIRECTORY");
        if let Some(files) = self.files.get(name) {
            command
                .env("STAGE_CA", &files.ca)
                .env("STAGE_CERT", &files.cert)
                .env("STAGE_KEY", &files.key);
        } else {
            command.env("STAGE_ALLOW_INSECURE", "1");
        }
    }

    fn url(&self) -> Result<String, LabError> {
        let scheme = match self.security {
            Security::Tls => "https",
            Security::Insecure => "http",
        };
        let address = SocketAddr::new(self.lab.address(&self.source)?, 7700);
        Ok(format!("{scheme}://{address}"))
    }

    /// Kills the coordinator with signal 9.
    pub fn kill_coordinator(&mut self) {
        self.end(COORDINATOR);
    }

    /// Kills a node's agent with signal 9.
    pub fn kill_agent(&mut self, node: &str) {
        self.end(&agent_name(node));
    }

    fn end(&mut self, name: &str) {
        let Some(mut daemon) = self.daemons.remove(name) else {
            return;
        };
        if let Some(pid) = i32::try_from(daemon.id()).ok().and_then(Pid::from_raw) {
            // The child is not waited for yet: its id is still its own, and what it took can still be read.
            let _ = kill_process(pid, Signal::KILL);
            let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
        }
        self.sampler.end(name);
        drop(daemon.wait());
    }

    /// Starts a command of the CLI on the source, with `--json`.
    ///
    /// # Errors
    /// The binary cannot be started.
    pub fn start_command(&self, words: &[&str]) -> Result<Running, LabError> {
        let mut command = self.command(&self.source, &self.stage)?;
        self.identify(&mut command, "operator");
        command
            .args(words)
            .args(["--json", "--coordinator", &self.url()?])
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let errors = self.logs.join("cli.log");
        let log = File::create(&errors).map_err(|source| LabError::Directory {
            path: errors.clone(),
            source,
        })?;
        let started = Instant::now();
        let child = self.spawn(command.stderr(log))?;
        Ok(Running::new(
            "cli",
            child,
            started,
            errors,
            Arc::clone(&self.sampler),
        ))
    }

    /// Runs a command of the CLI on the source, with `--json`, to its end.
    ///
    /// # Errors
    /// It cannot be started, or does not end in time.
    pub fn run(&self, words: &[&str], within: Duration) -> Result<Pushed, LabError> {
        self.start_command(words)?.finish(within)
    }

    /// `stage push` with these words.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn push(&self, words: &[&str], within: Duration) -> Result<Pushed, LabError> {
        self.run(&[&["push"], words].concat(), within)
    }

    /// Waits until the coordinator shows every node as up.
    ///
    /// # Errors
    /// It does not in time; what is known then is in the error.
    pub fn wait_until_up(&self, within: Duration) -> Result<(), LabError> {
        let deadline = Instant::now() + within;
        let wanted = self.lab.topology().nodes().len();
        loop {
            let answer = self.run(&["nodes"], Duration::from_secs(10))?;
            let up = answer.events.iter().filter(|event| event.value["state"] == "up");
            if up.count() == wanted {
                return Ok(());
            }
            if Instant::now() > deadline {
                let lines: Vec<String> = answer
                    .events
                    .iter()
                    .map(|event| event.value.to_string())
                    .collect();
                return Err(LabError::Late {
                    what: "every node up".to_owned(),
                    within,
                    state: format!("{}\n{}{}", lines.join("\n"), answer.errors, self.last_words()),
                });
            }
            // Starting the command is what takes the time here, not this.
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The last lines of each log.
    pub fn last_words(&self) -> String {
        let mut text = String::new();
        for name in self.daemons.keys() {
            let log = fs::read(self.logs.join(format!("{name}.log"))).unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            let lines: Vec<&str> = log.lines().collect();
            text.push_str(&format!("\n== {name}\n"));
            text.push_str(&lines[lines.len().saturating_sub(5)..].join("\n"));
        }
        text
    }

    /// The process of a node's agent, while it runs.
    pub fn agent_pid(&self, node: &str) -> Option<u32> {
        self.daemons.get(&agent_name(node)).map(Child::id)
    }

    /// What a node's agent has taken so far.
    pub fn agent_usage(&self, node: &str) -> Usage {
        self.sampler.usage(&agent_name(node))
    }

    /// The processor time of all programs so far, the CLI's too.
    pub fn cpu(&self) -> Duration {
        let names = self.sampler.names();
        names.iter().map(|name| self.sampler.usage(name).cpu).sum()
    }

    /// What has gone through a node's interfaces so far; its agent must be running.
    ///
    /// # Errors
    /// It is not.
    pub fn link_bytes(&self, node: &str) -> Result<LinkBytes, LabError> {
        let daemon = self
            .daemons
            .get(&agent_name(node))
            .ok_or_else(|| LabError::UnknownNode(format!("{node}, whose agent was killed,")))?;
        // A process shows the interfaces of its own namespace.
        let path = PathBuf::from(format!("/proc/{}/net/dev", daemon.id()));
        let text = fs::read_to_string(&path).map_err(|source| LabError::Directory { path, source })?;
        Ok(parse_net_dev(&text))
    }

    /// A target of the job as `stage status` shows it now.
    ///
    /// # Errors
    /// No answer in time.
    pub fn status(&self, job: &str) -> Result<Value, LabError> {
        let answer = self.run(&["status", job], Duration::from_secs(15))?;
        Ok(answer.end().clone())
    }
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        let names: Vec<String> = self.daemons.keys().cloned().collect();
        names.iter().for_each(|name| self.end(name));
    }
}

fn agent_name(node: &str) -> String {
    format!("agent-{node}")
}

fn make_dir(path: &Path) -> Result<(), LabError> {
    fs::create_dir_all(path).map_err(|source| fault(path, source))
}

fn write(path: &Path, text: &str) -> Result<(), LabError> {
    fs::write(path, text).map_err(|source| fault(path, source))
}

fn fault(path: &Path, source: io::Error) -> LabError {
    LabError::Directory {
        path: path.to_owned(),
        source,
    }
}

/// The sums over all interfaces but the loopback.
fn parse_net_dev(text: &str) -> LinkBytes {
    let mut sums = LinkBytes::default();
    for line in text.lines() {
        let Some((name, figures)) = line.rsplit_once(':') else {
            continue;
        };
        let figures: Vec<u64> = figures
            .split_whitespace()
            .map_while(|figure| figure.parse().ok())
            .collect();
        if let (false, [received, .., _], Some(sent)) = (name.trim() == "lo", &figures[..], figures.get(8)) {
            sums.received.0 += received;
            sums.sent.0 += sent;
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn net_dev_is_summed_without_the_loopback() {
        let text = "Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:    1000      10    0    0    0     0          0         0     1000      10    0    0    0     0       0          0
  eth0:     300       3    0    0    0     0          0         0       70       1    0    0    0     0       0          0
  eth1:       5       1    0    0    0     0          0         0        2       1    0    0    0     0       0          0
";
        assert_eq!(
            parse_net_dev(text),
            LinkBytes {
                received: ByteCount(305),
                sent: ByteCount(72)
            }
        );
        assert_eq!(parse_net_dev(""), LinkBytes::default());
    }
}
