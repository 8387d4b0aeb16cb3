//! Which agents are here. Only what the driver asks: it owns the time and all decisions about jobs.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use stage_core::assignment::Place;
use stage_core::failure::{Code, Failure};
use stage_core::id::{ClusterId, Epoch, InstanceId, JobId, NodeName};
use stage_core::job::{LEASE, Now, Presence, Standing};
use stage_core::plan::{Controls, WindowLimits};
use stage_core::topology::Topology;
use stage_proto::v1;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// In the first moments after a start nobody is declared away in mid-job: nobody's last heartbeat is known.
pub(crate) const START_GRACE: Duration = Duration::from_secs(30);

/// Leases are looked at every second. Where that took so long, it was this process that was silent (stopped, or its
/// machine asleep), and what agents said meanwhile lies unread.
const BLIND: Duration = Duration::from_secs(5);
/// A refusal is shown for so long: a refused agent dials again every 30 s.
const REFUSAL_SHOWN: Duration = Duration::from_secs(90);
/// Refusals kept at most: their names come from strangers.
const REFUSALS: usize = 64;

/// What an agent said of itself when it registered, decoded.
#[derive(Debug)]
pub(crate) struct Registration {
    pub(crate) node: NodeName,
    pub(crate) instance: InstanceId,
    pub(crate) version: String,
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) roots: Vec<v1::RootReport>,
    pub(crate) windows: Option<WindowLimits>,
    pub(crate) controls: Option<Controls>,
    pub(crate) jobs: Vec<JobId>,
    pub(crate) cluster: Option<ClusterId>,
    pub(crate) epoch: Epoch,
}

/// Tells one session from another, also of the same node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SessionId(pub(crate) u64);

/// The way to an agent.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) out: mpsc::Sender<v1::CoordinatorMessage>,
    /// Ends the task that reads from the agent.
    pub(crate) end: CancellationToken,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end.cancel();
    }
}

#[derive(Debug)]
struct Agent {
    instance: InstanceId,
    version: String,
    addresses: Vec<SocketAddr>,
    roots: Vec<v1::RootReport>,
    session: Option<Session>,
    heard: Duration,
    leaving: bool,
    /// Its lease runs.
    up: bool,
    /// Since when it has a session, or has none.
    since_unix_ms: u64,
}

impl Agent {
    /// It has a session. Without one its jobs wait until its lease ends, but who asks is told at once that it is away.
    fn is_here(&self) -> bool {
        self.up && self.session.is_some()
    }
}

struct Refusal {
    failure: Failure,
    version: String,
    at: Duration,
    since_unix_ms: u64,
}

/// All agents that were heard of since the start.
#[derive(Default)]
pub(crate) struct Fleet {
    agents: BTreeMap<NodeName, Agent>,
    refused: BTreeMap<String, Refusal>,
    drained: BTreeMap<NodeName, u64>,
    started_unix_ms: u64,
    grace_over: bool,
    /// When leases were looked at last.
    looked: Duration,
}

impl Fleet {
    pub(crate) fn new(drained: impl IntoIterator<Item = NodeName>, now: Now) -> Self {
        Self {
            drained: drained.into_iter().map(|node| (node, now.unix_ms)).collect(),
            started_unix_ms: now.unix_ms,
            ..Self::default()
        }
    }

    /// Whether this agent may have the name it asks for.
    pub(crate) fn admit(
        &self,
        registration: &Registration,
        topology: &Topology,
        cluster: ClusterId,
    ) -> Result<(), Failure> {
        let node = &registration.node;
        if registration.cluster.is_some_and(|theirs| theirs != cluster) {
            return Err(Failure::new(
                Code::ForeignCluster,
                format!("the agent of {node} belongs to another cluster than this coordinator ({cluster})"),
                "check --coordinator; to move the node here, stop its agent and empty the agent's state directory",
            )
            .on(node));
        }
        if topology.node(node).is_none() {
            return Err(Failure::new(
                Code::UnknownTarget,
                format!("{node} is not in the topology of cluster {}", topology.cluster()),
                "add the node to the topology, or start the agent with the right --node",
            )
            .on(node));
        }
        if registration.addresses.is_empty() {
            return Err(Failure::new(
                Code::Config,
                format!("the agent of {node} announces no data address"),
                "start it with --data-listen",
            )
            .on(node));
        }
        match self.agents.get(node) {
            Some(agent) if agent.up && agent.instance != registration.instance => Err(Failure::new(
                Code::NameTaken,
                format!("another agent runs as {node}"),
                format!(
                    "stop one of the two (the other announces {}), or start this one with another --node",
                    agent
                        .addresses
                        .first()
                        .map_or_else(String::new, ToString::to_string)
                ),
            )
            .on(node)),
            _ => Ok(()),
        }
    }

