//! Why the data plane could not do something. What a person must act on is a [`Failure`]; this is what it is made of.

use std::io;

use stage_core::failure::{Code, Failure};
use stage_core::id::NodeName;
use stage_net::NetError;

/// What can go wrong between two nodes.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// No connection, or no listener.
    #[error(transparent)]
    Net(#[from] NetError),
    /// A connection broke.
    #[error("{}", broke(.0))]
    Io(#[from] io::Error),
    /// The peer said nothing within the deadline.
    #[error("no answer within {0} s")]
    Silent(u64),
    /// The peer's bytes are none of the protocol's.
    #[error("peer does not keep to the protocol: {0}")]
    Protocol(&'static str),
    /// The peers have no protocol version in common.
    #[error("data protocol {theirs_min} to {theirs_max} there, {ours_min} to {ours_max} here")]
    Version {
        /// The peer's lowest.
        theirs_min: u16,
        /// The peer's highest.
        theirs_max: u16,
        /// Our lowest.
        ours_min: u16,
        /// Our highest.
        ours_max: u16,
    },
    /// The peer does not know the job yet.
    #[error("the job is not known there yet")]
    Later,
    /// Every place is taken.
    #[error("every place there is taken")]
    Busy,
    /// The peer refused, and said why; or it failed its own proof.
    #[error("{0}")]
    Refused(Failure),
    /// The plane was stopped.
    #[error("stopped")]
    Stopped,
}

/// How a connection ended, for people: who was killed says no good-bye.
fn broke(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "it closed the connection (it ended, or was killed)".to_owned(),
        _ => format!("connection broke: {error}"),
    }
}

impl TransferError {
    /// Whether the same act may succeed later without anyone changing anything.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Net(error) => error.is_retryable(),
            Self::Io(_) | Self::Silent(_) | Self::Later | Self::Busy => true,
            Self::Protocol(_) | Self::Version { .. } | Self::Refused(_) | Self::Stopped => false,
        }
    }

    /// The form for people, about `peer`.
    pub fn into_failure(self, peer: &NodeName) -> Failure {
        let message = format!("{peer}: {self}");
        match self {
            Self::Refused(failure) => failure,
            Self::Version { .. } => Failure::new(
                Code::ProtocolVersion,
                message,
                "bring both nodes to releases that are at most one apart",
            )
            .on(peer),
            Self::Protocol(_) => Failure::new(
                Code::Denied,
                message,
                "check that the address is that of a stage agent and that both sides use TLS, or neither",
            )
            .on(peer),
            Self::Stopped => Failure::new(Code::Cancelled, message, "").on(peer),
            Self::Net(NetError::Handshake { .. }) => Failure::new(
                Code::Denied,
                message,
                "check that both certificates are of the cluster's CA and bear the nodes' names",
            )
            .on(peer),
            Self::Net(_) | Self::Io(_) | Self::Silent(_) | Self::Later | Self::Busy => Failure::new(
                Code::Unreachable,
                message,
                "it is asked again by itself; check the node and the network if it lasts",
            )
            .on(peer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_peer_is_told_in_words() {
        // rustls says much more, and where its manual explains it.
        let error = io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "peer closed connection without sending TLS close_notify",
        );
        let said = TransferError::from(error).to_string();
        assert_eq!(said, "it closed the connection (it ended, or was killed)");
        let error = io::Error::from(io::ErrorKind::ConnectionReset);
        assert_eq!(
            TransferError::from(error).to_string(),
            "connection broke: connection reset"
        );
    }
}
