//! Convolutions as products of matrices, without ever writing out the whole patch matrix.
//!
//! With P the patches of a sample (see `patches`), F the filter as `[out_channels, channels * taps]`
//! and G the gradient of the output as `[out_channels, positions]`:
//! forward `F P`; gradient of the filter, transposed, the sum over samples of `P transpose(G)`; gradient of
//! the input `turned(F) Q`, Q being the patches of G, for strides of 1, and otherwise `transpose(F) G`
//! added back to where the patches came from.

mod filter;
mod scatter;

use std::ops::Range;

use pulp::{Simd, WithSimd};

use filter::Filter;
use scatter::Scatter;

use super::arch;
use super::block::Block;
use super::matmul::{K_BLOCK, M_BLOCK};
use super::pack::{Matrix, Panels, copy};
use super::patches::{Geometry, Layout, Patches};
use super::tile::{Start, VECTORS};
use super::{parallel, scratch};
use crate::device::params::Conv;

/// Panels of patches in work at a time.
const PANELS: usize = 4;

/// `output = conv(input, filter) + bias`.
///
/// # Panics
/// If a slice's length does not fit the sizes.
pub fn forward(
    p: &Conv,
    threads: usize,
    input: &[f32],
    filter: &[f32],
    bias: Option<&[f32]>,
    output: &mut [f32],
) {
    let arch = arch();
    by_samples(p, threads, input, output, |batch, input, output| {
        arch.dispatch(Forward {
            geometry: Geometry::forward(&p.window),
            batch,
            groups: p.groups,
            from_channels: p.in_channels / p.groups,
            to_channels: p.out_channels / p.groups,
            input,
            filter,
            bias,
            output,
        });
    });
}

/// `input_grad`: the gradient of the input from that of the output.
///
/// # Panics
/// If a slice's length does not fit the sizes.
pub fn backward_data(
    p: &Conv,
    threads: usize,
    filter: &[f32],
    grad: &[f32],
    input_grad: &mut [f32],
) {
    let arch = arch();
    if p.window.strides != [1, 1] {
        by_samples(p, threads, grad, input_grad, |batch, grad, input_grad| {
            let p = &Conv { batch, ..*p };
            arch.dispatch(Scatter {
                p,
                filter,
                grad,
                input_grad,
            });
        });
        return;
    }
    scratch::with(filter.len(), |turned| {
        turn(p, filter, turned);
        let turned = &*turned;
        by_samples(p, threads, grad, input_grad, |batch, grad, input_grad| {
            arch.dispatch(Forward {
                geometry: Geometry::turned(&p.window),
                batch,
                groups: p.groups,
                from_channels: p.out_channels / p.groups,
                to_channels: p.in_channels / p.groups,
                input: grad,
                filter: turned,
                bias: None,
                output: input_grad,
            });
        });
    });
}

/// `filter_grad`: the gradient of the filter from that of the output, summed over the batch.
///
/// # Panics
/// If a slice's length does not fit the sizes.
pub fn backward_filter(
    p: &Conv,
    threads: usize,
    input: &[f32],
    grad: &[f32],
    filter_grad: &mut [f32],
) {
    let arch = arch();
    let batches = batches(p, threads);
    // The first thread's sum goes where the result belongs, the others' are added to it.
    let len = filter_grad.len();
    let mut others = vec![0.0; (batches.len() - 1) * len];
    let sums = std::iter::once(&mut *filter_grad).chain(others.chunks_exact_mut(len.max(1)));
    let (image, result) = (input.len() / p.batch.max(1), grad.len() / p.batch.max(1));
    parallel::each(batches.into_iter().zip(sums), |(samples, filter_grad)| {
        let p = &Conv {
            batch: samples.len(),
            ..*p
        };
        let input = &input[samples.start * image..samples.end * image];
        let grad = &grad[samples.start * result..samples.end * result];
        arch.dispatch(Filter {
            p,
            input,
            grad,
            filter_grad,
        });
    });
    for other in others.chunks_exact(len.max(1)) {
        filter_grad
            .iter_mut()
            .zip(other)
            .for_each(|(sum, other)| *sum += other);
    }
}

/// The samples that each thread takes.
fn batches(p: &Conv, threads: usize) -> Vec<Range<usize>> {
    let taps = p.window.kernel[0] * p.window.kernel[1] * p.in_channels / p.groups;
    let outputs = p.out_channels * p.window.output[0] * p.window.output[1];
    let threads = parallel::useful(threads, p.batch * taps * outputs);
    let step = p.batch.div_ceil(threads.get()).max(1);
    let starts = (0..p.batch.max(1)).step_by(step);
    starts
        .map(|first| first..(first + step).min(p.batch))
        .collect()
}

/// Calls `f(samples, their part of from, their part of to)` on as many threads as are of use.
fn by_samples(
    p: &Conv,
    threads: usize,
    from: &[f32],
    to: &mut [f32],
    f: impl Fn(usize, &[f32], &mut [f32]) + Sync,
) {
    let batches = batches(p, threads);
    if batches.len() == 1 {
        return f(p.batch, from, to);
    }
    let (from_len, to_len) = (from.len() / p.batch, to.len() / p.batch);
    let step = batches[0].len();
    let parts = batches
        .iter()
        .zip(from.chunks(step * from_len))
        .zip(to.chunks_mut(step * to_len));
    parallel::each(parts, |((samples, from), to)| f(samples.len(), from, to));
}

