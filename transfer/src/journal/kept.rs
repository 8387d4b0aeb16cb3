//! The chunk table of a published copy, which outlives its job beside the copy's entry in the index.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use stage_core::chunk::ChunkIndex;
use stage_core::digest::ChunkDigest;
use stage_core::failure::Failure;
use stage_core::id::JobId;

use super::{SLOT, Table, parse, place};

impl Table {
    /// Gives the table a second name, under which it outlives its job. Where links cannot be made it is copied.
    pub(crate) fn keep_as(&self, path: &Path) -> Result<(), Failure> {
        let new = path.with_extension("new");
        let keep = || {
            match std::fs::remove_file(&new) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
            if std::fs::hard_link(&self.path, &new).is_err() {
                std::fs::copy(&self.path, &new)?;
            }
            std::fs::rename(&new, path)?;
            // Renaming one name of a file to another of its names leaves both.
            match std::fs::remove_file(&new) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
                _ => Ok(()),
            }
        };
        keep().map_err(|e| self.fail(&e, "keeping the chunk table"))
    }
}

/// A table that was kept with what it speaks of, for reading only.
#[derive(Debug)]
pub(crate) struct Kept {
    file: File,
    job: JobId,
}

impl Kept {
    /// Opens the table of a job at this path.
    pub(crate) fn open(path: &Path, job: JobId) -> io::Result<Self> {
        Ok(Self {
            file: File::open(path)?,
            job,
        })
    }

    /// A chunk's digest, `None` if its slot is empty or damaged.
    pub(crate) fn get(&self, index: ChunkIndex) -> Option<ChunkDigest> {
        let mut slot = [0; SLOT];
        self.file.read_exact_at(&mut slot, place(index.0)).ok()?;
        parse(self.job, index, &slot)
    }
}
