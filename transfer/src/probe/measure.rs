//! The side that measures: dials, asks, counts.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use stage_core::assignment::Peer;
use stage_core::bench::{Depth, Keep, LinkReading, Rtt, StreamReading, Trace, WORTH_DOUBLING};
use stage_core::failure::{Code, Failure};
use stage_core::id::{CongestionControl, Epoch, HopId, JobId, JobKey, PlanVersion};
use stage_core::units::{ByteCount, Rate};
use stage_net::{BlockingConn, Conn, HELLO_DEADLINE, Role};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::bursts::{Way, echo, keep_here, keep_there, run};
use super::sink::Sink;
use super::{IDLE, STANDSTILL};
use crate::error::TransferError;
use crate::hello::{self, ConnKind, Hello};
use crate::plane::DataPlane;
use crate::root::Roots;
use crate::sync::random;

/// Who answers may hear of the measurement a moment after us.
const PATIENCE: Duration = Duration::from_secs(8);
/// Between two attempts.
const AGAIN: Duration = Duration::from_millis(50);
/// Round trips until what is sent is what the path carries: 15 doublings of 14.6 kB are half a gigabyte, and what BBR's
/// start-up sent too much is mended in about as many again.
const RUN_UP: u32 = 30;
/// The run-up takes no longer, whatever the path.
const LONGEST_RUN_UP: Duration = Duration::from_secs(3);
/// Round trips of a burst that count, at least: a part of it should have several (`bursts::middle`).
const ROUNDS: u32 = 20;

/// What a measurement needs to know.
#[derive(Debug, Clone)]
pub struct Probing {
    /// Which.
    pub id: JobId,
    /// Its key.
    pub key: JobKey,
    /// With whom.
    pub peer: Peer,
    /// How much.
    pub depth: Depth,
    /// Each count of streams with each window.
    pub sweep: bool,
    /// At which ends what comes is written to disk, too.
    pub keep: Keep,
    /// Where this node writes then.
    pub roots: Option<Arc<Roots>>,
    /// What both ends' connections ask for; `None`: each host's own.
    pub control: Option<CongestionControl>,
}

/// Measures the way to a peer that answers this measurement. `bytes` counts what was moved.
///
/// # Errors
/// The peer cannot be reached, does not answer, or a connection broke; [`Code::Cancelled`] after `stop`.
pub async fn measure(
    plane: Arc<DataPlane>,
    probing: Probing,
    bytes: Arc<AtomicU64>,
    stop: CancellationToken,
) -> Result<LinkReading, Failure> {
    let peer = probing.peer.node.clone();
    let work = Work {
        plane,
        probing,
        bytes,
        stop: stop.clone(),
    };
    // Handshakes make it large.
    match stop.run_until_cancelled(Box::pin(work.run())).await {
        Some(reading) => reading.map_err(|error| error.into_failure(&peer)),
        None => Err(Failure::new(Code::Cancelled, "the measurement was ended", "")),
    }
}

struct Work {
    plane: Arc<DataPlane>,
    probing: Probing,
    bytes: Arc<AtomicU64>,
    stop: CancellationToken,
}

impl Work {
    async fn run(&self) -> Result<LinkReading, TransferError> {
        let depth = self.probing.depth;
        let (mut control, address) = match self.reach().await {
            Ok(reached) => reached,
            Err(error) => return Err(self.explained(error).await),
        };
        let (rtt, mut back) = {
            let echoes = depth.echoes();
            blocking(move || {
                let mut times = Vec::new();
                // The first wakes threads and fills caches.
                control.set_read_timeout(Some(STANDSTILL))?;
                echo(&mut control)?;
                for _ in 0..echoes {
                    times.push(echo(&mut control)?);
                }
                Ok((Rtt::of(times), control))
            })
            .await?
        };
        let mut reading = LinkReading {
            rtt,
            trace: self.trace(address.ip(), rtt.min).await,
            control: self.probing.control.clone(),
            ..LinkReading::default()
        };
        if self.probing.sweep {
            self.sweep(&mut reading, address, back).await?;
            return Ok(reading);
        }
        let mut going = [true, true];
        let mut rest = Duration::ZERO;
        let mut streams = 1;
        while streams <= depth.most_streams() && going != [false, false] {
            for (way, goes) in [Way::Forward, Way::Backward].into_iter().zip(&mut going) {
                if !*goes {
                    continue;
                }
                back = self.rest(back, rest).await?;
                let begun = Instant::now();
                let measured;
                (measured, back) = self
                    .burst(way, (streams, ByteCount(0)), address, rtt.median, back)
                    .await?;
                let readings = match way {
                    Way::Forward => &mut reading.forward,
                    Way::Backward => &mut reading.backward,
                };
                let best = LinkReading::best(readings).map_or(Rate::ZERO, |best| best.rate);
                *goes = measured.rate > best.times(WORTH_DOUBLING);
                readings.push(measured);
                rest = begun.elapsed() * depth.rest();
            }
            streams *= 2;
        }
        for (way, wanted) in [
            (Way::Forward, self.probing.keep.there),
            (Way::Backward, self.probing.keep.here),
        ] {
            if !wanted {
                continue;
            }
            back = self.rest(back, rest).await?;
            let begun = Instant::now();
            let readings = match way {
                Way::Forward => &reading.forward,
                Way::Backward => &reading.backward,
            };
            let streams = LinkReading::enough(readings).unwrap_or(1);
            let kept;
            (kept, back) = match self.keep(way, streams, address, rtt.median, back).await {
                Ok(kept) => kept,
                Err(error) => {
                    // What was measured so far is worth having all the same.
                    tracing::info!(peer = %self.probing.peer.node, %error, "what a disk takes from the network could not be measured");
                    break;
                }
            };
            match way {
                Way::Forward => reading.forward_kept = kept,
                Way::Backward => reading.backward_kept = kept,
            }
            rest = begun.elapsed() * depth.rest();
        }
        // Whoever uses these links next finds them rested.
        sleep(rest).await;
        Ok(reading)
    }

