//! Each file's SHA-256, and its MD5 where one is expected: in order, beside the transfer, and late if it must be. Holes are hashed, not read.
//!
//! The sequence has the bodies of the large files first and the rest of each in the pack behind them, so a large file's
//! hashers wait from its body to its tail.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use md5::Md5;
use sha2::{Digest as _, Sha256};
use stage_core::assignment::SourceReport;
use stage_core::chunk::{CHUNK, ChunkIndex, Part};
use stage_core::digest::{Expected, FileDigest, Md5Digest, chunk_digest};
use stage_core::failure::{Code, Failure};
use stage_core::manifest::Kind;

use super::expect::Wanted;
use super::{Shared, files, listing};
use crate::budget::ChunkBuf;
use crate::drive::{End, no_thread};
use crate::sparse::ZEROS;
use crate::store::map::{Map, size_of};

/// So many chunks lie ready for the lane.
const QUEUE: usize = 2;
/// Of chunks that are read again: those that lie ready, the one that is read, the one that is hashed.
const BUFFERS: usize = QUEUE + 2;
/// How long a chunk that must be read again waits for children that want the processor.
const WAY: Duration = Duration::from_millis(50);
/// So much time of the lane tells whether it gets the processor.
const LATELY: Duration = Duration::from_millis(20);

pub(super) fn run(shared: &Shared) {
    match hash_all(shared) {
        Ok(sha256) => {
            shared.drive.advance(|progress| progress.digested = true);
            // A digest of a file that has changed would be of nothing that exists.
            if shared.drive.wait(|progress| progress.declared) {
                shared.drive.say(SourceReport::Sha256(sha256));
            }
        }
        Err(End::Stopped) => {}
        Err(End::Failed(failure)) => shared.fail(failure),
    }
}

fn hash_all(shared: &Shared) -> Result<FileDigest, End> {
    let map = shared.store.map().map_err(End::Failed)?;
    let mut lane = Lane {
        shared,
        map,
        open: HashMap::new(),
        digests: vec![None; map.entries().len()],
    };
    let (crowded, over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (send, chunks) = sync_channel(QUEUE);
        let (back, empties) = sync_channel(BUFFERS);
        let supply = Supply {
            shared,
            crowded: &crowded,
            over: &over,
            empties,
            made: 0,
        };
        let supply = std::thread::Builder::new()
            .name("source-again".into())
            .spawn_scoped(scope, move || supply.run(&send))
            .map_err(|error| End::Failed(no_thread(&error)))?;
        let hashed = lane.all(chunks, &back, &crowded);
        over.store(true, Ordering::Relaxed);
        shared.drive.wake();
        let supplied = supply.join().expect("supplying chunks does not panic");
        hashed.and(supplied)
    })?;
    lane.without_data()?;
    match &lane.digests[..] {
        [Some(only)] => Ok(*only),
        digests => Ok(listing::digest(map.entries(), digests)),
    }
}

/// Gives the lane its chunks in order, ahead of it by a few: reading again and checking is half as much work as SHA-256.
struct Supply<'a> {
    shared: &'a Shared,
    /// The lane does not get the processor that it wants.
    crowded: &'a AtomicBool,
    /// Nobody wants chunks any more.
    over: &'a AtomicBool,
    /// Buffers that were hashed.
    empties: Receiver<Vec<u8>>,
    /// How many there are.
    made: usize,
}

/// A chunk's bytes.
enum Bytes {
    Hot(Arc<ChunkBuf>),
    Again(Vec<u8>),
}

impl Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Self::Hot(bytes) => bytes,
            Self::Again(bytes) => bytes,
        }
    }
}

