//! UFTP: one sender, multicast at a set rate to a daemon on each target.

use stage_lab::LabError;

use super::Peer;
use crate::compare::field::{Field, Seen, finish_all, text};

pub(super) const PEER: Peer = Peer {
    name: "uftp",
    about: "uftp (multicast, at 0.9 of the link's rate; 1 Gbit/s where nothing is shaped)",
    package: "uftp",
    programs: &["uftp", "uftpd"],
    checks: false,
    is_star: false,
    drive,
};

const PORT: u16 = 1044;
const GROUP: &str = "230.5.5.1";

fn drive(field: &Field<'_>) -> Result<Seen, LabError> {
    let id = |at: usize| format!("0x{:08x}", at + 1);
    let mut daemons = Vec::new();
    for (at, target) in field.targets.iter().enumerate() {
        let (dir, id) = (field.copy_dir(target), id(at));
        let words = [
            "uftpd",
            "-d",
            "-I",
            "eth0",
            "-M",
            GROUP,
            "-U",
            &id,
            "-D",
            text(&dir),
        ];
        let mut daemon = field.start(target, &words)?;
        daemon.wait_for_port("udp", PORT)?;
        daemons.push(daemon);
    }
    let hosts: Vec<String> = (0..field.targets.len()).map(id).collect();
    let hosts = hosts.join(",");
    let kilobits = field.rate.map_or(1e6, |rate| rate.bits_per_second() * 0.9 / 1e3);
    let kilobits = format!("{kilobits:.0}");
    field.count(|| {
        let words = [
            "uftp",
            "-I",
            "eth0",
            "-M",
            GROUP,
            "-P",
            "230.5.5.2",
            "-R",
            &kilobits,
            "-H",
            &hosts,
        ];
        let sender = field.start("n0", &[&words[..], &[text(field.file)]].concat())?;
        finish_all(vec![sender])
    })
}
