//! Gather: slices of a tensor by index; an embedding when the tensor is a weight.

use super::{
    Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, of_first, only,
};
use crate::device::params::Axis;
use crate::tensor::{DType, Tensor};

#[derive(Debug)]
struct Gather {
    axis: Axis,
    input_shape: Vec<usize>,
    outputs: [ValueType; 1],
}

/// Inputs data and indices (int64, negative ones count from the end).
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["axis"])?;
    spec.at_most_inputs(2)?;
    let data = spec.input(0, "data")?;
    let indices = spec.input(1, "indices")?;
    spec.expect_dtype(indices, "indices", DType::I64)?;
    let axis = spec.axis(spec.int("axis")?.unwrap_or(0), data.shape.len())?;
    let extent = data.shape[axis] as i64;
    if let Some(known) = spec.constants.get(1).and_then(Option::as_ref)
        && let Some(index) = known.i64s().iter().find(|&&i| i < -extent || i >= extent)
    {
        return Err(spec.input_error(
            "indices",
            format!("{index} is outside of axis {axis} of data {:?}", data.shape),
        ));
    }
    let shape = [
        &data.shape[..axis],
        &indices.shape[..],
        &data.shape[axis + 1..],
    ]
    .concat();
    spec.check_size(&shape)?;
    Ok(Box::new(Gather {
        axis: Axis::of(&data.shape, axis),
        input_shape: data.shape.clone(),
        outputs: [ValueType {
            dtype: data.dtype,
            shape,
        }],
    }))
}

impl Operator for Gather {
    fn name(&self) -> &'static str {
        "Gather"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        &[0]
    }

    fn index_limit(&self, input: usize) -> Option<usize> {
        (input == 1).then_some(self.axis.len)
    }

    fn saves(&self) -> Saves {
        Saves {
            inputs: vec![1],
            outputs: vec![],
        }
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let (Some(data), Some(indices)) = (&inputs[0], &inputs[1]) else {
            unreachable!("inputs that the shape rule requires");
        };
        let rows = cx.device.gather(self.axis, data, indices);
        Forward::of(rows.into_shape(&self.outputs[0].shape))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let back = |grad| {
            cx.device
                .scatter_add(self.axis, &self.input_shape, saved.input(1), &grad)
        };
        of_first(only(grads).map(back), wanted)
    }
}
