//! Questions to nodes: one fans out, every node's last word comes, and nobody works for who has gone.

use std::collections::BTreeMap;

use stage_core::ask::{Copy, Kind, Progress, Removed, Said, State};
use stage_core::digest::{FileDigest, RootDigest};
use stage_core::failure::{Code, Failure};
use stage_core::id::JobId;
use stage_core::units::ByteCount;
use stage_proto::v1;
use stage_proto::v1::agent_message::Body;
use stage_proto::v1::ask::Question;
use tonic::Streaming;

use crate::agent::{Agent, Play};
use crate::lab::{DEADLINE, Lab, states};

fn copy(job: JobId, sha256: Option<u8>) -> Copy {
    Copy {
        path: "/scratch/genome.db".to_owned(),
        place: "scratch:genome.db".to_owned(),
        kind: Kind::File,
        unpacked: false,
        sha256: sha256.map(|byte| FileDigest([byte; 32])),
        root: RootDigest([7; 32]),
        content: RootDigest([7; 32]),
        bytes: ByteCount(3 << 20),
        published: 1_700_000_000,
        job,
        found: false,
        state: State::Ok,
        detail: String::new(),
    }
}

fn some_job() -> JobId {
    JobId::from_random([1; 16])
}

fn copies(copies: &[Copy], last: bool) -> v1::Said {
    v1::Said::of(&Said::Copies(copies.to_vec()), last)
}

fn list(nodes: &str) -> v1::ListRequest {
    v1::ListRequest {
        hello: Some(stage_proto::version::hello()),
        nodes: nodes.to_owned(),
        ..v1::ListRequest::default()
    }
}

/// What each node said, in order, with its last word at the end.
async fn all(mut said: Streaming<v1::NodeSaid>) -> BTreeMap<String, Vec<Said>> {
    let mut by_node: BTreeMap<String, (Vec<Said>, bool)> = BTreeMap::new();
    let collect = async {
        while let Some(part) = said.message().await.unwrap() {
            let wire = part.said.unwrap();
            let (parts, ended) = by_node.entry(part.node).or_default();
            assert!(!*ended, "nothing follows a last word");
            parts.push(Said::try_from(&wire).unwrap());
            *ended = wire.last;
        }
    };
    tokio::time::timeout(DEADLINE, collect).await.unwrap();
    by_node
        .into_iter()
        .map(|(node, (parts, ended))| {
            assert!(ended, "{node} owes a last word");
            (node, parts)
        })
        .collect()
}

async fn ask(lab: &Lab, request: v1::ListRequest) -> BTreeMap<String, Vec<Said>> {
    all(lab.operator().await.list(request).await.unwrap().into_inner()).await
}

fn failed(said: &[Said]) -> &Failure {
    match said {
        [Said::Failed(failure)] => failure,
        other => panic!("{other:?}"),
    }
}

fn with(says: fn(&v1::Ask) -> Vec<v1::Said>) -> Play {
    Play {
        says,
        ..Play::default()
    }
}

#[tokio::test]
async fn a_question_reaches_all_and_each_answer_comes_whole() {
    let lab = Lab::start().await;
    let n1 = Agent::join(&lab, "n1", with(|_| vec![copies(&[], true)])).await;
    let says = |_: &v1::Ask| {
        vec![
            v1::Said::of(&Said::Progress(Progress { done: 1, total: 2 }), false),
            copies(&[copy(some_job(), Some(5))], false),
            copies(&[copy(some_job(), Some(6))], true),
            copies(&[copy(some_job(), Some(7))], true),
        ]
    };
    let _n2 = Agent::join(&lab, "n2", with(says)).await;
    let mut request = list("three");
    request.path = b"genome.db".to_vec();
    request.digest = "0505".to_owned();
    request.verify = true;
    let heard = ask(&lab, request).await;
    assert_eq!(heard["n1"], [Said::Copies(Vec::new())]);
    assert_eq!(
        heard["n2"],
        [
            Said::Progress(Progress { done: 1, total: 2 }),
            Said::Copies(vec![copy(some_job(), Some(5))]),
            Said::Copies(Vec::new()),
        ],
        "one of another digest is not wanted"
    );
    assert_eq!(failed(&heard["n3"]).code, Code::Away);
    assert_eq!(heard.len(), 3);
    let asked = n1.memory.lock().unwrap().asks.clone();
    let [
        v1::Ask {
            question: Some(Question::List(wanted)),
            ..
        },
    ] = asked.as_slice()
    else {
        panic!("{asked:?}")
    };
    assert_eq!(
        (wanted.path.as_slice(), wanted.digest.as_str()),
        (&b"genome.db"[..], "0505")
    );
    assert!(wanted.verify);
}

#[tokio::test]
async fn what_cannot_be_asked_is_refused() {
    let lab = Lab::start().await;
    let code = async |request| {
        let status = lab.operator().await.list(request).await.unwrap_err();
        <v1::Failure as prost::Message>::decode(status.details())
            .unwrap()
            .code
    };
    assert_eq!(code(list("n9")).await, "unknown_target");
    let mut bad = list("all");
    bad.digest = "xyz".to_owned();
    assert_eq!(code(bad).await, "usage");
    let request = v1::RemoveRequest {
        hello: Some(stage_proto::version::hello()),
        nodes: "all".to_owned(),
        dest: b"../x".to_vec(),
        ..v1::RemoveRequest::default()
    };
    assert!(lab.operator().await.remove(request).await.is_err());
    assert_eq!(ask(&lab, list("")).await.len(), 5, "without nodes all are meant");
}

