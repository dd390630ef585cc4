//! Element by element: functions, broadcasting, reductions, masks, optimizer steps.

use crate::device::params::{AdamStep, Binary, MaskSeed, SgdStep, Unary};
use crate::random::Stream;

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
    };
    for x in x {
        *x = f(*x);
    }
}

/// `grad <- grad * op'`, see [`crate::device::Device::unary_backward`].
pub fn unary_backward(op: Unary, saved: &[f32], grad: &mut [f32]) {
    for (grad, &s) in grad.iter_mut().zip(saved) {
        *grad *= match op {
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
        };
    }
}

/// `op(a, b)` of floats.
pub fn binary_f32(op: Binary, a: f32, b: f32) -> f32 {
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
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
    }
}

/// Combines two tensors of `shape` after broadcasting; the strides say how each runs.
pub fn broadcast<T: Copy>(
    shape: &[usize],
    (a, a_strides): (&[T], &[usize]),
    (b, b_strides): (&[T], &[usize]),
    out: &mut [T],
    f: impl Fn(T, T) -> T,
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

/// `x <- x * factor` where the mask is 1, else 0.
pub fn apply_mask(x: &mut [f32], mask: &[u8], factor: f32) {
    for (x, &mask) in x.iter_mut().zip(mask) {
        *x = if mask == 1 { *x * factor } else { 0.0 };
    }
}

/// One SGD step. `velocity` is the old one and becomes the new one; `first`: it holds nothing yet.
pub fn sgd(
    s: SgdStep,
    weight: &mut [f32],
    grad: &[f32],
    velocity: Option<&mut [f32]>,
    first: bool,
) {
    let Some(velocity) = velocity else {
        for (w, &g) in weight.iter_mut().zip(grad) {
            *w -= s.lr * (g + s.weight_decay * *w);
        }
        return;
    };
    for ((w, &g), v) in weight.iter_mut().zip(grad).zip(velocity) {
        let g = g + s.weight_decay * *w;
        *v = if first { g } else { s.momentum * *v + g };
        let direction = if s.nesterov { g + s.momentum * *v } else { *v };
        *w -= s.lr * direction;
    }
}

/// One Adam step; both moments become the new ones.
pub fn adam(s: AdamStep, weight: &mut [f32], grad: &[f32], first: &mut [f32], second: &mut [f32]) {
    let step = s.step.min(i32::MAX as u64) as i32;
    let correction1 = 1.0 - f64::from(s.beta1).powi(step);
    let correction2 = (1.0 - f64::from(s.beta2).powi(step)).sqrt() as f32;
    let rate = (f64::from(s.lr) / correction1) as f32;
    for (((w, &g), m), v) in weight.iter_mut().zip(grad).zip(first).zip(second) {
        let g = if s.decoupled {
            *w *= 1.0 - s.lr * s.weight_decay;
            g
        } else {
            g + s.weight_decay * *w
        };
        *m += (1.0 - s.beta1) * (g - *m);
        *v = s.beta2 * *v + (1.0 - s.beta2) * g * g;
        *w -= rate * *m / (v.sqrt() / correction2 + s.eps);
    }
}
