//! Named points at which a test kills the process, to prove that any moment is a good one to die.
//!
//! The environment is read here, below `main`, on purpose: a crash point must work in the real binary, in every process
//! that a test starts, without a parameter through each layer that only tests would set. It is read once, and without
//! the variable a point costs one load and one branch.

use std::sync::OnceLock;

/// Which point to die at: set by tests only.
const VARIABLE: &str = "STAGE_CRASH_AT";

/// Kills this process without any clean-up if the environment names this point.
pub(crate) fn at(point: &str) {
    static CHOSEN: OnceLock<Option<String>> = OnceLock::new();
    let chosen = CHOSEN.get_or_init(|| std::env::var(VARIABLE).ok());
    if chosen.as_deref() == Some(point) {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

/// Marks a moment at which a test may kill the process.
macro_rules! crash_point {
    ($name:literal) => {
        $crate::crash::at($name)
    };
}
pub(crate) use crash_point;
