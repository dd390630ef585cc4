//! Moving elements: strided selections, concatenation, rows by index.

use bytemuck::Pod;

use crate::device::params::{Axis, View};
use crate::tensor::{DType, Tensor};

/// Calls `f` with the position of every element of a selection, in order.
fn positions(view: &View, mut f: impl FnMut(usize)) {
    let count: usize = view.shape.iter().product();
    let mut index = vec![0usize; view.shape.len()];
    let mut position = view.offset as isize;
    for _ in 0..count {
        f(position as usize);
        for axis in (0..view.shape.len()).rev() {
            index[axis] += 1;
            position += view.strides[axis];
            if index[axis] < view.shape[axis] {
                break;
            }
            index[axis] = 0;
            position -= view.strides[axis] * view.shape[axis] as isize;
        }
    }
}

/// Picks a selection of elements of `size` bytes.
pub fn copy(view: &View, size: usize, x: &[u8], out: &mut [u8]) {
    let mut out = out.chunks_exact_mut(size);
    positions(view, |p| {
        if let Some(out) = out.next() {
            out.copy_from_slice(&x[p * size..][..size]);
        }
    });
}

/// Writes into a selection; `out` keeps what it holds elsewhere.
pub fn scatter(view: &View, size: usize, x: &[u8], out: &mut [u8]) {
    let mut x = x.chunks_exact(size);
    positions(view, |p| {
        if let Some(x) = x.next() {
            out[p * size..][..size].copy_from_slice(x);
        }
    });
}

/// Concatenates parts, each with the bytes it has per outer index.
pub fn concat(outer: usize, parts: &[(&[u8], usize)], out: &mut [u8]) {
    let mut at = 0;
    for o in 0..outer {
        for (part, run) in parts {
            out[at..at + run].copy_from_slice(&part[o * run..][..*run]);
            at += run;
        }
    }
}

/// The row that an index names; from the end if negative.
fn row(axis: Axis, index: i64) -> Option<usize> {
    let index = if index < 0 {
        index + axis.len as i64
    } else {
        index
    };
    usize::try_from(index).ok().filter(|&i| i < axis.len)
}

/// Rows by index. An index out of range, which only data can hold, gives all bits set: NaN if they are floats, so
/// that it cannot pass for a result.
pub fn gather(axis: Axis, size: usize, x: &[u8], indices: &[i64], out: &mut [u8]) {
    let run = axis.inner * size;
    if run == 0 {
        return;
    }
    let mut out = out.chunks_exact_mut(run);
    for o in 0..axis.outer {
        for (&index, out) in indices.iter().zip(&mut out) {
            match row(axis, index) {
                Some(row) => out.copy_from_slice(&x[(o * axis.len + row) * run..][..run]),
                None => out.fill(0xff),
            }
        }
    }
}

/// Adds rows by index.
pub fn scatter_add(axis: Axis, indices: &[i64], grad: &[f32], out: &mut [f32]) {
    out.fill(0.0);
    for o in 0..axis.outer {
        for (i, &index) in indices.iter().enumerate() {
            let Some(row) = row(axis, index) else {
                continue;
            };
            let grad = &grad[(o * indices.len() + i) * axis.inner..][..axis.inner];
            let out = &mut out[(o * axis.len + row) * axis.inner..][..axis.inner];
            for (out, grad) in out.iter_mut().zip(grad) {
                *out += grad;
            }
        }
    }
}

/// Converts between element types; `out` has one owner.
pub fn cast(x: &Tensor, out: &mut Tensor) {
    match (x.dtype(), out.dtype()) {
        (DType::F32, DType::I64) => map(x, out, |v: f32| v as i64),
        (DType::F32, DType::Bool) => map(x, out, |v: f32| u8::from(v != 0.0)),
        (DType::I64, DType::F32) => map(x, out, |v: i64| v as f32),
        (DType::I64, DType::Bool) => map(x, out, |v: i64| u8::from(v != 0)),
        (DType::I32, DType::I64) => map(x, out, |v: i32| i64::from(v)),
        (DType::Bool, DType::F32) => map(x, out, |v: u8| f32::from(v)),
        (DType::Bool, DType::I64) => map(x, out, |v: u8| i64::from(v)),
        (from, to) => unreachable!("a cast from {from} to {to}, which no operator asks for"),
    }
}

fn map<A: Pod, B: Pod>(x: &Tensor, out: &mut Tensor, f: impl Fn(A) -> B) {
    let out = out.elements_mut().expect("a tensor with one owner");
    for (out, &x) in out.iter_mut().zip(x.elements()) {
        *out = f(x);
    }
}
