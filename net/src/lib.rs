//! The one place where stage listens and dials.
//!
//! Control and data connections alike are made here: TLS 1.3 with certificates on both sides, the socket options that
//! notice a dead peer, and the deadlines of the handshake. [`Net`] says how (with which identity, or insecure),
//! [`Net::listen`] and [`Net::dial`] do it, [`Conn`] is what comes out.
//!
//! | module | holds |
//! |---|---|
//! | [`identity`] | who a certificate says its bearer is |
//! | [`authority`] | a throw-away CA for the demo and for tests |
//! | [`conn`] | a connection, async or blocking |
//! | [`local`] | the Unix socket between command line and agent of a host |
//! | [`route`] | the routers and the MTU on the way to a host |
//! | `tcp_info` | what the kernel counts of a connection |
//! | `grpc` | channels and incoming streams for tonic (feature `grpc`) |

pub mod authority;
pub mod conn;
#[cfg(feature = "grpc")]
pub mod grpc;
pub mod identity;
pub mod local;
pub mod route;
mod tcp_info;
mod tls;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsConnector};

pub use conn::{BlockingConn, Closer, Conn, may_have_congestion_control};
pub use identity::{Identity, Role};
pub use tcp_info::TcpCounters;

/// A dial that has no answer: a SYN to a black hole would otherwise be waited for over two minutes.
pub const CONNECT_DEADLINE: Duration = Duration::from_secs(3);
/// From accept to the end of the handshake, and again for the hello above it.
pub const HELLO_DEADLINE: Duration = Duration::from_secs(5);
/// Sent bytes that nobody acknowledges end a connection after this.
const USER_TIMEOUT: Duration = Duration::from_secs(10);

