//! Dropout with masks that depend on seed, node and sample alone.

use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, ValueType, of_first, only};
use crate::device::params::MaskSeed;
use crate::random;
use crate::tensor::{DType, Tensor};

#[derive(Debug)]
struct Dropout {
    ratio: f32,
    /// Drops when the context trains.
    training: bool,
    /// Identifies the node in every cut of the graph.
    node: u64,
    outputs: Vec<ValueType>,
}

/// Input data; ratio is an attribute before opset 12 and an input since, together with training_mode.
/// A node that is not in training form is the identity, and before opset 12 no node is. Its attribute
/// `seed` is left to the seed of the run.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    let data = spec.float_input(0, "data")?.clone();
    let (ratio, in_file) = if spec.opset >= 12 {
        spec.allow(&["seed"])?;
        spec.at_most_inputs(3)?;
        let mode = spec.optional_constant(2, "training_mode")?;
        if mode.is_some_and(|mode| mode.dtype() != DType::Bool || mode.len() != 1) {
            return Err(spec.input_error("training_mode", "must be one bool"));
        }
        let training = mode.is_some_and(|mode| mode.bools()[0] != 0);
        (spec.constant_float(1, "ratio")?, training)
    } else {
        spec.allow(&["ratio"])?;
        spec.at_most_inputs(1)?;
        (spec.float("ratio")?, false)
    };
    let ratio = ratio.unwrap_or(0.5);
    if !(0.0..1.0).contains(&ratio) {
        let problem = format!("{ratio} is outside of [0, 1)");
        return Err(if spec.opset >= 12 {
            spec.input_error("ratio", problem)
        } else {
            spec.attribute_error("ratio", problem)
        });
    }
    if spec.outputs > 2 {
        return Err(spec.error("has two outputs at most"));
    }
    let mask = ValueType {
        dtype: DType::Bool,
        shape: data.shape.clone(),
    };
    let mut outputs = vec![data, mask];
    outputs.truncate(spec.outputs.max(1));
    Ok(Box::new(Dropout {
        ratio,
        training: in_file || spec.training_form,
        node: random::hash(spec.name),
        outputs,
    }))
}

impl Operator for Dropout {
    fn name(&self) -> &'static str {
        "Dropout"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn forward(&self, cx: &Context<'_>, mut inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].take().expect("input data");
        let drops = self.training && cx.training && self.ratio > 0.0;
        let seed = MaskSeed {
            seed: cx.seed,
            node: self.node,
            first_sample: cx.first_sample,
        };
        let keep = 1.0 - self.ratio;
        let mask = if drops {
            Some(cx.device.random_mask(x.shape(), keep, seed))
        } else if self.outputs.len() > 1 {
            Some(cx.device.random_mask(x.shape(), 1.0, seed))
        } else {
            None
        };
        let y = match &mask {
            Some(mask) if drops => cx.device.apply_mask(x, mask, 1.0 / keep),
            _ => x,
        };
        let mut outputs = vec![y];
        outputs.extend(mask.clone());
        outputs.truncate(self.outputs.len());
        Forward {
            outputs,
            extra: mask.into_iter().filter(|_| drops).collect(),
        }
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        of_first(
            only(grads).map(|grad| match saved.extra.first() {
                Some(mask) => cx.device.apply_mask(grad, mask, 1.0 / (1.0 - self.ratio)),
                None => grad,
            }),
            wanted,
        )
    }
}