    /// Takes an admitted agent in; an older session of the same agent ends.
    pub(crate) fn register(&mut self, registration: &Registration, session: Session, now: Now) {
        self.refused.remove(registration.node.as_str());
        let old = self.agents.get(&registration.node);
        let since_unix_ms = old
            .filter(|agent| agent.is_here())
            .map_or(now.unix_ms, |agent| agent.since_unix_ms);
        let agent = Agent {
            instance: registration.instance,
            version: registration.version.clone(),
            addresses: registration.addresses.clone(),
            roots: registration.roots.clone(),
            session: Some(session),
            heard: now.up,
            leaving: false,
            up: true,
            since_unix_ms,
        };
        self.agents.insert(registration.node.clone(), agent);
    }

    /// Keeps a refusal for `nodes` to show.
    pub(crate) fn refuse(&mut self, node: &str, version: &str, failure: Failure, now: Now) {
        let since_unix_ms = self
            .refused
            .get(node)
            .map_or(now.unix_ms, |refusal| refusal.since_unix_ms);
        if self.refused.len() >= REFUSALS && !self.refused.contains_key(node) {
            return;
        }
        let refusal = Refusal {
            failure,
            version: version.to_owned(),
            at: now.up,
            since_unix_ms,
        };
        self.refused.insert(node.to_owned(), refusal);
    }

    /// The agent said something in this session; `false` if the session is not its present one.
    pub(crate) fn heard(&mut self, node: &NodeName, session: SessionId, now: Now) -> bool {
        match self.agents.get_mut(node) {
            Some(agent) if agent.session.as_ref().is_some_and(|s| s.id == session) => {
                agent.heard = now.up;
                true
            }
            _ => false,
        }
    }

    /// New free space; `true` if it differs from what was known.
    pub(crate) fn set_roots(&mut self, node: &NodeName, roots: Vec<v1::RootReport>) -> bool {
        match self.agents.get_mut(node) {
            Some(agent) if !roots.is_empty() && agent.roots != roots => {
                agent.roots = roots;
                true
            }
            _ => false,
        }
    }

