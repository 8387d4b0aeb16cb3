//! Generations that were replaced: how long they stay, and who keeps them.

use std::fs::{self, File};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime};

use stage_core::assignment::IfExists;
use stage_transfer::target::retired::{Swept, sweep};

use super::bench::{Bench, Tree};

const HOUR: Duration = Duration::from_secs(3600);

/// Three files, of which `a` and the small ones are the same in every version.
fn version(n: u8) -> Tree {
    let mut tree = Tree::default();
    tree.dir("refdb", 0o755)
        .file(b"refdb/a", 0o644, crate::bench::content(100_000))
        .dir("refdb/sub", 0o555)
        .file(b"refdb/sub/same", 0o444, b"same".to_vec())
        .file(b"refdb/sub/version", 0o444, vec![n; 100]);
    tree
}

/// A node on which version 1 was replaced by version 2, and where version 1 lies.
fn replaced(keep: Duration) -> (Bench, std::path::PathBuf) {
    let mut bench = Bench::new(version(1));
    bench.push();
    let old = fs::canonicalize(bench.name()).unwrap();
    bench.keep = keep;
    bench.tree = version(2);
    bench.next(IfExists::Replace).push();
    assert_eq!(bench.generations().len(), 2);
    (bench, old)
}

fn sweep_in(bench: &Bench, time: Duration) -> Swept {
    sweep(&bench.roots, &bench.state, SystemTime::now() + time)
}

/// The same where something is to go: a process that another test starts has this one's descriptors for a moment.
fn gone_in(bench: &Bench, time: Duration) -> Swept {
    (0..20)
        .map(|_| sweep_in(bench, time))
        .find(|swept| !swept.removed.is_empty())
        .unwrap_or_default()
}

#[test]
fn one_goes_when_its_time_is_over() {
    let (bench, old) = replaced(HOUR);
    let swept = sweep_in(&bench, Duration::ZERO);
    assert_eq!(swept.removed, [""; 0]);
    assert!(swept.next.unwrap() > HOUR - Duration::from_secs(60), "{swept:?}");
    assert!(old.exists());
    let swept = gone_in(&bench, HOUR + Duration::from_secs(10));
    assert_eq!(swept.removed, [old.to_str().unwrap()]);
    assert_eq!(swept.next, None);
    assert!(!old.exists());
    assert_eq!(bench.generations().len(), 1);
    bench.assert_published();
    // Nothing is left of it, and nothing more to do.
    assert_eq!(fs::read_dir(bench.state.join("retired")).unwrap().count(), 0);
    assert_eq!(sweep_in(&bench, 100 * HOUR), Swept::default());
    bench.assert_published();
}

#[test]
fn one_that_is_to_go_at_once_stays_for_a_moment() {
    let (bench, old) = replaced(Duration::ZERO);
    assert_eq!(sweep_in(&bench, Duration::ZERO).removed, [""; 0]);
    assert!(old.exists());
    assert_eq!(gone_in(&bench, Duration::from_secs(3)).removed.len(), 1);
}

#[test]
fn what_a_name_leads_to_never_goes() {
    let (mut bench, old) = replaced(Duration::ZERO);
    // The old content again, under a name of its own.
    bench.tree = version(1);
    bench.next(IfExists::Replace).push();
    assert_eq!(bench.generations().len(), 3);
    assert_eq!(gone_in(&bench, HOUR).removed.len(), 2);
    assert!(!old.exists());
    bench.assert_published();
    assert_eq!(bench.generations().len(), 1);
    // And once more to a name that was in use before.
    bench.tree = version(2);
    bench.next(IfExists::Replace).push();
    bench.assert_published();
    assert_eq!(gone_in(&bench, HOUR).removed.len(), 1);
    bench.assert_published();
}

#[test]
fn somebody_else_who_put_the_name_back_keeps_what_it_leads_to() {
    let (bench, old) = replaced(Duration::ZERO);
    fs::remove_file(bench.name()).unwrap();
    let text = format!(".stage/{}", old.file_name().unwrap().to_str().unwrap());
    std::os::unix::fs::symlink(text, bench.name()).unwrap();
    let swept = sweep_in(&bench, HOUR);
    assert_eq!(swept, Swept::default());
    assert!(old.join("a").exists());
}

#[test]
fn one_with_an_open_file_stays_until_it_is_closed() {
    // Whether only it has the file, or the generation that is published shares it.
    for file in ["sub/version", "a"] {
        let (bench, old) = replaced(Duration::ZERO);
        let open = File::open(old.join(file)).unwrap();
        let swept = sweep_in(&bench, HOUR);
        assert_eq!(swept.removed, [""; 0], "{file}");
        assert!(swept.next.is_some());
        drop(open);
        assert_eq!(gone_in(&bench, HOUR).removed.len(), 1, "{file}");
        bench.assert_published();
    }
}

/// Somebody else, who does one thing and says when it is done; until killed.
struct Reader(Child);

