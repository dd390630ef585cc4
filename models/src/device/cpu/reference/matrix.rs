//! Matrix product and convolution.

use crate::device::params::{Conv, Gemm, Window};

/// Batched matrix product, see [`Gemm`].
pub fn gemm(p: &Gemm, a: &[f32], b: &[f32], c: &mut [f32]) {
    let (a_row, a_col) = if p.transpose_a { (1, p.m) } else { (p.k, 1) };
    let (b_row, b_col) = if p.transpose_b { (1, p.k) } else { (p.n, 1) };
    let mut sums = vec![0f64; p.n];
    for (&(a_start, b_start), c) in p.offsets.iter().zip(c.chunks_exact_mut((p.m * p.n).max(1))) {
        for (i, c) in c.chunks_exact_mut(p.n).enumerate() {
            sums.fill(0.0);
            for l in 0..p.k {
                let a = f64::from(a[a_start + i * a_row + l * a_col]);
                for (j, sum) in sums.iter_mut().enumerate() {
                    *sum += a * f64::from(b[b_start + l * b_row + j * b_col]);
                }
            }
            for (c, sum) in c.iter_mut().zip(&sums) {
                let before = if p.beta == 0.0 { 0.0 } else { p.beta * *c };
                *c = (f64::from(p.alpha) * sum) as f32 + before;
            }
        }
    }
}

/// Calls `f(filter element, input element, output element)` for every product of one input plane with
/// one filter plane.
fn taps(w: &Window, mut f: impl FnMut(usize, usize, usize)) {
    for oh in 0..w.output[0] {
        for kh in 0..w.kernel[0] {
            let Some(ih) = tap(w, 0, oh, kh) else {
                continue;
            };
            for ow in 0..w.output[1] {
                for kw in 0..w.kernel[1] {
                    if let Some(iw) = tap(w, 1, ow, kw) {
                        f(
                            kh * w.kernel[1] + kw,
                            ih * w.input[1] + iw,
                            oh * w.output[1] + ow,
                        );
                    }
                }
            }
        }
    }
}

/// Input position under kernel element `k` of output `o`, unless it lies in the padding.
pub(super) fn tap(w: &Window, axis: usize, o: usize, k: usize) -> Option<usize> {
    (o * w.strides[axis] + k * w.dilations[axis])
        .checked_sub(w.pads_begin[axis])
        .filter(|&i| i < w.input[axis])
}

/// Calls `f(filter plane, input plane, output plane)` for every pair of planes that meet.
fn planes(p: &Conv, mut f: impl FnMut(usize, usize, usize)) {
    let in_group = p.in_channels / p.groups;
    let out_group = p.out_channels / p.groups;
    for n in 0..p.batch {
        for o in 0..p.out_channels {
            for i in 0..in_group {
                let input = n * p.in_channels + o / out_group * in_group + i;
                f(o * in_group + i, input, n * p.out_channels + o);
            }
        }
    }
}

/// Extents of one plane of filter, input and output.
fn sizes(p: &Conv) -> (usize, usize, usize) {
    let area = |extent: [usize; 2]| extent[0] * extent[1];
    (
        area(p.window.kernel),
        area(p.window.input),
        area(p.window.output),
    )
}

/// Convolution forward.
pub fn conv(p: &Conv, input: &[f32], filter: &[f32], bias: Option<&[f32]>, output: &mut [f32]) {
    let (kernel, area_in, area_out) = sizes(p);
    let mut sums = vec![0f64; output.len()];
    if let Some(bias) = bias {
        for (plane, sums) in sums.chunks_exact_mut(area_out).enumerate() {
            sums.fill(f64::from(bias[plane % p.out_channels]));
        }
    }
    planes(p, |f, i, o| {
        taps(&p.window, |ft, it, ot| {
            sums[o * area_out + ot] +=
                f64::from(input[i * area_in + it]) * f64::from(filter[f * kernel + ft]);
        });
    });
    store(&sums, output);
}

/// Gradient of a convolution's input.
pub fn conv_backward_data(p: &Conv, filter: &[f32], grad: &[f32], input_grad: &mut [f32]) {
    let (kernel, area_in, area_out) = sizes(p);
    let mut sums = vec![0f64; input_grad.len()];
    planes(p, |f, i, o| {
        taps(&p.window, |ft, it, ot| {
            sums[i * area_in + it] +=
                f64::from(grad[o * area_out + ot]) * f64::from(filter[f * kernel + ft]);
        });
    });
    store(&sums, input_grad);
}

/// Gradient of a convolution's filter.
pub fn conv_backward_filter(p: &Conv, input: &[f32], grad: &[f32], filter_grad: &mut [f32]) {
    let (kernel, area_in, area_out) = sizes(p);
    let mut sums = vec![0f64; filter_grad.len()];
    planes(p, |f, i, o| {
        taps(&p.window, |ft, it, ot| {
            sums[f * kernel + ft] +=
                f64::from(grad[o * area_out + ot]) * f64::from(input[i * area_in + it]);
        });
    });
    store(&sums, filter_grad);
}

fn store(sums: &[f64], out: &mut [f32]) {
    for (out, &sum) in out.iter_mut().zip(sums) {
        *out = sum as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gemm_by_hand() {
        let mut c = [1.0, 1.0, 1.0, 1.0];
        let p = Gemm {
            transpose_b: true,
            alpha: 2.0,
            beta: 10.0,
            ..Gemm::new(2, 2, 3)
        };
        gemm(
            &p,
            &[1., 2., 3., 4., 5., 6.],
            &[1., 0., 1., 0., 1., 0.],
            &mut c,
        );
        assert_eq!(c, [18., 14., 30., 20.]);
    }

    #[test]
    fn conv_by_hand() {
        let p = Conv {
            batch: 1,
            in_channels: 1,
            out_channels: 1,
            groups: 1,
            window: Window {
                input: [1, 4],
                output: [1, 4],
                kernel: [1, 3],
                strides: [1, 1],
                dilations: [1, 1],
                pads_begin: [0, 1],
                pads_end: [0, 1],
            },
        };
        let mut out = [0.0; 4];
        conv(
            &p,
            &[1., 2., 3., 4.],
            &[1., 10., 100.],
            Some(&[0.5]),
            &mut out,
        );
        assert_eq!(out, [210.5, 321.5, 432.5, 43.5]);
    }
}
