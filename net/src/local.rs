//! The node's own door: a Unix socket between the command line and the agent of the same host.
//!
//! Who knocks is known by the kernel (peer credentials, taken when the connection is made), and what somebody may read
//! is handed over as open descriptors. A message is its length (u32, little-endian, at most [`MAX_MESSAGE`]), the
//! protocol's number (u16) and so many bytes of postcard; descriptors ride with its first byte.

use std::fs::{self, File, Permissions};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener as StdListener, UnixStream as StdStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};

use crate::NetError;

/// What both sides speak. Command line and agent of a host are one binary, so that there is no range: only the moment
/// of an update has two of them, and its error says so.
pub const PROTOCOL: u16 = 1;
/// The longest message.
pub const MAX_MESSAGE: usize = 64 << 10;
/// The most descriptors that come with one message.
pub const MAX_DESCRIPTORS: usize = 16;

/// A socket's address holds 107 bytes of path; longer ones are reached through their directory's descriptor.
const MAX_PATH: usize = 107;
const HEADER: usize = 6;

/// Who is at the other end, as the kernel saw it when the connection was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its process, where the kernel tells: for logs only, since numbers are used again.
    pub pid: Option<i32>,
}

/// The agent's side. It owns the socket's name while it lives.
#[derive(Debug)]
pub struct LocalListener {
    listener: UnixListener,
    path: PathBuf,
    /// Held while we live: who has it may take the place of a socket that nobody listens on.
    _lock: File,
}