#[tokio::test]
async fn a_removal_is_told_where_and_what() {
    let lab = Lab::start().await;
    let says = |_: &v1::Ask| {
        let removed = Removed {
            path: "/scratch/db/x\u{1b}[2J".to_owned(),
            was_there: true,
            bytes: ByteCount(7),
        };
        vec![v1::Said::of(&Said::Removed(removed), true)]
    };
    let n1 = Agent::join(&lab, "n1", with(says)).await;
    let request = v1::RemoveRequest {
        hello: Some(stage_proto::version::hello()),
        nodes: "n1".to_owned(),
        dest: b"scratch:db/".to_vec(),
        name: b"x".to_vec(),
        force: true,
    };
    let heard = all(lab.operator().await.remove(request).await.unwrap().into_inner()).await;
    match heard["n1"].as_slice() {
        [Said::Removed(removed)] => assert!(!removed.path.contains('\u{1b}'), "{removed:?}"),
        other => panic!("{other:?}"),
    }
    let asked = n1.memory.lock().unwrap().asks.remove(0);
    let expected = v1::RemoveCopy {
        root: "scratch".to_owned(),
        dir: b"db".to_vec(),
        absolute: false,
        name: b"x".to_vec(),
        force: true,
    };
    assert_eq!(asked.question, Some(Question::Remove(expected)));
}

#[tokio::test]
async fn who_says_nothing_is_not_waited_for() {
    let lab = Lab::start().await;
    let silent = Agent::join(&lab, "n1", Play::default()).await;
    let _other = Agent::join(&lab, "n2", with(|_| vec![copies(&[], true)])).await;
    let heard = ask(&lab, list("n[1-2]")).await;
    assert_eq!(failed(&heard["n1"]).code, Code::Unreachable);
    assert_eq!(heard["n2"], [Said::Copies(Vec::new())]);
    withdrawn(&silent).await;
    // What it says now is nobody's answer.
    let id = silent.memory.lock().unwrap().asks[0].id;
    let answer = v1::Answer {
        id,
        said: Some(copies(&[], true)),
    };
    silent.say.send(Body::Answer(answer)).await.unwrap();
    assert_eq!(lab.nodes().await.len(), 5);
}

/// Waits until the agent has heard that its first question is nobody's any more.
async fn withdrawn(agent: &Agent) {
    let wait = async {
        loop {
            {
                let memory = agent.memory.lock().unwrap();
                if memory
                    .asks
                    .first()
                    .is_some_and(|ask| memory.withdrawn == [ask.id])
                {
                    return;
                }
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(DEADLINE, wait).await.unwrap();
}

async fn asked(agent: &Agent) {
    let wait = async {
        while agent.memory.lock().unwrap().asks.is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(DEADLINE, wait).await.unwrap();
}

#[tokio::test]
async fn nobody_works_for_who_has_gone() {
    let lab = Lab::start().await;
    let n1 = Agent::join(&lab, "n1", Play::default()).await;
    let mut request = list("n1");
    request.verify = true;
    let answers = lab.operator().await.list(request).await.unwrap().into_inner();
    asked(&n1).await;
    drop(answers);
    withdrawn(&n1).await;
}

#[tokio::test]
async fn a_session_that_ends_is_the_end_of_its_answers() {
    let lab = Lab::start().await;
    let n1 = Agent::join(&lab, "n1", Play::default()).await;
    let mut request = list("n1");
    request.verify = true;
    let answers = lab.operator().await.list(request).await.unwrap().into_inner();
    asked(&n1).await;
    n1.cut();
    drop(n1);
    assert_eq!(failed(&all(answers).await["n1"]).code, Code::Away);

    // The same agent in a new session has heard of no question.
    let n1 = Agent::join(&lab, "n2", Play::default()).await;
    let mut request = list("n2");
    request.verify = true;
    let answers = lab.operator().await.list(request).await.unwrap().into_inner();
    asked(&n1).await;
    let n1 = n1.again(&lab, Play::default()).await;
    assert_eq!(failed(&all(answers).await["n2"]).code, Code::Away);
    drop(n1);
}

#[tokio::test]
async fn the_digest_of_an_open_job_is_known_too() {
    let lab = Lab::start().await;
    let _n0 = Agent::join(&lab, "n0", Play::default()).await;
    let says = |ask: &v1::Ask| {
        // The path says which job: the agent was told nothing of its digest.
        let Some(Question::List(wanted)) = &ask.question else {
            return Vec::new();
        };
        let job = String::from_utf8(wanted.path.clone()).unwrap().parse().unwrap();
        vec![copies(&[copy(job, None), copy(some_job(), None)], true)]
    };
    let _n1 = Agent::join(&lab, "n1", with(says)).await;
    // n2 is away, so the job stays open.
    let job = lab.push("n[1-2]", |_| ()).await;
    lab.until(&job, |view| {
        view.state == "open" && states(view)[0] == "published"
    })
    .await;
    let mut request = list("n1");
    request.path = job.clone().into_bytes();
    request.digest = "0909".to_owned();
    let heard = ask(&lab, request).await;
    assert_eq!(
        heard["n1"],
        [Said::Copies(vec![copy(job.parse().unwrap(), Some(9))])]
    );
}
