//! Where a measurement's bytes become durable while they come: what a root takes from the network.
//!
//! As in a push, the threads that read the network write to the page cache; another one makes what was written durable
//! all the while, stretch by stretch. Who writes waits once two stretches are not yet on the disk, and leaves the bytes to
//! the socket. So network and disk work side by side where the host lets them, and one that does not shows: it takes turns.

use std::io::{self, Read};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use stage_core::failure::Failure;
use stage_core::units::{ByteCount, Rate};

use super::{BLOCK, LONGEST, disk};
use crate::fault;
use crate::root::Roots;
use crate::sync::lock;

/// The first stretch.
const FIRST: u64 = 4 << 20;
/// A stretch should take about so long: several fit into a measurement.
const STRETCH: Duration = Duration::from_millis(100);
/// Who waits for the disk looks this often whether it is over.
const LOOK: Duration = Duration::from_millis(50);

/// See the module.
pub(crate) struct Sink {
    shared: Arc<Shared>,
    syncer: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    file: OwnedFd,
    /// The file grows no larger: from here on it is written anew from its beginning.
    most: u64,
    /// Places that are taken.
    next: AtomicU64,
    run_up: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    written: u64,
    durable: u64,
    stretch: u64,
    /// When the first byte came.
    begun: Option<Instant>,
    /// When how much was durable.
    marks: Vec<(Instant, u64)>,
    ended: Option<Instant>,
    failed: Option<io::Error>,
}

impl Sink {
    /// Makes a file without a name in the first root, which holds `most` bytes at most, and counts from `run_up` after the first
    /// byte on. `Ok(None)`: there is no root, or too little room.
    ///
    /// # Errors
    /// The root's.
    pub(crate) fn open(roots: &Roots, most: ByteCount, run_up: Duration) -> Result<Option<Self>, Failure> {
        let Some((_, shown, directory)) = roots.directories().next() else {
            return Ok(None);
        };
        let dir = directory?;
        let Ok(most) = disk::room(dir.as_fd(), &shown, most)? else {
            return Ok(None);
        };
        let most = most.max(FIRST).next_multiple_of(BLOCK as u64);
        let file = disk::nameless(dir.as_fd())
            .map_err(|errno| fault::of(errno, "making a file to measure with", &shown))?;
        let shared = Arc::new(Shared {
            file,
            most,
            next: AtomicU64::new(0),
            run_up,
            state: Mutex::new(State {
                written: 0,
                durable: 0,
                stretch: FIRST,
                begun: None,
                marks: Vec::new(),
                ended: None,
                failed: None,
            }),
            changed: Condvar::new(),
        });
        let syncer = std::thread::Builder::new().name("probe-sync".to_owned()).spawn({
            let shared = shared.clone();
            move || shared.sync()
        });
        let syncer = syncer.map_err(|error| {
            Failure::new(
                stage_core::failure::Code::Io,
                format!("a thread cannot be started: {error}"),
                "look at the host's limits",
            )
        })?;
        Ok(Some(Self {
            shared,
            syncer: Mutex::new(Some(syncer)),
        }))
    }

