//! The encoding of a manifest, and what is refused in one.

use serde::{Deserialize, Serialize};

use super::{Data, Entry, Kind, MAX_MANIFEST, MAX_NAME, MAX_PATH, Manifest, ManifestError, path_order};
use crate::chunk::MAX_PAYLOAD;
use crate::units::ByteCount;

const MAGIC: &[u8; 8] = b"stageM2\n";

/// An entry as it is encoded: postcard, so that numbers are as short as they can be, and of a path only what differs from
/// the one before.
#[derive(Serialize, Deserialize)]
struct Line<'a> {
    shared: u16,
    rest: &'a [u8],
    mode: u16,
    mtime: (i64, u32),
    #[serde(borrow)]
    xattrs: Vec<(&'a [u8], &'a [u8])>,
    #[serde(borrow)]
    kind: LineKind<'a>,
}

#[derive(Serialize, Deserialize)]
enum LineKind<'a> {
    Dir,
    File(u64),
    /// Size; then for each run the hole before it and its length.
    Sparse(u64, Vec<(u64, u64)>),
    Symlink(&'a [u8]),
    HardLink(u32),
}

impl Manifest {
    /// The bytes that stand for it.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        let mut before: &[u8] = b"";
        for entry in &self.entries {
            let shared = before.iter().zip(&entry.path).take_while(|(a, b)| a == b).count();
            let line = Line {
                shared: shared as u16,
                rest: &entry.path[shared..],
                mode: entry.mode as u16,
                mtime: entry.mtime,
                xattrs: entry.xattrs.iter().map(|(k, v)| (&k[..], &v[..])).collect(),
                kind: LineKind::of(&entry.kind),
            };
            before = &entry.path;
            out = postcard::to_extend(&line, out)
                .expect("a line of a manifest has nothing that has no encoding");
        }
        out
    }

    /// Reads what [`Self::encode`] wrote. Never allocates much more than the input is long, whatever it claims.
    ///
    /// # Errors
    /// [`ManifestError`] says what is wrong with the bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        if bytes.len() as u64 > MAX_MANIFEST.0 {
            return Err(ManifestError("it is too long"));
        }
        let mut rest = bytes
            .strip_prefix(MAGIC)
            .ok_or(ManifestError("it does not begin as one"))?;
        let mut entries = Vec::new();
        let mut before = Vec::new();
        while !rest.is_empty() {
            let (line, tail) = postcard::take_from_bytes::<Line<'_>>(rest)
                .map_err(|_| ManifestError("an entry is cut or of no known kind"))?;
            rest = tail;
            let entry = line.entry(&before)?;
            before.clone_from(&entry.path);
            entries.push(entry);
        }
        let manifest = Self { entries };
        manifest.check()?;
        Ok(manifest)
    }

    /// Whether it is a tree that can be made.
    ///
    /// # Errors
    /// [`ManifestError`] says why not.
    pub fn check(&self) -> Result<(), ManifestError> {
        let refuse = |why| Err(ManifestError(why));
        let mut parents: Vec<&[u8]> = Vec::new();
        let mut before: Option<&Entry> = None;
        let mut data: u64 = 0;
        for entry in &self.entries {
            check_path(&entry.path)?;
            if before.is_some_and(|b| path_order(&b.path, &entry.path).is_ge()) {
                return refuse("its entries are not in order");
            }
            let name = entry.name().len();
            let parent = entry
                .path
                .len()
                .checked_sub(name + 1)
                .map(|end| &entry.path[..end]);
            while parents.last().is_some_and(|last| Some(*last) != parent) {
                parents.pop();
            }
            if parent != parents.last().copied() {
                return refuse("an entry has no directory");
            }
            if entry.mode & !0o777 != 0 {
                return refuse("a mode has more than permission bits");
            }
            if entry.mtime.1 >= 1_000_000_000 {
                return refuse("a time has more than a second of nanoseconds");
            }
            check_xattrs(entry)?;
            match &entry.kind {
                Kind::Dir => parents.push(&entry.path),
                Kind::File { size, data } => check_data(*size, data)?,
                Kind::Symlink { to } if to.is_empty() || to.len() > MAX_PATH || to.contains(&0) => {
                    return refuse("a symbolic link says nothing that a link can say");
                }
                Kind::Symlink { .. } if parent.is_none() => return refuse("a unit is a symbolic link"),
                Kind::Symlink { .. } => {}
                Kind::HardLink { to } => {
                    let file = self.entries.get(*to as usize).filter(|file| {
                        matches!(file.kind, Kind::File { .. })
                            && file.unit() == entry.unit()
                            && path_order(&file.path, &entry.path).is_lt()
                    });
                    if file.is_none() || parent.is_none() {
                        return refuse("a hard link is to no file before it");
                    }
                }
            }
            data = data.saturating_add(entry.data_len());
            before = Some(entry);
        }
        if data > MAX_PAYLOAD.0 {
            return refuse("it holds more than 4 PiB of data");
        }
        Ok(())
    }
}

