//! Where the payload's sequence lies in its file.

use std::ops::Range;

use stage_core::failure::{Code, Failure};
use stage_core::manifest::{Extent, Kind, Manifest};
use stage_core::units::ByteCount;

/// The data extents of the one file that a payload is for now.
#[derive(Debug, Clone)]
pub(crate) struct Map {
    extents: Vec<Extent>,
    size: ByteCount,
    payload: ByteCount,
    /// Permission bits.
    pub(crate) mode: u32,
    /// Modification time.
    pub(crate) mtime: (i64, u32),
}

impl Map {
    /// The map of a payload.
    ///
    /// # Errors
    /// The payload is of a form that this version does not know, or its extents do not make one sequence.
    pub(crate) fn new(manifest: &Manifest) -> Result<Self, Failure> {
        let refuse = |why: &str| {
            Failure::new(
                Code::Usage,
                format!("the payload cannot be laid out: {why}"),
                "use the same version of stage on all nodes",
            )
        };
        let [entry] = manifest.entries.as_slice() else {
            return Err(refuse("it is not one file"));
        };
        let Kind::File { size, extents } = &entry.kind;
        if !entry.path.is_empty() {
            return Err(refuse("it is not one file"));
        }
        let mut end = 0;
        for extent in extents {
            if extent.in_payload != end {
                return Err(refuse("its extents do not join"));
            }
            end += extent.len;
        }
        Ok(Self {
            extents: extents.clone(),
            size: *size,
            payload: ByteCount(end),
            mode: entry.mode & 0o777,
            mtime: entry.mtime,
        })
    }

    /// The file's apparent size.
    pub(crate) fn size(&self) -> ByteCount {
        self.size
    }

    /// Bytes of data in it.
    pub(crate) fn data(&self) -> ByteCount {
        self.payload
    }

    /// Whether the file has no hole.
    pub(crate) fn is_dense(&self) -> bool {
        self.payload == self.size
    }

    /// The file's data, as runs of bytes.
    pub(crate) fn data_runs(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.extents.iter().map(|e| e.in_file..e.in_file + e.len)
    }

    /// What no data lies in, as runs of bytes.
    pub(crate) fn holes(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let ends = std::iter::once(0).chain(self.extents.iter().map(|e| e.in_file + e.len));
        let starts = self.extents.iter().map(|e| e.in_file).chain([self.size.0]);
        ends.zip(starts)
            .map(|(from, to)| from..to)
            .filter(|hole| !hole.is_empty())
    }

    /// Calls `each` with the place in the file of every piece of `len` bytes of the payload from `at`, and with the
    /// part of the `len` bytes that lies there.
    pub(crate) fn pieces<E>(
        &self,
        at: u64,
        len: usize,
        mut each: impl FnMut(u64, Range<usize>) -> Result<(), E>,
    ) -> Result<(), E> {
        let first = self.extents.partition_point(|e| e.in_payload + e.len <= at);
        let mut done = 0;
        for extent in &self.extents[first..] {
            if done == len {
                break;
            }
            let skip = at + done as u64 - extent.in_payload;
            let take = usize::try_from(extent.len - skip)
                .unwrap_or(usize::MAX)
                .min(len - done);
            each(extent.in_file + skip, done..done + take)?;
            done += take;
        }
        debug_assert_eq!(done, len, "asked for bytes past the payload's end");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_holes_is_read_and_written_around_them() {
        let mut manifest = Manifest::single_file(ByteCount(100), 0o644, (0, 0));
        let extent = |in_file, in_payload, len| Extent {
            in_file,
            in_payload,
            len,
        };
        let Kind::File { extents, .. } = &mut manifest.entries[0].kind;
        *extents = vec![extent(10, 0, 5), extent(50, 5, 10), extent(90, 15, 10)];
        let map = Map::new(&manifest).unwrap();
        assert!(!map.is_dense());
        assert_eq!(map.data(), ByteCount(25));
        assert_eq!(map.holes().collect::<Vec<_>>(), [0..10, 15..50, 60..90]);
        let mut pieces = Vec::new();
        map.pieces(3, 14, |at, part| {
            pieces.push((at, part));
            Ok::<(), ()>(())
        })
        .unwrap();
        assert_eq!(pieces, [(13, 0..2), (50, 2..12), (90, 12..14)]);
        let Kind::File { extents, .. } = &mut manifest.entries[0].kind;
        extents.remove(1);
        assert!(Map::new(&manifest).is_err());
    }
}
