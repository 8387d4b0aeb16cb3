//! What can be typed. Everything is parsed into its type here; what the values mean is the commands' affair.

#![allow(
    rustdoc::broken_intra_doc_links,
    reason = "these comments are help texts, in which brackets mean optional"
)]

mod bench;
mod inventory;
mod job;
mod push;

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueHint};
use stage_core::id::{IdError, NodeName, RootName};
use stage_core::units::{ByteCount, Rate, parse_time};
use stage_net::grpc::CoordinatorUrl;

pub(crate) use bench::{Bench, Doctor};
pub(crate) use inventory::{Ls, Rm, Verify, Which};
pub(crate) use job::JobName;
pub(crate) use push::{Cache, IfExists, Plan, Push, Travel, Unfit};

/// Put a huge file on every node of a cluster at the speed of the network, and prove every copy right.
///
/// A coordinator plans who gets the file from whom; an agent on every node receives it, checks it, and passes it on
/// while it still arrives. `stage demo` shows all of it on this machine, without any set-up.
#[derive(Debug, Parser)]
#[command(
    name = "stage",
    version,
    propagate_version = true,
    max_term_width = 100,
    disable_help_subcommand = true
)]
pub(crate) struct Stage {
    /// How to reach the coordinator.
    #[command(flatten)]
    pub connection: Connection,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Where the coordinator is and how to speak to it.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Connection")]
pub(crate) struct Connection {
    /// Where the coordinator is: https://HOST[:7700] (needs --ca, --cert, --key) or http://HOST[:7700] (insecure)
    #[arg(long, global = true, env = "STAGE_COORDINATOR", value_name = "URL")]
    pub coordinator: Option<CoordinatorUrl>,
    /// The cluster's CA certificate, PEM
    #[arg(long, global = true, env = "STAGE_CA", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub ca: Option<PathBuf>,
    /// The certificate that says who we are, PEM
    #[arg(long, global = true, env = "STAGE_CERT", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub cert: Option<PathBuf>,
    /// The certificate's private key, PEM
    #[arg(long, global = true, env = "STAGE_KEY", value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub key: Option<PathBuf>,
    /// Speak without TLS, as http:// implies: for labs; refused on any address but loopback unless
    /// STAGE_ALLOW_INSECURE=1 is set
    #[arg(long, global = true)]
    pub insecure: bool,
    /// The socket of this host's agent
    #[arg(
        long,
        global = true,
        env = "STAGE_AGENT_SOCKET",
        value_name = "PATH",
        default_value = "/run/stage/agent.sock",
        value_hint = ValueHint::FilePath
    )]
    pub agent_socket: PathBuf,
}

/// Whether --insecure may be used on addresses that others can reach.
pub(crate) fn insecure_anywhere() -> bool {
    std::env::var_os("STAGE_ALLOW_INSECURE").is_some_and(|value| value == "1")
}

/// What stage can do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Send files and directories to many nodes
    Push(Box<Push>),
    /// Show who would get it from whom, and how long it would take
    Plan(Plan),
    /// Show jobs, or one job
    Status(Status),
    /// Wait for a job and end as its push would
    Wait(Wait),
    /// Print where this node has a payload, for a job's script
    Path(Path),
    /// Show the cluster's nodes, or declare some away
    Nodes(Nodes),
    /// End a job; copies that are published stay, nothing else does
    Cancel(Cancel),
    /// Try what is missing of a job again: at once, and only that
    Retry(Retry),
    /// Show what is staged where
    Ls(Ls),
    /// Hash copies again and compare them with what was published
    Verify(Verify),
    /// Remove copies that stage published
    Rm(Rm),
    /// Measure nodes and links: what the next plan is made from
    Bench(Bench),
    /// Find what on each host holds it back or will break, and what mends it
    Doctor(Doctor),
    /// Look into a topology file
    Topology(Topology),
    /// See it work on this machine, without any set-up
    Demo(Demo),
    /// Run the coordinator
    Coordinator(Coordinator),
    /// Run a node's agent
    Agent(Agent),
    /// Print a completion script for a shell
    Completions(Completions),
}

