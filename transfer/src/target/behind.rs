//! Write-back behind the writers: what has come goes to the disk while the rest is under way, so that a large file neither
//! fills memory up to the kernel's limit, where everybody who writes is held up, nor leaves all of it to the last fsync.
//!
//! It is `fdatasync` on a thread of its own, a file at a time. `sync_file_range` would do with less, but says nothing of
//! errors; and where nothing is to be written (tmpfs) both cost nothing.

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};

use rustix::fs::Advice;
use stage_core::assignment::Cache;
use stage_core::failure::Failure;

use crate::fault;

/// The disk is set to work for so many bytes at once: a tenth of a second or so of most disks.
const STEP: u64 = 64 << 20;

/// The write-back of one target.
#[derive(Debug)]
pub(super) struct Behind {
    cache: Cache,
    written: AtomicU64,
    thread: OnceLock<SyncSender<Work>>,
    failure: Arc<OnceLock<Failure>>,
}

#[derive(Debug)]
struct Work {
    file: File,
    shown: String,
}

impl Behind {
    pub(super) fn new(cache: Cache) -> Self {
        Self {
            cache,
            written: AtomicU64::new(0),
            thread: OnceLock::new(),
            failure: Arc::default(),
        }
    }

    /// So many bytes more were written to a file. `file` gives it, with its path for people, if it is to be written back now.
    pub(super) fn wrote(&self, bytes: usize, file: impl FnOnce() -> std::io::Result<(File, String)>) {
        let bytes = bytes as u64;
        let before = self.written.fetch_add(bytes, Ordering::Relaxed);
        if before / STEP == (before + bytes) / STEP {
            return;
        }
        // All this only saves time: what is left undone here the last fsync does.
        let Ok((file, shown)) = file() else { return };
        let thread = self.thread.get_or_init(|| {
            let (send, work) = sync_channel(1);
            let (cache, failure) = (self.cache, self.failure.clone());
            let thread = std::thread::Builder::new().name("write-back".into());
            // Nobody waits for its end, since a sick disk may take minutes: it has nothing but descriptors of its own, and
            // ends after what it is doing when there is no sender any more.
            if let Err(error) = thread.spawn(move || run(&work, cache, &failure)) {
                tracing::warn!(%error, "no thread writes back");
            }
            send
        });
        // It has enough to do if there is no room: the bytes go with the next step.
        let _ = thread.try_send(Work { file, shown });
    }

    /// What could not be written. The kernel has said it once, and would not say it to the last fsync.
    pub(super) fn failure(&self) -> Option<&Failure> {
        self.failure.get()
    }
}

fn run(work: &Receiver<Work>, cache: Cache, failure: &OnceLock<Failure>) {
    for Work { file, shown } in work {
        if let Err(error) = rustix::fs::fdatasync(&file) {
            let _ = failure.set(fault::of(error, "writing back", &shown));
            return;
        }
        if cache == Cache::Drop {
            // A hint; what is dirty by now stays.
            let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn the_disk_is_set_to_work_step_by_step() {
        let behind = Behind::new(Cache::Drop);
        let mut due = Vec::new();
        for at in 0..6 {
            behind.wrote(STEP as usize / 2, || {
                due.push(at);
                Ok((tempfile::tempfile()?, "a file".to_owned()))
            });
        }
        assert_eq!(due, [1, 3, 5]);
        assert_eq!(behind.failure(), None);
    }

    #[test]
    fn what_does_not_reach_the_disk_is_known_before_the_last_fsync() {
        let behind = Behind::new(Cache::Keep);
        behind.wrote(STEP as usize, || {
            // Something that cannot be synced.
            Ok((File::open("/proc/self/stat")?, "/scratch/x".to_owned()))
        });
        let since = Instant::now();
        while behind.failure().is_none() {
            assert!(since.elapsed() < Duration::from_secs(10));
            std::thread::yield_now();
        }
        assert_eq!(behind.failure().unwrap().path.as_deref(), Some("/scratch/x"));
    }
}
