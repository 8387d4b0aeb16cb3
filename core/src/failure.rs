//! The one form in which a cause travels to a person: what, where, why, and what to do next.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::id::NodeName;
use crate::units::ByteCount;

/// What went wrong, as a word that scripts may match on. `as_str` is the word in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// A flag, name or value of the request is wrong.
    Usage,
    /// A target, node or group is not in the topology.
    UnknownTarget,
    /// No node could be told to be the source.
    NoSource,
    /// The coordinator did not answer.
    NoCoordinator,
    /// The agent of this host did not answer on its socket.
    NoAgent,
    /// The source path does not exist.
    SourceMissing,
    /// The source cannot be read.
    SourceUnreadable,
    /// The source is not a regular file.
    SourceKind,
    /// The source changed while it was sent.
    SourceChanged,
    /// The source's node went away and did not come back.
    SourceLost,
    /// Reading the source failed.
    SourceIo,
    /// The node's agent is not connected, or its lease ended.
    Away,
    /// The administrator drained the node.
    Drained,
    /// The root is missing or cannot be written.
    RootUnusable,
    /// The destination lies outside every root, or its name is not allowed.
    OutsideRoot,
    /// A name is longer than the file system takes.
    NameTooLong,
    /// Too little space, or too few inodes.
    NoSpace,
    /// Over quota.
    Quota,
    /// The file system is read-only.
    ReadOnly,
    /// Other content stands at the target.
    Exists,
    /// The path is of the wrong kind: a directory where a file should be, or the other way round.
    WrongKind,
    /// A chunk came with bytes that do not fit its digest.
    Corrupt,
    /// The copy's digest is not the expected one.
    Unexpected,
    /// Nothing of that name is published on this node.
    NotHere,
    /// Writing or reading the target failed.
    Io,
    /// It is at work and left in peace.
    Busy,
    /// A peer could not be reached, or said nothing in time.
    Unreachable,
    /// A peer is not who it should be, or may not do what it asked.
    Denied,
    /// Another agent holds the name.
    NameTaken,
    /// The peer belongs to another cluster.
    ForeignCluster,
    /// The peer speaks no protocol version that we speak.
    ProtocolVersion,
    /// A lower epoch or plan version than one already seen.
    Fenced,
    /// A newer push took the path over.
    Superseded,
    /// Someone cancelled it.
    Cancelled,
    /// Ctrl-C at the command that watched; the job itself goes on.
    Interrupted,
    /// No job of that id.
    UnknownJob,
    /// The configuration or the topology is wrong.
    Config,
    /// The state directory is damaged or not what it should be.
    State,
    /// A fault of stage itself.
    Internal,
}

impl Code {
    /// The word for JSON and scripts.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Usage => "usage",
            Self::UnknownTarget => "unknown_target",
            Self::NoSource => "no_source",
            Self::NoCoordinator => "no_coordinator",
            Self::NoAgent => "no_agent",
            Self::SourceMissing => "source_missing",
            Self::SourceUnreadable => "source_unreadable",
            Self::SourceKind => "source_kind",
            Self::SourceChanged => "source_changed",
            Self::SourceLost => "source_lost",
            Self::SourceIo => "source_io",
            Self::Away => "away",
            Self::Drained => "drained",
            Self::RootUnusable => "root_unusable",
            Self::OutsideRoot => "outside_root",
            Self::NameTooLong => "name_too_long",
            Self::NoSpace => "no_space",
            Self::Quota => "quota",
            Self::ReadOnly => "read_only",
            Self::Exists => "exists",
            Self::WrongKind => "wrong_kind",
            Self::Corrupt => "corrupt",
            Self::Unexpected => "unexpected",
            Self::NotHere => "not_here",
            Self::Io => "io",
            Self::Busy => "busy",
            Self::Unreachable => "unreachable",
            Self::Denied => "denied",
            Self::NameTaken => "name_taken",
            Self::ForeignCluster => "foreign_cluster",
            Self::ProtocolVersion => "protocol_version",
            Self::Fenced => "fenced",
            Self::Superseded => "superseded",
            Self::Cancelled => "cancelled",
            Self::Interrupted => "interrupted",
            Self::UnknownJob => "unknown_job",
            Self::Config => "config",
            Self::State => "state",
            Self::Internal => "internal",
        }
    }

    /// Every code, for conversions and tests.
    pub const ALL: [Self; 39] = [
        Self::Usage,
        Self::UnknownTarget,
        Self::NoSource,
        Self::NoCoordinator,
        Self::NoAgent,
        Self::SourceMissing,
        Self::SourceUnreadable,
        Self::SourceKind,
        Self::SourceChanged,
        Self::SourceLost,
        Self::SourceIo,
        Self::Away,
        Self::Drained,
        Self::RootUnusable,
        Self::OutsideRoot,
        Self::NameTooLong,
        Self::NoSpace,
        Self::Quota,
        Self::ReadOnly,
        Self::Exists,
        Self::WrongKind,
        Self::Corrupt,
        Self::Unexpected,
        Self::NotHere,
        Self::Busy,
        Self::Io,
        Self::Unreachable,
        Self::Denied,
        Self::NameTaken,
        Self::ForeignCluster,
        Self::ProtocolVersion,
        Self::Fenced,
        Self::Superseded,
        Self::Cancelled,
        Self::Interrupted,
        Self::UnknownJob,
        Self::Config,
        Self::State,
        Self::Internal,
    ];

    /// The code of a word, [`Code::Internal`] for one that this version does not know.
    pub fn from_word(word: &str) -> Self {
        Self::ALL
            .into_iter()
            .find(|code| code.as_str() == word)
            .unwrap_or(Self::Internal)
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A cause, with all that a person needs to act on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// What, for scripts.
    pub code: Code,
    /// Which node, if it happened on one.
    pub node: Option<NodeName>,
    /// Which path, as text fit for a terminal.
    pub path: Option<String>,
    /// What happened and why: a lower-case fragment.
    pub message: String,
    /// What to do next.
    pub hint: String,
    /// For [`Code::NoSpace`]: how much is missing. (Boxed, because most failures have other causes.)
    pub space: Option<Box<Shortage>>,
}

