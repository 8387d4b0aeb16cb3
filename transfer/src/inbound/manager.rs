//! Which parent, since when, and why not any more: the one task that decides.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use stage_core::assignment::{Peer, StreamChoice};
use stage_core::cost::{self, Control, StreamPath};
use stage_core::failure::Failure;
use stage_core::id::NodeName;
use stage_core::units::Rate;
use stage_net::Conn;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};

use super::dial::{self, Connected};
use super::grow::Room;
use super::hop::{Fault, InHop};
use super::{Command, HopEvent, Shared};
use crate::sync::lock;

/// After a round in vain, until the next one.
const ROUND: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(2));
/// How often suspicions are looked at.
const LOOK: Duration = Duration::from_millis(100);
/// Streams of one hop, whatever anyone says.
const MAX_STREAMS: u16 = 64;

/// What streams are counted for where the plan expects no rate: 10 Gbit/s.
const WANTED_BITS: f64 = 1e10;

pub(super) struct Manager {
    shared: Arc<Shared>,
    parents: Vec<Peer>,
    streams: StreamChoice,
    events: mpsc::Sender<HopEvent>,
    /// The hop that bytes come from.
    current: Option<Arc<InHop>>,
    /// A hop to another parent, beside the current one until bytes come from it.
    trial: Option<Arc<InHop>>,
    search: Option<Search>,
    /// Every hop's task, ended or not.
    hops: JoinSet<()>,
    /// These sent corrupt chunks: asked last.
    shunned: BTreeSet<NodeName>,
    /// These failed since bytes last came, in this order: asked after all others.
    faded: Vec<NodeName>,
    /// The parent before, and what was wrong with it.
    before: Option<NodeName>,
    why: String,
    /// A plan has named another first parent: it is tried once.
    replanned: bool,
    round: Round,
    complete: bool,
    /// This node is out: nothing is received any more.
    out: bool,
}

struct Search {
    task: JoinHandle<Result<Connected, Failure>>,
}

impl Drop for Search {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Rounds over the candidates that found none.
struct Round {
    vain: u32,
    pause: Duration,
    next: Instant,
}

impl Manager {
    pub(super) fn new(
        shared: Arc<Shared>,
        parents: Vec<Peer>,
        streams: StreamChoice,
        events: mpsc::Sender<HopEvent>,
    ) -> Self {
        Self {
            shared,
            parents,
            streams,
            events,
            current: None,
            trial: None,
            search: None,
            hops: JoinSet::new(),
            shunned: BTreeSet::new(),
            faded: Vec::new(),
            before: None,
            why: "first parent".to_owned(),
            replanned: false,
            round: Round {
                vain: 0,
                pause: ROUND.0,
                next: Instant::now(),
            },
            complete: false,
            out: false,
        }
    }

    pub(super) async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let stopping = self.shared.stopping.clone();
        while !stopping.is_cancelled() {
            self.look().await;
            let searching = self.search.is_some();
            tokio::select! {
                () = stopping.cancelled() => {}
                command = commands.recv() => match command {
                    Some(command) => self.command(command),
                    None => break,
                },
                () = self.shared.changed.notified() => {}
                found = async { (&mut self.search.as_mut().expect("guarded").task).await }, if searching => {
                    self.search = None;
                    if let Ok(found) = found {
                        self.found(found).await;
                    }
                }
                Some(_) = self.hops.join_next(), if !self.hops.is_empty() => {}
                () = tokio::time::sleep(LOOK), if !self.out => {}
            }
        }
        self.search = None;
        self.end_hops();
        while self.hops.join_next().await.is_some() {}
    }

    async fn emit(&self, event: HopEvent) {
        tracing::debug!(job = %self.shared.job, ?event);
        // Whoever does not listen any more need not be told; whoever is slow must not keep us from stopping.
        tokio::select! {
            _ = self.events.send(event) => {}
            () = self.shared.stopping.cancelled() => {}
        }
    }

    /// Looks at all that may have happened, and does what follows from it.
    async fn look(&mut self) {
        if self.out {
            return;
        }
        if self.shared.store.is_complete() {
            if !self.complete {
                self.complete = true;
                self.search = None;
                self.end_hops();
                self.emit(HopEvent::Complete).await;
            }
            return;
        }
        self.complete = false;
        self.look_at_faults().await;
        if self.out {
            return;
        }
        self.drop_ended();
        if self
            .trial
            .as_ref()
            .is_some_and(|trial| self.current.is_none() || trial.has_brought())
        {
            self.promote().await;
        }
        self.seek();
    }

