//! The source's files, as they are read.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use stage_core::failure::Failure;

use crate::fault;
use crate::store::map::Map;

/// The files of a payload at its source: one for each unit, held open.
#[derive(Debug)]
pub struct Files {
    units: Vec<File>,
}

impl Files {
    /// The files of a payload of single files, in the order of their names.
    pub fn new(units: Vec<File>) -> Self {
        Self { units }
    }

    /// Reads bytes of an entry's file.
    pub(crate) fn read(&self, _map: &Map, entry: u32, at: u64, buf: &mut [u8]) -> Result<(), Failure> {
        self.units[entry as usize]
            .read_exact_at(buf, at)
            .map_err(|e| fault::of_source(&e))
    }
}
