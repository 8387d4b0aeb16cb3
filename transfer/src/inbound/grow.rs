//! Whether a hop should have another stream. A plan reckons with windows, round trips and loss as it knows them; where a
//! hop stays under its forecast although neither its disks nor its processors nor its parent hold it back, one stream
//! more is tried, and kept only if it brings something.

use std::time::Duration;

use stage_core::chunk::BLOCK;
use stage_core::units::Rate;

/// A hop is under its forecast below this share of it.
const UNDER: f64 = 0.9;
/// A stream more must bring at least this.
const WORTH: f64 = 1.03;
/// The threads of a hop that the network holds back wait for it at least this share of their time, at either end.
const HELD: f64 = 0.5;
/// The rate is taken over so long at least, and a hop gets so long before anything is tried.
const LOOK: Duration = Duration::from_secs(2);
/// And until so many bytes have come for each stream, or so long at most: bytes are counted by blocks, and 3 % must not be
/// one of them more or less.
const ENOUGH: (u64, Duration) = (100 * BLOCK as u64, Duration::from_secs(10));
/// A new stream gets so long, or so many round trips, until its rate counts.
const SETTLE: (Duration, u32) = (Duration::from_secs(1), 20);
/// After a try in vain, until the next one; doubled each time.
const REST: Duration = Duration::from_secs(20);
/// What would be over before a new stream has shown what it brings is left as it is.
const WORTHWHILE: Duration = Duration::from_secs(6);

/// What a hop may grow to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Room {
    /// So many streams at most.
    pub(super) cap: u16,
    /// The forecast of the hop.
    pub(super) wanted: Rate,
}

/// What went on since the last sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sample {
    /// How long that was.
    pub(super) time: Duration,
    /// Bytes that came.
    pub(super) bytes: u64,
    /// Streams that are open.
    pub(super) streams: u16,
    /// The share of their threads' time that went by in waiting for bytes.
    pub(super) starved: f64,
    /// The share of its threads' time in which the parent waited for room in its sockets.
    pub(super) pushed: f64,
    /// Bytes that are still to come, if anybody knows.
    pub(super) left: Option<u64>,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Stay,
    /// One more.
    Add,
    /// The one that came last goes.
    Drop,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    /// How things are is looked at.
    Looking,
    /// A stream was added; before, this was the rate.
    Trying { before: f64, until: Duration },
    /// That was in vain.
    Resting { until: Duration },
}

/// Decides for one hop, sample by sample.
#[derive(Debug)]
pub(super) struct Grower {
    room: Room,
    rtt: Duration,
    state: State,
    /// Time that has gone by in all samples.
    now: Duration,
    /// Of the present state: time and bytes that count, and time in which the network held the hop back.
    time: Duration,
    bytes: u64,
    held: Duration,
    rest: Duration,
}

impl Grower {
    pub(super) fn new(room: Room, rtt: Duration) -> Self {
        Self {
            room,
            rtt,
            state: State::Looking,
            now: Duration::ZERO,
            time: Duration::ZERO,
            bytes: 0,
            held: Duration::ZERO,
            rest: REST,
        }
    }

    fn begin(&mut self, state: State) {
        self.state = state;
        (self.time, self.bytes, self.held) = (Duration::ZERO, 0, Duration::ZERO);
    }