    async fn look_at_faults(&mut self) {
        for hop in [self.current.clone(), self.trial.clone()].into_iter().flatten() {
            let parent = hop.peer.node.clone();
            match hop.fault() {
                None => {}
                Some(Fault::Corrupt(chunk)) => {
                    self.shunned.insert(parent.clone());
                    self.lose(&hop, format!("chunk {chunk} came corrupt"));
                    self.emit(HopEvent::Corrupt { parent, chunk }).await;
                }
                Some(Fault::Broken(why)) => {
                    tracing::warn!(%parent, why, "a parent does not keep to the protocol");
                    self.shunned.insert(parent);
                    self.lose(&hop, why.to_owned());
                }
                Some(Fault::Store(failure)) => return self.give_up(HopEvent::Failed(failure)).await,
                Some(Fault::Unfit(failure)) => return self.give_up(HopEvent::Unfit(failure)).await,
            }
        }
    }

    async fn give_up(&mut self, event: HopEvent) {
        self.out = true;
        self.search = None;
        self.end_hops();
        self.emit(event).await;
    }

    fn drop_ended(&mut self) {
        for hop in [self.current.clone(), self.trial.clone()].into_iter().flatten() {
            if let Some(why) = hop.ended() {
                self.lose(&hop, why);
            }
        }
        // A trial that turns out no better makes room for the next.
        if let Some(trial) = self.trial.clone()
            && let Some(why) = trial.suspicion(Instant::now())
        {
            tracing::debug!(parent = %trial.peer.node, why, "a trial failed");
            self.lose(&trial, why);
        }
    }

    fn lose(&mut self, hop: &Arc<InHop>, why: String) {
        hop.end();
        self.faded.retain(|node| *node != hop.peer.node);
        self.faded.push(hop.peer.node.clone());
        if self.trial.as_ref().is_some_and(|trial| trial.id == hop.id) {
            self.trial = None;
        }
        if self.current.as_ref().is_some_and(|current| current.id == hop.id) {
            self.current = None;
            self.before = Some(hop.peer.node.clone());
            self.why = why;
            lock(&self.shared.view).hop = None;
        }
    }

    fn end_hops(&mut self) {
        for hop in [self.current.take(), self.trial.take()].into_iter().flatten() {
            hop.end();
            self.before = Some(hop.peer.node.clone());
        }
        lock(&self.shared.view).hop = None;
    }

    /// The trial is the parent now.
    async fn promote(&mut self) {
        let Some(trial) = self.trial.take() else { return };
        if let Some(old) = self.current.take() {
            old.end();
            self.before = Some(old.peer.node.clone());
        }
        self.current = Some(trial.clone());
        self.replanned = false;
        self.round = Round {
            vain: 0,
            pause: ROUND.0,
            next: Instant::now(),
        };
        let to = trial.peer.node.clone();
        {
            let mut view = lock(&self.shared.view);
            view.last = Some(to.clone());
            view.hop = Some(trial);
        }
        let from = self.before.clone();
        let why = self.why.clone();
        self.emit(HopEvent::Moved { from, to, why }).await;
    }

    /// Begins to ask around if there is a reason to.
    fn seek(&mut self) {
        let now = Instant::now();
        if self.search.is_some() || self.trial.is_some() || now < self.round.next {
            return;
        }
        let mut hurry = true;
        match &self.current {
            // The first parent gets its time: instructions and handshakes do not all arrive at once.
            None => hurry = self.before.is_some(),
            Some(current) => match current.suspicion(now) {
                Some(why) => self.why = why,
                None if self.replanned => "the plan has changed".clone_into(&mut self.why),
                None => {
                    if current.has_brought() {
                        self.faded.clear();
                    }
                    return;
                }
            },
        }
        let candidates = self.candidates();
        if candidates.is_empty() {
            self.replanned = false;
            self.pause();
            return;
        }
        let tried_others = self.round.vain > 0 || candidates.len() < self.parents.len();
        let task = tokio::spawn(dial::search(self.shared.clone(), candidates, hurry, tried_others));
        self.search = Some(Search { task });
    }

