//! Where the batch is in shapes and constants of a model that was exported with a fixed one.
//!
//! A reshape keeps elements in row-major order, so the axis of its target that holds the batch is the one
//! whose stride range covers the batch axis of its input.

use crate::tensor::{DType, Tensor};

/// The target shape of a reshape for another batch size, or `None` if it needs no change.
///
/// `target` is the shape as the model has it (0 copies, -1 infers). `exported_input`,
/// `exported_output` are the shapes with the exported batch, `input` is the input's shape with the new one.
pub(super) fn reshape_target(
    target: &[i64],
    exported_input: &[usize],
    exported_output: &[usize],
    input: &[usize],
) -> Option<Vec<i64>> {
    let axis = batch_axis(exported_input, input)?;
    let (old, new) = (exported_input[axis], input[axis]);
    let before: usize = exported_input[..axis].iter().product();
    let at = covering_axis(exported_output, before, old)
        .or_else(|| split_axis(exported_output, before, old, new))?;
    if *target.get(at)? <= 0 {
        return None;
    }
    let mut repaired = target.to_vec();
    repaired[at] = i64::try_from(exported_output[at] * new / old).ok()?;
    Some(repaired)
}

/// The one axis in which two shapes differ.
pub(super) fn batch_axis(exported: &[usize], now: &[usize]) -> Option<usize> {
    if exported.len() != now.len() {
        return None;
    }
    let mut differing = (0..now.len()).filter(|&axis| exported[axis] != now[axis]);
    let axis = differing.next().filter(|&axis| exported[axis] > 0)?;
    differing.next().is_none().then_some(axis)
}

/// The axis of `shape` that contains an axis of extent `extent` which `before` elements of outer axes
/// precede: the one of that extent if there is one, else the first that contains it as a factor.
pub(super) fn covering_axis(shape: &[usize], before: usize, extent: usize) -> Option<usize> {
    let outer = |axis: usize| shape[..axis].iter().product::<usize>();
    let exact = (0..shape.len()).find(|&axis| outer(axis) == before && shape[axis] == extent);
    exact.or_else(|| {
        (0..shape.len()).find(|&axis| {
            let outer = outer(axis);
            outer > 0
                && before.is_multiple_of(outer)
                && (before / outer * extent) <= shape[axis]
                && shape[axis].is_multiple_of(before / outer * extent)
        })
    })
}

/// The axis of `shape` that the batch goes to when an axis of several samples' rows is split: the
/// outermost part that can be scaled by `new / old` of that axis.
fn split_axis(shape: &[usize], before: usize, old: usize, new: usize) -> Option<usize> {
    let outer = |axis: usize| shape[..axis].iter().product::<usize>();
    let scales = |extent: usize| extent > 0 && (extent * new).is_multiple_of(old);
    (0..shape.len()).find(|&axis| {
        let inside = outer(axis) >= before && outer(axis) < before * old;
        inside && shape[axis] > 1 && scales(shape[axis])
    })
}

