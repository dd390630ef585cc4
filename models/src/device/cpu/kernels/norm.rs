//! Batch norm and softmax.
//!
//! Batch norm goes channel by channel: one channel of a whole minibatch usually fits the second cache
//! level, so the statistics and the normalisation read memory once.

use super::{arch, math, sum};
use crate::device::params::Axis;

/// Where the runs of a channel begin in `[outer, len, inner]`.
#[inline(always)]
fn starts(axis: Axis, channel: usize) -> impl Iterator<Item = usize> {
    (0..axis.outer).map(move |o| (o * axis.len + channel) * axis.inner)
}

/// Statistics of a minibatch, one per channel.
pub struct Statistics<'a> {
    /// Mean.
    pub mean: &'a mut [f32],
    /// Biased variance.
    pub variance: &'a mut [f32],
    /// 1 / sqrt(variance + eps).
    pub inv_std: &'a mut [f32],
}

/// `output = (x - mean) * inv_std * scale + bias` per channel, with statistics that it computes.
pub fn batch_norm(
    axis: Axis,
    x: &[f32],
    scale: &[f32],
    bias: &[f32],
    eps: f32,
    statistics: Statistics<'_>,
    output: &mut [f32],
) {
    let Statistics {
        mean,
        variance,
        inv_std,
    } = statistics;
    let count = (axis.outer * axis.inner) as f64;
    arch().dispatch(
        #[inline(always)]
        || {
            for c in 0..axis.len {
                let total: f64 = starts(axis, c)
                    .map(|i| sum::of(&x[i..][..axis.inner], |x| x))
                    .sum();
                let m = (total / count) as f32;
                // Squares of deviations, not a difference of squares: no digits cancel.
                let deviations = |i: usize| sum::of(&x[i..][..axis.inner], |x| (x - m) * (x - m));
                let v = (starts(axis, c).map(deviations).sum::<f64>() / count) as f32;
                (mean[c], variance[c], inv_std[c]) = (m, v, 1.0 / (v + eps).sqrt());
                let factor = inv_std[c] * scale[c];
                for i in starts(axis, c) {
                    let output = &mut output[i..][..axis.inner];
                    for (output, &x) in output.iter_mut().zip(&x[i..][..axis.inner]) {
                        *output = (x - m) * factor + bias[c];
                    }
                }
            }
        },
    );
}

/// `x <- (x - mean) * inv_std * scale + bias` per channel.
pub fn normalize(
    axis: Axis,
    x: &mut [f32],
    mean: &[f32],
    inv_std: &[f32],
    scale: &[f32],
    bias: &[f32],
) {
    arch().dispatch(
        #[inline(always)]
        || {
            for (run, x) in x.chunks_exact_mut(axis.inner.max(1)).enumerate() {
                let c = run % axis.len;
                let (mean, factor, bias) = (mean[c], inv_std[c] * scale[c], bias[c]);
                x.iter_mut().for_each(|x| *x = (*x - mean) * factor + bias);
            }
        },
    );
}

/// Turns the gradient of a batch norm's output into that of its input and gives those of scale and bias;
/// `statistics`: they were the minibatch's own, so the gradient flows through them too.
#[allow(clippy::too_many_arguments)]
pub fn batch_norm_backward(
    axis: Axis,
    x: &[f32],
    grad: &mut [f32],
    mean: &[f32],
    inv_std: &[f32],
    scale: &[f32],
    statistics: bool,
    scale_grad: &mut [f32],
    bias_grad: &mut [f32],
) {
    let count = (axis.outer * axis.inner) as f64;
    arch().dispatch(
        #[inline(always)]
        || {
            for c in 0..axis.len {
                let (m, s) = (mean[c], inv_std[c]);
                let mut total = [0f64; 2];
                for i in starts(axis, c) {
                    let sums =
                        sum::pairs(&grad[i..][..axis.inner], &x[i..][..axis.inner], |g, x| {
                            [g, g * (x - m)]
                        });
                    total
                        .iter_mut()
                        .zip(sums)
                        .for_each(|(total, sum)| *total += sum);
                }
                let [sum, product] = [total[0], total[1] * f64::from(s)];
                (bias_grad[c], scale_grad[c]) = (sum as f32, product as f32);
                let (sum_mean, product_mean) = if statistics {
                    ((sum / count) as f32, (product / count) as f32)
                } else {
                    (0.0, 0.0)
                };
                let (slope, factor) = (s * product_mean, s * scale[c]);
                for i in starts(axis, c) {
                    let grad = &mut grad[i..][..axis.inner];
                    for (grad, &x) in grad.iter_mut().zip(&x[i..][..axis.inner]) {
                        *grad = (*grad - sum_mean - (x - m) * slope) * factor;
                    }
                }
            }
        },
    );
}

/// Softmax or its logarithm along the last axis (`axis.inner` is 1), in place.
pub fn softmax(axis: Axis, x: &mut [f32], log: bool) {
    arch().dispatch(
        #[inline(always)]
        || {
            for line in x.chunks_exact_mut(axis.len) {
                let largest = largest(line);
                if log {
                    line.iter_mut().for_each(|x| *x -= largest);
                    let shift = sum::of(line, math::exp).ln() as f32;
                    line.iter_mut().for_each(|x| *x -= shift);
                } else {
                    // A loop, not a closure: what the compiler leaves outside of here is not
                    // compiled for this instruction set.
                    for x in line.iter_mut() {
                        *x = math::exp(*x - largest);
                    }
                    let factor = (1.0 / sum::of(line, |x| x)) as f32;
                    line.iter_mut().for_each(|x| *x *= factor);
                }
            }
        },
    );
}

