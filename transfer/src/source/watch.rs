//! Whether the source is still the file that it was.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use stage_core::chunk::ChunkIndex;
use stage_core::digest::chunk_digest;
use stage_core::failure::{Code, Failure};
use stage_core::manifest::Manifest;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::Shared;
use crate::fault;
use crate::sparse::holes_are_zero;
use crate::store::map::is_dense;
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
    remote: bool,
}

impl Fingerprint {
    pub(super) fn of(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        Ok(Self {
            size: meta.len(),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            ctime: (meta.ctime(), meta.ctime_nsec()),
            inode: (meta.dev(), meta.ino()),
            remote: is_remote(file),
        })
    }

    /// Whether it is the file that the manifest was made of; else what is different.
    pub(super) fn is_of(&self, manifest: &Manifest) -> Result<(), String> {
        let size = manifest.file_size().0;
        if self.size != size {
            return Err(format!("its size went from {size} to {} bytes", self.size));
        }
        let mtime = manifest.entries.first().map(|entry| entry.mtime);
        if mtime.is_some_and(|(s, ns)| !is_jitter((s, i64::from(ns)), self.mtime)) {
            return Err("it was written to".to_owned());
        }
        Ok(())
    }

    /// What has changed, if anything has.
    fn differs(&self, before: &Self) -> Differs {
        if self.size != before.size {
            Differs::Surely(format!(
                "its size went from {} to {} bytes",
                before.size, self.size
            ))
        } else if self.inode != before.inode {
            Differs::Surely("it is another file now".to_owned())
        } else if self.mtime != before.mtime && (self.was_written() || !is_jitter(self.mtime, before.mtime)) {
            // What was not read before cannot be compared with what it was then.
            Differs::Surely("it was written to".to_owned())
        } else if (self.mtime, self.ctime) != (before.mtime, before.ctime) {
            Differs::Perhaps
        } else {
            Differs::No
        }
    }

    /// A write sets both times to the same moment, and only there is a file system's word on them exact.
    fn was_written(&self) -> bool {
        !self.remote && self.mtime == self.ctime
    }
}

/// Whether a file has changed, as far as can be told without reading it.
#[derive(Debug, PartialEq, Eq)]
enum Differs {
    No,
    /// Its times did, which mode, owner, links and the jitter of network file systems explain as well as a write.
    Perhaps,
    Surely(String),
}

/// Network file systems keep times in grains of up to two seconds, and tell now the exact, now the rounded one.
fn is_jitter(one: (i64, i64), other: (i64, i64)) -> bool {
    let nanos = |(s, ns): (i64, i64)| i128::from(s) * 1_000_000_000 + i128::from(ns);
    (nanos(one) - nanos(other)).abs() <= 2_000_000_000
}

/// Whether a file lies on another host or behind a daemon, whose clocks and caches have a say in its times: NFS, AFS,
/// FUSE, the SMBs, Ceph, 9p, Lustre, BeeGFS, GPFS, GFS2, OCFS2.
fn is_remote(file: &File) -> bool {
    const REMOTE: [u32; 13] = [
        0x6969,
        0x5346_414f,
        0x6573_5546,
        0x517b,
        0xff53_4d42,
        0xfe53_4d42,
        0x00c3_6400,
        0x0102_1997,
        0x0bd0_0bd0,
        0x1983_0326,
        0x4750_4653,
        0x0116_1970,
        0x7461_636f,
    ];
    rustix::fs::fstatfs(file).is_ok_and(|stat| REMOTE.contains(&(stat.f_type as u32)))
}

pub(super) fn changed(what: &str, when: &str) -> Failure {
    Failure::new(
        Code::SourceChanged,
        format!("the source changed while it was sent: {what}, {when}"),
        "push again once nothing writes to it",
    )
}

impl Shared {
    /// Whether the file's content is still what it was when the push began. Where only its times say otherwise, all that
    /// was read is read again and compared with what was sent.
    pub(super) fn unchanged(&self) -> Result<(), Failure> {
        let failed = |error| {
            Failure::new(
                Code::SourceIo,
                format!("looking at the source failed: {error}"),
                "look at the file system on the source's node",
            )
        };
        let now = Fingerprint::of(&self.file).map_err(failed)?;
        // A file that was removed still arrives; one that another was put in the place of is not what was meant.
        if let Ok(meta) = std::fs::metadata(&self.place)
            && (meta.dev(), meta.ino()) != now.inode
        {
            return Err(self.changed("another file was put in its place"));
        }
        let read = lock(&self.progress).read;
        let before = *lock(&self.before);
        match now.differs(&before) {
            Differs::No => Ok(()),
            Differs::Surely(what) => Err(self.changed(&what)),
            Differs::Perhaps => {
                self.compare_again(read)?;
                *lock(&self.before) = now;
                Ok(())
            }
        }
    }

    fn changed(&self, what: &str) -> Failure {
        let passed = self.begun.elapsed().as_secs();
        changed(what, &format!("noticed {passed} s after the push began"))
    }

    /// Reads the first so many chunks again, if not stopped meanwhile.
    fn compare_again(&self, read: u32) -> Result<(), Failure> {
        let store = &self.store;
        let mut bytes = Vec::new();
        for index in (0..read).map(ChunkIndex) {
            if self.is_stopped() || self.has_failed() {
                return Ok(());
            }
            bytes.resize(store.layout().len(index), 0);
            store.read(index, 0, &mut bytes)?;
            self.bytes_read.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            if store.digest(index) != Some(chunk_digest(store.hash(), &bytes)) {
                return Err(self.changed(&format!("chunk {index} reads differently now")));
            }
        }
        tracing::info!(
            path = self.path,
            chunks = read,
            "the source's times changed and its content did not"
        );
        Ok(())
    }

    /// Whether nothing was written into what was not sent.
    pub(super) fn holes_unchanged(&self) -> Result<(), Failure> {
        let entry = self.store.map()?.entry(0);
        if is_dense(entry) {
            return Ok(());
        }
        match holes_are_zero(&self.file, entry) {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.changed("a hole of it was written to")),
            Err(error) => Err(fault::of_source(&error)),
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
        let begun = Instant::now();
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
        // Where times change all the while, comparing again takes a tenth of the reading at most.
        tokio::select! {
            () = shared.stopping.cancelled() => return,
            () = sleep_until(Instant::now() + begun.elapsed() * 10) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // R30, R31.
    #[test]
    fn a_write_is_told_from_times_that_jitter() {
        let before = Fingerprint {
            size: 9,
            mtime: (100, 500_000_000),
            ctime: (100, 500_000_000),
            inode: (1, 2),
            remote: false,
        };
        assert_eq!(before.differs(&before), Differs::No);
        let surely = |now: Fingerprint| matches!(now.differs(&before), Differs::Surely(_));
        let perhaps = |now: Fingerprint| now.differs(&before) == Differs::Perhaps;
        let times = |mtime, ctime, remote| Fingerprint {
            mtime,
            ctime,
            remote,
            ..before
        };
        // A mode, a name, a time that was set.
        assert!(perhaps(times(before.mtime, (160, 0), false)));
        assert!(perhaps(times((101, 0), (160, 0), false)));
        // A write, however soon after the last one; and how rounding looks.
        assert!(surely(times((101, 0), (101, 0), false)));
        assert!(perhaps(times((101, 0), (101, 0), true)));
        assert!(perhaps(times((98, 500_000_000), (98, 500_000_000), true)));
        assert!(surely(times((103, 0), (103, 0), true)));
        assert!(surely(times((160, 0), (170, 0), false)));
        assert!(surely(Fingerprint { size: 8, ..before }));
    }
}
