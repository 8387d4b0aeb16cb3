//! What is known beside the topology, and what it says of a hop.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::cost::{self, Control, StreamBound, StreamPath};
use crate::id::{CongestionControl, NodeName, SwitchName};
use crate::topology::{EdgeId, Route, Topology};
use crate::units::{ByteCount, Rate};

/// What is known beside the topology: measurements and what hosts say of themselves.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Facts {
    /// Of each node.
    pub nodes: BTreeMap<NodeName, NodeFacts>,
    /// RTT measured between two nodes, in the order (parent, child).
    pub rtts: BTreeMap<(NodeName, NodeName), Duration>,
    /// Measured between two nodes at these switches, of which the second is the receiver's: what any two there will meet
    /// that were not measured themselves.
    pub paths: BTreeMap<(SwitchName, SwitchName), PathFacts>,
    /// What an interface or a link was measured to carry in a direction, payload only, where that is less than the
    /// topology promises.
    pub edges: BTreeMap<EdgeId, Rate>,
    /// What pushes met between two nodes, (parent, child).
    pub hops: BTreeMap<(NodeName, NodeName), HopFacts>,
}

impl Facts {
    /// What an edge carries of payload: as measured, or as much of what the topology says as a link carries at best.
    pub fn goodput(&self, topology: &Topology, edge: EdgeId) -> Rate {
        let promised = cost::goodput(topology.capacity(edge));
        self.edges
            .get(&edge)
            .map_or(promised, |measured| promised.min(*measured))
    }

    /// What was measured between other nodes at the switches where this route begins and ends.
    pub(crate) fn path(&self, route: &Route) -> Option<&PathFacts> {
        if self.paths.is_empty() {
            return None;
        }
        let ends = (route.switches.first()?.clone(), route.switches.last()?.clone());
        self.paths.get(&ends)
    }

    /// What pushes met on this very hop.
    pub(crate) fn hop(&self, parent: &NodeName, child: &NodeName) -> HopFacts {
        if self.hops.is_empty() {
            return HopFacts::default();
        }
        let met = self.hops.get(&(parent.clone(), child.clone()));
        met.cloned().unwrap_or_default()
    }

    /// What was measured between other nodes at the switches where this route begins and ends, with the congestion control
    /// that a hop from this parent will have.
    pub(crate) fn measured(
        &self,
        parent: &NodeName,
        route: &Route,
        control: Option<&CongestionControl>,
    ) -> Option<&PathFacts> {
        let path = self.path(route)?;
        let had = self.resolved(parent, path.control.as_ref());
        (had == self.resolved(parent, control)).then_some(path)
    }

    /// Whether a host's connections may have this congestion control; one that does not say what it has may.
    pub fn offers(&self, node: &NodeName, control: &CongestionControl) -> bool {
        self.controls(node)
            .is_none_or(|controls| controls.offered.contains(control))
    }

    /// The congestion control of a hop's connections, asked for or the host's own; `None`: nobody says.
    pub(crate) fn resolved(
        &self,
        parent: &NodeName,
        asked: Option<&CongestionControl>,
    ) -> Option<CongestionControl> {
        let own = || self.controls(parent).map(|controls| &controls.default);
        asked.or_else(own).cloned()
    }

    fn controls(&self, node: &NodeName) -> Option<&Controls> {
        self.nodes.get(node)?.controls.as_ref()
    }

    /// The congestion control that a hop's connections ask for, those that send: what the topology says, else BBR where loss
    /// would take more than four streams of cubic's to fill the way, and cubic where the way is short. `None`: its host's own,
    /// also where that offers no other, and where nobody has said or measured how long the way is.
    ///
    /// Every ten seconds BBR sends next to nothing for 200 ms, to see the round trip without a queue. Along a chain what each
    /// hop loses by that adds up, and nobody learns anything from it where the round trip is that of a switch.
    pub fn control(
        &self,
        topology: &Topology,
        parent: &NodeName,
        child: &NodeName,
        route: &Route,
    ) -> Option<CongestionControl> {
        if let Some(asked) = &route.congestion_control {
            return self.offers(parent, asked).then(|| asked.clone());
        }
        let path = StreamPath {
            control: Control::Loss,
            ..self.stream_path(parent, child, route, None, false)
        };
        let is_near = path.rtt <= cost::NEAR;
        // It was measured with BBR because there was loss. As long as that is seen, it is asked for again.
        if let Some(path) = self.path(route)
            && path.loss >= cost::LOSSY
            && let Some(measured) = &path.control
            && Control::of(measured) == Control::Model
            && self.offers(parent, measured)
            && !is_near
        {
            return Some(measured.clone());
        }
        let carries = route.edges.iter().map(|edge| self.goodput(topology, *edge));
        let carries = carries.fold(Rate::UNLIMITED, Rate::min);
        let (suits, name) = match path.rate() {
            (one, StreamBound::Loss) if one.times(cost::FEW_STREAMS) < carries => (Control::Model, cost::BBR),
            _ if is_near && self.knows_rtt(parent, child, route) => (Control::Loss, cost::CUBIC),
            _ => return None,
        };
        let controls = self.controls(parent)?;
        if Control::of(&controls.default) == suits {
            return None;
        }
        controls
            .offered
            .iter()
            .find(|offered| offered.as_str() == name)
            .cloned()
    }

