//! What processes take: anonymous memory at its peak and processor time, from `/proc`.

use std::collections::BTreeMap;
use std::fs;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use stage_core::units::ByteCount;

/// How often memory is looked at. A peak shorter than this may be missed; nothing in the kernel keeps that of anonymous
/// memory alone.
const PERIOD: Duration = Duration::from_millis(20);

/// Ticks a second in `/proc/PID/stat`: what Linux shows to programs, whatever its own clock does.
const TICKS: f64 = 100.0;

/// What the processes of one name have taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// The most anonymous memory (RssAnon) that one of them had at a time.
    pub rss_anon_peak: ByteCount,
    /// Processor time, of all of them together.
    pub cpu: Duration,
}

#[derive(Debug, Default)]
struct Entry {
    pid: Option<u32>,
    peak: u64,
    /// Ticks of processes that have ended.
    past: u64,
    /// Ticks of the running one.
    now: u64,
}

impl Entry {
    fn sample(&mut self) {
        let Some(pid) = self.pid else { return };
        if let Some(bytes) = rss_anon(pid) {
            self.peak = self.peak.max(bytes);
        }
        if let Some(ticks) = ticks(pid) {
            self.now = ticks;
        }
    }
}

#[derive(Debug, Default)]
struct Table {
    stopping: bool,
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug, Default)]
struct Shared {
    table: Mutex<Table>,
    stop: Condvar,
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        // Figures stay figures whoever panicked.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread that looks at processes until it is dropped.
#[derive(Debug)]
pub(crate) struct Sampler {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    pub(crate) fn start() -> Self {
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            let mut table = own.table();
            while !table.stopping {
                table.entries.values_mut().for_each(Entry::sample);
                table = own
                    .stop
                    .wait_timeout(table, PERIOD)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            }
        });
        Self {
            shared,
            thread: Some(thread),
        }
    }

    /// Watches a process from now on, under a name that earlier ones may have had.
    pub(crate) fn add(&self, name: &str, pid: u32) {
        let mut table = self.shared.table();
        let entry = table.entries.entry(name.to_owned()).or_default();
        entry.pid = Some(pid);
        entry.sample();
    }

    /// A last look. To be called when the process has ended and before its parent has waited for it: after that, its
    /// id may be another's.
    pub(crate) fn end(&self, name: &str) {
        if let Some(entry) = self.shared.table().entries.get_mut(name) {
            entry.sample();
            entry.pid = None;
            entry.past += std::mem::take(&mut entry.now);
        }
    }

    pub(crate) fn usage(&self, name: &str) -> Usage {
        let mut table = self.shared.table();
        let Some(entry) = table.entries.get_mut(name) else {
            return Usage::default();
        };
        entry.sample();
        Usage {
            rss_anon_peak: ByteCount(entry.peak),
            cpu: Duration::from_secs_f64((entry.past + entry.now) as f64 / TICKS),
        }
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.shared.table().entries.keys().cloned().collect()
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.shared.table().stopping = true;
        self.shared.stop.notify_all();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn rss_anon(pid: u32) -> Option<u64> {
    parse_rss_anon(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

fn parse_rss_anon(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

fn ticks(pid: u32) -> Option<u64> {
    parse_ticks(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// User and system time, fields 14 and 15.
fn parse_ticks(stat: &str) -> Option<u64> {
    // The name, in brackets, may hold anything; what follows the last bracket is fields 3 and on.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(14 - 3);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_read() {
        assert_eq!(
            parse_rss_anon("VmRSS:\t 900 kB\nRssAnon:\t     128 kB\n"),
            Some(128 << 10)
        );
        assert_eq!(parse_rss_anon("Name:\tkthreadd\n"), None);
        assert_eq!(
            parse_ticks("7 (a) b) c) S 1 7 7 0 -1 4194560 100 0 0 0 25 17 0 0 20 0 1 0 99"),
            Some(42)
        );
        assert_eq!(parse_ticks(""), None);
    }

    #[test]
    fn a_process_is_counted_while_it_runs_and_after() {
        let sampler = Sampler::start();
        let held = vec![1_u8; 32 << 20];
        sampler.add("self", std::process::id());
        let peak = sampler.usage("self").rss_anon_peak;
        assert!(peak.0 >= held.len() as u64, "{peak}");
        sampler.end("self");
        let after = sampler.usage("self");
        assert!(after.rss_anon_peak >= peak);
        assert_eq!(after, sampler.usage("self"), "nothing is added once it has ended");
        assert_eq!(sampler.usage("nobody"), Usage::default());
    }
}
