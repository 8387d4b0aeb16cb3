//! `stage topology check`: what a file describes, or everything that is wrong with it.

use std::fs;
use std::path::Path;

use stage_core::failure::{Code, Failure, show_path};
use stage_core::topology::Topology;

use crate::args::{self, TopologyAction};
use crate::error::Error;
use crate::exit;
use crate::render::{self, Form};

/// Runs `stage topology …`.
///
/// # Errors
/// The file cannot be read, or describes no fabric.
pub(crate) fn run(flags: args::Topology) -> Result<u8, Error> {
    let TopologyAction::Check { file, output } = flags.action;
    let (name, topology) = load(&file)?;
    render::topology(Form::of(output.json), &name, &topology.summary())?;
    Ok(exit::DONE)
}

/// Reads a topology; gives the file's name as it is shown.
///
/// # Errors
/// The file cannot be read, or describes no fabric: every error with its line.
pub(crate) fn load(file: &Path) -> Result<(String, Topology), Error> {
    let name = show_path(file.as_os_str().as_encoded_bytes());
    let text = fs::read_to_string(file).map_err(|error| {
        Failure::new(
            Code::Config,
            format!("cannot read the topology: {error}"),
            "give the path of a readable topology file",
        )
        .at(&name)
    })?;
    match Topology::parse(&name, &text) {
        Ok(topology) => Ok((name, topology)),
        Err(errors) => {
            let lines = errors
                .iter()
                .map(|error| format!("{}:{}: {}", error.file, error.line, error.message))
                .collect();
            Err(Error::Topology { file: name, lines })
        }
    }
}
