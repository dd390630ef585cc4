//! Copies of strided selections that several operators make.

use crate::device::Device;
use crate::device::params::View;
use crate::shape;
use crate::tensor::Tensor;

fn signed(strides: impl IntoIterator<Item = usize>) -> Vec<isize> {
    strides.into_iter().map(|stride| stride as isize).collect()
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
    let strides = shape::strides(x.shape());
    let mut shape = x.shape().to_vec();
    shape[axis] = count;
    let view = View {
        shape,
        offset: first * strides[axis],
        strides: signed(strides),
    };
    device.copy(&view, x)
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
