//! Space that jobs under way were promised and have not taken yet, so that two of them are not promised the same.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::fd::BorrowedFd;
use stage_core::units::ByteCount;

use crate::root::free_space;

/// The promises of one agent, by file system.
#[derive(Debug, Default)]
pub(crate) struct Spaces {
    promised: Mutex<HashMap<u64, Vec<Weak<AtomicU64>>>>,
}

/// One job's promise on one file system; dropped, it is taken back.
#[derive(Debug, Clone, Default)]
pub(crate) struct Promise {
    outstanding: Arc<AtomicU64>,
}

impl Spaces {
    /// Promises so many bytes where `dir` lies.
    ///
    /// # Errors
    /// By how much that is more than there is, less what others were promised; or the file system's error.
    pub(crate) fn promise(
        &self,
        dir: BorrowedFd<'_>,
        need: ByteCount,
    ) -> rustix::io::Result<Result<Promise, ByteCount>> {
        let device = rustix::fs::fstat(dir)?.st_dev;
        let mut promised = self.promised.lock().unwrap_or_else(PoisonError::into_inner);
        let all = promised.entry(device).or_default();
        all.retain(|other| other.strong_count() > 0);
        // Under the lock: what others take of their promise in this moment is counted twice, never not at all.
        let others: u64 = all
            .iter()
            .filter_map(Weak::upgrade)
            .map(|other| other.load(Ordering::Relaxed))
            .sum();
        let free = free_space(dir)?.0.saturating_sub(others);
        if need.0 > free {
            return Ok(Err(ByteCount(need.0 - free)));
        }
        let promise = Promise {
            outstanding: Arc::new(AtomicU64::new(need.0)),
        };
        all.push(Arc::downgrade(&promise.outstanding));
        Ok(Ok(promise))
    }
}

impl Promise {
    /// So many bytes of it have been taken.
    pub(crate) fn take(&self, bytes: u64) {
        let less = |left: u64| Some(left.saturating_sub(bytes));
        // Always changes something, so there is no error.
        let _ = self
            .outstanding
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn what_was_promised_is_not_promised_again() {
        let dir = tempfile::tempdir().unwrap();
        let dir = std::fs::File::open(dir.path()).unwrap();
        let free = free_space(dir.as_fd()).unwrap();
        // Others write there meanwhile: with a wide margin.
        let most = ByteCount(free.0 / 4 * 3);
        let spaces = Spaces::default();
        let promise = spaces.promise(dir.as_fd(), most).unwrap().unwrap();
        assert!(spaces.promise(dir.as_fd(), most).unwrap().is_err());
        promise.take(most.0);
        let second = spaces.promise(dir.as_fd(), most).unwrap().unwrap();
        promise.take(1);
        drop(second);
        assert!(spaces.promise(dir.as_fd(), most).unwrap().is_ok());
    }
}
