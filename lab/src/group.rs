//! A control group of a measurement's own: the processor time of all that ran in it, and the most memory that one of its
//! processes had.
//!
//! Version 1 (`cpuacct`) or 2 (`cpu.stat`), whichever the machine has.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use stage_core::units::ByteCount;

use crate::{Lab, LabError, names};

/// How often memory is looked at: a shorter peak may be missed.
const PERIOD: Duration = Duration::from_millis(50);

/// How long killed processes may take to be gone.
const GONE: Duration = Duration::from_secs(5);

/// A control group. Dropping it kills what is still in it.
#[derive(Debug)]
pub struct Group {
    dir: PathBuf,
    is_second: bool,
    peak: Arc<AtomicU64>,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Group {
    /// Makes one.
    ///
    /// # Errors
    /// No control groups are mounted, or this is not root.
    pub fn new() -> Result<Self, LabError> {
        let (top, is_second) = place().ok_or_else(|| LabError::Answer {
            tool: "/proc/self/mounts",
            wanted: "control groups (cpuacct, or version 2)".to_owned(),
        })?;
        let dir = top.join(names::prefix().trim_end_matches('-'));
        fs::create_dir(&dir).map_err(|source| LabError::Directory {
            path: dir.clone(),
            source,
        })?;
        let (peak, stopping) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (own, at, stop) = (Arc::clone(&peak), dir.clone(), Arc::clone(&stopping));
        let thread = std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let most = processes(&at).into_iter().filter_map(resident).max();
                own.fetch_max(most.unwrap_or(0), Ordering::Relaxed);
                std::thread::park_timeout(PERIOD);
            }
        });
        Ok(Self {
            dir,
            is_second,
            peak,
            stopping,
            thread: Some(thread),
        })
    }

    /// A command that runs a program on a node and in this group; the process that is started becomes the program itself.
    ///
    /// # Errors
    /// An unknown node.
    pub fn command(&self, lab: &Lab, node: &str, program: impl AsRef<OsStr>) -> Result<Command, LabError> {
        self.door().command(lab, node, program)
    }

    /// What is needed to start programs in it.
    pub(crate) fn door(&self) -> Door {
        Door(self.dir.join("cgroup.procs"))
    }

    /// User and system time of all that ran in it so far.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn cpu(&self) -> Result<Duration, LabError> {
        let path = self.dir.join(if self.is_second {
            "cpu.stat"
        } else {
            "cpuacct.usage"
        });
        let text = fs::read_to_string(&path).map_err(|source| LabError::Directory {
            path: path.clone(),
            source,
        })?;
        parse_cpu(&text, self.is_second).ok_or_else(|| LabError::Answer {
            tool: "the control group",
            wanted: format!("processor time in {}", path.display()),
        })
    }

    /// The most resident memory that one of its processes had at a time, shared pages too, since the last call.
    pub fn take_peak(&self) -> ByteCount {
        ByteCount(self.peak.swap(0, Ordering::Relaxed))
    }

    /// Kills what is in it, and waits until it is gone.
    pub fn end_all(&self) {
        end_all(&self.dir);
    }
}

/// Ends and removes groups of processes that are no more. Which those are, `is_left_behind` says by their names.
pub(crate) fn sweep(is_left_behind: impl Fn(&str) -> bool) {
    let tops = [place(), place_of("cpu")].into_iter().flatten();
    let entries = tops.filter_map(|(top, _)| fs::read_dir(top).ok());
    for entry in entries.flatten().flatten() {
        if entry.file_name().to_str().is_some_and(&is_left_behind) {
            end_all(&entry.path());
            drop(remove(&entry.path()));
        }
    }
}

