//! Single decisions of a job that a simulation would meet too seldom to be read from.

use std::time::Duration;

use stage_core::assignment::{Final, Order, Outcome, Prepared, Progress, SourceReport};
use stage_core::digest::RootDigest;
use stage_core::failure::{Code, Failure};
use stage_core::id::{Epoch, NodeName};
use stage_core::job::{Event, Now, Phase, Presence, TargetState};
use stage_core::manifest::Manifest;
use stage_core::payload::Payload;
use stage_core::units::{ByteCount, Rate};

use crate::node;
use crate::push::{CHUNKS, Push};

pub(crate) fn failure(code: Code) -> Failure {
    Failure::new(code, "so it is", "do something")
}

#[test]
fn children_of_a_node_that_leaves_or_dies_move_to_its_parent() {
    let mut push = Push::run(4);
    assert_eq!(push.parents(3), ["n2", "n1", "n0"]);
    push.apply(Event::Leaving(node(2)));
    assert_eq!(push.parents(3), ["n1", "n0"]);
    assert_eq!(push.parents(4), ["n3", "n1", "n0"]);
    assert_eq!(push.children(1), ["n2", "n3"]);
    assert!(push.children(2).is_empty());
    assert_eq!(push.state(2), TargetState::Receiving);

    push.apply(Event::Away(node(2)));
    assert_eq!(push.state(2), TargetState::Unfit);
    assert_eq!(push.children(1), ["n3"]);

    // Back with what it had: it goes on at once, without being asked again.
    let addresses = vec!["10.0.9.9:7701".parse().unwrap()];
    push.apply(Event::Up {
        node: node(2),
        addresses,
        held: true,
    });
    assert_eq!(push.state(2), TargetState::Receiving);
    assert_eq!(push.parents(2), ["n1", "n0"]);
    assert_eq!(push.children(1), ["n2", "n3"]);
    push.finish();
    (1..=4).for_each(|i| push.publish(i));
    assert_eq!((push.job.phase(), push.job.exit()), (Phase::Done, 0));
}

#[test]
fn a_child_that_moved_by_itself_is_followed_but_never_in_a_ring() {
    let mut push = Push::run(4);
    let moved = |child: usize, to: usize| Event::Moved {
        node: node(child),
        from: node(child - 1),
        to: node(to),
        why: "silent".to_owned(),
    };
    push.apply(moved(3, 1));
    assert_eq!(push.parents(3), ["n1", "n0"]);
    assert_eq!(push.children(1), ["n2", "n3"]);
    let before = push.job.plan().cloned();
    push.apply(moved(3, 4));
    assert_eq!(push.job.plan().cloned(), before, "n4 receives from n3");
    assert_eq!(push.job.record().remarks.len(), 2);

    // Who has all needs nobody: then it may serve who was above it.
    push.finish();
    push.publish(4);
    push.apply(moved(3, 4));
    assert_eq!(push.parents(3)[0], "n4");
    let plan = push.job.plan().unwrap();
    assert_eq!(plan.hop(&node(4)).unwrap().parent, node(1), "it takes its place");
}

#[test]
fn two_children_that_got_damaged_chunks_end_a_parents_serving() {
    let mut push = Push::run(4);
    let corrupt = |child: usize| Event::Corrupt {
        node: node(child),
        parent: node(2),
        chunk: 5,
    };
    push.apply(corrupt(3));
    push.apply(corrupt(3));
    assert_eq!(push.parents(3), ["n2", "n1", "n0"], "one child may be mistaken");
    push.apply(corrupt(4));
    assert_eq!(push.parents(3), ["n1", "n0"]);
    assert_eq!(push.parents(4), ["n3", "n1", "n0"]);
    assert!(push.children(2).is_empty());
    assert_eq!(
        push.job.record().remarks.len(),
        4,
        "{:?}",
        push.job.record().remarks
    );
    // Not the source: without it nothing would go on.
    for child in [1, 3] {
        push.apply(Event::Corrupt {
            node: node(child),
            parent: node(0),
            chunk: 1,
        });
    }
    assert!(!push.job.record().quarantined.contains(&node(0)));
}

