//! GridFTP: a server on each target, `globus-url-copy -fast -p 4` to all of them at once.

use stage_lab::LabError;

use super::Peer;
use crate::compare::field::{Field, Seen, finish_all, text};

pub(super) const PEER: Peer = Peer {
    name: "gridftp",
    about: "globus-url-copy star (-fast -p 4)",
    package: "globus-gass-copy-progs, globus-gridftp-server-progs",
    programs: &["globus-url-copy", "globus-gridftp-server"],
    checks: false,
    is_star: true,
    drive,
};

const PORT: u16 = 2811;

fn drive(field: &Field<'_>) -> Result<Seen, LabError> {
    let port = PORT.to_string();
    let mut servers = Vec::new();
    for target in &field.targets {
        let address = field.address(target)?.to_string();
        let mut words = vec!["globus-gridftp-server", "-p", &port, "-data-interface", &address];
        words.extend(["-aa", "-anonymous-user", "root", "-allow-root", "-no-fork"]);
        let mut server = field.start(target, &words)?;
        server.wait_for_port("tcp", PORT)?;
        servers.push(server);
    }
    field.count(|| {
        let mut clients = Vec::new();
        for target in &field.targets {
            let from = format!("file://{}", text(field.file));
            let to = format!(
                "ftp://{}:{PORT}{}",
                field.address(target)?,
                text(&field.copy(target))
            );
            clients.push(field.start("n0", &["globus-url-copy", "-fast", "-p", "4", &from, &to])?);
        }
        finish_all(clients)
    })
}
