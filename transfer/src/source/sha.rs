//! Each file's SHA-256, and its MD5 where one is expected: in order, beside the transfer, and late if it must be. Holes are hashed, not read.
//!
//! The sequence has the bodies of the large files first and the rest of each in the pack behind them, so a large file's
//! hashers wait from its body to its tail.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use md5::Md5;
use sha2::{Digest as _, Sha256};
use stage_core::assignment::SourceReport;
use stage_core::chunk::{ChunkIndex, Part};
use stage_core::digest::{Expected, FileDigest, Md5Digest, chunk_digest};
use stage_core::failure::{Code, Failure};
use stage_core::manifest::Kind;

use super::expect::Wanted;
use super::{Shared, files, listing};
use crate::sparse::ZEROS;
use crate::store::map::{Map, size_of};

/// Why the lane ended before its end.
enum End {
    Stopped,
    Failed(Failure),
}

pub(super) fn run(shared: &Shared) {
    match hash_all(shared) {
        Ok(sha256) => {
            shared.advance(|progress| progress.digested = true);
            // A digest of a file that has changed would be of nothing that exists.
            if shared.wait(|progress| progress.declared) {
                shared.say(SourceReport::Sha256(sha256));
            }
        }
        Err(End::Stopped) => {}
        Err(End::Failed(failure)) => shared.fail(failure),
    }
}

fn hash_all(shared: &Shared) -> Result<FileDigest, End> {
    let store = &shared.store;
    let map = store.map().map_err(End::Failed)?;
    let mut lane = Lane {
        shared,
        map,
        open: HashMap::new(),
        digests: vec![None; map.entries().len()],
    };
    let mut own = Vec::new();
    for index in (0..store.layout().count()).map(ChunkIndex) {
        if !shared.wait(|progress| progress.read > index.0) {
            return Err(End::Stopped);
        }
        let Part::Data(place) = store.layout().part(index) else {
            continue;
        };
        if let Some(bytes) = store.hot(index) {
            lane.chunk(place, &bytes[..])?;
        } else {
            read_again(shared, index, &mut own).map_err(End::Failed)?;
            lane.chunk(place, &own)?;
        }
    }
    lane.without_data()?;
    match &lane.digests[..] {
        [Some(only)] => Ok(*only),
        digests => Ok(listing::digest(map.entries(), digests)),
    }
}

struct Lane<'a> {
    shared: &'a Shared,
    map: &'a Map,
    /// Files of which some bytes have come and some have not.
    open: HashMap<u32, Hashing>,
    /// By entry.
    digests: Vec<Option<FileDigest>>,
}

/// One file, as far as it has come.
struct Hashing {
    /// How far in the file.
    at: u64,
    /// Bytes of data that are to come.
    left: u64,
    sha256: Sha256,
    md5: Option<Md5>,
}

impl Lane<'_> {
    /// A chunk's bytes, each piece after the hole before it.
    fn chunk(&mut self, place: u64, bytes: &[u8]) -> Result<(), End> {
        let map = self.map;
        map.pieces(place, bytes.len(), |entry, from, part| {
            let mut file = self.open.remove(&entry).unwrap_or_else(|| self.begin(entry));
            self.zeros_to(&mut file, from)?;
            file.left -= part.len() as u64;
            self.update(&mut file, &bytes[part]);
            if file.left > 0 {
                self.open.insert(entry, file);
                return Ok(());
            }
            self.finish(entry, file)
        })
    }

    /// Files that are empty, or one hole.
    fn without_data(&mut self) -> Result<(), End> {
        for (entry, index) in self.map.entries().iter().zip(0..) {
            if matches!(entry.kind, Kind::File { .. }) && entry.data_len() == 0 {
                self.finish(index, self.begin(index))?;
            }
        }
        Ok(())
    }

    fn begin(&self, entry: u32) -> Hashing {
        let wants_md5 = self
            .expected(entry)
            .iter()
            .any(|wanted| matches!(wanted.digest, Expected::Md5(_)));
        Hashing {
            at: 0,
            left: self.map.entry(entry).data_len(),
            sha256: Sha256::new(),
            md5: wants_md5.then(Md5::new),
        }
    }

    fn expected(&self, entry: u32) -> &[Wanted] {
        let all = &self.shared.expect;
        let first = all.partition_point(|wanted| wanted.entry < entry);
        let after = all.partition_point(|wanted| wanted.entry <= entry);
        &all[first..after]
    }

    fn finish(&mut self, entry: u32, mut file: Hashing) -> Result<(), End> {
        self.zeros_to(&mut file, size_of(self.map.entry(entry)).0)?;
        let sha256 = FileDigest(file.sha256.finalize().into());
        let md5 = file.md5.map(|md5| Md5Digest(md5.finalize().into()));
        for wanted in self.expected(entry) {
            let (what, expected) = match wanted.digest {
                Expected::Sha256(digest) if digest != sha256 => {
                    (format!("SHA-256 is {sha256}"), digest.to_string())
                }
                Expected::Md5(digest) if Some(digest) != md5 => (
                    format!("MD5 is {}", md5.expect("computed where one is expected")),
                    digest.to_string(),
                ),
                _ => continue,
            };
            let failure = Failure::new(
                Code::Unexpected,
                format!("the source's {what}, expected was {expected}"),
                "check the source file, or the file given with --expect",
            );
            return Err(End::Failed(failure.at(self.shared.files.shown(self.map, entry))));
        }
        self.digests[entry as usize] = Some(sha256);
        Ok(())
    }

    fn zeros_to(&self, file: &mut Hashing, end: u64) -> Result<(), End> {
        while file.at < end {
            if self.shared.is_stopped() || self.shared.has_failed() {
                return Err(End::Stopped);
            }
            let some = (end - file.at).min(ZEROS.len() as u64) as usize;
            self.update(file, &ZEROS[..some]);
        }
        Ok(())
    }

    fn update(&self, file: &mut Hashing, bytes: &[u8]) {
        file.sha256.update(bytes);
        if let Some(md5) = &mut file.md5 {
            md5.update(bytes);
        }
        file.at += bytes.len() as u64;
        let passed = &self.shared.sha256_bytes;
        passed.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    }
}

/// Reads a chunk through the page cache and checks that it is the one that was sent.
fn read_again(shared: &Shared, index: ChunkIndex, own: &mut Vec<u8>) -> Result<(), Failure> {
    let store = &shared.store;
    own.resize(store.layout().len(index), 0);
    store.read(index, 0, own)?;
    shared.bytes_read.fetch_add(own.len() as u64, Ordering::Relaxed);
    if store.digest(index) != Some(chunk_digest(store.hash(), own)) {
        return Err(files::changed(
            &format!("chunk {index} reads differently now"),
            &format!("{} s after the push began", shared.files.since_begun()),
        ));
    }
    Ok(())
}
