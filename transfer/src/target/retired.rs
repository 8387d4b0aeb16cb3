//! Generations that no name leads to any more: each is written down before the switch away from it, and goes when its
//! time is over and nobody reads it.
//!
//! ```text
//!   retired/<id of its path>    where it lies, which directory it is, since when, and for how long it stays
//! ```
//!
//! What a name leads to never goes, whatever is written here: a switch that did not come about leaves a note that has no
//! effect.

mod usage;

use std::fs;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, FileType};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use stage_core::assignment::Place;
use stage_core::failure::{Failure, show_path};
use stage_core::id::JobId;
use stage_core::payload::UnitKind;

use super::site::Site;
use super::tree;
use crate::crash::crash_point;
use crate::durable;
use crate::root::Roots;
use usage::Usage;

/// Even one that is to go at once stays so long: who was just resolving the name gets to the end of that.
const MOMENT: Duration = Duration::from_secs(1);
/// How long until one that is read is looked at again, at least.
const AGAIN: Duration = Duration::from_secs(5);
/// And how many times as long as the looking took.
const SHARE: u32 = 50;

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    place: Place,
    /// The name that led to it.
    name: Vec<u8>,
    generation: Vec<u8>,
    /// Its directory's inode.
    inode: u64,
    /// Seconds since 1970.
    since: u64,
    keep: Duration,
    /// By which job it was replaced.
    by: JobId,
}

/// What [`sweep`] did.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Their paths, as text fit for a terminal.
    pub removed: Vec<String>,
    /// In how much time there may be something to do again.
    pub next: Option<Duration>,
}

fn dir(state: &Path) -> PathBuf {
    state.join("retired")
}

/// The name of a note, and of its generation while that is being removed.
fn id(site: &Site, generation: &[u8]) -> String {
    let path = [site.held.path().as_slice(), b"/", generation].concat();
    blake3::hash(&path).to_hex()[..32].to_owned()
}

/// The notes that are whole.
fn notes(state: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(dir(state))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    // One that was half written when an agent died has an extension.
    paths.filter(|path| path.extension().is_none()).collect()
}

fn note_of(state: &Path, site: &Site, generation: &[u8]) -> PathBuf {
    dir(state).join(id(site, generation))
}

/// Writes down that a generation is about to be switched away from.
pub(crate) fn note(
    state: &Path,
    site: &Site,
    generation: &[u8],
    inode: u64,
    keep: Duration,
    by: JobId,
) -> Result<(), Failure> {
    let note = Note {
        place: site.held.place(),
        name: site.name.clone(),
        generation: generation.to_vec(),
        inode,
        since: seconds(SystemTime::now()),
        keep,
        by,
    };
    durable::write(&note_of(state, site, generation), &note)
}

/// The name itself is removed: what it led to before has no more time to stay.
pub(crate) fn dismiss(state: &Path, site: &Site) -> Result<(), Failure> {
    for path in notes(state) {
        if let Some(note) = durable::read::<Note>(&path)
            && (&note.place, &note.name) == (&site.held.place(), &site.name)
        {
            let keep = Duration::ZERO;
            durable::write(&path, &Note { keep, ..note })?;
        }
    }
    Ok(())
}

/// Removes a generation that was written down and that no name leads to, unless somebody on this node reads it: then who.
/// `ours`: also this agent.
pub(crate) fn remove_unread(site: &Site, generation: &[u8], ours: bool) -> rustix::io::Result<Option<Usage>> {
    let all = site.generations()?;
    if let Some(usage) = usage::of(all.as_fd(), generation, ours)? {
        return Ok(Some(usage));
    }
    // Away in one step: nobody ever finds half of it under its name.
    rustix::fs::renameat(&all, generation, &all, away(site, generation))?;
    crash_point!("retired_away");
    remove_away(site, generation)?;
    Ok(None)
}

/// The name of a generation while it is being removed.
fn away(site: &Site, generation: &[u8]) -> String {
    format!("gone-{}", id(site, generation))
}

fn remove_away(site: &Site, generation: &[u8]) -> rustix::io::Result<()> {
    let all = site.generations()?;
    tree::remove(all.as_fd(), away(site, generation).as_bytes())?;
    drop(all);
    site.unmake_generations();
    Ok(())
}

/// Nothing of that name lies there any more: what was written down of it is of no use.
pub(crate) fn forget(state: &Path, site: &Site, generation: &[u8]) {
    let note = note_of(state, site, generation);
    if !note.exists() {
        return;
    }
    match remove_away(site, generation) {
        Ok(()) | Err(Errno::NOENT) => drop_note(&note),
        Err(e) => tracing::warn!(path = site.shown, "a part of an old generation stays: {e}"),
    }
}

