//! Which protocol versions this release speaks.

use crate::v1;
use stage_core::failure::{Code, Failure};

/// The lowest control protocol version that this release speaks.
pub const PROTOCOL_MIN: u32 = 1;
/// The highest.
pub const PROTOCOL_MAX: u32 = 1;

/// Our hello.
pub fn hello() -> v1::Hello {
    v1::Hello {
        protocol_min: PROTOCOL_MIN,
        protocol_max: PROTOCOL_MAX,
        features: Vec::new(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

/// The highest version that both sides speak.
///
/// # Errors
/// A [`Code::ProtocolVersion`] failure that names both ranges: the typed refusal, never a decode error.
pub fn agree(theirs: Option<&v1::Hello>) -> Result<u32, Failure> {
    let (min, max, version) = theirs.map_or((0, 0, "unknown"), |hello| {
        (hello.protocol_min, hello.protocol_max, hello.version.as_str())
    });
    let chosen = max.min(PROTOCOL_MAX);
    if min <= max && chosen >= min.max(PROTOCOL_MIN) && chosen > 0 {
        return Ok(chosen);
    }
    Err(Failure::new(
        Code::ProtocolVersion,
        format!(
            "the peer (version {version}) speaks protocol {min} to {max}, this one ({}) {PROTOCOL_MIN} to {PROTOCOL_MAX}",
            env!("CARGO_PKG_VERSION")
        ),
        "install the same or a neighbouring release of stage on both hosts",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(protocol_min: u32, protocol_max: u32) -> v1::Hello {
        v1::Hello {
            protocol_min,
            protocol_max,
            ..v1::Hello::default()
        }
    }

    #[test]
    fn ranges_that_meet_agree() {
        assert_eq!(agree(Some(&hello())), Ok(PROTOCOL_MAX));
        assert_eq!(agree(Some(&range(1, 9))), Ok(PROTOCOL_MAX));
    }

    #[test]
    fn ranges_that_do_not_meet_are_a_typed_refusal() {
        for theirs in [None, Some(range(0, 0)), Some(range(7, 9)), Some(range(3, 1))] {
            assert_eq!(
                agree(theirs.as_ref()).unwrap_err().code,
                Code::ProtocolVersion,
                "{theirs:?}"
            );
        }
    }
}
