//! A source that changes, and one that is limited.

use std::fs::OpenOptions;
use std::io::Write as _;

use stage_core::assignment::SourceReport;
use stage_core::chunk::CHUNK;
use stage_core::failure::Code;
use stage_core::units::Rate;

use crate::bench::{Bench, soon, until};

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_is_written_to_fails() {
    let bench = Bench::insecure(16 * CHUNK);
    let n0 = bench.node("n0");
    let n1 = bench.node("n1");
    let target = bench.target(&n1);
    let slow = Rate::from_bytes_per_second(1e6);
    let mut source = bench.source_at(&n0, &["n1"], Some(slow), None).await;
    let receiving = bench.receive(&n1, target.store(), vec![n0.peer()], 1);
    until("a chunk", || !target.store().have().is_empty()).await;
    let mut file = OpenOptions::new().append(true).open(&bench.file).unwrap();
    file.write_all(b"more").unwrap();
    match soon("a failure", source.reports.recv()).await {
        Some(SourceReport::Failed(failure)) => {
            assert_eq!(failure.code, Code::SourceChanged);
            assert_eq!(failure.node, Some("n0".parse().unwrap()));
            assert!(failure.path.is_some());
            assert!(failure.message.contains("size"), "{failure}");
        }
        other => panic!("{other:?}"),
    }
    receiving.inbound.stop().await;
    source.source.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_reads_a_little_ahead_and_no_more() {
    let bench = Bench::insecure(64 * CHUNK);
    let n0 = bench.node("n0");
    let source = bench.source(&n0, &["n1"]).await;
    until("the first chunks", || source.source.store().have().len() == 8).await;
    // Nobody asks: the SHA-256 lane comes as far as the reader, and the reader no further.
    until("the lane", || source.source.counters().sha256_bytes == 8 * CHUNK).await;
    assert_eq!(source.source.store().have().len(), 8);
    source.source.stop().await;
}
