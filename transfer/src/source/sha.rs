//! The whole file's SHA-256: in order, beside the transfer, and late if it must be.

use std::sync::atomic::Ordering;

use sha2::{Digest as _, Sha256};
use stage_core::assignment::SourceReport;
use stage_core::chunk::ChunkIndex;
use stage_core::digest::{FileDigest, chunk_digest};
use stage_core::failure::Failure;

use super::{Shared, watch};

pub(super) fn run(shared: &Shared) {
    let store = &shared.store;
    let mut sha = Sha256::new();
    let mut own = Vec::new();
    for index in (0..store.layout().count()).map(ChunkIndex) {
        if !shared.wait(|progress| progress.read > index.0) {
            return;
        }
        if let Some(bytes) = store.hot(index) {
            sha.update(&bytes[..]);
        } else {
            match read_again(shared, index, &mut own) {
                Ok(()) => sha.update(&own),
                Err(failure) => return shared.fail(failure),
            }
        }
        shared
            .sha256_bytes
            .fetch_add(store.layout().len(index) as u64, Ordering::Relaxed);
    }
    // A digest of a file that has changed would be of nothing that exists.
    if shared.wait(|progress| progress.declared) {
        shared.say(SourceReport::Sha256(FileDigest(sha.finalize().into())));
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
