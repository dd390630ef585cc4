//! The register tile: a few rows times a few vectors of C, accumulated over k in registers.
//!
//! Per step of k the tile loads [`VECTORS`] vectors of B, broadcasts one element of each row of A from
//! memory and issues rows x vectors fused multiply-adds, so that the multiply-adds and not the loads are
//! the limit. A is read row by row in place (its rows are contiguous in k); B is a panel whose rows are as
//! wide as the tile, or a matrix in place.

use pulp::{Simd, WithSimd};

/// Vectors of C per row of a full tile.
pub(super) const VECTORS: usize = 3;

/// Most rows of a tile, whatever the instruction set.
pub(super) const MAX_ROWS: usize = 8;

/// Rows of a full tile: accumulators, a row of B and a broadcast element fit into the registers.
pub(super) const fn rows<S: Simd>() -> usize {
    if S::REGISTER_COUNT >= 32 { MAX_ROWS } else { 4 }
}

/// What a tile starts from.
#[derive(Clone, Copy)]
pub(super) enum Start {
    /// C is overwritten.
    Zero,
    /// C is overwritten; a value per row of the tile is added.
    Bias(*const f32),
    /// The product is added to C.
    Add,
}

/// `C = alpha * A B` plus what `start` says, for one tile.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Length of the inner products.
    pub k: usize,
    /// First row of A; its elements are contiguous in k.
    pub a: *const f32,
    /// Elements from one row of A to the next.
    pub a_stride: usize,
    /// First row of B, at least `vectors * LANES` readable elements each.
    pub b: *const f32,
    /// Elements from one row of B to the next.
    pub b_stride: usize,
    /// First element of C.
    pub c: *mut f32,
    /// Elements from one row of C to the next.
    pub c_stride: usize,
    /// Rows, 1 to [`rows`].
    pub rows: usize,
    /// Columns, 1 to `VECTORS * LANES`.
    pub columns: usize,
    /// Factor of the product.
    pub alpha: f32,
    /// What the product is added to.
    pub start: Start,
    /// Writes C past the caches; C must be aligned to whole vectors. Follow with [`fence`].
    pub stream: bool,
    /// Memory needed soon: one cache line per step of k, `ahead_stride` elements apart.
    pub ahead: *const f32,
    /// See `ahead`.
    pub ahead_stride: usize,
}

impl Tile {
    /// Computes the tile.
    ///
    /// # Safety
    /// The pointers must be valid for what the fields describe; C overlaps neither A nor B.
    #[inline(always)]
    pub unsafe fn run<S: Simd>(self, simd: S) {
        macro_rules! pick {
            ($($rows:literal)*) => {
                match (self.rows, self.columns.div_ceil(S::F32_LANES)) {
                    $(
                        ($rows, 1) => simd.vectorize(Sized::<$rows, 1>(self)),
                        ($rows, 2) => simd.vectorize(Sized::<$rows, 2>(self)),
                        ($rows, 3) => simd.vectorize(Sized::<$rows, 3>(self)),
                    )*
                    _ => unreachable!("a tile has 1 to 8 rows and 1 to 3 vectors"),
                }
            };
        }
        pick!(1 2 3 4 5 6 7 8);
    }
}

/// A tile whose extents the compiler knows.
struct Sized<const ROWS: usize, const VECTORS: usize>(Tile);

