//! A hundred thousand tiny files, beside one file of their size and what people use for such trees.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;
use stage_core::units::ByteCount;
use stage_lab::cluster::{Cluster, Security};
use stage_lab::{Lab, LabError, is_installed};

use super::super::report::Row;
use super::super::{Bench, PUSH, one_switch, random_file, word};
use super::{exit, fault, last, sh};
use crate::bench::Spread;

const FILES: u64 = 100_000;
const DIRS: u64 = 100;

/// A hundred thousand files of 1 KiB against one file of their size, over links and without a limit, beside what people use.
pub(in super::super) fn many(bench: &mut Bench) {
    for rate in ["100 Mbit/s", "none"] {
        let shown = if rate == "none" { "unshaped" } else { rate };
        let text = if rate == "none" {
            one_switch(8, "40 Gbit/s")
        } else {
            one_switch(8, rate)
        };
        let repeats = bench.repeats;
        bench.stand(&format!("many files, {shown}"), &text, Security::Tls, |bench, lab, cluster| {
            let tree = lab.dir("n0").join("many");
            make_many(&tree).map_err(|why| fault(&tree, why))?;
            let tar = lab.dir("n0").join("many.tar");
            sh(&format!("tar cf {} -C {} many", word(&tar), word(&lab.dir("n0"))))?;
            let file = random_file(lab, "n0", "one", ByteCount(FILES << 10))?;
            let mut seen: Vec<[f64; 5]> = Vec::new();
            let mut ends = Vec::new();
            for _ in 0..repeats {
                let one = cluster.push(&[word(&file), "--to", "n[1-8]"], PUSH)?;
                clear(cluster, "one")?;
                let many = cluster.push(&[word(&tree), "--to", "n[1-8]"], PUSH)?;
                let files: usize = (1..=8)
                    .map(|node| count_files(&cluster.root(&format!("n{node}")).join("many")))
                    .sum();
                clear(cluster, "many")?;
                let untar = untar_everywhere(cluster, &tar)?;
                clear(cluster, "many")?;
                let mbuffer = if rate == "none" { f64::NAN } else { tar_mbuffer(lab, cluster, &tree)? };
                clear(cluster, "many")?;
                let rsync = rsync_star(lab, cluster, &tree)?;
                clear(cluster, "many")?;
                seen.push([last(&one), last(&many), untar, mbuffer, rsync]);
                ends.push(json!({ "one": one.end(), "many": many.end(), "exits": [exit(&one), exit(&many)], "files": files }));
            }
            let median = |figure: &dyn Fn(&[f64; 5]) -> f64| {
                Spread::of(seen.iter().map(figure)).map_or(f64::NAN, |spread| spread.median)
            };
            let (one, many) = (median(&|run| run[0]), median(&|run| run[1]));
            let (untar, mbuffer, rsync) = (median(&|run| run[2]), median(&|run| run[3]), median(&|run| run[4]));
            let whole = ends.iter().all(|end| end["files"] == 8 * FILES && end["exits"] == json!([0, 0]));
            let (asked, ratio, bound) = if rate == "none" {
                ("<= 1.5 x tar x on all nodes at once", many / untar, 1.5)
            } else {
                ("<= 1.3 x one file of that size", many / one, 1.3)
            };
            bench.add(
                Row::new(
                    format!("{FILES} files of 1 KiB to 8 nodes, {shown}: seconds (one file; tar x on all; tar | mbuffer | tar; rsync)"),
                    asked,
                    format!(
                        "{many:.2} ({one:.2}; {untar:.2}; {mbuffer:.2}; {rsync:.2}): x {ratio:.3}; all files there: {}",
                        if whole { "yes" } else { "no" }
                    ),
                    ratio <= bound && whole,
                )
                .with(json!({ "runs": seen.iter().map(|run| json!(run)).collect::<Vec<_>>(), "ends": ends })),
            );
            Ok(())
        });
    }
}

fn make_many(tree: &Path) -> io::Result<()> {
    let mut bytes = [0u8; 1024];
    for dir in 0..DIRS {
        let dir_path = tree.join(format!("d{dir:03}"));
        fs::create_dir_all(&dir_path)?;
        for file in 0..FILES / DIRS {
            bytes[..16].copy_from_slice(&[dir.to_le_bytes(), file.to_le_bytes()].concat());
            fs::write(dir_path.join(format!("f{file:05}")), bytes)?;
        }
    }
    Ok(())
}

fn count_files(dir: &Path) -> usize {
    sh(&format!("find -L {} -type f | wc -l", word(dir)))
        .ok()
        .and_then(|count| count.trim().parse().ok())
        .unwrap_or(0)
}

