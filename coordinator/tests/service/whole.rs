//! Pushes from end to end.

use stage_proto::v1;
use stage_proto::v1::assignment::Order;

use crate::agent::{Agent, Play};
use crate::lab::{Lab, paths, states, submit};

fn failure(code: &str) -> v1::Failure {
    v1::Failure {
        code: code.to_owned(),
        message: "so it is".to_owned(),
        ..v1::Failure::default()
    }
}

async fn cluster(lab: &Lab, play: Play) -> Vec<Agent> {
    let mut agents = Vec::new();
    for node in ["n0", "n1", "n2", "n3"] {
        agents.push(Agent::join(lab, node, play.clone()).await);
    }
    agents
}

#[tokio::test]
async fn three_targets_get_it() {
    let lab = Lab::start().await;
    let agents = cluster(&lab, Play::default()).await;
    let job = lab.push("three", |_| ()).await;
    let view = lab.until(&job, |view| view.state == "done").await;
    assert_eq!(states(&view), ["published"; 3]);
    assert_eq!((view.exit, view.settled, view.published), (0, true, 3));
    assert_eq!(view.sha256, "09".repeat(32));
    assert_eq!(view.bytes, 3 << 20);
    assert_eq!(view.nodes[0].path, "/scratch/genome.db");
    let plan = view.plan.unwrap();
    assert_eq!((plan.shape.as_str(), plan.depth), ("chain", 3));

    for agent in &agents {
        agent.told(|order| matches!(order, Order::Release(_))).await;
        let ranks: Vec<_> = agent.orders().iter().map(|o| (o.epoch, o.version)).collect();
        assert!(ranks.is_sorted(), "{ranks:?}");
    }
    // What they were told fits together.
    let run = |agent: &Agent| {
        agent
            .orders()
            .iter()
            .rev()
            .find_map(|order| match &order.order {
                Some(Order::Run(run)) => Some(run.clone()),
                _ => None,
            })
            .unwrap()
    };
    for hop in &plan.hops {
        let child = agents.iter().find(|a| a.register.node == hop.child).unwrap();
        let parent = agents.iter().find(|a| a.register.node == hop.parent).unwrap();
        assert_eq!(run(child).parents[0].node, hop.parent);
        assert_eq!(run(child).parents.last().unwrap().node, "n0");
        assert!(run(child).parents.iter().all(|peer| !peer.addresses.is_empty()));
        assert!(run(parent).children.contains(&hop.child));
        assert_eq!(run(child).key, run(parent).key);
    }
    assert!(run(&agents[0]).source.is_some() && run(&agents[0]).target.is_none());
}

#[tokio::test]
async fn who_is_away_is_filled_when_it_comes() {
    let lab = Lab::start().await;
    let agents = cluster(&lab, Play::default()).await;
    let job = lab.push("n[1-2],n4", |_| ()).await;
    let view = lab.until(&job, |view| view.settled).await;
    assert_eq!((view.state.as_str(), view.exit), ("open", 5));
    assert_eq!(states(&view), ["published", "published", "unfit"]);
    let why = view.nodes[2].failure.clone().unwrap();
    assert_eq!((why.code.as_str(), why.node.as_str()), ("away", "n4"));
    assert!(!why.hint.is_empty());
    // Who has it serves on while another is awaited.
    assert!(matches!(
        agents[1].orders().last().unwrap().order,
        Some(Order::Run(_))
    ));

    let late = Agent::join(&lab, "n4", Play::default()).await;
    let view = lab.until(&job, |view| view.state == "done").await;
    assert_eq!((states(&view), view.exit), (vec!["published"; 3], 0));
    late.told(|order| matches!(order, Order::Release(_))).await;
    agents[0].told(|order| matches!(order, Order::Release(_))).await;
}

