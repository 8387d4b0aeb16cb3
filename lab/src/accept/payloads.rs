//! Payloads as people have them: a BLAST database as a tree, a hundred thousand tiny files, a file that is nearly all hole,
//! a copy of which a little has changed, a publisher's list of digests.

mod many;

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;
use stage_core::chunk::CHUNK;
use stage_core::units::ByteCount;
use stage_lab::cluster::{Cluster, Pushed, Security};
use stage_lab::{LabError, is_installed};

pub(super) use self::many::many;
use super::report::Row;
use super::{Bench, PUSH, one_switch, random_file, received, right_copies, rounded, seconds, word};

/// Beside the chunks: control messages, TLS, and what TCP and IP add; for each node and push.
const META: u64 = 512 << 10;

fn fault(path: &Path, source: io::Error) -> LabError {
    LabError::Directory {
        path: path.to_owned(),
        source,
    }
}

/// Runs a shell line to its end; what it wrote.
fn sh(line: &str) -> Result<String, LabError> {
    let failed = |message: String| LabError::Tool {
        command: line.to_owned(),
        message,
    };
    let output = Command::new("sh")
        .args(["-c", line])
        .env("LC_ALL", "C")
        .output()
        .map_err(|why| failed(why.to_string()))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(failed(format!(
            "{}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        )))
    }
}

fn last(pushed: &Pushed) -> f64 {
    pushed.last_published().unwrap_or(pushed.wall).as_secs_f64()
}

fn exit(pushed: &Pushed) -> i32 {
    pushed.exit.unwrap_or(-1)
}

/// A BLAST database in several volumes, pushed as a tree: its own programs read each copy, and rsync finds no difference.
pub(super) fn blast(bench: &mut Bench) {
    let missing: Vec<&str> = ["makeblastdb", "blastdbcmd", "blastn", "rsync"]
        .into_iter()
        .filter(|program| !is_installed(program))
        .collect();
    if !missing.is_empty() {
        bench.add(Row::note(
            "BLAST database as a tree",
            format!(
                "not measured: {} missing (packages ncbi-blast+, rsync)",
                missing.join(", ")
            ),
        ));
        return;
    }
    let topology = one_switch(4, "1 Gbit/s");
    bench.stand("BLAST database", &topology, Security::Tls, |bench, lab, cluster| {
        let db = lab.dir("n0").join("refdb");
        let fasta = lab.dir("n0").join("nt.fa");
        fs::create_dir(&db).map_err(|why| fault(&db, why))?;
        sequences(&fasta, 400, 500_000).map_err(|why| fault(&fasta, why))?;
        sh(&format!(
            "makeblastdb -in {} -dbtype nucl -parse_seqids -max_file_sz 20MB -title nt -out {}/nt",
            word(&fasta),
            word(&db)
        ))?;
        let names = |dir: &Path| sh(&format!("cd {} && ls", word(dir)));
        let volumes = names(&db)?.lines().filter(|name| name.ends_with(".nsq")).count();
        let query = lab.dir("n0").join("query.fa");
        sh(&format!(
            "blastdbcmd -db {}/nt -entry seq7,seq350 > {}",
            word(&db),
            word(&query)
        ))?;
        let answers = |db: &Path| -> Result<(String, String), LabError> {
            let listed = sh(&format!(
                "blastdbcmd -db {0}/nt -info | grep -v -e Volumes -e {0} -e '^\t/' && blastdbcmd -db {0}/nt -entry all | sha256sum",
                word(db)
            ))?;
            let found = sh(&format!(
                "blastn -task megablast -db {}/nt -query {} -outfmt 6",
                word(db),
                word(&query)
            ))?;
            Ok((listed, found))
        };
        let right = answers(&db)?;
        let pushed = cluster.push(&[word(&db), "--to", "n[1-4]", "--xattrs"], PUSH)?;
        let (mut same, mut differences) = (0, String::new());
        for node in ["n1", "n2", "n3", "n4"] {
            let copy = cluster.root(node).join("refdb");
            if answers(&copy)? == right {
                same += 1;
            }
            differences.push_str(&sh(&format!(
                "rsync -nrlptcHAX --delete --out-format='%i %n' {}/ {}/",
                word(&db),
                word(&copy)
            ))?);
        }
        bench.add(
            Row::new(
                "BLAST database as a tree to 4 nodes: volumes; exit; copies that blastdbcmd and blastn answer from as from the source; hits",
                ">= 3; 0; 4; > 0",
                format!(
                    "{volumes}; {}; {same}; {}",
                    exit(&pushed),
                    right.1.lines().count()
                ),
                volumes >= 3 && exit(&pushed) == 0 && same == 4 && !right.1.is_empty(),
            )
            .with(json!({ "finished": pushed.end() })),
        );
        bench.add(Row::new(
            "BLAST database: what rsync -nrlptcHAX --delete would change in the four copies",
            "nothing",
            if differences.is_empty() {
                "nothing".to_owned()
            } else {
                differences.clone()
            },
            differences.is_empty(),
        ));
        Ok(())
    });
}

/// Random DNA in FASTA form.
fn sequences(path: &Path, count: usize, len: usize) -> io::Result<()> {
    let mut out = io::BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut x: u64 = 0x9e37_79b9_7f4a_7c15;
    for sequence in 0..count {
        writeln!(out, ">seq{sequence} generated")?;
        let mut line = Vec::with_capacity(81);
        for at in 0..len {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            line.push(b"ACGT"[(x >> 60) as usize & 3]);
            if line.len() == 80 || at + 1 == len {
                line.push(b'\n');
                out.write_all(&line)?;
                line.clear();
            }
        }
    }
    out.flush()
}

/// Files that are nearly all hole.
pub(super) fn sparse(bench: &mut Bench) {
    let topology = one_switch(4, "1 Gbit/s");
    bench.stand("sparse", &topology, Security::Tls, |bench, lab, cluster| {
        let make = |name: &str, size: u64| -> Result<(PathBuf, Vec<u64>), LabError> {
            let path = lab.dir("n0").join(name);
            let mut places = Vec::new();
            let write = || -> io::Result<()> {
                let file = File::create(&path)?;
                file.set_len(size)?;
                let mut bytes = vec![0u8; 1 << 20];
                for at in 0..4u64 {
                    let place = size / 4 * at + (7 << 20);
                    bytes.iter_mut().zip(0u64..).for_each(|(byte, i)| *byte = (i * 31 + at * 7 + 1) as u8);
                    file.write_all_at(&bytes, place)?;
                    places.push(place);
                }
                Ok(())
            };
            let mut write = write;
            write().map_err(|why| fault(&path, why))?;
            Ok((path, places))
        };
        let (file, places) = make("terabyte", 1 << 40)?;
        let before: Vec<u64> = nodes(4, |node| Ok(cluster.link_bytes(node)?.received.0))?;
        let running = cluster.start_command(&["push", word(&file), "--to", "n[1-4]"])?;
        let mut at = Duration::ZERO;
        for node in ["n1", "n2", "n3", "n4"] {
            let published = |event: &stage_lab::cluster::Event| {
                event.kind() == "node" && event.value["state"] == "published" && event.value["node"] == node
            };
            let event = running.wait_for("a published copy", Duration::from_secs(60), published)?;
            at = at.max(event.at);
        }
        let after: Vec<u64> = nodes(4, |node| Ok(cluster.link_bytes(node)?.received.0))?;
        let job = running.job(Duration::from_secs(5))?;
        drop(running);
        let _ = cluster.run(&["cancel", &job], PUSH)?;
        let most = before.iter().zip(&after).map(|(b, a)| a - b).max().unwrap_or(u64::MAX);
        let mut right = 0;
        let mut blocks = 0;
        for node in 1..=4 {
            let copy = cluster.root(&format!("n{node}")).join("terabyte");
            let Ok(meta) = fs::metadata(&copy) else { continue };
            blocks = blocks.max(meta.blocks() * 512);
            if meta.len() == 1 << 40 && same_data(&file, &copy, &places).unwrap_or(false) {
                right += 1;
            }
        }
        bench.add(Row::new(
            "1 TiB apparent, 4 MiB of data, to 4 nodes: seconds until all have published; most bytes into a node; most on a disk; copies with the same data and holes",
            "<= 5; < 10 MiB; < 10 MiB; 4",
            format!(
                "{:.2}; {most}; {blocks}; {right}",
                seconds(at)
            ),
            at.as_secs_f64() <= 5.0 && most < 10 << 20 && blocks < 10 << 20 && right == 4,
        ));
        let (file, _) = make("sixteen", 16 << 30)?;
        let digest = stage_lab::sha256sum(std::slice::from_ref(&file))?.remove(0);
        let pushed = cluster.push(&[word(&file), "--to", "n[1-4]"], PUSH)?;
        let right = right_copies(&pushed, &digest)?;
        bench.add(
            Row::new(
                "16 GiB apparent, 4 MiB of data: exit; right copies by sha256sum; the command's SHA-256 is the same",
                "0; 4; yes",
                format!("{}; {right}; {}", exit(&pushed), if pushed.end()["sha256"] == digest.as_str() { "yes" } else { "no" }),
                exit(&pushed) == 0 && right == 4 && pushed.end()["sha256"] == digest.as_str(),
            )
            .with(json!({ "finished": pushed.end() })),
        );
        Ok(())
    });
}

fn nodes<T>(count: u32, mut of: impl FnMut(&str) -> Result<T, LabError>) -> Result<Vec<T>, LabError> {
    (1..=count).map(|node| of(&format!("n{node}"))).collect()
}

/// Whether both files have the same bytes around these places, and holes elsewhere.
fn same_data(one: &Path, other: &Path, places: &[u64]) -> io::Result<bool> {
    let (one, other) = (File::open(one)?, File::open(other)?);
    let (mut a, mut b) = (vec![0; 3 << 20], vec![0; 3 << 20]);
    for place in places {
        let from = place - (1 << 20);
        one.read_exact_at(&mut a, from)?;
        other.read_exact_at(&mut b, from)?;
        if a != b {
            return Ok(false);
        }
    }
    Ok(one.metadata()?.blocks() == other.metadata()?.blocks())
}

/// Copies of which a little has changed, each time under another plan.
pub(super) fn changes(bench: &mut Bench) {
    let topology = one_switch(4, "1 Gbit/s");
    bench.stand("changes", &topology, Security::Tls, |bench, lab, cluster| {
        let file = random_file(lab, "n0", "thousand", ByteCount(1000 * CHUNK))?;
        let first = cluster.push(&[word(&file), "--to", "n[1-4]", "--shape", "chain"], PUSH)?;
        change(&file, 500 * CHUNK + 77)?;
        pushed_again(bench, cluster, &first, "1 of 1,000 chunks changed", &file, "star")?;

        let tree = lab.dir("n0").join("five");
        fs::create_dir(&tree).map_err(|why| fault(&tree, why))?;
        for at in 0..500 {
            random_file(lab, "n0", &format!("five/v{at:03}"), ByteCount(300_000 + at * 10))?;
        }
        let first = cluster.push(&[word(&tree), "--to", "n[1-4]", "--shape", "chain"], PUSH)?;
        change(&tree.join("v123"), 1000)?;
        pushed_again(bench, cluster, &first, "1 of 500 files changed", &tree, "star")?;
        let grown = tree.join("v250");
        fs::OpenOptions::new()
            .append(true)
            .open(&grown)
            .and_then(|mut file| file.write_all(b"x"))
            .map_err(|why| fault(&grown, why))?;
        pushed_again(
            bench,
            cluster,
            &first,
            "one file in the middle of 500 grown by a byte",
            &tree,
            "tree:2",
        )?;
        Ok(())
    });
}

fn change(path: &Path, at: u64) -> Result<(), LabError> {
    let file = File::options().read(true).write(true).open(path);
    let flip = |file: File| -> io::Result<()> {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at)?;
        file.write_all_at(&[byte[0] ^ 1], at)
    };
    file.and_then(flip).map_err(|why| fault(path, why))
}

fn pushed_again(
    bench: &mut Bench,
    cluster: &Cluster<'_>,
    first: &Pushed,
    what: &str,
    source: &Path,
    shape: &str,
) -> Result<(), LabError> {
    let before: Vec<u64> = nodes(4, |node| Ok(cluster.link_bytes(node)?.received.0))?;
    let sent = nodes(4, |node| Ok(cluster.link_bytes(node)?.sent.0))?;
    let again = cluster.push(
        &[
            word(source),
            "--to",
            "n[1-4]",
            "--shape",
            shape,
            "--if-exists",
            "replace",
        ],
        PUSH,
    )?;
    let after: Vec<u64> = nodes(4, |node| Ok(cluster.link_bytes(node)?.received.0))?;
    let after_sent = nodes(4, |node| Ok(cluster.link_bytes(node)?.sent.0))?;
    let payload = received(&again).into_iter().max().unwrap_or(u64::MAX);
    let into = before
        .iter()
        .zip(&after)
        .map(|(b, a)| a - b)
        .max()
        .unwrap_or(u64::MAX);
    let out = sent
        .iter()
        .zip(&after_sent)
        .map(|(b, a)| a - b)
        .max()
        .unwrap_or(u64::MAX);
    let mut same = 0;
    for node in 1..=4 {
        let name = source.file_name().unwrap_or_default();
        let copy = cluster.root(&format!("n{node}")).join(name);
        let slash = if source.is_dir() { "/" } else { "" };
        let line = format!("diff -r {}{slash} {}{slash}", word(source), word(&copy));
        same += usize::from(sh(&line).is_ok());
    }
    bench.add(
        Row::new(
            format!("{what}, now as {shape}: exits; payload bytes received by a node at most; its interface in (out); same copies"),
            format!("0, 0; <= {}; <= {}; 4", 2 * CHUNK, 2 * CHUNK + META),
            format!("{}, {}; {payload}; {into} ({out}); {same}", exit(first), exit(&again)),
            exit(first) == 0 && exit(&again) == 0 && payload <= 2 * CHUNK && into <= 2 * CHUNK + META && same == 4,
        )
        .with(json!({ "finished": again.end(), "seconds": rounded(last(&again)) })),
    );
    Ok(())
}

/// A publisher's list of digests: agreement is shown, one wrong line stops publishing everywhere.
pub(super) fn expect(bench: &mut Bench) {
    if !is_installed("md5sum") {
        bench.add(Row::note("--expect", "not measured: md5sum is missing"));
        return;
    }
    let topology = one_switch(4, "1 Gbit/s");
    bench.stand("expect", &topology, Security::Tls, |bench, lab, cluster| {
        let tree = lab.dir("n0").join("release");
        fs::create_dir_all(tree.join("vol")).map_err(|why| fault(&tree, why))?;
        for at in 0..20 {
            random_file(lab, "n0", &format!("release/vol/part{at:02}"), ByteCount(100_000 + at))?;
        }
        random_file(lab, "n0", "release/index", ByteCount(3 << 20))?;
        for program in ["sha256sum", "md5sum"] {
            let sums = lab.dir("n0").join(program);
            sh(&format!(
                "cd {} && {program} index vol/* > {}",
                word(&tree),
                word(&sums)
            ))?;
            let good = cluster.push(&[word(&tree), "--to", "n[1-4]", "--expect", word(&sums)], PUSH)?;
            let there = nodes(4, |node| Ok(cluster.root(node).join("release/index").exists()))?;
            for node in 1..=4 {
                let root = cluster.root(&format!("n{node}"));
                sh(&format!("cd {} && rm -rf release .stage", word(&root)))?;
            }
            let text = fs::read_to_string(&sums).map_err(|why| fault(&sums, why))?;
            let wrong: String = text
                .lines()
                .enumerate()
                .map(|(at, line)| {
                    let first = if line.starts_with('0') { '1' } else { '0' };
                    if at == 7 { format!("{first}{}\n", &line[1..]) } else { format!("{line}\n") }
                })
                .collect();
            fs::write(&sums, wrong).map_err(|why| fault(&sums, why))?;
            let bad = cluster.push(&[word(&tree), "--to", "n[1-4]", "--expect", word(&sums)], PUSH)?;
            // The nodes hear of the end after the command has.
            let deadline = Instant::now() + Duration::from_secs(10);
            let left = loop {
                let left: String = (1..=4)
                    .map(|node| sh(&format!("ls -A {}", word(&cluster.root(&format!("n{node}"))))))
                    .collect::<Result<_, _>>()?;
                if left.is_empty() || Instant::now() > deadline {
                    break left;
                }
                std::thread::sleep(Duration::from_millis(50));
            };
            bench.add(
                Row::new(
                    format!("--expect with {program}'s list of 21 files: exit, agrees, published; one line wrong: exit, files left anywhere"),
                    "0, yes, 4; 6, none",
                    format!(
                        "{}, {}, {}; {}, {}",
                        exit(&good),
                        good.end()["agrees"],
                        there.iter().filter(|there| **there).count(),
                        exit(&bad),
                        if left.is_empty() { "none" } else { &left }
                    ),
                    exit(&good) == 0 && !good.end()["agrees"].is_null() && there.iter().all(|there| *there) && exit(&bad) == 6 && left.is_empty(),
                )
                .with(json!({ "good": good.end(), "bad": bad.end() })),
            );
        }
        Ok(())
    });
}
