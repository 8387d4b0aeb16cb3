//! What all measurements of this program share: payloads, facts of the machine, where results go, medians.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde_json::{Value, json};
use stage_core::units::ByteCount;
use stage_lab::cluster::{Pushed, Security};
use stage_lab::{Lab, LabError};

/// No push of a measurement takes as long.
pub(crate) const PUSH: Duration = Duration::from_secs(600);

/// Where results are kept, from the repository's top.
const RESULTS: &str = "lab/results";

/// When and where something was measured, and by which call.
#[derive(Debug, Serialize)]
pub(crate) struct Facts {
    pub(crate) date: String,
    pub(crate) machine: Value,
    pub(crate) command: Vec<String>,
}

impl Facts {
    pub(crate) fn now() -> Self {
        Self {
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            machine: json!({
                "kernel": read("/proc/sys/kernel/osrelease"),
                "cpu": field("/proc/cpuinfo", "model name"),
                "cores": std::thread::available_parallelism().map_or(0, usize::from),
                "memory": field("/proc/meminfo", "MemTotal"),
                "load": read("/proc/loadavg"),
                "congestion_control": read("/proc/sys/net/ipv4/tcp_congestion_control"),
                "tcp_rmem": read("/proc/sys/net/ipv4/tcp_rmem"),
                "tcp_wmem": read("/proc/sys/net/ipv4/tcp_wmem"),
                "commit": commit(),
            }),
            command: std::env::args().collect(),
        }
    }

    /// Adds the version of the binary that is measured.
    pub(crate) fn of(mut self, stage: &Path) -> Self {
        let version = Command::new(stage).arg("--version").output();
        let version = version.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
        self.machine["stage"] = version.unwrap_or_default().into();
        self
    }

    /// A line for people.
    pub(crate) fn line(&self) -> String {
        let of = |name: &str| self.machine[name].as_str().unwrap_or("?").to_owned();
        format!(
            "{}, {} ({}), {} cores of {}, Linux {}, load before {}",
            self.date,
            of("stage"),
            of("commit"),
            self.machine["cores"],
            of("cpu"),
            of("kernel"),
            of("load")
        )
    }
}

/// Writes what was measured as JSON, into a new file of `lab/results` unless one is named, and its table beside it as text.
pub(crate) fn save(
    facts: &Facts,
    kind: &str,
    path: Option<&Path>,
    figures: &impl Serialize,
    table: Option<&str>,
) -> Result<PathBuf, String> {
    let usual = || {
        let dash = if kind.is_empty() { "" } else { "-" };
        PathBuf::from(RESULTS).join(format!("{}{dash}{kind}.json", facts.date.replace(':', "")))
    };
    let path = path.map_or_else(usual, Path::to_owned);
    let fault = |why: io::Error| format!("{}: {why}", path.display());
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(fault)?;
    }
    let mut text = serde_json::to_string_pretty(figures).map_err(|why| why.to_string())?;
    text.push('\n');
    fs::write(&path, text).map_err(fault)?;
    if let Some(table) = table {
        fs::write(path.with_extension("md"), table).map_err(fault)?;
    }
    Ok(path)
}

/// The binary that is measured.
pub(crate) fn binary(stage: &Path) -> Result<PathBuf, String> {
    std::path::absolute(stage)
        .and_then(fs::canonicalize)
        .map_err(|why| {
            format!(
                "{}: {why}: build it with `cargo build --release -p stage`, or give --stage",
                stage.display()
            )
        })
}

