//! One child at work: its control connection, its queue and its stream threads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use stage_core::chunk::ChunkIndex;
use stage_core::id::{HopId, NodeName};
use stage_core::units::{ByteCount, Rate};
use stage_core::waits::{self, Sending, Tcp};
use stage_net::{BlockingConn, Closer, Conn};
use tokio::io::{ReadHalf, WriteHalf};
use tokio::sync::{Notify, mpsc};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use super::Served;
use super::queue::Queue;
use super::stream;
use crate::clock::{Clock, Doing};
use crate::error::TransferError;
use crate::frame::{self, MAX_BATCH, MAX_MESSAGE, Reader, ToChild, ToParent};
use crate::store::Watcher;
use crate::sync::lock;

/// A child that says nothing for so long is gone.
const SILENCE: Duration = Duration::from_secs(10);
/// What a broken stream has sent waits so long for the child's word.
const ORPHANED: Duration = Duration::from_secs(2);
/// Data connections of one hop: no peer chooses our number of threads.
const MAX_STREAMS: usize = 64;

/// A child at work.
pub(crate) struct Hop {
    pub(crate) id: HopId,
    pub(crate) child: NodeName,
    served: Weak<Served>,
    queue: Mutex<Queue>,
    filled: Condvar,
    offers: Notify,
    over: AtomicBool,
    ending: CancellationToken,
    streams: Mutex<Vec<Stream>>,
    /// Streams whose thread has ended, and that the child has not yet said to be over.
    orphans: Mutex<Vec<(u32, Instant)>>,
    /// Where the time of threads went that are over.
    sent: Mutex<Sending>,
}

struct Stream {
    number: u32,
    closer: Closer,
    thread: JoinHandle<()>,
    /// The child has not said that it is over.
    open: bool,
    clock: Arc<Clock>,
}

impl Stream {
    fn sending(&self) -> Sending {
        let of = |part| self.clock.of(part);
        let (network, disk, cpu) = waits::apart(
            of(Doing::Network),
            of(Doing::Disk),
            of(Doing::Work),
            self.clock.cpu(),
        );
        let tcp = self.closer.counters().unwrap_or_default();
        Sending {
            idle: of(Doing::Idle),
            network,
            disk,
            limit: of(Doing::Limit),
            cpu,
            tcp: Tcp {
                busy: tcp.busy,
                receiver: tcp.receiver_limited,
                buffer: tcp.buffer_limited,
                sent: ByteCount(tcp.sent),
                again: ByteCount(tcp.sent_again),
                rtt: tcp.rtt,
                delivery: Rate::from_bytes_per_second(tcp.delivery_rate as f64),
            },
        }
    }
}

impl Hop {
    pub(crate) fn new(id: HopId, child: NodeName, served: &Arc<Served>) -> Arc<Self> {
        let hop = Arc::new(Self {
            id,
            child,
            served: Arc::downgrade(served),
            queue: Mutex::new(Queue::new(served.store.layout().count())),
            filled: Condvar::new(),
            offers: Notify::new(),
            over: AtomicBool::new(false),
            ending: CancellationToken::new(),
            streams: Mutex::default(),
            orphans: Mutex::default(),
            sent: Mutex::default(),
        });
        let watcher: Weak<dyn Watcher> = Arc::<Self>::downgrade(&hop);
        let here = served.store.watch(watcher);
        lock(&hop.queue).here(&here);
        hop
    }

    /// Whether the child has said what it has.
    pub(crate) fn is_started(&self) -> bool {
        lock(&self.queue).is_started()
    }

    /// Chunks that could be sent at once.
    pub(crate) fn ready(&self) -> u32 {
        lock(&self.queue).ready()
    }

