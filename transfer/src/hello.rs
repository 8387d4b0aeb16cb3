//! The handshake on each connection, control or data, with TLS or without.
//!
//! ```text
//!   parent (listens)                       child (dials)
//!   Prelude ─────────────────────────────►              fixed bytes that every version keeps
//!            ◄───────────────────────────── Prelude
//!            ◄───────────────────────────── Hello        who, which job and hop; proof of the job's key
//!   Answer ──────────────────────────────►              Welcome with a proof, or Later, Busy, Refused
//! ```
//!
//! A proof is HMAC-SHA256 with the job's key over a domain, both preludes (with their nonces), the message, and under
//! TLS what binds it to this very connection. Both sides see from the preludes alone whether they have a protocol
//! version in common, so another version is a typed refusal and never a decode error.

use hmac::{Hmac, KeyInit as _, Mac as _};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use stage_core::failure::{Code, Failure};
use stage_core::id::{CongestionControl, Epoch, HopId, JobId, JobKey, NodeName, PlanVersion};
use stage_core::plan::WindowLimits;
use stage_net::Conn;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::error::TransferError;
use crate::frame::{self, Reader};
use crate::sync::random;

/// The lowest protocol version that this release speaks.
pub const PROTOCOL_MIN: u16 = 1;
/// The highest.
pub const PROTOCOL_MAX: u16 = 1;
/// The longest hello and answer.
pub const MAX_HELLO: usize = 2048;

const MAGIC: [u8; 8] = *b"stage/d\n";
const HELLO: &[u8] = b"stage 2026-11 data hello v1";
const WELCOME: &[u8] = b"stage 2026-11 data welcome v1";

/// What each side says first: bytes that mean the same in every version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prelude {
    /// The lowest protocol version spoken.
    pub protocol_min: u16,
    /// The highest.
    pub protocol_max: u16,
    /// Optional abilities, one bit each; none yet.
    pub features: u64,
    /// Drawn at random for this connection.
    pub nonce: [u8; 32],
}

impl Prelude {
    /// Bytes of a prelude.
    pub const LEN: usize = 52;

    /// This release's, with a fresh nonce.
    pub fn ours() -> Self {
        Self {
            protocol_min: PROTOCOL_MIN,
            protocol_max: PROTOCOL_MAX,
            features: 0,
            nonce: random(),
        }
    }

    /// The prelude's bytes.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.protocol_min.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.protocol_max.to_le_bytes());
        bytes[12..20].copy_from_slice(&self.features.to_le_bytes());
        bytes[20..].copy_from_slice(&self.nonce);
        bytes
    }

    /// Reads a prelude.
    ///
    /// # Errors
    /// The bytes do not begin as one.
    pub fn decode(bytes: &[u8; Self::LEN]) -> Result<Self, TransferError> {
        if bytes[..8] != MAGIC {
            return Err(TransferError::Protocol("it is no data port of stage"));
        }
        let mut features = [0; 8];
        features.copy_from_slice(&bytes[12..20]);
        let mut nonce = [0; 32];
        nonce.copy_from_slice(&bytes[20..]);
        Ok(Self {
            protocol_min: u16::from_le_bytes([bytes[8], bytes[9]]),
            protocol_max: u16::from_le_bytes([bytes[10], bytes[11]]),
            features: u64::from_le_bytes(features),
            nonce,
        })
    }

    /// The highest version that both speak.
    ///
    /// # Errors
    /// [`TransferError::Version`] if there is none.
    pub fn agree(&self, theirs: &Self) -> Result<u16, TransferError> {
        let version = self.protocol_max.min(theirs.protocol_max);
        if version < self.protocol_min.max(theirs.protocol_min) {
            return Err(TransferError::Version {
                theirs_min: theirs.protocol_min,
                theirs_max: theirs.protocol_max,
                ours_min: self.protocol_min,
                ours_max: self.protocol_max,
            });
        }
        Ok(version)
    }
}

/// What a child says of itself and wants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Of which job.
    pub job: JobId,
    /// Which hop this connection is of.
    pub hop: HopId,
    /// Which of the hop's connections.
    pub kind: ConnKind,
    /// Who dials.
    pub node: NodeName,
    /// By which plan, to be read in logs: digests pin bytes, plan versions do not.
    pub rank: (Epoch, PlanVersion),
    /// Every other parent was asked before, in vain.
    pub tried_others: bool,
    /// What this connection's sender shall ask its kernel for; one that has it not goes on with its own.
    pub control: Option<CongestionControl>,
}

/// Which of a hop's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ConnKind {
    /// The one for messages, dialled first.
    Control,
    /// One that carries chunks.
    Data {
        /// Its number, never used twice in one hop.
        stream: u32,
    },
    /// One of a measurement, whose id stands for the job's: `crate::probe` says what follows.
    Probe,
}

