//! What a contestant finds: nodes, a file on the source, a place for each copy; and how its turn is counted.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use stage_core::units::{ByteCount, Rate};
use stage_lab::{Group, Lab, LabError};

use super::Setting;

/// How long a daemon may take until it listens.
const LISTENS: Duration = Duration::from_secs(10);

/// No tool takes as long for a file.
const TURN: Duration = Duration::from_secs(900);

pub(super) struct Field<'a> {
    pub(super) lab: &'a Lab,
    pub(super) group: &'a Group,
    pub(super) targets: Vec<String>,
    /// On the source, `n0`.
    pub(super) file: &'a Path,
    pub(super) size: ByteCount,
    digest: &'a str,
    /// What a link carries; `None` where nothing is shaped.
    pub(super) rate: Option<Rate>,
    logs: PathBuf,
}

/// What was counted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    pub(super) time: Duration,
    pub(super) cpu: Duration,
    pub(super) sent: ByteCount,
    pub(super) peak_rss: ByteCount,
}

impl<'a> Field<'a> {
    pub(super) fn new(
        lab: &'a Lab,
        group: &'a Group,
        setting: &Setting,
        file: &'a Path,
        size: ByteCount,
        digest: &'a str,
    ) -> Result<Self, LabError> {
        let field = Self {
            lab,
            group,
            targets: (1..=setting.targets).map(|at| format!("n{at}")).collect(),
            file,
            size,
            digest,
            rate: setting.shaped.then(|| setting.rate.parse().expect("a rate")),
            logs: lab.root_dir().join("logs"),
        };
        // Nothing of an earlier turn may be taken for this one's.
        for target in &field.targets {
            let dir = field.copy_dir(target);
            drop(fs::remove_dir_all(&dir));
            fs::create_dir_all(&dir).map_err(|why| fault(&dir, why))?;
        }
        fs::create_dir_all(&field.logs).map_err(|why| fault(&field.logs, why))?;
        Ok(field)
    }

    /// The directory that a target's copy lands in, under the file's own name.
    pub(super) fn copy_dir(&self, target: &str) -> PathBuf {
        self.lab.dir(target).join("copy")
    }

    pub(super) fn copy(&self, target: &str) -> PathBuf {
        self.copy_dir(target).join("payload")
    }

    /// A directory of the source for what a tool needs beside the file; empty.
    pub(super) fn scratch(&self, node: &str) -> Result<PathBuf, LabError> {
        let dir = self.lab.dir(node).join("scratch");
        drop(fs::remove_dir_all(&dir));
        fs::create_dir_all(&dir).map_err(|why| fault(&dir, why))?;
        Ok(dir)
    }

    pub(super) fn address(&self, node: &str) -> Result<IpAddr, LabError> {
        self.lab.address(node)
    }

    /// Starts a program on a node, in the group; what it says goes to a file.
    pub(super) fn start(&self, node: &str, words: &[&str]) -> Result<Started, LabError> {
        let (program, rest) = words.split_first().expect("a program");
        let mut command = self.group.command(self.lab, node, program)?;
        command.args(rest);
        self.spawn(
            command,
            &format!("{node}-{}", program.rsplit('/').next().unwrap_or(program)),
        )
    }

    fn spawn(&self, mut command: Command, name: &str) -> Result<Started, LabError> {
        let log = self.logs.join(format!("{name}.log"));
        let file = File::create(&log).map_err(|why| fault(&log, why))?;
        let errors = file.try_clone().map_err(|why| fault(&log, why))?;
        command.stdin(Stdio::null()).stdout(file).stderr(errors);
        let child = command.spawn().map_err(|why| LabError::Tool {
            command: name.to_owned(),
            message: why.to_string(),
        })?;
        Ok(Started {
            name: name.to_owned(),
            child,
            log,
        })
    }

    /// Counts what happens meanwhile.
    pub(super) fn count(&self, work: impl FnOnce() -> Result<(), LabError>) -> Result<Seen, LabError> {
        let (cpu, sent) = (self.group.cpu()?, self.sent()?);
        self.group.take_peak();
        let started = Instant::now();
        work()?;
        let time = started.elapsed();
        Ok(Seen {
            time,
            cpu: self.group.cpu()?.saturating_sub(cpu),
            sent: self.sent()?.saturating_sub(sent),
            peak_rss: self.group.take_peak(),
        })
    }

    /// What has left the source's interface.
    pub(super) fn sent(&self) -> Result<ByteCount, LabError> {
        let source = "n0".parse().expect("a name");
        let edge = self.lab.topology().interface_edge(&source, 0);
        Ok(self
            .lab
            .counters(edge.expect("the source has an interface"))?
            .bytes)
    }

    /// What a careful user does next: the SHA-256 of each copy on its node, and of the file at the source, all at once.
    pub(super) fn check(&self) -> Result<Seen, LabError> {
        let copies = self
            .targets
            .iter()
            .map(|target| (target.clone(), self.copy(target)));
        self.check_at(copies.collect())
    }

