//! A whole cluster in one thread, by the seed: agents that die and come back, messages that are late, doubled and out of
//! order, a coordinator that is killed between two effects and starts again from what it had committed.

mod agents;
mod coordinator;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use stage_core::assignment::{Assignment, Final, Order, Outcome, Prepared, Progress, Run, SourceReport};
use stage_core::digest::{FileDigest, RootDigest};
use stage_core::failure::{Code, Failure};
use stage_core::id::{Epoch, NodeName, PlanVersion};
use stage_core::job::{
    Changes, Effect, Event, Job, Now, Phase, Presence, Record, Spec, Standing, TargetRecord, TargetState,
    UnfitRule,
};
use stage_core::manifest::Manifest;
use stage_core::payload::{Expectation, Payload};
use stage_core::plan::{Facts, Plan, ShapeChoice, new_hops, plan};
use stage_core::topology::Topology;
use stage_core::units::ByteCount;
use stage_core::verdict::{Fault, SlowHop};

use crate::{node, one_switch, spec};

const CHUNKS: u32 = 20;
const STEP: u64 = 200;
/// Slow hops are looked for this often.
const LOOK: u64 = 2000;
const LEASE: u64 = 10_000;
const GRACE: u64 = 30_000;
/// Everything must have ended by then, in virtual milliseconds.
const END: u64 = 900_000;
const WAIT_FOR: u64 = 240;

struct Dice(u64);

impl Dice {
    /// splitmix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

fn final_of() -> Final {
    Final {
        root: RootDigest([7; 32]),
        chunks: CHUNKS,
        data: Default::default(),
    }
}

#[derive(Default, Clone)]
struct Agent {
    alive: bool,
    connected: bool,
    gone_at: u64,
    back_at: Option<u64>,
    rank: (Epoch, PlanVersion),
    held: bool,
    run: Option<Run>,
    chunks: u32,
    published: bool,
    outcome: Option<Outcome>,
    declared: bool,
    hashed: u32,
    hashed_told: bool,
    stalled: u64,
    /// Whom it asks, as a place in its order's list.
    parent: usize,
    /// Questions that it answers with "unfit" before it is fit.
    unfit: u32,
    let_go: bool,
    /// Other content of the same size stands there until then.
    occupied: u64,
    /// It found that out, and waits to be asked again.
    gave_up: bool,
    /// Its last answer to a prepare order, which it repeats in each session.
    answer: Option<Event>,
}

enum Message {
    Down(usize, Box<Assignment>),
    Up(usize, u64, Box<Event>),
}

#[derive(Default, Clone)]
struct Disk {
    record: Vec<u8>,
    plan: Option<Vec<u8>>,
    targets: BTreeMap<usize, Vec<u8>>,
}

struct World {
    seed: u64,
    dice: Dice,
    now: u64,
    topology: Topology,
    spec: Spec,
    agents: Vec<Agent>,
    queue: BinaryHeap<Reverse<(u64, u64)>>,
    messages: BTreeMap<u64, Message>,
    serial: u64,
    disk: Disk,
    epoch: Epoch,
    job: Option<Job>,
    started: u64,
    restart_at: u64,
    wake: Option<u64>,
    /// Crashes left, and the number of effects until the next one.
    crashes: u32,
    fuse: u64,
    sent: BTreeMap<usize, ((Epoch, PlanVersion), Order)>,
    away_told: BTreeSet<usize>,
    lossy: bool,
    expected_wrong: bool,
    /// Which nodes are found to be slow, again and again, and whose fault that is said to be.
    slow: BTreeMap<NodeName, Fault>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut dice = Dice(seed);
        let count = 2 + dice.below(7) as usize;
        let topology = Topology::parse("t", &one_switch(count)).unwrap();
        let expected_wrong = dice.chance(5);
        let expect = match dice.below(4) {
            _ if expected_wrong => Some(FileDigest([1; 32])),
            0 => Some(FileDigest([9; 32])),
            _ => None,
        };
        let own = usize::from(!dice.chance(15));
        let spec = Spec {
            targets: (own..count).map(node).collect(),
            shape: ["auto", "star", "chain", "tree"][dice.below(4) as usize]
                .parse::<ShapeChoice>()
                .unwrap(),
            unfit: [UnfitRule::Wait, UnfitRule::Wait, UnfitRule::Skip, UnfitRule::Fail]
                [dice.below(4) as usize],
            wait_for: Duration::from_secs(WAIT_FOR),
            expect: expect
                .map(|digest| Expectation {
                    path: Vec::new(),
                    digest: stage_core::digest::Expected::Sha256(digest),
                })
                .into_iter()
                .collect(),
            encrypted: true,
            ..spec(count - 1)
        };
        let agents = (0..count)
            .map(|_| Agent {
                alive: true,
                connected: true,
                occupied: if dice.chance(8) {
                    60_000 + dice.below(200_000)
                } else {
                    0
                },
                unfit: if dice.chance(10) { dice.below(3) as u32 } else { 0 },
                ..Agent::default()
            })
            .collect();
        let crashes = if dice.chance(60) { dice.below(4) as u32 } else { 0 };
        let fuse = 1 + dice.below(60);
        let lossy = dice.chance(50);
        // With dice of their own: the rest of a seed's life is the same with and without slow nodes.
        let mut dice_of_slow = Dice(!seed);
        let faults = [
            None,
            None,
            None,
            None,
            None,
            None,
            Some(Fault::Child),
            Some(Fault::Way),
        ];
        let slow = (1..count)
            .filter_map(|i| Some((node(i), faults[dice_of_slow.below(8) as usize]?)))
            .collect();
        Self {
            seed,
            dice,
            now: 0,
            topology,
            spec,
            agents,
            queue: BinaryHeap::new(),
            messages: BTreeMap::new(),
            serial: 0,
            disk: Disk::default(),
            epoch: Epoch(1),
            job: None,
            started: 0,
            restart_at: 0,
            wake: None,
            crashes,
            fuse,
            sent: BTreeMap::new(),
            away_told: BTreeSet::new(),
            lossy,
            expected_wrong,
            slow,
        }
    }

