//! Who and what is refused, and how it is told.

use std::sync::Arc;

use stage_proto::v1;
use tonic::Code;

use crate::agent::{Agent, Play, register};
use crate::lab::{Lab, paths, random_id, submit};

async fn refusal(lab: &Lab, change: impl FnOnce(&mut v1::Register)) -> v1::Failure {
    let mut register = register("n1");
    change(&mut register);
    let agent = Agent::dial(lab, register, Play::default(), Arc::default()).await;
    agent.refused().await
}

#[tokio::test]
async fn agents_that_do_not_belong_are_told_why_and_shown() {
    let lab = Lab::start().await;
    let spoken = refusal(&lab, |register| {
        register.hello = Some(v1::Hello {
            protocol_min: 7,
            protocol_max: 9,
            ..v1::Hello::default()
        });
    })
    .await;
    assert_eq!(spoken.code, "protocol_version");
    let n1 = |nodes: Vec<(String, String)>| -> Vec<String> {
        nodes
            .into_iter()
            .filter(|(node, _)| node == "n1")
            .map(|(_, state)| state)
            .collect()
    };
    assert_eq!(n1(lab.nodes().await), ["refused"]);

    let foreign = refusal(&lab, |register| register.cluster_id = random_id()).await;
    assert_eq!(foreign.code, "foreign_cluster");
    assert!(foreign.hint.contains("state directory"));

    let stranger = refusal(&lab, |register| register.node = "n9".to_owned()).await;
    assert_eq!(stranger.code, "unknown_target");
    assert!(
        lab.nodes()
            .await
            .contains(&("n9".to_owned(), "refused".to_owned()))
    );

    let malformed = refusal(&lab, |register| register.instance = "?".to_owned()).await;
    assert_eq!(malformed.code, "usage");

    let first = Agent::join(&lab, "n1", Play::default()).await;
    let taken = refusal(&lab, |_| ()).await;
    assert_eq!((taken.code.as_str(), taken.node.as_str()), ("name_taken", "n1"));
    assert_eq!(n1(lab.nodes().await), ["up", "refused"]);

    // The first keeps its name, and gets it back at once in a new session.
    let again = first.again(&lab, Play::default()).await;
    assert_eq!(n1(lab.nodes().await), ["up"]);
    again.cut();
    // A connection that broke is no proof that the agent is dead.
    assert_eq!(refusal(&lab, |_| ()).await.code, "name_taken");
}

#[tokio::test]
async fn a_higher_epoch_ends_this_coordinator() {
    let mut lab = Lab::start().await;
    let mut register = register("n1");
    register.epoch = 99;
    let _agent = Agent::dial(&lab, register, Play::default(), Arc::default()).await;
    let error = lab.ended().await.unwrap_err();
    assert_eq!(error.exit_code(), 75, "{error}");
    assert!(!error.is_retryable());
}

#[tokio::test]
async fn requests_that_cannot_be_make_no_job() {
    let lab = Lab::start().await;
    let mut operator = lab.operator().await;
    type Change = fn(&mut v1::SubmitRequest);
    let cases: [(&str, Change); 6] = [
        ("unknown_target", |r| r.targets = "nobody".to_owned()),
        ("no_source", |r| r.from = String::new()),
        ("usage", |r| r.paths = paths("/data/.stage-x")),
        ("usage", |r| r.dest = b"nowhere".to_vec()),
        ("usage", |r| r.shape = "ring".to_owned()),
        ("usage", |r| r.job = "7".to_owned()),
    ];
    for (code, change) in cases {
        let mut request = submit("n1");
        change(&mut request);
        let reply = operator.submit(request).await.unwrap().into_inner();
        assert_eq!(reply.job, "");
        assert_eq!(reply.failure.unwrap().code, code);
    }
    let hello = Some(stage_proto::version::hello());
    let jobs = operator
        .jobs(v1::JobsRequest {
            hello: hello.clone(),
            limit: 0,
        })
        .await
        .unwrap();
    assert!(jobs.into_inner().jobs.is_empty());

    let unknown = v1::WatchRequest {
        hello,
        job: random_id(),
    };
    let status = operator.watch(unknown).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    let failure: v1::Failure = prost::Message::decode(status.details()).unwrap();
    assert_eq!(failure.code, "unknown_job");

    let status = operator
        .nodes(v1::NodesRequest { hello: None })
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::FailedPrecondition);
}

