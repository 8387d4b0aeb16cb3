//! The pure heart of stage: no sockets, no files, no clock, no runtime.
//!
//! Everything that the parts of stage must agree on is said here once, in types, and everything that
//! is decided (which plan, what happens next in a job) is decided here by functions of their arguments:
//!
//! | module | holds |
//! |---|---|
//! | [`units`] | [`units::ByteCount`], [`units::Rate`] and the text forms of sizes, rates and times |
//! | [`id`] | names and numbers that tell one thing from another |
//! | [`chunk`] | a payload laid out as chunks, and sets of them |
//! | [`digest`] | chunk, file and root digests, and how each is computed |
//! | [`manifest`] | what a payload is made of |
//! | `place` | where a payload lies, as people write it |
//! | [`payload`] | the same in a few words, for orders and plans |
//! | [`failure`] | the one form in which a cause travels to a person |
//! | [`topology`] | the fabric: nodes, switches, links, groups, read from `topology.toml` |
//! | [`plan`] | who gets the payload from whom, and the forecast |
//! | [`cost`] | the formulas behind a forecast |
//! | [`simulate`] | a plan tried out on paper, flow by flow |
//! | [`assignment`] | what a node is told to be for a job |
//! | [`ask`] | what a node is asked beside its orders |
//! | [`mod@bench`] | what is measured of nodes and links, between whom, and what it says |
//! | [`doctor`] | what on a host holds it back or will break |
//! | [`waits`] | where the time of a push's threads goes |
//! | [`verdict`] | what limits a push, in words made of that |
//! | [`learn`] | what a finished push teaches the next plan |
//! | [`job`] | the life of a job, as a state machine without waiting |
//!
//! The walk through the whole system starts in `ARCHITECTURE.md`.

pub mod ask;
pub mod assignment;
pub mod bench;
pub mod chunk;
pub mod cost;
pub mod digest;
pub mod doctor;
pub mod failure;
pub mod id;
pub mod job;
pub mod learn;
pub mod manifest;
pub mod payload;
mod place;
pub mod plan;
pub mod simulate;
pub mod topology;
pub mod units;
pub mod verdict;
pub mod waits;
