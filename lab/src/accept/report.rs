//! What was asked, what was seen: as a Markdown table for people and as JSON to keep.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use serde::Serialize;
use serde_json::{Value, json};
use stage_lab::LabError;

/// Where results are kept, from the repository's top.
const RESULTS: &str = "lab/results";

/// One figure or fact.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    /// Of what.
    pub(super) what: String,
    /// The bound.
    pub(super) asked: String,
    /// What came out.
    pub(super) seen: String,
    /// Whether that is within the bound; none: nothing was asked.
    pub(super) right: Option<bool>,
    /// All that was measured for it.
    pub(super) figures: Value,
}

impl Row {
    pub(super) fn new(
        what: impl Into<String>,
        asked: impl Into<String>,
        seen: impl Into<String>,
        right: bool,
    ) -> Self {
        Self {
            what: what.into(),
            asked: asked.into(),
            seen: seen.into(),
            right: Some(right),
            figures: json!({}),
        }
    }

    /// A figure that nothing was asked of.
    pub(super) fn note(what: impl Into<String>, seen: impl Into<String>) -> Self {
        Self {
            right: None,
            ..Self::new(what, "", seen, true)
        }
    }

    pub(super) fn failed(what: &str, why: &LabError) -> Self {
        Self::new(what, "an answer", why.to_string(), false)
    }

    pub(super) fn with(mut self, figures: Value) -> Self {
        self.figures = figures;
        self
    }

    /// A line of the table.
    pub(super) fn line(&self) -> String {
        let verdict = match self.right {
            Some(true) => "yes",
            Some(false) => "**no**",
            None => "",
        };
        let cell = |text: &str| text.replace('|', "\\|").replace('\n', "<br>");
        format!(
            "| {} | {} | {} | {verdict} |",
            cell(&self.what),
            cell(&self.asked),
            cell(&self.seen)
        )
    }
}

/// All rows and where they come from.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    date: String,
    machine: Value,
    command: Vec<String>,
    pub(super) rows: Vec<Row>,
}

impl Report {
    pub(super) fn new() -> Self {
        Self {
            date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            machine: json!({
                "kernel": read("/proc/sys/kernel/osrelease"),
                "cpu": field("/proc/cpuinfo", "model name"),
                "cores": std::thread::available_parallelism().map_or(0, usize::from),
                "memory": field("/proc/meminfo", "MemTotal"),
                "load": read("/proc/loadavg"),
                "commit": commit(),
            }),
            command: std::env::args().collect(),
            rows: Vec::new(),
        }
    }

    /// Whether nothing was asked in vain.
    pub(super) fn is_all_right(&self) -> bool {
        self.rows.iter().all(|row| row.right != Some(false))
    }

    /// Writes the figures, into a new file unless one is named.
    pub(super) fn save(&mut self, path: Option<&Path>, stage: &Path) -> Result<(), String> {
        let version = Command::new(stage).arg("--version").output();
        let version = version.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
        self.machine["stage"] = version.unwrap_or_default().into();
        let usual = || PathBuf::from(RESULTS).join(format!("{}.json", self.date.replace(':', "")));
        let path = path.map_or_else(usual, Path::to_owned);
        let fault = |why: std::io::Error| format!("{}: {why}", path.display());
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).map_err(fault)?;
        }
        let mut text = serde_json::to_string_pretty(self).map_err(|why| why.to_string())?;
        text.push('\n');
        fs::write(&path, text).map_err(fault)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |name: &str| self.machine[name].as_str().unwrap_or("?").to_owned();
        writeln!(
            f,
            "{}, {}, {} cores of {}, Linux {}\n",
            self.date,
            of("stage"),
            self.machine["cores"],
            of("cpu"),
            of("kernel")
        )?;
        writeln!(f, "| what | asked | seen | as asked |\n|---|---|---|---|")?;
        self.rows.iter().try_for_each(|row| writeln!(f, "{}", row.line()))
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_a_table() {
        let mut report = Report::new();
        report
            .rows
            .push(Row::new("a | b", "<= 1", "0.5\n0.6", true).with(json!({ "x": 1 })));
        assert!(report.is_all_right());
        report.rows.push(Row::note("c", "2"));
        assert!(report.is_all_right(), "a note asks nothing");
        report.rows.push(Row::new("d", "<= 1", "2", false));
        assert!(!report.is_all_right());
        let text = report.to_string();
        assert!(
            text.ends_with(
                "| a \\| b | <= 1 | 0.5<br>0.6 | yes |\n| c |  | 2 |  |\n| d | <= 1 | 2 | **no** |\n"
            ),
            "{text}"
        );
    }
}
