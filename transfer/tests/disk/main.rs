//! A target's life on real files: every rule of prepare, resume, publish and discard, and death at every crash point.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "tests: helpers are not marked as such"
)]

mod again;
mod bench;
mod crash;
mod damage;
mod index;
mod indexed_trees;
mod life;
mod locate;
mod places;
mod present;
mod tree;
mod unpack;
