//! How fast a root is written and read: a file of ours that has no name, bounded in bytes and time.
//!
//! Written as a payload is, through the page cache, and made durable behind the writer by a second thread (fdatasync), a
//! stretch at a time. A stretch is given when the one before it is durable, and stretches grow until each takes a good
//! while, so that syncing costs little and a slow disk is not given more than it can take in time. Before reading, the
//! kernel is told to forget the pages, so that the disk is read and not memory.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use rustix::fs::{Advice, AtFlags, Mode, OFlags};
use rustix::io::Errno;
use stage_core::bench::{Depth, DiskReading, RootSpace};
use stage_core::failure::Failure;
use stage_core::units::{ByteCount, Rate};

use crate::fault;
use crate::root::{Roots, free_space};
use crate::sync::random;

/// What is written and read at once.
const STEP: usize = 1 << 20;
/// The first stretch between two syncs.
const FIRST: u64 = 4 << 20;
/// A stretch should take about so long.
const STRETCH: Duration = Duration::from_millis(250);
/// Beyond the second figure, so many times what is written is free: a measurement fills no disk.
const ROOM: (u64, u64) = (4, 1 << 30);

/// Measures each root, one after the other. `progress` is told of each step's bytes and says whether to go on. Blocks.
pub fn measure(roots: &Roots, depth: Depth, progress: &mut dyn FnMut(u64) -> bool) -> Vec<DiskReading> {
    let mut readings = Vec::new();
    for (name, shown, directory) in roots.directories() {
        let mut reading = DiskReading {
            root: name.clone(),
            write: None,
            read: None,
            skipped: String::new(),
        };
        match directory.and_then(|dir| one(dir.as_fd(), &shown, depth, progress)) {
            Ok(Measured::Rates(write, read)) => (reading.write, reading.read) = (Some(write), Some(read)),
            Ok(Measured::Short(free)) => {
                reading.skipped = format!("only {free} are free in {shown}");
            }
            Ok(Measured::Stopped) => reading.skipped = "the measurement was ended".to_owned(),
            Err(failure) => reading.skipped = failure.message,
        }
        readings.push(reading);
    }
    readings
}

/// The roots and their space.
pub fn spaces(roots: &Roots) -> Vec<RootSpace> {
    let mut spaces: Vec<RootSpace> = roots
        .report()
        .into_iter()
        .map(|root| RootSpace {
            name: root.name,
            path: root.path,
            free: root.free,
            total: ByteCount(0),
            failure: root.failure,
        })
        .collect();
    for ((_, _, directory), space) in roots.directories().zip(&mut spaces) {
        if let Ok(dir) = directory
            && let Ok(stat) = rustix::fs::fstatvfs(&dir)
        {
            space.total = ByteCount(stat.f_blocks.saturating_mul(stat.f_frsize));
        }
    }
    spaces
}

enum Measured {
    Rates(Rate, Rate),
    /// There is only so much room.
    Short(ByteCount),
    Stopped,
}

