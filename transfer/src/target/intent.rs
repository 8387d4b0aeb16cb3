//! What was about to get its final name: written before the first rename, so that after a crash what lies under the
//! names decides.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use serde::{Deserialize, Serialize};
use stage_core::digest::RootDigest;
use stage_core::failure::Failure;
use stage_core::id::JobId;

use crate::{fault, journal};

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
        let dir = journal::job_dir(state, job);
        let path = dir.join(NAME);
        let write = || -> std::io::Result<()> {
            let bytes = postcard::to_stdvec(self).map_err(std::io::Error::other)?;
            let new = dir.join("intent.new");
            let mut file = File::create(&new)?;
            file.write_all(&bytes)?;
            file.write_all(&crc32c::crc32c(&bytes).to_le_bytes())?;
            file.sync_all()?;
            std::fs::rename(&new, &path)?;
            File::open(&dir)?.sync_all()
        };
        write().map_err(|e| fault::state(&e, "writing what is to be published", &path))
    }

    /// What an earlier run was about to publish, if that is whole.
    pub(super) fn read(state: &Path, job: JobId) -> Option<Self> {
        let bytes = std::fs::read(journal::job_dir(state, job).join(NAME)).ok()?;
        let (body, crc) = bytes.split_last_chunk::<4>()?;
        if crc32c::crc32c(body).to_le_bytes() != *crc {
            return None;
        }
        postcard::from_bytes(body).ok()
    }
}
