//! What a push has taught: said of the push itself, kept over a restart, and planned with.

use stage_proto::v1;
use stage_proto::v1::bench_event::Event;

use crate::agent::{Agent, Play};
use crate::lab::Lab;

/// A target whose threads waited so many seconds for bytes and for its disk.
fn waited(parent: &str, upstream: f64, disk: f64, sending: Vec<v1::SendWaits>) -> Play {
    Play {
        counts: Some(v1::JobProgress {
            chunks: 3,
            bytes_kept: 3 << 20,
            bytes_received: 160 << 20,
            parent: parent.to_owned(),
            streams: 1,
            waits: Some(v1::Waits {
                receive_upstream: upstream,
                receive_disk: disk,
                receive_cpu: 0.5,
                sending,
                ..v1::Waits::default()
            }),
            ..v1::JobProgress::default()
        }),
        received: (160 << 20, 8.0),
        ..Play::default()
    }
}

/// A child that got all that there was to send.
fn idle(child: &str) -> Vec<v1::SendWaits> {
    vec![v1::SendWaits {
        child: child.to_owned(),
        idle: 8.0,
        network: 0.5,
        ..v1::SendWaits::default()
    }]
}

async fn taught(lab: &Lab) -> Vec<String> {
    let request = v1::BenchRequest {
        hello: Some(stage_proto::version::hello()),
        show: true,
        ..v1::BenchRequest::default()
    };
    let mut events = lab.operator().await.bench(request).await.unwrap().into_inner();
    let mut taught = Vec::new();
    while let Some(event) = events.message().await.unwrap() {
        if let Some(Event::Remark(remark)) = event.event
            && remark.kind == "taught"
        {
            taught.push(remark.text);
        }
    }
    taught
}

#[tokio::test]
async fn a_sick_disk_is_named_and_nobody_waits_for_it_the_next_time() {
    let mut lab = Lab::start().await;
    let plays = [
        ("n0", Play::default()),
        ("n1", waited("n0", 7.0, 1.0, Vec::new())),
        ("n2", waited("n1", 0.5, 7.5, idle("n3"))),
        ("n3", waited("n2", 7.5, 0.5, Vec::new())),
    ];
    let mut agents = Vec::new();
    for (node, play) in &plays {
        agents.push(Agent::join(&lab, node, play.clone()).await);
    }
    let job = lab.push("three", |_| ()).await;
    let view = lab.until(&job, |view| view.state == "done").await;
    let before = view.plan.unwrap();
    assert!(before.hops.iter().any(|hop| hop.parent == "n2"), "{before:?}");
    // Whoever waited names the one for whom all waited.
    assert!(
        view.verdict.starts_with("n2: its disk writes 21.0 MB/s; "),
        "{}",
        view.verdict
    );

    for round in 0..2 {
        let lines = taught(&lab).await;
        assert!(
            lines[0].starts_with("n2: its disk writes 21.0 MB/s (met by a push "),
            "{round}: {lines:?}"
        );
        assert!(
            lines[1].contains("forecast ") && lines[1].ends_with(&view.verdict),
            "{round}: {lines:?}"
        );
        let job = lab.push("three", |_| ()).await;
        let next = lab.until(&job, |view| view.plan.is_some()).await.plan.unwrap();
        assert!(
            next.hops.iter().all(|hop| hop.parent != "n2"),
            "{round}: {next:?}"
        );
        let sick = next.hops.iter().find(|hop| hop.child == "n2").unwrap();
        assert_eq!(sick.limited_by, "disk of n2", "{round}");
        let all = lab.until(&job, |view| view.settled).await;
        assert_eq!(all.state, "done");
        if round == 0 {
            lab.end().await.unwrap();
            lab.begin().await.unwrap();
            let mut again = Vec::new();
            for (agent, (_, play)) in agents.drain(..).zip(&plays) {
                again.push(agent.again(&lab, play.clone()).await);
            }
            agents = again;
        }
    }
}
