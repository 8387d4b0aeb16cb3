//! Another stream under way, where that brings something: the samples, and what is done by them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use stage_core::chunk::CHUNK;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use super::InHop;
use crate::inbound::grow::{Grower, Room, Sample, Step};
use crate::sync::lock;

/// A sample is taken this often: the parent's word comes as often.
const SAMPLE: Duration = Duration::from_secs(1);

impl InHop {
    /// Adds streams and takes them back for as long as the hop lives.
    pub(super) async fn grow(self: &Arc<Self>, room: Option<Room>, kept_up: &mut JoinSet<()>) {
        let Some(room) = room else {
            return std::future::pending().await;
        };
        let mut grower = Grower::new(room, self.rtt);
        let mut tick = interval(SAMPLE);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        tick.tick().await;
        let mut at = Instant::now();
        let mut bytes = self.shared.bytes_received.load(Ordering::Relaxed);
        let mut receiving = self.receiving();
        loop {
            tick.tick().await;
            let (now, came, waited) = (
                Instant::now(),
                self.shared.bytes_received.load(Ordering::Relaxed),
                self.receiving(),
            );
            let since = waited.since(&receiving);
            let sample = Sample {
                time: now - at,
                bytes: came.saturating_sub(bytes),
                streams: self.open_streams(),
                starved: since.upstream.as_secs_f64() / since.total().as_secs_f64().max(1e-9),
                pushed: lock(&self.state).pushed,
                left: self.left(),
            };
            (at, bytes, receiving) = (now, came, waited);
            match grower.step(&sample) {
                Step::Stay => {}
                Step::Add => {
                    tracing::info!(parent = %self.peer.node, streams = sample.streams + 1, "the hop tries a stream more");
                    kept_up.spawn(self.clone().keep_up());
                }
                Step::Drop => {
                    tracing::info!(parent = %self.peer.node, streams = sample.streams - 1, "a stream more brought nothing");
                    self.drop_newest();
                }
            }
        }
    }

    /// Bytes that are still to come; `None` of a stream whose end nobody knows.
    fn left(&self) -> Option<u64> {
        let store = &self.shared.store;
        let missing = store.layout().count().saturating_sub(store.kept());
        (!store.is_stream()).then(|| u64::from(missing) * CHUNK)
    }

    /// Ends the stream that came last, for good. What it was sent and is not kept comes over the others.
    fn drop_newest(&self) {
        let newest = lock(&self.slots).iter().max_by_key(|slot| slot.number).cloned();
        if let Some(slot) = newest {
            slot.leave();
        }
    }
}
