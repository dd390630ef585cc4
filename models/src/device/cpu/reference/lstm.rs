//! One step of an LSTM with everything that ONNX allows: any functions, clipping, peepholes, coupled gates.

use super::activation;
use crate::device::params::{LstmCell, Unary};

/// `op` of `x` cut to what the clip allows.
fn function(p: &LstmCell, op: Unary, x: f32) -> f32 {
    activation::value(op, f64::from(x.clamp(-p.clip, p.clip))) as f32
}

/// Slope of [`function`] where its value is `y`. A value that belongs to a bound was clipped.
fn slope(p: &LstmCell, op: Unary, y: f32) -> f32 {
    let bound = |x: f32| p.clip.is_finite() && y == function(p, op, x);
    if bound(-p.clip) || bound(p.clip) {
        return 0.0;
    }
    op.slope_at_output(y).unwrap_or(f32::NAN)
}

/// Positions of the gates input, output, forget, cell of one element.
fn positions(p: &LstmCell, element: usize) -> [usize; 4] {
    let (row, column) = (element / p.hidden, element % p.hidden);
    [0, 1, 2, 3].map(|gate| (4 * row + gate) * p.hidden + column)
}

/// Peepholes input, output, forget of one element.
fn peeps(p: &LstmCell, peepholes: Option<&[f32]>, element: usize) -> [f32; 3] {
    let column = element % p.hidden;
    peepholes.map_or([0.0; 3], |w| {
        [0, 1, 2].map(|gate| w[gate * p.hidden + column])
    })
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
    let [gate, candidate, state] = p.activations;
    for (e, &c) in before.iter().enumerate() {
        let at = positions(p, e);
        let peep = peeps(p, peepholes, e);
        let i = function(p, gate, gates[at[0]] + peep[0] * c);
        let f = if p.coupled {
            1.0 - i
        } else {
            function(p, gate, gates[at[2]] + peep[2] * c)
        };
        let g = function(p, candidate, gates[at[3]]);
        after[e] = f * c + i * g;
        let o = function(p, gate, gates[at[1]] + peep[1] * after[e]);
        hidden[e] = o * activation::value(state, f64::from(after[e])) as f32;
        for (at, value) in at.into_iter().zip([i, o, f, g]) {
            gates[at] = value;
        }
    }
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
    let [gate, candidate, state] = p.activations;
    for (e, &c) in before.iter().enumerate() {
        let at = positions(p, e);
        let peep = peeps(p, peepholes, e);
        let [i, o, f, g] = at.map(|at| gates[at]);
        let shown = activation::value(state, f64::from(after[e])) as f32;
        let o_grad = grad_hidden[e] * shown * slope(p, gate, o);
        let through = grad_hidden[e] * o * state.slope_at_output(shown).unwrap_or(f32::NAN);
        let cell = grad_cell[e] + through + o_grad * peep[1];
        let mut i_grad = cell * g;
        let mut f_grad = cell * c;
        if p.coupled {
            i_grad -= f_grad;
            f_grad = 0.0;
        }
        i_grad *= slope(p, gate, i);
        f_grad *= slope(p, gate, f);
        let g_grad = cell * i * slope(p, candidate, g);
        grad_cell[e] = cell * f + i_grad * peep[0] + f_grad * peep[2];
        for (at, grad) in at.into_iter().zip([i_grad, o_grad, f_grad, g_grad]) {
            gates[at] = grad;
        }
    }
}
