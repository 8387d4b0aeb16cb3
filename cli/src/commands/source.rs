//! What a push says of its source: the path as the source's node shall open it, this host's addresses, and the
//! digest that the payload is expected to have.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};

use stage_core::digest::Expected;
use stage_core::failure::{Code, Failure, show_path};

use crate::error::Error;

/// The one path that is sent, absolute. Links in it are left to whoever opens it.
///
/// # Errors
/// Several paths, a stream, or a path that ends in no name.
pub(crate) fn path(paths: &[PathBuf]) -> Result<PathBuf, Error> {
    let [path] = paths else {
        return Err(Error::usage(
            format!(
                "{} paths were given, and a push sends one file for now",
                paths.len()
            ),
            "push them one after another, or pack them into one file first",
        ));
    };
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
            "give the path of a file on the source's node",
        )
    })?;
    // Without a slash at the end, which would make a file a directory; `..` stays, it is not ours to resolve.
    let absolute: PathBuf = absolute.components().collect();
    if matches!(absolute.components().next_back(), Some(Component::Normal(_))) {
        Ok(absolute)
    } else {
        Err(Error::usage(
            format!("{} ends in no name that a copy could have", show(path)),
            "give the path of a file",
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

/// The digest that `file` (as `sha256sum` or `md5sum` writes it) has for the payload at `path`.
///
/// # Errors
/// The file cannot be read, has no line for the payload, or more than one that differ.
pub(crate) fn expected(file: &Path, path: &Path) -> Result<Expected, Error> {
    let hint = "make it with `sha256sum FILE > SUMS` where the file is known to be right";
    let text =
        fs::read(file).map_err(|error| Error::usage(format!("--expect {}: {error}", show(file)), hint))?;
    find(&text, path).map_err(|why| Error::usage(format!("--expect {}: {why}", show(file)), hint))
}

fn find(text: &[u8], path: &Path) -> Result<Expected, String> {
    let wanted = path.file_name().unwrap_or_default();
    let mut found: Vec<String> = Vec::new();
    for line in text.split(|byte| *byte == b'\n') {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if let Some((digest, name)) = entry(line)
            && Path::new(OsStr::from_bytes(&name)).file_name() == Some(wanted)
        {
            // A line with the whole path is meant for this file and no other of its name.
            if name == path.as_os_str().as_bytes() {
                found = vec![digest];
                break;
            }
            found.push(digest);
        }
    }
    // Where both are told, the stronger one counts.
    if found.iter().any(|digest| digest.len() == 64) {
        found.retain(|digest| digest.len() == 64);
    }
    found.dedup();
    match &found[..] {
        [] => Err(format!("has no line for {}", show_path(wanted.as_bytes()))),
        [digest] => match digest.len() {
            32 => digest.parse().map(Expected::Md5),
            _ => digest.parse().map(Expected::Sha256),
        }
        .map_err(|error| error.to_string()),
        _ => Err(format!(
            "has several lines for {} that differ",
            show_path(wanted.as_bytes())
        )),
    }
}

/// Digest and file name of a line: `DIGEST  NAME`, `DIGEST *NAME`, or `SHA256 (NAME) = DIGEST`; a line that begins
/// with a backslash has `\n` and `\\` in its name for newline and backslash.
fn entry(line: &[u8]) -> Option<(String, Vec<u8>)> {
    let (escaped, line) = match line.strip_prefix(b"\\") {
        Some(rest) => (true, rest),
        None => (false, line),
    };
    let tagged = [&b"SHA256 ("[..], b"MD5 ("]
        .iter()
        .find_map(|tag| line.strip_prefix(*tag));
    let (digest, name) = match tagged {
        Some(rest) => {
            let at = rest.windows(4).rposition(|window| window == b") = ")?;
            (&rest[at + 4..], &rest[..at])
        }
        None => {
            let end = line.iter().position(|byte| *byte == b' ')?;
            let name = line.get(end + 1..)?;
            let name = name
                .strip_prefix(b" ")
                .or_else(|| name.strip_prefix(b"*"))
                .unwrap_or(name);
            (&line[..end], name)
        }
    };
    if !matches!(digest.len(), 32 | 64) || !digest.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let name = if escaped { unescape(name) } else { name.to_vec() };
    Some((String::from_utf8_lossy(digest).to_ascii_lowercase(), name))
}

fn unescape(name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    let mut bytes = name.iter();
    while let Some(byte) = bytes.next() {
        match (byte, byte == &b'\\') {
            (_, true) => match bytes.next() {
                Some(b'n') => out.push(b'\n'),
                Some(b'r') => out.push(b'\r'),
                Some(other) => out.push(*other),
                None => out.push(b'\\'),
            },
            (other, false) => out.push(*other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    const B: &str = "BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBB";

    fn paths(texts: &[&str]) -> Vec<PathBuf> {
        texts.iter().map(PathBuf::from).collect()
    }

    #[test]
    fn a_path_becomes_absolute_and_stays_unresolved() {
        let here = std::env::current_dir().unwrap();
        assert_eq!(path(&paths(&["a.db"])).unwrap(), here.join("a.db"));
        assert_eq!(path(&paths(&["/x/../a.db/"])).unwrap(), Path::new("/x/../a.db"));
        let codes = |texts: &[&str]| path(&paths(texts)).unwrap_err().exit();
        assert_eq!(codes(&["a", "b"]), 2);
        assert_eq!(codes(&["/"]), 2);
        assert_eq!(codes(&["/a/.."]), 2);
        assert_eq!(codes(&["-"]), 4);
    }

    #[test]
    fn sums_are_found_in_every_form() {
        let path = Path::new("/data/genome.db");
        for text in [
            format!("{A}  genome.db\n"),
            format!("{A} *genome.db\r\n"),
            format!("{B}  other.db\n{A}  ./sub/genome.db\n"),
            format!("SHA256 (genome.db) = {A}\n"),
            format!("{B}  x/genome.db\n{A}  /data/genome.db\n"),
            format!("{A}  genome.db\n{A}  genome.db"),
        ] {
            assert_eq!(
                find(text.as_bytes(), path).unwrap(),
                Expected::Sha256(A.parse().unwrap()),
                "{text}"
            );
        }
        let odd = Path::new("/data/a\nb\\c");
        assert!(find(format!("\\{A}  a\\nb\\\\c\n").as_bytes(), odd).is_ok());
    }

    #[test]
    fn sums_that_do_not_settle_it_are_refused() {
        let path = Path::new("/data/genome.db");
        let fault = |text: &str| find(text.as_bytes(), path).unwrap_err();
        assert!(fault("").contains("no line"));
        assert!(fault(&format!("{A}  other.db\n")).contains("no line"));
        assert!(fault(&format!("{A}  x/genome.db\n{B}  y/genome.db\n")).contains("differ"));
        let md5 = &A[..32];
        for text in [
            format!("{md5}  genome.db\n"),
            format!("MD5 (genome.db) = {md5}\n"),
        ] {
            assert_eq!(
                find(text.as_bytes(), path).unwrap(),
                Expected::Md5(md5.parse().unwrap())
            );
            let both = format!("{text}SHA256 (genome.db) = {A}\n");
            assert_eq!(
                find(both.as_bytes(), path).unwrap(),
                Expected::Sha256(A.parse().unwrap())
            );
        }
    }

    #[test]
    fn the_host_knows_its_loopback() {
        let all = host_addresses().unwrap();
        assert!(all.iter().any(|address| address == "127.0.0.1"), "{all:?}");
    }
}