#[test]
fn a_lost_source_keeps_partials_for_a_day() {
    let mut push = Push::run(2);
    push.apply(Event::Away(node(0)));
    push.later(49);
    assert_eq!(push.job.phase(), Phase::Running);
    push.later(1);
    assert_eq!((push.job.phase(), push.job.exit()), (Phase::Failed, 6));
    assert_eq!(push.job.record().failure.as_ref().unwrap().code, Code::SourceLost);
    assert!(
        matches!(push.told[&node(1)].order, Order::Run(_)),
        "neither cancelled nor released"
    );
    push.later(24 * 3600);
    assert!(matches!(push.told[&node(1)].order, Order::Cancel));
}

#[test]
fn after_final_holders_go_on_without_the_source() {
    let mut push = Push::run(3);
    push.apply(Event::Source(
        node(0),
        SourceReport::Final(Final {
            root: RootDigest([7; 32]),
            chunks: CHUNKS,
            data: Default::default(),
        }),
    ));
    push.apply(Event::Outcome(node(1), Outcome::Failed(failure(Code::Io))));
    assert_eq!(push.parents(2), ["n0"]);
    push.publish(3);
    push.apply(Event::Away(node(0)));
    assert_eq!(push.parents(2)[0], "n3");
    push.later(60);
    assert_eq!(push.job.phase(), Phase::Running);
    push.publish(2);
    assert_eq!((push.job.phase(), push.job.exit()), (Phase::Partial, 5));
    assert_eq!(push.job.record().sha256, None);
}

#[test]
fn no_copy_counts_before_final() {
    let mut push = Push::run(1);
    push.publish(1);
    assert_eq!(push.state(1), TargetState::Verified);
    push.finish();
    assert_eq!(push.state(1), TargetState::Published);
    let mut push = Push::run(1);
    push.publish(1);
    push.apply(Event::Source(
        node(0),
        SourceReport::Failed(failure(Code::SourceChanged)),
    ));
    assert_eq!((push.state(1), push.job.exit()), (TargetState::Failed, 6));
}

#[test]
fn waiting_ends_with_wait_for() {
    let mut push = Push::new(2, |spec, standing| {
        spec.wait_for = Duration::from_secs(100);
        standing.get_mut(&node(2)).unwrap().presence = Presence::Away;
    });
    push.look();
    push.ready(1);
    push.finish();
    push.publish(1);
    assert_eq!((push.job.phase(), push.job.is_settled()), (Phase::Open, true));
    assert!(matches!(push.told[&node(1)].order, Order::Run(_)));
    push.later(100);
    assert_eq!((push.job.phase(), push.job.exit()), (Phase::Partial, 5));
    let sha256 = push.job.record().sha256;
    assert!(sha256.is_some(), "the index of what lies there wants it");
    assert_eq!(push.told[&node(1)].order, Order::Release { sha256 });
    assert_eq!(push.told[&node(0)].order, Order::Release { sha256 });
}

#[test]
fn room_that_was_made_is_noticed() {
    let mut push = Push::new(2, |_, _| ());
    push.look();
    push.ready(1);
    push.answer(2, Prepared::Unfit(failure(Code::NoSpace)));
    assert_eq!(push.state(2), TargetState::Unfit);
    let asked = push.told[&node(2)].version;
    push.apply(Event::Space(node(2)));
    push.later(5);
    assert!(push.told[&node(2)].version > asked, "it is asked again");
    push.ready(2);
    assert_eq!(push.state(2), TargetState::Receiving);
    assert!(!push.parents(2).is_empty());
}

#[test]
fn other_content_is_let_be_until_it_is_gone() {
    let mut push = Push::run(2);
    push.apply(Event::Outcome(node(2), Outcome::Unfit(failure(Code::Exists))));
    assert_eq!(push.told[&node(2)].order, Order::Cancel, "nothing stays reserved");
    let candidate = |push: &mut Push, candidate| {
        push.later(30);
        push.answer(
            2,
            Prepared::Ready {
                path: "/s/x".to_owned(),
                candidate,
            },
        );
    };
    candidate(&mut push, true);
    assert_eq!(push.state(2), TargetState::Unfit);
    assert_eq!(push.told[&node(2)].order, Order::Cancel);
    candidate(&mut push, false);
    assert_eq!(push.state(2), TargetState::Receiving);
}

