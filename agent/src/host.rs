//! What this host says of itself.

use std::fs;

use stage_core::plan::WindowLimits;
use stage_core::units::ByteCount;

/// The third figures of `tcp_rmem` and `tcp_wmem`: what autotuning may reach. Linux' defaults where they are not shown.
pub(crate) fn windows() -> WindowLimits {
    let max = |name: &str| {
        let text = fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).ok()?;
        text.split_whitespace().nth(2)?.parse().ok().map(ByteCount)
    };
    let default = WindowLimits::default();
    WindowLimits {
        receive: max("tcp_rmem").unwrap_or(default.receive),
        send: max("tcp_wmem").unwrap_or(default.send),
    }
}

/// Congestion controls that sockets of this process may ask for: the kernel keeps some for root.
pub(crate) fn congestion_controls() -> Vec<String> {
    let text = fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control").unwrap_or_default();
    text.split_whitespace()
        .filter(|name| stage_net::may_have_congestion_control(name))
        .map(str::to_owned)
        .collect()
}

/// The congestion control of sockets that ask for none; empty where the kernel does not say.
pub(crate) fn congestion_control() -> String {
    let text = fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").unwrap_or_default();
    text.trim().to_owned()
}

/// Changes with every boot; empty where the kernel does not say.
pub(crate) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .unwrap_or_default()
        .trim()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_speaks() {
        assert!(windows().receive.0 > 0 && windows().send.0 > 0);
        assert!(congestion_controls().contains(&congestion_control()));
        assert_eq!(boot_id().len(), 36);
    }
}
