//! Arithmetic of shapes.

/// Elements between neighbours along each axis of a contiguous row-major tensor.
pub fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    strides
}

/// The shape that both broadcast to by numpy's rules, if there is one.
pub fn broadcast(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let extent = |shape: &[usize], axis: usize| {
        (axis + shape.len())
            .checked_sub(rank)
            .map_or(1, |axis| shape[axis])
    };
    (0..rank)
        .map(|axis| match (extent(a, axis), extent(b, axis)) {
            (a, b) if a == b => Some(a),
            (1, b) => Some(b),
            (a, 1) => Some(a),
            _ => None,
        })
        .collect()
}

/// Strides with which a tensor of `shape` runs through one of shape `out` that it broadcasts to: 0 where it repeats.
pub fn broadcast_strides(shape: &[usize], out: &[usize]) -> Vec<usize> {
    let lead = out.len() - shape.len();
    let own = strides(shape);
    (0..out.len())
        .map(|axis| match axis.checked_sub(lead) {
            Some(axis) if shape[axis] != 1 => own[axis],
            _ => 0,
        })
        .collect()
}

/// Axes of `out` along which a tensor of `shape` repeats, those of extent 1 in both left out.
pub fn broadcast_axes(shape: &[usize], out: &[usize]) -> Vec<usize> {
    let lead = out.len() - shape.len();
    (0..out.len())
        .filter(|&axis| out[axis] != 1 && (axis < lead || shape[axis - lead] == 1))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcasting_follows_numpy() {
        assert_eq!(broadcast(&[2, 1, 4], &[3, 1]), Some(vec![2, 3, 4]));
        assert_eq!(broadcast(&[], &[5]), Some(vec![5]));
        assert_eq!(broadcast(&[1], &[0]), Some(vec![0]));
        assert_eq!(broadcast(&[2], &[3]), None);
        assert_eq!(broadcast_strides(&[3, 1], &[2, 3, 4]), [0, 1, 0]);
        assert_eq!(broadcast_axes(&[3, 1], &[2, 3, 4]), [0, 2]);
    }
}
