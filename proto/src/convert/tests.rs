//! What goes out comes in again, and what means nothing does not.

use std::time::Duration;

use stage_core::ask::{self, Copy, Question, Removal, Removed, Said, Wanted};
use stage_core::assignment::{
    Assignment, Cache, Final, IfExists, Order, Outcome, Peer, Place, Prepared, Progress, Run, SourceReport,
    SourceSpec, StreamChoice, TargetSpec,
};
use stage_core::bench::{
    Depth, DiskReading, HostReport, Keep, LinkProbe, LinkReading, NodeReading, RootSpace, Rtt, Side,
    StreamReading, Trace,
};
use stage_core::digest::{ChunkHash, Expected, FileDigest, Md5Digest, RootDigest};
use stage_core::failure::{Code, Failure};
use stage_core::id::{AskId, Epoch, JobId, JobKey, PlanVersion};
use stage_core::manifest::Manifest;
use stage_core::payload::{Expectation, Payload, SourcePath, Walk};
use stage_core::units::{ByteCount, Rate};
use stage_core::waits::{Reading, Receiving, Sending, Tcp, Waits};

use crate::v1;

fn run() -> Run {
    Run {
        key: JobKey([3; 32]),
        hash: ChunkHash::Blake3,
        payload: Payload::of(&Manifest::single_file(b"genome.db", ByteCount(77), 0o644, (5, 6))).unwrap(),
        source: Some(SourceSpec {
            paths: vec![SourcePath {
                path: b"/data/genome.db".to_vec(),
                name: b"genome.db".to_vec(),
            }],
            walk: Walk {
                follow: true,
                xattrs: false,
                include: vec!["*.db".to_owned()],
                exclude: Vec::new(),
            },
            limit: Some(Rate::from_bytes_per_second(1e6)),
            expect: vec![
                Expectation {
                    path: b"genome.db".to_vec(),
                    digest: Expected::Md5(Md5Digest([9; 16])),
                },
                Expectation {
                    path: Vec::new(),
                    digest: Expected::Sha256(FileDigest([8; 32])),
                },
            ],
            cache: Cache::Drop,
        }),
        target: Some(TargetSpec {
            place: Place::Root {
                root: Some("scratch".parse().unwrap()),
                dir: b"db".to_vec(),
            },
            if_exists: IfExists::Replace,
            unpack: true,
            keep_previous: Duration::from_secs(77),
            cache: Cache::Drop,
        }),
        parents: vec![Peer {
            node: "n0".parse().unwrap(),
            addresses: vec!["[::1]:7701".parse().unwrap()],
        }],
        streams: StreamChoice::Auto { least: 2, cap: 8 },
        wanted: Rate::from_bytes_per_second(1.25e9),
        congestion_control: Some("bbr".parse().unwrap()),
        children: vec!["n2".parse().unwrap()],
        limit: None,
        fin: Some(Final {
            root: RootDigest([9; 32]),
            chunks: 1,
            data: ByteCount(5),
        }),
    }
}

#[test]
fn assignments_survive_the_wire() {
    let orders = [
        Order::PrepareSource(run().source.unwrap()),
        Order::PrepareTarget {
            target: run().target.unwrap(),
            payload: run().payload,
            hash: ChunkHash::Sha256,
        },
        Order::Run(run()),
        Order::Run(Run {
            streams: StreamChoice::Fixed(4),
            source: None,
            target: None,
            fin: None,
            ..run()
        }),
        Order::Release { sha256: None },
        Order::Release {
            sha256: Some(FileDigest([8; 32])),
        },
        Order::Cancel,
    ];
    for order in orders {
        let assignment = Assignment {
            job: JobId::from_random([1; 16]),
            epoch: Epoch(4),
            version: PlanVersion(2),
            order,
        };
        assert_eq!(
            Assignment::try_from(&v1::Assignment::from(&assignment)).unwrap(),
            assignment
        );
    }
}

