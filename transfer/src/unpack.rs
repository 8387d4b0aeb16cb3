//! `--unpack`: a tar that is laid out as a tree while it comes.
//!
//! A thread reads the payload's chunks in their order, as soon as each is here, and writes what the tar holds into a
//! directory that nobody else may enter. When FINAL is known and all of the payload agrees with it, that directory
//! becomes a generation like any other tree, and is entered in the index like one, with chunks and a manifest of its own
//! ([`Known`]). The tar itself stays beside it, unnamed, for as long as others may ask for its chunks.

mod bodies;
mod entries;
mod known;
mod order;

use std::io::{self, BufRead as _, BufReader, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rustix::io::Errno;
use stage_core::failure::{Code, Failure, show_path};
use stage_core::id::JobId;
use stage_core::units::ByteCount;

use crate::durable;
use crate::journal;
use crate::store::Store;
use crate::target::reserve;
use crate::target::site::Site;
use crate::target::space::Promise;
use bodies::Bodies;
use entries::HeldBack;
pub(crate) use known::Known;
use order::InOrder;

/// What the thread reads ahead of what it has laid out.
const AHEAD: usize = 256 << 10;

/// What file systems usually give space in.
const BLOCK: u64 = 4 << 10;

/// Where is written how much room an earlier try found that it needs at the least.
fn room(state: &Path, job: JobId) -> PathBuf {
    journal::job_dir(state, job).join("room")
}

/// How much room what a tar holds needs at the least, if it was tried in vain before.
pub(crate) fn room_needed(state: &Path, job: JobId) -> Option<ByteCount> {
    durable::read(&room(state, job)).map(ByteCount)
}

/// A tar being laid out.
#[derive(Debug)]
pub(crate) struct Unpacking {
    store: Arc<Store>,
    site: Arc<Site>,
    /// The agent's state directory.
    state: PathBuf,
    job: JobId,
    /// Room for what the tar holds, as far as that is known.
    promise: Promise,
    work: Mutex<Option<Work>>,
    /// What was laid out last, as far as it is known.
    found: Mutex<Found>,
}

#[derive(Debug, Default)]
struct Found {
    /// The directory, where its own mode keeps the agent out.
    shut: Option<OwnedFd>,
    bodies: Option<Bodies>,
    held_back: HeldBack,
    known: Option<Arc<Known>>,
}

/// What the thread gives.
#[derive(Debug)]
struct LaidOut {
    dir: OwnedFd,
    bodies: Bodies,
    held_back: HeldBack,
}

/// Why it gives nothing.
#[derive(Debug)]
enum NotLaidOut {
    /// The file system is full. What had been laid out, so many bytes on disk, is removed.
    Full(ByteCount),
    Failed(Failure),
}

#[derive(Debug)]
struct Work {
    order: Arc<order::Shared>,
    thread: JoinHandle<Result<LaidOut, NotLaidOut>>,
    /// How often chunks that were here had been disowned when it began: what was laid out of them is doubted.
    disowned: u64,
}

impl Unpacking {
    pub(crate) fn new(
        store: Arc<Store>,
        site: Arc<Site>,
        state: &Path,
        job: JobId,
        promise: Promise,
    ) -> Self {
        Self {
            store,
            site,
            state: state.to_owned(),
            job,
            promise,
            work: Mutex::default(),
            found: Mutex::default(),
        }
    }

    /// Begins to lay out what has come and what will come; again it does nothing.
    ///
    /// # Errors
    /// There is no thread for it.
    pub(crate) fn start(&self) -> Result<(), Failure> {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        if work.is_none() {
            *work = Some(self.begin()?);
        }
        Ok(())
    }

    fn begin(&self) -> Result<Work, Failure> {
        let disowned = self.store.disowned();
        let order = InOrder::new(&self.store);
        let shared = order.shared().clone();
        let site = self.site.clone();
        let bodies = Bodies::new(self.store.hash(), &self.state, self.promise.clone())
            .map_err(|e| crate::fault::state(&e, "making a list of digests", &self.state))?;
        let thread = std::thread::Builder::new()
            .name("unpack".into())
            .spawn(move || lay_out(&site, order, bodies))
            .map_err(|e| crate::fault::of_std(&e, "starting a thread", &self.site.shown))?;
        Ok(Work {
            order: shared,
            thread,
            disowned,
        })
    }

    /// Waits until all is laid out; the payload must be complete. Gives the directory.
    ///
    /// # Errors
    /// It is no tar, holds what cannot be laid out, there is too little space for it, or the disk's.
    pub(crate) fn finish(&self) -> Result<OwnedFd, Failure> {
        let mut held = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let work = match held.take() {
                Some(work) => work,
                None => self.begin()?,
            };
            let (disowned, order) = (work.disowned, work.order);
            let done = work.thread.join().unwrap_or_else(|_| {
                Err(NotLaidOut::Failed(Failure::new(
                    Code::Internal,
                    "laying out the tar panicked",
                    "report this as a bug of stage",
                )))
            });
            let laid_out = done.map_err(|why| match why {
                NotLaidOut::Failed(failure) => failure,
                NotLaidOut::Full(held) => {
                    // Of what is packed nobody knows how much it will be: so much, and a block more, at the least.
                    let data = self.store.layout().data();
                    let left = data.0.saturating_sub(order.read()).max(BLOCK);
                    let needs = ByteCount(held.0.saturating_add(left));
                    if let Err(failure) = durable::write(&room(&self.state, self.job), &needs.0) {
                        tracing::warn!("{failure}");
                    }
                    reserve::full(&self.site, data.max(needs), needs)
                }
            })?;
            if disowned == self.store.disowned() {
                *self.found() = Found {
                    shut: None,
                    bodies: Some(laid_out.bodies),
                    held_back: laid_out.held_back,
                    known: None,
                };
                return Ok(laid_out.dir);
            }
            // Some chunk was another one when it was laid out.
        }
    }

    fn found(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The directory that was laid out, if its own mode keeps the agent out. Given once: who holds it reads it.
    pub(crate) fn take_shut(&self) -> Option<OwnedFd> {
        self.found().shut.take()
    }

    /// What was laid out as `dir`, as a payload of its own. Long files are not read again for it, if this process has
    /// written them.
    ///
    /// # Errors
    /// It cannot be read (by modes of its own, where the agent is not root and did not lay it out in this process), or the
    /// state directory cannot be written.
    pub(crate) fn known(&self, dir: &OwnedFd) -> Result<Arc<Known>, Failure> {
        let mut found = self.found();
        if let Some(known) = &found.known {
            return Ok(known.clone());
        }
        let path = journal::job_dir(&self.state, self.job).join("tree");
        let known = Known::of(
            dir,
            self.site.name(),
            self.store.hash(),
            (&path, self.job),
            found.bodies.as_ref(),
            &found.held_back,
        )?;
        Ok(found.known.insert(Arc::new(known)).clone())
    }

    /// Gives what was laid out as `dir` the modes that keep the agent out. What it is has to be known before.
    ///
    /// # Errors
    /// As [`Self::known`]; or the disk's.
    pub(crate) fn settle(&self, dir: &OwnedFd) -> Result<(), Failure> {
        if self.found().held_back.is_empty() {
            return Ok(());
        }
        let known = self.known(dir)?;
        let fail = |e| self.site.fault(e, "setting the modes");
        known.settle(dir).map_err(fail)?;
        if known.is_shut() {
            self.found().shut = dir.try_clone().ok();
        }
        Ok(())
    }

    /// Ends the thread, whatever it has done.
    pub(crate) fn stop(&self) {
        let work = self.work.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(work) = work {
            work.order.stop();
            // What it says is of no interest any more.
            drop(work.thread.join());
        }
    }
}

impl Drop for Unpacking {
    fn drop(&mut self) {
        self.stop();
    }
}

fn lay_out(site: &Site, order: InOrder, mut bodies: Bodies) -> Result<LaidOut, NotLaidOut> {
    let stopped = order.shared().clone();
    let dir = site.create_tree().map_err(NotLaidOut::Failed)?;
    let fail = |e: &io::Error| {
        if stopped.is_stopped() {
            return NotLaidOut::Failed(Failure::new(Code::Cancelled, "the transfer was stopped", ""));
        }
        if Errno::from_io_error(e) == Some(Errno::NOSPC) {
            let no_inodes = reserve::is_out_of_inodes(site);
            let held = ByteCount(site.held_by_partial());
            // Nobody takes it up: the next try lays it out anew.
            if let Err(failure) = site.remove_partial() {
                tracing::warn!("{failure}");
            }
            return match no_inodes {
                true => NotLaidOut::Failed(reserve::no_inodes(site, None)),
                false => NotLaidOut::Full(held),
            };
        }
        NotLaidOut::Failed(match e.raw_os_error() {
            Some(_) => crate::fault::of_std(e, "laying out the tar", &site.shown),
            None => Failure::new(
                Code::SourceKind,
                format!("the payload cannot be unpacked: {}", quoting(&e.to_string())),
                "push a tar, also packed by gzip or zstd, or leave out --unpack",
            )
            .at(site.shown.clone()),
        })
    };
    let mut input = BufReader::with_capacity(AHEAD, order);
    let mut plain = opened(&mut input).map_err(|e| fail(&e))?;
    let mut held_back = HeldBack::new();
    let top = entries::lay_out(&dir, &mut plain, &mut bodies, &mut held_back).map_err(|e| fail(&e))?;
    // To the very end: what follows a tar's end belongs to it, and a packed one is checked by its own sum there.
    io::copy(&mut plain, &mut io::sink()).map_err(|e| fail(&e))?;
    let dir = match top {
        // One directory that holds all is the tree itself.
        Some(top) => site
            .raise(&top)
            .map_err(|e| NotLaidOut::Failed(site.fault(e, "laying out the tar")))?,
        None => dir,
    };
    Ok(LaidOut {
        dir,
        bodies,
        held_back,
    })
}

/// The tar's own bytes, whatever they are packed by.
fn opened<'r>(input: &'r mut BufReader<InOrder>) -> io::Result<Box<dyn Read + 'r>> {
    let start = input.fill_buf()?;
    if let Some(packer) = packer_of(start) {
        return Err(io::Error::other(format!(
            "it is packed by {packer}, which is not read: use gzip, zstd or no compression"
        )));
    }
    Ok(if start.starts_with(&[0x1f, 0x8b]) {
        Box::new(flate2::bufread::MultiGzDecoder::new(input))
    } else if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        Box::new(zstd::Decoder::with_buffer(input)?)
    } else {
        Box::new(input)
    })
}

