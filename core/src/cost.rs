//! The formulas behind a forecast, each with its source. One pure place: the planner and the child that chooses its
//! stream count apply the same function.

use std::time::Duration;

use crate::plan::WindowLimits;
use crate::units::Rate;

/// How many streams a hop needs to carry `wanted`: the smallest count within 3 % of the best, `cap` at most.
#[expect(clippy::unimplemented, unused_variables, reason = "being written")]
pub fn streams(
    wanted: Rate,
    rtt: Duration,
    sender: WindowLimits,
    receiver: WindowLimits,
    loss: f64,
    cap: u16,
) -> u16 {
    unimplemented!()
}
