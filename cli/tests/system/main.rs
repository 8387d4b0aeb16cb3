//! The whole system: the real binary as coordinator, agents and command line, as processes on loopback, any user.

#![allow(
    clippy::unwrap_used,
    clippy::print_stderr,
    clippy::needless_pass_by_value,
    reason = "tests"
)]

mod again;
mod bench;
mod calls;
mod cluster;
mod directories;
mod faults;
mod generations;
mod inventory;
mod local;
mod memory;
mod payload;
mod push;
mod refusals;
mod space;
mod stream;
