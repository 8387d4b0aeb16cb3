//! The directory of a demo: everything lies in it, and it is gone afterwards unless it was asked for.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use stage_core::units::ByteCount;
use tempfile::TempDir;

use super::cluster;
use crate::commands::source::show;
use crate::error::Error;

/// A directory of the demo's own.
pub(crate) struct Workplace {
    path: PathBuf,
    /// `None`: `--keep`.
    temporary: Option<TempDir>,
}

impl Workplace {
    /// A new one, or `keep`, which must be absent or empty.
    ///
    /// # Errors
    /// It cannot be made, or holds something.
    pub(crate) fn new(keep: Option<&Path>) -> Result<Self, Error> {
        let Some(dir) = keep else {
            let temporary = tempfile::Builder::new()
                .prefix("stage-demo-")
                .tempdir()
                .map_err(|error| {
                    Error::other(
                        format!(
                            "cannot make a directory in {}: {error}",
                            show(&std::env::temp_dir())
                        ),
                        "set TMPDIR to a directory of yours, or give --keep DIR",
                    )
                })?;
            return Ok(Self {
                path: temporary.path().to_owned(),
                temporary: Some(temporary),
            });
        };
        let fault = |why: String| {
            Error::usage(
                format!("--keep {}: {why}", show(dir)),
                "name a directory that is absent or empty",
            )
        };
        fs::create_dir_all(dir).map_err(|error| fault(error.to_string()))?;
        let mut entries = fs::read_dir(dir).map_err(|error| fault(error.to_string()))?;
        if entries.next().is_some() {
            return Err(fault("is not empty".to_owned()));
        }
        Ok(Self {
            path: dir.canonicalize().map_err(|error| fault(error.to_string()))?,
            temporary: None,
        })
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Where a node's copy of `payload` lies.
    pub(crate) fn copy(&self, node: u8, payload: &Path) -> PathBuf {
        cluster::root(&self.path, node).join(payload.file_name().unwrap_or_default())
    }

    /// Sees that so many bytes have room.
    ///
    /// # Errors
    /// They have not.
    pub(crate) fn need(&self, bytes: u64) -> Result<(), Error> {
        let Ok(stat) = rustix::fs::statvfs(&self.path) else {
            // Who does not tell is found out by writing.
            return Ok(());
        };
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        if bytes <= free {
            return Ok(());
        }
        Err(Error::other(
            format!(
                "{} has {} free, and the demo's files take {}",
                show(&self.path),
                ByteCount(free),
                ByteCount(bytes)
            ),
            "choose a smaller --size or fewer --nodes, or a roomier place with --keep DIR or TMPDIR",
        ))
    }

    /// Clears up. What stays is named: all of it with `--keep`, the logs after a failure, else nothing.
    ///
    /// # Errors
    /// Something could not be removed.
    pub(crate) fn leave(self, good: bool) -> io::Result<Option<String>> {
        let Some(temporary) = self.temporary else {
            return Ok(Some(format!("all of it is kept in {}", show(&self.path))));
        };
        let logs = cluster::logs(&self.path);
        if good || !logs.exists() {
            return temporary.close().map(|()| None);
        }
        let kept = temporary.keep();
        for entry in fs::read_dir(&kept)? {
            let path = entry?.path();
            if path == logs {
                continue;
            }
            if path.is_dir() {
                fs::remove_dir_all(path)?;
            } else {
                fs::remove_file(path)?;
            }
        }
        Ok(Some(format!("the daemons' logs are kept in {}", show(&logs))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_good_run_nothing_is_left() {
        let place = Workplace::new(None).unwrap();
        let path = place.path().to_owned();
        fs::create_dir(cluster::logs(&path)).unwrap();
        assert_eq!(place.leave(true).unwrap(), None);
        assert!(!path.exists());
    }

    #[test]
    fn after_a_failure_the_logs_stay_and_nothing_else() {
        let place = Workplace::new(None).unwrap();
        let path = place.path().to_owned();
        fs::create_dir(cluster::logs(&path)).unwrap();
        fs::create_dir(path.join("n1")).unwrap();
        fs::write(path.join("payload.bin"), b"x").unwrap();
        let kept = place.leave(false).unwrap().unwrap();
        assert!(kept.contains(&show(&cluster::logs(&path))), "{kept}");
        let left: Vec<_> = fs::read_dir(&path).unwrap().collect();
        assert_eq!(left.len(), 1);
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_kept_directory_must_be_empty() {
        let dir = tempfile::tempdir().unwrap();
        let keep = dir.path().join("new");
        let place = Workplace::new(Some(&keep)).unwrap();
        fs::write(keep.join("x"), b"x").unwrap();
        assert!(place.leave(false).unwrap().is_some());
        assert!(keep.join("x").exists());
        assert_eq!(Workplace::new(Some(&keep)).map(|_| ()).unwrap_err().exit(), 2);
    }

    #[test]
    fn too_little_room_is_said_before_a_byte_is_written() {
        let place = Workplace::new(None).unwrap();
        assert!(place.need(1).is_ok());
        assert!(place.need(u64::MAX).is_err());
    }
}
