//! What the tests stand on: nodes on loopback, a payload, and words for what is done with them.

use std::fs;
use std::future::Future;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use stage_core::assignment::{
    Final, IfExists, KEEP_PREVIOUS, Peer, Place, SourceReport, SourceSpec, StreamChoice, TargetSpec,
};
use stage_core::chunk::{CHUNK, ChunkIndex};
use stage_core::digest::{ChunkHash, Expected, FileDigest, Md5Digest};
use stage_core::failure::Failure;
use stage_core::id::{Epoch, JobId, JobKey, NodeName, PlanVersion};
use stage_core::manifest::Manifest;
use stage_core::payload::{Expectation, Payload, SourcePath};
use stage_core::plan::WindowLimits;
use stage_core::units::{ByteCount, Rate};
use stage_net::authority::Authority;
use stage_net::{Net, Role};
use stage_transfer::budget::Budget;
use stage_transfer::inbound::{HopEvent, Inbound, InboundConfig};
use stage_transfer::outbound::Serving;
use stage_transfer::plane::DataPlane;
use stage_transfer::root::Roots;
use stage_transfer::source::{Look, Pulse, Source, SourceConfig, look};
use stage_transfer::store::Store;
use stage_transfer::target::{Preparation, Target, prepare};
use tempfile::TempDir;
use tokio::sync::mpsc;

/// Whatever is waited for must come within this; only a test that fails waits so long.
pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(Duration::from_secs(60), future).await {
        Ok(value) => value,
        Err(_) => panic!("still waiting for: {what}"),
    }
}

