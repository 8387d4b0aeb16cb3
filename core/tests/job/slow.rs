//! Slow hops: who waits for a slow node gets another parent, and goes back where that did not help.

use std::time::Duration;

use stage_core::assignment::{Outcome, Prepared, Progress, StreamChoice};
use stage_core::failure::Code;
use stage_core::job::{Event, Phase, SLOW_AFTER, TargetState};
use stage_core::plan::{Controls, NodeFacts};
use stage_core::verdict::{Fault, SlowHop};

use crate::decisions::failure;
use crate::node;
use crate::push::{CHUNKS, Push};

const MOMENT: Duration = Duration::from_secs(3);

fn slow(child: usize, parent: usize, fault: Fault, waiting: &[usize]) -> SlowHop {
    SlowHop {
        child: node(child),
        parent: node(parent),
        fault,
        waiting: waiting.iter().copied().map(node).collect(),
        text: format!("n{child}: its disk writes 4.00 MB/s"),
    }
}

impl Push {
    /// It is looked every second at what is slow: these hops are.
    fn slow_for(&mut self, time: Duration, hops: &[SlowHop]) {
        for _ in 0..time.as_secs() {
            self.apply(Event::Slow(hops.to_vec()));
            self.now += 1;
        }
        self.apply(Event::Slow(hops.to_vec()));
    }

    /// The same, while nodes receive so many bytes a second.
    fn slow_while(&mut self, time: Duration, hops: &[SlowHop], rates: &[(usize, u64)]) {
        for _ in 0..=time.as_secs() {
            for (i, rate) in rates {
                let bytes_received = (self.now - 59) * rate;
                let progress = Progress {
                    bytes_received,
                    ..Progress::default()
                };
                self.apply(Event::Progress(node(*i), progress));
            }
            self.apply(Event::Slow(hops.to_vec()));
            self.now += 1;
        }
    }

    fn remarks(&self) -> Vec<&str> {
        self.job.record().remarks.iter().map(String::as_str).collect()
    }
}

#[test]
fn who_waits_for_a_slow_node_asks_its_parent() {
    let mut push = Push::run(4);
    let sick = [slow(2, 1, Fault::Child, &[3])];
    push.slow_for(SLOW_AFTER - Duration::from_secs(1), &sick);
    assert_eq!(push.parents(3), ["n2", "n1", "n0"], "it may get better");
    push.slow_for(SLOW_AFTER, &[]);
    push.slow_for(SLOW_AFTER - MOMENT, &sick);
    assert_eq!(push.parents(3), ["n2", "n1", "n0"], "it was better for a while");
    // A disk that stands still says nothing for a moment.
    push.slow_for(MOMENT, &[]);
    push.slow_for(MOMENT, &sick);
    assert_eq!(push.parents(3), ["n1", "n0"]);
    assert_eq!(push.parents(4), ["n3", "n1", "n0"]);
    assert_eq!(push.children(1), ["n2", "n3"]);
    assert!(push.children(2).is_empty());
    assert_eq!(push.parents(2), ["n1", "n0"], "it stays, as a leaf");
    let told = "n2 is slow, and who waited for it now asks n1: n3 (n2: its disk writes 4.00 MB/s)";
    assert_eq!(push.remarks(), [told]);
    // It stays slow: that is said once.
    push.slow_for(SLOW_AFTER * 3, &[slow(2, 1, Fault::Child, &[])]);
    assert_eq!(push.remarks().len(), 1);
    push.finish();
    (1..=4).for_each(|i| push.publish(i));
    assert_eq!((push.job.phase(), push.job.exit()), (Phase::Done, 0));
}

#[test]
fn where_nobody_waits_nobody_is_moved() {
    let mut push = Push::run(3);
    let before = push.job.plan().cloned();
    push.slow_for(SLOW_AFTER * 3, &[slow(1, 0, Fault::Child, &[])]);
    assert_eq!(push.job.plan().cloned(), before);
}

#[test]
fn a_move_that_does_not_help_is_taken_back_and_was_the_last() {
    let mut push = Push::run(4);
    let sick = [slow(2, 1, Fault::Child, &[3])];
    push.slow_while(SLOW_AFTER, &sick, &[(3, 1000)]);
    assert_eq!(push.parents(3), ["n1", "n0"]);
    push.slow_while(SLOW_AFTER, &sick, &[(3, 1000)]);
    assert_eq!(push.parents(3), ["n2", "n1", "n0"]);
    assert_eq!(push.remarks().last(), Some(&"n3 asks n2 again: it was no faster"));
    push.slow_while(SLOW_AFTER * 3, &[slow(3, 2, Fault::Child, &[4])], &[(4, 1000)]);
    assert_eq!(push.parents(4), ["n3", "n2", "n1", "n0"]);
}

#[test]
fn a_move_that_helps_is_kept() {
    let mut push = Push::run(4);
    let sick = [slow(2, 1, Fault::Child, &[3])];
    push.slow_while(SLOW_AFTER, &sick, &[(3, 1000)]);
    push.slow_while(SLOW_AFTER * 3, &sick, &[(3, 9000)]);
    assert_eq!(push.parents(3), ["n1", "n0"]);
    assert_eq!(push.remarks().len(), 1);
}

#[test]
fn others_go_before_a_slow_node_until_it_has_all() {
    let mut push = Push::run(3);
    push.slow_for(SLOW_AFTER, &[slow(2, 1, Fault::Child, &[3])]);
    push.apply(Event::Leaving(node(1)));
    assert_eq!(push.parents(3), ["n0"]);
    assert_eq!(push.parents(2), ["n0"]);
    push.finish();
    push.publish(2);
    push.apply(Event::Moved {
        node: node(3),
        from: node(0),
        to: node(2),
        why: "silent".to_owned(),
    });
    assert_eq!(push.parents(3)[0], "n2", "it has all now");
}

