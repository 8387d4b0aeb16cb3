//! Where a published payload lies: what whoever uses the copies asks. Nothing is made and nothing is changed.

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, openat2, readlinkat, statat};
use rustix::io::Errno;
use stage_core::assignment::Place;
use stage_core::failure::{Code, Failure, show_path};
use stage_core::units::ByteCount;

use super::{Held, Roots, Spot, check_component, components};
use crate::fault;

/// The directory of a place that holds generations of trees.
const GENERATIONS: &[u8] = b".stage/";

/// A name in a place on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    /// The name's absolute path.
    pub name: Vec<u8>,
    /// What is published under it, if anything is.
    pub found: Option<Found>,
}

/// What is published under a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// A file, under its name.
    File {
        /// How long it is.
        size: ByteCount,
    },
    /// A tree: the generation that the name leads to now.
    Tree {
        /// The generation's own absolute path, which no later push gives other content.
        path: Vec<u8>,
    },
}

impl Roots {
    /// The absolute path of a place, and its directory, held; `None` if that is missing below its root.
    pub(crate) fn existing(&self, place: &Place) -> Result<(Vec<u8>, Option<Held>), Failure> {
        let (root, dir) = self.choose(place)?;
        let parts = components(dir)?;
        let (spot, dir) = Spot::open(root, root.directory()?, parts);
        let path = spot.path(spot.parts.len());
        match dir {
            Ok(dir) => Ok((path, Some(spot.held(dir, 0)))),
            Err(Errno::NOENT) => Ok((path, None)),
            Err(errno) => Err(spot.fail(errno, spot.parts.len())),
        }
    }

    /// Looks for what is published as `name` in a place.
    ///
    /// # Errors
    /// The place is none that payloads lie in, or what stands there was not put there by stage
    /// ([`Code::WrongKind`]).
    pub fn locate(&self, place: &Place, name: &[u8]) -> Result<Located, Failure> {
        check_component(name)?;
        let (root, dir) = self.choose(place)?;
        let parts = components(dir)?;
        let (spot, dir) = Spot::open(root, root.directory()?, parts);
        let whole = [spot.path(spot.parts.len()).as_slice(), name].join(&b'/');
        let dir = match dir {
            Ok(dir) => dir,
            Err(Errno::NOENT) => {
                return Ok(Located {
                    name: whole,
                    found: None,
                });
            }
            Err(errno) => return Err(spot.fail(errno, spot.parts.len())),
        };
        let shown = show_path(&whole);
        let found = match statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => None,
            Err(errno) => return Err(fault::of(errno, "looking at it", &shown)),
            Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => Some(Found::File {
                    size: ByteCount(u64::try_from(stat.st_size).unwrap_or_default()),
                }),
                FileType::Symlink => match readlinkat(&dir, name, Vec::new()) {
                    // It went in this moment, or gave way to something else: whoever asks again sees it.
                    Err(Errno::NOENT | Errno::INVAL) => None,
                    Err(errno) => return Err(fault::of(errno, "looking at it", &shown)),
                    Ok(link) => generation(&dir, name, link.as_bytes(), &whole)?,
                },
                FileType::Directory => {
                    return Err(foreign("a directory that stage did not put there", shown));
                }
                _ => return Err(foreign("neither a file nor a tree", shown)),
            },
        };
        Ok(Located { name: whole, found })
    }
}

/// The generation that a name's link leads to; `None` where it has gone.
fn generation(
    dir: &impl std::os::fd::AsFd,
    name: &[u8],
    link: &[u8],
    whole: &[u8],
) -> Result<Option<Found>, Failure> {
    let own = link
        .strip_prefix(GENERATIONS)
        .and_then(|rest| rest.strip_prefix(name))
        .is_some_and(|rest| rest.first() == Some(&b'@') && !rest.contains(&b'/'));
    if !own {
        return Err(foreign("a link that stage did not make", show_path(whole)));
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    match openat2(dir, link, flags, Mode::empty(), resolve) {
        Ok(_) => {
            let parent = &whole[..whole.len() - name.len()];
            Ok(Some(Found::Tree {
                path: [parent, link].concat(),
            }))
        }
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(fault::of(errno, "looking at the tree", &show_path(whole))),
    }
}

fn foreign(what: &str, shown: String) -> Failure {
    Failure::new(
        Code::WrongKind,
        format!("what stands there is {what}"),
        "move it away, or choose another name or directory",
    )
    .at(shown)
}
