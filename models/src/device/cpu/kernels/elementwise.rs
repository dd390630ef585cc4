//! Element by element: functions, broadcasting, reductions, masks, optimizer steps.
//!
//! Plain loops, compiled once per instruction set by `pulp`'s dispatch; what decides is chosen outside of
//! them.

use super::{arch, math, sum};
use crate::device::params::{AdamStep, SgdStep, Unary};

/// `x <- op(x)`.
pub fn unary(op: Unary, x: &mut [f32]) {
    match op {
        Unary::Abs => each(x, f32::abs),
        Unary::Exp => each(x, math::exp),
        Unary::Log => each(x, f32::ln),
        Unary::Sqrt => each(x, f32::sqrt),
        Unary::Reciprocal => each(x, |x| 1.0 / x),
        Unary::Erf => each(x, math::erf),
        Unary::Sin => each(x, f32::sin),
        Unary::Cos => each(x, f32::cos),
        Unary::Sign => each(x, |x| {
            if x == 0.0 || x.is_nan() {
                x
            } else {
                x.signum()
            }
        }),
        Unary::Floor => each(x, f32::floor),
        Unary::Ceil => each(x, f32::ceil),
        Unary::Round => each(x, f32::round_ties_even),
        // Written so that NaN stays NaN.
        Unary::Relu => each(x, |x| if x < 0.0 { 0.0 } else { x }),
        Unary::Sigmoid => each(x, math::sigmoid),
        Unary::Tanh => each(x, math::tanh),
        Unary::Clip { low, high } => each(x, |x| {
            let x = if x < low { low } else { x };
            if x > high { high } else { x }
        }),
        Unary::Scale(factor) => each(x, |x| factor * x),
        Unary::Gelu => each(x, |x| x * math::normal(x).0),
        Unary::GeluTanh => each(x, |x| 0.5 * x * (1.0 + math::tanh(gelu_inner(x)))),
        Unary::LeakyRelu(factor) => each(x, |x| if x < 0.0 { factor * x } else { x }),
        Unary::Elu {
            scale,
            factor,
            rate,
        } => each(x, |x| {
            if x > 0.0 {
                scale * x
            } else {
                factor * (math::exp(rate * x) - 1.0)
            }
        }),
        Unary::Threshold(threshold) => each(x, |x| if x <= threshold { 0.0 } else { x }),
        Unary::HardSigmoid { alpha, beta } => each(x, |x| unit(alpha * x + beta)),
        Unary::HardSwish => each(x, |x| x * unit(x / 6.0 + 0.5)),
        Unary::Mish => each(x, |x| x * math::tanh_softplus(x)),
        Unary::Softplus => each(x, |x| {
            (if x < 0.0 { 0.0 } else { x }) + math::exp(-x.abs()).ln_1p()
        }),
        Unary::Softsign => each(x, |x| x / (1.0 + x.abs())),
        Unary::Shrink { lambda, bias } => each(x, |x| {
            if x.abs() <= lambda {
                0.0
            } else {
                x - bias.copysign(x) * bias.signum()
            }
        }),
        Unary::Affine { alpha, beta } => each(x, |x| alpha * x + beta),
        Unary::ScaledTanh { alpha, beta } => each(x, |x| alpha * math::tanh(beta * x)),
    }
}

/// x cut to 0..1; NaN stays NaN.
#[inline(always)]
fn unit(x: f32) -> f32 {
    let x = if x < 0.0 { 0.0 } else { x };
    if x > 1.0 { 1.0 } else { x }
}

/// What Gelu's approximation takes the tanh of.
#[inline(always)]
fn gelu_inner(x: f32) -> f32 {
    GELU_SLOPE * (x + 0.044_715 * x * x * x)
}

/// sqrt(2 / pi)
const GELU_SLOPE: f32 = 0.797_884_6;

fn each(x: &mut [f32], f: impl Fn(f32) -> f32) {
    arch().dispatch(
        #[inline(always)]
        || x.iter_mut().for_each(|x| *x = f(*x)),
    );
}