    /// Writes down what comes until the connection or the measurement ends. Blocks.
    ///
    /// # Errors
    /// The connection's, or the disk's.
    pub(crate) fn keep(&self, conn: &mut impl Read) -> io::Result<()> {
        let begun = Instant::now();
        let mut block = vec![0; BLOCK];
        while begun.elapsed() < LONGEST {
            let mut filled = 0;
            while filled < block.len() {
                match conn.read(&mut block[filled..])? {
                    0 => break,
                    bytes => filled += bytes,
                }
            }
            if filled == 0 || !self.shared.write(&mut block[..filled])? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Nothing more is taken; gives what became durable, and in which time, at a steady pace.
    ///
    /// # Errors
    /// The disk's.
    pub(crate) fn finish(&self) -> io::Result<(ByteCount, Duration)> {
        self.end();
        let mut state = lock(&self.shared.state);
        match state.failed.take() {
            Some(error) => Err(error),
            None => Ok(state.steady(self.shared.run_up)),
        }
    }

    fn end(&self) {
        {
            let mut state = lock(&self.shared.state);
            state.ended.get_or_insert_with(Instant::now);
            self.shared.changed.notify_all();
        }
        let syncer = lock(&self.syncer).take();
        if let Some(syncer) = syncer {
            // A panic there is a fault of ours, and has been reported; what counts is that it is over.
            drop(syncer.join());
        }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    /// Whether to go on.
    fn write(&self, block: &mut [u8]) -> io::Result<bool> {
        let place = self.next.fetch_add(BLOCK as u64, Ordering::Relaxed);
        // No two blocks are the same, lest a file system finds that out.
        let stamp = place.to_le_bytes();
        let stamped = stamp.len().min(block.len());
        block[..stamped].copy_from_slice(&stamp[..stamped]);
        {
            let mut state = lock(&self.state);
            state.begun.get_or_insert_with(Instant::now);
            while state.written - state.durable >= 2 * state.stretch && state.is_going() {
                state = self
                    .changed
                    .wait_timeout(state, LOOK)
                    .map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state);
            }
            if !state.is_going() {
                return Ok(false);
            }
        }
        let mut at = 0;
        while at < block.len() {
            at += rustix::io::pwrite(&self.file, &block[at..], place % self.most + at as u64)?;
        }
        let mut state = lock(&self.state);
        state.written += block.len() as u64;
        self.changed.notify_all();
        Ok(state.is_going())
    }

    /// Makes what was written durable until the end, and then the rest.
    fn sync(&self) {
        loop {
            let upto = {
                let mut state = lock(&self.state);
                while state.written - state.durable < state.stretch && state.ended.is_none() {
                    state = self
                        .changed
                        .wait_timeout(state, LOOK)
                        .map_or_else(|poisoned| poisoned.into_inner().0, |(state, _)| state);
                }
                if state.written == state.durable {
                    return;
                }
                state.written
            };
            let begun = Instant::now();
            let synced = rustix::fs::fdatasync(&self.file);
            let took = begun.elapsed().max(Duration::from_micros(1));
            let mut state = lock(&self.state);
            let bytes = upto - state.durable;
            state.durable = upto;
            state.marks.push((Instant::now(), upto));
            let grown = bytes as f64 * STRETCH.as_secs_f64() / took.as_secs_f64();
            let most = (state.stretch * 2).min(self.most / 4).max(FIRST / 4);
            state.stretch = (grown as u64).clamp(FIRST / 4, most);
            if let Err(errno) = synced {
                state.failed = Some(errno.into());
                state.ended.get_or_insert_with(Instant::now);
            }
            self.changed.notify_all();
            if state.failed.is_some() {
                return;
            }
        }
    }
}

impl State {
    fn is_going(&self) -> bool {
        self.ended.is_none() && self.failed.is_none()
    }

    /// Between the first mark after the run-up and the last before the end, where there are two; else all of it.
    fn steady(&self, run_up: Duration) -> (ByteCount, Duration) {
        let (Some(begun), Some(last)) = (self.begun, self.marks.last()) else {
            return (ByteCount(0), Duration::ZERO);
        };
        let ended = self.ended.unwrap_or(last.0);
        let mut steady = self
            .marks
            .iter()
            .filter(|(at, _)| *at >= begun + run_up && *at <= ended);
        let (from, to) = match (steady.next(), steady.next_back()) {
            (Some(first), Some(last)) => (*first, *last),
            _ => ((begun, 0), *last),
        };
        (ByteCount(to.1 - from.1), to.0.saturating_duration_since(from.0))
    }
}

/// What so many bytes in such a time are, none where nothing came.
pub(super) fn rate((bytes, time): (ByteCount, Duration)) -> Option<Rate> {
    (bytes.0 > 0 && !time.is_zero()).then(|| Rate::of(bytes, time))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_pace_leaves_out_run_up_and_rest() {
        let begun = Instant::now();
        let at = |ms| begun + Duration::from_millis(ms);
        let mut state = State {
            written: 500,
            durable: 500,
            stretch: 1,
            begun: Some(begun),
            marks: vec![
                (at(50), 10),
                (at(100), 100),
                (at(200), 200),
                (at(300), 300),
                (at(900), 500),
            ],
            ended: Some(at(320)),
            failed: None,
        };
        assert_eq!(
            state.steady(Duration::from_millis(90)),
            (ByteCount(200), Duration::from_millis(200))
        );
        state.marks.truncate(1);
        assert_eq!(
            state.steady(Duration::from_millis(90)),
            (ByteCount(10), Duration::from_millis(50))
        );
        state.marks.clear();
        assert_eq!(rate(state.steady(Duration::ZERO)), None);
    }

    #[test]
    fn what_comes_is_on_the_disk_when_it_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots::open(vec![("main".parse().unwrap(), dir.path().to_owned())]);
        let most = ByteCount(1 << 20);
        let Some(sink) = Sink::open(&roots, most, Duration::ZERO).unwrap() else {
            // The machine is short of space: then nothing is measured on it either.
            assert!(
                crate::root::free_space(
                    rustix::fs::open(dir.path(), rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty())
                        .unwrap()
                        .as_fd()
                )
                .unwrap()
                .0 < 2 << 30
            );
            return;
        };
        // More than the file may hold: it is written again from its beginning.
        let bytes = vec![7; 9 << 20];
        std::thread::scope(|scope| {
            for half in bytes.chunks(bytes.len() / 2) {
                let sink = &sink;
                scope.spawn(move || sink.keep(&mut &half[..]).unwrap());
            }
        });
        let size = rustix::fs::fstat(&sink.shared.file).unwrap().st_size;
        assert_eq!(size, 4 << 20, "the least that is asked for");
        let counted = sink.finish().unwrap();
        assert!(rate(counted).is_some_and(|rate| rate > Rate::ZERO) && counted.0.0 <= 9 << 20);
        assert_eq!(lock(&sink.shared.state).durable, 9 << 20);
        assert!(!sink.shared.write(&mut [1; 16]).unwrap(), "it is over");
        drop(sink);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
