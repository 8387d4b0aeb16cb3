//! A stream more under way: where each is held back by itself, and where all share what there is.

use stage_core::chunk::CHUNK;

use crate::bench::{Bench, until};
use crate::proxy::{Fault, Proxy};

/// What a hop with too few streams for its forecast gets, until all has come.
async fn grows(chunks: u64, fault: Fault, wanted: f64, has_settled: impl Fn(u16, &Proxy) -> bool) {
    let bench = Bench::insecure(chunks * CHUNK + 5);
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    let proxy = Proxy::before(n0.plane.addresses()[0], fault).await;
    let mut parent = n0.peer();
    parent.addresses = vec![proxy.address];
    let mut source = bench.source(&n0, &["n1"]).await;
    let target = bench.target(&n1);
    let mut receiving = bench.receive_auto(&n1, target.store(), vec![parent], wanted);
    let streams = || receiving.inbound.counters().streams;
    until("one stream", || streams() == 1).await;
    until("two streams", || streams() == 2).await;
    until("what becomes of the second", || has_settled(streams(), &proxy)).await;
    receiving.complete().await;
    let fin = source.fin().await;
    bench.published(target, fin).await;
    receiving.inbound.stop().await;
    source.source.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_added_carries_chunks() {
    let fault = Fault {
        each: Some(8_000_000),
        ..Fault::default()
    };
    // Connection 0 is the control connection.
    grows(112, fault, 16_000_000.0, |_, proxy| {
        proxy.carried().get(2).is_some_and(|bytes| *bytes > 4 * CHUNK)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_brings_nothing_goes_again_and_loses_no_chunk() {
    let fault = Fault {
        all: Some(16_000_000),
        ..Fault::default()
    };
    // On a busy machine a stream may seem to bring something, and a third is tried: then that one goes.
    grows(240, fault, 100_000_000.0, |streams, proxy| {
        usize::from(streams) < proxy.carried().len() - 1
    })
    .await;
}
