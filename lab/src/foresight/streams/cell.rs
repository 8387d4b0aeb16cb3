//! One cell of the matrix: a path, and what counts of streams carry over it.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stage_core::cost::{Control, SEGMENT_BYTES, StreamPath};
use stage_core::plan::WindowLimits;
use stage_core::units::ByteCount;
use stage_lab::cluster::{Cluster, Setup};
use stage_lab::{Lab, LabError};

use super::super::parsed;
use super::Streams;
use crate::bench::{PUSH, Spread, copies, one_path, random_file, remove, rounded, word, word_of};

const COUNTS: [u16; 7] = [1, 2, 4, 8, 16, 32, 64];

/// Two doublings that bring less than this each end the walk.
const WORTH: f64 = 1.03;

/// A count below this share of the best after one round is not tried again.
const HOPE: [f64; 2] = [0.85, 0.7];

/// How near the best `auto` must come, without loss and with.
const ASKED: [f64; 2] = [0.95, 0.80];

/// How often the receiver's interface is looked at.
const SAMPLE: Duration = Duration::from_millis(20);

/// More than control traffic; less than a chunk.
const SIGN: u64 = 256 << 10;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Cell {
    /// Microseconds.
    rtt_us: u64,
    /// In ten thousandths: 1 is 0.01 %.
    loss: u32,
    /// MiB.
    window: u64,
    control: &'static str,
}

/// The whole matrix.
pub(super) fn all() -> Vec<Cell> {
    let mut cells = Vec::new();
    for control in ["cubic", "bbr"] {
        for rtt_us in [100, 15_000, 100_000] {
            for loss in [0, 1, 10] {
                for window in [1, 4, 16] {
                    cells.push(Cell {
                        rtt_us,
                        loss,
                        window,
                        control,
                    });
                }
            }
        }
    }
    cells
}

/// Where something can go wrong: near and far, each window where it matters, each loss under both controls.
const CHOSEN: [(u64, u32, u64, &str); 16] = [
    (100, 0, 4, "cubic"),
    (100, 10, 4, "cubic"),
    (15_000, 0, 1, "cubic"),
    (15_000, 0, 4, "cubic"),
    (15_000, 1, 4, "cubic"),
    (15_000, 10, 4, "cubic"),
    (100_000, 0, 1, "cubic"),
    (100_000, 0, 4, "cubic"),
    (100_000, 0, 16, "cubic"),
    (100_000, 1, 16, "cubic"),
    (100_000, 10, 16, "cubic"),
    (100, 0, 1, "bbr"),
    (15_000, 0, 1, "bbr"),
    (15_000, 10, 4, "bbr"),
    (100_000, 0, 4, "bbr"),
    (100_000, 1, 4, "bbr"),
];

/// What a count carried.
#[derive(Debug, Default)]
struct Tried {
    /// 0: stage's own choice.
    count: u16,
    used: Vec<u64>,
    /// Mbit/s.
    rates: Vec<f64>,
}

impl Tried {
    fn median(&self) -> f64 {
        Spread::of(self.rates.iter().copied()).map_or(0.0, |rates| rates.median)
    }
}

impl Cell {
    pub(super) fn name(&self) -> String {
        format!(
            "{}ms-{}%-{}MiB-{}",
            self.rtt_us as f64 / 1e3,
            f64::from(self.loss) / 100.0,
            self.window,
            self.control
        )
    }

    pub(super) fn is_chosen(&self) -> bool {
        CHOSEN.contains(&(self.rtt_us, self.loss, self.window, self.control))
    }

    pub(super) fn rtt(&self) -> Duration {
        Duration::from_micros(self.rtt_us)
    }

    /// How long a control that slows down at each loss takes from the window with which slow start ends down to its mean.
    /// It multiplies it by 0.7 (RFC 9438) at each loss, and with the window shrinks the rate of losses: the times between
    /// them are a geometric series, whose last term is that of the mean window.
    pub(super) fn settles(&self) -> Duration {
        if self.control != "cubic" || self.loss == 0 {
            return Duration::ZERO;
        }
        let windows = WindowLimits {
            receive: ByteCount(self.window << 20),
            send: ByteCount(self.window << 20),
        };
        let loss = f64::from(self.loss) / 1e4;
        let path = StreamPath {
            rtt: self.rtt(),
            sender: windows,
            receiver: windows,
            loss,
            control: Control::Loss,
            encrypted: true,
        };
        let lost_a_second = loss * path.rate().0.bytes_per_second() / SEGMENT_BYTES;
        Duration::from_secs_f64(1.0 / lost_a_second / (1.0 - 0.7))
    }

