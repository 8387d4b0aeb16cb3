//! What a payload is made of: files, directories and links, below the names under which they are published.
//!
//! A manifest travels and is digested as bytes of one encoding ([`Manifest::encode`]), so that all nodes agree on its
//! digest; it is bounded before it is decoded, and what is decoded is a tree that can be made: every entry has its
//! directory before it, no name leads out, no link points forward.

mod pieces;
mod wire;

use std::cmp::Ordering;
use std::ops::Range;

use crate::digest::ManifestDigest;
use crate::units::ByteCount;

pub use pieces::Piece;

/// The longest manifest, in bytes: some ten million entries.
pub const MAX_MANIFEST: ByteCount = ByteCount(256 << 20);
/// The longest path of an entry, in bytes: what Linux takes.
pub const MAX_PATH: usize = 4095;
/// The longest name, in bytes.
pub const MAX_NAME: usize = 255;

/// The payload's entries, in the order of [`path_order`]: each directory before what it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// The entries.
    pub entries: Vec<Entry>,
}

/// One entry of a payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its path as bytes; the first component is the name under which its unit is published.
    pub path: Vec<u8>,
    /// Permission bits, 0o777 at most: setuid, setgid and sticky are never made.
    pub mode: u32,
    /// Modification time: whole seconds since 1970, and nanoseconds.
    pub mtime: (i64, u32),
    /// Extended attributes by name, ascending; only `user.*` and the ACLs.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// What it is.
    pub kind: Kind,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A directory.
    Dir,
    /// A regular file.
    File {
        /// Apparent size.
        size: ByteCount,
        /// Where its data is.
        data: Data,
    },
    /// A symbolic link, kept as it is.
    Symlink {
        /// What it says.
        to: Vec<u8>,
    },
    /// Another name of a file.
    HardLink {
        /// The entry of that file, an earlier one of the same unit.
        to: u32,
    },
}

/// Where a file has data; what is not data is a hole, and reads as zeros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Data {
    /// All of it is data.
    Dense,
    /// Only these runs of bytes: ascending, apart, not empty, within the size.
    Runs(Vec<Range<u64>>),
}

