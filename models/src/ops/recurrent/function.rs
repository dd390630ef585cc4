//! The functions that gates go through.

use super::super::Context;
use crate::device::params::Unary;
use crate::tensor::Tensor;

/// An activation function whose argument may be cut to a range before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Function {
    pub op: Unary,
    pub clip: Option<Unary>,
}

impl Function {
    /// The value, and what [`Self::backward`] needs.
    pub fn forward(&self, cx: &Context<'_>, x: Tensor) -> (Tensor, Tensor) {
        let device = cx.device;
        if self.clip.is_none() && self.op.saves_output() {
            let value = device.unary(self.op, x);
            return (value.clone(), value);
        }
        let clipped = self.clipped(cx, &x);
        (device.unary(self.op, clipped), x)
    }

    /// Gradient of the argument.
    pub fn backward(&self, cx: &Context<'_>, kept: &Tensor, grad: Tensor) -> Tensor {
        let device = cx.device;
        if self.clip.is_none() {
            return device.unary_backward(self.op, kept, grad);
        }
        let mut read = self.clipped(cx, kept);
        if self.op.saves_output() {
            read = device.unary(self.op, read);
        }
        let grad = device.unary_backward(self.op, &read, grad);
        match self.clip {
            Some(clip) => device.unary_backward(clip, kept, grad),
            None => grad,
        }
    }

    fn clipped(&self, cx: &Context<'_>, x: &Tensor) -> Tensor {
        match self.clip {
            Some(clip) => cx.device.unary(clip, x.clone()),
            None => x.clone(),
        }
    }
}
