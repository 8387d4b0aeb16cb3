//! Whether an entry is what was published: its content is hashed again, chunk by chunk.
//!
//! A chunk that has bytes of several parts of one push is read from all of them. Where one of the others is gone, or is
//! another by now, such a chunk says nothing.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, openat2, readlinkat, statat};
use rustix::io::Errno;
use stage_core::ask::State;
use stage_core::chunk::{ChunkIndex, Part};
use stage_core::digest::{RootHasher, chunk_digest};
use stage_core::failure::{Failure, show_path};
use stage_core::manifest::{self, Kind};
use stage_core::payload::UnitKind;

use super::look::{Found, open};
use super::{Entry, EntryKind, Index};
use crate::journal::{self, FileState};
use crate::root::Roots;
use crate::sparse::holes_are_zero;
use crate::store::digest_by;
use crate::store::map::{Map, is_dense, size_of};
use crate::target::old::count;
use crate::target::site::Site;

/// Told of each chunk that was hashed, with its bytes; `false` ends the hashing.
pub type Hashing<'a> = dyn FnMut(u64) -> bool + 'a;

/// What the hashing came to.
enum Verdict {
    /// Every byte is what was published.
    Whole,
    /// In which way not.
    Damaged(String),
    /// Nobody can tell, and why.
    Unknown(String),
    /// It was ended before.
    Ended,
}

/// A part of the push on this node.
struct Unit {
    /// Its entries in the manifest.
    range: Range<u32>,
    /// The file, or the tree's directory; `None` where there is none now.
    place: Option<(UnitKind, File)>,
}

impl Index {
    /// What of an entry is there, after all of its content was hashed again. `None` if `hashing` ended that.
    pub fn verify(&self, roots: &Roots, entry: &Entry, hashing: &mut Hashing<'_>) -> Option<(State, String)> {
        let (file, before) = match open(roots, entry) {
            Found::Else(state, detail) => return Some((state, detail)),
            Found::There(file, state) => (file, state),
        };
        let verdict = self
            .judge(roots, entry, &file, &before, hashing)
            .unwrap_or_else(Verdict::Unknown);
        let damage = match verdict {
            Verdict::Ended => return None,
            Verdict::Unknown(why) => return Some((State::Unreadable, why)),
            Verdict::Damaged(damage) => Some(damage),
            Verdict::Whole => None,
        };
        match FileState::of(&file) {
            Ok(after) if after == before => {}
            _ => return Some((State::Changed, "it was changed while it was read".to_owned())),
        }
        let found = damage.clone().map(|damage| (before.clone(), damage));
        if found != entry.damage || (found.is_none() && !entry.is_untouched(&before)) {
            let noted = self.change(&entry.path, |now| {
                // Another copy may have been published meanwhile.
                if now.key != entry.key || now.job != entry.job {
                    return;
                }
                if found.is_none() {
                    // It is what was published, whatever was done to it: from now on this is how it looks.
                    now.key = before;
                    now.boot = journal::boot_id();
                }
                now.damage = found;
            });
            if let Err(failure) = noted {
                tracing::warn!("{failure}");
            }
        }
        Some(match damage {
            Some(damage) => (State::Damaged, damage),
            None => (State::Ok, String::new()),
        })
    }

