//! What the kernel counts of a TCP connection.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::net::TcpStream;
use std::os::fd::AsRawFd as _;

/// Segments that this end had to send again since the connection was made.
///
/// # Errors
/// The socket is gone.
#[expect(
    unsafe_code,
    reason = "no crate that we know reads TCP_INFO without; the kernel fills a plain struct of ours"
)]
pub(crate) fn retransmissions(tcp: &TcpStream) -> io::Result<u64> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the descriptor is open for as long as `tcp` is borrowed, and the kernel writes `length` bytes at most
    // into a struct of that size, all of whose bit patterns, the zeros that it may leave included, are values of it.
    let info = unsafe {
        let told = libc::getsockopt(
            tcp.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        );
        if told != 0 {
            return Err(io::Error::last_os_error());
        }
        info.assume_init()
    };
    Ok(info.tcpi_total_retrans.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn a_fresh_connection_has_sent_nothing_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(retransmissions(&tcp).unwrap(), 0);
    }
}
