//! What the disk's errors mean to a person.

use rustix::io::Errno;
use stage_core::failure::{Code, Failure};

/// Turns an error of a system call into a cause: `doing` is a fragment such as "writing".
pub(crate) fn of(errno: Errno, doing: &str, path: &str) -> Failure {
    let failure = match errno {
        Errno::NOSPC => Failure::new(
            Code::NoSpace,
            format!("{doing} failed: the file system is full"),
            "make room there, or push to another root",
        ),
        Errno::DQUOT => Failure::new(
            Code::Quota,
            format!(
                "{doing} failed: the quota of user id {} is used up",
                rustix::process::geteuid().as_raw()
            ),
            "raise the quota of the agent's user or make room",
        ),
        Errno::ROFS => Failure::new(
            Code::ReadOnly,
            format!("{doing} failed: the file system is read-only"),
            "remount it writable; the kernel log says why if it was writable before",
        ),
        Errno::ACCESS | Errno::PERM => Failure::new(
            Code::RootUnusable,
            format!(
                "{doing} failed: user id {} has no permission",
                rustix::process::geteuid().as_raw()
            ),
            "let the agent's user write there",
        ),
        other => Failure::new(
            Code::Io,
            format!("{doing} failed: {}", text(other)),
            "look at the kernel log and the disk of this node, then push again",
        ),
    };
    failure.at(path)
}

/// The system's words for an error, without the number.
pub(crate) fn text(errno: Errno) -> String {
    let text = std::io::Error::from(errno).to_string();
    text.split(" (os error").next().unwrap_or_default().to_lowercase()
}

/// The same for the standard library's errors.
pub(crate) fn of_std(error: &std::io::Error, doing: &str, path: &str) -> Failure {
    match error.raw_os_error() {
        Some(raw) => of(Errno::from_raw_os_error(raw), doing, path),
        None => Failure::new(
            Code::Io,
            format!("{doing} failed: {error}"),
            "look at the disk of this node, then push again",
        )
        .at(path),
    }
}

/// A failure of the agent's own state directory.
pub(crate) fn state(error: &std::io::Error, doing: &str, path: &std::path::Path) -> Failure {
    use std::os::unix::ffi::OsStrExt as _;
    let path = stage_core::failure::show_path(path.as_os_str().as_bytes());
    let mut failure = of_std(error, doing, &path);
    // What is wrong is the state directory, not a root; space there is still space.
    if !matches!(failure.code, Code::NoSpace | Code::Quota) {
        failure.code = Code::State;
    }
    failure.message = format!("in the agent's state directory: {}", failure.message);
    "look after the agent's state directory, then push again".clone_into(&mut failure.hint);
    failure
}

/// A failure to read the source.
pub(crate) fn of_source(error: &std::io::Error) -> Failure {
    let mut failure = of_std(error, "reading the source", "");
    failure.code = Code::SourceIo;
    failure.path = None;
    failure
}
