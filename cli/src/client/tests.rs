//! The client against a coordinator that says what the test wrote down, and goes away when it shall.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use stage_net::grpc::incoming;
use stage_proto::v1::operator_server::{Operator, OperatorServer};
use tokio::task::JoinHandle;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response};

use super::*;
use crate::commands::follow::{Until, follow};
use crate::event::Event;
use crate::render::Render;
use crate::view::JobState;

/// What the coordinator will say, and what it heard.
#[derive(Default)]
struct Script {
    /// Answers to submits, first first.
    submits: Vec<Result<v1::SubmitReply, Status>>,
    /// What each watch shows before it ends: with an error, or properly.
    watches: Vec<(Vec<v1::JobView>, Option<Status>)>,
    /// Ids that were submitted.
    heard: Vec<String>,
    /// Jobs that there are, newest first; of an empty list it is nobody's business.
    jobs: Vec<v1::JobView>,
}

#[derive(Clone, Default)]
struct Fake(Arc<Mutex<Script>>);

#[tonic::async_trait]
impl Operator for Fake {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::JobView, Status>> + Send>>;

    async fn submit(&self, request: Request<v1::SubmitRequest>) -> Result<Response<v1::SubmitReply>, Status> {
        let mut script = self.0.lock().unwrap();
        script.heard.push(request.into_inner().job);
        script.submits.remove(0).map(Response::new)
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (views, end) = self.0.lock().unwrap().watches.remove(0);
        let shown = tokio_stream::iter(views.into_iter().map(Ok));
        Ok(Response::new(Box::pin(
            shown.chain(tokio_stream::iter(end.map(Err))),
        )))
    }

    async fn plan(&self, _: Request<v1::SubmitRequest>) -> Result<Response<v1::PlanReply>, Status> {
        Ok(Response::new(v1::PlanReply::default()))
    }

    async fn jobs(&self, request: Request<v1::JobsRequest>) -> Result<Response<v1::JobsReply>, Status> {
        let jobs = self.0.lock().unwrap().jobs.clone();
        if jobs.is_empty() {
            return Err(Status::permission_denied("not you"));
        }
        let most = match request.into_inner().limit {
            0 => 50,
            limit => limit as usize,
        };
        let jobs = jobs.into_iter().take(most).collect();
        Ok(Response::new(v1::JobsReply { jobs }))
    }

    async fn cancel(&self, _: Request<v1::CancelRequest>) -> Result<Response<v1::CancelReply>, Status> {
        Err(Status::not_found("no such job"))
    }

    async fn retry(&self, _: Request<v1::RetryRequest>) -> Result<Response<v1::RetryReply>, Status> {
        // Of a later release: a word that this client does not know.
        Ok(Response::new(v1::RetryReply {
            job: id().to_string(),
            retried: 99,
            failure: None,
        }))
    }

    async fn nodes(&self, _: Request<v1::NodesRequest>) -> Result<Response<v1::NodesReply>, Status> {
        Ok(Response::new(v1::NodesReply::default()))
    }

    type ListStream = Pin<Box<dyn Stream<Item = Result<v1::NodeSaid, Status>> + Send>>;

    async fn list(&self, _: Request<v1::ListRequest>) -> Result<Response<Self::ListStream>, Status> {
        let said = |said| {
            Ok(v1::NodeSaid {
                node: "n1".to_owned(),
                said: Some(v1::Said::of(&said, false)),
            })
        };
        Ok(Response::new(Box::pin(tokio_stream::iter([
            said(Said::Progress(stage_core::ask::Progress { done: 1, total: 2 })),
            said(Said::Copies(Vec::new())),
            Err(Status::unavailable("it stops")),
        ]))))
    }

    type RemoveStream = Self::ListStream;

    async fn remove(&self, _: Request<v1::RemoveRequest>) -> Result<Response<Self::RemoveStream>, Status> {
        let strange = v1::NodeSaid {
            node: "n1".to_owned(),
            said: None,
        };
        Ok(Response::new(Box::pin(tokio_stream::iter([Ok(strange)]))))
    }

    type BenchStream = tokio_stream::Empty<Result<v1::BenchEvent, Status>>;

    async fn bench(&self, _: Request<v1::BenchRequest>) -> Result<Response<Self::BenchStream>, Status> {
        Ok(Response::new(tokio_stream::empty()))
    }

    type DoctorStream = tokio_stream::Empty<Result<v1::NodeFindings, Status>>;

    async fn doctor(&self, _: Request<v1::DoctorRequest>) -> Result<Response<Self::DoctorStream>, Status> {
        Ok(Response::new(tokio_stream::empty()))
    }

    async fn drain(&self, _: Request<v1::DrainRequest>) -> Result<Response<v1::NodesReply>, Status> {
        Err(Status::internal("a fault of the coordinator's own"))
    }
}

