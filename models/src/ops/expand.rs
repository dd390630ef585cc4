//! Expand and Tile: repetition along axes.

use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, ValueType, of_first, only};
use crate::device::params::{Reduction, View};
use crate::shape;
use crate::tensor::Tensor;

#[derive(Debug)]
struct Repeat {
    name: &'static str,
    /// The repetition, with axes of its own for what is repeated.
    view: View,
    /// Those axes.
    repeated: Vec<usize>,
    input_shape: Vec<usize>,
    outputs: [ValueType; 1],
}

/// Input data, and what must be known: the shape that it is broadcast with, or how often each axis is repeated.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&[])?;
    spec.at_most_inputs(2)?;
    let data = spec.input(0, "data")?;
    let (name, what) = match spec.op_type {
        "Tile" => ("Tile", "repeats"),
        _ => ("Expand", "shape"),
    };
    let wish = spec
        .constant_ints(1, what)?
        .ok_or_else(|| spec.input_error(what, "is missing"))?;
    let counts: Option<Vec<usize>> = wish.iter().map(|&n| usize::try_from(n).ok()).collect();
    let counts = counts.ok_or_else(|| {
        spec.input_error(what, format!("{wish:?} holds what is no number from 0"))
    })?;
    let refuse = || {
        let problem = format!("{wish:?} does not go with data {:?}", data.shape);
        spec.input_error(what, problem)
    };
    let strides = shape::strides(&data.shape);
    let mut view = View {
        shape: vec![],
        strides: vec![],
        offset: 0,
    };
    let mut repeated = Vec::new();
    let mut output = Vec::new();
    let push = |view: &mut View, count: usize, stride: usize| {
        view.shape.push(count);
        view.strides.push(stride as isize);
    };
    if name == "Tile" {
        if counts.len() != data.shape.len() {
            return Err(refuse());
        }
        for ((&count, &extent), &stride) in counts.iter().zip(&data.shape).zip(&strides) {
            repeated.push(view.shape.len());
            push(&mut view, count, 0);
            push(&mut view, extent, stride);
            output.push(count.checked_mul(extent).ok_or_else(refuse)?);
        }
    } else {
        output = shape::broadcast(&data.shape, &counts).ok_or_else(refuse)?;
        let strides = shape::broadcast_strides(&data.shape, &output);
        repeated = shape::broadcast_axes(&data.shape, &output);
        for (&extent, &stride) in output.iter().zip(&strides) {
            push(&mut view, extent, stride);
        }
    }
    spec.check_size(&output)?;
    Ok(Box::new(Repeat {
        name,
        view,
        repeated,
        input_shape: data.shape.clone(),
        outputs: [ValueType {
            dtype: data.dtype,
            shape: output,
        }],
    }))
}

impl Operator for Repeat {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        &[0]
    }

    fn forward(&self, cx: &Context<'_>, mut inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].take().expect("input data");
        let output = &self.outputs[0].shape;
        if x.len() == output.iter().product::<usize>() {
            return Forward::of(x.into_shape(output));
        }
        Forward::of(cx.device.copy(&self.view, &x).into_shape(output))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        _saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        of_first(
            only(grads).map(|grad| {
                let grad = grad.into_shape(&self.view.shape);
                let sum = cx.device.reduce(Reduction::Sum, &grad, &self.repeated);
                sum.into_shape(&self.input_shape)
            }),
            wanted,
        )
    }
}