    fn time(&self) -> Now {
        Now {
            up: Duration::from_millis(self.now - self.started),
            unix_ms: self.now + 1_000_000,
        }
    }

    fn post(&mut self, message: Message) {
        let late = self.dice.below(if self.lossy { 400 } else { 20 });
        self.serial += 1;
        self.queue.push(Reverse((self.now + late, self.serial)));
        self.messages.insert(self.serial, message);
    }

    fn up(&mut self, i: usize, event: Event) {
        if !self.agents[i].connected {
            return;
        }
        let session = self.epoch.0;
        if self.lossy && self.dice.chance(10) {
            self.post(Message::Up(i, session, Box::new(event.clone())));
        }
        self.post(Message::Up(i, session, Box::new(event)));
    }

    fn begin(&mut self) {
        // Far enough from the start that who is not here is away.
        self.now = 60_000;
        let standing = (0..self.agents.len())
            .map(|i| {
                let here = i == 0 || !self.dice.chance(10);
                if !here {
                    self.agents[i].alive = false;
                    self.agents[i].connected = false;
                    self.agents[i].back_at = self.dice.chance(70).then(|| 60_000 + self.dice.below(100_000));
                }
                let standing = Standing {
                    presence: if here { Presence::Up } else { Presence::Away },
                    drained: i > 0 && self.dice.chance(4),
                    addresses: vec!["10.0.0.1:7701".parse().unwrap()],
                };
                (node(i), standing)
            })
            .collect();
        self.job = Some(Job::new(self.spec.clone(), self.epoch, standing, self.time()));
        self.apply(Event::Start);
    }

