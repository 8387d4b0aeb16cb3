//! The file that holds the matrix: read at the start, written after each cell.

use std::fs;
use std::io::{self, Write as _};
use std::path::PathBuf;

use serde_json::{Value, json};

use super::cell;
use crate::bench::{Facts, save};

pub(super) struct Sheet {
    path: PathBuf,
    /// Of this call.
    facts: Value,
    line: String,
    cells: Vec<Value>,
    notes: Vec<String>,
}

impl Sheet {
    /// Reads what is there.
    ///
    /// # Errors
    /// There is a file that is no such matrix.
    pub(super) fn open(path: PathBuf, facts: &Facts) -> Result<Self, String> {
        let cells = match fs::read_to_string(&path) {
            Ok(text) => {
                let kept: Value =
                    serde_json::from_str(&text).map_err(|why| format!("{}: {why}", path.display()))?;
                let cells = kept["cells"].as_array().cloned();
                cells.ok_or_else(|| format!("{}: it has no cells", path.display()))?
            }
            Err(why) if why.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(why) => return Err(format!("{}: {why}", path.display())),
        };
        Ok(Self {
            path,
            facts: serde_json::to_value(facts).map_err(|why| why.to_string())?,
            line: facts.line(),
            cells,
            notes: Vec::new(),
        })
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.cells.iter().any(|cell| cell["cell"] == name)
    }

    /// Takes a cell up, in the place of an older one, and writes all.
    pub(super) fn keep(&mut self, mut cell: Value) -> Result<(), String> {
        drop(writeln!(io::stderr(), "{}", cell::line(&cell).join("; ")));
        cell["by"] = self.facts.clone();
        self.cells.retain(|old| old["cell"] != cell["cell"]);
        self.cells.push(cell);
        self.write()
    }

    /// What could not be measured, and why.
    pub(super) fn note(&mut self, note: &str) -> Result<(), String> {
        drop(writeln!(io::stderr(), "{note}"));
        self.notes.push(note.to_owned());
        self.write()
    }

    fn text(&self) -> String {
        let asked = self.cells.iter().filter(|cell| cell["as_asked"] == true).count();
        let mut text = format!(
            "{}\n\nMbit/s at the receiver's interface, medians; {asked} of {} cells as asked.\n\n| {} |\n|{}\n",
            self.line,
            self.cells.len(),
            cell::COLUMNS.join(" | "),
            "---|".repeat(cell::COLUMNS.len())
        );
        let order: Vec<String> = cell::all().iter().map(cell::Cell::name).collect();
        let mut cells: Vec<&Value> = self.cells.iter().collect();
        cells.sort_by_key(|cell| order.iter().position(|name| cell["cell"] == name.as_str()));
        for cell in cells {
            text.push_str(&format!("| {} |\n", cell::line(cell).join(" | ")));
        }
        for note in &self.notes {
            text.push_str(&format!("\nNot measured: {note}\n"));
        }
        text
    }

    fn write(&self) -> Result<(), String> {
        let figures = json!({ "cells": self.cells, "notes": self.notes });
        // Each cell has its own date and machine.
        save(
            &Facts::now(),
            "streams",
            Some(&self.path),
            &figures,
            Some(&self.text()),
        )
        .map(drop)
    }

    /// Prints the matrix. Whether all in it is as asked.
    pub(super) fn show(&self) -> Result<bool, String> {
        let said = writeln!(io::stdout(), "{}\nkept in {}", self.text(), self.path.display());
        said.map_err(|why| why.to_string())?;
        Ok(self.notes.is_empty() && self.cells.iter().all(|cell| cell["as_asked"] == true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_is_there_the_next_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("streams.json");
        let facts = Facts::now();
        let mut sheet = Sheet::open(path.clone(), &facts).unwrap();
        assert!(!sheet.has("a"));
        sheet.keep(json!({ "cell": "a", "as_asked": false })).unwrap();
        sheet.keep(json!({ "cell": "b", "as_asked": true })).unwrap();

        let mut again = Sheet::open(path.clone(), &facts).unwrap();
        assert!(again.has("a") && again.has("b") && !again.has("c"));
        again.keep(json!({ "cell": "a", "as_asked": true })).unwrap();
        let kept: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(kept["cells"].as_array().unwrap().len(), 2);
        assert!(
            kept["cells"]
                .as_array()
                .unwrap()
                .iter()
                .all(|cell| cell["as_asked"] == true)
        );
        assert!(
            fs::read_to_string(path.with_extension("md"))
                .unwrap()
                .contains("2 of 2 cells as asked")
        );

        fs::write(&path, "{}").unwrap();
        assert!(Sheet::open(path, &facts).is_err());
    }
}
