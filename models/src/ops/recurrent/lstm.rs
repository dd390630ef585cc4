//! The cell of an LSTM.

use super::super::Context;
use super::super::views::part;
use super::sequence::{Gradients, Sizes};
use super::{Back, Direction, Run};
use crate::device::params::{Binary, LstmCell};
use crate::tensor::Tensor;

#[derive(Debug)]
pub(super) struct Lstm {
    pub cell: LstmCell,
}

impl Lstm {
    pub fn forward(&self, cx: &Context<'_>, s: &Sizes, d: Direction<'_>) -> Run {
        let device = cx.device;
        let bias = d
            .bias
            .clone()
            .map(|[w, r]| device.binary(Binary::Add, w, r));
        let inputs = s.project(cx, &d, 0..4, bias.as_ref());
        let (mut hidden, mut cell) = (d.hidden.clone(), d.cell.clone());
        let mut kept = Vec::with_capacity(2 * s.steps);
        let mut states = vec![None; s.steps];
        for &t in &d.order {
            let gates = s.recur(cx, &d, 0..4, &hidden, Some(s.at(cx, &inputs, t)));
            let step = device.lstm_cell(&self.cell, gates, &cell, d.peepholes.as_ref());
            (hidden, cell) = (step.hidden, step.cell);
            states[t] = Some(hidden.clone());
            kept.extend([step.gates, cell.clone()]);
        }
        Run {
            hidden: states.into_iter().flatten().collect(),
            cell: Some(cell),
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
        let (mut hidden, mut cell) = (back.grad_hidden, back.grad_cell);
        let mut gates = Vec::with_capacity(s.steps);
        let mut cells = vec![d.cell.clone()];
        for pair in back.kept.chunks_exact(2) {
            gates.push(pair[0].clone());
            cells.push(pair[1].clone());
        }
        drop(back.kept);
        let mut grads = Vec::with_capacity(s.steps);
        for (run, &t) in d.order.iter().enumerate().rev() {
            if let Some(y) = &back.grad_y {
                hidden = device.binary(Binary::Add, s.at(cx, y, t), hidden);
            }
            let gates = gates.pop().expect("gates of every step");
            let around = [&cells[run], &cells[run + 1]];
            let peepholes = d.peepholes.as_ref();
            let grad;
            (grad, cell) =
                device.lstm_cell_backward(&self.cell, gates, around, peepholes, &hidden, cell);
            hidden = s.recur_backward(cx, &d, 0..4, &grad, None);
            grads.push(grad);
        }
        grads.reverse();
        let grad = s.in_time(cx, &d.order, grads);
        if d.bias.is_some() {
            let bias = s.bias_backward(cx, &grad);
            total.bias.extend([bias.clone(), bias]);
        }
        if d.peepholes.is_some() {
            let after = s.in_time(cx, &d.order, cells[1..].to_vec());
            let before = s.in_time(cx, &d.order, cells[..s.steps].to_vec());
            // Input and forget gate saw the cell state before the step, the output gate the one after it.
            for (gate, seen) in [(0, &before), (1, &after), (2, &before)] {
                let grad = part(device, &grad, 1, gate * s.hidden, s.hidden);
                let product: Tensor = device.binary(Binary::Mul, grad, seen.clone());
                total.peepholes.push(s.bias_backward(cx, &product));
            }
        }
        s.weights_backward(cx, &grad, &back.before, total);
        s.project_backward(cx, &d, 0..4, &grad, back.wants_x, total);
        total.hidden.push(hidden);
        total.cell.push(cell);
    }
}
