//! Sending: one job's chunks to the children that ask for them.
//!
//! ```text
//!   Store ──arrived──► Queue (one a hop) ◄──take── stream threads ──► child
//!                        ▲ have, want, kept
//!                        └── control connection ◄───────────────────── child
//! ```
//!
//! A hop is one control connection, driven by a task, and the data connections that the child dials, each driven by a
//! thread. The task owns the threads: it ends them and joins them when the hop ends.

mod hop;
mod queue;
mod stream;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::{Duration, Instant};

use stage_core::chunk::ChunkIndex;
use stage_core::failure::Failure;
use stage_core::id::{HopId, JobId, JobKey, NodeName};
use stage_core::units::Rate;
use stage_core::waits::{self, MAX_CHILDREN, Reading, Sending};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::beat::Pulse;
use crate::budget::Budget;
use crate::clock::{Clock, Doing};
use crate::frame::{Beat, Waits};
use crate::pace::Pacer;
use crate::plane::DataPlane;
use crate::store::Store;
use crate::sync::{lock, random};

pub(crate) use hop::Hop;
pub(crate) use queue::MAX_OFFERS;

/// Places for children that no plan has sent here: those whose parent failed.
const SPARE_PLACES: usize = 2;
/// How many chunks a hop may have ready before the source stops reading ahead of it.
const AHEAD: u32 = 8;

/// How long nobody asks before the source reads on without being asked. A child that lost a parent, or hears of the
/// job late, has dialled by then; if not, what it wants is read once more.
const ALONE: Duration = Duration::from_secs(5);

/// What this node sends of one job, sampled.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ServingCounters {
    /// Payload bytes written to children.
    pub bytes_sent: u64,
    /// Children with an open hop.
    pub children: u16,
}

/// A fault for tests: what a broken or lying relay does.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Flips a bit of this chunk on its way out, whenever it is sent.
    FlipByte {
        /// Which chunk.
        chunk: ChunkIndex,
    },
}

/// One job that this node serves.
pub(crate) struct Served {
    pub(crate) job: JobId,
    pub(crate) key: JobKey,
    pub(crate) store: Arc<Store>,
    pub(crate) pace: Pacer,
    /// This is the source: it counts, and it sends nobody away who has nowhere else to go.
    pub(crate) is_source: bool,
    /// What the source's reading waits for, for the beat.
    pub(crate) waits: Mutex<Waits>,
    pub(crate) fault: Mutex<Option<Fault>>,
    pub(crate) bytes_sent: AtomicU64,
    /// Bytes that were read from the file to be sent, because they were not in memory any more.
    pub(crate) bytes_read_back: AtomicU64,
    /// Why a chunk that is here could not be read.
    pub(crate) failure: Mutex<Option<Failure>>,
    pub(crate) node: NodeName,
    pub(crate) budget: Arc<Budget>,
    pulse: Arc<Pulse>,
    origin: u64,
    children: Mutex<BTreeSet<NodeName>>,
    hops: Mutex<HashMap<HopId, Arc<Hop>>>,
    /// Where the time went of hops that are over, by their child; [`MAX_CHILDREN`] at most.
    past: Mutex<BTreeMap<NodeName, Sending>>,
    /// Of the thread that reads the source.
    pub(crate) reader: Clock,
    /// Since when there is no hop.
    alone: Mutex<Option<Instant>>,
    gate: Gate,
    /// The job is not served any more.
    pub(crate) ended: CancellationToken,
    /// Children are asked to leave.
    pub(crate) leaving: CancellationToken,
}

/// What serving a job goes by.
pub(crate) struct Member {
    pub(crate) job: JobId,
    pub(crate) key: JobKey,
    pub(crate) children: Vec<NodeName>,
    pub(crate) limit: Option<Rate>,
}

/// Wakes the source's reader when a hop has taken something, come or gone.
#[derive(Debug, Default)]
struct Gate {
    turn: Mutex<u64>,
    turned: Condvar,
}

impl Gate {
    fn open(&self) {
        *lock(&self.turn) += 1;
        self.turned.notify_all();
    }
}

