//! What the kernel counts of a TCP connection.

use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::AsRawFd;
use std::time::Duration;

/// What the kernel says of one connection's sending since it was made.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct TcpCounters {
    /// Round trip as smoothed by the kernel.
    pub rtt: Duration,
    /// The least round trip of the last minutes; zero before the first.
    pub least_rtt: Duration,
    /// Time in which there was something to send or to be acknowledged.
    pub busy: Duration,
    /// Of it: the receiver's window was full.
    pub receiver_limited: Duration,
    /// Of it: the send buffer was too small for what the path holds.
    pub buffer_limited: Duration,
    /// Bytes sent, those sent again counted again.
    pub sent: u64,
    /// Bytes sent again.
    pub sent_again: u64,
    /// Segments sent again.
    pub segments_again: u64,
    /// What was delivered of late, in bytes a second.
    pub delivery_rate: u64,
}

/// `struct tcp_info` of linux/tcp.h up to `tcpi_bytes_retrans` (Linux 4.19). An older kernel fills less of it, and the
/// rest stays zero; a newer one has more, which is cut off.
#[repr(C)]
#[derive(Default)]
struct Raw {
    states: [u8; 8],
    /// From `tcpi_rto` to `tcpi_pmtu` and `tcpi_rcv_ssthresh`.
    first: [u32; 15],
    rtt_us: u32,
    /// From `tcpi_rttvar` to `tcpi_rcv_space`.
    second: [u32; 7],
    total_retrans: u32,
    pacing_rate: u64,
    max_pacing_rate: u64,
    bytes_acked: u64,
    bytes_received: u64,
    /// From `tcpi_segs_out` to `tcpi_notsent_bytes`.
    segments: [u32; 3],
    min_rtt_us: u32,
    /// From `tcpi_data_segs_in` to `tcpi_data_segs_out`.
    data_segments: [u32; 2],
    delivery_rate: u64,
    busy_us: u64,
    rwnd_limited_us: u64,
    sndbuf_limited_us: u64,
    delivered: [u32; 2],
    bytes_sent: u64,
    bytes_retrans: u64,
}

// What the kernel's header has, so that a slip in the fields above does not compile.
const _: () = assert!(offset_of!(Raw, rtt_us) == 68);
const _: () = assert!(offset_of!(Raw, total_retrans) == 100);
const _: () = assert!(offset_of!(Raw, min_rtt_us) == 148);
const _: () = assert!(offset_of!(Raw, delivery_rate) == 160);
const _: () = assert!(offset_of!(Raw, bytes_retrans) == 208);

/// Asks the kernel.
///
/// # Errors
/// The socket is gone.
#[expect(
    unsafe_code,
    reason = "no crate that we know reads TCP_INFO without; the kernel fills a plain struct of ours"
)]
pub(crate) fn counters(tcp: &impl AsRawFd) -> io::Result<TcpCounters> {
    let mut raw = Raw::default();
    let mut length = size_of::<Raw>() as libc::socklen_t;
    // SAFETY: the descriptor is open for as long as `tcp` is borrowed, and the kernel writes `length` bytes at most into
    // a struct of that size, which is made of integers only: whatever it writes is a value of it.
    let told = unsafe {
        libc::getsockopt(
            tcp.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut raw).cast(),
            &raw mut length,
        )
    };
    if told != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(TcpCounters {
        rtt: Duration::from_micros(raw.rtt_us.into()),
        // All bits are set before there is one.
        least_rtt: match raw.min_rtt_us {
            u32::MAX => Duration::ZERO,
            us => Duration::from_micros(us.into()),
        },
        busy: Duration::from_micros(raw.busy_us),
        receiver_limited: Duration::from_micros(raw.rwnd_limited_us),
        buffer_limited: Duration::from_micros(raw.sndbuf_limited_us),
        sent: raw.bytes_sent,
        sent_again: raw.bytes_retrans,
        segments_again: raw.total_retrans.into(),
        delivery_rate: raw.delivery_rate,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn what_was_sent_is_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let fresh = counters(&tcp).unwrap();
        assert_eq!((fresh.sent, fresh.sent_again, fresh.segments_again), (0, 0, 0));
        tcp.write_all(&[7; 1000]).unwrap();
        let (mut other, _) = listener.accept().unwrap();
        other.read_exact(&mut [0; 1000]).unwrap();
        let used = counters(&tcp).unwrap();
        assert_eq!((used.sent, used.segments_again), (1000, 0));
        assert!(used.rtt > Duration::ZERO);
        assert!(!used.least_rtt.is_zero() && used.least_rtt <= fresh.least_rtt.max(used.rtt));
    }

    #[test]
    fn a_full_window_of_the_receiver_is_time_that_counts() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (_silent, _) = listener.accept().unwrap();
        tcp.set_nonblocking(true).unwrap();
        let until = std::time::Instant::now() + Duration::from_secs(20);
        // The other side reads nothing: sooner or later its window is what holds us back.
        while counters(&tcp).unwrap().receiver_limited.is_zero() {
            assert!(std::time::Instant::now() < until, "{:?}", counters(&tcp).unwrap());
            let _ = tcp.write(&[0; 1 << 16]);
        }
    }
}
