//! Where a job's payload comes from on its source's node: files, or a pipe.

use stage_transfer::outbound::Serving;
use stage_transfer::pipe::Pipe;
use stage_transfer::source::{Source, SourceCounters};

/// A source at work.
#[derive(Debug)]
pub(crate) enum Origin {
    /// Reads files.
    Files(Source),
    /// Reads a pipe.
    Stream(Pipe),
}

impl Origin {
    /// How it is served.
    pub(crate) fn serving(&self) -> &Serving {
        match self {
            Self::Files(source) => source.serving(),
            Self::Stream(pipe) => pipe.serving(),
        }
    }

    /// What it has done so far.
    pub(crate) fn counters(&self) -> SourceCounters {
        match self {
            Self::Files(source) => source.counters(),
            Self::Stream(pipe) => pipe.counters(),
        }
    }

    /// Stops it, and waits until no thread is left.
    pub(crate) async fn stop(&self) {
        match self {
            Self::Files(source) => source.stop().await,
            Self::Stream(pipe) => pipe.stop().await,
        }
    }
}
