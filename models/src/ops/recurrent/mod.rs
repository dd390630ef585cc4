//! LSTM, GRU and RNN over whole sequences, in one or both directions.
//!
//! The part of the gates that comes from the inputs is one matrix product over all steps, in the backward too;
//! only the product with the hidden state goes step by step. Everything inside is time-major; `layout` 1 is
//! turned on the way in and out.

mod build;
mod function;
mod gru;
mod lstm;
mod rnn;
mod sequence;

use self::sequence::{Gradients, Sizes};
use super::views::{broadcast, part, permute};
use super::{Context, Forward, Operator, Saved, Saves, ValueType};
use crate::init::Fan;
use crate::tensor::Tensor;

pub(super) use build::build;

/// Positions of the inputs.
mod input {
    pub const X: usize = 0;
    pub const W: usize = 1;
    pub const R: usize = 2;
    pub const B: usize = 3;
    pub const SEQUENCE_LENS: usize = 4;
    pub const INITIAL_H: usize = 5;
    pub const INITIAL_C: usize = 6;
    pub const P: usize = 7;
    pub const COUNT: usize = 8;
}

#[derive(Debug)]
struct Recurrent {
    sizes: Sizes,
    /// One per direction.
    cells: Vec<Cell>,
    /// Whether each direction runs from the last step to the first.
    reversed: Vec<bool>,
    /// X is `[batch, steps, input]` instead of `[steps, batch, input]`, and states and Y accordingly.
    batch_first: bool,
    outputs: Vec<ValueType>,
}

#[derive(Debug)]
enum Cell {
    Lstm(lstm::Lstm),
    Gru(gru::Gru),
    Rnn(rnn::Rnn),
}

/// What one direction works on.
struct Direction<'a> {
    /// Which one.
    number: usize,
    /// Steps in the order in which they run.
    order: Vec<usize>,
    /// Input of all steps, `[steps * batch, input]`.
    x: &'a Tensor,
    /// Weights of all directions and gates.
    w: &'a Tensor,
    /// Recurrence weights of all directions and gates.
    r: &'a Tensor,
    /// Both biases of this direction, `[gates * hidden]` each.
    bias: Option<[Tensor; 2]>,
    /// Peepholes of this direction, `[3 * hidden]`.
    peepholes: Option<Tensor>,
    /// Hidden state before the first step, `[batch, hidden]`.
    hidden: Tensor,
    /// Cell state before the first step, `[batch, hidden]`.
    cell: Tensor,
}

/// What a direction gives.
struct Run {
    /// Hidden state after each step, in the order of time.
    hidden: Vec<Tensor>,
    /// Cell state after the last step.
    cell: Option<Tensor>,
    /// What the backward needs, the same number of tensors for each step, in the order in which they ran.
    kept: Vec<Tensor>,
}

/// What comes back to a direction.
struct Back {
    /// Hidden state before each step, `[steps * batch, hidden]`, in the order of time.
    before: Tensor,
    /// Gradient of the hidden state after each step, `[steps * batch, hidden]`, by way of Y.
    grad_y: Option<Tensor>,
    /// Gradient of the hidden state after the last step, by way of `Y_h`.
    grad_hidden: Tensor,
    /// Gradient of the cell state after the last step.
    grad_cell: Tensor,
    /// [`Run::kept`].
    kept: Vec<Tensor>,
    /// Whether the gradient of X is wanted.
    wants_x: bool,
}

impl Recurrent {
    fn order(&self, direction: usize) -> Vec<usize> {
        let steps = 0..self.sizes.steps;
        if self.reversed[direction] {
            steps.rev().collect()
        } else {
            steps.collect()
        }
    }

    /// Swaps batch and its neighbour where the layout says so.
    fn turn(&self, cx: &Context<'_>, x: &Tensor) -> Tensor {
        if self.batch_first {
            permute(cx.device, x, &[1, 0, 2])
        } else {
            x.clone()
        }
    }

    /// The argument of one direction. `inputs` are as the node lists them.
    fn direction<'a>(
        &self,
        cx: &Context<'_>,
        inputs: &'a [Option<Tensor>],
        x: &'a Tensor,
        number: usize,
    ) -> Direction<'a> {
        let device = cx.device;
        let s = &self.sizes;
        let get = |position: usize| inputs.get(position).and_then(Option::as_ref);
        let row = |t: &Tensor| part(device, t, 0, number, 1);
        let state = |position| match get(position) {
            Some(t) => {
                let state = row(&self.turn(cx, t));
                let samples = state.shape()[1];
                let state = state.into_shape(&[samples, s.hidden]);
                if samples == s.batch {
                    state
                } else {
                    // One constant for all samples: see the shape rule.
                    let one = part(device, &state, 0, 0, 1);
                    broadcast(device, &one, &[s.batch, s.hidden])
                }
            }
            None => device.fill(&[s.batch, s.hidden], 0.0),
        };
        let width = s.gates * s.hidden;
        let (Some(w), Some(r)) = (get(input::W), get(input::R)) else {
            unreachable!("inputs that the shape rule requires");
        };
        Direction {
            number,
            order: self.order(number),
            x,
            w,
            r,
            bias: get(input::B).map(|b| {
                let both = row(b).into_shape(&[2, width]);
                [0, 1].map(|half| part(device, &both, 0, half, 1).into_shape(&[width]))
            }),
            peepholes: get(input::P).map(|p| row(p).into_shape(&[3 * s.hidden])),
            hidden: state(input::INITIAL_H),
            cell: state(input::INITIAL_C),
        }
    }

    /// X as `[steps * batch, input]`.
    fn rows(&self, cx: &Context<'_>, x: &Tensor) -> Tensor {
        let s = &self.sizes;
        self.turn(cx, x).into_shape(&[s.steps * s.batch, s.input])
    }
}

