//! Errors of a topology file, collected with their places, and the reading of TOML tables that fills it.

use std::str::FromStr;
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{TopologyError, hostlist};
use crate::units::{self, Rate};

/// A value and where in the text it stands (byte offset).
#[derive(Debug, Clone)]
pub(super) struct At<T> {
    pub(super) value: T,
    pub(super) at: usize,
}

/// What is wrong with one text.
pub(super) struct Report<'a> {
    file: &'a str,
    line_starts: Vec<usize>,
    errors: Vec<(usize, String)>,
}

impl<'a> Report<'a> {
    pub(super) fn new(file: &'a str, text: &str) -> Self {
        let line_starts = std::iter::once(0)
            .chain(text.match_indices('\n').map(|(at, _)| at + 1))
            .collect();
        Self {
            file,
            line_starts,
            errors: Vec::new(),
        }
    }

    pub(super) fn line(&self, at: usize) -> usize {
        self.line_starts.partition_point(|start| *start <= at)
    }

    pub(super) fn error(&mut self, at: usize, message: impl Into<String>) {
        self.errors.push((at, message.into()));
    }

    /// "unknown switch "rack9", did you mean "rack1"?"; the nearest is looked for while errors are few.
    pub(super) fn unknown<'k>(
        &self,
        what: &str,
        name: &str,
        known: impl IntoIterator<Item = &'k str>,
    ) -> String {
        let near = if self.errors.len() < 50 {
            suggestion(name, known)
        } else {
            String::new()
        };
        format!("unknown {what} {name:?}{near}")
    }

    pub(super) fn is_empty(&self) -> bool {
        self.errors.is_empty()
    }

    /// All errors in the order of their places.
    pub(super) fn into_errors(mut self) -> Vec<TopologyError> {
        self.errors.sort_by_key(|(at, _)| *at);
        let errors = std::mem::take(&mut self.errors);
        errors
            .into_iter()
            .map(|(at, message)| TopologyError {
                file: self.file.to_owned(),
                line: self.line(at),
                message,
            })
            .collect()
    }
}

/// ", did you mean \"x\"?" with the nearest of `known`, or nothing if none is near.
pub(super) fn suggestion<'k>(wanted: &str, known: impl IntoIterator<Item = &'k str>) -> String {
    let far = wanted.len().div_ceil(3).max(1);
    known
        .into_iter()
        // The distance is at least the difference in length: most names need no closer look.
        .filter(|name| name.len().abs_diff(wanted.len()) <= far)
        .map(|name| (strsim::damerau_levenshtein(wanted, name), name))
        .filter(|(distance, _)| *distance <= far)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| format!(", did you mean {name:?}?"))
        .unwrap_or_default()
}

/// A table of the file: `[cluster]`, one `[[node]]`, …
pub(super) struct Section<'t> {
    table: &'t DeTable<'t>,
    /// Where it begins.
    pub(super) at: usize,
    /// How it is called in messages.
    what: &'static str,
}

impl<'t> Section<'t> {
    pub(super) fn new(table: &'t DeTable<'t>, at: usize, what: &'static str) -> Self {
        Self { table, at, what }
    }