    fn step(&mut self) {
        self.now += STEP;
        let now = self.now;
        let mut together = Vec::new();
        while let Some(Reverse((at, serial))) = self.queue.peek().copied() {
            if at > now {
                break;
            }
            self.queue.pop();
            match self.messages.remove(&serial).unwrap() {
                Message::Down(i, assignment) => self.ordered(i, *assignment),
                // What an older session said does not reach a new coordinator.
                Message::Up(i, session, event) => {
                    if session == self.epoch.0 && self.agents[i].connected {
                        together.push(*event);
                        if self.dice.chance(60) {
                            self.apply_all(std::mem::take(&mut together));
                        }
                    }
                }
            }
        }
        self.apply_all(together);
        if now.is_multiple_of(LOOK) {
            self.look();
        }
        if self.job.is_none() && now >= self.restart_at {
            self.restart();
        }
        let troubled = now < 160_000;
        for i in 0..self.agents.len() {
            if troubled && self.agents[i].alive && self.dice.below(if i == 0 { 3000 } else { 800 }) == 0 {
                self.kill(i);
            }
            if !self.agents[i].alive && self.agents[i].back_at.is_some_and(|at| at <= now) {
                self.agents[i].alive = true;
            }
            if self.agents[i].alive && !self.agents[i].connected && self.job.is_some() && self.dice.chance(30)
            {
                self.connect(i);
            }
            self.work(i);
            let agent = &self.agents[i];
            let grace_over = now >= self.started + GRACE;
            let expired = !agent.connected && grace_over && now >= agent.gone_at + LEASE;
            if expired && self.job.is_some() && self.away_told.insert(i) {
                self.apply(Event::Away(node(i)));
            }
        }
        if self.job.is_some() && self.wake.is_some_and(|at| at <= now) {
            self.wake = None;
            self.apply(Event::Tick);
        }
    }

    /// Says which hops are slow.
    fn look(&mut self) {
        let Some(plan) = self.job.as_ref().and_then(Job::plan) else {
            return;
        };
        let slow = plan.hops.iter().filter_map(|hop| {
            Some(SlowHop {
                child: hop.child.clone(),
                parent: hop.parent.clone(),
                fault: *self.slow.get(&hop.child)?,
                waiting: plan.children(&hop.child).cloned().collect(),
                text: "its disk".to_owned(),
            })
        });
        self.apply(Event::Slow(slow.collect()));
    }

    /// Someone tries again what is missing.
    fn retry(&mut self) {
        let standing = self
            .agents
            .iter()
            .enumerate()
            .map(|(i, agent)| {
                let standing = Standing {
                    presence: if agent.connected {
                        Presence::Up
                    } else {
                        Presence::Away
                    },
                    drained: false,
                    addresses: vec!["10.0.0.1:7701".parse().unwrap()],
                };
                (node(i), standing)
            })
            .collect();
        self.apply(Event::Retry {
            source: None,
            standing,
        });
    }

    /// A job that lost its source is taken up again once that is back.
    fn revive(&mut self) -> bool {
        let revivable = |world: &Self| world.job.as_ref().is_none_or(Job::can_be_revived);
        if !revivable(self) || !self.dice.chance(80) {
            return false;
        }
        for _ in 0..400 {
            self.step();
            if revivable(self) && self.job.is_some() && self.agents[0].connected {
                self.retry();
                return !self.has_ended();
            }
        }
        false
    }

    fn has_ended(&self) -> bool {
        self.job.as_ref().is_some_and(|job| job.phase().is_ended())
    }

