//! `stage completions`: what makes a shell complete our words.

use clap::CommandFactory as _;

use crate::args::{Completions, Stage};
use crate::error::Error;
use crate::{exit, render};

/// Prints the script.
///
/// # Errors
/// The output is gone.
pub(crate) fn run(flags: &Completions) -> Result<u8, Error> {
    let mut script = Vec::new();
    clap_complete::generate(flags.shell, &mut Stage::command(), "stage", &mut script);
    render::raw(&script)?;
    Ok(exit::DONE)
}
