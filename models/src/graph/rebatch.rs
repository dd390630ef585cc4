//! Another batch size for models that were exported with a fixed one.
//!
//! A reshape in such a model may have the exported batch written into its target shape. A reshape keeps
//! elements in row-major order, so the axis of the target that holds the batch is the one whose stride
//! range covers the batch axis of the input.

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
    let at = covering_axis(exported_output, before, old)?;
    if *target.get(at)? <= 0 {
        return None;
    }
    let mut repaired = target.to_vec();
    repaired[at] = i64::try_from(exported_output[at] / old * new).ok()?;
    Some(repaired)
}

/// The one axis in which two shapes differ.
fn batch_axis(exported: &[usize], now: &[usize]) -> Option<usize> {
    if exported.len() != now.len() {
        return None;
    }
    let mut differing = (0..now.len()).filter(|&axis| exported[axis] != now[axis]);
    let axis = differing.next().filter(|&axis| exported[axis] > 0)?;
    differing.next().is_none().then_some(axis)
}

/// The axis of `shape` that contains an axis of extent `extent` which `before` elements of outer axes
/// precede: the one of that extent if there is one, else the first that contains it as a factor.
fn covering_axis(shape: &[usize], before: usize, extent: usize) -> Option<usize> {
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
