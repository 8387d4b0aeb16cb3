//! Names of one lab's namespaces, and the removal of what dead labs left behind.
//!
//! A lab's prefix says which process made it: its id and its start time, so that a later process of the same id is
//! not taken for it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};

use crate::{LabError, group, tools};

const COMMON: &str = "stage-lab-";

/// Where `ip netns` keeps its names.
const NETNS: &str = "/run/netns";

/// Where `ip netns exec` finds files of a namespace's own.
const NETNS_ETC: &str = "/etc/netns";

/// Where nodes have their directories: memory, so that no disk is measured.
const MEMORY: &str = "/dev/shm";

/// A prefix that no other lab has.
pub(crate) fn prefix() -> String {
    static LABS: AtomicU32 = AtomicU32::new(0);
    let lab = LABS.fetch_add(1, Ordering::Relaxed);
    let pid = std::process::id();
    format!("{COMMON}{pid}-{}-{lab}-", started(pid).unwrap_or(0))
}

/// When a process started, in clock ticks since boot; `None` if there is none of this id.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in brackets, may hold anything; what follows the last bracket is fields 3 and on.
    stat.rsplit_once(')')?
        .1
        .split_whitespace()
        .nth(22 - 3)?
        .parse()
        .ok()
}

/// Whether a name is a lab's whose process is no more.
fn is_left_behind(name: &str) -> bool {
    let Some(rest) = name.strip_prefix(COMMON) else {
        return false;
    };
    let mut parts = rest.splitn(3, '-');
    let (Some(pid), Some(start)) = (parts.next(), parts.next()) else {
        return false;
    };
    match (pid.parse(), start.parse::<u64>()) {
        (Ok(pid), Ok(start)) => started(pid) != Some(start),
        _ => false,
    }
}

/// Removes namespaces and directories of labs whose process has died.
pub(crate) fn sweep() -> Vec<String> {
    let mut swept = Vec::new();
    group::sweep(is_left_behind);
    for name in listed(NETNS).into_iter().filter(|name| is_left_behind(name)) {
        if remove_namespace(&name).is_ok() {
            swept.push(name);
        }
    }
    for name in listed(NETNS_ETC).into_iter().filter(|name| is_left_behind(name)) {
        drop(fs::remove_dir_all(PathBuf::from(NETNS_ETC).join(name)));
    }
    for name in listed(MEMORY).into_iter().filter(|name| is_left_behind(name)) {
        unmount_below(&PathBuf::from(MEMORY).join(&name));
        if fs::remove_dir_all(PathBuf::from(MEMORY).join(&name)).is_ok() {
            swept.push(name);
        }
    }
    swept
}

/// Gives a namespace its own names: `ip netns exec` lays these files over those of the machine. Nobody is asked about a
/// name that is not there: whom the machine asks cannot be reached from here, and would be waited for.
pub(crate) fn set_hosts(name: &str, hosts: &str) -> Result<(), LabError> {
    let dir = Path::new(NETNS_ETC).join(name);
    let write = || {
        fs::create_dir_all(&dir)?;
        fs::write(dir.join("hosts"), hosts)?;
        fs::write(dir.join("resolv.conf"), "")
    };
    write().map_err(|source| LabError::Directory {
        path: dir.clone(),
        source,
    })
}

/// Takes away slow disks whose process has died: nothing below them can be removed.
fn unmount_below(dir: &Path) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    for point in points.map(Path::new).filter(|point| point.starts_with(dir)) {
        // What is busy or gone stays; the removal shows it.
        let _ = unmount(point, UnmountFlags::DETACH);
    }
}

fn listed(dir: &str) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}

/// Ends what runs in a namespace, and the namespace.
pub(crate) fn remove_namespace(name: &str) -> Result<(), LabError> {
    // A process that stays would keep the namespace and its links alive without a name.
    for pid in tools::ip(&["netns", "pids", name], "")
        .unwrap_or_default()
        .split_whitespace()
    {
        if let Some(pid) = pid.parse().ok().and_then(Pid::from_raw) {
            // It may have ended by itself meanwhile.
            let _ = kill_process(pid, Signal::KILL);
        }
    }
    // Not every namespace has some.
    drop(fs::remove_dir_all(Path::new(NETNS_ETC).join(name)));
    tools::ip(&["netns", "delete", name], "").map(drop)
}

/// The directory of a lab's nodes.
pub(crate) fn memory_dir(prefix: &str) -> PathBuf {
    PathBuf::from(MEMORY).join(prefix.trim_end_matches('-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_dead_labs_are_swept() {
        let own = prefix();
        assert_ne!(own, prefix());
        assert!(!is_left_behind(&format!("{own}node.n1")));
        // The same process id, another start: a process that is no more.
        let pid = std::process::id();
        assert!(is_left_behind(&format!("{COMMON}{pid}-1-0-fabric")));
        for foreign in ["lab-1-1-0-x", "stage-lab-", "stage-lab-x-y-z", "n1"] {
            assert!(!is_left_behind(foreign), "{foreign}");
        }
    }
}
