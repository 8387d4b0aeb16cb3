//! The way that packets take to a host: the routers that say so when a packet may go no further (RFC 792), and the
//! largest packet that gets there whole (RFC 1191).
//!
//! Small datagrams to ports where nobody listens, as traceroute and tracepath send them, and as they any user may: the
//! kernel hands the answers of routers to the socket (`IP_RECVERR`). A host or a firewall that answers nothing tells
//! nothing; what is known then is what the kernel has found out for its own connections.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt, sockopt};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt as rustix_sockopt;
use rustix::net::sockopt::{Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery};

/// Routers on the way at most.
const MOST_HOPS: u8 = 30;
/// So many in a row that say nothing, and those behind them are not asked.
const SILENT: usize = 3;
/// Where traceroute begins: the port tells to which datagram an answer belongs.
const PORT: u16 = 33434;
/// How long an answer may take: a few round trips, within these bounds.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(1));
/// A host that answers at all answers one a second at least, but not much more (`icmp_ratelimit`).
const AGAIN: Duration = Duration::from_millis(1100);
/// Packets that are tried where larger ones vanish: usual MTUs, and those of tunnels.
const SIZES: [u32; 10] = [9000, 8000, 4352, 1500, 1492, 1450, 1400, 1280, 1000, 576];
/// An attempt to send may be told of an earlier answer instead.
const ATTEMPTS: usize = 3;
/// IP has no larger ones.
const LARGEST: u32 = 65_535;

/// What was seen of a way.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Traced {
    /// Who answered from which distance; `None`: nobody. The last is the host itself if it was reached.
    pub hops: Vec<Option<IpAddr>>,
    /// The host answered.
    pub reached: bool,
    /// The largest packet, IP's header included, that gets there; where the host did not answer, what the kernel knows.
    pub mtu: Option<u32>,
    /// Larger ones vanish, and no router says so: connections find that out by standing still.
    pub swallows: bool,
}

/// Traces the way to a host, from an address of ours if one is given. Blocks, some seconds at most.
///
/// # Errors
/// There is no socket, or no way at all.
pub fn trace(from: Option<IpAddr>, to: IpAddr, rtt: Duration) -> io::Result<Traced> {
    let probe = Probe::new(from.filter(|from| from.is_ipv4() == to.is_ipv4()), to)?;
    let patience = (rtt * 3).clamp(PATIENCE.0, PATIENCE.1);
    // By distance, the nearest first.
    let mut answers: Vec<Option<Answer>> = Vec::new();
    for distance in 1..=MOST_HOPS {
        answers.push(probe.ask(distance, patience)?);
        let is_there = answers.last().is_some_and(is_end);
        let silent = answers.iter().rev().take_while(|answer| answer.is_none()).count();
        if is_there || silent == SILENT {
            break;
        }
    }
    // Who said nothing may have said too much of late.
    if answers.iter().any(Option::is_none) {
        std::thread::sleep(AGAIN);
        for (distance, answer) in (1..).zip(&mut answers) {
            if answer.is_none() {
                *answer = probe.ask(distance, patience)?;
            }
            if is_end(answer) {
                break;
            }
        }
    }
    let end = answers.iter().position(is_end);
    // Nobody knows how many more say nothing.
    let known = end.or_else(|| answers.iter().rposition(Option::is_some));
    answers.truncate(known.map_or(0, |last| last + 1));
    let reached = end.is_some_and(|end| {
        let from = answers[end].as_ref().and_then(|answer| answer.from);
        from.is_none_or(|from| from == to)
    });
    let mut traced = Traced {
        hops: answers
            .into_iter()
            .map(|answer| answer.and_then(|answer| answer.from))
            .collect(),
        reached,
        mtu: None,
        swallows: false,
    };
    probe.size(&mut traced, patience)?;
    Ok(traced)
}

/// Behind who says this there is nobody to ask.
fn is_end(answer: &Option<Answer>) -> bool {
    answer.as_ref().is_some_and(|answer| answer.what != What::TooFar)
}