/// `grad <- grad * op'`, see [`crate::device::Device::unary_backward`].
pub fn unary_backward(op: Unary, saved: &[f32], grad: &mut [f32]) {
    match op {
        Unary::Abs => each_with(
            grad,
            saved,
            |g, x| {
                if x == 0.0 { 0.0 } else { g * x.signum() }
            },
        ),
        Unary::Exp => each_with(grad, saved, |g, y| g * y),
        Unary::Log => each_with(grad, saved, |g, x| g / x),
        Unary::Sqrt => each_with(grad, saved, |g, y| 0.5 * g / y),
        Unary::Reciprocal => each_with(grad, saved, |g, y| -g * (y * y)),
        Unary::Erf => each_with(grad, saved, |g, x| {
            g * (std::f32::consts::FRAC_2_SQRT_PI * math::exp(-x * x))
        }),
        Unary::Sin => each_with(grad, saved, |g, x| g * x.cos()),
        Unary::Cos => each_with(grad, saved, |g, x| -g * x.sin()),
        Unary::Sign | Unary::Floor | Unary::Ceil | Unary::Round => each(grad, |_| 0.0),
        Unary::Relu => each_with(grad, saved, |g, s| if s > 0.0 { g } else { 0.0 }),
        Unary::Sigmoid => each_with(grad, saved, |g, s| g * (s * (1.0 - s))),
        Unary::Tanh => each_with(grad, saved, |g, s| g * (1.0 - s * s)),
        Unary::Clip { low, high } => {
            each_with(
                grad,
                saved,
                |g, s| if s >= low && s <= high { g } else { 0.0 },
            );
        }
        Unary::Scale(factor) => each(grad, |g| factor * g),
        Unary::Gelu => each_with(grad, saved, |g, x| {
            let (distribution, density) = math::normal(x);
            g * (distribution + x * density)
        }),
        Unary::GeluTanh => each_with(grad, saved, |g, x| {
            let t = math::tanh(gelu_inner(x));
            let inner = GELU_SLOPE * (1.0 + 3.0 * 0.044_715 * x * x);
            g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner)
        }),
        Unary::LeakyRelu(factor) => {
            each_with(grad, saved, |g, x| if x > 0.0 { g } else { factor * g });
        }
        Unary::Elu {
            scale,
            factor,
            rate,
        } => each_with(grad, saved, |g, x| {
            g * if x > 0.0 {
                scale
            } else {
                factor * rate * math::exp(rate * x)
            }
        }),
        Unary::Threshold(threshold) => {
            each_with(grad, saved, |g, x| if x > threshold { g } else { 0.0 });
        }
        Unary::HardSigmoid { alpha, beta } => each_with(grad, saved, |g, x| {
            let y = alpha * x + beta;
            if y > 0.0 && y < 1.0 { alpha * g } else { 0.0 }
        }),
        Unary::HardSwish => each_with(grad, saved, |g, x| {
            let slope = if x < 3.0 { x / 3.0 + 0.5 } else { 1.0 };
            if x <= -3.0 { 0.0 } else { g * slope }
        }),
        Unary::Mish => each_with(grad, saved, |g, x| {
            let t = math::tanh_softplus(x);
            g * (t + x * (1.0 - t * t) * math::sigmoid(x))
        }),
        Unary::Softplus => each_with(grad, saved, |g, x| g * math::sigmoid(x)),
        Unary::Softsign => each_with(grad, saved, |g, x| {
            let d = 1.0 + x.abs();
            g / (d * d)
        }),
        Unary::Shrink { lambda, .. } => {
            each_with(grad, saved, |g, x| if x.abs() > lambda { g } else { 0.0 });
        }
        Unary::Affine { alpha, .. } => each(grad, |g| alpha * g),
        Unary::ScaledTanh { alpha, beta } => each_with(grad, saved, |g, x| {
            let t = math::tanh(beta * x);
            g * alpha * beta * (1.0 - t * t)
        }),
    }
}

/// `a <- f(a, b)`.
pub fn each_with<T: Copy>(a: &mut [T], b: &[T], f: impl Fn(T, T) -> T) {
    arch().dispatch(
        #[inline(always)]
        || a.iter_mut().zip(b).for_each(|(a, &b)| *a = f(*a, b)),
    );
}

