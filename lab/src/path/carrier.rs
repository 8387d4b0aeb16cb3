//! The thread that carries packets between two TAP devices of one namespace.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tun_rs::{DeviceBuilder, Layer, SyncDevice};

use super::frame::Shape;
use super::way::{Moment, Way};
use super::{Path, Segments, Tally};

/// The largest super-packet, its Ethernet header and its prefix.
const PACKET: usize = (64 << 10) + 64;

/// Packets taken from one device before the other has its turn.
const BATCH: usize = 32;

/// The devices' own queue. What they hold is read at once into the path's queue, unless the machine is busy elsewhere.
const DEVICE_QUEUE: u32 = 4096;

/// A path at work. Dropping it ends its thread and removes its devices.
#[derive(Debug)]
pub(crate) struct Carrier {
    tally: Arc<Tally>,
    /// The thread sees its other end close.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl Carrier {
    /// Makes both devices in a namespace and starts to carry. They are down and belong to no bridge yet.
    ///
    /// # Errors
    /// The devices cannot be made: no `/dev/net/tun`, or this is not root.
    pub(crate) fn start(namespace: &str, devices: [String; 2], path: Path) -> io::Result<Self> {
        let (stopped, stop) = io::pipe()?;
        let tally = Arc::new(Tally::default());
        let own = Arc::clone(&tally);
        let at = PathBuf::from("/run/netns").join(namespace);
        let (made, when_made) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("path".to_owned())
            .spawn(move || match open(&at, &devices) {
                Ok(ends) => {
                    drop(made.send(Ok(())));
                    let ways = [Way::new(path, 1), Way::new(path, 2)];
                    carry(&ends, ways, &stopped, &own);
                }
                Err(why) => drop(made.send(Err(why))),
            })?;
        let carrier = Self {
            tally,
            stop: Some(stop),
            thread: Some(thread),
        };
        let made = when_made.recv();
        made.unwrap_or_else(|_| Err(io::Error::other("the path's thread has ended")))?;
        Ok(carrier)
    }

    pub(crate) fn segments(&self) -> Segments {
        self.tally.counts()
    }
}

impl Drop for Carrier {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Only this thread goes into the namespace; its devices stay there.
fn open(namespace: &std::path::Path, devices: &[String; 2]) -> io::Result<[SyncDevice; 2]> {
    let namespace = File::open(namespace)?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
    let [near, far] = devices;
    Ok([device(near)?, device(far)?])
}

fn device(name: &str) -> io::Result<SyncDevice> {
    let device = DeviceBuilder::new()
        .name(name)
        .layer(Layer::L2)
        .offload(true)
        .tx_queue_len(DEVICE_QUEUE)
        .enable(false)
        .build_sync()?;
    device.set_nonblocking(true)?;
    Ok(device)
}

/// A packet on its way.
struct Travelling {
    arrives: Moment,
    packet: Vec<u8>,
}

fn carry(ends: &[SyncDevice; 2], mut ways: [Way; 2], stopped: &PipeReader, tally: &Tally) {
    let started = Instant::now();
    let now = || u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let mut travelling: [VecDeque<Travelling>; 2] = Default::default();
    let mut buffer = vec![0; PACKET];
    loop {
        let mut more = false;
        for from in [0, 1] {
            for left in (0..BATCH).rev() {
                let packet = match rustix::io::read(&ends[from], &mut buffer[..]) {
                    Ok(length) => &buffer[..length],
                    Err(Errno::AGAIN | Errno::INTR) => break,
                    // The device is down, until its bridge is up.
                    Err(Errno::IO) => break,
                    // It is gone, with its namespace.
                    Err(_) => return,
                };
                more |= left == 0;
                let shape = Shape::of(packet);
                let other = ways[1 - from].free_at();
                let way = &mut ways[from];
                way.yield_to(other);
                let fate = way.take(now(), shape.segments(), |segment| shape.wire(segment));
                tally.add(&fate);
                travelling[from].extend(fate.pieces.iter().map(|piece| Travelling {
                    arrives: piece.arrives,
                    packet: shape.cut(packet, &piece.segments),
                }));
            }
        }
        for (from, queue) in travelling.iter_mut().enumerate() {
            while queue.front().is_some_and(|first| first.arrives <= now()) {
                let Some(arrived) = queue.pop_front() else { break };
                // A device that cannot take it loses it, as a host does that is out of memory.
                let _ = rustix::io::write(&ends[1 - from], &arrived.packet);
            }
        }
        let next = travelling
            .iter()
            .filter_map(|queue| queue.front())
            .map(|first| first.arrives)
            .min();
        let wait = match next {
            _ if more => Some(Duration::ZERO),
            Some(next) => Some(Duration::from_nanos(next.saturating_sub(now()))),
            None => None,
        };
        let wait = wait.map(|wait| Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(wait.subsec_nanos()),
        });
        let mut wakers = [
            PollFd::new(&ends[0], PollFlags::IN),
            PollFd::new(&ends[1], PollFlags::IN),
            PollFd::new(stopped, PollFlags::IN),
        ];
        match poll(&mut wakers, wait.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
        if !wakers[2].revents().is_empty() {
            return;
        }
    }
}