    /// Compares all of a copy with what was published.
    ///
    /// # Errors
    /// Why it cannot be compared.
    fn judge(
        &self,
        roots: &Roots,
        entry: &Entry,
        file: &File,
        state: &FileState,
        hashing: &mut Hashing<'_>,
    ) -> Result<Verdict, String> {
        let (kept, manifest) = self
            .digests(entry)
            .map_err(|e| format!("the agent's state directory does not tell what it should be: {e}"))?;
        let head = if entry.payload.head().0 > 0 {
            manifest.encode()
        } else {
            Vec::new()
        };
        let map = Map::new(manifest);
        let units = units(roots, entry, file, &map).map_err(|failure| failure.message)?;
        let own = units[entry.unit as usize].range.clone();
        let reading = |e: std::io::Error| format!("reading it failed: {e}");
        let structure = match entry.kind {
            EntryKind::Tree => {
                tree_damage(file.as_fd(), &map, own.clone(), false).map_err(|e| reading(e.into()))?
            }
            EntryKind::File if state.size != entry.size.0 => {
                Some(format!("it has {} bytes and not {}", state.size, entry.size.0))
            }
            EntryKind::File => None,
        };
        if let Some(damage) = structure {
            return Ok(Verdict::Damaged(damage));
        }
        let layout = entry.layout;
        let mut root = Some(RootHasher::new(entry.payload.manifest));
        let mut differing = 0u32;
        let mut first = None;
        let mut mute = 0u32;
        for index in (0..layout.count()).map(ChunkIndex) {
            let len = layout.len(index);
            let listed = kept.get(index);
            let computed = match layout.part(index) {
                Part::Head(at) => {
                    let at = usize::try_from(at).unwrap_or(usize::MAX);
                    Some(chunk_digest(entry.hash, &head[at..at + len]))
                }
                Part::Data(at) => {
                    let whose = whose(&map, at, len, &own);
                    if whose.own.is_none() {
                        None
                    } else {
                        let digest = digest_by(entry.hash, len, |from, block| {
                            map.pieces(at + from, block.len(), |entry, from, part| {
                                read(&units, &map, entry, from, &mut block[part])
                            })
                        });
                        if !hashing(len as u64) {
                            return Ok(Verdict::Ended);
                        }
                        let differs = match &digest {
                            Ok(digest) => listed.is_some_and(|listed| listed != *digest),
                            Err(_) => true,
                        };
                        match digest {
                            // Who of them is at fault only an untouched neighbour tells.
                            _ if differs && whose.shared && !self.are_untouched(roots, entry, &units) => {
                                mute += 1;
                                None
                            }
                            Err(e) => return Err(reading(e)),
                            Ok(digest) => {
                                if differs {
                                    differing += 1;
                                    first.get_or_insert((index, whose));
                                }
                                Some(digest)
                            }
                        }
                    }
                }
            };
            root = root.and_then(|mut root| {
                root.push(listed.or(computed)?);
                Some(root)
            });
        }
        let all = layout.count();
        if let Some((chunk, whose)) = first {
            let file = match (whose.own, &map.entry(own.start).kind) {
                (Some(entry), Kind::Dir) => format!(" (in {})", show_path(&map.entry(entry).path)),
                _ => String::new(),
            };
            let shared = if whose.shared {
                ", shared with other parts of its push,"
            } else {
                ""
            };
            return Ok(Verdict::Damaged(if differing == 1 {
                format!("chunk {chunk} of {all}{file}{shared} differs")
            } else {
                format!("{differing} of {all} chunks differ, the first is chunk {chunk}{file}")
            }));
        }
        for index in own {
            let entry = map.entry(index);
            if !is_dense(entry) {
                let holds = |file: File| holes_are_zero(&file, entry);
                if !opened(&units, &map, index).and_then(holds).map_err(reading)? {
                    return Ok(Verdict::Damaged(format!(
                        "there is data where {} has holes",
                        show_path(&entry.path)
                    )));
                }
            }
        }
        match root {
            Some(root) if root.finish() != entry.root => Ok(Verdict::Damaged(
                "its digests do not make the published root".to_owned(),
            )),
            Some(_) if mute == 0 => Ok(Verdict::Whole),
            _ if mute > 0 => Err(format!(
                "{mute} of {all} chunks are shared with other parts of its push, which are not there as they were"
            )),
            _ => Err("some digests in the agent's state directory are damaged".to_owned()),
        }
    }

    /// What in a tree is not as it was published, by a look at each of its files.
    pub(super) fn touched_in(&self, entry: &Entry, dir: &File) -> Option<String> {
        if entry.kind != EntryKind::Tree {
            return None;
        }
        let (_, manifest) = match self.digests(entry) {
            Ok(kept) => kept,
            Err(e) => return Some(format!("the agent does not know any more what was in it: {e}")),
        };
        let map = Map::new(manifest);
        let name = &entry.name;
        let of = |(_, found): &(u32, &manifest::Entry)| found.unit() == *name;
        let mut own = (0..).zip(map.entries()).filter(of).map(|(index, _)| index);
        let first = own.next()?;
        let range = first..own.last().unwrap_or(first) + 1;
        match tree_damage(dir.as_fd(), &map, range, true) {
            Ok(touched) => touched,
            Err(e) => Some(format!("it cannot be looked at: {}", crate::fault::text(e))),
        }
    }

    /// Whether all parts of a push lie as they were published.
    fn are_untouched(&self, roots: &Roots, entry: &Entry, units: &[Unit]) -> bool {
        let dir = &entry.path[..entry.path.len() - entry.name.len()];
        units.iter().zip(&entry.payload.units).all(|(unit, named)| {
            unit.place.is_some()
                && self
                    .find(&[dir, &named.name].concat())
                    .is_some_and(|other| other.job == entry.job && self.look(roots, &other).0 == State::Ok)
        })
    }
}