    /// The path of one of a hop's streams, which ask for this congestion control; `None`: for none.
    pub(crate) fn stream_path(
        &self,
        parent: &NodeName,
        child: &NodeName,
        route: &Route,
        control: Option<&CongestionControl>,
        encrypted: bool,
    ) -> StreamPath {
        let windows = |node: &NodeName| -> WindowLimits {
            let facts = self.nodes.get(node);
            facts.and_then(|facts| facts.windows).unwrap_or_default()
        };
        let own = self.controls(parent).map(|controls| &controls.default);
        let of = |asked: Option<&CongestionControl>| asked.or(own).map_or(Control::Loss, Control::of);
        // Where more streams brought more, what was sent again was lost, and the queue was not full. BBR fills a queue now
        // and then to see how long it is, and loses there.
        let seen = self.path(route).filter(|path| {
            of(path.control.as_ref()) == Control::Loss && !path.filled && path.loss >= cost::LOSSY
        });
        StreamPath {
            rtt: self.rtt(parent, child, route),
            sender: windows(parent),
            receiver: windows(child),
            loss: route.loss.max(seen.map_or(0.0, |path| path.loss)),
            control: of(control),
            encrypted,
        }
    }

    /// Whether a hop's RTT is more than a guess.
    fn knows_rtt(&self, parent: &NodeName, child: &NodeName, route: &Route) -> bool {
        let is_within_a_switch = route.switches.len() <= 1;
        is_within_a_switch
            || route.rtt.is_some()
            || self.path(route).is_some()
            || self.rtts.contains_key(&(parent.clone(), child.clone()))
    }

    /// A hop's RTT: measured, else measured between others at the same switches, else what the links on the way say,
    /// else [`crate::cost::SWITCH_RTT`] for each switch.
    pub fn rtt(&self, parent: &NodeName, child: &NodeName, route: &Route) -> Duration {
        let measured = if self.rtts.is_empty() {
            None
        } else {
            self.rtts.get(&(parent.clone(), child.clone())).copied()
        };
        let switches = u32::try_from(route.switches.len()).unwrap_or(u32::MAX);
        measured
            .or_else(|| self.path(route).map(|path| path.rtt))
            .or(route.rtt)
            .unwrap_or_else(|| cost::SWITCH_RTT.saturating_mul(switches))
    }
}

/// What is known of the way from one switch to another, or of that through one.
#[derive(Debug, Clone, PartialEq)]
pub struct PathFacts {
    /// Round trip.
    pub rtt: Duration,
    /// What 1, 2, 4 … streams carried together, as long as more of them carried more; counts and rates ascend.
    pub rates: Vec<(u16, Rate)>,
    /// More streams than the last of these brought nothing: it was not they that limited it.
    pub filled: bool,
    /// The share of segments that were sent again at the highest rate, 0 to 1.
    pub loss: f64,
    /// The congestion control that was asked for; `None`: each host's own.
    pub control: Option<CongestionControl>,
}

/// What pushes met between two nodes.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct HopFacts {
    /// What one stream carries, where the stream was the limit.
    pub one: Option<Rate>,
    /// With which congestion control that was, where it was loss that made it so.
    pub one_with: Option<CongestionControl>,
    /// What all streams together carry, where the network was the limit.
    pub carries: Option<Rate>,
}

/// What is known of one node.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct NodeFacts {
    /// Measured disk write rate.
    pub disk_write: Option<Rate>,
    /// Measured disk read rate.
    pub disk_read: Option<Rate>,
    /// What its kernel lets a TCP connection hold.
    pub windows: Option<WindowLimits>,
    /// Which congestion controls its connections may have.
    pub controls: Option<Controls>,
}

/// Which congestion controls the connections of a host may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Controls {
    /// That of those that do not ask for one.
    pub default: CongestionControl,
    /// Those that may be asked for.
    pub offered: Vec<CongestionControl>,
}

/// How much one TCP connection may hold: the third figures of `tcp_rmem` and `tcp_wmem`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowLimits {
    /// Receive.
    pub receive: ByteCount,
    /// Send.
    pub send: ByteCount,
}

