//! io_uring: a thread with a ring of its own for each end of each stream. It hashes between two calls of the kernel, of which each
//! hands over a read of the next block and the write of the last one.

use std::io;
use std::net::TcpStream as Socket;
use std::rc::Rc;
use std::thread;

use bytes::Bytes;
use stage_core::chunk::{BLOCK, CHUNK};
use tokio_uring::Runtime;
use tokio_uring::buf::BoundedBuf as _;
use tokio_uring::fs::File;
use tokio_uring::net::TcpStream;

use super::joined;
use super::work::{Header, Pair, Work, hasher};

/// A read and a write are under way at most, and what the runtime asks for itself.
const ENTRIES: u32 = 16;

/// # Errors
/// The kernel has no io_uring, or does not let us use it.
pub(super) fn available() -> io::Result<()> {
    ring().map(drop)
}

fn ring() -> io::Result<Runtime> {
    Runtime::new(tokio_uring::builder().entries(ENTRIES))
}

pub(super) fn run(work: &Work, pairs: Vec<Pair>) -> io::Result<()> {
    thread::scope(|scope| {
        let threads: Vec<_> = pairs
            .into_iter()
            .flat_map(|Pair { out, into }| {
                [
                    scope.spawn(move || ring()?.block_on(send(work, out))),
                    scope.spawn(move || ring()?.block_on(receive(work, into))),
                ]
            })
            .collect();
        joined(threads)
    })
}

async fn send(work: &Work, socket: Socket) -> io::Result<()> {
    let socket = TcpStream::from_std(socket);
    while let Some((header, bytes)) = work.take() {
        socket.write_all(header.encode().to_vec()).await.0?;
        for at in (0..bytes.len()).step_by(BLOCK) {
            let block = Bytes::slice(&bytes, at..bytes.len().min(at + BLOCK));
            socket.write_all(block).await.0?;
        }
    }
    socket.write_all(Header::LAST.to_vec()).await.0
}

async fn receive(work: &Work, socket: Socket) -> io::Result<()> {
    let socket = TcpStream::from_std(socket);
    let file = Rc::new(File::from_std(work.file().try_clone()?));
    let (mut hasher, mut block) = (hasher(), vec![0; BLOCK]);
    let mut written = tokio_uring::spawn(async { io::Result::Ok(vec![0; BLOCK]) });
    // The chunk whose last block is being written.
    let mut whole = None;
    let mut first = vec![0; Header::LEN];
    loop {
        first = fill(&socket, first).await?;
        let Some(header) = Header::decode(first[..].try_into().expect("as long as a header")) else {
            written.await??;
            return whole.map_or(Ok(()), |(header, digest)| work.keep(&header, digest));
        };
        for at in (0..CHUNK as usize).step_by(BLOCK) {
            block = fill(&socket, block).await?;
            let free = written.await??;
            if let Some((header, digest)) = whole.take() {
                work.keep(&header, digest)?;
            }
            hasher.update(&block);
            let full = std::mem::replace(&mut block, free);
            let (file, place) = (Rc::clone(&file), header.place(at));
            written = tokio_uring::spawn(async move {
                let (result, full) = file.write_all_at(full, place).await;
                result.map(|()| full)
            });
        }
        whole = Some((header, hasher.finish()));
    }
}

/// Reads until the buffer is full.
async fn fill(socket: &TcpStream, mut buffer: Vec<u8>) -> io::Result<Vec<u8>> {
    let mut at = 0;
    while at < buffer.len() {
        let (read, slice) = socket.read(buffer.slice(at..)).await;
        buffer = slice.into_inner();
        match read? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => at += read,
        }
    }
    Ok(buffer)
}
