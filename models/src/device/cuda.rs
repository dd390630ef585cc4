//! Looking for a CUDA driver without needing one.

/// Whether the driver library can be loaded.
pub(super) fn driver_present() -> bool {
    // SAFETY: only tries to open libcuda and closes it again; nothing of it is called.
    unsafe { cudarc::driver::sys::is_culib_present() }
}
