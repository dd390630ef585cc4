//! A value behind a lock that threads wait on, until it is there or the run is aborted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::{Traffic, TransportError};

/// A value that threads wait on.
#[derive(Debug, Default)]
pub struct Waited<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Waited<T> {
    /// The value, to look at or change.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        // A worker that panicked aborts the run; what it left behind is not used for anything.
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the value and wakes who waits for it.
    pub fn change(&self, change: impl FnOnce(&mut T)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Lets everybody who waits look again, be it at the mark of an abort.
    ///
    /// Takes the lock first, so that nobody is between looking and waiting.
    pub fn wake(&self) {
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Waits until `ready` gives something; the time goes to `traffic`.
    ///
    /// # Errors
    /// When `aborted` is set and nothing is ready.
    pub fn wait<R>(
        &self,
        aborted: &AtomicBool,
        traffic: &mut Traffic,
        mut ready: impl FnMut(&mut T) -> Option<R>,
    ) -> Result<R, TransportError> {
        let mut guard = self.lock();
        if let Some(result) = ready(&mut guard) {
            return Ok(result);
        }
        let begin = Instant::now();
        let result = loop {
            if aborted.load(Ordering::SeqCst) {
                break Err(TransportError::Aborted);
            }
            guard = self
                .changed
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
            if let Some(result) = ready(&mut guard) {
                break Ok(result);
            }
        };
        traffic.waited += begin.elapsed();
        result
    }
}
