//! One data connection of a hop, on its own thread: takes ready chunks and writes them.

use std::io::{self, ErrorKind, Write as _};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use stage_core::chunk::{BLOCK, ChunkIndex, SPARE_BLOCK};
use stage_net::BlockingConn;

use super::hop::Hop;
use super::{Fault, Served};
use crate::clock::{Clock, Doing};
use crate::error::TransferError;
use crate::frame::Header;
use crate::sync::lock;

/// How long one write may wait before the thread looks whether the hop is over.
const PATIENCE: Duration = Duration::from_millis(500);

/// Sends until the hop or the connection ends.
pub(super) fn run(
    hop: &Arc<Hop>,
    served: &Arc<Served>,
    number: u32,
    clock: &Clock,
    conn: BlockingConn,
) -> Result<(), TransferError> {
    conn.set_write_timeout(Some(PATIENCE))?;
    let _running = clock.enter();
    let mut sender = Sender {
        hop,
        served,
        clock,
        conn,
    };
    // Made on the first chunk that has to be read from the file: most are sent from memory.
    let mut block = Vec::new();
    while let Some(index) = hop.take(number, clock, &|| !hop.is_stream_open(number)) {
        served.taken();
        sender.chunk(index, &mut block)?;
    }
    Ok(())
}

struct Sender<'a> {
    hop: &'a Hop,
    served: &'a Served,
    clock: &'a Clock,
    conn: BlockingConn,
}

impl Sender<'_> {
    fn chunk(&mut self, index: ChunkIndex, block: &mut Vec<u8>) -> Result<(), TransferError> {
        let store = &self.served.store;
        let (Some(digest), true) = (store.digest(index), store.has(index)) else {
            self.hop.gone(index);
            return Ok(());
        };
        let len = store.len(index);
        let header = Header {
            index,
            len: len as u32,
            digest,
        };
        self.write(&header.encode())?;
        let hot = store.hot(index);
        let flip = *lock(&self.served.fault) == Some(Fault::FlipByte { chunk: index });
        let mut at = 0;
        while at < len {
            let now = if hot.is_some() { BLOCK } else { SPARE_BLOCK }.min(len - at);
            self.wait(now)?;
            match &hot {
                Some(bytes) if !flip => self.write(&bytes[at..at + now])?,
                _ => {
                    block.resize(now, 0);
                    let block = &mut block[..now];
                    match &hot {
                        Some(bytes) => block.copy_from_slice(&bytes[at..at + now]),
                        None => {
                            let read = self.clock.time(Doing::Disk, || store.read(index, at, block));
                            if let Err(failure) = read {
                                // Half a chunk is on the wire: this connection cannot go on, others can.
                                tracing::warn!(%failure, chunk = index.0, "a chunk cannot be read back");
                                self.hop.gone(index);
                                lock(&self.served.failure).get_or_insert_with(|| failure.clone());
                                return Err(TransferError::Refused(failure));
                            }
                            self.served
                                .bytes_read_back
                                .fetch_add(now as u64, Ordering::Relaxed);
                        }
                    }
                    if flip && at == 0 {
                        block[0] ^= 1;
                    }
                    self.write(block)?;
                }
            }
            at += now;
            self.served.bytes_sent.fetch_add(now as u64, Ordering::Relaxed);
        }
        self.flush()
    }

    /// Waits until the limit lets so many bytes pass.
    fn wait(&self, bytes: usize) -> Result<(), TransferError> {
        let pace = &self.served.pace;
        let passed = self
            .clock
            .time(Doing::Limit, || pace.wait(bytes, || self.hop.is_over()));
        if passed {
            Ok(())
        } else {
            Err(TransferError::Stopped)
        }
    }

    /// Writes all. A child that takes long is no error: the control connection says whether it lives.
    fn write(&mut self, mut bytes: &[u8]) -> Result<(), TransferError> {
        while !bytes.is_empty() {
            let conn = &mut self.conn;
            match self.clock.time(Doing::Network, || conn.write(bytes)) {
                Ok(0) => return Err(io::Error::from(ErrorKind::WriteZero).into()),
                Ok(written) => bytes = &bytes[written..],
                Err(error) => self.bear(error)?,
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), TransferError> {
        loop {
            let conn = &mut self.conn;
            match self.clock.time(Doing::Network, || conn.flush()) {
                Ok(()) => return Ok(()),
                Err(error) => self.bear(error)?,
            }
        }
    }

    fn bear(&self, error: io::Error) -> Result<(), TransferError> {
        match error.kind() {
            ErrorKind::Interrupted => Ok(()),
            ErrorKind::WouldBlock | ErrorKind::TimedOut if !self.hop.is_over() => Ok(()),
            _ => Err(error.into()),
        }
    }
}
