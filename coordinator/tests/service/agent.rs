//! An agent that plays the protocol and moves nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use stage_core::manifest::Manifest;
use stage_core::payload::Payload;
use stage_core::units::ByteCount;
use stage_proto::v1;
use stage_proto::v1::agent_message::Body;
use stage_proto::v1::assignment::Order;
use stage_proto::v1::coordinator_message::Body as Down;
use stage_proto::v1::fleet_client::FleetClient;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

use crate::lab::Lab;

/// How an agent plays.
#[derive(Clone)]
pub(crate) struct Play {
    /// What it answers to a question.
    pub(crate) says: fn(&v1::Ask) -> Vec<v1::Said>,
    /// The source declares FINAL only when this says so.
    pub(crate) hold_final: bool,
    /// What it answers to a prepare order as a target.
    pub(crate) unfit: Option<v1::Failure>,
    /// As a source.
    pub(crate) source_unfit: Option<v1::Failure>,
    /// It does not say that it has let a job go.
    pub(crate) deaf_to_cancel: bool,
    /// It says nothing to prepare orders.
    pub(crate) silent: bool,
    /// As a source, what it reports instead of FINAL.
    pub(crate) source_fails: Option<v1::Failure>,
    /// As a target, its counters before it says that it has published.
    pub(crate) counts: Option<v1::JobProgress>,
    /// As a target, bytes received and seconds taken.
    pub(crate) received: (u64, f64),
}

impl Default for Play {
    fn default() -> Self {
        Self {
            says: |_| Vec::new(),
            hold_final: false,
            unfit: None,
            source_unfit: None,
            deaf_to_cancel: false,
            silent: false,
            source_fails: None,
            counts: None,
            received: (3 << 20, 0.5),
        }
    }
}

/// What an agent keeps over sessions.
#[derive(Default)]
pub(crate) struct Memory {
    /// Every order, in the order in which they came.
    pub(crate) orders: Vec<v1::Assignment>,
    jobs: BTreeMap<String, v1::HeldJob>,
    /// Jobs of which it has published its copy.
    published: BTreeSet<String>,
    /// Every question, and every one that was withdrawn.
    pub(crate) asks: Vec<v1::Ask>,
    pub(crate) withdrawn: Vec<u64>,
    pub(crate) cluster: String,
    pub(crate) epoch: u64,
}

pub(crate) struct Agent {
    pub(crate) register: v1::Register,
    pub(crate) memory: Arc<Mutex<Memory>>,
    pub(crate) say: mpsc::Sender<Body>,
    task: JoinHandle<Option<v1::Failure>>,
}

pub(crate) fn register(node: &str) -> v1::Register {
    v1::Register {
        hello: Some(stage_proto::version::hello()),
        node: node.to_owned(),
        instance: crate::lab::random_id(),
        data_addresses: vec!["127.0.0.1:7701".to_owned()],
        roots: vec![v1::RootReport {
            name: "scratch".to_owned(),
            path: "/scratch".to_owned(),
            free_bytes: 1 << 40,
            failure: None,
        }],
        boot_id: "b".to_owned(),
        ..v1::Register::default()
    }
}

impl Agent {
    pub(crate) async fn join(lab: &Lab, node: &str, play: Play) -> Self {
        let agent = Self::dial(lab, register(node), play, Arc::default()).await;
        agent.is_up(lab).await;
        agent
    }

    /// The same agent in a new session.
    pub(crate) async fn again(self, lab: &Lab, play: Play) -> Self {
        self.task.abort();
        let _ = self.task.await;
        let mut register = self.register;
        {
            let memory = self.memory.lock().unwrap();
            register.cluster_id.clone_from(&memory.cluster);
            register.epoch = memory.epoch;
            register.jobs = memory.jobs.values().cloned().collect();
        }
        let agent = Self::dial(lab, register, play, self.memory).await;
        agent.is_up(lab).await;
        agent
    }

    /// Cuts the connection; the agent lives on.
    pub(crate) fn cut(&self) {
        self.task.abort();
    }

    /// Why it was refused.
    pub(crate) async fn refused(self) -> v1::Failure {
        let end = tokio::time::timeout(crate::lab::DEADLINE, self.task).await;
        end.unwrap().unwrap().expect("it was refused")
    }

