//! Calls to the coordinator. Requests leave here as wire messages, answers are checked here and go on as types of
//! ours; no other room knows the wire.

use std::error::Error as _;
use std::time::Duration;

use stage_core::ask::Said;
use stage_core::failure::{Code, Failure};
use stage_core::id::{JobId, NodeName};
use stage_core::plan::Plan;
use stage_net::Net;
use stage_net::grpc::{CoordinatorUrl, connect};
use stage_proto::v1::operator_client::OperatorClient;
use stage_proto::version::hello;
use stage_proto::{WireError, v1};
use tokio::time::{Instant, sleep, timeout_at};
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use crate::args::JobName;
use crate::error::Error;
use crate::view::Job;

/// How long a command tries to reach the coordinator.
const REACH: Duration = Duration::from_secs(5);
/// How long a command that watches a job tries to find the coordinator again.
const RETURN: Duration = Duration::from_secs(60);
/// The pause between two attempts, at most.
const PAUSE: Duration = Duration::from_secs(1);
/// The largest answer taken: a job on ten thousand nodes, with its plan, is a few megabytes.
const ANSWER: usize = 64 << 20;

/// A coordinator that answered.
#[derive(Clone)]
pub(crate) struct Client {
    url: CoordinatorUrl,
    calls: OperatorClient<Channel>,
}

/// What became of a cancel.
#[derive(Debug)]
pub(crate) struct Cancelled {
    /// The job had ended before, in this state.
    pub ended: Option<String>,
    /// Connected nodes that have not said yet that they did it.
    pub waiting: Vec<String>,
}

/// What a retry came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Retried {
    /// Nothing is missing, or nothing that may be tried again.
    Nothing,
    /// The job is under way: who is awaited is asked again now.
    Asked,
    /// It had failed, and goes on from what its targets kept.
    Revived,
    /// There is a new job for what is missing.
    Anew,
}

/// Runs a call and reads the failure that its answer may carry.
macro_rules! call {
    ($client:expr, $method:ident, $request:expr) => {
        $client
            .calls
            .$method($request)
            .await
            .map(tonic::Response::into_inner)
            .map_err(|status| refused(&$client.url, &status))
    };
}

impl Client {
    /// Reaches the coordinator, within five seconds.
    ///
    /// # Errors
    /// [`Code::NoCoordinator`] says what stood in the way last.
    pub(crate) async fn connect(net: &Net, url: &CoordinatorUrl) -> Result<Self, Error> {
        let deadline = Instant::now() + REACH;
        let mut pause = Duration::from_millis(50);
        let mut last = "no answer".to_owned();
        loop {
            match timeout_at(deadline, connect(net, url)).await {
                Ok(Ok(channel)) => {
                    let calls = OperatorClient::new(channel).max_decoding_message_size(ANSWER);
                    return Ok(Self {
                        url: url.clone(),
                        calls,
                    });
                }
                Ok(Err(error)) => last = root_cause(&error),
                Err(_) => return Err(away(url, &last)),
            }
            if Instant::now() + pause >= deadline {
                return Err(away(url, &last));
            }
            sleep(pause).await;
            pause = (2 * pause).min(PAUSE);
        }
    }

    /// Makes a job, within the time that a watcher has: the id is the client's, so that a second submit of the same
    /// is the same job.
    ///
    /// # Errors
    /// The coordinator refused, or went away.
    pub(crate) async fn submit(&mut self, request: v1::SubmitRequest) -> Result<JobId, Error> {
        let deadline = Instant::now() + REACH;
        let reply = loop {
            match self.calls.submit(request.clone()).await {
                Ok(reply) => break reply.into_inner(),
                Err(status) if is_transient(&status) && Instant::now() < deadline => {
                    sleep(Duration::from_millis(200)).await;
                }
                Err(status) => return Err(refused(&self.url, &status)),
            }
        };
        accept(reply.failure.as_ref())?;
        reply.job.parse().map_err(|error| {
            strange(&WireError {
                field: "job",
                why: format!("{error}"),
            })
        })
    }

    /// The plan that a push would have.
    ///
    /// # Errors
    /// The coordinator refused, or went away.
    pub(crate) async fn plan(&mut self, request: v1::SubmitRequest) -> Result<Plan, Error> {
        let reply = call!(self, plan, request)?;
        accept(reply.failure.as_ref())?;
        let plan = reply.plan.ok_or_else(|| {
            strange(&WireError {
                field: "plan",
                why: "is missing".to_owned(),
            })
        })?;
        (&plan).try_into().map_err(|error| strange(&error))
    }

