//! What was measured, and what is wrong with hosts: tables and sentences for people, lines for scripts.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use serde_json::{Value, json};
use stage_core::bench::{
    DiskReading, LinkReading, Measurement, NodeReading, Reading, StreamReading, Subject,
};
use stage_core::failure::{Code, Failure};
use stage_core::topology::hostlist;
use stage_core::units::{ByteCount, Rate, show_time};
use stage_proto::v1;
use stage_proto::v1::bench_event::Event;

use super::{Form, heat, human, json};

/// A bench as it is heard of.
pub(crate) struct Benching {
    form: Form,
    is_sweep: bool,
    bar: Option<ProgressBar>,
    measured: Vec<(Measurement, v1::Measured)>,
    remarks: Vec<v1::BenchRemark>,
    /// By why, in words.
    polite: BTreeMap<String, Vec<String>>,
    failed: Vec<(String, Failure)>,
}

impl Benching {
    /// Of a sweep, matrices are shown.
    pub(crate) fn new(form: Form, is_sweep: bool) -> Self {
        let bar = (form == Form::Human).then(|| {
            let style = ProgressStyle::with_template("{elapsed_precise} {bar:24} {pos}/{len} {msg}");
            let bar = ProgressBar::new(1);
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.enable_steady_tick(Duration::from_millis(500));
            bar
        });
        Self {
            form,
            is_sweep,
            bar,
            measured: Vec::new(),
            remarks: Vec::new(),
            polite: BTreeMap::new(),
            failed: Vec::new(),
        }
    }

    fn line(&self, line: &impl Serialize) -> io::Result<()> {
        if self.form == Form::Json {
            json::write(&mut io::stdout().lock(), line)?;
        }
        Ok(())
    }

    /// Takes an event.
    ///
    /// # Errors
    /// The output is gone.
    pub(crate) fn heard(&mut self, event: Event) -> io::Result<()> {
        match event {
            Event::Progress(progress) => {
                if let Some(bar) = &self.bar {
                    bar.set_length(progress.total.max(1).into());
                    bar.set_position(progress.done.into());
                    bar.set_message(progress.what.clone());
                }
                self.line(&json!({
                    "event": "progress", "done": progress.done, "total": progress.total, "what": progress.what,
                }))
            }
            Event::Skipped(skipped) => {
                let failure = skipped
                    .failure
                    .as_ref()
                    .map_or_else(|| Failure::new(Code::Internal, "no reason given", ""), Into::into);
                let name = if skipped.to.is_empty() {
                    skipped.node.clone()
                } else {
                    format!("{} to {}", skipped.node, skipped.to)
                };
                self.line(&json!({
                    "event": "skipped",
                    "node": skipped.node,
                    "to": (!skipped.to.is_empty()).then_some(&skipped.to),
                    "busy": skipped.is_polite,
                    "error": json::Cause::from(&failure),
                }))?;
                if skipped.is_polite {
                    self.polite.entry(failure.message).or_default().push(name);
                } else {
                    self.failed.push((name, failure));
                }
                Ok(())
            }
            Event::Measured(wire) => {
                // One that this release cannot read is one that it does not show.
                if let Ok(measurement) = Measurement::try_from(&wire) {
                    self.line(&object(&measurement, &wire))?;
                    self.measured.push((measurement, wire));
                }
                Ok(())
            }
            Event::Remark(remark) => {
                self.line(&json!({ "event": remark.kind, "text": remark.text }))?;
                self.remarks.push(remark);
                Ok(())
            }
        }
    }

    /// Both directions of what was measured, by name.
    fn ways(&self) -> Vec<(String, &[StreamReading])> {
        let mut ways = Vec::new();
        for (measurement, _) in &self.measured {
            if let (Subject::Link(pair), Reading::Link(link)) = (&measurement.subject, &measurement.reading) {
                ways.push((format!("{} to {}", pair.from, pair.to), link.forward.as_slice()));
                ways.push((format!("{} to {}", pair.to, pair.from), link.backward.as_slice()));
            }
        }
        ways
    }

    /// The sweep as a drawing; none if nothing was measured.
    pub(crate) fn heat_map(&self) -> Option<String> {
        let ways = self.ways();
        (!ways.is_empty()).then(|| heat::map(&ways))
    }

    /// Whether all that could be measured was.
    pub(crate) fn is_whole(&self) -> bool {
        self.failed.is_empty()
    }