/// What is checked out here, if this is a checkout.
fn commit() -> String {
    let words = ["describe", "--always", "--dirty", "--exclude=*"];
    let output = Command::new("git").args(words).output();
    output.map_or_else(
        |_| String::new(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    )
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn field(path: &str, name: &str) -> String {
    let text = read(path);
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines
        .find(|(key, _)| key.trim() == name)
        .map_or_else(String::new, |(_, value)| value.trim().to_owned())
}

/// Figures of one kind, from several runs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// `None`: there are none.
    pub(crate) fn of(figures: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut figures: Vec<f64> = figures.into_iter().filter(|figure| figure.is_finite()).collect();
        figures.sort_by(f64::total_cmp);
        let (min, max) = (*figures.first()?, *figures.last()?);
        let upper = figures.len() / 2;
        let lower = (figures.len() - 1) / 2;
        Some(Self {
            median: rounded(f64::midpoint(figures[lower], figures[upper])),
            min: rounded(min),
            max: rounded(max),
        })
    }
}

/// `median (min–max)`.
pub(crate) fn spread(figures: impl IntoIterator<Item = f64>, digits: usize) -> String {
    Spread::of(figures).map_or_else(
        || "–".to_owned(),
        |spread| {
            format!(
                "{:.digits$} ({:.digits$}–{:.digits$})",
                spread.median, spread.min, spread.max
            )
        },
    )
}

/// A table of a measurement, with all that was measured for each line.
#[derive(Debug, Serialize)]
pub(crate) struct Table {
    title: String,
    columns: Vec<&'static str>,
    rows: Vec<Line>,
}

#[derive(Debug, Serialize)]
struct Line {
    cells: Vec<String>,
    figures: Value,
}

impl Table {
    pub(crate) fn new(title: impl Into<String>, columns: &[&'static str]) -> Self {
        Self {
            title: title.into(),
            columns: columns.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Takes up a line, and shows it at once.
    pub(crate) fn add(&mut self, cells: Vec<String>, figures: Value) {
        drop(writeln!(io::stderr(), "{}: {}", self.title, cells.join("; ")));
        self.rows.push(Line { cells, figures });
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "## {}\n\n| {} |", self.title, self.columns.join(" | "))?;
        writeln!(f, "|{}", "---|".repeat(self.columns.len()))?;
        for line in &self.rows {
            let cells = line
                .cells
                .iter()
                .map(|cell| cell.replace('|', "\\|").replace('\n', " "));
            writeln!(f, "| {} |", cells.collect::<Vec<_>>().join(" | "))?;
        }
        Ok(())
    }
}

/// What several measurements have in common.
#[derive(Debug, clap::Args)]
pub(crate) struct Common {
    /// The binary that is measured.
    #[arg(long, default_value = "target/release/stage")]
    pub(crate) stage: PathBuf,
    /// Without TLS.
    #[arg(long)]
    pub(crate) insecure: bool,
    /// Where the figures go; the table beside them with the suffix md [default: lab/results/DATE-NAME.json].
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

impl Common {
    pub(crate) fn security(&self) -> Security {
        if self.insecure {
            Security::Insecure
        } else {
            Security::Tls
        }
    }

    /// Prints tables and keeps them.
    pub(crate) fn keep(&self, kind: &str, facts: &Facts, tables: &[Table]) -> Result<(), String> {
        keep(kind, facts, tables, self.json.as_deref())
    }

    /// Keeps tables that are not whole yet, in the place where the whole ones will be.
    pub(crate) fn keep_so_far(&self, kind: &str, facts: &Facts, tables: &[Table]) -> Result<(), String> {
        write(kind, facts, tables, self.json.as_deref()).map(drop)
    }
}

/// Prints tables and keeps them, in a new file of `lab/results` unless one is named.
pub(crate) fn keep(kind: &str, facts: &Facts, tables: &[Table], path: Option<&Path>) -> Result<(), String> {
    let (text, path) = write(kind, facts, tables, path)?;
    let said = writeln!(io::stdout(), "{text}\nkept in {}", path.display());
    said.map_err(|why| why.to_string())
}

/// The tables' text, and where it is.
fn write(
    kind: &str,
    facts: &Facts,
    tables: &[Table],
    path: Option<&Path>,
) -> Result<(String, PathBuf), String> {
    #[derive(Serialize)]
    struct Results<'a> {
        #[serde(flatten)]
        facts: &'a Facts,
        tables: &'a [Table],
    }
    let mut text = format!(
        "{}\n\n`{}`; medians (min–max).\n",
        facts.line(),
        facts.command.join(" ")
    );
    for table in tables {
        text.push_str(&format!("\n{table}"));
    }
    let path = save(facts, kind, path, &Results { facts, tables }, Some(&text))?;
    Ok((text, path))
}

/// The end of a push, which must have been good.
///
/// # Errors
/// It was not: what it said.
pub(crate) fn good(pushed: Pushed) -> Result<Pushed, LabError> {
    if pushed.exit == Some(0) {
        return Ok(pushed);
    }
    Err(LabError::Tool {
        command: "stage push".to_owned(),
        message: format!(
            "exit {:?}: {} {}",
            pushed.exit,
            pushed.end(),
            pushed.errors.trim()
        ),
    })
}

/// The file's bytes per second, in Mbit/s.
pub(crate) fn megabits(bytes: f64, seconds: f64) -> f64 {
    bytes * 8.0 / 1e6 / seconds
}

/// A fabric of one switch: a source `n0` and targets `n1` and on, all at one rate.
pub(crate) fn one_switch(targets: u32, rate: &str) -> String {
    format!(
        r#"[cluster]
name = "lab"

[[switch]]
name = "core"

[[node]]
name = "n[0-{targets}]"
address = "10.78.0.[1-{}]"
attach = "core"
nic = "{rate}"
"#,
        targets + 1
    )
}

/// A fabric of one path, from `near` to `far`, which their interfaces do not limit. `more` are further lines of its link.
pub(crate) fn one_path(capacity: &str, rtt: &str, loss: f64, more: &str) -> String {
    let loss = if loss > 0.0 {
        format!("loss = {loss}\n")
    } else {
        String::new()
    };
    format!(
        r#"[cluster]
name = "lab"

[[switch]]
name = "here"

[[switch]]
name = "there"

[[link]]
between = ["here", "there"]
capacity = "{capacity}"
rtt = "{rtt}"
{loss}{more}
[[node]]
name = "near"
address = "10.78.0.1"
attach = "here"
nic = "10 Gbit/s"

[[node]]
name = "far"
address = "10.78.0.2"
attach = "there"
nic = "10 Gbit/s"
"#
    )
}

pub(crate) fn in_words(security: Security) -> &'static str {
    match security {
        Security::Tls => "TLS",
        Security::Insecure => "insecure",
    }
}

/// Makes a file of random bytes on the source.
pub(crate) fn random_file(lab: &Lab, source: &str, name: &str, size: ByteCount) -> Result<PathBuf, LabError> {
    let path = lab.dir(source).join(name);
    let make = || -> io::Result<()> {
        let mut seed = [0; 32];
        File::open("/dev/urandom")?.read_exact(&mut seed)?;
        // The kernel's own generator would take longer than the push.
        let mut bytes = blake3::Hasher::new_keyed(&seed).finalize_xof().take(size.0);
        io::copy(
            &mut io::BufReader::with_capacity(1 << 20, &mut bytes),
            &mut File::create(&path)?,
        )?;
        Ok(())
    };
    make().map_err(|source| LabError::Directory {
        path: path.clone(),
        source,
    })?;
    Ok(path)
}

/// A path as a word of a command line.
pub(crate) fn word(path: &Path) -> &str {
    path.to_str().expect("the lab's own paths are text")
}

/// A text in JSON, `?` if it is none.
pub(crate) fn word_of(value: &Value) -> &str {
    value.as_str().unwrap_or("?")
}

/// Where the command says that each copy lies.
pub(crate) fn copies(pushed: &Pushed) -> Vec<PathBuf> {
    let paths = pushed.nodes().iter().filter_map(|node| node["path"].as_str());
    paths.map(PathBuf::from).collect()
}

/// How many copies `sha256sum` finds right, of those that the command tells of.
pub(crate) fn right_copies(pushed: &Pushed, digest: &str) -> Result<usize, LabError> {
    let copies: Vec<PathBuf> = copies(pushed).into_iter().filter(|path| path.is_file()).collect();
    let sums = stage_lab::sha256sum(&copies)?;
    Ok(sums.iter().filter(|sum| *sum == digest).count())
}

/// What each target says that it received over the network.
pub(crate) fn received(pushed: &Pushed) -> Vec<u64> {
    let nodes = pushed.nodes().iter();
    nodes
        .map(|node| node["bytes_received"].as_u64().unwrap_or(u64::MAX))
        .collect()
}

/// Gives memory back between two pushes.
pub(crate) fn remove(paths: &[PathBuf]) {
    // What is not there takes no memory.
    paths.iter().for_each(|path| drop(fs::remove_file(path)));
}

pub(crate) fn seconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e3).round() / 1e3
}

pub(crate) fn rounded(figure: f64) -> f64 {
    (figure * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_told_by_their_middle_and_their_ends() {
        let spread = Spread::of([3.0, 1.0, 2.5]).unwrap();
        assert_eq!((spread.median, spread.min, spread.max), (2.5, 1.0, 3.0));
        assert_eq!(Spread::of([1.0, 2.0]).unwrap().median, 1.5);
        assert_eq!(Spread::of([f64::NAN]), None);
        assert_eq!(super::spread([1.0, 2.0, 4.0], 1), "2.0 (1.0–4.0)");
        assert_eq!(super::spread([], 1), "–");
    }
}
