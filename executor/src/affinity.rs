//! Cores of their own for workers, so that the operating system does not move them about.

/// Binds the calling thread, and those it will start, to `count` cores from number `first` on.
///
/// Does nothing where there are fewer cores than that, or on systems without such a call.
#[cfg(target_os = "linux")]
pub fn bind(first: usize, count: usize) {
    use nix::sched::{CpuSet, sched_setaffinity};
    use nix::unistd::Pid;

    let available = std::thread::available_parallelism().map_or(1, usize::from);
    let mut cores = CpuSet::new();
    let all_set = (first..first + count).all(|core| core < available && cores.set(core).is_ok());
    if all_set {
        // A sandbox may forbid it: the worker then runs where the system puts it.
        let _ = sched_setaffinity(Pid::from_raw(0), &cores);
    }
}

/// Binds nothing: there is no such call on this system.
#[cfg(not(target_os = "linux"))]
pub fn bind(_first: usize, _count: usize) {}
