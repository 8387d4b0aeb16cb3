//! What was asked, what was seen: as a Markdown table for people and as JSON to keep.

use std::fmt;
use std::path::Path;

use serde::Serialize;
use serde_json::{Value, json};
use stage_lab::LabError;

use crate::bench::{Facts, save};

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
    #[serde(flatten)]
    facts: Facts,
    pub(super) rows: Vec<Row>,
}

impl Report {
    pub(super) fn new(stage: &Path) -> Self {
        Self {
            facts: Facts::now().of(stage),
            rows: Vec::new(),
        }
    }

    /// Whether nothing was asked in vain.
    pub(super) fn is_all_right(&self) -> bool {
        self.rows.iter().all(|row| row.right != Some(false))
    }

    /// Writes the figures, into a new file unless one is named.
    pub(super) fn save(&self, path: Option<&Path>) -> Result<(), String> {
        save(&self.facts, "", path, self, None).map(drop)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n", self.facts.line())?;
        writeln!(f, "| what | asked | seen | as asked |\n|---|---|---|---|")?;
        self.rows.iter().try_for_each(|row| writeln!(f, "{}", row.line()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_a_table() {
        let mut report = Report::new(Path::new("/nowhere"));
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
