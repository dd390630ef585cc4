//! BatchNormalization: with the minibatch's statistics in training, with the running ones in inference.

use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, only};
use crate::device::params::{Axis, Binary, Unary};
use crate::tensor::Tensor;

/// The output that holds the running variance.
const VARIANCE: usize = 2;

#[derive(Debug)]
struct BatchNorm {
    axis: Axis,
    eps: f32,
    momentum: f32,
    /// Uses the minibatch's statistics when the context trains.
    training: bool,
    outputs: Vec<ValueType>,
}

/// Inputs X `[n, c, ..]`, scale, B, mean and variance `[c]`.
///
/// A node is in training form when it says `training_mode` (since opset 14) or names more than one
/// output (before); it then gives Y and both running statistics, which blend by
/// `momentum * old + (1 - momentum) * new`. As outputs they hold the biased variance, as ONNX defines them;
/// the running variance that training keeps holds the unbiased one, as PyTorch's does, so that a model goes
/// on as in the framework it came from. Before opset 14 the mean and the inverse deviation of the
/// minibatch may follow.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["epsilon", "momentum", "spatial", "training_mode"])?;
    spec.at_most_inputs(5)?;
    let x = &spec.float_input(0, "X")?.shape;
    if x.len() < 2 {
        return Err(spec.input_error("X", format!("{x:?} must be [n, c, ..]")));
    }
    for (position, name) in ["scale", "B", "mean", "var"].into_iter().enumerate() {
        spec.expect_shape(spec.float_input(position + 1, name)?, name, &x[1..2])?;
    }
    if spec.int("spatial")?.unwrap_or(1) != 1 {
        return Err(
            spec.attribute_error("spatial", "only 1 (one statistic per channel) is supported")
        );
    }
    let in_file = if spec.opset >= 14 {
        spec.flag("training_mode")?
    } else {
        spec.outputs > 1
    };
    let most = if !in_file {
        1
    } else if spec.opset >= 14 {
        3
    } else {
        5
    };
    if spec.outputs > most {
        return Err(spec.error(format!(
            "names {} outputs, at most {most} are possible",
            spec.outputs
        )));
    }
    let training = in_file || spec.training_form;
    let mut outputs = vec![ValueType::float(x.clone())];
    if training {
        outputs.resize(spec.outputs.max(3), ValueType::float([x[1]]));
    }
    Ok(Box::new(BatchNorm {
        axis: Axis::of(x, 1),
        eps: spec.float("epsilon")?.unwrap_or(1e-5),
        momentum: spec.float("momentum")?.unwrap_or(0.9),
        training,
        outputs,
    }))
}

/// The four inputs after X.
fn parameters(inputs: &[Option<Tensor>]) -> [&Tensor; 4] {
    [1, 2, 3, 4].map(|position| {
        inputs[position]
            .as_ref()
            .expect("an input of one number per channel")
    })
}

impl Operator for BatchNorm {
    fn name(&self) -> &'static str {
        "BatchNormalization"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        &[1, 2]
    }

    fn saves(&self) -> Saves {
        let inputs: &[usize] = if self.training {
            &[0, 1]
        } else {
            &[0, 1, 3, 4]
        };
        Saves {
            inputs: inputs.to_vec(),
            outputs: vec![],
        }
    }

    fn state_updates(&self) -> &[(usize, usize)] {
        if self.training {
            &[(1, 3), (2, 4)]
        } else {
            &[]
        }
    }

    /// The running variance with the minibatch's unbiased variance in it: `m old + (1 - m) n / (n - 1) biased`,
    /// where the output is `m old + (1 - m) biased`.
    fn kept_state(&self, cx: &Context<'_>, output: usize, value: Tensor, old: &Tensor) -> Tensor {
        let count = self.axis.outer * self.axis.inner;
        if output != VARIANCE || !cx.training || count < 2 {
            return value;
        }
        let share = 1.0 / (count - 1) as f32;
        let excess = Unary::Scale(self.momentum * share);
        let excess = cx.device.unary(excess, old.clone());
        let raised = cx.device.unary(Unary::Scale(1.0 + share), value);
        cx.device.binary(Binary::Sub, raised, excess)
    }

    fn forward(&self, cx: &Context<'_>, mut inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].take().expect("input X");
        let [scale, bias, mean, variance] = parameters(&inputs);
        if !(self.training && cx.training) {
            let y = cx
                .device
                .batch_norm_inference(self.axis, x, scale, bias, mean, variance, self.eps);
            let mut outputs = vec![y];
            // In training form the statistics are outputs too; here they stay as they are.
            outputs.extend([mean, variance, mean, variance].into_iter().cloned());
            outputs.truncate(self.outputs.len());
            return Forward {
                outputs,
                extra: vec![],
            };
        }
        let y = cx.device.batch_norm(
            self.axis,
            &x,
            scale,
            bias,
            mean,
            variance,
            self.eps,
            self.momentum,
        );
        let mut outputs = vec![
            y.output,
            y.running_mean,
            y.running_variance,
            y.mean.clone(),
            y.inv_std.clone(),
        ];
        outputs.truncate(self.outputs.len());
        Forward {
            outputs,
            extra: vec![y.mean, y.inv_std],
        }
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
        let (x, scale) = (saved.input(0), saved.input(1));
        let back = match &saved.extra[..] {
            [mean, inv_std] => cx
                .device
                .batch_norm_backward(self.axis, x, scale, mean, inv_std, grad),
            _ => {
                let (mean, variance) = (saved.input(3), saved.input(4));
                cx.device.batch_norm_inference_backward(
                    self.axis, x, scale, mean, variance, self.eps, grad,
                )
            }
        };
        result[0] = Some(back.input);
        result[1] = Some(back.scale);
        result[2] = Some(back.bias);
        result
    }
}