    fn check(&self) {
        let job = self.job.as_ref().unwrap();
        let states: Vec<TargetState> = job.targets().iter().map(|target| target.state).collect();
        let all = |test: fn(&TargetRecord) -> bool| job.targets().iter().all(test);
        let any = |state: TargetState| states.contains(&state);
        let exit = job.exit();
        let whole = all(|t| t.state.is_good() || (t.drained && t.state == TargetState::Unfit));
        match job.phase() {
            Phase::Done => assert!(whole && exit == 0 && any(TargetState::Published)),
            Phase::Partial => assert!(!whole && exit == 5 && any(TargetState::Published)),
            Phase::Failed => assert!(matches!(exit, 4 | 6)),
            Phase::Cancelled => assert_eq!(exit, 7),
            phase => panic!("{phase:?} is no end"),
        }
        assert!(all(|t| !t.state.is_busy()), "a target is left open");
        if job.phase() == Phase::Done && !job.record().source_ended {
            assert_eq!(job.record().sha256, Some(FileDigest([9; 32])));
        }
        if exit == 4 {
            assert!(
                self.agents.iter().all(|agent| !agent.published),
                "exit 4 and a file"
            );
        }
        if self.expected_wrong {
            assert!(self.agents.iter().all(|agent| !agent.published));
        }
        let view = job.view(self.time());
        for (at, name) in self.spec.targets.iter().enumerate() {
            let i: usize = name.as_str()[1..].parse().unwrap();
            let agent = &self.agents[i];
            if states[at] == TargetState::Published {
                assert!(agent.published, "{name} is said to be published and is not");
            } else if agent.connected && !(states[at] == TargetState::Cancelled && self.epoch > Epoch(1)) {
                // (A copy that was reported to a coordinator which died before it wrote that down, on a node that a
                // cancel then made forget the job, is the one thing that nobody can know.)
                assert!(
                    !agent.published,
                    "{name} has published and is said to be {:?}",
                    states[at]
                );
            }
            assert_eq!(view.nodes[at].state, states[at]);
        }
        let kept = job.record().kept;
        for (i, agent) in self.agents.iter().enumerate() {
            if agent.connected && !kept {
                assert!(!agent.held || agent.let_go, "n{i} was not let go");
                assert!(agent.run.is_none(), "n{i} still has its order");
            }
        }
    }
}

fn simulate(seed: u64) -> (Phase, u8, bool) {
    let mut world = World::new(seed);
    world.begin();
    let cancel_at = world.dice.chance(10).then(|| 60_000 + world.dice.below(30_000));
    let retry_at = world.dice.chance(30).then(|| 60_000 + world.dice.below(200_000));
    let mut retries = 3;
    while world.now < END {
        if world.has_ended() {
            retries -= 1;
            if retries == 0 || !world.revive() {
                break;
            }
        }
        world.step();
        if retry_at.is_some_and(|at| at <= world.now && at + STEP > world.now) {
            world.retry();
        }
        if cancel_at.is_some_and(|at| at <= world.now && at + STEP > world.now) {
            world.apply(Event::Cancel(None));
        }
    }
    if !world.has_ended() {
        let job = world.job.as_ref().unwrap();
        panic!(
            "job does not end: {:?}, {:#?}, {:#?}",
            job.phase(),
            job.targets(),
            job.record().remarks
        );
    }
    // What was under way arrives, and who is connected is let go.
    for _ in 0..300 {
        world.step();
    }
    while world.job.is_none() {
        world.step();
    }
    for _ in 0..300 {
        world.step();
    }
    world.check();
    let job = world.job.as_ref().unwrap();
    assert_eq!(world.seed, seed);
    (job.phase(), job.exit(), job.record().revived > 0)
}

struct Named(u64);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the seed was {} (STAGE_SEED={} runs it alone)", self.0, self.0);
        }
    }
}

#[test]
fn every_job_ends_and_tells_the_truth() {
    let seeds = match option_env!("STAGE_SEED").and_then(|seed| seed.parse::<u64>().ok()) {
        Some(seed) => seed..seed + 1,
        None => 0..500,
    };
    let one = seeds.end - seeds.start == 1;
    let mut ends: BTreeMap<(Phase, u8, bool), u32> = BTreeMap::new();
    for seed in seeds {
        let name = Named(seed);
        *ends.entry(simulate(seed)).or_default() += 1;
        drop(name);
    }
    // A simulation in which nothing ever went wrong, or nothing ever went well, would prove nothing.
    if !one {
        let has = |phase| ends.keys().any(|(end, ..)| *end == phase);
        let revived = |end| ends.keys().any(|(phase, _, revived)| *revived && *phase == end);
        assert!(
            revived(Phase::Done),
            "none was taken up again and ended well: {ends:?}"
        );
        assert!(
            has(Phase::Done) && has(Phase::Partial) && has(Phase::Failed) && has(Phase::Cancelled),
            "{ends:?}"
        );
    }
}