/// Whether a child may come in.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Given,
    None,
}

impl Served {
    pub(crate) fn new(plane: &DataPlane, job: Member, store: Arc<Store>, is_source: bool) -> Arc<Self> {
        Arc::new(Self {
            pulse: plane.pulse(job.job),
            job: job.job,
            key: job.key,
            store,
            pace: Pacer::new(job.limit),
            is_source,
            waits: Mutex::default(),
            fault: Mutex::default(),
            bytes_sent: AtomicU64::new(0),
            bytes_read_back: AtomicU64::new(0),
            failure: Mutex::default(),
            node: plane.node().clone(),
            budget: plane.budget().clone(),
            origin: u64::from_le_bytes(random()),
            children: Mutex::new(job.children.into_iter().collect()),
            hops: Mutex::default(),
            past: Mutex::default(),
            reader: Clock::default(),
            alone: Mutex::new(Some(Instant::now())),
            gate: Gate::default(),
            ended: CancellationToken::new(),
            leaving: plane.draining(),
        })
    }

    /// Counts the seconds of who has everything, until the job is not served any more.
    pub(crate) async fn count(self: Arc<Self>) {
        let mut second = tokio::time::interval(Duration::from_secs(1));
        loop {
            tokio::select! {
                () = self.ended.cancelled() => return,
                _ = second.tick() => {}
            }
            if self.is_source || self.store.is_complete() {
                let waits = *lock(&self.waits);
                self.pulse.count(self.origin, waits);
            }
        }
    }

    pub(crate) fn beat(&self) -> Beat {
        self.pulse.now()
    }

    /// Sees each new beat.
    pub(crate) fn beats(&self) -> watch::Receiver<()> {
        self.pulse.watch()
    }

    /// Finds a place for a child, which replaces an older hop of the same child.
    pub(crate) fn place(&self, child: &NodeName, tried_others: bool) -> Place {
        let children = lock(&self.children);
        if children.contains(child) || (self.is_source && tried_others) {
            return Place::Given;
        }
        let spare_taken = lock(&self.hops)
            .values()
            .filter(|hop| hop.child != *child && !children.contains(&hop.child))
            .count();
        if spare_taken < SPARE_PLACES {
            Place::Given
        } else {
            Place::None
        }
    }

    /// Takes a hop in; an older one of the same child ends.
    pub(crate) fn admit(&self, hop: &Arc<Hop>) {
        let older: Vec<Arc<Hop>> = {
            let mut hops = lock(&self.hops);
            let older = hops.extract_if(|_, other| other.child == hop.child);
            let older = older.map(|(_, hop)| hop).collect();
            hops.insert(hop.id, hop.clone());
            *lock(&self.alone) = None;
            older
        };
        for hop in older {
            self.remember(&hop);
            hop.end();
        }
        self.gate.open();
    }

    pub(crate) fn dismiss(&self, id: HopId) {
        let gone = {
            let mut hops = lock(&self.hops);
            let gone = hops.remove(&id);
            if gone.is_some() && hops.is_empty() {
                *lock(&self.alone) = Some(Instant::now());
            }
            gone
        };
        if let Some(hop) = gone {
            self.remember(&hop);
        }
        self.gate.open();
    }

    /// A hop is over: what it says of its time counts on.
    fn remember(&self, hop: &Hop) {
        let mut past = lock(&self.past);
        if past.len() < MAX_CHILDREN || past.contains_key(&hop.child) {
            past.entry(hop.child.clone()).or_default().add(&hop.sending());
        }
    }

    /// Where the time of the threads that send went, by child; [`MAX_CHILDREN`] of them at most.
    fn sending(&self) -> Vec<(NodeName, Sending)> {
        let mut sums = lock(&self.past).clone();
        let hops: Vec<_> = lock(&self.hops).values().cloned().collect();
        for hop in hops {
            if sums.len() < MAX_CHILDREN || sums.contains_key(&hop.child) {
                sums.entry(hop.child.clone()).or_default().add(&hop.sending());
            }
        }
        sums.into_iter().collect()
    }

