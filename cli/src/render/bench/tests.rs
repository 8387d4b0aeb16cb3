//! What people and scripts see of one node and one link.

use std::time::{Duration, UNIX_EPOCH};

use serde_json::Value;
use stage_core::bench::{DiskReading, HostReport, LinkReading, NodeReading, Pair, Rtt, Trace};
use stage_core::units::{ByteCount, Rate};

use super::*;

fn mb(rate: f64) -> Rate {
    Rate::from_bytes_per_second(rate * 1e6)
}

fn node() -> Measurement {
    Measurement {
        subject: Subject::Node("n1".parse().unwrap()),
        unix_ms: 1_000_000,
        reading: Reading::Node(Box::new(NodeReading {
            host: HostReport {
                interface: "eth0".to_owned(),
                nic: Some(Rate::from_bits_per_second(1e10)),
                mtu: 9000,
                load: 0.25,
                ..HostReport::default()
            },
            disks: vec![DiskReading {
                root: "main".parse().unwrap(),
                write: Some(mb(180.0)),
                read: None,
                skipped: String::new(),
            }],
            blake3: mb(4000.0),
            sha256: mb(1500.0),
            aes_gcm: mb(3000.0),
        })),
    }
}

fn link() -> Measurement {
    let stream = |streams, rate| StreamReading {
        streams,
        window: ByteCount(0),
        rate: mb(rate),
        bytes: ByteCount(1_448_000),
        retransmissions: 10,
    };
    Measurement {
        subject: Subject::Link(Pair {
            from: "n0".parse().unwrap(),
            to: "n1".parse().unwrap(),
        }),
        unix_ms: 1_000_000,
        reading: Reading::Link(Box::new(LinkReading {
            rtt: Rtt {
                min: Duration::from_micros(80),
                median: Duration::from_micros(100),
                spread: Duration::from_micros(9),
            },
            forward: vec![stream(1, 600.0), stream(2, 1100.0), stream(4, 1110.0)],
            backward: vec![stream(1, 1170.0)],
            forward_kept: Some(stream(2, 170.0)),
            backward_kept: None,
            switches: vec!["rack1".parse().unwrap()],
            trace: Trace {
                routers: vec![Some("10.0.0.2".parse().unwrap())],
                reached: true,
                mtu: 9000,
                ..Trace::default()
            },
            control: None,
        })),
    }
}

fn wire() -> v1::Measured {
    v1::Measured {
        wire_bytes_per_second: 1.25e9,
        hops: vec!["interface of n0".to_owned()],
        readings: 3,
        together: Some(v1::Together {
            from: "n0".to_owned(),
            network_bytes_per_second: 1.1e9,
            disk_bytes_per_second: 1.8e8,
            both_bytes_per_second: 1.7e8,
            unix_ms: 1_000_000,
        }),
        ..v1::Measured::default()
    }
}

#[test]
fn a_bench_for_people_is_two_tables() {
    let mut out = Vec::new();
    let now = UNIX_EPOCH + Duration::from_secs(1000 + 7200);
    tables(&mut out, &[(node(), wire()), (link(), wire())], now).unwrap();
    insta::assert_snapshot!(String::from_utf8(out).unwrap(), @"
     node        age  load  root     write  read     BLAKE3    SHA-256    AES-GCM  interface          MTU  windows
     n1    2 h 0 min  0.25  main  180 MB/s     -  4.00 GB/s  1.50 GB/s  3.00 GB/s  eth0 10.0 Gbit/s  9000  6.00 MiB / 4.00 MiB

     node        age  from    network      disk  network to disk  side by side  in turns
     n1    2 h 0 min  n0    1.10 GB/s  180 MB/s         170 MB/s      180 MB/s  155 MB/s

     from  to        age     RTT  spread      there  streams       back  streams  sent again  BW x delay
     n0    n1  2 h 0 min  100 µs    9 µs  1.11 GB/s        2  1.17 GB/s        1      1.00 %  122.07 KiB

    n0 → rack1 → n1; no router; MTU 9000
    ");
    let mut out = Vec::new();
    tables(&mut out, &[], now).unwrap();
    assert_eq!(out, b"nothing is known\n");
}

#[test]
fn a_bench_for_scripts_has_plain_numbers() {
    let link = object(&link(), &wire());
    assert_eq!((&link["event"], &link["to"]), (&"link".into(), &"n1".into()));
    assert_eq!(link["bandwidth_delay_bytes"], 125_000);
    assert_eq!(link["forward"][1]["streams"], 2);
    assert_eq!(link["forward_to_disk"]["bytes_per_second"], 1.7e8);
    assert_eq!(
        (&link["routers"][0], &link["path_mtu"]),
        (&"10.0.0.2".into(), &9000.into())
    );
    assert_eq!(link["forward"][1]["bytes_per_second"], 1.1e9);
    let node = object(&node(), &wire());
    assert_eq!(node["disks"][0]["write_bytes_per_second"], 1.8e8);
    assert_eq!(node["disks"][0]["read_bytes_per_second"], Value::Null);
    let both = &node["network_to_disk"];
    assert_eq!(
        (&both["least_bytes_per_second"], &both["takes_turns"]),
        (&1.8e8.into(), &false.into())
    );
    assert_eq!((&node["mtu"], &node["readings"]), (&9000.into(), &3.into()));
}
