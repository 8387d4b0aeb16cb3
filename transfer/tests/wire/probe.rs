//! Measuring the way between two nodes, on loopback.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use stage_core::bench::{Depth, Keep, LinkReading};
use stage_core::chunk::CHUNK;
use stage_core::failure::{Code, Failure};
use stage_core::id::{JobId, JobKey};
use stage_core::units::Rate;
use stage_transfer::probe::{Probing, measure};
use stage_transfer::root::Roots;
use tokio_util::sync::CancellationToken;

use crate::bench::{Bench, Node, name, soon};

const KEY: JobKey = JobKey([5; 32]);

fn id() -> JobId {
    JobId::from_random([4; 16])
}

async fn measured(
    from: &Node,
    to: &Node,
    key: JobKey,
    stop: CancellationToken,
    sweep: bool,
) -> (Result<LinkReading, Failure>, u64) {
    let probing = Probing {
        id: id(),
        key,
        peer: to.peer(),
        depth: Depth::Quick,
        sweep,
        keep: Keep::default(),
        roots: None,
        control: None,
    };
    let bytes = Arc::new(AtomicU64::new(0));
    let work = measure(from.plane.clone(), probing, bytes.clone(), stop);
    let reading = soon("the measurement", work).await;
    (reading, bytes.load(Ordering::Relaxed))
}

async fn both_ways(bench: &Bench) {
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    let answering = n1.plane.answer_probe(id(), KEY, name("n0"), None);
    let (reading, bytes) = measured(&n0, &n1, KEY, CancellationToken::new(), false).await;
    let reading = reading.unwrap();
    assert!(reading.rtt.min > Duration::ZERO && reading.rtt.median >= reading.rtt.min);
    assert!(bytes > 0);
    let trace = &reading.trace;
    assert_eq!((trace.routers.len(), trace.reached), (1, true), "{trace:?}");
    assert!(trace.mtu > 10_000 && !trace.swallows, "{trace:?}");
    assert_eq!((reading.forward_kept, reading.backward_kept), (None, None));
    for rates in [&reading.forward, &reading.backward] {
        let streams: Vec<u16> = rates.iter().map(|rate| rate.streams).collect();
        assert!(
            [&[1][..], &[1, 2], &[1, 2, 4]].contains(&streams.as_slice()),
            "{streams:?}"
        );
        for rate in rates {
            assert!(rate.rate > Rate::ZERO && rate.bytes.0 > 0, "{rate:?}");
        }
        // It went on just as long as that brought more.
        for (one, next) in rates.iter().zip(rates.iter().skip(1)).rev().skip(1) {
            assert!(next.rate > one.rate, "{rates:?}");
        }
    }
    drop(answering);
    soon("all threads to end", n1.plane.stop()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_way_is_measured_in_both_directions() {
    let (tls, insecure) = (Bench::tls(CHUNK), Bench::insecure(CHUNK));
    tokio::join!(both_ways(&tls), both_ways(&insecure));
}

/// Measures with both disks, where who answers has a root or has none.
async fn kept(bench: &Bench, there: bool) {
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let roots = dirs.each_ref().map(|dir| {
        Arc::new(Roots::open(vec![(
            "main".parse().unwrap(),
            dir.path().to_owned(),
        )]))
    });
    let [ours, theirs] = roots;
    let _answering = n1
        .plane
        .answer_probe(id(), KEY, name("n0"), there.then_some(theirs));
    let probing = Probing {
        id: id(),
        key: KEY,
        peer: n1.peer(),
        depth: Depth::Quick,
        sweep: false,
        keep: Keep {
            here: true,
            there: true,
        },
        roots: Some(ours),
        control: None,
    };
    let work = measure(
        n0.plane.clone(),
        probing,
        Arc::default(),
        CancellationToken::new(),
    );
    let reading = soon("the measurement", work).await.unwrap();
    // Who has no root measures the rest all the same; nor does a machine that is short of space.
    assert!(there || reading.forward_kept.is_none());
    assert!(!there || reading.forward_kept.is_some() == reading.backward_kept.is_some());
    for (kept, alone) in [
        (&reading.forward_kept, &reading.forward),
        (&reading.backward_kept, &reading.backward),
    ] {
        assert!(!alone.is_empty());
        let Some(kept) = kept else { continue };
        assert!(kept.rate > Rate::ZERO && kept.bytes.0 > 0, "{kept:?}");
        assert_eq!(Some(kept.streams), LinkReading::enough(alone));
    }
    for dir in &dirs {
        assert_eq!(
            std::fs::read_dir(dir.path()).unwrap().count(),
            0,
            "nothing is left there"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_comes_goes_to_the_disks_of_both() {
    let (tls, insecure) = (Bench::tls(CHUNK), Bench::insecure(CHUNK));
    tokio::join!(kept(&insecure, true), kept(&tls, false));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_who_was_announced_and_has_the_key_is_answered() {
    for bench in [Bench::tls(CHUNK), Bench::insecure(CHUNK)] {
        let (n0, n1, n2) = (bench.node("n0"), bench.node("n1"), bench.node("n2"));
        let _answering = n1.plane.answer_probe(id(), KEY, name("n0"), None);
        let (wrong_key, _) = measured(&n0, &n1, JobKey([6; 32]), CancellationToken::new(), false).await;
        assert_eq!(wrong_key.unwrap_err().code, Code::Denied);
        let (stranger, _) = measured(&n2, &n1, KEY, CancellationToken::new(), false).await;
        assert_eq!(stranger.unwrap_err().code, Code::Denied);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_measurement_ends_when_nobody_waits_or_the_other_side_stops() {
    let bench = Bench::insecure(CHUNK);
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    let answering = n1.plane.answer_probe(id(), KEY, name("n0"), None);
    let stop = CancellationToken::new();
    stop.cancel();
    let (ended, _) = measured(&n0, &n1, KEY, stop, false).await;
    assert_eq!(ended.unwrap_err().code, Code::Cancelled);

    // Who answers goes away while it is measured.
    let ((reading, _), ()) = tokio::join!(measured(&n0, &n1, KEY, CancellationToken::new(), false), async {
        n1.plane.stop().await;
        drop(answering);
    });
    assert!(matches!(
        reading.unwrap_err().code,
        Code::Unreachable | Code::Denied
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_tries_each_count_with_each_window() {
    let bench = Bench::insecure(CHUNK);
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    let _answering = n1.plane.answer_probe(id(), KEY, name("n0"), None);
    let (reading, _) = measured(&n0, &n1, KEY, CancellationToken::new(), true).await;
    let reading = reading.unwrap();
    let (counts, windows) = Depth::Quick.grid();
    let grid: Vec<_> = windows
        .iter()
        .flat_map(|window| counts.iter().map(|streams| (*streams, *window)))
        .collect();
    for rates in [&reading.forward, &reading.backward] {
        let tried: Vec<_> = rates.iter().map(|rate| (rate.streams, rate.window)).collect();
        assert_eq!(tried, grid);
        assert!(rates.iter().all(|rate| rate.rate > Rate::ZERO), "{rates:?}");
    }
}
