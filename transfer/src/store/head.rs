//! The payload's head: the bytes of its manifest, where they come as chunks.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use stage_core::failure::Failure;
use stage_core::id::JobId;
use stage_core::payload::Payload;

use crate::{fault, journal};

/// Its name in the job's directory.
pub(crate) const NAME: &str = "manifest";

/// Where the head's bytes lie.
#[derive(Debug)]
pub(crate) enum Head {
    /// There is none: the manifest rode in the order.
    None,
    /// At a source: made of the walk.
    Bytes(Vec<u8>),
    /// At a target: beside the chunk table.
    File(File, PathBuf),
}

impl Head {
    /// The head of a target, with what an earlier run wrote of it.
    pub(crate) fn open(state: &Path, job: JobId, payload: &Payload) -> Result<Self, Failure> {
        if payload.head().0 == 0 {
            return Ok(Self::None);
        }
        let path = journal::job_dir(state, job).join(NAME);
        let open = || {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
                .open(&path)?;
            file.set_len(payload.head().0)?;
            Ok(file)
        };
        match open() {
            Ok(file) => Ok(Self::File(file, path)),
            Err(e) => Err(fault::state(&e, "opening the manifest", &path)),
        }
    }

    /// Reads bytes of it.
    pub(crate) fn read(&self, at: u64, buf: &mut [u8]) -> Result<(), Failure> {
        match self {
            Self::None => Err(outside()),
            Self::Bytes(bytes) => {
                let at = usize::try_from(at).map_err(|_| outside())?;
                let from = at
                    .checked_add(buf.len())
                    .and_then(|end| bytes.get(at..end))
                    .ok_or_else(outside)?;
                buf.copy_from_slice(from);
                Ok(())
            }
            Self::File(file, path) => file
                .read_exact_at(buf, at)
                .map_err(|e| fault::state(&e, "reading the manifest", path)),
        }
    }

    /// Writes bytes of it.
    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Failure> {
        match self {
            Self::None | Self::Bytes(_) => Err(outside()),
            Self::File(file, path) => file
                .write_all_at(bytes, at)
                .map_err(|e| fault::state(&e, "writing the manifest", path)),
        }
    }
}

fn outside() -> Failure {
    Failure::new(
        stage_core::failure::Code::Internal,
        "bytes outside the payload's head were asked for",
        "report this as a bug of stage",
    )
}
