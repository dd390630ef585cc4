//! Batch norm, softmax, local response normalisation.

use crate::device::params::{Axis, Lrn};

/// Mean and biased variance of each channel of `[outer, len, inner]`.
pub fn moments(axis: Axis, x: &[f32], mean: &mut [f32], variance: &mut [f32]) {
    let count = (axis.outer * axis.inner) as f64;
    for c in 0..axis.len {
        let m = channel(axis, c).map(|i| f64::from(x[i])).sum::<f64>() / count;
        let squares: f64 = channel(axis, c)
            .map(|i| (f64::from(x[i]) - m).powi(2))
            .sum();
        mean[c] = m as f32;
        variance[c] = (squares / count) as f32;
    }
}

/// Indices of the elements of one channel.
fn channel(axis: Axis, c: usize) -> impl Iterator<Item = usize> {
    (0..axis.outer).flat_map(move |o| {
        let start = (o * axis.len + c) * axis.inner;
        start..start + axis.inner
    })
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
    for c in 0..axis.len {
        for i in channel(axis, c) {
            x[i] = (x[i] - mean[c]) * inv_std[c] * scale[c] + bias[c];
        }
    }
}

/// Per channel: sum of `grad` and sum of `grad * (x - mean) * inv_std`, the gradients of bias and scale.
pub fn normalize_backward_parameters(
    axis: Axis,
    x: &[f32],
    grad: &[f32],
    mean: &[f32],
    inv_std: &[f32],
    scale_grad: &mut [f32],
    bias_grad: &mut [f32],
) {
    for c in 0..axis.len {
        let (mut sum, mut product) = (0f64, 0f64);
        for i in channel(axis, c) {
            sum += f64::from(grad[i]);
            product += f64::from(grad[i]) * f64::from((x[i] - mean[c]) * inv_std[c]);
        }
        bias_grad[c] = sum as f32;
        scale_grad[c] = product as f32;
    }
}

/// Turns the gradient of a batch norm's output into that of its input; `statistics`: they were the
/// minibatch's own, so the gradient flows through them too.
#[allow(clippy::too_many_arguments)]
pub fn normalize_backward_input(
    axis: Axis,
    x: &[f32],
    grad: &mut [f32],
    mean: &[f32],
    inv_std: &[f32],
    scale: &[f32],
    statistics: Option<(&[f32], &[f32])>,
) {
    let count = (axis.outer * axis.inner) as f32;
    for c in 0..axis.len {
        let (scale_mean, bias_mean) = match statistics {
            Some((scale_grad, bias_grad)) => (scale_grad[c] / count, bias_grad[c] / count),
            None => (0.0, 0.0),
        };
        for i in channel(axis, c) {
            let normalized = (x[i] - mean[c]) * inv_std[c];
            grad[i] = (grad[i] - bias_mean - normalized * scale_mean) * inv_std[c] * scale[c];
        }
    }
}

/// Indices of each line along the axis.
fn lines(axis: Axis) -> impl Iterator<Item = impl Iterator<Item = usize> + Clone> {
    (0..axis.outer * axis.inner).map(move |line| {
        let start = line / axis.inner * axis.len * axis.inner + line % axis.inner;
        (0..axis.len).map(move |i| start + i * axis.inner)
    })
}

/// Softmax or its logarithm, in place.
pub fn softmax(axis: Axis, x: &mut [f32], log: bool) {
    for line in lines(axis) {
        let largest = line.clone().map(|i| x[i]).fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = line.clone().map(|i| f64::from(x[i] - largest).exp()).sum();
        for i in line {
            let shifted = f64::from(x[i] - largest);
            x[i] = if log {
                shifted - sum.ln()
            } else {
                shifted.exp() / sum
            } as f32;
        }
    }
}

/// Gradient of softmax or its logarithm from its output, in place of the output's gradient.
pub fn softmax_backward(axis: Axis, output: &[f32], grad: &mut [f32], log: bool) {
    for line in lines(axis) {
        if log {
            let sum: f64 = line.clone().map(|i| f64::from(grad[i])).sum();
            for i in line {
                grad[i] -= output[i].exp() * sum as f32;
            }
        } else {
            let dot: f64 = line
                .clone()
                .map(|i| f64::from(grad[i]) * f64::from(output[i]))
                .sum();
            for i in line {
                grad[i] = output[i] * (grad[i] - dot as f32);
            }
        }
    }
}

/// Channels that a channel's normalisation sums: `size` around it, as ONNX centres them.
fn neighbours(p: &Lrn, c: usize) -> std::ops::Range<usize> {
    let below = (p.size - 1) / 2;
    let above = p.size - 1 - below;
    c.saturating_sub(below)..(c + above + 1).min(p.channels)
}

/// `base = bias + alpha / size * sum of squares; output = x * base^-beta`.
pub fn lrn(p: &Lrn, x: &[f32], output: &mut [f32], base: &mut [f32]) {
    let at = |n: usize, c: usize, s: usize| (n * p.channels + c) * p.spatial + s;
    for n in 0..p.batch {
        for c in 0..p.channels {
            for s in 0..p.spatial {
                let squares: f64 = neighbours(p, c)
                    .map(|k| f64::from(x[at(n, k, s)]).powi(2))
                    .sum();
                let i = at(n, c, s);
                base[i] = p.bias + p.alpha / p.size as f32 * squares as f32;
                output[i] = x[i] * base[i].powf(-p.beta);
            }
        }
    }
}

/// Gradient of [`lrn`]'s input.
pub fn lrn_backward(p: &Lrn, x: &[f32], base: &[f32], grad: &[f32], input_grad: &mut [f32]) {
    let at = |n: usize, c: usize, s: usize| (n * p.channels + c) * p.spatial + s;
    let factor = 2.0 * p.alpha * p.beta / p.size as f32;
    input_grad.fill(0.0);
    for n in 0..p.batch {
        for c in 0..p.channels {
            for s in 0..p.spatial {
                let i = at(n, c, s);
                let power = base[i].powf(-p.beta);
                input_grad[i] += grad[i] * power;
                let through = factor * grad[i] * x[i] * power / base[i];
                for k in neighbours(p, c) {
                    input_grad[at(n, k, s)] -= through * x[at(n, k, s)];
                }
            }
        }
    }
}