#[derive(Debug, PartialEq, Eq)]
enum What {
    /// A router: the packet had come as far as it might.
    TooFar,
    /// A router, or our own kernel: larger than what fits there.
    TooLarge(u32),
    /// The host, or who guards it: nobody listens there.
    There,
}

struct Answer {
    from: Option<IpAddr>,
    what: What,
}

struct Probe {
    socket: UdpSocket,
    to: IpAddr,
}

impl Probe {
    fn new(from: Option<IpAddr>, to: IpAddr) -> io::Result<Self> {
        let any = if to.is_ipv4() {
            IpAddr::from([0; 4])
        } else {
            IpAddr::from([0; 16])
        };
        let socket = UdpSocket::bind((from.unwrap_or(any), 0))?;
        socket.set_nonblocking(true)?;
        // No packet is cut on the way, and who cannot pass one on says so.
        if to.is_ipv4() {
            setsockopt(&socket, sockopt::Ipv4RecvErr, &true)?;
            rustix_sockopt::set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DO)?;
        } else {
            setsockopt(&socket, sockopt::Ipv6RecvErr, &true)?;
            rustix_sockopt::set_ipv6_mtu_discover(&socket, Ipv6PathMtuDiscovery::DO)?;
        }
        Ok(Self { socket, to })
    }

    fn set_distance(&self, hops: u8) -> io::Result<()> {
        if self.to.is_ipv4() {
            self.socket.set_ttl(hops.into())
        } else {
            Ok(rustix_sockopt::set_ipv6_unicast_hops(&self.socket, Some(hops))?)
        }
    }

    /// Who answers from this distance.
    fn ask(&self, distance: u8, patience: Duration) -> io::Result<Option<Answer>> {
        self.set_distance(distance)?;
        let port = PORT + u16::from(distance);
        self.send(&[0; 32], port)?;
        self.answer(port, patience)
    }

    /// Sends a datagram; that it is too large is said by [`Self::answer`] as well.
    fn send(&self, bytes: &[u8], port: u16) -> io::Result<()> {
        let to = SocketAddr::new(self.to, port);
        for _ in 0..ATTEMPTS {
            match self.socket.send_to(bytes, to) {
                Ok(_) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) => return Ok(()),
                // An earlier answer, which the queue has too; it is said once.
                Err(error)
                    if matches!(
                        error.raw_os_error(),
                        Some(
                            libc::ECONNREFUSED
                                | libc::EHOSTUNREACH
                                | libc::ENETUNREACH
                                | libc::EPROTO
                                | libc::EACCES
                        )
                    ) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The answer to what was sent to this port, if one comes in time.
    fn answer(&self, port: u16, patience: Duration) -> io::Result<Option<Answer>> {
        let until = Instant::now() + patience;
        loop {
            while let Some((to, answer)) = self.queued()? {
                if to == port {
                    return Ok(Some(answer));
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let wait = left.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
            match poll(&mut [PollFd::new(&self.socket, PollFlags::ERR)], Some(&wait)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// The next answer that the kernel keeps, and the port to which it belongs.
    fn queued(&self) -> io::Result<Option<(u16, Answer)>> {
        let mut bytes = [0; 64];
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let mut space = cmsg_space!(libc::sock_extended_err, libc::sockaddr_in6);
        let message = recvmsg::<SockaddrStorage>(
            self.socket.as_raw_fd(),
            &mut parts,
            Some(&mut space),
            MsgFlags::MSG_ERRQUEUE,
        );
        let message = match message {
            Ok(message) => message,
            Err(Errno::EAGAIN) => {
                // What the socket says once, else it would wake us again and again.
                drop(self.socket.take_error());
                return Ok(None);
            }
            Err(errno) => return Err(errno.into()),
        };
        let port = message.address.and_then(|to| {
            to.as_sockaddr_in()
                .map(|to| to.port())
                .or_else(|| to.as_sockaddr_in6().map(|to| to.port()))
        });
        let mut answer = Answer {
            from: None,
            what: What::There,
        };
        for control in message.cmsgs()? {
            let (error, from) = match control {
                ControlMessageOwned::Ipv4RecvErr(error, from) => (
                    error,
                    from.map(|from| IpAddr::from(from.sin_addr.s_addr.to_ne_bytes())),
                ),
                ControlMessageOwned::Ipv6RecvErr(error, from) => {
                    (error, from.map(|from| IpAddr::from(from.sin6_addr.s6_addr)))
                }
                _ => continue,
            };
            answer = match (error.ee_origin, error.ee_type, error.ee_code) {
                (libc::SO_EE_ORIGIN_ICMP, 11, _) | (libc::SO_EE_ORIGIN_ICMP6, 3, _) => Answer {
                    from,
                    what: What::TooFar,
                },
                (libc::SO_EE_ORIGIN_ICMP, 3, 4) | (libc::SO_EE_ORIGIN_ICMP6, 2, _) => Answer {
                    from,
                    what: What::TooLarge(error.ee_info),
                },
                (libc::SO_EE_ORIGIN_LOCAL, ..) => Answer {
                    from: None,
                    what: What::TooLarge(error.ee_info),
                },
                _ => Answer {
                    from,
                    what: What::There,
                },
            };
        }
        Ok(Some((port.unwrap_or_default(), answer)))
    }

    /// Which packets get there.
    fn size(&self, traced: &mut Traced, patience: Duration) -> io::Result<()> {
        let port = PORT + u16::from(MOST_HOPS) + 1;
        self.set_distance(64)?;
        self.socket.connect(SocketAddr::new(self.to, port))?;
        let mut size = self.known()?;
        traced.mtu = Some(size);
        // On loopback nothing is ever too large.
        if !traced.reached || size >= LARGEST {
            return Ok(());
        }
        let headers: u32 = if self.to.is_ipv4() { 28 } else { 48 };
        let bytes = vec![0; LARGEST as usize];
        for _ in 0..2 * SIZES.len() {
            let packet = &bytes[..size.saturating_sub(headers) as usize];
            self.send(packet, port)?;
            let mut answer = self.answer(port, patience)?;
            if answer.is_none() {
                std::thread::sleep(AGAIN);
                self.send(packet, port)?;
                answer = self.answer(port, patience)?;
            }
            let smaller = match answer.map(|answer| answer.what) {
                Some(What::There) => {
                    traced.mtu = Some(size);
                    return Ok(());
                }
                Some(What::TooLarge(fits)) if fits > 0 => fits.min(size - 1),
                Some(What::TooLarge(_)) => self.known()?.min(size - 1),
                // It would have answered a packet that came.
                Some(What::TooFar) | None => {
                    traced.swallows = true;
                    SIZES.into_iter().find(|fits| *fits < size).unwrap_or(0)
                }
            };
            if smaller < headers {
                break;
            }
            size = smaller;
        }
        // Not even small ones now: it says nothing any more, and this tells nothing of sizes.
        traced.swallows = false;
        Ok(())
    }

    /// What the kernel takes for the largest.
    fn known(&self) -> io::Result<u32> {
        Ok(if self.to.is_ipv4() {
            rustix_sockopt::ip_mtu(&self.socket)?
        } else {
            rustix_sockopt::ipv6_mtu(&self.socket)?
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_is_one_step_away_and_takes_all() {
        for (address, from) in [("127.0.0.1", Some("127.0.0.1")), ("127.0.0.7", None)] {
            let to: IpAddr = address.parse().unwrap();
            let from = from.map(|from| from.parse().unwrap());
            let traced = trace(from, to, Duration::from_micros(50)).unwrap();
            assert_eq!((traced.hops.as_slice(), traced.reached), (&[Some(to)][..], true));
            assert!(traced.mtu.unwrap() > 10_000 && !traced.swallows, "{traced:?}");
        }
    }
}
