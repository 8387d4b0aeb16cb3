//! What a finished push teaches. Its forecast and what became of it are kept to be looked at; its hops become facts for
//! the next plan, with care: the rate of a hop is what its disk or its way has only where that was the hop's limit.
//! Everywhere else it has at least so much, which counts only against a fact that says less.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::bench::facts::MAX_AGE;
use crate::chunk::CHUNK;
use crate::id::{CongestionControl, JobId, NodeName};
use crate::plan::{Facts, Plan};
use crate::topology::Topology;
use crate::units::{ByteCount, Rate, show_time};
use crate::verdict::{self, Limit, Seen, SeenHop};

/// Less than this over a hop is over before anything is known of it.
const ENOUGH: u64 = 16 * CHUNK;
/// Hops of a push that are kept to be looked at: those furthest below their forecast.
const KEPT_HOPS: usize = 64;
/// A way that carries at least this share of its forecast is as the topology has it.
const AS_PLANNED: f64 = 0.85;
/// More than a fact by this much is no spread of measuring.
const NOTABLY: f64 = 1.1;

/// What a lesson is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Subject {
    /// How fast a node's disk takes what is received.
    DiskWrite(NodeName),
    /// How fast a source's disk gives it.
    DiskRead(NodeName),
    /// What one stream carries from the first to the second.
    Stream(NodeName, NodeName),
    /// What the way from the first to the second carries, whatever the streams.
    Way(NodeName, NodeName),
}

/// One thing that a push has taught.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Lesson {
    /// About what.
    pub subject: Subject,
    /// So fast it is.
    #[serde(with = "bytes_per_second")]
    pub rate: Rate,
    /// When, in milliseconds since 1970.
    pub unix_ms: u64,
    /// By which push.
    pub job: JobId,
    /// Of a stream that loss held back: with which congestion control.
    pub control: Option<CongestionControl>,
}

/// A finished push, to be looked at.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Past {
    /// Which.
    pub job: JobId,
    /// When it ended, in milliseconds since 1970.
    pub unix_ms: u64,
    /// Bytes that travelled, to each target.
    pub size: ByteCount,
    /// How many targets have it.
    pub targets: u32,
    /// The plan's shape.
    pub shape: String,
    /// What the plan said.
    pub predicted: Duration,
    /// What no plan could have beaten.
    pub bound: Duration,
    /// What it took.
    pub actual: Duration,
    /// What limited it; empty where nobody knows.
    pub verdict: String,
    /// Its hops, those furthest below their forecast first.
    pub hops: Vec<PastHop>,
}

/// One of its hops.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PastHop {
    /// From whom.
    pub parent: NodeName,
    /// To whom.
    pub child: NodeName,
    /// Over so many streams.
    pub streams: u16,
    /// What the plan expected.
    #[serde(with = "bytes_per_second")]
    pub planned: Rate,
    /// What it was.
    #[serde(with = "bytes_per_second")]
    pub rate: Rate,
}

/// What became of one target, as far as a lesson needs it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Finished {
    /// It has a copy that came over the network, from one parent.
    pub whole: bool,
    /// Bytes received.
    pub bytes: ByteCount,
    /// From the first order until it was durable under its name.
    pub took: Duration,
}

/// A push that is over.
#[derive(Debug)]
pub struct Push<'a> {
    /// Which.
    pub job: JobId,
    /// When it ended, in milliseconds since 1970.
    pub unix_ms: u64,
    /// No other push was under way on its nodes meanwhile.
    pub alone: bool,
    /// By which plan.
    pub plan: &'a Plan,
    /// What was seen of it.
    pub seen: &'a Seen,
    /// What became of the child of each hop seen, in their order.
    pub finished: &'a [Finished],
}

