//! Wire <-> core. From the wire everything is checked ([`WireError`]); to the wire nothing can fail.
//!
//! | room | holds |
//! |---|---|
//! | `order` | what a node is told to be for a job |
//! | `report` | what a node says of it |
//! | `ask` | questions beside orders, and their answers |
//! | `bench` | what was measured |
//! | `plan` | plans |
//!
//! Here: what they share.

mod ask;
mod bench;
mod order;
mod plan;
mod report;
#[cfg(test)]
mod tests;

use std::time::Duration;

use stage_core::assignment::{Cache, IfExists, Place};
use stage_core::digest::{ChunkHash, FileDigest};
use stage_core::failure::{Code, Failure, Shortage};
use stage_core::plan::WindowLimits;
use stage_core::units::{ByteCount, Rate};

use crate::v1;

pub use ask::wanted;

/// A message that does not mean anything.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {why}")]
pub struct WireError {
    /// Which field.
    pub field: &'static str,
    /// What is wrong with it.
    pub why: String,
}

pub(crate) fn fault(field: &'static str, why: impl Into<String>) -> WireError {
    WireError {
        field,
        why: why.into(),
    }
}

/// Reads a text field by its type.
///
/// # Errors
/// [`WireError`] names the field.
pub fn parse<T: std::str::FromStr<Err: ToString>>(field: &'static str, text: &str) -> Result<T, WireError> {
    text.parse()
        .map_err(|error: T::Err| fault(field, error.to_string()))
}

/// As [`parse`]; an empty text is none.
///
/// # Errors
/// [`WireError`] names the field.
pub fn optional<T: std::str::FromStr<Err: ToString>>(
    field: &'static str,
    text: &str,
) -> Result<Option<T>, WireError> {
    if text.is_empty() {
        Ok(None)
    } else {
        parse(field, text).map(Some)
    }
}

/// What [`optional`] reads.
fn text(value: Option<&impl ToString>) -> String {
    value.map(ToString::to_string).unwrap_or_default()
}

fn required<T>(field: &'static str, value: Option<T>) -> Result<T, WireError> {
    value.ok_or_else(|| fault(field, "is missing"))
}

pub(crate) fn array<const N: usize>(field: &'static str, bytes: &[u8]) -> Result<[u8; N], WireError> {
    bytes
        .try_into()
        .map_err(|_| fault(field, format!("has {} bytes and not {N}", bytes.len())))
}

fn seconds(field: &'static str, value: f64) -> Result<Duration, WireError> {
    Duration::try_from_secs_f64(value).map_err(|error| fault(field, error.to_string()))
}

fn limit(bytes_per_second: u64) -> Option<Rate> {
    (bytes_per_second > 0).then(|| Rate::from_bytes_per_second(bytes_per_second as f64))
}

fn limit_out(limit: Option<Rate>) -> u64 {
    limit.map_or(0, |rate| (rate.bytes_per_second() as u64).max(1))
}

/// A root's name, a directory, and whether that is absolute.
fn place_out(place: &Place) -> (String, Vec<u8>, bool) {
    match place {
        Place::Root { root, dir } => (
            root.as_ref().map(ToString::to_string).unwrap_or_default(),
            dir.clone(),
            false,
        ),
        Place::Absolute(dir) => (String::new(), dir.clone(), true),
    }
}

fn place(field: &'static str, root: &str, dir: &[u8], absolute: bool) -> Result<Place, WireError> {
    if absolute {
        return Ok(Place::Absolute(dir.to_vec()));
    }
    let root = if root.is_empty() {
        None
    } else {
        Some(parse(field, root)?)
    };
    Ok(Place::Root {
        root,
        dir: dir.to_vec(),
    })
}

/// A file's digest; none where it is empty.
fn file_digest(field: &'static str, bytes: &[u8]) -> Result<Option<FileDigest>, WireError> {
    if bytes.is_empty() {
        return Ok(None);
    }
    Ok(Some(FileDigest(array(field, bytes)?)))
}

fn streams16(field: &'static str, value: u32) -> Result<u16, WireError> {
    u16::try_from(value).map_err(|error| fault(field, error.to_string()))
}