/// How results are shown.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Output {
    /// Print JSON, one object a line
    #[arg(long)]
    pub json: bool,
}

/// `stage status`.
#[derive(Debug, Args)]
pub(crate) struct Status {
    /// The job, by its id or the beginning of it [default: a line for each]
    pub job: Option<JobName>,
    /// Follow the job until it has ended, targets that were unfit included
    #[arg(long, requires = "job")]
    pub watch: bool,
    /// How it is shown
    #[command(flatten)]
    pub output: Output,
}

/// `stage wait`.
#[derive(Debug, Args)]
pub(crate) struct Wait {
    /// The job, by its id or the beginning of it
    pub job: JobName,
    /// Also wait for the targets that were unfit, until the job has ended
    #[arg(long)]
    pub unfit: bool,
    /// How it is shown
    #[command(flatten)]
    pub output: Output,
}

/// `stage path`.
#[derive(Debug, Args)]
#[command(after_help = "\
Example, in a job's script:
  DB=$(stage path k2_std --ensure --timeout 10min \\
                  --fallback /lustre/db/k2_std)
  kraken2 --db \"$DB\" …

Of a tree it prints the directory of the version that is there now: who asks
once sees one version whole, whatever is pushed meanwhile. This node's agent
answers, through its socket; no coordinator and no certificate is needed, but
for --ensure, which has another node that has it send it here first. Commands
that want the same at the same time share one transfer, also with a push of it
that is under way.

Exit: 0 a path was printed; 2 bad request; 4 it is not on this node (in time),
      or no agent answers; 3 --ensure found no coordinator. With --fallback
      everything but a bad request ends with 0.")]
pub(crate) struct Path {
    /// The payload's name, also as ROOT:DIR/NAME or with the absolute path of its directory
    #[arg(value_name = "NAME")]
    pub name: OsString,
    /// The directory that it was pushed to: ROOT:DIR, or an absolute one [default: the first root]
    #[arg(long, value_name = "DIR")]
    pub dest: Option<OsString>,
    /// Where this node does not have it, have it brought here first by one that does
    #[arg(long)]
    pub ensure: bool,
    /// How long to wait for that [default: until it is here or cannot be]
    #[arg(long, value_name = "TIME", requires = "ensure", value_parser = parse_time)]
    pub timeout: Option<Duration>,
    /// Print PATH where there is nothing else to print, say why on standard error, and succeed
    #[arg(long, value_name = "PATH", value_hint = ValueHint::AnyPath)]
    pub fallback: Option<PathBuf>,
    /// How it is shown
    #[command(flatten)]
    pub output: Output,
}

/// `stage nodes`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_value_name = "ACTION")]
pub(crate) struct Nodes {
    /// What to declare.
    #[command(subcommand)]
    pub action: Option<NodesAction>,
    /// How it is shown
    #[command(flatten)]
    pub output: Output,
}

/// What to declare of nodes.
#[derive(Debug, Subcommand)]
pub(crate) enum NodesAction {
    /// Declare nodes away: pushes pass them over, and they do not count against an exit code
    Drain {
        /// Groups, nodes, hostlists, exclusions
        nodes: String,
        /// How it is shown
        #[command(flatten)]
        output: Output,
    },
    /// Take that back
    Resume {
        /// Groups, nodes, hostlists, exclusions
        nodes: String,
        /// How it is shown
        #[command(flatten)]
        output: Output,
    },
}

/// `stage cancel`.
#[derive(Debug, Args)]
pub(crate) struct Cancel {
    /// The job, by its id or the beginning of it
    pub job: JobName,
    /// Only on these: groups, nodes, hostlists, exclusions
    #[arg(long, value_name = "NODES")]
    pub node: Option<String>,
    /// How it is shown
    #[command(flatten)]
    pub output: Output,
}

