//! What somebody removed here while its job was still open: it must not come again by itself.
//!
//! A mark in the job's directory, and no part of the table's head: the job may be at work and write that too.

use std::io::ErrorKind;
use std::path::Path;

use stage_core::failure::Failure;
use stage_core::id::JobId;

use super::{Record, job_dir};
use crate::{durable, fault};

/// Its name in the job's directory.
const NAME: &str = "removed";

/// Marks the job's copy here as removed, durably.
pub(crate) fn mark(state: &Path, job: JobId) -> Result<(), Failure> {
    durable::write(&job_dir(state, job).join(NAME), &())
}

/// Whether the job's copy here was removed.
pub(crate) fn is_marked(state: &Path, job: JobId) -> bool {
    job_dir(state, job).join(NAME).exists()
}

/// The copy is wanted again, or was not removed after all.
pub(crate) fn unmark(state: &Path, job: JobId) -> Result<(), Failure> {
    let path = job_dir(state, job).join(NAME);
    match std::fs::remove_file(&path) {
        Ok(()) => Ok(()),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(()),
        Err(e) => Err(fault::state(&e, "taking a mark back", &path)),
    }
}

impl Record {
    /// Whether the job brings, or brought, this name to this directory; one that does not tell its names may.
    pub(crate) fn is_at(&self, dir: &[u8], name: &[u8]) -> bool {
        self.dir == dir && (self.names.is_empty() || self.names.iter().any(|own| own == name))
    }
}
