//! Convolutions as products of matrices, without ever writing out the whole patch matrix.
//!
//! With P the patches of a sample (see [`super::patches`]), F the filter as `[out_channels, channels * taps]`
//! and G the gradient of the output as `[out_channels, positions]`:
//! forward `F P`; gradient of the filter, transposed, the sum over samples of `P transpose(G)`; gradient of
//! the input `turned(F) Q`, Q being the patches of G, for strides of 1, and otherwise `transpose(F) G`
//! added back to where the patches came from.

use std::ops::Range;

use pulp::{Simd, WithSimd};

use super::arch;
use super::block::Block;
use super::matmul::{K_BLOCK, M_BLOCK, Product};
use super::pack::{Matrix, Panels, copy, pack_panels};
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

struct Filter<'a> {
    p: &'a Conv,
    input: &'a [f32],
    grad: &'a [f32],
    filter_grad: &'a mut [f32],
}

impl WithSimd for Filter<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let p = self.p;
        let g = Geometry::forward(&p.window);
        let (channels, n) = (p.in_channels / p.groups, p.out_channels / p.groups);
        let (m, positions) = (channels * g.taps(), g.positions());
        if m * n == 0 {
            return;
        }
        let (image_len, grad_len) = (channels * g.input_len(), n * positions);
        assert_eq!(self.input.len(), p.batch * p.groups * image_len);
        assert_eq!(self.grad.len(), p.batch * p.groups * grad_len);
        assert_eq!(self.filter_grad.len(), p.groups * m * n);

        // The inner products run over the positions of all samples: a block of them is a part of one
        // sample's or all of several samples'.
        let parts = positions.div_ceil(K_BLOCK).max(1);
        let part = positions.div_ceil(parts).max(1);
        let samples = if parts > 1 {
            1
        } else {
            (K_BLOCK / part).clamp(1, p.batch.max(1))
        };
        let row = (samples * part).next_multiple_of(16) + 16;
        let panel_size = samples * part * n.next_multiple_of(S::F32_LANES);
        let layout = Layout::new(g);
        let image_size = layout.len::<S>(channels).next_multiple_of(16);
        let patches_size = M_BLOCK.min(m) * row + S::F32_LANES;
        let result_size = (m * n).next_multiple_of(16);
        let size = result_size + patches_size + samples * image_size + panel_size;
        let mut moves = Vec::new();
        for group in 0..p.groups {
            scratch::with(size, |memory| {
                let (result, memory) = memory.split_at_mut(result_size);
                let (patches, memory) = memory.split_at_mut(patches_size);
                let (image_memory, panels) = memory.split_at_mut(samples * image_size);
                result.fill(0.0);
                for s0 in (0..p.batch).step_by(samples) {
                    let s_len = samples.min(p.batch - s0);
                    let images: Vec<&[f32]> = (s0..s0 + s_len)
                        .zip(image_memory.chunks_exact_mut(image_size))
                        .map(|(s, memory)| {
                            let images = &self.input[(s * p.groups + group) * image_len..];
                            layout.lay_out(simd, images, channels, memory)
                        })
                        .collect();
                    for q0 in (0..positions).step_by(part) {
                        let q_len = part.min(positions - q0);
                        let k = s_len * q_len;
                        for s in 0..s_len {
                            let grad =
                                &self.grad[((s0 + s) * p.groups + group) * grad_len..][..grad_len];
                            let grad = Matrix {
                                data: grad.as_ptr(),
                                row: 1,
                                column: positions,
                            };
                            // SAFETY: a panel of k rows takes q_len rows of each sample.
                            unsafe {
                                pack_panels(
                                    simd,
                                    grad.at(q0, 0),
                                    n,
                                    q_len,
                                    panels.as_mut_ptr(),
                                    k,
                                    s * q_len,
                                );
                            }
                        }
                        for m0 in (0..m).step_by(M_BLOCK) {
                            let m_len = M_BLOCK.min(m - m0);
                            for (s, image) in images.iter().enumerate() {
                                let patches = Patches {
                                    layout: &layout,
                                    image,
                                    first_row: m0,
                                    rows: m_len,
                                    first_column: q0,
                                    columns: q_len,
                                    to: patches[s * q_len..].as_mut_ptr(),
                                    to_row: row,
                                    moves: &mut moves,
                                };
                                // SAFETY: a row holds k elements and a vector more.
                                unsafe { patches.pack(simd) };
                            }
                            let block = Block {
                                m: m_len,
                                n,
                                k,
                                a: Matrix {
                                    data: patches.as_ptr(),
                                    row,
                                    column: 1,
                                },
                                panels: panels.as_ptr(),
                                c: result[m0 * n..].as_mut_ptr(),
                                c_row: n,
                                alpha: 1.0,
                                start: Start::Add,
                                stream: false,
                                next: None,
                            };
                            // SAFETY: the patches, the panels and the result were measured above.
                            unsafe { block.multiply(simd) };
                        }
                    }
                }
                let from = Matrix {
                    data: result.as_ptr(),
                    row: 1,
                    column: n,
                };
                let to = self.filter_grad[group * m * n..][..m * n].as_mut_ptr();
                // SAFETY: n rows of m elements on both sides.
                unsafe { copy(from, n, m, to, m) };
            });
        }
    }
}