    /// Shows what is left to show.
    ///
    /// # Errors
    /// The output is gone.
    pub(crate) fn finish(self, exit: u8) -> io::Result<()> {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.line(&json!({
            "event": "finished",
            "exit": exit,
            "measured": self.measured.len(),
            "skipped": self.polite.values().map(Vec::len).sum::<usize>(),
            "failed": self.failed.len(),
        }))?;
        if self.form == Form::Human {
            let mut out = io::stdout().lock();
            if self.is_sweep {
                for (name, readings) in self.ways() {
                    heat::matrix(&mut out, &name, readings)?;
                }
            } else {
                tables(&mut out, &self.measured, SystemTime::now())?;
            }
            for kind in ["verdict", "flag"] {
                let remarks: Vec<_> = self.remarks.iter().filter(|r| r.kind == kind).collect();
                if !remarks.is_empty() {
                    writeln!(out)?;
                }
                for remark in remarks {
                    let mark = if kind == "flag" { "! " } else { "" };
                    writeln!(out, "{mark}{}", remark.text)?;
                }
            }
        }
        let mut out = io::stderr().lock();
        // Where standard error is gone too, the exit code is all that is left to say.
        for (why, names) in &self.polite {
            drop(writeln!(out, "stage: not measured: {}: {why}", fold(names)));
        }
        for (name, failure) in &self.failed {
            drop(writeln!(
                out,
                "stage: not measured: {name}: {}",
                human::cause(failure)
            ));
            drop(writeln!(out, "  next: {}", failure.hint));
        }
        Ok(())
    }
}

/// Names of nodes folded; of ways, which no hostlist can fold, in a row.
fn fold(names: &[String]) -> String {
    if names.iter().any(|name| name.contains(' ')) {
        names.join(", ")
    } else {
        hostlist::fold(names.iter().map(String::as_str))
    }
}

fn object(measurement: &Measurement, wire: &v1::Measured) -> Value {
    let mut object = match (&measurement.subject, &measurement.reading) {
        (Subject::Node(node), Reading::Node(reading)) => node_object(node.as_str(), reading),
        (Subject::Link(pair), Reading::Link(reading)) => json!({
            "event": "link",
            "node": pair.from,
            "to": pair.to,
            "rtt_min_seconds": reading.rtt.min.as_secs_f64(),
            "rtt_seconds": reading.rtt.median.as_secs_f64(),
            "rtt_spread_seconds": reading.rtt.spread.as_secs_f64(),
            "forward": streams(&reading.forward),
            "backward": streams(&reading.backward),
            "wire_bytes_per_second": wire.wire_bytes_per_second,
            "bandwidth_delay_bytes": product(reading, wire).0,
            "hops": wire.hops,
        }),
        _ => json!({}),
    };
    object["measured_unix_ms"] = measurement.unix_ms.into();
    object["readings"] = wire.readings.into();
    object
}

fn node_object(node: &str, reading: &NodeReading) -> Value {
    let host = &reading.host;
    let rate = |rate: Rate| rate.bytes_per_second();
    let disk = |disk: &DiskReading| {
        json!({
            "root": disk.root,
            "write_bytes_per_second": disk.write.map(rate),
            "read_bytes_per_second": disk.read.map(rate),
            "skipped": (!disk.skipped.is_empty()).then_some(&disk.skipped),
        })
    };
    json!({
        "event": "node",
        "node": node,
        "disks": reading.disks.iter().map(disk).collect::<Vec<_>>(),
        "blake3_bytes_per_second": rate(reading.blake3),
        "sha256_bytes_per_second": rate(reading.sha256),
        "aes_gcm_bytes_per_second": rate(reading.aes_gcm),
        "cpus": host.cpus,
        "load": host.load,
        "interface": host.interface,
        "nic_bits_per_second": host.nic.map(Rate::bits_per_second),
        "mtu": host.mtu,
        "tcp_rmem_bytes": host.windows.receive.0,
        "tcp_wmem_bytes": host.windows.send.0,
        "rmem_max_bytes": host.socket_windows.receive.0,
        "wmem_max_bytes": host.socket_windows.send.0,
        "congestion_control": host.congestion_control,
        "congestion_controls": host.congestion_controls,
        "version": host.version,
        "kernel": host.kernel,
    })
}

fn streams(readings: &[StreamReading]) -> Vec<Value> {
    readings
        .iter()
        .map(|reading| {
            json!({
                "streams": reading.streams,
                "bytes_per_second": reading.rate.bytes_per_second(),
                "window_bytes": (reading.window.0 > 0).then_some(reading.window.0),
                "retransmissions": reading.retransmissions,
                "loss": reading.loss(),
            })
        })
        .collect()
}

