//! `stage-lab streams`: the count of streams that stage chooses, against a sweep of counts, over round trips, loss, windows and
//! congestion controls. Each cell is kept at once; a second call with the same file goes on with those that are missing.

mod cell;
mod sheet;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use stage_core::units::ByteCount;

use self::cell::Cell;
use self::sheet::Sheet;
use super::Know;
use crate::bench::{Common, Facts, binary};

/// What can be asked for.
#[derive(Debug, clap::Args)]
pub(crate) struct Streams {
    #[command(flatten)]
    common: Common,
    /// Only cells with such a part in their name: 100ms-0.1%-16MiB-cubic.
    #[arg(long, value_name = "NAME", num_args = 1..)]
    only: Vec<String>,
    /// All 54 cells, not a choice of 16.
    #[arg(long)]
    all: bool,
    /// Begin no new cell after so many minutes.
    #[arg(long, value_name = "MINUTES")]
    minutes: Option<u64>,
    /// The path's rate.
    #[arg(long, default_value_t = 1000)]
    megabits: u32,
    /// How long a rate is looked at, once the streams have come up to speed.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// How often each count is tried [default: 3, with loss 5].
    #[arg(long)]
    rounds: Option<u32>,
    /// What stage knows before it chooses.
    #[arg(long, value_enum, default_value = "topology")]
    know: Know,
    /// Measure these cells again.
    #[arg(long)]
    again: bool,
}

/// Measures what is missing, and writes the matrix after each cell. Whether all was as asked.
///
/// # Errors
/// For people: what was asked for cannot be done.
pub(crate) fn run(streams: &Streams) -> Result<bool, String> {
    let cells: Vec<Cell> = cell::all()
        .into_iter()
        .filter(|cell| streams.all || !streams.only.is_empty() || cell.is_chosen())
        .collect();
    let names: Vec<String> = cells.iter().map(Cell::name).collect();
    super::unknown(&streams.only, names.iter().map(String::as_str))?;
    let stage = binary(&streams.common.stage)?;
    let facts = Facts::now().of(&stage);
    let path = streams
        .common
        .json
        .clone()
        .unwrap_or_else(|| PathBuf::from("lab/results/streams.json"));
    let mut sheet = Sheet::open(path, &facts)?;
    let started = Instant::now();
    let wanted = cells
        .iter()
        .filter(|cell| super::is_wanted(&streams.only, &cell.name()));
    for cell in wanted {
        if !streams.again && sheet.has(&cell.name()) {
            continue;
        }
        let time_is_up = |minutes| started.elapsed() > Duration::from_secs(minutes * 60);
        if streams.minutes.is_some_and(time_is_up) {
            sheet.note("the time was up before all cells were measured")?;
            break;
        }
        match cell.measure(streams, &stage) {
            Ok(measured) => sheet.keep(measured)?,
            // What one cell cannot have, the next may.
            Err(why) => sheet.note(&format!("{}: {why}", cell.name()))?,
        }
    }
    sheet.show()
}

impl Streams {
    /// How long connections are given to find their rate: slow start to 1 Gbit/s takes some 10 round trips, and what loss
    /// makes of it `settles`.
    fn start(&self, cell: &Cell) -> Duration {
        Duration::from_millis(500) + cell.rtt() * 12 + cell.settles()
    }

    fn time(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }

    /// More than arrives while it is looked at.
    fn size(&self, cell: &Cell) -> ByteCount {
        let time = self.start(cell) + self.time() + Duration::from_secs(2);
        ByteCount((f64::from(self.megabits) * 1e6 / 8.0 * time.as_secs_f64()) as u64)
    }
}