/// Waits until a condition holds.
pub(crate) async fn until(what: &str, condition: impl Fn() -> bool) {
    soon(what, async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

pub(crate) fn name(text: &str) -> NodeName {
    text.parse().unwrap()
}

/// Bytes that no two chunks share.
pub(crate) fn content(size: u64) -> Vec<u8> {
    let mut bytes = vec![0; size as usize];
    let mut x = size | 1;
    for word in bytes.chunks_mut(8) {
        x = x
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let random = (x ^ (x >> 31)).to_le_bytes();
        word.copy_from_slice(&random[..word.len()]);
    }
    bytes
}

/// One cluster with one payload.
pub(crate) struct Bench {
    dir: TempDir,
    authority: Option<Authority>,
    pub(crate) job: JobId,
    pub(crate) key: JobKey,
    pub(crate) file: PathBuf,
    pub(crate) bytes: Vec<u8>,
    pub(crate) manifest: Manifest,
    /// What the payload's MD5 is expected to be.
    pub(crate) md5: Option<Md5Digest>,
}

impl Bench {
    pub(crate) fn tls(size: u64) -> Self {
        Self::new(size, Some(Authority::new("c1").unwrap()))
    }

    pub(crate) fn insecure(size: u64) -> Self {
        Self::new(size, None)
    }

    fn new(size: u64, authority: Option<Authority>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("genome.db");
        let bytes = content(size);
        fs::write(&file, &bytes).unwrap();
        Self {
            authority,
            job: JobId::from_random([5; 16]),
            key: JobKey([6; 32]),
            manifest: look(&spec(&file), &Pulse::default()).unwrap().manifest,
            md5: None,
            file,
            bytes,
            dir,
        }
    }

    /// A payload with holes: so many apparent bytes, data at these places.
    pub(crate) fn sparse(size: u64, data: &[(u64, &[u8])]) -> Self {
        let mut bench = Self::new(0, None);
        let file = fs::File::options().write(true).open(&bench.file).unwrap();
        file.set_len(size).unwrap();
        for (at, bytes) in data {
            file.write_all_at(bytes, *at).unwrap();
        }
        bench.manifest = look(&spec(&bench.file), &Pulse::default()).unwrap().manifest;
        bench
    }

    pub(crate) fn payload(&self) -> Payload {
        Payload::of(&self.manifest).unwrap()
    }

    pub(crate) fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    pub(crate) fn net(&self, node: &str) -> Net {
        match &self.authority {
            None => Net::insecure(false),
            Some(authority) => {
                let files = authority.write(self.dir.path(), Role::Node(name(node))).unwrap();
                Net::tls(&files.ca, &files.cert, &files.key).unwrap()
            }
        }
    }

    pub(crate) fn node(&self, node: &str) -> Node {
        self.node_with(node, self.net(node), 32)
    }

    pub(crate) fn node_with(&self, node: &str, net: Net, chunks: u64) -> Node {
        let budget = Budget::new(ByteCount(chunks * CHUNK));
        let listen: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let plane = DataPlane::start(
            net,
            name(node),
            vec![listen],
            budget.clone(),
            WindowLimits::default(),
        )
        .unwrap();
        let home = self.dir.path().join(node);
        let root = home.join("root");
        fs::create_dir_all(&root).unwrap();
        Node {
            plane,
            budget,
            roots: Roots::open(vec![(name_of_root(), root)]),
            state: home.join("state"),
        }
    }

    pub(crate) async fn source(&self, node: &Node, children: &[&str]) -> Running {
        self.source_at(node, children, None, None).await
    }

    pub(crate) async fn source_at(
        &self,
        node: &Node,
        children: &[&str],
        source_limit: Option<Rate>,
        limit: Option<Rate>,
    ) -> Running {
        let (say, reports) = mpsc::channel(4);
        let config = SourceConfig {
            job: self.job,
            key: self.key.clone(),
            spec: SourceSpec {
                limit: source_limit,
                expect: self
                    .md5
                    .map(|md5| Expectation {
                        path: Vec::new(),
                        digest: Expected::Md5(md5),
                    })
                    .into_iter()
                    .collect(),
                ..spec(&self.file)
            },
            payload: self.payload(),
            look: None,
            hash: ChunkHash::Blake3,
            limit,
            state: node.state.clone(),
            children: children.iter().map(|child| name(child)).collect(),
        };
        fs::create_dir_all(&node.state).unwrap();
        let source = Source::start(&node.plane, config, say).await.unwrap();
        Running { source, reports }
    }

    /// A source of anything.
    pub(crate) async fn source_of(&self, node: &Node, spec: SourceSpec) -> Result<Running, Failure> {
        let payload = look(&spec, &Pulse::default())?.payload;
        self.source_as(node, spec, payload, None).await
    }

    /// A source of what was looked at before.
    pub(crate) async fn source_as(
        &self,
        node: &Node,
        spec: SourceSpec,
        payload: Payload,
        look: Option<Look>,
    ) -> Result<Running, Failure> {
        let (say, reports) = mpsc::channel(4);
        let config = SourceConfig {
            job: self.job,
            key: self.key.clone(),
            spec,
            payload,
            look,
            hash: ChunkHash::Blake3,
            limit: None,
            state: node.state.clone(),
            children: Vec::new(),
        };
        fs::create_dir_all(&node.state).unwrap();
        let source = Source::start(&node.plane, config, say).await?;
        Ok(Running { source, reports })
    }

    /// Where its files lie.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn target(&self, node: &Node) -> Target {
        self.target_if(node, IfExists::Fail)
    }

    pub(crate) fn target_if(&self, node: &Node, if_exists: IfExists) -> Target {
        match self.prepare(node, if_exists).unwrap() {
            Preparation::Ready(target) => target,
            Preparation::Skipped { path } => panic!("{path} is skipped"),
        }
    }

    /// Why the node cannot take it.
    pub(crate) fn unfit(&self, node: &Node) -> Failure {
        self.prepare(node, IfExists::Fail).unwrap_err()
    }

    fn prepare(&self, node: &Node, if_exists: IfExists) -> Result<Preparation, Failure> {
        let spec = TargetSpec {
            place: Place::Root {
                root: None,
                dir: Vec::new(),
            },
            if_exists,
            unpack: false,
            keep_previous: KEEP_PREVIOUS,
            cache: Default::default(),
        };
        prepare(
            &node.roots,
            &node.state,
            self.job,
            &spec,
            &self.payload(),
            ChunkHash::Blake3,
            &node.budget,
        )
    }

    pub(crate) fn serve(&self, node: &Node, target: &Target, children: &[&str]) -> Serving {
        let children = children.iter().map(|child| name(child)).collect();
        node.plane
            .serve(self.job, self.key.clone(), target.store().clone(), children, None)
    }

    pub(crate) fn receive(
        &self,
        node: &Node,
        store: &Arc<Store>,
        parents: Vec<Peer>,
        streams: u16,
    ) -> Receiving {
        self.receive_with(node, store, parents, streams, self.key.clone())
    }

    pub(crate) fn receive_with(
        &self,
        node: &Node,
        store: &Arc<Store>,
        parents: Vec<Peer>,
        streams: u16,
        key: JobKey,
    ) -> Receiving {
        let (say, events) = mpsc::channel(64);
        let config = InboundConfig {
            job: self.job,
            key,
            store: store.clone(),
            parents,
            streams: StreamChoice::Fixed(streams),
            control: None,
            rank: (Epoch(1), PlanVersion(1)),
            wanted: Rate::from_bits_per_second(1e10),
        };
        let inbound = Inbound::start(&node.plane, config, say);
        Receiving { inbound, events }
    }

    /// Receives with as many streams as seem right, under the forecast of so many bytes a second.
    pub(crate) fn receive_auto(
        &self,
        node: &Node,
        store: &Arc<Store>,
        parents: Vec<Peer>,
        wanted: f64,
    ) -> Receiving {
        let (say, events) = mpsc::channel(64);
        let config = InboundConfig {
            job: self.job,
            key: self.key.clone(),
            store: store.clone(),
            parents,
            streams: StreamChoice::Auto { least: 1, cap: 3 },
            control: None,
            rank: (Epoch(1), PlanVersion(1)),
            wanted: Rate::from_bytes_per_second(wanted),
        };
        let inbound = Inbound::start(&node.plane, config, say);
        Receiving { inbound, events }
    }

    /// Publishes and holds the file against the payload.
    pub(crate) async fn published(&self, target: Target, fin: Final) {
        let path = target.path().to_owned();
        let publication = tokio::task::spawn_blocking(move || target.publish(&fin).unwrap())
            .await
            .unwrap();
        assert_eq!(publication.path, path);
        assert!(fs::read(&path).unwrap() == self.bytes, "{path} is another file");
    }

    /// Puts a chunk's right bytes into a store, as if it had come before.
    pub(crate) fn put(&self, store: &Arc<Store>, index: ChunkIndex) {
        let begin = index.0 as usize * CHUNK as usize;
        let bytes = &self.bytes[begin..begin + store.layout().len(index)];
        put(store, index, bytes);
    }
}

/// Puts a chunk into a store.
pub(crate) fn put(store: &Arc<Store>, index: ChunkIndex, bytes: &[u8]) {
    let claim = store.claim(index).unwrap();
    claim.write(0, bytes).unwrap();
    let digest = stage_core::digest::chunk_digest(ChunkHash::Blake3, bytes);
    claim.keep(digest, None).unwrap();
}

fn name_of_root() -> stage_core::id::RootName {
    "main".parse().unwrap()
}

/// One agent's data plane and disk.
pub(crate) struct Node {
    pub(crate) plane: Arc<DataPlane>,
    pub(crate) budget: Arc<Budget>,
    pub(crate) roots: Roots,
    pub(crate) state: PathBuf,
}

impl Node {
    pub(crate) fn peer(&self) -> Peer {
        self.peer_at(self.plane.addresses()[0])
    }

    /// This node behind another address.
    pub(crate) fn peer_at(&self, address: SocketAddr) -> Peer {
        Peer {
            node: self.plane.node().clone(),
            addresses: vec![address],
        }
    }
}

/// A source at work.
pub(crate) struct Running {
    pub(crate) source: Source,
    pub(crate) reports: mpsc::Receiver<SourceReport>,
}

impl Running {
    pub(crate) async fn fin(&mut self) -> Final {
        match soon("FINAL", self.reports.recv()).await {
            Some(SourceReport::Final(fin)) => fin,
            other => panic!("{other:?} instead of FINAL"),
        }
    }

    /// Why it fails.
    pub(crate) async fn failure(&mut self) -> Failure {
        match soon("a failure", self.reports.recv()).await {
            Some(SourceReport::Failed(failure)) => failure,
            other => panic!("{other:?} instead of a failure"),
        }
    }

    pub(crate) async fn sha256(&mut self) -> FileDigest {
        match soon("SHA-256", self.reports.recv()).await {
            Some(SourceReport::Sha256(digest)) => digest,
            other => panic!("{other:?} instead of a digest"),
        }
    }
}

/// A target at work.
pub(crate) struct Receiving {
    pub(crate) inbound: Inbound,
    pub(crate) events: mpsc::Receiver<HopEvent>,
}

impl Receiving {
    pub(crate) async fn event(&mut self) -> HopEvent {
        soon("an event", self.events.recv()).await.unwrap()
    }

    /// The events up to and without `Complete`.
    pub(crate) async fn complete(&mut self) -> Vec<HopEvent> {
        let mut before = Vec::new();
        loop {
            match self.event().await {
                HopEvent::Complete => return before,
                other => before.push(other),
            }
        }
    }

    /// From whom it received, one after the other.
    pub(crate) async fn parents(&mut self) -> Vec<String> {
        let events = self.complete().await;
        parents(&events)
    }
}

pub(crate) fn parents(events: &[HopEvent]) -> Vec<String> {
    let moved = events.iter().filter_map(|event| match event {
        HopEvent::Moved { to, .. } => Some(to.to_string()),
        _ => None,
    });
    moved.collect()
}

fn spec(file: &Path) -> SourceSpec {
    SourceSpec {
        paths: vec![SourcePath {
            path: file.as_os_str().as_bytes().to_vec(),
            name: b"genome.db".to_vec(),
        }],
        walk: Default::default(),
        limit: None,
        expect: Vec::new(),
        cache: Default::default(),
    }
}
