//! JSON for scripts: one object a line, each with `"event"`. The field names are a promise.

mod plans;

use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;
use stage_core::failure::Failure;
use stage_core::id::{JobId, NodeName};

use super::Render;
use crate::event::Event;
use crate::view::{Job, Node};

/// Progress is told about this often, by the job's own clock.
const PROGRESS: Duration = Duration::from_millis(950);

/// Writes events as JSON lines.
pub(crate) struct Json<W> {
    out: W,
    progress: Option<Duration>,
}

impl<W: Write> Json<W> {
    /// Onto `out`.
    pub(crate) fn new(out: W) -> Self {
        Self { out, progress: None }
    }

    fn line(&mut self, line: &Line<'_>) -> io::Result<()> {
        write(&mut self.out, line)
    }
}

/// One object and the end of its line, in one write, at once.
pub(crate) fn write(out: &mut impl Write, object: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_vec(object)?;
    text.push(b'\n');
    out.write_all(&text)?;
    out.flush()
}

impl<W: Write> Render for Json<W> {
    fn event(&mut self, event: &Event) -> io::Result<()> {
        match event {
            Event::Submitted(job) => self.line(&Line::Submitted { job: *job }),
            Event::Planned { job, plan } => self.line(&Line::Planned {
                job: *job,
                plan: plan.into(),
            }),
            Event::Explained(tried) => self.line(&Line::Explained {
                tried: tried.iter().map(Into::into).collect(),
            }),
            Event::Simulated(simulated) => self.line(&Line::Simulated(simulated.as_ref().into())),
            Event::Node { job, node } => self.line(&Line::Node {
                job: *job,
                node: node.into(),
            }),
            Event::Remark { job, text } => self.line(&Line::Remark { job: *job, text }),
            Event::Progress(job) => {
                if job.state.is_before_bytes()
                    || self.progress.is_some_and(|last| job.elapsed < last + PROGRESS)
                {
                    return Ok(());
                }
                self.progress = Some(job.elapsed);
                self.line(&Line::Progress(Progress::of(job)))
            }
            Event::Compared(compared) => self.line(&Line::Compared {
                by: compared.by,
                sha256: &compared.sha256,
                copies: compared.copies,
                equal: true,
            }),
            Event::Finished { job, exit } => self.line(&Line::Finished {
                exit: *exit,
                job: Outcome::of(job),
            }),
            Event::Error {
                job,
                failure,
                nodes,
                exit,
            } => self.line(&Line::Error {
                exit: *exit,
                job: *job,
                failure: failure.into(),
                nodes: (!nodes.is_empty()).then(|| nodes.iter().map(Into::into).collect()),
            }),
        }
    }
}

#[derive(Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Line<'a> {
    Submitted {
        job: JobId,
    },
    Planned {
        #[serde(skip_serializing_if = "Option::is_none")]
        job: Option<JobId>,
        plan: plans::FullPlan<'a>,
    },
    Explained {
        tried: Vec<plans::OneTried<'a>>,
    },
    Simulated(plans::Simulation<'a>),
    Node {
        job: JobId,
        #[serde(flatten)]
        node: OneNode<'a>,
    },
    Remark {
        job: JobId,
        text: &'a str,
    },
    Progress(Progress<'a>),
    Compared {
        by: &'a str,
        sha256: &'a str,
        copies: usize,
        equal: bool,
    },
    Finished {
        exit: u8,
        #[serde(flatten)]
        job: Outcome<'a>,
    },
    Error {
        exit: u8,
        #[serde(skip_serializing_if = "Option::is_none")]
        job: Option<JobId>,
        #[serde(flatten)]
        failure: Cause<'a>,
        #[serde(skip_serializing_if = "Option::is_none")]
        nodes: Option<Vec<OneNode<'a>>>,
    },
}

/// A cause.
#[derive(Serialize)]
pub(crate) struct Cause<'a> {
    code: &'static str,
    node: Option<&'a NodeName>,
    path: Option<&'a str>,
    message: &'a str,
    hint: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    short_by_bytes: Option<u64>,
}

