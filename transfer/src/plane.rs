//! The data listener of one agent, and the jobs that it serves.
//!
//! A connection is nobody until its hello is believed: it has five seconds, there are at most 64 such, and when one
//! more comes the oldest has to go, so that a crowd that says nothing keeps nobody out.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Weak};

use stage_core::failure::{Code, Failure};
use stage_core::id::{JobId, JobKey, NodeName};
use stage_core::plan::WindowLimits;
use stage_core::units::Rate;
use stage_net::{Conn, HELLO_DEADLINE, Listener, Net};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::beat::Pulse;
use crate::budget::Budget;
use crate::error::TransferError;
use crate::hello::{self, Answer, Asked, ConnKind, Welcome};
use crate::outbound::{Hop, Member, Place, Served, Serving};
use crate::probe::{Answering, Probed};
use crate::root::Roots;
use crate::store::Store;
use crate::sync::lock;

/// Connections whose hello was not believed yet.
const MAX_STRANGERS: usize = 64;

/// The data plane of one agent.
pub struct DataPlane {
    net: Net,
    node: NodeName,
    windows: WindowLimits,
    budget: Arc<Budget>,
    addresses: Vec<SocketAddr>,
    jobs: Mutex<Jobs>,
    strangers: Mutex<Strangers>,
    /// Every task of the plane: accepting, greeting, hops.
    tasks: TaskTracker,
    /// No new connections.
    draining: CancellationToken,
    stopping: CancellationToken,
}

#[derive(Default)]
struct Jobs {
    served: HashMap<JobId, Arc<Served>>,
    pulses: HashMap<JobId, Weak<Pulse>>,
    /// Measurements in which this node answers, by their ids.
    probes: HashMap<JobId, Arc<Probed>>,
}

#[derive(Default)]
struct Strangers {
    next: u64,
    /// Oldest first.
    waiting: VecDeque<(u64, CancellationToken)>,
}

