//! Receiving: one parent at a time, its streams, and the way to another when it fails.
//!
//! ```text
//!   Inbound ── manager (task): which parent, since when, why not any more
//!                ├── search (task): dials candidates until one says welcome
//!                └── hop (task): control connection of the parent
//!                      └── stream (task + thread), k of them: read, hash, write, check, keep
//! ```
//!
//! Threads and tasks below say what happened by setting their hop's state and waking the manager, which looks at all
//! of it and acts. Nothing can be lost in a queue, and nobody waits for the manager.

mod dial;
mod grow;
mod hop;
mod manager;
mod repair;
mod stream;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use stage_core::assignment::{Final, Peer, StreamChoice};
use stage_core::chunk::{ChunkIndex, ChunkSet};
use stage_core::digest::ManifestDigest;
use stage_core::failure::Failure;
use stage_core::id::{CongestionControl, Epoch, JobId, JobKey, NodeName, PlanVersion};
use stage_core::units::Rate;
use stage_core::waits::Receiving;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::beat::Pulse;
use crate::plane::DataPlane;
use crate::store::{Store, Watcher};
use crate::sync::lock;

/// What a target receives, and from whom.
#[derive(Debug)]
pub struct InboundConfig {
    /// The job.
    pub job: JobId,
    /// The proof of membership.
    pub key: JobKey,
    /// Where the chunks go.
    pub store: Arc<Store>,
    /// Whom to ask: the parent first, then its fallbacks nearest first, the source last.
    pub parents: Vec<Peer>,
    /// How many streams.
    pub streams: StreamChoice,
    /// The congestion control that the first parent's data connections shall ask for; `None`: its host's own.
    pub control: Option<CongestionControl>,
    /// By which plan; it only informs.
    pub rank: (Epoch, PlanVersion),
    /// With [`StreamChoice::Auto`]: the rate that the streams together should carry; without limit, 10 Gbit/s.
    pub wanted: Rate,
}

/// What happens on the way.
#[derive(Debug, Clone, PartialEq)]
pub enum HopEvent {
    /// Every chunk is here. Said again after a [`Inbound::repair`] that had something to fetch.
    Complete,
    /// Another parent now; or the first one.
    Moved {
        /// The parent before.
        from: Option<NodeName>,
        /// The parent now.
        to: NodeName,
        /// What was wrong with the one before.
        why: String,
    },
    /// A chunk came with bytes that are not its digest's. It was not kept, and this parent is left.
    Corrupt {
        /// Who sent it.
        parent: NodeName,
        /// Which chunk.
        chunk: ChunkIndex,
    },
    /// This node cannot keep chunks any more; nothing is received from now on.
    Failed(Failure),
    /// Other content stands at the target; nothing is received from now on.
    Unfit(Failure),
    /// No parent lets us in, and this is what the last one said. They are asked on.
    Stuck(Failure),
}

/// What one target has received, sampled.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct InboundCounters {
    /// Payload bytes received, chunks that came twice counted twice.
    pub bytes_received: u64,
    /// From whom it receives.
    pub parent: Option<NodeName>,
    /// Data connections to the parent.
    pub streams: u16,
    /// RTT to the parent.
    pub rtt: Option<Duration>,
    /// Where the time of its threads went.
    pub receiving: Receiving,
}

enum Command {
    Parents(Vec<Peer>, StreamChoice),
    /// Something is missing again: leave who is shunned, and look at once.
    Refetch,
}

/// What the manager, its hops and their threads share.
struct Shared {
    plane: Arc<DataPlane>,
    job: JobId,
    key: JobKey,
    store: Arc<Store>,
    rank: (Epoch, PlanVersion),
    wanted: Rate,
    pulse: Arc<Pulse>,
    bytes_received: AtomicU64,
    /// Where the time of threads went that are over.
    received: Mutex<Receiving>,
    view: Mutex<View>,
    /// Something happened that the manager should look at.
    changed: Notify,
    stopping: CancellationToken,
}

/// What is shown outside, and what [`Inbound::repair`] goes by.
#[derive(Default)]
struct View {
    parents: Vec<Peer>,
    /// What the first parent's data connections shall ask for.
    control: Option<CongestionControl>,
    /// The parent of the open hop, or of the last one.
    last: Option<NodeName>,
    hop: Option<Arc<hop::InHop>>,
    /// These delivered chunks that were not the payload's, by FINAL's word: asked last.
    shunned: BTreeSet<NodeName>,
}

impl View {
    /// What is asked of this parent: the way to another than the first may want something else, and its host knows best.
    fn control_with(&self, parent: &NodeName) -> Option<CongestionControl> {
        let is_first = self.parents.first().is_some_and(|first| first.node == *parent);
        self.control.clone().filter(|_| is_first)
    }
}