    /// As [`Self::check`], of copies that lie elsewhere.
    pub(super) fn check_at(&self, copies: Vec<(String, PathBuf)>) -> Result<Seen, LabError> {
        let mut said = Vec::new();
        let seen = self.count(|| {
            let source = ("n0".to_owned(), self.file.to_owned());
            let started: Vec<Started> = std::iter::once(source)
                .chain(copies)
                .map(|(node, path)| self.start(&node, &["openssl", "dgst", "-sha256", "-r", text(&path)]))
                .collect::<Result<_, _>>()?;
            for one in started {
                said.push(one.finish()?);
            }
            Ok(())
        })?;
        let right = said.iter().filter(|said| said.starts_with(self.digest)).count();
        if right != self.targets.len() + 1 {
            return Err(LabError::Answer {
                tool: "openssl dgst",
                wanted: format!("right digest on {} nodes: {right}", self.targets.len() + 1),
            });
        }
        Ok(seen)
    }

    /// Touches as much memory as the copies take. A virtual machine's first touch of a page is dear, and later ones are not.
    pub(super) fn warm_up(&self) -> Result<(), LabError> {
        let path = self.lab.root_dir().join("warm-up");
        let write = || -> io::Result<()> {
            let block = vec![1; 1 << 20];
            let mut file = File::create(&path)?;
            for _ in 0..(self.size.0 * self.targets.len() as u64).div_ceil(block.len() as u64) {
                file.write_all(&block)?;
            }
            drop(file);
            fs::remove_file(&path)
        };
        write().map_err(|why| fault(&path, why))
    }
}

impl Drop for Field<'_> {
    fn drop(&mut self) {
        self.group.end_all();
        for target in &self.targets {
            // Memory is given back; what is not there takes none.
            drop(fs::remove_dir_all(self.copy_dir(target)));
        }
    }
}

/// A program that runs. Dropping it kills it.
pub(super) struct Started {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Started {
    /// Waits until it listens on a TCP port, or has bound a UDP one.
    pub(super) fn wait_for_port(&mut self, protocol: &str, port: u16) -> Result<(), LabError> {
        let deadline = Instant::now() + LISTENS;
        loop {
            // A process shows the sockets of its namespace.
            let files = [protocol.to_owned(), format!("{protocol}6")];
            let bound = files.iter().any(|file| {
                let table = fs::read_to_string(format!("/proc/{}/net/{file}", self.child.id()));
                is_bound(&table.unwrap_or_default(), port, protocol == "tcp")
            });
            if bound {
                return Ok(());
            }
            let ended = self.child.try_wait().ok().flatten();
            if ended.is_some() || Instant::now() > deadline {
                return Err(LabError::Late {
                    what: format!("{} on port {port}", self.name),
                    within: LISTENS,
                    state: self.said(),
                });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for its good end. What it said.
    pub(super) fn finish(mut self) -> Result<String, LabError> {
        let deadline = Instant::now() + TURN;
        let status: ExitStatus = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
                Ok(None) => {
                    return Err(LabError::Late {
                        what: format!("the end of {}", self.name),
                        within: TURN,
                        state: self.said(),
                    });
                }
                Err(why) => return Err(fault(&self.log, why)),
            }
        };
        let said = self.said();
        if status.success() {
            return Ok(said);
        }
        Err(LabError::Tool {
            command: self.name.clone(),
            message: format!("{status}: {}", last_lines(&said)),
        })
    }

    pub(super) fn said(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Waits for all, one after another.
pub(super) fn finish_all(all: Vec<Started>) -> Result<(), LabError> {
    all.into_iter().try_for_each(|one| one.finish().map(drop))
}

fn last_lines(said: &str) -> String {
    let lines: Vec<&str> = said.trim().lines().collect();
    lines[lines.len().saturating_sub(3)..].join(" / ")
}

/// Whether a table of `/proc/net` has a socket bound to this port; of TCP's, one that listens.
fn is_bound(table: &str, port: u16, listens: bool) -> bool {
    let wanted = format!(":{port:04X}");
    table.lines().skip(1).any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let state = words.get(3).is_some_and(|state| !listens || *state == "0A");
        state && words.get(1).is_some_and(|local| local.ends_with(&wanted))
    })
}

/// A path as a word of a command line.
pub(super) fn text(path: &Path) -> &str {
    crate::bench::word(path)
}

pub(super) fn fault(path: &Path, source: io::Error) -> LabError {
    LabError::Directory {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_found_in_the_kernels_tables() {
        let table = "  sl  local_address rem_address   st tx_queue\n   \
                     0: 0100007F:1B58 00000000:0000 0A 00000000\n   \
                     1: 0100007F:1B59 0100007F:1B58 01 00000000\n";
        assert!(is_bound(table, 7000, true));
        assert!(!is_bound(table, 7001, true), "connected, but does not listen");
        assert!(is_bound(table, 7001, false));
        assert!(!is_bound(table, 7002, false));
        assert!(!is_bound("", 7000, true));
    }

    #[test]
    fn an_error_tells_the_end_of_what_was_said() {
        assert_eq!(last_lines("a\nb\nc\nd\n"), "b / c / d");
        assert_eq!(last_lines(""), "");
    }
}
