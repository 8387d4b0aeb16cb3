//! Holes: where a file has data, and whether what should be a hole reads as zeros.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use stage_core::manifest::Entry;

use crate::store::map::holes;

/// A smaller hole is sent as the zeros that it reads as: a run of its own would cost more than it saves.
const MIN_HOLE: u64 = 64 << 10;
/// A manifest has at most so many runs (24 bytes each), so that it fits into a message; the smaller holes of a file with
/// more are sent as zeros.
const MAX_RUNS: usize = 8192;

/// Where data may lie in the file's first `size` bytes: ascending and apart. What lies between reads as zeros. A file
/// system that does not tell has one run of data.
///
/// # Errors
/// The file system's.
pub(crate) fn data_runs(file: &File, size: u64) -> io::Result<Vec<Range<u64>>> {
    let mut merge = Merge::new(MAX_RUNS);
    let mut at = 0;
    while let Some(run) = next_data(file, at..size)? {
        at = run.end;
        merge.push(run);
    }
    Ok(merge.finish())
}

/// The first run of data within a range.
fn next_data(file: &File, within: Range<u64>) -> io::Result<Option<Range<u64>>> {
    if within.is_empty() {
        return Ok(None);
    }
    let start = match seek(file, SeekFrom::Data(within.start)) {
        Ok(start) if start < within.end => start,
        Ok(_) | Err(Errno::NXIO) => return Ok(None),
        Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(Some(within)),
        Err(e) => return Err(e.into()),
    };
    // `NXIO` now is of a file that was cut short since: to be found out by reading it.
    let end = seek(file, SeekFrom::Hole(start)).unwrap_or(within.end);
    Ok(Some(start..end.clamp(start + 1, within.end)))
}

/// Runs of data with the small holes between them filled, and as many of the smallest others as it takes to have at most
/// `max` runs in the end. In memory are never more than twice as many.
struct Merge {
    runs: Vec<Range<u64>>,
    max: usize,
}

impl Merge {
    fn new(max: usize) -> Self {
        Self {
            runs: Vec::new(),
            max,
        }
    }

    fn push(&mut self, run: Range<u64>) {
        match self.runs.last_mut() {
            Some(last) if run.start - last.end < MIN_HOLE => last.end = run.end,
            _ => self.runs.push(run),
        }
        if self.runs.len() >= 2 * self.max {
            self.reduce();
        }
    }

    fn finish(mut self) -> Vec<Range<u64>> {
        self.reduce();
        self.runs
    }

    fn reduce(&mut self) {
        let Some(surplus) = self
            .runs
            .len()
            .checked_sub(self.max)
            .filter(|surplus| *surplus > 0)
        else {
            return;
        };
        let mut holes: Vec<_> = self
            .runs
            .windows(2)
            .map(|pair| pair[1].start - pair[0].end)
            .collect();
        let (_, limit, _) = holes.select_nth_unstable(surplus - 1);
        let limit = *limit;
        let mut left = surplus;
        self.runs.dedup_by(|run, last| {
            let fill = left > 0 && run.start - last.end <= limit;
            if fill {
                last.end = run.end;
                left -= 1;
            }
            fill
        });
    }
}

/// Whether all that a file has no data in reads as zeros. Real holes are not read.
///
/// # Errors
/// The file system's.
pub(crate) fn holes_are_zero(file: &File, entry: &Entry) -> io::Result<bool> {
    let mut block = Vec::new();
    for hole in holes(entry) {
        let mut at = hole.start;
        while let Some(data) = next_data(file, at..hole.end)? {
            at = data.start;
            while at < data.end {
                let some = (data.end - at).min(ZEROS.len() as u64) as usize;
                block.resize(some, 0);
                file.read_exact_at(&mut block, at)?;
                if block != ZEROS[..some] {
                    return Ok(false);
                }
                at += some as u64;
            }
        }
    }
    Ok(true)
}

/// What a hole reads as.
pub(crate) static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

#[cfg(test)]
mod tests {
    use stage_core::manifest::Manifest;
    use stage_core::units::ByteCount;

    use super::*;

    fn file_of(size: u64, data: &[(u64, &[u8])]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        for (at, bytes) in data {
            file.write_all_at(bytes, *at).unwrap();
        }
        file
    }

    #[test]
    fn data_is_found_between_holes() {
        let (far, size) = (1 << 41, (1 << 41) + (8 << 20));
        let file = file_of(size, &[(0, &[1; 4096]), (far + 5, b"x")]);
        let runs = data_runs(&file, size).unwrap();
        assert_eq!(runs.len(), 2, "{runs:?}");
        assert_eq!(runs[0].start, 0);
        assert!(
            runs[1].contains(&(far + 5)) && runs[1].end - runs[1].start <= 64 << 10,
            "{runs:?}"
        );
        assert_eq!(data_runs(&file_of(1 << 30, &[]), 1 << 30).unwrap(), []);
        assert_eq!(data_runs(&file_of(0, &[]), 0).unwrap(), []);
        // Data to the very end, in the middle of a block.
        let tail = file_of(3_000_001, &[(3_000_000, b"x")]);
        assert_eq!(data_runs(&tail, 3_000_001).unwrap()[0].end, 3_000_001);
    }

    #[test]
    fn small_holes_and_too_many_are_filled_smallest_first() {
        let mut few = Merge::new(8);
        few.push(0..10);
        few.push(10 + MIN_HOLE - 1..MIN_HOLE + 20);
        assert_eq!(few.finish(), vec![0..MIN_HOLE + 20; 1]);
        let mut many = Merge::new(4);
        let (small, large) = (MIN_HOLE * 3, MIN_HOLE * 100);
        let mut at = 0;
        for pair in 0..4 {
            many.push(at..at + 1);
            at += 1 + small;
            many.push(at..at + 1);
            at += 1 + large;
            assert!(many.runs.len() < 8, "{pair}");
        }
        let runs = many.finish();
        assert_eq!(runs.len(), 4, "{runs:?}");
        assert!(runs.iter().all(|run| run.end - run.start == small + 2));
        // Of holes that are alike no more are filled than must be.
        let mut alike = Merge::new(4);
        (0..6).for_each(|at| alike.push(at * large..at * large + 1));
        let runs = alike.finish();
        assert_eq!((runs.len(), runs.last()), (4, Some(&(5 * large..5 * large + 1))));
    }

    #[test]
    fn holes_may_be_filled_with_zeros_and_nothing_else() {
        let manifest =
            Manifest::single_sparse_file(b"a", ByteCount(1 << 30), vec![4096..8192; 1], 0o600, (0, 0));
        let zero =
            |data: &[(u64, &[u8])]| holes_are_zero(&file_of(1 << 30, data), &manifest.entries[0]).unwrap();
        assert!(zero(&[]));
        assert!(zero(&[(4096, &[7; 4096]), (1 << 20, &[0; 100_000])]));
        assert!(!zero(&[(4095, b"x")]));
        assert!(!zero(&[((1 << 30) - 1, b"x")]));
        assert!(!zero(&[(1 << 20, &[0; 100_000]), ((1 << 20) + 100_000, b"x")]));
    }
}
