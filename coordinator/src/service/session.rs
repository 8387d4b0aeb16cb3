//! One agent's session: its first message registers it, the others are reports for the driver.

use std::time::Duration;

use stage_core::failure::{Code, Failure};
use stage_net::grpc::Caller;
use stage_proto::v1;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tonic::{Status, Streaming};

use super::{decode, invalid};
use crate::access::Gate;
use crate::driver::Command;
use crate::fleet::{Session, SessionId};

/// An agent must say who it is within this.
const REGISTER_DEADLINE: Duration = Duration::from_secs(5);
/// Messages that wait for an agent that reads slowly. More of them, and its session ends.
const QUEUE: usize = 1024;

/// A session from its first byte.
pub(super) struct Talk {
    pub(super) id: SessionId,
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) gate: Gate,
    pub(super) caller: Option<Caller>,
    pub(super) inbound: Streaming<v1::AgentMessage>,
    pub(super) out: mpsc::Sender<Result<v1::CoordinatorMessage, Status>>,
}

impl Talk {
    /// Registers and listens until either side ends. Whatever way it ends, the driver hears of it.
    pub(super) async fn run(mut self) {
        let first = match tokio::time::timeout(REGISTER_DEADLINE, self.inbound.message()).await {
            Ok(Ok(Some(message))) => message.body,
            _ => return,
        };
        let Some(v1::agent_message::Body::Register(register)) = first else {
            let failure = Failure::new(
                Code::ProtocolVersion,
                "the first message of a session must be a registration",
                "install the same release of stage on both hosts",
            );
            return self.refuse(&failure).await;
        };
        let registration = stage_proto::version::agree(register.hello.as_ref())
            .and_then(|_| decode::registration(&register).map_err(|error| invalid(&error)))
            .and_then(|registration| {
                self.gate
                    .speaks_for(&registration.node, self.caller.as_ref())
                    .map(|()| registration)
            });
        let registration = match registration {
            Ok(registration) => registration,
            Err(failure) => {
                let node = decode::text(&register.node);
                tracing::warn!(node, code = %failure.code, %failure, "an agent was refused");
                let version = register.hello.map(|hello| decode::text(&hello.version));
                let told = Command::Refuse {
                    node,
                    version: version.unwrap_or_default(),
                    failure: failure.clone(),
                };
                drop(self.commands.send(told).await);
                return self.refuse(&failure).await;
            }
        };
        let node = registration.node.clone();
        let (queue, mut queued) = mpsc::channel(QUEUE);
        let end = CancellationToken::new();
        let session = Session {
            id: self.id,
            out: queue,
            end: end.clone(),
        };
        let (reply, answer) = oneshot::channel();
        let command = Command::Register {
            registration: Box::new(registration),
            session,
            reply,
        };
        if self.commands.send(command).await.is_err() {
            return;
        }
        match answer.await {
            Ok(Ok(())) => {}
            Ok(Err(failure)) => return self.refuse(&failure).await,
            Err(_) => return,
        }
        // Two tasks in one: what the driver says flows out while reports flow in; neither waits for the other.
        let Self {
            id,
            commands,
            mut inbound,
            out,
            ..
        } = self;
        let outward = async {
            while let Some(message) = queued.recv().await {
                if out.send(Ok(message)).await.is_err() {
                    return;
                }
            }
        };
        let inward = async {
            loop {
                let body = match inbound.message().await {
                    Ok(Some(message)) => message.body,
                    Ok(None) => return,
                    Err(error) => {
                        tracing::debug!(%node, %error, "a session broke");
                        return;
                    }
                };
                let Some(body) = body else { continue };
                match decode::report(body) {
                    Ok(report) => {
                        let command = Command::Report {
                            node: node.clone(),
                            session: id,
                            report,
                        };
                        if commands.send(command).await.is_err() {
                            return;
                        }
                    }
                    Err(error) => {
                        tracing::warn!(%node, %error, "an agent's message means nothing and is dropped");
                    }
                }
            }
        };
        tokio::select! {
            () = outward => {}
            () = inward => {}
            () = end.cancelled() => {}
        }
        drop(commands.send(Command::Closed { node, session: id }).await);
    }

    async fn refuse(&self, failure: &Failure) {
        let body = v1::coordinator_message::Body::Refused(failure.into());
        // Who hung up meanwhile does not want to know.
        drop(
            self.out
                .send(Ok(v1::CoordinatorMessage { body: Some(body) }))
                .await,
        );
    }
}
