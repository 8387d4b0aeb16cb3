//! Why an agent ends.

use std::io;
use std::path::PathBuf;

use stage_net::NetError;
use stage_transfer::error::TransferError;

/// Why an agent ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration cannot work.
    #[error("{0}")]
    Config(String),
    /// The state directory cannot be used.
    #[error("state directory {path}: {why}")]
    State {
        /// The file or directory in question.
        path: PathBuf,
        /// What is wrong with it and what to do.
        why: String,
    },
    /// The socket for users of this host could not be opened.
    #[error("{0}; give each agent of a host a --socket of its own")]
    Socket(#[from] NetError),
    /// The data port could not be opened.
    #[error(transparent)]
    Transfer(#[from] TransferError),
}

impl Error {
    pub(crate) fn state(path: impl Into<PathBuf>, error: &io::Error) -> Self {
        Self::State {
            path: path.into(),
            why: error.to_string(),
        }
    }

    /// The exit status: 78 (EX_CONFIG) for all, since each needs an administrator.
    pub fn exit_code(&self) -> u8 {
        78
    }

    /// Whether the same start may succeed later without a change.
    pub fn is_retryable(&self) -> bool {
        false
    }
}
