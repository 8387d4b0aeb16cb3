//! Questions beside orders: what a node is asked now, and answers now or not at all.
//!
//! An order says what a node is to be and is repeated until it is so; a question is asked once, of an agent that is
//! connected, and nobody remembers it. Its answer may come in parts, the last of which says so; an agent that works on
//! one for long shows that by saying [`Said::Progress`]. A new kind of question is a variant of [`Question`], one of
//! [`Said`], a row in the conversions of `stage-proto` and an arm in the agent's `asked`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::assignment::Place;
use crate::bench::{Depth, HostReport, LinkProbe, LinkReading, NodeReading};
use crate::digest::{FileDigest, RootDigest};
use crate::failure::Failure;
use crate::id::JobId;
use crate::units::ByteCount;

/// What a node is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Question {
    /// Which copies of stage's lie there. Answered by [`Said::Copies`], in parts.
    List(Wanted),
    /// Remove one. Answered by [`Said::Removed`].
    Remove(Removal),
    /// What the host says of itself. Answered by [`Said::Host`].
    Host,
    /// Measure the node. Answered by [`Said::Node`].
    ProbeNode(Depth),
    /// Measure the way to another node, or be measured. Who measures answers by [`Said::Link`]; who is measured says
    /// that it is ready ([`Said::Progress`]) until nobody waits for it.
    ProbeLink(LinkProbe),
}

impl Question {
    /// How long a node may say nothing before it counts as one that does not answer.
    pub fn patience(&self) -> Duration {
        match self {
            Self::List(wanted) if !wanted.verify => Duration::from_secs(2),
            // Whoever hashes says how far it is every second, but a disk may be busy; so may one that frees terabytes.
            Self::List(_) | Self::Remove(_) | Self::ProbeNode(_) | Self::ProbeLink(_) => {
                Duration::from_secs(10)
            }
            Self::Host => Duration::from_secs(5),
        }
    }
}

/// Which copies are listed.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Only these: an absolute path (the copy or a directory above it), else the path's last components.
    pub path: Option<Vec<u8>>,
    /// Only those whose SHA-256 or root begins so.
    pub digest: Option<DigestPrefix>,
    /// Their content is hashed again.
    pub verify: bool,
}

impl Wanted {
    /// Whether a copy at this absolute path is wanted, as far as the path tells.
    pub fn is_at(&self, path: &[u8]) -> bool {
        let Some(wanted) = &self.path else { return true };
        let wanted = wanted.strip_suffix(b"/").unwrap_or(wanted);
        if wanted.first() == Some(&b'/') || wanted.is_empty() {
            path.strip_prefix(wanted)
                .is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
        } else {
            path.strip_suffix(wanted)
                .is_some_and(|rest| rest.last() == Some(&b'/'))
        }
    }

    /// Whether a copy with these digests is wanted. One whose SHA-256 is not known may be.
    pub fn may_be(&self, sha256: Option<FileDigest>, root: RootDigest) -> bool {
        match &self.digest {
            None => true,
            Some(digest) => digest.begins(&root.0) || sha256.is_none_or(|sha256| digest.begins(&sha256.0)),
        }
    }

    /// Whether a copy with these digests is wanted, now that all is known of them that ever will be.
    pub fn is(&self, sha256: Option<FileDigest>, root: RootDigest) -> bool {
        match &self.digest {
            None => true,
            Some(digest) => digest.begins(&root.0) || sha256.is_some_and(|sha256| digest.begins(&sha256.0)),
        }
    }
}

/// The first digits of a digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DigestPrefix(String);

impl DigestPrefix {
    /// The digits, in lower case.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether the digest begins with them.
    pub fn begins(&self, digest: &[u8]) -> bool {
        let digits = digest
            .iter()
            .flat_map(|byte| [byte >> 4, byte & 15])
            .map(|digit| char::from_digit(digit.into(), 16).unwrap_or_default());
        self.0.len() <= 2 * digest.len() && self.0.chars().zip(digits).all(|(ours, theirs)| ours == theirs)
    }
}

impl FromStr for DigestPrefix {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if (4..=64).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            Ok(Self(text.to_ascii_lowercase()))
        } else {
            Err("write the first 4 to 64 hexadecimal digits of a SHA-256 or of a root".to_owned())
        }
    }
}

impl fmt::Display for DigestPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Which copy is removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removal {
    /// Its directory.
    pub place: Place,
    /// Its name.
    pub name: Vec<u8>,
    /// Also if it was changed since, or had stood there before stage came.
    pub force: bool,
}

