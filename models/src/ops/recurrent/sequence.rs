//! What recurrent cells share: matrix products over a whole sequence and over one step of it.

use std::ops::Range;

use super::super::Context;
use super::super::views::{broadcast, part};
use super::Direction;
use crate::device::params::{Gemm, Reduction};
use crate::tensor::Tensor;

/// Extents of a recurrent layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub steps: usize,
    pub batch: usize,
    pub input: usize,
    pub hidden: usize,
    /// Gates of a cell.
    pub gates: usize,
    pub directions: usize,
}

/// Shapes of the parameters, in ONNX's names.
pub(super) struct ParameterShapes {
    pub w: [usize; 3],
    pub r: [usize; 3],
    pub b: [usize; 2],
    pub p: [usize; 2],
}

/// Gradients that the directions add to, each a list of parts in the order of directions and gates.
#[derive(Default)]
pub(super) struct Gradients {
    pub x: Option<Tensor>,
    pub w: Vec<Tensor>,
    pub r: Vec<Tensor>,
    pub bias: Vec<Tensor>,
    pub peepholes: Vec<Tensor>,
    pub hidden: Vec<Tensor>,
    pub cell: Vec<Tensor>,
}

impl Sizes {
    pub fn parameter_shapes(&self) -> ParameterShapes {
        let (d, width) = (self.directions, self.gates * self.hidden);
        ParameterShapes {
            w: [d, width, self.input],
            r: [d, width, self.hidden],
            b: [d, 2 * width],
            p: [d, 3 * self.hidden],
        }
    }

    /// Element where the rows of a gate begin in a matrix of `columns` for each direction.
    fn begin(&self, direction: usize, gate: usize, columns: usize) -> usize {
        (direction * self.gates + gate) * self.hidden * columns
    }

    /// Gates of all steps as far as the inputs determine them: `x * w' + bias`, `[steps * batch, gates * hidden]`.
    pub fn project(
        &self,
        cx: &Context<'_>,
        d: &Direction<'_>,
        gates: Range<usize>,
        bias: Option<&Tensor>,
    ) -> Tensor {
        let rows = self.steps * self.batch;
        let width = gates.len() * self.hidden;
        let p = Gemm {
            transpose_b: true,
            beta: f32::from(u8::from(bias.is_some())),
            offsets: vec![(0, self.begin(d.number, gates.start, self.input))],
            ..Gemm::new(rows, width, self.input)
        };
        let bias = bias.map(|bias| broadcast(cx.device, bias, &[rows, width]));
        cx.device
            .gemm(&p, d.x, d.w, bias)
            .into_shape(&[rows, width])
    }

    /// `hidden * r' + sum`, `[batch, gates * hidden]`.
    pub fn recur(
        &self,
        cx: &Context<'_>,
        d: &Direction<'_>,
        gates: Range<usize>,
        hidden: &Tensor,
        sum: Option<Tensor>,
    ) -> Tensor {
        let width = gates.len() * self.hidden;
        let p = Gemm {
            transpose_b: true,
            beta: f32::from(u8::from(sum.is_some())),
            offsets: vec![(0, self.begin(d.number, gates.start, self.hidden))],
            ..Gemm::new(self.batch, width, self.hidden)
        };
        let gates = cx.device.gemm(&p, hidden, d.r, sum);
        gates.into_shape(&[self.batch, width])
    }

    /// Gradient of the hidden state from that of gates made with [`Self::recur`], added to `sum`.
    pub fn recur_backward(
        &self,
        cx: &Context<'_>,
        d: &Direction<'_>,
        gates: Range<usize>,
        grad: &Tensor,
        sum: Option<Tensor>,
    ) -> Tensor {
        let p = Gemm {
            beta: f32::from(u8::from(sum.is_some())),
            offsets: vec![(0, self.begin(d.number, gates.start, self.hidden))],
            ..Gemm::new(self.batch, self.hidden, gates.len() * self.hidden)
        };
        let hidden = cx.device.gemm(&p, grad, d.r, sum);
        hidden.into_shape(&[self.batch, self.hidden])
    }

    /// Adds the gradients of W and X from those of the gates of all steps.
    pub fn project_backward(
        &self,
        cx: &Context<'_>,
        d: &Direction<'_>,
        gates: Range<usize>,
        grad: &Tensor,
        wants_x: bool,
        total: &mut Gradients,
    ) {
        let rows = self.steps * self.batch;
        let width = gates.len() * self.hidden;
        let p = Gemm {
            transpose_a: true,
            ..Gemm::new(width, self.input, rows)
        };
        total.w.push(
            cx.device
                .gemm(&p, grad, d.x, None)
                .into_shape(&[width, self.input]),
        );
        if wants_x {
            let sum = total.x.take();
            let p = Gemm {
                beta: f32::from(u8::from(sum.is_some())),
                offsets: vec![(0, self.begin(d.number, gates.start, self.input))],
                ..Gemm::new(rows, self.input, width)
            };
            total.x = Some(cx.device.gemm(&p, grad, d.w, sum));
        }
    }

    /// Adds the gradient of R from those of the gates of all steps and from what it was multiplied with.
    pub fn weights_backward(
        &self,
        cx: &Context<'_>,
        grad: &Tensor,
        before: &Tensor,
        total: &mut Gradients,
    ) {
        let width = grad.shape()[1];
        let p = Gemm {
            transpose_a: true,
            ..Gemm::new(width, self.hidden, self.steps * self.batch)
        };
        let r = cx.device.gemm(&p, grad, before, None);
        total.r.push(r.into_shape(&[width, self.hidden]));
    }

    /// Gradient of a bias from those of the gates of all steps.
    pub fn bias_backward(&self, cx: &Context<'_>, grad: &Tensor) -> Tensor {
        let sum = cx.device.reduce(Reduction::Sum, grad, &[0]);
        sum.into_shape(&[grad.shape()[1]])
    }

    /// One step of `[steps * batch, ..]`.
    pub fn at(&self, cx: &Context<'_>, sequence: &Tensor, step: usize) -> Tensor {
        part(cx.device, sequence, 0, step * self.batch, self.batch)
    }

    /// State before each step from the states after each, `[steps * batch, hidden]`.
    pub fn shifted(
        &self,
        cx: &Context<'_>,
        after: &Tensor,
        first: &Tensor,
        reversed: bool,
    ) -> Tensor {
        let kept = (self.steps - 1) * self.batch;
        if kept == 0 {
            return first.clone();
        }
        let begin = if reversed { self.batch } else { 0 };
        let kept = part(cx.device, after, 0, begin, kept);
        let parts = if reversed {
            [kept, first.clone()]
        } else {
            [first.clone(), kept]
        };
        cx.device.concat(0, &parts)
    }

    /// Puts one tensor per step, in the order in which they ran, into the order of time.
    pub fn in_time(&self, cx: &Context<'_>, order: &[usize], steps: Vec<Tensor>) -> Tensor {
        let mut steps: Vec<_> = order.iter().copied().zip(steps).collect();
        steps.sort_by_key(|(step, _)| *step);
        let steps: Vec<Tensor> = steps.into_iter().map(|(_, tensor)| tensor).collect();
        cx.device.concat(0, &steps)
    }
}
