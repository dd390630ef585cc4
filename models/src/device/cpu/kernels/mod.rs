//! Loops over slices that do the CPU device's heavy work.
//!
//! Every product of matrices, convolutions included, runs through one register tile (`tile`). Kernels
//! are generic over `pulp::Simd` and pick the widest instruction set of the machine at run time: AVX-512,
//! AVX2 with FMA, NEON, else scalar code.
//!
//! A generic function that `pulp` dispatches into must be inlined to keep the instruction set's features;
//! that is why so much here is `#[inline(always)]`.

mod block;
pub mod conv;
pub mod elementwise;
pub mod layer_norm;
pub mod layout;
pub mod lrn;
pub mod lstm;
mod math;
pub mod matmul;
pub mod norm;
mod pack;
mod parallel;
mod patches;
pub mod pool;
mod scratch;
mod sum;
mod tile;

/// The widest instruction set that this machine has and `pulp` knows.
fn arch() -> pulp::Arch {
    #[cfg(test)]
    if let Some(arch) = testing::FORCED.get() {
        return arch;
    }
    pulp::Arch::new()
}

#[cfg(test)]
mod testing {
    //! What the tests of several kernels need.

    use std::cell::Cell;

    use pulp::Arch;

    thread_local! {
        /// What [`super::arch`] answers on this thread.
        pub static FORCED: Cell<Option<Arch>> = const { Cell::new(None) };
    }

    /// Calls `f` once per instruction set that this machine can run.
    pub fn on_every_arch(f: impl Fn()) {
        let mut all = vec![Arch::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            all.extend(pulp::x86::V3::try_new().map(Arch::V3));
            all.extend(pulp::x86::V4::try_new().map(Arch::V4));
        }
        #[cfg(target_arch = "aarch64")]
        all.push(Arch::new());
        for arch in all {
            FORCED.set(Some(arch));
            f();
            FORCED.set(None);
        }
    }

    /// `n` repeatable values in -0.5..0.5.
    pub fn values(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state as f32 / u32::MAX as f32 - 0.5
        };
        (0..n).map(|_| next()).collect()
    }

    /// Every element within `tolerance` times the largest expected one.
    #[track_caller]
    pub fn assert_close(what: &str, actual: &[f32], expected: &[f32], tolerance: f32) {
        assert_eq!(actual.len(), expected.len(), "{what}");
        let scale = expected.iter().fold(1.0f32, |scale, x| scale.max(x.abs()));
        for (i, (&actual, &expected)) in actual.iter().zip(expected).enumerate() {
            let close = actual == expected || (actual - expected).abs() <= tolerance * scale;
            assert!(close, "{what}: element {i} is {actual}, not {expected}");
        }
    }
}
