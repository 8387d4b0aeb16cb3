//! BitTorrent: a tracker and a seeder on the source, a client on each target. Making the torrent, which reads and hashes the
//! file, is not counted; the pieces are checked by their SHA-1 as they come.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use stage_lab::LabError;

use super::Peer;
use crate::compare::field::{Field, Seen, Started, fault, text};

pub(super) const PEER: Peer = Peer {
    name: "aria2",
    about: "aria2 (BitTorrent; pieces checked by SHA-1)",
    package: "aria2, opentracker, mktorrent",
    programs: &["aria2c", "opentracker", "mktorrent"],
    checks: true,
    is_star: false,
    drive,
};

const TRACKER: u16 = 6969;
const PORT: u16 = 6881;
const WITHIN: Duration = Duration::from_secs(900);

/// Only the tracker tells of peers; whoever has all goes on serving.
const COMMON: [&str; 11] = [
    "aria2c",
    "--enable-dht=false",
    "--enable-dht6=false",
    "--bt-enable-lpd=false",
    "--listen-port=6881",
    "--seed-ratio=0.0",
    "--file-allocation=none",
    "--summary-interval=0",
    "--console-log-level=warn",
    "--no-conf=true",
    "--allow-overwrite=true",
];

fn drive(field: &Field<'_>) -> Result<Seen, LabError> {
    let scratch = field.scratch("n0")?;
    let address = field.address("n0")?.to_string();
    let (port, announce) = (
        TRACKER.to_string(),
        format!("http://{address}:{TRACKER}/announce"),
    );
    let torrent = scratch.join("payload.torrent");
    let words = [
        "mktorrent",
        "-a",
        &announce,
        "-l",
        "20",
        "-o",
        text(&torrent),
        text(field.file),
    ];
    field.start("n0", &words)?.finish()?;
    // Debian's tracker serves what it has been told of.
    let shown = field
        .start("n0", &["aria2c", "--no-conf=true", "-S", text(&torrent)])?
        .finish()?;
    let hash = shown.lines().find_map(|line| line.strip_prefix("Info Hash: "));
    let list = scratch.join("list");
    fs::write(&list, format!("{}\n", hash.unwrap_or_default().trim())).map_err(|why| fault(&list, why))?;
    let words = [
        "opentracker",
        "-i",
        &address,
        "-p",
        &port,
        "-P",
        &port,
        "-w",
        text(&list),
    ];
    let mut tracker = field.start("n0", &words)?;
    tracker.wait_for_port("tcp", TRACKER)?;
    // It is called with a number, how many files there are, and the first one's path.
    let when_whole = scratch.join("whole");
    fs::write(&when_whole, "#!/bin/sh\n: >\"$3.whole\"\n")
        .and_then(|()| fs::set_permissions(&when_whole, Permissions::from_mode(0o755)))
        .map_err(|why| fault(&when_whole, why))?;
    let when_whole = format!("--on-bt-download-complete={}", text(&when_whole));

    let client = |node: &str, dir: &str, seeds: bool| -> Result<Started, LabError> {
        let (dir, own) = (
            format!("--dir={dir}"),
            format!("--interface={}", field.address(node)?),
        );
        let rest = [
            &dir[..],
            &own,
            if seeds {
                "--bt-seed-unverified=true"
            } else {
                &when_whole
            },
            text(&torrent),
        ];
        field.start(node, &[&COMMON[..], &rest].concat())
    };
    let dir = field.lab.dir("n0");
    let mut seeder = client("n0", text(&dir), true)?;
    seeder.wait_for_port("tcp", PORT)?;
    field.count(|| {
        let mut clients = Vec::new();
        for target in &field.targets {
            clients.push(client(target, text(&field.copy_dir(target)), false)?);
        }
        let whole: Vec<PathBuf> = field
            .targets
            .iter()
            .map(|target| field.copy_dir(target).join("payload.whole"))
            .collect();
        let deadline = Instant::now() + WITHIN;
        while !whole.iter().all(|mark| mark.exists()) {
            if Instant::now() > deadline {
                return Err(LabError::Late {
                    what: "whole copies".to_owned(),
                    within: WITHIN,
                    state: clients.iter().map(Started::said).collect(),
                });
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    })
}