/// The largest value, in as many lanes as the widest vectors have: a single chain of comparisons would wait for each.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    const LANES: usize = 16;
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, x);
        }
    }
    lanes
        .iter()
        .chain(rest)
        .copied()
        .fold(f32::NEG_INFINITY, larger)
}

/// Gradient of [`softmax`] from its output, in place of the output's gradient.
pub fn softmax_backward(axis: Axis, output: &[f32], grad: &mut [f32], log: bool) {
    arch().dispatch(
        #[inline(always)]
        || {
            let lines = grad.chunks_exact_mut(axis.len);
            for (grad, output) in lines.zip(output.chunks_exact(axis.len)) {
                if log {
                    let sum = sum::of(grad, |g| g) as f32;
                    for (g, &y) in grad.iter_mut().zip(output) {
                        *g -= math::exp(y) * sum;
                    }
                } else {
                    let [dot, _] = sum::pairs(grad, output, |g, y| [g * y, 0.0]);
                    let dot = dot as f32;
                    let pairs = grad.iter_mut().zip(output);
                    pairs.for_each(|(g, &y)| *g = y * (*g - dot));
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::kernels::testing::{assert_close, on_every_arch, values};
    use crate::device::cpu::reference::norm as plain;

    const AXES: [Axis; 4] = [
        Axis {
            outer: 3,
            len: 5,
            inner: 77,
        },
        Axis {
            outer: 9,
            len: 4,
            inner: 1,
        },
        Axis {
            outer: 1,
            len: 1,
            inner: 40_000,
        },
        Axis {
            outer: 2,
            len: 3,
            inner: 64,
        },
    ];

    #[test]
    fn batch_norm_forward_and_backward() {
        on_every_arch(|| {
            for axis in AXES {
                let (n, c) = (axis.outer * axis.len * axis.inner, axis.len);
                // A mean far from 0 shows what cancels.
                let x: Vec<f32> = values(n, 1).iter().map(|x| x + 30.0).collect();
                let (scale, bias) = (values(c, 2), values(c, 3));
                let [mut mean, mut variance, mut inv_std] =
                    [vec![0.0; c], vec![0.0; c], vec![0.0; c]];
                let mut output = vec![0.0; n];
                let statistics = Statistics {
                    mean: &mut mean,
                    variance: &mut variance,
                    inv_std: &mut inv_std,
                };
                batch_norm(axis, &x, &scale, &bias, 1e-5, statistics, &mut output);
                let (mut plain_mean, mut plain_variance) = (vec![0.0; c], vec![0.0; c]);
                plain::moments(axis, &x, &mut plain_mean, &mut plain_variance);
                assert_close("mean", &mean, &plain_mean, 1e-6);
                assert_close("variance", &variance, &plain_variance, 1e-6);
                let mut expected = x.clone();
                plain::normalize(axis, &mut expected, &mean, &inv_std, &scale, &bias);
                assert_close("output", &output, &expected, 1e-5);
                let mut actual = x.clone();
                normalize(axis, &mut actual, &mean, &inv_std, &scale, &bias);
                assert_close("normalize", &actual, &expected, 1e-5);

                for statistics in [true, false] {
                    let grad = values(n, 4);
                    let [mut scale_grad, mut bias_grad] = [vec![0.0; c], vec![0.0; c]];
                    let mut actual = grad.clone();
                    batch_norm_backward(
                        axis,
                        &x,
                        &mut actual,
                        &mean,
                        &inv_std,
                        &scale,
                        statistics,
                        &mut scale_grad,
                        &mut bias_grad,
                    );
                    let [mut plain_scale, mut plain_bias] = [vec![0.0; c], vec![0.0; c]];
                    plain::normalize_backward_parameters(
                        axis,
                        &x,
                        &grad,
                        &mean,
                        &inv_std,
                        &mut plain_scale,
                        &mut plain_bias,
                    );
                    assert_close("scale", &scale_grad, &plain_scale, 1e-5);
                    assert_close("bias", &bias_grad, &plain_bias, 1e-5);
                    let mut expected = grad.clone();
                    let sums = statistics.then_some((&plain_scale[..], &plain_bias[..]));
                    plain::normalize_backward_input(
                        axis,
                        &x,
                        &mut expected,
                        &mean,
                        &inv_std,
                        &scale,
                        sums,
                    );
                    assert_close("input", &actual, &expected, 1e-5);
                }
            }
        });
    }

    #[test]
    fn softmax_of_long_and_short_lines() {
        on_every_arch(|| {
            for (outer, len) in [(7, 10), (2, 1000), (3, 1)] {
                let axis = Axis {
                    outer,
                    len,
                    inner: 1,
                };
                for log in [false, true] {
                    let x: Vec<f32> = values(outer * len, 1).iter().map(|x| x * 40.0).collect();
                    let (mut actual, mut expected) = (x.clone(), x);
                    softmax(axis, &mut actual, log);
                    plain::softmax(axis, &mut expected, log);
                    assert_close("softmax", &actual, &expected, 1e-6);
                    let grad = values(outer * len, 2);
                    let (mut actual, mut again) = (grad.clone(), grad);
                    softmax_backward(axis, &expected, &mut actual, log);
                    plain::softmax_backward(axis, &expected, &mut again, log);
                    assert_close("its gradient", &actual, &again, 1e-6);
                }
            }
        });
    }
}
