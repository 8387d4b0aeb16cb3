//! Under its final name: in an order in which every crash leaves the name absent, whole old or whole new.

use std::sync::PoisonError;

use rustix::fs::{Mode, Timespec, Timestamps};
use rustix::io::Errno;
use stage_core::assignment::{Final, IfExists};
use stage_core::failure::{Code, Failure};

use super::Target;
use super::copy::Copy;
use super::site::Seen;
use crate::crash::crash_point;
use crate::fault;
use crate::journal::{FileState, Phase};
use crate::store::map::size_of;

/// What [`Target::publish`] did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publication {
    /// The final path, as text fit for a terminal.
    pub path: String,
    /// The payload stood there already: nothing was renamed.
    pub already: bool,
}

/// Why a target was not published.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The chunks here are not the declared ones: some have to be disowned and fetched elsewhere.
    #[error("the digests of the chunks here do not make the declared root")]
    RootDiffers,
    /// Somebody put other content there meanwhile, or moved the directory: the target is unfit.
    #[error("{0}")]
    Unfit(Failure),
    /// It failed for good.
    #[error("{0}")]
    Failed(Failure),
}

impl Target {
    /// Publishes the payload, if all of it is here and agrees with what the source declared. Again after success it
    /// says the same again.
    ///
    /// # Errors
    /// See [`PublishError`].
    pub fn publish(&self, fin: &Final) -> Result<Publication, PublishError> {
        let mut published = self.published.lock().unwrap_or_else(PoisonError::into_inner);
        self.store.close(fin.data).map_err(PublishError::Failed)?;
        if self.store.layout().count() != fin.chunks {
            return Err(PublishError::RootDiffers);
        }
        if !self.store.is_complete() {
            return Err(PublishError::Failed(Failure::new(
                Code::Internal,
                "not all chunks are here",
                "report this as a bug of stage",
            )));
        }
        if self.store.root().map_err(PublishError::Failed)? != fin.root {
            return Err(PublishError::RootDiffers);
        }
        let already = match *published {
            Some(already) => already,
            None => {
                let copy = self.copy();
                self.check_place(copy)?;
                let already = copy.partial().is_none();
                if already {
                    self.confirm_old(copy)?;
                } else {
                    self.rename_partial(copy)?;
                }
                *published = Some(already);
                already
            }
        };
        Ok(Publication {
            path: self.path().to_owned(),
            already,
        })
    }

    /// The old copy was the payload, chunk by chunk: it must still be the file under the name, untouched.
    fn confirm_old(&self, copy: &Copy) -> Result<(), PublishError> {
        let site = &copy.site;
        let looked = || -> rustix::io::Result<bool> {
            let Some(old) = &copy.old else { return Ok(false) };
            let named = FileState::of(&site.open_final()?)?;
            // The modification time tells of writes, not the change time: a chmod makes no other content.
            Ok(named.same_file(&old.state) && named.size == old.state.size && named.mtime == old.state.mtime)
        };
        if !looked().unwrap_or(false) {
            return Err(PublishError::Unfit(
                site.exists("and was changed while it was compared"),
            ));
        }
        self.store
            .table()
            .update(|record| record.phase = Phase::Published)
            .map_err(PublishError::Failed)
    }

