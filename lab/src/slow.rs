//! A slow disk: a directory whose bytes are read and written at a set rate, in bursts, for machines without an I/O
//! controller.
//!
//! It is a FUSE file system over the directory itself: what lies there is seen through it, and what is written stays.
//! Each `write` is answered when the disk's cache has room for its bytes, an `fsync` when all is on the disk. [`pace`] says
//! when, and is pure; [`real`] holds what lies below, [`through`] is the file system.

mod pace;
mod real;
mod through;

use std::io;
use std::path::Path;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use fuser::{BackgroundSession, Config, MountOption, SessionACL};
use stage_core::units::{ByteCount, Rate};

use self::pace::Pace;
use self::real::{Answer, Through};

/// How fast a slow disk is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// What it writes.
    pub write: Rate,
    /// What it reads of what is not in the page cache.
    pub read: Rate,
    /// So much it takes at once; the rate empties it.
    pub cache: ByteCount,
    /// A full cache takes nothing until so much of it is free: none for a smooth disk, all of it for a rough one.
    pub burst: ByteCount,
}

/// Requests that wait for their turn; the kernel has fewer under way.
const WAITING: usize = 1024;

/// Threads that look at requests. One that reserves much space must not hold up the others.
const THREADS: usize = 2;

/// What a disk has read before it is asked: as much as the kernel asks for at once.
const READ_AHEAD: ByteCount = ByteCount(256 << 10);

/// A slow directory. Dropping it makes it as fast as it was.
#[derive(Debug)]
pub struct SlowDisk {
    session: Option<BackgroundSession>,
    lanes: Vec<JoinHandle<()>>,
}

impl SlowDisk {
    /// Makes a directory slow.
    ///
    /// # Errors
    /// It cannot be opened, or nothing can be mounted on it: no `/dev/fuse`, or this is not root.
    pub fn mount(dir: &Path, speed: Speed) -> io::Result<Self> {
        let (writes, to_write) = sync_channel(WAITING);
        let (reads, to_read) = sync_channel(WAITING);
        let through = Through::over(dir, writes, reads)?;
        let write = Pace::new(speed.write, speed.cache, speed.burst);
        let read = Pace::reading_ahead(speed.read, READ_AHEAD);
        let lanes = [(to_write, write), (to_read, read)];
        let lanes = lanes.map(|(answers, pace)| {
            let lane = std::thread::Builder::new().name("slow".to_owned());
            lane.spawn(move || answer(&answers, pace))
        });
        let lanes = lanes.into_iter().collect::<io::Result<Vec<_>>>()?;
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName("stage-lab".to_owned()),
            MountOption::DefaultPermissions,
        ];
        config.acl = SessionACL::All;
        config.n_threads = Some(THREADS);
        config.clone_fd = true;
        let session = fuser::spawn_mount(through, dir, &config)?;
        Ok(Self {
            session: Some(session),
            lanes,
        })
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        // A drop has nobody to tell; what stays mounted is swept by the next lab.
        if let Some(session) = self.session.take() {
            drop(session.umount_and_join());
        }
        for lane in self.lanes.drain(..) {
            drop(lane.join());
        }
    }
}

/// Gives answers when the disk is so far, in their order.
fn answer(answers: &Receiver<Answer>, mut pace: Pace) {
    let started = Instant::now();
    while let Ok(answer) = answers.recv() {
        let wait = match &answer {
            Answer::Synced(_) => pace.settle(started.elapsed()),
            _ => pace.take(started.elapsed(), answer.bytes()),
        };
        std::thread::sleep(wait);
        answer.give();
    }
}
