//! The chunk table: one file per job and node that is have-set, digest list and journal at once.
//!
//! ```text
//!   0 ..  8 KiB   head: what the table speaks of (job, manifest, file, boot) and how far publishing got; checksummed
//!   then          one slot of 36 bytes per chunk: its digest, and a CRC-32C over job, index and digest
//! ```
//!
//! A slot is written when its chunk is kept; one that is torn, zeroed or flipped reads as "not here". The digests are
//! read from here by index, never held in memory. It is a hint: who opens it decides what of it to believe
//! (see [`crate::target`]). Damage never refuses a resume: a bad head only means that all slots are doubted.

mod kept;
pub(crate) mod removed;

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::fs::{AtFlags, FallocateFlags, StatxFlags, statx};
use serde::{Deserialize, Serialize};
use stage_core::chunk::{ChunkIndex, ChunkSet, Layout};
use stage_core::digest::{ChunkDigest, ChunkHash, ManifestDigest};
use stage_core::failure::Failure;
use stage_core::id::JobId;

use crate::fault;
pub(crate) use kept::Kept;

const MAGIC: &[u8; 8] = b"stageT\r\n";
const VERSION: u32 = 2;
/// Room for the head: the longest path and much else.
const HEAD: u64 = 8 << 10;
/// Bytes of a slot.
const SLOT: usize = 36;
/// Slots read at a time when many are wanted.
const BATCH: u32 = 1024;
/// How many seconds after the last entry a file may have been written by those who enter.
const MOMENTS: i64 = 2;
/// The table's name in the job's directory.
const NAME: &str = "table";

/// Which file a table's chunks lie in, and in which state of it they were hashed.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileState {
    /// Device.
    pub(crate) dev: u64,
    /// Mount, so that another file system under the same device number is not taken for this one.
    pub(crate) mount: u64,
    /// Inode.
    pub(crate) ino: u64,
    /// Size in bytes.
    pub(crate) size: u64,
    /// Last change of the content.
    pub(crate) mtime: (i64, u32),
    /// Last change of content or inode.
    pub(crate) ctime: (i64, u32),
}

impl FileState {
    /// Looks at an open file.
    pub(crate) fn of(file: &File) -> rustix::io::Result<Self> {
        let x = statx(
            file,
            "",
            AtFlags::EMPTY_PATH,
            StatxFlags::BASIC_STATS | StatxFlags::MNT_ID,
        )?;
        Ok(Self {
            dev: rustix::fs::makedev(x.stx_dev_major, x.stx_dev_minor),
            mount: x.stx_mnt_id,
            ino: x.stx_ino,
            size: x.stx_size,
            mtime: (x.stx_mtime.tv_sec, x.stx_mtime.tv_nsec),
            ctime: (x.stx_ctime.tv_sec, x.stx_ctime.tv_nsec),
        })
    }

    /// Whether inode, size and times are the same. Device and mount have other numbers in another boot.
    pub(crate) fn looks_like(&self, other: &Self) -> bool {
        (self.ino, self.size, self.mtime, self.ctime) == (other.ino, other.size, other.mtime, other.ctime)
    }

    /// Whether it is the same file on the same mount, whatever was done to it.
    pub(crate) fn same_file(&self, other: &Self) -> bool {
        (self.dev, self.mount, self.ino) == (other.dev, other.mount, other.ino)
    }
}

/// Where a table's chunks lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Lies {
    /// In the partial file.
    Partial,
    /// In an older copy under the final name.
    OldCopy,
}

/// How far publishing got.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Phase {
    /// Chunks come in.
    Receiving,
    /// All is durable and the rename may have happened: what lies under the final name decides.
    Intent,
    /// It lies under the final name, durably.
    Published,
}

/// What a table speaks of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// The job.
    pub(crate) job: JobId,
    /// The payload.
    pub(crate) manifest: ManifestDigest,
    /// What digested the chunks.
    pub(crate) hash: ChunkHash,
    /// The boot in which it was written: the page cache of another one is gone.
    pub(crate) boot: [u8; 16],
    /// Where the chunks lie.
    pub(crate) lies: Lies,
    /// In which file.
    pub(crate) file: FileState,
    /// How far publishing got.
    pub(crate) phase: Phase,
    /// A write failed: nothing is believed unseen.
    pub(crate) doubt: bool,
    /// The target's directory, absolute.
    pub(crate) dir: Vec<u8>,
    /// How many partials there may be.
    pub(crate) units: u16,
    /// The final names; none where they would be too long for this head.
    pub(crate) names: Vec<Vec<u8>>,
    /// How many of the directory's last components were made for this job.
    pub(crate) made: u32,
}

