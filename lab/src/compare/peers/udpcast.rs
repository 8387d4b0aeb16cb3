//! udpcast: one sender, multicast to all receivers.

use stage_lab::LabError;

use super::Peer;
use crate::compare::field::{Field, Seen, finish_all, text};

pub(super) const PEER: Peer = Peer {
    name: "udpcast",
    about: "udpcast (multicast, full duplex)",
    package: "udpcast",
    programs: &["udp-sender", "udp-receiver"],
    checks: false,
    is_star: false,
    drive,
};

/// Senders use it, receivers the one above.
const PORT: u16 = 9000;

/// Nodes have host addresses: there is no broadcast to meet by.
const MEETING: [&str; 8] = [
    "--nokbd",
    "--interface",
    "eth0",
    "--portbase",
    "9000",
    "--mcast-rdv-address",
    "232.43.43.43",
    "--file",
];

fn drive(field: &Field<'_>) -> Result<Seen, LabError> {
    let mut all = Vec::new();
    for target in &field.targets {
        let copy = field.copy(target);
        let mut words = vec!["udp-receiver"];
        words.extend(MEETING);
        words.push(text(&copy));
        let mut receiver = field.start(target, &words)?;
        receiver.wait_for_port("udp", PORT)?;
        all.push(receiver);
    }
    let receivers = field.targets.len().to_string();
    field.count(|| {
        let mut words = vec!["udp-sender", "--full-duplex", "--min-receivers", &receivers];
        words.extend(["--mcast-data-address", "232.43.43.44"]);
        words.extend(MEETING);
        words.push(text(field.file));
        all.push(field.start("n0", &words)?);
        finish_all(all)
    })
}
