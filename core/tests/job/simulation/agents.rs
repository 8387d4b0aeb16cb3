//! What agents do with their orders, and how they come and go.

use super::*;

impl World {
    pub(super) fn kill(&mut self, i: usize) {
        let agent = &mut self.agents[i];
        agent.alive = false;
        agent.connected = false;
        agent.gone_at = self.now;
        agent.run = None;
        agent.answer = None;
        if std::mem::take(&mut agent.gave_up) {
            agent.outcome = None;
        }
        self.agents[i].back_at = self
            .dice
            .chance(85)
            .then(|| self.now + 500 + self.dice.below(if i == 0 { 80_000 } else { 40_000 }));
    }

    pub(super) fn connect(&mut self, i: usize) {
        self.agents[i].connected = true;
        self.away_told.remove(&i);
        let agent = self.agents[i].clone();
        self.apply(Event::Up {
            node: node(i),
            addresses: vec!["10.0.0.1:7701".parse().unwrap()],
            held: agent.held,
        });
        if let Some(answer) = agent.answer.filter(|_| agent.held) {
            self.up(i, answer);
        }
        if let Some(outcome) = agent.outcome.filter(|_| agent.held) {
            self.up(i, Event::Outcome(node(i), outcome));
        }
    }

    pub(super) fn ordered(&mut self, i: usize, assignment: Assignment) {
        if !self.agents[i].alive || assignment.rank() < self.agents[i].rank {
            return;
        }
        let again = assignment.rank() == self.agents[i].rank;
        self.agents[i].rank = assignment.rank();
        let version = assignment.version;
        match assignment.order {
            Order::PrepareSource(_) => {
                self.agents[i].held = true;
                // Of a job that is taken up again: all is read anew.
                self.agents[i].declared = false;
                self.agents[i].hashed = 0;
                let manifest = Manifest::single_file(b"x", ByteCount(u64::from(CHUNKS) << 20), 0o644, (1, 1));
                let payload = Payload::of(&manifest).unwrap();
                self.up(i, Event::Prepared(node(i), version, Prepared::Source { payload }));
            }
            Order::PrepareTarget { .. } => {
                let answer = if self.agents[i].unfit > 0 {
                    if !again {
                        self.agents[i].unfit -= 1;
                    }
                    Prepared::Unfit(Failure::new(Code::NoSpace, "too little space", "free some"))
                } else {
                    self.agents[i].held = true;
                    if std::mem::take(&mut self.agents[i].gave_up) {
                        self.agents[i].outcome = None;
                    }
                    Prepared::Ready {
                        path: "/s/x".to_owned(),
                        candidate: self.agents[i].occupied > self.now,
                    }
                };
                self.answer(i, Event::Prepared(node(i), version, answer));
            }
            Order::Run(run) => {
                self.agents[i].held = true;
                let old = self.agents[i].run.as_ref().map(|run| run.parents.clone());
                if old.as_ref() != Some(&run.parents) {
                    self.agents[i].parent = 0;
                }
                self.agents[i].run = Some(run);
            }
            Order::Release { .. } | Order::Cancel => {
                let agent = &mut self.agents[i];
                agent.run = None;
                agent.held = false;
                agent.let_go = true;
                if !agent.published {
                    agent.chunks = 0;
                }
            }
        }
        let applied = self.agents[i].rank;
        self.up(i, Event::Applied(node(i), applied.0, applied.1));
    }

    pub(super) fn answer(&mut self, i: usize, event: Event) {
        self.agents[i].answer = Some(event.clone());
        self.up(i, event);
    }

    pub(super) fn work(&mut self, i: usize) {
        if !self.agents[i].alive {
            return;
        }
        let Some(run) = self.agents[i].run.clone() else {
            return;
        };
        if run.source.is_some() && !self.agents[i].declared {
            self.agents[i].chunks = (self.agents[i].chunks + 2).min(CHUNKS);
            self.agents[i].declared = self.agents[i].chunks == CHUNKS;
        }
        if run.source.is_some() && self.expected_wrong && self.agents[i].declared {
            let wrong = Failure::new(Code::Unexpected, "another digest", "check it").on(&node(i));
            self.up(i, Event::Source(node(i), SourceReport::Failed(wrong)));
        } else if run.source.is_some() {
            if self.agents[i].declared && self.dice.chance(20) {
                self.up(i, Event::Source(node(i), SourceReport::Final(final_of())));
            }
            self.agents[i].hashed = (self.agents[i].hashed + 1).min(CHUNKS);
            if self.agents[i].hashed == CHUNKS && self.dice.chance(20) {
                self.up(
                    i,
                    Event::Source(node(i), SourceReport::Sha256(FileDigest([9; 32]))),
                );
                self.agents[i].hashed_told = true;
            }
        }
        if run.target.is_none() || self.agents[i].published || self.agents[i].gave_up {
            return;
        }
        if i != 0 && self.agents[i].chunks < CHUNKS {
            let parents: Vec<usize> = run
                .parents
                .iter()
                .map(|peer| peer.node.as_str()[1..].parse().unwrap())
                .collect();
            let at = self.agents[i].parent.min(parents.len().saturating_sub(1));
            let serves = |p: usize| {
                let parent = &self.agents[p];
                parent.alive && parent.run.is_some() && parent.chunks > self.agents[i].chunks
            };
            if parents.get(at).is_some_and(|p| serves(*p)) {
                self.agents[i].chunks += 1;
                self.agents[i].stalled = 0;
            } else {
                self.agents[i].stalled += STEP;
                let alive = |p: &usize| self.agents[*p].alive && self.agents[*p].run.is_some();
                let silent = self.agents[i].stalled >= 3_000 && !parents.get(at).is_some_and(alive);
                let next = (0..parents.len()).find(|k| *k != at && alive(&parents[*k]));
                if silent {
                    self.agents[i].stalled = 0;
                    if let Some(next) = next {
                        self.agents[i].parent = next;
                        let event = Event::Moved {
                            node: node(i),
                            from: node(parents[at]),
                            to: node(parents[next]),
                            why: "silent".to_owned(),
                        };
                        self.up(i, event);
                    }
                }
            }
            let progress = Progress {
                chunks: self.agents[i].chunks,
                ..Progress::default()
            };
            self.up(i, Event::Progress(node(i), progress));
        }
        if self.agents[i].chunks == CHUNKS && self.agents[i].occupied > self.now {
            let failure = Failure::new(Code::Exists, "other content stands there", "move it away");
            self.agents[i].gave_up = true;
            self.agents[i].outcome = Some(Outcome::Unfit(failure.clone()));
            self.up(i, Event::Outcome(node(i), Outcome::Unfit(failure)));
        } else if self.agents[i].chunks == CHUNKS && run.fin == Some(final_of()) {
            let outcome = Outcome::Published {
                path: "/s/x".to_owned(),
                already: false,
                bytes_received: u64::from(CHUNKS) << 20,
                took: Duration::from_secs(1),
            };
            self.agents[i].published = true;
            self.agents[i].outcome = Some(outcome.clone());
            self.up(i, Event::Outcome(node(i), outcome));
        }
    }
}
