//! A cluster of real processes on loopback addresses of its own.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use sha2::{Digest as _, Sha256};
use stage_net::Role;
use stage_net::authority::{Authority, Files};
use tempfile::TempDir;

/// No state in these tests takes longer to come about.
const DEADLINE: Duration = Duration::from_secs(30);

/// A coordinator, and agents on n0, n1 … of which n0 is where sources lie.
pub(crate) struct Cluster {
    dir: TempDir,
    authority: Authority,
    /// The first three octets of every address: tests run side by side and must not meet.
    network: String,
    nodes: usize,
    coordinator: Option<Child>,
    agents: BTreeMap<usize, Child>,
    operator: Files,
}

impl Cluster {
    /// A cluster whose processes all run and know each other.
    pub(crate) fn start(nodes: usize) -> Self {
        let mut cluster = Self::prepare(nodes);
        cluster.start_coordinator();
        for node in 0..nodes {
            cluster.start_agent(node);
        }
        cluster.wait_up(nodes);
        cluster
    }

    /// A cluster of which nothing runs yet.
    pub(crate) fn prepare(nodes: usize) -> Self {
        static NEXT: AtomicU8 = AtomicU8::new(1);
        let dir = tempfile::Builder::new().prefix("stage-test-").tempdir().unwrap();
        let third = NEXT.fetch_add(1, Ordering::Relaxed);
        let second = 20 + std::process::id() % 200;
        let network = format!("127.{second}.{third}");
        let authority = Authority::new("test").unwrap();
        let operator = authority
            .write(dir.path(), Role::Operator("alice".to_owned()))
            .unwrap();
        let topology = format!(
            "[cluster]\nname = \"test\"\n\n[[switch]]\nname = \"s\"\n\n[[node]]\nname = \"n[0-{last}]\"\n\
             address = \"{network}.[10-{top}]\"\nattach = \"s\"\nnic = \"10 Gbit/s\"\n\n[groups]\ntargets = \"n[1-{last}]\"\n",
            last = nodes - 1,
            top = nodes + 9,
        );
        fs::write(dir.path().join("topology.toml"), topology).unwrap();
        for node in 0..nodes {
            fs::create_dir(dir.path().join(format!("root-n{node}"))).unwrap();
        }
        Self {
            dir,
            authority,
            network,
            nodes,
            coordinator: None,
            agents: BTreeMap::new(),
            operator,
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Where the node may write.
    pub(crate) fn root(&self, node: usize) -> PathBuf {
        self.path(&format!("root-n{node}"))
    }

    fn url(&self) -> String {
        format!("https://{}.1:7700", self.network)
    }

    fn stage(&self, identity: &Files) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stage"));
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command
            .arg("--ca")
            .arg(&identity.ca)
            .arg("--cert")
            .arg(&identity.cert)
            .arg("--key")
            .arg(&identity.key);
        command.current_dir(self.dir.path());
        command
    }

    fn log(&self, name: &str) -> File {
        File::options()
            .create(true)
            .append(true)
            .open(self.path(&format!("{name}.log")))
            .unwrap()
    }

    pub(crate) fn start_coordinator(&mut self) {
        let files = self.authority.write(self.dir.path(), Role::Coordinator).unwrap();
        let mut command = self.stage(&files);
        command.args([
            "coordinator",
            "--exit-with-stdin",
            "--topology",
            "topology.toml",
            "--state",
            "state-coordinator",
        ]);
        command.args(["--listen", &format!("{}.1:7700", self.network)]);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(self.log("coordinator"));
        self.coordinator = Some(command.spawn().unwrap());
    }

    pub(crate) fn start_agent(&mut self, node: usize) {
        let child = self
            .agent_command(node, &format!("state-n{node}"), 7701)
            .spawn()
            .unwrap();
        self.agents.insert(node, child);
    }

    /// Starts a node's agent so that it kills itself when it gets to a named point.
    pub(crate) fn start_agent_to_die_at(&mut self, node: usize, point: &str) {
        let mut command = self.agent_command(node, &format!("state-n{node}"), 7701);
        let child = command.env("STAGE_CRASH_AT", point).spawn().unwrap();
        self.agents.insert(node, child);
    }

    /// Waits until the node's agent has killed itself.
    pub(crate) fn wait_dead(&mut self, node: usize) {
        let mut child = self.agents.remove(&node).unwrap();
        self.wait_for("an agent to die", || child.try_wait().unwrap().is_some());
        let status = child.wait().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
    }

    /// The command that runs a node's agent, for those who change it first.
    pub(crate) fn agent_command(&self, node: usize, state: &str, port: u16) -> Command {
        let name = format!("n{node}");
        let files = self
            .authority
            .write(self.dir.path(), Role::Node(name.parse().unwrap()))
            .unwrap();
        let mut command = self.stage(&files);
        command.args([
            "agent",
            "--exit-with-stdin",
            "--node",
            &name,
            "--coordinator",
            &self.url(),
            "--state",
            state,
        ]);
        command.args(["--data-listen", &format!("{}.{}:{port}", self.network, node + 10)]);
        command
            .arg("--root")
            .arg(format!("main={}", self.root(node).display()));
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(self.log(&name));
        command
    }

    /// The process of a node's agent.
    pub(crate) fn agent_process(&self, node: usize) -> u32 {
        self.agents[&node].id()
    }

    /// Starts a node's agent under strace, which writes its calls of these names into a file. It ends when what is given
    /// back is dropped. `None`: there is no strace.
    pub(crate) fn start_traced(&self, node: usize, names: &str, calls: &Path) -> Option<Traced> {
        if Command::new("strace").arg("-V").output().is_err() {
            eprintln!("skipped: strace is not installed");
            return None;
        }
        let agent = self.agent_command(node, &format!("state-n{node}"), 7701);
        let mut traced = Command::new("strace");
        traced.args(["-f", "--seccomp-bpf", "-qq", "-e"]);
        traced.arg(format!("trace={names}")).arg("-o").arg(calls);
        traced.arg(agent.get_program()).args(agent.get_args());
        traced.current_dir(self.dir.path()).stdin(Stdio::piped());
        traced.stdout(Stdio::null()).stderr(Stdio::null());
        Some(Traced(traced.spawn().unwrap()))
    }

    /// kill -9. (Were this process killed instead, the daemons would see their standard input close, and end.)
    pub(crate) fn kill_coordinator(&mut self) {
        let mut child = self.coordinator.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    pub(crate) fn agent_pid(&self, node: usize) -> u32 {
        self.agents[&node].id()
    }

    /// kill -9.
    pub(crate) fn kill_agent(&mut self, node: usize) {
        let mut child = self.agents.remove(&node).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// An operator's command against this cluster.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = self.stage(&self.operator);
        command.args(["--coordinator", &self.url()]).args(args);
        command.stdin(Stdio::null());
        command
    }

    /// A command of a user of this node, who has no certificate and names no coordinator.
    pub(crate) fn local(&self, node: usize, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stage"));
        command
            .env_clear()
            .env("STAGE_AGENT_SOCKET", self.socket(node))
            .current_dir(self.dir.path())
            .args(args)
            .stdin(Stdio::null());
        command
    }

    /// Where the node's agent listens for users of its host.
    pub(crate) fn socket(&self, node: usize) -> PathBuf {
        self.path(&format!("state-n{node}")).join("agent.sock")
    }

    /// Runs an operator's command to its end.
    pub(crate) fn run(&self, args: &[&str]) -> Ran {
        Ran::of(self.command(args).output().unwrap())
    }

    /// `stage push FILE --from n0 --json` and more.
    pub(crate) fn push(&self, file: &Path, more: &[&str]) -> Ran {
        Ran::of(self.push_command(file, more).output().unwrap())
    }

    pub(crate) fn push_command(&self, file: &Path, more: &[&str]) -> Command {
        let mut command = self.command(&["push", "--from", "n0", "--json"]);
        command.arg(file).args(more);
        command
    }

    /// The nodes as `stage nodes --json` shows them.
    pub(crate) fn states(&self) -> BTreeMap<String, Value> {
        let ran = self.run(&["nodes", "--json"]);
        ran.events
            .iter()
            .filter(|e| e["event"] == "node")
            .map(|e| (text(&e["node"]), e.clone()))
            .collect()
    }

    pub(crate) fn wait_up(&self, count: usize) {
        self.wait_for("agents to join", || {
            self.states().values().filter(|n| n["state"] == "up").count() == count
        });
    }

    /// Asks again until it holds.
    pub(crate) fn wait_for(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !holds() {
            assert!(
                begin.elapsed() < DEADLINE,
                "waited too long for {what}; logs:\n{}",
                self.logs()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The job's newest view, as `stage status JOB --json` ends with.
    pub(crate) fn status(&self, job: &str) -> Value {
        self.run(&["status", job, "--json"])
            .events
            .last()
            .cloned()
            .unwrap_or_default()
    }

    pub(crate) fn logs(&self) -> String {
        let mut all = String::new();
        for entry in fs::read_dir(self.dir.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|e| e == "log") {
                let text = fs::read_to_string(&path).unwrap();
                let tail: Vec<_> = text.lines().rev().take(30).collect();
                all += &format!("--- {}\n", path.display());
                tail.iter().rev().for_each(|line| all += &format!("{line}\n"));
            }
        }
        all
    }

    /// A file of pseudo-random bytes on n0.
    pub(crate) fn source(&self, name: &str, size: u64) -> PathBuf {
        let path = self.path(name);
        let mut file = File::create(&path).unwrap();
        // xorshift: no two chunks alike, the same in every run.
        let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ size;
        let mut left = size;
        let mut block = vec![0; 1 << 20];
        while left > 0 {
            for word in block.chunks_exact_mut(8) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                word.copy_from_slice(&state.to_le_bytes());
            }
            let len = left.min(block.len() as u64);
            file.write_all(&block[..usize::try_from(len).unwrap()]).unwrap();
            left -= len;
        }
        path
    }

    /// Every node of `nodes` has the file under its name with this content, and nothing else of ours.
    pub(crate) fn assert_published(&self, nodes: impl IntoIterator<Item = usize>, source: &Path) {
        let expected = sha256(source);
        for node in nodes {
            let copy = self.root(node).join(source.file_name().unwrap());
            assert_eq!(sha256(&copy), expected, "n{node}");
        }
    }

    /// What lies in a node's root, partials included.
    pub(crate) fn listing(&self, node: usize) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(self.root(node))
            .unwrap()
            .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    /// Waits until no root holds a partial and no agent a journal.
    pub(crate) fn wait_clean(&self) {
        self.wait_for("partials and journals to go", || {
            (0..self.nodes).all(|node| {
                let journals = self.path(&format!("state-n{node}")).join("jobs");
                let none = fs::read_dir(&journals)
                    .map(|mut dir| dir.next().is_none())
                    .unwrap_or(true);
                none && !self.listing(node).iter().any(|name| name.starts_with(".stage-"))
            })
        });
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for child in self.agents.values_mut().chain(self.coordinator.as_mut()) {
            // Ended already is what is wanted.
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            eprintln!("{}", self.logs());
        }
    }
}

/// An agent under strace.
pub(crate) struct Traced(Child);

impl Drop for Traced {
    fn drop(&mut self) {
        // Its standard input closes, so the agent ends, and strace with it.
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// A command that has ended.
pub(crate) struct Ran {
    pub(crate) exit: i32,
    /// The lines of standard output, where they are JSON.
    pub(crate) events: Vec<Value>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    pub(crate) fn of(output: Output) -> Self {
        let stdout = String::from_utf8(output.stdout).unwrap();
        let events = stdout
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect();
        Self {
            exit: output.status.code().unwrap_or(-1),
            events,
            stdout,
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// The last event, which says how it ended.
    pub(crate) fn last(&self) -> &Value {
        self.events
            .last()
            .unwrap_or_else(|| panic!("no event; stdout {:?}, stderr {:?}", self.stdout, self.stderr))
    }

    #[track_caller]
    pub(crate) fn expect(self, exit: i32) -> Self {
        assert_eq!(
            self.exit, exit,
            "stdout:\n{}\nstderr:\n{}",
            self.stdout, self.stderr
        );
        if let Some(last) = self.events.last() {
            assert_eq!(
                last["exit"], exit,
                "the last event says the exit code too: {last}"
            );
        }
        self
    }

    /// The outcome of one node in the last event.
    pub(crate) fn node(&self, name: &str) -> &Value {
        let nodes = self.last()["nodes"]
            .as_array()
            .unwrap_or_else(|| panic!("no nodes in {}", self.last()));
        nodes
            .iter()
            .find(|node| node["node"] == name)
            .unwrap_or_else(|| panic!("no {name} in {}", self.last()))
    }
}

pub(crate) fn text(value: &Value) -> String {
    value
        .as_str()
        .unwrap_or_else(|| panic!("{value} is not a text"))
        .to_owned()
}

pub(crate) fn sha256(path: &Path) -> String {
    let mut file = File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut hasher = Sha256::new();
    std::io::copy(&mut file, &mut HashWriter(&mut hasher)).unwrap();
    hasher
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

struct HashWriter<'a>(&'a mut Sha256);

impl std::io::Write for HashWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
