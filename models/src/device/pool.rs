//! Memory for tensors: aligned buffers that are kept for reuse.
//!
//! Training asks for the same sizes minibatch after minibatch. A pool keeps what was returned in size
//! classes, so that after the first minibatches nothing is allocated (and no fresh page is faulted in)
//! any more.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::{Pod, Zeroable};

/// One cache line; the unit in which buffers are sized and aligned.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A 64-byte aligned block of bytes that goes back to its pool when dropped.
///
/// A fresh block is zeroed; a reused one holds whatever its last user left.
pub struct Buffer {
    lines: Box<[Line]>,
    len: usize,
    pool: Option<Arc<Pool>>,
}

impl Buffer {
    /// A zeroed block that belongs to no pool, for data that lives on the host.
    pub fn unpooled(len: usize) -> Self {
        Buffer {
            lines: zeroed_lines(len.div_ceil(64)),
            len,
            pool: None,
        }
    }

    /// The bytes asked for.
    pub fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }

    /// The bytes asked for, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }

    /// The bytes as elements of a type whose size divides their number.
    pub(crate) fn elements<T: Pod>(&self) -> &[T] {
        &bytemuck::cast_slice(&self.lines)[..self.len / size_of::<T>()]
    }

    /// As [`Self::elements`], to write.
    pub(crate) fn elements_mut<T: Pod>(&mut self) -> &mut [T] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len / size_of::<T>()]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            pool.give_back(std::mem::take(&mut self.lines), self.len);
        }
    }
}

/// Bytes that a device holds for tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Bytes of all tensors alive now.
    pub live_bytes: usize,
    /// Most bytes that were alive at once since the start or the last reset.
    pub peak_bytes: usize,
    /// Bytes taken from the operating system: live ones, kept ones, and rounding up to size classes.
    pub held_bytes: usize,
    /// How often a request found nothing to reuse.
    pub misses: usize,
}

#[derive(Default)]
struct State {
    /// Returned blocks by their number of lines.
    free: HashMap<usize, Vec<Box<[Line]>>>,
    memory: Memory,
}

/// A free list by size class that any thread may take from and give back to.
#[derive(Default)]
pub struct Pool {
    state: Mutex<State>,
}

impl Pool {
    /// An empty pool.
    pub fn new() -> Arc<Self> {
        Arc::new(Pool::default())
    }

    /// A block of `len` bytes; contents unspecified.
    pub fn take(self: &Arc<Self>, len: usize) -> Buffer {
        let class = size_class(len.div_ceil(64));
        let reused = {
            let mut state = self.lock();
            let memory = &mut state.memory;
            memory.live_bytes += len;
            memory.peak_bytes = memory.peak_bytes.max(memory.live_bytes);
            let reused = state.free.get_mut(&class).and_then(Vec::pop);
            if reused.is_none() {
                state.memory.misses += 1;
                state.memory.held_bytes += class * 64;
            }
            reused
        };
        Buffer {
            lines: reused.unwrap_or_else(|| zeroed_lines(class)),
            len,
            pool: Some(self.clone()),
        }
    }

    /// Counters.
    pub fn memory(&self) -> Memory {
        self.lock().memory
    }

    /// Lets the peak start again from what is alive now.
    pub fn reset_peak(&self) {
        let memory = &mut self.lock().memory;
        memory.peak_bytes = memory.live_bytes;
    }

    fn give_back(&self, lines: Box<[Line]>, len: usize) {
        let mut state = self.lock();
        state.memory.live_bytes -= len;
        state.free.entry(lines.len()).or_default().push(lines);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every critical section leaves the state whole, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn zeroed_lines(lines: usize) -> Box<[Line]> {
    bytemuck::zeroed_slice_box(lines)
}

/// Rounds up to an eighth of the power of two below, so at most 12.5 % is wasted and similar sizes share.
fn size_class(lines: usize) -> usize {
    if lines <= 8 {
        return lines;
    }
    let step = 1 << (lines.ilog2() - 3);
    lines.next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_zeroed_at_first() {
        let pool = Pool::new();
        let buffer = pool.take(1000);
        assert_eq!(buffer.bytes().as_ptr() as usize % 64, 0);
        assert_eq!(buffer.bytes().len(), 1000);
        assert!(buffer.bytes().iter().all(|&b| b == 0));
    }

    #[test]
    fn dropped_buffers_are_reused_from_any_thread() {
        let pool = Pool::new();
        let buffer = pool.take(4096);
        std::thread::spawn(move || drop(buffer)).join().unwrap();
        assert_eq!(pool.memory().live_bytes, 0);
        let _again = pool.take(4090);
        let memory = pool.memory();
        assert_eq!(
            (memory.misses, memory.live_bytes, memory.peak_bytes),
            (1, 4090, 4096)
        );
    }

    #[test]
    fn peak_counts_simultaneous_bytes() {
        let pool = Pool::new();
        let first = pool.take(100);
        let second = pool.take(200);
        drop(first);
        let _third = pool.take(50);
        assert_eq!(pool.memory().peak_bytes, 300);
        drop(second);
        pool.reset_peak();
        assert_eq!(pool.memory().peak_bytes, 50);
    }

    #[test]
    fn classes_waste_at_most_an_eighth() {
        for lines in 1..5000 {
            let class = size_class(lines);
            assert!(
                class >= lines && class * 8 <= lines * 9 + 8,
                "{lines} -> {class}"
            );
        }
    }
}