#[tokio::test]
async fn what_cannot_begin_ends_with_4_and_lets_go() {
    let lab = Lab::start().await;
    let full = Play {
        unfit: Some(failure("no_space")),
        ..Play::default()
    };
    let _n0 = Agent::join(&lab, "n0", Play::default()).await;
    let fit = Agent::join(&lab, "n1", Play::default()).await;
    let _full = Agent::join(&lab, "n2", full).await;

    let job = lab
        .push("n[1-2]", |request| request.unfit = v1::UnfitRule::Fail.into())
        .await;
    let view = lab.until(&job, |view| view.settled).await;
    assert_eq!((view.state.as_str(), view.exit), ("failed", 4));
    assert_eq!(view.failure.as_ref().unwrap().code, "no_space");
    assert_eq!(states(&view), ["cancelled", "unfit"]);
    fit.told(|order| matches!(order, Order::Cancel(_))).await;

    let job = lab.push("n2", |_| ()).await;
    let view = lab.until(&job, |view| view.settled).await;
    assert_eq!((view.state.as_str(), view.exit), ("failed", 4));
    assert_eq!(view.nodes[0].failure.clone().unwrap().code, "no_space");

    let job = lab
        .push("n[1-2]", |request| request.unfit = v1::UnfitRule::Skip.into())
        .await;
    let view = lab.until(&job, |view| view.settled).await;
    assert_eq!((view.state.as_str(), view.exit), ("partial", 5));
    assert_eq!(states(&view), ["published", "unfit"]);
}

#[tokio::test]
async fn a_source_that_fails_fails_the_job() {
    let lab = Lab::start().await;
    let n1 = Agent::join(&lab, "n1", Play::default()).await;
    let missing = Play {
        source_unfit: Some(failure("source_missing")),
        ..Play::default()
    };
    let n0 = Agent::join(&lab, "n0", missing).await;
    let job = lab.push("n1", |_| ()).await;
    let view = lab.until(&job, |view| view.settled).await;
    assert_eq!((view.state.as_str(), view.exit), ("failed", 4));
    let why = view.failure.unwrap();
    assert_eq!((why.code.as_str(), why.node.as_str()), ("source_missing", "n0"));
    assert!(n1.orders().is_empty());

    let changed = Play {
        source_fails: Some(failure("source_changed")),
        ..Play::default()
    };
    let _n0 = n0.again(&lab, changed).await;
    let job = lab.push("n1", |_| ()).await;
    let view = lab.until(&job, |view| view.settled).await;
    assert_eq!((view.state.as_str(), view.exit), ("failed", 6));
    assert_eq!(states(&view), ["failed"]);
    n1.told(|order| matches!(order, Order::Cancel(_))).await;
}

#[tokio::test]
async fn expect_keeps_another_file_from_being_published() {
    let lab = Lab::start().await;
    let _agents = cluster(&lab, Play::default()).await;
    let expect = |byte: u8| {
        vec![v1::Expectation {
            path: Vec::new(),
            sha256: vec![byte; 32],
            md5: Vec::new(),
        }]
    };
    let job = lab.push("n1", |request| request.expect = expect(10)).await;
    let view = lab.until(&job, |view| view.settled).await;
    assert_eq!((view.state.as_str(), view.exit), ("failed", 6));
    assert_eq!(view.failure.unwrap().code, "unexpected");
    let job = lab.push("n1", |request| request.expect = expect(9)).await;
    let view = lab.until(&job, |view| view.settled).await;
    assert_eq!(
        (view.state.as_str(), view.exit, view.agrees.as_str()),
        ("done", 0, "sha256")
    );
}

#[tokio::test]
async fn a_silent_agent_is_away_and_a_cancel_lets_all_go() {
    let lab = Lab::start().await;
    let hold = Play {
        hold_final: true,
        ..Play::default()
    };
    let n0 = Agent::join(&lab, "n0", hold).await;
    let n1 = Agent::join(&lab, "n1", Play::default()).await;
    let silent = Play {
        silent: true,
        ..Play::default()
    };
    let _n2 = Agent::join(&lab, "n2", silent).await;
    let job = lab.push("n[1-2]", |_| ()).await;
    let view = lab.until(&job, |view| view.state == "running").await;
    assert_eq!(view.nodes[1].failure.clone().unwrap().code, "away");

    let reply = cancel(&lab, &job).await;
    assert_eq!((reply.failure, reply.ended.as_str()), (None, ""));
    assert!(reply.waiting.is_empty(), "all have done it: {:?}", reply.waiting);
    let view = lab.until(&job, |view| view.state == "cancelled").await;
    assert_eq!((view.exit, states(&view)), (7, vec!["cancelled"; 2]));
    for agent in [&n0, &n1] {
        // It was not answered before.
        let last = agent.orders().last().unwrap().order.clone();
        assert!(matches!(last, Some(Order::Cancel(_))), "{last:?}");
    }
    assert_eq!(cancel(&lab, &job).await.ended, "cancelled");
}

