//! One data connection from the parent, on its own thread: reads blocks, hashes them, writes them to their place, and
//! keeps the chunk if its digest agrees.

use std::io::{self, ErrorKind, Read as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use stage_core::chunk::{BLOCK, SPARE_BLOCK};
use stage_core::digest::ChunkHasher;
use stage_core::failure::{Code, Failure};
use stage_core::waits::{self, Receiving};
use stage_net::{BlockingConn, Closer};

use super::hop::{Fault, InHop};
use crate::clock::{Clock, Doing};
use crate::error::TransferError;
use crate::frame::Header;
use crate::sync::lock;

/// How long one read may wait before the thread looks whether the hop is over.
const PATIENCE: Duration = Duration::from_millis(500);
/// A chunk of which nothing comes for so long is given up.
const SILENCE: Duration = Duration::from_secs(10);
/// A stream is slow whose chunk takes so many times its siblings' median, and this long at least.
/// A thread of a busy host may well get no turn for a second, at either end.
const SLOW: (u32, Duration) = (10, Duration::from_secs(2));
/// How many chunk times of a stream are remembered.
const TIMES: usize = 8;

/// What others may know and do about a stream.
pub(super) struct Slot {
    pub(super) number: u32,
    closer: Closer,
    seen: Mutex<Seen>,
    pub(super) slow: AtomicBool,
    /// It is not to come again.
    pub(super) left: AtomicBool,
    clock: Clock,
}

impl Slot {
    pub(super) fn new(number: u32, closer: Closer) -> Self {
        Self {
            number,
            closer,
            seen: Mutex::default(),
            slow: AtomicBool::new(false),
            left: AtomicBool::new(false),
            clock: Clock::default(),
        }
    }

    pub(super) fn close(&self) {
        self.closer.close();
    }

    /// Ends the stream for good.
    pub(super) fn leave(&self) {
        self.left.store(true, Ordering::Relaxed);
        self.close();
    }

    fn is_over(&self) -> bool {
        self.slow.load(Ordering::Relaxed) || self.left.load(Ordering::Relaxed)
    }

    /// Where its thread's time went.
    pub(super) fn receiving(&self) -> Receiving {
        let of = |part| self.clock.of(part);
        let (upstream, disk, cpu) = waits::apart(
            of(Doing::Network),
            of(Doing::Disk),
            of(Doing::Work),
            self.clock.cpu(),
        );
        Receiving { upstream, disk, cpu }
    }

    fn seen(&self) -> Seen {
        lock(&self.seen).clone()
    }

    /// A chunk begins.
    fn begin(&self) {
        lock(&self.seen).began = Some(Instant::now());
    }

    /// Does what is not the network's doing.
    fn aside<T>(&self, work: impl FnOnce() -> T) -> T {
        let since = Instant::now();
        lock(&self.seen).writing = Some(since);
        let done = work();
        let took = since.elapsed();
        self.clock.add(Doing::Disk, took);
        let mut seen = lock(&self.seen);
        seen.writing = None;
        if let Some(began) = seen.began {
            seen.began = Some(began + took);
        }
        done
    }

    /// The chunk under way is whole.
    fn end(&self) {
        let mut seen = lock(&self.seen);
        if let Some(began) = seen.began.take() {
            let now = Instant::now();
            if seen.whole.len() == TIMES {
                seen.whole.remove(0);
            }
            seen.whole.push((now, now - began));
        }
    }
}

/// Ends the streams whose chunk takes far longer than their siblings' chunks, and not because this host is busy.
pub(super) fn end_slow(slots: &[Arc<Slot>], now: Instant) {
    let seen: Vec<Seen> = slots.iter().map(|slot| slot.seen()).collect();
    for (at, slot) in slots.iter().enumerate() {
        if let Some(median) = slower(&seen, at, now)
            && !slot.closer.has_unread()
        {
            tracing::info!(
                stream = slot.number,
                ?median,
                "a stream is far slower than its siblings and is ended"
            );
            slot.slow.store(true, Ordering::Relaxed);
            slot.close();
        }
    }
}

/// What is known of a stream's chunks.
#[derive(Debug, Clone, Default)]
struct Seen {
    /// When the chunk under way began, later by the time that its writing took: only the network is judged.
    began: Option<Instant>,
    /// It is being written at the moment, since then.
    writing: Option<Instant>,
    /// When the last chunks were whole, and how long they took.
    whole: Vec<(Instant, Duration)>,
}

/// The median of the siblings' chunk times, if this stream's chunk takes far longer.
///
/// Only what siblings brought since that chunk began counts: when nothing comes over any stream it is not this one's
/// fault. Where all siblings have nothing to do there is nothing to wait for, and what they did before counts.
fn slower(seen: &[Seen], at: usize, now: Instant) -> Option<Duration> {
    let began = seen[at].began.filter(|_| seen[at].writing.is_none())?;
    let siblings = || {
        seen.iter()
            .enumerate()
            .filter(|(other, _)| *other != at)
            .map(|(_, seen)| seen)
    };
    let since = |then: Option<Instant>| {
        let mut times: Vec<Duration> = siblings()
            .flat_map(|seen| &seen.whole)
            .filter(|(whole, _)| then.is_none_or(|then| *whole > then))
            .map(|(_, took)| *took)
            .collect();
        times.sort_unstable();
        times.get(times.len() / 2).copied()
    };
    let idle = || siblings().all(|seen| seen.began.is_none());
    let median = since(Some(began)).or_else(|| idle().then(|| since(None)).flatten())?;
    let most = (median * SLOW.0).max(SLOW.1);
    (now.saturating_duration_since(began) > most).then_some(median)
}

/// Receives until the hop or the connection ends.
pub(super) fn run(hop: &Arc<InHop>, slot: &Arc<Slot>, conn: BlockingConn) -> Result<(), TransferError> {
    conn.set_read_timeout(Some(PATIENCE))?;
    let _running = slot.clock.enter();
    let store = &hop.shared.store;
    let mut receiver = Receiver {
        hop,
        slot,
        conn,
        hasher: ChunkHasher::new(store.hash()),
        block: Vec::new(),
    };
    let mut header = [0; Header::LEN];
    while receiver.fill(&mut header, true)? {
        let header = Header::decode(&header, store.layout())?;
        slot.begin();
        receiver.chunk(&header)?;
        slot.end();
    }
    Ok(())
}

struct Receiver<'a> {
    hop: &'a Arc<InHop>,
    slot: &'a Arc<Slot>,
    conn: BlockingConn,
    hasher: ChunkHasher,
    /// For chunks that get no buffer, and for those that nobody wants.
    block: Vec<u8>,
}