impl Record {
    /// Whether its slots may be believed unseen, as far as the boot and the job tell.
    pub(crate) fn is_of(&self, job: JobId, manifest: ManifestDigest, hash: ChunkHash) -> bool {
        self.job == job && self.manifest == manifest && self.hash == hash
    }

    fn encode(&self) -> io::Result<Vec<u8>> {
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend([0; 4]);
        let mut out = postcard::to_extend(self, out).map_err(io::Error::other)?;
        let len = (out.len() - 16) as u32;
        out[12..16].copy_from_slice(&len.to_le_bytes());
        let crc = crc32c::crc32c(&out);
        out.extend(crc.to_le_bytes());
        if out.len() as u64 > HEAD {
            return Err(io::Error::other("the table's head is too long"));
        }
        Ok(out)
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let head: &[u8; 16] = bytes.first_chunk()?;
        let number = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        if &head[..8] != MAGIC || number(8) != VERSION {
            return None;
        }
        let end = 16usize.checked_add(usize::try_from(number(12)).ok()?)?;
        let (body, rest) = bytes.split_at_checked(end)?;
        if crc32c::crc32c(body).to_le_bytes() != *rest.first_chunk::<4>()? {
            return None;
        }
        postcard::from_bytes(&body[16..]).ok()
    }
}

/// This boot's id: all zeros (and never believed) where the kernel does not tell it.
pub(crate) fn boot_id() -> [u8; 16] {
    static BOOT: OnceLock<[u8; 16]> = OnceLock::new();
    *BOOT.get_or_init(|| match std::fs::read("/proc/sys/kernel/random/boot_id") {
        Ok(text) => *blake3::hash(&text).as_bytes().first_chunk().expect("32 bytes"),
        Err(_) => [0; 16],
    })
}

/// Whether a record was written in this boot.
pub(crate) fn is_this_boot(boot: [u8; 16]) -> bool {
    boot != [0; 16] && boot == boot_id()
}

/// The open chunk table of one job.
#[derive(Debug)]
pub(crate) struct Table {
    file: File,
    path: PathBuf,
    job: JobId,
    count: u32,
    record: Mutex<Option<Record>>,
}

/// The directory of a job in an agent's state directory.
pub(crate) fn job_dir(state: &Path, job: JobId) -> PathBuf {
    state.join("jobs").join(job.to_string())
}

impl Table {
    /// Opens or makes the table of a job with `count` chunks, and reserves its space. A head that is damaged, foreign
    /// or of another version reads as none.
    pub(crate) fn open(state: &Path, job: JobId, count: u32) -> Result<Self, Failure> {
        let dir = job_dir(state, job);
        let path = dir.join(NAME);
        let fail = |e: &io::Error| fault::state(e, "opening the chunk table", &path);
        if is_misplaced(&dir) {
            // Whoever put it there: what the table said is gone, and the job begins anew.
            tracing::warn!(%job, path = %dir.display(), "the job's directory is none: it is made anew");
            std::fs::remove_file(&dir).map_err(|e| fail(&e))?;
        }
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .map_err(|e| fail(&e))?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
            .open(&path)
            .map_err(|e| fail(&e))?;
        let table = Self {
            file,
            path: path.clone(),
            job,
            count,
            record: Mutex::new(None),
        };
        table.size_up().map_err(|e| fail(&e))?;
        let record = read_record(&table.file).filter(|r| r.job == job);
        *table.record.lock().unwrap_or_else(PoisonError::into_inner) = record;
        Ok(table)
    }

    /// A table that no one can open after this process: a source reads its file again rather than believe it.
    pub(crate) fn unnamed(state: &Path, job: JobId, count: u32) -> Result<Self, Failure> {
        let dir = state.join("jobs");
        let path = dir.join(format!("{job}.source"));
        let fail = |e: io::Error| fault::state(&e, "making the chunk table", &path);
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .map_err(fail)?;
        let table = Self::at(&path, job, count)?;
        std::fs::remove_file(&path).map_err(fail)?;
        Ok(table)
    }

