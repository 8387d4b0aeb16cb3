//! The job and its effects: what is committed, sent, and lost in a crash.

use super::*;

impl World {
    pub(super) fn apply(&mut self, event: Event) {
        self.apply_all(vec![event]);
    }

    pub(super) fn apply_all(&mut self, events: Vec<Event>) {
        let Some(mut job) = self.job.take() else { return };
        let effects = job.apply_all(events, self.time());
        self.job = Some(job);
        let mut request = None;
        let mut laid = Vec::new();
        for effect in effects {
            if self.crashes > 0 {
                self.fuse -= 1;
                if self.fuse == 0 {
                    self.crash();
                    return;
                }
            }
            match effect {
                Effect::Persist(changes) => self.persist(&changes),
                Effect::Send(to, assignment) => self.send(&to, *assignment),
                Effect::Plan(wanted) => request = Some(wanted),
                Effect::NewHops(request, edges) => {
                    laid = new_hops(&self.topology, &request, &Facts::default(), &edges).unwrap();
                }
                Effect::Wake(at) => {
                    self.wake = Some(self.started + u64::try_from(at.as_millis()).unwrap() + 1);
                }
                Effect::Notify(_) => {}
            }
        }
        if let Some(request) = request {
            let answer = plan(&self.topology, &request, &Facts::default());
            self.apply(Event::Planned(answer));
        }
        if !laid.is_empty() {
            self.apply(Event::NewHops(laid));
        }
    }

    pub(super) fn persist(&mut self, changes: &Changes) {
        let bytes = |value: &Record| postcard::to_stdvec(value).unwrap();
        if let Some(record) = &changes.record {
            self.disk.record = bytes(record);
        }
        if let Some(plan) = &changes.plan {
            self.disk.plan = Some(postcard::to_stdvec(plan).unwrap());
        }
        for (at, _, target) in &changes.targets {
            self.disk
                .targets
                .insert(*at, postcard::to_stdvec(target).unwrap());
        }
    }

    pub(super) fn send(&mut self, to: &NodeName, assignment: Assignment) {
        let i: usize = to.as_str()[1..].parse().unwrap();
        let record: Record = postcard::from_bytes(&self.disk.record).unwrap();
        assert!(
            assignment.version <= record.version,
            "told before it was committed"
        );
        if let Order::Run(run) = &assignment.order {
            if run.fin.is_some() {
                assert_eq!(record.fin, run.fin, "FINAL was told before it was committed");
                assert!(self.agents[0].declared, "nobody declared FINAL");
                assert!(!self.expected_wrong, "published against --expect");
            }
            assert!(
                !run.parents.iter().any(|peer| peer.addresses.is_empty()),
                "a parent without address"
            );
        }
        let rank = assignment.rank();
        if let Some((last, order)) = self.sent.get(&i) {
            assert!(rank >= *last, "a lower order after a higher one");
            if rank == *last {
                assert_eq!(*order, assignment.order, "two orders under one number");
            }
        }
        self.sent.insert(i, (rank, assignment.order.clone()));
        if self.agents[i].connected {
            if self.lossy && self.dice.chance(10) {
                self.post(Message::Down(i, Box::new(assignment.clone())));
            }
            self.post(Message::Down(i, Box::new(assignment)));
        }
    }

    pub(super) fn crash(&mut self) {
        self.crashes -= 1;
        self.fuse = 1 + self.dice.below(80);
        self.job = None;
        self.wake = None;
        self.restart_at = self.now + 200 + self.dice.below(20_000);
        for i in 0..self.agents.len() {
            self.agents[i].connected = false;
        }
    }

    pub(super) fn restart(&mut self) {
        self.epoch = self.epoch.next();
        self.started = self.now;
        self.away_told.clear();
        for agent in &mut self.agents {
            agent.gone_at = self.now;
        }
        let job = if self.disk.record.is_empty() {
            // The submit was never acknowledged: the client sends it again.
            Job::new(self.spec.clone(), self.epoch, BTreeMap::new(), self.time())
        } else {
            let record = postcard::from_bytes(&self.disk.record).unwrap();
            let plan: Option<Plan> = self
                .disk
                .plan
                .as_ref()
                .map(|bytes| postcard::from_bytes(bytes).unwrap());
            let targets = (0..self.spec.targets.len())
                .map(|at| {
                    self.disk
                        .targets
                        .get(&at)
                        .map_or_else(TargetRecord::default, |bytes| {
                            postcard::from_bytes(bytes).unwrap()
                        })
                })
                .collect();
            Job::restore(
                self.spec.clone(),
                record,
                plan,
                targets,
                self.epoch,
                BTreeMap::new(),
                self.time(),
            )
        };
        self.job = Some(job);
        self.apply(Event::Start);
    }
}
