//! What a payload is made of. For now one regular file; the form is the one that trees will fill.
//!
//! A manifest travels and is digested as bytes of one canonical encoding ([`Manifest::encode`]), so that all
//! nodes agree on its digest; it is bounded before it is decoded.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::digest::ManifestDigest;
use crate::units::ByteCount;

/// The payload's entries in path order; data extents of its files laid end to end are its sequence of chunks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The entries.
    pub entries: Vec<Entry>,
}

/// One entry of a payload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Path below the payload's own name, as bytes; empty for a payload that is one file.
    pub path: Vec<u8>,
    /// Permission bits, 0o777 at most: setuid, setgid and sticky are never made.
    pub mode: u32,
    /// Modification time: whole seconds since 1970, and nanoseconds.
    pub mtime: (i64, u32),
    /// What it is.
    pub kind: Kind,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// A regular file.
    File {
        /// Apparent size.
        size: ByteCount,
        /// Where its data is: ascending, within the size; what no extent covers is a hole.
        extents: Vec<Extent>,
    },
}

/// A run of data in a file, and its place in the payload's sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Where in the file, in bytes.
    pub in_file: u64,
    /// Where in the payload's sequence, in bytes.
    pub in_payload: u64,
    /// How many bytes.
    pub len: u64,
}

/// Why bytes are not a manifest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("manifest is malformed: {0}")]
pub struct ManifestError(pub &'static str);

const MAGIC: &[u8; 8] = b"stageM1\n";

impl Manifest {
    /// The manifest of a single dense file.
    pub fn single_file(size: ByteCount, mode: u32, mtime: (i64, u32)) -> Self {
        Self::single_sparse_file(size, std::iter::once(0..size.0), mode, mtime)
    }

    /// The manifest of a single file whose data lies in `runs`: ascending, apart, within the size.
    pub fn single_sparse_file(
        size: ByteCount,
        runs: impl IntoIterator<Item = Range<u64>>,
        mode: u32,
        mtime: (i64, u32),
    ) -> Self {
        let mut in_payload = 0;
        let extents = runs
            .into_iter()
            .filter(|run| !run.is_empty())
            .map(|run| {
                let extent = Extent {
                    in_file: run.start,
                    in_payload,
                    len: run.end - run.start,
                };
                in_payload += extent.len;
                extent
            })
            .collect();
        Self {
            entries: vec![Entry {
                path: Vec::new(),
                mode: mode & 0o777,
                mtime,
                kind: Kind::File { size, extents },
            }],
        }
    }

    /// Apparent size of its files together, holes included.
    pub fn file_size(&self) -> ByteCount {
        let sizes = self.entries.iter().map(|entry| match &entry.kind {
            Kind::File { size, .. } => size.0,
        });
        ByteCount(sizes.fold(0, u64::saturating_add))
    }

    /// Bytes in the payload's sequence: those of data, without holes.
    pub fn payload_size(&self) -> ByteCount {
        let ends = self.entries.iter().flat_map(|entry| match &entry.kind {
            Kind::File { extents, .. } => extents.iter().map(|e| e.in_payload + e.len),
        });
        ByteCount(ends.max().unwrap_or(0))
    }

    /// The canonical bytes: little-endian, lengths before content.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend((self.entries.len() as u32).to_le_bytes());
        for entry in &self.entries {
            out.extend((entry.path.len() as u32).to_le_bytes());
            out.extend(&entry.path);
            out.extend(entry.mode.to_le_bytes());
            out.extend(entry.mtime.0.to_le_bytes());
            out.extend(entry.mtime.1.to_le_bytes());
            let Kind::File { size, extents } = &entry.kind;
            out.push(1);
            out.extend(size.0.to_le_bytes());
            out.extend((extents.len() as u32).to_le_bytes());
            for extent in extents {
                out.extend(extent.in_file.to_le_bytes());
                out.extend(extent.in_payload.to_le_bytes());
                out.extend(extent.len.to_le_bytes());
            }
        }
        out
    }

    /// Reads what [`Self::encode`] wrote. Never allocates more than the input is long, whatever it claims.
    ///
    /// # Errors
    /// [`ManifestError`] says what is wrong with the bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        let mut input = Input(bytes);
        if input.take(8)? != MAGIC {
            return Err(ManifestError("it does not begin as one"));
        }
        let mut entries = Vec::new();
        for _ in 0..input.u32()? {
            let len = input.u32()? as usize;
            let path = input.take(len)?.to_vec();
            let mode = input.u32()?;
            if mode & !0o777 != 0 {
                return Err(ManifestError("a mode has more than permission bits"));
            }
            let mtime = (input.u64()?.cast_signed(), input.u32()?);
            if mtime.1 >= 1_000_000_000 {
                return Err(ManifestError("a time has more than a second of nanoseconds"));
            }
            if input.take(1)? != [1] {
                return Err(ManifestError("an entry is of no known kind"));
            }
            let size = ByteCount(input.u64()?);
            let mut extents: Vec<Extent> = Vec::new();
            let mut end = 0;
            for _ in 0..input.u32()? {
                let extent = Extent {
                    in_file: input.u64()?,
                    in_payload: input.u64()?,
                    len: input.u64()?,
                };
                let ends = extent.in_file.checked_add(extent.len).filter(|e| *e <= size.0);
                let fits = extent.len > 0
                    && extent.in_file >= end
                    && extent
                        .in_payload
                        .checked_add(extent.len)
                        .is_some_and(|e| e <= crate::chunk::MAX_PAYLOAD.0);
                match ends {
                    Some(ends) if fits => end = ends,
                    _ => return Err(ManifestError("an extent lies outside its file")),
                }
                extents.push(extent);
            }
            entries.push(Entry {
                path,
                mode,
                mtime,
                kind: Kind::File { size, extents },
            });
        }
        if !input.0.is_empty() {
            return Err(ManifestError("bytes follow its end"));
        }
        Ok(Self { entries })
    }

    /// The digest of the canonical bytes.
    pub fn digest(&self) -> ManifestDigest {
        ManifestDigest(*blake3::hash(&self.encode()).as_bytes())
    }
}

struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], ManifestError> {
        let (head, tail) = self
            .0
            .split_at_checked(len)
            .ok_or(ManifestError("it ends too early"))?;
        self.0 = tail;
        Ok(head)
    }

    fn u32(&mut self) -> Result<u32, ManifestError> {
        Ok(u32::from_le_bytes(
            self.take(4)?.try_into().expect("four bytes were taken"),
        ))
    }

    fn u64(&mut self) -> Result<u64, ManifestError> {
        Ok(u64::from_le_bytes(
            self.take(8)?.try_into().expect("eight bytes were taken"),
        ))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_file_comes_back() {
        let manifest = Manifest::single_file(ByteCount(5), 0o4755, (-3, 999_999_999));
        assert_eq!(manifest.entries[0].mode, 0o755);
        assert_eq!(manifest.payload_size(), ByteCount(5));
        assert_eq!(Manifest::decode(&manifest.encode()).unwrap(), manifest);
        assert_eq!(
            Manifest::single_file(ByteCount(0), 0o600, (0, 0)).payload_size(),
            ByteCount(0)
        );
    }

    #[test]
    fn holes_are_in_the_size_and_not_in_the_payload() {
        let (size, far) = (ByteCount(1 << 42), 1 << 41);
        let manifest = Manifest::single_sparse_file(size, [5..10, far..far + 7], 0o644, (0, 0));
        assert_eq!(manifest.file_size(), size);
        assert_eq!(manifest.payload_size(), ByteCount(12));
        assert_eq!(Manifest::decode(&manifest.encode()).unwrap(), manifest);
        let hole = Manifest::single_sparse_file(size, [], 0o644, (0, 0));
        assert_eq!(hole.payload_size(), ByteCount(0));
        assert_ne!(
            hole.digest(),
            Manifest::single_sparse_file(ByteCount(1), [], 0o644, (0, 0)).digest()
        );
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Manifest::decode(&bytes);
            let mut claimed = Manifest::single_file(ByteCount(9), 0o644, (1, 2)).encode();
            for (at, byte) in bytes.iter().enumerate() {
                let place = at * 7 % claimed.len();
                claimed[place] ^= byte;
            }
            if let Ok(manifest) = Manifest::decode(&claimed) {
                prop_assert_eq!(manifest.encode(), claimed);
            }
        }
    }
}
