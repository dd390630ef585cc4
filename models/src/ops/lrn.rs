//! LRN: local response normalisation across channels.

use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, only};
use crate::device::params;
use crate::tensor::Tensor;

#[derive(Debug)]
struct Lrn {
    params: params::Lrn,
    outputs: [ValueType; 1],
}

/// Input X `[n, c, ..]`.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["alpha", "beta", "bias", "size"])?;
    spec.at_most_inputs(1)?;
    let x = spec.float_input(0, "X")?.clone();
    if x.shape.len() < 2 {
        return Err(spec.input_error("X", format!("{:?} must be [n, c, ..]", x.shape)));
    }
    let size = spec
        .int("size")?
        .and_then(|size| usize::try_from(size).ok())
        .filter(|&size| size > 0)
        .ok_or_else(|| spec.attribute_error("size", "must be given and at least 1"))?;
    Ok(Box::new(Lrn {
        params: params::Lrn {
            batch: x.shape[0],
            channels: x.shape[1],
            spatial: x.shape[2..].iter().product(),
            size,
            alpha: spec.float("alpha")?.unwrap_or(1e-4),
            beta: spec.float("beta")?.unwrap_or(0.75),
            bias: spec.float("bias")?.unwrap_or(1.0),
        },
        outputs: [x],
    }))
}

impl Operator for Lrn {
    fn name(&self) -> &'static str {
        "LRN"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn saves(&self) -> Saves {
        Saves {
            inputs: vec![0],
            outputs: vec![],
        }
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].as_ref().expect("input X");
        let (output, base) = cx.device.lrn(&self.params, x);
        Forward {
            outputs: vec![output],
            extra: vec![base],
        }
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        _wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let (x, base) = (saved.input(0), &saved.extra[0]);
        vec![only(grads).map(|grad| cx.device.lrn_backward(&self.params, x, base, &grad))]
    }
}