#[test]
fn a_late_joiner_is_not_given_to_a_slow_node() {
    let mut push = Push::new(3, |_, _| ());
    push.look();
    push.ready(1);
    push.ready(2);
    push.answer(3, Prepared::Unfit(failure(Code::NoSpace)));
    push.slow_for(SLOW_AFTER, &[slow(2, 1, Fault::Child, &[])]);
    push.later(60);
    push.ready(3);
    assert_eq!(push.state(3), TargetState::Receiving);
    assert_eq!(push.parents(3), ["n1", "n0"]);
}

#[test]
fn a_slow_way_is_gone_around() {
    let mut push = Push::run(4);
    push.slow_for(SLOW_AFTER, &[slow(3, 2, Fault::Way, &[4])]);
    assert_eq!(push.parents(3), ["n1", "n0"]);
    assert_eq!(push.children(1), ["n2", "n3"]);
    assert_eq!(
        push.parents(4),
        ["n3", "n1", "n0"],
        "its own children stay with it"
    );
}

#[test]
fn who_is_no_faster_anywhere_is_slow_by_itself() {
    let mut push = Push::run(4);
    let from = |parent| [slow(3, parent, Fault::Way, &[4])];
    push.slow_while(SLOW_AFTER, &from(2), &[(3, 1000), (4, 1000)]);
    assert_eq!(push.parents(3), ["n1", "n0"]);
    push.slow_while(SLOW_AFTER, &from(1), &[(3, 1000), (4, 1000)]);
    assert_eq!(push.parents(3), ["n2", "n1", "n0"], "it goes back");
    push.slow_while(MOMENT, &from(2), &[(3, 1000), (4, 1000)]);
    assert_eq!(push.parents(4), ["n2", "n1", "n0"], "those below it do not wait");
}

#[test]
fn above_the_source_is_nobody() {
    let mut push = Push::run(2);
    push.slow_for(SLOW_AFTER, &[slow(1, 0, Fault::Way, &[2])]);
    assert_eq!(push.parents(1), ["n0"]);
    assert_eq!(push.parents(2), ["n0"]);
}

#[test]
fn what_is_nearly_over_is_left_as_it_is() {
    let mut push = Push::run(3);
    for chunks in 1..CHUNKS {
        let progress = Progress {
            chunks,
            bytes_kept: u64::from(chunks) << 20,
            bytes_received: u64::from(chunks) << 20,
            ..Progress::default()
        };
        push.apply(Event::Progress(node(2), progress));
        push.now += 1;
    }
    // One chunk of a second is left.
    let sick = [slow(2, 1, Fault::Child, &[3])];
    push.slow_for(SLOW_AFTER * 2, &sick);
    assert_eq!(push.parents(3), ["n2", "n1", "n0"]);
    // And who receives no more is not slow.
    push.apply(Event::Outcome(node(2), Outcome::Failed(failure(Code::NoSpace))));
    let before = push.job.plan().cloned();
    push.slow_for(SLOW_AFTER * 2, &sick);
    assert_eq!(push.job.plan().cloned(), before);
}

#[test]
fn a_hop_over_which_no_chunk_is_whole_yet_has_a_rate() {
    let mut push = Push::run(1);
    for second in 0..3 {
        let progress = Progress {
            bytes_received: second * 100_000,
            ..Progress::default()
        };
        push.apply(Event::Progress(node(1), progress));
        push.now += 1;
    }
    let seen = push.job.seen_of_late();
    assert_eq!(seen.hops[0].rate.bytes_per_second(), 100_000.0);
}

/// A source that is 100 ms away from all others.
#[test]
fn a_hop_to_another_parent_is_laid_for_its_own_way() {
    let text = "[cluster]\nname = \"c\"\n[[switch]]\nname = \"s[1-2]\"\n[[link]]\nbetween = [\"s1\", \"s2\"]\n\
                capacity = \"1 Gbit/s\"\nrtt = \"100 ms\"\nloss = 0.0001\n\
                [[node]]\nname = \"n0\"\naddress = \"10.0.0.1\"\nattach = \"s1\"\nnic = \"1 Gbit/s\"\n\
                [[node]]\nname = \"n[1-3]\"\naddress = \"10.0.0.[2-4]\"\nattach = \"s2\"\nnic = \"1 Gbit/s\"\n\
                [roots]\nscratch = \"/s\"\n";
    let mut push = Push::over(text, 3, |_, _| ());
    let controls = Controls {
        default: "cubic".parse().unwrap(),
        offered: vec!["cubic".parse().unwrap(), "bbr".parse().unwrap()],
    };
    for i in 0..=3 {
        let facts = NodeFacts {
            controls: Some(controls.clone()),
            ..NodeFacts::default()
        };
        push.facts.nodes.insert(node(i), facts);
    }
    push.all_ready(3);
    let hop = |push: &Push, i| {
        let run = push.run_of(i);
        let StreamChoice::Auto { least, .. } = run.streams else {
            panic!("{:?}", run.streams);
        };
        let control = run.congestion_control.as_ref().map(ToString::to_string);
        (run.parents[0].node.to_string(), least, control)
    };
    let bbr = Some("bbr".to_owned());
    let (parent, far, control) = hop(&push, 1);
    assert_eq!((parent.as_str(), &control), ("n0", &bbr));
    assert!(far > 1);
    assert_eq!(hop(&push, 2), ("n1".to_owned(), 1, None));
    push.slow_for(SLOW_AFTER, &[slow(1, 0, Fault::Child, &[2])]);
    assert_eq!(hop(&push, 2), ("n0".to_owned(), far, bbr));
}
