//! Reading from somebody else's descriptor: never for longer than asked, whatever the other holders of it do.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FileType;
use rustix::io::{Errno, ReadWriteFlags};

/// An open end of input.
#[derive(Debug)]
pub(super) struct Input {
    fd: OwnedFd,
    /// Its flags are shared with whoever else has it, so they stay as they are; each read says for itself that it must
    /// not block, where the kernel knows how to.
    gently: bool,
}

impl Input {
    pub(super) fn new(fd: OwnedFd) -> Self {
        // A read of a file never waits for anybody.
        let gently = !rustix::fs::fstat(&fd)
            .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
        Self { fd, gently }
    }

    /// Reads what is there; `None` if that is nothing yet after `wait`, `Some(0)` at the end.
    pub(super) fn read(&mut self, block: &mut [u8], wait: Duration) -> io::Result<Option<usize>> {
        let mut polled = [PollFd::new(&self.fd, PollFlags::IN)];
        let wait = Timespec::try_from(wait).map_err(io::Error::other)?;
        match poll(&mut polled, Some(&wait)) {
            Ok(0) | Err(Errno::INTR) => return Ok(None),
            Ok(_) => {}
            Err(errno) => return Err(errno.into()),
        }
        let read = if self.gently {
            let mut parts = [io::IoSliceMut::new(block)];
            // All ones: from where it stands.
            match rustix::io::preadv2(&self.fd, &mut parts, u64::MAX, ReadWriteFlags::NOWAIT) {
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL | Errno::SPIPE) => {
                    self.gently = false;
                    rustix::io::read(&self.fd, block)
                }
                other => other,
            }
        } else {
            rustix::io::read(&self.fd, block)
        };
        match read {
            Ok(got) => Ok(Some(got)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek as _, Write as _};

    use super::*;

    const MOMENT: Duration = Duration::from_millis(5);

    #[test]
    fn a_pipe_gives_what_is_there_and_nobody_blocks() {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let mut input = Input::new(read);
        let mut block = [0; 8];
        assert_eq!(input.read(&mut block, MOMENT).unwrap(), None);
        rustix::io::write(&write, b"abc").unwrap();
        assert_eq!(input.read(&mut block, MOMENT).unwrap(), Some(3));
        assert_eq!(&block[..3], b"abc");
        drop(write);
        assert_eq!(input.read(&mut block, MOMENT).unwrap(), Some(0));
    }

    #[test]
    fn a_file_and_a_socket_do_as_well() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"abc").unwrap();
        file.rewind().unwrap();
        let mut input = Input::new(file.into());
        let mut block = [0; 2];
        assert_eq!(input.read(&mut block, MOMENT).unwrap(), Some(2));
        assert_eq!(input.read(&mut block, MOMENT).unwrap(), Some(1));
        assert_eq!(input.read(&mut block, MOMENT).unwrap(), Some(0));
        let (here, mut there) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut input = Input::new(here.into());
        there.write_all(b"x").unwrap();
        assert_eq!(input.read(&mut block, MOMENT).unwrap(), Some(1));
        assert_eq!(input.read(&mut block, MOMENT).unwrap(), None);
    }

    #[test]
    fn what_cannot_be_read_is_an_error() {
        let dir = std::fs::File::open("/").unwrap();
        assert!(Input::new(dir.into()).read(&mut [0; 2], MOMENT).is_err());
    }
}
