//! Groups that a command answers: run again and again, without a shell, with a deadline. The last good answer stays.

use std::process::Stdio;
use std::time::Duration;

use stage_core::id::NodeName;
use stage_core::topology::{Group, Topology, hostlist};
use tokio::io::AsyncReadExt as _;
use tokio::process::Command;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::driver;

/// A command that takes longer is killed.
const DEADLINE: Duration = Duration::from_secs(20);
/// More output than this is not read.
const OUTPUT: u64 = 1 << 20;

/// Starts one task for each command group; they end with `stop`.
pub(crate) fn spawn(
    topology: &Topology,
    commands: &mpsc::Sender<driver::Command>,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) {
    for (name, group) in topology.groups() {
        if let Group::Command { command, every } = group {
            let work = ask(name.clone(), command.clone(), *every, commands.clone());
            tasks.spawn(stop.clone().run_until_cancelled_owned(work));
        }
    }
}

async fn ask(group: String, command: Vec<String>, every: Duration, commands: mpsc::Sender<driver::Command>) {
    let mut turn = tokio::time::interval(every.max(Duration::from_secs(1)));
    turn.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        turn.tick().await;
        match run(&command).await {
            Ok(nodes) => {
                let answer = driver::Command::Group {
                    name: group.clone(),
                    nodes,
                };
                if commands.send(answer).await.is_err() {
                    return;
                }
            }
            Err(why) => {
                tracing::warn!(
                    group,
                    why,
                    "the group's command gave no answer: the last good one stays"
                );
            }
        }
    }
}

async fn run(command: &[String]) -> Result<Vec<NodeName>, String> {
    let (program, args) = command.split_first().ok_or("it is empty")?;
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| format!("{program}: {error}"))?;
    let stdout = child.stdout.take().ok_or("it has no output")?;
    let work = async {
        let mut text = String::new();
        stdout.take(OUTPUT).read_to_string(&mut text).await?;
        Ok::<_, std::io::Error>((text, child.wait().await?))
    };
    let (text, status) = tokio::time::timeout(DEADLINE, work)
        .await
        .map_err(|_| format!("{program} took longer than {} s", DEADLINE.as_secs()))?
        .map_err(|error| format!("{program}: {error}"))?;
    if !status.success() {
        return Err(format!("{program} ended with {status}"));
    }
    parse(&text)
}

/// The nodes of a command's output: hostlists between commas and white space.
fn parse(text: &str) -> Result<Vec<NodeName>, String> {
    let mut nodes = Vec::new();
    for term in hostlist::terms(text).map_err(|error| error.to_string())? {
        for name in hostlist::expand(term).map_err(|error| error.to_string())? {
            nodes.push(
                name.parse()
                    .map_err(|error: stage_core::id::IdError| error.to_string())?,
            );
        }
    }
    Ok(nodes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &[&str]) -> Vec<String> {
        text.iter().map(|word| (*word).to_owned()).collect()
    }

    #[tokio::test]
    async fn answers_are_hostlists_and_failures_are_told() {
        let names = |nodes: Vec<NodeName>| nodes.iter().map(ToString::to_string).collect::<Vec<_>>();
        let nodes = run(&words(&["printf", "n[1-2]\\nn5,n7\\n"])).await.unwrap();
        assert_eq!(names(nodes), ["n1", "n2", "n5", "n7"]);
        assert!(run(&words(&["false"])).await.unwrap_err().contains("ended with"));
        assert!(run(&words(&["/no/such/program"])).await.is_err());
        // No shell: what a shell would expand is a plain word.
        assert!(run(&words(&["echo", "$HOME"])).await.is_err());
        assert!(run(&[]).await.is_err());
    }
}
