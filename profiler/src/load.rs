//! Company while measuring: other workers of the same machine at the same work.
//!
//! Workers that share a machine share its memory and its last-level cache. A profile taken on an otherwise
//! idle machine is too good for them, most of all for layers that stream large weights.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::rig::Rig;

/// Runs `work` while every rig of `neighbours` trains on a thread of its own.
pub fn beside<T>(neighbours: Vec<Rig>, work: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for mut rig in neighbours {
            let stop = &stop;
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    rig.train();
                }
            });
        }
        // Also when `work` panics the neighbours must end, or the scope would wait for ever.
        let _stop = StopOnDrop(&stop);
        work()
    })
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
