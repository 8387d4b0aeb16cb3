//! Whether the source is still the file that it was.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;
use std::time::Duration;

use stage_core::failure::{Code, Failure};
use stage_core::manifest::Manifest;
use tokio::time::{MissedTickBehavior, interval};

use super::Shared;
use crate::sync::lock;

/// How often it is looked at.
const LOOK: Duration = Duration::from_secs(2);

/// What tells a file from a changed one without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fingerprint {
    size: u64,
    mtime: (i64, i64),
    ctime: (i64, i64),
    inode: (u64, u64),
}

impl Fingerprint {
    pub(super) fn of(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        Ok(Self {
            size: meta.len(),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            ctime: (meta.ctime(), meta.ctime_nsec()),
            inode: (meta.dev(), meta.ino()),
        })
    }

    /// Whether it is the file that the manifest was made of; else what is different.
    pub(super) fn is_of(&self, manifest: &Manifest) -> Result<(), String> {
        let size = manifest.payload_size().0;
        if self.size != size {
            return Err(format!("its size went from {size} to {} bytes", self.size));
        }
        let mtime = manifest.entries.first().map(|entry| entry.mtime);
        if mtime.is_some_and(|(s, ns)| (s, i64::from(ns)) != self.mtime) {
            return Err("it was written to".to_owned());
        }
        Ok(())
    }

    /// What has changed, if anything has.
    fn differs(&self, before: &Self) -> Option<String> {
        if self.size != before.size {
            Some(format!(
                "its size went from {} to {} bytes",
                before.size, self.size
            ))
        } else if self.mtime != before.mtime {
            Some("it was written to".to_owned())
        } else if self.ctime != before.ctime {
            Some("its inode was changed (content with its time set back, mode, owner or links)".to_owned())
        } else if self.inode != before.inode {
            Some("it is another file now".to_owned())
        } else {
            None
        }
    }
}

pub(super) fn changed(what: &str, when: &str) -> Failure {
    Failure::new(
        Code::SourceChanged,
        format!("the source changed while it was sent: {what}, {when}"),
        "push again once nothing writes to it",
    )
}

impl Shared {
    /// Whether the file is still what it was when the push began.
    pub(super) fn unchanged(&self) -> Result<(), Failure> {
        let now = Fingerprint::of(&self.file).map_err(|error| {
            Failure::new(
                Code::SourceIo,
                format!("looking at the source failed: {error}"),
                "look at the file system on the source's node",
            )
        })?;
        match now.differs(&self.before) {
            None => Ok(()),
            Some(what) => Err(changed(
                &what,
                &format!(
                    "noticed {} s after the push began",
                    self.begun.elapsed().as_secs()
                ),
            )),
        }
    }
}

/// Looks at the file until FINAL is declared. What happens to it later, its readers find out by digests.
pub(super) async fn run(shared: Arc<Shared>) {
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = shared.stopping.cancelled() => return,
            _ = look.tick() => {}
        }
        {
            let progress = lock(&shared.progress);
            if progress.declared || progress.failed {
                return;
            }
        }
        let looked = shared.clone();
        let end = tokio::task::spawn_blocking(move || {
            let seen = looked.unchanged();
            let failed = seen.err().or_else(|| lock(&looked.served.failure).clone());
            if let Some(failure) = failed {
                looked.fail(failure);
            }
        });
        if end.await.is_err() {
            return;
        }
    }
}
