//! Directories that are replaced while they are read.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::fs::{Dir, Mode, OFlags};

use crate::cluster::{Cluster, Ran};

/// Files that carry the number of their generation, at two depths.
const NUMBERED: [&str; 10] = [
    "vol.00",
    "vol.01",
    "vol.02",
    "vol.03",
    "vol.04",
    "sub/vol.05",
    "sub/vol.06",
    "sub/vol.07",
    "sub/vol.08",
    "sub/vol.09",
];
/// And one that is the same in all, which generations share.
const SAME: &str = "sub/taxonomy";

/// Writes the source's generation of this number.
fn write(source: &Path, number: u64) {
    fs::create_dir_all(source.join("sub")).unwrap();
    for (name, at) in NUMBERED.iter().zip(0..) {
        let mut bytes = format!("{number:08}").into_bytes();
        bytes.resize(8 + 37_000 * (at + 1), number as u8);
        fs::write(source.join(name), bytes).unwrap();
    }
    if number == 0 {
        fs::write(source.join(SAME), vec![7; 100_000]).unwrap();
    }
}

/// Reads what a name leads to: resolved once, all else below that descriptor. The number that all files carry, or what is
/// wrong with what was seen; `None` where nothing is published.
fn read(name: &Path) -> Result<Option<u64>, String> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let top = match rustix::fs::open(name, flags, Mode::empty()) {
        Ok(top) => top,
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        Err(e) => return Err(format!("cannot be opened: {e}")),
    };
    let contents = |file: &str| -> Result<Vec<u8>, String> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let opened =
            rustix::fs::openat(&top, file, flags, Mode::empty()).map_err(|e| format!("{file}: {e}"))?;
        let mut bytes = Vec::new();
        File::from(opened)
            .read_to_end(&mut bytes)
            .map_err(|e| format!("{file}: {e}"))?;
        Ok(bytes)
    };
    let mut numbers = BTreeSet::new();
    for (file, at) in NUMBERED.iter().zip(0..) {
        let bytes = contents(file)?;
        if bytes.len() != 8 + 37_000 * (at + 1) {
            return Err(format!("{file} has {} bytes", bytes.len()));
        }
        let number: u64 = std::str::from_utf8(&bytes[..8])
            .ok()
            .and_then(|digits| digits.parse().ok())
            .ok_or(format!("{file} carries no number"))?;
        if bytes[8..].iter().any(|byte| *byte != number as u8) {
            return Err(format!("{file} is mixed"));
        }
        numbers.insert(number);
    }
    if contents(SAME)? != [7; 100_000] {
        return Err(format!("{SAME} is another"));
    }
    let mut names = BTreeSet::new();
    for dir in [".", "sub"] {
        let inner = rustix::fs::openat(&top, dir, flags, Mode::empty()).map_err(|e| format!("{dir}: {e}"))?;
        for entry in Dir::new(inner).map_err(|e| e.to_string())? {
            names.insert(
                entry
                    .map_err(|e| e.to_string())?
                    .file_name()
                    .to_string_lossy()
                    .into_owned(),
            );
        }
    }
    // With ".", ".." and "sub".
    if names.len() != NUMBERED.len() + 4 {
        return Err(format!("there are {names:?}"));
    }
    match numbers.into_iter().collect::<Vec<_>>()[..] {
        [number] => Ok(Some(number)),
        ref several => Err(format!("files of the generations {several:?} are mixed")),
    }
}

/// Reads again and again until told to stop.
struct Reader {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(u64, BTreeSet<u64>, Vec<String>)>,
}

impl Reader {
    fn new(name: PathBuf) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let stop = stop.clone();
            move || {
                let (mut rounds, mut seen, mut wrong) = (0, BTreeSet::new(), Vec::new());
                let mut newest = 0;
                while !stop.load(Ordering::Relaxed) {
                    rounds += 1;
                    match read(&name) {
                        Ok(Some(number)) if number < newest => {
                            wrong.push(format!("after {newest} comes {number}"));
                        }
                        Ok(Some(number)) => {
                            newest = number;
                            seen.insert(number);
                        }
                        Ok(None) if newest > 0 => wrong.push("it is gone".to_owned()),
                        Ok(None) => {}
                        Err(what) => wrong.push(format!("after {newest}: {what}")),
                    }
                }
                (rounds, seen, wrong)
            }
        });
        Self { stop, thread }
    }

    fn end(self) -> (u64, BTreeSet<u64>, Vec<String>) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// The same numbers in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// What is around the switch of a name, where dying is most delicate.
