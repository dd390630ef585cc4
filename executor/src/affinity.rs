//! Cores of their own for workers: a CPU worker owns its cores as another owns its accelerator.
//!
//! Left alone, the operating system often wakes a worker on the core of the one that it waited for,
//! and both then share it.

/// A worker's place among those of the same machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// From 0.
    pub index: usize,
    /// Workers on the machine.
    pub of: usize,
}

/// Binds the calling thread, and those it will start, to `count` of the cores it may use, from the
/// `first` of them on.
///
/// Does nothing where there are fewer than that.
#[cfg(target_os = "linux")]
pub fn bind(first: usize, count: usize) {
    use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
    use nix::unistd::Pid;

    let this_thread = Pid::from_raw(0);
    let Ok(allowed) = sched_getaffinity(this_thread) else {
        return;
    };
    let mut own = CpuSet::new();
    let found = (0..CpuSet::count())
        .filter(|&core| allowed.is_set(core).unwrap_or(false))
        .skip(first)
        .take(count)
        .filter(|&core| own.set(core).is_ok())
        .count();
    if found == count {
        // A sandbox may forbid it: the worker then runs where the system puts it.
        let _ = sched_setaffinity(this_thread, &own);
    }
}

/// Binds nothing: there is no such call on this system.
#[cfg(not(target_os = "linux"))]
pub fn bind(_first: usize, _count: usize) {}
