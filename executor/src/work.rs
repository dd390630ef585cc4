//! What a stage computes: layers of a model, or waits as long as theirs.

use models::ops::Context;
use models::program::{Gradients, ParameterId, Program, Stash, StateId, ValueId};
use models::tensor::Tensor;

use crate::emulation::Emulated;

/// The work of one stage, in the terms of [`Program`].
#[derive(Debug)]
pub enum Work {
    /// Layers of a model.
    Layers(Program),
    /// Tensors as large as theirs, made of zeros; the time they take passes elsewhere ([`crate::worker`]).
    Emulated(Emulated),
}

/// What a forward keeps for its backward.
#[derive(Debug)]
pub enum Kept {
    /// Of layers.
    Layers(Stash),
    /// Nothing.
    Emulated,
}

impl Work {
    /// Values that other stages or the data give.
    pub fn inputs(&self) -> &[ValueId] {
        match self {
            Work::Layers(program) => program.inputs(),
            Work::Emulated(emulated) => &emulated.inputs,
        }
    }

    /// Values that [`Self::forward`] gives.
    pub fn outputs(&self) -> &[ValueId] {
        match self {
            Work::Layers(program) => program.outputs(),
            Work::Emulated(emulated) => &emulated.outputs,
        }
    }

    /// Parameters whose tensors are to be passed as `weights`.
    pub fn weights(&self) -> &[ParameterId] {
        match self {
            Work::Layers(program) => program.weights(),
            Work::Emulated(emulated) => &emulated.weights,
        }
    }

    /// Running statistics whose tensors are to be passed as `states`.
    pub fn states(&self) -> &[StateId] {
        match self {
            Work::Layers(program) => program.states(),
            Work::Emulated(_) => &[],
        }
    }

    /// Which inputs get a gradient.
    pub fn input_gradients(&self) -> &[bool] {
        match self {
            Work::Layers(program) => program.input_gradients(),
            Work::Emulated(emulated) => &emulated.wanted,
        }
    }

    /// As [`Program::forward`].
    pub fn forward(
        &self,
        context: &Context<'_>,
        inputs: Vec<Tensor>,
        weights: &[Tensor],
        states: &mut [Tensor],
    ) -> (Vec<Tensor>, Kept) {
        match self {
            Work::Layers(program) => {
                let (outputs, stash) = program.forward(context, inputs, weights, states);
                (outputs, Kept::Layers(stash))
            }
            Work::Emulated(emulated) => (emulated.made.clone(), Kept::Emulated),
        }
    }

    /// As [`Program::evaluate`].
    pub fn evaluate(
        &self,
        context: &Context<'_>,
        inputs: Vec<Tensor>,
        weights: &[Tensor],
        states: &[Tensor],
    ) -> Vec<Tensor> {
        match self {
            Work::Layers(program) => program.evaluate(context, inputs, weights, states),
            Work::Emulated(emulated) => emulated.made.clone(),
        }
    }

    /// As [`Program::backward_each`].
    pub fn backward_each(
        &self,
        context: &Context<'_>,
        kept: Kept,
        weights: &[Tensor],
        gradients: Vec<Option<Tensor>>,
        finished: &mut dyn FnMut(usize, Tensor),
    ) -> Vec<Option<Tensor>> {
        match (self, kept) {
            (Work::Layers(program), Kept::Layers(stash)) => {
                program.backward_each(context, stash, weights, gradients, finished)
            }
            (Work::Emulated(emulated), _) => {
                for weight in self.backward_order() {
                    finished(weight, emulated.gradients[weight].clone());
                }
                emulated.returned.clone()
            }
            (Work::Layers(_), Kept::Emulated) => {
                unreachable!("a stage's forward keeps what its backward reads")
            }
        }
    }

    /// As [`Program::backward`].
    pub fn backward(
        &self,
        context: &Context<'_>,
        kept: Kept,
        weights: &[Tensor],
        gradients: Vec<Option<Tensor>>,
    ) -> Gradients {
        let mut finished = vec![None; self.weights().len()];
        let inputs = self.backward_each(context, kept, weights, gradients, &mut |weight, grad| {
            finished[weight] = Some(grad);
        });
        Gradients {
            inputs,
            weights: finished.into_iter().flatten().collect(),
        }
    }

    /// As [`Program::backward_order`].
    pub fn backward_order(&self) -> Box<dyn Iterator<Item = usize> + '_> {
        match self {
            Work::Layers(program) => Box::new(program.backward_order()),
            Work::Emulated(emulated) => Box::new((0..emulated.weights.len()).rev()),
        }
    }
}