/// Gradient of the input for strides other than 1.
struct Scatter<'a> {
    p: &'a Conv,
    filter: &'a [f32],
    grad: &'a [f32],
    input_grad: &'a mut [f32],
}

impl WithSimd for Scatter<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let p = self.p;
        let g = Geometry::forward(&p.window);
        let (channels, k) = (p.in_channels / p.groups, p.out_channels / p.groups);
        let (m, n) = (channels * g.taps(), g.positions());
        self.input_grad.fill(0.0);
        if m * n * k == 0 {
            return;
        }
        let (image_len, grad_len) = (channels * g.input_len(), k * n);
        assert_eq!(self.input_grad.len(), p.batch * p.groups * image_len);
        assert_eq!(self.grad.len(), p.batch * p.groups * grad_len);
        assert_eq!(self.filter.len(), p.groups * m * k);
        let rows = g.output[1];
        // Output rows whose patches take about a quarter of the second cache level.
        let rows_block = ((1 << 16) / (m * rows)).clamp(1, g.output[0]);
        let n_block = rows_block * rows;
        scratch::with(m * n_block, |patches| {
            let images = self.input_grad.chunks_exact_mut(image_len);
            for (i, (image, grad)) in images.zip(self.grad.chunks_exact(grad_len)).enumerate() {
                let filter = &self.filter[i % p.groups * m * k..][..m * k];
                for n0 in (0..n).step_by(n_block) {
                    let n_len = n_block.min(n - n0);
                    Product {
                        m,
                        n: n_len,
                        k,
                        a: Matrix {
                            data: filter.as_ptr(),
                            row: 1,
                            column: m,
                        },
                        b: Matrix {
                            data: grad[n0..].as_ptr(),
                            row: n,
                            column: 1,
                        },
                        c: patches.as_mut_ptr(),
                        c_row: n_len,
                        alpha: 1.0,
                        add: false,
                    }
                    .with_simd(simd);
                    for (r, patch) in patches.chunks_exact(n_len).take(m).enumerate() {
                        let (channel, tap) = (r / g.taps(), r % g.taps());
                        let (h_first, h_end, h_shift) = reach(&g, 0, tap / g.kernel[1]);
                        let (w_first, w_end, w_shift) = reach(&g, 1, tap % g.kernel[1]);
                        let plane = &mut image[channel * g.input_len()..][..g.input_len()];
                        for (oh, patch) in (n0 / rows..).zip(patch.chunks_exact(rows)) {
                            if (h_first..h_end).contains(&oh) && w_first < w_end {
                                let ih = ((oh * g.strides[0]) as isize + h_shift) as usize;
                                let iw = ((w_first * g.strides[1]) as isize + w_shift) as usize;
                                let row = plane[ih * g.input[1] + iw..]
                                    .iter_mut()
                                    .step_by(g.strides[1]);
                                row.zip(&patch[w_first..w_end])
                                    .for_each(|(to, &from)| *to += from);
                            }
                        }
                    }
                }
            }
        });
    }
}

