use super::*;
use crate::bench::RootSpace;
use crate::failure::{Code, Failure};

const FABRIC: &str = "[cluster]\nname = \"c\"\n[[switch]]\nname = \"s\"\n[[switch]]\nname = \"far\"\n\
    [[node]]\nname = \"n[0-2]\"\nattach = \"s\"\nnic = \"10 Gbit/s\"\n\
    [[node]]\nname = \"z\"\nattach = \"far\"\nnic = \"10 Gbit/s\"\n\
    [[link]]\nbetween = [\"s\", \"far\"]\ncapacity = \"10 Gbit/s\"\nrtt = \"100 ms\"\n";

/// A host that lacks nothing.
fn sound() -> HostReport {
    HostReport {
        version: "1.0.0".to_owned(),
        kernel: "6.1".to_owned(),
        cpus: 8,
        load: 0.1,
        interface: "eth0".to_owned(),
        nic: Some(Rate::from_bits_per_second(1e10)),
        mtu: 9000,
        windows: WindowLimits {
            receive: ByteCount(64 << 20),
            send: ByteCount(64 << 20),
        },
        socket_windows: WindowLimits::default(),
        window_scaling: true,
        backlog: 10_000,
        congestion_controls: vec!["cubic".to_owned()],
        congestion_control: "cubic".to_owned(),
        descriptors: 65536,
        mtu_probing: false,
        governor: String::new(),
        unix_ms: 1,
        resolves_to: vec!["10.0.0.2".to_owned()],
        roots: vec![RootSpace {
            name: "main".parse().unwrap(),
            path: "/scratch".to_owned(),
            free: ByteCount(1 << 40),
            total: ByteCount(2 << 40),
            failure: None,
        }],
    }
}

struct Case {
    host: HostReport,
    topology: String,
    clock_ms: (i64, u64),
    loss: f64,
    neighbours: Vec<(NodeName, u32)>,
    ways: Vec<Way>,
}

fn found(change: impl FnOnce(&mut Case)) -> Vec<Finding> {
    let mut case = Case {
        host: sound(),
        topology: FABRIC.to_owned(),
        clock_ms: (0, 0),
        loss: 0.0,
        neighbours: ["n0", "n2"].map(|name| (name.parse().unwrap(), 9000)).to_vec(),
        ways: Vec::new(),
    };
    change(&mut case);
    let topology = Topology::parse("t", &case.topology).unwrap();
    let context = Context {
        topology: &topology,
        facts: &Facts::default(),
        version: "1.0.0",
        clock_ms: case.clock_ms,
        loss: case.loss,
        neighbours: &case.neighbours,
        ways: &case.ways,
    };
    examine(&"n1".parse().unwrap(), &case.host, &context)
}

/// The only finding.
fn only(change: impl FnOnce(&mut Case)) -> Finding {
    let found = found(change);
    assert_eq!(found.len(), 1, "{found:?}");
    found.into_iter().next().unwrap()
}

#[test]
fn a_sound_host_is_left_in_peace() {
    assert_eq!(found(|_| {}), []);
}

#[test]
fn windows_are_held_against_the_longest_fat_path() {
    let small = only(|case| {
        case.host.windows = WindowLimits {
            receive: ByteCount(4 << 20),
            send: ByteCount(2 << 20),
        };
    });
    assert_eq!(small.check, "windows");
    assert!(
        small.message.contains("z is 0.10 s away") && small.message.contains("119.21 MiB"),
        "{}",
        small.message
    );
    assert_eq!(
        small.mend.split("  #").next().unwrap(),
        "sysctl -w net.ipv4.tcp_rmem=\"4096 131072 67108864\" net.ipv4.tcp_wmem=\"4096 16384 67108864\""
    );
    // On a short path nothing is wrong with them.
    let near = FABRIC.replace("rtt = \"100 ms\"", "rtt = \"0.1 ms\"");
    assert_eq!(
        found(|case| {
            case.host.windows.receive = ByteCount(4 << 20);
            case.topology = near;
        }),
        []
    );
}

#[test]
fn what_the_kernel_is_told_is_looked_at() {
    let off = only(|case| case.host.window_scaling = false);
    assert_eq!(off.check, "window_scaling");
    assert!(off.mend.starts_with("sysctl -w net.ipv4.tcp_window_scaling=1"));
    let short = only(|case| case.host.backlog = 1000);
    assert_eq!(short.check, "backlog");
    assert!(
        short
            .mend
            .starts_with("sysctl -w net.core.netdev_max_backlog=10000")
    );
    assert_eq!(
        found(|case| {
            case.host.backlog = 1000;
            case.topology = FABRIC.replace("nic = \"10 Gbit/s\"", "nic = \"1 Gbit/s\"");
            case.host.nic = None;
        }),
        [],
        "a slow interface has no such bursts"
    );
    let few = only(|case| case.host.descriptors = 1024);
    assert_eq!(few.check, "descriptors");
}

#[test]
fn a_slow_interface_and_an_odd_mtu_are_found() {
    let slow = only(|case| case.host.nic = Some(Rate::from_bits_per_second(1e9)));
    assert_eq!(slow.check, "nic");
    assert!(
        slow.message.contains("1.00 Gbit/s") && slow.mend.contains("ethtool eth0"),
        "{slow:?}"
    );
    assert_eq!(
        found(|case| case.host.nic = None),
        [],
        "a virtual interface says nothing"
    );
    let odd = only(|case| case.host.mtu = 1500);
    assert_eq!(
        (odd.check, odd.mend.as_str()),
        ("mtu", "ip link set dev eth0 mtu 9000")
    );
    // Of two, one of which has more, that one is told.
    let two = |ours, theirs| {
        found(|case| {
            case.host.mtu = ours;
            case.neighbours = vec![("n0".parse().unwrap(), theirs)];
        })
        .len()
    };
    assert_eq!((two(9000, 1500), two(1500, 9000), two(0, 1500)), (1, 0, 0));
}

