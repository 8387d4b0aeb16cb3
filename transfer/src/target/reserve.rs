//! Space for the partial, taken before bytes come.
//!
//! Most file systems promise terabytes in milliseconds; some (tmpfs) take each page at once, a quarter of a second of
//! CPU per GiB, which the writes then save. So what is not done in a moment goes on in a thread of its own, in small
//! steps, while the first chunks come in: nobody waits for it, and a disk that is filled by others meanwhile is
//! noticed before the network has brought what cannot be kept.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use stage_core::chunk::UNKNOWN;
use stage_core::failure::{Code, Failure, Shortage};
use stage_core::manifest::Entry;
use stage_core::units::ByteCount;

use super::site::Site;
use super::space::Promise;
use crate::root::{free_inodes, free_space};
use crate::store::map::{data_runs, size_of};
use crate::sync::lock;

/// What the preparing waits for: it stands in the way of every push.
const MOMENT: Duration = Duration::from_millis(10);
/// The first step of preparing; each is twice the one before, so that a terabyte that is only promised takes 18.
const FIRST_STEP: u64 = 4 << 20;
/// A step beside the transfer: it keeps the file's writers waiting for 2 ms.
const STEP: u64 = 8 << 20;

/// The partial file, and the thread that takes its space if that takes long.
#[derive(Debug)]
pub(crate) struct Partial {
    pub(crate) file: File,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    failure: OnceLock<Failure>,
    /// Who changes the file. The file system lets in one at a time anyway, but there who waits spins.
    turn: Mutex<()>,
}

impl Partial {
    /// A partial that has all its space.
    pub(super) fn whole(file: File) -> Self {
        Self {
            file,
            shared: Arc::default(),
            thread: None,
        }
    }

    /// Writes bytes to their place.
    pub(super) fn write(&self, bytes: &[u8], at: u64) -> std::io::Result<()> {
        let _turn = lock(&self.shared.turn);
        self.file.write_all_at(bytes, at)
    }

    /// Gives the partial its size, and the blocks of its data where the file system can.
    ///
    /// # Errors
    /// There is too little space, with the numbers.
    pub(super) fn reserve(
        file: File,
        site: &Arc<Site>,
        entry: &Entry,
        promise: &Promise,
    ) -> Result<Self, Failure> {
        Self::reserve_within(MOMENT, file, site, entry, promise)
    }

    fn reserve_within(
        moment: Duration,
        file: File,
        site: &Arc<Site>,
        entry: &Entry,
        promise: &Promise,
    ) -> Result<Self, Failure> {
        let need = ByteCount(entry.data_len());
        if need == UNKNOWN {
            // Of a stream nobody knows what it needs: what comes is written as long as there is space.
            return Ok(Self::whole(file));
        }
        let fail = |e| site.fault(e, "reserving space");
        let stat = rustix::fs::fstat(&file).map_err(fail)?;
        let held = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
        let missing = need.0.saturating_sub(held);
        // Asked first, because the refusal of fallocate has no numbers.
        let free = free_space(site.held.fd()).map_err(fail)?;
        if missing > free.0 {
            return Err(no_space(
                site,
                need,
                ByteCount(missing),
                ByteCount(missing - free.0),
            ));
        }
        if stat.st_size.cast_unsigned() != size_of(entry).0 {
            rustix::fs::ftruncate(&file, size_of(entry).0).map_err(fail)?;
        }
        let mut rest = data_runs(entry);
        // Taken from the end.
        rest.reverse();
        let started = Instant::now();
        let mut step = FIRST_STEP;
        while started.elapsed() < moment {
            if !take(&file, &mut rest, step, site, need, promise)? {
                return Ok(Self::whole(file));
            }
            step = step.saturating_mul(2);
        }
        let fail = |e: &std::io::Error| crate::fault::of_std(e, "reserving space", &site.shown);
        let shared = Arc::new(Shared::default());
        let thread = std::thread::Builder::new().name("reserve".into()).spawn({
            let file = file.try_clone().map_err(|e| fail(&e))?;
            let (shared, site, promise) = (shared.clone(), site.clone(), promise.clone());
            move || shared.run(&file, rest, &site, need, &promise)
        });
        Ok(Self {
            file,
            shared,
            thread: Some(thread.map_err(|e| fail(&e))?),
        })
    }

    /// Why the space could not be taken, once that is known.
    pub(super) fn failure(&self) -> Option<&Failure> {
        self.shared.failure.get()
    }