/// Why there is no connection or no listener.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// A certificate file cannot be used.
    #[error("{path}: {why}")]
    File {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The certificate's name is none of stage's.
    #[error(
        "{0:?} is no identity of stage: a certificate bears NAME.node.CLUSTER.stage, coordinator.CLUSTER.stage or NAME.operator.CLUSTER.stage"
    )]
    Identity(String),
    /// `--insecure` on an address that others can reach.
    #[error(
        "refusing to speak without TLS on {0}: --insecure is for loopback; set STAGE_ALLOW_INSECURE=1 if this network is a lab"
    )]
    Insecure(SocketAddr),
    /// Listening failed.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// Dialling failed.
    #[error("cannot reach {address}: {source}")]
    Dial {
        /// Whom.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The TLS handshake failed: a foreign, expired or missing certificate, or not TLS at all.
    #[error("TLS handshake with {address} failed: {source}")]
    Handshake {
        /// With whom.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// TLS could not be set up from the given files.
    #[error("TLS cannot be set up: {0}")]
    Tls(#[from] rustls::Error),
    /// The agent's socket cannot be had.
    #[error("cannot listen on the socket {path}: {why}")]
    Socket {
        /// Where.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The agent's socket cannot be reached.
    #[error("cannot reach the agent's socket {path}: {source}")]
    Local {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A connection within the host broke.
    #[error("the connection within the host broke: {0}")]
    Broken(io::Error),
    /// A message on a connection within the host is none.
    #[error("a message on the agent's socket makes no sense: {0}")]
    Message(String),
    /// The other end of a connection within the host is of another release.
    #[error("the other end of the agent's socket speaks protocol {theirs}, this one {ours}")]
    OtherProtocol {
        /// What the peer speaks.
        theirs: u16,
        /// What we speak.
        ours: u16,
    },
}

impl NetError {
    /// Whether the same act may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Dial { .. } | Self::Handshake { .. })
    }
}

/// How this process speaks to others.
#[derive(Clone)]
pub struct Net {
    security: Security,
}

#[derive(Clone)]
enum Security {
    Tls(Arc<tls::Tls>),
    Insecure { any_address: bool },
}

impl Net {
    /// Mutual TLS 1.3 from certificate files in PEM.
    ///
    /// # Errors
    /// A file that cannot be read or used, or a certificate whose name is none of stage's.
    pub fn tls(ca: &Path, cert: &Path, key: &Path) -> Result<Self, NetError> {
        Ok(Self {
            security: Security::Tls(Arc::new(tls::Tls::load(ca, cert, key)?)),
        })
    }

    /// No TLS: for measurements and labs. Addresses other than loopback are refused unless `any_address`
    /// (STAGE_ALLOW_INSECURE=1) is set.
    pub fn insecure(any_address: bool) -> Self {
        Self {
            security: Security::Insecure { any_address },
        }
    }

    /// Whether connections are encrypted and authenticated.
    pub fn is_tls(&self) -> bool {
        matches!(self.security, Security::Tls(_))
    }

    /// Who this process is by its certificate; `None` without TLS.
    pub fn identity(&self) -> Option<&Identity> {
        match &self.security {
            Security::Tls(tls) => Some(&tls.identity),
            Security::Insecure { .. } => None,
        }
    }

    fn allow(&self, address: SocketAddr) -> Result<(), NetError> {
        match self.security {
            Security::Insecure { any_address: false } if !address.ip().to_canonical().is_loopback() => {
                Err(NetError::Insecure(address))
            }
            _ => Ok(()),
        }
    }

    /// Listens on `address`.
    ///
    /// # Errors
    /// The address is taken or not this host's, or insecure and not loopback.
    pub fn listen(&self, address: SocketAddr) -> Result<Listener, NetError> {
        self.allow(address)?;
        let fault = |source| NetError::Listen { address, source };
        let socket = if address.is_ipv4() {
            TcpSocket::new_v4()
        } else {
            TcpSocket::new_v6()
        }
        .map_err(fault)?;
        // A restarted daemon gets its port back although old connections linger.
        socket.set_reuseaddr(true).map_err(fault)?;
        socket.bind(address).map_err(fault)?;
        let listener = socket.listen(1024).map_err(fault)?;
        let address = listener.local_addr().map_err(fault)?;
        Ok(Listener {
            net: self.clone(),
            listener,
            address,
        })
    }

    /// Dials `address` and expects `role` there. `from` is the address of ours to dial from.
    ///
    /// # Errors
    /// No answer within [`CONNECT_DEADLINE`], a failed handshake, or another role than expected behind the address.
    pub async fn dial(
        &self,
        address: SocketAddr,
        role: &Role,
        from: Option<IpAddr>,
    ) -> Result<Conn, NetError> {
        self.allow(address)?;
        let fault = |source| NetError::Dial { address, source };
        let connect = async {
            let socket = if address.is_ipv4() {
                TcpSocket::new_v4()?
            } else {
                TcpSocket::new_v6()?
            };
            if let Some(ip) = from.filter(|ip| ip.is_ipv4() == address.is_ipv4() && !ip.is_unspecified()) {
                socket.bind(SocketAddr::new(ip, 0))?;
            }
            socket.connect(address).await
        };
        let tcp = timeout(CONNECT_DEADLINE, connect)
            .await
            .map_err(|_| fault(io::ErrorKind::TimedOut.into()))?
            .map_err(fault)?;
        set_options(&tcp).map_err(fault)?;
        match &self.security {
            Security::Insecure { .. } => Ok(Conn::plain(tcp)),
            Security::Tls(tls) => {
                let fault = |source| NetError::Handshake { address, source };
                let name = tls.server_name(role)?;
                let connector = TlsConnector::from(tls.client.clone());
                let stream = timeout(HELLO_DEADLINE, connector.connect(name, tcp))
                    .await
                    .map_err(|_| fault(io::ErrorKind::TimedOut.into()))?
                    .map_err(fault)?;
                Conn::tls(stream.into()).map_err(fault)
            }
        }
    }
}

impl std::fmt::Debug for Net {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.identity() {
            Some(identity) => write!(f, "Net({identity})"),
            None => f.write_str("Net(insecure)"),
        }
    }
}

/// A port of ours.
pub struct Listener {
    net: Net,
    listener: TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Where it listens, the port filled in.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The next connection, not yet trusted. Faults of accepting itself (out of descriptors, say) are waited out:
    /// a listener never ends by itself.
    pub async fn accept(&self) -> Pending {
        loop {
            match self.listener.accept().await {
                Ok((tcp, peer)) => {
                    return Pending {
                        net: self.net.clone(),
                        tcp,
                        peer,
                    };
                }
                Err(error) => {
                    tracing::warn!(address = %self.address, %error, "accepting a connection failed");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

/// An accepted connection before its handshake: keep few of them.
pub struct Pending {
    net: Net,
    tcp: TcpStream,
    /// Where it came from.
    pub peer: SocketAddr,
}

impl Pending {
    /// Proves who the peer is.
    ///
    /// # Errors
    /// The peer's certificate is missing or wrong, or the handshake took over [`HELLO_DEADLINE`].
    pub async fn handshake(self) -> Result<Conn, NetError> {
        let address = self.peer;
        let fault = |source| NetError::Handshake { address, source };
        set_options(&self.tcp).map_err(fault)?;
        match &self.net.security {
            Security::Insecure { .. } => Ok(Conn::plain(self.tcp)),
            Security::Tls(tls) => {
                let stream = timeout(
                    HELLO_DEADLINE,
                    TlsAcceptor::from(tls.server.clone()).accept(self.tcp),
                )
                .await
                .map_err(|_| fault(io::ErrorKind::TimedOut.into()))?
                .map_err(fault)?;
                Conn::tls(stream.into()).map_err(fault)
            }
        }
    }
}

/// What every connection has: no Nagle, and three ways to notice that the peer is gone (keepalive for who waits to
/// read, the user timeout for who wrote). Buffer sizes are left to the kernel's autotuning.
fn set_options(tcp: &TcpStream) -> io::Result<()> {
    let socket = socket2::SockRef::from(tcp);
    socket.set_tcp_nodelay(true)?;
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(Duration::from_secs(2))
        .with_interval(Duration::from_secs(1))
        .with_retries(5);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(USER_TIMEOUT))
}
