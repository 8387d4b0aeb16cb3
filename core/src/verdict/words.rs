//! The words of verdicts, whether on what was measured or on a push under way: one thing has one name.

use crate::cost;
use crate::id::NodeName;
use crate::topology::{EdgeId, Topology};
use crate::units::Rate;

/// A path that carries this share of its narrowest part is full.
pub(crate) const FULL: f64 = 0.85;
/// Below this share nobody speaks of loss.
pub(crate) const LOSSY: f64 = 1e-4;

/// How fast its disk reads.
pub(crate) fn reads(node: &NodeName) -> String {
    format!("{node}: its disk reads")
}

/// How fast its disk writes.
pub(crate) fn writes(node: &NodeName) -> String {
    format!("{node}: its disk writes")
}

/// What the network between two would have carried.
pub(crate) fn could_carry(from: &NodeName, to: &NodeName, rate: Rate) -> String {
    format!("; the way from {from} to {to} could carry {}", rate.in_bytes())
}

/// What the network carries.
pub(crate) fn carries(from: &NodeName, to: &NodeName, rate: Rate) -> String {
    format!("{from} to {to}: the network carries {}", rate.in_bytes())
}

/// The first of the narrowest edges between two: it is passed first.
pub(crate) fn narrowest(topology: &Topology, from: &NodeName, to: &NodeName) -> Option<EdgeId> {
    let route = topology.route(from, to)?;
    route.edges.into_iter().reduce(|least, next| {
        if topology.capacity(next) < topology.capacity(least) {
            next
        } else {
            least
        }
    })
}

/// How much of what an edge should carry a rate is, and what was lost on the way.
pub(crate) fn of_edge(topology: &Topology, edge: EdgeId, rate: Rate, loss: f64) -> String {
    let (name, wire) = (topology.edge_name(edge), topology.capacity(edge));
    let share = share_of(topology, edge, rate);
    if share >= FULL {
        return format!("which is what the {name} has ({})", wire.in_bits());
    }
    let loss = if loss > LOSSY {
        format!(", and {:.2} % of it was sent again", loss * 100.0)
    } else {
        String::new()
    };
    format!(
        "{:.0} % of what the {name} should ({}){loss}",
        share * 100.0,
        wire.in_bits()
    )
}

/// The share of an edge's payload rate that a rate is.
pub(crate) fn share_of(topology: &Topology, edge: EdgeId, rate: Rate) -> f64 {
    rate.bytes_per_second() / cost::goodput(topology.capacity(edge)).bytes_per_second().max(1.0)
}
