//! The coordinator: it plans, instructs agents and remembers jobs.
//!
//! | module | holds |
//! |---|---|
//! | `service` | the two gRPC services: decode once, send one command, await one reply, encode; they decide nothing |
//! | [`access`] | who may make which request: one table |
//! | `encode` | a job as people see it, as a message |
//! | `driver` | the one task that owns all state, and its order: commit, then tell agents, then answer and tell watchers |
//! | `fleet` | which agents are here: registration, leases, refusals |
//! | `store` | what survives: SQLite behind one atomic write |
//! | `state` | the state directory: whose it is, and that only one coordinator uses it |
//! | `bench` | who conducts `stage bench`, beside the driver |
//! | `doctor` | what is asked of hosts, and what follows |
//! | `groups` | groups that a command answers |
//! | `measurements` | what is known of hosts and paths beside the topology |
//!
//! A command walks service → driver → `stage_core::job::Job` → effects → store, agents, watchers. The driver performs
//! effects in that order and never shows what is not committed.

pub mod access;
mod bench;
mod doctor;
mod driver;
mod encode;
mod error;
mod fleet;
mod groups;
mod measurements;
mod service;
mod state;
mod store;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use stage_core::digest::ChunkHash;
use stage_core::topology::Topology;
use stage_net::{Listener, Net, Role};
use stage_proto::v1::fleet_server::FleetServer;
use stage_proto::v1::operator_server::OperatorServer;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use error::Error;

use driver::Driver;

/// What agents say is not read if it is larger than this.
const MESSAGE_LIMIT: usize = 1 << 20;
/// What an operator asks may hold a list of digests.
const REQUEST_LIMIT: usize = 4 << 20;
/// Calls that one connection may have open at once.
const CALLS: u32 = 64;
/// How long open calls may go on after a stop.
const STOP_GRACE: Duration = Duration::from_secs(3);

/// How a coordinator is set up.
#[derive(Debug, Clone)]
pub struct Config {
    /// The topology's file.
    pub topology: PathBuf,
    /// Where to listen; port 0 chooses one.
    pub listen: SocketAddr,
    /// The state directory, made if absent.
    pub state: PathBuf,
    /// Which function digests chunks of new jobs.
    pub chunk_hash: ChunkHash,
}

/// A coordinator that listens and has not begun to serve.
pub struct Coordinator {
    listener: Listener,
    net: Net,
    topology: Arc<Topology>,
    driver: Driver,
    commands: mpsc::Sender<driver::Command>,
}

impl Coordinator {
    /// Reads topology and state, commits the new epoch, and listens.
    ///
    /// # Errors
    /// See [`Error`]; [`Error::exit_code`] is what the process should end with.
    pub async fn start(config: Config, net: Net) -> Result<Self, Error> {
        // Agents and operators would all refuse it, each with a fault that reads as theirs.
        if let Some(identity) = net.identity().filter(|own| own.role != Role::Coordinator) {
            return Err(Error::Certificate(identity.clone()));
        }
        let name = config.topology.display().to_string();
        let text = tokio::fs::read_to_string(&config.topology)
            .await
            .map_err(|source| Error::Read {
                path: config.topology.clone(),
                source,
            })?;
        let topology = Arc::new(Topology::parse(&name, &text).map_err(Error::Topology)?);
        let path = config.state.clone();
        let opened = tokio::task::spawn_blocking(move || state::open(&path))
            .await
            .map_err(|error| Error::Internal(error.to_string()))??;
        // The epoch is committed: from here on nothing that an earlier incarnation still sends has an effect.
        let listener = net.listen(config.listen)?;
        tracing::info!(
            address = %listener.address(),
            cluster = %topology.cluster(),
            epoch = %opened.epoch,
            jobs = opened.jobs.len(),
            "coordinator is ready"
        );
        let (commands, inbox) = mpsc::channel(1024);
        let driver = Driver::new(
            driver::Setup {
                topology: topology.clone(),
                hash: config.chunk_hash,
                encrypted: net.is_tls(),
            },
            opened,
            inbox,
        );
        Ok(Self {
            listener,
            net,
            topology,
            driver,
            commands,
        })
    }

    /// Where it listens, the port filled in.
    pub fn address(&self) -> SocketAddr {
        self.listener.address()
    }

    /// Serves until `stop`, or until it may not go on.
    ///
    /// # Errors
    /// The store failed, or a newer coordinator of this cluster exists ([`Error::Fenced`]).
    pub async fn run(self, stop: CancellationToken) -> Result<(), Error> {
        let Self {
            listener,
            net,
            topology,
            driver,
            commands,
        } = self;
        // Ends everything below also when the driver or the server ends by itself.
        let ending = stop.child_token();
        let tasks = TaskTracker::new();
        groups::spawn(&topology, &commands, &tasks, &ending);
        let gate = access::Gate::new(net.is_tls());
        let service = service::Service::new(commands, topology, gate, tasks.clone(), ending.clone());
        let server = tonic::transport::Server::builder()
            .max_concurrent_streams(CALLS)
            .concurrency_limit_per_connection(CALLS as usize)
            .load_shed(true)
            .initial_stream_window_size(256 << 10)
            .initial_connection_window_size(1 << 20)
            .http2_keepalive_interval(Some(Duration::from_secs(10)))
            .http2_keepalive_timeout(Some(Duration::from_secs(5)))
            .http2_max_pending_accept_reset_streams(Some(20))
            .http2_max_local_error_reset_streams(Some(64))
            .http2_max_header_list_size(8 << 10)
            .add_service(
                OperatorServer::new(service.clone())
                    .max_decoding_message_size(REQUEST_LIMIT)
                    .max_encoding_message_size(usize::MAX),
            )
            .add_service(
                FleetServer::new(service)
                    .max_decoding_message_size(MESSAGE_LIMIT)
                    .max_encoding_message_size(usize::MAX),
            )
            .serve_with_incoming_shutdown(
                stage_net::grpc::incoming(listener),
                ending.clone().cancelled_owned(),
            );
        let mut driving = tokio::spawn(driver.run(ending.clone()));
        let mut serving = tokio::spawn(server);
        let result = tokio::select! {
            ended = &mut driving => {
                ending.cancel();
                // Open calls get a moment to hear of the end; a caller that does not read must not hold it up.
                let _ = tokio::time::timeout(STOP_GRACE, &mut serving).await;
                ended.map_err(|error| Error::Internal(error.to_string()))?
            }
            ended = &mut serving => {
                ending.cancel();
                let driven = driving.await.map_err(|error| Error::Internal(error.to_string()))?;
                match ended {
                    Ok(Ok(())) => driven,
                    Ok(Err(error)) => driven.and(Err(Error::Serve(error))),
                    Err(error) => driven.and(Err(Error::Internal(error.to_string()))),
                }
            }
        };
        serving.abort();
        tasks.close();
        let _ = tokio::time::timeout(STOP_GRACE, tasks.wait()).await;
        result
    }
}