impl Watcher for Shared {
    fn arrived(&self, _: ChunkIndex) {
        if self.store.is_complete() {
            self.changed.notify_one();
        }
    }
}

/// One target at work.
pub struct Inbound {
    shared: Arc<Shared>,
    commands: mpsc::Sender<Command>,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Inbound {
    /// Begins to receive. To be called within a tokio runtime.
    pub fn start(plane: &Arc<DataPlane>, config: InboundConfig, events: mpsc::Sender<HopEvent>) -> Self {
        let shared = Arc::new(Shared {
            plane: plane.clone(),
            job: config.job,
            key: config.key,
            store: config.store,
            rank: config.rank,
            wanted: config.wanted,
            pulse: plane.pulse(config.job),
            bytes_received: AtomicU64::new(0),
            received: Mutex::default(),
            view: Mutex::new(View {
                parents: config.parents.clone(),
                control: config.control,
                ..View::default()
            }),
            changed: Notify::new(),
            stopping: CancellationToken::new(),
        });
        let watcher: Weak<dyn Watcher> = Arc::<Shared>::downgrade(&shared);
        shared.store.watch(watcher);
        let (commands, commanded) = mpsc::channel(16);
        let manager = manager::Manager::new(shared.clone(), config.parents, config.streams, events);
        let task = tokio::spawn(manager.run(commanded));
        Self {
            shared,
            commands,
            task: Mutex::new(Some(task)),
        }
    }

    /// Other parents, or another number or kind of streams. The present parent stays if it is the first; else the first is
    /// moved to as soon as bytes come from it.
    pub async fn set_parents(
        &self,
        parents: Vec<Peer>,
        streams: StreamChoice,
        control: Option<CongestionControl>,
    ) {
        {
            let mut view = lock(&self.shared.view);
            view.parents.clone_from(&parents);
            view.control = control;
        }
        // A manager that has ended has nothing to move.
        let _ = self.commands.send(Command::Parents(parents, streams)).await;
    }

    /// What was received so far.
    pub fn counters(&self) -> InboundCounters {
        let mut receiving = *lock(&self.shared.received);
        let view = lock(&self.shared.view);
        if let Some(hop) = &view.hop {
            receiving.add(&hop.receiving());
        }
        InboundCounters {
            receiving,
            bytes_received: self.shared.bytes_received.load(Ordering::Relaxed),
            parent: view.hop.as_ref().map(|hop| hop.peer.node.clone()),
            streams: view.hop.as_ref().map_or(0, |hop| hop.open_streams()),
            rtt: view.hop.as_ref().map(|hop| hop.rtt),
        }
    }

    /// Finds out which chunks are not those of `fin`, takes back that they are here, and fetches them from another
    /// parent than the one that delivered last. Gives the chunks that differ; [`HopEvent::Complete`] follows when
    /// they have come again.
    ///
    /// # Errors
    /// No parent could give a list of digests that `fin` proves, or the store failed.
    pub async fn repair(&self, fin: &Final, manifest: ManifestDigest) -> Result<ChunkSet, Failure> {
        let differ = repair::find(&self.shared, fin, manifest).await?;
        if !differ.is_empty() {
            {
                // Before the chunks are missing: then they are looked for at once.
                let mut view = lock(&self.shared.view);
                if let Some(last) = view.last.clone() {
                    view.shunned.insert(last);
                }
            }
            let store = self.shared.store.clone();
            let chunks = differ.clone();
            tokio::task::spawn_blocking(move || store.disown(&chunks))
                .await
                .expect("disowning does not panic")?;
            let _ = self.commands.send(Command::Refetch).await;
        }
        Ok(differ)
    }

    /// Ends all connections and waits until no task or thread is left.
    pub async fn stop(&self) {
        self.shared.stopping.cancel();
        let task = lock(&self.task).take();
        if let Some(task) = task
            && task.await.is_err()
        {
            tracing::error!(job = %self.shared.job, "receiving panicked");
        }
    }
}

impl Drop for Inbound {
    fn drop(&mut self) {
        self.shared.stopping.cancel();
    }
}

impl std::fmt::Debug for Inbound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Inbound({})", self.shared.job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_parent_is_asked_for_what_the_plan_wants_on_its_way() {
        let peer = |name: &str| Peer {
            node: name.parse().unwrap(),
            addresses: Vec::new(),
        };
        let cubic: CongestionControl = "cubic".parse().unwrap();
        let view = View {
            parents: vec![peer("n1"), peer("n0")],
            control: Some(cubic.clone()),
            ..View::default()
        };
        assert_eq!(view.control_with(&"n1".parse().unwrap()), Some(cubic));
        assert_eq!(view.control_with(&"n0".parse().unwrap()), None);
        assert_eq!(View::default().control_with(&"n1".parse().unwrap()), None);
    }
}
