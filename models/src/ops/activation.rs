//! Relu, Sigmoid, Tanh, Clip.

use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, only};
use crate::device::params::Unary;
use crate::tensor::Tensor;

#[derive(Debug)]
struct Activation {
    op: Unary,
    outputs: [ValueType; 1],
}

/// Input X; Clip takes its bounds as attributes before opset 11 and as inputs since.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    let x = spec.float_input(0, "X")?.clone();
    let op = match spec.op_type {
        "Clip" => {
            spec.at_most_inputs(3)?;
            spec.allow(&["min", "max"])?;
            let (low, high) = if spec.opset < 11 {
                (spec.float("min")?, spec.float("max")?)
            } else {
                spec.allow_not("min", 11)?;
                spec.allow_not("max", 11)?;
                (
                    spec.constant_float(1, "min")?,
                    spec.constant_float(2, "max")?,
                )
            };
            Unary::Clip {
                low: low.unwrap_or(f32::NEG_INFINITY),
                high: high.unwrap_or(f32::INFINITY),
            }
        }
        name => {
            spec.at_most_inputs(1)?;
            spec.allow(&[])?;
            match name {
                "Relu" => Unary::Relu,
                "Sigmoid" => Unary::Sigmoid,
                _ => Unary::Tanh,
            }
        }
    };
    Ok(Box::new(Activation { op, outputs: [x] }))
}

impl Operator for Activation {
    fn name(&self) -> &'static str {
        match self.op {
            Unary::Relu => "Relu",
            Unary::Sigmoid => "Sigmoid",
            Unary::Tanh => "Tanh",
            _ => "Clip",
        }
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn saves(&self) -> Saves {
        match self.op {
            // A bound itself passes the gradient, which the output cannot tell from a clipped value.
            Unary::Clip { .. } => Saves {
                inputs: vec![0],
                outputs: vec![],
            },
            _ => Saves {
                inputs: vec![],
                outputs: vec![0],
            },
        }
    }

    fn forward(&self, cx: &Context<'_>, mut inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].take().expect("input X");
        Forward::of(cx.device.unary(self.op, x))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let read = match self.op {
            Unary::Clip { .. } => saved.input(0),
            _ => saved.output(0),
        };
        let mut result = vec![None; wanted.len()];
        result[0] = only(grads).map(|grad| cx.device.unary_backward(self.op, read, grad));
        result
    }
}
