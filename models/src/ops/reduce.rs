//! ReduceMean, as which global average pooling is often exported.

use super::pooling::spread;
use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, only};
use crate::device::params::Reduction;
use crate::tensor::Tensor;

#[derive(Debug)]
struct ReduceMean {
    axes: Vec<usize>,
    input_shape: Vec<usize>,
    /// Shape of the result with the reduced axes kept at extent 1.
    kept: Vec<usize>,
    outputs: [ValueType; 1],
}

/// Input data; axes are an attribute before opset 18 and an input since. No axes: all of them.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["axes", "keepdims", "noop_with_empty_axes"])?;
    spec.at_most_inputs(if spec.opset >= 18 { 2 } else { 1 })?;
    let shape = &spec.float_input(0, "data")?.shape;
    let rank = shape.len();
    let axes = match spec.axes_since(18, 1)? {
        Some(axes) if !axes.is_empty() => spec.axes(axes, rank)?,
        _ if spec.flag("noop_with_empty_axes")? => Vec::new(),
        _ => (0..rank).collect(),
    };
    let keep = spec.int("keepdims")?.unwrap_or(1) != 0;
    let mut kept = shape.clone();
    for &axis in &axes {
        kept[axis] = 1;
    }
    let output = (0..rank)
        .filter(|axis| keep || !axes.contains(axis))
        .map(|axis| kept[axis])
        .collect::<Vec<_>>();
    Ok(Box::new(ReduceMean {
        axes,
        input_shape: shape.clone(),
        kept,
        outputs: [ValueType::float(output)],
    }))
}

impl Operator for ReduceMean {
    fn name(&self) -> &'static str {
        "ReduceMean"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn saves(&self) -> Saves {
        Saves::default()
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].as_ref().expect("input data");
        let mean = cx.device.reduce(Reduction::Mean, x, &self.axes);
        Forward::of(mean.into_shape(&self.outputs[0].shape))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        _saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let mut result = vec![None; wanted.len()];
        result[0] =
            only(grads).map(|grad| spread(cx, grad.into_shape(&self.kept), &self.input_shape));
        result
    }
}