    /// Where the time of the thread that reads the source went.
    fn reading(&self) -> Reading {
        let of = |part| self.reader.of(part);
        let (disk, _, cpu) = waits::apart(
            of(Doing::Disk),
            Duration::ZERO,
            of(Doing::Work),
            self.reader.cpu(),
        );
        Reading {
            disk,
            limit: of(Doing::Limit),
            idle: of(Doing::Idle),
            cpu,
        }
    }

    pub(crate) fn hop(&self, id: HopId) -> Option<Arc<Hop>> {
        lock(&self.hops).get(&id).cloned()
    }

    /// A hop has taken a chunk: the reader may have to go on.
    pub(crate) fn taken(&self) {
        if self.is_source {
            self.gate.open();
        }
    }

    /// Whether the source should read on: some hop has little left to send, or nothing much was read yet, or nobody
    /// has asked for a while: then all may have all, of an earlier life of this source, and wait only for FINAL.
    fn wants_more(&self, read: u32) -> bool {
        let hops: Vec<_> = lock(&self.hops).values().cloned().collect();
        let mut lowest = None;
        for hop in hops.iter().filter(|hop| hop.is_started()) {
            let ready = hop.ready();
            lowest = Some(lowest.map_or(ready, |low: u32| low.min(ready)));
        }
        let alone = lock(&self.alone).is_some_and(|since| since.elapsed() >= ALONE);
        lowest.map_or(read < AHEAD || alone, |ready| ready < AHEAD)
    }

    /// Whether no child waits for anything that is here.
    pub(crate) fn is_idle(&self) -> bool {
        lock(&self.hops).values().all(|hop| hop.ready() == 0)
    }

    /// Blocks until the source should read on, after `read` chunks; `false` when it should stop instead.
    pub(crate) fn wait_for_demand(&self, read: u32, stop: &AtomicBool) -> bool {
        let mut turn = lock(&self.gate.turn);
        loop {
            if stop.load(Ordering::Relaxed) || self.ended.is_cancelled() {
                return false;
            }
            let seen = *turn;
            drop(turn);
            if self.wants_more(read) {
                return true;
            }
            turn = lock(&self.gate.turn);
            if *turn == seen {
                // The timeout only bounds how late a stop is seen.
                let wait = self.gate.turned.wait_timeout(turn, Duration::from_millis(100));
                turn = wait.unwrap_or_else(std::sync::PoisonError::into_inner).0;
            }
        }
    }

    fn counters(&self) -> ServingCounters {
        ServingCounters {
            bytes_sent: self.bytes_sent.load(Ordering::Relaxed),
            children: u16::try_from(lock(&self.hops).len()).unwrap_or(u16::MAX),
        }
    }

    /// Ends all hops, each with `leaving`.
    pub(crate) fn end(&self) {
        self.ended.cancel();
        self.gate.open();
    }
}

impl std::fmt::Debug for Served {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Served({})", self.job)
    }
}

/// Keeps a job served; dropped, its children are told that this parent leaves.
#[derive(Debug)]
pub struct Serving {
    pub(crate) served: Arc<Served>,
    pub(crate) plane: Weak<DataPlane>,
}

impl Serving {
    /// Who is planned to ask: these always find a place.
    pub fn set_children(&self, children: Vec<NodeName>) {
        *lock(&self.served.children) = children.into_iter().collect();
    }

    /// What may be sent a second, over all children.
    pub fn set_limit(&self, limit: Option<Rate>) {
        self.served.pace.set(limit);
    }

    /// What was sent so far.
    pub fn counters(&self) -> ServingCounters {
        self.served.counters()
    }

    /// Where the time of its threads went: of the one that reads the source, and of those that send to each child.
    pub fn waits(&self) -> (Reading, Vec<(NodeName, Sending)>) {
        (self.served.reading(), self.served.sending())
    }

    /// Makes this node a broken one.
    #[doc(hidden)]
    pub fn set_fault(&self, fault: Option<Fault>) {
        *lock(&self.served.fault) = fault;
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.served.end();
        if let Some(plane) = self.plane.upgrade() {
            plane.forget(&self.served);
        }
    }
}
