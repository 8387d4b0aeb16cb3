//! The wire after the handshake: control messages of both directions, and the header before a chunk's bytes.
//!
//! A control message is a length (u32, little-endian, at most [`MAX_MESSAGE`]) and so many bytes of postcard. A data
//! frame is a fixed header and the chunk. Every length is checked before anything is allocated for it.

use std::io;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use stage_core::chunk::{ChunkIndex, Layout};
use stage_core::digest::ChunkDigest;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use crate::error::TransferError;

/// The longest control message.
pub const MAX_MESSAGE: usize = 64 << 10;
/// The most entries in one message: 1500 digests are 48 KiB, and as many runs of two numbers at most 15 KiB.
pub const MAX_BATCH: usize = 1500;

/// From a child to its parent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToParent {
    /// Runs (begin, end) of chunks that the child has: pages of its have-set, before [`ToParent::Start`].
    Have(Vec<(u32, u32)>),
    /// The have-set is complete: send what is not in it.
    Start {
        /// Digests first, bytes only for what [`ToParent::Want`] then names.
        offers: bool,
    },
    /// These chunks are kept now, whoever sent them.
    Kept(Vec<ChunkIndex>),
    /// The bytes of these chunks are wanted: the answer to an offer, or taken back what was kept or written before.
    Want(Vec<ChunkIndex>),
    /// This data connection is over: what was written to it and is not kept is wanted again.
    StreamEnded {
        /// Its number.
        stream: u32,
    },
    /// Asks for digests, answered by [`ToChild::Digests`].
    Digests {
        /// The first chunk.
        from: ChunkIndex,
        /// How many, [`MAX_BATCH`] at most.
        count: u32,
    },
    /// The child lives.
    Beat,
    /// The child has all, or goes to another parent.
    Leaving,
}

/// From a parent to its child.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToChild {
    /// These chunks are here: keep what you have already, and say what you want.
    Offer(Vec<(ChunkIndex, ChunkDigest)>),
    /// Digests of a run of chunks. None at all: not everything is here.
    Digests {
        /// The first chunk.
        from: ChunkIndex,
        /// Its digest and those that follow.
        digests: Vec<ChunkDigest>,
    },
    /// The parent lives, and this is how far the count had come that reached it.
    Beat(Beat),
    /// The parent goes away: find another.
    Leaving,
    /// Each second: how much of it the threads that send to this child waited for room in their sockets.
    Pushed {
        /// In thousandths of their time.
        permille: u16,
    },
}

/// A count that only the source, or a holder of everything, advances.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beat {
    /// Who counts, by a number drawn at random.
    pub origin: u64,
    /// Seconds counted.
    pub count: u64,
    /// What the bytes wait for at the top, if they do.
    pub waits: Waits,
}

/// What the bytes wait for.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Waits {
    /// Nothing known.
    #[default]
    Nothing,
    /// The source cannot be read any faster.
    Source,
    /// A limit that someone set.
    Limit,
    /// A disk on the way.
    Disk,
}

/// Writes one message.
///
/// # Errors
/// The connection broke, or the message is longer than [`MAX_MESSAGE`].
pub async fn send<T: Serialize>(
    to: &mut (impl AsyncWrite + Unpin),
    message: &T,
) -> Result<(), TransferError> {
    let framed = encode(message)?;
    to.write_all(&framed).await?;
    to.flush().await?;
    Ok(())
}

/// The bytes of one message, its length before it.
///
/// # Errors
/// The message is longer than [`MAX_MESSAGE`].
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, TransferError> {
    let mut framed = vec![0; 4];
    framed = postcard::to_extend(message, framed)
        .map_err(|_| TransferError::Protocol("a message cannot be encoded"))?;
    let len = framed.len() - 4;
    if len > MAX_MESSAGE {
        return Err(TransferError::Protocol("a message is too long"));
    }
    framed[..4].copy_from_slice(&(len as u32).to_le_bytes());
    Ok(framed)
}

/// Decodes the bytes of one message, without its length.
///
/// # Errors
/// They are no such message, or more follow it.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, TransferError> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok(_) => Err(TransferError::Protocol("bytes follow a message")),
        Err(_) => Err(TransferError::Protocol("a message cannot be decoded")),
    }
}

/// Reads messages. A cancelled [`Reader::next`] loses nothing.
#[derive(Debug)]
pub struct Reader<R> {
    from: R,
    bytes: Vec<u8>,
    limit: usize,
}

impl<R: AsyncRead + Unpin> Reader<R> {
    /// Reads messages of at most `limit` bytes from here.
    pub fn new(from: R, limit: usize) -> Self {
        Self {
            from,
            bytes: Vec::new(),
            limit: limit.min(MAX_MESSAGE),
        }
    }

    /// The next message's bytes.
    ///
    /// # Errors
    /// The connection broke or ended, or a length is over the limit.
    pub async fn next_bytes(&mut self) -> Result<Vec<u8>, TransferError> {
        loop {
            let wanted = match self.bytes.first_chunk::<4>() {
                None => 4,
                Some(len) => {
                    let len = u32::from_le_bytes(*len) as usize;
                    if len > self.limit {
                        return Err(TransferError::Protocol("a message is too long"));
                    }
                    if self.bytes.len() == 4 + len {
                        return Ok(std::mem::take(&mut self.bytes).split_off(4));
                    }
                    4 + len
                }
            };
            // Exactly what belongs to this message: what follows may be for another reader.
            let missing = (wanted - self.bytes.len()) as u64;
            let read = (&mut self.from).take(missing).read_buf(&mut self.bytes).await?;
            if read == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
        }
    }