impl Supply<'_> {
    fn run(mut self, send: &SyncSender<(u64, Bytes)>) -> Result<(), End> {
        let store = &self.shared.store;
        for index in (0..store.layout().count()).map(ChunkIndex) {
            let over = || self.over.load(Ordering::Relaxed);
            if !self
                .shared
                .drive
                .wait(|progress| progress.read > index.0 || over())
                || over()
            {
                return Err(End::Stopped);
            }
            let Part::Data(place) = store.layout().part(index) else {
                continue;
            };
            let bytes = match store.hot(index) {
                Some(bytes) => Bytes::Hot(bytes),
                None => self.again(index)?,
            };
            if send.send((place, bytes)).is_err() {
                // The lane has ended early, and says why.
                return Err(End::Stopped);
            }
        }
        Ok(())
    }

    /// The lane has fallen behind what is in memory.
    fn again(&mut self, index: ChunkIndex) -> Result<Bytes, End> {
        self.give_way();
        let mut own = if self.made < BUFFERS {
            self.made += 1;
            Vec::with_capacity(CHUNK as usize)
        } else {
            self.empties.recv().map_err(|_| End::Stopped)?
        };
        read_again(self.shared, index, &mut own).map_err(End::Failed)?;
        Ok(Bytes::Again(own))
    }

    /// Where processors are short, children get their bytes first, and what only waits for the digest waits: what is read
    /// again now would cost them twice. It goes on at a chunk a moment, so that it sees when that is over.
    fn give_way(&self) {
        let since = Instant::now();
        let is_first = self.shared.expect.is_empty();
        while is_first
            && self.crowded.load(Ordering::Relaxed)
            && since.elapsed() < WAY
            && !self.shared.drive.is_stopped()
            && !self.over.load(Ordering::Relaxed)
            && !(self.shared.has_read_all() && self.shared.drive.served.is_idle())
        {
            std::thread::park_timeout(WAY / 10);
        }
    }
}

/// Whether a thread that only computes gets a processor to itself.
#[derive(Debug, Default)]
struct Turn {
    /// Of the processor, and of the clock, lately.
    had: Duration,
    took: Duration,
}

impl Turn {
    fn begin(&self) -> (Duration, Instant) {
        (processor_time(), Instant::now())
    }

    fn end(&mut self, (processor, clock): (Duration, Instant)) {
        self.add(processor_time().saturating_sub(processor), clock.elapsed());
    }

    fn add(&mut self, had: Duration, took: Duration) {
        self.had += had;
        self.took += took;
        if self.took > LATELY {
            self.had /= 2;
            self.took /= 2;
        }
    }

    fn is_crowded(&self) -> bool {
        self.took > LATELY / 4 && self.had * 5 < self.took * 4
    }
}

/// What this thread has had of a processor.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(
        time.tv_sec.cast_unsigned(),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

struct Lane<'a> {
    shared: &'a Shared,
    map: &'a Map,
    /// Files of which some bytes have come and some have not.
    open: HashMap<u32, Hashing>,
    /// By entry.
    digests: Vec<Option<FileDigest>>,
}

/// One file, as far as it has come.
struct Hashing {
    /// How far in the file.
    at: u64,
    /// Bytes of data that are to come.
    left: u64,
    sha256: Sha256,
    md5: Option<Md5>,
}