/// Too little space, in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shortage {
    /// How much was wanted beyond what the job has there already.
    pub needs: ByteCount,
    /// How much of that is missing.
    pub short_by: ByteCount,
}

impl Failure {
    /// A failure without place.
    pub fn new(code: Code, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self {
            code,
            node: None,
            path: None,
            message: message.into(),
            hint: hint.into(),
            space: None,
        }
    }

    /// The same, on this node.
    #[must_use]
    pub fn on(mut self, node: &NodeName) -> Self {
        self.node = Some(node.clone());
        self
    }

    /// The same, at this path.
    #[must_use]
    pub fn at(mut self, path: impl Into<String>) -> Self {
        self.path = Some(path.into());
        self
    }
}

/// A path or file name as text fit for a terminal, a log line and JSON: what could move a cursor, break a line or turn
/// the reading order round is written as `\xNN`, as are bytes that are not UTF-8; a backslash is doubled, so that no two
/// paths look the same.
pub fn show_path(path: &[u8]) -> String {
    let mut out = String::with_capacity(path.len());
    let escape = |out: &mut String, bytes: &[u8]| {
        for byte in bytes {
            // Writing to a string cannot fail.
            let _ = fmt::Write::write_fmt(out, format_args!("\\x{byte:02x}"));
        }
    };
    for piece in path.utf8_chunks() {
        for c in piece.valid().chars() {
            let hidden = c.is_control()
                || matches!(c, '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
            match c {
                '\\' => out.push_str("\\\\"),
                c if hidden => escape(&mut out, c.encode_utf8(&mut [0; 4]).as_bytes()),
                c => out.push(c),
            }
        }
        escape(&mut out, piece.invalid());
    }
    out
}

/// The bytes of which [`show_path`] made this text; `None` if it made it of none.
pub fn read_shown(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        rest = match (first, after) {
            (b'\\', [b'\\', after @ ..]) => {
                bytes.push(b'\\');
                after
            }
            (b'\\', [b'x', high, low, after @ ..]) => {
                let digit = |byte: &u8| char::from(*byte).to_digit(16);
                bytes.push(u8::try_from(digit(high)? * 16 + digit(low)?).ok()?);
                after
            }
            (b'\\', _) => return None,
            (other, after) => {
                bytes.push(*other);
                after
            }
        };
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shown_path_cannot_play_with_the_terminal() {
        assert_eq!(show_path("/data/Größe x.db".as_bytes()), "/data/Größe x.db");
        assert_eq!(show_path(b"a\nb\x1b[2J\xff"), "a\\x0ab\\x1b[2J\\xff");
        assert_eq!(show_path("\u{202e}gnp".as_bytes()), "\\xe2\\x80\\xaegnp");
        assert_ne!(show_path(b"\\x0a"), show_path(b"\n"));
        for bytes in [&b"/a b/\xff\n\\x0a\\"[..], "/Größe\u{202e}".as_bytes(), b""] {
            assert_eq!(read_shown(&show_path(bytes)).unwrap(), bytes);
        }
        assert_eq!(read_shown("a\\"), None);
        assert_eq!(read_shown("a\\xg0"), None);
    }

    #[test]
    fn every_code_has_its_own_word() {
        for code in Code::ALL {
            assert_eq!(Code::from_word(code.as_str()), code);
        }
        assert_eq!(Code::from_word("from a newer version"), Code::Internal);
    }
}
