//! Who should not come in, and does not.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use stage_core::assignment::Peer;
use stage_core::chunk::CHUNK;
use stage_core::failure::{Code, Failure};
use stage_core::id::JobKey;
use stage_transfer::hello::Prelude;
use stage_transfer::inbound::HopEvent;

use crate::bench::{Bench, Receiving, name};

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
