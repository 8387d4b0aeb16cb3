//! The tools beside stage, each as its users run it. A driver starts what must listen, which is not counted, then counts
//! what moves the file.

mod aria2;
mod cp;
mod gridftp;
mod mbuffer;
mod rsync;
mod scp;
mod udpcast;
mod uftp;

use stage_lab::LabError;

use super::field::{Field, Seen};

/// A tool.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) name: &'static str,
    /// How it is run.
    pub(super) about: &'static str,
    /// Debian's.
    pub(super) package: &'static str,
    pub(super) programs: &'static [&'static str],
    /// It holds each copy against digests of its own.
    pub(super) checks: bool,
    /// The source sends a copy for each target: over links of a set rate arithmetic says how long that takes.
    pub(super) is_star: bool,
    pub(super) drive: fn(&Field<'_>) -> Result<Seen, LabError>,
}

/// All of them.
pub(super) const ALL: &[Peer] = &[
    mbuffer::PEER,
    gridftp::PEER,
    rsync::PEER,
    scp::CHACHA,
    scp::AES,
    udpcast::PEER,
    uftp::PEER,
    aria2::PEER,
    cp::PEER,
];
