//! Where a payload lies, as people write it: `ROOT:DIR`, or an absolute directory that lies in a root.

use crate::assignment::Place;
use crate::failure::{Code, Failure, show_path};
use crate::id::RootName;

impl Place {
    /// From a `--dest`: nothing (the first root), `ROOT:DIR`, or an absolute directory.
    ///
    /// # Errors
    /// [`Code::Usage`]: it is neither, leads upwards, or has a part that is stage's own.
    pub fn parse(dest: &[u8]) -> Result<Self, Failure> {
        let fault = |why: &str| {
            Failure::new(
                Code::Usage,
                format!("destination \"{}\" {why}", show_path(dest)),
                "write ROOT:DIR, or an absolute directory that lies in a root",
            )
        };
        if dest.contains(&0) {
            return Err(fault("contains a zero byte"));
        }
        let clean = |dir: &[u8]| -> Result<Vec<u8>, Failure> {
            let parts: Vec<&[u8]> = dir
                .split(|byte| *byte == b'/')
                .filter(|part| !part.is_empty() && *part != b".")
                .collect();
            if parts.iter().any(|part| *part == b"..") {
                return Err(fault("leads upwards with \"..\""));
            }
            if parts.iter().any(|part| part.starts_with(b".stage")) {
                return Err(fault("has a part that begins with .stage, which is stage's own"));
            }
            Ok(parts.join(&b'/'))
        };
        if dest.is_empty() {
            return Ok(Self::Root {
                root: None,
                dir: Vec::new(),
            });
        }
        if dest[0] == b'/' {
            let mut dir = vec![b'/'];
            dir.extend(clean(dest)?);
            return Ok(Self::Absolute(dir));
        }
        let colon = dest
            .iter()
            .position(|byte| *byte == b':')
            .ok_or_else(|| fault("is neither ROOT:DIR nor absolute"))?;
        let root: RootName = std::str::from_utf8(&dest[..colon])
            .ok()
            .and_then(|name| name.parse().ok())
            .ok_or_else(|| fault("does not begin with the name of a root"))?;
        Ok(Self::Root {
            root: Some(root),
            dir: clean(&dest[colon + 1..])?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_root_or_absolute() {
        assert_eq!(
            Place::parse(b"scratch:/db//x/./y/").unwrap(),
            Place::Root {
                root: Some("scratch".parse().unwrap()),
                dir: b"db/x/y".to_vec()
            }
        );
        assert_eq!(
            Place::parse(b"/scratch//db/").unwrap(),
            Place::Absolute(b"/scratch/db".to_vec())
        );
        assert!(matches!(Place::parse(b""), Ok(Place::Root { root: None, .. })));
        for bad in [
            "db",
            ":x",
            "a b:x",
            "s:../x",
            "/a/../b",
            "s:.stage",
            "s:a/.stage-1",
            "s:\0",
        ] {
            assert_eq!(
                Place::parse(bad.as_bytes()).unwrap_err().code,
                Code::Usage,
                "{bad:?}"
            );
        }
    }
}