#[test]
fn what_a_peer_may_not_choose_is_refused() {
    let assignment = |change: fn(&mut v1::Run)| {
        let mut wire = v1::Run::from(&run());
        change(&mut wire);
        Run::try_from(&wire).unwrap_err().field
    };
    assert_eq!(assignment(|run| run.streams_cap = 0), "run.streams_cap");
    assert_eq!(assignment(|run| run.streams = 65), "run.streams");
    assert_eq!(assignment(|run| run.key.truncate(31)), "run.key");
    assert_eq!(assignment(|run| run.hash = 0), "run.hash");
    assert_eq!(assignment(|run| run.payload = None), "run.payload");
    let payload = |change: fn(&mut v1::Payload)| {
        let mut wire = v1::Payload::from(&run().payload);
        change(&mut wire);
        Payload::try_from(&wire).unwrap_err().field
    };
    assert_eq!(payload(|p| p.manifest.clear()), "payload.manifest");
    assert_eq!(payload(|p| p.inline.push(0)), "payload.inline");
    assert_eq!(payload(|p| p.units.clear()), "payload.units");
    assert_eq!(payload(|p| p.data_bytes = u64::MAX), "payload");
    assert_eq!(
        assignment(|run| run.source.as_mut().unwrap().paths[0].path = b"x".to_vec()),
        "source.paths"
    );
    assert_eq!(assignment(|run| run.target.as_mut().unwrap().cache = 9), "cache");
}

#[test]
fn reports_survive_the_wire() {
    let failure = Failure::new(Code::NoSpace, "short", "free some")
        .on(&"n1".parse().unwrap())
        .at("/scratch/x");
    let failure = Failure {
        space: Some(Box::new(stage_core::failure::Shortage {
            needs: ByteCount(11),
            short_by: ByteCount(9),
        })),
        ..failure
    };
    for outcome in [
        Outcome::Published {
            path: "/scratch/x".to_owned(),
            already: false,
            bytes_received: 7,
            took: Duration::from_millis(1500),
        },
        Outcome::Unfit(failure.clone()),
        Outcome::Failed(failure.clone()),
    ] {
        let wire = v1::Outcome {
            job: String::new(),
            outcome: Some((&outcome).into()),
        };
        assert_eq!(Outcome::try_from(&wire).unwrap(), outcome);
    }
    for prepared in [
        Prepared::Source {
            payload: run().payload,
        },
        Prepared::Ready {
            path: "/scratch/x".to_owned(),
            candidate: true,
        },
        Prepared::Skipped {
            path: "/scratch/x".to_owned(),
        },
        Prepared::Unfit(failure.clone()),
    ] {
        let wire = v1::Prepared {
            job: String::new(),
            version: 0,
            answer: Some((&prepared).into()),
        };
        assert_eq!(Prepared::try_from(&wire).unwrap(), prepared);
    }
    for report in [
        SourceReport::Final(run().fin.unwrap()),
        SourceReport::Sha256(FileDigest([8; 32])),
        SourceReport::Failed(failure),
    ] {
        let wire = v1::SourceReport {
            job: String::new(),
            report: Some((&report).into()),
        };
        assert_eq!(SourceReport::try_from(&wire).unwrap(), report);
    }
    let progress = Progress {
        chunks: 3,
        disk_time: Duration::from_millis(250),
        parent: Some("n0".parse().unwrap()),
        rtt: Some(Duration::from_millis(1)),
        walked: 7,
        waits: Waits {
            receiving: Receiving {
                upstream: Duration::from_secs(1),
                disk: Duration::from_secs(2),
                cpu: Duration::from_secs(3),
            },
            reading: Reading {
                disk: Duration::from_secs(4),
                limit: Duration::from_secs(5),
                idle: Duration::from_secs(6),
                cpu: Duration::from_secs(7),
            },
            sending: vec![(
                "n7".parse().unwrap(),
                Sending {
                    idle: Duration::from_secs(8),
                    network: Duration::from_secs(9),
                    disk: Duration::from_secs(10),
                    limit: Duration::from_secs(11),
                    cpu: Duration::from_secs(12),
                    tcp: Tcp {
                        busy: Duration::from_secs(13),
                        receiver: Duration::from_secs(14),
                        buffer: Duration::from_secs(15),
                        sent: ByteCount(16),
                        again: ByteCount(17),
                        rtt: Duration::from_secs(18),
                        delivery: Rate::from_bytes_per_second(19.0),
                    },
                },
            )],
        },
        ..Progress::default()
    };
    let wire = v1::JobProgress::of(JobId::from_random([1; 16]), &progress);
    assert_eq!(Progress::try_from(&wire).unwrap(), progress);
}

