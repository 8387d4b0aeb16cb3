//! A TCP proxy that stands between a child and its parent, and can be slow, frozen or cut.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// What goes wrong.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Fault {
    /// The n-th connection (0 is the control connection) carries so many bytes a second.
    pub(crate) slow: Option<(usize, u64)>,
    /// Every data connection carries so many bytes a second.
    pub(crate) each: Option<u64>,
    /// All data connections together do.
    pub(crate) all: Option<u64>,
    /// After so many bytes from the parent nothing is forwarded any more, and nothing closed.
    pub(crate) freezes_at: Option<u64>,
    /// After so many bytes from the parent all connections end, and no more are taken.
    pub(crate) ends_at: Option<u64>,
}

pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    inner: Arc<Inner>,
}

struct Inner {
    to: SocketAddr,
    fault: Fault,
    /// Ends these connections, by number.
    snapped: Mutex<Vec<CancellationToken>>,
    /// Bytes from the parent, by connection.
    carried: Mutex<Vec<Arc<AtomicU64>>>,
    /// Bytes so far, over all connections.
    sum: AtomicU64,
    /// When what all data connections have carried would have passed at their common rate.
    due: Mutex<Instant>,
    cut: CancellationToken,
}

impl Proxy {
    pub(crate) async fn before(to: SocketAddr, fault: Fault) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let inner = Arc::new(Inner {
            to,
            fault,
            snapped: Mutex::default(),
            carried: Mutex::default(),
            sum: AtomicU64::new(0),
            due: Mutex::new(Instant::now()),
            cut: CancellationToken::new(),
        });
        let accepting = inner.clone();
        tokio::spawn(async move {
            loop {
                let child = tokio::select! {
                    () = accepting.cut.cancelled() => return,
                    child = listener.accept() => child.unwrap().0,
                };
                // A frozen host's kernel still accepts.
                tokio::spawn(accepting.clone().forward(child));
            }
        });
        Self { address, inner }
    }

    /// Ends one connection.
    pub(crate) fn snap(&self, number: usize) {
        self.inner.snapped.lock().unwrap()[number].cancel();
    }

    /// Bytes from the parent so far, by connection in the order of their coming.
    pub(crate) fn carried(&self) -> Vec<u64> {
        let carried = self.inner.carried.lock().unwrap();
        carried
            .iter()
            .map(|bytes| bytes.load(Ordering::Relaxed))
            .collect()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.inner.cut.cancel();
    }
}

impl Inner {
    async fn forward(self: Arc<Self>, child: TcpStream) {
        let (number, count, snapped) = {
            let mut carried = self.carried.lock().unwrap();
            let count = Arc::new(AtomicU64::new(0));
            carried.push(count.clone());
            let snapped = CancellationToken::new();
            self.snapped.lock().unwrap().push(snapped.clone());
            (carried.len() - 1, count, snapped)
        };
        let Ok(parent) = TcpStream::connect(self.to).await else {
            return;
        };
        child.set_nodelay(true).unwrap();
        parent.set_nodelay(true).unwrap();
        let rate = self
            .fault
            .slow
            .filter(|(slow, _)| *slow == number)
            .map(|(_, rate)| rate)
            .or(self.fault.each.filter(|_| number > 0));
        let shares = self.fault.all.filter(|_| number > 0);
        let (from_child, to_child) = child.into_split();
        let (from_parent, to_parent) = parent.into_split();
        let upward = AtomicU64::new(0);
        tokio::select! {
            () = self.cut.cancelled() => {}
            () = snapped.cancelled() => {}
            () = self.copy(from_parent, to_child, (rate, shares), &count) => {}
            () = self.copy(from_child, to_parent, (None, None), &upward) => {}
        }
    }

    async fn copy(
        &self,
        mut from: OwnedReadHalf,
        mut to: OwnedWriteHalf,
        (rate, shares): (Option<u64>, Option<u64>),
        count: &AtomicU64,
    ) {
        let mut buf = vec![0; 16 << 10];
        loop {
            let Ok(read) = from.read(&mut buf).await else {
                return;
            };
            let sum = self.sum.load(Ordering::Relaxed);
            if self.fault.freezes_at.is_some_and(|at| sum >= at) {
                std::future::pending::<()>().await;
            }
            if self.fault.ends_at.is_some_and(|at| sum >= at) {
                self.cut.cancel();
                return;
            }
            if read == 0 || to.write_all(&buf[..read]).await.is_err() {
                return;
            }
            count.fetch_add(read as u64, Ordering::Relaxed);
            self.sum.fetch_add(read as u64, Ordering::Relaxed);
            if let Some(rate) = rate {
                tokio::time::sleep(Duration::from_secs_f64(read as f64 / rate as f64)).await;
            }
            if let Some(rate) = shares {
                let until = {
                    let mut due = self.due.lock().unwrap();
                    // What came late is made up for: however many connections, they carry this together.
                    let late = Instant::now() - Duration::from_millis(50);
                    let begin = (*due).max(late);
                    *due = begin + Duration::from_secs_f64(read as f64 / rate as f64);
                    *due
                };
                tokio::time::sleep_until(until.into()).await;
            }
        }
    }
}
