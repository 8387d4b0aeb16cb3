//! What comes through a pipe: sent while it comes, published when its end was seen, and not else.

use std::fs::File;
use std::io::Write as _;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use stage_core::assignment::{Final, SourceReport};
use stage_core::chunk::{CHUNK, ChunkIndex, UNKNOWN};
use stage_core::digest::{ChunkHash, Expected, FileDigest};
use stage_core::failure::{Code, Failure};
use stage_core::manifest::Manifest;
use stage_core::payload::Expectation;
use stage_core::units::ByteCount;
use stage_transfer::pipe::{Pipe, PipeConfig, Tie};
use stage_transfer::target::Target;
use tokio::sync::mpsc;

use crate::bench::{Bench, Node, Receiving, content, name, soon, until};

/// A stream's source at work, and the end of the pipe that is written to.
struct Stream {
    pipe: Pipe,
    tie: Arc<Tie>,
    writer: Option<File>,
    reports: mpsc::Receiver<SourceReport>,
}

/// A cluster for a stream of these bytes.
fn bench(bytes: Vec<u8>) -> Bench {
    let mut bench = Bench::insecure(0);
    bench.manifest = Manifest::single_file(b"genome.db", UNKNOWN, 0o644, (7, 0));
    bench.bytes = bytes;
    bench
}

impl Stream {
    async fn start(bench: &Bench, node: &Node, children: &[&str], expect: Vec<Expectation>) -> Self {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let tie = Arc::new(Tie::default());
        let (say, reports) = mpsc::channel(4);
        let config = PipeConfig {
            job: bench.job,
            key: bench.key.clone(),
            payload: bench.payload(),
            hash: ChunkHash::Blake3,
            source_limit: None,
            expect,
            limit: None,
            state: node.state.clone(),
            children: children.iter().map(|child| name(child)).collect(),
            input: read,
            tie: tie.clone(),
        };
        let pipe = Pipe::start(&node.plane, config, say).await.unwrap();
        Self {
            pipe,
            tie,
            writer: Some(write.into()),
            reports,
        }
    }

    /// Writes, on a thread of its own: nobody may be reading at the moment.
    async fn write(&mut self, bytes: &[u8]) {
        let mut writer = self.writer.take().unwrap();
        let bytes = bytes.to_vec();
        let written = tokio::task::spawn_blocking(move || {
            writer.write_all(&bytes).unwrap();
            writer
        });
        self.writer = Some(soon("the pipe to take it", written).await.unwrap());
    }

    /// The writer closes, and the other side sees it.
    async fn end(&mut self, bytes: &[u8]) -> Final {
        self.writer = None;
        let ended = soon("the end of input", self.tie.ended()).await;
        assert_eq!(ended, Some(ByteCount(bytes.len() as u64)));
        assert!(self.reports.try_recv().is_err(), "not before it was seen");
        self.tie.seen();
        match soon("FINAL", self.reports.recv()).await {
            Some(SourceReport::Final(fin)) => fin,
            other => panic!("{other:?} instead of FINAL"),
        }
    }

    async fn failure(&mut self) -> Failure {
        match soon("a failure", self.reports.recv()).await {
            Some(SourceReport::Failed(failure)) => failure,
            other => panic!("{other:?} instead of a failure"),
        }
    }
}

