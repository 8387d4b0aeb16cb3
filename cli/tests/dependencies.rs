//! Holds the direction of dependencies: core <- proto <- {coordinator, agent, cli}, core <- net, core <- transfer <-
//! agent; the heart knows no runtime and no socket, the data plane no gRPC, and only the binary knows both daemons.

#![allow(clippy::unwrap_used, reason = "a helper of tests")]

use std::collections::{BTreeMap, BTreeSet};

use cargo_metadata::{DependencyKind, MetadataCommand};

/// What each crate of the workspace uses when it is built (not what only its tests use).
fn uses() -> BTreeMap<String, BTreeSet<String>> {
    let metadata = MetadataCommand::new().no_deps().exec().unwrap();
    metadata
        .workspace_packages()
        .into_iter()
        .map(|package| {
            let normal = package
                .dependencies
                .iter()
                .filter(|dependency| dependency.kind != DependencyKind::Development);
            (
                package.name.to_string(),
                normal.map(|dependency| dependency.name.clone()).collect(),
            )
        })
        .collect()
}

/// For each crate, the ones of ours that it may use. `stage-lab` is for tests and builds on whatever it likes.
const MAY_USE: [(&str, &[&str]); 7] = [
    ("stage-core", &[]),
    ("stage-proto", &["stage-core"]),
    ("stage-net", &["stage-core"]),
    ("stage-transfer", &["stage-core", "stage-net"]),
    ("stage-coordinator", &["stage-core", "stage-proto", "stage-net"]),
    (
        "stage-agent",
        &["stage-core", "stage-proto", "stage-net", "stage-transfer"],
    ),
    (
        "stage",
        &[
            "stage-core",
            "stage-proto",
            "stage-net",
            "stage-coordinator",
            "stage-agent",
        ],
    ),
];

#[test]
fn arrows_point_inward() {
    let uses = uses();
    for (package, may) in MAY_USE {
        let ours: Vec<&String> = uses[package]
            .iter()
            .filter(|name| uses.contains_key(*name))
            .collect();
        for used in ours {
            assert!(may.contains(&used.as_str()), "{package} must not use {used}");
        }
    }
    let known: BTreeSet<&str> = MAY_USE.iter().map(|(package, _)| *package).collect();
    for package in uses.keys().filter(|package| *package != "stage-lab") {
        assert!(known.contains(package.as_str()), "{package} has no row here");
    }
    for (package, used) in &uses {
        assert!(!used.contains("stage-lab"), "{package} must not use the lab");
    }
}

#[test]
fn the_heart_and_the_data_plane_stay_free() {
    let uses = uses();
    for (package, foreign) in [
        (
            "stage-core",
            &[
                "tokio",
                "tonic",
                "prost",
                "rustls",
                "tokio-rustls",
                "socket2",
                "rustix",
                "rusqlite",
            ][..],
        ),
        ("stage-transfer", &["tonic", "prost", "tonic-prost"][..]),
        ("stage-coordinator", &["clap", "indicatif"][..]),
        ("stage-agent", &["clap", "indicatif", "rusqlite"][..]),
        ("stage", &["rusqlite"][..]),
    ] {
        for name in foreign {
            assert!(!uses[package].contains(*name), "{package} must not use {name}");
        }
    }
}