/// What a push teaches. `known` is what was known of disks and ways when it ended.
pub fn lessons(topology: &Topology, push: &Push<'_>, known: &Facts) -> Vec<Lesson> {
    let mut lessons = Vec::new();
    if !push.alone {
        // Somebody else's bytes went through the same disks and links.
        return lessons;
    }
    let mut teach = |subject, rate: Rate, control| {
        if rate > Rate::ZERO && rate < Rate::UNLIMITED {
            lessons.push(Lesson {
                subject,
                rate,
                unix_ms: push.unix_ms,
                job: push.job,
                control,
            });
        }
    };
    let mut read_taught = false;
    let limits = verdict::each(topology, push.seen);
    for ((hop, finished), limit) in push.seen.hops.iter().zip(push.finished).zip(limits) {
        if !finished.whole || finished.bytes.0 < ENOUGH || finished.took.is_zero() {
            continue;
        }
        let (parent, child) = (&hop.parent, &hop.child);
        match &limit {
            Some(Limit::DiskWrite(node)) => teach(Subject::DiskWrite(node.clone()), hop.rate, None),
            Some(Limit::SourceRead(node)) if !read_taught => {
                read_taught = true;
                let read = if push.seen.read > Rate::ZERO {
                    push.seen.read
                } else {
                    hop.rate
                };
                teach(Subject::DiskRead(node.clone()), read, None);
            }
            Some(Limit::ReceiveWindow(_) | Limit::SendWindow(_) | Limit::Loss) => {
                let one = hop.rate.times(1.0 / f64::from(hop.streams.max(1)));
                let asked = push
                    .plan
                    .hop(child)
                    .and_then(|hop| hop.congestion_control.as_ref());
                let control = known.resolved(parent, asked);
                // A window is as large with any other.
                let control = control.filter(|_| limit == Some(Limit::Loss));
                teach(Subject::Stream(parent.clone(), child.clone()), one, control);
            }
            // Of a parent that does not say how it went nobody knows whether it had anything to send.
            Some(Limit::Network)
                if parent != child && hop.sending.is_some() && is_below_plan(push.plan, hop) =>
            {
                teach(Subject::Way(parent.clone(), child.clone()), hop.rate, None);
            }
            _ => {}
        }
        // Durable all the same: at least so much.
        let durable = Rate::of(finished.bytes, finished.took);
        let more = |known: Option<Rate>| known.is_some_and(|known| durable > known.times(NOTABLY));
        let writes = known.nodes.get(child).and_then(|facts| facts.disk_write);
        if !matches!(limit, Some(Limit::DiskWrite(_))) && more(writes) {
            teach(Subject::DiskWrite(child.clone()), durable, None);
        }
        let carries = known.hops.get(&(parent.clone(), child.clone()));
        if !matches!(limit, Some(Limit::Network)) && more(carries.and_then(|hop| hop.carries)) {
            teach(Subject::Way(parent.clone(), child.clone()), durable, None);
        }
        let reads = known.nodes.get(parent).and_then(|facts| facts.disk_read);
        if *parent == push.seen.source
            && !read_taught
            && !matches!(limit, Some(Limit::SourceRead(_)))
            && more(reads)
        {
            read_taught = true;
            teach(Subject::DiskRead(parent.clone()), durable, None);
        }
    }
    lessons
}

fn is_below_plan(plan: &Plan, hop: &SeenHop) -> bool {
    plan.hop(&hop.child)
        .is_some_and(|planned| hop.rate < planned.rate.times(AS_PLANNED))
}

/// The push as it is kept to be looked at; `None` if it has taught nothing of forecasts: no hop has brought enough.
pub fn past(push: &Push<'_>, actual: Duration, verdict: &str) -> Option<Past> {
    let hops = push.seen.hops.iter().zip(push.finished);
    let mut hops: Vec<PastHop> = hops
        .filter(|(_, finished)| finished.whole && finished.bytes.0 >= ENOUGH)
        .filter_map(|(hop, _)| {
            let planned = push.plan.hop(&hop.child)?;
            Some(PastHop {
                parent: hop.parent.clone(),
                child: hop.child.clone(),
                streams: hop.streams,
                planned: planned.rate,
                rate: hop.rate,
            })
        })
        .collect();
    let size = push.finished.iter().map(|finished| finished.bytes).max()?;
    if hops.is_empty() || push.plan.predicted.is_zero() {
        return None;
    }
    let targets = u32::try_from(hops.len()).unwrap_or(u32::MAX);
    let share = |hop: &PastHop| hop.rate.bytes_per_second() / hop.planned.bytes_per_second().max(1.0);
    hops.sort_by(|one, other| share(one).total_cmp(&share(other)));
    hops.truncate(KEPT_HOPS);
    Some(Past {
        job: push.job,
        unix_ms: push.unix_ms,
        size,
        targets,
        shape: push.plan.shape.to_string(),
        predicted: push.plan.predicted,
        bound: push.plan.bound,
        actual,
        verdict: verdict.to_owned(),
        hops,
    })
}

