//! The bottlenecks: what is made slow, by what, and the words that name it.

use stage_lab::Way;

use crate::bench::one_switch;

/// One bottleneck.
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) made_by: &'static str,
    /// The fabric as it is.
    pub(super) truth: fn() -> String,
    /// What the coordinator is told of it, if that is something else.
    pub(super) told: Option<fn() -> String>,
    pub(super) half_duplex: bool,
    /// Nodes whose disks write and read so much.
    pub(super) slow: &'static [(&'static str, &'static str, &'static str)],
    /// Interfaces that are slower than the topology says.
    pub(super) reshaped: &'static [(&'static str, Way, &'static str)],
    /// Nodes whose agent has this share of a processor, beside a busy loop.
    pub(super) quotas: &'static [(&'static str, f64)],
    /// Bytes that a connection may hold.
    pub(super) window: Option<u64>,
    pub(super) control: Option<&'static str>,
    pub(super) to: &'static str,
    pub(super) words: &'static [&'static str],
    pub(super) mebibytes: u64,
    /// What names it, in a push's words: one of these, with all its words.
    pub(super) push: &'static [&'static [&'static str]],
    /// The same in bench's words.
    pub(super) bench: &'static [&'static [&'static str]],
}

const CHAIN: &[&str] = &["--shape", "chain"];

const PLAIN: Case = Case {
    name: "",
    made_by: "",
    truth: four,
    told: None,
    half_duplex: false,
    slow: &[],
    reshaped: &[],
    quotas: &[],
    window: None,
    control: None,
    to: "n[1-3]",
    words: CHAIN,
    mebibytes: 64,
    push: &[],
    bench: &[],
};

pub(super) const CASES: [Case; 10] = [
    Case {
        name: "slow disk",
        made_by: "n2 writes 15 MB/s (FUSE)",
        slow: &[("n2", "15 MB/s", "60 MB/s")],
        mebibytes: 96,
        push: &[&["n2", "disk"]],
        bench: &[&["n2: its disk writes"], &["n2's disk", "write"]],
        ..PLAIN
    },
    Case {
        name: "slow link",
        made_by: "100 Mbit/s between switches, interfaces have 500",
        truth: slow_link,
        to: "n[2-3]",
        push: &[&["left-right"]],
        bench: &[&["n0 to", "link left-right"], &["n1 to", "link left-right"]],
        ..PLAIN
    },
    Case {
        name: "small window",
        made_by: "256 KiB over 15 ms, one stream",
        truth: long_link,
        window: Some(256 << 10),
        to: "n1",
        words: &["--streams", "1"],
        mebibytes: 48,
        push: &[&["window"]],
        bench: &[&["window"]],
        ..PLAIN
    },
    Case {
        name: "busy processor",
        made_by: "n1's agent shares 3 % of a core with a busy loop",
        quotas: &[("n1", 0.03)],
        to: "n1",
        push: &[
            &["n1", "processor"],
            &["n1", "cpu"],
            &["n1", "core"],
            &["n1", "hash"],
        ],
        bench: &[&["n1: a core"], &["n1", "processor"], &["n1", "cpu"]],
        ..PLAIN
    },
    Case {
        name: "slow source",
        made_by: "n0 reads 15 MB/s (FUSE)",
        slow: &[("n0", "60 MB/s", "15 MB/s")],
        mebibytes: 96,
        push: &[&["n0", "disk"], &["source", "read"], &["n0", "read"]],
        bench: &[&["n0: its disk reads"], &["n0's disk", "read"]],
        ..PLAIN
    },
    Case {
        name: "half duplex",
        made_by: "n1's 200 Mbit/s carry one direction at a time, and it relays",
        truth: own_link,
        half_duplex: true,
        to: "n[1-2]",
        push: &[&["duplex"], &["n1", "both directions"], &["n1", "both ways"]],
        bench: &[&["duplex"], &["n1", "both directions"], &["n1", "both ways"]],
        ..PLAIN
    },
    Case {
        name: "slow relay",
        made_by: "n2, in the middle of a chain, sends 60 of 500 Mbit/s",
        reshaped: &[("n2", Way::Sends, "60 Mbit/s")],
        mebibytes: 48,
        push: &[&["n2 to n3: the network carries", "interface of n2"]],
        bench: &[&["n2 to", "% of what the interface of n2 should"]],
        ..PLAIN
    },
    Case {
        name: "loss",
        made_by: "1 % lost over 15 ms, cubic; the topology does not say so",
        truth: lossy_link,
        told: Some(long_link),
        control: Some("cubic"),
        to: "n1",
        words: &[],
        mebibytes: 12,
        push: &[&["loss"], &["lost"], &["sent again"], &["retransmi"]],
        bench: &[&["loss"], &["lost"], &["sent again"], &["retransmi"]],
        ..PLAIN
    },
    Case {
        name: "slower interface",
        made_by: "n2's interface has 100 Mbit/s, the topology says 500",
        reshaped: &[
            ("n2", Way::Sends, "100 Mbit/s"),
            ("n2", Way::Receives, "100 Mbit/s"),
        ],
        to: "n2",
        push: &[&["interface of n2"]],
        bench: &[&["% of what the interface of n2 should"]],
        ..PLAIN
    },
    Case {
        name: "limit",
        made_by: "push --limit '8 MB/s'",
        words: &["--shape", "chain", "--limit", "8 MB/s"],
        mebibytes: 48,
        push: &[&["limit"]],
        ..PLAIN
    },
];

fn four() -> String {
    one_switch(3, "500 Mbit/s")
}

/// `n0` at one switch, the others at another, with these lines for the link between.
fn two_switches(near: u32, far: u32, link: &str) -> String {
    let last = near + far - 1;
    let names = |from: u32, to: u32| {
        if from == to {
            (format!("n{from}"), format!("10.78.0.{}", from + 1))
        } else {
            (
                format!("n[{from}-{to}]"),
                format!("10.78.0.[{}-{}]", from + 1, to + 1),
            )
        }
    };
    let ((left, left_at), (right, right_at)) = (names(0, near - 1), names(near, last));
    format!(
        r#"[cluster]
name = "lab"

[[switch]]
name = "left"

[[switch]]
name = "right"

[[link]]
between = ["left", "right"]
{link}

[[node]]
name = "{left}"
address = "{left_at}"
attach = "left"
nic = "500 Mbit/s"

[[node]]
name = "{right}"
address = "{right_at}"
attach = "right"
nic = "500 Mbit/s"
"#
    )
}

fn slow_link() -> String {
    two_switches(2, 2, "capacity = \"100 Mbit/s\"")
}

fn long_link() -> String {
    two_switches(1, 1, "capacity = \"500 Mbit/s\"\nrtt = \"15 ms\"")
}

fn lossy_link() -> String {
    two_switches(1, 1, "capacity = \"500 Mbit/s\"\nrtt = \"15 ms\"\nloss = 0.01")
}

/// `n1` behind a link that the lab carries itself, and so can make half duplex.
fn own_link() -> String {
    r#"[cluster]
name = "lab"

[[switch]]
name = "core"

[[node]]
name = "n0"
address = "10.78.0.1"
attach = "core"
nic = "200 Mbit/s"

[[node]]
name = "n1"
address = "10.78.0.2"

[[link]]
between = ["n1", "core"]
capacity = "200 Mbit/s"
rtt = "0.1 ms"

[[node]]
name = "n2"
address = "10.78.0.3"
attach = "core"
nic = "200 Mbit/s"
"#
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::super::parsed;
    use super::*;

    #[test]
    fn each_case_can_be_laid_out_and_named() {
        for case in &CASES {
            let truth = parsed(case.name, &(case.truth)());
            let told = case.told.map(|told| parsed(case.name, &told()));
            let nodes = |topology: &stage_core::topology::Topology| {
                let names: Vec<String> = topology
                    .nodes()
                    .iter()
                    .map(|node| node.name.to_string())
                    .collect();
                names
            };
            assert_eq!(nodes(&truth)[0], "n0", "{}", case.name);
            assert!(
                told.is_none_or(|told| nodes(&told) == nodes(&truth)),
                "{}",
                case.name
            );
            truth.select(case.to, &std::collections::BTreeMap::new()).unwrap();
            assert!(!case.push.is_empty(), "{}", case.name);
        }
    }
}
