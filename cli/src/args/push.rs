//! `stage push` and `stage plan`: what is sent, to whom, and how.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum, ValueHint};
use stage_core::id::{IdError, NodeName};
use stage_core::plan::ShapeChoice;
use stage_core::units::{ByteCount, Rate, parse_time};

use super::{Output, parse_limit, parse_percent};

/// `stage push`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  stage push genome.db --to all-compute
  stage push genome.db --to 'all-compute,!compute[005-006]' --dest scratch:db
  stage push genome.db --to all-compute --if-exists replace
  stage push refdb more.fa --to gpu --exclude '*.tmp' --exclude old/
  stage push model.bin --to \"$SLURM_JOB_NODELIST\" --json
  tar c refdb | stage push - --as refdb.tar --to all-compute

A directory is sent with all it holds: files, directories (empty ones too),
symbolic links as links, hard links as hard links, holes as holes, permissions
and times; of owners, setuid bits and device files nothing. It appears on a node
at once and whole. refdb and refdb/ mean the same, unlike with rsync. A PATH that
is a link itself is followed; --follow does so with all links, and refuses those
that lead in a circle or nowhere.

GLOBs are about what directories hold, not about PATHs. * and ? stay within a
name, ** spans directories, [ab] and {a,b} are choices, \\ takes the next
character as it is. A GLOB without / is held against each name, one with / against
the path below PATH, without PATH's own name (a/x of refdb/a/x; /x and ./x: right
below PATH); x/ is a directory only. What --exclude matches is left out, a
directory with all it holds. With --include only what one of them matches is sent,
a directory with all it holds, and the directories on the way to it; --exclude
goes before --include.

--expect of one file takes the line of its name. Of a directory each line must
name a file of the push (by its path below PATH, or with PATH's name first); what
no line names is sent unchecked.

A pipe (-) is sent while it comes; its length need not be known. This node's
agent reads it. Whatever happens before its end was seen (a read error, the end
of this command, of the agent) fails the job, and nothing is published. But a
pipe ends alike whether its writer had finished or died: let the shell tell
(set -o pipefail), or hold what comes against a digest with --expect.

Exit: 0 every target has it; 2 bad request; 3 no coordinator;
      4 refused before a byte moved; 5 some have it; 6 none has it;
      7 cancelled; 130 Ctrl-C (the job goes on); 1 anything else.")]
pub(crate) struct Push {
    /// Files and directories to send, on the source's node, or - for the standard input
    #[arg(value_name = "PATH", required = true, num_args = 1.., value_hint = ValueHint::AnyPath)]
    pub paths: Vec<PathBuf>,
    /// The name that the one PATH shall have [default: its last part]; needed with -
    #[arg(long = "as", value_name = "NAME")]
    pub name: Option<OsString>,
    /// Who shall have it: groups, nodes, hostlists, exclusions
    #[arg(long, value_name = "TARGETS")]
    pub to: String,
    /// The node that has the file [default: this host's]
    #[arg(long, value_name = "NODE")]
    pub from: Option<NodeName>,
    /// Where it shall lie: ROOT:DIR, or an absolute directory that lies in a root [default: the first root]
    #[arg(long, value_name = "DIR")]
    pub dest: Option<OsString>,
    /// What of directories is sent
    #[command(flatten)]
    pub selection: Selection,
    /// How the bytes travel
    #[command(flatten)]
    pub travel: Travel,
    /// What to do where other content stands under the name
    #[arg(long, value_name = "RULE", default_value = "fail")]
    pub if_exists: IfExists,
    /// How long the generation of a directory stays that is replaced; it never goes while a file in it is open on its
    /// node. 0s: it goes as soon as nobody reads it
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_time)]
    pub keep_previous: Duration,
    /// What a push does with its nodes' memory: the copy's pages stay there for who reads it next, or go as soon as they are
    /// on the disk, so that what else is in memory stays
    #[arg(long, value_name = "HOW", default_value = "keep")]
    pub cache: Cache,
    /// What to do about targets that cannot take it now: start without them and fill them later, leave them out, or
    /// refuse the whole push
    #[arg(long, value_name = "RULE", default_value = "wait")]
    pub unfit: Unfit,
    /// How long unfit targets are waited for
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_time)]
    pub wait_for: Duration,
    /// Return once so many of the targets have it; the rest goes on
    #[arg(long, value_name = "N%", value_parser = parse_percent)]
    pub enough: Option<f64>,
    /// Publish only if the files agree with their lines in FILE, as `sha256sum` or `md5sum` writes it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub expect: Option<PathBuf>,
    /// The payload is a tar (also packed by gzip or zstd): publish the tree that it holds, under the tar's name without
    /// .tar, .tar.gz and the like, or as --as says. The tar is kept beside it until the job is over
    #[arg(long, conflicts_with = "expect")]
    pub unpack: bool,
    /// Return as soon as the job exists, and print its id
    #[arg(long, conflicts_with_all = ["dry_run", "enough"])]
    pub detach: bool,
    /// Plan with what the agents report, and send nothing
    #[arg(long)]
    pub dry_run: bool,
    /// How it is shown
    #[command(flatten)]
    pub output: Output,
    /// Print nothing but errors
    #[arg(short, long, conflicts_with = "json")]
    pub quiet: bool,
}