impl Lane<'_> {
    /// Hashes what comes, gives buffers back, and says whether it gets the processor for that.
    fn all(
        &mut self,
        chunks: Receiver<(u64, Bytes)>,
        back: &SyncSender<Vec<u8>>,
        crowded: &AtomicBool,
    ) -> Result<(), End> {
        let mut turn = Turn::default();
        for (place, bytes) in chunks {
            let begun = turn.begin();
            self.chunk(place, &bytes)?;
            turn.end(begun);
            crowded.store(turn.is_crowded(), Ordering::Relaxed);
            if let Bytes::Again(bytes) = bytes {
                // There is room for all, and if nobody wants them any more they may go.
                let _ = back.try_send(bytes);
            }
        }
        Ok(())
    }

    /// A chunk's bytes, each piece after the hole before it.
    fn chunk(&mut self, place: u64, bytes: &[u8]) -> Result<(), End> {
        let map = self.map;
        map.pieces(place, bytes.len(), |entry, from, part| {
            let mut file = self.open.remove(&entry).unwrap_or_else(|| self.begin(entry));
            self.zeros_to(&mut file, from)?;
            file.left -= part.len() as u64;
            self.update(&mut file, &bytes[part]);
            if file.left > 0 {
                self.open.insert(entry, file);
                return Ok(());
            }
            self.finish(entry, file)
        })
    }

    /// Files that are empty, or one hole.
    fn without_data(&mut self) -> Result<(), End> {
        for (entry, index) in self.map.entries().iter().zip(0..) {
            if matches!(entry.kind, Kind::File { .. }) && entry.data_len() == 0 {
                self.finish(index, self.begin(index))?;
            }
        }
        Ok(())
    }

    fn begin(&self, entry: u32) -> Hashing {
        let wants_md5 = self
            .expected(entry)
            .iter()
            .any(|wanted| matches!(wanted.digest, Expected::Md5(_)));
        Hashing {
            at: 0,
            left: self.map.entry(entry).data_len(),
            sha256: Sha256::new(),
            md5: wants_md5.then(Md5::new),
        }
    }

    fn expected(&self, entry: u32) -> &[Wanted] {
        let all = &self.shared.expect;
        let first = all.partition_point(|wanted| wanted.entry < entry);
        let after = all.partition_point(|wanted| wanted.entry <= entry);
        &all[first..after]
    }

    fn finish(&mut self, entry: u32, mut file: Hashing) -> Result<(), End> {
        self.zeros_to(&mut file, size_of(self.map.entry(entry)).0)?;
        let sha256 = FileDigest(file.sha256.finalize().into());
        let md5 = file.md5.map(|md5| Md5Digest(md5.finalize().into()));
        for wanted in self.expected(entry) {
            let (what, expected) = match wanted.digest {
                Expected::Sha256(digest) if digest != sha256 => {
                    (format!("SHA-256 is {sha256}"), digest.to_string())
                }
                Expected::Md5(digest) if Some(digest) != md5 => (
                    format!("MD5 is {}", md5.expect("computed where one is expected")),
                    digest.to_string(),
                ),
                _ => continue,
            };
            let failure = Failure::new(
                Code::Unexpected,
                format!("the source's {what}, expected was {expected}"),
                "check the source file, or the file given with --expect",
            );
            return Err(End::Failed(failure.at(self.shared.files.shown(self.map, entry))));
        }
        self.digests[entry as usize] = Some(sha256);
        Ok(())
    }

    fn zeros_to(&self, file: &mut Hashing, end: u64) -> Result<(), End> {
        while file.at < end {
            if self.shared.drive.is_over() {
                return Err(End::Stopped);
            }
            let some = (end - file.at).min(ZEROS.len() as u64) as usize;
            self.update(file, &ZEROS[..some]);
        }
        Ok(())
    }

    fn update(&self, file: &mut Hashing, bytes: &[u8]) {
        file.sha256.update(bytes);
        if let Some(md5) = &mut file.md5 {
            md5.update(bytes);
        }
        file.at += bytes.len() as u64;
        let passed = &self.shared.drive.sha256_bytes;
        passed.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    }
}

/// Reads a chunk through the page cache and checks that it is the one that was sent.
fn read_again(shared: &Shared, index: ChunkIndex, own: &mut Vec<u8>) -> Result<(), Failure> {
    let store = &shared.store;
    own.resize(store.layout().len(index), 0);
    store.read(index, 0, own)?;
    shared
        .drive
        .bytes_read
        .fetch_add(own.len() as u64, Ordering::Relaxed);
    if store.digest(index) != Some(chunk_digest(store.hash(), own)) {
        return Err(files::changed(
            &format!("chunk {index} reads differently now"),
            &format!("{} s after the push began", shared.files.since_begun()),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_is_crowded_that_waits_for_a_processor() {
        let ms = Duration::from_millis;
        let mut turn = Turn::default();
        // One chunk says nothing: it may just have lost its turn.
        turn.add(ms(1), ms(4));
        assert!(!turn.is_crowded());
        turn.add(ms(1), ms(4));
        assert!(turn.is_crowded());
        for _ in 0..100 {
            turn.add(ms(1), ms(1));
        }
        assert!(!turn.is_crowded());
        for _ in 0..10 {
            turn.add(ms(1), ms(2));
        }
        assert!(turn.is_crowded());
    }
}
