//! One room for each command. Here: from the command line to the room, and from its result to the exit code.

mod agent;
mod bench;
mod cancel;
mod completions;
mod coordinator;
mod daemon;
mod demo;
pub(crate) mod follow;
mod inventory;
mod nodes;
mod path;
mod plan;
mod push;
mod retry;
mod source;
mod status;
mod sums;
mod topology;

use clap::Parser as _;
use tokio::runtime::Builder;

use crate::args::{Command, Stage};
use crate::error::Error;
use crate::exit;
use crate::render::{self, Form};

/// Runs the command line; gives the exit code.
pub(crate) fn main() -> u8 {
    let stage = match Stage::try_parse() {
        Ok(stage) => stage,
        Err(error) => return unparsed(&error),
    };
    let form = Form::of(stage.command.json());
    match run(stage) {
        Ok(exit) => exit,
        Err(error) => {
            render::error(form, &error);
            error.exit()
        }
    }
}

/// Help and version are no errors; what is one is also told to a script that asked for JSON.
fn unparsed(error: &clap::Error) -> u8 {
    // Where the terminal is gone nobody can be told.
    drop(error.print());
    if !error.use_stderr() {
        return exit::DONE;
    }
    if std::env::args_os().any(|arg| arg == "--json") {
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default();
        render::usage(&Error::usage(
            first.strip_prefix("error: ").unwrap_or(first),
            "see `stage --help`",
        ));
    }
    exit::USAGE
}

fn run(stage: Stage) -> Result<u8, Error> {
    let Stage { connection, command } = stage;
    match command {
        Command::Push(push) => block_on(push::run(*push, &connection)),
        Command::Plan(plan) => plan::run(&plan, &connection),
        Command::Status(status) => block_on(status::status(status, &connection)),
        Command::Wait(wait) => block_on(status::wait(wait, &connection)),
        Command::Path(flags) => block_on(path::run(flags, &connection)),
        Command::Nodes(nodes) => block_on(nodes::run(nodes, &connection)),
        Command::Cancel(cancel) => block_on(cancel::run(cancel, &connection)),
        Command::Retry(retry) => block_on(retry::run(retry, &connection)),
        Command::Ls(ls) => block_on(inventory::ls(ls, &connection)),
        Command::Verify(verify) => block_on(inventory::verify(verify, &connection)),
        Command::Rm(rm) => block_on(inventory::rm(rm, &connection)),
        Command::Bench(flags) => block_on(bench::bench(flags, &connection)),
        Command::Doctor(flags) => block_on(bench::doctor(flags, &connection)),
        Command::Topology(topology) => topology::run(topology),
        Command::Demo(demo) => block_on(demo::run(demo, &connection)),
        Command::Coordinator(flags) => coordinator::run(flags, &connection),
        Command::Agent(flags) => agent::run(flags, &connection),
        Command::Completions(flags) => completions::run(&flags),
    }
}

/// Runs a command that waits for one coordinator or agent: one thread is enough. What still works on other threads when it
/// ends (a file being written that nobody wants any more) is not waited for.
fn block_on<T>(work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let done = runtime.block_on(work);
    runtime.shutdown_background();
    done
}
