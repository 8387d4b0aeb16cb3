//! cp: a copy for each target, all at once, without a network. The floor.

use stage_lab::LabError;

use super::Peer;
use crate::compare::field::{Field, Seen, finish_all, text};

pub(super) const PEER: Peer = Peer {
    name: "cp",
    about: "cp in parallel, without a network (the floor)",
    package: "coreutils",
    programs: &["cp"],
    checks: false,
    is_star: false,
    drive,
};

fn drive(field: &Field<'_>) -> Result<Seen, LabError> {
    field.count(|| {
        let copies = field.targets.iter().map(|target| {
            let copy = field.copy(target);
            field.start(target, &["cp", text(field.file), text(&copy)])
        });
        finish_all(copies.collect::<Result<_, _>>()?)
    })
}
