//! Kill -9 in mid-push: of the coordinator, of a relay, of both.

use std::time::{Duration, Instant};

use serde_json::json;
use stage_core::units::ByteCount;
use stage_lab::cluster::{Cluster, Pushed, Running, Security};
use stage_lab::{Lab, LabError};

use super::report::Row;
use super::{Bench, PUSH, one_switch, random_file, received, right_copies, rounded, seconds, word};

const SIZE: ByteCount = ByteCount(1 << 30);
const RATE: &str = "1 Gbit/s";
const TARGETS: usize = 4;
/// How long those below a dead relay may get nothing.
const GAP: Duration = Duration::from_secs(3);
/// As many new bytes are a sign of life: more than control traffic, less than a chunk.
const SIGN: u64 = 256 << 10;
/// What a node receives in all, over the file's size, if it gets no chunk twice; its interface counts headers too.
const ONCE: f64 = 1.02;

pub(super) fn run(bench: &mut Bench) {
    let topology = one_switch(4, RATE);
    bench.stand("coordinator killed", &topology, Security::Tls, coordinator_killed);
    for coordinator_runs in [true, false] {
        let state = if coordinator_runs { "running" } else { "down" };
        let name = format!("relay killed, coordinator {state}");
        bench.stand(&name, &topology, Security::Tls, |bench, lab, cluster| {
            relay_killed(bench, lab, cluster, &name, coordinator_runs)
        });
    }
}

fn push_words(file: &str) -> [&str; 6] {
    ["push", file, "--to", "n[1-4]", "--shape", "chain"]
}

fn coordinator_killed(bench: &mut Bench, lab: &Lab, cluster: &mut Cluster<'_>) -> Result<(), LabError> {
    let file = random_file(lab, "n0", "payload", SIZE)?;
    let digest = stage_lab::sha256sum(std::slice::from_ref(&file))?.remove(0);
    let nodes: Vec<String> = (1..=TARGETS).map(|at| format!("n{at}")).collect();
    let before: Vec<u64> = nodes
        .iter()
        .map(|node| in_bytes(cluster, node))
        .collect::<Result<_, _>>()?;
    let running = cluster.start_command(&push_words(word(&file)))?;
    wait_for_share(cluster, "n4", before[3], 0.33, &running)?;
    cluster.kill_coordinator();
    // Nobody needs it for the bytes.
    let went_on = wait_for_share(cluster, "n4", before[3], 0.66, &running);
    cluster.start_coordinator()?;
    let pushed = running.finish(PUSH)?;
    let counted: Vec<f64> = nodes
        .iter()
        .zip(&before)
        .map(|(node, before)| Ok((in_bytes(cluster, node)? - before) as f64 / SIZE.0 as f64))
        .collect::<Result<_, LabError>>()?;
    let right = right_copies(&pushed, &digest)?;
    let each = received(&pushed);
    let job = pushed.end()["job"].as_str().unwrap_or_default().to_owned();
    let told = cluster.status(&job)?;
    let figures = json!({
        "finished": pushed.end(),
        "status_after": told,
        "interface_received_over_size": counted.iter().map(|share| rounded(*share)).collect::<Vec<_>>(),
    });
    bench.add(
        Row::new(
            "coordinator killed at a third, started again at two thirds: exit; right copies; status",
            "0; 4; done",
            format!(
                "{}; {right}; {}",
                exit(&pushed),
                told["state"].as_str().unwrap_or("?")
            ),
            pushed.exit == Some(0) && right == TARGETS && told["state"] == "done",
        )
        .with(figures),
    );
    bench.add(Row::new(
        "coordinator killed: bytes went on while it was down",
        "yes",
        went_on
            .as_ref()
            .map_or_else(ToString::to_string, |()| "yes".to_owned()),
        went_on.is_ok(),
    ));
    bench.add(Row::new(
        "coordinator killed: each target received over size, as it says (its interface)",
        format!("1 (<= {ONCE})"),
        each.iter()
            .zip(&counted)
            .map(|(bytes, share)| format!("{:.4} ({share:.4})", *bytes as f64 / SIZE.0 as f64))
            .collect::<Vec<_>>()
            .join(", "),
        each.iter().all(|bytes| *bytes == SIZE.0) && counted.iter().all(|share| *share <= ONCE),
    ));
    Ok(())
}

