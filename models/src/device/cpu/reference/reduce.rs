//! Extremes, products, positions and running sums, along axes.

use crate::device::params::{Axis, CumulativeSum, Extreme, Reduction};

/// Numbers that can be reduced.
pub trait Number: Copy + PartialOrd {
    /// 0 and 1.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// Sum; integers wrap.
    fn plus(self, other: Self) -> Self;
    /// Product; integers wrap.
    fn times(self, other: Self) -> Self;
}

impl Number for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;

    fn plus(self, other: Self) -> Self {
        self + other
    }

    fn times(self, other: Self) -> Self {
        self * other
    }
}

impl Number for i64 {
    const ZERO: Self = 0;
    const ONE: Self = 1;

    fn plus(self, other: Self) -> Self {
        self.wrapping_add(other)
    }

    fn times(self, other: Self) -> Self {
        self.wrapping_mul(other)
    }
}

/// Whether `x` takes the place of `best`: NaN, once found, stays.
#[allow(clippy::eq_op, reason = "only NaN differs from itself")]
fn replaces<T: Number>(x: T, best: T, largest: bool) -> bool {
    let beyond = if largest { x > best } else { x < best };
    best == best && (beyond || x != x)
}

/// Calls `f` with the position in a tensor with these strides (0 along reduced axes) of each element of `shape`.
fn positions(shape: &[usize], strides: &[usize], mut f: impl FnMut(usize, usize)) {
    let mut index = vec![0; shape.len()];
    let mut o = 0;
    for i in 0..shape.iter().product() {
        f(i, o);
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
}

/// Reduces `x` of `shape` into `out`, whose strides are 0 along reduced axes; none of those may be empty for an extreme.
pub fn reduce<T: Number>(
    reduction: Reduction,
    shape: &[usize],
    x: &[T],
    strides: &[usize],
    out: &mut [T],
) {
    let extreme = matches!(reduction, Reduction::Max | Reduction::Min);
    out.fill(if reduction == Reduction::Prod {
        T::ONE
    } else {
        T::ZERO
    });
    let mut seen = vec![!extreme; out.len()];
    positions(shape, strides, |i, o| {
        if !std::mem::replace(&mut seen[o], true) {
            out[o] = x[i];
            return;
        }
        match reduction {
            Reduction::Sum | Reduction::Mean => out[o] = out[o].plus(x[i]),
            Reduction::Prod => out[o] = out[o].times(x[i]),
            Reduction::Max | Reduction::Min => {
                if replaces(x[i], out[o], reduction == Reduction::Max) {
                    out[o] = x[i];
                }
            }
        }
    });
}

/// Gradient of an extreme or a product; `strides` are those of the output.
pub fn reduce_backward(
    reduction: Reduction,
    shape: &[usize],
    x: &[f32],
    strides: &[usize],
    (output, grad): (&[f32], &[f32]),
    out: &mut [f32],
) {
    if reduction == Reduction::Prod {
        // The product of the others: without the zeros, if there is one that is this element.
        let (mut zeros, mut product) = (vec![0usize; output.len()], vec![1f32; output.len()]);
        positions(shape, strides, |i, o| {
            if x[i] == 0.0 {
                zeros[o] += 1;
            } else {
                product[o] *= x[i];
            }
        });
        positions(shape, strides, |i, o| {
            let others = match (zeros[o], x[i] == 0.0) {
                (0, _) => product[o] / x[i],
                (1, true) => product[o],
                _ => 0.0,
            };
            out[i] = grad[o] * others;
        });
        return;
    }
    let mut equals = vec![0f32; output.len()];
    let is_extreme = |i: usize, o: usize| x[i] == output[o] || x[i].is_nan();
    positions(shape, strides, |i, o| {
        equals[o] += f32::from(u8::from(is_extreme(i, o)));
    });
    positions(shape, strides, |i, o| {
        out[i] = if is_extreme(i, o) {
            grad[o] / equals[o]
        } else {
            0.0
        };
    });
}

/// Where the extreme of each row lies; 0 of an empty one.
pub fn arg_extreme<T: Number>(axis: Axis, x: &[T], extreme: Extreme, out: &mut [i64]) {
    for outer in 0..axis.outer {
        for inner in 0..axis.inner {
            let at = |i: usize| x[(outer * axis.len + i) * axis.inner + inner];
            let mut best = 0;
            for i in 1..axis.len {
                let equal = extreme.last && at(i) == at(best);
                if equal || replaces(at(i), at(best), extreme.largest) {
                    best = i;
                }
            }
            out[outer * axis.inner + inner] = best as i64;
        }
    }
}

/// Sums along the axis up to each element.
pub fn cumulative_sum<T: Number>(axis: Axis, x: &[T], p: CumulativeSum, out: &mut [T]) {
    for outer in 0..axis.outer {
        for inner in 0..axis.inner {
            let mut sum = T::ZERO;
            for step in 0..axis.len {
                let i = if p.reverse { axis.len - 1 - step } else { step };
                let at = (outer * axis.len + i) * axis.inner + inner;
                let with = sum.plus(x[at]);
                out[at] = if p.exclusive { sum } else { with };
                sum = with;
            }
        }
    }
}