    fn topology(&self, megabits: u32) -> String {
        one_path(
            &format!("{megabits} Mbit/s"),
            &format!("{} ms", self.rtt_us as f64 / 1e3),
            f64::from(self.loss) / 1e4,
            &format!("congestion_control = \"{}\"\n", self.control),
        )
    }

    /// Measures it.
    ///
    /// # Errors
    /// The kernel does not have the congestion control, or a lab or a push that failed.
    pub(super) fn measure(&self, streams: &Streams, stage: &Path) -> Result<Value, LabError> {
        let known =
            fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control").unwrap_or_default();
        if !known.split_whitespace().any(|name| name == self.control) {
            return Err(LabError::Answer {
                tool: "this kernel",
                wanted: format!("congestion control {}; it has {}", self.control, known.trim()),
            });
        }
        let began = Instant::now();
        let text = self.topology(streams.megabits);
        let lab = Lab::up(&parsed("streams", &text))?;
        for node in ["near", "far"] {
            lab.windows(node, ByteCount(self.window << 20))?;
            lab.congestion_control(node, self.control)?;
        }
        let cluster = Cluster::up(&lab, &Setup::new(stage, &text, streams.common.security()))?;
        streams.know.learn(&cluster)?;
        let file = random_file(&lab, "near", "payload", streams.size(self))?;
        let run = |tried: &mut Tried| -> Result<(), LabError> {
            let (rate, used) = self.push(streams, &cluster, word(&file), tried.count)?;
            tried.rates.push(rate);
            tried.used.push(used);
            Ok(())
        };

        let lossy = usize::from(self.loss > 0);
        // The first push of a cluster meets fresh pages and makes its first connections: it does not count.
        run(&mut Tried::default())?;
        let mut auto = Tried::default();
        run(&mut auto)?;
        let mut sweep: Vec<Tried> = Vec::new();
        for count in COUNTS {
            let mut tried = Tried {
                count,
                ..Tried::default()
            };
            run(&mut tried)?;
            sweep.push(tried);
            let flat = |two: &[Tried]| two[1].median() < two[0].median() * WORTH;
            // A count of stage's own is walked up to in any case.
            let chosen = auto.used.first().copied().unwrap_or(0);
            if sweep.len() >= 3 && u64::from(count) >= chosen && sweep[sweep.len() - 3..].windows(2).all(flat)
            {
                break;
            }
        }
        let rounds = streams.rounds.unwrap_or(if self.loss > 0 { 5 } else { 3 });
        let first = sweep.iter().map(Tried::median).fold(auto.median(), f64::max);
        for _ in 1..rounds {
            run(&mut auto)?;
            for tried in sweep
                .iter_mut()
                .filter(|tried| tried.rates[0] >= HOPE[lossy] * first)
            {
                run(tried)?;
            }
        }
        Ok(self.told(&auto, &sweep, began.elapsed()))
    }

