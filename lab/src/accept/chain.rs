//! A chain of equal links: how near the last copy comes to what one link carries, and what the source sends for it.

use serde_json::json;
use stage_core::units::{ByteCount, Rate};
use stage_lab::cluster::{Pushed, Security};

use super::report::Row;
use super::{Bench, PUSH, copies, in_words, one_switch, random_file, received, remove, right_copies};
use super::{rounded, seconds, word};
use crate::bench::Spread;

const SIZE: ByteCount = ByteCount(1 << 30);

/// Time to the last copy, over the file's size at the rate that iperf3 shows.
const SLOWDOWN: f64 = 1.06;
/// Payload that the source sends, over the file's size.
const SENT: f64 = 1.02;

pub(super) fn run(bench: &mut Bench) {
    for (targets, rate) in [(4, "1 Gbit/s"), (8, "500 Mbit/s")] {
        for security in [Security::Tls, Security::Insecure] {
            chain(bench, targets, rate, security);
        }
    }
}

/// One push.
struct Run {
    goodput: Rate,
    /// From the command's start to the last copy.
    last: f64,
    /// `last` over what one link needs.
    slowdown: f64,
    predicted: f64,
    /// Payload that left the source, as it says, over the size.
    sent: f64,
    /// All bytes that left its interface, over the size.
    counted: f64,
    cpu: f64,
    right: usize,
    whole: bool,
    pushed: Pushed,
}

fn chain(bench: &mut Bench, targets: u32, rate: &str, security: Security) {
    let name = format!("chain of {targets} at {rate}, {}", in_words(security));
    let topology = one_switch(targets, rate);
    bench.stand(&name, &topology, security, |bench, lab, cluster| {
        let file = random_file(lab, "n0", "payload", SIZE)?;
        let digest = stage_lab::sha256sum(std::slice::from_ref(&file))?.remove(0);
        let to = format!("n[1-{targets}]");
        let mut runs = Vec::new();
        for _ in 0..bench.repeats {
            let goodput = lab.iperf("n0", "n1")?;
            let (before, cpu) = (cluster.link_bytes("n0")?, cluster.cpu());
            let pushed = cluster.push(&[word(&file), "--to", &to, "--shape", "chain"], PUSH)?;
            let (after, cpu) = (cluster.link_bytes("n0")?, cluster.cpu().saturating_sub(cpu));
            let right = right_copies(&pushed, &digest)?;
            let size = SIZE.0 as f64;
            let last = pushed.last_published().unwrap_or(pushed.wall).as_secs_f64();
            runs.push(Run {
                goodput,
                last,
                slowdown: last / SIZE.time_at(goodput).as_secs_f64(),
                predicted: pushed.end()["plan"]["predicted_seconds"]
                    .as_f64()
                    .unwrap_or_default(),
                sent: pushed.figure("source_bytes_sent").unwrap_or(f64::NAN) / size,
                counted: (after.sent.0 - before.sent.0) as f64 / size,
                cpu: cpu.as_secs_f64(),
                right,
                whole: received(&pushed).iter().all(|bytes| *bytes == SIZE.0)
                    && pushed.exit == Some(0)
                    && pushed.end()["sha256"] == digest.as_str(),
                pushed,
            });
            remove(&runs.last().map(|run| copies(&run.pushed)).unwrap_or_default());
        }
        tell(bench, &name, targets as usize, &runs);
        Ok(())
    });
}

fn tell(bench: &mut Bench, name: &str, targets: usize, runs: &[Run]) {
    let list = |figure: &dyn Fn(&Run) -> String| runs.iter().map(figure).collect::<Vec<_>>().join(", ");
    let figures = json!(
        runs.iter()
            .map(|run| json!({
                "goodput_bits_per_second": run.goodput.bits_per_second().round(),
                "last_published_seconds": rounded(run.last),
                "slowdown": rounded(run.slowdown),
                "predicted_seconds": run.predicted,
                "command_seconds": seconds(run.pushed.wall),
                "sent_over_size": rounded(run.sent),
                "interface_sent_over_size": rounded(run.counted),
                "cpu_seconds": rounded(run.cpu),
                "cpu_seconds_per_gigabyte_and_hop": rounded(run.cpu / (SIZE.0 as f64 / 1e9) / targets as f64),
                "finished": run.pushed.end(),
            }))
            .collect::<Vec<_>>()
    );
    let median = Spread::of(runs.iter().map(|run| run.slowdown)).map_or(f64::NAN, |spread| spread.median);
    bench.add(
        Row::new(
            format!("{name}: time to the last copy over size / iperf3's goodput"),
            format!("<= {SLOWDOWN}"),
            format!(
                "{median:.3} ({}); goodput {} Mbit/s, last copy {} s",
                list(&|run| format!("{:.3}", run.slowdown)),
                list(&|run| format!("{:.0}", run.goodput.bits_per_second() / 1e6)),
                list(&|run| format!("{:.2}", run.last)),
            ),
            median <= SLOWDOWN,
        )
        .with(figures),
    );
    bench.add(Row::note(
        format!("{name}: forecast; processor time of all programs"),
        format!(
            "{} s; {} s",
            list(&|run| format!("{:.2}", run.predicted)),
            list(&|run| format!("{:.1}", run.cpu))
        ),
    ));
    bench.add(Row::new(
        format!("{name}: payload that leaves the source over size (its interface, with headers)"),
        format!("<= {SENT}"),
        format!(
            "{} ({})",
            list(&|run| format!("{:.4}", run.sent)),
            list(&|run| format!("{:.4}", run.counted))
        ),
        runs.iter().all(|run| run.sent <= SENT && run.counted <= SENT),
    ));
    bench.add(Row::new(
        format!("{name}: copies that sha256sum finds right; ends with 0, each received once"),
        format!("{targets}; yes"),
        list(&|run| {
            let whole = if run.whole { "yes" } else { "no" };
            let exit = run
                .pushed
                .exit
                .map_or_else(|| "a signal".to_owned(), |exit| exit.to_string());
            format!("{}; {whole} (exit {exit})", run.right)
        }),
        runs.iter().all(|run| run.right == targets && run.whole),
    ));
}
