//! Optimizers, with the semantics of PyTorch's.

use crate::device::Device;
use crate::device::params::{AdamStep, Binary, Reduction, SgdStep, Unary};
use crate::tensor::Tensor;

/// How a gradient changes a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// `torch.optim.SGD` (dampening 0).
    Sgd {
        /// Factor of the velocity.
        momentum: f32,
        /// L2 penalty.
        weight_decay: f32,
        /// Nesterov momentum.
        nesterov: bool,
    },
    /// `torch.optim.Adam`, and `AdamW` when decoupled.
    Adam {
        /// Decay of the mean gradient.
        beta1: f32,
        /// Decay of the mean squared gradient.
        beta2: f32,
        /// Added to the root of the second moment.
        eps: f32,
        /// L2 penalty, or decay of the weight itself.
        weight_decay: f32,
        /// Weight decay as in AdamW.
        decoupled: bool,
    },
}

/// What an optimizer remembers of the weights of one stage.
#[derive(Clone, Debug, Default)]
pub struct OptimizerState {
    /// Steps made.
    pub steps: u64,
    /// Velocity of each weight, once there was a step with momentum.
    pub velocities: Vec<Option<Tensor>>,
    /// Moments of each weight, once there was a step of Adam.
    pub moments: Vec<Option<[Tensor; 2]>>,
}

impl OptimizerState {
    /// Bytes of its tensors.
    pub fn bytes(&self) -> usize {
        let moments = self.moments.iter().flatten().flatten();
        let velocities = self.velocities.iter().flatten();
        velocities.chain(moments).map(Tensor::bytes).sum()
    }
}

/// Scales gradients down so that the root of the sum of all their squares is at most `largest`, as PyTorch's
/// `clip_grad_norm_` does.
pub fn clip_norm(device: &dyn Device, grads: Vec<Tensor>, largest: f32) -> Vec<Tensor> {
    let square = |grad: &Tensor| {
        let square = device.binary(Binary::Mul, grad.clone(), grad.clone());
        let axes: Vec<usize> = (0..grad.shape().len()).collect();
        let sum = device.reduce(Reduction::Sum, &square, &axes);
        f64::from(device.download(&sum).f32s()[0])
    };
    let norm = grads.iter().map(square).sum::<f64>().sqrt();
    let factor = f64::from(largest) / (norm + 1e-6);
    // Not a number stays: whoever watches the loss sees it.
    if factor >= 1.0 {
        return grads;
    }
    let scale = |grad| device.unary(Unary::Scale(factor as f32), grad);
    grads.into_iter().map(scale).collect()
}

impl Optimizer {
    /// Tensors of a weight's size that it keeps per weight.
    pub fn state_tensors(&self) -> usize {
        match *self {
            Optimizer::Sgd { momentum, .. } => usize::from(momentum != 0.0),
            Optimizer::Adam { .. } => 2,
        }
    }

    /// One step: the next weight version, in the memory of the old one where the caller has given up all
    /// other owners of it.
    pub fn step(
        &self,
        device: &dyn Device,
        state: &mut OptimizerState,
        weights: Vec<Tensor>,
        grads: &[Tensor],
        lr: f32,
    ) -> Vec<Tensor> {
        assert_eq!(weights.len(), grads.len(), "a gradient for each weight");
        state.steps += 1;
        state.velocities.resize(weights.len(), None);
        state.moments.resize(weights.len(), None);
        let mut next = Vec::with_capacity(weights.len());
        for (i, (weight, grad)) in weights.into_iter().zip(grads).enumerate() {
            next.push(match *self {
                Optimizer::Sgd {
                    momentum,
                    weight_decay,
                    nesterov,
                } => {
                    let step = SgdStep {
                        lr,
                        momentum,
                        weight_decay,
                        nesterov,
                    };
                    device.sgd(step, weight, grad, &mut state.velocities[i])
                }
                Optimizer::Adam {
                    beta1,
                    beta2,
                    eps,
                    weight_decay,
                    decoupled,
                } => {
                    let step = AdamStep {
                        lr,
                        beta1,
                        beta2,
                        eps,
                        weight_decay,
                        decoupled,
                        step: state.steps,
                    };
                    device.adam(step, weight, grad, &mut state.moments[i])
                }
            });
        }
        next
    }
}