/// The filter with input and output channels exchanged and its taps in reverse.
fn turn(p: &Conv, filter: &[f32], turned: &mut [f32]) {
    let (to, from) = (p.in_channels / p.groups, p.out_channels / p.groups);
    let taps = p.window.kernel[0] * p.window.kernel[1];
    let groups = turned
        .chunks_exact_mut(to * from * taps)
        .zip(filter.chunks_exact(to * from * taps));
    for (turned, filter) in groups {
        for (t, turned) in turned.chunks_exact_mut(from * taps).enumerate() {
            for (f, turned) in turned.chunks_exact_mut(taps).enumerate() {
                let filter = &filter[(f * to + t) * taps..][..taps];
                turned
                    .iter_mut()
                    .zip(filter.iter().rev())
                    .for_each(|(to, &from)| *to = from);
            }
        }
    }
}

struct Forward<'a> {
    geometry: Geometry,
    batch: usize,
    groups: usize,
    /// Per group.
    from_channels: usize,
    /// Per group.
    to_channels: usize,
    input: &'a [f32],
    filter: &'a [f32],
    bias: Option<&'a [f32]>,
    output: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let g = self.geometry;
        let (m, k, n) = (
            self.to_channels,
            self.from_channels * g.taps(),
            g.positions(),
        );
        if m * n * self.batch * self.groups == 0 {
            return;
        }
        let (image_len, result_len) = (self.from_channels * g.input_len(), m * n);
        assert_eq!(self.input.len(), self.batch * self.groups * image_len);
        assert_eq!(self.filter.len(), self.groups * m * k);
        assert_eq!(self.output.len(), self.batch * self.groups * result_len);
        assert!(self.bias.is_none_or(|bias| bias.len() == self.groups * m));

        let k_block = k.div_ceil(k.div_ceil(K_BLOCK).max(1)).max(1);
        let n_block = PANELS * VECTORS * S::F32_LANES;
        // Filter rows a multiple of 1 KiB apart would compete for the same cache sets.
        let filter_row = if k % 256 == 0 { k + 16 } else { k };
        let filter_size = if filter_row == k {
            0
        } else {
            self.groups * m * filter_row
        };
        let layout = Layout::new(g);
        let image_size = layout.len::<S>(self.from_channels).next_multiple_of(16);
        let mut moves = Vec::new();
        scratch::with(
            filter_size + image_size + k_block * n_block + S::F32_LANES,
            |memory| {
                let (spread, memory) = memory.split_at_mut(filter_size);
                let (image_memory, panels) = memory.split_at_mut(image_size);
                let filter = if spread.is_empty() {
                    self.filter.as_ptr()
                } else {
                    let from = Matrix {
                        data: self.filter.as_ptr(),
                        row: k,
                        column: 1,
                    };
                    // SAFETY: groups * m rows of k elements on both sides.
                    unsafe { copy(from, self.groups * m, k, spread.as_mut_ptr(), filter_row) };
                    spread.as_ptr()
                };
                for (i, result) in self.output.chunks_exact_mut(result_len).enumerate() {
                    let group = i % self.groups;
                    let images = &self.input[i * image_len..];
                    let image = layout.lay_out(simd, images, self.from_channels, image_memory);
                    for n0 in (0..n).step_by(n_block) {
                        let n_len = n_block.min(n - n0);
                        for k0 in (0..k).step_by(k_block) {
                            let k_len = k_block.min(k - k0);
                            for (j, columns) in Panels::new::<S>(n_len) {
                                let patches = Patches {
                                    layout: &layout,
                                    image,
                                    first_row: k0,
                                    rows: k_len,
                                    first_column: n0 + j,
                                    columns,
                                    to: panels[k_len * j..].as_mut_ptr(),
                                    to_row: columns.next_multiple_of(S::F32_LANES),
                                    moves: &mut moves,
                                };
                                // SAFETY: panels lie one behind the other and a vector follows the last.
                                unsafe { patches.pack(simd) };
                            }
                            for m0 in (0..m).step_by(M_BLOCK) {
                                let rows = filter.wrapping_add((group * m + m0) * filter_row + k0);
                                let block = Block {
                                    m: M_BLOCK.min(m - m0),
                                    n: n_len,
                                    k: k_len,
                                    a: Matrix {
                                        data: rows,
                                        row: filter_row,
                                        column: 1,
                                    },
                                    panels: panels.as_ptr(),
                                    c: result[m0 * n + n0..].as_mut_ptr(),
                                    c_row: n,
                                    alpha: 1.0,
                                    start: match self.bias {
                                        _ if k0 > 0 => Start::Add,
                                        Some(bias) => Start::Bias(bias[group * m + m0..].as_ptr()),
                                        None => Start::Zero,
                                    },
                                    stream: false,
                                    next: None,
                                };
                                // SAFETY: the filter, the panels and the result were measured above.
                                unsafe { block.multiply(simd) };
                            }
                        }
                    }
                }
            },
        );
    }
}

#[cfg(test)]
mod tests;