    /// Takes a sample in.
    pub(super) fn step(&mut self, sample: &Sample) -> Step {
        self.now += sample.time;
        match self.state {
            State::Resting { until } | State::Trying { until, .. } if self.now <= until => return Step::Stay,
            State::Resting { .. } => self.begin(State::Looking),
            State::Looking | State::Trying { .. } => {}
        }
        self.time += sample.time;
        self.bytes += sample.bytes;
        if sample.starved >= HELD && sample.pushed >= HELD {
            self.held += sample.time;
        }
        let has_enough = self.bytes >= ENOUGH.0 * u64::from(sample.streams) || self.time >= ENOUGH.1;
        if self.time < LOOK || !has_enough {
            return Step::Stay;
        }
        let rate = self.bytes as f64 / self.time.as_secs_f64();
        let is_held = self.held >= self.time.mul_f64(HELD);
        if let State::Trying { before, .. } = self.state {
            if rate >= before * WORTH {
                self.begin(State::Looking);
                return Step::Stay;
            }
            // Where something else holds it back by now, nobody knows what the stream would have brought; it goes all the
            // same: the fewer the better.
            let until = self.now + self.rest;
            self.rest *= 2;
            self.begin(State::Resting { until });
            return if sample.streams > 1 {
                Step::Drop
            } else {
                Step::Stay
            };
        }
        self.begin(State::Looking);
        let left = sample.left.map_or(f64::INFINITY, |left| left as f64 / rate);
        let is_under = rate < self.room.wanted.bytes_per_second() * UNDER;
        if !is_held || !is_under || sample.streams >= self.room.cap || left < WORTHWHILE.as_secs_f64() {
            return Step::Stay;
        }
        let settle = SETTLE.0.max(self.rtt.saturating_mul(SETTLE.1));
        self.begin(State::Trying {
            before: rate,
            until: self.now + settle,
        });
        Step::Add
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Room = Room {
        cap: 4,
        wanted: Rate::UNLIMITED,
    };

    fn room(mb: f64) -> Room {
        Room {
            wanted: Rate::from_bytes_per_second(mb * 1e6),
            ..ROOM
        }
    }

    fn sample(streams: u16, mb: u64) -> Sample {
        Sample {
            time: Duration::from_secs(1),
            bytes: mb * 1_000_000,
            streams,
            starved: 0.9,
            pushed: 0.9,
            left: None,
        }
    }

    /// Runs a hop whose rate follows from its streams; gives the streams second by second.
    fn run(room: Room, seconds: u32, rate: impl Fn(u16) -> u64) -> Vec<u16> {
        let mut grower = Grower::new(room, Duration::from_millis(1));
        let mut streams = 1;
        (0..seconds)
            .map(|_| {
                match grower.step(&sample(streams, rate(streams))) {
                    Step::Stay => {}
                    Step::Add => streams += 1,
                    Step::Drop => streams -= 1,
                }
                streams
            })
            .collect()
    }

    #[test]
    fn streams_that_windows_hold_back_grow_up_to_the_forecast() {
        let streams = run(room(100.0), 40, |streams| 31 * u64::from(streams));
        assert_eq!(streams.last(), Some(&3), "three carry 93 of 100: {streams:?}");
        // And no further than the cap.
        let streams = run(room(1000.0), 60, |streams| 10 * u64::from(streams));
        assert_eq!(streams.last(), Some(&4), "{streams:?}");
    }

    #[test]
    fn a_stream_that_brings_nothing_goes_and_the_next_try_takes_longer() {
        let streams = run(room(100.0), 300, |_| 50);
        assert!(streams.contains(&2) && !streams.contains(&3), "{streams:?}");
        assert_eq!(streams.last(), Some(&1));
        let tries = streams.windows(2).filter(|pair| pair[0] < pair[1]).count();
        assert!((3..=5).contains(&tries), "{tries}");
        // Less than 3 % is nothing.
        let streams = run(room(100.0), 20, |streams| 50 + u64::from(streams > 1));
        assert_eq!(streams.last(), Some(&1), "{streams:?}");
    }

    #[test]
    fn a_hop_that_does_as_forecast_is_left_alone() {
        assert_eq!(run(room(50.0), 60, |_| 46), vec![1; 60]);
    }

    #[test]
    fn what_a_stream_cannot_mend_is_left_alone() {
        type Change = fn(&mut Sample);
        let cases: [(&str, Change); 3] = [
            ("its own disk or processor", |sample| sample.starved = 0.2),
            ("a parent that has nothing to send", |sample| sample.pushed = 0.1),
            ("nearly done", |sample| sample.left = Some(20_000_000)),
        ];
        for (what, change) in cases {
            let mut grower = Grower::new(room(100.0), Duration::ZERO);
            for _ in 0..30 {
                let mut sample = sample(1, 10);
                change(&mut sample);
                assert_eq!(grower.step(&sample), Step::Stay, "{what}");
            }
        }
    }

    #[test]
    fn over_a_long_way_a_new_stream_gets_its_time() {
        let mut grower = Grower::new(room(100.0), Duration::from_millis(500));
        let second = sample(1, 10);
        assert_eq!(
            [(); 3].map(|()| grower.step(&second)),
            [Step::Stay, Step::Stay, Step::Add]
        );
        // Ten seconds of slow start bring nothing yet, and are not held against it.
        for _ in 0..10 {
            assert_eq!(grower.step(&sample(2, 10)), Step::Stay);
        }
        for _ in 0..3 {
            assert_eq!(grower.step(&sample(2, 20)), Step::Stay);
        }
        assert_eq!(grower.state, State::Looking);
    }
}