fn relay_killed(
    bench: &mut Bench,
    lab: &Lab,
    cluster: &mut Cluster<'_>,
    name: &str,
    coordinator_runs: bool,
) -> Result<(), LabError> {
    let file = random_file(lab, "n0", "payload", SIZE)?;
    let digest = stage_lab::sha256sum(std::slice::from_ref(&file))?.remove(0);
    let start: Vec<u64> = (0..=TARGETS)
        .map(|at| in_bytes(cluster, &format!("n{at}")))
        .collect::<Result<_, _>>()?;
    let running = cluster.start_command(&push_words(word(&file)))?;
    let planned = running.wait_for("a plan", PUSH, |event| event.kind() == "planned")?;
    let chain = chain_of(&planned.value["plan"]);
    let [_, relay, below @ ..] = &chain[..] else {
        return Err(LabError::Answer {
            tool: "stage push",
            wanted: format!("plan with a chain of {TARGETS}: {}", planned.value),
        });
    };
    let last = below.last().unwrap_or(relay);
    wait_for_share(cluster, last, start[place(last)], 0.3, &running)?;
    if !coordinator_runs {
        cluster.kill_coordinator();
        wait_for_share(cluster, last, start[place(last)], 0.4, &running)?;
    }
    let at_kill: Vec<u64> = below
        .iter()
        .map(|node| in_bytes(cluster, node))
        .collect::<Result<_, _>>()?;
    cluster.kill_agent(relay);
    let traces = trace(cluster, below, &at_kill, &start)?;
    let gaps: Vec<Option<Duration>> = traces
        .iter()
        .zip(below.iter().zip(&at_kill))
        .map(|(trace, (node, at_kill))| {
            let missing = (SIZE.0 + start[place(node)]).saturating_sub(*at_kill);
            longest_gap(trace, SIGN, missing / 100 * 98)
        })
        .collect();
    let shown: Vec<String> = below
        .iter()
        .zip(&gaps)
        .map(|(node, gap)| match gap {
            Some(gap) => format!("{node} {:.2} s", gap.as_secs_f64()),
            None => format!("{node} for good"),
        })
        .collect();
    bench.add(
        Row::new(
            format!("{name}: longest time without bytes below it"),
            format!("< {} s", GAP.as_secs()),
            shown.join(", "),
            gaps.iter().all(|gap| gap.is_some_and(|gap| gap < GAP)),
        )
        .with(json!({
            "chain": chain,
            "relay": relay,
            "gap_seconds": gaps.iter().map(|gap| gap.map(seconds)).collect::<Vec<_>>(),
        })),
    );

    // With the coordinator, the relay stays away until the others are done; without, both come back.
    let (wanted, copies) = if coordinator_runs {
        (5, TARGETS - 1)
    } else {
        cluster.start_coordinator()?;
        cluster.start_agent(relay)?;
        (0, TARGETS)
    };
    let pushed = running.finish(PUSH)?;
    let right = right_copies(&pushed, &digest)?;
    bench.add(
        Row::new(
            format!("{name}: exit; right copies"),
            format!("{wanted}; {copies}"),
            format!("{}; {right}", exit(&pushed)),
            pushed.exit == Some(wanted) && right == copies,
        )
        .with(json!({ "finished": pushed.end() })),
    );
    if coordinator_runs {
        cluster.start_agent(relay)?;
        let job = pushed.end()["job"].as_str().unwrap_or_default().to_owned();
        let filled = cluster.run(&["wait", &job, "--unfit"], PUSH)?;
        let right = right_copies(&filled, &digest)?;
        let bytes = filled.node(relay)["bytes_received"].as_u64().unwrap_or_default();
        bench.add(
            Row::new(
                format!("{name}: it comes back: exit of `stage wait`; right copies; it received over size"),
                format!("0; {TARGETS}; 1"),
                format!("{}; {right}; {:.4}", exit(&filled), bytes as f64 / SIZE.0 as f64),
                filled.exit == Some(0) && right == TARGETS && bytes <= SIZE.0,
            )
            .with(json!({ "finished": filled.end() })),
        );
    }
    Ok(())
}

