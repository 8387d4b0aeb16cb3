//! What was about to get its final name: written before the first rename, so that after a crash what lies under the
//! names decides.

use std::path::Path;

use serde::{Deserialize, Serialize};
use stage_core::digest::RootDigest;
use stage_core::failure::Failure;
use stage_core::id::JobId;

use crate::{durable, journal};

/// Its name in the job's directory.
const NAME: &str = "intent";

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Intent {
    /// What the payload is.
    pub(super) root: RootDigest,
    /// For each unit its partial's device and inode, which it keeps under its final name; `None` for one that is left as it
    /// is.
    pub(super) inodes: Vec<Option<(u64, u64)>>,
    /// For each unit, whether it is a tree, and its name.
    pub(super) units: Vec<(bool, Vec<u8>)>,
}

impl Intent {
    /// Makes it durable.
    pub(super) fn write(&self, state: &Path, job: JobId) -> Result<(), Failure> {
        durable::write(&journal::job_dir(state, job).join(NAME), self)
    }

    /// What an earlier run was about to publish, if that is whole.
    pub(super) fn read(state: &Path, job: JobId) -> Option<Self> {
        durable::read(&journal::job_dir(state, job).join(NAME))
    }
}
