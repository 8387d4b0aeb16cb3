//! A coordinator that ends in mid-push and starts again from what it committed.

use stage_proto::v1;
use stage_proto::v1::agent_message::Body;
use stage_proto::v1::assignment::Order;

use crate::agent::{Agent, Play, fin};
use crate::lab::{Lab, states};

#[tokio::test]
async fn a_push_goes_on_after_a_restart() {
    let mut lab = Lab::start().await;
    let hold = Play {
        hold_final: true,
        ..Play::default()
    };
    let n0 = Agent::join(&lab, "n0", hold.clone()).await;
    let n1 = Agent::join(&lab, "n1", Play::default()).await;
    let n2 = Agent::join(&lab, "n2", Play::default()).await;
    let job = lab.push("n[1-2]", |_| ()).await;
    let before = lab.until(&job, |view| states(view) == ["receiving"; 2]).await;
    for agent in [&n0, &n1, &n2] {
        agent.told(|order| matches!(order, Order::Run(_))).await;
    }
    let told = n2.orders().last().unwrap().clone();
    lab.end().await.unwrap();

    lab.begin().await.unwrap();
    let view = lab.job(&job).await.unwrap();
    assert_eq!(view.state, "running");
    let n1 = n1.again(&lab, Play::default()).await;
    let n2 = n2.again(&lab, Play::default()).await;
    let n0 = n0.again(&lab, hold).await;
    let again = n2.told(|order| matches!(order, Order::Run(_))).await;
    assert!(again.epoch > told.epoch);
    assert_eq!(again.order, told.order, "the same order under the new epoch");
    let after = lab.until(&job, |_| true).await;
    assert_eq!(after.plan, before.plan);

    for report in [
        v1::source_report::Report::Final(fin()),
        v1::source_report::Report::Sha256(vec![9; 32]),
    ] {
        let report = v1::SourceReport {
            job: job.clone(),
            report: Some(report),
        };
        n0.say.send(Body::Source(report)).await.unwrap();
    }
    let view = lab.until(&job, |view| view.state == "done").await;
    assert_eq!((view.exit, states(&view)), (0, vec!["published"; 2]));
    drop((n1, n2));

    // What ended is remembered too.
    lab.end().await.unwrap();
    lab.begin().await.unwrap();
    let view = lab.until(&job, |_| true).await;
    assert_eq!((view.state.as_str(), view.exit), ("done", 0));
    assert_eq!(view.sha256, "09".repeat(32));
    assert_eq!(view.nodes[0].bytes_received, 3 << 20);
}

#[tokio::test]
async fn what_was_published_meanwhile_is_learnt() {
    let mut lab = Lab::start().await;
    let n0 = Agent::join(&lab, "n0", Play::default()).await;
    let n1 = Agent::join(&lab, "n1", Play::default()).await;
    let job = lab.push("n[1,4]", |_| ()).await;
    lab.until(&job, |view| view.state == "open").await;
    lab.end().await.unwrap();
    lab.begin().await.unwrap();
    // Nobody but the awaited one need come back for the job to be open still.
    let view = lab.job(&job).await.unwrap();
    assert_eq!((view.state.as_str(), view.exit), ("open", 5));
    let _n0 = n0.again(&lab, Play::default()).await;
    let _n1 = n1.again(&lab, Play::default()).await;
    let _n4 = Agent::join(&lab, "n4", Play::default()).await;
    lab.until(&job, |view| view.state == "done").await;
}

#[tokio::test]
async fn a_damaged_database_is_refused() {
    let mut lab = Lab::start().await;
    lab.end().await.unwrap();
    let db = lab.state().join("stage.db");
    let len = std::fs::metadata(&db).unwrap().len();
    std::fs::write(&db, vec![0xa5; usize::try_from(len).unwrap()]).unwrap();
    let error = lab.begin().await.unwrap_err();
    assert_eq!(error.exit_code(), 78, "{error}");
    std::fs::remove_file(&db).unwrap();
    let error = lab.begin().await.unwrap_err();
    assert_eq!(error.exit_code(), 78, "{error}");
    assert!(!db.exists());
}