#[test]
fn a_way_that_takes_smaller_packets_than_both_ends_is_found() {
    let way = |other: &str, mtu, rtt_ms| Way {
        other: other.parse().unwrap(),
        other_mtu: 9000,
        mtu,
        swallows: false,
        rtt: Duration::from_millis(rtt_ms),
    };
    let hole = |mtu| Way {
        swallows: true,
        ..way("z", mtu, 100)
    };
    let cut = only(|case| case.ways = vec![way("n0", 9000, 0), way("n2", 1500, 0)]);
    assert_eq!(cut.check, "path_mtu");
    assert!(
        cut.message.contains("the way to n2 takes packets of 1500"),
        "{}",
        cut.message
    );
    assert!(
        cut.mend.ends_with("ip link set dev eth0 mtu 1500"),
        "{}",
        cut.mend
    );
    let vanish = only(|case| case.ways = vec![way("n2", 1500, 0), hole(1400), hole(1280)]);
    assert!(
        vanish
            .message
            .contains("more than 1280 bytes to or from z vanish"),
        "{}",
        vanish.message
    );
    assert!(
        vanish.mend.starts_with("sysctl -w net.ipv4.tcp_mtu_probing=1"),
        "{}",
        vanish.mend
    );
    // Mended; and nothing is wrong where the other end has no more, or the way is long and its routers speak.
    assert_eq!(
        found(|case| {
            case.host.mtu_probing = true;
            case.ways = vec![hole(1280)];
        }),
        []
    );
    let narrow = Way {
        other_mtu: 1500,
        ..way("n2", 1500, 0)
    };
    assert_eq!(
        found(|case| case.ways = vec![way("z", 1500, 100), narrow, way("n0", 0, 0)]),
        []
    );
    assert_eq!(
        found(|case| {
            case.host.mtu = 65_536;
            case.neighbours.clear();
            case.ways = vec![Way {
                other_mtu: 65_536,
                ..way("n0", 65_535, 0)
            }];
        }),
        [],
        "loopback"
    );
}

#[test]
fn processors_that_save_power_are_found() {
    let slow = only(|case| case.host.governor = "powersave".to_owned());
    assert_eq!(
        (slow.check, slow.mend.as_str()),
        ("governor", "cpupower frequency-set -g performance")
    );
    assert_eq!(found(|case| case.host.governor = "schedutil".to_owned()), []);
}

#[test]
fn a_name_that_leads_to_loopback_is_found() {
    let lost = only(|case| case.host.resolves_to = vec!["10.0.0.2".to_owned(), "127.0.1.1".to_owned()]);
    assert_eq!(lost.check, "name");
    assert!(lost.mend.contains("/etc/hosts"), "{}", lost.mend);
    assert_eq!(
        found(|case| case.host.resolves_to.clear()),
        [],
        "an address in the topology needs no name"
    );
}

#[test]
fn a_clock_is_off_only_beyond_what_the_question_took() {
    let behind = only(|case| case.clock_ms = (-90_000, 500));
    assert_eq!(behind.check, "clock");
    assert!(behind.message.contains("1 min 30 s behind"), "{}", behind.message);
    assert_eq!(found(|case| case.clock_ms = (2500, 1000)), []);
}

#[test]
fn bbr_is_missed_only_where_something_is_lost() {
    let lossy = only(|case| case.loss = 0.002);
    assert_eq!(lossy.check, "congestion_control");
    let mend = "modprobe tcp_bbr && sysctl -w net.ipv4.tcp_allowed_congestion_control=\"cubic bbr\"";
    assert!(lossy.mend.starts_with(mend), "{}", lossy.mend);
    let told = only(|case| case.topology = FABRIC.to_owned() + "loss = \"0.1 %\"\n");
    assert!(told.message.contains("0.10 %"), "{}", told.message);
    let asked = only(|case| case.topology = FABRIC.to_owned() + "congestion_control = \"bbr\"\n");
    assert!(
        asked.message.contains("the topology asks for bbr"),
        "{}",
        asked.message
    );
    assert_eq!(
        found(|case| {
            case.loss = 0.002;
            case.host.congestion_controls.push("bbr".to_owned());
        }),
        []
    );
}

#[test]
fn roots_that_are_full_or_missing_are_found() {
    let full = only(|case| case.host.roots[0].free = ByteCount(5 << 30));
    assert_eq!(full.check, "space");
    // A small file system is not full at ten gigabytes.
    assert_eq!(
        found(|case| {
            case.host.roots[0].free = ByteCount(5 << 30);
            case.host.roots[0].total = ByteCount(20 << 30);
        }),
        []
    );
    let gone = only(|case| {
        case.host.roots[0].failure = Some(Failure::new(Code::RootUnusable, "it is missing", "mount it"));
    });
    assert_eq!((gone.check, gone.mend.as_str()), ("root", "mount it"));
}

#[test]
fn another_release_is_found() {
    let skewed = only(|case| case.host.version = "0.9.0".to_owned());
    assert_eq!(skewed.check, "version");
    assert!(skewed.message.contains("0.9.0"), "{}", skewed.message);
}
