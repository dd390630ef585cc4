//! Max pooling.

use super::arch;
use crate::device::params::{Pool, Window};

/// Maximum over windows and, where asked for, its position in the input plane. The first one counts among
/// equals, NaN wins; a window that lies in the padding altogether gives negative infinity and -1.
pub fn max_pool(p: &Pool, input: &[f32], output: &mut [f32], positions: Option<&mut [i32]>) {
    let arch = arch();
    let w = &p.window;
    let halves = w.kernel == [2, 2]
        && w.strides == [2, 2]
        && w.dilations == [1, 1]
        && w.pads_begin == [0, 0]
        && (0..2).all(|axis| w.output[axis] * 2 <= w.input[axis]);
    match positions {
        Some(positions) => arch.dispatch(
            #[inline(always)]
            || {
                if halves {
                    halve(w, input, output, positions)
                } else {
                    slide(w, input, output, positions)
                }
            },
        ),
        None => {
            // One plane of positions, written again and again.
            let area = w.output[0] * w.output[1];
            let mut positions = vec![0; area];
            let planes = input.chunks_exact(w.input[0] * w.input[1]);
            for (input, output) in planes.zip(output.chunks_exact_mut(area)) {
                max_pool(p, input, output, Some(&mut positions));
            }
        }
    }
}

/// Windows of 2 x 2 side by side.
#[inline(always)]
fn halve(w: &Window, input: &[f32], output: &mut [f32], positions: &mut [i32]) {
    let [height, width] = w.output;
    let planes = input.chunks_exact(w.input[0] * w.input[1]);
    let results = output
        .chunks_exact_mut(height * width)
        .zip(positions.chunks_exact_mut(height * width));
    for (plane, (output, positions)) in planes.zip(results) {
        let rows = output
            .chunks_exact_mut(width)
            .zip(positions.chunks_exact_mut(width));
        for (oh, (output, positions)) in rows.enumerate() {
            let first = 2 * oh * w.input[1];
            let upper = &plane[first..][..2 * width];
            let lower = &plane[first + w.input[1]..][..2 * width];
            let down = w.input[1] as i32;
            for ow in 0..width {
                let (mut best, mut position) = (upper[2 * ow], 0);
                for (value, at) in [
                    (upper[2 * ow + 1], 1),
                    (lower[2 * ow], down),
                    (lower[2 * ow + 1], down + 1),
                ] {
                    let better = value > best || (value.is_nan() & !best.is_nan());
                    best = if better { value } else { best };
                    position = if better { at } else { position };
                }
                output[ow] = best;
                positions[ow] = position + (first + 2 * ow) as i32;
            }
        }
    }
}

/// Any windows: element by element of the window, a row of outputs at a time.
#[inline(always)]
fn slide(w: &Window, input: &[f32], output: &mut [f32], positions: &mut [i32]) {
    let [height, width] = w.output;
    let planes = input.chunks_exact(w.input[0] * w.input[1]);
    let results = output
        .chunks_exact_mut(height * width)
        .zip(positions.chunks_exact_mut(height * width));
    for (plane, (output, positions)) in planes.zip(results) {
        output.fill(f32::NEG_INFINITY);
        positions.fill(-1);
        let rows = output
            .chunks_exact_mut(width)
            .zip(positions.chunks_exact_mut(width));
        for (oh, (output, positions)) in rows.enumerate() {
            for kh in 0..w.kernel[0] {
                let row = (oh * w.strides[0] + kh * w.dilations[0]).checked_sub(w.pads_begin[0]);
                let Some(row) = row.filter(|&row| row < w.input[0]) else {
                    continue;
                };
                for kw in 0..w.kernel[1] {
                    let shift = kw * w.dilations[1];
                    // Outputs for which this element lies inside the row.
                    let first = w.pads_begin[1].saturating_sub(shift).div_ceil(w.strides[1]);
                    let end = (w.input[1] + w.pads_begin[1]).saturating_sub(shift);
                    let end = end.div_ceil(w.strides[1]).min(width);
                    if first >= end {
                        continue;
                    }
                    let at = row * w.input[1] + first * w.strides[1] + shift - w.pads_begin[1];
                    let (output, positions) = (&mut output[first..end], &mut positions[first..end]);
                    match w.strides[1] {
                        1 => take::<1>(1, plane, at, output, positions),
                        2 => take::<2>(2, plane, at, output, positions),
                        stride => take::<0>(stride, plane, at, output, positions),
                    }
                }
            }
        }
    }
}