#[tokio::test]
async fn a_cancel_says_who_has_not_confirmed_it() {
    let lab = Lab::start().await;
    let hold = Play {
        hold_final: true,
        ..Play::default()
    };
    let _n0 = Agent::join(&lab, "n0", hold).await;
    let deaf = Play {
        deaf_to_cancel: true,
        ..Play::default()
    };
    let _n1 = Agent::join(&lab, "n1", Play::default()).await;
    let _n2 = Agent::join(&lab, "n2", deaf).await;
    let job = lab.push("n[1-2]", |_| ()).await;
    lab.until(&job, |view| view.state == "running").await;
    assert_eq!(cancel(&lab, &job).await.waiting, ["n2"]);
    lab.until(&job, |view| view.state == "cancelled").await;
}

async fn cancel(lab: &Lab, job: &str) -> v1::CancelReply {
    let request = v1::CancelRequest {
        hello: Some(stage_proto::version::hello()),
        job: job.to_owned(),
        nodes: String::new(),
    };
    lab.operator().await.cancel(request).await.unwrap().into_inner()
}

async fn retry(lab: &Lab, job: &str, from: &str) -> v1::RetryReply {
    let request = v1::RetryRequest {
        hello: Some(stage_proto::version::hello()),
        job: job.to_owned(),
        from: from.to_owned(),
        new_job: crate::lab::random_id(),
    };
    lab.operator().await.retry(request).await.unwrap().into_inner()
}

#[tokio::test]
async fn a_retry_asks_or_brings_it_to_the_rest_only() {
    let lab = Lab::start().await;
    let mut agents = cluster(&lab, Play::default()).await;
    let job = lab.push("n[1-2]", |_| ()).await;
    lab.until(&job, |view| view.state == "done").await;
    let reply = retry(&lab, &job, "").await;
    assert_eq!((reply.retried(), &reply.job), (v1::Retried::Nothing, &job));

    // Awaited: asked at once, although the next turn is half a minute away.
    let full = Play {
        unfit: Some(failure("no_space")),
        ..Play::default()
    };
    let n2 = agents.remove(2).again(&lab, full).await;
    let job = lab.push("n[1-2]", |_| ()).await;
    lab.until(&job, |view| view.state == "open" && view.settled).await;
    let asked = |agent: &Agent| {
        let orders = agent.orders();
        let of = orders.iter().filter(|order| order.job == job);
        of.filter(|order| matches!(order.order, Some(Order::PrepareTarget(_))))
            .count()
    };
    let before = asked(&n2);
    let reply = retry(&lab, &job, "").await;
    assert_eq!((reply.retried(), &reply.job), (v1::Retried::Asked, &job));
    lab.until(&job, |view| view.state == "open" && view.settled).await;
    assert_eq!(asked(&n2), before + 1);
    assert_eq!(retry(&lab, &job, "n3").await.failure.unwrap().code, "usage");

    // Ended without it: a new job, for that node alone.
    let job = lab
        .push("n[1-2]", |request| request.unfit = v1::UnfitRule::Skip.into())
        .await;
    lab.until(&job, |view| view.state == "partial").await;
    let n2 = n2.again(&lab, Play::default()).await;
    let reply = retry(&lab, &job, "n3").await;
    assert_eq!(reply.retried(), v1::Retried::Anew);
    assert_ne!(reply.job, job);
    let view = lab.until(&reply.job, |view| view.state == "done").await;
    assert_eq!((view.source.as_str(), view.nodes.len()), ("n3", 1));
    assert_eq!((view.nodes[0].node.as_str(), view.exit), ("n2", 0));
    n2.told(|order| matches!(order, Order::Release(_))).await;

    assert_eq!(retry(&lab, &job, "n77").await.failure.unwrap().code, "no_source");
    let unknown = retry(&lab, &crate::lab::random_id(), "").await;
    assert_eq!(unknown.failure.unwrap().code, "unknown_job");
}

#[tokio::test]
async fn a_newer_push_takes_over_what_is_still_open() {
    let lab = Lab::start().await;
    let _agents = cluster(&lab, Play::default()).await;
    let old = lab.push("n1,n4", |_| ()).await;
    lab.until(&old, |view| view.state == "open").await;
    let new = lab.push("n2,n4", |_| ()).await;
    let view = lab.until(&old, |view| view.state == "partial").await;
    assert_eq!(states(&view), ["published", "superseded"]);
    assert_eq!(view.nodes[1].superseded_by, new);
    lab.until(&new, |view| view.state == "open").await;
}

