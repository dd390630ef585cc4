//! Losses: the end of the forward and the beginning of the backward.

use std::fmt;
use std::str::FromStr;

use crate::device::Device;
use crate::device::params::Axis;
use crate::tensor::{DType, Tensor};

/// A loss over a minibatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Cross-entropy of logits against class numbers, mean over all targets that count. It contains the
    /// softmax: where a model ends in one, the loss attaches before it.
    CrossEntropy(Classes),
    /// Mean squared error over all elements.
    Mse,
}

/// Where the classes lie in a model's output, and which label does not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Classes {
    /// The axis of the classes; by [`Self::axis_of`] if none.
    pub axis: Option<usize>,
    /// Targets with this label are passed over.
    pub ignore: Option<i64>,
}

impl Classes {
    /// The axis of the classes: the last of three (`[batch, sequence, classes]`, as language models give
    /// it), else axis 1 (`[batch, classes, ..]`).
    pub fn axis_of(self, output: &[usize]) -> usize {
        self.axis.unwrap_or(if output.len() == 3 { 2 } else { 1 })
    }
}

/// A target that does not go with an output.
#[derive(Debug, thiserror::Error)]
pub enum LossError {
    /// Number or kind of elements.
    #[error(
        "loss {loss}: the model gives {output:?}, so targets must be {expected} of shape {shape:?}, not {found_dtype} {found:?}"
    )]
    Target {
        /// The loss.
        loss: Loss,
        /// Shape of the model's output.
        output: Vec<usize>,
        /// Type it needs.
        expected: DType,
        /// Shape it needs.
        shape: Vec<usize>,
        /// Type it got.
        found_dtype: DType,
        /// Shape it got.
        found: Vec<usize>,
    },
    /// Class numbers.
    #[error(
        "loss cross-entropy: label {label} is outside 0..{classes}, the classes that the model's output {output:?} has"
    )]
    Label {
        /// The label.
        label: i64,
        /// Number of classes.
        classes: usize,
        /// Shape of the model's output.
        output: Vec<usize>,
    },
    /// Nothing to compare.
    #[error(
        "loss {loss}: the model's output must be float with at least {axes} axes, not {output:?}"
    )]
    Output {
        /// The loss.
        loss: Loss,
        /// Axes it needs.
        axes: usize,
        /// Shape of the model's output.
        output: Vec<usize>,
    },
}

/// What a minibatch cost.
#[derive(Debug)]
pub struct LossResult {
    /// Mean over the minibatch.
    pub loss: f32,
    /// Gradient of the mean with respect to the output.
    pub gradient: Tensor,
    /// Targets whose class has the largest logit; 0 for [`Loss::Mse`].
    pub correct: usize,
    /// Targets that count: what the mean is taken over.
    pub targets: usize,
}

/// How an output was judged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Judgement {
    /// Mean over the targets that count.
    pub loss: f32,
    /// Targets whose class has the largest logit; 0 for [`Loss::Mse`].
    pub correct: usize,
    /// Targets that count.
    pub targets: usize,
}

impl Loss {
    /// Cross-entropy over the usual axis, in which every label counts.
    pub const CROSS_ENTROPY: Self = Loss::CrossEntropy(Classes {
        axis: None,
        ignore: None,
    });

    /// Axis of the classes in an output that has one.
    fn axis(self, output: &[usize]) -> Option<usize> {
        match self {
            Loss::Mse => None,
            Loss::CrossEntropy(classes) => {
                let axis = classes.axis_of(output);
                (output.len() > 1 && (1..output.len()).contains(&axis)).then_some(axis)
            }
        }
    }

    /// Checks that targets go with an output; labels are checked one by one. Whoever feeds data does this
    /// once per data set or minibatch: a label out of range makes the loss NaN.
    pub fn check(self, output: &[usize], target: &Tensor) -> Result<(), LossError> {
        let (dtype, shape) = self.target(output)?;
        if target.dtype() != dtype || target.shape() != shape {
            return Err(LossError::Target {
                loss: self,
                output: output.to_vec(),
                expected: dtype,
                shape,
                found_dtype: target.dtype(),
                found: target.shape().to_vec(),
            });
        }
        if let (Loss::CrossEntropy(which), Some(axis)) = (self, self.axis(output)) {
            let classes = output[axis];
            let inside = |label: &i64| usize::try_from(*label).is_ok_and(|l| l < classes);
            let counts = |label: &&i64| which.ignore != Some(**label);
            let mut labels = target.i64s().iter().filter(counts);
            if let Some(&label) = labels.find(|label| !inside(label)) {
                return Err(LossError::Label {
                    label,
                    classes,
                    output: output.to_vec(),
                });
            }
        }
        Ok(())
    }

    /// Type and shape of the targets for an output: in cross-entropy int64, in the output's shape without
    /// the axis of the classes.
    ///
    /// # Errors
    /// When the output has no such axis.
    pub fn target(self, output: &[usize]) -> Result<(DType, Vec<usize>), LossError> {
        match (self, self.axis(output)) {
            (Loss::Mse, _) => Ok((DType::F32, output.to_vec())),
            (Loss::CrossEntropy(classes), None) => Err(LossError::Output {
                loss: self,
                axes: 1 + classes.axis.unwrap_or(1).max(1),
                output: output.to_vec(),
            }),
            (Loss::CrossEntropy(_), Some(axis)) => {
                let mut shape = output.to_vec();
                shape.remove(axis);
                Ok((DType::I64, shape))
            }
        }
    }

    /// Number of classes that an output of this shape tells apart; none where that has no meaning.
    pub fn classes(self, output: &[usize]) -> Option<usize> {
        self.axis(output).map(|axis| output[axis])
    }

    /// Loss and its gradient. The target must have passed [`Self::check`].
    pub fn forward_backward(
        self,
        device: &dyn Device,
        output: &Tensor,
        target: &Tensor,
    ) -> LossResult {
        let result = self.run(device, output, target, true);
        LossResult {
            loss: result.loss,
            gradient: result.gradient.expect("a gradient that was asked for"),
            correct: result.correct,
            targets: result.targets,
        }
    }

    /// Mean loss and number of correct targets.
    pub fn evaluate(self, device: &dyn Device, output: &Tensor, target: &Tensor) -> Judgement {
        let result = self.run(device, output, target, false);
        Judgement {
            loss: result.loss,
            correct: result.correct,
            targets: result.targets,
        }
    }

    fn run(
        self,
        device: &dyn Device,
        output: &Tensor,
        target: &Tensor,
        gradient: bool,
    ) -> crate::device::LossOutput {
        match self {
            Loss::CrossEntropy(classes) => {
                let axis = Axis::of(output.shape(), classes.axis_of(output.shape()));
                device.cross_entropy(axis, output, target, classes.ignore, gradient)
            }
            Loss::Mse => device.mean_squared_error(output, target, gradient),
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Loss::CrossEntropy(_) => "cross-entropy",
            Loss::Mse => "mse",
        })
    }
}

impl FromStr for Loss {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "cross-entropy" => Ok(Loss::CROSS_ENTROPY),
            "mse" => Ok(Loss::Mse),
            _ => Err(format!("no loss {name:?}; use cross-entropy or mse")),
        }
    }
}
