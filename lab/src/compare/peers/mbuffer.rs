//! mbuffer: a chain of pipes with a buffer in each, as in `mbuffer -I … -O next -o FILE`.

use stage_lab::LabError;

use super::Peer;
use crate::compare::field::{Field, Seen, Started, finish_all, text};

pub(super) const PEER: Peer = Peer {
    name: "mbuffer",
    about: "mbuffer chain (-s 1M -m 64M)",
    package: "mbuffer",
    programs: &["mbuffer"],
    checks: false,
    is_star: false,
    drive,
};

const PORT: u16 = 7000;
const BUFFERS: [&str; 6] = ["mbuffer", "-q", "-s", "1M", "-m", "64M"];

fn drive(field: &Field<'_>) -> Result<Seen, LabError> {
    let port = PORT.to_string();
    let mut chain: Vec<Started> = Vec::new();
    let mut next: Option<String> = None;
    // The last first: whoever passes on connects when it starts.
    for target in field.targets.iter().rev() {
        let copy = field.copy(target);
        let mut words = BUFFERS.to_vec();
        words.extend(["-I", &port, "-o", text(&copy)]);
        if let Some(next) = &next {
            words.extend(["-O", next]);
        }
        let mut started = field.start(target, &words)?;
        started.wait_for_port("tcp", PORT)?;
        chain.push(started);
        next = Some(format!("{}:{PORT}", field.address(target)?));
    }
    let first = next.expect("there is a target");
    field.count(|| {
        let mut words = BUFFERS.to_vec();
        words.extend(["-i", text(field.file), "-O", &first]);
        chain.push(field.start("n0", &words)?);
        finish_all(chain)
    })
}
