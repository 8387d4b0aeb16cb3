//! Measuring: who is asked, with whom, what is kept, and what the next plan makes of it.

use std::time::Duration;

use stage_core::ask::Said;
use stage_core::bench::{
    DiskReading, HostReport, LinkReading, NodeReading, RootSpace, Rtt, StreamReading, Trace,
};
use stage_core::failure::{Code, Failure};
use stage_core::units::{ByteCount, Rate};
use stage_proto::v1;
use stage_proto::v1::ask::Question;
use stage_proto::v1::bench_event::Event;
use stage_proto::v1::probe_link::Side;
use tonic::Streaming;

use crate::agent::{Agent, Play};
use crate::lab::{DEADLINE, Lab, submit};

fn host(load: f64) -> HostReport {
    HostReport {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        cpus: 2,
        load,
        mtu: 1500,
        window_scaling: true,
        backlog: 10_000,
        descriptors: 65536,
        interface: "eth0".to_owned(),
        congestion_controls: vec!["cubic\u{1b}[2J".to_owned()],
        roots: vec![RootSpace {
            name: "scratch".parse().unwrap(),
            path: "/scratch".to_owned(),
            free: ByteCount(1 << 40),
            total: ByteCount(1 << 41),
            failure: None,
        }],
        ..HostReport::default()
    }
}

fn mb(rate: f64) -> Rate {
    Rate::from_bytes_per_second(rate * 1e6)
}

fn stream(mb_per_second: f64) -> StreamReading {
    StreamReading {
        streams: 1,
        window: ByteCount(0),
        rate: mb(mb_per_second),
        bytes: ByteCount(1 << 30),
        retransmissions: 0,
    }
}

/// What an agent answers whose disk writes so many MB/s.
fn answer(ask: &v1::Ask, load: f64, disk: f64) -> Vec<v1::Said> {
    answer_by(ask, load, disk, "10.0.0.254")
}

/// The same with this router on its way.
fn answer_by(ask: &v1::Ask, load: f64, disk: f64, router: &str) -> Vec<v1::Said> {
    let said = match ask.question.as_ref().unwrap() {
        Question::Host(_) => Said::Host(Box::new(host(load))),
        Question::ProbeNode(_) => Said::Node(Box::new(NodeReading {
            host: host(load),
            disks: vec![DiskReading {
                root: "scratch".parse().unwrap(),
                write: Some(mb(disk)),
                read: Some(mb(3000.0)),
                skipped: String::new(),
            }],
            blake3: mb(4000.0),
            sha256: mb(1000.0),
            aes_gcm: mb(3000.0),
        })),
        Question::ProbeLink(probe) => match probe.side.as_ref().unwrap() {
            // It goes on until it is told that nobody measures it.
            Side::AnswerTo(_) => return vec![v1::Said::of(&Said::Progress(Default::default()), false)],
            Side::Measure(measure) => Said::Link(Box::new(LinkReading {
                rtt: Rtt::of(vec![Duration::from_micros(150)]),
                forward: vec![stream(1100.0)],
                backward: Vec::new(),
                forward_kept: Some(stream(100.0)),
                backward_kept: None,
                // The coordinator knows better.
                switches: vec!["elsewhere".parse().unwrap()],
                trace: Trace {
                    routers: vec![router.parse().ok(), "127.0.0.11".parse().ok()],
                    reached: true,
                    mtu: 1400,
                    swallows: true,
                    from_second: false,
                },
                control: measure.congestion_control.parse().ok(),
            })),
        },
        _ => return Vec::new(),
    };
    vec![v1::Said::of(&said, true)]
}

fn with(says: fn(&v1::Ask) -> Vec<v1::Said>) -> Play {
    Play {
        says,
        ..Play::default()
    }
}

fn fine(ask: &v1::Ask) -> Vec<v1::Said> {
    answer(ask, 0.1, 2000.0)
}

fn slow(ask: &v1::Ask) -> Vec<v1::Said> {
    answer(ask, 0.1, 180.0)
}

fn rerouted(ask: &v1::Ask) -> Vec<v1::Said> {
    answer_by(ask, 0.1, 2000.0, "10.0.7.254")
}

fn loaded(ask: &v1::Ask) -> Vec<v1::Said> {
    answer(ask, 7.5, 2000.0)
}

fn request(nodes: &str) -> v1::BenchRequest {
    v1::BenchRequest {
        hello: Some(stage_proto::version::hello()),
        nodes: nodes.to_owned(),
        depth: "quick".to_owned(),
        ..v1::BenchRequest::default()
    }
}

