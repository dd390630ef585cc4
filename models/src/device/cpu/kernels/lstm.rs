//! One step of an LSTM as nearly everybody uses it: sigmoid and tanh, no clipping, no peepholes. Anything else
//! runs on the plain version.

use super::{arch, math};
use crate::device::cpu::reference::lstm as plain;
use crate::device::params::{LstmCell, Unary};

fn is_usual(p: &LstmCell, peepholes: Option<&[f32]>) -> bool {
    p.activations == [Unary::Sigmoid, Unary::Tanh, Unary::Tanh]
        && p.clip.is_infinite()
        && !p.coupled
        && peepholes.is_none()
}

/// The gates input, output, forget, cell of one sample.
#[inline(always)]
fn split(gates: &mut [f32], hidden: usize) -> [&mut [f32]; 4] {
    let (io, fg) = gates.split_at_mut(2 * hidden);
    let (i, o) = io.split_at_mut(hidden);
    let (f, g) = fg.split_at_mut(hidden);
    [i, o, f, g]
}

/// Puts the gates through their functions and gives both states after the step.
pub fn forward(
    p: &LstmCell,
    gates: &mut [f32],
    before: &[f32],
    peepholes: Option<&[f32]>,
    after: &mut [f32],
    hidden: &mut [f32],
) {
    if !is_usual(p, peepholes) {
        plain::forward(p, gates, before, peepholes, after, hidden);
        return;
    }
    let n = p.hidden;
    arch().dispatch(
        #[inline(always)]
        || {
            for row in 0..p.batch {
                let gates = &mut gates[4 * row * n..][..4 * n];
                let (sigmoids, candidates) = gates.split_at_mut(3 * n);
                sigmoids.iter_mut().for_each(|x| *x = math::sigmoid(*x));
                candidates.iter_mut().for_each(|x| *x = math::tanh(*x));
                let [i, o, f, g] = split(gates, n);
                let before = &before[row * n..][..n];
                let after = &mut after[row * n..][..n];
                let hidden = &mut hidden[row * n..][..n];
                for e in 0..n {
                    after[e] = f[e] * before[e] + i[e] * g[e];
                    hidden[e] = o[e] * math::tanh(after[e]);
                }
            }
        },
    );
}

/// Turns the gates after their functions into their gradients before these, and the gradient of the cell state
/// after the step into that of the one before.
pub fn backward(
    p: &LstmCell,
    gates: &mut [f32],
    [before, after]: [&[f32]; 2],
    peepholes: Option<&[f32]>,
    grad_hidden: &[f32],
    grad_cell: &mut [f32],
) {
    if !is_usual(p, peepholes) {
        let cells = [before, after];
        plain::backward(p, gates, cells, peepholes, grad_hidden, grad_cell);
        return;
    }
    let n = p.hidden;
    arch().dispatch(
        #[inline(always)]
        || {
            for row in 0..p.batch {
                let [i, o, f, g] = split(&mut gates[4 * row * n..][..4 * n], n);
                let before = &before[row * n..][..n];
                let after = &after[row * n..][..n];
                let grad_hidden = &grad_hidden[row * n..][..n];
                let grad_cell = &mut grad_cell[row * n..][..n];
                for e in 0..n {
                    let shown = math::tanh(after[e]);
                    let through = grad_hidden[e] * o[e] * (1.0 - shown * shown);
                    let cell = grad_cell[e] + through;
                    grad_cell[e] = cell * f[e];
                    o[e] = grad_hidden[e] * shown * (o[e] * (1.0 - o[e]));
                    f[e] = cell * before[e] * (f[e] * (1.0 - f[e]));
                    let (input, gate) = (i[e], g[e]);
                    i[e] = cell * gate * (input * (1.0 - input));
                    g[e] = cell * input * (1.0 - gate * gate);
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::kernels::testing::{assert_close, on_every_arch, values};

    #[test]
    fn a_usual_step_forward_and_backward() {
        on_every_arch(|| {
            for (batch, hidden) in [(1, 1), (3, 37), (2, 64)] {
                let p = LstmCell {
                    batch,
                    hidden,
                    activations: [Unary::Sigmoid, Unary::Tanh, Unary::Tanh],
                    clip: f32::INFINITY,
                    coupled: false,
                };
                let n = batch * hidden;
                let before = values(n, 2);
                let run = |fast: bool| {
                    let mut gates: Vec<f32> = values(4 * n, 1).iter().map(|x| 4.0 * x).collect();
                    let (mut after, mut shown) = (vec![0.0; n], vec![0.0; n]);
                    let f = if fast { forward } else { plain::forward };
                    f(&p, &mut gates, &before, None, &mut after, &mut shown);
                    let mut grads = gates.clone();
                    let mut cell = values(n, 3);
                    let f = if fast { backward } else { plain::backward };
                    let cells = [&before[..], &after[..]];
                    f(&p, &mut grads, cells, None, &values(n, 4), &mut cell);
                    [gates, after, shown, grads, cell]
                };
                for (actual, expected) in run(true).iter().zip(run(false)) {
                    assert_close("step", actual, &expected, 1e-5);
                }
            }
        });
    }
}