/// A coordinator with this script at `address`; gives where it is and what ends it.
fn serve(fake: Fake, address: &str) -> (SocketAddr, JoinHandle<()>) {
    let listener = net().listen(address.parse().unwrap()).unwrap();
    let address = listener.address();
    let server = tonic::transport::Server::builder()
        .add_service(OperatorServer::new(fake))
        .serve_with_incoming(incoming(listener));
    let task = tokio::spawn(async move { server.await.unwrap() });
    (address, task)
}

fn net() -> Net {
    Net::insecure(false)
}

async fn client(address: SocketAddr) -> Client {
    let url = format!("http://{address}").parse().unwrap();
    Client::connect(&net(), &url).await.unwrap()
}

fn id() -> JobId {
    JobId::from_bytes([7; 16])
}

fn view(state: &str, settled: bool) -> v1::JobView {
    v1::JobView {
        job: id().to_string(),
        state: state.to_owned(),
        settled,
        ..v1::JobView::default()
    }
}

/// Keeps what was shown.
#[derive(Default)]
struct Seen(Vec<JobState>);

impl Render for Seen {
    fn event(&mut self, event: &Event) -> std::io::Result<()> {
        if let Event::Progress(job) = event {
            self.0.push(job.state);
        }
        Ok(())
    }
}

#[tokio::test]
async fn a_submit_that_broke_is_the_same_job_again() {
    let fake = Fake::default();
    fake.0.lock().unwrap().submits = vec![
        Err(Status::unavailable("just a moment")),
        Ok(v1::SubmitReply {
            job: id().to_string(),
            failure: None,
        }),
    ];
    let (address, _server) = serve(fake.clone(), "127.0.0.1:0");
    let request = v1::SubmitRequest {
        job: id().to_string(),
        ..v1::SubmitRequest::default()
    };
    assert_eq!(client(address).await.submit(request).await.unwrap(), id());
    assert_eq!(fake.0.lock().unwrap().heard, [id().to_string(), id().to_string()]);
}

#[tokio::test]
async fn a_refused_submit_keeps_its_cause() {
    let fake = Fake::default();
    fake.0.lock().unwrap().submits = vec![Ok(v1::SubmitReply {
        job: String::new(),
        failure: Some((&Failure::new(Code::UnknownTarget, "no node m1", "see the topology")).into()),
    })];
    let (address, _server) = serve(fake, "127.0.0.1:0");
    let error = client(address)
        .await
        .submit(v1::SubmitRequest::default())
        .await
        .unwrap_err();
    assert_eq!((error.exit(), error.failure().code), (2, Code::UnknownTarget));
}

#[tokio::test]
async fn a_watch_survives_a_coordinator_that_comes_back() {
    let fake = Fake::default();
    fake.0.lock().unwrap().watches = vec![
        (
            vec![view("running", false)],
            Some(Status::unavailable("stopping")),
        ),
        (vec![view("running", false), view("done", true)], None),
    ];
    let (address, server) = serve(fake.clone(), "127.0.0.1:0");
    let mut watch = client(address).await.watch(id());
    let mut seen = Seen::default();
    let first = watch.next().await.unwrap().unwrap();
    assert!(!first.settled);
    server.abort();
    assert!(
        server.await.unwrap_err().is_cancelled(),
        "it is gone before the next one begins"
    );
    let (_, _server) = serve(fake, &address.to_string());
    let last = follow(&mut watch, Until::Settled, &mut seen).await.unwrap();
    assert!(last.settled);
    assert_eq!(seen.0, [JobState::Running, JobState::Done]);
}

#[tokio::test]
async fn a_watch_that_ends_before_its_job_is_taken_up_again() {
    let fake = Fake::default();
    fake.0.lock().unwrap().watches = vec![
        (vec![view("running", false)], None),
        (vec![], None),
        (vec![view("done", true)], None),
    ];
    let (address, _server) = serve(fake, "127.0.0.1:0");
    let mut watch = client(address).await.watch(id());
    let last = follow(&mut watch, Until::Ended, &mut Seen::default())
        .await
        .unwrap();
    assert_eq!(last.state, JobState::Done);
}

#[tokio::test]
async fn settled_is_not_ended() {
    let fake = Fake::default();
    let open = || (vec![view("open", true), view("done", true)], None);
    fake.0.lock().unwrap().watches = vec![open(), open()];
    let (address, _server) = serve(fake, "127.0.0.1:0");
    let client = client(address).await;
    for (until, state) in [(Until::Settled, JobState::Open), (Until::Ended, JobState::Done)] {
        let mut watch = client.clone().watch(id());
        let last = follow(&mut watch, until, &mut Seen::default()).await.unwrap();
        assert_eq!(last.state, state);
    }
}

