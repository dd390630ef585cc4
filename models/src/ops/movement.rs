//! Transpose, Slice, DepthToSpace and SpaceToDepth: strided selections out of tensors.

use super::views::{block, permute, permute_back};
use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, ValueType, of_first, only};
use crate::device::params::View;
use crate::shape;
use crate::tensor::Tensor;

pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    let data = spec.input(0, "data")?;
    match spec.op_type {
        "Transpose" => transpose(spec, data),
        "DepthToSpace" => depth_to_space(spec, data),
        "SpaceToDepth" => space_to_depth(spec, data),
        _ => slice(spec, data),
    }
}

/// The axes of a tensor seen in `shape`, in another order.
fn exchange(
    name: &'static str,
    data: &ValueType,
    shape: &[usize],
    perm: &[usize],
    output: Vec<usize>,
) -> Transpose {
    Transpose {
        name,
        shape: shape.to_vec(),
        perm: perm.to_vec(),
        input_shape: data.shape.clone(),
        outputs: [ValueType {
            dtype: data.dtype,
            shape: output,
        }],
    }
}

/// Extents of an image `[n, c, h, w]`, and the side of the blocks that are moved.
fn blocks(spec: &NodeSpec<'_>, data: &ValueType) -> Result<([usize; 4], usize), OpError> {
    spec.at_most_inputs(1)?;
    let &[n, c, h, w] = &data.shape[..] else {
        return Err(spec.input_error("input", format!("{:?} must be [n, c, h, w]", data.shape)));
    };
    let side = usize::try_from(spec.int("blocksize")?.unwrap_or(0)).unwrap_or(0);
    if side == 0 || side > 1 << 16 {
        return Err(spec.attribute_error("blocksize", "must be at least 1"));
    }
    Ok(([n, c, h, w], side))
}

fn depth_to_space(spec: &NodeSpec<'_>, data: &ValueType) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["blocksize", "mode"])?;
    let ([n, c, h, w], side) = blocks(spec, data)?;
    if !c.is_multiple_of(side * side) {
        let problem = format!("{c} channels do not fill blocks of {side} x {side}");
        return Err(spec.attribute_error("blocksize", problem));
    }
    let deep = c / (side * side);
    let output = vec![n, deep, h * side, w * side];
    let (shape, perm) = match spec.string("mode")?.unwrap_or("DCR") {
        "DCR" => ([n, side, side, deep, h, w], [0, 3, 4, 1, 5, 2]),
        "CRD" => ([n, deep, side, side, h, w], [0, 1, 4, 2, 5, 3]),
        other => {
            return Err(spec.attribute_error("mode", format!("{other} is neither DCR nor CRD")));
        }
    };
    Ok(Box::new(exchange(
        "DepthToSpace",
        data,
        &shape,
        &perm,
        output,
    )))
}

fn space_to_depth(spec: &NodeSpec<'_>, data: &ValueType) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["blocksize"])?;
    let ([n, c, h, w], side) = blocks(spec, data)?;
    if !h.is_multiple_of(side) || !w.is_multiple_of(side) {
        let problem = format!("{h} x {w} is not made of blocks of {side} x {side}");
        return Err(spec.attribute_error("blocksize", problem));
    }
    let shape = [n, c, h / side, side, w / side, side];
    let output = vec![n, c * side * side, h / side, w / side];
    let perm = [0, 3, 5, 1, 2, 4];
    Ok(Box::new(exchange(
        "SpaceToDepth",
        data,
        &shape,
        &perm,
        output,
    )))
}

fn transpose(spec: &NodeSpec<'_>, data: &ValueType) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["perm"])?;
    spec.at_most_inputs(1)?;
    let rank = data.shape.len();
    let perm: Vec<usize> = match spec.ints("perm")? {
        None => (0..rank).rev().collect(),
        Some(perm) => {
            let mut sorted = perm.to_vec();
            sorted.sort_unstable();
            if !sorted.iter().copied().eq(0..rank as i64) {
                return Err(spec
                    .attribute_error("perm", format!("{perm:?} is not an order of {rank} axes")));
            }
            perm.iter().map(|&axis| axis as usize).collect()
        }
    };
    let output = perm.iter().map(|&axis| data.shape[axis]).collect();
    Ok(Box::new(exchange(
        "Transpose",
        data,
        &data.shape,
        &perm,
        output,
    )))
}

