//! A payload in a few words: what orders, plans and views need of it, without its manifest.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::chunk::{Layout, UNKNOWN};
use crate::digest::{Expected, ManifestDigest};
use crate::manifest::{Entry, Kind, Manifest, ManifestError, digest_of};
use crate::units::ByteCount;

/// A manifest that is no longer rides in orders; a longer one is the payload's head and comes as chunks.
pub const INLINE_MANIFEST: usize = 4 << 10;
/// What file systems usually give space in.
const FS_BLOCK: u64 = 4 << 10;
/// What a stream is planned as: long enough that its start does not matter.
const STREAM_GUESS: ByteCount = ByteCount(64 << 30);
/// A payload has at most so many units, so that their names fit into a message.
pub const MAX_UNITS: usize = 256;

/// `--expect` has at most so many lines, and [`MAX_EXPECT_BYTES`] of paths, so that they fit into a message.
pub const MAX_EXPECT: usize = 20_000;
/// Bytes of all the paths of `--expect` together.
pub const MAX_EXPECT_BYTES: usize = 2 << 20;

/// A payload without its manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Payload {
    /// The manifest's digest.
    pub manifest: ManifestDigest,
    /// The encoded manifest's length.
    pub manifest_len: ByteCount,
    /// The encoded manifest itself, if it is short.
    pub inline: Option<Vec<u8>>,
    /// Bytes of data, without holes.
    pub data: ByteCount,
    /// Apparent size of its files together.
    pub size: ByteCount,
    /// What it takes on disk, as blocks of 4 KiB.
    pub allocated: ByteCount,
    /// Entries of all kinds.
    pub entries: u32,
    /// What is published, each under its own name, in the order of their names.
    pub units: Vec<Unit>,
}

/// What is published by one rename.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unit {
    /// The final name.
    pub name: Vec<u8>,
    /// What it is.
    pub kind: UnitKind,
    /// Apparent size of its files together.
    pub size: ByteCount,
}

/// What a unit is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum UnitKind {
    /// A regular file, renamed to its final name.
    File,
    /// A directory, of which each generation lies beside the final name, and that is a symbolic link.
    Tree,
}

/// One PATH of a push.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourcePath {
    /// Where it is: absolute, on the source's node.
    pub path: Vec<u8>,
    /// Under which name it is published.
    pub name: Vec<u8>,
}

impl SourcePath {
    /// In place of a path: what comes through a pipe that was handed to the source's agent.
    pub const STREAM: &[u8] = b"-";

    /// Whether it comes through a pipe.
    pub fn is_stream(&self) -> bool {
        self.path == Self::STREAM
    }
}

/// What of a directory is sent, and how.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Walk {
    /// Symbolic links are followed instead of kept.
    pub follow: bool,
    /// Extended attributes and ACLs come along.
    pub xattrs: bool,
    /// Only files that one of these globs matches; empty: all.
    pub include: Vec<String>,
    /// Nothing that one of these globs matches.
    pub exclude: Vec<String>,
}

/// What a file of the payload is expected to be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expectation {
    /// Which file, as the list names it; empty for the payload's only file.
    pub path: Vec<u8>,
    /// Its digest.
    pub digest: Expected,
}

impl Payload {
    /// What a manifest says in short.
    ///
    /// # Errors
    /// It has no unit, or more than [`MAX_UNITS`].
    pub fn of(manifest: &Manifest) -> Result<Self, ManifestError> {
        let encoded = manifest.encode();
        let mut units: Vec<Unit> = Vec::new();
        let mut allocated: u64 = 0;
        for entry in &manifest.entries {
            allocated = allocated.saturating_add(allocated_by(entry));
            let size = match entry.kind {
                Kind::File { size, .. } => size.0,
                _ => 0,
            };
            match units.last_mut() {
                Some(unit) if unit.name == entry.unit() => unit.size.0 = unit.size.0.saturating_add(size),
                _ => units.push(Unit {
                    name: entry.unit().to_vec(),
                    kind: match entry.kind {
                        Kind::Dir => UnitKind::Tree,
                        _ => UnitKind::File,
                    },
                    size: ByteCount(size),
                }),
            }
        }
        if units.is_empty() {
            return Err(ManifestError("it is empty"));
        }
        if units.len() > MAX_UNITS {
            return Err(ManifestError("it has more than 256 units"));
        }
        Ok(Self {
            manifest: digest_of(&encoded),
            manifest_len: ByteCount(encoded.len() as u64),
            data: manifest.payload_size(),
            size: manifest.file_size(),
            allocated: ByteCount(allocated),
            entries: u32::try_from(manifest.entries.len()).unwrap_or(u32::MAX),
            units,
            inline: (encoded.len() <= INLINE_MANIFEST).then_some(encoded),
        })
    }

    /// What comes through a pipe: a file of this name, whose size is [`UNKNOWN`] until FINAL tells it.
    ///
    /// # Errors
    /// The name is none of a file.
    pub fn stream(name: &[u8], mode: u32, mtime: (i64, u32)) -> Result<Self, ManifestError> {
        let encoded = Manifest::single_file(name, UNKNOWN, mode, mtime).encode();
        Self::of(&Manifest::decode(&encoded)?)
    }

    /// Whether its size is told by FINAL only.
    pub fn is_stream(&self) -> bool {
        self.data == UNKNOWN
    }

