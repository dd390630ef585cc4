//! Split.

use super::views::part;
use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, ValueType, of_first};
use crate::tensor::Tensor;

#[derive(Debug)]
struct Split {
    axis: usize,
    outputs: Vec<ValueType>,
}

/// Input data, and the extents of the parts: an attribute before opset 13, an input that must be known since, or equal
/// ones (the last one smaller if need be), as many as outputs or as `num_outputs` says.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["axis", "split", "num_outputs"])?;
    let data = spec.input(0, "input")?;
    let axis = spec.axis(spec.int("axis")?.unwrap_or(0), data.shape.len())?;
    let extent = data.shape[axis];
    let given = if spec.opset >= 13 {
        spec.at_most_inputs(2)?;
        spec.allow_not("split", 13)?;
        spec.constant_ints(1, "split")?
    } else {
        spec.at_most_inputs(1)?;
        spec.ints("split")?
    };
    let extents: Vec<usize> = if let Some(given) = given {
        let parts: Option<Vec<usize>> = given.iter().map(|&n| usize::try_from(n).ok()).collect();
        let sum = |parts: &Vec<usize>| parts.iter().try_fold(0usize, |sum, &n| sum.checked_add(n));
        parts
            .filter(|parts| sum(parts) == Some(extent) && parts.len() >= spec.outputs)
            .ok_or_else(|| {
                let problem = format!(
                    "{given:?} does not divide axis {axis} of {:?} into {} parts",
                    data.shape, spec.outputs
                );
                spec.input_error("split", problem)
            })?
    } else {
        let count = match spec.int("num_outputs")? {
            None => spec.outputs,
            Some(count) => usize::try_from(count).unwrap_or(0),
        };
        if count == 0 || count < spec.outputs || count > extent.max(spec.outputs) {
            let problem = format!(
                "{count} parts of axis {axis} of {:?} for {} outputs",
                data.shape, spec.outputs
            );
            return Err(spec.attribute_error("num_outputs", problem));
        }
        let part = extent.div_ceil(count);
        let begin = |i: usize| (i * part).min(extent);
        (0..count).map(|i| begin(i + 1) - begin(i)).collect()
    };
    let part = |extent| {
        let mut part = data.clone();
        part.shape[axis] = extent;
        part
    };
    Ok(Box::new(Split {
        axis,
        outputs: extents.into_iter().map(part).collect(),
    }))
}

impl Operator for Split {
    fn name(&self) -> &'static str {
        "Split"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        &[0]
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].as_ref().expect("an input");
        let mut first = 0;
        let parts = self.outputs.iter().map(|output| {
            let count = output.shape[self.axis];
            first += count;
            part(cx.device, x, self.axis, first - count, count)
        });
        Forward {
            outputs: parts.collect(),
            extra: vec![],
        }
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        _saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        // A part that nobody used has no gradient: it is 0.
        let parts = self.outputs.iter().zip(grads);
        let parts: Vec<Tensor> = parts
            .map(|(ty, grad)| grad.unwrap_or_else(|| cx.device.fill(&ty.shape, 0.0)))
            .collect();
        of_first(Some(cx.device.concat(self.axis, &parts)), wanted)
    }
}
