//! The cell of a GRU, with gates update (z), reset (r) and candidate (n):
//! `hidden' = n + z * (hidden - n)`.
//!
//! The reset gate weighs the hidden state before its product with the candidate's recurrence weights, or, with
//! `linear_before_reset`, that product (as in PyTorch and cuDNN).

use super::super::Context;
use super::super::views::part;
use super::function::Function;
use super::sequence::{Gradients, Sizes};
use super::{Back, Direction, Run};
use crate::device::params::Binary;
use crate::tensor::Tensor;

const UPDATE: std::ops::Range<usize> = 0..1;
const RESET: std::ops::Range<usize> = 1..2;
const CANDIDATE: std::ops::Range<usize> = 2..3;
/// Tensors that a step keeps.
const KEPT: usize = 7;

#[derive(Debug)]
pub(super) struct Gru {
    /// Of update and reset gate.
    pub gate: Function,
    pub candidate: Function,
    pub linear_before_reset: bool,
}

impl Gru {
    pub fn forward(&self, cx: &Context<'_>, s: &Sizes, d: Direction<'_>) -> Run {
        let device = cx.device;
        let add = |a, b| device.binary(Binary::Add, a, b);
        let mul = |a: &Tensor, b: &Tensor| device.binary(Binary::Mul, a.clone(), b.clone());
        let third = |bias: &Tensor, gate: usize| part(device, bias, 0, gate * s.hidden, s.hidden);
        let linear = self.linear_before_reset;
        // Both biases go to the inputs' part, but for the one that the reset gate weighs.
        let bias = |gate: usize| {
            d.bias.as_ref().map(|[w, r]| match gate {
                2 if linear => third(w, gate),
                _ => add(third(w, gate), third(r, gate)),
            })
        };
        let inputs = [UPDATE, RESET, CANDIDATE].map(|gate| {
            let bias = bias(gate.start);
            s.project(cx, &d, gate, bias.as_ref())
        });
        let inner_bias = d.bias.as_ref().filter(|_| linear).map(|[_, r]| third(r, 2));
        let mut hidden = d.hidden.clone();
        let mut states = vec![None; s.steps];
        let mut kept = Vec::with_capacity(KEPT * s.steps);
        for &t in &d.order {
            let from_inputs = |gate: usize| s.at(cx, &inputs[gate], t);
            let z = s.recur(cx, &d, UPDATE, &hidden, Some(from_inputs(0)));
            let (z, z_kept) = self.gate.forward(cx, z);
            let r = s.recur(cx, &d, RESET, &hidden, Some(from_inputs(1)));
            let (r, r_kept) = self.gate.forward(cx, r);
            // What the reset gate weighs, and the candidate before its function.
            let (weighed, n) = if linear {
                let mut product = s.recur(cx, &d, CANDIDATE, &hidden, None);
                if let Some(bias) = &inner_bias {
                    product = add(product, bias.clone());
                }
                let n = add(from_inputs(2), mul(&r, &product));
                (product, n)
            } else {
                let reset = mul(&r, &hidden);
                let n = s.recur(cx, &d, CANDIDATE, &reset, Some(from_inputs(2)));
                (hidden.clone(), n)
            };
            let (n, n_kept) = self.candidate.forward(cx, n);
            let change = device.binary(Binary::Sub, hidden, n.clone());
            hidden = add(mul(&z, &change), n);
            states[t] = Some(hidden.clone());
            kept.extend([z, z_kept, r, r_kept, n_kept, weighed, change]);
        }
        Run {
            hidden: states.into_iter().flatten().collect(),
            cell: None,
            kept,
        }
    }

    pub fn backward(
        &self,
        cx: &Context<'_>,
        s: &Sizes,
        d: Direction<'_>,
        back: Back,
        total: &mut Gradients,
    ) {
        let device = cx.device;
        let add = |a, b| device.binary(Binary::Add, a, b);
        let mul = |a: &Tensor, b: &Tensor| device.binary(Binary::Mul, a.clone(), b.clone());
        let mut hidden = back.grad_hidden;
        // Gradients of the gates, and of what the candidate's recurrence weights gave; and what these were
        // multiplied with.
        let mut grads: [Vec<Tensor>; 4] = Default::default();
        let mut factors = Vec::new();
        let steps: Vec<&[Tensor]> = back.kept.chunks_exact(KEPT).collect();
        for (&t, step) in d.order.iter().zip(steps).rev() {
            let [z, z_kept, r, r_kept, n_kept, weighed, change] = step else {
                unreachable!("what the forward kept of a step");
            };
            if let Some(y) = &back.grad_y {
                hidden = add(s.at(cx, y, t), hidden);
            }
            let z_grad = self.gate.backward(cx, z_kept, mul(&hidden, change));
            let mut before = mul(&hidden, z);
            let n_grad = device.binary(Binary::Sub, hidden, before.clone());
            let n_grad = self.candidate.backward(cx, n_kept, n_grad);
            let (r_grad, inner) = if self.linear_before_reset {
                let inner = mul(&n_grad, r);
                before = s.recur_backward(cx, &d, CANDIDATE, &inner, Some(before));
                (mul(&n_grad, weighed), inner)
            } else {
                let reset = s.recur_backward(cx, &d, CANDIDATE, &n_grad, None);
                before = add(mul(&reset, r), before);
                factors.push(mul(r, weighed));
                (mul(&reset, weighed), n_grad.clone())
            };
            let r_grad = self.gate.backward(cx, r_kept, r_grad);
            before = s.recur_backward(cx, &d, UPDATE, &z_grad, Some(before));
            hidden = s.recur_backward(cx, &d, RESET, &r_grad, Some(before));
            for (all, grad) in grads.iter_mut().zip([z_grad, r_grad, n_grad, inner]) {
                all.push(grad);
            }
        }
        let in_time = |mut steps: Vec<Tensor>| {
            steps.reverse();
            s.in_time(cx, &d.order, steps)
        };
        let [z, r, n, inner] = grads.map(in_time);
        let factor = if self.linear_before_reset {
            back.before.clone()
        } else {
            in_time(factors)
        };
        if d.bias.is_some() {
            let sums = [&z, &r, &n, &inner].map(|grad| s.bias_backward(cx, grad));
            let [z, r, n, inner] = sums;
            total.bias.extend([z.clone(), r.clone(), n, z, r, inner]);
        }
        for (gate, grad) in [(UPDATE, &z), (RESET, &r), (CANDIDATE, &n)] {
            s.project_backward(cx, &d, gate, grad, back.wants_x, total);
        }
        for (grad, before) in [(&z, &back.before), (&r, &back.before), (&inner, &factor)] {
            s.weights_backward(cx, grad, before, total);
        }
        total.hidden.push(hidden);
    }
}
