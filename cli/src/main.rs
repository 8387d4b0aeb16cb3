//! The one binary. A command is parsed ([`args`]), run ([`commands`]), and its results are shown ([`render`]):
//! views of a job come in from the [`client`], become events in [`event`], and leave through a renderer. The way of a
//! whole push through all parts is told in `ARCHITECTURE.md`.

mod args;
mod client;
mod commands;
mod config;
mod error;
mod event;
mod exit;
mod local;
mod render;
mod view;

fn main() -> std::process::ExitCode {
    commands::main().into()
}
