//! What our own programs take on a usual host: the only figures in a forecast that come from neither the topology, nor a
//! measurement of the cluster, nor a protocol. Each says where it was measured and how to measure it again; whoever makes
//! a part faster corrects its figure here and nowhere else.

use std::time::Duration;

/// From the push to the first dial: the preparing round, the plan's commit and the instruction. No size changes it.
///
/// Source: an allowance for two commits of the store (an fsync each) and two round trips to the agents. To measure: `stage-lab small`, the rows from the start to *the plan sent*, with 1 KiB.
pub(crate) const INSTRUCT: Duration = Duration::from_millis(20);

/// From the last byte to published: FINAL's commit and its way down, fsync, rename, fsync of the directory.
///
/// Source: an allowance for one commit of the coordinator's and two syncs at the target, as above. To measure:
/// `stage-lab small`, the rows from *the plan sent* to the last copy, less the handshakes ([`super::handshake`]).
pub(crate) const PUBLISH: Duration = Duration::from_millis(20);

/// What one thread moves with check and write.
///
/// Source: loopback with BLAKE3, 1.0 to 1.3 CPU seconds a GB. To measure: `stage-lab compare --setting four` without a
/// shaped link, insecure: processor time over bytes and hops.
pub const THREAD_RATE_BYTES_PER_SECOND: f64 = 1.0e9;

/// The same with AES-GCM, which costs 0.4 to 0.5 CPU seconds a GB and hop, half of it on either end.
///
/// Source and measurement: as above, encrypted.
pub const ENCRYPTED_THREAD_RATE_BYTES_PER_SECOND: f64 = 0.8e9;

/// What one core hashes with BLAKE3.
///
/// Source: a core with AVX2, about 4 GB/s. `stage bench` shows each node's own.
pub(super) const HASH_BYTES_PER_SECOND: f64 = 4.0e9;

/// RTT through one switch, when neither the topology nor a measurement says.
///
/// Source: an allowance for hosts at one switch, between user programs. What a push meets or `stage bench` measures
/// replaces it.
pub const SWITCH_RTT: Duration = Duration::from_micros(100);