impl Reader {
    fn new(script: &str, at: &std::path::Path) -> Self {
        use std::io::Read as _;
        let mut child = Command::new("sh")
            .args(["-c", &format!("{script}; echo; exec sleep 600")])
            .current_dir("/")
            .env("AT", at)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = [0];
        child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
        Self(child)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn one_that_another_process_is_in_stays() {
    for script in [
        r#"cd "$AT""#,
        r#"cd "$AT/sub""#,
        r#"exec 3<"$AT/sub/version""#,
        r#"exec 3<"$AT/sub""#,
    ] {
        let (bench, old) = replaced(Duration::ZERO);
        let reader = Reader::new(script, &old);
        assert_eq!(sweep_in(&bench, HOUR).removed, [""; 0], "{script}");
        drop(reader);
        assert_eq!(gone_in(&bench, HOUR).removed.len(), 1, "{script}");
    }
}

#[test]
fn who_reads_the_new_one_does_not_keep_the_old_one_where_that_can_be_told() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root sees all that is open");
        return;
    }
    let (bench, old) = replaced(Duration::ZERO);
    // A file that both share, under the new one's name.
    let reader = Reader::new(r#"exec 3<"$AT/a""#, &bench.name());
    assert_eq!(gone_in(&bench, HOUR).removed, [old.to_str().unwrap()]);
    drop(reader);
    bench.assert_published();
}

#[test]
fn a_directory_that_was_exchanged_is_kept_as_long() {
    let mut bench = Bench::new(version(2));
    fs::create_dir_all(bench.dir()).unwrap();
    version(1).make("refdb", &bench.name());
    bench.keep = HOUR;
    bench.next(IfExists::Replace).push();
    assert_eq!(sweep_in(&bench, HOUR / 2).removed, [""; 0]);
    assert_eq!(bench.generations().len(), 2);
    assert_eq!(gone_in(&bench, 2 * HOUR).removed.len(), 1);
    assert_eq!(bench.generations().len(), 1);
    bench.assert_published();
}

#[test]
fn what_lies_there_instead_is_not_touched() {
    let (bench, old) = replaced(Duration::ZERO);
    fs::rename(&old, bench.root.join("aside")).unwrap();
    fs::create_dir(&old).unwrap();
    fs::write(old.join("mine"), "mine").unwrap();
    // Not the inode that was replaced: the kernel has not given that one to somebody else, since it still is.
    assert_eq!(sweep_in(&bench, HOUR), Swept::default());
    assert!(old.join("mine").exists());
}

#[test]
fn a_root_that_is_away_keeps_its_notes() {
    let (bench, old) = replaced(Duration::ZERO);
    let aside = bench.root.with_extension("aside");
    fs::rename(&bench.root, &aside).unwrap();
    assert_eq!(sweep_in(&bench, HOUR), Swept::default());
    fs::rename(&aside, &bench.root).unwrap();
    assert_eq!(gone_in(&bench, HOUR).removed, [old.to_str().unwrap()]);
}

#[test]
fn a_later_push_that_is_cancelled_leaves_those_before_it() {
    let (mut bench, old) = replaced(HOUR);
    let now = fs::canonicalize(bench.name()).unwrap();
    bench.tree = version(3);
    let target = bench.next(IfExists::Replace).ready();
    bench.receive(&target);
    target.discard().unwrap();
    assert!(old.exists() && now.exists());
    // The job that published a generation is forgotten, after another one has replaced that.
    bench.tree = version(4);
    let target = bench.next(IfExists::Replace).ready();
    bench.receive(&target);
    target.publish(&bench.fin()).unwrap();
    drop(target);
    let (job, fourth) = (bench.job, fs::canonicalize(bench.name()).unwrap());
    bench.tree = version(5);
    bench.next(IfExists::Replace).push();
    stage_transfer::target::discard_job(&bench.roots, &bench.state, job).unwrap();
    assert!(fourth.exists(), "its time is not over");
    bench.assert_published();
}

/// Not a test of its own: a sweep that is cut short.
#[test]
#[ignore = "run by the test below as a child"]
fn child() {
    if let Some(dir) = std::env::var_os("STAGE_TEST_CRASH_DIR") {
        let bench = Bench::within(std::path::Path::new(&dir), version(2));
        sweep_in(&bench, HOUR);
    }
}

#[test]
fn a_removal_that_was_cut_short_is_brought_to_its_end() {
    use std::os::unix::process::ExitStatusExt as _;
    let dir = tempfile::tempdir().unwrap();
    let mut bench = Bench::within(dir.path(), version(1));
    bench.keep = Duration::ZERO;
    bench.push();
    let old = fs::canonicalize(bench.name()).unwrap();
    bench.tree = version(2);
    bench.next(IfExists::Replace).push();
    let die = || {
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "tree::retire::child", "--quiet"])
            .env("STAGE_CRASH_AT", "retired_away")
            .env("STAGE_TEST_CRASH_DIR", dir.path())
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.signal(), Some(9), "the child was to be killed");
    };
    die();
    assert!(!old.exists(), "it goes in one step");
    assert_eq!(bench.generations().len(), 2);
    assert_eq!(gone_in(&bench, HOUR).removed, [old.to_str().unwrap()]);
    assert_eq!(bench.generations().len(), 1);
    // The same content comes back before the end of the removal is reached.
    bench.tree = version(1);
    bench.next(IfExists::Replace).push();
    die();
    bench.tree = version(2);
    bench.next(IfExists::Replace).push();
    sweep_in(&bench, HOUR);
    assert_eq!(bench.generations().len(), 1);
    bench.assert_published();
}
