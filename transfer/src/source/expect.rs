//! Which file of the payload each line of `--expect` is about.
//!
//! A line names a file by its path in the payload (the unit's name first), by its path below its unit, or by its whole
//! path on the source's node. Of a payload that is a single file, a list may say more: the line that ends in its name
//! counts.

use std::collections::HashMap;

use stage_core::assignment::SourceSpec;
use stage_core::digest::Expected;
use stage_core::failure::{Code, Failure, show_path};
use stage_core::manifest::{Kind, Manifest};
use stage_core::payload::{Expectation, MAX_EXPECT};

/// What an entry's digest must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted {
    /// A file; never one of its other names.
    pub(super) entry: u32,
    pub(super) digest: Expected,
}

/// What the files of a payload are expected to be, in their order.
///
/// # Errors
/// A line is about no file of the payload, or about several.
pub(super) fn resolve(manifest: &Manifest, spec: &SourceSpec) -> Result<Vec<Wanted>, Failure> {
    if spec.expect.is_empty() {
        return Ok(Vec::new());
    }
    if spec.expect.len() > MAX_EXPECT {
        return Err(refused(
            format!("--expect has {} lines", spec.expect.len()),
            format!("give a list of {MAX_EXPECT} lines at most, or push in parts"),
        ));
    }
    if is_single_file(manifest) {
        let digest = of_single(&manifest.entries[0].path, spec)?;
        return Ok(vec![Wanted { entry: 0, digest }]);
    }
    let mut wanted = of_tree(manifest, spec)?;
    wanted.sort_by_key(|wanted| wanted.entry);
    Ok(wanted)
}

/// Whether the payload is one file, and no tree.
pub(super) fn is_single_file(manifest: &Manifest) -> bool {
    matches!(&manifest.entries[..], [only] if matches!(only.kind, Kind::File { .. }))
}

fn refused(message: String, hint: impl Into<String>) -> Failure {
    Failure::new(Code::Usage, message, hint)
}

fn of_single(name: &[u8], spec: &SourceSpec) -> Result<Expected, Failure> {
    let source = spec
        .paths
        .first()
        .map(|path| path.path.as_slice())
        .unwrap_or_default();
    let own = last(source);
    let whole = |expected: &&Expectation| expected.path.is_empty() || expected.path == source;
    let mut found: Vec<Expected> = match spec.expect.iter().find(whole) {
        // A line with the whole path is meant for this file and no other of its name.
        Some(one) => vec![one.digest],
        None => {
            let named = |path: &[u8]| last(path) == own || last(path) == name;
            let lines = spec.expect.iter().filter(|expected| named(&expected.path));
            lines.map(|expected| expected.digest).collect()
        }
    };
    // Where both are told, the stronger one counts.
    if found.iter().any(|digest| matches!(digest, Expected::Sha256(_))) {
        found.retain(|digest| matches!(digest, Expected::Sha256(_)));
    }
    found.dedup();
    let hint = "make it with `sha256sum FILE > SUMS` where the file is known to be right";
    match &found[..] {
        [digest] => Ok(*digest),
        [] => Err(refused(
            format!("--expect has no line for {}", show_path(own)),
            hint,
        )),
        _ => Err(refused(
            format!("--expect has several lines for {} that differ", show_path(own)),
            hint,
        )),
    }
}

fn last(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
}

fn of_tree(manifest: &Manifest, spec: &SourceSpec) -> Result<Vec<Wanted>, Failure> {
    let lines: Vec<Vec<u8>> = spec
        .expect
        .iter()
        .map(|line| in_payload(&line.path, spec))
        .collect();
    // What each path of the list is: by its place in the payload, and else by its place below a unit.
    let mut files: HashMap<&[u8], [Option<u32>; 2]> =
        lines.iter().map(|line| (&line[..], [None; 2])).collect();
    let mut double = None;
    for (entry, index) in manifest.entries.iter().zip(0..) {
        let file = match entry.kind {
            Kind::File { .. } => index,
            Kind::HardLink { to } => to,
            Kind::Dir | Kind::Symlink { .. } => continue,
        };
        if let Some(found) = files.get_mut(entry.path.as_slice()) {
            found[0] = Some(file);
        }
        if let Some(found) = files.get_mut(entry.below())
            && let Some(other) = found[1].replace(file)
            && other != file
        {
            double.get_or_insert((other, file));
        }
    }
    let mut wanted = Vec::with_capacity(lines.len());
    for (line, expected) in lines.iter().zip(&spec.expect) {
        let [in_payload, below] = files[&line[..]];
        let shown = show_path(&expected.path);
        let Some(entry) = in_payload.or(below) else {
            return Err(refused(
                format!("--expect: {shown} names no file of the payload"),
                "write each path as below the pushed directory, or with that directory's name first",
            ));
        };
        let is_double = |(_, file): (u32, u32)| manifest.entries[file as usize].below() == line.as_slice();
        if in_payload.is_none()
            && let Some((one, other)) = double.filter(|pair| is_double(*pair))
        {
            let path = |entry: u32| show_path(&manifest.entries[entry as usize].path);
            return Err(refused(
                format!("--expect: {shown} may be {} or {}", path(one), path(other)),
                "write the path with the pushed directory's name first",
            ));
        }
        wanted.push(Wanted {
            entry,
            digest: expected.digest,
        });
    }
    Ok(wanted)
}