/// Why bytes are not a manifest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("manifest is malformed: {0}")]
pub struct ManifestError(pub &'static str);

/// The order of entries: by components, so that a directory's entries follow it without a gap.
pub fn path_order(one: &[u8], other: &[u8]) -> Ordering {
    one.split(|b| *b == b'/').cmp(other.split(|b| *b == b'/'))
}

impl Entry {
    /// The name of the unit that it belongs to.
    pub fn unit(&self) -> &[u8] {
        self.path.split(|b| *b == b'/').next().unwrap_or_default()
    }

    /// The path below the unit's own name; empty for the unit itself.
    pub fn below(&self) -> &[u8] {
        let unit = self.unit().len();
        self.path.get(unit + 1..).unwrap_or_default()
    }

    /// Its own name.
    pub fn name(&self) -> &[u8] {
        self.path.rsplit(|b| *b == b'/').next().unwrap_or_default()
    }

    /// The runs of a file that has holes.
    fn runs(&self) -> &[Range<u64>] {
        match &self.kind {
            Kind::File {
                data: Data::Runs(runs),
                ..
            } => runs,
            _ => &[],
        }
    }

    /// Calls `each` with a file's runs of data; nothing else has any.
    pub fn each_run(&self, mut each: impl FnMut(Range<u64>)) {
        match &self.kind {
            Kind::File {
                size,
                data: Data::Dense,
            } if size.0 > 0 => each(0..size.0),
            _ => self.runs().iter().cloned().for_each(each),
        }
    }

    /// Bytes of data in a file; nothing else has any.
    pub fn data_len(&self) -> u64 {
        match &self.kind {
            Kind::File {
                size,
                data: Data::Dense,
            } => size.0,
            _ => self.runs().iter().map(|run| run.end - run.start).sum(),
        }
    }
}

impl Manifest {
    /// The manifest of a single dense file.
    pub fn single_file(name: &[u8], size: ByteCount, mode: u32, mtime: (i64, u32)) -> Self {
        Self {
            entries: vec![Entry {
                path: name.to_vec(),
                mode: mode & 0o777,
                mtime,
                xattrs: Vec::new(),
                kind: Kind::File {
                    size,
                    data: Data::Dense,
                },
            }],
        }
    }

    /// The manifest of a single file whose data lies in `runs`: ascending, apart, within the size.
    pub fn single_sparse_file(
        name: &[u8],
        size: ByteCount,
        runs: Vec<Range<u64>>,
        mode: u32,
        mtime: (i64, u32),
    ) -> Self {
        let mut manifest = Self::single_file(name, size, mode, mtime);
        manifest.entries[0].kind = Kind::File {
            size,
            data: Data::of(size, runs),
        };
        manifest
    }

    /// Apparent size of its files together, holes included.
    pub fn file_size(&self) -> ByteCount {
        let sizes = self.entries.iter().map(|entry| match &entry.kind {
            Kind::File { size, .. } => size.0,
            _ => 0,
        });
        ByteCount(sizes.fold(0, u64::saturating_add))
    }

    /// Bytes in the payload's sequence: those of data, without holes.
    pub fn payload_size(&self) -> ByteCount {
        let data = self.entries.iter().map(Entry::data_len);
        ByteCount(data.fold(0, u64::saturating_add))
    }

    /// The digest of the encoded bytes.
    pub fn digest(&self) -> ManifestDigest {
        digest_of(&self.encode())
    }
}

/// The digest of an encoded manifest.
pub fn digest_of(encoded: &[u8]) -> ManifestDigest {
    ManifestDigest(*blake3::hash(encoded).as_bytes())
}

impl Data {
    /// The data of a file of `size` bytes in `runs`, in the one form that it has: no empty run, and dense where there is
    /// no hole.
    pub fn of(size: ByteCount, mut runs: Vec<Range<u64>>) -> Self {
        runs.retain(|run| !run.is_empty());
        match runs.as_slice() {
            [run] if *run == (0..size.0) => Self::Dense,
            [] if size.0 == 0 => Self::Dense,
            _ => Self::Runs(runs),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_comes_back() {
        let manifest = Manifest::single_file(b"a", ByteCount(5), 0o4755, (-3, 999_999_999));
        assert_eq!(manifest.entries[0].mode, 0o755);
        assert_eq!(manifest.payload_size(), ByteCount(5));
        assert_eq!(Manifest::decode(&manifest.encode()).unwrap(), manifest);
        let empty = Manifest::single_file(b"a", ByteCount(0), 0o600, (0, 0));
        assert_eq!(empty.payload_size(), ByteCount(0));
    }

    #[test]
    fn holes_are_in_the_size_and_not_in_the_payload() {
        let (size, far) = (ByteCount(1 << 42), 1 << 41);
        let sparse = |size, runs| Manifest::single_sparse_file(b"a", size, runs, 0o644, (0, 0));
        let manifest = sparse(size, vec![5..10, 10..10, far..far + 7]);
        assert_eq!(manifest.file_size(), size);
        assert_eq!(manifest.payload_size(), ByteCount(12));
        assert_eq!(Manifest::decode(&manifest.encode()).unwrap(), manifest);
        let hole = sparse(size, vec![]);
        assert_eq!(hole.payload_size(), ByteCount(0));
        assert_ne!(hole.digest(), sparse(ByteCount(1), vec![]).digest());
        assert_eq!(
            sparse(ByteCount(3), vec![0..3; 1]),
            Manifest::single_file(b"a", ByteCount(3), 0o644, (0, 0))
        );
    }

    #[test]
    fn a_directory_comes_right_before_what_it_holds() {
        let mut paths: Vec<&[u8]> = vec![b"a!", b"a/b", b"a", b"a/b!c", b"a/b/c", b"b"];
        paths.sort_by(|one, other| path_order(one, other));
        let right: [&[u8]; 6] = [b"a", b"a/b", b"a/b/c", b"a/b!c", b"a!", b"b"];
        assert_eq!(paths, right);
    }
}
