//! Parents that fail: corrupt, dead, silent, leaving.

use stage_core::chunk::{CHUNK, ChunkIndex};
use stage_core::units::Rate;
use stage_transfer::inbound::HopEvent;
use stage_transfer::outbound;

use crate::bench::{Bench, name, parents, until};
use crate::proxy::{Fault, Proxy};

#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_byte_is_never_counted_and_its_sender_is_named() {
    let bench = Bench::tls(16 * CHUNK);
    let nodes: Vec<_> = ["n0", "n1", "n2", "n3"].map(|n| bench.node(n)).into();
    let (t1, t2, t3) = (
        bench.target(&nodes[1]),
        bench.target(&nodes[2]),
        bench.target(&nodes[3]),
    );
    let _s1 = bench.serve(&nodes[1], &t1, &["n2"]);
    let s2 = bench.serve(&nodes[2], &t2, &["n3"]);
    let chunk = ChunkIndex(9);
    s2.set_fault(Some(outbound::Fault::FlipByte { chunk }));
    let mut source = bench.source(&nodes[0], &["n1"]).await;
    let mut r1 = bench.receive(&nodes[1], t1.store(), vec![nodes[0].peer()], 2);
    let mut r2 = bench.receive(&nodes[2], t2.store(), vec![nodes[1].peer(), nodes[0].peer()], 2);
    let ancestors = vec![nodes[2].peer(), nodes[1].peer(), nodes[0].peer()];
    let mut r3 = bench.receive(&nodes[3], t3.store(), ancestors, 2);
    r1.complete().await;
    r2.complete().await;
    let events = r3.complete().await;
    let corrupt = HopEvent::Corrupt {
        parent: name("n2"),
        chunk,
    };
    assert_eq!(
        events.iter().filter(|event| **event == corrupt).count(),
        1,
        "{events:?}"
    );
    // The nearest ancestor, or on a host that is busy the next.
    assert_eq!(parents(&events)[0], "n2");
    assert_eq!(parents(&events).len(), 2);
    let fin = source.fin().await;
    for target in [t1, t2, t3] {
        bench.published(target, fin.clone()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_whose_parent_dies_goes_on_where_it_was() {
    let bench = Bench::insecure(48 * CHUNK);
    let (n0, n1, n2) = (bench.node("n0"), bench.node("n1"), bench.node("n2"));
    let (t1, t2) = (bench.target(&n1), bench.target(&n2));
    let _serving = bench.serve(&n1, &t1, &["n2"]);
    let mut source = bench.source(&n0, &["n1"]).await;
    let mut r1 = bench.receive(&n1, t1.store(), vec![n0.peer()], 2);
    let fault = Fault {
        ends_at: Some(8 * CHUNK),
        ..Fault::default()
    };
    let proxy = Proxy::before(n1.plane.addresses()[0], fault).await;
    let streams = 2;
    let mut r2 = bench.receive(
        &n2,
        t2.store(),
        vec![n1.peer_at(proxy.address), n0.peer()],
        streams,
    );
    r1.complete().await;
    let events = r2.complete().await;
    assert_eq!(parents(&events), ["n1", "n0"], "{events:?}");
    // Beyond the payload only what each stream had of a chunk when the parent died.
    let twice = r2.inbound.counters().bytes_received - bench.size();
    assert!(twice < u64::from(streams) * CHUNK, "{twice} bytes came twice");
    bench.published(t2, source.fin().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_parent_is_left_for_its_fallback() {
    let bench = Bench::tls(24 * CHUNK);
    let (n0, n1, n2) = (bench.node("n0"), bench.node("n1"), bench.node("n2"));
    let (t1, t2) = (bench.target(&n1), bench.target(&n2));
    let _serving = bench.serve(&n1, &t1, &["n2"]);
    let mut source = bench.source(&n0, &["n1"]).await;
    let mut r1 = bench.receive(&n1, t1.store(), vec![n0.peer()], 2);
    let fault = Fault {
        freezes_at: Some(4 * CHUNK),
        ..Fault::default()
    };
    let proxy = Proxy::before(n1.plane.addresses()[0], fault).await;
    let mut r2 = bench.receive(&n2, t2.store(), vec![n1.peer_at(proxy.address), n0.peer()], 2);
    r1.complete().await;
    let events = r2.complete().await;
    assert_eq!(parents(&events), ["n1", "n0"], "{events:?}");
    let silent = events
        .iter()
        .any(|event| matches!(event, HopEvent::Moved { why, .. } if why.contains("no word")));
    assert!(silent, "{events:?}");
    bench.published(t2, source.fin().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parent_that_drains_is_left() {
    let bench = Bench::insecure(32 * CHUNK);
    let (n0, n1, n2) = (bench.node("n0"), bench.node("n1"), bench.node("n2"));
    let (t1, t2) = (bench.target(&n1), bench.target(&n2));
    let serving = bench.serve(&n1, &t1, &["n2"]);
    serving.set_limit(Some(Rate::from_bytes_per_second(2e6)));
    let mut source = bench.source(&n0, &["n1"]).await;
    let mut r1 = bench.receive(&n1, t1.store(), vec![n0.peer()], 2);
    let mut r2 = bench.receive(&n2, t2.store(), vec![n1.peer(), n0.peer()], 2);
    r1.complete().await;
    until("some chunks", || t2.store().have().len() >= 4).await;
    n1.plane.drain();
    let events = r2.complete().await;
    assert_eq!(parents(&events), ["n1", "n0"], "{events:?}");
    bench.published(t2, source.fin().await).await;
    n1.plane.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_plan_moves_the_child_without_a_gap() {
    let bench = Bench::insecure(32 * CHUNK);
    let (n0, n1, n2) = (bench.node("n0"), bench.node("n1"), bench.node("n2"));
    let (t1, t2) = (bench.target(&n1), bench.target(&n2));
    let serving = bench.serve(&n1, &t1, &["n2"]);
    serving.set_limit(Some(Rate::from_bytes_per_second(2e6)));
    let mut source = bench.source(&n0, &["n1", "n2"]).await;
    let mut r1 = bench.receive(&n1, t1.store(), vec![n0.peer()], 2);
    let mut r2 = bench.receive(&n2, t2.store(), vec![n1.peer(), n0.peer()], 2);
    r1.complete().await;
    until("some chunks", || t2.store().have().len() >= 4).await;
    // The same plan again changes nothing, another first parent does.
    let streams = stage_core::assignment::StreamChoice::Fixed(2);
    r2.inbound
        .set_parents(vec![n1.peer(), n0.peer()], streams, None)
        .await;
    r2.inbound
        .set_parents(vec![n0.peer(), n1.peer()], streams, None)
        .await;
    let events = r2.complete().await;
    assert_eq!(parents(&events), ["n1", "n0"], "{events:?}");
    bench.published(t2, source.fin().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_circle_finds_out_by_itself() {
    let bench = Bench::insecure(8 * CHUNK);
    let (n0, n1, n2) = (bench.node("n0"), bench.node("n1"), bench.node("n2"));
    let (t1, t2) = (bench.target(&n1), bench.target(&n2));
    let _s1 = bench.serve(&n1, &t1, &["n2"]);
    let _s2 = bench.serve(&n2, &t2, &["n1"]);
    // Each is the other's parent, and both beat: nobody is silent, and nobody has anything.
    let mut source = bench.source(&n0, &[]).await;
    let mut r1 = bench.receive(&n1, t1.store(), vec![n2.peer(), n0.peer()], 1);
    let mut r2 = bench.receive(&n2, t2.store(), vec![n1.peer(), n0.peer()], 1);
    let events = r1.complete().await;
    assert_eq!(parents(&events)[0], "n2");
    let mut all = events;
    all.extend(r2.complete().await);
    let still = all
        .iter()
        .any(|event| matches!(event, HopEvent::Moved { to, why, .. } if *to == name("n0") && why.contains("stood still")));
    assert!(still, "{all:?}");
    let fin = source.fin().await;
    bench.published(t1, fin.clone()).await;
    bench.published(t2, fin).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_data_connection_that_breaks_is_dialled_again() {
    let bench = Bench::insecure(32 * CHUNK);
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    let target = bench.target(&n1);
    let mut source = bench.source(&n0, &["n1"]).await;
    source
        .source
        .serving()
        .set_limit(Some(Rate::from_bytes_per_second(4e6)));
    let proxy = Proxy::before(n0.plane.addresses()[0], Fault::default()).await;
    let mut receiving = bench.receive(&n1, target.store(), vec![n0.peer_at(proxy.address)], 2);
    // One after the other, and again the one that was dialled in its place.
    let mut snaps = 0;
    for number in 1..=3 {
        until("bytes on it", || {
            proxy
                .carried()
                .get(number)
                .is_some_and(|bytes| *bytes > CHUNK / 2)
        })
        .await;
        proxy.snap(number);
        snaps += 1;
    }
    source.source.serving().set_limit(None);
    let events = receiving.complete().await;
    assert_eq!(parents(&events), ["n0"], "the hop itself stood: {events:?}");
    let twice = receiving.inbound.counters().bytes_received - bench.size();
    assert!(twice <= snaps * CHUNK, "{twice} bytes came twice");
    bench.published(target, source.fin().await).await;
}
