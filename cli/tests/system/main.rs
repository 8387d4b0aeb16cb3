//! The whole system: the real binary as coordinator, agents and command line, as processes on loopback, any user.

#![allow(clippy::unwrap_used, reason = "tests")]

mod cluster;
mod faults;
mod push;
mod refusals;
