//! The lab of stage: a topology laid out as network namespaces and shaped links, so that the same file drives the lab
//! and the planner.
//!
//! [`Lab::up`] makes a namespace for each node and one for all switches; dropping the [`Lab`] removes them. Needs root,
//! iproute2 and a kernel with tbf; tests ask [`need_netns`] first.
//!
//! [`cluster::Cluster::up`] starts stage itself in a lab: a coordinator and an agent on every node.
//!
//! A link with `rtt` or `loss` is carried in user space (the module `path`), as netem may be missing from a kernel.
//!
//! What a lab does not do: parallel links are one of their summed capacity; a fabric with loops is refused, as bridges
//! would send broadcasts around it.

pub mod cluster;
mod group;
mod layout;
mod measure;
mod names;
mod need;
mod path;
mod slow;
mod tools;
mod usage;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use stage_core::id::NodeName;
use stage_core::topology::Topology;
use stage_core::units::{ByteCount, Rate};

pub use self::group::{Group, Quota};
pub use self::measure::{Carried, Counters, sha256sum};
pub use self::need::{is_demanded, need_fuse, need_iperf, need_long_links, need_netns};
pub use self::path::Segments;
pub use self::slow::{SlowDisk, Speed};
pub use self::tools::is_installed;
pub use self::usage::Usage;

/// Why a lab cannot be.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// A tool failed.
    #[error("`{command}` failed: {message}")]
    Tool {
        /// The command line.
        command: String,
        /// What it said.
        message: String,
    },
    /// A node without an address: the lab has nobody to resolve its name.
    #[error("{0} has an interface without an address: a lab needs one for each")]
    NoAddress(NodeName),
    /// A link closes a loop.
    #[error("{0} closes a loop: the lab's bridges cannot carry that")]
    Loop(String),
    /// A name that is no node of the lab.
    #[error("{0} is no node of the lab")]
    UnknownNode(String),
    /// Two nodes that no network joins.
    #[error("no network joins {0} and {1}")]
    NoRoute(NodeName, NodeName),
    /// A tool's answer that cannot be understood.
    #[error("the answer of {tool} has no {wanted}")]
    Answer {
        /// The tool.
        tool: &'static str,
        /// What was looked for.
        wanted: String,
    },
    /// Certificates for a cluster cannot be made.
    #[error("no certificates: {0}")]
    Certificates(String),
    /// What was waited for did not come.
    #[error("{what} did not come within {within:?}: {state}")]
    Late {
        /// What.
        what: String,
        /// How long it was waited for.
        within: std::time::Duration,
        /// What was there instead.
        state: String,
    },
    /// A link with delay or loss cannot be made.
    #[error("no device for {link} can be made: {source}")]
    Path {
        /// The link's devices.
        link: String,
        /// Why.
        source: std::io::Error,
    },
    /// A file or directory cannot be made or read.
    #[error("{path}: {source}")]
    Directory {
        /// Where.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

impl LabError {
    /// Whether the same call may succeed later: a lab has no such errors.
    pub fn is_retryable(&self) -> bool {
        false
    }
}

/// What a lab has that its topology does not say.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Links and interfaces carry what the machine can.
    pub unshaped: bool,
    /// What waits at most before a link with an RTT; `None`: as much as is under way on it at full rate.
    pub queue: Option<ByteCount>,
    /// What goes one way over a link with an RTT or a loss waits for what goes the other.
    pub half_duplex: bool,
}

/// A direction, as a node sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// What it sends.
    Sends,
    /// What it receives.
    Receives,
}

/// A fabric that stands. Dropping it ends the processes in it and removes it.
#[derive(Debug)]
pub struct Lab {
    topology: Topology,
    prefix: String,
    /// Every namespace made so far, the fabric first: these are removed, and no other.
    made: Vec<String>,
    dir: PathBuf,
    namespaces: BTreeMap<NodeName, String>,
    fabric: String,
    taps: Vec<layout::Tap>,
    carriers: Vec<path::Carrier>,
}

impl Lab {
    /// Lays out a topology: node namespaces with their addresses, and the links between them at their rates. What labs
    /// of dead processes left behind is removed first.
    ///
    /// # Errors
    /// A topology that a lab cannot have, or a tool that failed; what was made until then is removed.
    pub fn up(topology: &Topology) -> Result<Self, LabError> {
        Self::with(topology, &Options::default())
    }