fn host() -> HostReport {
    HostReport {
        version: "1".to_owned(),
        kernel: "6".to_owned(),
        cpus: 2,
        load: 0.5,
        interface: "eth0".to_owned(),
        nic: Some(Rate::from_bits_per_second(1e10)),
        mtu: 9000,
        window_scaling: true,
        backlog: 1000,
        congestion_controls: vec!["cubic".to_owned(), "bbr".to_owned()],
        congestion_control: "cubic".to_owned(),
        descriptors: 1024,
        mtu_probing: true,
        governor: "powersave".to_owned(),
        unix_ms: 77,
        resolves_to: vec!["127.0.0.1".to_owned()],
        roots: vec![RootSpace {
            name: "main".parse().unwrap(),
            path: "/s".to_owned(),
            free: ByteCount(1),
            total: ByteCount(2),
            failure: Some(Failure::new(Code::RootUnusable, "x", "y")),
        }],
        ..HostReport::default()
    }
}

#[test]
fn questions_and_answers_survive_the_wire() {
    let removal = |place| {
        Question::Remove(Removal {
            place,
            name: b"genome.db".to_vec(),
            force: true,
        })
    };
    let probe = |side| {
        Question::ProbeLink(LinkProbe {
            id: JobId::from_random([1; 16]),
            key: JobKey([2; 32]),
            side,
        })
    };
    for question in [
        Question::List(Wanted::default()),
        Question::List(Wanted {
            path: Some(b"/scratch/x".to_vec()),
            digest: Some("abcd".parse().unwrap()),
            verify: true,
        }),
        removal(Place::Absolute(b"/scratch".to_vec())),
        Question::Host,
        Question::ProbeNode(Depth::Quick),
        probe(Side::Answer {
            from: "n0".parse().unwrap(),
        }),
        probe(Side::Measure {
            peer: Peer {
                node: "n1".parse().unwrap(),
                addresses: vec!["127.0.0.1:7701".parse().unwrap()],
            },
            depth: Depth::Full,
            sweep: true,
            keep: Keep {
                here: true,
                there: false,
            },
            control: Some("bbr".parse().unwrap()),
        }),
        removal(Place::Root {
            root: None,
            dir: b"db".to_vec(),
        }),
    ] {
        let wire = v1::Ask::of(AskId(7), &question);
        assert_eq!((wire.id, Question::try_from(&wire)), (7, Ok(question)));
    }
    let copy = Copy {
        path: "/scratch/x".to_owned(),
        place: "scratch:x".to_owned(),
        kind: ask::Kind::File,
        unpacked: true,
        sha256: Some(FileDigest([8; 32])),
        root: RootDigest([9; 32]),
        content: RootDigest([10; 32]),
        bytes: ByteCount(77),
        published: 1_700_000_000,
        job: JobId::from_random([1; 16]),
        found: true,
        state: ask::State::Damaged,
        detail: "chunk 3".to_owned(),
    };
    let unhashed = Copy {
        sha256: None,
        ..copy.clone()
    };
    for said in [
        Said::Copies(Vec::new()),
        Said::Copies(vec![copy, unhashed]),
        Said::Removed(Removed {
            path: "/scratch/x".to_owned(),
            was_there: true,
            bytes: ByteCount(77),
        }),
        Said::Progress(ask::Progress { done: 3, total: 9 }),
        Said::Host(Box::new(host())),
        Said::Node(Box::new(NodeReading {
            host: host(),
            disks: vec![DiskReading {
                root: "main".parse().unwrap(),
                write: Some(Rate::from_bytes_per_second(1e9)),
                read: None,
                skipped: "why".to_owned(),
            }],
            blake3: Rate::from_bytes_per_second(4e9),
            sha256: Rate::from_bytes_per_second(1e9),
            aes_gcm: Rate::ZERO,
        })),
        Said::Link(Box::new(LinkReading {
            rtt: Rtt::of(vec![Duration::from_millis(1)]),
            forward: vec![StreamReading {
                streams: 4,
                rate: Rate::from_bytes_per_second(1e9),
                bytes: ByteCount(5),
                retransmissions: 3,
                window: ByteCount(4096),
            }],
            backward: Vec::new(),
            forward_kept: None,
            backward_kept: Some(StreamReading {
                streams: 2,
                rate: Rate::from_bytes_per_second(1e8),
                bytes: ByteCount(6),
                retransmissions: 0,
                window: ByteCount(0),
            }),
            switches: vec!["s1".parse().unwrap()],
            trace: Trace {
                routers: vec![None, Some("10.0.0.1".parse().unwrap())],
                reached: true,
                mtu: 1400,
                swallows: true,
                from_second: true,
            },
            control: Some("bbr".parse().unwrap()),
        })),
        Said::Failed(Failure::new(Code::Exists, "x", "y")),
    ] {
        let wire = v1::Said::of(&said, true);
        assert!(wire.last);
        assert_eq!(Said::try_from(&wire).unwrap(), said);
    }
}