fn end_all(dir: &Path) {
    let deadline = Instant::now() + GONE;
    loop {
        let left = processes(dir);
        if left.is_empty() || Instant::now() > deadline {
            return;
        }
        for pid in left {
            if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        // A child that its parent has not waited for yet is no more in the list.
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The file through which a process goes into a group.
#[derive(Debug, Clone)]
pub(crate) struct Door(PathBuf);

impl Door {
    pub(crate) fn command(
        &self,
        lab: &Lab,
        node: &str,
        program: impl AsRef<OsStr>,
    ) -> Result<Command, LabError> {
        let namespace = lab.namespace(node)?;
        let mut command = Command::new("sh");
        command
            .args(["-c", r#"echo $$ >"$1" && shift && exec "$@""#, "sh"])
            .arg(&self.0)
            .args(["ip", "netns", "exec", namespace])
            .arg(program);
        Ok(command)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.end_all();
        self.stopping.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            drop(thread.join());
        }
        // A drop has nobody to tell; an empty group takes nothing.
        drop(remove(&self.dir));
    }
}

/// The kernel frees a group a moment after its last process.
fn remove(dir: &Path) -> io::Result<()> {
    let deadline = Instant::now() + GONE;
    loop {
        match fs::remove_dir(dir) {
            Err(why) if why.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            other => return other,
        }
    }
}

fn place() -> Option<(PathBuf, bool)> {
    place_of("cpuacct")
}

fn place_of(controller: &str) -> Option<(PathBuf, bool)> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    find(&mounts, controller)
}

/// Where groups are made: the hierarchy of the controller if there is one, else version 2.
fn find(mounts: &str, controller: &str) -> Option<(PathBuf, bool)> {
    let of = |kind: &str, option: &str| {
        let mut lines = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        lines.find_map(|words| match words[..] {
            [_, at, is, options, ..] if is == kind => {
                let has = option.is_empty() || options.split(',').any(|known| known == option);
                has.then(|| PathBuf::from(at))
            }
            _ => None,
        })
    };
    of("cgroup", controller)
        .map(|at| (at, false))
        .or_else(|| Some((of("cgroup2", "")?, true)))
}

fn processes(dir: &Path) -> Vec<u32> {
    let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

fn resident(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = text.split(' ').nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

fn parse_cpu(text: &str, is_second: bool) -> Option<Duration> {
    if !is_second {
        return text.trim().parse().ok().map(Duration::from_nanos);
    }
    let mut lines = text.lines();
    let figure = lines.find_map(|line| line.strip_prefix("usage_usec "))?;
    figure.parse().ok().map(Duration::from_micros)
}

/// Little processor time for some processes, and a busy loop that wants it too. Dropping it ends the loop, and lets the
/// processes go.
#[derive(Debug)]
pub struct Quota {
    dir: PathBuf,
    top: PathBuf,
    busy: Vec<Child>,
}

impl Quota {
    /// Gives all that will be in it this share of one processor.
    ///
    /// # Errors
    /// No control group for processor time can be made.
    pub fn new(share: f64) -> Result<Self, LabError> {
        const PERIOD_US: f64 = 100_000.0;
        let (top, is_second) = place_of("cpu").ok_or_else(|| LabError::Answer {
            tool: "/proc/self/mounts",
            wanted: "a control group for processor time".to_owned(),
        })?;
        if is_second {
            // Where it is on already, and where it cannot be, the next step says.
            drop(fs::write(top.join("cgroup.subtree_control"), "+cpu"));
        }
        let dir = top.join(names::prefix().trim_end_matches('-'));
        fs::create_dir(&dir).map_err(|source| fault(&dir, source))?;
        let quota = Self {
            dir,
            top,
            busy: Vec::new(),
        };
        let most = (PERIOD_US * share).round();
        if is_second {
            quota.write("cpu.max", &format!("{most} {PERIOD_US}"))?;
        } else {
            quota.write("cpu.cfs_period_us", &PERIOD_US.to_string())?;
            quota.write("cpu.cfs_quota_us", &most.to_string())?;
        }
        Ok(quota)
    }

    fn write(&self, file: &str, text: &str) -> Result<(), LabError> {
        let path = self.dir.join(file);
        fs::write(&path, text).map_err(|source| fault(&path, source))
    }

    /// Puts a process in, with all its threads.
    ///
    /// # Errors
    /// There is no such process.
    pub fn take(&self, pid: u32) -> Result<(), LabError> {
        self.write("cgroup.procs", &pid.to_string())
    }

    /// Starts a busy loop in it, which ends by itself after a minute of processor time.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn keep_busy(&mut self) -> Result<(), LabError> {
        let script = r#"ulimit -t 60; echo $$ >"$1" && while :; do :; done"#;
        let mut command = Command::new("sh");
        command
            .args(["-c", script, "sh"])
            .arg(self.dir.join("cgroup.procs"));
        let child = command.spawn().map_err(|source| fault(Path::new("sh"), source))?;
        self.busy.push(child);
        Ok(())
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        for child in &mut self.busy {
            drop(child.kill());
            drop(child.wait());
        }
        // A drop has nobody to tell; who has ended meanwhile need not be let go.
        for pid in processes(&self.dir) {
            drop(fs::write(self.top.join("cgroup.procs"), pid.to_string()));
        }
        drop(remove(&self.dir));
    }
}

fn fault(path: &Path, source: io::Error) -> LabError {
    LabError::Directory {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_found_and_read() {
        let mixed = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
                     cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                     cgroup /sys/fs/cgroup/acct cgroup rw,cpu,cpuacct 0 0\n\
                     cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(
            find(mixed, "cpuacct"),
            Some((PathBuf::from("/sys/fs/cgroup/acct"), false))
        );
        assert_eq!(
            find(mixed, "cpu"),
            Some((PathBuf::from("/sys/fs/cgroup/cpu"), false))
        );
        let second = "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n";
        assert_eq!(
            find(second, "cpuacct"),
            Some((PathBuf::from("/sys/fs/cgroup"), true))
        );
        assert_eq!(find("", "cpuacct"), None);
        assert_eq!(parse_cpu("1500000\n", false), Some(Duration::from_micros(1500)));
        assert_eq!(
            parse_cpu("usage_usec 7\nuser_usec 3\n", true),
            Some(Duration::from_micros(7))
        );
        assert_eq!(parse_cpu("nr_periods 7\n", true), None);
    }
}
