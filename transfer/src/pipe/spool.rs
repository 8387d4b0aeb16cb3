//! Where a stream is kept for children that lag or come late: a file without a name in the agent's state directory,
//! gone with the process whatever happens.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use stage_core::failure::Failure;

use crate::fault;

/// Space is taken in steps, each twice the one before up to the last: a short stream must not take a gibibyte.
const STEPS: (u64, u64) = (64 << 20, 1 << 30);

#[derive(Debug)]
pub(super) struct Spool {
    file: File,
    path: PathBuf,
    /// Space is taken up to here.
    taken: u64,
    step: u64,
}

/// A file without a name in a directory, which is made if it is not there.
pub(crate) fn unnamed(dir: &Path) -> std::io::Result<File> {
    std::fs::create_dir_all(dir)?;
    let mode = Mode::RUSR | Mode::WUSR;
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let file = match rustix::fs::open(dir, flags | OFlags::TMPFILE, mode) {
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => {
            let named = dir.join(format!(
                "{:032x}.spool",
                u128::from_le_bytes(crate::sync::random())
            ));
            let file = rustix::fs::open(
                &named,
                flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW,
                mode,
            );
            file.and_then(|file| rustix::fs::unlink(&named).map(|()| file))
        }
        other => other,
    };
    Ok(file?.into())
}

impl Spool {
    pub(super) fn make(state: &Path) -> Result<Self, Failure> {
        let dir = state.join("jobs");
        let file = unnamed(&dir).map_err(|e| fault::state(&e, "making the spool", &dir))?;
        Ok(Self {
            file,
            path: dir,
            taken: 0,
            step: STEPS.0,
        })
    }

    /// The same file, to be read by others.
    pub(super) fn reader(&self) -> Result<File, Failure> {
        self.file
            .try_clone()
            .map_err(|e| fault::state(&e, "opening the spool", &self.path))
    }

    /// Writes what came.
    ///
    /// # Errors
    /// The state directory's file system cannot take more.
    pub(super) fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), Failure> {
        if at + bytes.len() as u64 > self.taken {
            match rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, self.taken, self.step) {
                // Where there is no room for a step there may be for what comes; where no space can be taken beforehand, the
                // writes take it.
                Ok(()) | Err(Errno::NOSPC | Errno::DQUOT | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INTR) => {
                }
                Err(e) => return Err(fault::state(&e.into(), "taking space for the spool", &self.path)),
            }
            self.taken += self.step;
            self.step = (2 * self.step).min(STEPS.1);
        }
        self.file
            .write_all_at(bytes, at)
            .map_err(|e| fault::state(&e, "spooling the input", &self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_has_no_name_and_is_read_while_it_grows() {
        let state = tempfile::tempdir().unwrap();
        let mut spool = Spool::make(state.path()).unwrap();
        let reader = spool.reader().unwrap();
        spool.write(0, b"abc").unwrap();
        spool.write(3, b"def").unwrap();
        let mut read = [0; 6];
        reader.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(&read, b"abcdef");
        assert_eq!(std::fs::read_dir(state.path().join("jobs")).unwrap().count(), 0);
    }
}
