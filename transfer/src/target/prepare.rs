//! The first step of a target's life: may the payload stand here, is there room for it, and what of it is here already.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use stage_core::assignment::{Cache, IfExists, TargetSpec};
use stage_core::chunk::{CHUNK, ChunkIndex, ChunkSet};
use stage_core::digest::ChunkHash;
use stage_core::failure::{Code, Failure, show_path};
use stage_core::id::JobId;
use stage_core::manifest::MAX_NAME;
use stage_core::payload::{Payload, UnitKind};
use stage_core::units::ByteCount;

use super::copy::Copy;
use super::intent::Intent;
use super::site::{Seen, Site};
use super::space::Promise;
use super::{Preparation, PublishError, Target, lay};
use crate::budget::Budget;
use crate::journal::{self, Table};
use crate::root::{Roots, check_component};
use crate::store::head::Head;
use crate::store::map::Map;
use crate::store::{Bytes, Parts, Store, layout_of};
use crate::unpack::{Unpacking, room_needed};

/// What a generation's name has after the tree's own, at most: `@before-`, a part of a job's id and a number.
const MARK: usize = 8 + 12 + 4;

/// Looks whether the payload can be taken, promises its space and takes up what an earlier run left. May hash again
/// all that an earlier run claimed, so it can take as long as reading the partial. One at a time for a job: the caller
/// keeps the target as long as the job lasts.
///
/// # Errors
/// Why the target is unfit now. Then nothing new is left on the disk.
pub fn prepare(
    roots: &Roots,
    state: &Path,
    job: JobId,
    spec: &TargetSpec,
    payload: &Payload,
    hash: ChunkHash,
    budget: &Arc<Budget>,
) -> Result<Preparation, Failure> {
    let map = payload.inline().map_err(|error| malformed(&error))?.map(Map::new);
    layout_of(payload)?;
    for unit in &payload.units {
        check_component(&unit.name)?;
        if (unit.kind == UnitKind::Tree || spec.unpack) && unit.name.len() + MARK > MAX_NAME {
            return Err(Failure::new(
                Code::NameTooLong,
                format!(
                    "the name of the directory has {} bytes, and {} are the most",
                    unit.name.len(),
                    MAX_NAME - MARK
                ),
                "push it under a shorter name (--as): its generations have the name and a mark",
            )
            .at(show_path(&unit.name)));
        }
    }
    if payload.has_double_names() {
        return Err(Failure::new(
            Code::Usage,
            "two parts of the payload have one name",
            "push them one after another",
        ));
    }
    let mut held = roots.resolve(&spec.place)?;
    journal::removed::unmark(state, job)?;
    let before = journal::peek(state, job).filter(|record| record.dir == held.path());
    held.made = held.made.max(before.as_ref().map_or(0, |record| record.made));
    // A job that has published here once fills what was lost, but what others put there since is not its to replace.
    let is_done = before.is_some_and(|record| record.phase == journal::Phase::Published);
    let rule = match spec.if_exists {
        IfExists::Replace if is_done => IfExists::Fail,
        rule => rule,
    };
    let held = Arc::new(held);
    let mut sites: Vec<_> = payload
        .units
        .iter()
        .enumerate()
        .map(|(at, unit)| Arc::new(Site::new(held.clone(), &unit.name, unit.kind, job, at)))
        .collect();
    let mut unpack = None;
    if spec.unpack {
        let [unit] = payload.units.as_slice() else {
            return Err(not_a_tar());
        };
        if unit.kind != UnitKind::File {
            return Err(not_a_tar());
        }
        unpack = Some(Arc::new(Site::new(
            held.clone(),
            &unit.name,
            UnitKind::Tree,
            job,
            1,
        )));
        sites = vec![Arc::new(Site::of_tar(held, job))];
    }
    let preparing = Preparing {
        roots,
        state,
        job,
        rule,
        keep: spec.keep_previous,
        cache: spec.cache,
        sites,
        unpack,
        payload,
        hash,
        budget,
    };
    let result = preparing.run(map).map_err(|failure| elsewhere(roots, failure));
    // What it had published is remembered, whatever stands there now.
    if !is_done && !matches!(result, Ok(Preparation::Ready(_))) {
        preparing.clean_up(matches!(result, Ok(Preparation::Skipped { .. })));
    }
    result
}

/// Where there is too little space, the other roots are named with theirs. One copy never lies in several: a rename
/// switches it whole.
fn elsewhere(roots: &Roots, mut failure: Failure) -> Failure {
    if failure.code != Code::NoSpace {
        return failure;
    }
    let here = failure.path.clone().unwrap_or_default();
    let others: Vec<_> = roots
        .report()
        .into_iter()
        .filter(|root| root.failure.is_none() && !here.starts_with(&format!("{}/", root.path)))
        .map(|root| format!("{} has {} free", root.name, root.free))
        .collect();
    if !others.is_empty() {
        failure.hint = format!(
            "make room there, or push to another root ({}) with --dest ROOT:, in parts with --include and --exclude",
            others.join(", ")
        );
    }
    failure
}

