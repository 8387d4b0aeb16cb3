//! The exit codes, in one table. What a job's end amounts to is decided by the coordinator (it comes with the job);
//! here is what each cause amounts to when there is no job to speak of.
//!
//! | exit | case |
//! |---|---|
//! | 0 | done |
//! | 1 | anything else |
//! | 2 | bad flag, unknown or empty target, no source node, errors in a topology |
//! | 3 | no coordinator |
//! | 4 | refused before a byte moved: source missing or unreadable, no target fit; no agent on this host; `path`, `verify`: not there |
//! | 5 | some targets published, some not |
//! | 6 | none published |
//! | 7 | cancelled |
//! | 75 | a daemon was fenced |
//! | 78 | a daemon's configuration is wrong |
//! | 130 | Ctrl-C |

use stage_core::failure::Code;

/// Every target has it.
pub(crate) const DONE: u8 = 0;
/// No case of its own.
pub(crate) const OTHER: u8 = 1;
/// The request itself is wrong.
pub(crate) const USAGE: u8 = 2;
/// The coordinator does not answer.
pub(crate) const NO_COORDINATOR: u8 = 3;
/// Refused before a byte moved.
pub(crate) const REFUSED: u8 = 4;
/// Some published, some not.
pub(crate) const PARTLY: u8 = 5;
/// None published.
pub(crate) const NONE: u8 = 6;
/// Cancelled.
pub(crate) const CANCELLED: u8 = 7;
/// Bad configuration of a daemon (`EX_CONFIG`).
pub(crate) const CONFIG: u8 = 78;
/// Ctrl-C.
pub(crate) const INTERRUPTED: u8 = 130;

/// Whether a job that ended so is reported as `finished`; else as `error`.
pub(crate) fn is_finished(exit: u8) -> bool {
    matches!(exit, DONE | PARTLY | NONE | CANCELLED)
}

/// The exit code of a request that was refused for this reason.
pub(crate) fn of(code: Code) -> u8 {
    match code {
        Code::Usage | Code::UnknownTarget | Code::NoSource | Code::UnknownJob | Code::Config => USAGE,
        Code::NoCoordinator => NO_COORDINATOR,
        Code::NoAgent
        | Code::SourceMissing
        | Code::SourceUnreadable
        | Code::SourceKind
        | Code::SourceIo
        | Code::Away
        | Code::Drained
        | Code::RootUnusable
        | Code::OutsideRoot
        | Code::NameTooLong
        | Code::NoSpace
        | Code::Quota
        | Code::ReadOnly
        | Code::Exists
        | Code::NotHere
        | Code::WrongKind => REFUSED,
        Code::SourceChanged | Code::SourceLost | Code::Corrupt | Code::Unexpected => NONE,
        Code::Cancelled => CANCELLED,
        Code::Interrupted => INTERRUPTED,
        Code::Io
        | Code::Busy
        | Code::Unreachable
        | Code::Denied
        | Code::NameTaken
        | Code::ForeignCluster
        | Code::ProtocolVersion
        | Code::Fenced
        | Code::Superseded
        | Code::State
        | Code::Internal => OTHER,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_end_as_the_table_says() {
        for (code, exit) in [
            (Code::Usage, 2),
            (Code::UnknownTarget, 2),
            (Code::NoSource, 2),
            (Code::NoCoordinator, 3),
            (Code::SourceMissing, 4),
            (Code::NotHere, 4),
            (Code::NoAgent, 4),
            (Code::SourceUnreadable, 4),
            (Code::SourceKind, 4),
            (Code::NoSpace, 4),
            (Code::SourceChanged, 6),
            (Code::SourceLost, 6),
            (Code::Cancelled, 7),
            (Code::Internal, 1),
            (Code::ProtocolVersion, 1),
        ] {
            assert_eq!(of(code), exit, "{code}");
        }
    }

    #[test]
    fn only_these_ends_are_finished() {
        let finished: Vec<u8> = (0..=u8::MAX).filter(|exit| is_finished(*exit)).collect();
        assert_eq!(finished, [0, 5, 6, 7]);
    }
}