impl<'a> LineKind<'a> {
    fn of(kind: &'a Kind) -> Self {
        match kind {
            Kind::Dir => Self::Dir,
            Kind::File {
                size,
                data: Data::Dense,
            } => Self::File(size.0),
            Kind::File {
                size,
                data: Data::Runs(runs),
            } => {
                let mut at = 0;
                let runs = runs.iter().map(|run| {
                    let pair = (run.start - at, run.end - run.start);
                    at = run.end;
                    pair
                });
                Self::Sparse(size.0, runs.collect())
            }
            Kind::Symlink { to } => Self::Symlink(to),
            Kind::HardLink { to } => Self::HardLink(*to),
        }
    }
}

impl Line<'_> {
    fn entry(self, before: &[u8]) -> Result<Entry, ManifestError> {
        let shared = before
            .get(..self.shared.into())
            .ok_or(ManifestError("a path shares more than the one before has"))?;
        let kind = match self.kind {
            LineKind::Dir => Kind::Dir,
            LineKind::File(size) => Kind::File {
                size: ByteCount(size),
                data: Data::Dense,
            },
            LineKind::Sparse(size, pairs) => {
                let mut at: u64 = 0;
                let mut runs = Vec::with_capacity(pairs.len());
                for (hole, len) in pairs {
                    let start = at.checked_add(hole);
                    let end = start.and_then(|start| start.checked_add(len));
                    let (Some(start), Some(end)) = (start, end) else {
                        return Err(ManifestError("a run of data lies outside its file"));
                    };
                    runs.push(start..end);
                    at = end;
                }
                Kind::File {
                    size: ByteCount(size),
                    data: Data::Runs(runs),
                }
            }
            LineKind::Symlink(to) => Kind::Symlink { to: to.to_vec() },
            LineKind::HardLink(to) => Kind::HardLink { to },
        };
        Ok(Entry {
            path: [shared, self.rest].concat(),
            mode: self.mode.into(),
            mtime: self.mtime,
            xattrs: self
                .xattrs
                .iter()
                .map(|(name, value)| (name.to_vec(), value.to_vec()))
                .collect(),
            kind,
        })
    }
}

fn check_path(path: &[u8]) -> Result<(), ManifestError> {
    if path.len() > MAX_PATH {
        return Err(ManifestError("a path is too long"));
    }
    for name in path.split(|b| *b == b'/') {
        match name {
            b"" => return Err(ManifestError("a path has an empty name")),
            b"." | b".." => return Err(ManifestError("a path leads out of its place")),
            _ if name.len() > MAX_NAME => return Err(ManifestError("a name is too long")),
            _ if name.contains(&0) => return Err(ManifestError("a name contains a NUL byte")),
            _ => {}
        }
    }
    Ok(())
}

fn check_xattrs(entry: &Entry) -> Result<(), ManifestError> {
    let mut before: &[u8] = b"";
    for (name, value) in &entry.xattrs {
        let known = name.starts_with(b"user.")
            || name == b"system.posix_acl_access"
            || (name == b"system.posix_acl_default" && entry.kind == Kind::Dir);
        if !known || name.len() > MAX_NAME || name.contains(&0) || value.len() > 64 << 10 {
            return Err(ManifestError("an extended attribute is none that stage sets"));
        }
        if name.as_slice() <= before {
            return Err(ManifestError("extended attributes are not in order"));
        }
        before = name;
    }
    if !entry.xattrs.is_empty() && !matches!(entry.kind, Kind::Dir | Kind::File { .. }) {
        return Err(ManifestError("a link has extended attributes"));
    }
    Ok(())
}