#[tokio::test]
async fn refusals_are_told_apart() {
    let fake = Fake::default();
    fake.0.lock().unwrap().watches = vec![(vec![], Some(Status::not_found("no such job")))];
    let (address, _server) = serve(fake, "127.0.0.1:0");
    let mut client = client(address).await;
    let codes = [
        client.jobs().await.map(|_| ()).unwrap_err(),
        client.cancel(id(), None).await.unwrap_err(),
        client.drain("n1".to_owned(), true).await.map(|_| ()).unwrap_err(),
        client
            .plan(v1::SubmitRequest::default())
            .await
            .map(|_| ())
            .unwrap_err(),
        client.watch(id()).next().await.map(|_| ()).unwrap_err(),
    ]
    .map(|error| error.failure().code);
    assert_eq!(
        codes,
        [
            Code::Denied,
            Code::UnknownJob,
            Code::Internal,
            Code::Internal,
            Code::UnknownJob
        ]
    );
}

#[tokio::test]
async fn a_beginning_is_looked_for_among_all_jobs() {
    let fake = Fake::default();
    let named = |first: u8| v1::JobView {
        job: JobId::from_random([first; 16]).to_string(),
        ..view("done", true)
    };
    // The oldest of sixty fits a beginning, too.
    let mut jobs: Vec<v1::JobView> = (0..60).map(named).collect();
    let beginning: String = jobs[1].job.chars().take(8).collect();
    let (address, _server) = serve(fake.clone(), "127.0.0.1:0");
    let mut client = client(address).await;
    fake.0.lock().unwrap().jobs = jobs.clone();
    let oldest: String = jobs[59].job.chars().take(8).collect();
    let found = client.job(&oldest.parse().unwrap()).await.unwrap();
    assert_eq!(found.to_string(), jobs[59].job);
    jobs[59].job = format!("{beginning}{}", &jobs[59].job[8..]);
    fake.0.lock().unwrap().jobs = jobs;
    let error = client.job(&beginning.parse().unwrap()).await.unwrap_err();
    assert_eq!(error.exit(), crate::exit::USAGE, "{error}");
}

#[tokio::test]
async fn who_does_not_listen_is_no_coordinator() {
    // A port that was ours a moment ago and is closed now.
    let address = net().listen("127.0.0.1:0".parse().unwrap()).unwrap().address();
    let url: CoordinatorUrl = format!("http://{address}").parse().unwrap();
    let error = Client::connect(&net(), &url).await.map(|_| ()).unwrap_err();
    assert_eq!(error.exit(), 3);
    assert!(error.to_string().contains(&address.to_string()), "{error}");
}

fn some_url() -> CoordinatorUrl {
    "http://127.0.0.1:7700".parse().unwrap()
}

#[test]
fn a_status_with_a_failure_is_that_failure() {
    let failure = v1::Failure {
        code: "no_space".to_owned(),
        message: "too little space".to_owned(),
        ..v1::Failure::default()
    };
    let details = prost::Message::encode_to_vec(&failure);
    let status = Status::with_details(tonic::Code::Internal, "x", details.into());
    assert_eq!(refused(&some_url(), &status).failure().code, Code::NoSpace);
}

#[test]
fn a_bare_status_gets_a_cause() {
    for (status, code) in [
        (Status::not_found("no such job"), Code::UnknownJob),
        (Status::permission_denied("not you"), Code::Denied),
        (Status::unavailable("gone"), Code::NoCoordinator),
        (Status::internal("oops"), Code::Internal),
        (Status::unimplemented("what"), Code::ProtocolVersion),
    ] {
        assert_eq!(refused(&some_url(), &status).failure().code, code);
    }
}

#[test]
fn only_a_broken_connection_is_tried_again() {
    assert!(is_transient(&Status::unavailable("gone")));
    assert!(!is_transient(&Status::internal("the coordinator's own fault")));
    assert!(!is_transient(&Status::not_found("no such job")));
}

#[tokio::test]
async fn answers_come_in_parts_and_may_end_too_early() {
    let (address, server) = serve(Fake::default(), "127.0.0.1:0");
    let request = v1::ListRequest::default();
    let mut answers = client(address).await.list(request).await.unwrap();
    let n1: NodeName = "n1".parse().unwrap();
    let progress = Said::Progress(stage_core::ask::Progress { done: 1, total: 2 });
    assert_eq!(answers.next().await.unwrap(), Some((n1.clone(), progress, false)));
    let copies = Said::Copies(Vec::new());
    assert_eq!(answers.next().await.unwrap(), Some((n1, copies, false)));
    assert_eq!(answers.next().await.unwrap_err().exit(), 3);
    let mut answers = client(address)
        .await
        .remove(v1::RemoveRequest::default())
        .await
        .unwrap();
    let error = answers.next().await.unwrap_err();
    assert_eq!(error.exit(), 1);
    assert!(error.to_string().contains("said.said: is missing"), "{error}");
    server.abort();
}
