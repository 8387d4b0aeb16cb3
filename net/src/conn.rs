//! A connection whose peer is known, async for handshakes and control, blocking for data streams.

use std::io::{self, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream as StdTcpStream};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::{ClientConnection, ServerConnection, StreamOwned};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;

use crate::identity::Identity;
use crate::tcp_info::TcpCounters;
use crate::tls::identity_of;

/// Bytes of a TLS connection's exporter that bind a proof to this very connection.
pub type Binding = [u8; 32];

/// A connection after its handshake.
pub struct Conn {
    stream: Stream,
    identity: Option<Identity>,
    binding: Option<Binding>,
}

#[expect(
    clippy::large_enum_variant,
    reason = "a connection is one of few, and lives long"
)]
enum Stream {
    Plain(TcpStream),
    Tls(TlsStream<TcpStream>),
}

impl Conn {
    pub(crate) fn plain(tcp: TcpStream) -> Self {
        Self {
            stream: Stream::Plain(tcp),
            identity: None,
            binding: None,
        }
    }

    pub(crate) fn tls(stream: TlsStream<TcpStream>) -> io::Result<Self> {
        let (_, session) = stream.get_ref();
        let cert = session.peer_certificates().and_then(|chain| chain.first());
        let identity = cert.map(identity_of).transpose().map_err(io::Error::other)?;
        let binding = match &stream {
            TlsStream::Client(s) => s
                .get_ref()
                .1
                .export_keying_material([0; 32], b"EXPORTER-stage-v1", None),
            TlsStream::Server(s) => s
                .get_ref()
                .1
                .export_keying_material([0; 32], b"EXPORTER-stage-v1", None),
        };
        let binding = Some(binding.map_err(io::Error::other)?);
        Ok(Self {
            stream: Stream::Tls(stream),
            identity,
            binding,
        })
    }

    /// Who the peer is by its certificate; `None` without TLS.
    pub fn identity(&self) -> Option<&Identity> {
        self.identity.as_ref()
    }

    /// What binds a proof to this connection; `None` without TLS, where nonces have to do.
    pub fn binding(&self) -> Option<&Binding> {
        self.binding.as_ref()
    }

    /// The least round trip so far, by the kernel's own clock: a busy host does not make it longer, and a segment that was
    /// sent again does not count.
    ///
    /// # Errors
    /// The connection is gone.
    pub fn rtt(&self) -> io::Result<Duration> {
        Ok(crate::tcp_info::counters(self.tcp())?.least_rtt)
    }

    /// Which congestion control what is sent goes by, instead of the host's own.
    ///
    /// # Errors
    /// The kernel does not have it, or lets only root have it.
    pub fn set_congestion_control(&self, name: &str) -> io::Result<()> {
        Ok(rustix::net::sockopt::set_tcp_congestion(self.tcp(), name)?)
    }

    /// The peer's address.
    ///
    /// # Errors
    /// The connection is gone.
    pub fn peer_address(&self) -> io::Result<SocketAddr> {
        self.tcp().peer_addr()
    }

    fn tcp(&self) -> &TcpStream {
        match &self.stream {
            Stream::Plain(tcp) => tcp,
            Stream::Tls(tls) => tls.get_ref().0,
        }
    }

    /// The same connection with blocking calls, for a thread of its own. Nothing may be half read or written.
    ///
    /// # Errors
    /// The socket cannot be switched.
    pub fn into_blocking(self) -> io::Result<BlockingConn> {
        let blocking = |tcp: TcpStream| -> io::Result<StdTcpStream> {
            let tcp = tcp.into_std()?;
            tcp.set_nonblocking(false)?;
            Ok(tcp)
        };
        let stream = match self.stream {
            Stream::Plain(tcp) => BlockingStream::Plain(blocking(tcp)?),
            Stream::Tls(TlsStream::Client(tls)) => {
                let (tcp, session) = tls.into_inner();
                BlockingStream::Client(StreamOwned::new(session, Buffered::new(blocking(tcp)?)))
            }
            Stream::Tls(TlsStream::Server(tls)) => {
                let (tcp, session) = tls.into_inner();
                BlockingStream::Server(StreamOwned::new(session, Buffered::new(blocking(tcp)?)))
            }
        };
        Ok(BlockingConn { stream })
    }
}

/// Whether this process may have this congestion control for its connections: asked of the kernel, which has its own
/// rules for whom it lets.
pub fn may_have_congestion_control(name: &str) -> bool {
    socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)
        .is_ok_and(|socket| rustix::net::sockopt::set_tcp_congestion(&socket, name).is_ok())
}

