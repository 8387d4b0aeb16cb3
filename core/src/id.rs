//! Names and numbers that tell one thing from another. Each is a type of its own, parsed once at the
//! border, so that a job can never be taken for a hop.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Why a text is not a name or an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// The text breaks the rule for names.
    #[error(
        "{text:?} is not a {what} name: use 1 to {most} letters, digits, '-', '_' or '.', beginning with a letter or digit"
    )]
    Name {
        /// Which kind of name was wanted.
        what: &'static str,
        /// The text as it came.
        text: String,
        /// Letters it may have.
        most: usize,
    },
    /// The text is not an id in hexadecimal UUID form.
    #[error("{text:?} is not a {what} id")]
    Id {
        /// Which kind of id was wanted.
        what: &'static str,
        /// The text as it came.
        text: String,
    },
}

fn is_name(text: &str, most: usize) -> bool {
    let bytes = text.as_bytes();
    (1..=most).contains(&bytes.len())
        && bytes[0].is_ascii_alphanumeric()
        && bytes
            .iter()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

macro_rules! name {
    ($(#[$doc:meta])* $type:ident, $what:literal, $most:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $type(Arc<str>);

        impl $type {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl FromStr for $type {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                if is_name(text, $most) {
                    Ok(Self(text.into()))
                } else {
                    Err(IdError::Name { what: $what, text: text.to_owned(), most: $most })
                }
            }
        }
        impl TryFrom<String> for $type {
            type Error = IdError;
            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }
        impl From<$type> for String {
            fn from(name: $type) -> Self {
                name.0.as_ref().to_owned()
            }
        }
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }
        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

name!(
    /// A machine of the topology, by its name there.
    NodeName,
    "node",
    63
);
name!(
    /// A switch of the topology.
    SwitchName,
    "switch",
    63
);
name!(
    /// A directory that agents may write in, by a name that means the same on every node.
    RootName,
    "root",
    63
);
name!(
    /// A cluster, as `[cluster]` of its topology names it.
    ClusterName,
    "cluster",
    63
);
name!(
    /// A congestion control of the kernel, by the name that sockets ask for (`TCP_CONGESTION`); the kernel's own limit is
    /// `TCP_CA_NAME_MAX`, 16 with its final zero.
    CongestionControl,
    "congestion control",
    15
);

macro_rules! uuid_id {
    ($(#[$doc:meta])* $type:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $type(Uuid);

        impl $type {
            /// An id from 16 bytes that the caller drew at random.
            pub fn from_random(bytes: [u8; 16]) -> Self {
                Self(uuid::Builder::from_random_bytes(bytes).into_uuid())
            }

            /// The 16 bytes of the id.
            pub fn as_bytes(&self) -> &[u8; 16] {
                self.0.as_bytes()
            }

            /// The id of these 16 bytes, as [`Self::as_bytes`] gave them.
            pub fn from_bytes(bytes: [u8; 16]) -> Self {
                Self(Uuid::from_bytes(bytes))
            }
        }
        impl FromStr for $type {
            type Err = IdError;
            fn from_str(text: &str) -> Result<Self, IdError> {
                Uuid::try_parse(text)
                    .map(Self)
                    .map_err(|_| IdError::Id { what: $what, text: text.to_owned() })
            }
        }
        impl TryFrom<String> for $type {
            type Error = IdError;
            fn try_from(text: String) -> Result<Self, IdError> {
                text.parse()
            }
        }
        impl From<$type> for String {
            fn from(id: $type) -> Self {
                id.to_string()
            }
        }
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

uuid_id!(
    /// One push. Made by the client, so that a submit sent twice is one job.
    JobId,
    "job"
);
uuid_id!(
    /// One installation of an agent, kept in its state directory: tells a node that came back from another
    /// one under its name.
    InstanceId,
    "instance"
);
uuid_id!(
    /// One cluster, made at the coordinator's first start and kept in its store.
    ClusterId,
    "cluster"
);
uuid_id!(
    /// One attempt of a child to receive from a parent: ties control connection and data streams together.
    HopId,
    "hop"
);

macro_rules! counter {
    ($(#[$doc:meta])* $type:ident) => {
        $(#[$doc])*
        #[derive(
            Debug, Default, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $type(pub u64);

        impl $type {
            /// The one after this.
            #[must_use]
            pub fn next(self) -> Self {
                Self(self.0 + 1)
            }
        }
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

counter!(
    /// The coordinator's incarnation: one more at each start, so that an older one's orders have no effect.
    Epoch
);
counter!(
    /// A question to one agent: tells the answers of one life of the coordinator apart.
    AskId
);
counter!(
    /// The job's n-th order to its nodes: of two orders of one epoch the higher counts.
    PlanVersion
);

/// The secret of one job: whoever holds it is a member and may ask other members for chunks.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobKey(pub [u8; 32]);

impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey(secret)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_keep_to_the_rule() {
        for good in ["n1", "compute-001", "a.b_c", "7"] {
            assert_eq!(good.parse::<NodeName>().unwrap().as_str(), good);
        }
        for bad in ["", "-x", "a b", "n\n1", "ä", "a/b", &"x".repeat(64)] {
            assert!(bad.parse::<NodeName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn ids_survive_their_text() {
        let id = JobId::from_random([7; 16]);
        assert_eq!(id.to_string().parse::<JobId>().unwrap(), id);
        assert!("7".parse::<JobId>().is_err());
    }

    #[test]
    fn a_key_never_shows_itself() {
        assert_eq!(format!("{:?}", JobKey([1; 32])), "JobKey(secret)");
    }
}