fn exit(pushed: &Pushed) -> String {
    pushed
        .exit
        .map_or_else(|| "a signal".to_owned(), |exit| exit.to_string())
}

fn in_bytes(cluster: &Cluster<'_>, node: &str) -> Result<u64, LabError> {
    Ok(cluster.link_bytes(node)?.received.0)
}

/// `n3` is at 3.
fn place(node: &str) -> usize {
    node.trim_start_matches('n').parse().unwrap_or_default()
}

/// The nodes of a chain in its order, without the source.
fn chain_of(plan: &serde_json::Value) -> Vec<String> {
    let hops = plan["hops"].as_array().map_or(&[][..], Vec::as_slice);
    let mut chain: Vec<String> = Vec::new();
    let mut parent = plan["source"].as_str().unwrap_or_default();
    while let Some(child) = hops
        .iter()
        .find(|hop| hop["parent"] == parent)
        .and_then(|hop| hop["child"].as_str())
        .filter(|child| chain.iter().all(|known| known != child))
    {
        chain.push(child.to_owned());
        parent = child;
    }
    chain
}

/// Waits until a node has received a share of the file.
fn wait_for_share(
    cluster: &Cluster<'_>,
    node: &str,
    start: u64,
    share: f64,
    running: &Running,
) -> Result<(), LabError> {
    let within = Duration::from_secs(60);
    let deadline = Instant::now() + within;
    loop {
        let got = in_bytes(cluster, node)?.saturating_sub(start) as f64 / SIZE.0 as f64;
        if got >= share {
            return Ok(());
        }
        if Instant::now() > deadline || running.has_ended() {
            return Err(LabError::Late {
                what: format!("{share} of the file on {node}"),
                within,
                state: format!("it has {got:.3}; {}", running.state()),
            });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What each node has received since the relay was killed, until all have the whole file.
fn trace(
    cluster: &Cluster<'_>,
    nodes: &[String],
    at_kill: &[u64],
    start: &[u64],
) -> Result<Vec<Vec<(Duration, u64)>>, LabError> {
    let killed = Instant::now();
    let mut traces = vec![Vec::new(); nodes.len()];
    loop {
        let mut whole = true;
        for (at, node) in nodes.iter().enumerate() {
            let bytes = in_bytes(cluster, node)?;
            traces[at].push((killed.elapsed(), bytes - at_kill[at]));
            whole &= bytes - start[place(node)] >= SIZE.0;
        }
        if whole || killed.elapsed() > Duration::from_secs(60) {
            return Ok(traces);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The longest time in which fewer than `step` bytes came, up to when `until` had come; `None` if they never did.
fn longest_gap(trace: &[(Duration, u64)], step: u64, until: u64) -> Option<Duration> {
    let mut longest = Duration::ZERO;
    let mut mark = (Duration::ZERO, 0);
    for (at, bytes) in trace {
        if *bytes >= mark.1 + step || *bytes >= until {
            longest = longest.max(*at - mark.0);
            mark = (*at, *bytes);
        }
        if *bytes >= until {
            return Some(longest);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_between_signs_of_life() {
        let ms = Duration::from_millis;
        let trace = [
            (ms(10), 300),
            (ms(20), 310),
            (ms(700), 350),
            (ms(900), 800),
            (ms(910), 2000),
        ];
        assert_eq!(longest_gap(&trace, 100, 2000), Some(ms(890)));
        assert_eq!(longest_gap(&trace, 100, 2001), None);
        assert_eq!(longest_gap(&trace[..1], 100, 300), Some(ms(10)));
        assert_eq!(longest_gap(&[], 100, 1), None);
    }

    #[test]
    fn a_chain_is_read_from_a_plan() {
        let plan = json!({ "source": "n0", "hops": [
            { "child": "n1", "parent": "n2" },
            { "child": "n2", "parent": "n0" },
            { "child": "n3", "parent": "n1" },
        ] });
        assert_eq!(chain_of(&plan), ["n2", "n1", "n3"]);
        assert!(chain_of(&serde_json::Value::Null).is_empty());
    }
}