/// The newest lesson on each subject.
pub type Lessons = BTreeMap<Subject, Lesson>;

/// Lays lessons over what is known already. `measured` says when a node was last measured, in milliseconds since 1970: of
/// a measurement and a push the newer counts. `now` is the time, likewise.
pub fn lay(facts: &mut Facts, lessons: &Lessons, measured: &dyn Fn(&NodeName) -> Option<u64>, now: u64) {
    for lesson in lessons.values() {
        if u128::from(now.saturating_sub(lesson.unix_ms)) > MAX_AGE.as_millis() {
            continue;
        }
        let is_newer = |node: &NodeName| measured(node).is_none_or(|at| at < lesson.unix_ms);
        match &lesson.subject {
            Subject::DiskWrite(node) if is_newer(node) => {
                facts.nodes.entry(node.clone()).or_default().disk_write = Some(lesson.rate);
            }
            Subject::DiskRead(node) if is_newer(node) => {
                facts.nodes.entry(node.clone()).or_default().disk_read = Some(lesson.rate);
            }
            Subject::DiskWrite(_) | Subject::DiskRead(_) => {}
            Subject::Stream(from, to) => {
                let hop = facts.hops.entry((from.clone(), to.clone())).or_default();
                (hop.one, hop.one_with) = (Some(lesson.rate), lesson.control.clone());
            }
            Subject::Way(from, to) => {
                facts.hops.entry((from.clone(), to.clone())).or_default().carries = Some(lesson.rate);
            }
        }
    }
}

impl Lesson {
    /// The lesson as a line for people, with its age at `now`.
    pub fn words(&self, now: u64) -> String {
        let what = match &self.subject {
            Subject::DiskWrite(node) => format!("{} {}", verdict::words::writes(node), self.rate.in_bytes()),
            Subject::DiskRead(node) => format!("{} {}", verdict::words::reads(node), self.rate.in_bytes()),
            Subject::Stream(from, to) => {
                format!("{from} to {to}: a stream carries {}", self.rate.in_bytes())
            }
            Subject::Way(from, to) => verdict::words::carries(from, to, self.rate),
        };
        format!("{what} (met by a push {} ago)", age(self.unix_ms, now))
    }
}

impl Past {
    /// The push as a line for people, with its age at `now`.
    pub fn words(&self, now: u64) -> String {
        let (actual, predicted) = (self.actual.as_secs_f64(), self.predicted.as_secs_f64());
        let verdict = if self.verdict.is_empty() {
            String::new()
        } else {
            format!("; {}", self.verdict)
        };
        format!(
            "push {} ago: {} to {}, {}: forecast {}, actual {} ({:+.0} %){verdict}",
            age(self.unix_ms, now),
            self.size,
            self.targets,
            self.shape,
            show_time(self.predicted),
            show_time(self.actual),
            (actual / predicted - 1.0) * 100.0,
        )
    }
}

fn age(then: u64, now: u64) -> String {
    match now.saturating_sub(then) / 1000 {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds => show_time(Duration::from_secs(seconds)).to_string(),
    }
}

mod bytes_per_second {
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::units::Rate;

