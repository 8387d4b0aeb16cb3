//! Readings made up for tests.

use super::StreamReading;
use crate::units::{ByteCount, Rate};

/// What 1, 2, 4 … streams carried, MB/s.
pub(super) fn rates(mb: &[f64]) -> Vec<StreamReading> {
    mb.iter()
        .zip([1, 2, 4, 8])
        .map(|(mb, streams)| StreamReading {
            streams,
            window: ByteCount(0),
            rate: Rate::from_bytes_per_second(mb * 1e6),
            bytes: ByteCount(1),
            retransmissions: 0,
        })
        .collect()
}
