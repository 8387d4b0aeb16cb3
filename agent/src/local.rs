//! The agent's door for the users of its own host: a Unix socket. Who asks is known by the kernel; what each request
//! needs is said in one place, [`who`].

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use stage_core::assignment::Place;
use stage_core::failure::{Code, Failure};
use stage_core::id::{JobId, NodeName};
use stage_net::NetError;
use stage_net::local::{LocalConn, LocalListener, Peer};
use stage_proto::local::{Answer, Ask, Found, Whereabouts};
use stage_transfer::root::{self, Roots};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::streams::{Held, Streams};
use crate::{Error, blocking};

/// Connections at once. More wait to be accepted.
const CONNECTIONS: usize = 512;
/// Of one user: nobody shuts the others out.
const OF_ONE_USER: usize = 128;
/// From the connection to the whole request.
const ASKED: Duration = Duration::from_secs(5);

/// Who may make a request on the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    /// Every user of the host who reaches the socket.
    Anybody,
}

/// The table of who may ask what: each request has its row.
fn who(ask: &Ask) -> Who {
    match ask {
        // Names and paths of copies are no secret: what they hold is kept by their own modes.
        Ask::Where { .. } => Who::Anybody,
        // What somebody may push is what the coordinator makes a job of; here they only hand over what they have open.
        Ask::Stream { .. } | Ask::Seen => Who::Anybody,
    }
}

/// The door, before it is open.
pub(crate) struct Local {
    listener: LocalListener,
    desk: Arc<Desk>,
}

/// What answers are made from.
struct Desk {
    node: NodeName,
    roots: Arc<Roots>,
    streams: Arc<Streams>,
    /// Connections of each user.
    users: Mutex<BTreeMap<u32, usize>>,
}

impl Local {
    /// Listens on the socket; nobody is answered before [`Local::serve`].
    ///
    /// # Errors
    /// Another agent listens there, or the path cannot be used.
    pub(crate) fn open(
        socket: &Path,
        node: NodeName,
        roots: Arc<Roots>,
        streams: Arc<Streams>,
    ) -> Result<Self, Error> {
        let listener = LocalListener::bind(socket)?;
        Ok(Self {
            listener,
            desk: Arc::new(Desk {
                node,
                roots,
                streams,
                users: Mutex::default(),
            }),
        })
    }

    /// Answers until `stop`.
    pub(crate) async fn serve(self, stop: CancellationToken) {
        tracing::info!(socket = %self.listener.path().display(), "users of this host are answered");
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        let mut connections = JoinSet::new();
        loop {
            let place = tokio::select! {
                () = stop.cancelled() => break,
                Some(ended) = connections.join_next(), if !connections.is_empty() => {
                    if let Err(error) = ended {
                        tracing::error!(%error, "a connection on the socket did not end well");
                    }
                    continue;
                }
                place = places.clone().acquire_owned() => place.expect("nobody closes it"),
            };
            let conn = tokio::select! {
                () = stop.cancelled() => break,
                conn = self.listener.accept() => conn,
            };
            let desk = self.desk.clone();
            connections.spawn(async move {
                attend(conn, desk).await;
                drop(place);
            });
        }
        // Whoever still waits sees the connection end.
        connections.shutdown().await;
    }
}

/// A user's place among the connections.
struct Seat {
    desk: Arc<Desk>,
    uid: u32,
}

impl Desk {
    fn seat(self: &Arc<Self>, uid: u32) -> Option<Seat> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let count = users.entry(uid).or_default();
        if *count >= OF_ONE_USER {
            return None;
        }
        *count += 1;
        Some(Seat {
            desk: self.clone(),
            uid,
        })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut users = self.desk.users.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = users.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                users.remove(&self.uid);
            }
        }
    }
}