/// What packs a tar that is not read here, told by its first bytes. (A tar begins with a name, and these are none.)
fn packer_of(start: &[u8]) -> Option<&'static str> {
    let magics: [(&[u8], &str); 6] = [
        (b"\xfd7zXZ\0", "xz"),
        (b"\x04\x22\x4d\x18", "lz4"),
        (b"LZIP\x01", "lzip"),
        (b"\x1f\x9d", "compress"),
        (b"PK\x03\x04", "zip"),
        (b"7z\xbc\xaf\x27\x1c", "7z"),
    ];
    // After its own three letters a digit, then the begin of a block or the end.
    let is_bzip2 = start.starts_with(b"BZh")
        && start.get(4..10).is_some_and(|block| {
            block == b"\x31\x41\x59\x26\x53\x59" || block == b"\x17\x72\x45\x38\x50\x90"
        });
    let known = magics.iter().find(|(magic, _)| start.starts_with(magic));
    known.map(|(_, name)| *name).or(is_bzip2.then_some("bzip2"))
}

/// An error's text fit for a terminal: it may quote what could not be read. Paths in it are so already, and stay.
fn quoting(text: &str) -> String {
    let parts: Vec<String> = text.split('\\').map(|part| show_path(part.as_bytes())).collect();
    parts.join("\\")
}
