//! tokio: a runtime with a thread for each core at each end, a task for each stream.

use std::future::Future;
use std::io;
use std::net::TcpStream as Socket;
use std::sync::Arc;
use std::thread;

use stage_core::chunk::{BLOCK, CHUNK};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::{JoinSet, spawn_blocking};

use super::joined;
use super::work::{Header, Pair, Work, hasher};

/// Hash and disk have threads of their own, as the design asks.
pub(super) fn aside(work: &Arc<Work>, pairs: Vec<Pair>) -> io::Result<()> {
    run(work, pairs, receive_aside)
}

/// The runtime's threads hash and write to the disk, which the design forbids.
pub(super) fn inline(work: &Arc<Work>, pairs: Vec<Pair>) -> io::Result<()> {
    run(work, pairs, receive_inline)
}

fn run<F>(work: &Arc<Work>, pairs: Vec<Pair>, receive: fn(Arc<Work>, TcpStream) -> F) -> io::Result<()>
where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    let (outs, intos) = pairs.into_iter().map(|pair| (pair.out, pair.into)).unzip();
    thread::scope(|scope| {
        joined(vec![
            scope.spawn(|| side(work, outs, send)),
            scope.spawn(move || side(work, intos, receive)),
        ])
    })
}

/// One end of all streams.
fn side<F>(work: &Arc<Work>, sockets: Vec<Socket>, task: fn(Arc<Work>, TcpStream) -> F) -> io::Result<()>
where
    F: Future<Output = io::Result<()>> + Send + 'static,
{
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_io().build()?;
    runtime.block_on(async {
        let mut tasks = JoinSet::new();
        for socket in sockets {
            socket.set_nonblocking(true)?;
            tasks.spawn(task(Arc::clone(work), TcpStream::from_std(socket)?));
        }
        while let Some(ended) = tasks.join_next().await {
            ended.map_err(io::Error::other)??;
        }
        Ok(())
    })
}

async fn send(work: Arc<Work>, mut socket: TcpStream) -> io::Result<()> {
    while let Some((header, bytes)) = work.take() {
        socket.write_all(&header.encode()).await?;
        for block in bytes.chunks(BLOCK) {
            socket.write_all(block).await?;
        }
    }
    socket.write_all(&Header::LAST).await
}

async fn receive_inline(work: Arc<Work>, mut socket: TcpStream) -> io::Result<()> {
    let (mut hasher, mut block) = (hasher(), vec![0; BLOCK]);
    let mut header = [0; Header::LEN];
    loop {
        socket.read_exact(&mut header).await?;
        let Some(header) = Header::decode(&header) else {
            return Ok(());
        };
        for at in (0..CHUNK as usize).step_by(BLOCK) {
            socket.read_exact(&mut block).await?;
            hasher.update(&block);
            work.write(&block, header.place(at))?;
        }
        work.keep(&header, hasher.finish())?;
    }
}

/// With two blocks: one is filled from the socket while the other is hashed and written.
async fn receive_aside(work: Arc<Work>, mut socket: TcpStream) -> io::Result<()> {
    let mut block = vec![0; BLOCK];
    let mut aside = spawn_blocking(|| io::Result::Ok((hasher(), vec![0; BLOCK])));
    let mut header = [0; Header::LEN];
    loop {
        socket.read_exact(&mut header).await?;
        let Some(header) = Header::decode(&header).map(Arc::new) else {
            return aside.await?.map(drop);
        };
        for at in (0..CHUNK as usize).step_by(BLOCK) {
            socket.read_exact(&mut block).await?;
            let (mut hasher, free) = aside.await??;
            let full = std::mem::replace(&mut block, free);
            let (work, header) = (Arc::clone(&work), Arc::clone(&header));
            aside = spawn_blocking(move || {
                hasher.update(&full);
                work.write(&full, header.place(at))?;
                if at + BLOCK == CHUNK as usize {
                    work.keep(&header, hasher.finish())?;
                }
                Ok((hasher, full))
            });
        }
    }
}
