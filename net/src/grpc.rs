//! gRPC over our own connections: tonic's TLS would neither reload, nor limit handshakes, nor tell who dialled.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

use crate::{Conn, Identity, Listener, Net, Role};

/// Connections that may be in their handshake at once.
const HANDSHAKES: usize = 128;

/// Where the coordinator is, as people write it: `https://HOST[:PORT]` or `http://HOST[:PORT]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoordinatorUrl {
    host: String,
    port: u16,
    tls: bool,
}

/// A text that is no coordinator URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a coordinator URL: write https://HOST:7700 (with --ca, --cert, --key) or http://HOST:7700 (insecure)"
)]
pub struct UrlError(String);

impl std::str::FromStr for CoordinatorUrl {
    type Err = UrlError;
    fn from_str(text: &str) -> Result<Self, UrlError> {
        let fault = || UrlError(text.to_owned());
        let uri: Uri = text.parse().map_err(|_| fault())?;
        let tls = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(fault()),
        };
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(fault());
        }
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(fault)?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        Ok(Self {
            host,
            port: uri.port_u16().unwrap_or(7700),
            tls,
        })
    }
}

impl std::fmt::Display for CoordinatorUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        if self.host.contains(':') {
            write!(f, "{scheme}://[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{scheme}://{}:{}", self.host, self.port)
        }
    }
}

impl CoordinatorUrl {
    /// Whether it asks for TLS.
    pub fn is_tls(&self) -> bool {
        self.tls
    }
}

/// One attempt to reach the coordinator: every address that the host's name resolves to is tried in turn.
///
/// # Errors
/// Nobody answers there, or it is not our coordinator.
pub async fn connect(net: &Net, url: &CoordinatorUrl) -> Result<Channel, tonic::transport::Error> {
    let target = Arc::new((net.clone(), url.clone()));
    let connector = service_fn(move |_: Uri| {
        let target = target.clone();
        async move {
            let (net, url) = &*target;
            let addresses = tokio::net::lookup_host((url.host.as_str(), url.port)).await?;
            let mut last = io::Error::new(
                io::ErrorKind::NotFound,
                format!("{} resolves to no address", url.host),
            );
            for address in addresses {
                match net.dial(address, &Role::Coordinator, None).await {
                    Ok(conn) => return Ok(TokioIo::new(conn)),
                    Err(error) => last = io::Error::other(error),
                }
            }
            Err(last)
        }
    });
    // tonic wants a URI of its own; TLS is ours, so the scheme here is always plain.
    Endpoint::from_static("http://coordinator.stage")
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(5))
        .keep_alive_while_idle(true)
        .tcp_nodelay(true)
        .connect_with_connector(connector)
        .await
}

/// Connections of a listener after their handshakes, for tonic's `serve_with_incoming`. The task that accepts them
/// ends when the stream is dropped.
pub fn incoming(listener: Listener) -> ReceiverStream<io::Result<GrpcConn>> {
    let (out, stream) = mpsc::channel(16);
    let places = Arc::new(Semaphore::new(HANDSHAKES));
    tokio::spawn(async move {
        loop {
            let Ok(place) = places.clone().acquire_owned().await else {
                return;
            };
            let pending = tokio::select! {
                pending = listener.accept() => pending,
                () = out.closed() => return,
            };
            let out = out.clone();
            tokio::spawn(async move {
                let peer = pending.peer;
                match pending.handshake().await {
                    // A closed stream means that the server ends.
                    Ok(conn) => drop(out.send(Ok(GrpcConn(conn))).await),
                    Err(error) => tracing::info!(%peer, %error, "a connection was refused"),
                }
                drop(place);
            });
        }
    });
    ReceiverStream::new(stream)
}

/// An accepted connection as tonic wants it; [`Caller`] reaches the handlers as a request extension.
pub struct GrpcConn(Conn);

/// Who called, by certificate; `None` without TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller(pub Option<Identity>);

impl Connected for GrpcConn {
    type ConnectInfo = Caller;
    fn connect_info(&self) -> Caller {
        Caller(self.0.identity().cloned())
    }
}

impl AsyncRead for GrpcConn {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for GrpcConn {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
