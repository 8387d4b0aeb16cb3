//! Chunk buffers under one byte budget: what an agent holds of payloads in memory, whatever their size and number.
//!
//! A buffer is taken before bytes are read into it and comes back when the last who shares it drops it. Kept chunks
//! stay *hot* (may be sent without reading the file) until their buffers are needed again, oldest first.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use stage_core::chunk::{CHUNK, ChunkIndex};
use stage_core::units::ByteCount;

/// The buffers of one agent.
pub struct Budget {
    state: Mutex<State>,
}

struct State {
    /// Buffers that nobody uses. They are made on first use and never given back to the system.
    free: Vec<Box<[u8]>>,
    /// How many more may be made.
    unmade: usize,
    /// Hot chunks, oldest first.
    hot: VecDeque<(Owner, ChunkIndex, Arc<ChunkBuf>)>,
}

/// Tells the hot chunks of one store from another's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Owner(pub u64);

impl Budget {
    /// A budget of so many bytes, rounded down to whole chunks, two at least.
    pub fn new(bytes: ByteCount) -> Arc<Self> {
        let chunks = usize::try_from(bytes.0 / CHUNK)
            .expect("fits the address space")
            .max(2);
        Arc::new(Self {
            state: Mutex::new(State {
                free: Vec::new(),
                unmade: chunks,
                hot: VecDeque::new(),
            }),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every section below leaves the state whole, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer of one chunk, or `None` if all are in use: then the caller goes on with a block buffer of its own.
    /// The oldest hot chunk that nobody is sending makes room.
    pub fn take(self: &Arc<Self>) -> Option<ChunkBuf> {
        let mut state = self.state();
        let bytes = if let Some(bytes) = state.free.pop() {
            bytes
        } else if state.unmade > 0 {
            state.unmade -= 1;
            vec![0; CHUNK as usize].into_boxed_slice()
        } else {
            let oldest = state
                .hot
                .iter()
                .position(|(_, _, chunk)| Arc::strong_count(chunk) == 1)?;
            let (_, _, chunk) = state.hot.remove(oldest).expect("the position was just found");
            // Only the queue held it and the lock is ours, so nobody can have begun to share it.
            let mut chunk = Arc::into_inner(chunk).expect("the only holder");
            std::mem::take(&mut chunk.bytes)
        };
        Some(ChunkBuf {
            bytes,
            len: 0,
            home: Arc::downgrade(self),
        })
    }

    /// Keeps a whole chunk hot until its buffer is needed.
    pub fn keep_hot(&self, owner: Owner, index: ChunkIndex, chunk: Arc<ChunkBuf>) {
        self.state().hot.push_back((owner, index, chunk));
    }

    /// A chunk that is still hot.
    pub fn hot(&self, owner: Owner, index: ChunkIndex) -> Option<Arc<ChunkBuf>> {
        // Newest last and asked for soonest: a few dozen at most, searched from the end.
        self.state()
            .hot
            .iter()
            .rev()
            .find(|(o, i, _)| *o == owner && *i == index)
            .map(|(_, _, chunk)| chunk.clone())
    }

    /// Forgets a store's hot chunks.
    pub fn forget(&self, owner: Owner) {
        let gone: VecDeque<_> = {
            let mut state = self.state();
            let (gone, kept) = state.hot.drain(..).partition(|(o, _, _)| *o == owner);
            state.hot = kept;
            gone
        };
        // Dropped outside the lock: a dropped buffer takes it to come home.
        drop(gone);
    }
}

impl std::fmt::Debug for Budget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state();
        write!(
            f,
            "Budget(free {}, unmade {}, hot {})",
            state.free.len(),
            state.unmade,
            state.hot.len()
        )
    }
}

/// A buffer of one chunk that goes home when dropped. As a slice it is the bytes filled so far.
pub struct ChunkBuf {
    bytes: Box<[u8]>,
    len: usize,
    home: Weak<Budget>,
}

impl ChunkBuf {
    /// Sets how many bytes it holds, [`CHUNK`] at most, and gives them for writing.
    pub fn resize(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= self.bytes.len(), "a chunk is {CHUNK} bytes at most");
        self.len = len;
        &mut self.bytes[..len]
    }
}

impl Deref for ChunkBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl DerefMut for ChunkBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }
}

impl Drop for ChunkBuf {
    fn drop(&mut self) {
        if let Some(home) = self.home.upgrade()
            && !self.bytes.is_empty()
        {
            home.state().free.push(std::mem::take(&mut self.bytes));
        }
    }
}

impl std::fmt::Debug for ChunkBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ChunkBuf({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_more_buffers_than_the_budget() {
        let budget = Budget::new(ByteCount(3 * CHUNK));
        let held: Vec<_> = std::iter::from_fn(|| budget.take()).collect();
        assert_eq!(held.len(), 3);
        drop(held);
        assert_eq!(std::iter::from_fn(|| budget.take()).collect::<Vec<_>>().len(), 3);
    }

    #[test]
    fn the_oldest_hot_chunk_that_nobody_sends_makes_room() {
        let budget = Budget::new(ByteCount(2 * CHUNK));
        let (a, b) = (Owner(1), Owner(2));
        for (owner, fill) in [(a, 1), (b, 2)] {
            let mut chunk = budget.take().unwrap();
            chunk.resize(3).fill(fill);
            budget.keep_hot(owner, ChunkIndex(0), Arc::new(chunk));
        }
        let sending = budget.hot(a, ChunkIndex(0)).unwrap();
        let taken = budget.take().expect("the other one makes room");
        assert!(budget.take().is_none());
        assert!(budget.hot(b, ChunkIndex(0)).is_none());
        assert_eq!(&sending[..], [1, 1, 1]);
        drop((taken, sending));
        budget.forget(a);
        assert_eq!(std::iter::from_fn(|| budget.take()).collect::<Vec<_>>().len(), 2);
    }
}
