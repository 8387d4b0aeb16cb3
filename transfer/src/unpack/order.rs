//! The payload's bytes in their order, each as soon as it is here.

use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

use stage_core::chunk::ChunkIndex;

use crate::store::{Store, Watcher};

/// How long a reader sleeps at most before it looks again.
const LOOK: Duration = Duration::from_millis(200);

/// What wakes the reader.
#[derive(Debug, Default)]
pub(super) struct Shared {
    stopped: Mutex<bool>,
    changed: Condvar,
    /// Bytes that were read.
    read: AtomicU64,
}

impl Shared {
    pub(super) fn stop(&self) {
        *self.stopped.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    pub(super) fn is_stopped(&self) -> bool {
        *self.stopped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many bytes of the payload were read so far.
    pub(super) fn read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Sleeps until something has changed; `false` when stopped.
    fn wait(&self) -> bool {
        let stopped = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        if *stopped {
            return false;
        }
        let (stopped, _) = self
            .changed
            .wait_timeout(stopped, LOOK)
            .unwrap_or_else(PoisonError::into_inner);
        !*stopped
    }
}

impl Watcher for Shared {
    fn arrived(&self, _: ChunkIndex) {
        self.changed.notify_all();
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct InOrder {
    store: Arc<Store>,
    shared: Arc<Shared>,
    index: ChunkIndex,
    at: usize,
}

impl InOrder {
    /// From the first chunk of data on.
    pub(super) fn new(store: &Arc<Store>) -> Self {
        let shared = Arc::new(Shared::default());
        let watcher: Weak<dyn Watcher> = Arc::<Shared>::downgrade(&shared);
        store.watch(watcher);
        Self {
            store: store.clone(),
            shared,
            index: ChunkIndex(store.layout().head_count()),
            at: 0,
        }
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Read for InOrder {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            let layout = self.store.layout();
            if !layout.is_open() && self.index.0 >= layout.count() {
                return Ok(0);
            }
            if self.store.has(self.index) {
                let len = self.store.len(self.index);
                let now = buf.len().min(len - self.at);
                let read = match self.store.hot(self.index) {
                    Some(bytes) => {
                        buf[..now].copy_from_slice(&bytes[self.at..self.at + now]);
                        Ok(())
                    }
                    None => self.store.read(self.index, self.at, &mut buf[..now]),
                };
                // One that cannot be read is not here any more, and comes again.
                if read.is_ok() {
                    self.at += now;
                    self.shared.read.fetch_add(now as u64, Ordering::Relaxed);
                    if self.at == len {
                        self.index.0 += 1;
                        self.at = 0;
                    }
                    return Ok(now);
                }
            }
            if !self.shared.wait() {
                return Err(io::Error::other("stopped"));
            }
        }
    }
}