    /// As [`Self::up`], with options.
    ///
    /// # Errors
    /// As [`Self::up`].
    pub fn with(topology: &Topology, options: &Options) -> Result<Self, LabError> {
        sweep();
        let prefix = names::prefix();
        let layout = layout::layout(topology, &prefix, options)?;
        let mut lab = Self {
            topology: topology.clone(),
            dir: names::memory_dir(&prefix),
            prefix,
            made: Vec::new(),
            namespaces: layout
                .nodes
                .iter()
                .map(|(node, space)| (node.clone(), space.name.clone()))
                .collect(),
            fabric: layout.fabric.name.clone(),
            taps: layout.taps,
            carriers: Vec::new(),
        };
        for node in topology.nodes() {
            let path = lab.dir.join(node.name.as_str());
            std::fs::create_dir_all(&path).map_err(|source| LabError::Directory { path, source })?;
        }
        let spaces = || std::iter::once(&layout.fabric).chain(layout.nodes.iter().map(|(_, space)| space));
        for space in spaces() {
            tools::ip(&["netns", "add", &space.name], "")?;
            lab.made.push(space.name.clone());
            let node = layout.nodes.iter().find(|(_, own)| own.name == space.name);
            let hosts = hosts(topology, node.map(|(node, _)| node));
            names::set_hosts(&space.name, &hosts)?;
        }
        for long in &layout.paths {
            let carrier = path::Carrier::start(&lab.fabric, long.devices.clone(), long.path);
            lab.carriers.push(carrier.map_err(|source| LabError::Path {
                link: long.devices.join("-"),
                source,
            })?);
        }
        for space in spaces() {
            settings(&space.name, space.forwards)?;
            tools::ip(&["-n", &space.name, "-batch", "-"], &space.ip)?;
            if !space.tc.is_empty() {
                tools::tc(&["-n", &space.name, "-batch", "-"], &space.tc)?;
            }
        }
        Ok(lab)
    }

    /// The topology that it was laid out from.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// What the names of its namespaces begin with: `PREFIXnode.NAME`.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// A node's namespace, as `ip netns exec` takes it.
    ///
    /// # Errors
    /// An unknown node.
    pub fn namespace(&self, node: &str) -> Result<&str, LabError> {
        let unknown = || LabError::UnknownNode(node.to_owned());
        let name: NodeName = node.parse().map_err(|_| unknown())?;
        self.namespaces.get(&name).map(String::as_str).ok_or_else(unknown)
    }

    /// A command that runs a program on a node. The process that is started becomes the program itself: killing it
    /// kills the program.
    ///
    /// # Errors
    /// An unknown node.
    pub fn command(&self, node: &str, program: impl AsRef<OsStr>) -> Result<Command, LabError> {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", self.namespace(node)?])
            .arg(program);
        Ok(command)
    }

    /// The address of a node's first interface.
    ///
    /// # Errors
    /// An unknown node.
    pub fn address(&self, node: &str) -> Result<IpAddr, LabError> {
        let unknown = || LabError::UnknownNode(node.to_owned());
        let name = node.parse().map_err(|_| unknown())?;
        let node = self.topology.node(&name).ok_or_else(unknown)?;
        node.interfaces
            .first()
            .and_then(|interface| interface.address)
            .ok_or_else(|| LabError::NoAddress(node.name.clone()))
    }