impl Receiver<'_> {
    fn chunk(&mut self, header: &Header) -> Result<(), TransferError> {
        let shared = &self.hop.shared;
        let len = header.len as usize;
        if !shared.store.admits(header.index, len) {
            return Err(TransferError::Protocol(
                "a chunk of another length than the payload's",
            ));
        }
        let Some(claim) = shared.store.claim(header.index) else {
            self.drain(len)?;
            self.hop.missed(header.index);
            return Ok(());
        };
        let failed = |failure: Failure| {
            self.hop.fail(match failure.code {
                // Known only when the manifest had come, or a byte differed.
                Code::Exists | Code::WrongKind => Fault::Unfit(failure),
                _ => Fault::Store(failure),
            });
            TransferError::Stopped
        };
        // Never waited for: without one the chunk goes through a block, and is read from the file by who needs it.
        let mut buffer = shared.plane.budget().take();
        let mut at = 0;
        let most = if buffer.is_some() { BLOCK } else { SPARE_BLOCK };
        while at < len {
            let now = most.min(len - at);
            let mut own = std::mem::take(&mut self.block);
            let block = match &mut buffer {
                Some(buffer) => &mut buffer.resize(len)[at..at + now],
                None => {
                    own.resize(SPARE_BLOCK, 0);
                    &mut own[..now]
                }
            };
            self.fill(block, false)?;
            self.slot.clock.time(Doing::Work, || self.hasher.update(block));
            self.slot.aside(|| claim.write(at, block)).map_err(failed)?;
            self.block = own;
            at += now;
            self.count(now);
        }
        if self.hasher.finish() != header.digest {
            self.hop.fail(Fault::Corrupt(header.index));
            return Err(TransferError::Protocol("a chunk's bytes are not its digest's"));
        }
        let bytes = buffer.map(Arc::new);
        self.slot
            .aside(|| claim.keep(header.digest, bytes))
            .map_err(failed)
    }

    fn drain(&mut self, mut len: usize) -> Result<(), TransferError> {
        while len > 0 {
            let now = SPARE_BLOCK.min(len);
            let mut own = std::mem::take(&mut self.block);
            own.resize(SPARE_BLOCK, 0);
            self.fill(&mut own[..now], false)?;
            self.block = own;
            self.count(now);
            len -= now;
        }
        Ok(())
    }

    fn count(&self, bytes: usize) {
        self.hop
            .shared
            .bytes_received
            .fetch_add(bytes as u64, Ordering::Relaxed);
        self.hop.bytes_came();
    }

    /// Fills the buffer. Between chunks a stream may be silent for as long as its hop lives, and may end: `false`.
    fn fill(&mut self, mut buf: &mut [u8], between: bool) -> Result<bool, TransferError> {
        let whole = buf.len();
        let mut last = Instant::now();
        // What was not counted yet.
        let mut since = last;
        while !buf.is_empty() {
            // A closed socket still gives what the kernel had received, which may be megabytes.
            if self.hop.is_over() || self.slot.is_over() {
                return Err(TransferError::Stopped);
            }
            match self.conn.read(buf) {
                Ok(0) if between && buf.len() == whole => return Ok(false),
                Ok(0) => return Err(io::Error::from(ErrorKind::UnexpectedEof).into()),
                Ok(read) => {
                    buf = &mut buf[read..];
                    last = Instant::now();
                }
                Err(error) => match error.kind() {
                    ErrorKind::Interrupted => {}
                    ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                        let now = Instant::now();
                        self.slot.clock.add(Doing::Network, now - since);
                        since = now;
                        let within = !between || buf.len() < whole;
                        if within && last.elapsed() > SILENCE {
                            return Err(TransferError::Silent(SILENCE.as_secs()));
                        }
                    }
                    _ => return Err(error.into()),
                },
            }
        }
        self.slot
            .clock
            .add(Doing::Network, last.saturating_duration_since(since));
        Ok(true)
    }
}