/// What a parent answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// Come in.
    Welcome(Welcome),
    /// The job is not known here yet: ask again.
    Later,
    /// Every place is taken: ask another.
    Busy,
    /// No, and why.
    Refused(Failure),
}

/// What a child is told when it comes in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// Who this is.
    pub node: NodeName,
    /// How much one connection from here may hold.
    pub windows: WindowLimits,
    /// Chunks in the payload, to be sure that both mean the same.
    pub chunks: u32,
}

/// One side's view of a handshake: what its proofs are bound to.
#[derive(Debug)]
struct Transcript {
    preludes: [[u8; Prelude::LEN]; 2],
    binding: Option<[u8; 32]>,
}

impl Transcript {
    fn mac(&self, key: &JobKey, domain: &[u8], message: &[u8]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&key.0).expect("HMAC takes keys of any length");
        // Everything but the message has a fixed length, so no two inputs look alike.
        mac.update(domain);
        mac.update(&self.preludes[0]);
        mac.update(&self.preludes[1]);
        match &self.binding {
            None => mac.update(&[0]),
            Some(binding) => {
                mac.update(&[1]);
                mac.update(binding);
            }
        }
        mac.update(message);
        mac
    }
}

/// A message with its proof before it: 32 bytes, and then postcard.
fn sealed<T: Serialize>(
    transcript: &Transcript,
    key: Option<&JobKey>,
    domain: &[u8],
    message: &T,
) -> Result<Vec<u8>, TransferError> {
    let body =
        postcard::to_stdvec(message).map_err(|_| TransferError::Protocol("a message cannot be encoded"))?;
    let mut sealed = ((body.len() + 32) as u32).to_le_bytes().to_vec();
    match key {
        Some(key) => sealed.extend(transcript.mac(key, domain, &body).finalize().into_bytes()),
        None => sealed.extend([0; 32]),
    }
    sealed.extend(body);
    Ok(sealed)
}

/// Splits a sealed message into proof and body.
fn unseal(bytes: &[u8]) -> Result<(&[u8; 32], &[u8]), TransferError> {
    bytes
        .split_first_chunk()
        .ok_or(TransferError::Protocol("a hello is too short"))
}

async fn preludes(conn: &mut Conn, parent: bool) -> Result<Transcript, TransferError> {
    let ours = Prelude::ours();
    let mut theirs = [0; Prelude::LEN];
    if parent {
        conn.write_all(&ours.encode()).await?;
        conn.flush().await?;
        conn.read_exact(&mut theirs).await?;
    } else {
        conn.read_exact(&mut theirs).await?;
        // Said even if the versions turn out not to match, so that the parent can tell as well.
        conn.write_all(&ours.encode()).await?;
        conn.flush().await?;
    }
    let peer = Prelude::decode(&theirs)?;
    ours.agree(&peer)?;
    let preludes = if parent {
        [ours.encode(), theirs]
    } else {
        [theirs, ours.encode()]
    };
    Ok(Transcript {
        preludes,
        binding: conn.binding().copied(),
    })
}

/// The child's side.
///
/// # Errors
/// The refusal, typed, or a parent that is not who it should be.
pub async fn ask(
    conn: &mut Conn,
    key: &JobKey,
    hello: &Hello,
    parent: &NodeName,
) -> Result<Welcome, TransferError> {
    let transcript = preludes(conn, false).await?;
    conn.write_all(&sealed(&transcript, Some(key), HELLO, hello)?)
        .await?;
    conn.flush().await?;
    let bytes = Reader::new(&mut *conn, MAX_HELLO).next_bytes().await?;
    let (proof, body) = unseal(&bytes)?;
    match frame::decode(body)? {
        Answer::Welcome(welcome) => {
            let denied = |what: &str| {
                TransferError::Refused(
                    Failure::new(
                        Code::Denied,
                        format!("what answers at {parent}'s address {what}"),
                        "check that agents announce their own data addresses",
                    )
                    .on(parent),
                )
            };
            let mac = transcript.mac(key, WELCOME, body);
            if mac.verify_slice(proof).is_err() {
                return Err(denied("is no member of the job"));
            }
            if welcome.node != *parent {
                return Err(denied(&format!("is {}", welcome.node)));
            }
            Ok(welcome)
        }
        Answer::Later => Err(TransferError::Later),
        Answer::Busy => Err(TransferError::Busy),
        Answer::Refused(failure) => Err(TransferError::Refused(failure)),
    }
}

/// A child at the door, whose hello was read but not yet believed.
#[derive(Debug)]
pub struct Asked {
    /// What it says.
    pub hello: Hello,
    transcript: Transcript,
    proof: [u8; 32],
    body: Vec<u8>,
}