/// As the agent does when FINAL comes.
async fn publish(bench: &Bench, target: Target, receiving: &mut Receiving, fin: &Final) {
    target.store().close(fin.data).unwrap();
    receiving.complete().await;
    receiving.inbound.stop().await;
    bench.published(target, fin.clone()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn it_arrives_while_it_comes_whatever_its_length() {
    for size in [0, 1, CHUNK - 1, CHUNK, 3 * CHUNK, 12 * CHUNK + 5] {
        let bytes = content(size);
        let bench = bench(bytes.clone());
        let (n0, n1, n2) = (bench.node("n0"), bench.node("n1"), bench.node("n2"));
        let (one, two) = (bench.target(&n1), bench.target(&n2));
        let mut stream = Stream::start(&bench, &n0, &["n1"], Vec::new()).await;
        let _serving = bench.serve(&n1, &one, &["n2"]);
        let mut first = bench.receive(&n1, one.store(), vec![n0.peer()], 3);
        let mut second = bench.receive(&n2, two.store(), vec![n1.peer(), n0.peer()], 2);
        let half = bytes.len() / 2;
        stream.write(&bytes[..half]).await;
        if half >= CHUNK as usize {
            until("bytes at the end of the chain", || two.store().has(ChunkIndex(0))).await;
        }
        stream.write(&bytes[half..]).await;
        let fin = stream.end(&bytes).await;
        assert_eq!(
            (fin.data, u64::from(fin.chunks)),
            (ByteCount(size), size.div_ceil(CHUNK))
        );
        publish(&bench, one, &mut first, &fin).await;
        publish(&bench, two, &mut second, &fin).await;
        let sha256 = FileDigest(Sha256::digest(&bytes).into());
        assert_eq!(
            soon("SHA-256", stream.reports.recv()).await,
            Some(SourceReport::Sha256(sha256)),
            "{size}"
        );
        assert_eq!(stream.pipe.counters().source_bytes_read, size);
        stream.pipe.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_comes_late_is_served_from_the_spool() {
    let bytes = content(20 * CHUNK + 7);
    let bench = bench(bytes.clone());
    // Little memory, so that the first chunks are in none when the second child comes.
    let n0 = bench.node_with("n0", bench.net("n0"), 4);
    let (n1, n2) = (bench.node("n1"), bench.node("n2"));
    let (one, two) = (bench.target(&n1), bench.target(&n2));
    let mut stream = Stream::start(&bench, &n0, &["n1", "n2"], Vec::new()).await;
    let mut first = bench.receive(&n1, one.store(), vec![n0.peer()], 1);
    stream.write(&bytes).await;
    let fin = stream.end(&bytes).await;
    publish(&bench, one, &mut first, &fin).await;
    let mut second = bench.receive(&n2, two.store(), vec![n0.peer()], 2);
    publish(&bench, two, &mut second, &fin).await;
    stream.pipe.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_not_seen_to_end_is_not_declared() {
    for ends_first in [false, true] {
        let bytes = content(3 * CHUNK + 1);
        let bench = bench(bytes.clone());
        let (n0, n1) = (bench.node("n0"), bench.node("n1"));
        let one = bench.target(&n1);
        let mut stream = Stream::start(&bench, &n0, &["n1"], Vec::new()).await;
        let first = bench.receive(&n1, one.store(), vec![n0.peer()], 1);
        stream.write(&bytes).await;
        until("bytes", || one.store().has(ChunkIndex(2))).await;
        if ends_first {
            // The producer and `stage push` are killed together.
            stream.writer = None;
            assert!(soon("the end", stream.tie.ended()).await.is_some());
        }
        stream.tie.cut();
        let failure = stream.failure().await;
        assert_eq!(
            (failure.code, failure.node.as_ref()),
            (Code::SourceLost, Some(&name("n0")))
        );
        assert!(!one.store().is_complete());
        first.inbound.stop().await;
        stream.pipe.stop().await;
        let path = one.path().to_owned();
        one.discard().unwrap();
        assert!(!std::path::Path::new(&path).exists());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_expected_is_not_declared() {
    let bytes = content(CHUNK + 1);
    let bench = bench(bytes.clone());
    let n0 = bench.node("n0");
    let expect = |digest| {
        vec![Expectation {
            path: Vec::new(),
            digest: Expected::Sha256(digest),
        }]
    };
    let mut stream = Stream::start(&bench, &n0, &[], expect(FileDigest([1; 32]))).await;
    stream.write(&bytes).await;
    stream.writer = None;
    // What came may be known to be wrong before its end was told.
    if soon("the end", stream.tie.ended()).await.is_some() {
        stream.tie.seen();
    }
    assert_eq!(stream.failure().await.code, Code::Unexpected);
    stream.pipe.stop().await;
    let right = FileDigest(Sha256::digest(&bytes).into());
    let mut stream = Stream::start(&bench, &n0, &[], expect(right)).await;
    stream.write(&bytes).await;
    stream.end(&bytes).await;
    stream.pipe.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_that_starts_again_goes_on_where_it_was() {
    for rest in [0, 9] {
        let bytes = content(6 * CHUNK + rest);
        let bench = bench(bytes.clone());
        let (n0, n1) = (bench.node("n0"), bench.node("n1"));
        let mut stream = Stream::start(&bench, &n0, &["n1"], Vec::new()).await;
        let one = bench.target(&n1);
        let first = bench.receive(&n1, one.store(), vec![n0.peer()], 2);
        stream.write(&bytes).await;
        let fin = stream.end(&bytes).await;
        until("all", || one.store().kept() == fin.chunks).await;
        first.inbound.stop().await;
        drop(one);
        let again = bench.target(&n1);
        assert_eq!(again.store().kept(), fin.chunks, "the chunk table tells");
        let mut first = bench.receive(&n1, again.store(), vec![n0.peer()], 1);
        publish(&bench, again, &mut first, &fin).await;
        assert_eq!(first.inbound.counters().bytes_received, 0);
        // And once more after it was published: what lies under the name is it.
        let after = bench.target(&n1);
        assert!(after.store().is_complete());
        bench.published(after, fin).await;
        stream.pipe.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spool_that_is_full_fails_the_push_and_says_where() {
    if std::env::var_os("STAGE_TEST_NETNS").is_none_or(|wanted| wanted != "1") {
        eprintln!("skipped: mounting a small tmpfs needs root and STAGE_TEST_NETNS=1");
        return;
    }
    let bytes = content(12 * CHUNK);
    let bench = bench(bytes.clone());
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    std::fs::create_dir_all(&n0.state).unwrap();
    let none = rustix::mount::MountFlags::empty();
    rustix::mount::mount("tmpfs", &n0.state, "tmpfs", none, Some(c"size=6m")).unwrap();
    let one = bench.target(&n1);
    let mut stream = Stream::start(&bench, &n0, &["n1"], Vec::new()).await;
    let first = bench.receive(&n1, one.store(), vec![n0.peer()], 1);
    let mut writer = stream.writer.take().unwrap();
    let written = tokio::task::spawn_blocking(move || writer.write_all(&bytes));
    let failure = stream.failure().await;
    assert_eq!(failure.code, Code::NoSpace, "{failure}");
    assert!(failure.message.contains("state directory"), "{failure}");
    first.inbound.stop().await;
    stream.pipe.stop().await;
    assert!(
        soon("the writer", written).await.unwrap().is_err(),
        "nobody writes to a pipe that nobody reads"
    );
    assert!(!std::path::Path::new(&one.path()).exists());
    drop(stream);
    rustix::mount::unmount(&n0.state, rustix::mount::UnmountFlags::DETACH).unwrap();
}