    /// Leaves the way in peace, and says now and then that we are here: who answers ends a connection that says nothing.
    async fn rest(
        &self,
        mut control: BlockingConn,
        mut left: Duration,
    ) -> Result<BlockingConn, TransferError> {
        while !left.is_zero() {
            let part = left.min(IDLE / 4);
            sleep(part).await;
            left -= part;
            control = blocking(move || {
                echo(&mut control)?;
                Ok(control)
            })
            .await?;
        }
        Ok(control)
    }

    /// Where a connection stands still because its large packets vanish, says that instead.
    async fn explained(&self, error: TransferError) -> TransferError {
        let stands_still = matches!(
            error,
            TransferError::Silent(_) | TransferError::Net(_) | TransferError::Io(_)
        );
        let Some(address) = self.probing.peer.addresses.first().filter(|_| stands_still) else {
            return error;
        };
        let trace = self.trace(address.ip(), Duration::ZERO).await;
        if !trace.swallows {
            return error;
        }
        let peer = &self.probing.peer.node;
        TransferError::Refused(Failure::new(
            Code::Unreachable,
            format!(
                "packets of more than {} bytes vanish on the way to {peer}, and connections stand still: {error}",
                trace.mtu
            ),
            "sysctl -w net.ipv4.tcp_mtu_probing=1 on both nodes, or mend the MTU on the way",
        ))
    }

    /// The routers on the way, and the largest packet that passes. Nothing is known where that cannot be asked.
    async fn trace(&self, to: IpAddr, rtt: Duration) -> Trace {
        let from = self.from(to);
        let traced = blocking(move || Ok(stage_net::route::trace(from, to, rtt))).await;
        match traced {
            Ok(Ok(traced)) => Trace {
                routers: traced.hops,
                reached: traced.reached,
                mtu: traced.mtu.unwrap_or(0),
                swallows: traced.swallows,
                from_second: false,
            },
            Ok(Err(error)) => {
                tracing::debug!(%to, %error, "the way was not traced");
                Trace::default()
            }
            Err(_) => Trace::default(),
        }
    }

    /// Our address to that one.
    fn from(&self, to: IpAddr) -> Option<IpAddr> {
        self.plane
            .addresses()
            .iter()
            .map(SocketAddr::ip)
            .find(|ip| ip.is_ipv4() == to.is_ipv4())
    }

    /// Each count of streams with each window, both ways.
    async fn sweep(
        &self,
        reading: &mut LinkReading,
        address: SocketAddr,
        mut control: BlockingConn,
    ) -> Result<(), TransferError> {
        let depth = self.probing.depth;
        let (counts, windows) = depth.grid();
        let mut rest = Duration::ZERO;
        for window in windows {
            for streams in counts {
                for way in [Way::Forward, Way::Backward] {
                    control = self.rest(control, rest).await?;
                    let begun = Instant::now();
                    let measured;
                    (measured, control) = self
                        .burst(way, (*streams, *window), address, reading.rtt.median, control)
                        .await?;
                    match way {
                        Way::Forward => reading.forward.push(measured),
                        Way::Backward => reading.backward.push(measured),
                    }
                    rest = begun.elapsed() * depth.rest();
                }
            }
        }
        Ok(())
    }