/// A constant that holds something for each of `shape[axis]` samples, for `samples` of them: it goes on
/// by the same step from sample to sample, which is none for equal rows and one for sample numbers.
/// `None` if there is no such step.
pub(super) fn continued(constant: &Tensor, axis: usize, samples: usize) -> Option<Tensor> {
    let shape = constant.shape();
    let exported = shape[axis];
    let inner: usize = shape[axis + 1..].iter().product();
    let outer: usize = shape[..axis].iter().product();
    if exported == 0 {
        return None;
    }
    let at =
        |block: usize, sample: usize, element: usize| (block * exported + sample) * inner + element;
    let places = || (0..outer).flat_map(|block| (0..inner).map(move |element| (block, element)));
    let equal = |same: &dyn Fn(usize, usize) -> bool| {
        places().all(|(block, element)| {
            (1..exported).all(|sample| same(at(block, 0, element), at(block, sample, element)))
        })
    };
    let source = |index: usize| {
        let (block, element) = (index / (samples * inner), index % inner);
        (at(block, 0, element), index / inner % samples)
    };
    let mut extents = shape.to_vec();
    extents[axis] = samples;
    let count = 0..outer * samples * inner;
    match constant.dtype() {
        DType::F32 => {
            let values = constant.f32s();
            let same = equal(&|a, b| values[a].to_bits() == values[b].to_bits());
            let continued = || {
                count
                    .map(|index| values[source(index).0])
                    .collect::<Vec<_>>()
            };
            same.then(|| Tensor::from_f32(&extents, continued()))
        }
        DType::Bool => {
            let values = constant.raw();
            let same = equal(&|a, b| values[a] == values[b]);
            let continued = || {
                count
                    .map(|index| values[source(index).0] != 0)
                    .collect::<Vec<_>>()
            };
            same.then(|| Tensor::from_bool(&extents, continued()))
        }
        _ => {
            let values = constant.i64s();
            let step = |first: usize| match exported {
                1 => 0,
                _ => values[first + inner].wrapping_sub(values[first]),
            };
            let steady = places().all(|(block, element)| {
                let first = at(block, 0, element);
                matches!(step(first), 0 | 1)
                    && (1..exported).all(|sample| {
                        let expected = values[first].wrapping_add(step(first) * sample as i64);
                        values[at(block, sample, element)] == expected
                    })
            });
            let value = |index: usize| {
                let (first, sample) = source(index);
                values[first].wrapping_add(step(first) * sample as i64)
            };
            steady.then(|| Tensor::from_i64(&extents, count.map(value).collect::<Vec<_>>()))
        }
    }
}

/// Batch sizes, and the rows that an axis has for each sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Samples {
    pub exported: usize,
    pub requested: usize,
    pub rows: usize,
}

