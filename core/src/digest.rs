//! Digests: of a chunk, of a manifest, of a whole file, and the root that pins a payload.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::Digest as _;

/// Which function digests chunks. BLAKE3 costs a third of SHA-256 here, and a relay hashes every byte.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ChunkHash {
    /// BLAKE3, the default.
    #[default]
    Blake3,
    /// SHA-256, for sites that must.
    Sha256,
}

macro_rules! digest {
    ($(#[$doc:meta])* $type:ident, $len:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub struct $type(pub [u8; $len]);

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }
        /// The first four bytes, for logs.
        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0[..4].iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
                f.write_str("…")
            }
        }
        impl FromStr for $type {
            type Err = DigestError;
            fn from_str(text: &str) -> Result<Self, DigestError> {
                let fault = || DigestError(text.to_owned(), 2 * $len);
                if text.len() != 2 * $len || !text.is_ascii() {
                    return Err(fault());
                }
                let mut bytes = [0; $len];
                for (i, byte) in bytes.iter_mut().enumerate() {
                    *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).map_err(|_| fault())?;
                }
                Ok(Self(bytes))
            }
        }
    };
}

/// A text that is not so many hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a digest of {1} hexadecimal digits")]
pub struct DigestError(String, usize);

digest!(
    /// The digest of one chunk's bytes, by the job's [`ChunkHash`].
    ChunkDigest,
    32
);
digest!(
    /// The BLAKE3 digest of a manifest's bytes.
    ManifestDigest,
    32
);
digest!(
    /// BLAKE3 over the manifest's digest and the list of chunk digests: who agrees on it agrees on every byte.
    RootDigest,
    32
);
digest!(
    /// SHA-256 of a whole file: what people compare.
    FileDigest,
    32
);

digest!(
    /// MD5 of a whole file: worth nothing against an adversary, but what many publishers ship.
    Md5Digest,
    16
);

/// What a whole file is expected to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Expected {
    /// By its SHA-256, which every source computes.
    Sha256(FileDigest),
    /// By its MD5, which only a source computes that is asked to.
    Md5(Md5Digest),
}

impl Expected {
    /// The name of the function.
    pub fn function(&self) -> &'static str {
        match self {
            Self::Sha256(_) => "sha256",
            Self::Md5(_) => "md5",
        }
    }
}

/// A chunk digest under way.
// The BLAKE3 state is 1.9 KiB against 100 bytes, but there is one of these per stream, reused.
#[expect(clippy::large_enum_variant, reason = "one per stream, on its stack")]
#[derive(Clone)]
pub enum ChunkHasher {
    /// See [`ChunkHash::Blake3`].
    Blake3(blake3::Hasher),
    /// See [`ChunkHash::Sha256`].
    Sha256(sha2::Sha256),
}

impl ChunkHasher {
    /// A hasher that has seen nothing.
    pub fn new(hash: ChunkHash) -> Self {
        match hash {
            ChunkHash::Blake3 => Self::Blake3(blake3::Hasher::new()),
            ChunkHash::Sha256 => Self::Sha256(sha2::Sha256::new()),
        }
    }

    /// Takes in the next bytes of the chunk.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Blake3(hasher) => {
                hasher.update(bytes);
            }
            Self::Sha256(hasher) => hasher.update(bytes),
        }
    }

    /// The digest of all bytes so far; the hasher is then as new.
    pub fn finish(&mut self) -> ChunkDigest {
        match self {
            Self::Blake3(hasher) => {
                let digest = ChunkDigest(*hasher.finalize().as_bytes());
                hasher.reset();
                digest
            }
            Self::Sha256(hasher) => ChunkDigest(hasher.finalize_reset().into()),
        }
    }
}

/// The digest of a chunk that is at hand whole.
pub fn chunk_digest(hash: ChunkHash, bytes: &[u8]) -> ChunkDigest {
    let mut hasher = ChunkHasher::new(hash);
    hasher.update(bytes);
    hasher.finish()
}

/// Computes the root: feed it every chunk's digest in order.
pub struct RootHasher(blake3::Hasher);

impl RootHasher {
    /// Begins with the manifest's digest.
    pub fn new(manifest: ManifestDigest) -> Self {
        // A context of its own, so that a root can never be passed off as another digest of stage.
        let mut hasher = blake3::Hasher::new_derive_key("stage 2026-11 payload root v1");
        hasher.update(&manifest.0);
        Self(hasher)
    }

    /// Takes in the next chunk's digest.
    pub fn push(&mut self, digest: ChunkDigest) {
        self.0.update(&digest.0);
    }

    /// The root.
    pub fn finish(&self) -> RootDigest {
        RootDigest(*self.0.finalize().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published test vectors of both functions, for the empty input and for "abc".
    #[test]
    fn digests_are_the_standard_ones() {
        assert_eq!(
            chunk_digest(ChunkHash::Sha256, b"abc").to_string(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(
            chunk_digest(ChunkHash::Blake3, b"").to_string(),
            "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
        );
    }

    #[test]
    fn a_finished_hasher_is_new_again() {
        for hash in [ChunkHash::Blake3, ChunkHash::Sha256] {
            let mut hasher = ChunkHasher::new(hash);
            hasher.update(b"something else");
            hasher.finish();
            hasher.update(b"a");
            hasher.update(b"bc");
            assert_eq!(hasher.finish(), chunk_digest(hash, b"abc"));
        }
    }

    #[test]
    fn the_root_depends_on_manifest_content_and_order() {
        let root = |manifest: u8, chunks: &[u8]| {
            let mut hasher = RootHasher::new(ManifestDigest([manifest; 32]));
            chunks.iter().for_each(|c| hasher.push(ChunkDigest([*c; 32])));
            hasher.finish()
        };
        assert_eq!(root(1, &[2, 3]), root(1, &[2, 3]));
        assert_ne!(root(1, &[2, 3]), root(1, &[3, 2]));
        assert_ne!(root(1, &[2, 3]), root(2, &[2, 3]));
        assert_ne!(root(1, &[2, 3]), root(1, &[2]));
    }

    #[test]
    fn digests_survive_their_text() {
        let digest = FileDigest([0xa5; 32]);
        assert_eq!(digest.to_string().parse::<FileDigest>().unwrap(), digest);
        assert!("a5".parse::<FileDigest>().is_err());
        assert!("zz".repeat(32).parse::<FileDigest>().is_err());
    }
}
