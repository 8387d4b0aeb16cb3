//! Partials of a job whose chunk table was lost, and with it the place where they lie.

use std::collections::VecDeque;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use stage_core::id::JobId;
use stage_core::payload::UnitKind;

use super::site::{Site, partial_name};
use crate::root::Roots;

/// Entries looked at, at most: this is a service for a rare accident, and a root may hold millions of files.
const ENTRIES: usize = 100_000;

/// Removes the job's partials from the roots, as far as they are found soon. Links are not followed, and what is found
/// is opened again beneath its root before it is touched.
pub(super) fn remove(roots: &Roots, job: JobId) {
    let prefix = partial_name(job, 0);
    let prefix = &prefix[..prefix.len() - 1];
    let mut dirs: VecDeque<PathBuf> = roots.paths().map(ToOwned::to_owned).collect();
    let mut left = ENTRIES;
    while let Some(dir) = dirs.pop_front() {
        let Ok(entries) = std::fs::read_dir(&dir) else {
            continue;
        };
        for entry in entries.flatten() {
            if left == 0 {
                tracing::warn!(%job, "there are too many files to look for its partials among all of them");
                return;
            }
            left -= 1;
            let name = entry.file_name();
            if let Some(unit) = name.to_str().and_then(|name| name.strip_prefix(prefix)) {
                if let Ok(unit) = unit.parse() {
                    remove_one(roots, &dir, job, unit);
                }
            } else if !name.as_bytes().starts_with(b".stage")
                && entry.file_type().is_ok_and(|kind| kind.is_dir())
            {
                dirs.push_back(entry.path());
            }
        }
    }
}

fn remove_one(roots: &Roots, dir: &std::path::Path, job: JobId, unit: usize) {
    let removed = roots.find(dir.as_os_str().as_bytes()).and_then(|held| {
        let site = Site::new(Arc::new(held), b"-", UnitKind::Tree, job, unit);
        site.remove_partial()
    });
    match removed {
        Ok(()) => tracing::warn!(%job, dir = %dir.display(), "a partial was found and removed"),
        Err(failure) => tracing::warn!(%job, "a partial was found and could not be removed: {failure}"),
    }
}