    /// No more space is wanted: all is written, or nothing will be.
    pub(super) fn stop_reserving(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It ends after a step at most. A panic of its own has been reported by the panic hook.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(
        &self,
        file: &File,
        mut rest: Vec<Range<u64>>,
        site: &Arc<Site>,
        need: ByteCount,
        promise: &Promise,
    ) {
        while !self.stop.load(Ordering::Relaxed) {
            let started = Instant::now();
            let taken = {
                let _turn = lock(&self.turn);
                take(file, &mut rest, STEP, site, need, promise)
            };
            match taken {
                Ok(true) => {}
                Ok(false) => return,
                Err(failure) => {
                    tracing::warn!(path = site.shown, "{failure}");
                    let _ = self.failure.set(failure);
                    return;
                }
            }
            // Half of the time belongs to the transfer.
            std::thread::park_timeout(started.elapsed());
        }
    }
}

/// Takes the next so many bytes of space; `false` when nothing is left to take.
fn take(
    file: &File,
    rest: &mut Vec<Range<u64>>,
    step: u64,
    site: &Arc<Site>,
    need: ByteCount,
    promise: &Promise,
) -> Result<bool, Failure> {
    let Some(run) = rest.last_mut() else {
        return Ok(false);
    };
    let len = step.min(run.end - run.start);
    match rustix::fs::fallocate(file, FallocateFlags::empty(), run.start, len) {
        Ok(()) => {}
        Err(Errno::INTR) => return Ok(true),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            tracing::warn!(
                path = site.shown,
                "the file system cannot reserve space; going on without"
            );
            return Ok(false);
        }
        Err(Errno::NOSPC) => {
            let left: u64 = rest.iter().map(|run| run.end - run.start).sum();
            return Err(full(site, need, ByteCount(left)));
        }
        Err(e) => return Err(site.fault(e, "reserving space")),
    }
    run.start += len;
    promise.take(len);
    if run.is_empty() {
        rest.pop();
    }
    Ok(!rest.is_empty())
}

/// The file system of the site is full, and so much more was wanted.
pub(crate) fn full(site: &Site, size: ByteCount, needs: ByteCount) -> Failure {
    if is_out_of_inodes(site) {
        return no_inodes(site, None);
    }
    let free = free_space(site.held.fd()).map_or(0, |free| free.0);
    no_space(site, size, needs, ByteCount(needs.0.saturating_sub(free).max(1)))
}

/// Whether the site's file system, where space is left or not, takes no more files.
pub(crate) fn is_out_of_inodes(site: &Site) -> bool {
    matches!(free_inodes(site.held.fd()), Ok(Some(0)))
}

/// So many files and directories are still to be made, and so many more the file system takes.
pub(crate) fn no_inodes(site: &Site, needs: Option<(u64, u64)>) -> Failure {
    let numbers = match needs {
        Some((needs, free)) => format!("needs {needs}, free {free}"),
        None => "the file system takes no more files".to_owned(),
    };
    Failure::new(
        Code::NoSpace,
        format!("no inodes left: {numbers}"),
        "remove files there, or push to another root; as one file (a tar) it needs one inode",
    )
    .at(site.shown.clone())
}

/// There is too little space for what is still wanted of a payload.
pub(super) fn no_space(site: &Site, size: ByteCount, needs: ByteCount, short_by: ByteCount) -> Failure {
    let mut failure = Failure::new(
        Code::NoSpace,
        format!("no space for {size}: short by {short_by}"),
        "make room there, or push to another root",
    )
    .at(site.shown.clone());
    failure.space = Some(Box::new(Shortage { needs, short_by }));
    failure
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use stage_core::assignment::Place;
    use stage_core::id::JobId;
    use stage_core::manifest::Manifest;
    use stage_core::payload::UnitKind;

    use super::*;
    use crate::root::Roots;

    #[test]
    fn what_takes_long_goes_on_beside_the_transfer() {
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots::open(vec![("main".parse().unwrap(), dir.path().to_owned())]);
        let place = Place::Root {
            root: None,
            dir: Vec::new(),
        };
        let held = roots.resolve(&place).unwrap();
        let site = Arc::new(Site::new(
            Arc::new(held),
            b"x",
            UnitKind::File,
            JobId::from_random([1; 16]),
            0,
        ));
        let size = 3 * STEP + 5;
        let manifest = Manifest::single_file(b"x", ByteCount(size), 0o600, (0, 0));
        let entry = &manifest.entries[0];
        let promise = Promise::default();
        let file = tempfile::tempfile_in(dir.path()).unwrap();
        let look = file.try_clone().unwrap();
        let mut partial = Partial::reserve_within(Duration::ZERO, file, &site, entry, &promise).unwrap();
        assert_eq!(look.metadata().unwrap().len(), size);
        let thread = partial.thread.take();
        thread
            .expect("no moment was given to do it at once")
            .join()
            .unwrap();
        assert!(look.metadata().unwrap().blocks() * 512 >= size);
        assert_eq!(partial.failure(), None);

        // One that is not wanted any more ends by itself.
        let file = tempfile::tempfile_in(dir.path()).unwrap();
        let partial = Partial::reserve_within(Duration::ZERO, file, &site, entry, &promise).unwrap();
        partial.stop_reserving();
        drop(partial);
    }
}