    /// The job that is meant.
    ///
    /// # Errors
    /// None begins so, or several do; the coordinator refused, or went away.
    pub(crate) async fn job(&mut self, name: &JobName) -> Result<JobId, Error> {
        if let Some(whole) = name.whole() {
            return Ok(whole);
        }
        // Of all, lest a beginning that fits two looks as if it fitted one.
        let fits: Vec<JobId> = self
            .newest_jobs(u32::MAX)
            .await?
            .into_iter()
            .map(|job| job.id)
            .filter(|job| name.fits(*job))
            .collect();
        let (message, hint) = match &fits[..] {
            [one] => return Ok(*one),
            [] => (
                format!("there is no job that begins with {name}"),
                "`stage status` lists the jobs; of older ones write the whole id",
            ),
            several => {
                let all: Vec<String> = several.iter().map(ToString::to_string).collect();
                (
                    format!("{name} may be any of {}", all.join(", ")),
                    "write more of the one that is meant",
                )
            }
        };
        Err(Failure::new(Code::UnknownJob, message, hint).into())
    }

    /// Jobs, newest first, without their nodes.
    ///
    /// # Errors
    /// The coordinator refused, or went away.
    pub(crate) async fn jobs(&mut self) -> Result<Vec<Job>, Error> {
        self.newest_jobs(0).await
    }

    /// The newest jobs, so many at most; of 0 as many as the coordinator thinks fit.
    async fn newest_jobs(&mut self, limit: u32) -> Result<Vec<Job>, Error> {
        let request = v1::JobsRequest {
            hello: Some(hello()),
            limit,
        };
        call!(self, jobs, request)?
            .jobs
            .into_iter()
            .map(|job| job.try_into().map_err(|error| strange(&error)))
            .collect()
    }

    /// Ends a job, everywhere or on some nodes.
    ///
    /// # Errors
    /// The coordinator refused, or went away.
    pub(crate) async fn cancel(&mut self, job: JobId, nodes: Option<String>) -> Result<Cancelled, Error> {
        let request = v1::CancelRequest {
            hello: Some(hello()),
            job: job.to_string(),
            nodes: nodes.unwrap_or_default(),
        };
        let reply = call!(self, cancel, request)?;
        accept(reply.failure.as_ref())?;
        Ok(Cancelled {
            ended: Some(reply.ended).filter(|state| !state.is_empty()),
            waiting: reply.waiting,
        })
    }

    /// Tries what is missing of a job again. `new` is the id of a new job, should there have to be one: sent twice, it
    /// is one. Gives the job that goes on.
    ///
    /// # Errors
    /// The coordinator refused, or went away.
    pub(crate) async fn retry(
        &mut self,
        job: JobId,
        from: Option<&NodeName>,
        new: JobId,
    ) -> Result<(JobId, Retried), Error> {
        let request = v1::RetryRequest {
            hello: Some(hello()),
            job: job.to_string(),
            from: from.map(ToString::to_string).unwrap_or_default(),
            new_job: new.to_string(),
        };
        let reply = call!(self, retry, request)?;
        accept(reply.failure.as_ref())?;
        let retried = match reply.retried() {
            v1::Retried::Nothing => Retried::Nothing,
            v1::Retried::Asked => Retried::Asked,
            v1::Retried::Revived => Retried::Revived,
            v1::Retried::Anew => Retried::Anew,
            v1::Retried::Unspecified => {
                return Err(strange(&WireError {
                    field: "retried",
                    why: "is not known".to_owned(),
                }));
            }
        };
        let job = stage_proto::convert::parse("job", &reply.job).map_err(|error| strange(&error))?;
        Ok((job, retried))
    }

    /// The cluster's nodes.
    ///
    /// # Errors
    /// The coordinator refused, or went away.
    pub(crate) async fn nodes(&mut self) -> Result<Vec<v1::FleetNode>, Error> {
        let request = v1::NodesRequest { hello: Some(hello()) };
        let reply = call!(self, nodes, request)?;
        accept(reply.failure.as_ref())?;
        Ok(reply.nodes)
    }

    /// Declares nodes away, or takes that back; gives them as they are then.
    ///
    /// # Errors
    /// The coordinator refused, or went away.
    pub(crate) async fn drain(&mut self, nodes: String, drain: bool) -> Result<Vec<v1::FleetNode>, Error> {
        let request = v1::DrainRequest {
            hello: Some(hello()),
            nodes,
            drain,
        };
        let reply = call!(self, drain, request)?;
        accept(reply.failure.as_ref())?;
        Ok(reply.nodes)
    }