    /// The manifest, from its bytes, if they are the ones that this speaks of.
    ///
    /// # Errors
    /// They are others, or malformed.
    pub fn decode(&self, encoded: &[u8]) -> Result<Manifest, ManifestError> {
        if digest_of(encoded) != self.manifest {
            return Err(ManifestError("its bytes are not those of its digest"));
        }
        let manifest = Manifest::decode(encoded)?;
        if Self::of(&manifest)? != *self {
            return Err(ManifestError("it is not what was said of it"));
        }
        Ok(manifest)
    }

    /// The manifest, if it came along.
    ///
    /// # Errors
    /// As [`Self::decode`].
    pub fn inline(&self) -> Result<Option<Manifest>, ManifestError> {
        self.inline.as_deref().map(|bytes| self.decode(bytes)).transpose()
    }

    /// Bytes of the manifest that come as chunks.
    pub fn head(&self) -> ByteCount {
        match self.inline {
            Some(_) => ByteCount(0),
            None => self.manifest_len,
        }
    }

    /// How it is cut; `None` if it is too large.
    pub fn layout(&self) -> Option<Layout> {
        (self.manifest_len <= crate::manifest::MAX_MANIFEST)
            .then(|| Layout::with_head(self.head(), self.data))?
    }

    /// Bytes that travel.
    pub fn travels(&self) -> ByteCount {
        ByteCount(self.head().0 + self.data.0)
    }

    /// How many bytes a plan is made for.
    pub fn planned(&self) -> ByteCount {
        if self.is_stream() {
            STREAM_GUESS
        } else {
            self.travels()
        }
    }

    /// Whether it is one file, and no tree.
    pub fn is_single_file(&self) -> bool {
        matches!(self.units.as_slice(), [only] if only.kind == UnitKind::File)
    }

    /// Whether two units have one name, which no directory can hold.
    pub fn has_double_names(&self) -> bool {
        let names: BTreeSet<_> = self.units.iter().map(|unit| &unit.name).collect();
        names.len() < self.units.len()
    }
}

/// What an entry takes on disk. The runs of a file share no block, or it would be one run.
pub fn allocated_by(entry: &Entry) -> u64 {
    match &entry.kind {
        Kind::Dir => FS_BLOCK,
        Kind::HardLink { .. } => 0,
        Kind::Symlink { to } if to.len() < 60 => 0,
        Kind::Symlink { .. } => FS_BLOCK,
        Kind::File { .. } => {
            let mut blocks: u64 = 0;
            entry.each_run(|run| {
                blocks += run.end.div_ceil(FS_BLOCK) - run.start / FS_BLOCK;
            });
            blocks.saturating_mul(FS_BLOCK)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::Data;

    fn entry(path: &str, kind: Kind) -> Entry {
        Entry {
            path: path.as_bytes().to_vec(),
            mode: 0o644,
            mtime: (0, 0),
            xattrs: Vec::new(),
            kind,
        }
    }

    fn file(size: u64) -> Kind {
        Kind::File {
            size: ByteCount(size),
            data: Data::Dense,
        }
    }

    #[test]
    fn units_are_told_apart() {
        let manifest = Manifest {
            entries: vec![
                entry("db", Kind::Dir),
                entry("db/a", file(1)),
                entry("db/b", file(5000)),
                entry("more", file(7)),
            ],
        };
        let payload = Payload::of(&manifest).unwrap();
        let units: Vec<_> = payload
            .units
            .iter()
            .map(|u| (u.name.as_slice(), u.kind, u.size.0))
            .collect();
        assert_eq!(
            units,
            [
                (b"db".as_slice(), UnitKind::Tree, 5001),
                (b"more", UnitKind::File, 7)
            ]
        );
        assert_eq!(payload.allocated, ByteCount(5 * 4096));
        assert_eq!(payload.inline().unwrap().unwrap(), manifest);
        assert_eq!(payload.head(), ByteCount(0));
    }

    #[test]
    fn a_long_manifest_is_the_head() {
        let mut entries = vec![entry("db", Kind::Dir)];
        entries.extend((0..4000).map(|at| entry(&format!("db/{at:04}"), file(1))));
        let manifest = Manifest { entries };
        let payload = Payload::of(&manifest).unwrap();
        assert_eq!(payload.inline, None);
        assert_eq!(payload.layout().unwrap().head_count(), 1);
        assert_eq!(payload.layout().unwrap().count(), 2);
        assert_eq!(payload.decode(&manifest.encode()).unwrap(), manifest);
        let other = Payload {
            entries: 5,
            ..payload.clone()
        };
        assert!(other.decode(&manifest.encode()).is_err());
        assert!(payload.decode(b"something else").is_err());
    }

    #[test]
    fn a_stream_has_no_size_yet() {
        let payload = Payload::stream(b"refdb.tar", 0o100_644, (7, 0)).unwrap();
        assert!(payload.is_stream() && payload.layout().unwrap().is_open());
        assert_eq!(payload.inline().unwrap().unwrap().entries[0].mode, 0o644);
        assert!(Payload::stream(b"a/b", 0o644, (0, 0)).is_err());
        assert!(Payload::stream(b"..", 0o644, (0, 0)).is_err());
    }

    #[test]
    fn nothing_is_no_payload() {
        assert!(Payload::of(&Manifest { entries: vec![] }).is_err());
    }
}
