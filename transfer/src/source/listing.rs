//! The digest of a payload of more than one file: that of its sorted `sha256sum` listing, so that anybody can make it
//! with the usual tools.

use sha2::{Digest as _, Sha256};
use stage_core::digest::FileDigest;
use stage_core::manifest::{Entry, Kind};

/// The SHA-256 of the listing: a line for each file, and for each other name of one, in the order of the paths' bytes.
/// `digests` has each file's at its entry's place.
pub(super) fn digest(entries: &[Entry], digests: &[Option<FileDigest>]) -> FileDigest {
    let mut lines: Vec<(&[u8], FileDigest)> = entries
        .iter()
        .zip(digests)
        .filter_map(|(entry, own)| {
            let digest = match entry.kind {
                Kind::File { .. } => (*own)?,
                Kind::HardLink { to } => digests[to as usize]?,
                Kind::Dir | Kind::Symlink { .. } => return None,
            };
            Some((&entry.path[..], digest))
        })
        .collect();
    lines.sort_unstable_by_key(|line| line.0);
    let mut sha256 = Sha256::new();
    let mut line = Vec::new();
    for (path, digest) in lines {
        line.clear();
        write(&mut line, path, digest);
        sha256.update(&line);
    }
    FileDigest(sha256.finalize().into())
}

/// A line as `sha256sum` writes it: where a name has to be escaped, a backslash in front says so.
fn write(line: &mut Vec<u8>, path: &[u8], digest: FileDigest) {
    let is_escaped = path.iter().any(|byte| matches!(byte, b'\\' | b'\n' | b'\r'));
    if is_escaped {
        line.push(b'\\');
    }
    line.extend_from_slice(digest.to_string().as_bytes());
    line.extend_from_slice(b"  ");
    for byte in path {
        match byte {
            b'\\' => line.extend_from_slice(b"\\\\"),
            b'\n' => line.extend_from_slice(b"\\n"),
            b'\r' => line.extend_from_slice(b"\\r"),
            other => line.push(*other),
        }
    }
    line.push(b'\n');
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs;
    use std::os::unix::ffi::OsStrExt as _;
    use std::process::Command;

    use super::*;
    use crate::source::walk::tests::spec_of;
    use crate::source::{Pulse, look};

    #[test]
    fn it_is_what_the_usual_tools_make() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("refdb");
        fs::create_dir_all(tree.join("a/b")).unwrap();
        fs::create_dir(tree.join("empty")).unwrap();
        // In the order of bytes "a!" lies before what is in "a".
        let names: [&[u8]; 9] = [
            b"a!",
            b"a/x",
            b"a/b/y",
            b"Z",
            b"-n",
            b"two\nlines",
            b"back\\slash",
            b"\xff",
            b"a/car\rriage",
        ];
        for name in names {
            fs::write(tree.join(OsStr::from_bytes(name)), name).unwrap();
        }
        fs::hard_link(tree.join("Z"), tree.join("a/linked")).unwrap();
        std::os::unix::fs::symlink("Z", tree.join("link")).unwrap();
        let more = dir.path().join("more.fa");
        fs::write(&more, b"").unwrap();

        let manifest = look(&spec_of(&[&tree, &more]), &Pulse::default())
            .unwrap()
            .manifest;
        let digests: Vec<_> = manifest
            .entries
            .iter()
            .map(|entry| {
                let content = match entry.path.as_slice() {
                    b"more.fa" => b"",
                    _ => entry.below(),
                };
                matches!(entry.kind, Kind::File { .. }).then(|| FileDigest(Sha256::digest(content).into()))
            })
            .collect();
        let command =
            "find refdb more.fa -type f -print0 | LC_ALL=C sort -z | xargs -0r sha256sum | sha256sum";
        let output = Command::new("sh")
            .args(["-c", command])
            .current_dir(dir.path())
            .output()
            .unwrap();
        let theirs = String::from_utf8(output.stdout).unwrap();
        let ours = digest(&manifest.entries, &digests).to_string();
        assert_eq!(theirs.split(' ').next(), Some(ours.as_str()));
    }
}
