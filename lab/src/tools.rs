//! Calls of `ip`, `tc` and friends.

use std::io::Write as _;
use std::process::{Command, Output, Stdio};

use crate::LabError;

/// Runs a tool to its end, with `input` on its standard input, and gives its standard output.
pub(crate) fn run(command: &mut Command, input: &str) -> Result<String, LabError> {
    let Output {
        status,
        stdout,
        stderr,
    } = spawn(command, input).map_err(|why| LabError::Tool {
        command: shown(command),
        message: why.to_string(),
    })?;
    if status.success() {
        return Ok(String::from_utf8_lossy(&stdout).into_owned());
    }
    // iperf3 -J tells its errors on standard output.
    let told = if stderr.is_empty() { &stdout } else { &stderr };
    let message = format!("{status}: {}", String::from_utf8_lossy(told).trim());
    Err(LabError::Tool {
        command: shown(command),
        message,
    })
}

fn spawn(command: &mut Command, input: &str) -> std::io::Result<Output> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    if input.is_empty() {
        return command.stdin(Stdio::null()).output();
    }
    let mut child = command.stdin(Stdio::piped()).spawn()?;
    // The tools read all before they say much: their output fits the pipes. A tool that ends early has said why.
    let written = child
        .stdin
        .take()
        .map_or(Ok(()), |mut stdin| stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output()?;
    if output.status.success() {
        written?;
    }
    Ok(output)
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

/// `ip` with these words.
pub(crate) fn ip(words: &[&str], input: &str) -> Result<String, LabError> {
    run(Command::new("ip").args(words), input)
}

/// `tc` with these words.
pub(crate) fn tc(words: &[&str], input: &str) -> Result<String, LabError> {
    run(Command::new("tc").args(words), input)
}

/// Whether a program of this name can be started.
pub fn is_installed(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|paths| {
        // Administrators' tools are not in every PATH, but `Command` looks there alone.
        std::env::split_paths(&paths).any(|dir| dir.join(program).is_file())
    })
}