    /// Asks nodes what stage published there.
    ///
    /// # Errors
    /// The coordinator refused, or went away.
    pub(crate) async fn list(mut self, request: v1::ListRequest) -> Result<Answers, Error> {
        let said = call!(self, list, request)?;
        Ok(Answers { url: self.url, said })
    }

    /// Has nodes remove a copy.
    ///
    /// # Errors
    /// The coordinator refused, or went away.
    pub(crate) async fn remove(mut self, request: v1::RemoveRequest) -> Result<Answers, Error> {
        let said = call!(self, remove, request)?;
        Ok(Answers { url: self.url, said })
    }

    /// Measures nodes and links, or has it shown what was.
    ///
    /// # Errors
    /// The coordinator refused, or went away.
    pub(crate) async fn bench(mut self, request: v1::BenchRequest) -> Result<Told<v1::BenchEvent>, Error> {
        let told = call!(self, bench, request)?;
        Ok(Told { url: self.url, told })
    }

    /// Asks what on each host holds it back.
    ///
    /// # Errors
    /// The coordinator refused, or went away.
    pub(crate) async fn doctor(
        mut self,
        request: v1::DoctorRequest,
    ) -> Result<Told<v1::NodeFindings>, Error> {
        let told = call!(self, doctor, request)?;
        Ok(Told { url: self.url, told })
    }

    /// Follows a job.
    pub(crate) fn watch(self, job: JobId) -> Watch {
        Watch {
            client: self,
            job,
            views: None,
            ended: false,
        }
    }
}

/// What nodes answer, as it comes.
pub(crate) struct Answers {
    url: CoordinatorUrl,
    said: Streaming<v1::NodeSaid>,
}

impl Answers {
    /// The next part of a node's answer, and whether it is that node's last; `None` when all have said theirs.
    ///
    /// # Errors
    /// The coordinator went away.
    pub(crate) async fn next(&mut self) -> Result<Option<(NodeName, Said, bool)>, Error> {
        let part = match self.said.message().await {
            Ok(Some(part)) => part,
            Ok(None) => return Ok(None),
            Err(status) => return Err(refused(&self.url, &status)),
        };
        let said = part.said.unwrap_or_default();
        let read = || {
            let node = stage_proto::convert::parse("node", &part.node)?;
            Ok((node, Said::try_from(&said)?, said.last))
        };
        read().map(Some).map_err(|error| strange(&error))
    }
}

/// What the coordinator tells, one after another.
pub(crate) struct Told<T> {
    url: CoordinatorUrl,
    told: Streaming<T>,
}

impl<T> Told<T> {
    async fn message(&mut self) -> Result<Option<T>, Error> {
        self.told
            .message()
            .await
            .map_err(|status| refused(&self.url, &status))
    }
}

impl Told<v1::BenchEvent> {
    /// The next event; `None` after the last.
    ///
    /// # Errors
    /// The coordinator went away.
    pub(crate) async fn next(&mut self) -> Result<Option<v1::bench_event::Event>, Error> {
        while let Some(told) = self.message().await? {
            // One without is of a later release.
            if told.event.is_some() {
                return Ok(told.event);
            }
        }
        Ok(None)
    }
}

impl Told<v1::NodeFindings> {
    /// The next node; `None` after the last.
    ///
    /// # Errors
    /// The coordinator went away.
    pub(crate) async fn next(&mut self) -> Result<Option<v1::NodeFindings>, Error> {
        self.message().await
    }
}

/// A job's views, one after another, over as many connections as it takes.
pub(crate) struct Watch {
    client: Client,
    job: JobId,
    views: Option<Streaming<v1::JobView>>,
    /// The last view showed the job's end.
    ended: bool,
}