    /// A new table at a place of its own, in place of what was there.
    pub(crate) fn at(path: &Path, job: JobId, count: u32) -> Result<Self, Failure> {
        let make = || {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
                .open(path)?;
            let table = Self {
                file,
                path: path.to_owned(),
                job,
                count,
                record: Mutex::new(None),
            };
            table.size_up()?;
            Ok(table)
        };
        make().map_err(|e: io::Error| fault::state(&e, "making the chunk table", path))
    }

    /// Whether the file was changed so long after the last entry that it was not by us: a chunk is entered as soon as it
    /// is written, so what was under way when a process died lies within moments of an entry.
    pub(crate) fn is_outlived_by(&self, file: &FileState) -> bool {
        FileState::of(&self.file).map_or(true, |own| file.mtime.0 > own.mtime.0 + MOMENTS)
    }

    /// Brings the file to its exact size, with its blocks reserved where the file system can.
    fn size_up(&self) -> io::Result<()> {
        if self.is_open() {
            // It grows with what comes.
            return Ok(());
        }
        let size = HEAD + u64::from(self.count) * SLOT as u64;
        if self.file.metadata()?.len() != size {
            self.file.set_len(size)?;
        }
        match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, size) {
            Ok(()) | Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Of a stream, whose end is not known.
    fn is_open(&self) -> bool {
        self.count == Layout::open().count()
    }

    fn fail(&self, error: &io::Error, doing: &str) -> Failure {
        fault::state(error, doing, &self.path)
    }

    /// What the table speaks of, if its head is whole.
    pub(crate) fn record(&self) -> Option<Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Writes another head.
    pub(crate) fn set_record(&self, record: Record) -> Result<(), Failure> {
        let mut held = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        self.write_head(&record)?;
        *held = Some(record);
        Ok(())
    }

    /// Changes the head, if there is one.
    pub(crate) fn update(&self, change: impl FnOnce(&mut Record)) -> Result<(), Failure> {
        let mut held = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(record) = &mut *held {
            change(record);
            self.write_head(record)?;
        }
        Ok(())
    }

    fn write_head(&self, record: &Record) -> Result<(), Failure> {
        record
            .encode()
            .and_then(|bytes| self.file.write_all_at(&bytes, 0))
            .map_err(|e| self.fail(&e, "writing the chunk table"))
    }

    /// Makes the head durable.
    pub(crate) fn sync(&self) -> Result<(), Failure> {
        self.file
            .sync_data()
            .map_err(|e| self.fail(&e, "syncing the chunk table"))
    }

    /// Forgets head and slots.
    pub(crate) fn reset(&self) -> Result<(), Failure> {
        *self.record.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.file
            .set_len(0)
            .and_then(|()| self.size_up())
            .map_err(|e| self.fail(&e, "emptying the chunk table"))
    }

    fn checksum(&self, index: ChunkIndex, digest: &[u8]) -> [u8; 4] {
        checksum(self.job, index, digest)
    }

    /// Writes a chunk's slot.
    pub(crate) fn put(&self, index: ChunkIndex, digest: ChunkDigest) -> Result<(), Failure> {
        let mut slot = [0; SLOT];
        slot[..32].copy_from_slice(&digest.0);
        slot[32..].copy_from_slice(&self.checksum(index, &digest.0));
        self.file
            .write_all_at(&slot, place(index.0))
            .map_err(|e| self.fail(&e, "writing the chunk table"))
    }

    /// Empties a chunk's slot.
    pub(crate) fn clear(&self, index: ChunkIndex) -> Result<(), Failure> {
        self.file
            .write_all_at(&[0; SLOT], place(index.0))
            .map_err(|e| self.fail(&e, "writing the chunk table"))
    }

    /// A chunk's digest, `None` if its slot is empty or damaged.
    pub(crate) fn get(&self, index: ChunkIndex) -> Option<ChunkDigest> {
        let mut slot = [0; SLOT];
        self.file.read_exact_at(&mut slot, place(index.0)).ok()?;
        parse(self.job, index, &slot)
    }

    /// Passes each slot of a run to `each`, in order.
    pub(crate) fn each(
        &self,
        run: Range<u32>,
        each: impl FnMut(ChunkIndex, Option<ChunkDigest>),
    ) -> Result<(), Failure> {
        each_slot(&self.file, self.job, run, each).map_err(|e| self.fail(&e, "reading the chunk table"))
    }

    /// The chunks whose slots are whole.
    pub(crate) fn claimed(&self) -> Result<ChunkSet, Failure> {
        let mut set = ChunkSet::empty(self.count);
        let end = if self.is_open() {
            let len = self
                .file
                .metadata()
                .map_err(|e| self.fail(&e, "looking at the chunk table"))?;
            u32::try_from(len.len().saturating_sub(HEAD) / SLOT as u64).unwrap_or(self.count)
        } else {
            self.count
        };
        self.each(0..end, |index, digest| {
            if digest.is_some() {
                set.insert(index);
            }
        })?;
        Ok(set)
    }
}

fn place(index: u32) -> u64 {
    HEAD + u64::from(index) * SLOT as u64
}

fn checksum(job: JobId, index: ChunkIndex, digest: &[u8]) -> [u8; 4] {
    let crc = crc32c::crc32c(job.as_bytes());
    let crc = crc32c::crc32c_append(crc, &index.0.to_le_bytes());
    crc32c::crc32c_append(crc, digest).to_le_bytes()
}

fn parse(job: JobId, index: ChunkIndex, slot: &[u8]) -> Option<ChunkDigest> {
    let (digest, crc) = slot.split_first_chunk::<32>()?;
    // Zeros are an empty slot even for the one index in four billion whose checksum they would fit.
    (digest != &[0; 32] && crc == checksum(job, index, digest)).then_some(ChunkDigest(*digest))
}

fn each_slot(
    file: &File,
    job: JobId,
    run: Range<u32>,
    mut each: impl FnMut(ChunkIndex, Option<ChunkDigest>),
) -> io::Result<()> {
    let mut buffer = vec![0; SLOT * BATCH.min(run.end.saturating_sub(run.start)) as usize];
    let mut at = run.start;
    while at < run.end {
        let some = BATCH.min(run.end - at);
        let bytes = &mut buffer[..some as usize * SLOT];
        file.read_exact_at(bytes, place(at))?;
        for (slot, index) in bytes.chunks_exact(SLOT).zip(at..) {
            let index = ChunkIndex(index);
            each(index, parse(job, index, slot));
        }
        at += some;
    }
    Ok(())
}

fn read_record(file: &File) -> Option<Record> {
    let mut bytes = vec![0; HEAD as usize];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], filled as u64) {
            Ok(0) | Err(_) => break,
            Ok(n) => filled += n,
        }
    }
    Record::decode(&bytes[..filled])
}