#[test]
fn nothing_changes_by_counters_alone() {
    let mut push = Push::run(2);
    let told = push.told.clone();
    for chunks in [1, CHUNKS, CHUNKS - 1, CHUNKS] {
        let progress = Progress {
            chunks,
            ..Progress::default()
        };
        push.apply(Event::Progress(node(1), progress));
    }
    assert_eq!(push.state(1), TargetState::Verified);
    assert_eq!(push.told, told);
}

#[test]
fn a_walk_may_take_its_time_and_may_not_stand_still() {
    let walks = |until_second: u64| {
        let mut push = Push::new(1, |_, _| ());
        for second in 0..60 {
            push.now += 1;
            let progress = Progress {
                walked: second.min(until_second),
                ..Progress::default()
            };
            push.apply(Event::Progress(node(0), progress));
            push.apply(Event::Tick);
        }
        push
    };
    let mut push = walks(60);
    assert_eq!(push.job.phase(), Phase::Preparing);
    push.look();
    push.ready(1);
    assert_eq!(push.job.phase(), Phase::Running);
    assert_eq!(walks(40).job.phase(), Phase::Failed);
}

#[test]
fn a_target_that_ended_takes_no_more_time() {
    let mut push = Push::run(2);
    let progress = |chunks: u32| Progress {
        chunks,
        bytes_kept: u64::from(chunks) << 20,
        bytes_received: u64::from(chunks) << 20,
        ..Progress::default()
    };
    push.apply(Event::Progress(node(1), progress(1)));
    push.later(2);
    push.apply(Event::Progress(node(1), progress(2)));
    push.apply(Event::Cancel(Some(vec![node(1)])));
    push.later(60);
    let now = Now {
        up: Duration::from_secs(push.now),
        unix_ms: push.now * 1000,
    };
    let view = &push.job.view(now).nodes[0];
    assert_eq!(view.state, TargetState::Cancelled);
    assert_eq!(view.took, Duration::from_secs(2));
    assert_eq!(view.rate.bytes_per_second(), f64::from(1 << 20));
    assert_eq!(view.rate_now, Rate::ZERO);
}

#[test]
fn an_order_is_told_again_until_it_is_applied() {
    let mut push = Push::run(1);
    let run = push.told.remove(&node(1)).unwrap();
    push.later(5);
    assert_eq!(push.told[&node(1)], run, "the same, under the same number");
    push.apply(Event::Applied(node(1), Epoch(1), run.version));
    push.told.clear();
    push.later(5);
    assert!(!push.told.contains_key(&node(1)));
}

#[test]
fn the_exit_code_follows_the_targets() {
    for (outcome, exit) in [
        (Outcome::Failed(failure(Code::Io)), 5),
        (Outcome::Unfit(failure(Code::NoSpace)), 5),
    ] {
        let mut push = Push::run(2);
        push.finish();
        push.publish(1);
        push.apply(Event::Outcome(node(2), outcome));
        assert!(push.job.is_settled());
        assert_eq!(push.job.exit(), exit);
    }
    let mut push = Push::run(1);
    push.apply(Event::Outcome(node(1), Outcome::Failed(failure(Code::Io))));
    assert_eq!((push.job.phase(), push.job.exit()), (Phase::Failed, 6));
    let mut push = Push::run(2);
    push.apply(Event::Cancel(Some(vec![node(1)])));
    assert_eq!(push.told[&node(1)].order, Order::Cancel);
    assert_eq!(push.parents(2), ["n0"]);
    push.finish();
    push.publish(2);
    assert_eq!((push.job.phase(), push.job.exit()), (Phase::Partial, 5));
}