fn not_a_tar() -> Failure {
    Failure::new(
        Code::Usage,
        "only a single file can be unpacked",
        "push one tar, or leave out --unpack: directories are pushed as they are",
    )
}

fn malformed(error: &stage_core::manifest::ManifestError) -> Failure {
    Failure::new(
        Code::Usage,
        format!("the payload cannot be laid out: {error}"),
        "use the same version of stage on all nodes",
    )
}

struct Preparing<'a> {
    roots: &'a Roots,
    state: &'a Path,
    job: JobId,
    rule: IfExists,
    keep: Duration,
    cache: Cache,
    sites: Vec<Arc<Site>>,
    unpack: Option<Arc<Site>>,
    payload: &'a Payload,
    hash: ChunkHash,
    budget: &'a Arc<Budget>,
}

impl Preparing<'_> {
    fn run(&self, map: Option<Map>) -> Result<Preparation, Failure> {
        let seen = self
            .sites
            .iter()
            .map(|site| site.look())
            .collect::<Result<Vec<_>, _>>()?;
        let ours = self.is_ours();
        let mut stands = false;
        if let Some(site) = &self.unpack
            && !ours
        {
            let seen = site.look()?;
            match (self.rule, seen) {
                (_, Seen::Absent) => {}
                (IfExists::Skip, _) => {
                    return Ok(Preparation::Skipped {
                        path: site.shown.clone(),
                    });
                }
                (_, Seen::File(_)) => return Err(site.wrong_kind("a file")),
                (_, Seen::Other(kind)) => return Err(site.wrong_kind(kind)),
                // What the tar holds is compared with it when all of it is laid out.
                (IfExists::Fail | IfExists::Replace, _) => stands = true,
            }
        }
        if !ours && self.rule == IfExists::Skip && !seen.iter().any(|seen| matches!(seen, Seen::Absent)) {
            return Ok(Preparation::Skipped {
                path: self.sites[0].shown.clone(),
            });
        }
        if !ours {
            self.check_kinds(&seen)?;
        }
        let has_old = seen.iter().any(|seen| !matches!(seen, Seen::Absent));
        // What an older copy shares with the payload is known when the payload is laid out; and so is what is here already.
        let promise = if map.is_some() || ours || (has_old && self.rule != IfExists::Replace) {
            Promise::default()
        } else {
            self.promise_unseen(has_old)?
        };
        let table = self.open_table()?;
        let head = Head::open(self.state, self.job, self.payload)?;
        let map = match map {
            Some(map) => Some(map),
            None => self.head_of_before(&table, &head)?,
        };
        let copy = Copy::new(self.sites.clone(), self.rule, (self.keep, self.cache), promise);
        // What it holds lies beside the tar until the job is over, and is hardly ever less.
        let beside = match &self.unpack {
            Some(site) if !ours => {
                let tar = match self.payload.is_stream() {
                    // As much of it as has come.
                    true => self.sites[0].held_by_partial(),
                    false => self.payload.allocated.0,
                };
                let tried = room_needed(self.state, self.job).map_or(0, |room| room.0);
                tar.max(tried).saturating_sub(site.held_by_partial())
            }
            _ => 0,
        };
        let mut ended = None;
        let laying = lay::Laying {
            state: self.state.to_owned(),
            job: self.job,
            payload: self.payload.clone(),
            hash: self.hash,
            spaces: self.roots.spaces().clone(),
            beside: ByteCount(beside),
        };
        let mut published = None;
        let mut have = ChunkSet::empty(layout_of(self.payload)?.count());
        if let Some(map) = &map {
            let laid = laying.lay_out(&copy, &table, map)?;
            have = laid.have;
            have.insert_run(0..layout_of(self.payload)?.head_count());
            published = laid.published.then_some(false);
            ended = laid.ended;
        } else {
            table.set_record(laying.record(&copy, journal::Lies::Partial, None))?;
        }
        let promise = copy.promise();
        let store = Store::assemble(Parts {
            tail: self.tail(&have, &copy),
            payload: self.payload.clone(),
            map,
            head,
            laying: Some(laying),
            hash: self.hash,
            table,
            bytes: Bytes::Target(Box::new(copy)),
            have,
            budget: self.budget.clone(),
        })?;
        let target = Target {
            unpacking: self
                .unpack
                .as_ref()
                .map(|site| Unpacking::new(store.clone(), site.clone(), self.state, self.job, promise))
                .map(Box::new),
            is_candidate: has_old || stands,
            store,
            sites: self.sites.iter().chain(&self.unpack).cloned().collect(),
            state: self.state.to_owned(),
            job: self.job,
            published: Mutex::new(published),
        };
        if let Some(size) = ended {
            target.store.close(size)?;
        }
        if published.is_some() {
            target.finish().map_err(|error| match error {
                PublishError::Unfit(failure) | PublishError::Failed(failure) => failure,
                PublishError::RootDiffers => unreachable!("finishing compares no root"),
            })?;
        }
        Ok(Preparation::Ready(target))
    }

    /// Whether an earlier run of this job had begun to publish: then what stands there may be its own.
    fn is_ours(&self) -> bool {
        journal::peek(self.state, self.job).is_some_and(|record| {
            record.is_of(self.job, self.payload.manifest, self.hash) && record.phase >= journal::Phase::Intent
        }) && Intent::read(self.state, self.job).is_some()
    }

    fn check_kinds(&self, seen: &[Seen]) -> Result<(), Failure> {
        for ((site, seen), unit) in self.sites.iter().zip(seen).zip(&self.payload.units) {
            let left = self.rule == IfExists::Skip;
            match (unit.kind, seen) {
                _ if left => {}
                (_, Seen::Absent) | (UnitKind::Tree, Seen::Generation | Seen::Dir) => {}
                (UnitKind::File, Seen::File(stat)) => {
                    let same = stat.st_size.cast_unsigned() == unit.size.0;
                    if !same && self.rule == IfExists::Fail && !self.payload.is_stream() {
                        return Err(site.exists("with another size"));
                    }
                }
                (UnitKind::Tree, Seen::File(_)) => return Err(site.wrong_kind("a file")),
                (UnitKind::File, Seen::Generation | Seen::Dir) => return Err(site.wrong_kind("a directory")),
                (_, Seen::Other(kind)) => return Err(site.wrong_kind(kind)),
            }
        }
        Ok(())
    }

    /// The space for a payload of which only the size is known: its manifest comes ahead of its bytes.
    fn promise_unseen(&self, has_old: bool) -> Result<Promise, Failure> {
        let sum = |of: fn(&Site) -> u64| {
            let each = self.sites.iter().map(|site| of(site));
            each.fold(0, u64::saturating_add)
        };
        let most = self
            .payload
            .allocated
            .0
            .saturating_sub(sum(Site::held_by_partial));
        if !has_old {
            // Hard links among them need none, but nobody knows yet which are.
            let beside: u64 = self.sites.iter().map(|site| site.inodes_beside()).sum();
            let there: u64 = self.sites.iter().map(|site| site.inodes_of_partial()).sum();
            let entries = u64::from(self.payload.entries).saturating_sub(there);
            lay::check_inodes(&self.sites[0], entries + beside)?;
        }
        match self.promise(most) {
            // It may share all of the old copy at the best: what even then is too much need not be sent to be refused.
            Err(failure) if has_old && failure.code == Code::NoSpace => {
                self.promise(most.saturating_sub(sum(Site::held_by_final)))
            }
            other => other,
        }
    }

    fn promise(&self, need: u64) -> Result<Promise, Failure> {
        lay::promise(self.roots.spaces(), &self.sites[0], need, self.payload.data)
    }

    /// Leaves nothing of a target that is not ready, unless it is an earlier run's partial that may yet be of use.
    fn clean_up(&self, skipped: bool) {
        for site in self.sites.iter().chain(&self.unpack) {
            if skipped && let Err(failure) = site.remove_partial() {
                tracing::warn!("{failure}");
            }
        }
        if self.sites.iter().any(|site| site.has_partial()) {
            return;
        }
        if let Err(failure) = journal::remove(self.state, self.job) {
            tracing::warn!("{failure}");
        }
        self.sites.iter().for_each(|site| site.unmake());
    }

    fn open_table(&self) -> Result<Table, Failure> {
        let table = Table::open(self.state, self.job, layout_of(self.payload)?.count())?;
        let foreign = |record: &journal::Record| !record.is_of(self.job, self.payload.manifest, self.hash);
        if table.record().as_ref().is_some_and(foreign) {
            table.reset()?;
        }
        Ok(table)
    }

    /// Of a stream, the chunk here that is shorter than the others: where the partial ends.
    fn tail(&self, have: &ChunkSet, copy: &Copy) -> Option<(ChunkIndex, u32)> {
        let len = copy.len_of_partial().filter(|_| self.payload.is_stream())?;
        let index = ChunkIndex(u32::try_from(len / CHUNK).ok()?);
        let short = u32::try_from(len % CHUNK).ok()?;
        (short > 0 && have.contains(index)).then_some((index, short))
    }

    /// The manifest that an earlier run received, if all of it is here; else nothing of that run counts.
    fn head_of_before(&self, table: &Table, head: &Head) -> Result<Option<Map>, Failure> {
        if table.claimed()?.is_empty() {
            return Ok(None);
        }
        let mut bytes = vec![0; self.payload.head().0 as usize];
        head.read(0, &mut bytes)?;
        let manifest = self.payload.decode(&bytes).ok();
        if manifest.is_none() {
            table.reset()?;
        }
        Ok(manifest.map(Map::new))
    }
}