    /// Asks the hop to end, saying `leaving`.
    pub(crate) fn end(&self) {
        self.ending.cancel();
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Takes in a data connection that the child has dialled.
    pub(crate) fn add_stream(self: &Arc<Self>, number: u32, conn: BlockingConn) -> Result<(), TransferError> {
        let Some(served) = self.served.upgrade() else {
            return Err(TransferError::Stopped);
        };
        let closer = conn.closer()?;
        let mut streams = lock(&self.streams);
        for over in streams.extract_if(.., |stream| !stream.open && stream.thread.is_finished()) {
            lock(&self.sent).add(&over.sending());
        }
        if self.is_over() {
            return Err(TransferError::Stopped);
        }
        if streams.len() >= MAX_STREAMS {
            return Err(TransferError::Protocol("too many data connections"));
        }
        if streams.iter().any(|stream| stream.number == number) {
            return Err(TransferError::Protocol("two data connections of one number"));
        }
        let hop = self.clone();
        let clock = Arc::new(Clock::default());
        let its = clock.clone();
        let thread = std::thread::Builder::new()
            .name(format!("out-{number}"))
            .spawn(move || {
                if let Err(error) = stream::run(&hop, &served, number, &its, conn) {
                    tracing::debug!(child = %hop.child, stream = number, %error, "stream ended");
                }
                hop.thread_ended(number);
            })?;
        streams.push(Stream {
            number,
            closer,
            thread,
            open: true,
            clock,
        });
        Ok(())
    }

    /// Where the time of its threads went.
    pub(crate) fn sending(&self) -> Sending {
        let mut sum = *lock(&self.sent);
        for stream in &*lock(&self.streams) {
            sum.add(&stream.sending());
        }
        sum
    }

    /// Blocks until there is a chunk for this stream; `None` when the hop or the stream is over.
    pub(crate) fn take(&self, stream: u32, clock: &Clock, closed: &dyn Fn() -> bool) -> Option<ChunkIndex> {
        let mut queue = lock(&self.queue);
        loop {
            if self.is_over() || closed() {
                return None;
            }
            if let Some(index) = queue.take(stream) {
                return Some(index);
            }
            let wait = clock.time(Doing::Idle, || {
                self.filled.wait_timeout(queue, Duration::from_millis(500))
            });
            queue = wait.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
    }

    /// A chunk that was taken is not here after all.
    pub(crate) fn gone(&self, index: ChunkIndex) {
        lock(&self.queue).gone(index);
    }

    /// Whether the stream has been ended from the other side, by a word on the control connection.
    pub(crate) fn is_stream_open(&self, number: u32) -> bool {
        !self.is_over()
            && lock(&self.streams)
                .iter()
                .any(|stream| stream.number == number && stream.open)
    }

    fn stream_ended(&self, number: u32) {
        lock(&self.queue).ended(number);
        self.filled.notify_all();
    }

    /// A stream's thread has ended. If the child has not said so, it may still be reading what the kernel holds: what
    /// was sent goes to another stream once the child has said that it is done, or after some time.
    fn thread_ended(&self, number: u32) {
        if self.is_stream_open(number) {
            lock(&self.orphans).push((number, Instant::now()));
        } else {
            self.stream_ended(number);
        }
    }

    /// Puts back what ended streams have sent, where the child has not said anything for too long.
    fn adopt_orphans(&self) {
        let late: Vec<_> = lock(&self.orphans)
            .extract_if(.., |(_, since)| since.elapsed() > ORPHANED)
            .collect();
        for (number, _) in late {
            self.end_stream(number);
        }
    }

    fn end_stream(&self, number: u32) {
        lock(&self.orphans).retain(|(other, _)| *other != number);
        if let Some(stream) = lock(&self.streams)
            .iter_mut()
            .find(|stream| stream.number == number)
        {
            stream.open = false;
            stream.closer.close();
        }
        // Now, not when the thread has noticed; what it may have taken meanwhile comes back when it ends.
        self.stream_ended(number);
    }

    /// Runs the control connection until the hop ends, then ends its threads.
    pub(crate) async fn run(self: Arc<Self>, conn: Conn) {
        let Some(served) = self.served.upgrade() else {
            return;
        };
        let (read, write) = tokio::io::split(conn);
        let (ask, asked) = mpsc::channel(4);
        let end = tokio::select! {
            end = self.hear(read, ask) => end,
            end = self.speak(&served, write, asked) => end,
        };
        match end {
            Ok(()) => tracing::debug!(child = %self.child, "hop ended"),
            Err(error) => tracing::debug!(child = %self.child, %error, "hop broke"),
        }
        self.over.store(true, Ordering::Relaxed);
        self.filled.notify_all();
        served.dismiss(self.id);
        let streams: Vec<_> = lock(&self.streams).drain(..).collect();
        for stream in &streams {
            stream.closer.close();
        }
        let joined = tokio::task::spawn_blocking(move || {
            for stream in streams {
                if stream.thread.join().is_err() {
                    tracing::error!("a sending thread panicked");
                }
            }
        });
        let _ = joined.await;
    }

    async fn hear(
        &self,
        read: ReadHalf<Conn>,
        ask: mpsc::Sender<(ChunkIndex, u32)>,
    ) -> Result<(), TransferError> {
        let mut reader = Reader::new(read, MAX_MESSAGE);
        loop {
            let message: ToParent = timeout(SILENCE, reader.next())
                .await
                .map_err(|_| TransferError::Silent(SILENCE.as_secs()))??;
            match message {
                ToParent::Have(runs) => {
                    let mut queue = lock(&self.queue);
                    runs.iter().for_each(|(begin, end)| queue.has(*begin, *end));
                }
                ToParent::Start { offers } => {
                    lock(&self.queue).start(offers);
                    self.filled();
                }
                ToParent::Kept(chunks) => {
                    let mut queue = lock(&self.queue);
                    chunks.iter().for_each(|index| queue.kept(*index));
                    if queue.has_offers() {
                        self.offers.notify_one();
                    }
                }
                ToParent::Want(chunks) => {
                    let mut queue = lock(&self.queue);
                    chunks.iter().for_each(|index| queue.want(*index));
                    drop(queue);
                    self.filled();
                }
                ToParent::StreamEnded { stream } => self.end_stream(stream),
                ToParent::Digests { from, count } => {
                    if ask.send((from, count.min(MAX_BATCH as u32))).await.is_err() {
                        return Ok(());
                    }
                }
                ToParent::Beat => {}
                ToParent::Leaving => return Ok(()),
            }
        }
    }

    /// Tells everyone who waits that the queue may hold something new.
    fn filled(&self) {
        self.filled.notify_all();
        self.offers.notify_one();
        if let Some(served) = self.served.upgrade() {
            served.taken();
        }
    }

    async fn speak(
        &self,
        served: &Arc<Served>,
        mut write: WriteHalf<Conn>,
        mut asked: mpsc::Receiver<(ChunkIndex, u32)>,
    ) -> Result<(), TransferError> {
        let mut second = interval(Duration::from_secs(1));
        second.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut beats = served.beats();
        let mut said_leaving = false;
        let mut before = Sending::default();
        loop {
            let message = tokio::select! {
                () = self.ending.cancelled() => break,
                () = served.ended.cancelled() => break,
                () = served.leaving.cancelled(), if !said_leaving => {
                    said_leaving = true;
                    ToChild::Leaving
                }
                _ = second.tick() => {
                    self.adopt_orphans();
                    say(&mut write, &ToChild::Beat(served.beat())).await?;
                    let now = self.sending();
                    let pushed = pushed(&now.since(&before));
                    before = now;
                    pushed
                }
                Ok(()) = beats.changed() => ToChild::Beat(served.beat()),
                () = self.offers.notified() => {
                    self.offer(served, &mut write).await?;
                    continue;
                }
                Some((from, count)) = asked.recv() => digests(served, from, count).await,
            };
            say(&mut write, &message).await?;
        }
        say(&mut write, &ToChild::Leaving).await
    }

    async fn offer(&self, served: &Arc<Served>, write: &mut WriteHalf<Conn>) -> Result<(), TransferError> {
        loop {
            let next = lock(&self.queue).offers(MAX_BATCH);
            if next.is_empty() {
                return Ok(());
            }
            let items = next
                .into_iter()
                .filter_map(|index| Some((index, served.store.digest(index)?)))
                .collect();
            say(write, &ToChild::Offer(items)).await?;
        }
    }
}

/// How much the threads waited for room in their sockets.
fn pushed(since: &Sending) -> ToChild {
    let share = since.network.as_secs_f64() / since.total().as_secs_f64().max(1e-9);
    ToChild::Pushed {
        permille: (share * 1000.0) as u16,
    }
}

/// Says a word to a child that must not take for ever to listen.
async fn say(write: &mut WriteHalf<Conn>, message: &ToChild) -> Result<(), TransferError> {
    timeout(SILENCE, frame::send(write, message))
        .await
        .map_err(|_| TransferError::Silent(SILENCE.as_secs()))?
}

async fn digests(served: &Arc<Served>, from: ChunkIndex, count: u32) -> ToChild {
    let store = served.store.clone();
    let begin = Instant::now();
    let read = tokio::task::spawn_blocking(move || {
        let end = from.0.saturating_add(count).min(store.layout().count());
        if from.0 >= end || !store.is_complete() {
            return Vec::new();
        }
        store.digests(from.0..end).unwrap_or_else(|failure| {
            tracing::warn!(%failure, "digests cannot be read");
            Vec::new()
        })
    });
    let digests = read.await.unwrap_or_default();
    tracing::trace!(count = digests.len(), took = ?begin.elapsed(), "digests read");
    ToChild::Digests { from, digests }
}

impl Watcher for Hop {
    fn arrived(&self, index: ChunkIndex) {
        let mut queue = lock(&self.queue);
        queue.arrived(index);
        let offers = queue.has_offers();
        drop(queue);
        self.filled.notify_one();
        if offers {
            self.offers.notify_one();
        }
    }
}

impl std::fmt::Debug for Hop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hop({} to {})", self.id, self.child)
    }
}