/// `x <- x ^ exponent`. The powers that models have most are products and roots.
pub fn power(x: &mut [f32], exponent: f32) {
    const POWERS: [f32; 6] = [1.0, 2.0, 3.0, 0.5, -0.5, -1.0];
    match POWERS.iter().position(|&power| power == exponent) {
        Some(0) => {}
        Some(1) => each(x, |x| x * x),
        Some(2) => each(x, |x| x * x * x),
        Some(3) => each(x, f32::sqrt),
        Some(4) => each(x, |x| 1.0 / x.sqrt()),
        Some(5) => each(x, |x| 1.0 / x),
        _ => each(x, |x| x.powf(exponent)),
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
    let axes = Axes::new(shape, [a_strides, b_strides]);
    let &[a_step, b_step] = &axes.inner_strides;
    arch().dispatch(
        #[inline(always)]
        || {
            axes.for_each_run(|[a0, b0], out0, n| {
                let out = &mut out[out0..][..n];
                match (a_step, b_step) {
                    (1, 1) => {
                        let terms = a[a0..][..n].iter().zip(&b[b0..][..n]);
                        out.iter_mut()
                            .zip(terms)
                            .for_each(|(out, (&a, &b))| *out = f(a, b));
                    }
                    (1, 0) => {
                        let b = b[b0];
                        out.iter_mut()
                            .zip(&a[a0..][..n])
                            .for_each(|(out, &a)| *out = f(a, b));
                    }
                    (0, 1) => {
                        let a = a[a0];
                        out.iter_mut()
                            .zip(&b[b0..][..n])
                            .for_each(|(out, &b)| *out = f(a, b));
                    }
                    _ => {
                        for (i, out) in out.iter_mut().enumerate() {
                            *out = f(a[a0 + i * a_step], b[b0 + i * b_step]);
                        }
                    }
                }
            });
        },
    );
}

/// Picks from `a` or `b` of `shape` after broadcasting; the strides say how each runs.
pub fn select<T: Copy>(
    shape: &[usize],
    (condition, c_strides): (&[u8], &[usize]),
    (a, a_strides): (&[T], &[usize]),
    (b, b_strides): (&[T], &[usize]),
    out: &mut [T],
) {
    let axes = Axes::new(shape, [c_strides, a_strides, b_strides]);
    let [c_step, a_step, b_step] = axes.inner_strides;
    let pick = |c: u8, a: T, b: T| if c == 0 { b } else { a };
    arch().dispatch(
        #[inline(always)]
        || {
            axes.for_each_run(|[c0, a0, b0], out0, n| {
                let out = &mut out[out0..][..n];
                if let (1, 1, 1) = (c_step, a_step, b_step) {
                    let terms = a[a0..][..n].iter().zip(&b[b0..][..n]);
                    let all = condition[c0..][..n].iter().zip(terms);
                    out.iter_mut()
                        .zip(all)
                        .for_each(|(out, (&c, (&a, &b)))| *out = pick(c, a, b));
                } else if let (1, 1, 0) = (c_step, a_step, b_step) {
                    let b = b[b0];
                    let all = condition[c0..][..n].iter().zip(&a[a0..][..n]);
                    out.iter_mut()
                        .zip(all)
                        .for_each(|(out, (&c, &a))| *out = pick(c, a, b));
                } else {
                    for (i, out) in out.iter_mut().enumerate() {
                        *out = pick(
                            condition[c0 + i * c_step],
                            a[a0 + i * a_step],
                            b[b0 + i * b_step],
                        );
                    }
                }
            });
        },
    );
}

/// Sums `x` of `shape` into `out`, whose strides are 0 along reduced axes, and multiplies by `factor`.
pub fn reduce(shape: &[usize], x: &[f32], strides: &[usize], factor: f32, out: &mut [f32]) {
    let axes = Axes::new(shape, [strides]);
    let mut sums = vec![0f64; out.len()];
    arch().dispatch(
        #[inline(always)]
        || {
            axes.for_each_run(|[o], x0, n| {
                let x = &x[x0..][..n];
                match axes.inner_strides {
                    [0] => sums[o] += sum::of(x, |x| x),
                    [step] => {
                        let sums = sums[o..].iter_mut().step_by(step);
                        sums.zip(x).for_each(|(sum, &x)| *sum += f64::from(x));
                    }
                }
            });
        },
    );
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = (sum * f64::from(factor)) as f32;
    }
}

/// A contiguous tensor's axes, neighbours merged where `N` other tensors run through both alike.
struct Axes<const N: usize> {
    /// Extents and strides of all but the last.
    outer: Vec<(usize, [usize; N])>,
    inner: usize,
    inner_strides: [usize; N],
}

impl<const N: usize> Axes<N> {
    fn new(shape: &[usize], strides: [&[usize]; N]) -> Self {
        let mut merged: Vec<(usize, [usize; N])> = Vec::new();
        for (axis, &extent) in shape.iter().enumerate() {
            let strides = strides.map(|strides| strides[axis]);
            match merged.last_mut() {
                _ if extent == 1 => (),
                Some((before, outer)) if *outer == strides.map(|stride| stride * extent) => {
                    (*before, *outer) = (*before * extent, strides);
                }
                _ => merged.push((extent, strides)),
            }
        }
        let (inner, inner_strides) = merged.pop().unwrap_or((1, [1; N]));
        Axes {
            outer: merged,
            inner,
            inner_strides,
        }
    }

