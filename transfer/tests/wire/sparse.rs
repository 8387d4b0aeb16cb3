//! Payloads with holes.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;

use rustix::fs::{SeekFrom, seek};
use sha2::{Digest as _, Sha256};
use stage_core::assignment::IfExists;
use stage_core::chunk::{CHUNK, ChunkIndex};
use stage_core::digest::Md5Digest;
use stage_core::failure::Code;
use stage_core::units::ByteCount;
use stage_transfer::store::Compared;
use stage_transfer::target::{PublishError, Target};

use crate::bench::{Bench, Node, content};

const MIB: u64 = 1 << 20;

/// Where a file has data, as its file system tells.
fn extents(path: &Path) -> Vec<(u64, u64)> {
    let file = File::open(path).unwrap();
    let mut found = Vec::new();
    let mut at = 0;
    while let Ok(start) = seek(&file, SeekFrom::Data(at)) {
        at = seek(&file, SeekFrom::Hole(start)).unwrap();
        found.push((start, at));
    }
    found
}

fn allocated(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

/// Pushes over one hop; what was received, and where it lies.
async fn push(bench: &Bench, n0: &Node, n1: &Node, target: Target) -> (u64, std::path::PathBuf) {
    let mut source = bench.source(n0, &["n1"]).await;
    let mut receiving = bench.receive(n1, target.store(), vec![n0.peer()], 2);
    receiving.complete().await;
    let fin = source.fin().await;
    let received = receiving.inbound.counters().bytes_received;
    assert!(source.source.counters().source_bytes_read <= 2 * bench.manifest.payload_size().0);
    receiving.inbound.stop().await;
    // Whether its digest is known by now or not: terabytes of zeros take their time, and it ends at once all the same.
    source.source.stop().await;
    // Without its journal, so that the next push knows nothing of this one.
    let publish = move || {
        let publication = target.publish(&fin).unwrap();
        target.release();
        publication
    };
    let publication = tokio::task::spawn_blocking(publish).await.unwrap();
    (received, publication.path.into())
}

// R73: offsets beyond 2^31, 2^32 and 2^41.
#[tokio::test(flavor = "multi_thread")]
async fn terabytes_of_holes_cost_neither_network_nor_disk() {
    let data = content(MIB);
    let places = [
        (1 << 31) - 4096,
        (1 << 32) + 4096,
        (1 << 41) + 8192,
        (1 << 42) - MIB,
    ];
    let bench = Bench::sparse(1 << 42, &places.map(|at| (at, &data[..])));
    assert_eq!(bench.manifest.file_size(), ByteCount(1 << 42));
    assert_eq!(bench.manifest.payload_size(), ByteCount(4 * MIB));
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    let target = bench.target(&n1);
    let partial = fs::read_dir(bench.file.parent().unwrap().join("n1/root")).unwrap();
    let partial = partial.map(|entry| entry.unwrap().path()).next().unwrap();
    let reserved = allocated(&partial);
    assert!(
        (4 * MIB..10 * MIB).contains(&reserved),
        "{reserved} bytes are reserved"
    );
    let (received, copy) = push(&bench, &n0, &n1, target).await;
    assert_eq!(received, 4 * MIB);
    assert_eq!(fs::metadata(&copy).unwrap().len(), 1 << 42);
    assert!(allocated(&copy) < 10 * MIB);
    assert_eq!(extents(&copy), extents(&bench.file));
    let file = File::open(&copy).unwrap();
    for at in places {
        let mut found = vec![0; data.len()];
        file.read_exact_at(&mut found, at).unwrap();
        assert!(found == data, "at {at}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_digest_is_the_whole_files_holes_included() {
    let data = content(2 * CHUNK + 77);
    for (size, places) in [
        (64 * MIB + 5, vec![0, 40 * MIB + 3]),
        (64 * MIB, vec![MIB, 64 * MIB - data.len() as u64]),
        (3 * MIB + 1, vec![]),
    ] {
        let parts: Vec<_> = places.iter().map(|at| (*at, &data[..])).collect();
        let bench = Bench::sparse(size, &parts);
        assert!(bench.manifest.payload_size().0 <= places.len() as u64 * (data.len() as u64 + 128 * 1024));
        let (n0, n1) = (bench.node("n0"), bench.node("n1"));
        let target = bench.target(&n1);
        let mut source = bench.source(&n0, &["n1"]).await;
        let mut receiving = bench.receive(&n1, target.store(), vec![n0.peer()], 1);
        receiving.complete().await;
        let fin = source.fin().await;
        let expected: [u8; 32] = Sha256::digest(fs::read(&bench.file).unwrap()).into();
        assert_eq!(source.sha256().await.0, expected, "{size}");
        assert_eq!(source.source.counters().sha256_bytes, size);
        receiving.inbound.stop().await;
        source.source.stop().await;
        let path = target.path().to_owned();
        target.publish(&fin).unwrap();
        assert!(fs::read(path).unwrap() == fs::read(&bench.file).unwrap());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sparse_copy_is_already_there_unless_a_hole_of_it_is_none() {
    let data = content(CHUNK);
    let bench = Bench::sparse(1 << 33, &[(MIB, &data), ((1 << 32) + 7 * MIB, &data)]);
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    let (_, copy) = push(&bench, &n0, &n1, bench.target(&n1)).await;
    let inode = fs::metadata(&copy).unwrap().ino();

    for if_exists in [IfExists::Fail, IfExists::Replace] {
        let (received, _) = push(&bench, &n0, &n1, bench.target_if(&n1, if_exists)).await;
        assert_eq!(received, 0);
        assert_eq!(fs::metadata(&copy).unwrap().ino(), inode);
    }
    // Zeros that are written are zeros.
    let file = File::options().write(true).open(&copy).unwrap();
    file.write_all_at(&[0; 100_000], 1 << 30).unwrap();
    let (received, _) = push(&bench, &n0, &n1, bench.target(&n1)).await;
    assert_eq!((received, fs::metadata(&copy).unwrap().ino()), (0, inode));
    // One byte where no data is.
    file.write_all_at(b"x", (1 << 31) + 5).unwrap();
    let failure = bench.unfit(&n1);
    assert_eq!(failure.code, Code::Exists);
    assert!(failure.message.contains("other content"), "{failure}");
    let (received, _) = push(&bench, &n0, &n1, bench.target_if(&n1, IfExists::Replace)).await;
    assert_eq!(received, 0, "all the data was in the old copy");
    assert_ne!(fs::metadata(&copy).unwrap().ino(), inode);
    assert_eq!(extents(&copy), extents(&bench.file));

    // Written to while it is compared: not what was compared.
    let target = bench.target(&n1);
    for index in 0..target.store().layout().count() {
        let digest = stage_core::digest::chunk_digest(target.store().hash(), &data);
        assert_eq!(
            target.store().compare(ChunkIndex(index), digest).unwrap(),
            Compared::Same
        );
    }
    let file = File::options().write(true).open(&copy).unwrap();
    file.write_all_at(b"x", 1 << 31).unwrap();
    let fin = stage_core::assignment::Final {
        root: target.store().root().unwrap(),
        chunks: target.store().layout().count(),
        data: target.store().layout().data(),
    };
    assert!(matches!(target.publish(&fin), Err(PublishError::Unfit(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_push_of_a_sparse_file_goes_on_where_it_was() {
    let data = content(4 * CHUNK);
    let bench = Bench::sparse(1 << 35, &[(0, &data[..CHUNK as usize]), (1 << 34, &data)]);
    let (n0, n1) = (bench.node("n0"), bench.node("n1"));
    let target = bench.target(&n1);
    for index in [0, 2] {
        let at = if index == 0 { 0 } else { CHUNK as usize };
        crate::bench::put(target.store(), ChunkIndex(index), &data[at..at + CHUNK as usize]);
    }
    drop(target);
    let target = bench.target(&n1);
    assert_eq!(target.store().kept(), 2);
    let (received, copy) = push(&bench, &n0, &n1, target).await;
    assert_eq!(received, 3 * CHUNK);
    assert_eq!(extents(&copy), extents(&bench.file));
}

// "abc" and its MD5 as RFC 1321 has them, behind a hole that MD5 takes in as zeros.
#[tokio::test(flavor = "multi_thread")]
async fn an_expected_md5_decides_about_final() {
    let whole = |bench: &Bench| md5::Md5::digest(fs::read(&bench.file).unwrap()).into();
    for (size, at) in [(3, 0), (4 * MIB + 3, 4 * MIB)] {
        let mut bench = Bench::sparse(size, &[(at, b"abc")]);
        let mut md5: [u8; 16] = whole(&bench);
        if at == 0 {
            assert_eq!(Md5Digest(md5).to_string(), "900150983cd24fb0d6963f7d28e17f72");
        }
        for right in [true, false] {
            md5[0] ^= u8::from(!right);
            bench.md5 = Some(Md5Digest(md5));
            let node = bench.node("n0");
            let child = bench.node("n1");
            let target = bench.target(&child);
            let mut source = bench.source(&node, &["n1"]).await;
            let receiving = bench.receive(&child, target.store(), vec![node.peer()], 1);
            if right {
                source.fin().await;
            } else {
                let failure = source.failure().await;
                assert_eq!(failure.code, Code::Unexpected);
                assert!(failure.message.contains("MD5"), "{failure}");
            }
            receiving.inbound.stop().await;
            source.source.stop().await;
        }
    }
}
