//! `--expect`: the digests in a list as `sha256sum` or `md5sum` writes it.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use stage_core::digest::Expected;
use stage_core::failure::show_path;
use stage_core::payload::{Expectation, MAX_EXPECT, MAX_EXPECT_BYTES};

use super::source::show;
use crate::error::Error;

/// What a list says of the one file that is pushed; or, of directories, all that it says: the source finds out which file
/// each line is about.
///
/// # Errors
/// The list cannot be read, says nothing of the file, says two things of one file, or is too long.
pub(crate) fn read(list: &Path, only: Option<&Path>) -> Result<Vec<Expectation>, Error> {
    let refused = |why: String| {
        Error::usage(
            format!("--expect {}: {why}", show(list)),
            "make it with `sha256sum FILE... > SUMS` where the files are known to be right",
        )
    };
    let text = fs::read(list).map_err(|error| refused(error.to_string()))?;
    match only {
        Some(path) => {
            let digest = of_one(&text, path).map_err(refused)?;
            let path = Vec::new();
            Ok(vec![Expectation { path, digest }])
        }
        None => of_all(&text).map_err(refused),
    }
}

fn lines(text: &[u8]) -> impl Iterator<Item = Expectation> {
    // Editors of other systems put a mark of the encoding before it.
    let text = text.strip_prefix("\u{feff}".as_bytes()).unwrap_or(text);
    text.split(|byte| *byte == b'\n')
        .map(|line| line.strip_suffix(b"\r").unwrap_or(line))
        .filter_map(entry)
}

fn of_all(text: &[u8]) -> Result<Vec<Expectation>, String> {
    let mut all: Vec<Expectation> = Vec::new();
    let mut places: HashMap<Vec<u8>, usize> = HashMap::new();
    let mut bytes = 0;
    for line in lines(text) {
        let Some(at) = places.get(&line.path) else {
            bytes += line.path.len();
            if all.len() >= MAX_EXPECT || bytes > MAX_EXPECT_BYTES {
                return Err(format!(
                    "it is longer than {MAX_EXPECT} lines or {} MiB of names",
                    MAX_EXPECT_BYTES >> 20
                ));
            }
            places.insert(line.path.clone(), all.len());
            all.push(line);
            continue;
        };
        // Where both are told, the stronger one counts.
        let known = &mut all[*at];
        match (known.digest, line.digest) {
            (one, other) if one == other => {}
            (Expected::Md5(_), Expected::Sha256(_)) => *known = line,
            (Expected::Sha256(_), Expected::Md5(_)) => {}
            _ => {
                return Err(format!(
                    "has several lines for {} that differ",
                    show_path(&line.path)
                ));
            }
        }
    }
    if all.is_empty() {
        return Err("has no line with a SHA-256 or MD5 digest".to_owned());
    }
    Ok(all)
}

fn of_one(text: &[u8], path: &Path) -> Result<Expected, String> {
    let wanted = path.file_name().unwrap_or_default();
    let mut found: Vec<Expected> = Vec::new();
    for line in lines(text) {
        if Path::new(OsStr::from_bytes(&line.path)).file_name() == Some(wanted) {
            // A line with the whole path is meant for this file and no other of its name.
            if line.path == path.as_os_str().as_bytes() {
                found = vec![line.digest];
                break;
            }
            found.push(line.digest);
        }
    }
    // Where both are told, the stronger one counts.
    let is_strong = |digest: &Expected| matches!(digest, Expected::Sha256(_));
    if found.iter().any(is_strong) {
        found.retain(is_strong);
    }
    found.dedup();
    match &found[..] {
        [digest] => Ok(*digest),
        [] => Err(format!("has no line for {}", show_path(wanted.as_bytes()))),
        _ => Err(format!(
            "has several lines for {} that differ",
            show_path(wanted.as_bytes())
        )),
    }
}

