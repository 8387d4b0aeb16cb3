//! One parent at work: its control connection, and the streams that are kept up beside it.

mod growth;
mod upkeep;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use stage_core::assignment::Peer;
use stage_core::chunk::{ChunkIndex, ChunkSet};
use stage_core::digest::ChunkDigest;
use stage_core::failure::Failure;
use stage_core::id::HopId;
use stage_core::waits::Receiving;
use stage_net::Conn;
use tokio::io::{ReadHalf, WriteHalf};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use super::Shared;
use super::dial::Connected;
use super::grow::Room;
use super::stream::{self, Slot};
use crate::beat::Heard;
use crate::error::TransferError;
use crate::frame::{self, MAX_BATCH, MAX_MESSAGE, Reader, ToChild, ToParent};
use crate::outbound::MAX_OFFERS;
use crate::store::{Compared, Watcher};
use crate::sync::lock;

/// A parent that says nothing for so long: others are asked.
const SUSPECT: Duration = Duration::from_secs(3);
/// A parent whose count stands still for so long has no way to the bytes: others are asked.
const STILL: Duration = Duration::from_secs(6);
/// A parent that says nothing for so long is dropped.
const DEAD: Duration = Duration::from_secs(10);
/// How often slow streams and missed chunks are looked for.
const LOOK: Duration = Duration::from_millis(100);
/// Why nothing more comes from this parent, or to this node at all.
#[derive(Debug, Clone)]
pub(super) enum Fault {
    /// The parent sent bytes that are not their digest's.
    Corrupt(ChunkIndex),
    /// The parent sent what the protocol does not have.
    Broken(&'static str),
    /// This node's disk.
    Store(Failure),
    /// Other content stands at the target.
    Unfit(Failure),
}

/// One parent at work.
pub(super) struct InHop {
    pub(super) id: HopId,
    pub(super) peer: Peer,
    pub(super) rtt: Duration,
    pub(super) shared: Arc<Shared>,
    address: SocketAddr,
    state: Mutex<State>,
    outbox: Mutex<Outbox>,
    say: Notify,
    /// Offers to be held against the older copy.
    offered: Mutex<Vec<(ChunkIndex, ChunkDigest)>>,
    offers: Notify,
    slots: Mutex<Vec<Arc<Slot>>>,
    next_stream: AtomicU32,
    bytes_seen: AtomicBool,
    over: AtomicBool,
    ending: CancellationToken,
}

struct State {
    /// When anything came from the parent.
    heard: Instant,
    /// When its count advanced.
    advanced: Instant,
    counts: Heard,
    /// Since when there is no data connection.
    without_streams: Option<Instant>,
    /// A chunk was given up because nothing more of it came, and nothing has come since.
    stalled: bool,
    leaving: bool,
    /// The share of the last second that the parent waited for room in its sockets.
    pushed: f64,
    fault: Option<Fault>,
    /// Why the control connection ended.
    ended: Option<String>,
}

/// What is to be said to the parent.
#[derive(Default)]
struct Outbox {
    kept: Vec<ChunkIndex>,
    want: Vec<ChunkIndex>,
    /// Bytes are wanted at once from now on.
    no_offers: bool,
    ended: Vec<u32>,
    /// Came while another stream had them, perhaps one that will not bring them.
    missed: Vec<ChunkIndex>,
}

impl InHop {
    /// A hop over a fresh connection, and the connection, to be given to [`InHop::run`].
    pub(super) fn new(shared: &Arc<Shared>, connected: Connected) -> (Arc<Self>, Conn) {
        let now = Instant::now();
        let hop = Self {
            id: connected.hop,
            peer: connected.peer,
            rtt: connected.rtt,
            shared: shared.clone(),
            address: connected.address,
            state: Mutex::new(State {
                heard: now,
                advanced: now,
                counts: Heard::default(),
                without_streams: Some(now),
                stalled: false,
                leaving: false,
                pushed: 0.0,
                fault: None,
                ended: None,
            }),
            outbox: Mutex::default(),
            say: Notify::new(),
            offered: Mutex::default(),
            offers: Notify::new(),
            slots: Mutex::default(),
            next_stream: AtomicU32::new(0),
            bytes_seen: AtomicBool::new(false),
            over: AtomicBool::new(false),
            ending: CancellationToken::new(),
        };
        (Arc::new(hop), connected.conn)
    }

