//! What one core hashes and encrypts.

use std::hint::black_box;
use std::time::{Duration, Instant};

use rustls::ContentType;
use rustls::ProtocolVersion;
use rustls::crypto::aws_lc_rs::cipher_suite::TLS13_AES_256_GCM_SHA384;
use rustls::crypto::cipher::{AeadKey, Iv, OutboundPlainMessage};
use sha2::{Digest as _, Sha256};
use stage_core::chunk::BLOCK;
use stage_core::units::{ByteCount, Rate};

/// Bytes of a full TLS record.
const RECORD: usize = 16 << 10;

/// Does the work on a block again and again for a while.
fn rate(time: Duration, mut work: impl FnMut(&[u8])) -> Rate {
    let block = vec![0x5a; BLOCK];
    // Pages, caches and the table of the cipher.
    work(&block);
    let begun = Instant::now();
    let mut bytes = 0;
    loop {
        work(&block);
        bytes += BLOCK;
        let spent = begun.elapsed();
        if spent >= time {
            return Rate::of(ByteCount(bytes as u64), spent);
        }
    }
}

/// BLAKE3, block by block as a stream does it.
pub fn blake3(time: Duration) -> Rate {
    let mut hasher = blake3::Hasher::new();
    rate(time, |block| {
        hasher.update(block);
    })
}

/// SHA-256, block by block.
pub fn sha256(time: Duration) -> Rate {
    let mut hasher = Sha256::new();
    rate(time, |block| hasher.update(block))
}

/// AES-256-GCM, record by record, by the very code that TLS connections use. [`Rate::ZERO`] if that has no such cipher.
pub fn aes_gcm(time: Duration) -> Rate {
    let Some(suite) = TLS13_AES_256_GCM_SHA384.tls13() else {
        return Rate::ZERO;
    };
    let mut encrypter = suite
        .aead_alg
        .encrypter(AeadKey::from([7; 32]), Iv::from([3; 12]));
    let mut sequence = 0;
    rate(time, |block| {
        for record in block.chunks(RECORD) {
            let message = OutboundPlainMessage {
                typ: ContentType::ApplicationData,
                version: ProtocolVersion::TLSv1_3,
                payload: record.into(),
            };
            // A record of a legal size is never refused.
            let _ = black_box(encrypter.encrypt(message, sequence));
            sequence += 1;
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_work_has_a_rate() {
        let time = Duration::from_millis(5);
        for (what, rate) in [
            ("blake3", blake3(time)),
            ("sha256", sha256(time)),
            ("aes", aes_gcm(time)),
        ] {
            assert!(rate > Rate::ZERO && rate < Rate::UNLIMITED, "{what}");
        }
    }
}
