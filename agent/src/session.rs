//! The control session: dial the coordinator, register, obey, report; and dial again for ever.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use stage_core::assignment::{Assignment, Progress};
use stage_core::failure::Failure;
use stage_core::id::{AskId, ClusterId, Epoch, JobId};
use stage_net::Net;
use stage_proto::v1;
use stage_proto::v1::agent_message::Body;
use stage_proto::v1::coordinator_message::Body as Answer;
use stage_proto::v1::fleet_client::FleetClient;
use stage_transfer::root::Roots;
use stage_transfer::target::held_jobs;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use crate::asked::Asked;
use crate::identity::Identity;
use crate::outbox::Outbox;
use crate::runner::Runner;
use crate::{Config, Error, blocking, host};

/// Heartbeats; the coordinator's lease is five of them.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// Counters are sampled and sent, if they changed.
const PROGRESS: Duration = Duration::from_millis(500);
/// First and longest pause before dialling again.
const DIAL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Pause after a refusal: an administrator has to act.
const REFUSED: Duration = Duration::from_secs(30);
/// For the whole of dial, register and welcome.
const WELCOME: Duration = Duration::from_secs(10);
/// A session on which nothing came for so long is dead.
const SILENCE: Duration = Duration::from_secs(10);
/// Messages on their way up.
const MESSAGES: usize = 64;

/// How one session ended.
enum End {
    /// The agent stops.
    Stopped,
    /// The session broke; dial again.
    Lost(String),
    /// The coordinator said why it will not have this agent.
    Refused(Failure),
}

/// Dials, again and again.
pub(crate) struct Session {
    config: Config,
    net: Net,
    identity: Identity,
    addresses: Vec<SocketAddr>,
    roots: Arc<Roots>,
    outbox: Arc<Outbox>,
}

impl Session {
    pub(crate) fn new(
        config: Config,
        net: Net,
        identity: Identity,
        addresses: Vec<SocketAddr>,
        roots: Arc<Roots>,
        outbox: Arc<Outbox>,
    ) -> Self {
        Self {
            config,
            net,
            identity,
            addresses,
            roots,
            outbox,
        }
    }

    /// Until `stop`.
    pub(crate) async fn run(&mut self, runner: &Runner, stop: &CancellationToken) -> Result<(), Error> {
        let mut pause = DIAL.0;
        loop {
            let mut welcomed = false;
            let wait = match self.once(runner, stop, &mut welcomed).await? {
                End::Stopped => return Ok(()),
                End::Lost(why) => {
                    // A coordinator that is down for hours is said once, not every two seconds.
                    if welcomed || pause == DIAL.0 {
                        tracing::warn!(coordinator = %self.config.coordinator, why, "no session with the coordinator; dialling again");
                    }
                    pause = if welcomed { DIAL.0 } else { (pause * 2).min(DIAL.1) };
                    pause
                }
                End::Refused(failure) => {
                    tracing::error!(code = %failure.code, hint = failure.hint, "the coordinator refuses this agent: {failure}");
                    REFUSED
                }
            };
            tokio::select! {
                () = stop.cancelled() => return Ok(()),
                () = sleep(wait) => {}
            }
        }
    }

    async fn once(
        &mut self,
        runner: &Runner,
        stop: &CancellationToken,
        welcomed: &mut bool,
    ) -> Result<End, Error> {
        let opened = tokio::select! {
            () = stop.cancelled() => return Ok(End::Stopped),
            opened = timeout(WELCOME, self.open(runner)) => opened,
        };
        let (messages, mut orders, answer) = match opened {
            Ok(Ok(opened)) => opened,
            Ok(Err(why)) => return Ok(End::Lost(why)),
            Err(_) => return Ok(End::Lost("it does not answer".to_owned())),
        };
        let welcome = match answer {
            Answer::Welcome(welcome) => welcome,
            Answer::Refused(failure) => return Ok(End::Refused((&failure).into())),
            Answer::Assignment(_) | Answer::Heartbeat(_) | Answer::Ask(_) | Answer::Withdraw(_) => {
                return Ok(End::Lost("it did not begin with a welcome".to_owned()));
            }
        };
        if let Err(failure) = stage_proto::version::agree(welcome.hello.as_ref()) {
            return Ok(End::Refused(failure));
        }
        let Ok(cluster) = welcome.cluster_id.parse::<ClusterId>() else {
            return Ok(End::Lost("its welcome names no cluster".to_owned()));
        };
        self.identity.joined(cluster, Epoch(welcome.epoch))?;
        *welcomed = true;
        tracing::info!(coordinator = %self.config.coordinator, epoch = welcome.epoch, "joined");
        self.outbox.say_again();

        let mut asked = Asked::new(runner.context().clone(), messages.clone());
        let mut heartbeat = interval(HEARTBEAT);
        let mut progress = interval(PROGRESS);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        progress.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut said: BTreeMap<JobId, Progress> = BTreeMap::new();
        let mut heard = Instant::now();
        let mut count = 0;
        loop {
            let mut outgoing = Vec::new();
            tokio::select! {
                () = stop.cancelled() => {
                    // Best effort: a session that breaks now tells the coordinator the same.
                    let _ = say(&messages, Body::Draining(v1::Draining {})).await;
                    return Ok(End::Stopped);
                }
                order = orders.message() => match order {
                    Ok(Some(message)) => {
                        heard = Instant::now();
                        match message.body {
                            Some(Answer::Assignment(assignment)) => self.obey(runner, &assignment).await,
                            Some(Answer::Ask(ask)) => asked.ask(&ask, runner.held().into_keys().collect()),
                            Some(Answer::Withdraw(withdraw)) => asked.withdraw(AskId(withdraw.id)),
                            Some(Answer::Refused(failure)) => return Ok(End::Refused((&failure).into())),
                            Some(Answer::Heartbeat(_) | Answer::Welcome(_)) | None => {}
                        }
                    }
                    Ok(None) => return Ok(End::Lost("it ended the session".to_owned())),
                    Err(status) => return Ok(End::Lost(status.message().to_owned())),
                },
                () = asked.answered() => {}
                () = self.outbox.changed() => {
                    // Counters first: the fact may be the job's last, and its result is shown with what they say.
                    outgoing = fresh_progress(runner, &mut said);
                    outgoing.extend(self.outbox.unsaid());
                }
                _ = progress.tick() => {
                    if heard.elapsed() > SILENCE {
                        return Ok(End::Lost("it has gone silent".to_owned()));
                    }
                    outgoing = fresh_progress(runner, &mut said);
                }
                _ = heartbeat.tick() => {
                    count += 1;
                    outgoing.push(Body::Heartbeat(v1::Heartbeat { count, roots: self.root_reports().await }));
                }
            }
            for body in outgoing {
                if say(&messages, body).await.is_err() {
                    return Ok(End::Lost("it ended the session".to_owned()));
                }
            }
        }
    }