    fn rename_partial(&self, copy: &Copy) -> Result<(), PublishError> {
        let site = &copy.site;
        let map = self.store.map().map_err(PublishError::Failed)?;
        let entry = map.entry(0);
        let fail = |doing: &str| {
            let doing = doing.to_owned();
            move |e: Errno| PublishError::Failed(fault::of(e, &doing, &site.shown))
        };
        let partial = copy.partial().expect("looked for before");
        copy.stop_reserving();
        let size = if self.store.is_stream() {
            self.store.layout().data().0
        } else {
            size_of(entry).0
        };
        rustix::fs::ftruncate(partial, size).map_err(fail("setting the size"))?;
        rustix::fs::fchmod(partial, Mode::from_raw_mode(entry.mode)).map_err(fail("setting the mode"))?;
        let mtime = Timespec {
            tv_sec: entry.mtime.0,
            tv_nsec: entry.mtime.1.into(),
        };
        let times = Timestamps {
            last_access: Timespec {
                tv_sec: 0,
                tv_nsec: rustix::fs::UTIME_OMIT,
            },
            last_modification: mtime,
        };
        rustix::fs::futimens(partial, &times).map_err(fail("setting the time"))?;
        crash_point!("before_fsync");
        if let Err(e) = rustix::fs::fsync(partial) {
            // The kernel has dropped what it could not write, and a second fsync would succeed without it.
            self.store.lose_all();
            copy.remove_partial();
            let _ = self.store.table().reset();
            return Err(fail("making the file durable")(e));
        }
        crash_point!("after_fsync");
        self.check_names(copy)?;
        let state = FileState::of(partial).map_err(fail("looking at the partial file"))?;
        let table = self.store.table();
        table
            .update(|record| {
                record.phase = Phase::Intent;
                record.file = state;
            })
            .and_then(|()| table.sync())
            .map_err(PublishError::Failed)?;
        crash_point!("before_rename");
        match site.rename(copy.rule == IfExists::Replace) {
            Ok(()) => {}
            Err(Errno::EXIST) => return Err(PublishError::Unfit(self.appeared(copy))),
            Err(Errno::ISDIR | Errno::NOTEMPTY) => {
                return Err(PublishError::Unfit(site.wrong_kind("a directory")));
            }
            Err(e) => return Err(fail("renaming the partial file to its final name")(e)),
        }
        crash_point!("after_rename");
        self.finish(copy)
    }

    /// Makes the new name durable and journals that.
    pub(super) fn finish(&self, copy: &Copy) -> Result<(), PublishError> {
        let site = &copy.site;
        site.held
            .sync()
            .map_err(|e| PublishError::Failed(fault::of(e, "making the name durable", &site.shown)))?;
        crash_point!("after_dirsync");
        let table = self.store.table();
        if let Err(failure) = table.update(|record| record.phase = Phase::Published) {
            // It is published all the same: at the next start what lies under the name decides.
            tracing::warn!(path = site.shown, "{failure}");
        }
        Ok(())
    }

    /// A copy in a directory that was moved away, or unmounted while it was held, is none at the path that was asked
    /// for. The target begins anew there once it is asked again.
    fn check_place(&self, copy: &Copy) -> Result<(), PublishError> {
        let site = &copy.site;
        if site.held.is_in_place() {
            return Ok(());
        }
        copy.remove_partial();
        Err(PublishError::Unfit(
            Failure::new(
                Code::RootUnusable,
                "the directory was removed, moved or unmounted during the transfer",
                "put it back; the push fills whatever directory stands there",
            )
            .at(site.shown.clone()),
        ))
    }

    /// The partial's name must still lead to our file, and the final name to nothing but a file.
    fn check_names(&self, copy: &Copy) -> Result<(), PublishError> {
        let site = &copy.site;
        let ours = copy
            .partial()
            .and_then(|partial| rustix::fs::fstat(partial).ok())
            .map(|stat| (stat.st_dev, stat.st_ino));
        if site.partial_inode() != ours {
            return Err(PublishError::Failed(
                Failure::new(
                    Code::Io,
                    "the partial file was removed or replaced by somebody else",
                    "find out who cleans up there, then push again",
                )
                .at(site.shown.clone()),
            ));
        }
        match site.look().map_err(PublishError::Failed)? {
            Seen::Other(kind) => Err(PublishError::Unfit(site.wrong_kind(kind))),
            Seen::File(_) if copy.rule != IfExists::Replace => Err(PublishError::Unfit(self.appeared(copy))),
            _ => Ok(()),
        }
    }

    fn appeared(&self, copy: &Copy) -> Failure {
        copy.site.exists("now: somebody put it there during the transfer")
    }
}
