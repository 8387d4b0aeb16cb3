//! The whole file's SHA-256, and its MD5 where one is expected: in order, beside the transfer, and late if it must be. Holes are hashed, not read.

use std::sync::atomic::Ordering;

use md5::Md5;
use sha2::{Digest as _, Sha256};
use stage_core::assignment::SourceReport;
use stage_core::chunk::{ChunkIndex, Part};
use stage_core::digest::{Expected, FileDigest, Md5Digest, chunk_digest};
use stage_core::failure::{Code, Failure};

use super::{Shared, watch};
use crate::sparse::ZEROS;
use crate::store::map::size_of;

/// Its source has stopped.
struct Stopped;

pub(super) fn run(shared: &Shared) {
    let store = &shared.store;
    let mut lane = Lane {
        shared,
        at: 0,
        sha256: Sha256::new(),
        md5: wants_md5(shared).then(Md5::new),
    };
    let mut own = Vec::new();
    for index in (0..store.layout().count()).map(ChunkIndex) {
        if !shared.wait(|progress| progress.read > index.0) {
            return;
        }
        let passed = if let Some(bytes) = store.hot(index) {
            lane.chunk(index, &bytes[..])
        } else {
            match read_again(shared, index, &mut own) {
                Ok(()) => lane.chunk(index, &own),
                Err(failure) => return shared.fail(failure),
            }
        };
        if passed.is_err() {
            return;
        }
    }
    let Ok(map) = store.map() else { return };
    if lane.zeros_to(size_of(map.entry(0)).0).is_err() {
        return;
    }
    let sha256 = FileDigest(lane.sha256.finalize().into());
    let md5 = lane.md5.map(|md5| Md5Digest(md5.finalize().into()));
    for expected in &shared.expect {
        let (what, found) = match expected.digest {
            Expected::Sha256(digest) if digest != sha256 => {
                (format!("SHA-256 is {sha256}"), digest.to_string())
            }
            Expected::Md5(digest) if Some(digest) != md5 => (
                format!("MD5 is {}", md5.expect("computed where one is expected")),
                digest.to_string(),
            ),
            _ => continue,
        };
        return shared.fail(Failure::new(
            Code::Unexpected,
            format!("the source's {what}, expected was {found}"),
            "check the source file, or the file given with --expect",
        ));
    }
    shared.advance(|progress| progress.digested = true);
    // A digest of a file that has changed would be of nothing that exists.
    if shared.wait(|progress| progress.declared) {
        shared.say(SourceReport::Sha256(sha256));
    }
}

fn wants_md5(shared: &Shared) -> bool {
    shared
        .expect
        .iter()
        .any(|expected| matches!(expected.digest, Expected::Md5(_)))
}

struct Lane<'a> {
    shared: &'a Shared,
    /// How far in the file.
    at: u64,
    sha256: Sha256,
    md5: Option<Md5>,
}

impl Lane<'_> {
    /// A chunk's bytes, each piece after the hole before it.
    fn chunk(&mut self, index: ChunkIndex, bytes: &[u8]) -> Result<(), Stopped> {
        let store = &self.shared.store;
        let Part::Data(place) = store.layout().part(index) else {
            return Ok(());
        };
        let Ok(map) = store.map() else { return Ok(()) };
        map.pieces(place, bytes.len(), |_, from, part| {
            self.zeros_to(from)?;
            self.update(&bytes[part]);
            Ok(())
        })
    }

    fn zeros_to(&mut self, end: u64) -> Result<(), Stopped> {
        while self.at < end {
            if self.shared.is_stopped() || self.shared.has_failed() {
                return Err(Stopped);
            }
            let some = (end - self.at).min(ZEROS.len() as u64) as usize;
            self.update(&ZEROS[..some]);
        }
        Ok(())
    }

    fn update(&mut self, bytes: &[u8]) {
        self.sha256.update(bytes);
        if let Some(md5) = &mut self.md5 {
            md5.update(bytes);
        }
        self.at += bytes.len() as u64;
        self.shared.sha256_bytes.store(self.at, Ordering::Relaxed);
    }
}

/// Reads a chunk through the page cache and checks that it is the one that was sent.
fn read_again(shared: &Shared, index: ChunkIndex, own: &mut Vec<u8>) -> Result<(), Failure> {
    let store = &shared.store;
    own.resize(store.layout().len(index), 0);
    store.read(index, 0, own)?;
    shared.bytes_read.fetch_add(own.len() as u64, Ordering::Relaxed);
    if store.digest(index) != Some(chunk_digest(store.hash(), own)) {
        return Err(watch::changed(
            &format!("chunk {index} reads differently now"),
            &format!("{} s after the push began", shared.begun.elapsed().as_secs()),
        ));
    }
    Ok(())
}
