//! Why a command ends without what was asked for.

use std::io;

use stage_core::failure::{Code, Failure};
use stage_core::id::JobId;

use crate::{exit, view};

/// Any end of a command that is not its proper one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// With a cause for people and scripts.
    #[error("{0}")]
    Failure(Box<Failure>),
    /// The job ended as a whole: refused, or for a cause outside the table of finished ends.
    #[error("job {} failed", .0.id)]
    Job(Box<view::Job>),
    /// A topology describes no fabric.
    #[error("{}", .lines.join("\n"))]
    Topology {
        /// Which file, as it is shown.
        file: String,
        /// `file:line: message`, all there are.
        lines: Vec<String>,
    },
    /// Ctrl-C; the job, if there is one by now, goes on.
    #[error("interrupted")]
    Interrupted(Option<JobId>),
    /// Ctrl-C before the end of a stream: its job fails.
    #[error("interrupted before the end of the input")]
    Cut(JobId),
    /// A daemon ended.
    #[error("{message}")]
    Daemon {
        /// Why.
        message: String,
        /// Its exit code.
        exit: u8,
    },
    /// Our own output cannot be written.
    #[error("cannot write the output: {0}")]
    Output(#[from] io::Error),
}

impl Error {
    /// The request is wrong: exit 2.
    pub(crate) fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Failure::new(Code::Usage, message, hint).into()
    }

    /// Something of ours went wrong that has no case of its own: exit 1.
    pub(crate) fn other(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Failure::new(Code::Internal, message, hint).into()
    }

    /// A daemon cannot start from its configuration: exit 78.
    pub(crate) fn config(message: impl Into<String>) -> Self {
        Self::Daemon {
            message: message.into(),
            exit: exit::CONFIG,
        }
    }

    /// Whoever read our output has gone, as `head` does.
    pub(crate) fn is_closed_pipe(&self) -> bool {
        matches!(self, Self::Output(cause) if cause.kind() == io::ErrorKind::BrokenPipe)
    }

    /// The exit code.
    pub(crate) fn exit(&self) -> u8 {
        match self {
            Self::Failure(failure) => exit::of(failure.code),
            Self::Job(job) => job.exit,
            Self::Topology { .. } => exit::USAGE,
            Self::Interrupted(_) | Self::Cut(_) => exit::INTERRUPTED,
            Self::Daemon { exit, .. } => *exit,
            Self::Output(_) => exit::OTHER,
        }
    }

    /// The job concerned.
    pub(crate) fn job(&self) -> Option<JobId> {
        match self {
            Self::Job(job) => Some(job.id),
            Self::Interrupted(job) => *job,
            Self::Cut(job) => Some(*job),
            Self::Failure(_) | Self::Topology { .. } | Self::Daemon { .. } | Self::Output(_) => None,
        }
    }

    /// The cause in the form that people and scripts get.
    pub(crate) fn failure(&self) -> Failure {
        match self {
            Self::Failure(failure) => (**failure).clone(),
            Self::Job(job) => job
                .failure
                .clone()
                .or_else(|| job.nodes.iter().find_map(|node| node.failure.clone()))
                .unwrap_or_else(|| {
                    Failure::new(
                        Code::Internal,
                        format!("the job ended as {} without saying why", job.state),
                        "look into the coordinator's log",
                    )
                }),
            Self::Interrupted(Some(job)) => Failure::new(
                Code::Interrupted,
                format!("interrupted; job {job} goes on without this command"),
                format!("follow it with `stage status {job} --watch`, end it with `stage cancel {job}`"),
            ),
            Self::Cut(job) => Failure::new(
                Code::Interrupted,
                format!(
                    "interrupted before the end of the input: job {job} fails, nothing of it is published"
                ),
                "push again",
            ),
            Self::Interrupted(None) => Failure::new(Code::Interrupted, "interrupted", ""),
            Self::Topology { file, lines } => Failure::new(
                Code::Config,
                lines.join("\n"),
                "mend these lines and run `stage topology check` again",
            )
            .at(file),
            Self::Daemon { message, exit } => Failure::new(
                if *exit == exit::CONFIG {
                    Code::Config
                } else {
                    Code::Internal
                },
                message.clone(),
                "",
            ),
            Self::Output(error) => Failure::new(Code::Io, format!("cannot write the output: {error}"), ""),
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        Self::Failure(Box::new(failure))
    }
}
