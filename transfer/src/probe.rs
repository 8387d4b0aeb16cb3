//! Measurements: of disks ([`disk`]), of processors ([`cpu`]), and of the way to another node, over the data plane's own
//! port and with its own connections, so that what is measured is what a push would meet.
//!
//! ```text
//!   who answers                             who measures
//!   prelude, hello, proofs as on each data connection ([`crate::hello`])
//!            ◄───────────────────────────── Echo         the same 16 bytes back
//!            ◄───────────────────────────── Count        what came so far, by when, and what was sent again
//!            ◄───────────────────────────── Take         bytes until the connection ends
//!            ◄───────────────────────────── Give         … and here from the one who answers
//!            ◄───────────────────────────── Place        a file is made, for so many bytes; or not, and why does not matter
//!            ◄───────────────────────────── Keep         as Take, and the bytes go into that file (`sink`)
//!            ◄───────────────────────────── Done         what became durable, in which time
//! ```
//!
//! The first connection is for echoes, counts and the file, each stream has one of its own. Rates are those of arrival, by the
//! clock of whoever receives, after the streams have come up to speed.

mod bursts;
pub mod cpu;
pub mod disk;
mod measure;
mod sink;

use std::io::{self, Read as _, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use stage_core::bench::Depth;
use stage_core::id::{JobId, JobKey, NodeName};
use stage_core::units::ByteCount;
use stage_net::{BlockingConn, Closer};

pub use measure::{Probing, measure};

use self::sink::Sink;
use crate::plane::DataPlane;
use crate::root::Roots;
use crate::sync::{lock, random};

/// Bytes of each request, the first of which says what.
const REQUEST: usize = 16;
const ECHO: u8 = b'E';
const COUNT: u8 = b'C';
const TAKE: u8 = b'T';
const GIVE: u8 = b'G';
const PLACE: u8 = b'P';
const KEEP: u8 = b'K';
const DONE: u8 = b'D';
/// Connections of one measurement at once: its streams, and the one that counts.
const CONNECTIONS: usize = stage_core::cost::MAX_STREAMS as usize + 1;
/// A connection on which nothing is asked for so long is over: who measures may pause between bursts.
const IDLE: Duration = Duration::from_secs(60);
/// A stream that stands still for so long is over.
const STANDSTILL: Duration = Duration::from_secs(10);
/// No stream runs longer, whoever asks.
const LONGEST: Duration = Duration::from_secs(60);
/// No window is larger, whoever asks.
const MOST_WINDOW: u64 = 1 << 30;
/// What is written and read at once: a data stream's block.
const BLOCK: usize = stage_core::chunk::BLOCK;

/// What a count says.
#[derive(Debug, Clone, Copy)]
struct Count {
    /// Bytes that came.
    received: u64,
    /// By when, on the clock of the one who counts.
    at: Duration,
    /// Segments that were sent again.
    retransmissions: u64,
}

impl Count {
    const LEN: usize = 24;

    fn encode(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&self.received.to_le_bytes());
        let nanos = u64::try_from(self.at.as_nanos()).unwrap_or(u64::MAX);
        bytes[8..16].copy_from_slice(&nanos.to_le_bytes());
        bytes[16..].copy_from_slice(&self.retransmissions.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; Self::LEN]) -> Self {
        let number = |at: usize| {
            let mut eight = [0; 8];
            eight.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(eight)
        };
        Self {
            received: number(0),
            at: Duration::from_nanos(number(8)),
            retransmissions: number(16),
        }
    }
}

/// Asks for a file of so many bytes at most, whose rate counts from `run_up` after the first byte on.
fn place(most: ByteCount, run_up: Duration) -> [u8; REQUEST] {
    let mut bytes = request(PLACE, most);
    let run_up = u32::try_from(run_up.as_millis()).unwrap_or(u32::MAX);
    bytes[4..8].copy_from_slice(&run_up.to_le_bytes());
    bytes
}