    pub(super) fn serialize<S: Serializer>(rate: &Rate, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_f64(rate.bytes_per_second())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(input: D) -> Result<Rate, D::Error> {
        f64::deserialize(input).map(Rate::from_bytes_per_second)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Request, ShapeChoice, plan};
    use crate::verdict::SeenHop;
    use crate::waits::{Reading, Receiving, Sending, Tcp};

    const FABRIC: &str = "[cluster]\nname = \"c\"\n[[switch]]\nname = \"s\"\n[[node]]\nname = \"n[0-4]\"\n\
                          attach = \"s\"\nnic = \"1 Gbit/s\"\n";

    fn topology() -> Topology {
        Topology::parse("t", FABRIC).unwrap()
    }

    fn name(name: &str) -> NodeName {
        name.parse().unwrap()
    }

    fn mb(rate: f64) -> Rate {
        Rate::from_bytes_per_second(rate * 1e6)
    }

    fn request() -> Request {
        Request {
            source: name("n0"),
            targets: ["n1", "n2", "n3", "n4"].map(name).to_vec(),
            size: ByteCount(4 << 30),
            shape: ShapeChoice::Auto,
            streams: None,
            limit: None,
            source_limit: None,
            encrypted: false,
        }
    }

    #[derive(Clone, Copy, PartialEq)]
    enum At {
        Disk,
        Network,
        Loss,
        Upstream,
    }

    fn hop(parent: &str, child: &str, rate: f64, at: At) -> SeenHop {
        let seconds = Duration::from_secs;
        let (upstream, disk) = if at == At::Disk { (1, 8) } else { (8, 1) };
        let (idle, network) = if at == At::Upstream { (9, 1) } else { (0, 9) };
        let again = if at == At::Loss { 1_000_000 } else { 0 };
        SeenHop {
            child: name(child),
            parent: name(parent),
            moving: false,
            rate: mb(rate),
            streams: 2,
            rtt: None,
            receiving: Receiving {
                upstream: seconds(upstream),
                disk: seconds(disk),
                cpu: seconds(1),
            },
            sending: Some(Sending {
                idle: seconds(idle),
                network: seconds(network),
                tcp: Tcp {
                    busy: seconds(network),
                    sent: ByteCount(1 << 30),
                    again: ByteCount(again),
                    ..Tcp::default()
                },
                ..Sending::default()
            }),
        }
    }

    fn seen(hops: Vec<SeenHop>) -> Seen {
        Seen {
            source: name("n0"),
            piped: false,
            read: Rate::ZERO,
            reading: Reading::default(),
            limit: None,
            source_limit: None,
            hops,
        }
    }

    fn taught(facts: &Facts, seen: &Seen, finished: Finished, alone: bool) -> Vec<Lesson> {
        let plan = plan(&topology(), &request(), facts).unwrap();
        let finished = vec![finished; seen.hops.len()];
        let push = Push {
            job: JobId::from_random([7; 16]),
            unix_ms: 1000,
            alone,
            plan: &plan,
            seen,
            finished: &finished,
        };
        lessons(&topology(), &push, facts)
    }

    const WHOLE: Finished = Finished {
        whole: true,
        bytes: ByteCount(4 << 30),
        took: Duration::from_secs(40),
    };

    fn laid(lessons: &[Lesson], measured: Option<u64>, now: u64) -> Facts {
        let mut facts = Facts::default();
        let lessons = lessons
            .iter()
            .map(|lesson| (lesson.subject.clone(), lesson.clone()))
            .collect();
        lay(&mut facts, &lessons, &|_| measured, now);
        facts
    }

    #[test]
    fn a_sick_disk_is_a_leaf_the_next_time_and_the_forecast_comes_true() {
        let before = plan(&topology(), &request(), &Facts::default()).unwrap();
        assert!(
            before.children(&name("n2")).count() > 0,
            "it had others below it: {before:?}"
        );
        let push = seen(vec![
            hop("n0", "n1", 117.0, At::Network),
            hop("n1", "n2", 20.0, At::Disk),
            hop("n2", "n3", 20.0, At::Upstream),
            hop("n3", "n4", 20.0, At::Upstream),
        ]);
        let lessons = taught(&Facts::default(), &push, WHOLE, true);
        assert_eq!(lessons.len(), 1, "{lessons:?}");
        assert_eq!(lessons[0].subject, Subject::DiskWrite(name("n2")));
        let facts = laid(&lessons, None, 2000);
        let next = plan(&topology(), &request(), &facts).unwrap();
        assert_eq!(next.children(&name("n2")).count(), 0, "{next:?}");
        let actual = (4u64 << 30) as f64 / 20e6;
        let off = |plan: &Plan| (plan.predicted.as_secs_f64() / actual - 1.0).abs();
        assert!(off(&next) < 0.05, "{}", off(&next));
        assert!(off(&before) > 0.5);
        assert!(
            lessons[0]
                .words(7_201_000)
                .starts_with("n2: its disk writes 20.0 MB/s (met by a push 2 h"),
            "{}",
            lessons[0].words(7_201_000)
        );
    }

    #[test]
    fn the_network_teaches_what_a_way_and_a_stream_carry() {
        let push = seen(vec![
            hop("n0", "n1", 30.0, At::Loss),
            hop("n0", "n2", 40.0, At::Network),
        ]);
        let lessons = taught(&Facts::default(), &push, WHOLE, true);
        let facts = laid(&lessons, None, 2000);
        let hop = |to: &str| facts.hops[&(name("n0"), name(to))].clone();
        assert_eq!(hop("n1").one, Some(mb(15.0)));
        assert_eq!(hop("n2").carries, Some(mb(40.0)));
        let star = Request {
            targets: vec![name("n1"), name("n2")],
            shape: ShapeChoice::Fixed(crate::plan::Shape::Star),
            ..request()
        };
        let next = plan(&topology(), &star, &facts).unwrap();
        let planned = next.hop(&name("n2")).unwrap();
        assert_eq!(planned.rate, mb(40.0), "{planned:?}");
        assert!(next.hop(&name("n1")).unwrap().streams > 2);
    }

    #[test]
    fn a_rate_that_something_else_limited_is_only_a_lower_bound() {
        let push = seen(vec![hop("n0", "n1", 107.0, At::Upstream)]);
        assert_eq!(taught(&Facts::default(), &push, WHOLE, true), []);
        // A disk that was slow and is not any more.
        let mut known = Facts::default();
        known.nodes.entry(name("n1")).or_default().disk_write = Some(mb(20.0));
        let lessons = taught(&known, &push, WHOLE, true);
        assert_eq!(lessons.len(), 1);
        let durable = Rate::of(WHOLE.bytes, WHOLE.took);
        assert_eq!(
            laid(&lessons, None, 2000).nodes[&name("n1")].disk_write,
            Some(durable)
        );
        // One that is faster than that stays so.
        known.nodes.entry(name("n1")).or_default().disk_write = Some(mb(2000.0));
        assert_eq!(taught(&known, &push, WHOLE, true), []);
    }

    #[test]
    fn what_is_unfinished_short_or_shared_teaches_nothing() {
        let push = seen(vec![hop("n0", "n1", 20.0, At::Disk)]);
        let short = Finished {
            bytes: ByteCount(CHUNK),
            ..WHOLE
        };
        let cut = Finished {
            whole: false,
            ..WHOLE
        };
        assert_eq!(taught(&Facts::default(), &push, short, true), []);
        assert_eq!(taught(&Facts::default(), &push, cut, true), []);
        assert_eq!(taught(&Facts::default(), &push, WHOLE, false), []);
        assert_eq!(taught(&Facts::default(), &push, WHOLE, true).len(), 1);
    }

    #[test]
    fn lessons_age_and_a_newer_measurement_counts_more() {
        let push = seen(vec![hop("n0", "n1", 20.0, At::Disk)]);
        let lessons = taught(&Facts::default(), &push, WHOLE, true);
        let known = |measured, now| {
            let facts = laid(&lessons, measured, now);
            facts.nodes.get(&name("n1")).and_then(|node| node.disk_write)
        };
        assert_eq!(known(None, 2000), Some(mb(20.0)));
        assert_eq!(known(Some(999), 2000), Some(mb(20.0)));
        assert_eq!(known(Some(1001), 2000), None);
        let too_old = u64::try_from(MAX_AGE.as_millis()).unwrap() + 1001;
        assert_eq!(known(None, too_old), None);
    }

    #[test]
    fn a_push_is_kept_with_its_worst_hops() {
        let push = seen(vec![
            hop("n0", "n1", 117.0, At::Network),
            hop("n1", "n2", 20.0, At::Disk),
        ]);
        let plan = plan(&topology(), &request(), &Facts::default()).unwrap();
        let whole = Push {
            job: JobId::from_random([7; 16]),
            unix_ms: 0,
            alone: true,
            plan: &plan,
            seen: &push,
            finished: &[WHOLE, WHOLE],
        };
        let past = past(&whole, Duration::from_secs(200), "n2: its disk writes 20.0 MB/s").unwrap();
        assert_eq!(past.hops[0].child, name("n2"));
        let words = past.words(60_000);
        assert!(
            words.starts_with("push 1 min 0 s ago: 4.00 GiB to 2, "),
            "{words}"
        );
        assert!(words.contains("actual 3 min 20 s (+4"), "{words}");
        let none = Push {
            finished: &[Finished {
                whole: false,
                ..WHOLE
            }; 2],
            ..whole
        };
        assert_eq!(super::past(&none, Duration::from_secs(1), ""), None);
    }
}
