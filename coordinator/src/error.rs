//! Why a coordinator does not start, or does not go on.

use std::io;
use std::path::PathBuf;

use stage_core::id::Epoch;
use stage_core::topology::TopologyError;
use stage_net::{Identity, NetError};

/// Why a coordinator does not start, or does not go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The topology's file cannot be read.
    #[error("{path}: cannot be read: {source}")]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The topology is wrong.
    #[error("the topology has {} error{}", .0.len(), if .0.len() == 1 { "" } else { "s" })]
    Topology(Vec<TopologyError>),
    /// The certificate is not a coordinator's.
    #[error(
        "the certificate is for {0}, not for a coordinator: use one for coordinator.{cluster}.stage",
        cluster = .0.cluster
    )]
    Certificate(Identity),
    /// The state directory cannot be used as it is. It is never emptied or made anew.
    #[error("state directory {path}: {why}; {hint}")]
    State {
        /// Which directory or file.
        path: PathBuf,
        /// What is wrong.
        why: String,
        /// What to do.
        hint: &'static str,
    },
    /// The database failed while at work.
    #[error("the coordinator's store failed: {0}")]
    Store(#[from] rusqlite::Error),
    /// Listening failed.
    #[error(transparent)]
    Net(#[from] NetError),
    /// Serving failed.
    #[error("serving failed: {0}")]
    Serve(tonic::transport::Error),
    /// A newer coordinator of this cluster exists: an agent follows its epoch.
    #[error(
        "an agent follows epoch {theirs} of this cluster and this coordinator has {ours}: a newer coordinator runs, or this state directory is an old copy"
    )]
    Fenced {
        /// Ours.
        ours: Epoch,
        /// The one that the agent has seen.
        theirs: Epoch,
    },
    /// A fault of the coordinator itself.
    #[error("internal fault: {0}")]
    Internal(String),
}

impl Error {
    /// What the process should end with: 78 for a bad configuration or state, 75 when fenced, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Read { .. } | Self::Topology(_) | Self::Certificate(_) | Self::State { .. } => 78,
            Self::Net(
                NetError::File { .. } | NetError::Identity(_) | NetError::Insecure(_) | NetError::Tls(_),
            ) => 78,
            Self::Fenced { .. } => 75,
            Self::Net(_) | Self::Store(_) | Self::Serve(_) | Self::Internal(_) => 1,
        }
    }

    /// Whether starting again may help without anybody's doing.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::Store(_) | Self::Serve(_) | Self::Internal(_) | Self::Net(NetError::Listen { .. })
        )
    }
}