    async fn is_up(&self, lab: &Lab) {
        let wait = async {
            while !lab
                .nodes()
                .await
                .iter()
                .any(|(node, state)| *node == self.register.node && state != "away")
            {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(crate::lab::DEADLINE, wait).await.unwrap();
    }

    pub(crate) async fn dial(
        lab: &Lab,
        register: v1::Register,
        play: Play,
        memory: Arc<Mutex<Memory>>,
    ) -> Self {
        let (say, queue) = mpsc::channel(256);
        say.send(Body::Register(register.clone())).await.unwrap();
        let up = ReceiverStream::new(queue).map(|body| v1::AgentMessage { body: Some(body) });
        let mut down = FleetClient::new(lab.channel().await)
            .session(up)
            .await
            .unwrap()
            .into_inner();
        let out = say.clone();
        let kept = memory.clone();
        let task = tokio::spawn(async move {
            let mut count = 0;
            loop {
                let message = tokio::select! {
                    message = down.message() => message,
                    () = tokio::time::sleep(std::time::Duration::from_secs(2)) => {
                        count += 1;
                        let beat = v1::Heartbeat { count, roots: Vec::new() };
                        let _ = out.send(Body::Heartbeat(beat)).await;
                        continue;
                    }
                };
                let Ok(Some(message)) = message else { return None };
                match message.body.unwrap() {
                    Down::Welcome(welcome) => {
                        let mut memory = kept.lock().unwrap();
                        memory.cluster = welcome.cluster_id;
                        memory.epoch = welcome.epoch;
                    }
                    Down::Refused(failure) => return Some(failure),
                    Down::Heartbeat(_) => {}
                    Down::Ask(ask) => {
                        for said in (play.says)(&ask) {
                            let answer = v1::Answer {
                                id: ask.id,
                                said: Some(said),
                            };
                            let _ = out.send(Body::Answer(answer)).await;
                        }
                        kept.lock().unwrap().asks.push(ask);
                    }
                    Down::Withdraw(withdraw) => kept.lock().unwrap().withdrawn.push(withdraw.id),
                    Down::Assignment(assignment) => {
                        let answers = answer(&play, &kept, assignment);
                        for body in answers {
                            let _ = out.send(body).await;
                        }
                    }
                }
            }
        });
        Self {
            register,
            memory,
            say,
            task,
        }
    }

    pub(crate) fn orders(&self) -> Vec<v1::Assignment> {
        self.memory.lock().unwrap().orders.clone()
    }

    /// Waits until the last order is of this kind.
    pub(crate) async fn told(&self, wanted: impl Fn(&Order) -> bool) -> v1::Assignment {
        let wait = async {
            loop {
                if let Some(last) = self.orders().last()
                    && wanted(last.order.as_ref().unwrap())
                {
                    return last.clone();
                }
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(crate::lab::DEADLINE, wait).await.unwrap()
    }
}

pub(crate) fn fin() -> v1::Final {
    v1::Final {
        root: vec![7; 32],
        chunks: 3,
        data_bytes: 0,
    }
}

fn answer(play: &Play, memory: &Mutex<Memory>, assignment: v1::Assignment) -> Vec<Body> {
    let mut memory = memory.lock().unwrap();
    let job = assignment.job.clone();
    let mut answers = vec![Body::Applied(v1::Applied {
        job: job.clone(),
        epoch: assignment.epoch,
        version: assignment.version,
    })];
    let prepared = |answer| {
        Body::Prepared(v1::Prepared {
            job: job.clone(),
            version: assignment.version,
            answer: Some(answer),
        })
    };
    let source = |report| {
        Body::Source(v1::SourceReport {
            job: job.clone(),
            report: Some(report),
        })
    };
    match assignment.order.as_ref().unwrap() {
        Order::PrepareSource(_) => {
            let manifest = Manifest::single_file(b"genome.db", ByteCount(3 << 20), 0o644, (1, 2));
            let payload = Payload::of(&manifest).unwrap();
            answers.push(prepared(match &play.source_unfit {
                Some(failure) => v1::prepared::Answer::Unfit(failure.clone()),
                None => v1::prepared::Answer::Source((&payload).into()),
            }));
        }
        Order::PrepareTarget(_) if play.silent => {}
        Order::PrepareTarget(_) => {
            answers.push(prepared(match &play.unfit {
                Some(failure) => v1::prepared::Answer::Unfit(failure.clone()),
                None => v1::prepared::Answer::Ready(v1::Ready {
                    path: "/scratch/genome.db".to_owned(),
                    candidate: false,
                }),
            }));
        }
        Order::Run(run) => {
            let held = memory.jobs.entry(job.clone()).or_insert_with(|| v1::HeldJob {
                job: job.clone(),
                ..v1::HeldJob::default()
            });
            held.epoch = assignment.epoch;
            held.version = assignment.version;
            if let Some(spec) = &run.source {
                if spec.expect.iter().any(|expected| expected.sha256 != [9; 32]) {
                    answers.push(source(v1::source_report::Report::Failed(v1::Failure {
                        code: "unexpected".to_owned(),
                        ..v1::Failure::default()
                    })));
                } else if let Some(failure) = &play.source_fails {
                    answers.push(source(v1::source_report::Report::Failed(failure.clone())));
                } else if !play.hold_final && run.r#final.is_none() {
                    answers.push(source(v1::source_report::Report::Final(fin())));
                    answers.push(source(v1::source_report::Report::Sha256(vec![9; 32])));
                }
            }
            if run.target.is_some() && run.r#final.is_some() && memory.published.insert(job.clone()) {
                if let Some(counts) = &play.counts {
                    answers.push(Body::Progress(v1::JobProgress {
                        job: job.clone(),
                        ..counts.clone()
                    }));
                }
                let outcome = v1::Outcome {
                    job: job.clone(),
                    outcome: Some(v1::outcome::Outcome::Published(v1::Published {
                        path: "/scratch/genome.db".to_owned(),
                        already: false,
                        bytes_received: play.received.0,
                        seconds: play.received.1,
                    })),
                };
                answers.push(Body::Outcome(outcome));
            }
        }
        Order::Cancel(_) if play.deaf_to_cancel => answers.clear(),
        Order::Release(_) | Order::Cancel(_) => {
            memory.jobs.remove(&job);
        }
    }
    memory.orders.push(assignment);
    answers
}