const POINTS: [&str; 5] = [
    "before_rename",
    "after_generation",
    "after_retire",
    "after_rename",
    "after_dirsync",
];

#[test]
fn fifty_replacing_pushes_and_kills_show_no_mixed_view() {
    const PUSHES: u64 = 50;
    let mut cluster = Cluster::start(2);
    let source = cluster.path("refdb");
    let mut dice = Dice(0x5eed);
    let more = ["--to", "n1", "--if-exists", "replace", "--keep-previous", "0s"];
    write(&source, 0);
    cluster.push(&source, &more).expect(0);
    let reader = Reader::new(cluster.root(1).join("refdb"));
    for number in 1..=PUSHES {
        write(&source, number);
        let point = (number % 5 == 0).then(|| POINTS[(number / 5) as usize % POINTS.len()]);
        if let Some(point) = point {
            cluster.kill_agent(1);
            cluster.wait_up(1);
            cluster.start_agent_to_die_at(1, point);
            cluster.wait_up(2);
        }
        let push = cluster
            .push_command(&source, &more)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        if point.is_some() {
            cluster.wait_dead(1);
            cluster.start_agent(1);
        } else if dice.below(3) == 0 {
            // At any moment of the push, not at a state of it.
            std::thread::sleep(Duration::from_millis(dice.below(400)));
            cluster.kill_agent(1);
            cluster.start_agent(1);
        }
        let ran = Ran::of(push.wait_with_output().unwrap());
        if ran.exit == 4 {
            // The agent was away when the push asked who can take it: nothing was moved.
            cluster.wait_up(2);
            cluster.push(&source, &more).expect(0);
        } else {
            ran.expect(0);
        }
        assert_eq!(read(&cluster.root(1).join("refdb")), Ok(Some(number)));
    }
    let (rounds, seen, wrong) = reader.end();
    assert_eq!(wrong, [""; 0], "in {rounds} rounds");
    assert!(rounds > PUSHES && seen.len() > 10, "{rounds} rounds saw {seen:?}");
    // Nobody reads the old ones any more.
    let all = cluster.root(1).join(".stage");
    cluster.wait_for("old generations to go", || {
        fs::read_dir(&all).unwrap().count() == 1
    });
    assert_eq!(read(&cluster.root(1).join("refdb")), Ok(Some(PUSHES)));
    cluster.wait_clean();
}

#[test]
fn a_generation_stays_its_time_and_while_it_is_read() {
    let mut cluster = Cluster::start(2);
    let source = cluster.path("refdb");
    let name = cluster.root(1).join("refdb");
    let push = |cluster: &Cluster, number: u64, keep: &str| {
        write(&source, number);
        let more = ["--to", "n1", "--if-exists", "replace", "--keep-previous", keep];
        cluster.push(&source, &more).expect(0);
        fs::canonicalize(&name).unwrap()
    };
    let first = push(&cluster, 0, "0s");
    // Somebody has a file of it open, and maps nothing else.
    let open = File::open(first.join("vol.01")).unwrap();
    let second = push(&cluster, 1, "0s");
    let third = push(&cluster, 2, "1h");
    // A restart forgets nothing.
    cluster.kill_agent(1);
    cluster.start_agent(1);
    cluster.wait_up(2);
    let fourth = push(&cluster, 3, "0s");
    cluster.wait_for("the third to go", || !third.exists());
    assert!(first.exists(), "a file of it is open");
    assert!(second.exists(), "its hour is not over");
    assert!(fourth.exists());
    drop(open);
    cluster.wait_for("the first to go", || !first.exists());
    assert!(second.exists() && fourth.exists());
    assert_eq!(read(&name), Ok(Some(3)));
}