impl LocalListener {
    /// Listens at `path`. A socket that a dead agent left behind is replaced. Everybody who reaches the directory may
    /// connect: what each may ask is decided by the peer's credentials.
    ///
    /// # Errors
    /// Somebody listens there, something else stands there, or the directory cannot be used.
    pub fn bind(path: &Path) -> Result<Self, NetError> {
        let fault = |why: String| NetError::Socket {
            path: path.to_owned(),
            why,
        };
        let io = |error: io::Error| fault(error.to_string());
        let taken = || fault("another agent listens there".to_owned());
        let mut lock = path.as_os_str().to_owned();
        lock.push(".lock");
        let lock = File::create(&lock).map_err(io)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| taken())?;
        match fs::symlink_metadata(path) {
            Ok(there) if there.file_type().is_socket() => {
                // One that was bound by somebody without our lock is refused all the same while it lives.
                match with_short(path, |short| StdStream::connect(short)) {
                    Ok(_) => return Err(taken()),
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                        fs::remove_file(path).map_err(io)?;
                    }
                    Err(error) => return Err(io(error)),
                }
            }
            Ok(_) => return Err(fault("something that is no socket stands there".to_owned())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(io(error)),
        }
        let listener = with_short(path, |short| StdListener::bind(short)).map_err(io)?;
        fs::set_permissions(path, Permissions::from_mode(0o666)).map_err(io)?;
        listener.set_nonblocking(true).map_err(io)?;
        Ok(Self {
            listener: UnixListener::from_std(listener).map_err(io)?,
            path: path.to_owned(),
            _lock: lock,
        })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next connection. Faults of accepting itself (out of descriptors, say) are waited out.
    pub async fn accept(&self) -> LocalConn {
        loop {
            let accepted = match self.listener.accept().await {
                Ok((stream, _)) => LocalConn::of(stream),
                Err(error) => Err(error),
            };
            match accepted {
                Ok(conn) => return conn,
                Err(error) => {
                    tracing::warn!(socket = %self.path.display(), %error, "accepting a connection failed");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

impl Drop for LocalListener {
    fn drop(&mut self) {
        // What is left behind is replaced at the next start.
        let _ = fs::remove_file(&self.path);
    }
}

/// A connection within the host.
#[derive(Debug)]
pub struct LocalConn {
    stream: UnixStream,
    peer: Peer,
}

impl LocalConn {
    /// Reaches the agent that listens at `path`.
    ///
    /// # Errors
    /// Nobody listens there, or we may not connect.
    pub async fn connect(path: &Path) -> Result<Self, NetError> {
        let fault = |source| NetError::Local {
            path: path.to_owned(),
            source,
        };
        // Connecting within the host waits for nobody: it is done or refused at once.
        let stream = with_short(path, |short| StdStream::connect(short)).map_err(fault)?;
        stream.set_nonblocking(true).map_err(fault)?;
        UnixStream::from_std(stream).and_then(Self::of).map_err(fault)
    }

    fn of(stream: UnixStream) -> io::Result<Self> {
        let credentials = stream.peer_cred()?;
        let peer = Peer {
            uid: credentials.uid(),
            gid: credentials.gid(),
            pid: credentials.pid(),
        };
        Ok(Self { stream, peer })
    }

    /// Who is at the other end.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Sends one message, with copies of these descriptors.
    ///
    /// # Errors
    /// The other end has gone, or the message is too long.
    pub async fn send<T: Serialize>(
        &mut self,
        message: &T,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), NetError> {
        let mut framed = vec![0; HEADER];
        framed = postcard::to_extend(message, framed)
            .map_err(|_| NetError::Message("it cannot be encoded".to_owned()))?;
        let len = framed.len() - HEADER;
        if len > MAX_MESSAGE || descriptors.len() > MAX_DESCRIPTORS {
            return Err(NetError::Message("it is too long".to_owned()));
        }
        framed[..4].copy_from_slice(&(len as u32).to_le_bytes());
        framed[4..HEADER].copy_from_slice(&PROTOCOL.to_le_bytes());
        let mut sent = 0;
        while sent < framed.len() {
            let with = if sent == 0 { descriptors } else { &[] };
            let rest = &framed[sent..];
            sent += self
                .stream
                .async_io(Interest::WRITABLE, || {
                    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
                    let mut control = SendAncillaryBuffer::new(&mut space);
                    if !with.is_empty() {
                        control.push(SendAncillaryMessage::ScmRights(with));
                    }
                    rustix::net::sendmsg(
                        &self.stream,
                        &[IoSlice::new(rest)],
                        &mut control,
                        SendFlags::NOSIGNAL,
                    )
                    .map_err(io::Error::from)
                })
                .await
                .map_err(NetError::Broken)?;
        }
        Ok(())
    }

    /// Receives one message and the descriptors that came with it; `None` at a proper end between messages. Once it
    /// was cancelled the connection is good for nothing.
    ///
    /// # Errors
    /// The other end has gone in the middle, speaks another protocol, or says what is no such message.
    pub async fn receive<T: DeserializeOwned>(&mut self) -> Result<Option<(T, Vec<OwnedFd>)>, NetError> {
        let mut descriptors = Vec::new();
        let mut header = [0; HEADER];
        if !self.fill(&mut header, &mut descriptors).await? {
            return Ok(None);
        }
        let len = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let theirs = u16::from_le_bytes([header[4], header[5]]);
        if theirs != PROTOCOL {
            return Err(NetError::OtherProtocol {
                theirs,
                ours: PROTOCOL,
            });
        }
        if len > MAX_MESSAGE {
            return Err(NetError::Message("it is too long".to_owned()));
        }
        let mut body = vec![0; len];
        if len > 0 && !self.fill(&mut body, &mut descriptors).await? {
            return Err(NetError::Broken(io::ErrorKind::UnexpectedEof.into()));
        }
        match postcard::take_from_bytes(&body) {
            Ok((message, [])) => Ok(Some((message, descriptors))),
            Ok(_) => Err(NetError::Message("bytes follow it".to_owned())),
            Err(_) => Err(NetError::Message("it cannot be decoded".to_owned())),
        }
    }

    /// Waits until the other end says something or goes; takes nothing.
    pub async fn stirs(&self) {
        let peek = || {
            let mut byte = [0; 1];
            rustix::net::recv(&self.stream, &mut byte, RecvFlags::PEEK)
                .map(drop)
                .map_err(io::Error::from)
        };
        // An error is something that the next receive will tell.
        let _ = self.stream.async_io(Interest::READABLE, peek).await;
    }

    /// Fills all of `buffer`; `false` at an end before its first byte.
    async fn fill(&self, buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<bool, NetError> {
        let mut have = 0;
        while have < buffer.len() {
            let got = self
                .stream
                .async_io(Interest::READABLE, || {
                    receive(&self.stream, &mut buffer[have..], descriptors)
                })
                .await
                .map_err(NetError::Broken)?;
            if descriptors.len() > MAX_DESCRIPTORS {
                return Err(NetError::Message("too many descriptors come with it".to_owned()));
            }
            if got == 0 {
                return match have {
                    0 => Ok(false),
                    _ => Err(NetError::Broken(io::ErrorKind::UnexpectedEof.into())),
                };
            }
            have += got;
        }
        Ok(true)
    }
}

fn receive(stream: &UnixStream, buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::net::recvmsg(
        stream,
        &mut [IoSliceMut::new(buffer)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received);
        }
    }
    Ok(got.bytes)
}

/// Does something with a path short enough for a socket's address: the path itself, or one through its directory's
/// descriptor.
fn with_short<T>(path: &Path, act: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<T> {
    if path.as_os_str().len() <= MAX_PATH {
        return act(path);
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return act(path);
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(parent, flags, Mode::empty())?;
    let short = PathBuf::from(format!("/proc/self/fd/{}", directory.as_fd().as_raw_fd()));
    act(&short.join(name))
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    fn place() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sock");
        (dir, path)
    }

    fn why(error: &NetError) -> String {
        error.to_string()
    }

    #[tokio::test]
    async fn messages_and_descriptors_arrive_and_the_peer_is_known() {
        let (_dir, path) = place();
        let listener = LocalListener::bind(&path).unwrap();
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o666,
            "credentials decide"
        );
        let mut client = LocalConn::connect(&path).await.unwrap();
        let mut server = listener.accept().await;
        assert_eq!(server.peer().uid, rustix::process::getuid().as_raw());
        assert_eq!(
            server.peer().pid,
            Some(rustix::process::getpid().as_raw_nonzero().get())
        );

        let (read, write) = rustix::pipe::pipe().unwrap();
        client.send(&"hello", &[read.as_fd()]).await.unwrap();
        client.send(&"again", &[]).await.unwrap();
        drop(read);
        let (text, mut descriptors): (String, _) = server.receive().await.unwrap().unwrap();
        assert_eq!((text.as_str(), descriptors.len()), ("hello", 1));
        rustix::io::write(&write, b"through the pipe").unwrap();
        drop(write);
        let mut got = String::new();
        File::from(descriptors.pop().unwrap())
            .read_to_string(&mut got)
            .unwrap();
        assert_eq!(got, "through the pipe");
        let (text, descriptors): (String, _) = server.receive().await.unwrap().unwrap();
        assert_eq!((text.as_str(), descriptors.len()), ("again", 0));
        drop(client);
        assert!(server.receive::<String>().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn who_goes_is_noticed_and_who_stays_is_not() {
        let (_dir, path) = place();
        let listener = LocalListener::bind(&path).unwrap();
        for says_something in [false, true] {
            let mut client = LocalConn::connect(&path).await.unwrap();
            let mut server = listener.accept().await;
            client.send(&"hello", &[]).await.unwrap();
            server.receive::<String>().await.unwrap().unwrap();
            let stirs = tokio::time::timeout(Duration::from_millis(20), server.stirs());
            assert!(stirs.await.is_err(), "nothing happens");
            if says_something {
                client.send(&"more", &[]).await.unwrap();
            } else {
                drop(client);
            }
            server.stirs().await;
            let next = server.receive::<String>().await.unwrap();
            assert_eq!(
                next.map(|(text, _)| text).as_deref(),
                says_something.then_some("more")
            );
        }
    }

    #[tokio::test]
    async fn a_message_longer_than_the_sockets_buffer_is_whole() {
        let (_dir, path) = place();
        let listener = LocalListener::bind(&path).unwrap();
        let mut client = LocalConn::connect(&path).await.unwrap();
        let mut server = listener.accept().await;
        let long = "x".repeat(MAX_MESSAGE - 16);
        let (sent, received) = tokio::join!(client.send(&long, &[]), server.receive::<String>());
        sent.unwrap();
        assert_eq!(received.unwrap().unwrap().0, long);
        let longer = "x".repeat(MAX_MESSAGE + 1);
        assert!(why(&client.send(&longer, &[]).await.unwrap_err()).contains("too long"));
    }

    #[tokio::test]
    async fn garbage_is_refused_before_anything_is_allocated_for_it() {
        let (_dir, path) = place();
        let listener = LocalListener::bind(&path).unwrap();
        for (bytes, said) in [
            (&b"\xff\xff\xff\xff\x01\x00"[..], "too long"),
            (b"\x01\x00\x00\x00\x07\x00\x00", "protocol 7"),
            (b"\x01\x00\x00\x00\x01\x00\xff", "cannot be decoded"),
            (b"\x02\x00\x00\x00\x01\x00\x00\x00", "bytes follow"),
            (b"\x09\x00", "end of file"),
        ] {
            let client = StdStream::connect(&path).unwrap();
            let mut server = listener.accept().await;
            io::Write::write_all(&mut &client, bytes).unwrap();
            drop(client);
            let error = server.receive::<String>().await.unwrap_err();
            assert!(why(&error).contains(said), "{bytes:?}: {error}");
        }
    }

    #[tokio::test]
    async fn a_dead_agents_socket_is_replaced_and_a_live_ones_is_not() {
        let (_dir, path) = place();
        let live = LocalListener::bind(&path).unwrap();
        assert!(why(&LocalListener::bind(&path).unwrap_err()).contains("another agent"));
        drop(live);
        assert!(!path.exists(), "who leaves takes its name along");
        drop(StdListener::bind(&path).unwrap());
        assert!(path.exists(), "a dead one's name stays");
        let again = LocalListener::bind(&path).unwrap();
        LocalConn::connect(&path).await.unwrap();
        drop(again);
        let foreign = StdListener::bind(&path).unwrap();
        assert!(
            why(&LocalListener::bind(&path).unwrap_err()).contains("another agent"),
            "also without our lock"
        );
        drop(foreign);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "precious").unwrap();
        assert!(why(&LocalListener::bind(&path).unwrap_err()).contains("no socket"));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[tokio::test]
    async fn a_path_may_be_longer_than_an_address() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("d".repeat(100)).join("e".repeat(100));
        fs::create_dir_all(&deep).unwrap();
        let path = deep.join("agent.sock");
        let listener = LocalListener::bind(&path).unwrap();
        let (client, _server) = tokio::join!(LocalConn::connect(&path), listener.accept());
        client.unwrap();
        assert!(why(&LocalListener::bind(&path).unwrap_err()).contains("another agent"));
    }

    #[tokio::test]
    async fn where_nobody_listens_the_path_is_named() {
        let (_dir, path) = place();
        let error = LocalConn::connect(&path).await.unwrap_err();
        assert!(why(&error).contains("agent.sock"), "{error}");
    }
}
