//! The two gRPC services: decode once, send one command to the driver, await one reply, encode. They decide nothing.

mod decode;
mod session;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use prost::Message as _;
use stage_core::ask::Question;
use stage_core::failure::{Code, Failure};
use stage_core::job::Phase;
use stage_core::topology::Topology;
use stage_net::grpc::Caller;
use stage_proto::v1;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, WatchStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status, Streaming};

use crate::access::Gate;
use crate::driver::{Answers, Command, Retried};
use crate::{bench, doctor};

/// Both services.
#[derive(Clone)]
pub(crate) struct Service {
    shared: Arc<Shared>,
}

struct Shared {
    commands: mpsc::Sender<Command>,
    topology: Arc<Topology>,
    gate: Gate,
    tasks: TaskTracker,
    stop: CancellationToken,
    sessions: AtomicU64,
}

/// The one place where a failure becomes a status. The failure itself rides along as details, for our own clients.
fn status(failure: &Failure) -> Status {
    let code = match failure.code {
        Code::Busy => tonic::Code::ResourceExhausted,
        Code::UnknownJob => tonic::Code::NotFound,
        Code::Denied => tonic::Code::PermissionDenied,
        Code::Usage | Code::UnknownTarget | Code::NoSource => tonic::Code::InvalidArgument,
        Code::ProtocolVersion | Code::Fenced | Code::ForeignCluster => tonic::Code::FailedPrecondition,
        Code::NoCoordinator => tonic::Code::Unavailable,
        _ => tonic::Code::Internal,
    };
    let details = v1::Failure::from(failure).encode_to_vec();
    Status::with_details(code, failure.message.clone(), details.into())
}

fn stopping() -> Failure {
    Failure::new(
        Code::NoCoordinator,
        "the coordinator is stopping",
        "try again in a moment",
    )
}

