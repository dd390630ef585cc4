//! Products of matrices.
//!
//! Blocks of B are packed into panels as wide as a tile, blocks of A into rows unless they can be read in
//! place; the block of A and the panels in work share the second cache level (Goto and van de Geijn,
//! "Anatomy of High-Performance Matrix Multiplication", 2008).

use pulp::{Simd, WithSimd};

use super::arch;
use super::block::Block;
use super::pack::{Matrix, copy, pack_panels};
use super::tile::{Start, VECTORS, fence};
use super::{parallel, scratch};
use crate::device::params::Gemm;

/// Longest block of k: a full panel of it (48 columns) fills a tenth of a 1 MiB second cache level.
pub(super) const K_BLOCK: usize = 512;
/// Rows of A that are used again and again from the second cache level.
pub(super) const M_BLOCK: usize = 128;
/// Columns of B that are packed at a time when there are several blocks of A to use them.
const N_BLOCK: usize = 1024;

/// Bytes of C beyond which nobody finds it in a cache later.
const LARGE: usize = 16 << 20;

/// Batched product: `C[i] = alpha op(A[i]) op(B[i]) + beta C[i]`; `c` holds `offsets.len() * m * n` elements.
///
/// # Panics
/// If a slice is too short for the sizes.
pub fn gemm(p: &Gemm, threads: usize, a: &[f32], b: &[f32], c: &mut [f32]) {
    if p.m * p.n == 0 {
        return;
    }
    assert_eq!(c.len(), p.offsets.len() * p.m * p.n);
    if p.beta != 1.0 && p.beta != 0.0 {
        c.iter_mut().for_each(|c| *c *= p.beta);
    }
    let products = c.chunks_exact_mut(p.m * p.n).zip(&p.offsets);
    let products = products.map(|(c, &(a_offset, b_offset))| {
        let (a, b) = (&a[a_offset..][..p.m * p.k], &b[b_offset..][..p.k * p.n]);
        let matrix = |data: &[f32], rows: usize, columns: usize, transposed: bool| {
            let data = data.as_ptr();
            if transposed {
                Matrix {
                    data,
                    row: 1,
                    column: rows,
                }
            } else {
                Matrix {
                    data,
                    row: columns,
                    column: 1,
                }
            }
        };
        Product {
            m: p.m,
            n: p.n,
            k: p.k,
            a: matrix(a, p.m, p.k, p.transpose_a),
            b: matrix(b, p.k, p.n, p.transpose_b),
            c: c.as_mut_ptr(),
            c_row: p.n,
            alpha: p.alpha,
            add: p.beta != 0.0,
        }
    });
    let arch = arch();
    let threads = parallel::useful(threads, p.offsets.len() * p.m * p.n * p.k).get();
    if threads == 1 {
        products.for_each(|product| arch.dispatch(product));
        return;
    }
    let parts = if p.offsets.len() < threads {
        threads
    } else {
        1
    };
    let parts: Vec<Product> = products.flat_map(|product| product.parts(parts)).collect();
    parallel::each(parts.chunks(parts.len().div_ceil(threads)), |parts| {
        parts.iter().for_each(|&product| arch.dispatch(product));
    });
}

/// One product of strided matrices; the rows of C are contiguous.
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Matrix,
    pub b: Matrix,
    pub c: *mut f32,
    pub c_row: usize,
    pub alpha: f32,
    pub add: bool,
}

// SAFETY: a product reads A and B and writes C; products that run at the same time write different
// elements, see [`Product::parts`] and [`gemm`].
unsafe impl Send for Product {}
// SAFETY: as above; a shared product can only be copied.
unsafe impl Sync for Product {}

impl WithSimd for Product {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Product { m, n, k, .. } = self;
        // Rows of B that run along k cannot be read as vectors of C. Packing them costs n * k scalar copies;
        // exchanging the roles of A and B costs m * k for A and m * n each way for C.
        if self.b.column != 1 && m * (k + 2 * n) < n * k {
            self.exchanged(simd);
        } else {
            self.blocked(simd);
        }
    }
}