    /// Dials and registers; returns both directions and the coordinator's first word.
    async fn open(
        &self,
        runner: &Runner,
    ) -> Result<
        (
            mpsc::Sender<v1::AgentMessage>,
            tonic::Streaming<v1::CoordinatorMessage>,
            Answer,
        ),
        String,
    > {
        let channel = stage_net::grpc::connect(&self.net, &self.config.coordinator)
            .await
            .map_err(|error| chain(&error))?;
        let (messages, outgoing) = mpsc::channel(MESSAGES);
        let register = self.register(runner).await;
        say(&messages, Body::Register(register))
            .await
            .map_err(|()| "the session ended at once".to_owned())?;
        let mut orders = FleetClient::new(channel)
            .session(ReceiverStream::new(outgoing))
            .await
            .map_err(|status| status.message().to_owned())?
            .into_inner();
        let first = orders
            .message()
            .await
            .map_err(|status| status.message().to_owned())?;
        match first.and_then(|message| message.body) {
            Some(answer) => Ok((messages, orders, answer)),
            None => Err("it ended the session at once".to_owned()),
        }
    }

    async fn register(&self, runner: &Runner) -> v1::Register {
        let state = self.config.state.clone();
        let mut jobs: BTreeMap<JobId, v1::HeldJob> = blocking(move || held_jobs(&state))
            .await
            .into_iter()
            .map(|(job, chunks)| {
                (
                    job,
                    v1::HeldJob {
                        job: job.to_string(),
                        chunks,
                        ..v1::HeldJob::default()
                    },
                )
            })
            .collect();
        for (job, (epoch, version)) in runner.held() {
            let held = jobs.entry(job).or_insert_with(|| v1::HeldJob {
                job: job.to_string(),
                ..v1::HeldJob::default()
            });
            (held.epoch, held.version) = (epoch.0, version.0);
        }
        v1::Register {
            hello: Some(stage_proto::version::hello()),
            node: self.config.node.to_string(),
            instance: self.identity.instance.to_string(),
            data_addresses: self.addresses.iter().map(ToString::to_string).collect(),
            roots: self.root_reports().await,
            windows: Some(host::windows().into()),
            congestion_controls: host::congestion_controls(),
            congestion_control: host::congestion_control(),
            boot_id: host::boot_id(),
            jobs: jobs.into_values().collect(),
            cluster_id: self.identity.cluster.map(|id| id.to_string()).unwrap_or_default(),
            epoch: self.identity.epoch.0,
        }
    }

    async fn root_reports(&self) -> Vec<v1::RootReport> {
        let roots = self.roots.clone();
        let reports = blocking(move || roots.report()).await;
        reports
            .into_iter()
            .map(|root| v1::RootReport {
                name: root.name.to_string(),
                path: root.path,
                free_bytes: root.free.0,
                failure: root
                    .failure
                    .map(|failure| (&failure.on(&self.config.node)).into()),
            })
            .collect()
    }

    async fn obey(&self, runner: &Runner, wire: &v1::Assignment) {
        match Assignment::try_from(wire) {
            Ok(assignment) if assignment.epoch < self.identity.epoch => {
                tracing::warn!(job = %assignment.job, epoch = %assignment.epoch, "an order of an older coordinator has no effect");
            }
            Ok(assignment) => runner.assign(assignment).await,
            Err(error) => tracing::error!(job = wire.job, %error, "an order means nothing and is left out"),
        }
    }
}

async fn say(messages: &mpsc::Sender<v1::AgentMessage>, body: Body) -> Result<(), ()> {
    messages
        .send(v1::AgentMessage { body: Some(body) })
        .await
        .map_err(|_| ())
}

/// An error with its causes, since a transport error alone says nothing.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// The counters that changed since they were said last.
fn fresh_progress(runner: &Runner, said: &mut BTreeMap<JobId, Progress>) -> Vec<Body> {
    let mut news = Vec::new();
    for (job, now) in runner.progress() {
        if said.get(&job) != Some(&now) {
            news.push(Body::Progress(v1::JobProgress::of(job, &now)));
            said.insert(job, now);
        }
    }
    news
}
