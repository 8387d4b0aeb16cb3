//! The job's state machine: single decisions, and whole lives with everything that can go wrong.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "a test")]

mod decisions;
mod push;
mod simulation;
mod slow;

use std::time::Duration;

use stage_core::assignment::{IfExists, KEEP_PREVIOUS, Place, TargetSpec};
use stage_core::digest::ChunkHash;
use stage_core::id::{JobId, JobKey, NodeName};
use stage_core::job::{Spec, UnfitRule};
use stage_core::payload::{SourcePath, Walk};

fn node(i: usize) -> NodeName {
    format!("n{i}").parse().unwrap()
}

/// A topology of `n0` to `n{nodes - 1}` at one switch.
fn one_switch(nodes: usize) -> String {
    format!(
        "[cluster]\nname = \"c\"\n[[switch]]\nname = \"s\"\n[[node]]\nname = \"n[0-{}]\"\naddress = \"10.0.0.[1-{nodes}]\"\n\
         attach = \"s\"\nnic = \"1 Gbit/s\"\n[roots]\nscratch = \"/s\"\n",
        nodes - 1
    )
}

/// A push of one file from `n0` along a chain of `n1` to `n{targets}`.
fn spec(targets: usize) -> Spec {
    Spec {
        id: JobId::from_random([3; 16]),
        key: JobKey([1; 32]),
        hash: ChunkHash::Blake3,
        source: node(0),
        paths: vec![SourcePath {
            path: b"/d/x".to_vec(),
            name: b"x".to_vec(),
        }],
        walk: Walk::default(),
        target: TargetSpec {
            place: Place::Root {
                root: None,
                dir: Vec::new(),
            },
            if_exists: IfExists::Fail,
            unpack: false,
            keep_previous: KEEP_PREVIOUS,
            cache: Default::default(),
        },
        targets: (1..=targets).map(node).collect(),
        shape: "chain".parse().unwrap(),
        streams: None,
        limit: None,
        source_limit: None,
        unfit: UnfitRule::Wait,
        wait_for: Duration::from_secs(3600),
        expect: Vec::new(),
        encrypted: false,
    }
}