async fn heard(mut events: Streaming<v1::BenchEvent>) -> Vec<Event> {
    let collect = async {
        let mut all = Vec::new();
        while let Some(event) = events.message().await.unwrap() {
            all.push(event.event.unwrap());
        }
        all
    };
    tokio::time::timeout(DEADLINE, collect).await.unwrap()
}

async fn bench(lab: &Lab, request: v1::BenchRequest) -> Vec<Event> {
    heard(lab.operator().await.bench(request).await.unwrap().into_inner()).await
}

async fn doctor(lab: &Lab, nodes: &str) -> Vec<v1::NodeFindings> {
    let request = v1::DoctorRequest {
        hello: Some(stage_proto::version::hello()),
        nodes: nodes.to_owned(),
    };
    let mut told = lab.operator().await.doctor(request).await.unwrap().into_inner();
    let mut findings = Vec::new();
    while let Some(node) = told.message().await.unwrap() {
        findings.push(node);
    }
    findings
}

fn measured(events: &[Event]) -> Vec<(&str, &str)> {
    events
        .iter()
        .filter_map(|event| match event {
            Event::Measured(measured) => Some((measured.node.as_str(), measured.to.as_str())),
            _ => None,
        })
        .collect()
}

fn remarks<'a>(events: &'a [Event], kind: &str) -> Vec<&'a str> {
    events
        .iter()
        .filter_map(|event| match event {
            Event::Remark(remark) if remark.kind == kind => Some(remark.text.as_str()),
            _ => None,
        })
        .collect()
}

fn skipped(events: &[Event]) -> Vec<(&str, &str, bool)> {
    events
        .iter()
        .filter_map(|event| match event {
            Event::Skipped(skipped) => Some((
                skipped.node.as_str(),
                skipped.failure.as_ref().unwrap().code.as_str(),
                skipped.is_polite,
            )),
            _ => None,
        })
        .collect()
}

