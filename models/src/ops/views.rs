//! Copies of strided selections that several operators make.

use crate::device::Device;
use crate::device::params::View;
use crate::shape;
use crate::tensor::Tensor;

fn signed(strides: impl IntoIterator<Item = usize>) -> Vec<isize> {
    strides.into_iter().map(|stride| stride as isize).collect()
}

/// The block of `shape` that begins at index `first` of a tensor of the shape `whole`.
pub(super) fn block(whole: &[usize], first: &[usize], shape: &[usize]) -> View {
    let strides = shape::strides(whole);
    View {
        shape: shape.to_vec(),
        offset: first
            .iter()
            .zip(&strides)
            .map(|(i, stride)| i * stride)
            .sum(),
        strides: signed(strides),
    }
}

/// The tensor with its axes in another order; itself where that moves nothing.
pub(super) fn permute(device: &dyn Device, x: &Tensor, order: &[usize]) -> Tensor {
    let shape: Vec<usize> = order.iter().map(|&axis| x.shape()[axis]).collect();
    let moved = order.iter().filter(|&&axis| x.shape()[axis] != 1);
    if moved.is_sorted() {
        return x.reshape(&shape);
    }
    let strides = shape::strides(x.shape());
    let view = View {
        strides: signed(order.iter().map(|&axis| strides[axis])),
        shape,
        offset: 0,
    };
    device.copy(&view, x)
}

/// Undoes [`permute`] with the same order.
pub(super) fn permute_back(device: &dyn Device, x: &Tensor, order: &[usize]) -> Tensor {
    let mut inverse = vec![0; order.len()];
    for (to, &from) in order.iter().enumerate() {
        inverse[from] = to;
    }
    permute(device, x, &inverse)
}

/// `count` elements along an axis from `first` on; the tensor itself where these are all.
pub(super) fn part(
    device: &dyn Device,
    x: &Tensor,
    axis: usize,
    first: usize,
    count: usize,
) -> Tensor {
    if count == x.shape()[axis] {
        return x.clone();
    }
    let (mut begin, mut shape) = (vec![0; x.shape().len()], x.shape().to_vec());
    (begin[axis], shape[axis]) = (first, count);
    device.copy(&block(x.shape(), &begin, &shape), x)
}

/// The tensor repeated to a shape that it broadcasts to.
pub(super) fn broadcast(device: &dyn Device, x: &Tensor, shape: &[usize]) -> Tensor {
    let view = View {
        shape: shape.to_vec(),
        strides: signed(shape::broadcast_strides(x.shape(), shape)),
        offset: 0,
    };
    device.copy(&view, x)
}
