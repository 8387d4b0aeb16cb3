//! The coordinator as others meet it: a real gRPC server on loopback, agents that play the protocol.

#![allow(clippy::unwrap_used, reason = "a test")]

mod agent;
mod asks;
mod bench;
mod lab;
mod learn;
mod refusals;
mod restart;
mod whole;