impl<const ROWS: usize, const VECTORS: usize> WithSimd for Sized<ROWS, VECTORS> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let t = self.0;
        let zero = simd.splat_f32s(0.0);
        let mut sum = [[zero; VECTORS]; ROWS];
        let (mut a, mut b, mut ahead) = (t.a, t.b, t.ahead);
        for _ in 0..t.k {
            let mut row = [zero; VECTORS];
            prefetch(ahead);
            for (v, value) in row.iter_mut().enumerate() {
                // SAFETY: rows of B are readable over the tile's whole width.
                *value = unsafe { load(simd, b.add(v * S::F32_LANES)) };
            }
            for (i, sum) in sum.iter_mut().enumerate() {
                // SAFETY: row i of A has k elements.
                let x = simd.splat_f32s(unsafe { *a.add(i * t.a_stride) });
                for (sum, &y) in sum.iter_mut().zip(&row) {
                    *sum = simd.mul_add_e_f32s(x, y, *sum);
                }
            }
            // Past the end after the last step, where they are not read again.
            a = a.wrapping_add(1);
            b = b.wrapping_add(t.b_stride);
            ahead = ahead.wrapping_add(t.ahead_stride);
        }

        // Each loop below is small enough to be unrolled; an index that stays variable would move the
        // sums from registers to memory, in the loop above as well.
        let alpha = simd.splat_f32s(t.alpha);
        let last = t.columns - (VECTORS - 1) * S::F32_LANES;
        let whole = last == S::F32_LANES;
        let mask = simd.mask_between_m32s(0, last as u32);
        let at = |i: usize, v: usize| t.c.wrapping_add(i * t.c_stride + v * S::F32_LANES);
        // SAFETY: C has `rows` rows of `columns` elements; the last vector is masked to them where it is
        // not whole. The bias has a value for each row.
        unsafe {
            match t.start {
                Start::Zero if t.alpha == 1.0 => (),
                Start::Zero => {
                    sum.iter_mut()
                        .flatten()
                        .for_each(|sum| *sum = simd.mul_f32s(alpha, *sum));
                }
                Start::Bias(bias) => {
                    for (i, row) in sum.iter_mut().enumerate() {
                        let bias = simd.splat_f32s(*bias.add(i));
                        row.iter_mut()
                            .for_each(|sum| *sum = simd.mul_add_e_f32s(alpha, *sum, bias));
                    }
                }
                Start::Add => {
                    for (i, row) in sum.iter_mut().enumerate() {
                        for (v, sum) in row[..VECTORS - 1].iter_mut().enumerate() {
                            *sum = simd.mul_add_e_f32s(alpha, *sum, load(simd, at(i, v)));
                        }
                    }
                    for (i, row) in sum.iter_mut().enumerate() {
                        let c = at(i, VECTORS - 1);
                        let c = if whole {
                            load(simd, c)
                        } else {
                            simd.mask_load_ptr_f32s(mask, c)
                        };
                        row[VECTORS - 1] = simd.mul_add_e_f32s(alpha, row[VECTORS - 1], c);
                    }
                }
            }
            if whole && t.stream {
                for (i, row) in sum.iter().enumerate() {
                    for (v, &sum) in row.iter().enumerate() {
                        store_past_cache(simd, at(i, v), sum);
                    }
                }
            } else if whole {
                for (i, row) in sum.iter().enumerate() {
                    for (v, &sum) in row.iter().enumerate() {
                        store(simd, at(i, v), sum);
                    }
                }
            } else {
                for (i, row) in sum.iter().enumerate() {
                    for (v, &sum) in row[..VECTORS - 1].iter().enumerate() {
                        store(simd, at(i, v), sum);
                    }
                    simd.mask_store_ptr_f32s(mask, at(i, VECTORS - 1), row[VECTORS - 1]);
                }
            }
        }
    }
}

/// Reads a vector from anywhere.
///
/// # Safety
/// A vector must be readable at `from`; it need not be aligned.
#[inline(always)]
pub(super) unsafe fn load<S: Simd>(_: S, from: *const f32) -> S::f32s {
    // SAFETY: the caller's promise.
    unsafe { from.cast::<S::f32s>().read_unaligned() }
}

/// Writes a vector to anywhere.
///
/// # Safety
/// A vector must be writable at `to`; it need not be aligned.
#[inline(always)]
pub(super) unsafe fn store<S: Simd>(_: S, to: *mut f32, value: S::f32s) {
    // SAFETY: the caller's promise.
    unsafe { to.cast::<S::f32s>().write_unaligned(value) }
}

/// Writes an aligned vector without reading its cache lines first, where the machine can.
///
/// # Safety
/// A vector must be writable at `to`, which is aligned to its size.
#[inline(always)]
unsafe fn store_past_cache<S: Simd>(simd: S, to: *mut f32, value: S::f32s) {
    #[cfg(target_arch = "x86_64")]
    if S::F32_LANES == 16 {
        // SAFETY: only AVX-512 has 16 lanes here, and then the vector is a `__m512`.
        unsafe {
            std::arch::x86_64::_mm512_stream_ps(to, std::mem::transmute_copy(&value));
        }
        return;
    }
    // SAFETY: the caller's promise.
    unsafe { store(simd, to, value) }
}

/// Makes what was written past the caches visible to other threads.
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has it.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Asks for a cache line, if the machine knows how; any address is allowed.
#[inline(always)]
pub(super) fn prefetch(address: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