fn check_data(size: ByteCount, data: &Data) -> Result<(), ManifestError> {
    let Data::Runs(runs) = data else { return Ok(()) };
    let mut end = None;
    for run in runs {
        let apart = end.is_none_or(|end| run.start > end);
        if run.is_empty() || !apart || run.end > size.0 {
            return Err(ManifestError("a run of data lies outside its file"));
        }
        end = Some(run.end);
    }
    if *data != Data::of(size, runs.clone()) {
        return Err(ManifestError("a dense file is said to be sparse"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(path: &[u8], kind: Kind) -> Entry {
        Entry {
            path: path.to_vec(),
            mode: 0o644,
            mtime: (7, 8),
            xattrs: Vec::new(),
            kind,
        }
    }

    fn file(size: u64) -> Kind {
        Kind::File {
            size: ByteCount(size),
            data: Data::Dense,
        }
    }

    fn tree() -> Manifest {
        let sparse = Kind::File {
            size: ByteCount(1 << 40),
            data: Data::Runs(vec![5..9, 1 << 30..(1 << 30) + 1]),
        };
        let mut dir = entry(b"db", Kind::Dir);
        dir.xattrs = vec![(b"user.a".to_vec(), b"x".to_vec()), (b"user.b".to_vec(), vec![])];
        Manifest {
            entries: vec![
                dir,
                entry(b"db/\xff\n", file(3)),
                entry(b"db/a", Kind::Dir),
                entry(b"db/a/x", sparse),
                entry(b"db/a/y", Kind::Symlink { to: b"../x".to_vec() }),
                entry(b"db/a!", Kind::HardLink { to: 3 }),
                entry(b"more.fa", file(0)),
            ],
        }
    }

    // The names above in the order of components: 0xff is the highest.
    fn ordered() -> Manifest {
        let mut manifest = tree();
        manifest.entries.swap(1, 2);
        manifest.entries.swap(2, 3);
        manifest.entries.swap(3, 4);
        manifest.entries.swap(4, 5);
        manifest.entries[4].kind = Kind::HardLink { to: 2 };
        manifest
    }

    #[test]
    fn a_tree_comes_back() {
        let manifest = ordered();
        let bytes = manifest.encode();
        assert_eq!(Manifest::decode(&bytes).unwrap(), manifest);
        assert!(bytes.len() < 7 * 24, "{}", bytes.len());
    }

    #[test]
    fn what_cannot_be_made_is_refused() {
        let refused = |change: &dyn Fn(&mut Manifest)| {
            let mut manifest = ordered();
            change(&mut manifest);
            Manifest::decode(&manifest.encode()).expect_err("refused").0
        };
        assert_eq!(refused(&|m| m.entries.swap(0, 1)), "an entry has no directory");
        assert_eq!(refused(&|m| m.entries.swap(1, 6)), "its entries are not in order");
        assert_eq!(
            refused(&|m| m.entries[6].path = b"db".to_vec()),
            "its entries are not in order"
        );
        assert_eq!(
            refused(&|m| m.entries[6].path = b"e/f".to_vec()),
            "an entry has no directory"
        );
        assert_eq!(
            refused(&|m| m.entries[5].path = b"db/x/../y".to_vec()),
            "a path leads out of its place"
        );
        assert_eq!(
            refused(&|m| m.entries[5].path = b"db//y".to_vec()),
            "a path has an empty name"
        );
        assert_eq!(
            refused(&|m| m.entries[5].path = b"/y".to_vec()),
            "a path has an empty name"
        );
        assert_eq!(
            refused(&|m| m.entries[5].path = b"db/\0".to_vec()),
            "a name contains a NUL byte"
        );
        assert_eq!(
            refused(&|m| m.entries[5].path = [b"db/".as_slice(), &[b'x'; 256]].concat()),
            "a name is too long"
        );
        assert_eq!(
            refused(&|m| m.entries[4].kind = Kind::HardLink { to: 4 }),
            "a hard link is to no file before it"
        );
        assert_eq!(
            refused(&|m| m.entries[4].kind = Kind::HardLink { to: 0 }),
            "a hard link is to no file before it"
        );
        assert_eq!(
            refused(&|m| m.entries[4].kind = Kind::HardLink { to: 99 }),
            "a hard link is to no file before it"
        );
        assert_eq!(
            refused(&|m| m.entries[6].kind = Kind::HardLink { to: 5 }),
            "a hard link is to no file before it"
        );
        assert_eq!(
            refused(&|m| m.entries[6].kind = Kind::Symlink { to: b"x".to_vec() }),
            "a unit is a symbolic link"
        );
        assert_eq!(
            refused(&|m| m.entries[0].mode = 0o4755),
            "a mode has more than permission bits"
        );
        assert_eq!(
            refused(&|m| m.entries[0].xattrs[0].0 = b"security.capability".to_vec()),
            "an extended attribute is none that stage sets"
        );
        let runs = |runs| Kind::File {
            size: ByteCount(9),
            data: Data::Runs(runs),
        };
        for bad in [vec![1..3, 3..4], vec![5..6, 1..2], vec![1..10; 1], vec![0..9; 1]] {
            // Where one run begins before the last one ended there is no encoding at all.
            if bad.is_sorted_by_key(|run| run.start) {
                refused(&|m| m.entries[5].kind = runs(bad.clone()));
            }
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Manifest::decode(&bytes);
            let mut claimed = ordered().encode();
            for (at, byte) in bytes.iter().enumerate() {
                let place = at * 7 % claimed.len();
                claimed[place] ^= byte;
            }
            if let Ok(manifest) = Manifest::decode(&claimed) {
                prop_assert!(manifest.check().is_ok());
                prop_assert_eq!(Manifest::decode(&manifest.encode()).unwrap(), manifest);
            }
        }
    }
}