impl Service {
    pub(crate) fn new(
        commands: mpsc::Sender<Command>,
        topology: Arc<Topology>,
        gate: Gate,
        tasks: TaskTracker,
        stop: CancellationToken,
    ) -> Self {
        let shared = Shared {
            commands,
            topology,
            gate,
            tasks,
            stop,
            sessions: AtomicU64::new(0),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Whether the caller may make this request, and speaks our protocol.
    fn admit<T>(&self, method: &str, request: &Request<T>, hello: Option<&v1::Hello>) -> Result<(), Status> {
        self.shared
            .gate
            .pass(method, request.extensions().get::<Caller>())
            .and_then(|()| stage_proto::version::agree(hello).map(drop))
            .map_err(|failure| status(&failure))
    }

    async fn ask<T>(&self, make: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, Status> {
        let (reply, answer) = oneshot::channel();
        self.shared
            .commands
            .send(make(reply))
            .await
            .map_err(|_| status(&stopping()))?;
        answer.await.map_err(|_| status(&stopping()))
    }
}

impl Service {
    /// Puts a question to nodes.
    async fn put(&self, nodes: String, question: Question) -> Result<Response<Heard>, Status> {
        let answers = self
            .ask(|reply| Command::Ask {
                nodes,
                question,
                reply,
            })
            .await?
            .map_err(|failure| status(&failure))?;
        Ok(Response::new(Heard(answers)))
    }
}

fn invalid(error: &stage_proto::WireError) -> Failure {
    Failure::new(
        Code::Usage,
        error.to_string(),
        "the request is malformed: look at its fields",
    )
}

#[tonic::async_trait]
impl v1::operator_server::Operator for Service {
    async fn submit(&self, request: Request<v1::SubmitRequest>) -> Result<Response<v1::SubmitReply>, Status> {
        self.admit("Submit", &request, request.get_ref().hello.as_ref())?;
        let result = match decode::submit(request.get_ref()) {
            Ok(submit) => {
                let submit = Box::new(submit);
                self.ask(|reply| Command::Submit { submit, reply }).await?
            }
            Err(error) => Err(invalid(&error)),
        };
        Ok(Response::new(match result {
            Ok(job) => v1::SubmitReply {
                job: job.to_string(),
                failure: None,
            },
            Err(failure) => v1::SubmitReply {
                job: String::new(),
                failure: Some((&failure).into()),
            },
        }))
    }

    async fn plan(&self, request: Request<v1::SubmitRequest>) -> Result<Response<v1::PlanReply>, Status> {
        self.admit("Plan", &request, request.get_ref().hello.as_ref())?;
        let result = match decode::submit(request.get_ref()) {
            Ok(submit) => {
                let submit = Box::new(submit);
                self.ask(|reply| Command::Plan { submit, reply }).await?
            }
            Err(error) => Err(invalid(&error)),
        };
        Ok(Response::new(match result {
            Ok(plan) => v1::PlanReply {
                plan: Some((&plan).into()),
                failure: None,
            },
            Err(failure) => v1::PlanReply {
                plan: None,
                failure: Some((&failure).into()),
            },
        }))
    }

    type WatchStream = Watched;

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Watched>, Status> {
        self.admit("Watch", &request, request.get_ref().hello.as_ref())?;
        let job = decode::job(&request.get_ref().job).map_err(|failure| status(&failure))?;
        let view = self
            .ask(|reply| Command::Watch { job, reply })
            .await?
            .map_err(|failure| status(&failure))?;
        Ok(Response::new(Watched {
            views: WatchStream::new(view),
            ended: false,
        }))
    }

    async fn jobs(&self, request: Request<v1::JobsRequest>) -> Result<Response<v1::JobsReply>, Status> {
        self.admit("Jobs", &request, request.get_ref().hello.as_ref())?;
        let limit = request.get_ref().limit as usize;
        let jobs = self.ask(|reply| Command::Jobs { limit, reply }).await?;
        Ok(Response::new(v1::JobsReply { jobs }))
    }

    async fn cancel(&self, request: Request<v1::CancelRequest>) -> Result<Response<v1::CancelReply>, Status> {
        self.admit("Cancel", &request, request.get_ref().hello.as_ref())?;
        let request = request.into_inner();
        let result = match decode::job(&request.job) {
            Ok(job) => {
                let nodes = request.nodes;
                self.ask(|reply| Command::Cancel { job, nodes, reply }).await?
            }
            Err(failure) => Err(failure),
        };
        Ok(Response::new(match result {
            Ok(cancelled) => v1::CancelReply {
                failure: None,
                ended: cancelled.ended.map(Phase::as_str).unwrap_or_default().to_owned(),
                waiting: cancelled.waiting.iter().map(ToString::to_string).collect(),
            },
            Err(failure) => v1::CancelReply {
                failure: Some((&failure).into()),
                ..v1::CancelReply::default()
            },
        }))
    }

    async fn retry(&self, request: Request<v1::RetryRequest>) -> Result<Response<v1::RetryReply>, Status> {
        self.admit("Retry", &request, request.get_ref().hello.as_ref())?;
        let request = request.into_inner();
        let result = match decode::retry(&request) {
            Ok((job, from, new)) => {
                self.ask(|reply| Command::Retry {
                    job,
                    from,
                    new,
                    reply,
                })
                .await?
            }
            Err(failure) => Err(failure),
        };
        Ok(Response::new(match result {
            Ok(retried) => {
                let (job, retried) = match retried {
                    Retried::Nothing => (request.job, v1::Retried::Nothing),
                    Retried::Asked => (request.job, v1::Retried::Asked),
                    Retried::Revived => (request.job, v1::Retried::Revived),
                    Retried::Anew(job) => (job.to_string(), v1::Retried::Anew),
                };
                v1::RetryReply {
                    job,
                    retried: retried.into(),
                    failure: None,
                }
            }
            Err(failure) => v1::RetryReply {
                failure: Some((&failure).into()),
                ..v1::RetryReply::default()
            },
        }))
    }

    type ListStream = Heard;

    async fn list(&self, request: Request<v1::ListRequest>) -> Result<Response<Heard>, Status> {
        self.admit("List", &request, request.get_ref().hello.as_ref())?;
        let request = request.into_inner();
        let question = decode::list(&request).map_err(|error| status(&invalid(&error)))?;
        self.put(decode::all_unless_said(&request.nodes), question).await
    }

    type BenchStream = ReceiverStream<Result<v1::BenchEvent, Status>>;

    async fn bench(&self, request: Request<v1::BenchRequest>) -> Result<Response<Self::BenchStream>, Status> {
        self.admit("Bench", &request, request.get_ref().hello.as_ref())?;
        let wanted = decode::bench(request.get_ref()).map_err(|error| status(&invalid(&error)))?;
        let Shared {
            commands, topology, ..
        } = &*self.shared;
        let begun = bench::begin(commands.clone(), topology.clone(), wanted)
            .await
            .and_then(|begun| begun.ok_or_else(stopping))
            .map_err(|failure| status(&failure))?;
        let (conductor, events) = begun;
        let stop = self.shared.stop.clone();
        self.shared
            .tasks
            .spawn(async move { stop.run_until_cancelled(conductor.run()).await });
        Ok(Response::new(ReceiverStream::new(events)))
    }

    type DoctorStream = ReceiverStream<Result<v1::NodeFindings, Status>>;

    async fn doctor(
        &self,
        request: Request<v1::DoctorRequest>,
    ) -> Result<Response<Self::DoctorStream>, Status> {
        self.admit("Doctor", &request, request.get_ref().hello.as_ref())?;
        let nodes = decode::all_unless_said(&request.get_ref().nodes);
        let (nodes, facts) = self
            .ask(|reply| Command::Known { nodes, reply })
            .await?
            .map_err(|failure| status(&failure))?;
        let asked = doctor::Asked {
            topology: self.shared.topology.clone(),
            history: self.ask(|reply| Command::History { reply }).await?,
            facts,
            begun: tokio::time::Instant::now(),
            unix_ms: crate::driver::unix_ms(),
        };
        let asks = nodes.into_iter().map(|node| (node, Question::Host)).collect();
        let answers = self
            .ask(|reply| Command::AskEach { asks, reply })
            .await?
            .map_err(|failure| status(&failure))?;
        let (events, heard) = mpsc::channel(64);
        let stop = self.shared.stop.clone();
        self.shared
            .tasks
            .spawn(async move { stop.run_until_cancelled(asked.run(answers, events)).await });
        Ok(Response::new(ReceiverStream::new(heard)))
    }

    type RemoveStream = Heard;

    async fn remove(&self, request: Request<v1::RemoveRequest>) -> Result<Response<Heard>, Status> {
        self.admit("Remove", &request, request.get_ref().hello.as_ref())?;
        let request = request.into_inner();
        let question = decode::removal(&request).map_err(|failure| status(&failure))?;
        self.put(request.nodes, question).await
    }

    async fn nodes(&self, request: Request<v1::NodesRequest>) -> Result<Response<v1::NodesReply>, Status> {
        self.admit("Nodes", &request, request.get_ref().hello.as_ref())?;
        let nodes = self.ask(|reply| Command::Nodes { reply }).await?;
        Ok(Response::new(v1::NodesReply { nodes, failure: None }))
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Result<Response<v1::NodesReply>, Status> {
        self.admit("Drain", &request, request.get_ref().hello.as_ref())?;
        let v1::DrainRequest { nodes, drain, .. } = request.into_inner();
        let result = self.ask(|reply| Command::Drain { nodes, drain, reply }).await?;
        Ok(Response::new(match result {
            Ok(nodes) => v1::NodesReply { nodes, failure: None },
            Err(failure) => v1::NodesReply {
                nodes: Vec::new(),
                failure: Some((&failure).into()),
            },
        }))
    }
}

#[tonic::async_trait]
impl v1::fleet_server::Fleet for Service {
    type SessionStream = ReceiverStream<Result<v1::CoordinatorMessage, Status>>;

    async fn session(
        &self,
        request: Request<Streaming<v1::AgentMessage>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let caller = request.extensions().get::<Caller>().cloned();
        self.shared
            .gate
            .pass("Session", caller.as_ref())
            .map_err(|failure| status(&failure))?;
        let id = self.shared.sessions.fetch_add(1, Ordering::Relaxed);
        let (out, stream) = mpsc::channel(4);
        let talk = session::Talk {
            id: crate::fleet::SessionId(id),
            commands: self.shared.commands.clone(),
            gate: self.shared.gate,
            caller,
            inbound: request.into_inner(),
            out,
        };
        let stop = self.shared.stop.clone();
        self.shared
            .tasks
            .spawn(async move { stop.run_until_cancelled(talk.run()).await });
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// What nodes answer, as it comes.
pub(crate) struct Heard(Answers);

impl Stream for Heard {
    type Item = Result<v1::NodeSaid, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx).map(|part| {
            part.map(|part| {
                Ok(v1::NodeSaid {
                    node: part.node.to_string(),
                    said: Some(v1::Said::of(&part.said, part.last)),
                })
            })
        })
    }
}

/// A job's views, the latest each time, until one shows that it has ended.
pub(crate) struct Watched {
    views: WatchStream<Arc<v1::JobView>>,
    ended: bool,
}

impl Stream for Watched {
    type Item = Result<v1::JobView, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        Pin::new(&mut self.views).poll_next(cx).map(|view| {
            view.map(|view| {
                self.ended = matches!(view.state.as_str(), "done" | "partial" | "failed" | "cancelled");
                Ok((*view).clone())
            })
        })
    }
}