    /// Lets stage send until its rate is known, then cancels. Mbit/s at the receiver's interface, and the streams used.
    fn push(
        &self,
        streams: &Streams,
        cluster: &Cluster<'_>,
        file: &str,
        count: u16,
    ) -> Result<(f64, u64), LabError> {
        let words = if count == 0 {
            "auto".to_owned()
        } else {
            count.to_string()
        };
        let received = || cluster.link_bytes("far").map(|bytes| bytes.received.0);
        let (before, started) = (received()?, Instant::now());
        let running = cluster.start_command(&["push", file, "--to", "far", "--streams", &words])?;
        let (start, time) = (streams.start(self), streams.time());
        let mut samples: Vec<(Duration, u64)> = Vec::new();
        let mut begun = None;
        while !running.has_ended() && started.elapsed() < PUSH {
            let (at, bytes) = (started.elapsed(), received()? - before);
            samples.push((at, bytes));
            if begun.is_none() && bytes >= SIGN {
                begun = Some(at);
            }
            if begun.is_some_and(|begun| at >= begun + start + time) {
                break;
            }
            std::thread::sleep(SAMPLE);
        }
        let job = running.job(Duration::from_secs(5))?;
        let status = cluster.status(&job)?;
        if !running.has_ended() {
            cluster.run(&["cancel", &job], PUSH)?;
        }
        let pushed = running.finish(PUSH)?;
        remove(&copies(&pushed));
        let rate = begun
            .and_then(|begun| rate(&samples, begun + start))
            .ok_or_else(|| LabError::Tool {
                command: format!("stage push --streams {words}"),
                message: format!(
                    "there was no rate to be seen: {} {}",
                    pushed.end(),
                    pushed.errors.trim()
                ),
            })?;
        let used = |value: &Value| value["nodes"][0]["streams"].as_u64().unwrap_or(0);
        Ok((rate * 8.0 / 1e6, used(&status).max(used(pushed.end()))))
    }

    /// What is kept of it.
    fn told(&self, auto: &Tried, sweep: &[Tried], took: Duration) -> Value {
        let lossy = usize::from(self.loss > 0);
        let best = sweep.iter().map(Tried::median).fold(auto.median(), f64::max);
        let enough = sweep.iter().find(|tried| tried.median() >= ASKED[lossy] * best);
        // If no count by hand comes so far, only stage's own does.
        let smallest = enough.map(|tried| u64::from(tried.count));
        let used = auto.used.iter().copied().max().unwrap_or(0);
        let share = auto.median() / best;
        let is_near = share >= ASKED[lossy];
        let is_few = smallest.is_none_or(|smallest| used <= 2 * smallest);
        let rates = |tried: &Tried| {
            json!({
                "streams": tried.count,
                "used": tried.used,
                "megabits_per_second": tried.rates.iter().copied().map(rounded).collect::<Vec<_>>(),
            })
        };
        json!({
            "cell": self.name(),
            "rtt_ms": self.rtt_us as f64 / 1e3,
            "loss": f64::from(self.loss) / 1e4,
            "window_bytes": self.window << 20,
            "congestion_control": self.control,
            "auto": rates(auto),
            "sweep": sweep.iter().map(rates).collect::<Vec<_>>(),
            "best_megabits_per_second": rounded(best),
            "auto_share": rounded(share),
            "asked_share": ASKED[lossy],
            "smallest_enough": smallest,
            "as_asked": is_near && is_few,
            "seconds": rounded(took.as_secs_f64()),
        })
    }
}

/// Bytes a second from `from` until the last sample, or until nothing more came. `None`: there is too little.
fn rate(samples: &[(Duration, u64)], from: Duration) -> Option<f64> {
    let whole = samples.last()?.1;
    let first = samples.iter().find(|(at, _)| *at >= from)?;
    let end = samples.iter().find(|(_, bytes)| *bytes >= whole)?;
    let seconds = end.0.checked_sub(first.0)?.as_secs_f64();
    (seconds >= 0.3).then(|| (end.1 - first.1) as f64 / seconds)
}

/// A line of the matrix for people.
pub(super) fn line(cell: &Value) -> Vec<String> {
    let median = |tried: &Value| {
        let rates = tried["megabits_per_second"].as_array().into_iter().flatten();
        Spread::of(rates.filter_map(Value::as_f64))
            .map_or("–".to_owned(), |rates| format!("{:.0}", rates.median))
    };
    let mut counts: Vec<u64> = cell["auto"]["used"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_u64)
        .collect();
    counts.sort_unstable();
    counts.dedup();
    let counts: Vec<String> = counts.iter().map(ToString::to_string).collect();
    let mut cells = vec![
        word_of(&cell["cell"]).to_owned(),
        counts.join(", "),
        median(&cell["auto"]),
    ];
    for count in COUNTS {
        let mut sweep = cell["sweep"].as_array().into_iter().flatten();
        let tried = sweep.find(|tried| tried["streams"] == count);
        cells.push(tried.map_or("–".to_owned(), median));
    }
    let share = cell["auto_share"].as_f64().unwrap_or(f64::NAN);
    let asked = cell["asked_share"].as_f64().unwrap_or(f64::NAN);
    cells.push(format!("{:.1} % (>= {:.0} %)", share * 100.0, asked * 100.0));
    cells.push(
        cell["smallest_enough"]
            .as_u64()
            .map_or("–".to_owned(), |count| count.to_string()),
    );
    cells.push(super::super::yes(cell["as_asked"] == true));
    cells
}