/// What a job's table says, without opening it for work.
pub(crate) fn peek(state: &Path, job: JobId) -> Option<Record> {
    let file = File::open(job_dir(state, job).join(NAME)).ok()?;
    read_record(&file).filter(|r| r.job == job)
}

/// What the tables of all jobs here speak of.
pub(crate) fn records(state: &Path) -> Vec<Record> {
    let Ok(entries) = std::fs::read_dir(state.join("jobs")) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| peek(state, entry.file_name().to_str()?.parse().ok()?))
        .collect()
}

/// Whether something stands where a job's directory should be that is none.
fn is_misplaced(dir: &Path) -> bool {
    std::fs::symlink_metadata(dir).is_ok_and(|meta| !meta.is_dir())
}

/// Removes a job's table and its directory, and whatever stands in its place.
pub(crate) fn remove(state: &Path, job: JobId) -> Result<(), Failure> {
    let dir = job_dir(state, job);
    let removed = if is_misplaced(&dir) {
        std::fs::remove_file(&dir)
    } else {
        std::fs::remove_dir_all(&dir)
    };
    match removed {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(fault::state(&e, "removing the job's journal", &dir)),
    }
}

/// The jobs that have a table here, with the time of its last change and how many chunks it claims.
pub(crate) fn tables(state: &Path) -> Vec<(JobId, std::time::SystemTime, u32)> {
    let Ok(entries) = std::fs::read_dir(state.join("jobs")) else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| {
            let job: JobId = entry.file_name().to_str()?.parse().ok()?;
            if is_misplaced(&entry.path()) {
                let meta = std::fs::symlink_metadata(entry.path()).ok()?;
                return Some((job, meta.modified().ok()?, 0));
            }
            let file = File::open(entry.path().join(NAME)).ok()?;
            let meta = file.metadata().ok()?;
            let slots = meta.len().saturating_sub(HEAD) / SLOT as u64;
            let mut kept = 0;
            // A table that cannot be read claims what was read of it: it is a hint.
            let _ = each_slot(
                &file,
                job,
                0..u32::try_from(slots).unwrap_or(u32::MAX),
                |_, digest| {
                    kept += u32::from(digest.is_some());
                },
            );
            Some((job, meta.modified().ok()?, kept))
        })
        .collect()
}
