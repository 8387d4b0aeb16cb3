//! What of an entry is there: by a look, or by hashing all of it.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use rustix::io::Errno;
use stage_core::ask::State;
use stage_core::chunk::{ChunkIndex, Part};
use stage_core::digest::{RootHasher, chunk_digest};
use stage_core::failure::Failure;
use stage_core::payload::UnitKind;

use super::{Entry, Index};
use crate::fault;
use crate::journal::{self, FileState};
use crate::root::{Held, Roots};
use crate::sparse::holes_are_zero;
use crate::store::digest_by;
use crate::store::map::{Map, is_dense};
use crate::target::site::{Seen, Site};

/// Told of each chunk that was hashed, with its bytes; `false` ends the hashing.
pub type Hashing<'a> = dyn FnMut(u64) -> bool + 'a;

/// What a look finds under an entry's name.
pub(super) enum Found {
    /// A file, opened.
    File(File, FileState),
    /// Nothing, or what is no file.
    Else(State, String),
}

fn unreadable(failure: &Failure) -> Found {
    Found::Else(State::Unreadable, failure.message.clone())
}

/// The directory of an entry as a site; `None` if it is gone.
pub(super) fn site_of(roots: &Roots, entry: &Entry) -> Result<Option<Arc<Site>>, Failure> {
    let (_, held) = roots.existing(&entry.place)?;
    Ok(held.map(|held: Held| {
        Arc::new(Site::new(
            Arc::new(held),
            &entry.name,
            UnitKind::File,
            entry.job,
            0,
        ))
    }))
}

pub(super) fn open(roots: &Roots, entry: &Entry) -> Found {
    let site = match site_of(roots, entry) {
        Ok(Some(site)) => site,
        Ok(None) => return Found::Else(State::Missing, String::new()),
        Err(failure) => return unreadable(&failure),
    };
    match site.look() {
        Ok(Seen::Absent) => Found::Else(State::Missing, String::new()),
        Ok(Seen::Dir | Seen::Generation) => Found::Else(State::Changed, "a directory lies there".to_owned()),
        Ok(Seen::Other(kind)) => Found::Else(State::Changed, format!("{kind} lies there")),
        Ok(Seen::File(_)) => match site.open_final().and_then(|file| {
            let state = FileState::of(&file)?;
            Ok((file, state))
        }) {
            Ok((file, state)) => Found::File(file, state),
            Err(Errno::NOENT) => Found::Else(State::Missing, String::new()),
            Err(errno) => unreadable(&fault::of(errno, "opening the copy", &site.shown)),
        },
        Err(failure) => unreadable(&failure),
    }
}

impl Index {
    /// What of an entry is there, without reading it.
    pub fn look(&self, roots: &Roots, entry: &Entry) -> (State, String) {
        match open(roots, entry) {
            Found::Else(state, detail) => (state, detail),
            Found::File(_, now) => match &entry.damage {
                // Until it is touched again, that is what it is.
                Some((then, damage)) if then.looks_like(&now) => (State::Damaged, damage.clone()),
                _ if entry.is_untouched(&now) => (State::Ok, String::new()),
                _ => {
                    let key = &entry.key;
                    let what = if now.ino != key.ino {
                        "another file lies there"
                    } else if (now.size, now.mtime) != (key.size, key.mtime) {
                        "it was written to"
                    } else {
                        "its owner, mode, links or times were changed"
                    };
                    (State::Changed, what.to_owned())
                }
            },
        }
    }

    /// The same, after all of its content was hashed again. `None` if `hashing` ended that.
    pub fn verify(&self, roots: &Roots, entry: &Entry, hashing: &mut Hashing<'_>) -> Option<(State, String)> {
        let (file, before) = match open(roots, entry) {
            Found::Else(state, detail) => return Some((state, detail)),
            Found::File(file, state) => (file, state),
        };
        let damage = match self.damage(entry, &file, &before, hashing) {
            Ok(None) => return None,
            Ok(Some(damage)) => damage,
            Err(why) => return Some((State::Unreadable, why)),
        };
        match FileState::of(&file) {
            Ok(after) if after == before => {}
            _ => return Some((State::Changed, "it was changed while it was read".to_owned())),
        }
        let found = damage.clone().map(|damage| (before.clone(), damage));
        if found != entry.damage || (found.is_none() && !entry.is_untouched(&before)) {
            let noted = self.change(&entry.path, |now| {
                // Another copy may have been published meanwhile.
                if now.key != entry.key || now.job != entry.job {
                    return;
                }
                if found.is_none() {
                    // It is what was published, whatever was done to it: from now on this is how it looks.
                    now.key = before;
                    now.boot = journal::boot_id();
                }
                now.damage = found;
            });
            if let Err(failure) = noted {
                tracing::warn!("{failure}");
            }
        }
        if let Some(damage) = damage {
            return Some((State::Damaged, damage));
        }
        Some((State::Ok, String::new()))
    }

    /// Compares all of a file with what was published: what differs, or `Some(None)`; `None` if `hashing` ended it.
    ///
    /// # Errors
    /// Why it cannot be compared.
    #[expect(clippy::option_option, reason = "the outer one is an end before the end")]
    fn damage(
        &self,
        entry: &Entry,
        file: &File,
        state: &FileState,
        hashing: &mut Hashing<'_>,
    ) -> Result<Option<Option<String>>, String> {
        let (kept, manifest) = self
            .digests(entry)
            .map_err(|e| format!("the agent's state directory does not tell what it should be: {e}"))?;
        let head = entry.payload.head().0 > 0;
        let head = if head { manifest.encode() } else { Vec::new() };
        let map = Map::new(manifest);
        let (layout, of) = (entry.layout, map.entry(0));
        if state.size != entry.size.0 {
            return Ok(Some(Some(format!(
                "it has {} bytes and not {}",
                state.size, entry.size.0
            ))));
        }
        let reading = |e: std::io::Error| format!("reading it failed: {e}");
        let mut root = RootHasher::new(entry.payload.manifest);
        let mut differing = 0u32;
        let mut first = None;
        for index in (0..layout.count()).map(ChunkIndex) {
            let len = layout.len(index);
            let digest = match layout.part(index) {
                Part::Head(at) => {
                    let at = usize::try_from(at).unwrap_or(usize::MAX);
                    chunk_digest(entry.hash, &head[at..at + len])
                }
                Part::Data(at) => digest_by(entry.hash, len, |from, block| {
                    map.pieces(at + from, block.len(), |_, from, part| {
                        file.read_exact_at(&mut block[part], from)
                    })
                })
                .map_err(reading)?,
            };
            if kept.get(index).is_some_and(|kept| kept != digest) {
                differing += 1;
                first.get_or_insert(index);
            }
            root.push(digest);
            if !hashing(len as u64) {
                return Ok(None);
            }
        }
        Ok(Some(match first {
            Some(first) if differing == 1 => Some(format!("chunk {first} of {} differs", layout.count())),
            Some(first) => Some(format!(
                "{differing} of {} chunks differ, the first is chunk {first}",
                layout.count()
            )),
            None if root.finish() != entry.root => {
                Some("its digests do not make the published root".to_owned())
            }
            None if !is_dense(of) && !holes_are_zero(file, of).map_err(reading)? => {
                Some("there is data where the payload has holes".to_owned())
            }
            None => None,
        }))
    }
}
