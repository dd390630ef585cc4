//! Concat.

use super::views::part;
use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, ValueType, only};
use crate::tensor::Tensor;

#[derive(Debug)]
struct Concat {
    axis: usize,
    /// Extent of each input along the axis.
    extents: Vec<usize>,
    positions: Vec<usize>,
    outputs: [ValueType; 1],
}

/// Any number of inputs that differ in their extent along one axis only.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["axis"])?;
    let first = spec.input(0, "inputs")?;
    let axis = spec
        .int("axis")?
        .ok_or_else(|| spec.attribute_error("axis", "is missing"))?;
    let axis = spec.axis(axis, first.shape.len())?;
    let mut output = first.clone();
    output.shape[axis] = 0;
    let mut extents = Vec::with_capacity(spec.inputs.len());
    for position in 0..spec.inputs.len() {
        let input = spec.input(position, "inputs")?;
        spec.expect_dtype(input, "inputs", first.dtype)?;
        let extent = input.shape.get(axis).copied().unwrap_or(0);
        let mut expected = first.shape.clone();
        expected[axis] = extent;
        spec.expect_shape(input, "inputs", &expected)?;
        extents.push(extent);
        output.shape[axis] = output.shape[axis].saturating_add(extent);
    }
    spec.check_size(&output.shape)?;
    Ok(Box::new(Concat {
        axis,
        extents,
        positions: (0..spec.inputs.len()).collect(),
        outputs: [output],
    }))
}

impl Operator for Concat {
    fn name(&self) -> &'static str {
        "Concat"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        &self.positions
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let parts: Vec<Tensor> = inputs.into_iter().flatten().collect();
        Forward::of(cx.device.concat(self.axis, &parts))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        _saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let Some(grad) = only(grads) else {
            return vec![None; wanted.len()];
        };
        let mut first = 0;
        let parts = self.extents.iter().zip(wanted).map(|(&count, &wanted)| {
            first += count;
            wanted.then(|| part(cx.device, &grad, self.axis, first - count, count))
        });
        parts.collect()
    }
}
