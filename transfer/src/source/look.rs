//! What a payload would be, before anything of it is read.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use stage_core::assignment::SourceSpec;
use stage_core::chunk::MAX_PAYLOAD;
use stage_core::failure::{Code, Failure, show_path};
use stage_core::manifest::{Kind, Manifest};
use stage_core::payload::{Payload, SourcePath};

use super::expect;
use super::files::Files;
use super::seen::Seen;
use super::walk::walk;

/// What a payload is, before anything of it is read.
#[derive(Debug)]
pub struct Look {
    /// Its entries.
    pub manifest: Manifest,
    /// The same in short.
    pub payload: Payload,
    seen: Seen,
}

impl Look {
    /// What a source is made of.
    pub fn into_parts(self) -> (Manifest, Payload, Files) {
        (self.manifest, self.payload, Files::new(self.seen))
    }
}

/// How far a walk has come, and the way to stop it.
#[derive(Debug, Default)]
pub struct Pulse {
    entries: AtomicU64,
    stop: AtomicBool,
}

impl Pulse {
    /// How many entries were looked at so far.
    pub fn entries(&self) -> u64 {
        self.entries.load(Ordering::Relaxed)
    }

    /// Ends the walk as soon as it looks at the next entry.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// One more entry; `false` when the walk is to end.
    pub(super) fn beat(&self) -> bool {
        self.entries.fetch_add(1, Ordering::Relaxed);
        !self.stop.load(Ordering::Relaxed)
    }
}

/// Looks at paths and says what the payload would be, holes left out. Nothing is read. A path that is a symbolic link is
/// followed: the user named it.
///
/// # Errors
/// Something is missing, of a kind that cannot be sent, or cannot be read; the links go round in a circle; a digest is
/// expected of what is no file of the payload.
pub fn look(spec: &SourceSpec, pulse: &Pulse) -> Result<Look, Failure> {
    let (manifest, seen) = walk(spec, pulse)?;
    let kind = |message: String, hint: &str| {
        Failure::new(Code::SourceKind, message, hint).at(paths_shown(&spec.paths))
    };
    if seen.globs.includes() && !manifest.entries.iter().any(|e| e.kind != Kind::Dir) {
        return Err(Failure::new(
            Code::SourceMissing,
            "nothing there matches --include",
            "a pattern without / is held against names, one with / against the path below PATH",
        )
        .at(paths_shown(&spec.paths)));
    }
    manifest.check().map_err(|error| {
        kind(
            format!("the source cannot be pushed: {error}"),
            "push it in parts",
        )
    })?;
    let payload = Payload::of(&manifest).map_err(|error| {
        kind(
            format!("the source cannot be pushed: {error}"),
            "push it in parts",
        )
    })?;
    let is_too_large = payload.data >= MAX_PAYLOAD;
    if is_too_large || payload.layout().is_none() {
        let what = match is_too_large {
            true => format!("is larger than {MAX_PAYLOAD}"),
            false => format!("has too many entries ({})", payload.entries),
        };
        return Err(kind(format!("the source {what}"), "push it in parts"));
    }
    expect::resolve(&manifest, spec)?;
    Ok(Look {
        manifest,
        payload,
        seen,
    })
}

/// Paths as a person would name them together.
pub(super) fn paths_shown(paths: &[SourcePath]) -> String {
    let first = paths
        .first()
        .map(|path| show_path(&path.path))
        .unwrap_or_default();
    match paths.len() {
        0 | 1 => first,
        more => format!("{first} and {} more", more - 1),
    }
}