/// `stage retry`.
#[derive(Debug, Args)]
#[command(after_help = "\
An open job asks the targets that it waits for at once, instead of at their
next turn. One that lost its source goes on under its id from what the targets
kept of it (for 24 h), once the source is back or another is named. Of any
other end, a new job brings the payload to the targets that do not have it.

Exit: as `stage push`; 0 too where nothing was missing.")]
pub(crate) struct Retry {
    /// The job, by its id or the beginning of it
    pub job: JobName,
    /// Another node that has the payload, under the same path [default: the same source]
    #[arg(long, value_name = "NODE")]
    pub from: Option<NodeName>,
    /// Return at once, and print the id of the job that goes on
    #[arg(long)]
    pub detach: bool,
    /// How it is shown
    #[command(flatten)]
    pub output: Output,
}

/// `stage topology`.
#[derive(Debug, Args)]
pub(crate) struct Topology {
    /// What to do.
    #[command(subcommand)]
    pub action: TopologyAction,
}

/// What to do with a topology.
#[derive(Debug, Subcommand)]
pub(crate) enum TopologyAction {
    /// Say what the file describes, or everything that is wrong with it
    Check {
        /// The topology
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
        /// How it is shown
        #[command(flatten)]
        output: Output,
    },
}

/// `stage demo`.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  stage demo --nodes 8 --size '1 GiB' --shape tree:2

Starts a coordinator and an agent for each node as processes of this machine,
on addresses from 127.0.0.1 on, with certificates made for the occasion. All
share one machine's memory, disk and processors: what it shows is that the
copies arrive and are right, not how fast a cluster is.")]
pub(crate) struct Demo {
    /// The file to send [default: a new one of random bytes]
    #[arg(value_hint = ValueHint::FilePath)]
    pub file: Option<PathBuf>,
    /// How many nodes get it
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub nodes: u8,
    /// How large the new file is
    #[arg(long, default_value = "256 MiB", conflicts_with = "file")]
    pub size: ByteCount,
    /// Work in DIR (absent or empty) and leave all there, copies and logs
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub keep: Option<PathBuf>,
    /// How the bytes travel
    #[command(flatten)]
    pub travel: Travel,
    /// How it is shown
    #[command(flatten)]
    pub output: Output,
}

/// Where a daemon's settings are.
#[derive(Debug, Args)]
pub(crate) struct Daemon {
    /// Settings [default: /etc/stage/coordinator.toml or agent.toml, if there]; flags and STAGE_… variables win over what it says
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    /// Where the daemon keeps what it must not forget; made if absent
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub state: Option<PathBuf>,
    /// End when the standard input ends: for whoever starts daemons as its own children.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
}

/// `stage coordinator`.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  stage coordinator --topology /etc/stage/topology.toml \\
        --listen 10.0.0.1:7700 --state /var/lib/stage-coordinator \\
        --ca ca.pem --cert coordinator.pem --key coordinator.key

Exit: 0 on SIGTERM; 78 bad configuration; 75 fenced by a newer coordinator.")]
pub(crate) struct Coordinator {
    /// The fabric
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub topology: Option<PathBuf>,
    /// Where to listen, IP[:7700]
    #[arg(long, value_name = "ADDR", value_parser = parse_listen)]
    pub listen: Option<SocketAddr>,
    /// Write the address that it listens on into FILE once it does.
    #[arg(long, hide = true, value_name = "FILE")]
    pub address_file: Option<PathBuf>,
    /// What both daemons have
    #[command(flatten)]
    pub daemon: Daemon,
}

/// `stage agent`.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  stage agent --node n1 --coordinator https://head:7700 \\
        --data-listen 10.0.1.1 --root /scratch/stage --state /var/lib/stage-agent \\
        --ca ca.pem --cert n1.pem --key n1.key

