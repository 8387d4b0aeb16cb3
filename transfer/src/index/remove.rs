//! Removing what stage published, and nothing else.
//!
//! The file, or the link that is a tree's name, is renamed away first and looked at under its new name, which nobody else
//! knows: what is removed is what was checked. The inode that is to go is written down before, so that an agent that dies in between knows what to do.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{AtFlags, RenameFlags, readlinkat, renameat, renameat_with, unlinkat};
use rustix::io::Errno;
use stage_core::ask::{Removal, Removed, State};
use stage_core::failure::{Code, Failure, show_path};
use stage_core::id::JobId;
use stage_core::payload::UnitKind;
use stage_core::units::ByteCount;

use super::look::{Found, open, site_of};
use super::{Entry, EntryKind, Index};
use crate::crash::crash_point;
use crate::fault;
use crate::journal::{self, Phase, removed};
use crate::root::{Roots, check_component};
use crate::target::site::{GENERATIONS, Seen, Site};
use crate::target::{retired, tree};

impl Index {
    /// Removes the copy at a path. Nothing there is no error.
    ///
    /// # Errors
    /// It is not stage's, was changed since, is being written by a job that `is_open`, or cannot be removed.
    pub fn remove(
        &self,
        roots: &Roots,
        state: &Path,
        removal: &Removal,
        is_open: impl Fn(JobId) -> bool,
    ) -> Result<Removed, Failure> {
        check_component(&removal.name)?;
        let (dir, held) = roots.existing(&removal.place)?;
        let mut path = dir.clone();
        path.push(b'/');
        path.extend(&removal.name);
        let shown = show_path(&path);
        let entry = self.find(&path);
        let jobs: Vec<_> = journal::records(state)
            .into_iter()
            .filter(|record| record.is_at(&dir, &removal.name))
            .collect();
        // Whose jobs are still open brings it again when its agent starts, if it is only lost.
        let mark = || {
            let mut published = jobs.iter().filter(|record| record.phase == Phase::Published);
            published.try_for_each(|record| removed::mark(state, record.job))
        };
        let absent = || -> Result<Removed, Failure> {
            mark()?;
            self.forget(&path);
            Ok(Removed {
                path: shown.clone(),
                was_there: false,
                bytes: ByteCount(0),
            })
        };
        let Some(held) = held else { return absent() };
        let refuse = |code, why: &str, hint: &str| {
            Err(Failure::new(code, format!("{shown} {why}"), hint).at(shown.clone()))
        };
        let busy = jobs
            .iter()
            .find(|record| record.phase < Phase::Published && is_open(record.job));
        if let Some(record) = busy {
            return refuse(
                Code::Exists,
                &format!("is being written by job {}", record.job),
                &format!(
                    "wait for it with `stage wait {0}`, or end it with `stage cancel {0}`",
                    record.job
                ),
            );
        }
        let Some(entry) = entry else {
            let job = JobId::from_bytes([0; 16]);
            return match Site::new(Arc::new(held), &removal.name, UnitKind::File, job, 0).look()? {
                Seen::Absent => absent(),
                _ => refuse(
                    Code::Exists,
                    "was not published by stage",
                    "remove it by other means if it is not wanted",
                ),
            };
        };
        drop(held);
        let (file, now) = match open(roots, &entry) {
            Found::There(file, now) => (file, now),
            Found::Else(State::Missing, _) => {
                // Somebody removed the name by hand, who saw no more than that of a tree.
                if let Some(site) = site_of(roots, &entry)? {
                    remove_generation(&self.state, &site, &entry, entry.key.ino)?;
                }
                return absent();
            }
            Found::Else(_, why) => {
                return refuse(
                    Code::WrongKind,
                    &format!("is not what stage published: {why}"),
                    "look what lies there and remove it by other means",
                );
            }
        };
        let touched = match self.look(roots, &entry) {
            _ if removal.force => None,
            (State::Ok, _) => self.touched_in(&entry, &file),
            (_, why) => Some(why),
        };
        if let Some(why) = touched {
            return refuse(
                Code::Exists,
                &format!("was changed since stage published it: {why}"),
                "`stage verify` says whether its content is still the same; --force removes it all the same",
            );
        }
        if !removal.force && entry.found {
            return refuse(
                Code::Exists,
                "stood there before stage came, which only found it to be right",
                "--force removes it all the same",
            );
        }
        // Who holds a tree's directory reads it.
        drop(file);
        mark()?;
        if let Err(failure) = self.take_away(roots, &entry, now.ino) {
            for record in &jobs {
                removed::unmark(state, record.job)?;
            }
            return Err(failure);
        }
        self.forget(&path);
        Ok(Removed {
            path: shown,
            was_there: true,
            bytes: match entry.kind {
                EntryKind::File => ByteCount(now.size),
                EntryKind::Tree => entry.size,
            },
        })
    }