/// Bounds are attributes before opset 10 and inputs since.
fn slice(spec: &NodeSpec<'_>, data: &ValueType) -> Result<Box<dyn Operator>, OpError> {
    let rank = data.shape.len();
    let (starts, ends, axes, steps) = if spec.opset < 10 {
        spec.allow(&["starts", "ends", "axes"])?;
        spec.at_most_inputs(1)?;
        (
            spec.ints("starts")?,
            spec.ints("ends")?,
            spec.ints("axes")?,
            None,
        )
    } else {
        spec.allow(&[])?;
        spec.at_most_inputs(5)?;
        (
            spec.constant_ints(1, "starts")?,
            spec.constant_ints(2, "ends")?,
            spec.constant_ints(3, "axes")?,
            spec.constant_ints(4, "steps")?,
        )
    };
    let (Some(starts), Some(ends)) = (starts, ends) else {
        return Err(spec.error("starts and ends must be given"));
    };
    let default: Vec<i64> = (0..starts.len() as i64).collect();
    let axes = axes.unwrap_or(&default);
    let ones = vec![1; starts.len()];
    let steps = steps.unwrap_or(&ones);
    if [ends.len(), axes.len(), steps.len()] != [starts.len(); 3] {
        return Err(spec.error("starts, ends, axes and steps must be of one length"));
    }
    spec.axes(axes, rank)?;
    let strides = shape::strides(&data.shape);
    let mut view = block(&data.shape, &vec![0; rank], &data.shape);
    for (i, &axis) in axes.iter().enumerate() {
        let axis = spec.axis(axis, rank)?;
        let (first, count) = bounds(starts[i], ends[i], steps[i], data.shape[axis])
            .ok_or_else(|| spec.input_error("steps", format!("{steps:?} has a step of 0")))?;
        view.shape[axis] = count;
        // With one element or none the step does not matter, and might be huge.
        if count > 1 {
            view.strides[axis] *= steps[i] as isize;
        }
        view.offset += first * strides[axis];
    }
    Ok(Box::new(Slice {
        input_shape: data.shape.clone(),
        outputs: [ValueType {
            dtype: data.dtype,
            shape: view.shape.clone(),
        }],
        view,
    }))
}

/// First element and number of elements of a slice of an axis of `extent`; `None`: a step of 0.
fn bounds(start: i64, end: i64, step: i64, extent: usize) -> Option<(usize, usize)> {
    let extent = extent as i64;
    let from_end = |i: i64| if i < 0 { i.saturating_add(extent) } else { i };
    let (first, count) = match step {
        0 => return None,
        1.. => {
            let (first, end) = (
                from_end(start).clamp(0, extent),
                from_end(end).clamp(0, extent),
            );
            (
                first,
                (end - first)
                    .max(0)
                    .unsigned_abs()
                    .div_ceil(step.unsigned_abs()),
            )
        }
        _ => {
            let first = from_end(start).clamp(-1, extent - 1);
            let end = from_end(end).clamp(-1, extent - 1);
            (
                first,
                (first - end)
                    .max(0)
                    .unsigned_abs()
                    .div_ceil(step.unsigned_abs()),
            )
        }
    };
    let first = if count == 0 { 0 } else { first };
    Some((first as usize, count as usize))
}

#[derive(Debug)]
struct Transpose {
    name: &'static str,
    /// The shape that the input is seen in, and the order that its axes get.
    shape: Vec<usize>,
    perm: Vec<usize>,
    input_shape: Vec<usize>,
    outputs: [ValueType; 1],
}

impl Operator for Transpose {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        &[0]
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].as_ref().expect("input data");
        let exchanged = permute(cx.device, &x.reshape(&self.shape), &self.perm);
        Forward::of(exchanged.into_shape(&self.outputs[0].shape))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        _saved: Saved,
        grads: Vec<Option<Tensor>>,
        _wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let shape: Vec<usize> = self.perm.iter().map(|&axis| self.shape[axis]).collect();
        let back = |grad: Tensor| {
            permute_back(cx.device, &grad.into_shape(&shape), &self.perm)
                .into_shape(&self.input_shape)
        };
        vec![only(grads).map(back)]
    }
}

#[derive(Debug)]
struct Slice {
    view: View,
    input_shape: Vec<usize>,
    outputs: [ValueType; 1],
}

impl Operator for Slice {
    fn name(&self) -> &'static str {
        "Slice"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        &[0]
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        Forward::of(
            cx.device
                .copy(&self.view, inputs[0].as_ref().expect("input data")),
        )
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        _saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        of_first(
            only(grads).map(|grad| cx.device.scatter(&self.view, &self.input_shape, 0.0, &grad)),
            wanted,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::bounds;

    #[test]
    fn slices_clamp_like_numpy() {
        assert_eq!(bounds(1, i64::MAX, 1, 5), Some((1, 4)));
        assert_eq!(bounds(-2, 5, 1, 5), Some((3, 2)));
        assert_eq!(bounds(4, 1, 1, 5), Some((0, 0)));
        assert_eq!(bounds(0, 5, 2, 5), Some((0, 3)));
        assert_eq!(bounds(-1, i64::MIN, -1, 5), Some((4, 5)));
        assert_eq!(bounds(i64::MAX, 0, -2, 5), Some((4, 2)));
        assert_eq!(bounds(i64::MIN, i64::MAX, i64::MIN, 5), Some((0, 0)));
        assert_eq!(bounds(0, 1, 0, 5), None);
    }
}
