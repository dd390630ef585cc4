//! Strided selections, by runs and tiles where the plain version moves element by element.

use bytemuck::Pod;

use crate::device::params::View;

/// Side of the tiles in which axes are exchanged: a tile of floats touches as many cache lines as fit easily.
const TILE: usize = 16;

/// Picks a selection of elements of `size` bytes (1, 4 or 8).
pub fn copy(view: &View, size: usize, x: &[u8], out: &mut [u8]) {
    let axes = Axes::of(view);
    match size {
        1 => axes.copy(view.offset, x, out),
        4 => axes.copy::<u32>(
            view.offset,
            bytemuck::cast_slice(x),
            bytemuck::cast_slice_mut(out),
        ),
        _ => axes.copy::<u64>(
            view.offset,
            bytemuck::cast_slice(x),
            bytemuck::cast_slice_mut(out),
        ),
    }
}

/// An axis of a selection: its extent, and the distance of its elements in the source and in the result.
#[derive(Clone, Copy, Debug)]
struct Extent {
    len: usize,
    from: isize,
    to: usize,
}

/// The axes of a selection, those of one element left out and those merged that run as one.
struct Axes {
    outer: Vec<Extent>,
    /// The last axis, which is contiguous in the result.
    last: Extent,
}

impl Axes {
    fn of(view: &View) -> Self {
        let mut axes: Vec<Extent> = Vec::with_capacity(view.shape.len() + 1);
        let mut to = 1;
        for (&len, &from) in view.shape.iter().zip(&view.strides).rev() {
            match axes.last_mut() {
                _ if len == 1 => {}
                Some(inner) if from == inner.from * inner.len as isize => inner.len *= len,
                _ => axes.push(Extent { len, from, to }),
            }
            to *= len;
        }
        axes.reverse();
        let one = Extent {
            len: 1,
            from: 1,
            to: 1,
        };
        let last = axes.pop().unwrap_or(one);
        Axes { outer: axes, last }
    }

    fn copy<T: Pod>(mut self, offset: usize, x: &[T], out: &mut [T]) {
        if out.is_empty() {
            return;
        }
        let last = self.last;
        let start = offset as isize;
        // An axis that is contiguous in the source, while the last one is contiguous in the result.
        let contiguous = self.outer.iter().position(|axis| axis.from == 1);
        match (last.from, contiguous) {
            (1, _) => each(&self.outer, start, 0, &mut |from, to| {
                out[to..to + last.len].copy_from_slice(&x[from..from + last.len]);
            }),
            (0, _) => each(&self.outer, start, 0, &mut |from, to| {
                out[to..to + last.len].fill(x[from]);
            }),
            (_, Some(contiguous)) => {
                let other = self.outer.remove(contiguous);
                each(&self.outer, start, 0, &mut |from, to| {
                    exchange(other, last, x, from, &mut out[to..]);
                });
            }
            _ => each(&self.outer, start, 0, &mut |from, to| {
                let mut from = from as isize;
                for out in &mut out[to..to + last.len] {
                    *out = x[from as usize];
                    from += last.from;
                }
            }),
        }
    }
}

/// Calls `f` with the place in the source and in the result of every element of the axes.
fn each(axes: &[Extent], from: isize, to: usize, f: &mut impl FnMut(usize, usize)) {
    let Some((axis, inner)) = axes.split_first() else {
        return f(from as usize, to);
    };
    for i in 0..axis.len {
        each(inner, from + i as isize * axis.from, to + i * axis.to, f);
    }
}

/// Copies two axes, of which `rows` is contiguous in the source and `columns` in the result, tile by tile.
fn exchange<T: Pod>(rows: Extent, columns: Extent, x: &[T], from: usize, out: &mut [T]) {
    for first_row in (0..rows.len).step_by(TILE) {
        let last_row = (first_row + TILE).min(rows.len);
        for first in (0..columns.len).step_by(TILE) {
            let last = (first + TILE).min(columns.len);
            for row in first_row..last_row {
                let out = &mut out[row * rows.to..][first..last];
                let mut at = (from + row) as isize + first as isize * columns.from;
                for out in out {
                    *out = x[at as usize];
                    at += columns.from;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::reference;
    use crate::shape;
    use proptest::prelude::*;

    /// Selections of a tensor: some order of its axes, slices with steps of either sign, repetitions.
    fn selection() -> impl Strategy<Value = (usize, View)> {
        prop::collection::vec((1usize..40, 0usize..5), 0..4).prop_flat_map(|axes| {
            let shape: Vec<usize> = axes.iter().map(|axis| axis.0).collect();
            let strides = shape::strides(&shape);
            let len = shape.iter().product();
            let order: Vec<usize> = (0..shape.len()).collect();
            Just(order).prop_shuffle().prop_map(move |order| {
                let mut view = View {
                    shape: vec![],
                    strides: vec![],
                    offset: 0,
                };
                for &axis in &order {
                    let (extent, kind) = axes[axis];
                    let stride = strides[axis] as isize;
                    let (count, step, first) = match kind {
                        0 => (extent, -stride, extent - 1),
                        1 => (extent.div_ceil(2), 2 * stride, 0),
                        2 => (3, 0, 0),
                        _ => (extent, stride, 0),
                    };
                    view.shape.push(count);
                    view.strides.push(step);
                    view.offset += first * strides[axis];
                }
                (len, view)
            })
        })
    }

    proptest! {
        #[test]
        fn copies_equal_the_plain_ones((len, view) in selection(), size in 0usize..3) {
            let size = [1, 4, 8][size];
            let stream = crate::random::Stream::new(1);
            let x: Vec<u64> = (0..(len * size).div_ceil(8) as u64).map(|i| stream.bits(i)).collect();
            let x: &[u8] = &bytemuck::cast_slice(&x)[..len * size];
            let bytes = view.shape.iter().product::<usize>() * size;
            let (mut fast, mut plain) = (vec![0u64; bytes.div_ceil(8)], vec![0u8; bytes]);
            let fast = &mut bytemuck::cast_slice_mut(&mut fast)[..bytes];
            copy(&view, size, x, fast);
            reference::layout::copy(&view, size, x, &mut plain);
            prop_assert_eq!(&*fast, &plain[..]);
        }
    }
}
