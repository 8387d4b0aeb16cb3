//! Hops that work: one, four in a row, resumed, with an older copy at the target, with a slow stream.

use std::fs;

use stage_core::assignment::IfExists;
use stage_core::chunk::{CHUNK, ChunkIndex};
use stage_core::units::Rate;
use stage_transfer::inbound::HopEvent;

use crate::bench::{Bench, Node, content, name, parents, put, soon, until};
use crate::proxy::{Fault, Proxy};

async fn one_hop(bench: &Bench) {
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    let mut source = bench.source(&n0, &["n1"]).await;
    let target = bench.target(&n1);
    let mut receiving = bench.receive(&n1, target.store(), vec![n0.peer()], 1);
    let events = receiving.complete().await;
    if bench.size() > 0 {
        assert_eq!(parents(&events), ["n0"], "{events:?}");
    }
    assert_eq!(receiving.inbound.counters().bytes_received, bench.size());
    let fin = source.fin().await;
    let sha = source.sha256().await;
    // The child can have the last byte before the thread that sent it has counted it.
    let sent = || source.source.counters().serving.bytes_sent;
    until("all is counted as sent", || sent() >= bench.size()).await;
    let counters = source.source.counters();
    assert_eq!(counters.serving.bytes_sent, bench.size());
    assert_eq!(counters.sha256_bytes, bench.size());
    assert!(counters.source_bytes_read >= bench.size());
    let expected: [u8; 32] = <sha2::Sha256 as sha2::Digest>::digest(&bench.bytes).into();
    assert_eq!(sha.0, expected);
    bench.published(target, fin).await;
    // The child has all and has closed its hop.
    until("no child", || source.source.counters().serving.children == 0).await;
    receiving.inbound.stop().await;
    source.source.stop().await;
    n0.plane.stop().await;
    n1.plane.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_hop_with_tls() {
    one_hop(&Bench::tls(20 * CHUNK + 7)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_hop_without_tls() {
    one_hop(&Bench::insecure(20 * CHUNK + 7)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sizes_around_a_chunk() {
    for size in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1] {
        one_hop(&Bench::insecure(size)).await;
    }
}

/// A chain in which every child dials before its parent knows the job.
async fn chain(bench: &Bench) {
    let nodes: Vec<Node> = (0..5).map(|n| bench.node(&format!("n{n}"))).collect();
    let targets: Vec<_> = nodes[1..].iter().map(|node| bench.target(node)).collect();
    let mut receiving = Vec::new();
    for (at, target) in targets.iter().enumerate() {
        receiving.push(bench.receive(&nodes[at + 1], target.store(), vec![nodes[at].peer()], 2));
    }
    let mut serving = Vec::new();
    for (at, target) in targets.iter().enumerate() {
        let child = format!("n{}", at + 2);
        serving.push(bench.serve(&nodes[at + 1], target, &[&child]));
    }
    let mut source = bench.source(&nodes[0], &["n1"]).await;
    for (at, receiving) in receiving.iter_mut().enumerate() {
        assert_eq!(receiving.parents().await, [format!("n{at}")]);
    }
    let fin = source.fin().await;
    for target in targets {
        bench.published(target, fin.clone()).await;
    }
    // Each hop carries the payload once. (On a host that is busy enough a stream may look slow, and a chunk of it may
    // come again; what the kernel held of it is written twice.)
    let (once, twice) = (bench.size() * 11 / 10, bench.size() * 2);
    assert!(source.source.counters().serving.bytes_sent < twice);
    for (serving, receiving) in serving.iter().zip(&receiving[1..]) {
        assert!(serving.counters().bytes_sent < twice);
        assert!(receiving.inbound.counters().bytes_received < once);
    }
    assert_eq!(serving[3].counters().bytes_sent, 0);
    source.source.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_of_four_with_tls() {
    chain(&Bench::tls(40 * CHUNK + 1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_of_four_without_tls() {
    chain(&Bench::insecure(40 * CHUNK + 1)).await;
}

/// The last come first, so that each hop's own clock is just ahead of the one above it.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_long_chain_hears_of_the_source_at_once() {
    let bench = Bench::insecure(10 * CHUNK);
    let nodes: Vec<Node> = (0..11).map(|n| bench.node(&format!("n{n}"))).collect();
    let targets: Vec<_> = nodes[1..].iter().map(|node| bench.target(node)).collect();
    let mut receiving = Vec::new();
    let mut serving = Vec::new();
    for (at, target) in targets.iter().enumerate().rev() {
        serving.push(bench.serve(&nodes[at + 1], target, &[&format!("n{}", at + 2)]));
        if at + 1 < targets.len() {
            let parents = vec![nodes[at + 1].peer(), nodes[at].peer()];
            let hop = bench.receive(&nodes[at + 2], targets[at + 1].store(), parents, 1);
            until("the hop", || hop.inbound.counters().parent.is_some()).await;
            receiving.push(hop);
        }
    }
    // For longer than a node waits for its parent's count.
    let slow = Some(Rate::from_bytes_per_second(1.2e6));
    let mut source = bench.source_at(&nodes[0], &["n1"], slow, None).await;
    receiving.push(bench.receive(&nodes[1], targets[0].store(), vec![nodes[0].peer()], 1));
    for (receiving, parent) in receiving.iter_mut().zip((0..10).rev()) {
        assert_eq!(receiving.parents().await, [format!("n{parent}")]);
    }
    let fin = source.fin().await;
    for target in targets {
        bench.published(target, fin.clone()).await;
    }
    source.source.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn budgets_of_two_chunks_are_enough() {
    let bench = Bench::insecure(24 * CHUNK);
    let (n0, n1, n2) = (
        bench.node_with("n0", bench.net("n0"), 2),
        bench.node_with("n1", bench.net("n1"), 2),
        bench.node_with("n2", bench.net("n2"), 2),
    );
    let mut source = bench.source(&n0, &["n1"]).await;
    let (t1, t2) = (bench.target(&n1), bench.target(&n2));
    let _serving = bench.serve(&n1, &t1, &["n2"]);
    let mut r1 = bench.receive(&n1, t1.store(), vec![n0.peer()], 4);
    let mut r2 = bench.receive(&n2, t2.store(), vec![n1.peer()], 4);
    r1.complete().await;
    r2.complete().await;
    bench.published(t2, source.fin().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn exactly_the_missing_chunks_are_sent() {
    let bench = Bench::tls(31 * CHUNK + 9);
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    let target = bench.target(&n1);
    let mut missing = 0;
    for index in 0..32 {
        if index % 2 == 0 {
            bench.put(target.store(), ChunkIndex(index));
        } else {
            missing += target.store().layout().len(ChunkIndex(index)) as u64;
        }
    }
    let mut source = bench.source(&n0, &["n1"]).await;
    let mut receiving = bench.receive(&n1, target.store(), vec![n0.peer()], 1);
    receiving.complete().await;
    assert_eq!(receiving.inbound.counters().bytes_received, missing);
    // The last bytes may be here before the thread that wrote them has counted them.
    let sent = || source.source.counters().serving.bytes_sent;
    until("what was sent to be counted", || sent() >= missing).await;
    assert_eq!(sent(), missing);
    bench.published(target, source.fin().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_copy_saves_what_it_has() {
    let bench = Bench::insecure(20 * CHUNK);
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    // Chunks 3 and 11 are others.
    let mut old = bench.bytes.clone();
    for at in [3, 11] {
        old[at * CHUNK as usize + 5] ^= 1;
    }
    let path = n1.state.parent().unwrap().join("root/genome.db");
    fs::write(&path, &old).unwrap();
    let target = bench.target_if(&n1, IfExists::Replace);
    let mut source = bench.source(&n0, &["n1"]).await;
    let mut receiving = bench.receive(&n1, target.store(), vec![n0.peer()], 1);
    receiving.complete().await;
    assert_eq!(receiving.inbound.counters().bytes_received, 2 * CHUNK);
    bench.published(target, source.fin().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_slow_stream_of_four_is_ended_and_its_siblings_go_on() {
    let bench = Bench::insecure(64 * CHUNK);
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    let target = bench.target(&n1);
    let mut source = bench.source(&n0, &["n1"]).await;
    // The second data connection gets a small share of what its siblings carry.
    let slow = 2;
    let proxy = Proxy::before(
        n0.plane.addresses()[0],
        Fault {
            slow: Some((slow, 100_000)),
            ..Fault::default()
        },
    )
    .await;
    let mut receiving = bench.receive(&n1, target.store(), vec![n0.peer_at(proxy.address)], 4);
    receiving.complete().await;
    let carried = proxy.carried();
    // Four equal streams would have carried 16 chunks each; three must have carried nearly everything.
    assert!(carried[slow] < 3 * CHUNK, "{carried:?}");
    let siblings = carried.iter().sum::<u64>() - carried[slow];
    assert!(siblings > bench.size() - 3 * CHUNK, "{carried:?}");
    bench.published(target, source.fin().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_of_digests_finds_the_chunk_that_is_not_the_payloads() {
    let bench = Bench::tls(12 * CHUNK);
    let (n0, n1, n2) = (bench.node("n0"), bench.node("n1"), bench.node("n2"));
    let mut source = bench.source(&n0, &["n1", "n2"]).await;
    // A chunk that was kept in good faith, from a list that was not the source's.
    let target = bench.target(&n1);
    put(target.store(), ChunkIndex(4), &content(CHUNK));
    let other = bench.target(&n2);
    let _serving = bench.serve(&n2, &other, &["n1"]);
    let mut relay = bench.receive(&n2, other.store(), vec![n0.peer()], 1);
    relay.complete().await;
    let mut receiving = bench.receive(&n1, target.store(), vec![n2.peer(), n0.peer()], 2);
    receiving.complete().await;
    let fin = source.fin().await;
    let root = target.store().root().unwrap();
    assert_ne!(root, fin.root);
    let repair = receiving.inbound.repair(&fin, bench.manifest.digest());
    let differ = soon("a list of digests", repair).await.unwrap();
    assert_eq!(differ.iter().collect::<Vec<_>>(), [ChunkIndex(4)]);
    // It comes from another parent than the one that delivered.
    assert_eq!(receiving.parents().await, ["n0"]);
    bench.published(target, fin).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_holds_and_can_be_lifted() {
    let bench = Bench::insecure(8 * CHUNK);
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    let target = bench.target(&n1);
    let slow = Rate::from_bytes_per_second(1.0);
    let mut source = bench.source_at(&n0, &["n1"], None, Some(slow)).await;
    let mut receiving = bench.receive(&n1, target.store(), vec![n0.peer()], 1);
    // The first block passes at once, the next would take hours.
    until("the first block", || {
        source.source.counters().serving.bytes_sent > 0
    })
    .await;
    assert!(matches!(receiving.event().await, HopEvent::Moved { .. }));
    assert_eq!(target.store().have().len(), 0);
    source.source.serving().set_limit(None);
    receiving.complete().await;
    bench.published(target, source.fin().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_to_the_plan_find_two_places_and_the_source_takes_the_rest() {
    let bench = Bench::insecure(4 * CHUNK);
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    // Nothing comes: so hops stay open.
    let slow = Rate::from_bytes_per_second(1.0);
    let source = bench.source_at(&n0, &["n1"], Some(slow), None).await;
    let t1 = bench.target(&n1);
    let serving = bench.serve(&n1, &t1, &[]);
    let mut children = Vec::new();
    for child in ["n2", "n3", "n4"] {
        let node = bench.node(child);
        let target = bench.target(&node);
        let mut receiving = bench.receive(&node, target.store(), vec![n1.peer(), n0.peer()], 1);
        let parent = match receiving.event().await {
            HopEvent::Moved { to, .. } => to,
            other => panic!("{other:?}"),
        };
        children.push((parent, node, target, receiving));
    }
    let parents: Vec<_> = children.iter().map(|child| child.0.clone()).collect();
    assert_eq!(parents, [name("n1"), name("n1"), name("n0")]);
    assert_eq!(serving.counters().children, 2);
    source.source.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sources_own_node_gets_a_copy_like_any_target() {
    let bench = Bench::tls(10 * CHUNK + 3);
    let n0 = bench.node("n0");
    let mut source = bench.source(&n0, &["n0"]).await;
    let target = bench.target(&n0);
    let mut receiving = bench.receive(&n0, target.store(), vec![n0.peer()], 2);
    assert_eq!(receiving.parents().await, ["n0"]);
    bench.published(target, source.fin().await).await;
}