    /// Calls `f(offsets in the others, offset here, length)` for every run along the last axis.
    #[inline(always)]
    fn for_each_run(&self, mut f: impl FnMut([usize; N], usize, usize)) {
        let runs: usize = self.outer.iter().map(|(extent, _)| extent).product();
        let mut index = vec![0; self.outer.len()];
        let mut offsets = [0; N];
        for run in 0..runs {
            f(offsets, run * self.inner, self.inner);
            for (index, (extent, strides)) in index.iter_mut().zip(&self.outer).rev() {
                *index += 1;
                offsets
                    .iter_mut()
                    .zip(strides)
                    .for_each(|(offset, stride)| *offset += stride);
                if *index < *extent {
                    break;
                }
                *index = 0;
                offsets
                    .iter_mut()
                    .zip(strides)
                    .for_each(|(offset, stride)| *offset -= stride * extent);
            }
        }
    }
}

/// `x <- x * factor` where the mask is 1, else 0.
pub fn apply_mask(x: &mut [f32], mask: &[u8], factor: f32) {
    arch().dispatch(
        #[inline(always)]
        || {
            for (x, &mask) in x.iter_mut().zip(mask) {
                *x = if mask == 1 { *x * factor } else { 0.0 };
            }
        },
    );
}

/// One SGD step. `velocity` is the old one and becomes the new one; `first`: it holds nothing yet.
pub fn sgd(
    s: SgdStep,
    weight: &mut [f32],
    grad: &[f32],
    velocity: Option<&mut [f32]>,
    first: bool,
) {
    let arch = arch();
    let Some(velocity) = velocity else {
        arch.dispatch(
            #[inline(always)]
            || {
                for (w, &g) in weight.iter_mut().zip(grad) {
                    *w -= s.lr * (g + s.weight_decay * *w);
                }
            },
        );
        return;
    };
    if first {
        velocity.fill(0.0);
    }
    arch.dispatch(
        #[inline(always)]
        || {
            for ((w, &g), v) in weight.iter_mut().zip(grad).zip(velocity) {
                let g = g + s.weight_decay * *w;
                *v = s.momentum * *v + g;
                let direction = if s.nesterov { g + s.momentum * *v } else { *v };
                *w -= s.lr * direction;
            }
        },
    );
}