/// One connection: one request, one answer; of a stream some more.
async fn attend(mut conn: LocalConn, desk: Arc<Desk>) {
    let Peer { uid, gid, pid } = conn.peer();
    let Some(_seat) = desk.seat(uid) else {
        let failure = Failure::new(
            Code::Unreachable,
            format!("user id {uid} has {OF_ONE_USER} connections to this node's agent already"),
            "wait for some of them to end",
        );
        refuse(&mut conn, failure).await;
        return;
    };
    let (ask, descriptors) = match timeout(ASKED, conn.receive::<Ask>()).await {
        Ok(Ok(Some(asked))) => asked,
        // Whoever comes only to see whether we live leaves without a word.
        Ok(Ok(None)) => return,
        Ok(Err(error)) => {
            tracing::debug!(uid, gid, pid, %error, "a request on the socket is none");
            let code = match error {
                NetError::OtherProtocol { .. } => Code::ProtocolVersion,
                _ => Code::Usage,
            };
            let hint =
                "see that command and agent are of one release (`stage --version`), and restart the agent";
            refuse(&mut conn, Failure::new(code, error.to_string(), hint)).await;
            return;
        }
        Err(_) => return,
    };
    tracing::debug!(uid, gid, pid, ?ask, "asked on the socket");
    let answer = match who(&ask) {
        Who::Anybody => match ask {
            Ask::Where { place, name } => whereabouts(place, name, &desk).await,
            Ask::Stream { job, mode } => match take_in(job, mode, descriptors, &desk) {
                Ok(held) => return attend_stream(conn, job, held, &desk).await,
                Err(failure) => Answer::Refused(failure.on(&desk.node)),
            },
            Ask::Seen => Answer::Refused(out_of_turn()),
        },
    };
    say(&mut conn, &answer).await;
}

fn out_of_turn() -> Failure {
    Failure::new(
        Code::Usage,
        "that was said before there was anything to see",
        "use the `stage` command of this release",
    )
}

/// Takes a stream's input in.
fn take_in(job: JobId, mode: u32, mut descriptors: Vec<OwnedFd>, desk: &Arc<Desk>) -> Result<Held, Failure> {
    let (Some(input), true) = (descriptors.pop(), descriptors.is_empty()) else {
        return Err(Failure::new(
            Code::Usage,
            "a stream comes with one descriptor",
            "use the `stage` command of this release",
        ));
    };
    desk.streams.hand_over(job, input, mode)
}

/// Stays with a stream until its end was seen, its job has ended, or whoever brought it has gone.
async fn attend_stream(mut conn: LocalConn, job: JobId, held: Held, desk: &Arc<Desk>) {
    let Peer { uid, pid, .. } = conn.peer();
    tracing::info!(%job, uid, pid, "a stream was handed over");
    let node = desk.node.clone();
    say(&mut conn, &Answer::Taken { node }).await;
    let ended = tokio::select! {
        // Nothing is to be said before the end, so that this is somebody who leaves.
        () = conn.stirs() => {
            tracing::warn!(%job, uid, pid, "whoever brought the stream has gone before its end");
            return;
        }
        ended = held.tie.ended() => ended,
    };
    let Some(bytes) = ended else { return };
    say(&mut conn, &Answer::Ended { bytes }).await;
    match timeout(ASKED, conn.receive::<Ask>()).await {
        Ok(Ok(Some((Ask::Seen, _)))) => {
            tracing::info!(%job, %bytes, "the stream has ended");
            held.tie.seen();
        }
        _ => tracing::warn!(%job, uid, pid, "nobody lived to see the stream's end; nothing of it counts"),
    }
}

async fn whereabouts(place: Place, name: Vec<u8>, desk: &Arc<Desk>) -> Answer {
    let at = desk.clone();
    match blocking(move || at.roots.locate(&place, &name)).await {
        Ok(located) => Answer::Where(Whereabouts {
            node: desk.node.clone(),
            roots: desk.roots.names(),
            path: located.name,
            found: located.found.map(|found| match found {
                root::Found::File { size } => Found::File { size },
                root::Found::Tree { path } => Found::Tree { generation: path },
            }),
        }),
        Err(failure) => Answer::Refused(failure.on(&desk.node)),
    }
}

async fn refuse(conn: &mut LocalConn, failure: Failure) {
    say(conn, &Answer::Refused(failure)).await;
}

