//! Who should not come in, and does not; and who came in and then does not keep to the protocol.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use stage_core::assignment::Peer;
use stage_core::chunk::{CHUNK, ChunkIndex};
use stage_core::digest::{ChunkDigest, ChunkHash, RootDigest, RootHasher, chunk_digest};
use stage_core::failure::{Code, Failure};
use stage_core::id::{Epoch, HopId, JobKey, PlanVersion};
use stage_core::plan::WindowLimits;
use stage_net::Role;
use stage_transfer::TransferError;
use stage_transfer::frame::{Header, ToChild, ToParent, encode};
use stage_transfer::hello::{self, Answer, ConnKind, Hello, Prelude, Welcome};
use stage_transfer::inbound::HopEvent;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::{JoinHandle, JoinSet};

use crate::bench::{Bench, Receiving, name, soon, until};

async fn stuck(mut receiving: Receiving) -> Failure {
    let event = receiving.event().await;
    receiving.inbound.stop().await;
    match event {
        HopEvent::Stuck(failure) => failure,
        other => panic!("{other:?}"),
    }
}

async fn wrong_key(bench: &Bench) {
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    let source = bench.source(&n0, &["n1"]).await;
    let target = bench.target(&n1);
    let key = JobKey([9; 32]);
    let failure = stuck(bench.receive_with(&n1, target.store(), vec![n0.peer()], 1, key)).await;
    assert_eq!(failure.code, Code::Denied);
    assert!(failure.message.contains("key"), "{failure}");
    assert_eq!(source.source.counters().serving.children, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_key_is_denied() {
    wrong_key(&Bench::tls(CHUNK)).await;
    wrong_key(&Bench::insecure(CHUNK)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_under_a_foreign_name_is_denied() {
    let bench = Bench::tls(CHUNK);
    let n0 = bench.node("n0");
    let _source = bench.source(&n0, &["n1"]).await;
    // Its certificate says n9.
    let liar = bench.node_with("n1", bench.net("n9"), 4);
    let target = bench.target(&liar);
    let failure = stuck(bench.receive(&liar, target.store(), vec![n0.peer()], 1)).await;
    assert_eq!(failure.code, Code::Denied);
    assert!(failure.message.contains("n9"), "{failure}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parent_that_is_another_node_is_not_taken() {
    for bench in [Bench::tls(CHUNK), Bench::insecure(CHUNK)] {
        let (n0, n1) = (bench.node("n0"), bench.node("n1"));
        let _source = bench.source(&n0, &["n1"]).await;
        let target = bench.target(&n1);
        let wrong = Peer {
            node: name("n7"),
            addresses: n0.plane.addresses().to_vec(),
        };
        let failure = stuck(bench.receive(&n1, target.store(), vec![wrong], 1)).await;
        assert_eq!(failure.code, Code::Denied, "{failure:?}");
        assert_eq!(target.store().have().len(), 0);
    }
}

fn foreign_prelude() -> [u8; Prelude::LEN] {
    let mut prelude = Prelude::ours();
    prelude.protocol_min = 70;
    prelude.protocol_max = 90;
    prelude.encode()
}

#[tokio::test(flavor = "multi_thread")]
async fn another_protocol_version_is_a_typed_refusal_on_both_sides() {
    let bench = Bench::insecure(CHUNK);
    let n1 = bench.node("n1");
    let target = bench.target(&n1);
    // A parent of another version.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let parent = std::thread::spawn(move || {
        let (mut conn, _) = listener.accept().unwrap();
        conn.write_all(&foreign_prelude()).unwrap();
        let mut theirs = [0; Prelude::LEN];
        conn.read_exact(&mut theirs).unwrap();
        Prelude::decode(&theirs).unwrap()
    });
    let peer = Peer {
        node: name("n0"),
        addresses: vec![address],
    };
    let failure = stuck(bench.receive(&n1, target.store(), vec![peer], 1)).await;
    assert_eq!(failure.code, Code::ProtocolVersion);
    assert!(failure.message.contains("70 to 90"), "{failure}");
    // The other side can tell as well: the child has said its versions before it left.
    let theirs = parent.join().unwrap();
    let ours = Prelude::decode(&foreign_prelude()).unwrap();
    let refused = ours.agree(&theirs).unwrap_err().into_failure(&name("n1"));
    assert_eq!(refused.code, Code::ProtocolVersion);

    // A child of another version: it is told ours, and then the connection ends.
    let address = n1.plane.addresses()[0];
    let child = tokio::task::spawn_blocking(move || {
        let mut conn = TcpStream::connect(address).unwrap();
        let mut theirs = [0; Prelude::LEN];
        conn.read_exact(&mut theirs).unwrap();
        conn.write_all(&foreign_prelude()).unwrap();
        assert_eq!(conn.read(&mut [0]).unwrap(), 0);
        Prelude::decode(&theirs).unwrap()
    });
    let theirs = child.await.unwrap();
    assert!(ours.agree(&theirs).is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_that_says_nothing_or_nonsense_keeps_nobody_out() {
    for bench in [Bench::tls(8 * CHUNK), Bench::insecure(8 * CHUNK)] {
        let (n0, n1) = (bench.node("n0"), bench.node("n1"));
        let mut source = bench.source(&n0, &["n1"]).await;
        let address = n0.plane.addresses()[0];
        let mut crowd = Vec::new();
        for number in 0..200 {
            let mut conn = TcpStream::connect(address).unwrap();
            match number % 3 {
                0 => {}
                1 => conn.write_all(&[number as u8]).unwrap(),
                _ => {
                    let _ = conn.write_all(&[number as u8; 5000]);
                }
            }
            crowd.push(conn);
        }
        let target = bench.target(&n1);
        let mut receiving = bench.receive(&n1, target.store(), vec![n0.peer()], 2);
        receiving.complete().await;
        bench.published(target, source.fin().await).await;
        drop(crowd);
    }
}

/// A parent that lets everyone in with the right proof, and then says and sends what it is told to.
async fn fake_parent(bench: &Bench, said: Vec<u8>, sent: Vec<u8>) -> (Peer, JoinHandle<()>) {
    let listener = bench.net("n0").listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let peer = Peer {
        node: name("n0"),
        addresses: vec![listener.address()],
    };
    let key = bench.key.clone();
    let chunks = u32::try_from(bench.size().div_ceil(CHUNK)).unwrap();
    let task = tokio::spawn(async move {
        let mut open = Vec::new();
        loop {
            let Ok(mut conn) = listener.accept().await.handshake().await else {
                continue;
            };
            let Ok(asked) = hello::listen(&mut conn).await else {
                continue;
            };
            let welcome = Answer::Welcome(Welcome {
                node: name("n0"),
                windows: WindowLimits::default(),
                chunks,
            });
            asked.answer(&mut conn, Some(&key), &welcome).await.unwrap();
            let bytes = match asked.hello.kind {
                ConnKind::Control => &said,
                ConnKind::Data { .. } => &sent,
                ConnKind::Probe => panic!("nothing is measured here"),
            };
            // The child may have had enough before all is said.
            let _ = conn.write_all(bytes).await;
            let _ = conn.flush().await;
            open.push(conn);
        }
    });
    (peer, task)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parent_that_breaks_the_protocol_is_left() {
    let bench = Bench::insecure(6 * CHUNK + 5);
    let (good, n1) = (bench.node("n9"), bench.node("n1"));
    let mut source = bench.source(&good, &["n1"]).await;
    let header = |index, len| {
        let digest = ChunkDigest([0; 32]);
        let index = ChunkIndex(index);
        Header { index, len, digest }.encode().to_vec()
    };
    let full = u32::try_from(CHUNK).unwrap();
    let beyond = vec![(ChunkIndex(7), ChunkDigest([0; 32]))];
    let corrupt = [header(0, full), vec![7; CHUNK as usize]].concat();
    // A message that claims 4 GiB, one that is none, an offer past the end; a chunk past the end, one that claims to
    // be larger than it can be, one of another length than it has, bytes that are not the digest's.
    let cases = [
        (vec![0xff; 64], Vec::new()),
        ([4, 0, 0, 0, 0xee, 0xee, 0xee, 0xee].to_vec(), Vec::new()),
        (encode(&ToChild::Offer(beyond)).unwrap(), Vec::new()),
        (Vec::new(), header(7, full)),
        (Vec::new(), header(0, u32::MAX)),
        (Vec::new(), header(6, full)),
        (Vec::new(), corrupt),
    ];
    for (case, (said, sent)) in cases.into_iter().enumerate() {
        let target = bench.target(&n1);
        let (bad, task) = fake_parent(&bench, said, sent).await;
        let mut receiving = bench.receive(&n1, target.store(), vec![bad, good.peer()], 2);
        let events = receiving.complete().await;
        let last = crate::bench::parents(&events).pop();
        assert_eq!(last.as_deref(), Some("n9"), "case {case}: {events:?}");
        assert_eq!(target.store().root().unwrap(), source_root(&bench), "case {case}");
        receiving.inbound.stop().await;
        target.discard().unwrap();
        task.abort();
    }
    source.fin().await;
}

fn source_root(bench: &Bench) -> RootDigest {
    let mut root = RootHasher::new(bench.manifest.digest());
    for chunk in bench.bytes.chunks(CHUNK as usize) {
        root.push(chunk_digest(ChunkHash::Blake3, chunk));
    }
    root.finish()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_that_breaks_the_protocol_is_alone_in_it() {
    let bench = Bench::insecure(4 * CHUNK);
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    let mut source = bench.source(&n0, &["n1"]).await;
    let address = n0.plane.addresses()[0];
    let net = bench.net("n7");
    let hello = |kind, hop: u8| Hello {
        job: bench.job,
        hop: HopId::from_random([hop; 16]),
        kind,
        node: name("n7"),
        rank: (Epoch(1), PlanVersion(1)),
        tried_others: true,
        control: None,
    };
    let ask = async |hello: &Hello| {
        let mut conn = net.dial(address, &Role::Node(name("n0")), None).await.unwrap();
        let answer = hello::ask(&mut conn, &bench.key, hello, &name("n0")).await;
        answer.map(|_| conn)
    };
    let wanted = vec![ChunkIndex(u32::MAX), ChunkIndex(4)];
    let talk = [
        encode(&ToParent::Have(vec![(3, 1), (0, u32::MAX), (u32::MAX, 0)])).unwrap(),
        encode(&ToParent::Start { offers: true }).unwrap(),
        encode(&ToParent::Start { offers: false }).unwrap(),
        encode(&ToParent::Kept(wanted.clone())).unwrap(),
        encode(&ToParent::Want(wanted)).unwrap(),
        encode(&ToParent::StreamEnded { stream: 77 }).unwrap(),
        encode(&ToParent::Digests {
            from: ChunkIndex(u32::MAX),
            count: u32::MAX,
        })
        .unwrap(),
        vec![0xff; 9],
    ];
    let mut control = ask(&hello(ConnKind::Control, 1)).await.unwrap();
    control.write_all(&talk.concat()).await.unwrap();
    // The parent answers what it can, and ends the hop at the nonsense.
    soon("the end", async {
        let mut buf = [0; 4096];
        while control.read(&mut buf).await.is_ok_and(|read| read > 0) {}
    })
    .await;
    until("no child", || source.source.counters().serving.children == 0).await;
    // A data connection of a hop that is over.
    let refused = ask(&hello(ConnKind::Data { stream: 0 }, 1)).await;
    assert!(matches!(refused, Err(TransferError::Refused(_))));
    // More data connections than anyone needs: the parent takes 64, and no two of one number.
    let _control = ask(&hello(ConnKind::Control, 2)).await.unwrap();
    let mut open = JoinSet::new();
    for stream in (0..70).chain([0]) {
        let mut conn = ask(&hello(ConnKind::Data { stream }, 2)).await.unwrap();
        open.spawn(async move { conn.read(&mut [0]).await.is_ok_and(|read| read > 0) });
    }
    for _ in 0..7 {
        let brought = soon("an end", open.join_next()).await.unwrap().unwrap();
        assert!(!brought);
    }
    // The others stand.
    assert!(open.try_join_next().is_none());
    assert_eq!(open.len(), 64);
    // A well-behaved child gets all meanwhile.
    let target = bench.target(&n1);
    let mut receiving = bench.receive(&n1, target.store(), vec![n0.peer()], 2);
    receiving.complete().await;
    bench.published(target, source.fin().await).await;
}