    /// Whom to ask, in order: who has just failed late, who sent corrupt chunks last.
    fn candidates(&self) -> Vec<Peer> {
        let current = self.current.as_ref().map(|hop| &hop.peer.node);
        let mut asked: Vec<Peer> = Vec::new();
        for peer in &self.parents {
            if Some(&peer.node) == current {
                if self.replanned {
                    // Only who comes before the present parent is better than it.
                    break;
                }
            } else {
                asked.push(peer.clone());
            }
        }
        let disowned = lock(&self.shared.view).shunned.clone();
        asked.sort_by_key(|peer| {
            (
                self.shunned.contains(&peer.node) || disowned.contains(&peer.node),
                self.faded.iter().position(|node| *node == peer.node),
            )
        });
        asked
    }

    fn pause(&mut self) {
        self.round.next = Instant::now() + self.round.pause;
        self.round.pause = (self.round.pause * 2).min(ROUND.1);
    }

    async fn found(&mut self, found: Result<Connected, Failure>) {
        match found {
            Ok(connected) => {
                let streams = self.count(&connected);
                let (hop, conn): (Arc<InHop>, Conn) = InHop::new(&self.shared, connected);
                self.hops.spawn(hop.clone().run(conn, streams, self.room()));
                self.trial = Some(hop);
            }
            Err(failure) => {
                self.replanned = false;
                self.round.vain += 1;
                self.pause();
                if self.round.vain == 1 && self.current.is_none() {
                    self.emit(HopEvent::Stuck(failure)).await;
                }
            }
        }
    }

    /// How many streams the hop gets.
    fn count(&self, connected: &Connected) -> u16 {
        let missing = self.shared.store.layout().count() - self.shared.store.have().len();
        let wanted = match self.streams {
            StreamChoice::Fixed(count) => count,
            StreamChoice::Auto { least, cap } => cost::streams(
                wanted_rate(self.shared.wanted),
                &StreamPath {
                    rtt: connected.rtt,
                    sender: connected.welcome.windows,
                    receiver: self.shared.plane.windows(),
                    // Which the plan knows, and not the child: it is in `least`.
                    loss: 0.0,
                    control: Control::Loss,
                    encrypted: true,
                },
                cap,
            )
            .max(least.min(cap)),
        };
        wanted
            .clamp(1, MAX_STREAMS)
            .min(u16::try_from(missing).unwrap_or(u16::MAX).max(1))
    }

    /// What the hop may grow to under way: nothing, where the number of streams was given or no rate is forecast.
    fn room(&self) -> Option<Room> {
        let wanted = self.shared.wanted;
        match self.streams {
            StreamChoice::Auto { cap, .. } if wanted > Rate::ZERO && wanted < Rate::UNLIMITED => Some(Room {
                cap: cap.min(MAX_STREAMS),
                wanted,
            }),
            _ => None,
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Parents(parents, streams) => {
                self.streams = streams;
                let unchanged = self.parents == parents;
                self.parents = parents;
                if unchanged {
                    return;
                }
                // A search among the old ones, or a pause after it, must not keep the new ones waiting.
                self.search = None;
                self.round.next = Instant::now();
                self.round.pause = ROUND.0;
                let first = self.parents.first().map(|peer| &peer.node);
                let stays = |hop: &Arc<InHop>| Some(&hop.peer.node) == first;
                if self.trial.as_ref().is_some_and(|trial| !stays(trial))
                    && let Some(trial) = self.trial.take()
                {
                    trial.end();
                }
                self.replanned = self.current.as_ref().is_some_and(|current| !stays(current));
            }
            Command::Refetch => {
                self.complete = false;
                let shunned = lock(&self.shared.view).shunned.clone();
                let there = self.current.as_ref().or(self.trial.as_ref());
                if there.is_some_and(|hop| shunned.contains(&hop.peer.node)) {
                    self.end_hops();
                }
                self.round.next = Instant::now();
                "its chunks were not those of the payload".clone_into(&mut self.why);
            }
        }
    }
}

fn wanted_rate(planned: Rate) -> Rate {
    if planned.bytes_per_second().is_finite() {
        planned
    } else {
        Rate::from_bits_per_second(WANTED_BITS)
    }
}