impl Default for WindowLimits {
    /// What Linux has unless told otherwise: 6 MiB and 4 MiB.
    fn default() -> Self {
        Self {
            receive: ByteCount(6 << 20),
            send: ByteCount(4 << 20),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Hop, Request, ShapeChoice, plan};

    /// Two nodes, 100 ms apart; the link says this of itself too.
    fn far(says: &str) -> Topology {
        apart("100 ms", says)
    }

    fn apart(rtt: &str, says: &str) -> Topology {
        linked(&format!("rtt = \"{rtt}\"\n{says}"))
    }

    fn linked(says: &str) -> Topology {
        let text = format!(
            "[cluster]\nname = \"c\"\n[[switch]]\nname = \"s[1-2]\"\n[[link]]\nbetween = [\"s1\", \"s2\"]\n\
             capacity = \"1 Gbit/s\"\n{says}\n[[node]]\nname = \"n0\"\nattach = \"s1\"\n\
             nic = \"1 Gbit/s\"\n[[node]]\nname = \"n1\"\nattach = \"s2\"\nnic = \"1 Gbit/s\"\n"
        );
        Topology::parse("t", &text).unwrap()
    }

    fn names(names: &[&str]) -> Vec<CongestionControl> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    /// The source's host has these, the first by itself, and lets a connection hold 4 MiB.
    fn host(offered: &[&str]) -> Facts {
        let mut facts = Facts::default();
        let offered = names(offered);
        let node = NodeFacts {
            controls: Some(Controls {
                default: offered[0].clone(),
                offered,
            }),
            ..NodeFacts::default()
        };
        facts.nodes.insert("n0".parse().unwrap(), node);
        facts
    }

    fn hop(topology: &Topology, facts: &Facts) -> Hop {
        let request = Request {
            source: "n0".parse().unwrap(),
            targets: vec!["n1".parse().unwrap()],
            size: ByteCount(10 << 30),
            shape: ShapeChoice::Auto,
            streams: None,
            limit: None,
            source_limit: None,
            encrypted: false,
        };
        plan(topology, &request, facts).unwrap().hops.remove(0)
    }

    fn asks(says: &str, facts: &Facts) -> Option<String> {
        hop(&far(says), facts).congestion_control.map(String::from)
    }

    #[test]
    fn bbr_is_asked_for_where_loss_would_be_the_limit_and_it_is_there() {
        const LOSSY: &str = "loss = 0.0001";
        let cubic = host(&["cubic", "reno", "bbr"]);
        assert_eq!(asks("", &cubic), None, "nothing is lost");
        assert_eq!(asks(LOSSY, &cubic).as_deref(), Some("bbr"));
        assert_eq!(asks(LOSSY, &host(&["cubic", "reno"])), None, "it is not there");
        assert_eq!(
            asks(LOSSY, &host(&["bbr", "cubic"])),
            None,
            "it is the host's own"
        );
        assert_eq!(asks(LOSSY, &Facts::default()), None, "nobody says what is there");

        let streams = |facts: &Facts| hop(&far(LOSSY), facts).streams;
        let (with, without) = (streams(&cubic), streams(&host(&["cubic"])));
        assert!(with < 10 && without > 30, "{with} and {without}");
        assert_eq!(streams(&host(&["bbr"])), with, "asked for or not, it is BBR");
    }

    #[test]
    fn what_a_push_met_by_loss_counts_for_the_control_that_met_it() {
        let topology = far("loss = 0.0001");
        let streams = |one_with: Option<&str>| {
            let mut facts = host(&["cubic", "bbr"]);
            let met = HopFacts {
                one: Some(Rate::from_bytes_per_second(2.7e6)),
                one_with: one_with.map(|name| name.parse().unwrap()),
                carries: None,
            };
            facts
                .hops
                .insert(("n0".parse().unwrap(), "n1".parse().unwrap()), met);
            hop(&topology, &facts).streams
        };
        assert!(streams(Some("cubic")) < 10, "it will be BBR");
        assert!(streams(Some("bbr")) > 30);
        assert!(streams(None) > 30, "a window");
    }

    #[test]
    fn on_a_short_way_cubic_has_no_need_to_stop_and_look() {
        let asks = |rtt, says, offered: &[&str]| {
            let control = hop(&apart(rtt, says), &host(offered)).congestion_control;
            control.map(String::from)
        };
        assert_eq!(asks("0.2 ms", "", &["bbr", "cubic"]).as_deref(), Some("cubic"));
        assert_eq!(asks("0.2 ms", "", &["cubic", "bbr"]), None);
        assert_eq!(
            asks("0.2 ms", "", &["reno", "bbr"]),
            None,
            "that does not stop either"
        );
        assert_eq!(asks("0.2 ms", "", &["bbr", "reno"]), None, "it is not there");
        assert_eq!(asks("15 ms", "", &["bbr", "cubic"]), None, "the host knows best");
        assert_eq!(
            asks("0.2 ms", "loss = 0.05", &["bbr", "cubic"]),
            None,
            "loss would be the limit"
        );
        assert_eq!(
            asks("0.2 ms", "loss = 0.001", &["cubic", "bbr"]),
            None,
            "two streams are as fast as the link"
        );
        assert_eq!(asks("2 ms", "loss = 0.00001", &["cubic", "bbr"]), None);
        // Nobody says how long the link is, until a push has met it.
        let mut unknown = host(&["bbr", "cubic"]);
        assert_eq!(hop(&linked(""), &unknown).congestion_control, None);
        let pair = ("n0".parse().unwrap(), "n1".parse().unwrap());
        unknown.rtts.insert(pair, Duration::from_micros(200));
        assert!(hop(&linked(""), &unknown).congestion_control.is_some());
        // A way that was once measured with BBR is short all the same.
        let mut measured = host(&["cubic", "bbr"]);
        let path = PathFacts {
            rtt: Duration::from_micros(200),
            rates: vec![(1, Rate::from_bytes_per_second(117e6))],
            filled: true,
            loss: 0.0,
            control: Some("bbr".parse().unwrap()),
        };
        let ends = ("s1".parse().unwrap(), "s2".parse().unwrap());
        measured.paths.insert(ends, path);
        assert_eq!(hop(&apart("0.2 ms", ""), &measured).congestion_control, None);
        assert_eq!(
            asks("0.2 ms", "congestion_control = \"bbr\"", &["bbr", "cubic"]).as_deref(),
            Some("bbr")
        );
    }

    #[test]
    fn what_the_topology_asks_for_is_asked_for() {
        let cubic = host(&["cubic", "reno", "bbr"]);
        assert_eq!(
            asks("congestion_control = \"reno\"", &cubic).as_deref(),
            Some("reno")
        );
        assert_eq!(
            asks("loss = 0.01\ncongestion_control = \"cubic\"", &cubic).as_deref(),
            Some("cubic"),
            "it goes before the planner's own choice"
        );
        assert_eq!(
            asks("congestion_control = \"dctcp\"", &cubic),
            None,
            "it is not there"
        );
        assert_eq!(
            asks("congestion_control = \"dctcp\"", &Facts::default()).as_deref(),
            Some("dctcp"),
            "nobody says what is there"
        );
        let offers = |node: &str, name: &str| cubic.offers(&node.parse().unwrap(), &name.parse().unwrap());
        assert!(offers("n0", "reno") && !offers("n0", "dctcp"));
        assert!(offers("n1", "dctcp"), "it says nothing");
    }

    #[test]
    fn a_measurement_counts_for_the_control_that_it_was_made_with() {
        let topology = far("");
        let mut facts = host(&["cubic", "bbr"]);
        let path = |control: Option<&str>, loss, one| PathFacts {
            rtt: Duration::from_millis(100),
            rates: vec![
                (1, Rate::from_bytes_per_second(one)),
                (2, Rate::from_bytes_per_second(2.0 * one)),
            ],
            filled: false,
            loss,
            control: control.map(|name| name.parse().unwrap()),
        };
        let ends = || ("s1".parse().unwrap(), "s2".parse().unwrap());
        // Cubic met loss, and had 2 MB/s: BBR will have more, and nobody has measured how much.
        facts.paths.insert(ends(), path(None, 1e-4, 2e6));
        let first = hop(&topology, &facts);
        assert_eq!(first.congestion_control, Some("bbr".parse().unwrap()));
        assert!(first.streams < 10, "{first:?}");
        // The next measurement was made with it, and sees no more than BBR's own losses.
        facts.paths.insert(ends(), path(Some("bbr"), 3e-4, 20e6));
        let second = hop(&topology, &facts);
        assert_eq!(second.congestion_control, Some("bbr".parse().unwrap()));
        assert_eq!(second.streams, 6, "of 20 MB/s each, for 117.7 less 3 %");
        // It lost nothing any more: the host's own does as well.
        facts.paths.insert(ends(), path(Some("bbr"), 0.0, 20e6));
        assert_eq!(hop(&topology, &facts).congestion_control, None);
        facts.paths.insert(ends(), path(Some("bbr"), 3e-4, 20e6));
        // The host has lost it: what was measured with it says nothing.
        let gone = host(&["cubic"]);
        facts.nodes = gone.nodes;
        assert_eq!(hop(&topology, &facts).congestion_control, None);
    }
}
