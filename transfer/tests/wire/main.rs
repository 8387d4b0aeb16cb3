//! The data plane over real sockets on loopback, with and without TLS: hops, relays, and peers that misbehave.

#![expect(clippy::unwrap_used, reason = "tests: helpers are not marked as such")]

mod bench;
mod failover;
mod growth;
mod hops;
mod pipe;
mod probe;
mod proxy;
mod source;
mod sparse;
mod strangers;
mod tree;