/// The thread of a stream, and word of its end.
pub(super) fn spawn(
    hop: Arc<InHop>,
    slot: Arc<Slot>,
    conn: BlockingConn,
) -> io::Result<(std::thread::JoinHandle<()>, tokio::sync::oneshot::Receiver<()>)> {
    let (say, said) = tokio::sync::oneshot::channel();
    let thread = std::thread::Builder::new()
        .name(format!("in-{}", slot.number))
        .spawn(move || {
            if let Err(error) = run(&hop, &slot, conn) {
                match &error {
                    TransferError::Protocol(why) => hop.fail(Fault::Broken(why)),
                    TransferError::Silent(_) => hop.stalled(),
                    _ => {}
                }
                tracing::debug!(parent = %hop.peer.node, stream = slot.number, %error, "stream ended");
            }
            let _ = say.send(());
        })?;
    Ok((thread, said))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A stream that began its chunk `began` ms ago, and made others whole so many ms ago, each in 10 ms.
    fn seen(now: Instant, began: Option<u32>, whole: &[u32]) -> Seen {
        Seen {
            began: began.map(|ago| now - MS * ago),
            writing: None,
            whole: whole.iter().map(|ago| (now - MS * *ago, MS * 10)).collect(),
        }
    }

    #[test]
    fn a_stream_is_slow_beside_siblings_that_get_on() {
        let now = Instant::now() + Duration::from_secs(100);
        let busy = seen(now, Some(5), &[900, 600, 300]);
        let late = seen(now, Some(2100), &[]);
        assert_eq!(slower(&[busy.clone(), late.clone()], 1, now), Some(MS * 10));
        assert_eq!(slower(&[busy.clone(), late.clone()], 0, now), None);
        // Its own disk is not the stream's fault.
        let mut writing = late;
        writing.writing = Some(now);
        assert_eq!(slower(&[busy.clone(), writing], 1, now), None);
        // Ten times ten milliseconds is not enough: nothing under two seconds is.
        assert_eq!(slower(&[busy, seen(now, Some(1500), &[])], 1, now), None);
    }

    #[test]
    fn a_stall_of_all_is_nobodys_fault() {
        let now = Instant::now() + Duration::from_secs(100);
        let stalled = seen(now, Some(3000), &[3100, 3200]);
        assert_eq!(slower(&[stalled.clone(), stalled.clone()], 0, now), None);
        // But the last chunk must not wait for a stream that hangs while the others have nothing to do.
        let idle = seen(now, None, &[3100, 3200]);
        assert_eq!(slower(&[stalled.clone(), idle], 0, now), Some(MS * 10));
        assert_eq!(slower(&[stalled], 0, now), None);
    }
}
