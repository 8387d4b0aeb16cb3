//! When FINAL disagrees: which chunks are not the payload's.

use std::sync::Arc;
use std::time::Duration;

use stage_core::assignment::Final;
use stage_core::chunk::{ChunkIndex, ChunkSet};
use stage_core::digest::{ChunkDigest, ManifestDigest, RootHasher};
use stage_core::failure::{Code, Failure};
use tokio::time::timeout;

use super::Shared;
use super::dial;
use crate::error::TransferError;
use crate::frame::{self, MAX_BATCH, MAX_MESSAGE, Reader, ToChild, ToParent};
use crate::sync::lock;

/// Until a page of digests has to be there.
const PAGE: Duration = Duration::from_secs(10);

/// Asks the parents in turn for the list that `fin` proves, the one that delivered last at the end, and gives the
/// chunks here whose digests are not on it.
pub(super) async fn find(
    shared: &Arc<Shared>,
    fin: &Final,
    manifest: ManifestDigest,
) -> Result<ChunkSet, Failure> {
    let count = shared.store.layout().count();
    if fin.chunks != count {
        return Err(Failure::new(
            Code::Internal,
            format!(
                "the source declared {} chunks, this node counts {count}",
                fin.chunks
            ),
            "cancel the job and push again",
        ));
    }
    let (mut parents, last) = {
        let view = lock(&shared.view);
        (view.parents.clone(), view.last.clone())
    };
    parents.sort_by_key(|peer| Some(&peer.node) == last.as_ref());
    let mut failed = Failure::new(
        Code::Unreachable,
        "there is no parent to ask for digests",
        "wait for the next plan",
    );
    for peer in parents {
        match ask(shared, &peer, fin, manifest).await {
            Ok(digests) => {
                let shared = shared.clone();
                let compared = tokio::task::spawn_blocking(move || compare(&shared, &digests));
                return compared.await.expect("comparing does not panic");
            }
            Err(error) => {
                failed = error.into_failure(&peer.node);
                tracing::info!(peer = %peer.node, error = %failed, "no digests from there");
            }
        }
    }
    Err(failed)
}

async fn ask(
    shared: &Shared,
    peer: &stage_core::assignment::Peer,
    fin: &Final,
    manifest: ManifestDigest,
) -> Result<Vec<ChunkDigest>, TransferError> {
    let connected = dial::connect(shared, peer, true).await?;
    let (read, mut write) = tokio::io::split(connected.conn);
    let mut reader = Reader::new(read, MAX_MESSAGE);
    let mut list: Vec<ChunkDigest> = Vec::new();
    let mut root = RootHasher::new(manifest);
    let page = async |write: &mut _, reader: &mut Reader<_>, from: ChunkIndex, count: u32| {
        frame::send(write, &ToParent::Digests { from, count }).await?;
        loop {
            if let ToChild::Digests { from: begin, digests } = reader.next().await?
                && begin == from
            {
                return Ok::<_, TransferError>(digests);
            }
        }
    };
    while (list.len() as u32) < fin.chunks {
        let from = ChunkIndex(list.len() as u32);
        let count = (fin.chunks - from.0).min(MAX_BATCH as u32);
        let digests = timeout(PAGE, page(&mut write, &mut reader, from, count))
            .await
            .map_err(|_| TransferError::Silent(PAGE.as_secs()))??;
        if digests.is_empty() || digests.len() as u32 > count {
            return Err(TransferError::Protocol(
                "it does not have the whole list of digests",
            ));
        }
        digests.iter().for_each(|digest| root.push(*digest));
        list.extend(digests);
    }
    if root.finish() != fin.root {
        return Err(TransferError::Protocol(
            "its list of digests is not the declared one",
        ));
    }
    frame::send(&mut write, &ToParent::Leaving).await?;
    Ok(list)
}

/// The chunks here whose digests are not the list's.
fn compare(shared: &Shared, digests: &[ChunkDigest]) -> Result<ChunkSet, Failure> {
    let count = shared.store.layout().count();
    let mut differ = ChunkSet::empty(count);
    for run in shared.store.have().runs() {
        let ours = shared.store.digests(run.clone())?;
        for (index, own) in run.zip(ours) {
            if own != digests[index as usize] {
                differ.insert(ChunkIndex(index));
            }
        }
    }
    Ok(differ)
}
