//! Too little space: said with numbers, before a byte moves or when it vanishes later, on file systems that the tests
//! mount (root).

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::cluster::{Cluster, text};
use crate::faults::{Push, kept};

const CHUNK: u64 = 1 << 20;
/// What a directory is counted as.
const BLOCK: u64 = 4096;

/// Whether file systems can be mounted: without root such tests are left out, visibly, unless CI wants them all.
fn may_mount() -> bool {
    if std::env::var_os("STAGE_TEST_NETNS").is_some_and(|set| set == "1") {
        return true;
    }
    eprintln!("skipped: it mounts file systems, which needs root; STAGE_TEST_NETNS=1 runs it");
    false
}

struct Mount(PathBuf);

impl Mount {
    fn run(command: &mut Command) {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{command:?}: {output:?}");
    }

    /// Memory, where space is promised page by page.
    fn tmpfs(at: &Path, size: u64) -> Self {
        Self::run(
            Command::new("mount")
                .args(["-t", "tmpfs", "-o"])
                .arg(format!("size={size}"))
                .arg("stage-test")
                .arg(at),
        );
        Self(at.to_owned())
    }

    /// A file system that cannot reserve space, so that others can take what was free.
    fn ext2(at: &Path, image: &Path, size: u64) -> Self {
        File::create(image).unwrap().set_len(size).unwrap();
        Self::run(Command::new("mkfs.ext2").args(["-q", "-F", "-m", "0"]).arg(image));
        Self::run(Command::new("mount").args(["-o", "loop"]).arg(image).arg(at));
        fs::remove_dir(at.join("lost+found")).unwrap();
        Self(at.to_owned())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // The agent may still have it open.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// A cluster with something mounted where n2 writes.
fn cluster(nodes: usize, mount: impl FnOnce(&Cluster) -> Mount) -> (Cluster, Mount) {
    let mut cluster = Cluster::prepare(nodes);
    let mount = mount(&cluster);
    cluster.start_coordinator();
    (0..nodes).for_each(|node| cluster.start_agent(node));
    cluster.wait_up(nodes);
    (cluster, mount)
}

#[test]
fn each_rule_says_who_is_short_by_how_much() {
    if !may_mount() {
        return;
    }
    let (cluster, _mount) = cluster(4, |c| Mount::tmpfs(&c.root(2), 8 * CHUNK));
    let size = 16 * CHUNK;
    let push = |name: &str, rule: &str| {
        let source = cluster.source(name, size);
        cluster.push(&source, &["--to", "targets", "--unfit", rule])
    };
    for (rule, exit, state) in [("wait", 5, "open"), ("skip", 5, "partial")] {
        let ran = push(&format!("{rule}.db"), rule).expect(exit);
        assert_eq!(ran.last()["state"], state);
        let error = &ran.node("n2")["error"];
        assert_eq!(
            (ran.node("n2")["state"].as_str(), error["code"].as_str()),
            (Some("unfit"), Some("no_space"))
        );
        let short = error["short_by_bytes"].as_u64().unwrap();
        assert!((8 * CHUNK..size).contains(&short), "{error}");
        for words in ["n2", "short by", "needs      free", "16.0"] {
            assert!(
                ran.stderr.contains(words),
                "{words:?} is missing:\n{}",
                ran.stderr
            );
        }
        cluster.assert_published([1, 3], &cluster.path(&format!("{rule}.db")));
        let job = text(&ran.last()["job"]);
        assert_eq!(cluster.run(&["cancel", &job]).exit, 0);
    }
    let ran = push("fail.db", "fail").expect(4);
    assert_eq!(ran.last()["code"], "no_space");
    assert!(
        ran.last()["short_by_bytes"].as_u64().unwrap() >= 8 * CHUNK,
        "{}",
        ran.last()
    );
    assert!(ran.stderr.contains("short by"), "{}", ran.stderr);
    cluster.wait_clean();
    for node in 1..4 {
        assert!(!cluster.root(node).join("fail.db").exists(), "n{node}");
    }
}

/// Two volumes of seven chunks each.
fn volumes(cluster: &Cluster) -> PathBuf {
    let tree = cluster.path("refdb");
    fs::create_dir_all(&tree).unwrap();
    for name in ["a.nsq", "b.nsq"] {
        fs::rename(cluster.source(name, 7 * CHUNK), tree.join(name)).unwrap();
    }
    tree
}

/// R81: nodes with half, all and twice the space that is needed; the half gets what fits.
#[test]
fn who_has_too_little_space_is_named_and_a_part_fits() {
    if !may_mount() {
        return;
    }
    let mut cluster = Cluster::prepare(4);
    let _mounts: Vec<_> = [(1, 7), (2, 14), (3, 28)]
        .map(|(node, chunks)| Mount::tmpfs(&cluster.root(node), chunks * CHUNK + BLOCK))
        .into();
    cluster.start_coordinator();
    (0..4).for_each(|node| cluster.start_agent(node));
    cluster.wait_up(4);
    let tree = volumes(&cluster);
    let refused = cluster
        .push(&tree, &["--to", "targets", "--unfit", "fail"])
        .expect(4);
    assert_eq!(
        (refused.last()["code"].as_str(), refused.last()["node"].as_str()),
        (Some("no_space"), Some("n1"))
    );
    cluster.wait_clean();
    for node in 1..4 {
        assert_eq!(cluster.listing(node), [""; 0], "nothing is left of it");
    }
    let ran = cluster
        .push(&tree, &["--to", "targets", "--unfit", "skip"])
        .expect(5);
    assert_eq!(
        ran.node("n1")["error"]["short_by_bytes"],
        7 * CHUNK,
        "{}",
        ran.last()
    );
    for words in ["n1", "needs      free", "14.00 MiB", "7.00 MiB"] {
        assert!(
            ran.stderr.contains(words),
            "{words:?} is missing:\n{}",
            ran.stderr
        );
    }
    for node in ["n2", "n3"] {
        assert_eq!(ran.node(node)["state"], "published", "{}", ran.last());
    }
    let part = ["--to", "n1", "--include", "a.*"];
    cluster.push(&tree, &part).expect(0);
    let names: Vec<_> = fs::read_dir(cluster.root(1).join("refdb"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, ["a.nsq"]);
}

/// R82: two roots of which neither has room for all: they are named with their space, and take a part each.
#[test]
fn what_fits_in_no_root_goes_into_two_in_parts() {
    if !may_mount() {
        return;
    }
    let mut cluster = Cluster::prepare(2);
    let fast = cluster.path("fast-n1");
    fs::create_dir(&fast).unwrap();
    let _mounts = [&cluster.root(1), &fast].map(|root| Mount::tmpfs(root, 9 * CHUNK));
    cluster.start_coordinator();
    cluster.start_agent(0);
    let mut agent = cluster.agent_command(1, "state-n1", 7701);
    agent.arg("--root").arg(format!("fast={}", fast.display()));
    let mut agent = agent.spawn().unwrap();
    cluster.wait_up(2);
    let tree = volumes(&cluster);
    let refused = cluster.push(&tree, &["--to", "n1"]).expect(4);
    let hint = text(&refused.last()["hint"]);
    for words in ["fast has 9.00 MiB free", "--dest", "--include"] {
        assert!(hint.contains(words), "{words:?} is missing: {hint}");
    }
    cluster.push(&tree, &["--to", "n1", "--include", "a.*"]).expect(0);
    cluster
        .push(&tree, &["--to", "n1", "--exclude", "a.*", "--dest", "fast:"])
        .expect(0);
    for (root, name) in [(cluster.root(1), "a.nsq"), (fast, "b.nsq")] {
        assert_eq!(
            crate::cluster::sha256(&root.join("refdb").join(name)),
            crate::cluster::sha256(&tree.join(name))
        );
    }
    let verified = cluster.run(&["verify", "--json"]).expect(0);
    assert_eq!(verified.last()["copies"], 2, "{}", verified.stdout);
    drop(agent.stdin.take());
    agent.wait().unwrap();
}

/// A payload whose manifest comes ahead of it is refused before it comes, also where it replaces something.
#[test]
fn many_files_that_do_not_fit_are_refused_before_they_come() {
    if !may_mount() {
        return;
    }
    let (cluster, _mount) = cluster(3, |c| Mount::tmpfs(&c.root(2), 16 * CHUNK));
    let tree = cluster.path("refdb");
    fs::create_dir_all(&tree).unwrap();
    let fill = |len: usize, byte: u8| {
        for at in 0..400 {
            let name = format!("a file with a long name, as many have one {at:04}");
            fs::write(tree.join(name), vec![byte; len]).unwrap();
        }
    };
    fill(10 << 10, 1);
    cluster.push(&tree, &["--to", "targets"]).expect(0);
    cluster.wait_clean();
    fill(60 << 10, 2);
    let replace = ["--to", "targets", "--if-exists", "replace", "--unfit"];
    let refused = cluster.push(&tree, &[&replace[..], &["fail"]].concat()).expect(4);
    assert_eq!(
        (refused.last()["code"].as_str(), refused.last()["node"].as_str()),
        (Some("no_space"), Some("n2"))
    );
    assert!(refused.stderr.contains("short by"), "{}", refused.stderr);
    cluster.wait_clean();
    // What it is short of without anything that the old copy may share is known when the manifest is here, before data.
    fill(32 << 10, 3);
    let ran = cluster.push(&tree, &[&replace[..], &["skip"]].concat()).expect(5);
    let node = ran.node("n2");
    assert_eq!(
        (&node["error"]["code"], &node["bytes_received"]),
        (&"no_space".into(), &0.into()),
        "{node}"
    );
    assert_eq!(ran.node("n1")["state"], "published");
    let old = cluster
        .root(2)
        .join("refdb/a file with a long name, as many have one 0007");
    assert_eq!(fs::read(old).unwrap(), vec![1; 10 << 10]);
}

#[test]
fn what_one_job_was_promised_another_does_not_get() {
    if !may_mount() {
        return;
    }
    let (cluster, _mount) = cluster(3, |c| Mount::tmpfs(&c.root(2), 48 * CHUNK));
    let first = Push::at_a_quarter(&cluster, "n2", 32 * CHUNK, &["--unfit", "fail"]);
    let second = cluster.source("second.db", 32 * CHUNK);
    let refused = cluster.push(&second, &["--to", "n2"]).expect(4);
    let short = refused.last()["short_by_bytes"].as_u64().unwrap();
    assert!((16 * CHUNK..32 * CHUNK).contains(&short), "{}", refused.last());
    first.finish().expect(0);
    cluster.assert_published([1, 2], &cluster.path("genome.db"));
}

#[test]
fn space_that_vanishes_is_no_stall_and_what_was_received_stays() {
    if !may_mount() {
        return;
    }
    let (cluster, _mount) = cluster(4, |c| Mount::ext2(&c.root(2), &c.path("n2.img"), 100 * CHUNK));
    let size = 64 * CHUNK;
    for by_itself in [false, true] {
        let push = Push::at_a_quarter(&cluster, "n2", size, &[]);
        let job = push.job.clone();
        cluster.wait_for("n2 to have two thirds", || {
            kept(&cluster, &job, "n2") >= size * 2 / 3
        });
        let filler = cluster.root(2).join("filler");
        let mut file = File::create(&filler).unwrap();
        while file.write_all(&[1; 1 << 16]).is_ok() {}
        drop(file);

        let ran = push.finish().expect(5);
        let error = &ran.node("n2")["error"];
        assert_eq!(ran.node("n2")["state"], "unfit");
        assert_eq!(error["code"], "no_space", "{error}");
        assert!(text(&error["message"]).contains("short by"), "{error}");
        assert!(error["short_by_bytes"].as_u64().unwrap() <= size / 2, "{error}");
        assert_eq!(ran.node("n3")["state"], "published", "its child went on");

        fs::remove_file(&filler).unwrap();
        if by_itself {
            cluster.wait_for("n2 to be filled by itself", || {
                cluster.status(&job)["state"] == "done"
            });
        } else {
            cluster.run(&["retry", &job, "--json"]).expect(0);
        }
        let again = kept(&cluster, &job, "n2");
        assert!(
            again <= size / 3 + 8 * CHUNK,
            "only what was missing came again, not {again}"
        );
        cluster.assert_published(1..4, &cluster.path("genome.db"));
        cluster.wait_clean();
        for node in 1..4 {
            fs::remove_file(cluster.root(node).join("genome.db")).unwrap();
        }
    }
}

/// How large a packed tar becomes nobody knows before: who has too little room for that waits for it like anybody else.
#[test]
fn what_a_packed_tar_holds_may_be_too_much() {
    if !may_mount() {
        return;
    }
    let (cluster, mount) = cluster(3, |c| Mount::tmpfs(&c.root(2), 8 * CHUNK));
    let tree = cluster.path("refdb");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("a"), vec![7; 16 << 20]).unwrap();
    let tar = cluster.path("refdb.tar.gz");
    Mount::run(
        Command::new("tar")
            .arg("-C")
            .arg(tree.parent().unwrap())
            .arg("-czf")
            .arg(&tar)
            .arg("refdb"),
    );
    let ran = cluster.push(&tar, &["--to", "targets", "--unpack"]).expect(5);
    assert_eq!(ran.last()["state"], "open");
    let node = ran.node("n2");
    assert_eq!(
        (&node["state"], &node["error"]["code"]),
        (&"unfit".into(), &"no_space".into())
    );
    assert!(text(&node["error"]["message"]).contains("short by"), "{node}");
    assert_eq!(ran.node("n1")["state"], "published");
    Mount::run(
        Command::new("mount")
            .args(["-o", "remount,size=64m"])
            .arg(&mount.0),
    );
    let job = text(&ran.last()["job"]);
    cluster.run(&["retry", &job, "--json"]).expect(0);
    assert_eq!(
        fs::metadata(cluster.root(2).join("refdb/a")).unwrap().len(),
        16 << 20
    );
}

#[test]
fn a_first_push_needs_no_more_than_its_size() {
    if !may_mount() {
        return;
    }
    let (cluster, _mount) = cluster(3, |c| Mount::tmpfs(&c.root(2), 256 * CHUNK));
    let used = || {
        let stat = rustix::fs::statvfs(cluster.root(2)).unwrap();
        (stat.f_blocks - stat.f_bfree) * stat.f_frsize
    };
    let before = used();
    let size = 96 * CHUNK;
    let source = cluster.source("genome.db", size);
    let (peak, over) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                peak.fetch_max(used() - before, Ordering::Relaxed);
                std::thread::yield_now();
            }
        });
        let ran = cluster.push(&source, &["--to", "targets", "--limit", "64 MiB/s"]);
        over.store(true, Ordering::Relaxed);
        ran.expect(0);
    });
    let peak = peak.into_inner();
    assert!(peak <= size + size / 100, "{peak} bytes for {size}");
    assert!(peak >= size, "it was watched: {peak}");
}
