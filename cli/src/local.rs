//! Calls to the agent of this host, through its socket. As with the coordinator, no other room knows this wire.

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use stage_core::assignment::Place;
use stage_core::failure::{Code, Failure, show_path};
use stage_core::id::{JobId, NodeName};
use stage_net::NetError;
use stage_net::local::LocalConn;
use stage_proto::local::{Answer, Ask, Whereabouts};
use tokio::time::timeout;

use crate::error::Error;

/// How long the agent may take to answer what it has only to look up. A root on a disk that hangs must not hang a
/// job's script.
const ANSWER: Duration = Duration::from_secs(10);

/// The agent of this host.
#[derive(Debug, Clone)]
pub(crate) struct Agent {
    socket: PathBuf,
}

impl Agent {
    /// Behind this socket.
    pub(crate) fn at(socket: &Path) -> Self {
        Self {
            socket: socket.to_owned(),
        }
    }

    /// What is published on this node under a name.
    ///
    /// # Errors
    /// [`Code::NoAgent`], or why the place can hold nothing.
    pub(crate) async fn locate(&self, place: Place, name: Vec<u8>) -> Result<Whereabouts, Error> {
        match self.ask(&Ask::Where { place, name }).await? {
            Answer::Where(whereabouts) => Ok(whereabouts),
            Answer::Refused(failure) => Err(failure.into()),
            _ => Err(self.strange()),
        }
    }

    /// Hands this process's standard input over, for a push under this id.
    ///
    /// # Errors
    /// [`Code::NoAgent`], or the agent will not take it.
    pub(crate) async fn hand_over(&self, job: JobId, mode: u32) -> Result<Stream, Error> {
        let asked = async {
            let mut conn = LocalConn::connect(&self.socket).await?;
            let input = std::io::stdin();
            let sent = conn.send(&Ask::Stream { job, mode }, &[input.as_fd()]).await;
            let answer = answer(&mut conn, sent).await?;
            Ok((conn, answer))
        };
        match self.within(asked).await? {
            (conn, Answer::Taken { node }) => Ok(Stream { node, conn }),
            (_, Answer::Refused(failure)) => Err(failure.into()),
            _ => Err(self.strange()),
        }
    }

    async fn ask(&self, ask: &Ask) -> Result<Answer, Error> {
        let asked = async {
            let mut conn = LocalConn::connect(&self.socket).await?;
            let sent = conn.send(ask, &[]).await;
            answer(&mut conn, sent).await
        };
        self.within(asked).await
    }

    async fn within<T>(&self, asked: impl Future<Output = Result<T, NetError>>) -> Result<T, Error> {
        match timeout(ANSWER, asked).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(error)) => Err(self.fault(&error)),
            Err(_) => Err(self.gone(&format!("it gives no answer within {} s", ANSWER.as_secs()))),
        }
    }

    fn fault(&self, error: &NetError) -> Error {
        match error {
            NetError::Local { source, .. } => self.gone(&match source.kind() {
                std::io::ErrorKind::NotFound => "there is no such socket".to_owned(),
                std::io::ErrorKind::ConnectionRefused => "nobody listens on it".to_owned(),
                _ => source.to_string(),
            }),
            NetError::OtherProtocol { .. } | NetError::Message(_) => Failure::new(
                Code::ProtocolVersion,
                error.to_string(),
                "restart the agent, so that it is of this command's release",
            )
            .at(self.shown())
            .into(),
            other => self.gone(&other.to_string()),
        }
    }

    fn strange(&self) -> Error {
        Failure::new(
            Code::ProtocolVersion,
            "the agent answers what it was not asked",
            "restart the agent, so that it is of this command's release",
        )
        .at(self.shown())
        .into()
    }

    fn gone(&self, why: &str) -> Error {
        Failure::new(
            Code::NoAgent,
            format!("no agent answers on this host: {why}"),
            "see that `stage agent` runs here, or name its socket with --agent-socket PATH or STAGE_AGENT_SOCKET",
        )
        .at(self.shown())
        .into()
    }

    fn shown(&self) -> String {
        use std::os::unix::ffi::OsStrExt as _;
        show_path(self.socket.as_os_str().as_bytes())
    }
}

/// The agent's answer. One that refuses before all was sent has hung up; what it said is still to be read.
async fn answer(conn: &mut LocalConn, sent: Result<(), NetError>) -> Result<Answer, NetError> {
    match conn.receive::<Answer>().await {
        Ok(Some((answer, _))) => Ok(answer),
        Ok(None) => Err(sent
            .err()
            .unwrap_or_else(|| NetError::Broken(std::io::ErrorKind::UnexpectedEof.into()))),
        Err(error) => Err(error),
    }
}

/// A stream in the agent's hands. Dropped before its end, it counts as not sent.
pub(crate) struct Stream {
    /// The node whose agent has it.
    pub node: NodeName,
    conn: LocalConn,
}

impl Stream {
    /// Waits for the end of input, and says that it was seen. `false`: the agent has let go of it before.
    pub(crate) async fn until_its_end(&mut self) -> bool {
        match self.conn.receive::<Answer>().await {
            Ok(Some((Answer::Ended { .. }, _))) => self.conn.send(&Ask::Seen, &[]).await.is_ok(),
            _ => false,
        }
    }
}
