//! Losses: the end of the forward and the beginning of the backward.

use std::fmt;
use std::str::FromStr;

use crate::device::Device;
use crate::device::params::Axis;
use crate::tensor::{DType, Tensor};

/// A loss over a minibatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Cross-entropy of logits against class numbers, mean over all targets. It contains the softmax:
    /// where a model ends in one, the loss attaches before it.
    CrossEntropy,
    /// Mean squared error over all elements.
    Mse,
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
}

impl Loss {
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
        if self == Loss::CrossEntropy {
            let classes = output[1];
            let inside = |label: &i64| usize::try_from(*label).is_ok_and(|l| l < classes);
            if let Some(&label) = target.i64s().iter().find(|label| !inside(label)) {
                return Err(LossError::Label {
                    label,
                    classes,
                    output: output.to_vec(),
                });
            }
        }
        Ok(())
    }

    /// Type and shape of the targets for an output: `[batch, classes, ..]` needs int64 `[batch, ..]` in cross-entropy.
    pub fn target(self, output: &[usize]) -> Result<(DType, Vec<usize>), LossError> {
        match self {
            Loss::Mse => Ok((DType::F32, output.to_vec())),
            Loss::CrossEntropy if output.len() < 2 => Err(LossError::Output {
                loss: self,
                axes: 2,
                output: output.to_vec(),
            }),
            Loss::CrossEntropy => {
                let mut shape = output.to_vec();
                shape.remove(1);
                Ok((DType::I64, shape))
            }
        }
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
        }
    }

    /// Mean loss and number of correct targets.
    pub fn evaluate(self, device: &dyn Device, output: &Tensor, target: &Tensor) -> (f32, usize) {
        let result = self.run(device, output, target, false);
        (result.loss, result.correct)
    }

    fn run(
        self,
        device: &dyn Device,
        output: &Tensor,
        target: &Tensor,
        gradient: bool,
    ) -> crate::device::LossOutput {
        match self {
            Loss::CrossEntropy => {
                device.cross_entropy(Axis::of(output.shape(), 1), output, target, gradient)
            }
            Loss::Mse => device.mean_squared_error(output, target, gradient),
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Loss::CrossEntropy => "cross-entropy",
            Loss::Mse => "mse",
        })
    }
}

impl FromStr for Loss {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "cross-entropy" => Ok(Loss::CrossEntropy),
            "mse" => Ok(Loss::Mse),
            _ => Err(format!("no loss {name:?}; use cross-entropy or mse")),
        }
    }
}