/// Whose bytes a chunk has.
struct Whose {
    /// The first entry of the unit in question that has some.
    own: Option<u32>,
    /// Entries of other units have some too.
    shared: bool,
}

fn whose(map: &Map, at: u64, len: usize, own: &Range<u32>) -> Whose {
    let mut whose = Whose {
        own: None,
        shared: false,
    };
    let Ok(()) = map.pieces(at, len, |entry, _, _| {
        if own.contains(&entry) {
            whose.own.get_or_insert(entry);
        } else {
            whose.shared = true;
        }
        Ok::<_, std::convert::Infallible>(())
    });
    whose
}

/// All parts of the push that an entry is one of, as they lie in its directory now.
fn units(roots: &Roots, entry: &Entry, file: &File, map: &Map) -> Result<Vec<Unit>, Failure> {
    let (_, held) = roots.existing(&entry.place)?;
    let held = held.map(Arc::new);
    let mut start = 0;
    let units = entry.payload.units.iter().zip(0..).map(|(unit, at)| {
        let rest = map.entries().iter().skip(start as usize);
        let range = start..start + rest.take_while(|entry| entry.unit() == unit.name).count() as u32;
        start = range.end;
        let place = if at == entry.unit {
            file.try_clone().ok()
        } else {
            held.clone().and_then(|held| {
                let site = Site::new(held, &unit.name, unit.kind, entry.job, at as usize);
                match unit.kind {
                    UnitKind::File => site.open_final().ok(),
                    UnitKind::Tree => site.open_final_dir().ok().map(File::from),
                }
            })
        };
        Unit {
            range,
            place: place.map(|place| (unit.kind, place)),
        }
    });
    Ok(units.collect())
}

/// The file of a manifest's entry. No link is followed, and none leads out.
fn opened(units: &[Unit], map: &Map, index: u32) -> std::io::Result<File> {
    let unit = units.iter().find(|unit| unit.range.contains(&index));
    match unit.and_then(|unit| unit.place.as_ref()) {
        Some((UnitKind::File, file)) => file.try_clone(),
        Some((UnitKind::Tree, dir)) => {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_SYMLINKS;
            let path = map.entry(index).below();
            Ok(openat2(dir, path, flags, Mode::empty(), resolve)?.into())
        }
        None => Err(Errno::NOENT.into()),
    }
}

fn read(units: &[Unit], map: &Map, index: u32, at: u64, buf: &mut [u8]) -> std::io::Result<()> {
    opened(units, map, index)?.read_exact_at(buf, at)
}

/// Whether a tree has exactly the entries that were published, with their kinds, sizes and links, and where that matters
/// their files' times; else the first that differs.
fn tree_damage(
    dir: BorrowedFd<'_>,
    map: &Map,
    range: Range<u32>,
    times: bool,
) -> rustix::io::Result<Option<String>> {
    let expected = range.len().saturating_sub(1);
    for index in range {
        let entry = map.entry(index);
        if entry.below().is_empty() {
            continue;
        }
        let is = |what: &str| Ok(Some(format!("{} {what}", show_path(&entry.path))));
        let stat = match statat(dir, entry.below(), AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT | Errno::NOTDIR) => return is("is missing"),
            other => other?,
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        let inode = |entry: &manifest::Entry| {
            statat(dir, entry.below(), AtFlags::SYMLINK_NOFOLLOW).map(|stat| (stat.st_dev, stat.st_ino))
        };
        let fits = match &entry.kind {
            Kind::Dir => kind == FileType::Directory,
            Kind::File { .. } => {
                if kind == FileType::RegularFile && stat.st_size.cast_unsigned() != size_of(entry).0 {
                    return is(&format!(
                        "has {} bytes and not {}",
                        stat.st_size,
                        size_of(entry).0
                    ));
                }
                if times && (stat.st_mtime, stat.st_mtime_nsec as u32) != entry.mtime {
                    return is("was written to");
                }
                kind == FileType::RegularFile
            }
            Kind::Symlink { to } => {
                kind == FileType::Symlink
                    && readlinkat(dir, entry.below(), Vec::new())?.as_bytes() == to.as_slice()
            }
            Kind::HardLink { to } => inode(map.entry(*to)).ok() == Some((stat.st_dev, stat.st_ino)),
        };
        if !fits {
            return is("is something else");
        }
    }
    match count(dir, expected) {
        Ok(found) if found == expected => Ok(None),
        Ok(_) | Err(Errno::TOOBIG) => Ok(Some("there is more in it than was published".to_owned())),
        Err(e) => Err(e),
    }
}
