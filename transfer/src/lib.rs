//! The data plane: how a payload's chunks get from node to node, checked, onto disk and under their name.
//!
//! ```text
//!   source file ── Source ──► Store ──► Serving ══ streams ══► Inbound ──► Store ──► Serving ══► …
//!                 reads once,  have-set,  one queue   k TCP     checks each   partial    next hop
//!                 hashes       digests    per hop     conns     chunk         file
//!                                                                             └─ publish after FINAL
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`budget`] | chunk buffers under one byte budget |
//! | [`store`] | one job's chunks on this node: what is here, where it lies, who is writing what |
//! | `journal` | the chunk table: the have-set with digests, on disk |
//! | [`index`] | what was published here, and what of it is still there |
//! | [`root`] | the directories that may be written in, and no way out of them |
//! | [`target`] | a target's life on disk: prepare, partial, publish, discard |
//! | [`source`] | a source's life: look, read once in order, declare FINAL, SHA-256 beside it |
//! | [`pipe`] | a source that comes through a pipe, spooled while it is sent |
//! | [`plane`] | the data listener, and the jobs that it serves |
//! | [`inbound`] | receiving: one parent at a time, fallbacks, streams |
//! | `unpack` | a tar laid out as a tree while it comes |
//! | `sparse` | where a file has data, and whether the rest reads as zeros |
//! | `durable`, `lease` | what has to outlive a crash; whether somebody has a file open |
//! | `clock` | where the threads' time goes |
//! | `crash`, `fault` | points at which tests kill the process; what the disk's errors mean |
//! | [`outbound`] | sending: one queue a hop, and the threads that take from it |
//! | [`probe`] | how fast disks, processors and the ways between nodes are |
//! | [`frame`], [`hello`], [`pace`], `beat` | the wire, its handshake, limits, and how waiting differs from silence |
//!
//! It knows core and net, never gRPC: what a job is comes in as arguments, what happens goes out as events.

mod beat;
pub mod budget;
mod clock;
mod crash;
mod drive;
mod durable;
pub mod error;
mod fault;
pub mod frame;
pub mod hello;
pub mod inbound;
pub mod index;
mod journal;
mod lease;
pub mod outbound;
pub mod pace;
pub mod pipe;
pub mod plane;
pub mod probe;
pub mod root;
pub mod source;
mod sparse;
pub mod store;
mod sync;
pub mod target;
mod unpack;

pub use error::TransferError;
