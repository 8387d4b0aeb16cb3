//! Final names: each by one rename, and what it takes the place of is not forgotten.

use rustix::io::Errno;
use stage_core::assignment::IfExists;
use stage_core::digest::RootDigest;
use stage_core::payload::UnitKind;

use super::copy::{Copy, Partial, Unit};
use super::publish::{PublishError, appeared};
use super::site::Site;
use super::{Target, retired};
use crate::crash::crash_point;
use crate::store::map::Map;

impl Target {
    /// Gives one unit its final name.
    pub(super) fn name(
        &self,
        copy: &Copy,
        map: &Map,
        unit: &Unit,
        inode: (u64, u64),
        root: &RootDigest,
    ) -> Result<(), PublishError> {
        let site = &unit.site;
        let fail = |e| PublishError::Failed(site.fault(e, "giving the copy its final name"));
        let named = match site.kind {
            UnitKind::File => site.rename(copy.rule == IfExists::Replace),
            UnitKind::Tree => {
                let generation = site
                    .generation_of(inode, root)
                    .map_or_else(|| self.make_generation(site, root), Ok)
                    .map_err(fail)?;
                crash_point!("after_generation");
                if let Some(Partial::Tree(tree)) = unit.partial.get() {
                    tree.settle(map.entry(unit.range.start)).map_err(fail)?;
                }
                self.lead(copy, site, &generation)?
            }
        };
        match named {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) => Err(PublishError::Unfit(appeared(unit))),
            Err(Errno::ISDIR | Errno::NOTEMPTY) => Err(PublishError::Unfit(site.wrong_kind("a directory"))),
            Err(e) => Err(fail(e)),
        }
    }

    /// Moves a whole tree to where generations lie; gives its name there.
    pub(super) fn make_generation(&self, site: &Site, root: &RootDigest) -> rustix::io::Result<Vec<u8>> {
        site.make_generation(root, |name| retired::forget(&self.state, site, name))
    }

    /// Lets a name lead to a generation. What it led to before, or the directory that stood there, is written down as one
    /// that no name leads to: before the switch, so that none is forgotten.
    pub(super) fn lead(
        &self,
        copy: &Copy,
        site: &Site,
        generation: &[u8],
    ) -> Result<rustix::io::Result<()>, PublishError> {
        let fail = |e| PublishError::Failed(site.fault(e, "looking at what stands there"));
        let replace = copy.rule == IfExists::Replace;
        let old = site.generation_now().map_err(fail)?.filter(|_| replace);
        if let Some(old) = old.filter(|old| old != generation) {
            self.retire(copy, site, &old, site.inode_of_generation(&old))?;
        }
        Ok(match site.switch(generation, replace) {
            Err(Errno::ISDIR | Errno::NOTEMPTY | Errno::EXIST) if replace => {
                let kept = site.name_of_foreign(self.job).map_err(fail)?;
                self.retire(copy, site, &kept, site.inode_of_foreign())?;
                site.exchange(generation, &kept)
            }
            other => other,
        })
    }

    fn retire(
        &self,
        copy: &Copy,
        site: &Site,
        generation: &[u8],
        inode: Option<(u64, u64)>,
    ) -> Result<(), PublishError> {
        // Where nothing lies, nothing stays.
        if let Some((_, inode)) = inode {
            retired::note(&self.state, site, generation, inode, copy.keep, self.job)
                .map_err(PublishError::Failed)?;
            crash_point!("after_retire");
        }
        Ok(())
    }
}