impl From<&Failure> for v1::Failure {
    fn from(failure: &Failure) -> Self {
        Self {
            code: failure.code.as_str().to_owned(),
            node: failure.node.as_ref().map(ToString::to_string).unwrap_or_default(),
            path: failure.path.clone().unwrap_or_default(),
            message: failure.message.clone(),
            hint: failure.hint.clone(),
            short_by_bytes: failure.space.as_ref().map_or(0, |space| space.short_by.0),
            needs_bytes: failure.space.as_ref().map_or(0, |space| space.needs.0),
        }
    }
}

/// Never refused: a failure that cannot be read would hide another.
impl From<&v1::Failure> for Failure {
    fn from(wire: &v1::Failure) -> Self {
        Self {
            code: Code::from_word(&wire.code),
            node: wire.node.parse().ok(),
            path: (!wire.path.is_empty()).then(|| wire.path.clone()),
            message: wire.message.clone(),
            hint: wire.hint.clone(),
            space: (wire.short_by_bytes > 0).then(|| {
                Box::new(Shortage {
                    needs: ByteCount(wire.needs_bytes.max(wire.short_by_bytes)),
                    short_by: ByteCount(wire.short_by_bytes),
                })
            }),
        }
    }
}

impl From<WindowLimits> for v1::WindowLimits {
    fn from(limits: WindowLimits) -> Self {
        Self {
            receive_bytes: limits.receive.0,
            send_bytes: limits.send.0,
        }
    }
}

impl From<&v1::WindowLimits> for WindowLimits {
    fn from(wire: &v1::WindowLimits) -> Self {
        Self {
            receive: ByteCount(wire.receive_bytes),
            send: ByteCount(wire.send_bytes),
        }
    }
}

impl From<IfExists> for v1::IfExists {
    fn from(rule: IfExists) -> Self {
        match rule {
            IfExists::Fail => Self::Fail,
            IfExists::Replace => Self::Replace,
            IfExists::Skip => Self::Skip,
        }
    }
}

/// The rule of a wire number.
///
/// # Errors
/// A number without meaning; unspecified is refused too.
pub fn if_exists(wire: i32) -> Result<IfExists, WireError> {
    match v1::IfExists::try_from(wire) {
        Ok(v1::IfExists::Fail) => Ok(IfExists::Fail),
        Ok(v1::IfExists::Replace) => Ok(IfExists::Replace),
        Ok(v1::IfExists::Skip) => Ok(IfExists::Skip),
        Ok(v1::IfExists::Unspecified) | Err(_) => Err(fault("if_exists", "is not a rule")),
    }
}

impl From<Cache> for v1::Cache {
    fn from(cache: Cache) -> Self {
        match cache {
            Cache::Keep => Self::Keep,
            Cache::Drop => Self::Drop,
        }
    }
}

/// What becomes of the page cache, by a wire number.
///
/// # Errors
/// A number without meaning.
pub fn cache(wire: i32) -> Result<Cache, WireError> {
    match v1::Cache::try_from(wire) {
        Ok(v1::Cache::Unspecified | v1::Cache::Keep) => Ok(Cache::Keep),
        Ok(v1::Cache::Drop) => Ok(Cache::Drop),
        Err(_) => Err(fault("cache", "is not a way to treat the page cache")),
    }
}

impl From<ChunkHash> for v1::ChunkHash {
    fn from(hash: ChunkHash) -> Self {
        match hash {
            ChunkHash::Blake3 => Self::Blake3,
            ChunkHash::Sha256 => Self::Sha256,
        }
    }
}

fn chunk_hash(field: &'static str, wire: i32) -> Result<ChunkHash, WireError> {
    match v1::ChunkHash::try_from(wire) {
        Ok(v1::ChunkHash::Blake3) => Ok(ChunkHash::Blake3),
        Ok(v1::ChunkHash::Sha256) => Ok(ChunkHash::Sha256),
        Ok(v1::ChunkHash::Unspecified) | Err(_) => Err(fault(field, "is not known")),
    }
}