#[tokio::test]
async fn drained_nodes_do_not_count() {
    let lab = Lab::start().await;
    let _agents = cluster(&lab, Play::default()).await;
    let request = |drain| v1::DrainRequest {
        hello: Some(stage_proto::version::hello()),
        nodes: "n[2,4]".to_owned(),
        drain,
    };
    let reply = lab
        .operator()
        .await
        .drain(request(true))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        reply.nodes.iter().filter(|node| node.state == "drained").count(),
        2
    );
    let job = lab.push("n[1-2],n4", |_| ()).await;
    let view = lab.until(&job, |view| view.settled).await;
    assert_eq!((view.state.as_str(), view.exit), ("done", 0));
    assert_eq!(states(&view), ["published", "unfit", "unfit"]);
    assert!(view.nodes[1].drained);
    let reply = lab
        .operator()
        .await
        .drain(request(false))
        .await
        .unwrap()
        .into_inner();
    assert!(reply.nodes.iter().all(|node| node.state != "drained"));
}

#[tokio::test]
async fn a_submit_sent_twice_is_one_job() {
    let lab = Lab::start().await;
    let agents = cluster(&lab, Play::default()).await;
    let request = submit("n1");
    let mut operator = lab.operator().await;
    let first = operator.submit(request.clone()).await.unwrap().into_inner();
    let second = operator.submit(request.clone()).await.unwrap().into_inner();
    assert_eq!(first, second);
    assert_eq!(first.job, request.job);
    lab.until(&first.job, |view| view.state == "done").await;
    let third = operator.submit(request.clone()).await.unwrap().into_inner();
    assert_eq!(third, first);
    let prepares = agents[1]
        .orders()
        .iter()
        .filter(|order| matches!(order.order, Some(Order::PrepareTarget(_))))
        .count();
    assert_eq!(prepares, 1);
    let other = v1::SubmitRequest {
        paths: paths("/data/other.db"),
        ..request
    };
    let reply = operator.submit(other).await.unwrap().into_inner();
    assert_eq!(reply.failure.unwrap().code, "usage");
}

#[tokio::test]
async fn a_dry_run_plans_and_leaves_nothing() {
    let lab = Lab::start().await;
    let agents = cluster(&lab, Play::default()).await;
    let reply = lab
        .operator()
        .await
        .plan(submit("three"))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(reply.failure, None);
    assert_eq!(reply.plan.unwrap().hops.len(), 3);
    agents[0].told(|order| matches!(order, Order::Release(_))).await;
    assert!(agents[1].orders().is_empty());
    let group = lab
        .operator()
        .await
        .plan(submit("said"))
        .await
        .unwrap()
        .into_inner();
    assert!(
        group
            .failure
            .is_none_or(|failure| failure.message.contains("has not answered yet"))
    );
}

#[tokio::test]
async fn who_joins_is_part_of_what_is_under_way() {
    let lab = Lab::start().await;
    let _agents = cluster(&lab, Play::default()).await;
    let open = lab.push("n1,n4", |_| ()).await;
    lab.until(&open, |view| view.state == "open").await;
    let join = |request: &mut v1::SubmitRequest| request.set_join(v1::Join::OrMake);
    assert_eq!(lab.push("n4", join).await, open, "it comes there with that job");
    let only = |targets| {
        let mut request = submit(targets);
        request.set_join(v1::Join::Only);
        request
    };
    let mut operator = lab.operator().await;
    let reply = operator.submit(only("n4")).await.unwrap().into_inner();
    assert_eq!((reply.failure, reply.job), (None, open.clone()));
    let reply = operator.submit(only("n3")).await.unwrap().into_inner();
    assert_eq!(reply.failure.unwrap().code, "unknown_job");
    let all = v1::JobsRequest {
        hello: Some(stage_proto::version::hello()),
        limit: 0,
    };
    let jobs = operator.jobs(all).await;
    assert_eq!(
        jobs.map(|jobs| jobs.into_inner().jobs.len()).ok(),
        Some(1),
        "none was made"
    );
    // Not to n1, which has it: to bring it there again is another job.
    let other = lab.push("n1", join).await;
    assert_ne!(other, open);
    lab.until(&other, |view| view.settled).await;
    for change in [
        (|request| request.paths = paths("/data/other.db")) as fn(&mut v1::SubmitRequest),
        |request| request.dest = b"scratch:db".to_vec(),
        |request| request.targets = "n[2-4]".to_owned(),
    ] {
        let other = lab
            .push("n4", |request| {
                join(request);
                change(request);
            })
            .await;
        assert_ne!(other, open);
    }
}
