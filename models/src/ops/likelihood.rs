//! SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss as nodes of a graph.

use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, of_first};
use crate::device::params::{Axis, Binary, Reduction};
use crate::tensor::{DType, Tensor};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reduce {
    /// One loss per target.
    None,
    Sum,
    /// Sum of the losses over the sum of their weights.
    Mean,
}

#[derive(Debug)]
struct Likelihood {
    /// Scores `[n, classes, ..]`, seen around the classes.
    axis: Axis,
    /// The input holds scores, of which a softmax makes probabilities; else it holds log-probabilities.
    softmax: bool,
    reduce: Reduce,
    ignored: Option<i64>,
    input_shape: Vec<usize>,
    outputs: Vec<ValueType>,
}

/// Inputs scores `[n, classes, ..]`, class numbers `[n, ..]` and optional weights `[classes]`, which are constants:
/// no gradient reaches them.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    let softmax = spec.op_type == "SoftmaxCrossEntropyLoss";
    let names = if softmax {
        ["scores", "labels", "weights"]
    } else {
        ["input", "target", "weight"]
    };
    spec.allow(&["ignore_index", "reduction"])?;
    spec.at_most_inputs(3)?;
    let scores = &spec.float_input(0, names[0])?.shape;
    let &[n, classes, ref rest @ ..] = &scores[..] else {
        return Err(spec.input_error(names[0], format!("{scores:?} must be [n, classes, ..]")));
    };
    let targets = [&[n], rest].concat();
    let labels = spec.input(1, names[1])?;
    spec.expect_dtype(labels, names[1], DType::I64)?;
    spec.expect_shape(labels, names[1], &targets)?;
    if spec.optional(2).is_some() {
        spec.expect_shape(spec.float_input(2, names[2])?, names[2], &[classes])?;
    }
    let ignored = spec.int("ignore_index")?;
    if let Some(Some(known)) = spec.constants.get(1)
        && let Some(label) = known.i64s().iter().find(|&&label| {
            let class = usize::try_from(label).is_ok_and(|label| label < classes);
            !class && Some(label) != ignored
        })
    {
        let problem = format!("{label} is outside of 0..{classes}");
        return Err(spec.input_error(names[1], problem));
    }
    let reduce = match spec.string("reduction")?.unwrap_or("mean") {
        "none" => Reduce::None,
        "sum" => Reduce::Sum,
        "mean" => Reduce::Mean,
        other => {
            let problem = format!("{other} is none of none, sum, mean");
            return Err(spec.attribute_error("reduction", problem));
        }
    };
    let most = if softmax { 2 } else { 1 };
    if spec.outputs > most {
        return Err(spec.error(format!("has at most {most} outputs, not {}", spec.outputs)));
    }
    let loss = match reduce {
        Reduce::None => targets,
        Reduce::Sum | Reduce::Mean => vec![],
    };
    let mut outputs = vec![ValueType::float(loss), ValueType::float(scores.clone())];
    outputs.truncate(spec.outputs.max(1));
    Ok(Box::new(Likelihood {
        axis: Axis::of(scores, 1),
        softmax,
        reduce,
        ignored,
        input_shape: scores.clone(),
        outputs,
    }))
}

impl Likelihood {
    fn sum(&self, cx: &Context<'_>, x: &Tensor) -> Tensor {
        let axes: Vec<usize> = (0..x.shape().len()).collect();
        cx.device.reduce(Reduction::Sum, x, &axes).into_shape(&[])
    }
}

impl Operator for Likelihood {
    fn name(&self) -> &'static str {
        if self.softmax {
            "SoftmaxCrossEntropyLoss"
        } else {
            "NegativeLogLikelihoodLoss"
        }
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn saves(&self) -> Saves {
        Saves {
            inputs: vec![1],
            outputs: vec![],
        }
    }

    fn forward(&self, cx: &Context<'_>, mut inputs: Vec<Option<Tensor>>) -> Forward {
        let device = cx.device;
        let scores = inputs[0].take().expect("input scores");
        let targets = inputs[1].as_ref().expect("input labels");
        let class_weights = inputs.get(2).and_then(Option::as_ref);
        let log_probabilities = match self.softmax {
            true => device.softmax(self.axis, scores, true),
            false => scores,
        };
        let (losses, weights) = device.likelihood(
            self.axis,
            &log_probabilities,
            targets,
            class_weights,
            self.ignored,
        );
        let mut extra = vec![weights];
        let loss = match self.reduce {
            Reduce::None => losses,
            Reduce::Sum => self.sum(cx, &losses),
            Reduce::Mean => {
                let total = self.sum(cx, &extra[0]);
                extra.push(total.clone());
                device.binary(Binary::Div, self.sum(cx, &losses), total)
            }
        };
        if self.softmax {
            extra.insert(0, log_probabilities.clone());
        }
        let mut outputs = vec![loss, log_probabilities];
        outputs.truncate(self.outputs.len());
        Forward { outputs, extra }
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        mut saved: Saved,
        mut grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let device = cx.device;
        let log_probabilities = self.softmax.then(|| saved.extra.remove(0));
        let mut grad = grads.get_mut(1).and_then(Option::take);
        if let Some(loss) = grads[0].take() {
            let weights = saved.extra[0].clone();
            let factor = match self.reduce {
                Reduce::None | Reduce::Sum => loss,
                Reduce::Mean => device.binary(Binary::Div, loss, saved.extra[1].clone()),
            };
            let factors = device.binary(Binary::Mul, weights, factor);
            let targets = saved.input(1);
            let shape = &self.input_shape;
            let back = device.likelihood_backward(self.axis, shape, targets, &factors);
            grad = Some(match grad {
                Some(grad) => device.binary(Binary::Add, grad, back),
                None => back,
            });
        }
        of_first(
            match (grad, log_probabilities) {
                (Some(grad), Some(output)) => {
                    Some(device.softmax_backward(self.axis, &output, grad, true))
                }
                (grad, _) => grad,
            },
            wanted,
        )
    }
}
