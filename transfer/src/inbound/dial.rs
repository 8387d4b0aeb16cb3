//! Finding a parent: dialling one, and a round over all candidates.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use stage_core::assignment::Peer;
use stage_core::failure::{Code, Failure};
use stage_core::id::HopId;
use stage_net::{Conn, HELLO_DEADLINE, Role};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::Shared;
use crate::error::TransferError;
use crate::hello::{self, ConnKind, Hello, Welcome};
use crate::sync::{lock, random};

/// After `later`: 20, 40, 80 ms and so on, up to a second.
const LATER: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// How long a candidate may say `later` before the next one is asked too.
const PATIENCE: Duration = Duration::from_secs(3);
/// Between two candidates while a parent is silent.
const STAGGER: Duration = Duration::from_millis(250);

/// A parent that has said welcome, before anything else was said.
pub(super) struct Connected {
    pub(super) conn: Conn,
    pub(super) welcome: Welcome,
    pub(super) hop: HopId,
    pub(super) peer: Peer,
    pub(super) address: SocketAddr,
    pub(super) rtt: Duration,
}

/// One connection to an address of `peer`, hello and all.
pub(super) async fn connect_to(
    shared: &Shared,
    peer: &Peer,
    address: SocketAddr,
    hop: HopId,
    kind: ConnKind,
    tried_others: bool,
) -> Result<(Conn, Welcome), TransferError> {
    // From the address that we listen on ourselves: a node in several networks answers where it was asked.
    let from: Option<IpAddr> = shared
        .plane
        .addresses()
        .iter()
        .map(SocketAddr::ip)
        .find(|ip| ip.is_ipv4() == address.is_ipv4());
    let role = Role::Node(peer.node.clone());
    let mut conn = shared.plane.net().dial(address, &role, from).await?;
    let hello = Hello {
        job: shared.job,
        hop,
        kind,
        node: shared.plane.node().clone(),
        rank: shared.rank,
        tried_others,
        control: lock(&shared.view).control_with(&peer.node),
    };
    let welcome = timeout(
        HELLO_DEADLINE,
        hello::ask(&mut conn, &shared.key, &hello, &peer.node),
    )
    .await
    .map_err(|_| TransferError::Silent(HELLO_DEADLINE.as_secs()))??;
    let ours = shared.store.layout().count();
    // Of a stream one side may know the end already: digests and FINAL pin it.
    if welcome.chunks != ours && !shared.store.is_stream() {
        return Err(TransferError::Refused(
            Failure::new(
                Code::Internal,
                format!(
                    "{} counts {} chunks in the job, we {ours}",
                    peer.node, welcome.chunks
                ),
                "cancel the job and push again",
            )
            .on(&peer.node),
        ));
    }
    Ok((conn, welcome))
}

/// A control connection to `peer`, over whichever of its addresses answers first in order.
pub(super) async fn connect(
    shared: &Shared,
    peer: &Peer,
    tried_others: bool,
) -> Result<Connected, TransferError> {
    let mut failed = TransferError::Refused(
        Failure::new(
            Code::Unreachable,
            format!("{} has announced no data address", peer.node),
            "start its agent, and give it --data-listen",
        )
        .on(&peer.node),
    );
    for address in &peer.addresses {
        let hop = HopId::from_random(random());
        match connect_to(shared, peer, *address, hop, ConnKind::Control, tried_others).await {
            Ok((conn, welcome)) => {
                return Ok(Connected {
                    rtt: conn.rtt()?,
                    conn,
                    welcome,
                    hop,
                    peer: peer.clone(),
                    address: *address,
                });
            }
            // This is an answer, and would be the same at another address.
            Err(error @ (TransferError::Later | TransferError::Busy | TransferError::Refused(_))) => {
                return Err(error);
            }
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// Asks the candidates in order until one says welcome: the next at once when one has failed, and beside it when one
/// takes long. `hurry` says how long that is.
pub(super) async fn search(
    shared: Arc<Shared>,
    candidates: Vec<Peer>,
    hurry: bool,
    tried_others: bool,
) -> Result<Connected, Failure> {
    let stagger = if hurry { STAGGER } else { PATIENCE };
    let mut attempts = JoinSet::new();
    let mut failed = Failure::new(
        Code::Unreachable,
        "there is no parent to ask",
        "wait for the next plan",
    );
    let last = candidates.len().saturating_sub(1);
    for (at, peer) in candidates.into_iter().enumerate() {
        let later = Arc::new(AtomicBool::new(false));
        let begun = Instant::now();
        let tried = tried_others || at == last;
        let node = peer.node.clone();
        attempts.spawn(attempt(shared.clone(), peer, tried, later.clone()));
        let mut until = begun + stagger;
        while !attempts.is_empty() {
            match timeout_at(until, attempts.join_next()).await {
                Ok(Some(Ok(Ok(connected)))) => return Ok(connected),
                Ok(Some(Ok(Err((peer, error))))) => {
                    failed = error.into_failure(&peer.node);
                    tracing::debug!(peer = %peer.node, error = %failed, "no parent there");
                    // Another may still be under way, but it has had its time alone.
                    break;
                }
                Ok(Some(Err(_)) | None) => break,
                // Who says `later` is there, and is about to know the job: that is worth some patience.
                Err(_) if later.load(Ordering::Relaxed) && until < begun + PATIENCE => {
                    until = begun + PATIENCE;
                }
                Err(_) => {
                    let waits = if later.load(Ordering::Relaxed) {
                        TransferError::Later
                    } else {
                        TransferError::Silent(until.duration_since(begun).as_secs())
                    };
                    failed = waits.into_failure(&node);
                    break;
                }
            }
        }
    }
    while let Ok(Some(joined)) = timeout(PATIENCE, attempts.join_next()).await {
        match joined {
            Ok(Ok(connected)) => return Ok(connected),
            Ok(Err((peer, error))) => failed = error.into_failure(&peer.node),
            Err(_) => {}
        }
    }
    Err(failed)
}

async fn attempt(
    shared: Arc<Shared>,
    peer: Peer,
    tried_others: bool,
    later: Arc<AtomicBool>,
) -> Result<Connected, (Peer, TransferError)> {
    let mut pause = LATER.0;
    loop {
        match connect(&shared, &peer, tried_others).await {
            Err(TransferError::Later) => {
                later.store(true, Ordering::Relaxed);
                sleep(pause).await;
                pause = (pause * 2).min(LATER.1);
            }
            Ok(connected) => return Ok(connected),
            Err(error) => return Err((peer, error)),
        }
    }
}