/// Makes room for the next round: what is under the name, and the generations.
fn clear(cluster: &Cluster<'_>, name: &str) -> Result<(), LabError> {
    for node in 1..=8 {
        let root = cluster.root(&format!("n{node}"));
        sh(&format!("cd {} && rm -rf {name} .stage", word(&root)))?;
    }
    Ok(())
}

/// The same tar, unpacked on all nodes at once.
fn untar_everywhere(cluster: &Cluster<'_>, tar: &Path) -> Result<f64, LabError> {
    let mut line = String::new();
    for node in 1..=8 {
        let root = cluster.root(&format!("n{node}"));
        line.push_str(&format!("tar xf {} -C {} & ", word(tar), word(&root)));
    }
    line.push_str("wait");
    let started = Instant::now();
    sh(&line)?;
    Ok(started.elapsed().as_secs_f64())
}

/// `tar | mbuffer | … | tar x`: what people do for trees.
fn tar_mbuffer(lab: &Lab, cluster: &Cluster<'_>, tree: &Path) -> Result<f64, LabError> {
    if !is_installed("mbuffer") {
        return Ok(f64::NAN);
    }
    let mut children = Vec::new();
    for node in (1..=8).rev() {
        let next = if node == 8 {
            String::new()
        } else {
            format!("-O {}:7000 ", lab.address(&format!("n{}", node + 1))?)
        };
        let name = format!("n{node}");
        let line = format!(
            "mbuffer -q -s 1M -m 64M -I 7000 {next}-o - | tar x -C {}",
            word(&cluster.root(&name))
        );
        let mut command = lab.command(&name, "sh")?;
        let child = command
            .args(["-c", &line])
            .spawn()
            .map_err(|why| LabError::Tool {
                command: line.clone(),
                message: why.to_string(),
            })?;
        children.push(child);
        wait_for_port(lab, &name)?;
    }
    let parent = tree.parent().unwrap_or(tree);
    let line = format!(
        "tar c -C {} many | mbuffer -q -s 1M -m 64M -O {}:7000",
        word(parent),
        lab.address("n1")?
    );
    let started = Instant::now();
    let mut command = lab.command("n0", "sh")?;
    let status = command.args(["-c", &line]).status();
    let mut good = status.is_ok_and(|status| status.success());
    for child in &mut children {
        good &= child.wait().is_ok_and(|status| status.success());
    }
    let took = started.elapsed().as_secs_f64();
    Ok(if good { took } else { f64::NAN })
}

fn wait_for_port(lab: &Lab, node: &str) -> Result<(), LabError> {
    let deadline = Instant::now() + Duration::from_secs(10);
    while Instant::now() < deadline {
        let mut command = lab.command(node, "ss")?;
        let listening = command.args(["-Hltn", "sport = :7000"]).output();
        if listening.is_ok_and(|output| !output.stdout.is_empty()) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Err(LabError::Tool {
        command: format!("mbuffer on {node}"),
        message: "does not listen".to_owned(),
    })
}

/// rsync to all nodes at once, over its own daemon.
fn rsync_star(lab: &Lab, cluster: &Cluster<'_>, tree: &Path) -> Result<f64, LabError> {
    if !is_installed("rsync") {
        return Ok(f64::NAN);
    }
    let mut daemons = Vec::new();
    let mut line = String::new();
    for node in 1..=8 {
        let name = format!("n{node}");
        let config = lab.dir(&name).join("rsyncd.conf");
        let text = format!(
            "use chroot = no\nuid = root\ngid = root\n[copy]\npath = {}\nread only = no\n",
            word(&cluster.root(&name))
        );
        fs::write(&config, text).map_err(|why| fault(&config, why))?;
        let mut command = lab.command(&name, "rsync")?;
        let daemon = command
            .args(["--daemon", "--no-detach", "--port=7000", "--config"])
            .arg(&config)
            .spawn();
        daemons.push(daemon.map_err(|why| fault(&config, why))?);
        wait_for_port(lab, &name)?;
        line.push_str(&format!(
            "rsync -a --port=7000 {} rsync://{}/copy/ & ",
            word(tree),
            lab.address(&name)?
        ));
    }
    line.push_str("wait");
    let started = Instant::now();
    let mut command = lab.command("n0", "sh")?;
    let done = command.args(["-c", &line]).status();
    let took = started.elapsed().as_secs_f64();
    for daemon in &mut daemons {
        // It runs until it is ended.
        drop(daemon.kill());
        drop(daemon.wait());
    }
    Ok(if done.is_ok_and(|status| status.success()) {
        took
    } else {
        f64::NAN
    })
}
