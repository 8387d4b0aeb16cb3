//! What was measured, as it is heard of.

mod lines;
mod tables;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::{Duration, Instant, SystemTime};

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use serde_json::json;
use stage_core::bench::{Measurement, Reading, StreamReading, Subject};
use stage_core::failure::{Code, Failure};
use stage_core::topology::hostlist;
use stage_proto::v1;
use stage_proto::v1::bench_event::Event;

use self::lines::object;
use self::tables::tables;
use super::{Form, heat, human, json};

/// A bench as it is heard of.
pub(crate) struct Benching {
    form: Form,
    is_sweep: bool,
    begun: Instant,
    bar: Option<ProgressBar>,
    measured: Vec<(Measurement, v1::Measured)>,
    remarks: Vec<v1::BenchRemark>,
    /// By why, in words.
    polite: BTreeMap<String, Vec<String>>,
    failed: Vec<(String, Failure)>,
}

impl Benching {
    /// Of a sweep, matrices are shown.
    pub(crate) fn new(form: Form, is_sweep: bool) -> Self {
        let bar = (form == Form::Human).then(|| {
            let style = ProgressStyle::with_template("{elapsed_precise} {bar:24} {pos}/{len} {msg}");
            let bar = ProgressBar::new(1);
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.enable_steady_tick(Duration::from_millis(500));
            bar
        });
        Self {
            form,
            is_sweep,
            begun: Instant::now(),
            bar,
            measured: Vec::new(),
            remarks: Vec::new(),
            polite: BTreeMap::new(),
            failed: Vec::new(),
        }
    }

    fn line(&self, line: &impl Serialize) -> io::Result<()> {
        if self.form == Form::Json {
            json::write(&mut io::stdout().lock(), line)?;
        }
        Ok(())
    }

    /// Takes an event.
    ///
    /// # Errors
    /// The output is gone.
    pub(crate) fn heard(&mut self, event: Event) -> io::Result<()> {
        match event {
            Event::Progress(progress) => {
                if let Some(bar) = &self.bar {
                    bar.set_length(progress.total.max(1).into());
                    bar.set_position(progress.done.into());
                    bar.set_message(progress.what.clone());
                }
                self.line(&json!({
                    "event": "progress", "done": progress.done, "total": progress.total, "what": progress.what,
                }))
            }
            Event::Skipped(skipped) => {
                let failure = skipped
                    .failure
                    .as_ref()
                    .map_or_else(|| Failure::new(Code::Internal, "no reason given", ""), Into::into);
                let name = if skipped.to.is_empty() {
                    skipped.node.clone()
                } else {
                    format!("{} to {}", skipped.node, skipped.to)
                };
                self.line(&json!({
                    "event": "skipped",
                    "node": skipped.node,
                    "to": (!skipped.to.is_empty()).then_some(&skipped.to),
                    "busy": skipped.is_polite,
                    "error": json::Cause::from(&failure),
                }))?;
                if skipped.is_polite {
                    self.polite.entry(failure.message).or_default().push(name);
                } else {
                    self.failed.push((name, failure));
                }
                Ok(())
            }
            Event::Measured(wire) => {
                // One that this release cannot read is one that it does not show.
                if let Ok(measurement) = Measurement::try_from(&wire) {
                    self.line(&object(&measurement, &wire))?;
                    self.measured.push((measurement, wire));
                }
                Ok(())
            }
            Event::Remark(remark) => {
                self.line(&json!({ "event": remark.kind, "text": remark.text }))?;
                self.remarks.push(remark);
                Ok(())
            }
        }
    }

    /// Both directions of what was measured, by name.
    fn ways(&self) -> Vec<(String, &[StreamReading])> {
        let mut ways = Vec::new();
        for (measurement, _) in &self.measured {
            if let (Subject::Link(pair), Reading::Link(link)) = (&measurement.subject, &measurement.reading) {
                ways.push((format!("{} to {}", pair.from, pair.to), link.forward.as_slice()));
                ways.push((format!("{} to {}", pair.to, pair.from), link.backward.as_slice()));
            }
        }
        ways
    }

    /// The sweep as a drawing; none if nothing was measured.
    pub(crate) fn heat_map(&self) -> Option<String> {
        let ways = self.ways();
        (!ways.is_empty()).then(|| heat::map(&ways))
    }

    /// Whether all that could be measured was.
    pub(crate) fn is_whole(&self) -> bool {
        self.failed.is_empty()
    }

    /// Shows what is left to show.
    ///
    /// # Errors
    /// The output is gone.
    pub(crate) fn finish(self, exit: u8) -> io::Result<()> {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.line(&json!({
            "event": "finished",
            "exit": exit,
            "measured": self.measured.len(),
            "skipped": self.polite.values().map(Vec::len).sum::<usize>(),
            "failed": self.failed.len(),
            "seconds": self.begun.elapsed().as_secs_f64(),
        }))?;
        if self.form == Form::Human {
            let mut out = io::stdout().lock();
            if self.is_sweep {
                for (name, readings) in self.ways() {
                    heat::matrix(&mut out, &name, readings)?;
                }
            } else {
                tables(&mut out, &self.measured, SystemTime::now())?;
            }
            for kind in ["verdict", "route", "taught", "flag"] {
                let remarks: Vec<_> = self.remarks.iter().filter(|r| r.kind == kind).collect();
                if !remarks.is_empty() {
                    writeln!(out)?;
                }
                for remark in remarks {
                    let mark = if matches!(kind, "verdict" | "taught") {
                        ""
                    } else {
                        "! "
                    };
                    writeln!(out, "{mark}{}", remark.text)?;
                }
            }
        }
        let mut out = io::stderr().lock();
        // Where standard error is gone too, the exit code is all that is left to say.
        for (why, names) in &self.polite {
            drop(writeln!(out, "stage: not measured: {}: {why}", fold(names)));
        }
        for (name, failure) in &self.failed {
            drop(writeln!(
                out,
                "stage: not measured: {name}: {}",
                human::cause(failure)
            ));
            drop(writeln!(out, "  next: {}", failure.hint));
        }
        Ok(())
    }
}

/// Names of nodes folded; of ways, which no hostlist can fold, in a row.
fn fold(names: &[String]) -> String {
    if names.iter().any(|name| name.contains(' ')) {
        names.join(", ")
    } else {
        hostlist::fold(names.iter().map(String::as_str))
    }
}