async fn say(conn: &mut LocalConn, answer: &Answer) {
    match timeout(ASKED, conn.send(answer, &[])).await {
        Ok(Ok(())) => {}
        // Who does not wait for the answer misses nothing.
        Ok(Err(error)) => tracing::debug!(%error, "an answer on the socket found nobody"),
        Err(_) => tracing::debug!("an answer on the socket was not taken"),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use stage_core::units::ByteCount;

    use super::*;

    struct Door {
        dir: tempfile::TempDir,
        stop: CancellationToken,
        task: tokio::task::JoinHandle<()>,
    }

    impl Door {
        fn open() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let root = dir.path().join("root");
            std::fs::create_dir(&root).unwrap();
            let roots = Arc::new(Roots::open(vec![("main".parse().unwrap(), root)]));
            let stop = CancellationToken::new();
            let local = Local::open(
                &dir.path().join("agent.sock"),
                "n1".parse().unwrap(),
                roots,
                Arc::default(),
            )
            .unwrap();
            let task = tokio::spawn(local.serve(stop.clone()));
            Self { dir, stop, task }
        }

        fn socket(&self) -> PathBuf {
            self.dir.path().join("agent.sock")
        }

        async fn ask(&self, name: &str) -> Answer {
            let mut conn = LocalConn::connect(&self.socket()).await.unwrap();
            let ask = Ask::Where {
                place: Place::parse(b"main:").unwrap(),
                name: name.as_bytes().to_vec(),
            };
            conn.send(&ask, &[]).await.unwrap();
            conn.receive().await.unwrap().unwrap().0
        }
    }

    #[tokio::test]
    async fn it_is_told_what_is_there_and_what_is_not() {
        let door = Door::open();
        let root = door.dir.path().join("root");
        std::fs::write(root.join("x.fa"), "acgt").unwrap();
        let Answer::Where(there) = door.ask("x.fa").await else {
            panic!("refused")
        };
        assert_eq!(there.node.as_str(), "n1");
        assert_eq!(there.roots[0].0.as_str(), "main");
        assert_eq!(there.path, root.join("x.fa").as_os_str().as_encoded_bytes());
        assert_eq!(there.found, Some(Found::File { size: ByteCount(4) }));
        assert!(matches!(
            door.ask("y.fa").await,
            Answer::Where(Whereabouts { found: None, .. })
        ));
        let Answer::Refused(failure) = door.ask("..").await else {
            panic!("answered")
        };
        assert_eq!(
            (failure.code, failure.node),
            (Code::OutsideRoot, "n1".parse().ok())
        );
    }

    #[tokio::test]
    async fn who_speaks_another_language_is_told_so() {
        let door = Door::open();
        for (word, code) in [
            (&b"\x01\x00\x00\x00\x63\x00\x00"[..], Code::ProtocolVersion),
            (b"\x01\x00\x00\x00\x01\x00\x63", Code::Usage),
        ] {
            let raw = std::os::unix::net::UnixStream::connect(door.socket()).unwrap();
            std::io::Write::write_all(&mut &raw, word).unwrap();
            let answer = blocking(move || {
                let mut bytes = Vec::new();
                // It hangs up on what it did not read, which breaks the connection behind its answer.
                let _ = std::io::Read::read_to_end(&mut &raw, &mut bytes);
                bytes
            });
            let bytes = answer.await;
            assert!(
                String::from_utf8_lossy(&bytes).contains("agent's socket"),
                "{code}: {bytes:?}"
            );
        }
        // A connection without a word, and one that stays silent, hold up nobody.
        drop(LocalConn::connect(&door.socket()).await.unwrap());
        let _silent = LocalConn::connect(&door.socket()).await.unwrap();
        assert!(matches!(door.ask("x").await, Answer::Where(_)));
    }

    #[tokio::test]
    async fn one_user_cannot_take_every_place() {
        let door = Door::open();
        let mut silent = Vec::new();
        for _ in 0..OF_ONE_USER {
            silent.push(LocalConn::connect(&door.socket()).await.unwrap());
        }
        // They are taken in the order of their coming.
        let Answer::Refused(failure) = door.ask("x").await else {
            panic!("answered")
        };
        assert!(failure.message.contains("connections"), "{failure}");
        drop(silent);
        while !matches!(door.ask("x").await, Answer::Where(_)) {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn it_closes_and_takes_its_name_along() {
        let door = Door::open();
        let mut waiting = LocalConn::connect(&door.socket()).await.unwrap();
        door.stop.cancel();
        door.task.await.unwrap();
        assert!(matches!(waiting.receive::<Answer>().await, Ok(None) | Err(_)));
        assert!(!door.dir.path().join("agent.sock").exists());
    }
}
