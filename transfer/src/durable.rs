//! Small things in the state directory that have to outlive a crash: each a file of its own, whole or not there.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use stage_core::failure::Failure;

use crate::fault;

/// Writes a thing where `path` says, in place of what was there, and makes that durable.
///
/// # Errors
/// The state directory's.
pub(crate) fn write(path: &Path, thing: &impl Serialize) -> Result<(), Failure> {
    let attempt = || -> io::Result<()> {
        let dir = path.parent().ok_or(io::ErrorKind::NotFound)?;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let bytes = postcard::to_stdvec(thing).map_err(io::Error::other)?;
        let new = path.with_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(&bytes)?;
        file.write_all(&crc32c::crc32c(&bytes).to_le_bytes())?;
        file.sync_all()?;
        fs::rename(&new, path)?;
        File::open(dir)?.sync_all()
    };
    attempt().map_err(|e| fault::state(&e, "writing down what is to be done", path))
}

/// What was written there, if it is whole.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let bytes = fs::read(path).ok()?;
    let (body, crc) = bytes.split_last_chunk::<4>()?;
    if crc32c::crc32c(body).to_le_bytes() != *crc {
        return None;
    }
    postcard::from_bytes(body).ok()
}