    /// Asks the hop to end.
    pub(super) fn end(&self) {
        self.ending.cancel();
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Whether payload bytes have come over this hop.
    pub(super) fn has_brought(&self) -> bool {
        self.bytes_seen.load(Ordering::Relaxed)
    }

    pub(super) fn open_streams(&self) -> u16 {
        u16::try_from(lock(&self.slots).len()).unwrap_or(u16::MAX)
    }

    /// Where the time of the threads of its open streams went.
    pub(super) fn receiving(&self) -> Receiving {
        let slots = lock(&self.slots).clone();
        slots.iter().fold(Receiving::default(), |mut sum, slot| {
            sum.add(&slot.receiving());
            sum
        })
    }

    /// Payload bytes came.
    pub(super) fn bytes_came(&self) {
        {
            let mut state = lock(&self.state);
            state.heard = Instant::now();
            state.stalled = false;
        }
        if !self.bytes_seen.swap(true, Ordering::Relaxed) {
            self.shared.changed.notify_one();
        }
    }

    /// Nothing more of a chunk came, although the connection stands.
    pub(super) fn stalled(&self) {
        lock(&self.state).stalled = true;
        self.shared.changed.notify_one();
    }

    /// Something is wrong beyond this connection; the first word counts.
    pub(super) fn fail(&self, fault: Fault) {
        lock(&self.state).fault.get_or_insert(fault);
        self.shared.changed.notify_one();
    }

    pub(super) fn fault(&self) -> Option<Fault> {
        lock(&self.state).fault.clone()
    }

    /// Why the hop has ended, if it has.
    pub(super) fn ended(&self) -> Option<String> {
        lock(&self.state).ended.clone()
    }

    /// Why others should be asked, although the connection stands.
    pub(super) fn suspicion(&self, now: Instant) -> Option<String> {
        let state = lock(&self.state);
        let since = |then: Instant| now.saturating_duration_since(then);
        if state.leaving {
            Some("it leaves".to_owned())
        } else if since(state.heard) > SUSPECT {
            Some(format!("no word for {} s", SUSPECT.as_secs()))
        } else if since(state.advanced) > STILL {
            Some(format!("its count has stood still for {} s", STILL.as_secs()))
        } else if state.stalled {
            Some("a chunk has come to a stop".to_owned())
        } else if state.without_streams.is_some_and(|then| since(then) > SUSPECT) {
            Some(format!("no data connection for {} s", SUSPECT.as_secs()))
        } else {
            None
        }
    }

    /// A chunk came that another stream owns, or that is here.
    pub(super) fn missed(&self, index: ChunkIndex) {
        if !self.shared.store.has(index) {
            lock(&self.outbox).missed.push(index);
        }
    }

    /// Runs until the hop ends; no thread of it is left then. With `room`, it may get more streams on the way.
    pub(super) async fn run(self: Arc<Self>, conn: Conn, streams: u16, room: Option<Room>) {
        let watcher: Weak<dyn Watcher> = Arc::<Self>::downgrade(&self);
        let have = self.shared.store.watch(watcher);
        let offers = self.shared.store.wants_offers();
        let (read, mut write) = tokio::io::split(conn);
        let mut kept_up = JoinSet::new();
        let end = async {
            self.introduce(&mut write, &have, offers).await?;
            for _ in 0..streams {
                kept_up.spawn(self.clone().keep_up());
            }
            if offers {
                kept_up.spawn(self.clone().compare());
            }
            tokio::select! {
                end = self.hear(read) => end,
                end = self.speak(&mut write) => end,
                () = self.grow(room, &mut kept_up) => Ok(()),
            }
        }
        .await;
        self.over.store(true, Ordering::Relaxed);
        self.ending.cancel();
        let why = match end {
            Ok(()) => "left".to_owned(),
            Err(error) => error.to_string(),
        };
        tracing::debug!(parent = %self.peer.node, why, "hop ended");
        while let Some(joined) = kept_up.join_next().await {
            if joined.is_err() {
                tracing::error!("a receiving task panicked");
            }
        }
        // Only now: whoever comes next must find no chunk owned by a thread of this hop.
        lock(&self.state).ended = Some(why);
        self.shared.changed.notify_one();
    }

    /// Says what is here, page by page, and in which way the rest is wanted.
    async fn introduce(
        &self,
        write: &mut WriteHalf<Conn>,
        have: &ChunkSet,
        offers: bool,
    ) -> Result<(), TransferError> {
        let mut page = Vec::new();
        for run in have.runs() {
            page.push((run.start, run.end));
            if page.len() == MAX_BATCH {
                say(write, &ToParent::Have(std::mem::take(&mut page))).await?;
            }
        }
        if !page.is_empty() {
            say(write, &ToParent::Have(page)).await?;
        }
        say(write, &ToParent::Start { offers }).await
    }

    async fn hear(&self, read: ReadHalf<Conn>) -> Result<(), TransferError> {
        let mut reader = Reader::new(read, MAX_MESSAGE);
        loop {
            let message: ToChild = match timeout(LOOK, reader.next()).await {
                Ok(message) => message?,
                // Bytes on the data connections are words too.
                Err(_) if lock(&self.state).heard.elapsed() < DEAD => continue,
                Err(_) => return Err(TransferError::Silent(DEAD.as_secs())),
            };
            lock(&self.state).heard = Instant::now();
            match message {
                ToChild::Beat(beat) => {
                    self.shared.pulse.heard(beat);
                    let mut state = lock(&self.state);
                    if state.counts.advances(beat) {
                        state.advanced = Instant::now();
                    }
                }
                ToChild::Offer(items) => {
                    if items
                        .iter()
                        .any(|(index, _)| !self.shared.store.layout().contains(*index))
                    {
                        return Err(TransferError::Protocol("an offer past the payload's end"));
                    }
                    let mut offered = lock(&self.offered);
                    if offered.len() + items.len() > MAX_OFFERS as usize {
                        return Err(TransferError::Protocol("more offers than can be answered"));
                    }
                    offered.extend(items);
                    drop(offered);
                    self.offers.notify_one();
                }
                ToChild::Leaving => {
                    lock(&self.state).leaving = true;
                    self.shared.changed.notify_one();
                }
                ToChild::Pushed { permille } => {
                    lock(&self.state).pushed = f64::from(permille.min(1000)) / 1000.0;
                }
                ToChild::Digests { .. } => {}
            }
        }
    }

    async fn speak(&self, write: &mut WriteHalf<Conn>) -> Result<(), TransferError> {
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut beaten = Instant::now();
        loop {
            tokio::select! {
                () = self.ending.cancelled() => break,
                () = self.say.notified() => {}
                _ = look.tick() => {
                    let slots = lock(&self.slots).clone();
                    stream::end_slow(&slots, Instant::now());
                    self.want_missed();
                }
            }
            self.empty_outbox(write).await?;
            if beaten.elapsed() >= Duration::from_secs(1) {
                beaten = Instant::now();
                say(write, &ToParent::Beat).await?;
            }
        }
        self.empty_outbox(write).await?;
        say(write, &ToParent::Leaving).await
    }

    async fn empty_outbox(&self, write: &mut WriteHalf<Conn>) -> Result<(), TransferError> {
        let (kept, want, no_offers, ended) = {
            let mut outbox = lock(&self.outbox);
            (
                std::mem::take(&mut outbox.kept),
                std::mem::take(&mut outbox.want),
                std::mem::take(&mut outbox.no_offers),
                std::mem::take(&mut outbox.ended),
            )
        };
        for batch in kept.chunks(MAX_BATCH) {
            say(write, &ToParent::Kept(batch.to_vec())).await?;
        }
        for batch in want.chunks(MAX_BATCH) {
            say(write, &ToParent::Want(batch.to_vec())).await?;
        }
        if no_offers {
            say(write, &ToParent::Start { offers: false }).await?;
        }
        // After what they brought was said to be kept: the rest is sent again.
        for stream in ended {
            say(write, &ToParent::StreamEnded { stream }).await?;
        }
        Ok(())
    }

    /// A chunk that came while it had another owner is wanted again once that one has ended without it.
    fn want_missed(&self) {
        let mut outbox = lock(&self.outbox);
        if outbox.missed.is_empty() {
            return;
        }
        let missed = std::mem::take(&mut outbox.missed);
        for index in missed {
            if self.shared.store.has(index) {
                continue;
            }
            match self.shared.store.claim(index) {
                Some(claim) => {
                    drop(claim);
                    outbox.want.push(index);
                }
                None => outbox.missed.push(index),
            }
        }
    }

    /// The payload's head is wanted before anything else: without the manifest, nobody knows what the rest is held against.
    fn want_head(&self, items: Vec<(ChunkIndex, ChunkDigest)>) {
        let store = &self.shared.store;
        let (head, rest): (Vec<_>, Vec<_>) = items
            .into_iter()
            .partition(|(index, _)| index.0 < store.layout().head_count());
        lock(&self.outbox).want.extend(
            head.into_iter()
                .map(|(index, _)| index)
                .filter(|index| !store.has(*index)),
        );
        self.say.notify_one();
        lock(&self.offered).splice(0..0, rest);
    }

    /// Holds what is offered against the older copy. The disk work is done off the runtime, one batch after another.
    async fn compare(self: Arc<Self>) {
        loop {
            let items = std::mem::take(&mut *lock(&self.offered));
            if items.is_empty() {
                tokio::select! {
                    () = self.ending.cancelled() => return,
                    () = self.offers.notified() => continue,
                }
            }
            if !self.shared.store.is_laid_out() {
                self.want_head(items);
                tokio::select! {
                    () = self.ending.cancelled() => return,
                    () = self.offers.notified() => continue,
                }
            }
            if !self.shared.store.has_old() {
                // Said after the offers that were answered, and those that were not are wanted then.
                lock(&self.outbox).no_offers = true;
                self.say.notify_one();
                return;
            }
            let hop = self.clone();
            let compared = tokio::task::spawn_blocking(move || {
                for (index, digest) in items {
                    if hop.is_over() {
                        return;
                    }
                    if hop.shared.store.has(index) {
                        hop.arrived(index);
                        continue;
                    }
                    match hop.shared.store.compare(index, digest) {
                        // The store tells all watchers, this hop among them.
                        Ok(Compared::Same) => {}
                        Ok(Compared::Different) => {
                            lock(&hop.outbox).want.push(index);
                            hop.say.notify_one();
                        }
                        Err(failure) => {
                            hop.fail(Fault::Unfit(failure));
                            return;
                        }
                    }
                }
            });
            if compared.await.is_err() {
                return;
            }
        }
    }
}

/// Says a word to a parent that must not take for ever to listen.
async fn say(write: &mut WriteHalf<Conn>, message: &ToParent) -> Result<(), TransferError> {
    timeout(DEAD, frame::send(write, message))
        .await
        .map_err(|_| TransferError::Silent(DEAD.as_secs()))?
}

impl Watcher for InHop {
    fn arrived(&self, index: ChunkIndex) {
        lock(&self.outbox).kept.push(index);
        self.say.notify_one();
        if index.0 < self.shared.store.layout().head_count() {
            // The manifest may be known now.
            self.offers.notify_one();
        }
    }
}