impl<'a> From<&'a Failure> for Cause<'a> {
    fn from(failure: &'a Failure) -> Self {
        Self {
            code: failure.code.as_str(),
            node: failure.node.as_ref(),
            path: failure.path.as_deref(),
            message: &failure.message,
            hint: &failure.hint,
            short_by_bytes: failure.space.as_ref().map(|space| space.short_by.0),
        }
    }
}

/// A target.
#[derive(Serialize)]
pub(crate) struct OneNode<'a> {
    node: &'a NodeName,
    state: &'static str,
    path: Option<&'a str>,
    bytes_received: u64,
    seconds: f64,
    bytes_per_second: u64,
    parent: Option<&'a NodeName>,
    streams: u32,
    already: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    drained: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    superseded_by: Option<&'a str>,
    error: Option<Cause<'a>>,
}

impl<'a> From<&'a Node> for OneNode<'a> {
    fn from(node: &'a Node) -> Self {
        Self {
            node: &node.name,
            state: node.state.as_str(),
            path: (!node.path.is_empty()).then_some(node.path.as_str()),
            bytes_received: node.received.0,
            seconds: seconds(node.elapsed),
            bytes_per_second: node.rate.bytes_per_second().round() as u64,
            parent: node.parent.as_ref(),
            streams: node.streams,
            already: node.already,
            drained: node.drained,
            superseded_by: node.superseded_by.as_deref(),
            error: node.failure.as_ref().map(Into::into),
        }
    }
}

/// A time that a plan speaks of, if it does.
pub(super) fn forecast(time: Duration) -> Option<f64> {
    (!time.is_zero()).then(|| seconds(time))
}

/// Thousandths are what a measured time is worth.
pub(super) fn seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e3).round() / 1e3
}

#[derive(Serialize)]
struct PlanSummary {
    shape: String,
    depth: u16,
    predicted_seconds: Option<f64>,
    bound_seconds: Option<f64>,
}

/// A job with its targets.
#[derive(Serialize)]
pub(crate) struct Outcome<'a> {
    job: JobId,
    state: &'static str,
    name: &'a str,
    source: Option<&'a NodeName>,
    bytes: u64,
    payload_bytes: u64,
    seconds: f64,
    sha256: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    agrees: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    agreeing_files: Option<u32>,
    source_bytes_read: u64,
    source_bytes_sent: u64,
    plan: Option<PlanSummary>,
    verdict: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Cause<'a>>,
    nodes: Vec<OneNode<'a>>,
}

impl<'a> Outcome<'a> {
    /// Of this job.
    pub(crate) fn of(job: &'a Job) -> Self {
        Self {
            job: job.id,
            state: job.state.as_str(),
            name: &job.name,
            source: job.source.as_ref(),
            bytes: job.size.0,
            payload_bytes: job.payload.0,
            seconds: seconds(job.elapsed),
            sha256: job.sha256.as_deref(),
            agrees: job.agrees.as_deref(),
            agreeing_files: job.agrees.as_ref().map(|_| job.agreeing),
            source_bytes_read: job.source_bytes_read.0,
            source_bytes_sent: job.source_bytes_sent.0,
            plan: job.plan.as_ref().map(|plan| PlanSummary {
                shape: plan.shape.to_string(),
                depth: plan.depth,
                predicted_seconds: forecast(plan.predicted),
                bound_seconds: forecast(plan.bound),
            }),
            verdict: job.verdict.as_deref(),
            error: job.failure.as_ref().map(Into::into),
            nodes: job.nodes.iter().map(Into::into).collect(),
        }
    }
}

