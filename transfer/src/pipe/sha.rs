//! The stream's SHA-256, and its MD5 where one is expected: in order, beside the reading, late if it must be.

use std::sync::atomic::Ordering;

use md5::Md5;
use sha2::{Digest as _, Sha256};
use stage_core::assignment::SourceReport;
use stage_core::chunk::ChunkIndex;
use stage_core::digest::{Expected, FileDigest, Md5Digest, chunk_digest};
use stage_core::failure::{Code, Failure};

use super::Shared;

pub(super) fn run(shared: &Shared) {
    let store = &shared.store;
    let wants_md5 = shared
        .expect
        .iter()
        .any(|expected| matches!(expected.digest, Expected::Md5(_)));
    let mut sha256 = Sha256::new();
    let mut md5 = wants_md5.then(Md5::new);
    let mut own = Vec::new();
    for index in (0..).map(ChunkIndex) {
        if !shared
            .drive
            .wait(|progress| progress.read > index.0 || progress.ended)
        {
            return;
        }
        if !store.layout().contains(index) {
            break;
        }
        let hot = store.hot(index);
        let bytes = match &hot {
            Some(bytes) => &bytes[..],
            None => {
                own.resize(store.len(index), 0);
                if let Err(failure) = store.read(index, 0, &mut own) {
                    return shared.fail(failure);
                }
                if store.digest(index) != Some(chunk_digest(store.hash(), &own)) {
                    return shared.fail(Failure::new(
                        Code::SourceIo,
                        format!("chunk {index} reads differently from the spool"),
                        "look at the disk of the agent's state directory, then push again",
                    ));
                }
                &own[..]
            }
        };
        sha256.update(bytes);
        if let Some(md5) = &mut md5 {
            md5.update(bytes);
        }
        shared
            .drive
            .sha256_bytes
            .fetch_add(bytes.len() as u64, Ordering::Relaxed);
    }
    let sha256 = FileDigest(sha256.finalize().into());
    let md5 = md5.map(|md5| Md5Digest(md5.finalize().into()));
    for expected in &shared.expect {
        let (found, wanted) = match (expected.digest, md5) {
            (Expected::Sha256(wanted), _) if wanted != sha256 => {
                (format!("SHA-256 is {sha256}"), wanted.to_string())
            }
            (Expected::Md5(wanted), Some(md5)) if wanted != md5 => {
                (format!("MD5 is {md5}"), wanted.to_string())
            }
            _ => continue,
        };
        return shared.fail(Failure::new(
            Code::Unexpected,
            format!("the stream's {found}, expected was {wanted}"),
            "check what writes into it, or the file given with --expect",
        ));
    }
    shared.drive.advance(|progress| progress.digested = true);
    if shared.drive.wait(|progress| progress.declared) {
        shared.drive.say(SourceReport::Sha256(sha256));
    }
}