/// Bandwidth × delay: what must be under way to fill the way.
fn product(reading: &LinkReading, wire: &v1::Measured) -> ByteCount {
    ByteCount((wire.wire_bytes_per_second * reading.rtt.median.as_secs_f64()) as u64)
}

fn tables(out: &mut impl Write, measured: &[(Measurement, v1::Measured)], now: SystemTime) -> io::Result<()> {
    let age = |measurement: &Measurement| {
        let then = UNIX_EPOCH + Duration::from_millis(measurement.unix_ms);
        let age = now.duration_since(then).unwrap_or_default();
        if age < Duration::from_secs(1) {
            return "now".to_owned();
        }
        show_time(age).to_string()
    };
    let or_dash = |rate: Option<Rate>| rate.map_or("-".to_owned(), |rate| rate.in_bytes().to_string());
    let mut nodes = super::table::plain(
        &[
            "node",
            "age",
            "load",
            "root",
            "write",
            "read",
            "BLAKE3",
            "SHA-256",
            "AES-GCM",
            "interface",
            "MTU",
            "windows",
        ],
        &[1, 2, 4, 5, 6, 7, 8, 10],
    );
    let mut links = super::table::plain(
        &[
            "from",
            "to",
            "age",
            "RTT",
            "spread",
            "there",
            "streams",
            "back",
            "streams",
            "sent again",
            "BW x delay",
        ],
        &[2, 3, 4, 5, 6, 7, 8, 9, 10],
    );
    let mut counts = [0, 0];
    for (measurement, wire) in measured {
        match (&measurement.subject, &measurement.reading) {
            (Subject::Node(node), Reading::Node(reading)) => {
                counts[0] += 1;
                let host = &reading.host;
                for (at, disk) in reading.disks.iter().enumerate() {
                    let first = |text: String| if at == 0 { text } else { String::new() };
                    let speed = host
                        .nic
                        .map_or(String::new(), |nic| format!(" {}", nic.in_bits()));
                    nodes.add_row([
                        first(node.to_string()),
                        first(age(measurement)),
                        first(format!("{:.2}", host.load)),
                        disk.root.to_string(),
                        or_dash(disk.write),
                        or_dash(disk.read),
                        first(reading.blake3.in_bytes().to_string()),
                        first(reading.sha256.in_bytes().to_string()),
                        first(reading.aes_gcm.in_bytes().to_string()),
                        first(format!("{}{speed}", host.interface)),
                        first(host.mtu.to_string()),
                        first(format!("{} / {}", host.windows.receive, host.windows.send)),
                    ]);
                }
            }
            (Subject::Link(pair), Reading::Link(reading)) => {
                counts[1] += 1;
                let best = |readings| or_dash(LinkReading::best(readings).map(|best| best.rate));
                let enough = |readings| {
                    LinkReading::enough(readings).map_or("-".to_owned(), |count| count.to_string())
                };
                let lost = [&reading.forward, &reading.backward]
                    .into_iter()
                    .filter_map(|readings| LinkReading::best(readings))
                    .map(StreamReading::loss)
                    .fold(0.0, f64::max);
                links.add_row([
                    pair.from.to_string(),
                    pair.to.to_string(),
                    age(measurement),
                    show_time(reading.rtt.median).to_string(),
                    show_time(reading.rtt.spread).to_string(),
                    best(&reading.forward),
                    enough(&reading.forward),
                    best(&reading.backward),
                    enough(&reading.backward),
                    format!("{:.2} %", lost * 100.0),
                    product(reading, wire).to_string(),
                ]);
            }
            _ => {}
        }
    }
    if counts == [0, 0] {
        return writeln!(out, "nothing is known");
    }
    if counts[0] > 0 {
        super::table::write(out, &nodes)?;
    }
    if counts[0] > 0 && counts[1] > 0 {
        writeln!(out)?;
    }
    if counts[1] > 0 {
        super::table::write(out, &links)?;
    }
    for (measurement, _) in measured {
        if let (Subject::Node(node), Reading::Node(reading)) = (&measurement.subject, &measurement.reading) {
            for disk in reading.disks.iter().filter(|disk| !disk.skipped.is_empty()) {
                writeln!(
                    out,
                    "{node}: root {} was not measured: {}",
                    disk.root, disk.skipped
                )?;
            }
        }
    }
    Ok(())
}

/// What is wrong with hosts, as it is heard of.
pub(crate) struct Findings {
    form: Form,
    nodes: usize,
    /// Check, message and what mends it, with the nodes where that is so.
    found: BTreeMap<(String, String, String), Vec<String>>,
    silent: Vec<(String, Failure)>,
}

