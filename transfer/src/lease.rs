//! Whether somebody on this node has a file open, or mapped.
//!
//! The kernel gives a write lease on a file only to who has it open alone, whoever else there is and whatever of them
//! `/proc` would show; a mapping counts as long as it lasts. So who gets one, and gives it back at once, knows.

#![expect(unsafe_code, reason = "fcntl's leases are in no crate with a safe face")]

use std::fs::File;
use std::os::fd::AsRawFd as _;

use rustix::io::Errno;

/// `F_SETSIG`, which libc does not name: which signal tells of somebody who wants to open the file.
const F_SETSIG: libc::c_int = 10;

/// Whether the file is open elsewhere, under whatever name. `None`: this cannot be known, because the file is somebody
/// else's or its file system has no leases.
pub(crate) fn is_open_elsewhere(file: &File) -> Option<bool> {
    // Who opens the file in the moment of the lease waits until it is given back, and the signal that tells of it must not
    // be the one that ends a process. This one is ignored unless asked for.
    fcntl(file, F_SETSIG, libc::SIGURG).ok()?;
    match fcntl(file, libc::F_SETLEASE, libc::F_WRLCK) {
        Ok(()) => {
            // Closing the file would give it back too.
            let _ = fcntl(file, libc::F_SETLEASE, libc::F_UNLCK);
            Some(false)
        }
        Err(Errno::AGAIN) => Some(true),
        Err(_) => None,
    }
}

fn fcntl(file: &File, command: libc::c_int, argument: libc::c_int) -> Result<(), Errno> {
    // SAFETY: these commands take a number, read and write no memory of ours, and the descriptor is open.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), command, argument) };
    if done == -1 {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_a_file_open_is_seen_whatever_name_it_used() {
        let dir = tempfile::tempdir().unwrap();
        let (one, other) = (dir.path().join("one"), dir.path().join("other"));
        std::fs::write(&one, "x").unwrap();
        std::fs::hard_link(&one, &other).unwrap();
        let file = File::open(&one).unwrap();
        let Some(open) = is_open_elsewhere(&file) else {
            eprintln!("skipped: this file system has no leases");
            return;
        };
        assert!(!open);
        let reader = File::open(&other).unwrap();
        assert_eq!(is_open_elsewhere(&file), Some(true));
        drop(reader);
        assert_eq!(is_open_elsewhere(&file), Some(false));
    }
}
