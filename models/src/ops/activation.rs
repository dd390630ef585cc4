//! Element-wise functions of one input with fixed parameters: the activation functions and Clip.

use super::{
    Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, of_first, only,
};
use crate::device::params::Unary;
use crate::tensor::Tensor;

#[derive(Debug)]
struct Activation {
    name: &'static str,
    op: Unary,
    outputs: [ValueType; 1],
}

/// Input X.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    let x = spec.float_input(0, "X")?.clone();
    let (name, op) = function(spec)?;
    spec.at_most_inputs(if name == "Clip" { 3 } else { 1 })?;
    Ok(Box::new(Activation {
        name,
        op,
        outputs: [x],
    }))
}

/// The function that a node computes, with ONNX's defaults.
fn function(spec: &NodeSpec<'_>) -> Result<(&'static str, Unary), OpError> {
    let alone = |name, op| spec.allow(&[]).map(|()| (name, op));
    let float = |name, default| Ok(spec.float(name)?.unwrap_or(default));
    match spec.op_type {
        "Relu" => alone("Relu", Unary::Relu),
        "Sigmoid" => alone("Sigmoid", Unary::Sigmoid),
        "Tanh" => alone("Tanh", Unary::Tanh),
        "HardSwish" => alone("HardSwish", Unary::HardSwish),
        "Mish" => alone("Mish", Unary::Mish),
        "Softplus" => alone("Softplus", Unary::Softplus),
        "Softsign" => alone("Softsign", Unary::Softsign),
        "Gelu" => {
            spec.allow(&["approximate"])?;
            let op = match spec.string("approximate")?.unwrap_or("none") {
                "none" => Unary::Gelu,
                "tanh" => Unary::GeluTanh,
                other => {
                    let problem = format!("{other} is neither none nor tanh");
                    return Err(spec.attribute_error("approximate", problem));
                }
            };
            Ok(("Gelu", op))
        }
        "LeakyRelu" => {
            spec.allow(&["alpha"])?;
            Ok(("LeakyRelu", Unary::LeakyRelu(float("alpha", 0.01)?)))
        }
        "ThresholdedRelu" => {
            spec.allow(&["alpha"])?;
            Ok(("ThresholdedRelu", Unary::Threshold(float("alpha", 1.0)?)))
        }
        "Elu" => {
            spec.allow(&["alpha"])?;
            let op = Unary::Elu {
                scale: 1.0,
                factor: float("alpha", 1.0)?,
                rate: 1.0,
            };
            Ok(("Elu", op))
        }
        "Selu" => {
            spec.allow(&["alpha", "gamma"])?;
            let scale = float("gamma", 1.050_701)?;
            let op = Unary::Elu {
                scale,
                factor: scale * float("alpha", 1.673_263_2)?,
                rate: 1.0,
            };
            Ok(("Selu", op))
        }
        "Celu" => {
            spec.allow(&["alpha"])?;
            let alpha = float("alpha", 1.0)?;
            if alpha == 0.0 {
                return Err(spec.attribute_error("alpha", "must not be 0"));
            }
            let op = Unary::Elu {
                scale: 1.0,
                factor: alpha,
                rate: 1.0 / alpha,
            };
            Ok(("Celu", op))
        }
        "HardSigmoid" => {
            spec.allow(&["alpha", "beta"])?;
            let op = Unary::HardSigmoid {
                alpha: float("alpha", 0.2)?,
                beta: float("beta", 0.5)?,
            };
            Ok(("HardSigmoid", op))
        }
        "Shrink" => {
            spec.allow(&["bias", "lambd"])?;
            let op = Unary::Shrink {
                lambda: float("lambd", 0.5)?,
                bias: float("bias", 0.0)?,
            };
            Ok(("Shrink", op))
        }
        _ => clip(spec),
    }
}

/// Bounds are attributes before opset 11 and inputs since.
fn clip(spec: &NodeSpec<'_>) -> Result<(&'static str, Unary), OpError> {
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
    let op = Unary::Clip {
        low: low.unwrap_or(f32::NEG_INFINITY),
        high: high.unwrap_or(f32::INFINITY),
    };
    Ok(("Clip", op))
}

impl Operator for Activation {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn saves(&self) -> Saves {
        let (mut inputs, mut outputs) = (vec![], vec![]);
        if self.op.saves_output() {
            outputs.push(0);
        } else {
            inputs.push(0);
        }
        Saves { inputs, outputs }
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
        let read = if self.op.saves_output() {
            saved.output(0)
        } else {
            saved.input(0)
        };
        of_first(
            only(grads).map(|grad| cx.device.unary_backward(self.op, read, grad)),
            wanted,
        )
    }
}