/// Outputs along an axis for which `tap` falls inside the input, and where it falls for output 0.
fn reach(g: &Geometry, axis: usize, tap: usize) -> (usize, usize, isize) {
    let stride = g.strides[axis] as isize;
    let shift = (tap * g.dilations[axis]) as isize - g.pads[axis];
    let bound = |end: isize| {
        (end - shift + stride - 1)
            .div_euclid(stride)
            .clamp(0, g.output[axis] as isize) as usize
    };
    (bound(0), bound(g.input[axis] as isize), shift)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::kernels::testing::{assert_close, on_every_arch, values};
    use crate::device::cpu::reference::matrix;
    use crate::device::params::Window;

    fn check(p: &Conv) {
        check_on(p, 1);
    }

    fn check_on(p: &Conv, threads: usize) {
        let w = &p.window;
        let area = |extent: [usize; 2]| extent[0] * extent[1];
        let input = values(p.batch * p.in_channels * area(w.input), 1);
        let filter = values(
            p.out_channels * p.in_channels / p.groups * area(w.kernel),
            2,
        );
        let bias = values(p.out_channels, 3);
        let grad = values(p.batch * p.out_channels * area(w.output), 4);

        let (mut actual, mut expected) = (vec![f32::NAN; grad.len()], vec![f32::NAN; grad.len()]);
        forward(p, threads, &input, &filter, Some(&bias), &mut actual);
        matrix::conv(p, &input, &filter, Some(&bias), &mut expected);
        assert_close(&format!("forward {p:?}"), &actual, &expected, 1e-5);

        let (mut actual, mut expected) = (vec![f32::NAN; input.len()], vec![f32::NAN; input.len()]);
        backward_data(p, threads, &filter, &grad, &mut actual);
        matrix::conv_backward_data(p, &filter, &grad, &mut expected);
        assert_close(&format!("backward data {p:?}"), &actual, &expected, 1e-5);

        let (mut actual, mut expected) =
            (vec![f32::NAN; filter.len()], vec![f32::NAN; filter.len()]);
        backward_filter(p, threads, &input, &grad, &mut actual);
        matrix::conv_backward_filter(p, &input, &grad, &mut expected);
        assert_close(&format!("backward filter {p:?}"), &actual, &expected, 1e-5);
    }

    #[allow(clippy::too_many_arguments)]
    fn conv(
        batch: usize,
        channels: (usize, usize),
        groups: usize,
        input: [usize; 2],
        kernel: [usize; 2],
        strides: [usize; 2],
        dilations: [usize; 2],
        (pads_begin, pads_end): ([usize; 2], [usize; 2]),
    ) -> Conv {
        let output = [0, 1].map(|i| {
            let reach = dilations[i] * (kernel[i] - 1) + 1;
            (input[i] + pads_begin[i] + pads_end[i] - reach) / strides[i] + 1
        });
        let window = Window {
            input,
            output,
            kernel,
            strides,
            dilations,
            pads_begin,
            pads_end,
        };
        Conv {
            batch,
            in_channels: channels.0,
            out_channels: channels.1,
            groups,
            window,
        }
    }

    #[test]
    fn convolutions_of_all_kinds() {
        on_every_arch(|| {
            let none = ([0, 0], [0, 0]);
            let same = ([1, 1], [1, 1]);
            for p in [
                conv(
                    2,
                    (1, 6),
                    1,
                    [28, 28],
                    [5, 5],
                    [1, 1],
                    [1, 1],
                    ([2, 2], [2, 2]),
                ),
                conv(3, (6, 16), 1, [14, 14], [5, 5], [1, 1], [1, 1], none),
                conv(1, (64, 12), 1, [9, 11], [3, 3], [1, 1], [1, 1], same),
                conv(7, (3, 5), 1, [7, 7], [3, 3], [1, 1], [1, 1], same),
                conv(2, (5, 9), 1, [8, 6], [1, 1], [1, 1], [1, 1], none),
                conv(2, (5, 9), 1, [8, 7], [1, 1], [2, 2], [1, 1], none),
                conv(
                    2,
                    (3, 8),
                    1,
                    [23, 21],
                    [7, 7],
                    [2, 2],
                    [1, 1],
                    ([3, 3], [3, 3]),
                ),
                conv(2, (4, 6), 2, [9, 9], [3, 3], [2, 1], [1, 1], same),
                conv(2, (6, 6), 6, [9, 9], [3, 3], [1, 1], [1, 1], same),
                conv(
                    1,
                    (2, 3),
                    1,
                    [12, 13],
                    [3, 2],
                    [1, 1],
                    [2, 3],
                    ([2, 0], [1, 4]),
                ),
                conv(
                    1,
                    (2, 3),
                    1,
                    [5, 5],
                    [2, 2],
                    [1, 1],
                    [1, 1],
                    ([3, 3], [2, 2]),
                ),
                conv(
                    1,
                    (2, 3),
                    1,
                    [40, 1],
                    [3, 1],
                    [3, 1],
                    [1, 1],
                    ([1, 0], [2, 0]),
                ),
                conv(1, (130, 130), 1, [4, 4], [3, 3], [1, 1], [1, 1], same),
                conv(1, (1, 1), 1, [30, 60], [3, 3], [1, 1], [1, 1], same),
            ] {
                check(&p);
            }
        });
    }

    #[test]
    fn threads_divide_the_samples() {
        // Enough work for three threads, whose shares differ.
        let same = ([1, 1], [1, 1]);
        for strides in [[1, 1], [1, 2]] {
            let p = conv(5, (28, 28), 1, [42, 42], [3, 3], strides, [1, 1], same);
            assert_eq!(batches(&p, 3), [0..2, 2..4, 4..5]);
            check_on(&p, 3);
        }
    }
}