    /// The first connection, over whichever of the peer's addresses answers.
    async fn reach(&self) -> Result<(BlockingConn, SocketAddr), TransferError> {
        let begun = Instant::now();
        loop {
            let mut last = TransferError::Refused(
                Failure::new(
                    Code::Unreachable,
                    format!("{} has announced no data address", self.probing.peer.node),
                    "start its agent, and give it --data-listen",
                )
                .on(&self.probing.peer.node),
            );
            for address in &self.probing.peer.addresses {
                match self.dial(*address).await {
                    Ok(conn) => return Ok((conn, *address)),
                    Err(error) => last = error,
                }
            }
            if !matches!(last, TransferError::Later) || begun.elapsed() > PATIENCE {
                return Err(last);
            }
            sleep(AGAIN).await;
        }
    }

    async fn dial(&self, address: SocketAddr) -> Result<BlockingConn, TransferError> {
        let peer = &self.probing.peer;
        let from = self.from(address.ip());
        let role = Role::Node(peer.node.clone());
        let mut conn: Conn = self.plane.net().dial(address, &role, from).await?;
        let hello = Hello {
            job: self.probing.id,
            hop: HopId::from_random(random()),
            kind: ConnKind::Probe,
            node: self.plane.node().clone(),
            rank: (Epoch(0), PlanVersion(0)),
            tried_others: false,
            control: self.probing.control.clone(),
        };
        if let Some(control) = &hello.control {
            conn.set_congestion_control(control.as_str()).map_err(|error| {
                TransferError::Io(io::Error::new(
                    error.kind(),
                    format!("congestion control {control}: {error}"),
                ))
            })?;
        }
        timeout(
            HELLO_DEADLINE,
            hello::ask(&mut conn, &self.probing.key, &hello, &peer.node),
        )
        .await
        .map_err(|_| TransferError::Silent(HELLO_DEADLINE.as_secs()))??;
        Ok(conn.into_blocking()?)
    }

    /// So many streams at full rate for a while.
    async fn burst(
        &self,
        way: Way,
        (streams, window): (u16, ByteCount),
        address: SocketAddr,
        rtt: Duration,
        control: BlockingConn,
    ) -> Result<(StreamReading, BlockingConn), TransferError> {
        let conns = self.streams(streams, address).await?;
        let burst = self.probing.depth.burst();
        let run_up = run_up(rtt).max(burst / 2);
        let time = burst.max(rtt * ROUNDS);
        let (stop, bytes) = (self.stop.clone(), self.bytes.clone());
        blocking(move || {
            let mut control = control;
            let reading = run(way, conns, window, &mut control, (run_up, time), &stop)?;
            bytes.fetch_add(reading.bytes.0, Ordering::Relaxed);
            Ok((reading, control))
        })
        .await
    }

    async fn streams(&self, count: u16, address: SocketAddr) -> Result<Vec<BlockingConn>, TransferError> {
        let mut conns = Vec::new();
        for _ in 0..count {
            conns.push(self.dial(address).await?);
        }
        Ok(conns)
    }

    /// So many streams at full rate, and what comes goes to a disk; `None` where that has no room.
    async fn keep(
        &self,
        way: Way,
        streams: u16,
        address: SocketAddr,
        rtt: Duration,
        control: BlockingConn,
    ) -> Result<(Option<StreamReading>, BlockingConn), TransferError> {
        let depth = self.probing.depth;
        let run_up = run_up(rtt);
        let sink = match (way, &self.probing.roots) {
            (Way::Backward, Some(roots)) => {
                let roots = roots.clone();
                let opened = blocking(move || Ok(Sink::open(&roots, depth.disk_bytes(), run_up))).await?;
                match opened.map_err(TransferError::Refused)? {
                    Some(sink) => Some(sink),
                    None => return Ok((None, control)),
                }
            }
            (Way::Backward, None) => return Ok((None, control)),
            (Way::Forward, _) => None,
        };
        let conns = self.streams(streams, address).await?;
        let time = depth.keep_time().max(rtt * 5) + run_up;
        let (stop, bytes) = (self.stop.clone(), self.bytes.clone());
        blocking(move || {
            let mut control = control;
            let kept = match sink {
                Some(sink) => keep_here(conns, &sink, time, &stop)?,
                None => keep_there(conns, &mut control, (depth.disk_bytes(), run_up, time), &stop)?,
            };
            if let Some(kept) = &kept {
                bytes.fetch_add(kept.bytes.0, Ordering::Relaxed);
            }
            Ok((kept, control))
        })
        .await
    }
}

/// How long slow start takes, at most.
fn run_up(rtt: Duration) -> Duration {
    (rtt * RUN_UP).min(LONGEST_RUN_UP)
}

/// Runs what blocks on a thread that may.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, TransferError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => Ok(done?),
        // A panic below is a fault of ours and goes on up; started blocking work is never cancelled.
        Err(error) => std::panic::resume_unwind(error.into_panic()),
    }
}
