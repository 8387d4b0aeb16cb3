//! `stage ls`, `verify` and `rm`.

use std::ffi::OsString;

use clap::Args;
use stage_core::ask::DigestPrefix;

use super::Output;

/// Which copies.
#[derive(Debug, Args)]
pub(crate) struct Which {
    /// Only these: an absolute path (a copy, or a directory with all below it), or a name [default: all]
    #[arg(value_name = "NAME|PATH")]
    pub what: Option<OsString>,
    /// Only on these: groups, nodes, hostlists, exclusions
    #[arg(long, value_name = "TARGETS", default_value = "all")]
    pub nodes: String,
    /// Only those whose SHA-256 (or root) begins with these digits, 4 or more
    #[arg(long, value_name = "HEX")]
    pub digest: Option<DigestPrefix>,
}

/// `stage ls`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  stage ls                                  # all, equal copies in one line
  stage ls genome.db --nodes all-compute
  stage ls --digest 9f86d081 --json         # who has this content

Every agent looks at each file: ok (untouched since it was published), changed,
missing. What the content is only --verify tells, which reads all of it.

Exit: 0; 5 some nodes did not answer (with --verify also: some copy is not ok;
      4 nobody has what was asked for); 2 bad request; 3 no coordinator;
      1 anything else.")]
pub(crate) struct Ls {
    /// Which
    #[command(flatten)]
    pub which: Which,
    /// Hash the content again, as `stage verify` does
    #[arg(long)]
    pub verify: bool,
    /// How it is shown
    #[command(flatten)]
    pub output: Output,
}

/// `stage verify`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  stage verify genome.db --nodes all-compute
  stage verify                              # everything, everywhere

Every agent hashes its copies again and compares them, chunk by chunk, with what
was published; of a directory also what is in it. Push a damaged copy again with
--if-exists replace: only the chunks that differ travel.

Exit: 0 all are ok; 4 nobody has what was asked for; 5 some are not, or some
      nodes did not answer; 2 bad request; 3 no coordinator; 1 anything else.")]
pub(crate) struct Verify {
    /// Which
    #[command(flatten)]
    pub which: Which,
    /// How it is shown
    #[command(flatten)]
    pub output: Output,
}

/// `stage rm`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  stage rm genome.db --from all-compute
  stage rm genome.db --from n[1-3] --dest scratch:db
  stage rm /scratch/stage/db/genome.db --from all

Removes what stage published, and only while it is as it was; a directory whole.
Whoever has a file of it open keeps that. That nothing is there is no error.

Exit: 0 it is gone everywhere; 5 some nodes still have it or did not answer;
      2 bad request; 3 no coordinator; 1 anything else.")]
pub(crate) struct Rm {
    /// The copy: its name, or its absolute path
    #[arg(value_name = "NAME|PATH")]
    pub what: OsString,
    /// Where: groups, nodes, hostlists, exclusions
    #[arg(long, value_name = "TARGETS")]
    pub from: String,
    /// Where NAME lies: ROOT:DIR, or an absolute directory that lies in a root [default: the first root]
    #[arg(long, value_name = "DIR")]
    pub dest: Option<OsString>,
    /// Also if it was changed since it was published, or stood there before stage came
    #[arg(long)]
    pub force: bool,
    /// How it is shown
    #[command(flatten)]
    pub output: Output,
}