    /// The next message.
    ///
    /// # Errors
    /// As [`Reader::next_bytes`], or the bytes are no such message.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<T, TransferError> {
        decode(&self.next_bytes().await?)
    }
}

/// What stands before a chunk's bytes on a data connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Which chunk.
    pub index: ChunkIndex,
    /// How many bytes follow.
    pub len: u32,
    /// Their digest, as the source computed it.
    pub digest: ChunkDigest,
}

impl Header {
    /// Bytes of a header.
    pub const LEN: usize = 41;
    const KIND: u8 = 0xc1;

    /// The header's bytes.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0] = Self::KIND;
        bytes[1..5].copy_from_slice(&self.index.0.to_le_bytes());
        bytes[5..9].copy_from_slice(&self.len.to_le_bytes());
        bytes[9..].copy_from_slice(&self.digest.0);
        bytes
    }

    /// Reads a header and holds it against the layout.
    ///
    /// # Errors
    /// No header, no chunk of the payload, or another length than that chunk has.
    pub fn decode(bytes: &[u8; Self::LEN], layout: Layout) -> Result<Self, TransferError> {
        let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let (index, len) = (ChunkIndex(number(1)), number(5));
        if bytes[0] != Self::KIND {
            return Err(TransferError::Protocol("a data frame is of no known kind"));
        }
        if !layout.contains(index) {
            return Err(TransferError::Protocol("a chunk past the payload's end"));
        }
        // Of an open stream any chunk may turn out to be the last, and shorter.
        let short = layout.is_open() && len > 0 && (len as usize) < layout.len(index);
        if len as usize != layout.len(index) && !short {
            return Err(TransferError::Protocol(
                "a chunk of another length than the payload's",
            ));
        }
        let mut digest = [0; 32];
        digest.copy_from_slice(&bytes[9..]);
        Ok(Self {
            index,
            len,
            digest: ChunkDigest(digest),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use stage_core::units::ByteCount;

    use super::*;

    #[test]
    fn the_fullest_messages_fit() {
        let digest = ChunkDigest([0xff; 32]);
        let top = u32::MAX;
        encode(&ToChild::Offer(vec![(ChunkIndex(top), digest); MAX_BATCH])).unwrap();
        encode(&ToChild::Digests {
            from: ChunkIndex(top),
            digests: vec![digest; MAX_BATCH],
        })
        .unwrap();
        encode(&ToParent::Have(vec![(top, top); MAX_BATCH])).unwrap();
        encode(&ToParent::Want(vec![ChunkIndex(top); MAX_BATCH])).unwrap();
    }

    #[tokio::test]
    async fn a_claimed_length_is_refused_before_it_is_believed() {
        let mut reader = Reader::new(&[0xff, 0xff, 0xff, 0x7f, 1, 2, 3][..], 512);
        assert!(matches!(
            reader.next_bytes().await,
            Err(TransferError::Protocol(_))
        ));
        assert!(reader.bytes.capacity() < 1024);
    }

    #[tokio::test]
    async fn messages_come_back_whatever_the_pieces() {
        let messages = [
            ToParent::Beat,
            ToParent::Kept(vec![ChunkIndex(7), ChunkIndex(1 << 30)]),
            ToParent::Start { offers: true },
        ];
        let bytes: Vec<u8> = messages.iter().flat_map(|m| encode(m).unwrap()).collect();
        for piece in [1, 2, 3, 5, 100] {
            let (mut from, to) = tokio::io::duplex(piece);
            let bytes = bytes.clone();
            let writer = tokio::spawn(async move { from.write_all(&bytes).await });
            let mut reader = Reader::new(to, MAX_MESSAGE);
            for message in &messages {
                assert_eq!(&reader.next::<ToParent>().await.unwrap(), message);
            }
            writer.await.unwrap().unwrap();
            assert!(reader.next_bytes().await.is_err());
        }
    }

    #[test]
    fn headers_are_held_against_the_layout() {
        let layout = Layout::new(ByteCount((1 << 20) + 5)).unwrap();
        let good = Header {
            index: ChunkIndex(1),
            len: 5,
            digest: ChunkDigest([3; 32]),
        };
        assert_eq!(Header::decode(&good.encode(), layout).unwrap(), good);
        for bad in [
            Header {
                index: ChunkIndex(2),
                len: 0,
                ..good
            },
            Header { len: 6, ..good },
            Header {
                len: u32::MAX,
                ..good
            },
            Header {
                index: ChunkIndex(0),
                ..good
            },
        ] {
            assert!(Header::decode(&bad.encode(), layout).is_err(), "{bad:?}");
        }
        let mut bytes = good.encode();
        bytes[0] = 0;
        assert!(Header::decode(&bytes, layout).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_decoder_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode::<ToParent>(&bytes);
            let _ = decode::<ToChild>(&bytes);
            let layout = Layout::new(ByteCount(10 << 20)).unwrap();
            if let Some(header) = bytes.first_chunk()
                && let Ok(header) = Header::decode(header, layout)
            {
                prop_assert_eq!(header.len as usize, layout.len(header.index));
            }
        }
    }
}
