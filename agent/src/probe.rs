//! Measurements that the coordinator asks for: what this host says of itself, its disks and processors, the ways to
//! other nodes.

use std::fs;
use std::net::{IpAddr, ToSocketAddrs as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::available_parallelism;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::process::{Resource, getrlimit};
use stage_core::ask::{Progress, Said};
use stage_core::bench::{Depth, HostReport, LinkProbe, NodeReading, Side};
use stage_core::id::NodeName;
use stage_core::plan::WindowLimits;
use stage_core::units::{ByteCount, Rate};
use stage_transfer::probe::{Probing, cpu, disk, measure};
use tokio::time::interval;

use crate::asked::{PROGRESS, Voice};
use crate::runner::Context;
use crate::{blocking, host};

/// What this host says of itself.
pub(crate) async fn describe(context: &Arc<Context>) -> HostReport {
    let (node, roots) = (context.node.clone(), context.roots.clone());
    let data = context.plane.addresses().first().map(|address| address.ip());
    blocking(move || HostReport {
        roots: disk::spaces(&roots),
        ..report(&node, data)
    })
    .await
}

/// Measures this node, and says every second how far it is.
pub(crate) async fn node(context: &Arc<Context>, depth: Depth, voice: &Voice) {
    let host = describe(context).await;
    let moved = Arc::new(AtomicU64::new(0));
    let mut measuring = Box::pin({
        let (roots, moved, stop) = (context.roots.clone(), moved.clone(), voice.stop.clone());
        blocking(move || {
            let disks = disk::measure(&roots, depth, &mut |bytes| {
                moved.fetch_add(bytes, Ordering::Relaxed);
                !stop.is_cancelled()
            });
            NodeReading {
                host,
                disks,
                blake3: cpu::blake3(depth.cpu_time()),
                sha256: cpu::sha256(depth.cpu_time()),
                aes_gcm: cpu::aes_gcm(depth.cpu_time()),
            }
        })
    });
    let roots = context.roots.names().len() as u64;
    let total = 2 * roots * depth.disk_bytes().0;
    let mut beat = interval(PROGRESS);
    loop {
        tokio::select! {
            reading = &mut measuring => return voice.last(Said::Node(Box::new(reading))).await,
            _ = beat.tick() => {
                let done = moved.load(Ordering::Relaxed);
                voice.say(&Said::Progress(Progress { done, total }), false).await;
            }
        }
    }
}

/// Measures the way to another node, or lets itself be measured until nobody waits for that any more.
pub(crate) async fn link(context: &Arc<Context>, probe: LinkProbe, voice: &Voice) {
    let mut beat = interval(PROGRESS);
    let LinkProbe { id, key, side } = probe;
    match side {
        Side::Answer { from } => {
            let roots = Some(context.roots.clone());
            let _answering = context.plane.answer_probe(id, key, from, roots);
            loop {
                beat.tick().await;
                voice.say(&Said::Progress(Progress::default()), false).await;
            }
        }
        Side::Measure {
            peer,
            depth,
            sweep,
            keep,
            control,
        } => {
            let moved = Arc::new(AtomicU64::new(0));
            let probing = Probing {
                id,
                key,
                peer,
                depth,
                sweep,
                keep,
                roots: Some(context.roots.clone()),
                control,
            };
            let mut measuring = Box::pin(measure(
                context.plane.clone(),
                probing,
                moved.clone(),
                voice.stop.clone(),
            ));
            loop {
                tokio::select! {
                    reading = &mut measuring => {
                        let said = match reading {
                            Ok(reading) => Said::Link(Box::new(reading)),
                            Err(failure) => Said::Failed(failure.on(&context.node)),
                        };
                        return voice.last(said).await;
                    }
                    _ = beat.tick() => {
                        let done = moved.load(Ordering::Relaxed);
                        voice.say(&Said::Progress(Progress { done, total: 0 }), false).await;
                    }
                }
            }
        }
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// A number in a file of the kernel's; 0 where it does not say.
fn number(path: &str) -> u64 {
    read(path).parse().unwrap_or(0)
}

/// All but the roots.
fn report(node: &NodeName, data: Option<IpAddr>) -> HostReport {
    let interface = data.map(interface_of).unwrap_or_default();
    let class = |what: &str| read(&format!("/sys/class/net/{interface}/{what}"));
    // In Mbit/s; interfaces without a cable say -1, many virtual ones nothing.
    let nic = class("speed")
        .parse::<f64>()
        .ok()
        .filter(|speed| *speed > 0.0 && *speed < 1e7)
        .map(|speed| Rate::from_bits_per_second(speed * 1e6));
    let first = |text: String| text.split_whitespace().next().unwrap_or_default().to_owned();
    HostReport {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        kernel: read("/proc/sys/kernel/osrelease"),
        cpus: available_parallelism().map_or(1, |cpus| u32::try_from(cpus.get()).unwrap_or(u32::MAX)),
        load: first(read("/proc/loadavg")).parse().unwrap_or(0.0),
        nic,
        mtu: class("mtu").parse().unwrap_or(0),
        interface,
        windows: host::windows(),
        socket_windows: WindowLimits {
            receive: ByteCount(number("/proc/sys/net/core/rmem_max")),
            send: ByteCount(number("/proc/sys/net/core/wmem_max")),
        },
        // Where the kernel does not say, it has not been switched off.
        window_scaling: read("/proc/sys/net/ipv4/tcp_window_scaling") != "0",
        backlog: number("/proc/sys/net/core/netdev_max_backlog"),
        congestion_controls: host::congestion_controls(),
        congestion_control: host::congestion_control(),
        mtu_probing: number("/proc/sys/net/ipv4/tcp_mtu_probing") > 0,
        governor: governor(
            &read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"),
            read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        ),
        descriptors: getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX),
        unix_ms: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        resolves_to: (node.as_str(), 0)
            .to_socket_addrs()
            .map(|found| found.map(|address| address.ip().to_string()).collect())
            .unwrap_or_default(),
        roots: Vec::new(),
    }
}

/// What a governor's name says. The drivers that choose frequencies themselves call their usual way powersave as well.
fn governor(driver: &str, name: String) -> String {
    if driver.contains("pstate") {
        String::new()
    } else {
        name
    }
}

/// The interface that has this address; empty if none has.
fn interface_of(address: IpAddr) -> String {
    let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
    interfaces
        .iter()
        .find(|interface| interface.ip() == address)
        // Every address in 127.0.0.0/8 is the loopback interface's, which names one of them.
        .or_else(|| {
            interfaces
                .iter()
                .find(|interface| address.is_loopback() && interface.is_loopback())
        })
        .map(|interface| interface.name.clone())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_chooses_itself_saves_no_power_at_the_wrong_time() {
        assert_eq!(governor("acpi-cpufreq", "powersave".to_owned()), "powersave");
        for driver in ["intel_pstate", "amd-pstate-epp"] {
            assert_eq!(governor(driver, "powersave".to_owned()), "");
        }
    }

    #[test]
    fn this_host_describes_itself() {
        let host = report(&"localhost".parse().unwrap(), Some("127.0.0.9".parse().unwrap()));
        assert_eq!((host.interface.as_str(), host.nic), ("lo", None));
        assert!(
            host.mtu >= 1500 && host.cpus > 0 && host.descriptors > 0,
            "{host:?}"
        );
        assert!(host.unix_ms > 1_600_000_000_000 && host.window_scaling);
        assert!(
            host.resolves_to.iter().any(|ip| ip == "127.0.0.1" || ip == "::1"),
            "{host:?}"
        );
        assert!(host.congestion_controls.contains(&host.congestion_control));
    }
}
