//! The side that measures: dials, asks, counts.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use stage_core::assignment::Peer;
use stage_core::bench::{Depth, LinkReading, Rtt, StreamReading, WORTH_DOUBLING};
use stage_core::failure::{Code, Failure};
use stage_core::id::{Epoch, HopId, JobId, JobKey, PlanVersion};
use stage_core::units::{ByteCount, Rate};
use stage_net::{BlockingConn, Closer, Conn, HELLO_DEADLINE, Role};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::{COUNT, Count, ECHO, GIVE, REQUEST, STANDSTILL, TAKE, give, request, set_window, take};
use crate::error::TransferError;
use crate::hello::{self, ConnKind, Hello};
use crate::plane::DataPlane;
use crate::sync::random;

/// Who answers may hear of the measurement a moment after us.
const PATIENCE: Duration = Duration::from_secs(8);
/// Between two attempts.
const AGAIN: Duration = Duration::from_millis(50);
/// While it waits, it looks this often whether it should go on.
const LOOK: Duration = Duration::from_millis(20);
/// Round trips until slow start has filled a path: 15 doublings of 14.6 kB are half a gigabyte.
const RUN_UP: u32 = 15;
/// The run-up takes no longer, whatever the path.
const LONGEST_RUN_UP: Duration = Duration::from_secs(3);

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

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Forward,
    Backward,
}

impl Work {
    async fn run(&self) -> Result<LinkReading, TransferError> {
        let depth = self.probing.depth;
        let (mut control, address) = self.reach().await?;
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
                sleep(rest).await;
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
        Ok(reading)
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
                    sleep(rest).await;
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
        let from: Option<IpAddr> = self
            .plane
            .addresses()
            .iter()
            .map(SocketAddr::ip)
            .find(|ip| ip.is_ipv4() == address.is_ipv4());
        let role = Role::Node(peer.node.clone());
        let mut conn: Conn = self.plane.net().dial(address, &role, from).await?;
        let hello = Hello {
            job: self.probing.id,
            hop: HopId::from_random(random()),
            kind: ConnKind::Probe,
            node: self.plane.node().clone(),
            rank: (Epoch(0), PlanVersion(0)),
            tried_others: false,
        };
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
        let mut conns = Vec::new();
        for _ in 0..streams {
            conns.push(self.dial(address).await?);
        }
        let burst = self.probing.depth.burst();
        let run_up = (rtt * RUN_UP).min(LONGEST_RUN_UP).max(burst / 2);
        let time = burst.max(rtt * 5);
        let (stop, bytes) = (self.stop.clone(), self.bytes.clone());
        blocking(move || {
            let mut control = control;
            let reading = run(way, conns, window, &mut control, (run_up, time), &stop)?;
            bytes.fetch_add(reading.bytes.0, Ordering::Relaxed);
            Ok((reading, control))
        })
        .await
    }
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

fn echo(control: &mut BlockingConn) -> io::Result<Duration> {
    let asked = request(ECHO, ByteCount(0));
    let begun = Instant::now();
    control.write_all(&asked)?;
    control.flush()?;
    let mut back = [0; REQUEST];
    control.read_exact(&mut back)?;
    let time = begun.elapsed();
    if back == asked {
        Ok(time)
    } else {
        Err(io::ErrorKind::InvalidData.into())
    }
}

fn count(control: &mut BlockingConn) -> io::Result<Count> {
    control.write_all(&request(COUNT, ByteCount(0)))?;
    control.flush()?;
    let mut bytes = [0; Count::LEN];
    control.read_exact(&mut bytes)?;
    Ok(Count::decode(&bytes))
}

/// Ends connections when the burst is over, however it ends: threads in the scope wait for that.
struct Ends(Vec<Closer>);

impl Ends {
    fn retransmissions(&self) -> u64 {
        self.0.iter().map(Closer::retransmissions).sum()
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.iter().for_each(Closer::close);
    }
}

fn run(
    way: Way,
    mut conns: Vec<BlockingConn>,
    window: ByteCount,
    control: &mut BlockingConn,
    (run_up, time): (Duration, Duration),
    stop: &CancellationToken,
) -> io::Result<StreamReading> {
    let streams = conns.len() as u16;
    let moved = AtomicU64::new(0);
    let epoch = Instant::now();
    let ends = conns
        .iter()
        .map(BlockingConn::closer)
        .collect::<io::Result<Vec<_>>>()?;
    for conn in &mut conns {
        conn.set_read_timeout(Some(STANDSTILL))?;
        conn.set_write_timeout(Some(STANDSTILL))?;
        let what = if way == Way::Forward { TAKE } else { GIVE };
        set_window(conn, window)?;
        conn.write_all(&request(what, window))?;
        conn.flush()?;
    }
    std::thread::scope(|scope| {
        let ends = Ends(ends);
        for mut conn in conns {
            let moved = &moved;
            std::thread::Builder::new()
                .name("probe".to_owned())
                .spawn_scoped(scope, move || {
                    // It ends when its connection is closed, which is no error; a slower stream shows in the rate.
                    let _ = match way {
                        Way::Forward => give(&mut conn, moved),
                        Way::Backward => take(&mut conn, moved),
                    };
                })?;
        }
        let mut sample = || {
            let theirs = count(control)?;
            Ok::<_, io::Error>(match way {
                Way::Forward => (theirs.received, theirs.at, ends.retransmissions()),
                Way::Backward => (
                    moved.load(Ordering::Relaxed),
                    epoch.elapsed(),
                    theirs.retransmissions,
                ),
            })
        };
        let before = sample()?;
        wait(run_up, stop)?;
        let first = sample()?;
        wait(time, stop)?;
        let last = sample()?;
        drop(ends);
        Ok(StreamReading {
            streams,
            window,
            rate: Rate::of(
                ByteCount(last.0.saturating_sub(first.0)),
                last.1.saturating_sub(first.1),
            ),
            bytes: ByteCount(moved.load(Ordering::Relaxed)),
            retransmissions: last.2.saturating_sub(before.2),
        })
    })
}

fn wait(time: Duration, stop: &CancellationToken) -> io::Result<()> {
    let end = Instant::now() + time;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        if stop.is_cancelled() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        std::thread::sleep(left.min(LOOK));
    }
}
