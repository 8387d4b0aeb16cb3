//! How long a plan for many nodes takes, and its simulation: `cargo run --release -p stage-core --example plan_time -- 10000`.

use std::fmt::Write as _;
use std::time::Instant;

use stage_core::plan::{Facts, NodeFacts, Request, ShapeChoice, plan};
use stage_core::simulate::{Trial, simulate};
use stage_core::topology::Topology;
use stage_core::units::{ByteCount, Rate};

/// Racks of 32 nodes below one core switch; the source at the core.
fn fabric(nodes: usize) -> String {
    let racks = nodes.div_ceil(32);
    let mut text = format!(
        "[cluster]\nname = \"big\"\n[[switch]]\nname = \"core\"\n[[switch]]\nname = \"rack[1-{racks}]\"\n\
        [[link]]\nbetween = [\"rack[1-{racks}]\", \"core\"]\ncapacity = \"100 Gbit/s\"\n\
        [[node]]\nname = \"head\"\nattach = \"core\"\nnic = \"25 Gbit/s\"\n"
    );
    for rack in 1..=racks {
        let (first, last) = (rack * 32 - 31, (rack * 32).min(nodes));
        let node =
            format!("[[node]]\nname = \"n[{first}-{last}]\"\nattach = \"rack{rack}\"\nnic = \"10 Gbit/s\"\n");
        write!(text, "{node}").expect("a string takes all");
    }
    text
}

#[expect(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "run by hand, it shows what the clock says"
)]
fn main() {
    let nodes = std::env::args()
        .nth(1)
        .and_then(|text| text.parse().ok())
        .unwrap_or(10_000);
    let begin = Instant::now();
    let topology = Topology::parse("big.toml", &fabric(nodes)).expect("the fabric is well formed");
    println!("{nodes} nodes parsed in {:?}", begin.elapsed());
    let source = topology.nodes()[0].name.clone();
    let request = Request {
        targets: topology.nodes()[1..]
            .iter()
            .map(|node| node.name.clone())
            .collect(),
        source,
        size: ByteCount(100 << 30),
        shape: ShapeChoice::Auto,
        streams: None,
        limit: None,
        source_limit: None,
        encrypted: true,
    };
    // One node in a hundred has a tenth of the disk.
    let sick = request.targets.iter().step_by(100).map(|node| {
        let facts = NodeFacts {
            disk_write: Some(Rate::from_bytes_per_second(118e6)),
            ..NodeFacts::default()
        };
        (node.clone(), facts)
    });
    let sick = Facts {
        nodes: sick.collect(),
        ..Facts::default()
    };
    for (what, facts) in [
        ("equal", Facts::default()),
        ("again", Facts::default()),
        ("some sick", sick),
    ] {
        let begin = Instant::now();
        let made = plan(&topology, &request, &facts).expect("every node is reachable");
        println!("{what}: planned in {:?}: {}", begin.elapsed(), made.reason);
        let trial = Trial {
            topology: &topology,
            request: &request,
            facts: &facts,
            faults: &[],
            spread: 0.0,
            seed: 0,
        };
        let begin = Instant::now();
        let outcome = simulate(&made, &trial).expect("the plan is for this topology");
        println!(
            "{what}: simulated in {:?}: forecast {:?}, simulated {:?}",
            begin.elapsed(),
            made.predicted,
            outcome.last()
        );
    }
}