Exit: 0 on SIGTERM; 78 bad configuration.")]
pub(crate) struct Agent {
    /// This node's name in the topology [default: the host's name up to its first dot]
    #[arg(long, value_name = "NAME")]
    pub node: Option<NodeName>,
    /// Where other agents reach this one, IP[:7701]; several, best first
    #[arg(long, value_name = "ADDR", value_parser = parse_data_listen)]
    pub data_listen: Vec<SocketAddr>,
    /// A directory to write in, and its name in the cluster; several, the first is where payloads land unless told
    /// [default name of the first: main]
    #[arg(long = "root", value_name = "[NAME=]DIR")]
    pub roots: Vec<Root>,
    /// Where users of this host reach the agent [default: agent.sock in $RUNTIME_DIRECTORY, else in the state directory]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub socket: Option<PathBuf>,
    /// How much memory bytes in transit may take
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteCount>,
    /// What both daemons have
    #[command(flatten)]
    pub daemon: Daemon,
}

/// `--root`: a directory, with the name that was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Root {
    /// `None`: not said.
    pub name: Option<RootName>,
    /// Where.
    pub dir: PathBuf,
}

impl FromStr for Root {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, dir) = match text.split_once('=') {
            // A directory's name may hold an equals sign; a root's name holds no slash.
            Some((name, dir)) if !name.contains('/') => {
                let name = name.parse().map_err(|error: IdError| error.to_string())?;
                (Some(name), dir)
            }
            _ => (None, text),
        };
        if !dir.starts_with('/') {
            return Err("write an absolute path: /DIR or NAME=/DIR".to_owned());
        }
        Ok(Self {
            name,
            dir: dir.into(),
        })
    }
}

/// `stage completions`.
#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// For which shell
    pub shell: clap_complete::Shell,
}

fn parse_percent(text: &str) -> Result<f64, String> {
    text.strip_suffix('%')
        .and_then(|number| number.trim().parse::<f64>().ok())
        .filter(|number| *number > 0.0 && *number <= 100.0)
        .map(|number| number / 100.0)
        .ok_or_else(|| "write a share of the targets, such as 98%".to_owned())
}

fn parse_limit(text: &str) -> Result<Rate, String> {
    let rate: Rate = text
        .parse()
        .map_err(|error: stage_core::units::UnitError| error.to_string())?;
    if rate.bytes_per_second() < 1.0 {
        return Err("a limit below 1 B/s would never end".to_owned());
    }
    Ok(rate)
}

/// `IP` or `IP:PORT`.
fn parse_address(text: &str, port: u16) -> Result<SocketAddr, String> {
    let bare = text.trim_start_matches('[').trim_end_matches(']');
    text.parse()
        .or_else(|_| bare.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, port)))
        .map_err(|_| format!("write an address of this host: IP or IP:PORT ({port} if not said)"))
}

/// Where the coordinator listens.
///
/// # Errors
/// For people.
pub(crate) fn parse_listen(text: &str) -> Result<SocketAddr, String> {
    parse_address(text, 7700)
}

/// Where an agent listens.
///
/// # Errors
/// For people.
pub(crate) fn parse_data_listen(text: &str) -> Result<SocketAddr, String> {
    parse_address(text, 7701)
}

