//! Blocking system calls, a thread for each end of each stream.

use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::thread;

use stage_core::chunk::{BLOCK, CHUNK};

use super::joined;
use super::work::{Header, Pair, Work, hasher};

pub(super) fn run(work: &Work, pairs: Vec<Pair>) -> io::Result<()> {
    thread::scope(|scope| {
        let threads: Vec<_> = pairs
            .into_iter()
            .flat_map(|Pair { out, into }| {
                [
                    scope.spawn(move || send(work, out)),
                    scope.spawn(move || receive(work, into)),
                ]
            })
            .collect();
        joined(threads)
    })
}

fn send(work: &Work, mut socket: TcpStream) -> io::Result<()> {
    while let Some((header, bytes)) = work.take() {
        socket.write_all(&header.encode())?;
        for block in bytes.chunks(BLOCK) {
            socket.write_all(block)?;
        }
    }
    socket.write_all(&Header::LAST)
}

fn receive(work: &Work, mut socket: TcpStream) -> io::Result<()> {
    let (mut hasher, mut block) = (hasher(), vec![0; BLOCK]);
    let mut header = [0; Header::LEN];
    loop {
        socket.read_exact(&mut header)?;
        let Some(header) = Header::decode(&header) else {
            return Ok(());
        };
        for at in (0..CHUNK as usize).step_by(BLOCK) {
            socket.read_exact(&mut block)?;
            hasher.update(&block);
            work.write(&block, header.place(at))?;
        }
        work.keep(&header, hasher.finish())?;
    }
}
