//! Lists that no event carries: jobs, nodes, a topology.

use std::io::{self, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use stage_core::failure::Failure;
use stage_core::topology::Summary;
use stage_core::units::{ByteCount, show_time};
use stage_proto::v1;

use super::{Form, human, json, table};
use crate::view::Job;

/// All jobs, a line each.
///
/// # Errors
/// The output is gone.
pub(crate) fn jobs(form: Form, jobs: &[Job]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match form {
        Form::Json => jobs
            .iter()
            .try_for_each(|job| json::write(&mut out, &JobLine::of(job))),
        Form::Quiet => Ok(()),
        Form::Human if jobs.is_empty() => writeln!(out, "no jobs"),
        Form::Human => table::write(&mut out, &job_table(jobs)),
    }
}

fn job_table(jobs: &[Job]) -> comfy_table::Table {
    let mut table = table::plain(
        &["job", "state", "payload", "size", "source", "published", "took"],
        &[3, 6],
    );
    for job in jobs {
        table.add_row([
            job.id.to_string(),
            job.state.to_string(),
            job.name.clone(),
            job.size.to_string(),
            job.source.as_ref().map_or("-".to_owned(), ToString::to_string),
            format!("{} of {}", job.published, job.targets),
            show_time(job.elapsed).to_string(),
        ]);
    }
    table
}

/// One job as it is now.
///
/// # Errors
/// The output is gone.
pub(crate) fn job(form: Form, job: &Job) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match form {
        Form::Json => json::write(&mut out, &JobLine::of(job)),
        Form::Quiet => Ok(()),
        Form::Human => {
            human::why(&mut out, job)?;
            human::end(&mut out, job)?;
            human::missing(&mut out, job)
        }
    }
}

#[derive(Serialize)]
struct JobLine<'a> {
    event: &'static str,
    #[serde(flatten)]
    job: json::Outcome<'a>,
    targets: u32,
    published: u32,
    submitted: String,
}

impl<'a> JobLine<'a> {
    fn of(job: &'a Job) -> Self {
        Self {
            event: "job",
            job: json::Outcome::of(job),
            targets: job.targets,
            published: job.published,
            submitted: date(job.submitted_unix_ms),
        }
    }
}

/// A moment as RFC 3339 writes it, in UTC.
fn date(unix_ms: u64) -> String {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(unix_ms)).to_string()
}

/// The cluster's nodes.
///
/// # Errors
/// The output is gone.
pub(crate) fn nodes(form: Form, nodes: &[v1::FleetNode]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match form {
        Form::Json => nodes
            .iter()
            .try_for_each(|node| json::write(&mut out, &node_line(node))),
        Form::Quiet => Ok(()),
        Form::Human => node_table(&mut out, nodes, SystemTime::now()),
    }
}

#[derive(Serialize)]
struct NodeLine<'a> {
    event: &'static str,
    node: &'a str,
    state: &'a str,
    version: Option<&'a str>,
    since: Option<String>,
    roots: Vec<RootLine<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<CauseLine>,
}

#[derive(Serialize)]
struct RootLine<'a> {
    name: &'a str,
    path: &'a str,
    free_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<CauseLine>,
}

/// A cause that nobody lends.
#[derive(Serialize)]
struct CauseLine {
    code: &'static str,
    message: String,
    hint: String,
}

impl From<&v1::Failure> for CauseLine {
    fn from(wire: &v1::Failure) -> Self {
        let failure = Failure::from(wire);
        Self {
            code: failure.code.as_str(),
            message: failure.message,
            hint: failure.hint,
        }
    }
}

fn node_line(node: &v1::FleetNode) -> NodeLine<'_> {
    NodeLine {
        event: "node",
        node: &node.node,
        state: &node.state,
        version: (!node.version.is_empty()).then_some(node.version.as_str()),
        since: (node.since_unix_ms > 0).then(|| date(node.since_unix_ms)),
        roots: node
            .roots
            .iter()
            .map(|root| RootLine {
                name: &root.name,
                path: &root.path,
                free_bytes: root.free_bytes,
                error: root.failure.as_ref().map(Into::into),
            })
            .collect(),
        error: node.failure.as_ref().map(Into::into),
    }
}

