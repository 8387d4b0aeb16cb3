//! A command of the CLI at work: its JSON lines with the moments at which they came.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use serde_json::Value;

use crate::LabError;
use crate::usage::Sampler;

/// A line of `--json`.
#[derive(Debug, Clone)]
pub struct Event {
    /// When it came, from the start of the program.
    pub at: Duration,
    /// What it says.
    pub value: Value,
}

impl Event {
    /// Its `"event"`.
    pub fn kind(&self) -> &str {
        self.value["event"].as_str().unwrap_or_default()
    }
}

/// How a command of the CLI went.
#[derive(Debug, Clone)]
pub struct Pushed {
    /// Its exit code; `None` if a signal ended it.
    pub exit: Option<i32>,
    /// Its lines in their order.
    pub events: Vec<Event>,
    /// From its start to its end.
    pub wall: Duration,
    /// What it wrote on standard error.
    pub errors: String,
}

impl Pushed {
    /// The last line: `finished` or `error`.
    pub fn end(&self) -> &Value {
        self.events.last().map_or(&Value::Null, |event| &event.value)
    }

    /// A figure of the last line.
    pub fn figure(&self, name: &str) -> Option<f64> {
        self.end()[name].as_f64()
    }

    /// The targets as the last line tells of them.
    pub fn nodes(&self) -> &[Value] {
        self.end()["nodes"].as_array().map_or(&[], Vec::as_slice)
    }

    /// The last line's words on one target.
    pub fn node(&self, name: &str) -> &Value {
        let mut nodes = self.nodes().iter();
        nodes.find(|node| node["node"] == name).unwrap_or(&Value::Null)
    }

    /// When the command told of the last copy that it was published.
    pub fn last_published(&self) -> Option<Duration> {
        let mut events = self.events.iter().rev();
        events
            .find(|event| event.kind() == "node" && event.value["state"] == "published")
            .map(|event| event.at)
    }
}

#[derive(Debug, Default)]
struct Lines {
    events: Vec<Event>,
    /// When the output ended.
    ended: Option<Duration>,
}

#[derive(Debug, Default)]
struct Seen {
    lines: Mutex<Lines>,
    news: Condvar,
}

impl Seen {
    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `wanted` finds something, with a deadline.
    fn wait<T>(&self, within: Duration, wanted: impl Fn(&Lines) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + within;
        let mut lines = self.lines();
        loop {
            if let Some(found) = wanted(&lines) {
                return Some(found);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            lines = self
                .news
                .wait_timeout(lines, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// A command of the CLI that runs. Dropping it kills it.
#[derive(Debug)]
pub struct Running {
    name: &'static str,
    child: Child,
    sampler: Arc<Sampler>,
    seen: Arc<Seen>,
    reader: Option<JoinHandle<()>>,
    errors: PathBuf,
    reaped: bool,
}

impl Running {
    /// Takes over a child whose standard output is piped and whose standard error goes to the file `errors`.
    pub(super) fn new(
        name: &'static str,
        mut child: Child,
        started: Instant,
        errors: PathBuf,
        sampler: Arc<Sampler>,
    ) -> Self {
        sampler.add(name, child.id());
        let seen = Arc::new(Seen::default());
        let output = child.stdout.take().expect("its output is piped");
        let own = Arc::clone(&seen);
        let reader = std::thread::spawn(move || read(output, started, &own));
        Self {
            name,
            child,
            sampler,
            seen,
            reader: Some(reader),
            errors,
            reaped: false,
        }
    }

    /// The next event, or one that has come already, that `wanted` takes.
    ///
    /// # Errors
    /// It does not come in time.
    pub fn wait_for(
        &self,
        what: &str,
        within: Duration,
        wanted: impl Fn(&Event) -> bool,
    ) -> Result<Event, LabError> {
        // An output that has ended brings nothing more: `Some(None)`.
        let found = self.seen.wait(within, |lines| {
            let found = lines.events.iter().find(|event| wanted(event)).cloned();
            (found.is_some() || lines.ended.is_some()).then_some(found)
        });
        found.flatten().ok_or_else(|| self.late(what, within))
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        self.seen.lines().ended.is_some()
    }

    /// What it last said, for an error.
    pub fn state(&self) -> String {
        let lines = self.seen.lines();
        let last = lines.events.last().map(|event| event.value.to_string());
        format!(
            "the last line was {}, standard error: {}",
            last.as_deref().unwrap_or("none"),
            self.errors().trim()
        )
    }

    /// The job that it made.
    ///
    /// # Errors
    /// There is none in time.
    pub fn job(&self, within: Duration) -> Result<String, LabError> {
        let event = self.wait_for("the job's id", within, |event| event.kind() == "submitted")?;
        Ok(event.value["job"].as_str().unwrap_or_default().to_owned())
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It does not end in time; then it is killed.
    pub fn finish(mut self, within: Duration) -> Result<Pushed, LabError> {
        let wall = self
            .seen
            .wait(within, |lines| lines.ended)
            .ok_or_else(|| self.late("the command's end", within))?;
        let exit = self.reap();
        Ok(Pushed {
            exit,
            events: std::mem::take(&mut self.seen.lines().events),
            wall,
            errors: self.errors(),
        })
    }

    fn reap(&mut self) -> Option<i32> {
        // Not waited for yet, it still tells what it took.
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
        }
        self.sampler.end(self.name);
        self.reaped = true;
        let status = self.child.wait().ok();
        if let Some(reader) = self.reader.take() {
            drop(reader.join());
        }
        status.and_then(|status| status.code())
    }

    fn errors(&self) -> String {
        std::fs::read_to_string(&self.errors).unwrap_or_default()
    }

    fn late(&self, what: &str, within: Duration) -> LabError {
        LabError::Late {
            what: what.to_owned(),
            within,
            state: self.state(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.reaped {
            drop(self.child.kill());
            self.reap();
        }
    }
}

fn read(output: ChildStdout, started: Instant, seen: &Seen) {
    for line in BufReader::new(output).lines().map_while(Result::ok) {
        let at = started.elapsed();
        // A line that is no JSON is kept as text: whoever looks for an event will show it.
        let value = serde_json::from_str(&line).unwrap_or(Value::String(line));
        seen.lines().events.push(Event { at, value });
        seen.news.notify_all();
    }
    seen.lines().ended = Some(started.elapsed());
    seen.news.notify_all();
}