    /// Removes what has this inode, if it is still what the entry's name leads to.
    fn take_away(&self, roots: &Roots, entry: &Entry, inode: u64) -> Result<(), Failure> {
        let Some(site) = site_of(roots, entry)? else {
            return Ok(());
        };
        self.change(&entry.path, |entry| entry.removing = Some(inode))?;
        crash_point!("before_away");
        let away = away(entry);
        let fail = |e: Errno| fault::of(e, "removing the copy", &site.shown);
        let (dir, name) = (site.held.fd(), entry.name.as_slice());
        let moved = match renameat_with(dir, name, dir, &away, RenameFlags::NOREPLACE) {
            // File systems without it (NFS). The name is ours alone.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => renameat(dir, name, dir, &away),
            other => other,
        };
        match moved {
            Ok(()) => {}
            Err(Errno::NOENT) => return Ok(()),
            Err(e) => return Err(fail(e)),
        }
        crash_point!("after_away");
        if finish(&self.state, &site, entry, inode)? {
            crash_point!("after_unlink");
            return site.held.sync().map_err(fail);
        }
        self.change(&entry.path, |entry| entry.removing = None)?;
        Err(Failure::new(
            Code::Exists,
            format!("{} was replaced by somebody else at this very moment", site.shown),
            "look what lies there, then try again",
        )
        .at(site.shown.clone()))
    }

    /// Ends the removals in which an agent died. To be called once at its start.
    pub fn recover(&self, roots: &Roots) {
        for entry in self.entries() {
            let Some(inode) = entry.removing else { continue };
            let ended = site_of(roots, &entry).and_then(|site| {
                let Some(site) = site else { return Ok(true) };
                Ok(finish(&self.state, &site, &entry, inode)? || matches!(site.look()?, Seen::Absent))
            });
            match ended {
                Ok(true) => self.forget(&entry.path),
                // It had not been renamed yet.
                Ok(false) => {
                    if let Err(failure) = self.change(&entry.path, |entry| entry.removing = None) {
                        tracing::warn!("{failure}");
                    }
                }
                Err(failure) => tracing::warn!("{failure}"),
            }
        }
    }
}

/// The name under which a copy waits to be removed. Two entries never share it.
fn away(entry: &Entry) -> String {
    let id = blake3::hash(&entry.path).to_hex();
    format!(".stage-gone-{}", &id[..16])
}

/// Removes what was renamed away, if it is the copy; anything else gets its name back. `true`: it is gone.
fn finish(state: &Path, site: &Site, entry: &Entry, inode: u64) -> Result<bool, Failure> {
    let away = away(entry);
    let dir = site.held.fd();
    let fail = |e: Errno| fault::of(e, "removing the copy", &site.shown);
    let stat = match rustix::fs::statat(dir, &away, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat,
        // The name is gone, and a tree's generation may be left.
        Err(Errno::NOENT) => {
            return match (&entry.generation, site.look()?) {
                (Some(_), Seen::Absent) => remove_generation(state, site, entry, inode).map(|()| true),
                _ => Ok(false),
            };
        }
        Err(e) => return Err(fail(e)),
    };
    let is_copy = match &entry.generation {
        None => stat.st_ino == inode,
        Some(generation) => {
            let text = [GENERATIONS.as_bytes(), b"/", generation].concat();
            readlinkat(dir, &away, Vec::new()).is_ok_and(|leads| leads.as_bytes() == text)
        }
    };
    if !is_copy {
        let name = entry.name.as_slice();
        renameat_with(dir, &away, dir, name, RenameFlags::NOREPLACE).map_err(fail)?;
        return Ok(false);
    }
    match (entry.kind, &entry.generation) {
        (EntryKind::Tree, None) => tree::remove(dir, away.as_bytes()).map_err(fail)?,
        (EntryKind::File, _) => unlinkat(dir, &away, AtFlags::empty()).map_err(fail)?,
        (EntryKind::Tree, Some(_)) => {
            // The name first: who resolves it finds nothing rather than half a tree.
            unlinkat(dir, &away, AtFlags::empty()).map_err(fail)?;
            site.held.sync().map_err(fail)?;
            crash_point!("after_name");
            remove_generation(state, site, entry, inode)?;
        }
    }
    Ok(true)
}

/// Removes the generation of an entry, if it is that inode, and those before it. One that somebody reads goes as soon as
/// nobody does.
fn remove_generation(state: &Path, site: &Site, entry: &Entry, inode: u64) -> Result<(), Failure> {
    let Some(generation) = &entry.generation else {
        return Ok(());
    };
    retired::dismiss(state, site)?;
    match site.inode_of_generation(generation) {
        Some((_, now)) if now == inode => {}
        _ => return Ok(()),
    }
    retired::note(state, site, generation, inode, Duration::ZERO, entry.job)?;
    match retired::remove_unread(site, generation, false) {
        Ok(None) | Err(Errno::NOENT) => {
            retired::forget(state, site, generation);
            Ok(())
        }
        Ok(Some(usage)) => {
            tracing::info!(
                path = site.shown,
                "its generation goes when nobody reads it: {usage}"
            );
            Ok(())
        }
        Err(e) => Err(fault::of(e, "removing the generation", &site.shown)),
    }
}