/// The window counts for what is taken and given.
fn request(what: u8, window: ByteCount) -> [u8; REQUEST] {
    let mut bytes = [0; REQUEST];
    bytes[0] = what;
    bytes[8..].copy_from_slice(&window.0.to_le_bytes());
    bytes
}

/// Sets what a request asks for; 0 leaves it to the kernel.
fn set_window(conn: &BlockingConn, window: ByteCount) -> io::Result<()> {
    match usize::try_from(window.0.min(MOST_WINDOW)) {
        Ok(bytes) if bytes > 0 => conn.set_window(bytes),
        _ => Ok(()),
    }
}

/// A measurement in which this node answers.
pub(crate) struct Probed {
    id: JobId,
    pub(crate) key: JobKey,
    pub(crate) from: NodeName,
    /// Where it may be asked to write.
    roots: Option<Arc<Roots>>,
    sink: Mutex<Option<Arc<Sink>>>,
    begun: Instant,
    received: AtomicU64,
    /// Of connections that have ended.
    retransmissions: AtomicU64,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    /// By number.
    connections: Vec<(u64, Closer)>,
    next: u64,
    ended: bool,
}

impl Probed {
    pub(crate) fn new(id: JobId, key: JobKey, from: NodeName, roots: Option<Arc<Roots>>) -> Self {
        Self {
            id,
            key,
            from,
            roots,
            sink: Mutex::default(),
            begun: Instant::now(),
            received: AtomicU64::new(0),
            retransmissions: AtomicU64::new(0),
            open: Mutex::default(),
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        lock(&self.open).connections.len() >= CONNECTIONS
    }

    /// Takes a connection into the list of those that end with the measurement.
    pub(crate) fn admit(&self, conn: &BlockingConn) -> io::Result<u64> {
        let closer = conn.closer()?;
        let mut open = lock(&self.open);
        if open.ended || open.connections.len() >= CONNECTIONS {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        let number = open.next;
        open.next += 1;
        open.connections.push((number, closer));
        Ok(number)
    }

    /// Ends all connections; no more are taken.
    pub(crate) fn end(&self) {
        let mut open = lock(&self.open);
        open.ended = true;
        for (_, closer) in &open.connections {
            closer.close();
        }
    }

    fn count(&self) -> Count {
        let live: u64 = lock(&self.open)
            .connections
            .iter()
            .map(|(_, closer)| closer.retransmissions())
            .sum();
        Count {
            received: self.received.load(Ordering::Relaxed),
            at: self.begun.elapsed(),
            retransmissions: live + self.retransmissions.load(Ordering::Relaxed),
        }
    }

    /// Makes a file to write to; false where there is none to be had.
    fn place(&self, most: ByteCount, run_up: Duration) -> bool {
        let Some(roots) = &self.roots else { return false };
        // Whoever asks fills no more than the deepest measurement would.
        let most = most.min(Depth::Full.disk_bytes());
        match Sink::open(roots, most, run_up) {
            Ok(sink) => {
                let there = sink.is_some();
                *lock(&self.sink) = sink.map(Arc::new);
                there
            }
            Err(failure) => {
                tracing::debug!(from = %self.from, %failure, "a measurement finds no place to write");
                false
            }
        }
    }

    /// What became durable.
    fn done(&self) -> io::Result<Count> {
        let sink = lock(&self.sink).take();
        let (bytes, time) = sink.ok_or(io::ErrorKind::NotFound)?.finish()?;
        Ok(Count {
            received: bytes.0,
            at: time,
            retransmissions: 0,
        })
    }

    /// Does what the connection asks until it ends. Blocks.
    pub(crate) fn serve(&self, number: u64, mut conn: BlockingConn) {
        // How it ends says nothing: whoever measures closes it when it has seen enough.
        if let Err(error) = self.obey(&mut conn) {
            tracing::trace!(from = %self.from, %error, "a connection of a measurement ended");
        }
        let mut open = lock(&self.open);
        if let Some(at) = open.connections.iter().position(|(other, _)| *other == number) {
            let (_, closer) = open.connections.swap_remove(at);
            self.retransmissions
                .fetch_add(closer.retransmissions(), Ordering::Relaxed);
            closer.close();
        }
    }

    fn obey(&self, conn: &mut BlockingConn) -> io::Result<()> {
        conn.set_read_timeout(Some(IDLE))?;
        conn.set_write_timeout(Some(STANDSTILL))?;
        let mut bytes = [0; REQUEST];
        loop {
            conn.read_exact(&mut bytes)?;
            match bytes[0] {
                ECHO => conn.write_all(&bytes)?,
                COUNT => conn.write_all(&self.count().encode())?,
                PLACE => {
                    let mut run_up = [0; 4];
                    run_up.copy_from_slice(&bytes[4..8]);
                    let run_up = Duration::from_millis(u32::from_le_bytes(run_up).into()).min(LONGEST);
                    bytes[1] = self.place(number(&bytes), run_up).into();
                    conn.write_all(&bytes)?;
                }
                DONE => conn.write_all(&self.done()?.encode())?,
                KEEP => {
                    let sink = lock(&self.sink).clone();
                    let sink = sink.ok_or(io::ErrorKind::NotFound)?;
                    conn.set_read_timeout(Some(STANDSTILL))?;
                    return sink.keep(conn);
                }
                TAKE | GIVE => {
                    set_window(conn, number(&bytes))?;
                    if bytes[0] == GIVE {
                        return give(conn, &AtomicU64::new(0));
                    }
                    conn.set_read_timeout(Some(STANDSTILL))?;
                    return take(conn, &self.received);
                }
                _ => return Err(io::ErrorKind::InvalidData.into()),
            }
            conn.flush()?;
        }
    }
}

/// The number in a request.
fn number(request: &[u8; REQUEST]) -> ByteCount {
    let mut number = [0; 8];
    number.copy_from_slice(&request[8..]);
    ByteCount(u64::from_le_bytes(number))
}

/// Reads until the connection ends, and counts.
fn take(conn: &mut BlockingConn, received: &AtomicU64) -> io::Result<()> {
    let begun = Instant::now();
    let mut block = vec![0; BLOCK];
    while begun.elapsed() < LONGEST {
        match conn.read(&mut block)? {
            0 => return Ok(()),
            bytes => received.fetch_add(bytes as u64, Ordering::Relaxed),
        };
    }
    Ok(())
}

/// Writes until the connection ends, and counts.
fn give(conn: &mut BlockingConn, sent: &AtomicU64) -> io::Result<()> {
    let begun = Instant::now();
    // Nothing on the way makes it smaller.
    let seed: [u8; 4096] = random();
    let block: Vec<u8> = seed.iter().copied().cycle().take(BLOCK).collect();
    while begun.elapsed() < LONGEST {
        conn.write_all(&block)?;
        sent.fetch_add(BLOCK as u64, Ordering::Relaxed);
    }
    Ok(())
}

/// This node answers a measurement while this is kept.
pub struct Answering {
    probed: Arc<Probed>,
    plane: Weak<DataPlane>,
}

impl Answering {
    pub(crate) fn new(probed: Arc<Probed>, plane: Weak<DataPlane>) -> Self {
        Self { probed, plane }
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        if let Some(plane) = self.plane.upgrade() {
            plane.forget_probe(self.probed.id);
        }
        self.probed.end();
    }
}

impl std::fmt::Debug for Answering {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Answering({} of {})", self.probed.id, self.probed.from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_survive_the_wire() {
        let count = Count {
            received: 1 << 40,
            at: Duration::from_nanos(123_456_789),
            retransmissions: 7,
        };
        let back = Count::decode(&count.encode());
        assert_eq!(
            (back.received, back.at, back.retransmissions),
            (count.received, count.at, count.retransmissions)
        );
    }
}