/// The parent's side, first half: reads the hello. Under TLS the certificate already vouches for the node's name.
///
/// # Errors
/// A peer that speaks no common version, or not the protocol at all, or under another name than its certificate's.
pub async fn listen(conn: &mut Conn) -> Result<Asked, TransferError> {
    let transcript = preludes(conn, true).await?;
    let bytes = Reader::new(&mut *conn, MAX_HELLO).next_bytes().await?;
    let (proof, body) = unseal(&bytes)?;
    let hello: Hello = frame::decode(body)?;
    let asked = Asked {
        transcript,
        proof: *proof,
        body: body.to_vec(),
        hello,
    };
    if let Some(identity) = conn.identity()
        && identity.node() != Some(&asked.hello.node)
    {
        let failure = Failure::new(
            Code::Denied,
            format!(
                "the certificate is that of {identity}, the hello says {}",
                asked.hello.node
            ),
            "give each node the certificate that bears its name",
        );
        asked
            .answer(conn, None, &Answer::Refused(failure.clone()))
            .await?;
        return Err(TransferError::Refused(failure));
    }
    Ok(asked)
}

impl Asked {
    /// Whether the child holds the job's key.
    pub fn proves(&self, key: &JobKey) -> bool {
        self.transcript
            .mac(key, HELLO, &self.body)
            .verify_slice(&self.proof)
            .is_ok()
    }

    /// Lets the connection have what the child wishes for it.
    pub fn grant(&self, conn: &Conn) {
        if let Some(control) = &self.hello.control
            && let Err(error) = conn.set_congestion_control(control.as_str())
        {
            tracing::debug!(child = %self.hello.node, %control, %error, "the kernel's own congestion control has to do");
        }
    }

    /// The parent's side, second half: answers, with a proof of its own if it has the key.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn answer(
        &self,
        conn: &mut Conn,
        key: Option<&JobKey>,
        answer: &Answer,
    ) -> Result<(), TransferError> {
        conn.write_all(&sealed(&self.transcript, key, WELCOME, answer)?)
            .await?;
        conn.flush().await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn prelude(protocol_min: u16, protocol_max: u16) -> Prelude {
        Prelude {
            protocol_min,
            protocol_max,
            features: 0,
            nonce: [7; 32],
        }
    }

    #[test]
    fn versions_meet_or_are_told_apart() {
        assert_eq!(prelude(1, 3).agree(&prelude(2, 9)).unwrap(), 3);
        assert_eq!(prelude(2, 2).agree(&prelude(1, 2)).unwrap(), 2);
        for (a, b) in [((1, 1), (2, 3)), ((2, 3), (1, 1)), ((5, 4), (1, 9))] {
            let refused = prelude(a.0, a.1).agree(&prelude(b.0, b.1)).unwrap_err();
            let failure = refused.into_failure(&"n1".parse().unwrap());
            assert_eq!(failure.code, Code::ProtocolVersion);
        }
    }

    #[test]
    fn a_proof_holds_for_its_own_message_and_place_only() {
        let transcript = |nonce: u8, binding| Transcript {
            preludes: [[nonce; Prelude::LEN], [2; Prelude::LEN]],
            binding,
        };
        let key = JobKey([1; 32]);
        let made = |t: &Transcript, key: &JobKey, domain: &[u8], body: &[u8]| {
            <[u8; 32]>::from(t.mac(key, domain, body).finalize().into_bytes())
        };
        let proof = made(&transcript(1, None), &key, HELLO, b"x");
        for other in [
            made(&transcript(9, None), &key, HELLO, b"x"),
            made(&transcript(1, Some([0; 32])), &key, HELLO, b"x"),
            made(&transcript(1, None), &JobKey([3; 32]), HELLO, b"x"),
            made(&transcript(1, None), &key, WELCOME, b"x"),
            made(&transcript(1, None), &key, HELLO, b"y"),
        ] {
            assert_ne!(proof, other);
        }
        assert_eq!(proof, made(&transcript(1, None), &key, HELLO, b"x"));
    }

    #[test]
    fn the_longest_hello_fits() {
        let hello = Hello {
            job: JobId::from_random([9; 16]),
            hop: HopId::from_random([9; 16]),
            kind: ConnKind::Data { stream: u32::MAX },
            node: "x".repeat(63).parse().unwrap(),
            rank: (Epoch(u64::MAX), PlanVersion(u64::MAX)),
            tried_others: true,
            control: Some("x".repeat(15).parse().unwrap()),
        };
        assert!(postcard::to_stdvec(&hello).unwrap().len() + 32 <= MAX_HELLO / 4);
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_decoder_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Some(fixed) = bytes.first_chunk()
                && let Ok(prelude) = Prelude::decode(fixed)
            {
                prop_assert_eq!(&prelude.encode(), fixed);
            }
            if let Ok((_, body)) = unseal(&bytes) {
                let _ = frame::decode::<Hello>(body);
                let _ = frame::decode::<Answer>(body);
            }
        }
    }
}
