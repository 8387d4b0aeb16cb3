//! What of an entry is there, by a look.

use std::fs::File;
use std::sync::Arc;

use rustix::io::Errno;
use stage_core::ask::State;
use stage_core::failure::Failure;
use stage_core::payload::UnitKind;

use super::{Entry, EntryKind, Index};
use crate::fault;
use crate::journal::FileState;
use crate::root::{Held, Roots};
use crate::target::site::{Seen, Site};

/// What a look finds under an entry's name.
pub(super) enum Found {
    /// What may be the copy, opened: the file, or the tree's directory.
    There(File, FileState),
    /// Nothing, or something of another kind.
    Else(State, String),
}

fn unreadable(failure: &Failure) -> Found {
    Found::Else(State::Unreadable, failure.message.clone())
}

impl Entry {
    /// Its place in its directory.
    pub(super) fn site(&self, held: Arc<Held>) -> Site {
        let kind = match self.kind {
            EntryKind::File => UnitKind::File,
            EntryKind::Tree => UnitKind::Tree,
        };
        Site::new(held, &self.name, kind, self.job, self.unit as usize)
    }
}

/// The directory of an entry as a site; `None` if it is gone.
pub(super) fn site_of(roots: &Roots, entry: &Entry) -> Result<Option<Site>, Failure> {
    let (_, held) = roots.existing(&entry.place)?;
    Ok(held.map(|held| entry.site(Arc::new(held))))
}

pub(super) fn open(roots: &Roots, entry: &Entry) -> Found {
    let changed = |what: &str| Found::Else(State::Changed, format!("{what} lies there"));
    let site = match site_of(roots, entry) {
        Ok(Some(site)) => site,
        Ok(None) => return Found::Else(State::Missing, String::new()),
        Err(failure) => return unreadable(&failure),
    };
    let opened = match site.look() {
        Err(failure) => return unreadable(&failure),
        Ok(Seen::Absent) => return Found::Else(State::Missing, String::new()),
        Ok(Seen::Other(kind)) => return changed(kind),
        Ok(Seen::File(_)) if entry.kind == EntryKind::File => site.open_final(),
        Ok(Seen::File(_)) => return changed("a file"),
        Ok(Seen::Dir) if entry.kind == EntryKind::Tree && entry.generation.is_none() => {
            site.open_final_dir().map(File::from)
        }
        Ok(Seen::Dir) => return changed("a directory"),
        Ok(Seen::Generation) => match (site.generation_now(), &entry.generation) {
            (Ok(Some(now)), Some(then)) if now == *then => site.open_generation(&now).map(File::from),
            (Err(e), _) => Err(e),
            _ => return changed("another generation"),
        },
    };
    match opened.and_then(|file| FileState::of(&file).map(|state| (file, state))) {
        Ok((file, state)) => Found::There(file, state),
        Err(Errno::NOENT) => Found::Else(State::Missing, String::new()),
        Err(errno) => unreadable(&fault::of(errno, "opening the copy", &site.shown)),
    }
}

impl Index {
    /// What of an entry is there, without reading it: of a tree, what its name leads to, and whether its own directory
    /// is as it was.
    pub fn look(&self, roots: &Roots, entry: &Entry) -> (State, String) {
        let now = match open(roots, entry) {
            Found::Else(state, detail) => return (state, detail),
            Found::There(_, now) => now,
        };
        match &entry.damage {
            // Until it is touched again, that is what it is.
            Some((then, damage)) if then.looks_like(&now) => return (State::Damaged, damage.clone()),
            _ if entry.is_untouched(&now) => return (State::Ok, String::new()),
            _ => {}
        }
        let key = &entry.key;
        let what = if now.ino != key.ino {
            match entry.kind {
                EntryKind::File => "another file lies there",
                EntryKind::Tree => "another directory lies there",
            }
        } else if (now.size, now.mtime) != (key.size, key.mtime) {
            "it was written to"
        } else {
            "its owner, mode, links or times were changed"
        };
        (State::Changed, what.to_owned())
    }
}
