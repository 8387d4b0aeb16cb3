//! A job as people see it, as a message.

use std::time::Duration;

use stage_core::job::{JobView, NodeView};
use stage_proto::v1;

pub(crate) fn job(view: &JobView) -> v1::JobView {
    v1::JobView {
        job: view.job.to_string(),
        state: view.phase.as_str().to_owned(),
        name: view.name.clone(),
        source: view.source.to_string(),
        bytes: view.size.0,
        payload_bytes: view.payload.0,
        plan: view.plan.as_ref().map(Into::into),
        nodes: view.nodes.iter().map(node).collect(),
        submitted_unix_ms: view.submitted_unix_ms,
        seconds: view.took.as_secs_f64(),
        sha256: view.sha256.map(|digest| digest.to_string()).unwrap_or_default(),
        agrees: view.agrees.unwrap_or_default().to_owned(),
        agreeing: count(view.agreeing),
        sha256_bytes: view.sha256_bytes,
        source_bytes_read: view.source_bytes_read,
        source_bytes_sent: view.source_bytes_sent,
        failure: view.failure.as_ref().map(Into::into),
        settled: view.settled,
        exit: view.exit.into(),
        remarks: view.remarks.clone(),
        targets: count(view.targets),
        published: count(view.published),
        verdict: view.verdict.clone(),
    }
}

fn count(items: usize) -> u32 {
    u32::try_from(items).unwrap_or(u32::MAX)
}

fn node(view: &NodeView) -> v1::NodeView {
    v1::NodeView {
        node: view.node.to_string(),
        state: view.state.as_str().to_owned(),
        path: view.path.clone(),
        bytes_kept: view.bytes_kept,
        bytes_received: view.bytes_received,
        seconds: view.took.as_secs_f64(),
        bytes_per_second: view.rate.bytes_per_second(),
        bytes_per_second_now: view.rate_now.bytes_per_second(),
        disk_bytes_per_second: view.disk_rate.bytes_per_second(),
        parent: view.parent.as_ref().map(ToString::to_string).unwrap_or_default(),
        streams: view.streams.into(),
        failure: view.failure.as_ref().map(Into::into),
        already: view.already,
        superseded_by: view.superseded_by.map(|job| job.to_string()).unwrap_or_default(),
        rtt_seconds: view.rtt.unwrap_or(Duration::ZERO).as_secs_f64(),
        drained: view.drained,
    }
}