/// A part of an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum Said {
    /// Some of the copies.
    Copies(Vec<Copy>),
    /// What became of a removal.
    Removed(Removed),
    /// What the host says of itself.
    Host(Box<HostReport>),
    /// What was measured on the node.
    Node(Box<NodeReading>),
    /// What was measured between two.
    Link(Box<LinkReading>),
    /// How far the work on the answer is.
    Progress(Progress),
    /// There is no answer, or no more of it.
    Failed(Failure),
}

/// A copy in a node's index: what stage published there, and what of it is there now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    /// Its absolute path, as text fit for a terminal.
    pub path: String,
    /// The same by its root's name (`ROOT:DIR/NAME`), which is the same on every node; empty if the agent does not say.
    pub place: String,
    /// What it is.
    pub kind: Kind,
    /// It was laid out from a tar, whose digests these are.
    pub unpacked: bool,
    /// The file's SHA-256, if it is known yet.
    pub sha256: Option<FileDigest>,
    /// The payload's root.
    pub root: RootDigest,
    /// The root of what lies there: the payload's, but that of the tree where that came as a tar. What is the same has the
    /// same, however it came.
    pub content: RootDigest,
    /// Apparent size.
    pub bytes: ByteCount,
    /// When it was published: seconds since 1970.
    pub published: u64,
    /// By which job.
    pub job: JobId,
    /// It stood there before, and was found to be the payload.
    pub found: bool,
    /// What is there now.
    pub state: State,
    /// More of the state, for people; may be empty.
    pub detail: String,
}

/// What a copy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory with all that is in it.
    Tree,
}

/// What lies where a copy was published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// The same file, untouched; after a verification also every byte of it.
    Ok,
    /// Another file, or one that was touched since: nobody knows its content.
    Changed,
    /// Nothing.
    Missing,
    /// Its content is not what was published.
    Damaged,
    /// It cannot be looked at.
    Unreadable,
}

macro_rules! words {
    ($type:ident, $($variant:ident = $word:literal),+) => {
        impl $type {
            /// The word for people, scripts and the wire.
            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$variant => $word),+
                }
            }
        }
        impl FromStr for $type {
            type Err = String;
            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($word => Ok(Self::$variant),)+
                    _ => Err(format!("{text:?} is not known")),
                }
            }
        }
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }
    };
}
words!(Kind, File = "file", Tree = "tree");
words!(
    State,
    Ok = "ok",
    Changed = "changed",
    Missing = "missing",
    Damaged = "damaged",
    Unreadable = "unreadable"
);

/// What became of a removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removed {
    /// The path, as text fit for a terminal.
    pub path: String,
    /// It is gone now; `false`: nothing was there.
    pub was_there: bool,
    /// Apparent size of what is gone.
    pub bytes: ByteCount,
}

/// How far the work on an answer is.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Done, in what the question counts in (bytes).
    pub done: u64,
    /// Of so much; 0: not known.
    pub total: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_wanted_whole_by_its_end_or_by_a_directory_above() {
        let wanted = |path: &str| Wanted {
            path: Some(path.into()),
            ..Wanted::default()
        };
        for yes in ["/scratch/db/x", "/scratch/db", "/scratch/", "/", "x", "db/x"] {
            assert!(wanted(yes).is_at(b"/scratch/db/x"), "{yes}");
        }
        for no in ["/scratch/d", "/scratch/db/x/y", "b/x", "db", "y", "x/"] {
            assert_eq!(wanted(no).is_at(b"/scratch/db/x"), no == "x/", "{no}");
        }
        assert!(Wanted::default().is_at(b"/any"));
    }

    #[test]
    fn digests_are_found_by_their_first_digits() {
        let (sha256, root) = (FileDigest([0xab; 32]), RootDigest([0xcd; 32]));
        let wanted = |text: &str| Wanted {
            digest: Some(text.parse().unwrap()),
            ..Wanted::default()
        };
        for (text, is) in [("ABAB", true), ("ababa", true), ("cdcdc", true), ("abcd", false)] {
            assert_eq!(wanted(text).may_be(Some(sha256), root), is, "{text}");
        }
        assert!(wanted("abcd").may_be(None, root), "its SHA-256 may be that");
        assert!(!wanted("abcd").is(None, root));
        assert!(wanted("cdcd").is(None, root) && wanted("abab").is(Some(sha256), root));
        assert!(wanted(&sha256.to_string()).may_be(Some(sha256), root));
        for bad in ["", "abc", "wxyz", &"a".repeat(65)] {
            assert!(bad.parse::<DigestPrefix>().is_err(), "{bad}");
        }
    }

    #[test]
    fn states_survive_their_words() {
        for state in [
            State::Ok,
            State::Changed,
            State::Missing,
            State::Damaged,
            State::Unreadable,
        ] {
            assert_eq!(state.as_str().parse(), Ok(state));
        }
        assert!("fine".parse::<State>().is_err());
    }
}