/// Takes what is larger from `plane[at..]`; `KNOWN` is the stride where the compiler should know it.
#[inline(always)]
fn take<const KNOWN: usize>(
    stride: usize,
    plane: &[f32],
    at: usize,
    output: &mut [f32],
    positions: &mut [i32],
) {
    let stride = if KNOWN == 0 { stride } else { KNOWN };
    let from = &plane[at..][..(output.len() - 1) * stride + 1];
    for (i, (best, position)) in output.iter_mut().zip(positions).enumerate() {
        let value = from[i * stride];
        let better = value > *best || (*position < 0) | (value.is_nan() & !best.is_nan());
        *best = if better { value } else { *best };
        *position = if better {
            (at + i * stride) as i32
        } else {
            *position
        };
    }
}

/// Gradient of a max pool's input.
pub fn max_pool_backward(p: &Pool, grad: &[f32], positions: &[i32], input_grad: &mut [f32]) {
    let (area_in, area_out) = (
        p.window.input[0] * p.window.input[1],
        p.window.output[0] * p.window.output[1],
    );
    let outputs = grad
        .chunks_exact(area_out)
        .zip(positions.chunks_exact(area_out));
    for (plane, (grad, positions)) in input_grad.chunks_exact_mut(area_in).zip(outputs) {
        plane.fill(0.0);
        for (grad, &position) in grad.iter().zip(positions) {
            // -1 wraps to a position that no plane has.
            if let Some(to) = plane.get_mut(position as usize) {
                *to += grad;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::kernels::testing::{assert_close, on_every_arch, values};
    use crate::device::cpu::reference::pool as plain;

    fn check(input: [usize; 2], kernel: usize, stride: usize, dilation: usize, pad: usize) {
        let extent = |i: usize| (input[i] + 2 * pad - dilation * (kernel - 1) - 1) / stride + 1;
        let window = Window {
            input,
            output: [extent(0), extent(1)],
            kernel: [kernel; 2],
            strides: [stride; 2],
            dilations: [dilation; 2],
            pads_begin: [pad; 2],
            pads_end: [pad; 2],
        };
        let p = Pool {
            planes: 3,
            window,
            count_include_pad: false,
        };
        let mut x = values(3 * input[0] * input[1], 1);
        // Equal values, NaN and negative infinity decide which position counts.
        x.iter_mut().for_each(|x| *x = (*x * 4.0).round());
        x[..40].fill(f32::NEG_INFINITY);
        x[input[0] * input[1] + 7] = f32::NAN;
        let n = 3 * extent(0) * extent(1);
        let (mut actual, mut expected) = (vec![0.0; n], vec![0.0; n]);
        let (mut at, mut plain_at) = (vec![0; n], vec![0; n]);
        max_pool(&p, &x, &mut actual, Some(&mut at));
        plain::max_pool(&p, &x, &mut expected, Some(&mut plain_at));
        assert_eq!(at, plain_at, "{window:?}");
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&actual), bits(&expected), "{window:?}");
        let mut alone = vec![0.0; n];
        max_pool(&p, &x, &mut alone, None);
        assert_eq!(bits(&alone), bits(&expected), "{window:?}");

        let grad = values(n, 2);
        let (mut actual, mut expected) = (vec![f32::NAN; x.len()], vec![f32::NAN; x.len()]);
        max_pool_backward(&p, &grad, &at, &mut actual);
        plain::max_pool_backward(&p, &grad, &at, &mut expected);
        assert_close(&format!("{window:?}"), &actual, &expected, 1e-6);
    }

    #[test]
    fn windows_of_all_kinds() {
        on_every_arch(|| {
            check([12, 70], 2, 2, 1, 0);
            check([13, 71], 2, 2, 1, 0);
            check([28, 28], 3, 2, 1, 1);
            check([15, 40], 3, 1, 1, 1);
            check([20, 37], 3, 3, 2, 0);
            check([9, 9], 2, 2, 1, 1);
            check([9, 9], 5, 4, 2, 4);
        });
    }
}
