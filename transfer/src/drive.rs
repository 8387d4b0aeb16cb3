//! What the threads of a source share, be it files or a pipe: how far the work is, who waits for that, and how they are
//! told to stop.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use stage_core::assignment::SourceReport;
use stage_core::failure::{Code, Failure};
use stage_core::units::Rate;
use tokio::sync::mpsc;

use crate::clock::Doing;
use crate::frame::Waits;
use crate::outbound::Served;
use crate::pace::Pacer;
use crate::sync::lock;

/// How late a stop is seen by whoever waits for something else.
pub(crate) const LOOK: Duration = Duration::from_millis(100);

/// Why a thread's work ended before its end.
pub(crate) enum End {
    Stopped,
    Failed(Failure),
}

/// How far a source is.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Chunks that are here, from the first on.
    pub(crate) read: u32,
    /// No more comes: a pipe has no other way to say how much there is.
    pub(crate) ended: bool,
    /// The digests of all of it are known, and as expected.
    pub(crate) digested: bool,
    /// FINAL is declared.
    pub(crate) declared: bool,
    failed: bool,
}

/// The common part of a source's threads.
pub(crate) struct Drive {
    pub(crate) served: Arc<Served>,
    /// What may be read a second.
    pub(crate) pace: Pacer,
    /// Read so far, again counted again.
    pub(crate) bytes_read: AtomicU64,
    /// Passed by the SHA-256 lane.
    pub(crate) sha256_bytes: AtomicU64,
    events: mpsc::Sender<SourceReport>,
    progress: Mutex<Progress>,
    progressed: Condvar,
    stop: AtomicBool,
}

impl Drive {
    pub(crate) fn new(served: Arc<Served>, limit: Option<Rate>, events: mpsc::Sender<SourceReport>) -> Self {
        Self {
            served,
            pace: Pacer::new(limit),
            bytes_read: AtomicU64::new(0),
            sha256_bytes: AtomicU64::new(0),
            events,
            progress: Mutex::default(),
            progressed: Condvar::new(),
            stop: AtomicBool::new(false),
        }
    }

    /// What says that all threads are to stop.
    pub(crate) fn stop(&self) -> &AtomicBool {
        &self.stop
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Whether nothing more is to be done, for whatever reason.
    pub(crate) fn is_over(&self) -> bool {
        self.is_stopped() || lock(&self.progress).failed
    }

    /// Tells all threads to stop, and serves nobody any more.
    pub(crate) fn halt(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.wake();
        self.served.end();
    }

    /// Says something, from a thread; gives up when stopped.
    pub(crate) fn say(&self, mut report: SourceReport) {
        while !self.is_stopped() {
            match self.events.try_send(report) {
                Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => return,
                Err(mpsc::error::TrySendError::Full(back)) => report = back,
            }
            std::thread::sleep(LOOK / 5);
        }
    }

    /// The source cannot go on: said once, and nothing more is read.
    pub(crate) fn fail(&self, failure: Failure) {
        let first = !std::mem::replace(&mut lock(&self.progress).failed, true);
        self.wake();
        if first {
            self.say(SourceReport::Failed(failure.on(&self.served.node)));
        }
    }

    /// How far it is, by a question.
    pub(crate) fn look<T>(&self, at: impl FnOnce(&Progress) -> T) -> T {
        at(&lock(&self.progress))
    }

    /// Changes what is known of the progress, and wakes who waits for it.
    pub(crate) fn advance(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut lock(&self.progress));
        self.wake();
    }

    /// Has all who wait look again.
    pub(crate) fn wake(&self) {
        self.progressed.notify_all();
    }

    /// Blocks until `ready` says so; `false` if the source has stopped or failed before.
    pub(crate) fn wait(&self, ready: impl Fn(&Progress) -> bool) -> bool {
        let mut progress = lock(&self.progress);
        loop {
            if self.is_stopped() || progress.failed {
                return false;
            }
            if ready(&progress) {
                return true;
            }
            let wait = self.progressed.wait_timeout(progress, LOOK);
            progress = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drive {
    /// Sleeps as long as the limit says.
    pub(crate) fn pause(&self, bytes: usize) -> Result<(), End> {
        let passed = self.served.reader.time(Doing::Limit, || {
            self.pace.wait(bytes, || {
                // Asked only when there is something to wait for.
                self.wait_as(Waits::Limit);
                self.is_over()
            })
        });
        if passed { Ok(()) } else { Err(End::Stopped) }
    }

    /// What the beat says that the bytes wait for.
    pub(crate) fn wait_as(&self, waits: Waits) {
        *lock(&self.served.waits) = waits;
    }
}

/// A thread of a source could not be started.
pub(crate) fn no_thread(error: &std::io::Error) -> Failure {
    Failure::new(
        Code::Internal,
        format!("no thread for the source: {error}"),
        "raise the agent's limit of tasks",
    )
}
