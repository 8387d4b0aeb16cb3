//! A coordinator under test.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use stage_coordinator::{Config, Coordinator, Error};
use stage_core::digest::ChunkHash;
use stage_net::Net;
use stage_net::grpc::connect;
use stage_proto::v1;
use stage_proto::v1::operator_client::OperatorClient;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

/// No state that a test waits for takes longer; it fails then.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

pub(crate) struct Lab {
    pub(crate) dir: TempDir,
    pub(crate) address: SocketAddr,
    stop: CancellationToken,
    server: Option<JoinHandle<Result<(), Error>>>,
}

fn config(dir: &Path) -> Config {
    Config {
        topology: dir.join("topology.toml"),
        listen: "127.0.0.1:0".parse().unwrap(),
        state: dir.join("state"),
        chunk_hash: ChunkHash::Blake3,
    }
}

impl Lab {
    pub(crate) async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let topology = r#"
[cluster]
name = "c1"
[[switch]]
name = "s"
[[node]]
name = "n[0-4]"
address = "127.0.0.[10-14]"
attach = "s"
nic = "10 Gbit/s"
[roots]
scratch = "/scratch"
[groups]
three = "n[1-3]"
said = { command = ["printf", "n[1-2]"], every = "60 s" }
"#;
        std::fs::write(dir.path().join("topology.toml"), topology).unwrap();
        let mut lab = Self {
            dir,
            address: "127.0.0.1:0".parse().unwrap(),
            stop: CancellationToken::new(),
            server: None,
        };
        lab.begin().await.unwrap();
        lab
    }

    /// Starts a coordinator on the state directory.
    pub(crate) async fn begin(&mut self) -> Result<(), Error> {
        let coordinator = Coordinator::start(config(self.dir.path()), Net::insecure(false)).await?;
        self.address = coordinator.address();
        self.stop = CancellationToken::new();
        self.server = Some(tokio::spawn(coordinator.run(self.stop.clone())));
        Ok(())
    }

    /// Stops it and gives how it ended.
    pub(crate) async fn end(&mut self) -> Result<(), Error> {
        self.stop.cancel();
        self.ended().await
    }

    /// Waits until it ends by itself.
    pub(crate) async fn ended(&mut self) -> Result<(), Error> {
        let server = self.server.take().unwrap();
        tokio::time::timeout(DEADLINE, server).await.unwrap().unwrap()
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    pub(crate) async fn channel(&self) -> Channel {
        let url = format!("http://{}", self.address).parse().unwrap();
        connect(&Net::insecure(false), &url).await.unwrap()
    }

    pub(crate) async fn operator(&self) -> OperatorClient<Channel> {
        OperatorClient::new(self.channel().await)
    }

    /// Submits a push from n0.
    pub(crate) async fn push(&self, targets: &str, change: impl FnOnce(&mut v1::SubmitRequest)) -> String {
        let mut request = submit(targets);
        change(&mut request);
        let reply = self.operator().await.submit(request).await.unwrap().into_inner();
        assert_eq!(reply.failure, None);
        reply.job
    }

    /// Watches the job until its view is as wanted.
    pub(crate) async fn until(&self, job: &str, wanted: impl Fn(&v1::JobView) -> bool) -> v1::JobView {
        let request = v1::WatchRequest {
            hello: Some(stage_proto::version::hello()),
            job: job.to_owned(),
        };
        let mut views = self.operator().await.watch(request).await.unwrap().into_inner();
        let mut last = None;
        let wait = async {
            while let Some(view) = views.message().await.unwrap() {
                if wanted(&view) {
                    return view;
                }
                last = Some(view);
            }
            panic!("the job ended another way: {last:#?}")
        };
        match tokio::time::timeout(DEADLINE, wait).await {
            Ok(view) => view,
            Err(_) => panic!("waited in vain; {job} is {:#?}", self.job(job).await),
        }
    }

    pub(crate) async fn job(&self, job: &str) -> Option<v1::JobView> {
        let request = v1::JobsRequest {
            hello: Some(stage_proto::version::hello()),
            limit: 0,
        };
        let jobs = self
            .operator()
            .await
            .jobs(request)
            .await
            .unwrap()
            .into_inner()
            .jobs;
        jobs.into_iter().find(|view| view.job == job)
    }

    pub(crate) async fn nodes(&self) -> Vec<(String, String)> {
        let request = v1::NodesRequest {
            hello: Some(stage_proto::version::hello()),
        };
        let reply = self.operator().await.nodes(request).await.unwrap().into_inner();
        reply
            .nodes
            .into_iter()
            .map(|node| (node.node, node.state))
            .collect()
    }
}

pub(crate) fn random_id() -> String {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).unwrap();
    stage_core::id::JobId::from_random(bytes).to_string()
}

pub(crate) fn submit(targets: &str) -> v1::SubmitRequest {
    v1::SubmitRequest {
        hello: Some(stage_proto::version::hello()),
        job: random_id(),
        paths: paths("/data/genome.db"),
        targets: targets.to_owned(),
        from: "n0".to_owned(),
        shape: "chain".to_owned(),
        if_exists: v1::IfExists::Fail.into(),
        unfit: v1::UnfitRule::Wait.into(),
        ..v1::SubmitRequest::default()
    }
}

/// The state of each target, in order.
pub(crate) fn states(view: &v1::JobView) -> Vec<&str> {
    view.nodes.iter().map(|node| node.state.as_str()).collect()
}

pub(crate) fn paths(path: &str) -> Vec<v1::SourcePath> {
    vec![v1::SourcePath {
        path: path.into(),
        name: Vec::new(),
    }]
}
