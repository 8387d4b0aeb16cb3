//! What a push costs, in calls and bytes: counted, since times say little on a machine that is shared.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use crate::cluster::{Cluster, sha256};

const CHUNK: u64 = 1 << 20;

/// How often each of these calls was made.
fn count(calls: &Path, names: &[&str]) -> Vec<usize> {
    let calls = fs::read_to_string(calls).unwrap();
    let count = |name: &&str| calls.lines().filter(|line| line.contains(*name)).count();
    names.iter().map(count).collect()
}

/// R39: a file without holes is known to be one by its size on disk, so nobody looks for holes in it, and it is read once.
#[test]
fn a_dense_file_is_not_searched_for_holes() {
    let mut cluster = Cluster::prepare(2);
    cluster.start_coordinator();
    cluster.start_agent(1);
    let calls = cluster.path("calls");
    let Some(agent) = cluster.start_traced(0, "lseek,pread64", &calls) else {
        return;
    };
    cluster.wait_up(2);
    let dense = cluster.source("dense", 64 * CHUNK);
    cluster.push(&dense, &["--to", "n1"]).expect(0);
    let before = count(&calls, &["SEEK_DATA", "SEEK_HOLE"]);
    assert_eq!(before, [0, 0]);
    // That it is counted at all is seen with one that has holes.
    let sparse = cluster.path("sparse");
    let file = fs::File::create(&sparse).unwrap();
    file.set_len(64 * CHUNK).unwrap();
    file.write_all_at(&[7; 100_000], 32 * CHUNK).unwrap();
    cluster.push(&sparse, &["--to", "n1"]).expect(0);
    let after = count(&calls, &["SEEK_DATA", "SEEK_HOLE"]);
    assert!(after[0] > 0 && after[1] > 0, "{after:?}");
    drop(agent);
    cluster.assert_published([1], &dense);
}

/// R113: of five thousand files not each is synced; one call makes all of a generation durable.
#[test]
fn many_small_files_are_made_durable_at_once() {
    let mut cluster = Cluster::prepare(2);
    const FILES: usize = 5000;
    let tree = cluster.path("refdb");
    for dir in 0..50 {
        fs::create_dir_all(tree.join(dir.to_string())).unwrap();
        for file in 0..FILES / 50 {
            fs::write(tree.join(format!("{dir}/{file}")), [7; 1024]).unwrap();
        }
    }
    cluster.start_coordinator();
    cluster.start_agent(0);
    let calls = cluster.path("calls");
    let Some(agent) = cluster.start_traced(1, "fsync,fdatasync,syncfs,sync", &calls) else {
        return;
    };
    cluster.wait_up(2);
    cluster.push(&tree, &["--to", "n1"]).expect(0);
    drop(agent);
    let counts = count(&calls, &["syncfs(", "fsync(", "fdatasync("]);
    assert_eq!(counts[0], 1, "{counts:?}");
    assert!(
        counts[1] + counts[2] < 30,
        "{counts:?}: only directories and what the agent notes"
    );
    assert!(counts[1] > 0, "they are counted");
    let copies = fs::read_dir(cluster.root(1).join("refdb/7")).unwrap().count();
    assert_eq!(copies, FILES / 50);
}

/// Bytes that a process has read with read(2) and the like, from files and elsewhere.
fn bytes_read(process: u32) -> u64 {
    let io = fs::read_to_string(format!("/proc/{process}/io")).unwrap();
    let line = io.lines().find_map(|line| line.strip_prefix("rchar: "));
    line.unwrap().parse().unwrap()
}

/// R36: whatever the content, each chunk is compared with the one chunk of the old copy that lies at its place, and with no
/// other.
#[test]
fn one_block_repeated_is_compared_as_any_other_content_is() {
    let cluster = Cluster::start(2);
    let size = 64 * CHUNK;
    let random = cluster.source("random", size);
    let block = &fs::read(&random).unwrap()[..4096];
    let repeated = cluster.path("repeated");
    fs::write(&repeated, block.repeat((size / 4096) as usize)).unwrap();
    let mut reads = Vec::new();
    for source in [&random, &repeated] {
        cluster.push(source, &["--to", "n1"]).expect(0);
        cluster.wait_clean();
        // Shifted by a byte in one chunk, so that each old block is found everywhere but at its place.
        let mut bytes = fs::read(source).unwrap();
        bytes[9 * CHUNK as usize..10 * CHUNK as usize].rotate_left(1);
        fs::write(source, bytes).unwrap();
        let before = bytes_read(cluster.agent_process(1));
        let ran = cluster
            .push(source, &["--to", "n1", "--if-exists", "replace"])
            .expect(0);
        let read = bytes_read(cluster.agent_process(1)) - before;
        assert!(
            (size..4 * size).contains(&read),
            "{read} bytes read of {}",
            source.display()
        );
        reads.push(read);
        let received = ran.node("n1")["bytes_received"].as_u64().unwrap();
        assert!(received <= CHUNK, "{received}");
        assert_eq!(
            sha256(&cluster.root(1).join(source.file_name().unwrap())),
            sha256(source)
        );
        cluster.wait_clean();
    }
    assert!(
        reads[0].abs_diff(reads[1]) < 8 * CHUNK,
        "the content makes no difference: {reads:?}"
    );
}
