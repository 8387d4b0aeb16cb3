//! The control protocol: generated messages and services, and the only conversions between wire and core.
//!
//! Generated types live in [`v1`] and go no further than the services and clients that send them; what the rest
//! works with are the types of `stage-core`, made in [`convert`]. What is said within a host is in [`local`].

/// Messages and services as generated.
#[allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    clippy::pedantic,
    reason = "generated"
)]
pub mod v1 {
    tonic::include_proto!("stage.v1");
}

pub mod convert;
pub mod local;
mod payload;
pub mod version;

pub use convert::WireError;