/// Whether a generation was switched away from, or is about to be.
pub(super) fn is_noted(state: &Path, site: &Site, generation: &[u8]) -> bool {
    note_of(state, site, generation).exists()
}

fn drop_note(path: &Path) {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), "a note of an old generation stays: {e}");
        }
        _ => {}
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

impl Note {
    /// How long it is to stay from `now` on; zero when its time is over.
    fn left(&self, now: SystemTime) -> Duration {
        // Whole seconds were written down: of what is short of a second nothing is known.
        let since = Duration::from_secs(self.since).saturating_add(Duration::from_secs(1));
        match UNIX_EPOCH.checked_add(since.saturating_add(self.keep.max(MOMENT))) {
            Some(over) => over.duration_since(now).unwrap_or_default(),
            None => Duration::MAX,
        }
    }
}

/// What became of one generation.
enum Fate {
    Removed(String),
    /// Nothing is left to do.
    Gone,
    /// To be looked at again, in so much time if that is known.
    Stays(Option<Duration>),
}

/// Removes the generations whose time is over at `now`, that no name leads to, and that nobody on this node reads. May
/// take long: it looks at each file of such a generation.
pub fn sweep(roots: &Roots, state: &Path, now: SystemTime) -> Swept {
    let mut swept = Swept::default();
    for path in notes(state) {
        match look_after(roots, &path, now) {
            Ok(Fate::Removed(shown)) => {
                drop_note(&path);
                swept.removed.push(shown);
            }
            Ok(Fate::Gone) => drop_note(&path),
            Ok(Fate::Stays(None)) => {}
            Ok(Fate::Stays(Some(left))) => {
                swept.next = Some(swept.next.map_or(left, |next| next.min(left)));
            }
            Err(failure) => tracing::warn!(hint = failure.hint, "an old generation stays: {failure}"),
        }
    }
    swept
}

fn look_after(roots: &Roots, path: &Path, now: SystemTime) -> Result<Fate, Failure> {
    let read = || durable::read::<Note>(path);
    let Some(note) = read() else {
        tracing::warn!(path = %path.display(), "a note of an old generation is damaged and is dropped");
        return Ok(Fate::Gone);
    };
    let left = note.left(now);
    if !left.is_zero() {
        return Ok(Fate::Stays(Some(left)));
    }
    let Some(held) = roots.existing(&note.place)?.1 else {
        return Ok(Fate::Gone);
    };
    let site = Site::new(Arc::new(held), &note.name, UnitKind::Tree, note.by, 0);
    let shown = show_path(&[site.held.path().as_slice(), b"/.stage/", &note.generation].concat());
    let fail = |e: Errno| crate::fault::of(e, "removing an old generation", &shown);
    let all = match site.generations() {
        Ok(all) => all,
        Err(Errno::NOENT) => return Ok(Fate::Gone),
        Err(e) => return Err(fail(e)),
    };
    let stat = |name: &[u8]| rustix::fs::statat(&all, name, AtFlags::SYMLINK_NOFOLLOW);
    if stat(away(&site, &note.generation).as_bytes()).is_ok() {
        remove_away(&site, &note.generation).map_err(fail)?;
        return Ok(Fate::Removed(shown));
    }
    match site.generation_now() {
        Ok(Some(now)) if now == note.generation => return Ok(Fate::Stays(None)),
        Ok(_) => {}
        Err(e) => return Err(fail(e)),
    }
    // The note is written before a switch. It was read before the name was, so a switch may lie between.
    if read().as_ref() != Some(&note) {
        return Ok(Fate::Stays(Some(Duration::ZERO)));
    }
    let there = match stat(&note.generation) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(Fate::Gone),
        Err(e) => return Err(fail(e)),
    };
    match FileType::from_raw_mode(there.st_mode) {
        FileType::Directory if there.st_ino == note.inode => {}
        FileType::Symlink => {
            // It was to be exchanged for a directory when an agent died.
            rustix::fs::unlinkat(&all, note.generation.as_slice(), AtFlags::empty()).map_err(fail)?;
            return Ok(Fate::Gone);
        }
        _ => return Ok(Fate::Gone),
    }
    let started = Instant::now();
    drop(all);
    if let Some(usage) = remove_unread(&site, &note.generation, true).map_err(fail)? {
        tracing::debug!(path = shown, "an old generation stays: {usage}");
        return Ok(Fate::Stays(Some(AGAIN.max(started.elapsed() * SHARE))));
    }
    Ok(Fate::Removed(shown))
}
