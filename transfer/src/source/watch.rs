//! Whether the source still is what it was.
//!
//! Every two seconds the units, the files that are being read and some of the others are looked at; all of them once all
//! is read, before FINAL. A file is looked at when it is opened besides (`files`).

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use stage_core::chunk::{CHUNK, ChunkIndex, ChunkSet, Layout};
use stage_core::digest::chunk_digest;
use stage_core::failure::Failure;
use stage_core::manifest::{Entry, Kind};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::Shared;
use super::files::Change;
use crate::fault;
use crate::sparse::holes_are_zero;
use crate::store::map::is_dense;
use crate::sync::lock;

/// How often it is looked at.
const LOOK: Duration = Duration::from_secs(2);
/// Entries of trees that are looked at each time, beside those that are in use: a millisecond's work.
const SOME: u32 = 500;

impl Shared {
    /// Whether nothing at all of the source has changed since the walk.
    pub(super) fn all_unchanged(&self) -> Result<(), Failure> {
        let map = self.store.map()?;
        self.unchanged(0..map.entries().len() as u32)
    }

    /// Whether the content of some entries is still what it was when the push began. Where only times say otherwise, what
    /// was read of these is read again and compared with what was sent.
    fn unchanged(&self, entries: impl IntoIterator<Item = u32>) -> Result<(), Failure> {
        let map = self.store.map()?;
        let mut doubted = Vec::new();
        for entry in entries {
            if self.drive.is_over() {
                return Ok(());
            }
            if let Change::Perhaps(now) = self.files.change(map, entry)? {
                doubted.push((entry, now));
            }
        }
        if doubted.is_empty() {
            return Ok(());
        }
        let files: Vec<u32> = doubted.iter().map(|(entry, _)| *entry).collect();
        if self.compare_again(&files)? {
            for (entry, now) in doubted {
                self.files.renew(entry, now);
            }
        }
        Ok(())
    }

    /// Reads what was read of some files again; `false` if stopped meanwhile.
    fn compare_again(&self, files: &[u32]) -> Result<bool, Failure> {
        let store = &self.store;
        let map = store.map()?;
        let read = self.drive.look(|progress| progress.read);
        let mut bytes = Vec::new();
        let mut compared = ChunkSet::empty(read);
        let all = places(map.entries(), files);
        for (entry, place) in all {
            for index in chunks(store.layout(), place).map(ChunkIndex) {
                if self.drive.is_over() {
                    return Ok(false);
                }
                // Not read yet, or seen with another file's part of it.
                if !compared.insert(index) {
                    continue;
                }
                bytes.resize(store.layout().len(index), 0);
                store.read(index, 0, &mut bytes)?;
                self.drive
                    .bytes_read
                    .fetch_add(bytes.len() as u64, Ordering::Relaxed);
                if store.digest(index) != Some(chunk_digest(store.hash(), &bytes)) {
                    let what = format!("chunk {index} reads differently now");
                    return Err(self.files.changed(map, entry, &what));
                }
            }
        }
        tracing::info!(
            path = self.path,
            chunks = compared.len(),
            "the source's times changed and its content did not"
        );
        Ok(true)
    }

    /// Whether nothing was written into what was not sent.
    pub(super) fn holes_unchanged(&self) -> Result<(), Failure> {
        let map = self.store.map()?;
        for (entry, index) in map.entries().iter().zip(0..) {
            if is_dense(entry) {
                continue;
            }
            let file = self.files.file(map, index)?;
            match holes_are_zero(&file, entry) {
                Ok(true) => {}
                Ok(false) => return Err(self.files.changed(map, index, "a hole of it was written to")),
                Err(error) => return Err(fault::of_source(&error).at(self.files.shown(map, index))),
            }
        }
        Ok(())
    }
}

/// Where in the sequence of data some files lie.
fn places(entries: &[Entry], files: &[u32]) -> Vec<(u32, Range<u64>)> {
    let files: HashSet<u32> = files
        .iter()
        .map(|index| match entries[*index as usize].kind {
            Kind::HardLink { to } => to,
            _ => *index,
        })
        .collect();
    let bodies: u64 = entries.iter().map(|entry| entry.data_len() / CHUNK * CHUNK).sum();
    let (mut body, mut pack) = (0, bodies);
    let mut places = Vec::new();
    for (entry, index) in entries.iter().zip(0..) {
        let len = entry.data_len();
        let (in_body, in_pack) = (len / CHUNK * CHUNK, len % CHUNK);
        if files.contains(&index) {
            places.push((index, body..body + in_body));
            places.push((index, pack..pack + in_pack));
        }
        body += in_body;
        pack += in_pack;
    }
    places
}

/// The chunks that a run of the data lies in.
fn chunks(layout: Layout, place: Range<u64>) -> Range<u32> {
    if place.is_empty() {
        return 0..0;
    }
    let index = |chunk: u64| layout.head_count() + u32::try_from(chunk).unwrap_or(u32::MAX);
    index(place.start / CHUNK)..index(place.end.div_ceil(CHUNK))
}

/// Looks at the source until FINAL is declared. What happens to it later, its readers find out by digests.
pub(super) async fn run(shared: Arc<Shared>) {
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut next = 0_u32;
    loop {
        tokio::select! {
            () = shared.stopping.cancelled() => return,
            _ = look.tick() => {}
        }
        if shared.drive.is_over() || shared.drive.look(|progress| progress.declared) {
            return;
        }
        let looked = shared.clone();
        let begun = Instant::now();
        let from = next;
        let end = tokio::task::spawn_blocking(move || {
            let all = looked.store.map().map_or(0, |map| map.entries().len() as u32);
            let some = from..from.saturating_add(SOME).min(all);
            let next = if some.end < all { some.end } else { 0 };
            let seen = looked.unchanged(looked.files.in_use().into_iter().chain(some));
            let failed = seen.err().or_else(|| lock(&looked.drive.served.failure).clone());
            if let Some(failure) = failed {
                looked.fail(failure);
            }
            next
        });
        match end.await {
            Ok(after) => next = after,
            Err(_) => return,
        }
        // Where times change all the while, comparing again takes a tenth of the reading at most.
        tokio::select! {
            () = shared.stopping.cancelled() => return,
            () = sleep_until(Instant::now() + begun.elapsed() * 10) => {}
        }
    }
}