fn one(
    dir: BorrowedFd<'_>,
    shown: &str,
    depth: Depth,
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<Measured, Failure> {
    let fail = |what: &'static str| move |errno: Errno| fault::of(errno, what, shown);
    let most = match room(dir, shown, depth.disk_bytes())? {
        Ok(most) => most,
        Err(free) => return Ok(Measured::Short(free)),
    };
    let file = nameless(dir).map_err(fail("making a file to measure with"))?;
    let mut block: Vec<u8> = Vec::with_capacity(STEP);
    while block.len() < STEP {
        block.extend(random::<4096>());
    }

    let begun = Instant::now();
    let Some(written) = write(
        file.as_fd(),
        shown,
        &mut block,
        (most, depth.disk_time()),
        progress,
    )?
    else {
        return Ok(Measured::Stopped);
    };
    rustix::fs::fdatasync(&file).map_err(fail("syncing"))?;
    let write = Rate::of(ByteCount(written), begun.elapsed());

    // Where pages cannot be forgotten (tmpfs), reading is from memory, and will be in a push.
    let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
    let _ = rustix::fs::fadvise(&file, 0, None, Advice::Sequential);
    let begun = Instant::now();
    let mut read = 0;
    while read < written && (read == 0 || begun.elapsed() < depth.disk_time()) {
        match rustix::io::pread(&file, &mut block[..], read).map_err(fail("reading"))? {
            0 => break,
            bytes => read += bytes as u64,
        }
        if !progress(STEP as u64) {
            return Ok(Measured::Stopped);
        }
    }
    Ok(Measured::Rates(write, Rate::of(ByteCount(read), begun.elapsed())))
}

/// Writes until there is enough; gives how much, or nothing where `progress` wants no more. Only what was written since
/// the last stretch was handed over is not durable by then.
fn write(
    file: BorrowedFd<'_>,
    shown: &str,
    block: &mut [u8],
    (most, time): (u64, Duration),
    progress: &mut dyn FnMut(u64) -> bool,
) -> Result<Option<u64>, Failure> {
    let fail = |what: &'static str| move |errno: Errno| fault::of(errno, what, shown);
    std::thread::scope(|scope| {
        // Handed over, and not queued: what is given while the last stretch is still on its way waits.
        let (send, stretches) = sync_channel(0);
        let behind = scope.spawn(move || {
            for () in stretches {
                rustix::fs::fdatasync(file).map_err(fail("syncing"))?;
            }
            Ok(())
        });
        let begun = Instant::now();
        let (mut written, mut given, mut stretch) = (0, 0, FIRST);
        let mut mark = Instant::now();
        while written < most && (written == 0 || begun.elapsed() < time) {
            // No two blocks are the same, lest a file system finds that out.
            block[..8].copy_from_slice(&written.to_le_bytes());
            let mut at = 0;
            while at < block.len() {
                let offset = written + at as u64;
                at += rustix::io::pwrite(file, &block[at..], offset).map_err(fail("writing"))?;
            }
            written += STEP as u64;
            if !progress(STEP as u64) {
                return Ok(None);
            }
            if written - given >= stretch {
                if send.send(()).is_err() {
                    // It says why.
                    break;
                }
                // The first is handed over at once, and says nothing of the disk.
                if given > 0 {
                    let took = mark.elapsed().max(Duration::from_micros(1));
                    let grown = stretch as f64 * STRETCH.as_secs_f64() / took.as_secs_f64();
                    stretch = (grown as u64)
                        .clamp(FIRST / 4, stretch * 4)
                        .next_multiple_of(STEP as u64);
                }
                given = written;
                mark = Instant::now();
            }
        }
        drop(send);
        behind
            .join()
            .expect("syncing does not panic")
            .map(|()| Some(written))
    })
}

/// How many of so many bytes a measurement may write there; with what is free, where that is too little for any.
pub(super) fn room(
    dir: BorrowedFd<'_>,
    shown: &str,
    wanted: ByteCount,
) -> Result<Result<u64, ByteCount>, Failure> {
    let free = free_space(dir).map_err(|errno| fault::of(errno, "asking for free space", shown))?;
    let most = free.0.saturating_sub(ROOM.1) / ROOM.0;
    Ok(if most < Depth::Quick.disk_bytes().0 {
        Err(free)
    } else {
        Ok(wanted.0.min(most))
    })
}

/// A file that nobody else can open and that is gone when it is closed, or when we are.
pub(super) fn nameless(dir: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    match rustix::fs::openat(dir, ".", flags | OFlags::TMPFILE, mode) {
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => {
            let name = format!(".stage-bench-{:016x}", u64::from_le_bytes(random()));
            let flags = flags | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
            let file = rustix::fs::openat(dir, &name, flags, mode)?;
            rustix::fs::unlinkat(dir, &name, AtFlags::empty())?;
            Ok(file)
        }
        made => made,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_has_a_rate_and_nothing_is_left_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots::open(vec![
            ("main".parse().unwrap(), dir.path().to_owned()),
            ("gone".parse().unwrap(), dir.path().join("gone")),
        ]);
        let mut told = 0;
        let readings = measure(&roots, Depth::Quick, &mut |bytes| {
            told += bytes;
            true
        });
        let spaces = spaces(&roots);
        assert!(spaces[0].total >= spaces[0].free && spaces[0].failure.is_none());
        assert!(spaces[1].failure.is_some());
        if spaces[0].free.0 >= Depth::Quick.disk_bytes().0 * ROOM.0 + ROOM.1 {
            assert!(readings[0].write.unwrap() > Rate::ZERO && readings[0].read.unwrap() > Rate::ZERO);
            assert!(told >= 2 * STEP as u64);
        } else {
            assert!(readings[0].skipped.contains("free"), "{}", readings[0].skipped);
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(readings[1].write.is_none() && readings[1].skipped.contains("missing"));
    }

    #[test]
    fn whoever_does_not_want_it_any_more_is_heard() {
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots::open(vec![("main".parse().unwrap(), dir.path().to_owned())]);
        let readings = measure(&roots, Depth::Full, &mut |_| false);
        assert_eq!(readings[0].write, None);
        assert!(!readings[0].skipped.is_empty());
    }
}