#[tokio::test]
async fn a_topology_with_errors_says_all_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let topology = dir.path().join("topology.toml");
    let config = stage_coordinator::Config {
        topology: topology.clone(),
        listen: "127.0.0.1:0".parse().unwrap(),
        state: dir.path().join("state"),
        chunk_hash: Default::default(),
    };
    let start = || stage_coordinator::Coordinator::start(config.clone(), stage_net::Net::insecure(false));
    let error = start().await.err().unwrap();
    assert_eq!(error.exit_code(), 78);
    std::fs::write(&topology, "[cluster]\nname = \"c\"\nshape = 3\n").unwrap();
    let error = start().await.err().unwrap();
    assert_eq!(error.exit_code(), 78);
    let stage_coordinator::Error::Topology(errors) = error else {
        panic!("{error}")
    };
    assert!(!errors.is_empty());
    assert!(!dir.path().join("state").exists());
}

#[tokio::test]
async fn certificates_say_who_may_what() {
    use stage_net::authority::Authority;
    use stage_net::{Net, Role};
    use stage_proto::v1::agent_message::Body;
    use stage_proto::v1::coordinator_message::Body as Down;
    use tokio_stream::StreamExt as _;

    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new("c1").unwrap();
    let net = |role: Role| {
        let files = authority.write(dir.path(), role).unwrap();
        Net::tls(&files.ca, &files.cert, &files.key).unwrap()
    };
    let topology = dir.path().join("topology.toml");
    let text = "[cluster]\nname = \"c1\"\n[[switch]]\nname = \"s\"\n[[node]]\nname = \"n[0-1]\"\n\
                address = \"127.0.0.[10-11]\"\nattach = \"s\"\nnic = \"1 Gbit/s\"\n[roots]\nscratch = \"/s\"\n";
    std::fs::write(&topology, text).unwrap();
    let config = stage_coordinator::Config {
        topology,
        listen: "127.0.0.1:0".parse().unwrap(),
        state: dir.path().join("state"),
        chunk_hash: Default::default(),
    };
    let alice = Role::Operator("alice".to_owned());
    let refused = stage_coordinator::Coordinator::start(config.clone(), net(alice)).await;
    let error = refused.err().unwrap();
    assert_eq!(error.exit_code(), 78);
    assert!(error.to_string().contains("coordinator.c1.stage"), "{error}");
    let coordinator = stage_coordinator::Coordinator::start(config, net(Role::Coordinator))
        .await
        .unwrap();
    let url = format!("https://{}", coordinator.address()).parse().unwrap();
    let stop = tokio_util::sync::CancellationToken::new();
    let server = tokio::spawn(coordinator.run(stop.clone()));
    let alice = stage_net::grpc::connect(&net(Role::Operator("alice".to_owned())), &url)
        .await
        .unwrap();
    let n1 = stage_net::grpc::connect(&net(Role::Node("n1".parse().unwrap())), &url)
        .await
        .unwrap();

    let nodes = || v1::NodesRequest {
        hello: Some(stage_proto::version::hello()),
    };
    let operator = v1::operator_client::OperatorClient::new;
    assert!(operator(alice.clone()).nodes(nodes()).await.is_ok());
    let denied = operator(n1.clone()).nodes(nodes()).await.unwrap_err();
    assert_eq!(denied.code(), Code::PermissionDenied);

    let register = |node: &str| {
        let body = Some(Body::Register(register(node)));
        // It stays open, as an agent's does.
        tokio_stream::iter([v1::AgentMessage { body }]).chain(tokio_stream::pending())
    };
    let fleet = v1::fleet_client::FleetClient::new;
    let denied = fleet(alice).session(register("n1")).await.unwrap_err();
    assert_eq!(denied.code(), Code::PermissionDenied);
    let first = async |node: &str| {
        let mut down = fleet(n1.clone())
            .session(register(node))
            .await
            .unwrap()
            .into_inner();
        down.message().await.unwrap().unwrap().body.unwrap()
    };
    match first("n0").await {
        Down::Refused(failure) => assert_eq!(failure.code, "denied"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(first("n1").await, Down::Welcome(_)));
    stop.cancel();
    server.await.unwrap().unwrap();
}
