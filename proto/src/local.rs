//! What the command line and the agent of the same host say to each other, over `stage_net::local`. One [`Ask`], one
//! [`Answer`], and the connection is over; only a stream's goes on as long as its input does.

use serde::{Deserialize, Serialize};
use stage_core::assignment::Place;
use stage_core::failure::Failure;
use stage_core::id::{JobId, NodeName, RootName};
use stage_core::units::ByteCount;

/// What a user of the host asks of its agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// What is published here under a name.
    Where {
        /// In which directory.
        place: Place,
        /// The payload's name.
        name: Vec<u8>,
    },
    /// Takes the descriptor that comes along as the input of a push under this id, which the coordinator is asked for
    /// afterwards. The connection stays: who leaves before [`Ask::Seen`] has sent nothing.
    Stream {
        /// The job that it is for.
        job: JobId,
        /// Permission bits of the copies.
        mode: u32,
    },
    /// To [`Answer::Ended`]: we live, and have seen it.
    Seen,
}

/// The agent's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// To [`Ask::Where`].
    Where(Whereabouts),
    /// To [`Ask::Stream`]: it is in good hands; push it from this node.
    Taken {
        /// The node.
        node: NodeName,
    },
    /// The input of a stream has ended.
    Ended {
        /// How long it was.
        bytes: ByteCount,
    },
    /// It will not, or cannot.
    Refused(Failure),
}

/// A name on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Whereabouts {
    /// The node.
    pub node: NodeName,
    /// Its roots by name and path, the one that counts unless said first.
    pub roots: Vec<(RootName, Vec<u8>)>,
    /// The name's absolute path, whether anything is there or not.
    pub path: Vec<u8>,
    /// What is published under it.
    pub found: Option<Found>,
}

/// What is published under a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Found {
    /// A file, under its name.
    File {
        /// How long it is.
        size: ByteCount,
    },
    /// A tree, of which a name leads to one generation after another.
    Tree {
        /// The absolute path of the one that it leads to now.
        generation: Vec<u8>,
    },
}