/// Indices into an axis that holds `samples.rows` rows for each sample, for the batch that is asked for.
///
/// The indices must have an axis along which each sample picks among its own rows, the same as the others.
/// With `component` only that component of each index along the last axis counts rows, the others
/// must not differ between samples.
pub(super) fn sample_rows(
    indices: &Tensor,
    component: Option<usize>,
    samples: Samples,
) -> Option<Tensor> {
    let values = indices.i64s();
    let (shape, rows) = (indices.shape(), samples.rows as i64);
    let depth = component.map_or(Some(1), |_| shape.last().copied())?;
    let counts = |index: usize| component.is_none_or(|component| index % depth == component);
    let row = |sample: usize, index: usize| {
        if counts(index) {
            sample as i64 * rows
        } else {
            0
        }
    };
    let counted = shape.len() - usize::from(component.is_some());
    let axis = (0..counted).find(|&axis| {
        let stride: usize = shape[axis + 1..].iter().product();
        shape[axis] == samples.exported
            && values.iter().enumerate().all(|(index, &value)| {
                let sample = index / stride % samples.exported;
                let own = value - row(sample, index);
                own == values[index - sample * stride]
                    && (!counts(index) || (0..rows).contains(&own))
            })
    })?;
    let stride: usize = shape[axis + 1..].iter().product();
    let mut extents = shape.to_vec();
    extents[axis] = samples.requested;
    let picked = (0..extents.iter().product()).map(|index: usize| {
        let (block, inner) = (index / (stride * samples.requested), index % stride);
        let sample = index / stride % samples.requested;
        values[block * stride * samples.exported + inner] + row(sample, inner)
    });
    Some(Tensor::from_i64(&extents, picked.collect::<Vec<_>>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leading_batch_is_replaced() {
        assert_eq!(
            reshape_target(&[2, 400], &[2, 16, 5, 5], &[2, 400], &[8, 16, 5, 5]),
            Some(vec![8, 400])
        );
        assert_eq!(
            reshape_target(&[2, -1], &[2, 16, 5, 5], &[2, 400], &[8, 16, 5, 5]),
            Some(vec![8, -1])
        );
    }

    #[test]
    fn a_batch_of_one_is_found_too() {
        assert_eq!(
            reshape_target(&[1, 1, 784], &[1, 1, 28, 28], &[1, 1, 784], &[8, 1, 28, 28]),
            Some(vec![8, 1, 784])
        );
    }

    #[test]
    fn a_batch_folded_with_other_axes_is_scaled() {
        // Attention: [time, batch, width] as [time, batch * heads, width / heads].
        assert_eq!(
            reshape_target(&[4, 6, 8], &[4, 2, 24], &[4, 6, 8], &[4, 5, 24]),
            Some(vec![4, 15, 8])
        );
        // Tokens: [batch, time, width] as [batch * time, width].
        assert_eq!(
            reshape_target(&[8, 24], &[2, 4, 24], &[8, 24], &[5, 4, 24]),
            Some(vec![20, 24])
        );
    }

    #[test]
    fn a_batch_that_is_split_from_other_axes_is_scaled() {
        // Tokens: [batch * time, width] as [batch, time, width]; heads: [batch * heads, ..] as [batch, heads, ..].
        assert_eq!(
            reshape_target(&[2, 4, 24], &[8, 24], &[2, 4, 24], &[20, 24]),
            Some(vec![5, 4, 24])
        );
        assert_eq!(
            reshape_target(
                &[2, 4, 32, 64],
                &[8, 32, 64],
                &[2, 4, 32, 64],
                &[16, 32, 64]
            ),
            Some(vec![4, 4, 32, 64])
        );
    }

    #[test]
    fn constants_for_each_sample_are_repeated_or_counted_on() {
        let rows = Tensor::from_f32(&[1, 2, 2], [1.0, 2.0, 1.0, 2.0]);
        let more = continued(&rows, 1, 3).unwrap();
        assert_eq!(more.shape(), [1, 3, 2]);
        assert_eq!(more.f32s(), [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]);
        assert_eq!(continued(&rows, 1, 1).unwrap().f32s(), [1.0, 2.0]);
        assert!(continued(&rows, 2, 3).is_none(), "columns differ");
        let numbers = Tensor::from_i64(&[2, 2], [0, 7, 1, 7]);
        assert_eq!(
            continued(&numbers, 0, 3).unwrap().i64s(),
            [0, 7, 1, 7, 2, 7]
        );
        assert!(continued(&Tensor::from_i64(&[2], [0, 5]), 0, 3).is_none());
        let flags = Tensor::from_bool(&[2, 1], [true, true]);
        assert_eq!(continued(&flags, 0, 3).unwrap().raw(), [1, 1, 1]);
    }

    #[test]
    fn indices_of_samples_are_counted_on_even_from_one() {
        let samples = |exported, requested, rows| Samples {
            exported,
            requested,
            rows,
        };
        // [batch, time, (sample, position)]
        let two = Tensor::from_i64(&[2, 3, 2], [0, 0, 0, 1, 0, 2, 1, 0, 1, 1, 1, 2]);
        let three = sample_rows(&two, Some(0), samples(2, 3, 1)).unwrap();
        assert_eq!(three.shape(), [3, 3, 2]);
        assert_eq!(three.i64s()[..12], *two.i64s());
        assert_eq!(three.i64s()[12..], [2, 0, 2, 1, 2, 2]);
        assert!(sample_rows(&two, Some(1), samples(2, 3, 1)).is_none());
        let one = Tensor::from_i64(&[1, 2, 2], [0, 0, 0, 1]);
        assert_eq!(
            sample_rows(&one, Some(0), samples(1, 2, 1)).unwrap().i64s(),
            [0, 0, 0, 1, 1, 0, 1, 1]
        );
        // Rows of two samples that were put behind each other, three for each.
        let flat = Tensor::from_i64(&[2, 1, 2], [0, 2, 3, 5]);
        let more = sample_rows(&flat, None, samples(2, 4, 3)).unwrap();
        assert_eq!(more.i64s(), [0, 2, 3, 5, 6, 8, 9, 11]);
        let first_sample = Tensor::from_i64(&[2], [0, 1]);
        assert!(sample_rows(&first_sample, None, samples(2, 4, 3)).is_none());
    }

    #[test]
    fn shapes_that_follow_the_batch_stay() {
        assert_eq!(
            reshape_target(&[-1, 400], &[2, 16, 5, 5], &[2, 400], &[8, 16, 5, 5]),
            None
        );
        assert_eq!(
            reshape_target(&[0, 400], &[2, 16, 5, 5], &[2, 400], &[8, 16, 5, 5]),
            None
        );
        assert_eq!(reshape_target(&[3, 4], &[12], &[3, 4], &[12]), None);
    }
}