/// What the lines' cells are.
pub(super) const COLUMNS: [&str; 13] = [
    "cell",
    "auto: streams",
    "auto Mbit/s",
    "1",
    "2",
    "4",
    "8",
    "16",
    "32",
    "64",
    "auto of the best",
    "smallest count that is enough",
    "as asked",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn tried(count: u16, rates: &[f64]) -> Tried {
        Tried {
            count,
            used: vec![if count == 0 { 4 } else { count.into() }],
            rates: rates.to_vec(),
        }
    }

    #[test]
    fn the_chosen_cells_are_in_the_matrix() {
        let cells = all();
        assert_eq!(cells.len(), 54);
        assert_eq!(cells.iter().filter(|cell| cell.is_chosen()).count(), CHOSEN.len());
        assert_eq!(cells[0].name(), "0.1ms-0%-1MiB-cubic");
        for cell in cells {
            let parsed = parsed("streams", &cell.topology(1000));
            let [near, far] = ["near", "far"].map(|name| name.parse().unwrap());
            let route = parsed.route(&near, &far).unwrap();
            assert_eq!(route.rtt, Some(cell.rtt()), "{}", cell.name());
            assert_eq!(route.congestion_control, Some(cell.control.parse().unwrap()));
            assert!((route.loss * 1e4 - f64::from(cell.loss)).abs() < 1e-6);
        }
    }

    #[test]
    fn cubic_is_looked_at_when_it_has_slowed_down() {
        let settles = |name: &str| {
            let cell = all().into_iter().find(|cell| cell.name() == name).unwrap();
            cell.settles().as_secs_f64()
        };
        // 187 segments in 100 ms (RFC 9438, table 2), of which one in 10,000 is lost: 5.3 s between two losses.
        assert!((settles("100ms-0.01%-16MiB-cubic") - 17.8).abs() < 0.2);
        assert!((settles("100ms-0.1%-16MiB-cubic") - 8.6).abs() < 0.2);
        assert!(settles("0.1ms-0.1%-4MiB-cubic") < 0.05);
        assert_eq!(settles("100ms-0.01%-16MiB-bbr"), 0.0);
    }

    #[test]
    fn auto_must_be_near_the_best_with_few_streams() {
        let cell = all()[0];
        let sweep = [
            tried(1, &[300.0, 310.0, 290.0]),
            tried(2, &[600.0]),
            tried(4, &[905.0, 899.0]),
        ];
        let right = |auto: &[f64], sweep: &[Tried]| cell.told(&tried(0, auto), sweep, Duration::ZERO);
        let told = right(&[900.0, 890.0, 880.0], &sweep);
        assert_eq!(
            (&told["as_asked"], &told["smallest_enough"]),
            (&true.into(), &4.into())
        );
        assert_eq!(right(&[700.0], &sweep)["as_asked"], false, "too slow");
        let one = [tried(1, &[900.0]), tried(2, &[901.0])];
        assert_eq!(
            right(&[900.0], &one)["as_asked"],
            false,
            "four where one is enough"
        );
        assert_eq!(line(&told).len(), COLUMNS.len());
    }

    #[test]
    fn a_rate_counts_from_its_start_to_the_last_byte() {
        let ms = Duration::from_millis;
        let samples: Vec<_> = (0..100)
            .map(|at| (ms(at * 20), (at * 20).min(1500) * 1000))
            .collect();
        let seen = rate(&samples, ms(500)).unwrap();
        assert!((seen / 1e6 - 1.0).abs() < 0.02, "{seen}");
        assert_eq!(rate(&samples, ms(1400)), None);
        assert_eq!(rate(&[], ms(0)), None);
    }
}