/// What of directories is sent.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Selection {
    /// Send what symbolic links lead to, not the links
    #[arg(long)]
    pub follow: bool,
    /// Send extended attributes (user.*) and POSIX ACLs too
    #[arg(long)]
    pub xattrs: bool,
    /// Of directories send only what matches; may be repeated
    #[arg(long, value_name = "GLOB")]
    pub include: Vec<String>,
    /// Leave out what matches; may be repeated
    #[arg(long, value_name = "GLOB")]
    pub exclude: Vec<String>,
}

/// How the bytes travel.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Travel {
    /// auto, star, chain, tree or tree:K (K children each)
    #[arg(long, default_value = "auto")]
    pub shape: ShapeChoice,
    /// TCP streams on each hop: auto, or 1 to 64
    #[arg(long, value_name = "auto|N", default_value = "auto")]
    pub streams: Streams,
    /// What each node may send, such as "2 Gbit/s"
    #[arg(long, value_name = "RATE", value_parser = parse_limit)]
    pub limit: Option<Rate>,
    /// What the source may read, such as "500 MB/s"
    #[arg(long, value_name = "RATE", value_parser = parse_limit)]
    pub source_limit: Option<Rate>,
}

/// `--streams`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Streams(pub Option<u16>);

impl FromStr for Streams {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self(None));
        }
        match text.parse() {
            Ok(count @ 1..=64) => Ok(Self(Some(count))),
            _ => Err("use auto, or a number from 1 to 64".to_owned()),
        }
    }
}

/// `--if-exists`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum IfExists {
    /// The target is unfit
    Fail,
    /// Swap it atomically
    Replace,
    /// Leave it; the target counts as done
    Skip,
}

/// `--cache`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Cache {
    /// The copy stays in memory as far as there is room
    Keep,
    /// It goes once it is on the disk
    Drop,
}

/// `--unfit`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Unfit {
    /// Start with the others, fill these when they can take it
    Wait,
    /// Leave them out
    Skip,
    /// Refuse the push
    Fail,
}

/// `stage plan`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  stage plan genome.db --to all-compute    # with what the agents report

Without any daemon:
  stage plan --topology topology.toml --from head --to all-compute \\
        --size '100 GiB'
  stage plan --topology topology.toml --from head --to all-compute \\
        --size '100 GiB' --explain --plot plan.svg
  stage plan --topology topology.toml --from head --to all-compute \\
        --size '100 GiB' --simulate --fail compute007@30s")]
pub(crate) struct Plan {
    /// The file or directory that would be sent
    #[arg(value_name = "PATH", required_unless_present = "topology", value_hint = ValueHint::AnyPath)]
    pub path: Option<PathBuf>,
    /// Plan from this file alone, without coordinator
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "from")]
    pub topology: Option<PathBuf>,
    /// The node that has the file
    #[arg(long, value_name = "NODE")]
    pub from: Option<NodeName>,
    /// Who shall have it: groups, nodes, hostlists, exclusions
    #[arg(long, value_name = "TARGETS")]
    pub to: String,
    /// How large it is, such as "100 GiB" [default: PATH's size]
    #[arg(
        long,
        requires = "topology",
        conflicts_with = "path",
        required_unless_present = "path"
    )]
    pub size: Option<ByteCount>,
    /// Show every layout that was tried, its forecast, what limits it, and why it was not taken
    #[arg(long, requires = "topology")]
    pub explain: bool,
    /// Try the plan in a flow-level simulation of the topology
    #[arg(long, requires = "topology")]
    pub simulate: bool,
    /// In the simulation, a node that dies so long after the start, such as n7@30s; may be repeated
    #[arg(long, value_name = "NODE@TIME", requires = "simulate")]
    pub fail: Vec<Death>,
    /// Draw the plan as SVG: the tree over the racks, with the rate of each hop
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "topology")]
    pub plot: Option<PathBuf>,
    /// How the bytes travel
    #[command(flatten)]
    pub travel: Travel,
    /// How it is shown
    #[command(flatten)]
    pub output: Output,
}

/// `--fail`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Death {
    /// Who.
    pub node: NodeName,
    /// When, from the start of the push.
    pub at: Duration,
}

impl FromStr for Death {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (node, at) = text
            .rsplit_once('@')
            .ok_or_else(|| format!("{text:?} is no node with a time: write for example \"n7@30s\""))?;
        Ok(Self {
            node: node.parse().map_err(|error: IdError| error.to_string())?,
            at: parse_time(at).map_err(|error| error.to_string())?,
        })
    }
}