/// Digest and file name of a line: `DIGEST  NAME`, `DIGEST *NAME`, or `SHA256 (NAME) = DIGEST`; a line that begins
/// with a backslash has `\n` and `\\` in its name for newline and backslash.
fn entry(line: &[u8]) -> Option<Expectation> {
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
    let digest = std::str::from_utf8(digest).ok()?;
    let digest = match digest.len() {
        32 => digest.parse().map(Expected::Md5).ok()?,
        _ => digest.parse().map(Expected::Sha256).ok()?,
    };
    let path = if escaped { unescape(name) } else { name.to_vec() };
    Some(Expectation { path, digest })
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

    #[test]
    fn sums_are_found_in_every_form() {
        let path = Path::new("/data/genome.db");
        for text in [
            format!("{A}  genome.db\n"),
            format!("{A} *genome.db\r\n"),
            format!("\u{feff}{A}  genome.db\r\n"),
            format!("{B}  other.db\n{A}  ./sub/genome.db\n"),
            format!("SHA256 (genome.db) = {A}\n"),
            format!("{B}  x/genome.db\n{A}  /data/genome.db\n"),
            format!("{A}  genome.db\n{A}  genome.db"),
        ] {
            assert_eq!(
                of_one(text.as_bytes(), path).unwrap(),
                Expected::Sha256(A.parse().unwrap()),
                "{text}"
            );
        }
        let odd = Path::new("/data/a\nb\\c");
        assert!(of_one(format!("\\{A}  a\\nb\\\\c\n").as_bytes(), odd).is_ok());
    }

    #[test]
    fn sums_that_do_not_settle_it_are_refused() {
        let path = Path::new("/data/genome.db");
        let fault = |text: &str| of_one(text.as_bytes(), path).unwrap_err();
        assert!(fault("").contains("no line"));
        assert!(fault(&format!("{A}  other.db\n")).contains("no line"));
        assert!(fault(&format!("{A}  x/genome.db\n{B}  y/genome.db\n")).contains("differ"));
        let md5 = &A[..32];
        for text in [
            format!("{md5}  genome.db\n"),
            format!("MD5 (genome.db) = {md5}\n"),
        ] {
            assert_eq!(
                of_one(text.as_bytes(), path).unwrap(),
                Expected::Md5(md5.parse().unwrap())
            );
            let both = format!("{text}SHA256 (genome.db) = {A}\n");
            assert_eq!(
                of_one(both.as_bytes(), path).unwrap(),
                Expected::Sha256(A.parse().unwrap())
            );
        }
    }

    #[test]
    fn of_directories_every_line_counts_once() {
        let md5 = &A[..32];
        let text = format!(
            "\u{feff}# a remark\n{md5}  db/a\n{A}  db/a\n{md5}  db/a\n{B} *./db/b\n\nSHA256 (c) = {A}\n\\{A}  two\\nlines\n"
        );
        let all = of_all(text.as_bytes()).unwrap();
        let paths: Vec<_> = all.iter().map(|line| line.path.as_slice()).collect();
        assert_eq!(paths, [&b"db/a"[..], b"./db/b", b"c", b"two\nlines"]);
        assert_eq!(all[0].digest, Expected::Sha256(A.parse().unwrap()));
        assert_eq!(all[1].digest, Expected::Sha256(B.parse().unwrap()));
        let fault = |text: &str| of_all(text.as_bytes()).unwrap_err();
        assert!(fault("nothing\n").contains("no line"));
        assert!(fault(&format!("{A}  a\n{B}  a\n")).contains("differ"));
    }

    #[test]
    fn a_list_is_bounded() {
        let list = |lines: usize| -> String { (0..lines).map(|at| format!("{A}  {at}\n")).collect() };
        assert_eq!(of_all(list(MAX_EXPECT).as_bytes()).unwrap().len(), MAX_EXPECT);
        assert!(
            of_all(list(MAX_EXPECT + 1).as_bytes())
                .unwrap_err()
                .contains("longer")
        );
        let long = format!("{A}  {}\n", "x".repeat(MAX_EXPECT_BYTES + 1));
        assert!(of_all(long.as_bytes()).is_err());
    }
}
