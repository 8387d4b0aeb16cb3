//! The blocking half of the side that measures: threads that fill connections for a while, and what is counted meanwhile.

use std::io::{self, Read as _, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use stage_core::bench::StreamReading;
use stage_core::units::{ByteCount, Rate};
use stage_net::{BlockingConn, Closer};
use tokio_util::sync::CancellationToken;

use super::sink::{self, Sink};
use super::{
    COUNT, Count, DONE, ECHO, GIVE, IDLE, KEEP, REQUEST, STANDSTILL, TAKE, give, place, request, set_window,
    take,
};

/// While it waits, it looks this often whether it should go on.
const LOOK: Duration = Duration::from_millis(20);

/// A burst is looked at in so many parts of equal length.
const PARTS: u32 = 5;

/// Which way bytes go.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Way {
    /// To who answers.
    Forward,
    /// From there.
    Backward,
}

/// The mean of all but the slowest and the fastest. Where a segment is missing, what comes behind it is held back by the
/// kernel, and comes all at once when it was sent again: over 100 ms that makes parts in which more comes than can.
fn middle(mut parts: Vec<Rate>) -> Rate {
    parts.sort_unstable_by(|a, b| a.bytes_per_second().total_cmp(&b.bytes_per_second()));
    let middle = parts.get(1..parts.len().saturating_sub(1)).unwrap_or_default();
    let sum: f64 = middle.iter().map(|rate| rate.bytes_per_second()).sum();
    Rate::from_bytes_per_second(sum / middle.len().max(1) as f64)
}

pub(super) fn echo(control: &mut BlockingConn) -> io::Result<Duration> {
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

/// So many streams at full rate, and what arrived meanwhile.
pub(super) fn run(
    way: Way,
    conns: Vec<BlockingConn>,
    window: ByteCount,
    control: &mut BlockingConn,
    (run_up, time): (Duration, Duration),
    stop: &CancellationToken,
) -> io::Result<StreamReading> {
    let streams = conns.len() as u16;
    let moved = AtomicU64::new(0);
    let epoch = Instant::now();
    let what = if way == Way::Forward { TAKE } else { GIVE };
    // It ends when its connection is closed, which is no error; a slower stream shows in the rate.
    let work = |conn: &mut BlockingConn| {
        let _ = match way {
            Way::Forward => give(conn, &moved),
            Way::Backward => take(conn, &moved),
        };
    };
    let (before, samples) = with_streams(conns, (what, window), work, |ends| {
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
        let mut samples = vec![sample()?];
        for _ in 0..PARTS {
            wait(time / PARTS, stop)?;
            samples.push(sample()?);
        }
        Ok((before, samples))
    })?;
    let last = samples.last().map_or(before.2, |last| last.2);
    let parts = samples.windows(2).map(|pair| {
        let bytes = ByteCount(pair[1].0.saturating_sub(pair[0].0));
        Rate::of(bytes, pair[1].1.saturating_sub(pair[0].1))
    });
    Ok(StreamReading {
        streams,
        window,
        rate: middle(parts.collect()),
        bytes: ByteCount(moved.into_inner()),
        retransmissions: last.saturating_sub(before.2),
    })
}

/// Streams to the peer, which writes what comes; `None` where it has no room.
pub(super) fn keep_there(
    conns: Vec<BlockingConn>,
    control: &mut BlockingConn,
    (most, run_up, time): (ByteCount, Duration, Duration),
    stop: &CancellationToken,
) -> io::Result<Option<StreamReading>> {
    control.write_all(&place(most, run_up))?;
    control.flush()?;
    let mut answer = [0; REQUEST];
    control.read_exact(&mut answer)?;
    if answer[1] == 0 {
        return Ok(None);
    }
    let streams = conns.len() as u16;
    let moved = AtomicU64::new(0);
    let work = |conn: &mut BlockingConn| {
        let _ = give(conn, &moved);
    };
    let again = with_streams(conns, (KEEP, ByteCount(0)), work, |ends| {
        wait(time, stop)?;
        Ok(ends.retransmissions())
    })?;
    // What is not durable yet takes its time.
    control.set_read_timeout(Some(IDLE))?;
    control.write_all(&request(DONE, ByteCount(0)))?;
    control.flush()?;
    let mut bytes = [0; Count::LEN];
    control.read_exact(&mut bytes)?;
    control.set_read_timeout(Some(STANDSTILL))?;
    let count = Count::decode(&bytes);
    let counted = (ByteCount(count.received), count.at);
    Ok(kept(streams, counted, moved.into_inner(), again))
}

/// Streams from the peer, and what comes is written here.
pub(super) fn keep_here(
    conns: Vec<BlockingConn>,
    sink: &Sink,
    time: Duration,
    stop: &CancellationToken,
) -> io::Result<Option<StreamReading>> {
    let streams = conns.len() as u16;
    let work = |conn: &mut BlockingConn| {
        let _ = sink.keep(conn);
    };
    with_streams(conns, (GIVE, ByteCount(0)), work, |_| wait(time, stop))?;
    let counted = sink.finish()?;
    Ok(kept(streams, counted, counted.0.0, 0))
}

fn kept(streams: u16, counted: (ByteCount, Duration), bytes: u64, again: u64) -> Option<StreamReading> {
    Some(StreamReading {
        streams,
        window: ByteCount(0),
        rate: sink::rate(counted)?,
        bytes: ByteCount(bytes),
        retransmissions: again,
    })
}

/// Asks each connection for something, does the work of each on a thread of its own until `meanwhile` is over, and ends
/// them.
fn with_streams<T>(
    mut conns: Vec<BlockingConn>,
    (what, window): (u8, ByteCount),
    work: impl Fn(&mut BlockingConn) + Sync,
    meanwhile: impl FnOnce(&Ends) -> io::Result<T>,
) -> io::Result<T> {
    let ends = conns
        .iter()
        .map(BlockingConn::closer)
        .collect::<io::Result<Vec<_>>>()?;
    for conn in &mut conns {
        conn.set_read_timeout(Some(STANDSTILL))?;
        conn.set_write_timeout(Some(STANDSTILL))?;
        set_window(conn, window)?;
        conn.write_all(&request(what, window))?;
        conn.flush()?;
    }
    std::thread::scope(|scope| {
        let ends = Ends(ends);
        for mut conn in conns {
            let work = &work;
            std::thread::Builder::new()
                .name("probe".to_owned())
                .spawn_scoped(scope, move || work(&mut conn))?;
        }
        meanwhile(&ends)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_held_back_does_not_count_twice() {
        let rates = |mb: &[f64]| {
            mb.iter()
                .map(|mb| Rate::from_bytes_per_second(mb * 1e6))
                .collect()
        };
        let middle = |mb: &[f64]| middle(rates(mb)).bytes_per_second() / 1e6;
        assert!((middle(&[20.0, 50.0, 35.0, 34.0, 36.0]) - 35.0).abs() < 1e-9);
        assert!((middle(&[35.0; 5]) - 35.0).abs() < 1e-9);
        assert!(middle(&[]).abs() < 1e-9, "nothing was seen");
    }
}