#[derive(Serialize)]
struct Progress<'a> {
    job: JobId,
    state: &'static str,
    seconds: f64,
    bytes: u64,
    payload_bytes: u64,
    targets: u32,
    published: u32,
    bytes_kept: u64,
    bytes_per_second_now: u64,
    eta_seconds: Option<f64>,
    sha256_bytes: u64,
    source_bytes_read: u64,
    verdict: Option<&'a str>,
    nodes: Vec<NodeProgress<'a>>,
}

/// A target that bytes arrive on.
#[derive(Serialize)]
struct NodeProgress<'a> {
    node: &'a NodeName,
    bytes_kept: u64,
    bytes_per_second: u64,
    bytes_per_second_now: u64,
    disk_bytes_per_second: u64,
}

impl<'a> Progress<'a> {
    fn of(job: &'a Job) -> Self {
        let now = job.nodes.iter().map(|node| node.rate_now.bytes_per_second());
        Self {
            job: job.id,
            state: job.state.as_str(),
            seconds: seconds(job.elapsed),
            bytes: job.size.0,
            payload_bytes: job.payload.0,
            targets: job.targets,
            published: job.published,
            bytes_kept: job.nodes.iter().map(|node| node.kept.0).sum(),
            bytes_per_second_now: now.sum::<f64>().round() as u64,
            eta_seconds: job.remaining().map(seconds),
            sha256_bytes: job.sha256_bytes.0,
            source_bytes_read: job.source_bytes_read.0,
            verdict: job.verdict.as_deref(),
            nodes: job
                .nodes
                .iter()
                .filter(|node| node.state == crate::view::NodeState::Receiving)
                .map(|node| NodeProgress {
                    node: &node.name,
                    bytes_kept: node.kept.0,
                    bytes_per_second: node.rate.bytes_per_second().round() as u64,
                    bytes_per_second_now: node.rate_now.bytes_per_second().round() as u64,
                    disk_bytes_per_second: node.disk_rate.bytes_per_second().round() as u64,
                })
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Compared;
    use crate::view::samples::{finished, job, plan, published, receiving, unfit};

    fn shown(events: &[Event]) -> String {
        let mut out = Vec::new();
        let mut json = Json::new(&mut out);
        for event in events {
            json.event(event).unwrap();
        }
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn finished_has_the_promised_fields() {
        let job = finished(vec![published("n1", "n0"), unfit("n2")]);
        insta::assert_snapshot!(shown(&[Event::Finished { job: Box::new(job), exit: 5 }]), @r#"{"event":"finished","exit":5,"job":"11111111-1111-1111-1111-111111111111","state":"open","name":"genome.db","source":"n0","bytes":1073741824,"payload_bytes":1073741824,"seconds":9.1,"sha256":"0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef","source_bytes_read":1073741824,"source_bytes_sent":1073741824,"plan":{"shape":"chain","depth":2,"predicted_seconds":8.9,"bound_seconds":8.6},"verdict":null,"nodes":[{"node":"n1","state":"published","path":"/scratch/stage/genome.db","bytes_received":1073741824,"seconds":8.8,"bytes_per_second":122016116,"parent":"n0","streams":1,"already":false,"error":null},{"node":"n2","state":"unfit","path":"/scratch/stage/genome.db","bytes_received":0,"seconds":0.0,"bytes_per_second":0,"parent":null,"streams":0,"already":false,"error":{"code":"no_space","node":"n2","path":"/scratch/stage/genome.db","message":"too little space: short by 3.00 GiB","hint":"free space under /scratch/stage, the push then goes on by itself","short_by_bytes":3221225472}}]}"#);
    }

    #[test]
    fn the_other_events_too() {
        let running = job(vec![receiving("n1", "n0", 1 << 29)]);
        let id = running.id;
        insta::assert_snapshot!(shown(&[
            Event::Submitted(id),
            Event::Planned { job: Some(id), plan: plan(&["n1"]) },
            Event::Planned { job: None, plan: plan(&[]) },
            Event::Node { job: id, node: running.nodes[0].clone() },
            Event::Remark { job: id, text: "n1 moved".to_owned() },
            Event::Progress(Box::new(running)),
            Event::Compared(Compared { by: "sha256sum", sha256: "00".to_owned(), copies: 3 }),
        ]), @r#"
        {"event":"submitted","job":"11111111-1111-1111-1111-111111111111"}
        {"event":"planned","job":"11111111-1111-1111-1111-111111111111","plan":{"shape":"chain","source":"n0","depth":1,"predicted_seconds":8.9,"bound_seconds":8.6,"reason":"every node sends to one other, so each has its whole interface","hops":[{"child":"n1","parent":"n0","fallbacks":[],"streams":1,"streams_cap":4,"congestion_control":null,"depth":1,"bytes_per_second":125000000,"finish_seconds":8.6,"limited_by":"interface of n1"}]}}
        {"event":"planned","plan":{"shape":"chain","source":"n0","depth":0,"predicted_seconds":8.9,"bound_seconds":8.6,"reason":"every node sends to one other, so each has its whole interface","hops":[]}}
        {"event":"node","job":"11111111-1111-1111-1111-111111111111","node":"n1","state":"receiving","path":"/scratch/stage/genome.db","bytes_received":536870912,"seconds":4.0,"bytes_per_second":120000000,"parent":"n0","streams":1,"already":false,"error":null}
        {"event":"remark","job":"11111111-1111-1111-1111-111111111111","text":"n1 moved"}
        {"event":"progress","job":"11111111-1111-1111-1111-111111111111","state":"running","seconds":4.0,"bytes":1073741824,"payload_bytes":1073741824,"targets":1,"published":0,"bytes_kept":536870912,"bytes_per_second_now":117000000,"eta_seconds":4.589,"sha256_bytes":536870912,"source_bytes_read":536870912,"verdict":null,"nodes":[{"node":"n1","bytes_kept":536870912,"bytes_per_second":120000000,"bytes_per_second_now":117000000,"disk_bytes_per_second":900000000}]}
        {"event":"compared","by":"sha256sum","sha256":"00","copies":3,"equal":true}
        "#);
    }

    #[test]
    fn an_error_lists_the_nodes_that_it_concerns() {
        let node = unfit("n1");
        let failure = node.failure.clone().unwrap();
        insta::assert_snapshot!(shown(&[
            Event::Error { job: None, failure: failure.clone(), nodes: Vec::new(), exit: 2 },
            Event::Error { job: Some(job(vec![]).id), failure, nodes: vec![node], exit: 4 },
        ]), @r#"
        {"event":"error","exit":2,"code":"no_space","node":"n1","path":"/scratch/stage/genome.db","message":"too little space: short by 3.00 GiB","hint":"free space under /scratch/stage, the push then goes on by itself","short_by_bytes":3221225472}
        {"event":"error","exit":4,"job":"11111111-1111-1111-1111-111111111111","code":"no_space","node":"n1","path":"/scratch/stage/genome.db","message":"too little space: short by 3.00 GiB","hint":"free space under /scratch/stage, the push then goes on by itself","short_by_bytes":3221225472,"nodes":[{"node":"n1","state":"unfit","path":"/scratch/stage/genome.db","bytes_received":0,"seconds":0.0,"bytes_per_second":0,"parent":null,"streams":0,"already":false,"error":{"code":"no_space","node":"n1","path":"/scratch/stage/genome.db","message":"too little space: short by 3.00 GiB","hint":"free space under /scratch/stage, the push then goes on by itself","short_by_bytes":3221225472}}]}
        "#);
    }

    #[test]
    fn progress_is_told_about_once_a_second() {
        let mut running = job(vec![receiving("n1", "n0", 1 << 29)]);
        let mut events = Vec::new();
        for tenth in 0..30 {
            running.elapsed = Duration::from_millis(100 * tenth);
            events.push(Event::Progress(Box::new(running.clone())));
        }
        assert_eq!(shown(&events).lines().count(), 3);
    }
}