#[test]
fn a_retry_goes_on_from_what_is_kept_of_a_lost_source() {
    let mut push = Push::run(3);
    push.apply(Event::Cancel(Some(vec![node(3)])));
    push.apply(Event::Away(node(0)));
    push.later(50);
    assert!(push.job.can_be_revived());
    assert_eq!(push.job.missing(), [node(1), node(2), node(3)]);
    let before = push.told[&node(1)].rank();

    push.retry(None);
    assert_eq!(
        (push.job.phase(), push.job.record().revived),
        (Phase::Preparing, 1)
    );
    assert!(!push.job.can_be_revived() && !push.job.is_settled());
    assert!(matches!(push.told[&node(0)].order, Order::PrepareSource(_)));
    push.look();
    assert!(matches!(push.told[&node(1)].order, Order::PrepareTarget { .. }));
    assert!(push.told[&node(1)].rank() > before);
    assert_eq!(push.state(3), TargetState::Cancelled, "someone took it out");
    push.ready(1);
    push.ready(2);
    assert_eq!(push.job.phase(), Phase::Running);
    assert_eq!(push.parents(2), ["n1", "n0"]);
    push.finish();
    push.publish(1);
    push.publish(2);
    assert_eq!((push.job.phase(), push.job.exit()), (Phase::Partial, 5));
    assert!(!push.job.can_be_revived());
    assert_eq!(push.job.missing(), [] as [NodeName; 0]);
}

#[test]
fn a_retry_that_comes_too_soon_or_too_late_drops_nothing() {
    let mut push = Push::run(1);
    push.apply(Event::Away(node(0)));
    push.later(50);
    push.retry(None);
    // It is gone again before it has said anything.
    push.apply(Event::Away(node(0)));
    assert_eq!((push.job.phase(), push.job.exit()), (Phase::Failed, 6));
    assert!(push.job.can_be_revived());
    assert!(!matches!(push.told[&node(1)].order, Order::Cancel));
    push.retry(None);
    push.look();
    push.answer(1, Prepared::Unfit(failure(Code::NoSpace)));
    assert_eq!(push.job.record().failure.as_ref().unwrap().code, Code::NoSpace);
    assert!(push.job.can_be_revived());
    push.later(24 * 3600);
    assert!(!push.job.can_be_revived());
    assert!(matches!(push.told[&node(1)].order, Order::Cancel));
    push.retry(None);
    assert_eq!(push.job.phase(), Phase::Failed);
}

#[test]
fn a_retry_may_name_another_source() {
    let mut push = Push::run(2);
    push.apply(Event::Away(node(0)));
    push.later(50);
    push.retry(Some(2));
    assert_eq!(push.job.spec().source, node(2));
    assert!(matches!(push.told[&node(2)].order, Order::PrepareSource(_)));
    assert!(
        matches!(push.told[&node(0)].order, Order::Cancel),
        "it need not come back"
    );
    let manifest = Manifest::single_file(b"x", ByteCount(u64::from(CHUNKS) << 20), 0o644, (1, 1));
    let payload = Payload::of(&manifest).unwrap();
    push.answer(2, Prepared::Source { payload });
    push.ready(1);
    push.ready(2);
    assert_eq!(push.parents(1), ["n2"]);
    assert_eq!(push.run_of(2).parents[0].node, node(2), "its own copy");
}

#[test]
fn a_retry_of_an_open_job_asks_at_once() {
    let mut push = Push::run(3);
    push.apply(Event::Outcome(node(2), Outcome::Unfit(failure(Code::NoSpace))));
    push.apply(Event::Outcome(node(3), Outcome::Failed(failure(Code::Io))));
    push.finish();
    push.publish(1);
    assert_eq!((push.job.phase(), push.job.is_settled()), (Phase::Open, true));
    push.retry(None);
    for i in [2, 3] {
        assert!(matches!(push.told[&node(i)].order, Order::PrepareTarget { .. }));
    }
    assert!(!push.job.is_settled(), "they are asked");
    push.ready(2);
    push.answer(3, Prepared::Unfit(failure(Code::Io)));
    assert_eq!(push.state(2), TargetState::Receiving);
    assert_eq!((push.job.phase(), push.job.is_settled()), (Phase::Open, false));
    push.publish(2);
    assert!(push.job.is_settled(), "n3 is awaited");
}

#[test]
fn a_cancel_is_done_when_all_have_applied_it() {
    let mut push = Push::run(2);
    let names = |push: &Push| push.job.unapplied().cloned().collect::<Vec<_>>();
    push.apply(Event::Cancel(None));
    assert_eq!(names(&push), [node(0), node(1), node(2)]);
    for i in [0, 1] {
        let version = push.told[&node(i)].version;
        push.apply(Event::Applied(node(i), Epoch(1), version));
    }
    assert_eq!(names(&push), [node(2)]);
}
