//! The agent: one on every node. It dials the coordinator, is told what to be for each job, moves the bytes with
//! `stage-transfer` and reports facts back.
//!
//! | module | holds |
//! |---|---|
//! | [`config`] | what an agent must be told |
//! | `identity` | what an agent keeps across starts: instance, cluster, highest epoch |
//! | `host` | what this host says of itself: windows, congestion controls, boot id |
//! | `session` | the control session: dial, register, obey, report, dial again |
//! | `asked` | questions of the coordinator, one task each |
//! | `probe` | measurements of this host, its disks and the ways to others |
//! | `runner` | the jobs on this node, one task each |
//! | `job` | one job on this node: source, target or both |
//! | `local`, `streams` | the socket for users of this host, and the streams that they hand over |
//! | `origin` | where a payload comes from: files, or a pipe |
//! | `outbox` | facts on their way to the coordinator, said again after each reconnect |
//!
//! Losing the coordinator stops nothing here: jobs go on receiving and serving; only publishing waits for FINAL.

mod asked;
pub mod config;
mod error;
mod host;
mod identity;
mod job;
mod local;
mod origin;
mod outbox;
mod probe;
mod runner;
mod session;
mod streams;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use stage_net::Net;
use stage_transfer::budget::Budget;
use stage_transfer::index::Index;
use stage_transfer::plane::DataPlane;
use stage_transfer::root::Roots;
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

pub use config::Config;
pub use error::Error;

use identity::Identity;
use local::Local;
use outbox::Outbox;
use runner::{Context, Runner};
use streams::Streams;

/// How long children may take to move when the agent drains; the unit's stop timeout is longer.
const DRAIN: Duration = Duration::from_secs(10);

/// An agent that listens for data and is ready to dial its coordinator.
pub struct Agent {
    config: Config,
    net: Net,
    identity: Identity,
    plane: Arc<DataPlane>,
    budget: Arc<Budget>,
    roots: Arc<Roots>,
    streams: Arc<Streams>,
    local: Local,
}

impl Agent {
    /// Makes the state directory, opens the roots, the data port and the socket.
    ///
    /// # Errors
    /// A configuration that cannot work ([`Error::exit_code`] 78): an address or a socket that is not ours or taken, a
    /// state directory that cannot be used, a certificate of another node.
    pub async fn start(config: Config, net: Net) -> Result<Self, Error> {
        config.check(&net)?;
        let state = config.state.clone();
        let identity = blocking(move || Identity::open(&state)).await?;
        let roots = Arc::new(Roots::open(config.roots.clone()));
        let budget = Budget::new(config.memory);
        let plane = DataPlane::start(
            net.clone(),
            config.node.clone(),
            config.data_listen.clone(),
            budget.clone(),
            host::windows(),
        )?;
        let streams = Arc::new(Streams::default());
        let local = Local::open(
            &config.socket(),
            config.node.clone(),
            roots.clone(),
            streams.clone(),
        )?;
        Ok(Self {
            config,
            net,
            identity,
            plane,
            budget,
            roots,
            streams,
            local,
        })
    }

    /// Where children reach this agent, ports filled in.
    pub fn data_addresses(&self) -> &[SocketAddr] {
        self.plane.addresses()
    }

    /// Works until `stop`, then drains: children move, partials and journals stay for the next start.
    ///
    /// # Errors
    /// Only what makes going on pointless; a lost coordinator is not among it.
    pub async fn run(self, stop: CancellationToken) -> Result<(), Error> {
        let outbox = Arc::new(Outbox::default());
        let index = Arc::new(Index::open(&self.config.state));
        {
            let (index, roots) = (index.clone(), self.roots.clone());
            blocking(move || index.recover(&roots)).await;
        }
        let runner = Runner::new(Context {
            node: self.config.node.clone(),
            state: self.config.state.clone(),
            plane: self.plane.clone(),
            roots: self.roots.clone(),
            index,
            budget: self.budget,
            streams: self.streams,
            replaced: Notify::new(),
            outbox: outbox.clone(),
        });
        let mut session = session::Session::new(
            self.config,
            self.net,
            self.identity,
            self.plane.addresses().to_vec(),
            self.roots,
            outbox,
        );
        let door = stop.child_token();
        let local = tokio::spawn(self.local.serve(door.clone()));
        let ended = tokio::select! {
            ended = session.run(&runner, &stop) => ended,
            never = runner.sweep() => match never {},
            never = Box::pin(runner.retire()) => match never {},
        };
        door.cancel();
        self.plane.drain();
        if timeout(DRAIN, runner.children_gone()).await.is_err() {
            tracing::warn!("children did not move in time; leaving them to their fallbacks");
        }
        runner.stop().await;
        self.plane.stop().await;
        if let Err(error) = local.await {
            tracing::error!(%error, "the socket's task did not end well");
        }
        ended
    }
}

/// Runs what waits for a disk on a thread that may wait.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        // A panic below is a fault of ours and goes on up; cancellation cannot happen to started blocking work.
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
