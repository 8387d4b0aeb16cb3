//! The one reading of the source: each chunk once, in order, hashed and kept as it comes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use stage_core::assignment::{Final, SourceReport};
use stage_core::chunk::{BLOCK, ChunkIndex, Part};
use stage_core::digest::ChunkHasher;
use stage_core::failure::{Code, Failure};

use super::Shared;
use crate::clock::Doing;
use crate::drive::End;
use crate::frame::Waits;

pub(super) fn run(shared: &Shared) {
    match read_all(shared).and_then(|()| declare(shared)) {
        Ok(fin) => {
            // In this order: whoever waits for the declaration must find it said.
            shared.drive.say(SourceReport::Final(fin));
            shared.drive.advance(|progress| progress.declared = true);
        }
        Err(End::Stopped) => {}
        Err(End::Failed(failure)) => shared.fail(failure),
    }
}

fn read_all(shared: &Shared) -> Result<(), End> {
    let clock = &shared.drive.served.reader;
    let _running = clock.enter();
    let store = &shared.store;
    let mut hasher = ChunkHasher::new(store.hash());
    let mut own = Vec::new();
    for index in (0..store.layout().count()).map(ChunkIndex) {
        shared.drive.wait_as(Waits::Nothing);
        let wanted = || shared.drive.served.wait_for_demand(index.0, shared.drive.stop());
        if shared.drive.is_over() || !clock.time(Doing::Idle, wanted) {
            return Err(End::Stopped);
        }
        let claim = store.claim(index).ok_or_else(|| {
            End::Failed(Failure::new(
                Code::Internal,
                format!("chunk {index} of the source has another owner"),
                "report this as a bug of stage",
            ))
        })?;
        let len = store.layout().len(index);
        // The head is in memory: neither read from the source nor held back by its limit.
        let is_data = matches!(store.layout().part(index), Part::Data(_));
        let mut buffer = shared.drive.served.budget.take();
        let mut at = 0;
        while at < len {
            let now = BLOCK.min(len - at);
            if is_data {
                shared.drive.pause(now)?;
            }
            shared.drive.wait_as(Waits::Source);
            let block = match &mut buffer {
                Some(buffer) => &mut buffer.resize(len)[at..at + now],
                None => {
                    own.resize(BLOCK, 0);
                    &mut own[..now]
                }
            };
            clock
                .time(Doing::Disk, || store.read(index, at, block))
                .map_err(End::Failed)?;
            clock.time(Doing::Work, || hasher.update(block));
            if is_data {
                shared.drive.bytes_read.fetch_add(now as u64, Ordering::Relaxed);
            }
            at += now;
        }
        claim
            .keep(hasher.finish(), buffer.map(Arc::new))
            .map_err(End::Failed)?;
        shared.drive.advance(|progress| progress.read = index.0 + 1);
    }
    shared.drive.wait_as(Waits::Nothing);
    Ok(())
}

/// All is read: what it was, provided that it still is.
fn declare(shared: &Shared) -> Result<Final, End> {
    if !shared.expect.is_empty() && !shared.drive.wait(|progress| progress.digested) {
        return Err(End::Stopped);
    }
    shared.all_unchanged().map_err(End::Failed)?;
    shared.holes_unchanged().map_err(End::Failed)?;
    if shared.drive.is_over() {
        return Err(End::Stopped);
    }
    Ok(Final {
        root: shared.store.root().map_err(End::Failed)?,
        chunks: shared.store.layout().count(),
        data: shared.store.layout().data(),
    })
}