impl Product {
    /// Cuts C along its longer side into at most `count` products of nearly equal size.
    fn parts(self, count: usize) -> impl Iterator<Item = Product> {
        // Whole cache lines of C, so that no two threads write to the same one.
        const STEP: usize = 16;
        let columns = self.n >= self.m;
        let extent = if columns { self.n } else { self.m };
        let step = extent.div_ceil(count).next_multiple_of(STEP);
        (0..extent).step_by(step).map(move |first| {
            let len = step.min(extent - first);
            if columns {
                let c = self.c.wrapping_add(first);
                Product {
                    n: len,
                    b: self.b.at(0, first),
                    c,
                    ..self
                }
            } else {
                let c = self.c.wrapping_add(first * self.c_row);
                Product {
                    m: len,
                    a: self.a.at(first, 0),
                    c,
                    ..self
                }
            }
        })
    }

    /// Computes the transpose of C, in which A and B change places.
    #[inline(always)]
    fn exchanged<S: Simd>(self, simd: S) {
        let Product { m, n, .. } = self;
        scratch::with(m * n, |transposed| {
            let product = Product {
                m: n,
                n: m,
                a: self.b.transposed(),
                b: self.a.transposed(),
                c: transposed.as_mut_ptr(),
                c_row: m,
                add: false,
                ..self
            };
            product.blocked(simd);
            let from = Matrix {
                data: transposed.as_ptr(),
                row: 1,
                column: m,
            };
            // SAFETY: `transposed` holds n rows of m elements, C m rows of n.
            unsafe {
                if self.add {
                    for i in 0..m {
                        for j in 0..n {
                            *self.c.add(i * self.c_row + j) += transposed[j * m + i];
                        }
                    }
                } else {
                    copy(from, m, n, self.c, self.c_row);
                }
            }
        });
    }

