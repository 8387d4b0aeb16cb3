//! Payloads and what is asked of a source, on the wire and in the core's words.

use stage_core::digest::{Expected, FileDigest, ManifestDigest, Md5Digest};
use stage_core::payload::{
    Expectation, INLINE_MANIFEST, MAX_UNITS, Payload, SourcePath, Unit, UnitKind, Walk,
};
use stage_core::units::ByteCount;

use crate::convert::{WireError, array, fault};
use crate::v1;

impl From<&Payload> for v1::Payload {
    fn from(payload: &Payload) -> Self {
        Self {
            manifest: payload.manifest.0.to_vec(),
            manifest_bytes: payload.manifest_len.0,
            inline: payload.inline.clone().unwrap_or_default(),
            data_bytes: payload.data.0,
            file_bytes: payload.size.0,
            allocated_bytes: payload.allocated.0,
            entries: payload.entries,
            units: payload
                .units
                .iter()
                .map(|unit| v1::Unit {
                    name: unit.name.clone(),
                    tree: unit.kind == UnitKind::Tree,
                    file_bytes: unit.size.0,
                })
                .collect(),
        }
    }
}

impl TryFrom<&v1::Payload> for Payload {
    type Error = WireError;
    fn try_from(wire: &v1::Payload) -> Result<Self, WireError> {
        let whole = wire.inline.is_empty() || wire.inline.len() as u64 == wire.manifest_bytes;
        if wire.inline.len() > INLINE_MANIFEST || !whole {
            return Err(fault("payload.inline", "is not the manifest"));
        }
        if wire.units.is_empty() || wire.units.len() > MAX_UNITS {
            return Err(fault("payload.units", "are none, or too many"));
        }
        let payload = Self {
            manifest: ManifestDigest(array("payload.manifest", &wire.manifest)?),
            manifest_len: ByteCount(wire.manifest_bytes),
            inline: (!wire.inline.is_empty()).then(|| wire.inline.clone()),
            data: ByteCount(wire.data_bytes),
            size: ByteCount(wire.file_bytes),
            allocated: ByteCount(wire.allocated_bytes),
            entries: wire.entries,
            units: wire
                .units
                .iter()
                .map(|unit| Unit {
                    name: unit.name.clone(),
                    kind: if unit.tree { UnitKind::Tree } else { UnitKind::File },
                    size: ByteCount(unit.file_bytes),
                })
                .collect(),
        };
        if payload.layout().is_none() {
            return Err(fault("payload", "is larger than stage can move"));
        }
        Ok(payload)
    }
}

impl From<&SourcePath> for v1::SourcePath {
    fn from(path: &SourcePath) -> Self {
        Self {
            path: path.path.clone(),
            name: path.name.clone(),
        }
    }
}

impl From<&v1::SourcePath> for SourcePath {
    fn from(wire: &v1::SourcePath) -> Self {
        Self {
            path: wire.path.clone(),
            name: wire.name.clone(),
        }
    }
}

impl From<&Walk> for v1::Walk {
    fn from(walk: &Walk) -> Self {
        Self {
            follow: walk.follow,
            xattrs: walk.xattrs,
            include: walk.include.clone(),
            exclude: walk.exclude.clone(),
        }
    }
}

impl From<&v1::Walk> for Walk {
    fn from(wire: &v1::Walk) -> Self {
        Self {
            follow: wire.follow,
            xattrs: wire.xattrs,
            include: wire.include.clone(),
            exclude: wire.exclude.clone(),
        }
    }
}

impl From<&Expectation> for v1::Expectation {
    fn from(expected: &Expectation) -> Self {
        let (sha256, md5) = match expected.digest {
            Expected::Sha256(digest) => (digest.0.to_vec(), Vec::new()),
            Expected::Md5(digest) => (Vec::new(), digest.0.to_vec()),
        };
        Self {
            path: expected.path.clone(),
            sha256,
            md5,
        }
    }
}

impl TryFrom<&v1::Expectation> for Expectation {
    type Error = WireError;
    fn try_from(wire: &v1::Expectation) -> Result<Self, WireError> {
        let digest = match (wire.sha256.as_slice(), wire.md5.as_slice()) {
            (sha256, []) => Expected::Sha256(FileDigest(array("expect.sha256", sha256)?)),
            ([], md5) => Expected::Md5(Md5Digest(array("expect.md5", md5)?)),
            _ => return Err(fault("expect", "has two digests")),
        };
        Ok(Self {
            path: wire.path.clone(),
            digest,
        })
    }
}
