//! Keeping a hop's data connections up: dialled at once, dialled again when they end, each with a thread of its own.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use stage_net::BlockingConn;
use tokio::time::sleep;

use super::InHop;
use crate::error::TransferError;
use crate::hello::ConnKind;
use crate::inbound::dial;
use crate::inbound::stream::{self, Slot};
use crate::sync::lock;

/// Until a data connection that broke is dialled again; doubled each time it brings nothing.
const REDIAL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Until a stream that was ended as slow is dialled again; doubled each time.
const REDIAL_SLOW: Duration = Duration::from_secs(5);

impl InHop {
    /// Keeps one data connection up for as long as the hop lives.
    pub(super) async fn keep_up(self: Arc<Self>) {
        let mut pause = REDIAL.0;
        let mut slow_pause = REDIAL_SLOW;
        while !self.ending.is_cancelled() {
            let number = self.next_stream.fetch_add(1, Ordering::Relaxed);
            let before = self.shared.bytes_received.load(Ordering::Relaxed);
            let ended = tokio::select! {
                () = self.ending.cancelled() => return,
                dialled = self.dial_stream(number) => dialled,
            };
            let wait = match ended {
                Ok((conn, slot)) => {
                    self.receive(conn, &slot).await;
                    lock(&self.outbox).ended.push(number);
                    self.say.notify_one();
                    if slot.left.load(Ordering::Relaxed) {
                        return;
                    }
                    if slot.slow.load(Ordering::Relaxed) {
                        slow_pause *= 2;
                        slow_pause / 2
                    } else {
                        if self.shared.bytes_received.load(Ordering::Relaxed) > before {
                            pause = REDIAL.0;
                        }
                        pause
                    }
                }
                Err(TransferError::Refused(failure)) => {
                    // The parent does not know this hop any more: nothing will come over it.
                    tracing::debug!(%failure, "a data connection was refused");
                    lock(&self.state).leaving = true;
                    self.shared.changed.notify_one();
                    pause
                }
                Err(error) => {
                    tracing::debug!(parent = %self.peer.node, %error, "no data connection");
                    pause
                }
            };
            pause = (pause * 2).min(REDIAL.1);
            tokio::select! {
                () = self.ending.cancelled() => return,
                () = sleep(wait) => {}
            }
        }
    }

    async fn dial_stream(&self, number: u32) -> Result<(BlockingConn, Arc<Slot>), TransferError> {
        let kind = ConnKind::Data { stream: number };
        let (conn, _) =
            dial::connect_to(&self.shared, &self.peer, self.address, self.id, kind, false).await?;
        let conn = conn.into_blocking()?;
        let slot = Arc::new(Slot::new(number, conn.closer()?));
        Ok((conn, slot))
    }

    /// Lets a thread receive over the connection until it or the hop ends.
    async fn receive(self: &Arc<Self>, conn: BlockingConn, slot: &Arc<Slot>) {
        let (thread, mut said) = match stream::spawn(self.clone(), slot.clone(), conn) {
            Ok(spawned) => spawned,
            Err(error) => {
                tracing::warn!(%error, "no thread for a stream");
                return;
            }
        };
        lock(&self.slots).push(slot.clone());
        let without = lock(&self.state).without_streams.take();
        let before = self.shared.bytes_received.load(Ordering::Relaxed);
        tokio::select! {
            _ = &mut said => {}
            () = self.ending.cancelled() => {
                slot.close();
                let _ = said.await;
            }
        }
        let joined = tokio::task::spawn_blocking(move || thread.join());
        if !matches!(joined.await, Ok(Ok(()))) {
            tracing::error!("a receiving thread panicked");
        }
        lock(&self.shared.received).add(&slot.receiving());
        let mut slots = lock(&self.slots);
        slots.retain(|other| other.number != slot.number);
        if slots.is_empty() {
            // A connection that comes and goes and brings nothing is as good as none.
            let brought = self.shared.bytes_received.load(Ordering::Relaxed) > before;
            let since = without.filter(|_| !brought);
            lock(&self.state).without_streams = since.or_else(|| Some(Instant::now()));
        }
    }
}