impl AsyncRead for Conn {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(tcp) => Pin::new(tcp).poll_read(cx, buf),
            Stream::Tls(tls) => Pin::new(tls).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Conn {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Stream::Plain(tcp) => Pin::new(tcp).poll_write(cx, buf),
            Stream::Tls(tls) => Pin::new(tls).poll_write(cx, buf),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(tcp) => Pin::new(tcp).poll_flush(cx),
            Stream::Tls(tls) => Pin::new(tls).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Stream::Plain(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Stream::Tls(tls) => Pin::new(tls).poll_shutdown(cx),
        }
    }
}

/// A connection with blocking calls.
pub struct BlockingConn {
    stream: BlockingStream,
}

enum BlockingStream {
    Plain(StdTcpStream),
    Client(StreamOwned<ClientConnection, Buffered>),
    Server(StreamOwned<ServerConnection, Buffered>),
}

impl BlockingConn {
    /// What ends the connection from another thread, whatever call it is blocked in.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn closer(&self) -> io::Result<Closer> {
        self.tcp().try_clone().map(Closer)
    }

    /// What the connection may hold under way at most, each way, instead of what the kernel finds right. The kernel's
    /// own limits (`rmem_max`, `wmem_max`) hold.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_window(&self, bytes: usize) -> io::Result<()> {
        let socket = socket2::SockRef::from(self.tcp());
        socket.set_send_buffer_size(bytes)?;
        socket.set_recv_buffer_size(bytes)
    }

    /// How long one read may wait for a byte; `None`: for ever.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_read_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        self.tcp().set_read_timeout(time)
    }

    /// How long one write may wait for room; `None`: for ever.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn set_write_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        self.tcp().set_write_timeout(time)
    }

    /// The socket under a connection without TLS, for system calls that move bytes inside the kernel.
    pub fn plain_socket(&self) -> Option<&StdTcpStream> {
        match &self.stream {
            BlockingStream::Plain(tcp) => Some(tcp),
            BlockingStream::Client(_) | BlockingStream::Server(_) => None,
        }
    }

    fn tcp(&self) -> &StdTcpStream {
        match &self.stream {
            BlockingStream::Plain(tcp) => tcp,
            BlockingStream::Client(tls) => tls.sock.tcp(),
            BlockingStream::Server(tls) => tls.sock.tcp(),
        }
    }
}

impl Read for BlockingConn {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match &mut self.stream {
            BlockingStream::Plain(tcp) => tcp.read(buf),
            BlockingStream::Client(tls) => tls.read(buf),
            BlockingStream::Server(tls) => tls.read(buf),
        }
    }
}

impl Write for BlockingConn {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match &mut self.stream {
            BlockingStream::Plain(tcp) => tcp.write(buf),
            BlockingStream::Client(tls) => tls.write(buf),
            BlockingStream::Server(tls) => tls.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.stream {
            BlockingStream::Plain(tcp) => tcp.flush(),
            BlockingStream::Client(tls) => tls.flush(),
            BlockingStream::Server(tls) => tls.flush(),
        }
    }
}

/// Ends a connection from outside. Dropping it ends nothing.
#[derive(Debug)]
pub struct Closer(StdTcpStream);

impl Closer {
    /// Whether the kernel holds bytes that nobody has read yet: then it is not the peer or the path that is slow.
    pub fn has_unread(&self) -> bool {
        rustix::io::ioctl_fionread(&self.0).is_ok_and(|bytes| bytes > 0)
    }

    /// Segments that this end had to send again so far; 0 where the kernel does not say.
    pub fn retransmissions(&self) -> u64 {
        self.counters().map_or(0, |counters| counters.segments_again)
    }

    /// What the kernel counts of the connection; `None` where it does not say.
    pub fn counters(&self) -> Option<TcpCounters> {
        crate::tcp_info::counters(&self.0).ok()
    }

    /// Ends the connection: reads and writes under way return at once.
    pub fn close(&self) {
        // A connection that has ended already is what was wanted.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// A socket read through a buffer: rustls asks for 4 KiB at a time, which would be a system call for each.
struct Buffered(BufReader<StdTcpStream>);

impl Buffered {
    fn new(tcp: StdTcpStream) -> Self {
        Self(BufReader::with_capacity(64 << 10, tcp))
    }

    fn tcp(&self) -> &StdTcpStream {
        self.0.get_ref()
    }
}

impl Read for Buffered {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf)
    }
}

impl Write for Buffered {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.0.get_mut().write(buf)
    }

    fn write_vectored(&mut self, bufs: &[io::IoSlice<'_>]) -> io::Result<usize> {
        self.0.get_mut().write_vectored(bufs)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.get_mut().flush()
    }
}
