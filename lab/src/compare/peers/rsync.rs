//! rsync: a daemon on each target, a client for each of them at the source.

use std::fs;

use stage_lab::LabError;

use super::Peer;
use crate::compare::field::{Field, Seen, fault, finish_all, text};

pub(super) const PEER: Peer = Peer {
    name: "rsync",
    about: "rsync daemon star (-W)",
    package: "rsync",
    programs: &["rsync"],
    checks: false,
    is_star: true,
    drive,
};

const PORT: u16 = 8730;

fn drive(field: &Field<'_>) -> Result<Seen, LabError> {
    let port = format!("--port={PORT}");
    let mut daemons = Vec::new();
    for target in &field.targets {
        let config = field.scratch(target)?.join("rsyncd.conf");
        let module = format!(
            "use chroot = no\nuid = root\ngid = root\n[copy]\npath = {}\nread only = no\n",
            text(&field.copy_dir(target))
        );
        fs::write(&config, module).map_err(|why| fault(&config, why))?;
        let config = format!("--config={}", text(&config));
        let mut daemon = field.start(target, &["rsync", "--daemon", "--no-detach", &config, &port])?;
        daemon.wait_for_port("tcp", PORT)?;
        daemons.push(daemon);
    }
    field.count(|| {
        let mut clients = Vec::new();
        for target in &field.targets {
            let to = format!("rsync://{}/copy/", field.address(target)?);
            clients.push(field.start("n0", &["rsync", "-W", &port, text(field.file), &to])?);
        }
        finish_all(clients)
    })
}