impl Command {
    /// Whether results were asked for as JSON.
    pub(crate) fn json(&self) -> bool {
        match self {
            Self::Push(push) => push.output.json,
            Self::Plan(plan) => plan.output.json,
            Self::Status(status) => status.output.json,
            Self::Wait(wait) => wait.output.json,
            Self::Path(path) => path.output.json,
            Self::Nodes(nodes) => match &nodes.action {
                None => nodes.output.json,
                Some(NodesAction::Drain { output, .. } | NodesAction::Resume { output, .. }) => output.json,
            },
            Self::Cancel(cancel) => cancel.output.json,
            Self::Retry(retry) => retry.output.json,
            Self::Ls(ls) => ls.output.json,
            Self::Verify(verify) => verify.output.json,
            Self::Rm(rm) => rm.output.json,
            Self::Bench(bench) => bench.output.json,
            Self::Doctor(doctor) => doctor.output.json,
            Self::Topology(topology) => match &topology.action {
                TopologyAction::Check { output, .. } => output.json,
            },
            Self::Demo(demo) => demo.output.json,
            Self::Coordinator(_) | Self::Agent(_) | Self::Completions(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::push::Streams;
    use super::*;
    use clap::CommandFactory as _;

    fn parse(line: &str) -> Result<Stage, clap::Error> {
        Stage::try_parse_from(line.split_whitespace())
    }

    #[test]
    fn the_definition_is_sound() {
        Stage::command().debug_assert();
    }

    #[test]
    fn push_takes_all_its_flags() {
        let stage = parse(
            "stage --coordinator http://127.0.0.1 push a.db --to all --dest scratch:db --from n0 --shape tree:3 \
             --streams 4 --limit 2Gbit/s --source-limit 500MB/s --if-exists skip --unfit skip --wait-for 2h \
             --enough 98% --expect SUMS --keep-previous 0s --json",
        )
        .unwrap();
        assert!(stage.command.json());
        let Command::Push(push) = stage.command else {
            panic!("not a push")
        };
        assert_eq!(push.travel.streams, Streams(Some(4)));
        assert_eq!(push.travel.limit.unwrap().bytes_per_second(), 2.5e8);
        assert_eq!(push.if_exists, IfExists::Skip);
        assert_eq!(push.unfit, Unfit::Skip);
        assert_eq!(push.wait_for, Duration::from_secs(7200));
        assert_eq!(push.keep_previous, Duration::ZERO);
        assert_eq!(push.enough, Some(0.98));
    }

    #[test]
    fn global_options_may_stand_behind_the_command() {
        let stage = parse("stage nodes --coordinator https://head:7700 --ca a --cert b --key c").unwrap();
        assert!(stage.connection.coordinator.unwrap().is_tls());
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for line in [
            "stage push --to all",
            "stage push a.db",
            "stage push a.db --to all --streams 0",
            "stage push a.db --to all --streams 65",
            "stage push a.db --to all --enough 0%",
            "stage push a.db --to all --enough 98",
            "stage push a.db --to all --limit 10",
            "stage push a.db --to all --shape ring",
            "stage push a.db --to all --wait-for 24",
            "stage push a.db --to all -q --json",
            "stage plan --to all",
            "stage plan --to all --topology t.toml --size 1GiB",
            "stage plan --to all --topology t.toml --from n0",
            "stage status --watch",
            "stage status 7",
            "stage cancel",
            "stage retry",
            "stage ls --digest abc",
            "stage rm genome.db",
            "stage rm --from all",
            "stage demo --nodes 0",
            "stage agent --root relative",
            "stage coordinator --listen head:7700",
            "stage --coordinator head:7700 nodes",
        ] {
            assert_eq!(parse(line).map(|_| ()).unwrap_err().exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn addresses_have_default_ports() {
        assert_eq!(parse_listen("10.0.0.1").unwrap().to_string(), "10.0.0.1:7700");
        assert_eq!(parse_data_listen("[::1]").unwrap().to_string(), "[::1]:7701");
        assert_eq!(parse_data_listen("::1").unwrap().to_string(), "[::1]:7701");
        assert_eq!(
            parse_data_listen("127.0.0.2:0").unwrap().to_string(),
            "127.0.0.2:0"
        );
    }

    #[test]
    fn roots_have_a_name_or_not() {
        let root: Root = "scratch=/nvme/a=b".parse().unwrap();
        assert_eq!(root.name.unwrap().as_str(), "scratch");
        assert_eq!(root.dir, PathBuf::from("/nvme/a=b"));
        let root: Root = "/nvme/a=b".parse().unwrap();
        assert_eq!(root.name, None);
        assert!("scratch=nvme".parse::<Root>().is_err());
        assert!("=/nvme".parse::<Root>().is_err());
    }
}