impl Operator for Recurrent {
    fn name(&self) -> &'static str {
        match self.cells[0] {
            Cell::Lstm(_) => "LSTM",
            Cell::Gru(_) => "GRU",
            Cell::Rnn(_) => "RNN",
        }
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        &[input::W, input::R, input::B, input::P]
    }

    fn fan(&self, position: usize) -> Option<Fan> {
        let inputs = match position {
            input::W => self.sizes.input,
            input::R => self.sizes.hidden,
            _ => return None,
        };
        Some(Fan {
            inputs,
            outputs: self.sizes.hidden,
        })
    }

    fn saves(&self) -> Saves {
        Saves {
            inputs: (0..input::COUNT)
                .filter(|&position| position != input::SEQUENCE_LENS)
                .collect(),
            outputs: vec![0],
        }
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let device = cx.device;
        let s = &self.sizes;
        let x = self.rows(cx, inputs[input::X].as_ref().expect("input X"));
        let mut runs = Vec::with_capacity(s.directions);
        for (number, cell) in self.cells.iter().enumerate() {
            let direction = self.direction(cx, &inputs, &x, number);
            runs.push(match cell {
                Cell::Lstm(lstm) => lstm.forward(cx, s, direction),
                Cell::Gru(gru) => gru.forward(cx, s, direction),
                Cell::Rnn(rnn) => rnn.forward(cx, s, direction),
            });
        }
        let steps = (0..s.steps).flat_map(|t| runs.iter().map(move |run| run.hidden[t].clone()));
        let y = device.concat(0, &steps.collect::<Vec<_>>()).into_shape(&[
            s.steps,
            s.directions,
            s.batch,
            s.hidden,
        ]);
        let last = |run: &Run, direction: usize| {
            let order = self.order(direction);
            run.hidden[order[s.steps - 1]].clone()
        };
        let states = |tensors: Vec<Tensor>| {
            let states = device.concat(0, &tensors);
            self.turn(cx, &states.into_shape(&[s.directions, s.batch, s.hidden]))
        };
        let hidden = runs.iter().zip(0..).map(|(run, d)| last(run, d)).collect();
        let mut outputs = vec![
            if self.batch_first {
                permute(device, &y, &[2, 0, 1, 3])
            } else {
                y
            },
            states(hidden),
        ];
        let cells: Vec<Tensor> = runs.iter_mut().filter_map(|run| run.cell.take()).collect();
        if !cells.is_empty() {
            outputs.push(states(cells));
        }
        outputs.truncate(self.outputs.len());
        Forward {
            outputs,
            extra: runs.into_iter().flat_map(|run| run.kept).collect(),
        }
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        mut saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let device = cx.device;
        let s = &self.sizes;
        let x = self.rows(cx, saved.input(input::X));
        let time_major = |y: &Tensor| match self.batch_first {
            true => permute(device, y, &[1, 2, 0, 3]),
            false => y.clone(),
        };
        let y = time_major(saved.output(0));
        let grad = |output: usize| grads.get(output).and_then(Option::as_ref);
        let grad_y = grad(0).map(time_major);
        let grad_states = [1, 2].map(|output| grad(output).map(|grad| self.turn(cx, grad)));
        let kept_per_direction = saved.extra.len() / s.directions;
        let mut total = Gradients::default();
        for (number, cell) in self.cells.iter().enumerate() {
            let direction = self.direction(cx, &saved.inputs, &x, number);
            let of_y = |y: &Tensor| {
                let all = part(device, y, 1, number, 1);
                all.into_shape(&[s.steps * s.batch, s.hidden])
            };
            let state = |grad: &Option<Tensor>| match grad {
                Some(grad) => part(device, grad, 0, number, 1).into_shape(&[s.batch, s.hidden]),
                None => device.fill(&[s.batch, s.hidden], 0.0),
            };
            let back = Back {
                before: s.shifted(cx, &of_y(&y), &direction.hidden, self.reversed[number]),
                grad_y: grad_y.as_ref().map(of_y),
                grad_hidden: state(&grad_states[0]),
                grad_cell: state(&grad_states[1]),
                kept: saved.extra.drain(..kept_per_direction).collect(),
                wants_x: wanted[input::X],
            };
            match cell {
                Cell::Lstm(lstm) => lstm.backward(cx, s, direction, back, &mut total),
                Cell::Gru(gru) => gru.backward(cx, s, direction, back, &mut total),
                Cell::Rnn(rnn) => rnn.backward(cx, s, direction, back, &mut total),
            }
        }
        let shapes = s.parameter_shapes();
        let joined = |parts: Vec<Tensor>, shape: &[usize]| {
            (!parts.is_empty()).then(|| device.concat(0, &parts).into_shape(shape))
        };
        let states = [s.directions, s.batch, s.hidden];
        let mut result = vec![None; input::COUNT];
        result[input::X] = total
            .x
            .map(|grad| self.turn(cx, &grad.into_shape(&[s.steps, s.batch, s.input])));
        result[input::W] = joined(total.w, &shapes.w);
        result[input::R] = joined(total.r, &shapes.r);
        result[input::B] = joined(total.bias, &shapes.b);
        result[input::P] = joined(total.peepholes, &shapes.p);
        result[input::INITIAL_H] = joined(total.hidden, &states).map(|grad| self.turn(cx, &grad));
        result[input::INITIAL_C] = joined(total.cell, &states).map(|grad| self.turn(cx, &grad));
        result.truncate(wanted.len());
        result
    }
}