#[tokio::test]
async fn what_is_measured_is_kept_and_planned_with() {
    let mut lab = Lab::start().await;
    let n0 = Agent::join(&lab, "n0", with(fine)).await;
    let n1 = Agent::join(&lab, "n1", with(slow)).await;
    let n2 = Agent::join(&lab, "n2", with(loaded)).await;
    let events = bench(&lab, request("n[0-3]")).await;
    assert_eq!(measured(&events), [("n0", ""), ("n1", ""), ("n0", "n1")]);
    let mut left = skipped(&events);
    left.sort_unstable();
    assert_eq!(left, [("n2", "busy", true), ("n3", "away", false)]);
    assert!(
        !format!("{events:?}").contains('\u{1b}'),
        "texts are fit for a terminal"
    );
    assert_eq!(
        remarks(&events, "verdict"),
        [
            "n1 takes turns: from the network to the disk 100 MB/s, where side by side would give 180 MB/s and in \
             turns 155 MB/s",
            "n1: its disk writes 180 MB/s; the way from n0 to n1 could carry 1.10 GB/s"
        ]
    );
    let switches = events.iter().find_map(|event| match event {
        Event::Measured(measured) => Some(measured.link.as_ref()?.switches.clone()),
        _ => None,
    });
    assert_eq!(switches.unwrap(), ["s"]);
    // Both ends have one key; the other side is told when it is over.
    let probe = |agent: &Agent| {
        let memory = agent.memory.lock().unwrap();
        memory.asks.iter().find_map(|ask| match &ask.question {
            Some(Question::ProbeLink(probe)) => Some((ask.id, probe.clone())),
            _ => None,
        })
    };
    let ((_, measures), (id, answers)) = (probe(&n0).unwrap(), probe(&n1).unwrap());
    assert_eq!((&measures.id, &measures.key), (&answers.id, &answers.key));
    assert_eq!(answers.side, Some(Side::AnswerTo("n0".to_owned())));
    let Some(Side::Measure(measure)) = &measures.side else {
        panic!("{measures:?}")
    };
    assert!(measure.keep_here && measure.keep_there, "the disk of each, once");
    let withdrawn = async {
        while !n1.memory.lock().unwrap().withdrawn.contains(&id) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(DEADLINE, withdrawn).await.unwrap();
    assert_eq!(probe(&n2), None, "who is busy is not asked");

    // A restart forgets nothing, and a plan is made from it.
    lab.end().await.unwrap();
    lab.begin().await.unwrap();
    let _n0 = n0.again(&lab, with(rerouted)).await;
    let _n1 = n1.again(&lab, with(slow)).await;
    let mut show = request("n[0-1]");
    show.show = true;
    let shown = bench(&lab, show).await;
    assert_eq!(measured(&shown), measured(&events));
    let reply = lab
        .operator()
        .await
        .plan(submit("n1"))
        .await
        .unwrap()
        .into_inner();
    let plan = reply.plan.unwrap();
    assert!(plan.hops[0].limited_by.contains("disk of n1"), "{plan:?}");
    assert_eq!(plan.hops[0].bytes_per_second, 1.8e8);

    // Measured again, the way is another one; only links are.
    let mut links = request("n[0-1]");
    links.links_only = true;
    let events = bench(&lab, links).await;
    assert_eq!(measured(&events), [("n0", "n1")]);
    assert_eq!(
        remarks(&events, "route"),
        ["packets from n0 to n1 pass 10.0.7.254, 127.0.0.11 now; before, they passed 10.0.0.254, 127.0.0.11"]
    );
    let told = doctor(&lab, "n[0-1]").await;
    let path = |node: &v1::NodeFindings| node.findings.iter().any(|found| found.check == "path_mtu");
    assert!(told.iter().all(path), "{told:?}");
}

#[tokio::test]
async fn a_link_that_cannot_be_measured_says_why_and_another_bench_waits_its_turn() {
    let lab = Lab::start().await;
    let refuses = |ask: &v1::Ask| match ask.question.as_ref().unwrap() {
        Question::ProbeLink(_) => {
            let failure = Failure::new(Code::Unreachable, "n1 is behind a wall", "look at the firewall");
            vec![v1::Said::of(&Said::Failed(failure), true)]
        }
        _ => fine(ask),
    };
    let _n0 = Agent::join(&lab, "n0", with(refuses)).await;
    // n1 says nothing once it is asked to be measured.
    let mute = |ask: &v1::Ask| match ask.question.as_ref().unwrap() {
        Question::ProbeLink(_) => Vec::new(),
        _ => fine(ask),
    };
    let _n1 = Agent::join(&lab, "n1", with(mute)).await;
    let events = bench(&lab, request("n[0-1]")).await;
    assert_eq!(skipped(&events), [("n0", "unreachable", false)]);
    assert_eq!(measured(&events), [("n0", ""), ("n1", "")]);

    let silent = with(|ask| match ask.question.as_ref().unwrap() {
        Question::Host(_) => fine(ask),
        _ => Vec::new(),
    });
    let n2 = Agent::join(&lab, "n2", silent).await;
    let mut first = lab
        .operator()
        .await
        .bench(request("n2"))
        .await
        .unwrap()
        .into_inner();
    first.message().await.unwrap();
    let refused = lab.operator().await.bench(request("n0")).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
    // Nobody waits for the first any more: its questions are withdrawn, and the next has its turn.
    drop(first);
    let turn = async {
        while lab.operator().await.bench(request("n0")).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(DEADLINE, turn).await.unwrap();
    assert!(!n2.memory.lock().unwrap().asks.is_empty());
}

#[tokio::test]
async fn a_doctor_compares_what_hosts_say_with_what_is_known() {
    let lab = Lab::start().await;
    let odd = |ask: &v1::Ask| {
        let sick = HostReport {
            version: "0.0.1".to_owned(),
            descriptors: 256,
            nic: Some(Rate::from_bits_per_second(1e9)),
            ..host(0.1)
        };
        match ask.question.as_ref().unwrap() {
            Question::Host(_) => vec![v1::Said::of(&Said::Host(Box::new(sick)), true)],
            _ => Vec::new(),
        }
    };
    let _n0 = Agent::join(&lab, "n0", with(fine)).await;
    let _n1 = Agent::join(&lab, "n1", with(odd)).await;
    let nodes = doctor(&lab, "n[0-2]").await;
    let checks = |at: usize| -> Vec<&str> {
        nodes[at]
            .findings
            .iter()
            .map(|found| found.check.as_str())
            .collect()
    };
    assert_eq!(checks(0), [""; 0], "{:?}", nodes[0]);
    assert_eq!(checks(1), ["version", "nic", "descriptors"]);
    assert_eq!(nodes[2].failure.as_ref().unwrap().code, "away");
}