    /// Root and directory below it that a place means on a node; `None` where its agent has told of no such root.
    pub(crate) fn landing<'a>(&'a self, node: &NodeName, place: &'a Place) -> Option<(&'a str, &'a [u8])> {
        let roots = &self.agents.get(node)?.roots;
        match place {
            Place::Root { root: None, dir } => Some((roots.first()?.name.as_str(), dir)),
            Place::Root {
                root: Some(name),
                dir,
            } => Some((name.as_str(), dir)),
            Place::Absolute(path) => roots
                .iter()
                .filter_map(|root| {
                    let rest = path.strip_prefix(root.path.trim_end_matches('/').as_bytes())?;
                    match rest {
                        [] => Some((root, rest)),
                        [b'/', below @ ..] => Some((root, below)),
                        _ => None,
                    }
                })
                .max_by_key(|(root, _)| root.path.len())
                .map(|(root, below)| (root.name.as_str(), below)),
        }
    }

    /// The agent is about to stop.
    pub(crate) fn set_leaving(&mut self, node: &NodeName) {
        if let Some(agent) = self.agents.get_mut(node) {
            agent.leaving = true;
        }
    }

    /// The session ended. An agent that had said that it would leave is away at once: the result is `true` then.
    pub(crate) fn closed(&mut self, node: &NodeName, session: SessionId, now: Now) -> bool {
        let Some(agent) = self.agents.get_mut(node) else {
            return false;
        };
        if agent.session.as_ref().is_none_or(|s| s.id != session) {
            return false;
        }
        agent.session = None;
        agent.since_unix_ms = now.unix_ms;
        if agent.leaving && agent.up {
            agent.up = false;
            return true;
        }
        false
    }

    /// The nodes whose lease has ended since the last call; once, when the grace after a start is over, also those
    /// of `topology` that have not come at all.
    pub(crate) fn expired(&mut self, topology: &Topology, now: Now) -> Vec<NodeName> {
        let mut gone = Vec::new();
        let blind = now.up.saturating_sub(std::mem::replace(&mut self.looked, now.up));
        if blind >= BLIND {
            tracing::warn!(
                seconds = blind.as_secs(),
                "this coordinator did not run for a while; every agent gets a new lease"
            );
            for agent in self.agents.values_mut().filter(|agent| agent.up) {
                agent.heard = now.up;
            }
        }
        if now.up < START_GRACE {
            return gone;
        }
        for (node, agent) in &mut self.agents {
            if agent.up && agent.heard + LEASE <= now.up {
                agent.up = false;
                if agent.session.take().is_some() {
                    agent.since_unix_ms = now.unix_ms;
                }
                gone.push(node.clone());
            }
        }
        if !std::mem::replace(&mut self.grace_over, true) {
            let agents = &self.agents;
            gone.extend(
                topology
                    .nodes()
                    .iter()
                    .map(|node| &node.name)
                    .filter(|node| !agents.contains_key(*node))
                    .cloned(),
            );
        }
        self.refused
            .retain(|_, refusal| refusal.at + REFUSAL_SHOWN > now.up);
        gone
    }

    /// What a new job should know of a node.
    pub(crate) fn standing(&self, node: &NodeName, now: Now) -> Standing {
        let agent = self.agents.get(node);
        let presence = match agent {
            Some(agent) if agent.session.is_some() && agent.leaving => Presence::Leaving,
            Some(agent) if agent.session.is_some() => Presence::Up,
            Some(_) if now.up >= stage_core::job::CONNECT_GRACE => Presence::Away,
            _ => Presence::Unknown,
        };
        Standing {
            presence,
            drained: self.drained.contains_key(node),
            addresses: agent.map(|agent| agent.addresses.clone()).unwrap_or_default(),
        }
    }

    /// The session of a connected agent.
    pub(crate) fn session(&self, node: &NodeName) -> Option<SessionId> {
        Some(self.agents.get(node)?.session.as_ref()?.id)
    }

    /// The nodes that were declared away.
    pub(crate) fn drained(&self) -> impl Iterator<Item = &NodeName> {
        self.drained.keys()
    }

    /// Where a node's agent listens for data, best first.
    pub(crate) fn addresses(&self, node: &NodeName) -> Vec<SocketAddr> {
        self.agents
            .get(node)
            .map(|agent| agent.addresses.clone())
            .unwrap_or_default()
    }

    /// Why an agent without a session does not answer.
    pub(crate) fn why_silent(&self, node: &NodeName) -> Failure {
        let failure = if self.drained.contains_key(node) {
            Failure::new(
                Code::Drained,
                "the node is drained and its agent is away",
                "`stage nodes resume` takes it back",
            )
        } else {
            Failure::new(
                Code::Away,
                "the agent is away",
                "`stage nodes` says since when; start the agent or drain the node",
            )
        };
        failure.on(node)
    }

    /// Sends to the agent if it is connected. One that does not read is cut off: it comes back and is told all again.
    pub(crate) fn send(&mut self, node: &NodeName, message: v1::coordinator_message::Body) {
        let Some(agent) = self.agents.get_mut(node) else {
            return;
        };
        let Some(session) = &agent.session else { return };
        let message = v1::CoordinatorMessage { body: Some(message) };
        // A closed one says so by itself.
        if let Err(mpsc::error::TrySendError::Full(_)) = session.out.try_send(message) {
            tracing::warn!(%node, "the agent does not read what it is told: its session ends");
            agent.session = None;
        }
    }

    /// Declares a node away, or takes that back; `false` if nothing changed.
    pub(crate) fn drain(&mut self, node: &NodeName, drain: bool, now: Now) -> bool {
        if drain {
            self.drained.insert(node.clone(), now.unix_ms).is_none()
        } else {
            self.drained.remove(node).is_some()
        }
    }

    /// Every node as `stage nodes` shows it: those of the topology in its order, then strangers that were refused.
    pub(crate) fn view(&self, topology: &Topology) -> Vec<v1::FleetNode> {
        let mut nodes = Vec::new();
        let refused = |name: &str, refusal: &Refusal| v1::FleetNode {
            node: name.to_owned(),
            state: "refused".to_owned(),
            version: refusal.version.clone(),
            since_unix_ms: refusal.since_unix_ms,
            roots: Vec::new(),
            failure: Some((&refusal.failure).into()),
        };
        for node in topology.nodes() {
            let name = node.name.as_str();
            let refusal = self.refused.get(name);
            let agent = self.agents.get(&node.name);
            let up = agent.is_some_and(|agent| agent.up);
            let (state, since_unix_ms) = match (self.drained.get(&node.name), agent) {
                (Some(since), _) => ("drained", *since),
                (None, Some(agent)) if agent.is_here() => ("up", agent.since_unix_ms),
                (None, Some(agent)) => ("away", agent.since_unix_ms),
                (None, None) => ("away", self.started_unix_ms),
            };
            // A second agent under a name that lives is shown beside the first.
            if up || state == "drained" || refusal.is_none() {
                nodes.push(v1::FleetNode {
                    node: name.to_owned(),
                    state: state.to_owned(),
                    version: agent.map(|agent| agent.version.clone()).unwrap_or_default(),
                    since_unix_ms,
                    roots: agent.map(|agent| agent.roots.clone()).unwrap_or_default(),
                    failure: None,
                });
            }
            nodes.extend(refusal.map(|refusal| refused(name, refusal)));
        }
        for (name, refusal) in &self.refused {
            let known = name
                .parse::<NodeName>()
                .is_ok_and(|name| topology.node(&name).is_some());
            if !known {
                nodes.push(refused(name, refusal));
            }
        }
        nodes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOPOLOGY: &str = "[cluster]\nname = \"c\"\n[[switch]]\nname = \"s\"\n[[node]]\nname = \"n[0-1]\"\n\
                            address = \"10.0.0.[1-2]\"\nattach = \"s\"\nnic = \"1 Gbit/s\"\n[roots]\nscratch = \"/s\"\n";

    fn at(seconds: u64) -> Now {
        Now {
            up: Duration::from_secs(seconds),
            unix_ms: seconds * 1000,
        }
    }

    fn registration(instance: u8) -> Registration {
        Registration {
            node: "n1".parse().unwrap(),
            instance: InstanceId::from_random([instance; 16]),
            version: "1".to_owned(),
            addresses: vec!["10.0.0.2:7701".parse().unwrap()],
            roots: Vec::new(),
            windows: None,
            controls: None,
            jobs: Vec::new(),
            cluster: None,
            epoch: Epoch(0),
        }
    }

    #[test]
    fn a_place_is_the_same_however_it_is_written() {
        let topology = Topology::parse("t.toml", TOPOLOGY).unwrap();
        let mut fleet = Fleet::new(Vec::new(), at(0));
        let root = |name: &str, path: &str| v1::RootReport {
            name: name.to_owned(),
            path: path.to_owned(),
            ..v1::RootReport::default()
        };
        let mut registration = registration(1);
        registration.roots = vec![root("scratch", "/s"), root("fast", "/s/nvme/")];
        fleet
            .admit(&registration, &topology, ClusterId::from_random([1; 16]))
            .unwrap();
        fleet.register(&registration, session(1).0, at(1));
        let node = "n1".parse().unwrap();
        let lands = |dest: &str| {
            let place = Place::parse(dest.as_bytes()).unwrap();
            fleet
                .landing(&node, &place)
                .map(|(root, dir)| format!("{root}:{}", String::from_utf8_lossy(dir)))
        };
        for (dest, landing) in [
            ("", Some("scratch:")),
            ("scratch:", Some("scratch:")),
            ("/s", Some("scratch:")),
            ("scratch:db/x", Some("scratch:db/x")),
            ("/s/db/x/", Some("scratch:db/x")),
            ("/s/nvme/db", Some("fast:db")),
            ("fast:", Some("fast:")),
            ("/sx", None),
        ] {
            assert_eq!(lands(dest).as_deref(), landing, "{dest}");
        }
    }

    fn session(id: u64) -> (Session, mpsc::Receiver<v1::CoordinatorMessage>) {
        let (out, queue) = mpsc::channel(1);
        let session = Session {
            id: SessionId(id),
            out,
            end: CancellationToken::new(),
        };
        (session, queue)
    }

    #[test]
    fn a_lease_outlives_its_session_and_ends_with_silence() {
        let topology = Topology::parse("t", TOPOLOGY).unwrap();
        let cluster = ClusterId::from_random([1; 16]);
        let n1 = registration(1).node;
        let mut fleet = Fleet::new([], at(0));
        let (first, _queue) = session(1);
        fleet.register(&registration(1), first, at(1));
        assert!(
            fleet.expired(&topology, at(29)).is_empty(),
            "nobody is away so soon after a start"
        );
        assert!(fleet.heard(&n1, SessionId(1), at(29)));
        let never_came: Vec<NodeName> = vec!["n0".parse().unwrap()];
        assert_eq!(fleet.expired(&topology, at(30)), never_came);

        assert!(!fleet.closed(&n1, SessionId(1), at(31)), "it may come back");
        assert_eq!(
            fleet.standing(&n1, at(31)).presence,
            Presence::Away,
            "for a new job it is away at once"
        );
        assert_eq!(
            fleet
                .admit(&registration(2), &topology, cluster)
                .unwrap_err()
                .code,
            Code::NameTaken
        );
        assert!(fleet.admit(&registration(1), &topology, cluster).is_ok());
        for second in 31..=38 {
            assert!(fleet.expired(&topology, at(second)).is_empty());
        }
        assert_eq!(fleet.expired(&topology, at(39)), std::slice::from_ref(&n1));
        assert!(fleet.expired(&topology, at(40)).is_empty(), "told once");
        assert!(fleet.admit(&registration(2), &topology, cluster).is_ok());
    }

    #[test]
    fn who_did_not_run_takes_no_lease_for_ended() {
        let topology = Topology::parse("t", TOPOLOGY).unwrap();
        let mut fleet = Fleet::new([], at(0));
        let n1 = registration(1).node;
        let (first, _queue) = session(1);
        fleet.register(&registration(1), first, at(1));
        for second in 26..=31 {
            fleet.expired(&topology, at(second));
        }
        assert!(fleet.heard(&n1, SessionId(1), at(31)));
        assert!(
            fleet.expired(&topology, at(90)).is_empty(),
            "a minute in which nobody listened"
        );
        assert!(!fleet.closed(&n1, SessionId(1), at(90)), "it may come back");
        for second in 91..100 {
            assert!(fleet.expired(&topology, at(second)).is_empty());
        }
        assert_eq!(fleet.expired(&topology, at(100)), std::slice::from_ref(&n1));
    }

    #[test]
    fn an_older_session_has_no_say_and_a_goodbye_is_believed() {
        let mut fleet = Fleet::new([], at(0));
        let n1 = registration(1).node;
        let (first, _old) = session(1);
        let ended = first.end.clone();
        fleet.register(&registration(1), first, at(1));
        let (second, mut queue) = session(2);
        fleet.register(&registration(1), second, at(2));
        assert!(ended.is_cancelled(), "the older session is over");
        assert!(!fleet.heard(&n1, SessionId(1), at(3)));
        assert!(!fleet.closed(&n1, SessionId(1), at(3)));
        let beat = v1::coordinator_message::Body::Heartbeat(v1::Heartbeat::default());
        fleet.send(&n1, beat.clone());
        assert!(queue.try_recv().is_ok());

        fleet.set_leaving(&n1);
        assert_eq!(fleet.standing(&n1, at(4)).presence, Presence::Leaving);
        assert!(fleet.closed(&n1, SessionId(2), at(4)));

        // Who does not read is cut off.
        let (third, _unread) = session(3);
        fleet.register(&registration(1), third, at(5));
        fleet.send(&n1, beat.clone());
        fleet.send(&n1, beat);
        assert_eq!(fleet.standing(&n1, at(6)).presence, Presence::Away);
    }
}
