//! What a lab measures: bytes over an edge, and what a TCP connection carries.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use serde_json::Value;
use stage_core::topology::EdgeId;
use stage_core::units::{ByteCount, Rate};

use crate::{Lab, LabError, tools};

/// What has passed an edge since the lab came up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// Bytes with their Ethernet headers; packets that the kernel holds together count as one.
    pub bytes: ByteCount,
    /// Packets, held together likewise.
    pub packets: u64,
}

/// What TCP connections have carried together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Carried {
    /// Payload that has arrived when the sender says that it has sent all.
    pub received: ByteCount,
    /// From start to end.
    pub rate: Rate,
    /// Segments sent again.
    pub retransmitted: u64,
}

/// The SHA-256 digests of files, in their order, as coreutils' `sha256sum` finds them.
///
/// # Errors
/// A file that it cannot read.
pub fn sha256sum(files: &[PathBuf]) -> Result<Vec<String>, LabError> {
    if files.is_empty() {
        return Ok(Vec::new());
    }
    let answer = tools::run(Command::new("sha256sum").arg("--").args(files), "")?;
    // A name with a line feed in it is written with a backslash, and its line begins with one.
    let digests = answer.lines().filter_map(|line| line.split_whitespace().next());
    Ok(digests
        .map(|digest| digest.trim_start_matches('\\').to_owned())
        .collect())
}

/// A process that ends with its owner.
struct Owned(Child);

impl Drop for Owned {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

impl Lab {
    /// What has passed an edge in its direction.
    ///
    /// # Errors
    /// An edge of another topology, or a tool that failed.
    pub fn counters(&self, edge: EdgeId) -> Result<Counters, LabError> {
        let missing = |wanted: String| LabError::Answer {
            tool: "ip -s link",
            wanted,
        };
        let tap = self
            .taps
            .get(edge.0 as usize)
            .ok_or_else(|| missing(format!("edge {}", edge.0)))?;
        let answer = tools::ip(
            &["-n", &self.fabric, "-s", "-j", "link", "show", "dev", &tap.device],
            "",
        )?;
        let answer: Value = serde_json::from_str(&answer).map_err(|why| missing(why.to_string()))?;
        let direction = if tap.sends { "tx" } else { "rx" };
        let figure = |name: &str| {
            let value = &answer[0]["stats64"][direction][name];
            value
                .as_u64()
                .ok_or_else(|| missing(format!("stats64.{direction}.{name} of {}", tap.device)))
        };
        Ok(Counters {
            bytes: ByteCount(figure("bytes")?),
            packets: figure("packets")?,
        })
    }

    /// The payload rate of one TCP connection for two seconds, after one second of start-up, as iperf3 shows it.
    ///
    /// # Errors
    /// Unknown nodes, nodes that no network joins, or an iperf3 that failed.
    pub fn iperf(&self, from: &str, to: &str) -> Result<Rate, LabError> {
        let answer = self.iperf_with(from, to, &["--time", "2", "--omit", "1"])?;
        let rate = figure(&answer, "/end/sum_received/bits_per_second")?;
        Ok(Rate::from_bits_per_second(rate))
    }

    /// What TCP connections carry of so many bytes, together, from their start, as iperf3 shows it.
    ///
    /// # Errors
    /// As [`Self::iperf`].
    pub fn iperf_bytes(
        &self,
        from: &str,
        to: &str,
        bytes: ByteCount,
        streams: u32,
    ) -> Result<Carried, LabError> {
        let (bytes, streams) = (bytes.0.to_string(), streams.to_string());
        let answer = self.iperf_with(from, to, &["--bytes", &bytes, "--parallel", &streams])?;
        Ok(Carried {
            received: ByteCount(figure(&answer, "/end/sum_received/bytes")? as u64),
            rate: Rate::from_bits_per_second(figure(&answer, "/end/sum_received/bits_per_second")?),
            retransmitted: figure(&answer, "/end/sum_sent/retransmits")? as u64,
        })
    }

    /// What so many TCP connections carry together for a while, after a start-up that does not count, as iperf3 shows it.
    /// Whole seconds.
    ///
    /// # Errors
    /// As [`Self::iperf`].
    pub fn iperf_streams(
        &self,
        from: &str,
        to: &str,
        streams: u32,
        start: Duration,
        time: Duration,
    ) -> Result<Rate, LabError> {
        let [streams, start, time] =
            [u64::from(streams), start.as_secs(), time.as_secs()].map(|figure| figure.to_string());
        let words = ["--time", &time, "--omit", &start, "--parallel", &streams];
        let answer = self.iperf_with(from, to, &words)?;
        let rate = figure(&answer, "/end/sum_received/bits_per_second")?;
        Ok(Rate::from_bits_per_second(rate))
    }

    /// Round trips as `ping` finds them.
    ///
    /// # Errors
    /// Unknown nodes, or a ping without answers.
    pub fn ping(&self, from: &str, to: &str, count: u32) -> Result<Vec<Duration>, LabError> {
        let mut ping = self.command(from, "ping")?;
        let address = self.address(to)?.to_string();
        ping.args(["-n", "-i", "0.05", "-c", &count.to_string(), &address]);
        let answer = tools::run(&mut ping, "")?;
        let times = answer
            .lines()
            .filter_map(|line| line.split_once("time=")?.1.split(' ').next()?.parse().ok());
        Ok(times.map(|ms: f64| Duration::from_secs_f64(ms / 1e3)).collect())
    }

    fn iperf_with(&self, from: &str, to: &str, words: &[&str]) -> Result<Value, LabError> {
        // A port of its own, so that measurements may run side by side.
        static PORTS: AtomicU16 = AtomicU16::new(0);
        let port = (20_000 + PORTS.fetch_add(1, Ordering::Relaxed) % 10_000).to_string();
        let node = |name: &str| name.parse().map_err(|_| LabError::UnknownNode(name.to_owned()));
        let (sender, receiver) = (node(from)?, node(to)?);
        let address = self
            .topology()
            .route(&sender, &receiver)
            .and_then(|route| route.to_address)
            .ok_or(LabError::NoRoute(sender, receiver))?
            .to_string();

        let mut server = self.command(to, "iperf3")?;
        server.args([
            "--server",
            "--one-off",
            "--forceflush",
            "--bind",
            &address,
            "--port",
            &port,
        ]);
        server
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let failed = |message: String| LabError::Tool {
            command: "iperf3 --server".to_owned(),
            message,
        };
        let mut server = Owned(server.spawn().map_err(|why| failed(why.to_string()))?);
        // It says when it listens; if it cannot, its output ends.
        let output = server.0.stdout.take().expect("its output is piped");
        let mut lines = BufReader::new(output).lines().map_while(Result::ok);
        if !lines.any(|line| line.contains("listening")) {
            return Err(failed(format!("it does not listen on {address} port {port}")));
        }

        let mut client = self.command(from, "iperf3")?;
        client.args(["--client", &address, "--port", &port, "--connect-timeout", "3000"]);
        client.args(words).arg("--json");
        let answer = tools::run(&mut client, "")?;
        serde_json::from_str(&answer).map_err(|why| missing(why.to_string()))
    }
}

fn missing(wanted: String) -> LabError {
    LabError::Answer {
        tool: "iperf3",
        wanted,
    }
}

fn figure(answer: &Value, at: &str) -> Result<f64, LabError> {
    let figure = answer.pointer(at).and_then(Value::as_f64);
    figure.ok_or_else(|| missing(at.to_owned()))
}