fn node_table(out: &mut impl Write, nodes: &[v1::FleetNode], now: SystemTime) -> io::Result<()> {
    let mut table = table::plain(&["node", "state", "for", "version", "roots"], &[]);
    let or_dash = |text: String| if text.is_empty() { "-".to_owned() } else { text };
    for node in nodes {
        let since = UNIX_EPOCH + Duration::from_millis(node.since_unix_ms);
        let roots: Vec<String> = node
            .roots
            .iter()
            .map(|root| match &root.failure {
                Some(failure) => format!("{} {}: {}", root.name, root.path, failure.message),
                None => format!(
                    "{} {} ({} free)",
                    root.name,
                    root.path,
                    ByteCount(root.free_bytes)
                ),
            })
            .collect();
        table.add_row([
            node.node.clone(),
            node.state.clone(),
            if node.since_unix_ms == 0 {
                "-".to_owned()
            } else {
                show_time(now.duration_since(since).unwrap_or_default()).to_string()
            },
            or_dash(node.version.clone()),
            or_dash(roots.join("; ")),
        ]);
    }
    table::write(out, &table)?;
    for node in nodes {
        if let Some(failure) = &node.failure {
            let failure = Failure::from(failure);
            writeln!(out, "{} {}: {}", node.node, node.state, human::cause(&failure))?;
            writeln!(out, "  next: {}", failure.hint)?;
        }
    }
    Ok(())
}

/// What a topology describes.
///
/// # Errors
/// The output is gone.
pub(crate) fn topology(form: Form, file: &str, summary: &Summary) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match form {
        Form::Json => json::write(
            &mut out,
            &serde_json::json!({
                "event": "topology",
                "file": file,
                "cluster": summary.cluster.as_str(),
                "nodes": summary.nodes,
                "switches": summary.switches,
                "links": summary.links,
                "groups": summary.groups,
                "roots": summary.roots,
                "remarks": summary.remarks,
            }),
        ),
        Form::Quiet => Ok(()),
        Form::Human => writeln!(out, "{file}: {summary}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::samples::{finished, published, unfit};

    fn fleet() -> Vec<v1::FleetNode> {
        vec![
            v1::FleetNode {
                node: "n1".to_owned(),
                state: "up".to_owned(),
                version: "0.1.0".to_owned(),
                since_unix_ms: 1_700_000_000_000,
                roots: vec![v1::RootReport {
                    name: "scratch".to_owned(),
                    path: "/scratch/stage".to_owned(),
                    free_bytes: 5 << 30,
                    failure: None,
                }],
                failure: None,
            },
            v1::FleetNode {
                node: "n2".to_owned(),
                state: "refused".to_owned(),
                failure: Some(v1::Failure {
                    code: "name_taken".to_owned(),
                    message: "another agent holds the name".to_owned(),
                    hint: "stop one of the two".to_owned(),
                    ..v1::Failure::default()
                }),
                ..v1::FleetNode::default()
            },
        ]
    }

    #[test]
    fn nodes_for_people() {
        let mut out = Vec::new();
        let now = UNIX_EPOCH + Duration::from_secs(1_700_000_200);
        node_table(&mut out, &fleet(), now).unwrap();
        insta::assert_snapshot!(String::from_utf8(out).unwrap(), @"
         node  state    for         version  roots
         n1    up       3 min 20 s  0.1.0    scratch /scratch/stage (5.00 GiB free)
         n2    refused  -           -        -
        n2 refused: another agent holds the name
          next: stop one of the two
        ");
    }

    #[test]
    fn nodes_for_scripts() {
        let mut out = Vec::new();
        for node in &fleet() {
            json::write(&mut out, &node_line(node)).unwrap();
        }
        insta::assert_snapshot!(String::from_utf8(out).unwrap(), @r#"
        {"event":"node","node":"n1","state":"up","version":"0.1.0","since":"2023-11-14T22:13:20Z","roots":[{"name":"scratch","path":"/scratch/stage","free_bytes":5368709120}]}
        {"event":"node","node":"n2","state":"refused","version":null,"since":null,"roots":[],"error":{"code":"name_taken","message":"another agent holds the name","hint":"stop one of the two"}}
        "#);
    }

    #[test]
    fn jobs_for_people() {
        let jobs = [
            finished(vec![published("n1", "n0")]),
            finished(vec![published("n1", "n0"), unfit("n2")]),
        ];
        let mut out = Vec::new();
        table::write(&mut out, &job_table(&jobs)).unwrap();
        insta::assert_snapshot!(String::from_utf8(out).unwrap(), @"
        job                                   state  payload        size  source  published    took
        11111111-1111-1111-1111-111111111111  done   genome.db  1.00 GiB  n0      1 of 1     9.10 s
        11111111-1111-1111-1111-111111111111  open   genome.db  1.00 GiB  n0      1 of 2     9.10 s
        ");
    }
}
