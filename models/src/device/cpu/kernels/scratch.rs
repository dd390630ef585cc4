//! Working memory of the kernels, kept from call to call.
//!
//! Fresh pages cost a fault each, more than the work on them. Buffers are per thread and only grow; what
//! kernels ask for is bounded by cache sizes and by one padded sample, not by the minibatch.

use std::cell::RefCell;

use pulp::bytemuck;

/// A cache line, so that vectors of 64 bytes never straddle two.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

// SAFETY: 16 floats in 64 bytes: no padding, and every bit pattern is a float.
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for Line {}

thread_local! {
    static FREE: RefCell<Vec<Vec<Line>>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with `len` floats, aligned to a cache line, of unspecified contents.
pub(super) fn with<R>(len: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    // Taken out of the list while in use, so calls may nest.
    let mut lines = FREE.with_borrow_mut(Vec::pop).unwrap_or_default();
    let wanted = len.div_ceil(16);
    if lines.len() < wanted {
        lines.clear();
        lines.resize(wanted, Line([0.0; 16]));
    }
    let result = f(&mut bytemuck::cast_slice_mut(&mut lines)[..len]);
    FREE.with_borrow_mut(|free| free.push(lines));
    result
}
