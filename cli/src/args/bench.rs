//! `stage bench` and `stage doctor`.

use clap::Args;
use stage_core::id::NodeName;

use super::Output;

/// `stage bench`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  stage bench                        # all nodes, all links
  stage bench --nodes 'rack1,rack2' --quick
  stage bench --links --from head    # only links; head's path to each site
  stage bench --show                 # what is known, and how old it is
  stage bench --sweep head z1 --plot sweep.svg

Measures each node (its roots' sequential durable write and read, hashes, cipher)
and enough pairs of nodes to know every link: round trips, and the rate with 1, 2,
4, ... streams until doubling them brings less than 3 %, in both directions. Pairs
go in rounds in which no node and no link is measured twice at once. Once for each
node in a pair, bytes go over the link into a file of its root, to see whether network
and disk work side by side or take turns (not with --links). With each pair come the
routers on the way and the largest packet that passes; a changed way is said. The next
plan uses the results.

Polite: nodes with a job under way, a load above one for each processor, drained,
or in the topology's group `busy` are left in peace and named; a link is at full
rate for a fifth of the time at most (--full: all of it). A root is measured with
a file that has no name, and only where four times its size and 1 GiB are free.

Exit: 0; 5 something could not be measured (left in peace does not count);
      2 bad request; 3 no coordinator; 1 anything else.")]
pub(crate) struct Bench {
    /// Only these: groups, nodes, hostlists, exclusions
    #[arg(long, value_name = "TARGETS", default_value = "all")]
    pub nodes: String,
    /// Only links, not disks and processors
    #[arg(long)]
    pub links: bool,
    /// Little: a pair at each switch and across each link, 64 MiB on each root, short bursts
    #[arg(long, conflicts_with_all = ["full", "show"])]
    pub quick: bool,
    /// Much: 4 GiB on each root, long bursts, and no rest between them
    #[arg(long, conflicts_with = "show")]
    pub full: bool,
    /// Measure nothing: show what was measured last, its age and what follows from it
    #[arg(long)]
    pub show: bool,
    /// Measure busy nodes too
    #[arg(long, conflicts_with = "show")]
    pub busy_too: bool,
    /// The node whose paths to other sites are measured [default: the first]
    #[arg(long, value_name = "NODE", conflicts_with = "show")]
    pub from: Option<NodeName>,
    /// Only between these two: each of many stream counts with each of many TCP windows, both ways; not kept
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with_all = ["show", "links", "from", "nodes"])]
    pub sweep: Vec<NodeName>,
    /// Draw the sweep as a heat map, SVG
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath, requires = "sweep")]
    pub plot: Option<std::path::PathBuf>,
    /// How it is shown
    #[command(flatten)]
    pub output: Output,
}

/// `stage doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  stage doctor
  stage doctor compute[001-010] --json

Each agent describes its host, and what holds it back or will break is listed with
the command that mends it: TCP windows against the longest fat path, window
scaling, netdev_max_backlog, MTU against the neighbours and on the ways that `stage
bench` saw, a name that resolves to loopback, the clock, descriptors, a congestion
control that is missing, an interface slower than the topology says, a root that is
nearly full or gone, another release, processors that save power. Nothing is changed.

Exit: 0 nothing was found; 5 something was, or some nodes did not answer;
      2 bad request; 3 no coordinator; 1 anything else.")]
pub(crate) struct Doctor {
    /// Only these: groups, nodes, hostlists, exclusions
    #[arg(value_name = "NODE", default_value = "all")]
    pub nodes: Vec<String>,
    /// How it is shown
    #[command(flatten)]
    pub output: Output,
}
