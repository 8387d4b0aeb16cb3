//! Sizes at the edges of the layout, and the same file a second time.

use serde_json::json;
use stage_core::chunk::CHUNK;
use stage_core::units::ByteCount;
use stage_lab::cluster::Security;

use super::report::Row;
use super::{Bench, PUSH, copies, one_switch, random_file, received, remove, right_copies, word};

/// What may leave the source's interface in a push that moves nothing: a talk, and for each target the chunks' digests.
fn talk(size: u64) -> u64 {
    (128 << 10) + 2 * 80 * size.div_ceil(CHUNK)
}

pub(super) fn run(bench: &mut Bench) {
    let sizes = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, (4 << 30) + 12_345];
    let topology = one_switch(2, "10 Gbit/s");
    bench.stand("sizes", &topology, Security::Tls, |bench, lab, cluster| {
        for size in sizes {
            let file = random_file(lab, "n0", &format!("file-{size}"), ByteCount(size))?;
            let digest = stage_lab::sha256sum(std::slice::from_ref(&file))?.remove(0);
            let words = [word(&file), "--to", "n[1-2]"];
            let first = cluster.push(&words, PUSH)?;
            let right = right_copies(&first, &digest)?;
            let all = received(&first).iter().all(|bytes| *bytes == size);
            bench.add(
                Row::new(
                    format!("{size} bytes to two targets: exit; right copies; each received as much"),
                    "0; 2; yes",
                    format!("{}; {right}; {}", first.exit.unwrap_or(-1), yes(all)),
                    first.exit == Some(0) && right == 2 && all && first.end()["sha256"] == digest.as_str(),
                )
                .with(json!({ "finished": first.end() })),
            );
            let before = cluster.link_bytes("n0")?.sent.0;
            let second = cluster.push(&words, PUSH)?;
            let sent = cluster.link_bytes("n0")?.sent.0 - before;
            let none = received(&second).iter().all(|bytes| *bytes == 0) && second.nodes().len() == 2;
            bench.add(
                Row::new(
                    format!("{size} bytes again: exit; no payload; bytes on the source's interface"),
                    format!("0; yes; < {}", talk(size)),
                    format!("{}; {}; {sent}", second.exit.unwrap_or(-1), yes(none)),
                    second.exit == Some(0) && none && sent < talk(size),
                )
                .with(json!({ "finished": second.end(), "interface_sent_bytes": sent })),
            );
            remove(&copies(&first));
            remove(&[file]);
        }
        Ok(())
    });
}

fn yes(is: bool) -> &'static str {
    if is { "yes" } else { "no" }
}
