//! Element by element: functions, broadcasting, reductions, masks.

use crate::device::params::{Binary, Distribution, MaskSeed, Unary};
use crate::random::Stream;

use super::activation;

/// `x <- op(x)`.
pub fn unary(op: Unary, x: &mut [f32]) {
    let f = |x: f32| match op {
        // Written so that NaN stays NaN.
        Unary::Relu => {
            if x < 0.0 {
                0.0
            } else {
                x
            }
        }
        Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Unary::Tanh => x.tanh(),
        Unary::Clip { low, high } => {
            if x < low {
                low
            } else if x > high {
                high
            } else {
                x
            }
        }
        Unary::Scale(factor) => factor * x,
        _ => activation::value(op, f64::from(x)) as f32,
    };
    for x in x {
        *x = f(*x);
    }
}

/// `grad <- grad * op'`, see [`crate::device::Device::unary_backward`].
pub fn unary_backward(op: Unary, saved: &[f32], grad: &mut [f32]) {
    for (grad, &s) in grad.iter_mut().zip(saved) {
        *grad *= match op {
            // From the output.
            Unary::Exp => s,
            Unary::Sqrt => 0.5 / s,
            Unary::Reciprocal => -s * s,
            Unary::Relu => {
                if s > 0.0 {
                    1.0
                } else {
                    0.0
                }
            }
            Unary::Sigmoid => s * (1.0 - s),
            Unary::Tanh => 1.0 - s * s,
            Unary::Clip { low, high } => {
                if s >= low && s <= high {
                    1.0
                } else {
                    0.0
                }
            }
            Unary::Scale(factor) => factor,
            _ => activation::slope(op, f64::from(s)) as f32,
        };
    }
}

/// `op(a, b)` of integers; overflow wraps, and x / 0 is 0, since shape arithmetic must not bring a program down.
pub fn binary_i64(op: Binary, a: i64, b: i64) -> i64 {
    match op {
        Binary::Add => a.wrapping_add(b),
        Binary::Sub => a.wrapping_sub(b),
        Binary::Mul => a.wrapping_mul(b),
        Binary::Div => {
            if b == 0 {
                0
            } else {
                a.wrapping_div(b)
            }
        }
        Binary::Pow => pow_i64(a, b),
        Binary::Max => a.max(b),
        Binary::Min => a.min(b),
        Binary::Mod if b == 0 => 0,
        Binary::Mod => {
            let rest = a.wrapping_rem(b);
            if rest != 0 && (rest < 0) != (b < 0) {
                rest + b
            } else {
                rest
            }
        }
        Binary::Fmod if b == 0 => 0,
        Binary::Fmod => a.wrapping_rem(b),
    }
}

/// Toward zero where the exponent is negative.
fn pow_i64(base: i64, exponent: i64) -> i64 {
    match (base, u32::try_from(exponent)) {
        (_, Ok(exponent)) => base.wrapping_pow(exponent),
        (1, _) => 1,
        (-1, _) if exponent % 2 == 0 => 1,
        (-1, _) => -1,
        _ => 0,
    }
}

/// `op(a, b)` of floats.
pub fn binary_f32(op: Binary, a: f32, b: f32) -> f32 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::Pow => a.powf(b),
        Binary::Max if a.is_nan() || a > b => a,
        Binary::Min if a.is_nan() || a < b => a,
        Binary::Max | Binary::Min => b,
        Binary::Mod => {
            let rest = a % b;
            if rest != 0.0 && (rest < 0.0) != (b < 0.0) {
                rest + b
            } else {
                rest
            }
        }
        Binary::Fmod => a % b,
    }
}

/// Picks from `a` or `b` of `shape` after broadcasting; the strides say how each runs.
pub fn select<T: Copy>(
    shape: &[usize],
    (condition, c_strides): (&[u8], &[usize]),
    (a, a_strides): (&[T], &[usize]),
    (b, b_strides): (&[T], &[usize]),
    out: &mut [T],
) {
    let at = |strides: &[usize], mut i: usize| {
        let mut offset = 0;
        for axis in (0..shape.len()).rev() {
            offset += i % shape[axis] * strides[axis];
            i /= shape[axis];
        }
        offset
    };
    for (i, out) in out.iter_mut().enumerate() {
        *out = if condition[at(c_strides, i)] != 0 {
            a[at(a_strides, i)]
        } else {
            b[at(b_strides, i)]
        };
    }
}

/// Combines two tensors of `shape` after broadcasting; the strides say how each runs.
pub fn broadcast<T: Copy, U>(
    shape: &[usize],
    (a, a_strides): (&[T], &[usize]),
    (b, b_strides): (&[T], &[usize]),
    out: &mut [U],
    f: impl Fn(T, T) -> U,
) {
    let mut index = vec![0; shape.len()];
    let (mut i, mut j) = (0, 0);
    for out in out {
        *out = f(a[i], b[j]);
        for axis in (0..shape.len()).rev() {
            index[axis] += 1;
            i += a_strides[axis];
            j += b_strides[axis];
            if index[axis] < shape[axis] {
                break;
            }
            index[axis] = 0;
            i -= a_strides[axis] * shape[axis];
            j -= b_strides[axis] * shape[axis];
        }
    }
}

/// Sums `x` of `shape` into `out`, whose strides are 0 along reduced axes, and multiplies by `factor`.
pub fn reduce(shape: &[usize], x: &[f32], strides: &[usize], factor: f32, out: &mut [f32]) {
    let mut sums = vec![0f64; out.len()];
    let mut index = vec![0; shape.len()];
    let mut o = 0;
    for &x in x {
        sums[o] += f64::from(x);
        for axis in (0..shape.len()).rev() {
            index[axis] += 1;
            o += strides[axis];
            if index[axis] < shape[axis] {
                break;
            }
            index[axis] = 0;
            o -= strides[axis] * shape[axis];
        }
    }
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = sum as f32 * factor;
    }
}

/// Random floats; samples of `out.len() / samples` elements each.
pub fn random(distribution: Distribution, samples: usize, seed: MaskSeed, out: &mut [f32]) {
    let per_sample = (out.len() / samples.max(1)).max(1);
    let node = Stream::new(seed.seed).child(seed.node);
    for (sample, out) in out.chunks_mut(per_sample).enumerate() {
        let stream = node.child(seed.first_sample.wrapping_add(sample as u64));
        for (i, out) in (0..).zip(out) {
            *out = match distribution {
                Distribution::Uniform { low, high } => low + (high - low) * stream.uniform(i),
                Distribution::Normal { mean, deviation } => mean + deviation * stream.normal(i),
            };
        }
    }
}

/// 1 with probability `keep`; samples of `mask.len() / samples` elements each.
pub fn random_mask(samples: usize, keep: f32, seed: MaskSeed, mask: &mut [u8]) {
    let per_sample = (mask.len() / samples.max(1)).max(1);
    let node = Stream::new(seed.seed).child(seed.node);
    for (sample, mask) in mask.chunks_mut(per_sample).enumerate() {
        let stream = node.child(seed.first_sample.wrapping_add(sample as u64));
        for (i, mask) in mask.iter_mut().enumerate() {
            *mask = u8::from(stream.uniform(i as u64) < keep);
        }
    }
}