impl DataPlane {
    /// Listens on these addresses. To be called within a tokio runtime, on which its tasks then run.
    ///
    /// # Errors
    /// An address cannot be listened on.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "the plane takes over what it is given"
    )]
    pub fn start(
        net: Net,
        node: NodeName,
        listen: Vec<SocketAddr>,
        budget: Arc<Budget>,
        windows: WindowLimits,
    ) -> Result<Arc<Self>, TransferError> {
        let listeners = listen
            .iter()
            .map(|address| net.listen(*address))
            .collect::<Result<Vec<_>, _>>()?;
        let plane = Arc::new(Self {
            net,
            node,
            windows,
            budget,
            addresses: listeners.iter().map(Listener::address).collect(),
            jobs: Mutex::default(),
            strangers: Mutex::default(),
            tasks: TaskTracker::new(),
            draining: CancellationToken::new(),
            stopping: CancellationToken::new(),
        });
        for listener in listeners {
            plane.tasks.spawn(plane.clone().accept(listener));
        }
        Ok(plane)
    }

    /// Where it listens, ports filled in.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Who this node is.
    pub fn node(&self) -> &NodeName {
        &self.node
    }

    pub(crate) fn net(&self) -> &Net {
        &self.net
    }

    pub(crate) fn windows(&self) -> WindowLimits {
        self.windows
    }

    pub(crate) fn draining(&self) -> CancellationToken {
        self.draining.clone()
    }

    pub(crate) fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Serves a job's chunks to its members for as long as the [`Serving`] is kept. `children` always find a place.
    /// A job served twice is served by the later call.
    pub fn serve(
        self: &Arc<Self>,
        job: JobId,
        key: JobKey,
        store: Arc<Store>,
        children: Vec<NodeName>,
        limit: Option<Rate>,
    ) -> Serving {
        let member = Member {
            job,
            key,
            children,
            limit,
        };
        self.serve_as(member, store, false)
    }

    pub(crate) fn serve_as(self: &Arc<Self>, member: Member, store: Arc<Store>, is_source: bool) -> Serving {
        let job = member.job;
        let served = Served::new(self, member, store, is_source);
        self.tasks.spawn(served.clone().count());
        let older = lock(&self.jobs).served.insert(job, served.clone());
        if let Some(older) = older {
            older.end();
        }
        Serving {
            served,
            plane: Arc::downgrade(self),
        }
    }

    /// The job's count on this node, shared by who receives and who sends.
    pub(crate) fn pulse(&self, job: JobId) -> Arc<Pulse> {
        let mut jobs = lock(&self.jobs);
        jobs.pulses.retain(|_, pulse| pulse.strong_count() > 0);
        if let Some(pulse) = jobs.pulses.get(&job).and_then(Weak::upgrade) {
            return pulse;
        }
        let pulse = Arc::new(Pulse::default());
        jobs.pulses.insert(job, Arc::downgrade(&pulse));
        pulse
    }

    pub(crate) fn forget(&self, served: &Arc<Served>) {
        let mut jobs = lock(&self.jobs);
        if jobs
            .served
            .get(&served.job)
            .is_some_and(|other| Arc::ptr_eq(other, served))
        {
            jobs.served.remove(&served.job);
        }
    }

    /// Answers a measurement of `from`'s for as long as the [`Answering`] is kept. With `roots`, it may be asked to write
    /// what comes to the first of them.
    pub fn answer_probe(
        self: &Arc<Self>,
        id: JobId,
        key: JobKey,
        from: NodeName,
        roots: Option<Arc<Roots>>,
    ) -> Answering {
        let probed = Arc::new(Probed::new(id, key, from, roots));
        lock(&self.jobs).probes.insert(id, probed.clone());
        Answering::new(probed, Arc::downgrade(self))
    }

    pub(crate) fn forget_probe(&self, id: JobId) {
        lock(&self.jobs).probes.remove(&id);
    }

    /// Tells all children to find other parents, and lets no one in any more. Those that are here are served on.
    pub fn drain(&self) {
        self.draining.cancel();
    }

    /// Ends everything and waits until no task or thread of the plane is left.
    pub async fn stop(&self) {
        self.draining.cancel();
        let served: Vec<_> = lock(&self.jobs)
            .served
            .drain()
            .map(|(_, served)| served)
            .collect();
        served.iter().for_each(|served| served.end());
        let probes: Vec<_> = lock(&self.jobs)
            .probes
            .drain()
            .map(|(_, probed)| probed)
            .collect();
        probes.iter().for_each(|probed| probed.end());
        self.stopping.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    async fn accept(self: Arc<Self>, listener: Listener) {
        loop {
            let pending = tokio::select! {
                () = self.draining.cancelled() => return,
                pending = listener.accept() => pending,
            };
            let peer = pending.peer;
            let (number, evicted) = self.stranger();
            let plane = self.clone();
            self.tasks.spawn(async move {
                let greeted = tokio::select! {
                    () = evicted.cancelled() => None,
                    () = plane.stopping.cancelled() => None,
                    greeted = timeout(HELLO_DEADLINE, plane.greet(pending)) => greeted.ok(),
                };
                plane.no_stranger(number);
                match greeted {
                    Some(Ok(Some((hop, conn)))) => hop.run(conn).await,
                    Some(Ok(None)) => {}
                    Some(Err(error)) => tracing::debug!(%peer, %error, "a connection was not let in"),
                    None => tracing::debug!(%peer, "a connection said nothing in time"),
                }
            });
        }
    }

    fn stranger(&self) -> (u64, CancellationToken) {
        let mut strangers = lock(&self.strangers);
        if strangers.waiting.len() >= MAX_STRANGERS
            && let Some((_, oldest)) = strangers.waiting.pop_front()
        {
            oldest.cancel();
        }
        let number = strangers.next;
        strangers.next += 1;
        let evicted = CancellationToken::new();
        strangers.waiting.push_back((number, evicted.clone()));
        (number, evicted)
    }

    fn no_stranger(&self, number: u64) {
        lock(&self.strangers)
            .waiting
            .retain(|(other, _)| *other != number);
    }

    /// From accept to the answer; gives back a new hop to run.
    async fn greet(&self, pending: stage_net::Pending) -> Result<Option<(Arc<Hop>, Conn)>, TransferError> {
        let mut conn = pending.handshake().await?;
        let asked = hello::listen(&mut conn).await?;
        if asked.hello.kind == ConnKind::Probe {
            self.greet_probe(&asked, conn).await?;
            return Ok(None);
        }
        let served = lock(&self.jobs).served.get(&asked.hello.job).cloned();
        let Some(served) = served else {
            asked.answer(&mut conn, None, &Answer::Later).await?;
            return Ok(None);
        };
        if !asked.proves(&served.key) {
            let failure = Failure::new(
                Code::Denied,
                format!("{} does not hold the job's key", asked.hello.node),
                "a node that was left out of the job cannot join it; push again to give it a new key",
            )
            .on(&self.node);
            asked
                .answer(&mut conn, None, &Answer::Refused(failure.clone()))
                .await?;
            return Err(TransferError::Refused(failure));
        }
        match asked.hello.kind {
            ConnKind::Control => self.greet_hop(&served, &asked, conn).await,
            ConnKind::Data { stream } => {
                self.greet_stream(&served, &asked, stream, conn).await?;
                Ok(None)
            }
            ConnKind::Probe => Ok(None),
        }
    }

    async fn greet_probe(&self, asked: &Asked, mut conn: Conn) -> Result<(), TransferError> {
        let probed = lock(&self.jobs).probes.get(&asked.hello.job).cloned();
        let Some(probed) = probed.filter(|_| !self.draining.is_cancelled()) else {
            return asked.answer(&mut conn, None, &Answer::Later).await;
        };
        if !asked.proves(&probed.key) || asked.hello.node != probed.from {
            let failure = Failure::new(
                Code::Denied,
                format!("{} is not who measures here", asked.hello.node),
                "measure again with `stage bench`",
            )
            .on(&self.node);
            asked
                .answer(&mut conn, None, &Answer::Refused(failure.clone()))
                .await?;
            return Err(TransferError::Refused(failure));
        }
        if probed.is_full() {
            return asked.answer(&mut conn, Some(&probed.key), &Answer::Busy).await;
        }
        asked.grant(&conn);
        let welcome = Answer::Welcome(Welcome {
            node: self.node.clone(),
            windows: self.windows,
            chunks: 0,
        });
        asked.answer(&mut conn, Some(&probed.key), &welcome).await?;
        let conn = conn.into_blocking()?;
        let number = probed.admit(&conn)?;
        // It ends when its connection does, which whoever ends the measurement, or stops the plane, sees to.
        self.tasks.spawn_blocking(move || probed.serve(number, conn));
        Ok(())
    }

    async fn greet_hop(
        &self,
        served: &Arc<Served>,
        asked: &Asked,
        mut conn: Conn,
    ) -> Result<Option<(Arc<Hop>, Conn)>, TransferError> {
        let hello = &asked.hello;
        let full = served.place(&hello.node, hello.tried_others) == Place::None;
        if full || self.draining.is_cancelled() {
            asked.answer(&mut conn, Some(&served.key), &Answer::Busy).await?;
            return Ok(None);
        }
        let hop = Hop::new(hello.hop, hello.node.clone(), served);
        served.admit(&hop);
        // Known before it is answered, so that its data connections find it.
        if let Err(error) = self.welcome(served, asked, &mut conn).await {
            served.dismiss(hop.id);
            return Err(error);
        }
        let (epoch, version) = hello.rank;
        tracing::debug!(child = %hop.child, job = %served.job, %epoch, %version, "a hop begins");
        Ok(Some((hop, conn)))
    }

    async fn greet_stream(
        &self,
        served: &Arc<Served>,
        asked: &Asked,
        stream: u32,
        mut conn: Conn,
    ) -> Result<(), TransferError> {
        let hop = served.hop(asked.hello.hop);
        let Some(hop) = hop.filter(|hop| hop.child == asked.hello.node) else {
            let failure = Failure::new(
                Code::Denied,
                "the hop is over",
                "nothing: the child dials a new one by itself",
            )
            .on(&self.node);
            asked
                .answer(&mut conn, None, &Answer::Refused(failure.clone()))
                .await?;
            return Err(TransferError::Refused(failure));
        };
        asked.grant(&conn);
        self.welcome(served, asked, &mut conn).await?;
        hop.add_stream(stream, conn.into_blocking()?)
    }

    async fn welcome(&self, served: &Served, asked: &Asked, conn: &mut Conn) -> Result<(), TransferError> {
        let welcome = Answer::Welcome(Welcome {
            node: self.node.clone(),
            windows: self.windows,
            chunks: served.store.layout().count(),
        });
        asked.answer(conn, Some(&served.key), &welcome).await
    }
}

impl std::fmt::Debug for DataPlane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DataPlane({} on {:?})", self.node, self.addresses)
    }
}
