//! The cell of a plain recurrent network: `hidden = f(x * w' + hidden * r' + bias)`.

use super::super::Context;
use super::function::Function;
use super::sequence::{Gradients, Sizes};
use super::{Back, Direction, Run};
use crate::device::params::Binary;

#[derive(Debug)]
pub(super) struct Rnn {
    pub function: Function,
}

impl Rnn {
    pub fn forward(&self, cx: &Context<'_>, s: &Sizes, d: Direction<'_>) -> Run {
        let bias = d
            .bias
            .clone()
            .map(|[w, r]| cx.device.binary(Binary::Add, w, r));
        let inputs = s.project(cx, &d, 0..1, bias.as_ref());
        let mut hidden = d.hidden.clone();
        let mut states = vec![None; s.steps];
        let mut all_kept = Vec::with_capacity(s.steps);
        for &t in &d.order {
            let sum = s.recur(cx, &d, 0..1, &hidden, Some(s.at(cx, &inputs, t)));
            let kept;
            (hidden, kept) = self.function.forward(cx, sum);
            states[t] = Some(hidden.clone());
            all_kept.push(kept);
        }
        Run {
            hidden: states.into_iter().flatten().collect(),
            cell: None,
            kept: all_kept,
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
        let mut hidden = back.grad_hidden;
        let mut grads = Vec::with_capacity(s.steps);
        for (&t, kept) in d.order.iter().zip(back.kept).rev() {
            if let Some(y) = &back.grad_y {
                hidden = cx.device.binary(Binary::Add, s.at(cx, y, t), hidden);
            }
            let grad = self.function.backward(cx, &kept, hidden);
            hidden = s.recur_backward(cx, &d, 0..1, &grad, None);
            grads.push(grad);
        }
        grads.reverse();
        let grad = s.in_time(cx, &d.order, grads);
        if d.bias.is_some() {
            let bias = s.bias_backward(cx, &grad);
            total.bias.extend([bias.clone(), bias]);
        }
        s.weights_backward(cx, &grad, &back.before, total);
        s.project_backward(cx, &d, 0..1, &grad, back.wants_x, total);
        total.hidden.push(hidden);
    }
}
