//! A source that changes, and one that is limited.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::time::Duration;

use stage_core::chunk::{CHUNK, ChunkIndex};
use stage_core::failure::Code;
use stage_core::units::Rate;
use stage_transfer::target::Target;

use crate::bench::{Bench, Receiving, Running, content, until};

/// Does something to the source once a chunk of it has arrived and more is to be read; lets it go on with all.
async fn meanwhile(bench: &Bench, change: impl FnOnce(&Bench)) -> (Running, Target, Receiving) {
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    let target = bench.target(&n1);
    let slow = Rate::from_bytes_per_second(1e6);
    let source = bench.source_at(&n0, &["n1"], Some(slow), None).await;
    let receiving = bench.receive(&n1, target.store(), vec![n0.peer()], 1);
    until("a chunk", || target.store().has(ChunkIndex(0))).await;
    change(bench);
    source.source.set_source_limit(None);
    (source, target, receiving)
}

async fn fails(change: impl FnOnce(&Bench), words: &str) {
    let bench = Bench::insecure(16 * CHUNK);
    let (mut source, target, receiving) = meanwhile(&bench, change).await;
    let failure = source.failure().await;
    assert_eq!(failure.code, Code::SourceChanged, "{failure}");
    assert_eq!(failure.node, Some("n0".parse().unwrap()));
    assert!(failure.path.is_some());
    assert!(failure.message.contains(words), "{failure}");
    receiving.inbound.stop().await;
    source.source.stop().await;
    assert!(!std::path::Path::new(&target.path()).exists());
}

async fn arrives(change: impl FnOnce(&Bench)) {
    let bench = Bench::insecure(16 * CHUNK);
    let (mut source, target, mut receiving) = meanwhile(&bench, change).await;
    receiving.complete().await;
    bench.published(target, source.fin().await).await;
    source.sha256().await;
    source.source.stop().await;
}

fn opened(bench: &Bench) -> File {
    OpenOptions::new().write(true).open(&bench.file).unwrap()
}

fn shift(bench: &Bench, by: Duration) {
    let file = opened(bench);
    let mtime = file.metadata().unwrap().modified().unwrap();
    file.set_modified(mtime + by).unwrap();
}

// R30: four ways to change it, each found, none published.
#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_grows_fails() {
    let append = |bench: &Bench| {
        let mut file = OpenOptions::new().append(true).open(&bench.file).unwrap();
        file.write_all(b"more").unwrap();
    };
    fails(append, "size").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_is_cut_short_fails() {
    fails(|bench| opened(bench).set_len(9 * CHUNK).unwrap(), "size").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_is_overwritten_fails_even_with_its_time_set_back() {
    let overwrite = |bench: &Bench| {
        let file = opened(bench);
        let mtime = file.metadata().unwrap().modified().unwrap();
        file.write_all_at(b"other", 77).unwrap();
        file.set_modified(mtime).unwrap();
    };
    fails(overwrite, "chunk 0 reads differently").await;
    // One that was last written to long ago, in a part that nobody has read yet.
    fails(
        |bench| {
            opened(bench).write_all_at(b"other", 15 * CHUNK).unwrap();
            shift(bench, Duration::from_secs(60));
        },
        "written to",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_another_file_replaces_fails() {
    let replace = |bench: &Bench| {
        let other = bench.file.with_extension("new");
        fs::write(&other, &bench.bytes).unwrap();
        fs::rename(other, &bench.file).unwrap();
    };
    fails(replace, "in its place").await;
}

// R31: times that jitter are no change where the content is none; nor are mode and links.
#[tokio::test(flavor = "multi_thread")]
async fn times_alone_are_no_change() {
    arrives(|bench| shift(bench, Duration::from_millis(1999))).await;
    arrives(|bench| {
        opened(bench)
            .set_permissions(fs::Permissions::from_mode(0o600))
            .unwrap();
    })
    .await;
    arrives(|bench| fs::hard_link(&bench.file, bench.file.with_extension("link")).unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_is_removed_while_it_is_open_arrives() {
    arrives(|bench| fs::remove_file(&bench.file).unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hole_that_is_written_to_is_a_change() {
    let bench = Bench::sparse(1 << 30, &[(0, &content(16 * CHUNK))]);
    let write = |bench: &Bench| {
        let file = opened(bench);
        let mtime = file.metadata().unwrap().modified().unwrap();
        file.write_all_at(b"x", 1 << 29).unwrap();
        file.set_modified(mtime).unwrap();
    };
    let (mut source, _target, receiving) = meanwhile(&bench, write).await;
    let failure = source.failure().await;
    assert_eq!(failure.code, Code::SourceChanged);
    assert!(failure.message.contains("hole"), "{failure}");
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

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_nobody_asks_declares_all_the_same() {
    // As after a restart: its children had all before, and wait for nothing but FINAL.
    let bench = Bench::insecure(64 * CHUNK);
    let n0 = bench.node("n0");
    let mut source = bench.source(&n0, &["n1"]).await;
    assert_eq!(source.fin().await.chunks, 64);
    source.source.stop().await;
}