impl Findings {
    pub(crate) fn new(form: Form) -> Self {
        Self {
            form,
            nodes: 0,
            found: BTreeMap::new(),
            silent: Vec::new(),
        }
    }

    /// Takes what is said of a node.
    ///
    /// # Errors
    /// The output is gone.
    pub(crate) fn heard(&mut self, told: &v1::NodeFindings) -> io::Result<()> {
        self.nodes += 1;
        let failure = told.failure.as_ref().map(Failure::from);
        if self.form == Form::Json {
            let findings: Vec<Value> = told
                .findings
                .iter()
                .map(|found| json!({"check": found.check, "message": found.message, "mend": found.mend}))
                .collect();
            json::write(
                &mut io::stdout().lock(),
                &json!({
                    "event": "node",
                    "node": told.node,
                    "findings": findings,
                    "error": failure.as_ref().map(json::Cause::from),
                }),
            )?;
        }
        for found in &told.findings {
            let key = (found.check.clone(), found.message.clone(), found.mend.clone());
            self.found.entry(key).or_default().push(told.node.clone());
        }
        if let Some(failure) = failure {
            self.silent.push((told.node.clone(), failure));
        }
        Ok(())
    }

    /// Whether nothing was found, and all answered that should: one that is drained need not.
    pub(crate) fn is_sound(&self) -> bool {
        self.found.is_empty()
            && self
                .silent
                .iter()
                .all(|(_, failure)| failure.code == Code::Drained)
    }

    /// Shows what is left to show.
    ///
    /// # Errors
    /// The output is gone.
    pub(crate) fn finish(self, exit: u8) -> io::Result<()> {
        let mut out = io::stdout().lock();
        let findings: usize = self.found.values().map(Vec::len).sum();
        match self.form {
            Form::Quiet => {}
            Form::Json => json::write(
                &mut out,
                &json!({
                    "event": "finished", "exit": exit, "nodes": self.nodes, "findings": findings,
                    "unanswered": self.silent.len(),
                }),
            )?,
            Form::Human => {
                people(&mut out, &self.found)?;
                let answered = self.nodes - self.silent.len();
                if findings == 0 {
                    writeln!(out, "nothing found on {}", human::count(answered, "node"))?;
                }
            }
        }
        let mut err = io::stderr().lock();
        for (node, failure) in &self.silent {
            drop(writeln!(
                err,
                "stage: {node} did not answer: {}",
                human::cause(failure)
            ));
        }
        Ok(())
    }
}

fn people(out: &mut impl Write, found: &BTreeMap<(String, String, String), Vec<String>>) -> io::Result<()> {
    for ((_, message, mend), nodes) in found {
        writeln!(
            out,
            "{}: {message}",
            hostlist::fold(nodes.iter().map(String::as_str))
        )?;
        writeln!(out, "  {mend}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use stage_core::bench::{HostReport, Pair, Rtt};

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
            })),
        }
    }

    fn wire() -> v1::Measured {
        v1::Measured {
            wire_bytes_per_second: 1.25e9,
            hops: vec!["interface of n0".to_owned()],
            readings: 3,
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

         from  to        age     RTT  spread      there  streams       back  streams  sent again  BW x delay
         n0    n1  2 h 0 min  100 µs    9 µs  1.11 GB/s        2  1.17 GB/s        1      1.00 %  122.07 KiB
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
        assert_eq!(link["forward"][1]["bytes_per_second"], 1.1e9);
        let node = object(&node(), &wire());
        assert_eq!(node["disks"][0]["write_bytes_per_second"], 1.8e8);
        assert_eq!(node["disks"][0]["read_bytes_per_second"], Value::Null);
        assert_eq!((&node["mtu"], &node["readings"]), (&9000.into(), &3.into()));
    }

    #[test]
    fn equal_findings_are_folded() {
        let mut findings = Findings::new(Form::Quiet);
        for node in ["n1", "n2", "n3"] {
            let told = v1::NodeFindings {
                node: node.to_owned(),
                failure: None,
                findings: vec![v1::Finding {
                    check: "backlog".to_owned(),
                    message: "1000 packets".to_owned(),
                    mend: "sysctl -w x=1".to_owned(),
                }],
            };
            findings.heard(&told).unwrap();
        }
        assert!(!findings.is_sound());
        let mut out = Vec::new();
        people(&mut out, &findings.found).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "n[1-3]: 1000 packets\n  sysctl -w x=1\n"
        );
    }
}