impl Watch {
    /// The next view; `None` when the job has ended and the view before was its last. A coordinator that goes away
    /// is looked for during sixty seconds.
    ///
    /// # Errors
    /// The coordinator stays away (the job goes on), or does not know the job.
    pub(crate) async fn next(&mut self) -> Result<Option<Job>, Error> {
        let deadline = Instant::now() + RETURN;
        let mut pause = Duration::from_millis(100);
        loop {
            let status = match &mut self.views {
                Some(views) => match views.message().await {
                    Ok(Some(view)) => {
                        let job: Job = view.try_into().map_err(|error| strange(&error))?;
                        self.ended = job.state.is_ended();
                        return Ok(Some(job));
                    }
                    Ok(None) if self.ended => return Ok(None),
                    // A coordinator that stops ends what it was saying properly, the job goes on.
                    Ok(None) => Status::unavailable("it ended the watch before the job had ended"),
                    Err(status) => status,
                },
                None => {
                    let request = v1::WatchRequest {
                        hello: Some(hello()),
                        job: self.job.to_string(),
                    };
                    match timeout_at(deadline, self.client.calls.watch(request)).await {
                        Ok(Ok(views)) => {
                            self.views = Some(views.into_inner());
                            continue;
                        }
                        Ok(Err(status)) => status,
                        Err(_) => Status::unavailable("no answer"),
                    }
                }
            };
            self.views = None;
            if !is_transient(&status) {
                return Err(refused(&self.client.url, &status));
            }
            if Instant::now() + pause >= deadline {
                return Err(self.lost(&status));
            }
            sleep(pause).await;
            pause = (2 * pause).min(PAUSE);
        }
    }

    fn lost(&self, status: &Status) -> Error {
        let job = self.job;
        Failure::new(
            Code::NoCoordinator,
            format!(
                "the coordinator at {} was lost and did not come back within {} s ({}); job {job} goes on without it",
                self.client.url,
                RETURN.as_secs(),
                status_cause(status),
            ),
            format!("when it is back, follow the job with `stage status {job} --watch`"),
        )
        .into()
    }
}

fn accept(failure: Option<&v1::Failure>) -> Result<(), Error> {
    failure.map_or(Ok(()), |failure| Err(Failure::from(failure).into()))
}

fn away(url: &CoordinatorUrl, cause: &str) -> Error {
    // What answers, but not as it should, is not helped by a start.
    let hint = if cause.contains("invalid peer certificate") {
        "give the CA of the coordinator's cluster with --ca or STAGE_CA; if that is it, the coordinator's certificate is not what it should be"
    } else if url.to_string().starts_with("http:") && cause.contains("broken pipe") {
        "something answers there, but not without TLS: try https://, with --ca, --cert and --key"
    } else {
        "see that `stage coordinator` runs there, or give its address with --coordinator URL or STAGE_COORDINATOR"
    };
    Failure::new(
        Code::NoCoordinator,
        format!("no coordinator at {url}: {cause}"),
        hint,
    )
    .into()
}

fn strange(error: &WireError) -> Error {
    Error::other(
        format!("the coordinator's answer makes no sense: {error}"),
        "see that both are of the same release (`stage --version`)",
    )
}

/// Whether the connection is at fault and not the request.
fn is_transient(status: &Status) -> bool {
    match status.code() {
        tonic::Code::Unavailable | tonic::Code::Aborted => true,
        // What tonic makes of a connection that broke; a server's own answer has no such source.
        tonic::Code::Unknown | tonic::Code::Cancelled | tonic::Code::Internal => status.source().is_some(),
        _ => false,
    }
}

/// What a call that was not answered means.
fn refused(url: &CoordinatorUrl, status: &Status) -> Error {
    // A coordinator that has more to say than a status holds sends its failure along.
    if let Ok(failure) = <v1::Failure as prost::Message>::decode(status.details())
        && !failure.code.is_empty()
    {
        return Failure::from(&failure).into();
    }
    if is_transient(status) {
        return away(url, &status_cause(status));
    }
    let (code, hint) = match status.code() {
        tonic::Code::NotFound => (Code::UnknownJob, "`stage status` lists the jobs"),
        tonic::Code::InvalidArgument => (Code::Usage, "see `stage --help`"),
        tonic::Code::PermissionDenied | tonic::Code::Unauthenticated => (
            Code::Denied,
            "use an operator's certificate of this cluster (--ca, --cert, --key)",
        ),
        tonic::Code::Unimplemented | tonic::Code::FailedPrecondition => (
            Code::ProtocolVersion,
            "install the same or a neighbouring release of stage on both hosts",
        ),
        _ => (Code::Internal, "look into the coordinator's log"),
    };
    Failure::new(
        code,
        format!("the coordinator refused: {}", status.message()),
        hint,
    )
    .into()
}

fn status_cause(status: &Status) -> String {
    match status.source() {
        Some(source) => root_cause(source),
        None => status.message().to_owned(),
    }
}

/// The innermost cause: the wrappers around it say only that there is one.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    let mut said = error.to_string();
    while let Some(inner) = cause.source() {
        cause = inner;
        // A wrapper of ours repeats its inner error and says where it was: keep that.
        let text = cause.to_string();
        if !said.contains(&text) {
            said = text;
        }
    }
    said
}

#[cfg(test)]
mod tests;