/// One Adam step; both moments become the new ones.
pub fn adam(s: AdamStep, weight: &mut [f32], grad: &[f32], first: &mut [f32], second: &mut [f32]) {
    let step = s.step.min(i32::MAX as u64) as i32;
    let correction1 = 1.0 - f64::from(s.beta1).powi(step);
    let correction2 = (1.0 - f64::from(s.beta2).powi(step)).sqrt() as f32;
    let rate = (f64::from(s.lr) / correction1) as f32;
    // Decay acts on the weight itself or through the gradient.
    let (shrink, decay) = if s.decoupled {
        (1.0 - s.lr * s.weight_decay, 0.0)
    } else {
        (1.0, s.weight_decay)
    };
    arch().dispatch(
        #[inline(always)]
        || {
            for (((w, &g), m), v) in weight.iter_mut().zip(grad).zip(first).zip(second) {
                let g = g + decay * *w;
                *m += (1.0 - s.beta1) * (g - *m);
                *v = s.beta2 * *v + (1.0 - s.beta2) * g * g;
                *w = *w * shrink - rate * *m / (v.sqrt() / correction2 + s.eps);
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::kernels::testing::{assert_close, on_every_arch, values};
    use crate::device::cpu::reference::elementwise as plain;
    use crate::shape;

    #[test]
    fn functions() {
        on_every_arch(|| {
            let clip = Unary::Clip {
                low: -0.2,
                high: 0.3,
            };
            for op in [
                Unary::Abs,
                Unary::Exp,
                Unary::Erf,
                Unary::Sin,
                Unary::Cos,
                Unary::Sign,
                Unary::Floor,
                Unary::Ceil,
                Unary::Round,
                Unary::Relu,
                Unary::Sigmoid,
                Unary::Tanh,
                clip,
                Unary::Scale(3.0),
                Unary::Gelu,
                Unary::GeluTanh,
                Unary::LeakyRelu(0.1),
                Unary::Elu {
                    scale: 1.1,
                    factor: 0.7,
                    rate: 1.5,
                },
                Unary::Threshold(0.1),
                Unary::HardSigmoid {
                    alpha: 2.0,
                    beta: 0.4,
                },
                Unary::HardSwish,
                Unary::Mish,
                Unary::Softplus,
                Unary::Softsign,
                Unary::Shrink {
                    lambda: 0.2,
                    bias: 0.1,
                },
                Unary::Affine {
                    alpha: -2.0,
                    beta: 0.5,
                },
                Unary::ScaledTanh {
                    alpha: 1.7,
                    beta: 0.6,
                },
            ] {
                let x: Vec<f32> = values(1003, 1).iter().map(|x| 8.0 * x).collect();
                let (mut actual, mut expected) = (x.clone(), x.clone());
                unary(op, &mut actual);
                plain::unary(op, &mut expected);
                assert_close(&format!("{op:?}"), &actual, &expected, 1e-6);
                let (mut actual, mut expected) = (values(1003, 2), values(1003, 2));
                unary_backward(op, &x, &mut actual);
                plain::unary_backward(op, &x, &mut expected);
                assert_close(&format!("backward of {op:?}"), &actual, &expected, 1e-6);
            }
            let mut x = [f32::NAN, -1.0];
            unary(Unary::Relu, &mut x);
            assert!(x[0].is_nan() && x[1] == 0.0);
        });
    }

    #[test]
    fn broadcasting() {
        on_every_arch(|| {
            for (a, b) in [
                (vec![2, 3, 4], vec![2, 3, 4]),
                (vec![2, 3, 4], vec![4]),
                (vec![2, 3, 4], vec![3, 1]),
                (vec![2, 1, 4], vec![3, 1]),
                (vec![1], vec![5, 2]),
                (vec![2, 3, 1, 1], vec![2, 1, 5, 7]),
                (vec![], vec![]),
            ] {
                let shape = shape::broadcast(&a, &b).unwrap();
                let n = shape.iter().product();
                let (x, y) = (values(a.iter().product(), 1), values(b.iter().product(), 2));
                let x = (&x[..], &shape::broadcast_strides(&a, &shape)[..]);
                let y = (&y[..], &shape::broadcast_strides(&b, &shape)[..]);
                let (mut actual, mut expected) = (vec![0.0; n], vec![0.0; n]);
                broadcast(&shape, x, y, &mut actual, |x, y| x - y);
                plain::broadcast(&shape, x, y, &mut expected, |x, y| x - y);
                assert_eq!(actual, expected, "{a:?} - {b:?}");
            }
        });
    }

    #[test]
    fn selection() {
        on_every_arch(|| {
            for (c, a, b) in [
                (vec![2, 3, 4], vec![2, 3, 4], vec![2, 3, 4]),
                (vec![3, 4], vec![2, 3, 4], vec![]),
                (vec![2, 1, 4], vec![3, 1], vec![4]),
                (vec![], vec![5], vec![2, 5]),
            ] {
                let shape = shape::broadcast(&shape::broadcast(&c, &a).unwrap(), &b).unwrap();
                let n: usize = shape.iter().product();
                let condition: Vec<u8> = (0..c.iter().product::<usize>())
                    .map(|i| (i % 3 == 1).into())
                    .collect();
                let (x, y) = (values(a.iter().product(), 1), values(b.iter().product(), 2));
                let strides = |of: &[usize]| shape::broadcast_strides(of, &shape);
                let (c, a, b) = (strides(&c), strides(&a), strides(&b));
                let (c, a, b) = ((&condition[..], &c[..]), (&x[..], &a[..]), (&y[..], &b[..]));
                let (mut actual, mut expected) = (vec![0.0; n], vec![0.0; n]);
                select(&shape, c, a, b, &mut actual);
                plain::select(&shape, c, a, b, &mut expected);
                assert_eq!(actual, expected, "{shape:?}");
            }
        });
    }

    #[test]
    fn reductions() {
        on_every_arch(|| {
            let shape = [3, 5, 2, 67];
            let x = values(shape.iter().product(), 1);
            for kept in [
                [3, 5, 2, 67],
                [1, 5, 1, 1],
                [3, 1, 2, 1],
                [1, 1, 1, 67],
                [1, 1, 1, 1],
                [3, 1, 1, 67],
            ] {
                let strides = shape::broadcast_strides(&kept, &shape);
                let n = kept.iter().product();
                let (mut actual, mut expected) = (vec![0.0; n], vec![0.0; n]);
                reduce(&shape, &x, &strides, 0.5, &mut actual);
                plain::reduce(&shape, &x, &strides, 0.5, &mut expected);
                assert_close(&format!("to {kept:?}"), &actual, &expected, 1e-6);
            }
        });
    }
}