    #[inline(always)]
    fn blocked<S: Simd>(self, simd: S) {
        let Product { m, n, k, a, b, .. } = self;
        let k_block = k.div_ceil(k.div_ceil(K_BLOCK).max(1)).max(1);
        // A few lines more than a row of the block, so that rows do not fall on the same cache sets.
        let a_row = k_block.next_multiple_of(16) + 16;
        let in_place = a.column == 1 && (a.row % 256 != 0 || n <= 3 * S::F32_LANES);
        let a_size = if in_place { 0 } else { m.min(M_BLOCK) * a_row };
        // Panels that one block of A uses up are packed shortly before.
        let n_block = if m <= M_BLOCK {
            4 * VECTORS * S::F32_LANES
        } else {
            N_BLOCK
        };
        let b_size = k_block * n.min(n_block).next_multiple_of(S::F32_LANES);
        let stream = !self.add
            && k <= k_block
            && m * n * size_of::<f32>() > LARGE
            && (self.c as usize).is_multiple_of(64)
            && self.c_row.is_multiple_of(16);
        scratch::with(a_size + b_size, |memory| {
            let (a_memory, b_memory) = memory.split_at_mut(a_size);
            for k0 in (0..k.max(1)).step_by(k_block) {
                let k_len = k_block.min(k - k0);
                for n0 in (0..n).step_by(n_block) {
                    let n_len = n_block.min(n - n0);
                    // SAFETY: the block lies inside B; the panels fit `b_size`.
                    unsafe {
                        pack_panels(
                            simd,
                            b.at(k0, n0),
                            n_len,
                            k_len,
                            b_memory.as_mut_ptr(),
                            k_len,
                            0,
                        )
                    };
                    for m0 in (0..m).step_by(M_BLOCK) {
                        let m_len = M_BLOCK.min(m - m0);
                        let a = if in_place {
                            a.at(m0, k0)
                        } else {
                            // SAFETY: the block lies inside A; its rows fit `a_size`.
                            unsafe {
                                copy(a.at(m0, k0), m_len, k_len, a_memory.as_mut_ptr(), a_row)
                            };
                            Matrix {
                                data: a_memory.as_ptr(),
                                row: a_row,
                                column: 1,
                            }
                        };
                        // SAFETY: A and the panels were just made, C is ours.
                        unsafe {
                            Block {
                                m: m_len,
                                n: n_len,
                                k: k_len,
                                a,
                                panels: b_memory.as_ptr(),
                                c: self.c.wrapping_add(m0 * self.c_row + n0),
                                c_row: self.c_row,
                                alpha: self.alpha,
                                start: if self.add || k0 > 0 {
                                    Start::Add
                                } else {
                                    Start::Zero
                                },
                                stream,
                                next: if m > M_BLOCK || b.column != 1 {
                                    None
                                } else if n0 + n_len < n {
                                    Some(b.at(k0, n0 + n_len))
                                } else {
                                    Some(b.at(k0 + k_len, 0))
                                },
                            }
                            .multiply(simd)
                        };
                    }
                }
            }
        });
        if stream {
            fence();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::kernels::testing::{assert_close, on_every_arch, values};
    use crate::device::cpu::reference::matrix;

    fn check(p: &Gemm) {
        check_on(p, 1);
    }

    fn check_on(p: &Gemm, threads: usize) {
        let count = p.offsets.len();
        let a = values(count * p.m * p.k, 1);
        let b = values(count * p.k * p.n, 2);
        let mut c = values(count * p.m * p.n, 3);
        let mut expected = c.clone();
        matrix::gemm(p, &a, &b, &mut expected);
        gemm(p, threads, &a, &b, &mut c);
        assert_close(&format!("{p:?}"), &c, &expected, 1e-5);
    }

    #[test]
    fn products_of_all_layouts_and_edges() {
        on_every_arch(|| {
            let sizes = [
                (1, 1, 1),
                (1, 10, 84),
                (8, 48, 16),
                (9, 49, 17),
                (3, 200, 600),
                (32, 10, 1100),
                (32, 130, 1500),
                (130, 50, 7),
                (131, 1030, 5),
                (5, 7, 0),
            ];
            for (m, n, k) in sizes {
                for (transpose_a, transpose_b) in
                    [(false, false), (false, true), (true, false), (true, true)]
                {
                    for (alpha, beta) in [(1.0, 0.0), (0.5, 1.0), (2.0, -0.5)] {
                        check(&Gemm {
                            transpose_a,
                            transpose_b,
                            alpha,
                            beta,
                            ..Gemm::new(m, n, k)
                        });
                    }
                }
            }
        });
    }

    #[test]
    fn a_batch_takes_each_product_from_its_offsets() {
        on_every_arch(|| {
            let (m, n, k) = (5, 6, 7);
            let offsets = vec![(m * k, 0), (0, k * n)];
            check(&Gemm {
                offsets,
                ..Gemm::new(m, n, k)
            });
        });
    }

    #[test]
    fn a_result_larger_than_the_caches_is_whole() {
        on_every_arch(|| {
            let (m, n) = (2048, LARGE / 2048 / 4 + 16);
            let p = Gemm::new(m, n, 1);
            let a: Vec<f32> = (0..m).map(|i| i as f32).collect();
            let b: Vec<f32> = (0..n).map(|j| (j % 7) as f32).collect();
            let mut c = vec![f32::NAN; m * n + 16];
            let first = c.as_ptr().align_offset(64);
            let c = &mut c[first..][..m * n];
            gemm(&p, 1, &a, &b, c);
            let right = c.iter().enumerate().all(|(i, &c)| c == a[i / n] * b[i % n]);
            assert!(right);
        });
    }

    #[test]
    fn threads_divide_columns_rows_or_the_batch() {
        for (m, n) in [(100, 517), (517, 100)] {
            let p = Gemm::new(m, n, 500);
            assert_eq!(parallel::useful(3, m * n * 500).get(), 3);
            check_on(&p, 3);
            let offsets = (0..4).map(|i| (i * m * 500, i * 500 * n)).collect();
            check_on(&Gemm { offsets, ..p }, 3);
        }
    }
}
