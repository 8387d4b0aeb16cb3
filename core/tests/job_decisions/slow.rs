//! Slow hops: who waits for a slow node gets another parent.

use std::time::Duration;

use stage_core::assignment::{Outcome, Prepared, Progress};
use stage_core::failure::Code;
use stage_core::job::{Event, Phase, SLOW_AFTER, TargetState};
use stage_core::verdict::{Fault, SlowHop};

use crate::failure;
use crate::push::{CHUNKS, Push, node};

fn slow(child: usize, parent: usize, fault: Fault) -> SlowHop {
    SlowHop {
        child: node(child),
        parent: node(parent),
        fault,
        text: format!("n{child}: its disk writes 4.00 MB/s"),
    }
}

impl Push {
    /// It is looked every second at what is slow: these hops are.
    fn slow_for(&mut self, time: Duration, hops: &[SlowHop]) {
        for _ in 0..=time.as_secs() {
            self.apply(Event::Slow(hops.to_vec()));
            self.now += 1;
        }
        self.now -= 1;
    }
}

#[test]
fn who_waits_for_a_slow_node_asks_its_parent() {
    let mut push = Push::run(4);
    let sick = [slow(2, 1, Fault::Child)];
    push.slow_for(SLOW_AFTER - Duration::from_secs(1), &sick);
    assert_eq!(push.parents(3), ["n2", "n1", "n0"], "it may get better");
    push.apply(Event::Slow(Vec::new()));
    push.slow_for(SLOW_AFTER - Duration::from_secs(1), &sick);
    assert_eq!(push.parents(3), ["n2", "n1", "n0"], "it was better for a moment");
    push.slow_for(Duration::from_secs(1), &sick);
    assert_eq!(push.parents(3), ["n1", "n0"]);
    assert_eq!(push.parents(4), ["n3", "n1", "n0"]);
    assert_eq!(push.children(1), ["n2", "n3"]);
    assert!(push.children(2).is_empty());
    assert_eq!(push.parents(2), ["n1", "n0"], "it stays, as a leaf");
    let remarks = &push.job.record().remarks;
    assert_eq!(
        remarks[..],
        ["n2 is slow, and who waited for it now asks n1: n3 (n2: its disk writes 4.00 MB/s)"]
    );
    // It stays slow: that is said once.
    push.slow_for(SLOW_AFTER * 3, &sick);
    assert_eq!(push.job.record().remarks.len(), 1);
    push.finish();
    (1..=4).for_each(|i| push.publish(i));
    assert_eq!((push.job.phase(), push.job.exit()), (Phase::Done, 0));
}

#[test]
fn nobody_is_given_to_a_slow_node_before_it_has_all() {
    let mut push = Push::run(3);
    push.slow_for(SLOW_AFTER, &[slow(2, 1, Fault::Child)]);
    // The others have no room for it, but for the source.
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
    push.slow_for(SLOW_AFTER, &[slow(2, 1, Fault::Child)]);
    push.slow_for(SLOW_AFTER, &[slow(1, 0, Fault::Child)]);
    push.later(60);
    push.ready(3);
    assert_eq!(push.state(3), TargetState::Receiving);
    assert_eq!(push.parents(3), ["n0"]);
}

#[test]
fn a_slow_way_is_gone_around() {
    let mut push = Push::run(4);
    push.slow_for(SLOW_AFTER, &[slow(3, 2, Fault::Way)]);
    assert_eq!(push.parents(3), ["n1", "n0"]);
    assert_eq!(push.children(1), ["n2", "n3"]);
    assert_eq!(
        push.parents(4),
        ["n3", "n1", "n0"],
        "its own children stay with it"
    );
    // It is no better there: then it is its own fault.
    push.slow_for(SLOW_AFTER, &[slow(3, 1, Fault::Child)]);
    assert_eq!(push.parents(4), ["n1", "n0"]);
    // Above the source is nobody.
    push.slow_for(SLOW_AFTER, &[slow(1, 0, Fault::Way)]);
    assert_eq!(push.parents(1), ["n0"]);
    assert_eq!(push.job.record().remarks.len(), 2);
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
    push.slow_for(SLOW_AFTER * 2, &[slow(2, 1, Fault::Child)]);
    assert_eq!(push.parents(3), ["n2", "n1", "n0"]);
    // And who receives no more is not slow.
    push.apply(Event::Outcome(node(2), Outcome::Failed(failure(Code::NoSpace))));
    let before = push.job.plan().cloned();
    push.slow_for(SLOW_AFTER * 2, &[slow(2, 1, Fault::Child)]);
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