/// A line's path without what does not tell: `./` at its begin, and the directories above the unit.
fn in_payload(path: &[u8], spec: &SourceSpec) -> Vec<u8> {
    let mut rest = path;
    while let Some(after) = rest.strip_prefix(b"./") {
        rest = after;
    }
    if rest.first() != Some(&b'/') {
        return rest.to_vec();
    }
    let units = spec.paths.iter();
    let mut inside = units.filter_map(|unit| {
        let below = rest.strip_prefix(&unit.path[..])?;
        (below.is_empty() || below[0] == b'/').then(|| [&unit.name, below].concat())
    });
    inside.next().unwrap_or_else(|| rest.to_vec())
}

#[cfg(test)]
mod tests {
    use stage_core::digest::{FileDigest, Md5Digest};
    use stage_core::manifest::{Data, Entry};
    use stage_core::payload::{SourcePath, Walk};
    use stage_core::units::ByteCount;

    use super::*;

    fn entry(path: &str, kind: Kind) -> Entry {
        Entry {
            path: path.into(),
            mode: 0o644,
            mtime: (0, 0),
            xattrs: Vec::new(),
            kind,
        }
    }

    fn file(path: &str) -> Entry {
        let (size, data) = (ByteCount(1), Data::Dense);
        entry(path, Kind::File { size, data })
    }

    fn tree() -> Manifest {
        let entries = vec![
            entry("db", Kind::Dir),
            file("db/a"),
            entry("db/b", Kind::HardLink { to: 1 }),
            entry("db/db", Kind::Dir),
            file("db/db/a"),
            entry("db/l", Kind::Symlink { to: b"a".to_vec() }),
            entry("other", Kind::Dir),
            file("other/a"),
            file("other/x"),
        ];
        Manifest { entries }
    }

    fn sha(byte: u8) -> Expected {
        Expected::Sha256(FileDigest([byte; 32]))
    }

    fn spec(units: &[(&str, &str)], lines: &[(&str, Expected)]) -> SourceSpec {
        let units = units.iter().map(|(path, name)| SourcePath {
            path: path.as_bytes().to_vec(),
            name: name.as_bytes().to_vec(),
        });
        let lines = lines.iter().map(|(path, digest)| Expectation {
            path: path.as_bytes().to_vec(),
            digest: *digest,
        });
        SourceSpec {
            paths: units.collect(),
            walk: Walk::default(),
            limit: None,
            expect: lines.collect(),
            cache: Default::default(),
        }
    }

    const UNITS: [(&str, &str); 2] = [("/data/db", "db"), ("/data/old", "other")];

    #[test]
    fn a_line_names_a_file_by_its_place_in_the_payload_or_below_its_unit() {
        let entry = |path: &str| {
            let lines = [(path, sha(1))];
            resolve(&tree(), &spec(&UNITS, &lines)).map(|wanted| wanted[0].entry)
        };
        assert_eq!(entry("db/b"), Ok(1), "another name of the file");
        assert_eq!(entry("./x"), Ok(8));
        assert_eq!(entry("other/a"), Ok(7));
        assert_eq!(entry("/data/old/a"), Ok(7));
        assert_eq!(entry("db/a"), Ok(1), "the place in the payload comes first");
        let refused = |path: &str| entry(path).unwrap_err();
        for none in ["c", "db", "db/l", "/data/x", "", "db/a/"] {
            let failure = refused(none);
            assert_eq!(failure.code, Code::Usage);
            assert!(
                failure.message.contains("names no file of the payload"),
                "{failure}"
            );
        }
        assert!(
            refused("a").message.contains("db/a or other/a"),
            "{}",
            refused("a")
        );
    }

    #[test]
    fn a_single_file_takes_its_line_out_of_a_longer_list() {
        let manifest = Manifest {
            entries: vec![file("new.db")],
        };
        let find = |lines: &[(&str, Expected)]| {
            let wanted = resolve(&manifest, &spec(&[("/data/genome.db", "new.db")], lines));
            wanted.map(|wanted| wanted[0].digest)
        };
        assert_eq!(find(&[("x.db", sha(1)), ("v1/genome.db", sha(2))]), Ok(sha(2)));
        assert_eq!(find(&[("", sha(3))]), Ok(sha(3)));
        assert_eq!(
            find(&[("genome.db", sha(1)), ("/data/genome.db", sha(2))]),
            Ok(sha(2))
        );
        let md5 = Expected::Md5(Md5Digest([1; 16]));
        assert_eq!(find(&[("genome.db", md5), ("./genome.db", sha(2))]), Ok(sha(2)));
        assert_eq!(find(&[("genome.db", md5)]), Ok(md5));
        let why = |lines: &[(&str, Expected)]| find(lines).unwrap_err().message;
        assert!(why(&[("x.db", sha(1))]).contains("no line for genome.db"));
        assert!(why(&[("a/genome.db", sha(1)), ("b/genome.db", sha(2))]).contains("differ"));
    }

    #[test]
    fn a_list_is_bounded() {
        let lines = vec![("db/a", sha(1)); MAX_EXPECT + 1];
        assert!(resolve(&tree(), &spec(&UNITS, &lines[1..])).is_ok());
        let failure = resolve(&tree(), &spec(&UNITS, &lines)).unwrap_err();
        assert!(failure.message.contains("20001 lines"), "{failure}");
    }
}
