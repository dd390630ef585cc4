//! PRelu: a leaky Relu whose slope is an input, usually one weight per channel.

use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, only, sum_to};
use crate::device::params::{Binary, Unary};
use crate::shape;
use crate::tensor::Tensor;

const POSITIVE: Unary = Unary::Relu;
const NEGATIVE: Unary = Unary::Clip {
    low: f32::NEG_INFINITY,
    high: 0.0,
};

#[derive(Debug)]
struct PRelu {
    slope_shape: Vec<usize>,
    outputs: [ValueType; 1],
}

/// Inputs X and slope, which broadcasts to X.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&[])?;
    spec.at_most_inputs(2)?;
    let x = spec.float_input(0, "X")?;
    let slope = &spec.float_input(1, "slope")?.shape;
    if shape::broadcast(slope, &x.shape).as_ref() != Some(&x.shape) {
        let problem = format!("{slope:?} does not broadcast to X {:?}", x.shape);
        return Err(spec.input_error("slope", problem));
    }
    Ok(Box::new(PRelu {
        slope_shape: slope.clone(),
        outputs: [x.clone()],
    }))
}

impl Operator for PRelu {
    fn name(&self) -> &'static str {
        "PRelu"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        &[1]
    }

    fn saves(&self) -> Saves {
        Saves {
            inputs: vec![0, 1],
            outputs: vec![],
        }
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let (Some(x), Some(slope)) = (&inputs[0], &inputs[1]) else {
            unreachable!("inputs that the shape rule requires");
        };
        let negative = cx.device.unary(NEGATIVE, x.clone());
        let negative = cx.device.binary(Binary::Mul, negative, slope.clone());
        let positive = cx.device.unary(POSITIVE, x.clone());
        Forward::of(cx.device.binary(Binary::Add, positive, negative))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let mut result = vec![None; wanted.len()];
        let Some(grad) = only(grads) else {
            return result;
        };
        let device = cx.device;
        let (x, slope) = (saved.input(0), saved.input(1));
        if wanted[1] {
            let negative = device.unary(NEGATIVE, x.clone());
            let through = device.binary(Binary::Mul, negative, grad.clone());
            result[1] = Some(sum_to(device, through, &self.slope_shape));
        }
        if wanted[0] {
            // What passes where x is above 0, and the rest, which the slope weighs.
            let passed = device.unary_backward(POSITIVE, x, grad.clone());
            let rest = device.binary(Binary::Sub, grad, passed.clone());
            let rest = device.binary(Binary::Mul, rest, slope.clone());
            result[0] = Some(device.binary(Binary::Add, passed, rest));
        }
        result
    }
}
