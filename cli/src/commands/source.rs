//! What a push says of its source: paths as the source's node shall open them, and this host's addresses.

use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use stage_core::failure::{Code, Failure, show_path};

use crate::error::Error;

/// The paths that are sent, absolute.
///
/// # Errors
/// As [`path`]; or the standard input is among several.
pub(crate) fn paths(paths: &[PathBuf]) -> Result<Vec<PathBuf>, Error> {
    if paths.len() > 1 && paths.iter().any(|path| path.as_os_str() == "-") {
        return Err(Error::usage(
            "the standard input (-) is pushed alone",
            "push it by itself; a file named '-' is ./-",
        ));
    }
    paths.iter().map(|given| path(given)).collect()
}

/// A path that is sent, absolute. Links in it are left to whoever opens it.
///
/// # Errors
/// A stream, or a path that ends in no name.
pub(crate) fn path(path: &Path) -> Result<PathBuf, Error> {
    if path.as_os_str() == "-" {
        return Err(Failure::new(
            Code::SourceKind,
            "nobody can look at the standard input before it is read",
            "give the path of a file; one named '-' is ./-",
        )
        .at("-")
        .into());
    }
    let absolute = std::path::absolute(path).map_err(|error| {
        Error::usage(
            format!("{}: {error}", show(path)),
            "give the path of a file or directory on the source's node",
        )
    })?;
    // Without a slash at the end, which would make a file a directory; `..` stays, it is not ours to resolve.
    let absolute: PathBuf = absolute.components().collect();
    if matches!(absolute.components().next_back(), Some(Component::Normal(_))) {
        Ok(absolute)
    } else {
        Err(Error::usage(
            format!("{} ends in no name that a copy could have", show(path)),
            "give the path of a file or directory",
        ))
    }
}

/// A path as text fit for a terminal.
pub(crate) fn show(path: &Path) -> String {
    show_path(path.as_os_str().as_bytes())
}

/// Addresses of this host that others may know it by, those of the loopback last.
///
/// # Errors
/// The kernel does not tell.
pub(crate) fn host_addresses() -> io::Result<Vec<String>> {
    let mut interfaces = if_addrs::get_if_addrs()?;
    interfaces.retain(|interface| !interface.is_link_local());
    interfaces.sort_by_key(if_addrs::Interface::is_loopback);
    Ok(interfaces
        .iter()
        .map(|interface| interface.ip().to_string())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_becomes_absolute_and_stays_unresolved() {
        let here = std::env::current_dir().unwrap();
        let absolute = |text: &str| path(Path::new(text));
        assert_eq!(absolute("a.db").unwrap(), here.join("a.db"));
        assert_eq!(absolute("refdb/").unwrap(), here.join("refdb"));
        assert_eq!(absolute(".").unwrap(), here);
        assert_eq!(absolute("/x/../a.db/").unwrap(), Path::new("/x/../a.db"));
        let exit = |text: &str| absolute(text).unwrap_err().exit();
        assert_eq!((exit("/"), exit("/a/.."), exit("-")), (2, 2, 4));
        let all = |texts: &[&str]| paths(&texts.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(all(&["/a", "/b/"]).unwrap(), [Path::new("/a"), Path::new("/b")]);
        assert_eq!(all(&["/a", "-"]).unwrap_err().exit(), 2);
    }

    #[test]
    fn the_host_knows_its_loopback() {
        let all = host_addresses().unwrap();
        assert!(all.iter().any(|address| address == "127.0.0.1"), "{all:?}");
    }
}