    /// Reports every key that is none of `known`, on its own line.
    pub(super) fn check_keys(&self, report: &mut Report<'_>, known: &[&str]) {
        for key in self.table.keys() {
            let name: &str = key.get_ref();
            if !known.contains(&name) {
                let near = suggestion(name, known.iter().copied());
                let message = format!(
                    "unknown key {name:?} in {}{near} (known: {})",
                    self.what,
                    known.join(", ")
                );
                report.error(key.span().start, message);
            }
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<&'t Spanned<DeValue<'t>>> {
        self.table.get(key)
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// Keys and values, each with its place.
    pub(super) fn entries(&self) -> impl Iterator<Item = (At<&'t str>, &'t Spanned<DeValue<'t>>)> {
        self.table.iter().map(|(key, value)| {
            (
                At {
                    value: key.get_ref().as_ref(),
                    at: key.span().start,
                },
                value,
            )
        })
    }

    /// A string, if the key is there.
    pub(super) fn text(&self, report: &mut Report<'_>, key: &str, example: &str) -> Option<At<&'t str>> {
        let value = self.get(key)?;
        let at = value.span().start;
        match value.get_ref().as_str() {
            Some(text) => Some(At { value: text, at }),
            None => {
                let kind = value.get_ref().type_str();
                report.error(
                    at,
                    format!("{key} is {kind}, not a string: write {key} = {example:?}"),
                );
                None
            }
        }
    }

    /// A string that must be there.
    pub(super) fn need_text(&self, report: &mut Report<'_>, key: &str, example: &str) -> Option<At<&'t str>> {
        if !self.has(key) {
            report.error(
                self.at,
                format!("{} has no {key}: add {key} = {example:?}", self.what),
            );
        }
        self.text(report, key, example)
    }

    /// A rate of more than zero, if the key is there.
    pub(super) fn rate(&self, report: &mut Report<'_>, key: &str, example: &str) -> Option<Rate> {
        let text = self.text(report, key, example)?;
        match Rate::from_str(text.value) {
            Ok(rate) if rate.bits_per_second() >= 1.0 => return Some(rate),
            Ok(_) => report.error(text.at, format!("{key} is zero: nothing would ever arrive")),
            Err(why) => report.error(text.at, format!("{key}: {why}")),
        }
        None
    }

    /// A time, if the key is there.
    pub(super) fn time(&self, report: &mut Report<'_>, key: &str, example: &str) -> Option<At<Duration>> {
        let text = self.text(report, key, example)?;
        match units::parse_time(text.value) {
            Ok(value) => Some(At { value, at: text.at }),
            Err(why) => {
                report.error(text.at, format!("{key}: {why}"));
                None
            }
        }
    }

    /// The tables of `[[key]]`, none if the key is not there.
    pub(super) fn tables(&self, report: &mut Report<'_>, key: &str, what: &'static str) -> Vec<Section<'t>> {
        let Some(value) = self.get(key) else {
            return Vec::new();
        };
        let wrong = format!("{key} is not a list of tables: write {what} on a line of its own");
        let Some(array) = value.get_ref().as_array() else {
            report.error(value.span().start, wrong);
            return Vec::new();
        };
        let mut sections = Vec::with_capacity(array.len());
        for item in array {
            match item.get_ref().as_table() {
                Some(table) => sections.push(Section::new(table, item.span().start, what)),
                None => report.error(item.span().start, wrong.clone()),
            }
        }
        sections
    }

    /// The table under `key`, if the key is there.
    pub(super) fn table(
        &self,
        report: &mut Report<'_>,
        key: &str,
        what: &'static str,
    ) -> Option<Section<'t>> {
        let value = self.get(key)?;
        let table = value.get_ref().as_table();
        if table.is_none() {
            report.error(value.span().start, format!("{key} is not a table: write {what}"));
        }
        Some(Section::new(table?, value.span().start, what))
    }
}

/// The names in a hostlist, or `None` after reporting what is wrong with it.
pub(super) fn names<T>(report: &mut Report<'_>, text: &At<&str>) -> Option<Vec<T>>
where
    T: FromStr<Err: std::fmt::Display>,
{
    let names = match hostlist::expand(text.value) {
        Ok(names) => names,
        Err(why) => {
            report.error(text.at, why.to_string());
            return None;
        }
    };
    if names.is_empty() {
        report.error(
            text.at,
            "an empty string names nothing: write a name or a hostlist such as \"n[1-4]\"",
        );
        return None;
    }
    match names.iter().map(|name| name.parse()).collect() {
        Ok(names) => Some(names),
        Err(why) => {
            report.error(text.at, why.to_string());
            None
        }
    }
}
