//! Several cores for one kernel.
//!
//! Threads are started per call: that takes some tens of microseconds, so only work of at least
//! [`WORTH`] multiply-adds per thread is divided. One thread, the default, never starts another.

use std::num::NonZero;

/// Multiply-adds that take long enough, about a fifth of a millisecond, to be worth a thread.
const WORTH: usize = 1 << 23;

/// How many of `threads` to use for so many multiply-adds.
pub(super) fn useful(threads: usize, multiply_adds: usize) -> NonZero<usize> {
    NonZero::new(threads.min(multiply_adds / WORTH)).unwrap_or(NonZero::<usize>::MIN)
}

/// Calls `f` with every part, each on a thread of its own, the first on this one.
pub(super) fn each<T: Send>(parts: impl IntoIterator<Item = T>, f: impl Fn(T) + Sync) {
    let mut parts = parts.into_iter();
    let Some(first) = parts.next() else { return };
    let f = &f;
    std::thread::scope(|scope| {
        for part in parts {
            scope.spawn(move || f(part));
        }
        f(first);
    });
}