    /// Sets a kernel setting of a node's namespace: `net.ipv4.tcp_rmem`.
    ///
    /// # Errors
    /// An unknown node, or a setting that its namespace does not have.
    pub fn set(&self, node: &str, setting: &str, value: &str) -> Result<(), LabError> {
        let path = format!("/proc/sys/{}", setting.replace('.', "/"));
        let mut command = self.command(node, "sh")?;
        command.args(["-c", r#"echo "$1" >"$2""#, "sh", value, &path]);
        tools::run(&mut command, "").map(drop)
    }

    /// What a node's first interface sends (or receives) is shaped anew; its topology still says what it said.
    ///
    /// # Errors
    /// An unknown node, or a tool that failed.
    pub fn reshape(&self, node: &str, way: Way, rate: Rate) -> Result<(), LabError> {
        let unknown = || LabError::UnknownNode(node.to_owned());
        let name: NodeName = node.parse().map_err(|_| unknown())?;
        let (namespace, device) = match way {
            Way::Sends => {
                let of = self.topology.node(&name).ok_or_else(unknown)?;
                (self.namespace(node)?, layout::device(of, 0))
            }
            Way::Receives => {
                let edge = self.topology.interface_edge(&name, 0).ok_or_else(unknown)?;
                let tap = self.taps.get(edge.0 as usize).ok_or_else(unknown)?;
                (&self.fabric[..], tap.device.clone())
            }
        };
        let line = format!("qdisc replace {}\n", layout::bucket(&device, rate));
        tools::tc(&["-n", namespace, "-batch", "-"], &line).map(drop)
    }

    /// What connections of a node use unless they ask for something else. Set for each route, as a namespace's default may be
    /// one of those alone that everybody may ask for.
    ///
    /// # Errors
    /// An unknown node, or a congestion control that the kernel does not have.
    pub fn congestion_control(&self, node: &str, name: &str) -> Result<(), LabError> {
        let namespace = self.namespace(node)?;
        for family in ["-4", "-6"] {
            let routes = tools::ip(&["-n", namespace, family, "route", "show"], "")?;
            let lines = routes.lines().filter(|line| !line.contains("linkdown"));
            let lines: Vec<String> = lines
                .map(|line| format!("route replace {} congctl {name}\n", line.trim()))
                .collect();
            if !lines.is_empty() {
                tools::ip(&["-n", namespace, family, "-batch", "-"], &lines.concat())?;
            }
        }
        Ok(())
    }

    /// The most that a node's connections may hold, in each direction: `tcp_rmem` and `tcp_wmem`.
    ///
    /// # Errors
    /// An unknown node.
    pub fn windows(&self, node: &str, most: ByteCount) -> Result<(), LabError> {
        // The first figure must not pass the third, the second is where a connection begins.
        let figures = format!("4096 {} {}", most.0.min(131_072), most.0);
        self.set(node, "net.ipv4.tcp_rmem", &figures)?;
        self.set(node, "net.ipv4.tcp_wmem", &figures)
    }

    /// From now on, packets from one node to another vanish: no answer, no error at the other end. The way back stays.
    ///
    /// # Errors
    /// Unknown nodes, or a tool that failed.
    pub fn black_hole(&self, from: &str, to: &str) -> Result<(), LabError> {
        let unknown = || LabError::UnknownNode(to.to_owned());
        let name = to.parse().map_err(|_| unknown())?;
        for interface in &self.topology.node(&name).ok_or_else(unknown)?.interfaces {
            let address = interface
                .address
                .ok_or_else(|| LabError::NoAddress(name.clone()))?;
            let words = ["route", "replace", "blackhole", &layout::host(address)];
            tools::ip(&[&["-n", self.namespace(from)?], &words[..]].concat(), "")?;
        }
        Ok(())
    }

    /// What has become of the segments on each link with an RTT or a loss, in the topology's order; both directions.
    pub fn segments(&self) -> Vec<Segments> {
        self.carriers.iter().map(path::Carrier::segments).collect()
    }

    /// A directory of the node's own, in memory, gone with the lab.
    pub fn dir(&self, node: &str) -> PathBuf {
        self.dir.join(node)
    }

    /// The directory above those of the nodes.
    pub fn root_dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // Nodes first: their processes end before their links go.
        for name in self.made.iter().rev() {
            // A drop has nobody to tell; what stays is swept by the next lab.
            drop(names::remove_namespace(name));
        }
        drop(std::fs::remove_dir_all(&self.dir));
    }
}

/// Removes what labs of dead processes left behind, and says what that was.
pub fn sweep() -> Vec<String> {
    names::sweep()
}

/// Every node by its name, with its first address; on a node the machine's own name is the node.
fn hosts(topology: &Topology, own: Option<&NodeName>) -> String {
    let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut text = "127.0.0.1 localhost\n".to_owned();
    for node in topology.nodes() {
        if let Some(address) = node.interfaces.first().and_then(|interface| interface.address) {
            let also = if own == Some(&node.name) { &machine[..] } else { "" };
            text.push_str(&format!("{address} {} {also}\n", node.name));
        }
    }
    text
}

/// Kernel settings of a namespace: no run teaches the next; answers come from the interface that was asked; packets
/// are taken from wherever they come, as the way back may be another.
fn settings(namespace: &str, forwards: bool) -> Result<(), LabError> {
    let forward = u8::from(forwards);
    let script = format!(
        "cd /proc/sys/net || exit 1
echo 1 >ipv4/tcp_no_metrics_save
echo {forward} >ipv4/ip_forward
for at in all default; do
  echo 0 >ipv4/conf/$at/rp_filter
  echo 1 >ipv4/conf/$at/arp_ignore
  echo 2 >ipv4/conf/$at/arp_announce
  echo 0 >ipv4/conf/$at/send_redirects
  if [ -e ipv6/conf/$at ]; then
    echo {forward} >ipv6/conf/$at/forwarding
    echo 0 >ipv6/conf/$at/accept_ra
  fi
done
"
    );
    tools::ip(&["netns", "exec", namespace, "sh", "-e"], &script).map(drop)
}
