//! Programs: a run of nodes that steps forward and backward with the weights it is given.
//!
//! A program keeps no state. Weights are an argument, so a weight version is whatever slice of tensors
//! the caller passes; what a forward keeps for its backward is the [`Stash`] it returns. Values are
//! dropped at their last use, so an operator that finds itself the only owner of an argument may write
//! into it.

mod build;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::device::Device;
use crate::device::params::Binary;
use crate::ops::{Context, Operator, Saved};
use crate::tensor::Tensor;
use build::Builder;

/// Position of a value in its graph.
pub type ValueId = usize;
/// Position of a node in its graph.
pub type NodeId = usize;
/// Position of a trainable parameter in its graph.
pub type ParameterId = usize;
/// Position of a running statistic in its graph.
pub type StateId = usize;

/// An operator and the values it connects.
#[derive(Clone, Debug)]
pub struct Node {
    /// Name in the file or a synthetic one.
    pub name: String,
    /// What it does.
    pub op: Arc<dyn Operator>,
    /// Values it reads; `None`: an optional input is omitted.
    pub inputs: Vec<Option<ValueId>>,
    /// Values it writes; `None`, or missing at the end: nobody has a name for it.
    pub outputs: Vec<Option<ValueId>>,
}

/// A whole graph as a program sees it.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// All nodes, each after those it reads from.
    pub nodes: &'a [Node],
    /// Value of each trainable parameter.
    pub parameters: &'a [ValueId],
    /// Value of each running statistic.
    pub states: &'a [ValueId],
    /// Values that never change.
    pub constants: &'a BTreeMap<ValueId, Tensor>,
    /// What is fed to the graph; no gradient is computed for these.
    pub inputs: &'a [ValueId],
}

/// A node's argument, resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Argument {
    Omitted,
    /// Slot of a value; `last`: nobody reads it afterwards.
    Slot {
        slot: usize,
        last: bool,
    },
    /// Position in the program's weights.
    Weight(usize),
    /// Position in the program's states.
    State(usize),
    /// Position in the program's constants.
    Constant(usize),
}

#[derive(Debug)]
struct Step {
    op: Arc<dyn Operator>,
    arguments: Vec<Argument>,
    /// Slot of each output; `None`: it is dropped.
    results: Vec<Option<usize>>,
    /// (output, position in the program's states)
    updates: Vec<(usize, usize)>,
    /// Which inputs need a gradient; all false: the node is left out of the backward.
    wanted: Vec<bool>,
    save_inputs: Vec<usize>,
    save_outputs: Vec<usize>,
    /// Weights that no earlier node reads: their gradients are whole after this node's backward.
    finishes: Vec<usize>,
}

impl Step {
    /// Takes the gradients of its results out of `flowing`, and adds those of its arguments to `flowing` and `weight_grads`.
    fn backward(
        &self,
        cx: &Context<'_>,
        mut saved: Saved,
        weights: &[Tensor],
        flowing: &mut [Option<Tensor>],
        weight_grads: &mut [Option<Tensor>],
    ) {
        let mut grads: Vec<Option<Tensor>> = self
            .results
            .iter()
            .map(|slot| slot.and_then(|slot| flowing[slot].take()))
            .collect();
        grads.resize(self.op.outputs().len(), None);
        if !self.wanted.contains(&true) || grads.iter().all(Option::is_none) {
            return;
        }
        for &position in &self.save_inputs {
            if let Some(Argument::Weight(weight)) = self.arguments.get(position) {
                saved.inputs[position] = Some(weights[*weight].clone());
            }
        }
        let input_grads = self.op.backward(cx, saved, grads, &self.wanted);
        for ((&argument, grad), &wanted) in self.arguments.iter().zip(input_grads).zip(&self.wanted)
        {
            let Some(grad) = grad.filter(|_| wanted) else {
                continue;
            };
            match argument {
                Argument::Slot { slot, .. } => accumulate(cx.device, &mut flowing[slot], grad),
                Argument::Weight(weight) => {
                    accumulate(cx.device, &mut weight_grads[weight], grad);
                }
                Argument::Omitted | Argument::State(_) | Argument::Constant(_) => {}
            }
        }
    }
}

/// A run of nodes made ready to step.
#[derive(Debug)]
pub struct Program {
    steps: Vec<Step>,
    slots: usize,
    inputs: Vec<ValueId>,
    /// Slot of each input.
    input_slots: Vec<usize>,
    input_wanted: Vec<bool>,
    outputs: Vec<ValueId>,
    output_slots: Vec<usize>,
    weights: Vec<ParameterId>,
    states: Vec<StateId>,
    constants: Vec<Tensor>,
}

/// What a forward keeps for its backward.
#[derive(Debug, Default)]
pub struct Stash {
    /// One per node that has a backward; weights are not in it.
    saved: Vec<Saved>,
    bytes: usize,
}

impl Stash {
    /// Bytes of the distinct buffers it holds. Weights, running statistics and constants are not counted:
    /// they are alive anyway.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// What a backward gives.
#[derive(Debug)]
pub struct Gradients {
    /// One per program input; `None` for inputs of the graph, integers, and what nothing flows back to.
    pub inputs: Vec<Option<Tensor>>,
    /// One per weight, in the order of [`Program::weights`].
    pub weights: Vec<Tensor>,
}

impl Program {
    /// A program of `nodes` (ascending). `targets` are the values that are wanted of the whole graph: its
    /// outputs, or in training the value the loss reads. Nodes that no target depends on are left out.
    pub fn new(source: &Source<'_>, nodes: &[NodeId], targets: &[ValueId]) -> Self {
        let mut program = Builder::new(source, targets).build(nodes);
        program.find_finishes();
        program
    }

    fn find_finishes(&mut self) {
        let mut seen = vec![false; self.weights.len()];
        for step in &mut self.steps {
            for argument in &step.arguments {
                if let Argument::Weight(weight) = *argument
                    && !std::mem::replace(&mut seen[weight], true)
                {
                    step.finishes.push(weight);
                }
            }
        }
    }

    /// Values to be passed to [`Self::forward`]: made by earlier nodes or fed to the graph.
    pub fn inputs(&self) -> &[ValueId] {
        &self.inputs
    }

    /// Values that [`Self::forward`] gives: targets, and what nodes outside read.
    pub fn outputs(&self) -> &[ValueId] {
        &self.outputs
    }

    /// Parameters whose tensors are to be passed as `weights`.
    pub fn weights(&self) -> &[ParameterId] {
        &self.weights
    }

    /// Running statistics whose tensors are to be passed as `states`.
    pub fn states(&self) -> &[StateId] {
        &self.states
    }

    /// Which inputs get a gradient in [`Gradients::inputs`]. The upstream stage may rely on it.
    pub fn input_gradients(&self) -> &[bool] {
        &self.input_wanted
    }

    /// Runs forward in training: values of [`Self::outputs`] and what the backward needs. Replaces
    /// running statistics.
    pub fn forward(
        &self,
        cx: &Context<'_>,
        inputs: Vec<Tensor>,
        weights: &[Tensor],
        states: &mut [Tensor],
    ) -> (Vec<Tensor>, Stash) {
        let mut stash = Stash::default();
        let mut updates = Vec::new();
        let outputs = self.run(cx, inputs, weights, states, Some(&mut stash), &mut updates);
        for (state, value) in updates {
            states[state] = value;
        }
        stash.bytes = self.stash_bytes(&stash, states);
        (outputs, stash)
    }

    /// Runs forward and keeps nothing; the context says whether in the form of training or of inference.
    pub fn evaluate(
        &self,
        cx: &Context<'_>,
        inputs: Vec<Tensor>,
        weights: &[Tensor],
        states: &[Tensor],
    ) -> Vec<Tensor> {
        self.run(cx, inputs, weights, states, None, &mut Vec::new())
    }

    fn run(
        &self,
        cx: &Context<'_>,
        inputs: Vec<Tensor>,
        weights: &[Tensor],
        states: &[Tensor],
        mut stash: Option<&mut Stash>,
        updates: &mut Vec<(usize, Tensor)>,
    ) -> Vec<Tensor> {
        assert_eq!(inputs.len(), self.inputs.len(), "inputs of the program");
        assert_eq!(weights.len(), self.weights.len(), "weights of the program");
        assert_eq!(states.len(), self.states.len(), "states of the program");
        let mut values: Vec<Option<Tensor>> = vec![None; self.slots];
        for (&slot, input) in self.input_slots.iter().zip(inputs) {
            values[slot] = Some(input);
        }
        for step in &self.steps {
            let mut saved = Saved::default();
            let mut arguments = Vec::with_capacity(step.arguments.len());
            for (position, &argument) in step.arguments.iter().enumerate() {
                let value = match argument {
                    Argument::Omitted => None,
                    Argument::Slot { slot, last: true } => values[slot].take(),
                    Argument::Slot { slot, last: false } => values[slot].clone(),
                    Argument::Weight(weight) => Some(weights[weight].clone()),
                    Argument::State(state) => Some(states[state].clone()),
                    Argument::Constant(constant) => Some(self.constants[constant].clone()),
                };
                if stash.is_some() {
                    let keep = step.save_inputs.contains(&position)
                        && !matches!(argument, Argument::Weight(_));
                    saved.inputs.push(if keep { value.clone() } else { None });
                }
                arguments.push(value);
            }
            let forward = step.op.forward(cx, arguments);
            if stash.is_some() {
                for &(output, state) in &step.updates {
                    let blended = forward.outputs[output].clone();
                    let kept = step.op.kept_state(cx, output, blended, &states[state]);
                    updates.push((state, kept));
                }
                saved.outputs = (0..forward.outputs.len())
                    .map(|o| {
                        step.save_outputs
                            .contains(&o)
                            .then(|| forward.outputs[o].clone())
                    })
                    .collect();
            }
            for (&slot, value) in step.results.iter().zip(forward.outputs) {
                if let Some(slot) = slot {
                    values[slot] = Some(value);
                }
            }
            if let Some(stash) = stash.as_deref_mut() {
                if step.wanted.contains(&true) {
                    saved.extra = forward.extra;
                } else {
                    saved = Saved::default();
                }
                stash.saved.push(saved);
            }
        }
        self.output_slots
            .iter()
            .map(|&slot| values[slot].clone().expect("an output that a node wrote"))
            .collect()
    }

    /// Runs backward: consumes the stash, frees each part of it as soon as it has been read.
    ///
    /// `weights` are those that the forward used; `grads` has one entry per output (`None`: nothing flows
    /// back through it).
    pub fn backward(
        &self,
        cx: &Context<'_>,
        stash: Stash,
        weights: &[Tensor],
        grads: Vec<Option<Tensor>>,
    ) -> Gradients {
        let mut finished = vec![None; self.weights.len()];
        let inputs = self.backward_each(cx, stash, weights, grads, &mut |weight, grad| {
            finished[weight] = Some(grad);
        });
        Gradients {
            inputs,
            weights: finished.into_iter().flatten().collect(),
        }
    }

    /// As [`Self::backward`], handing out each weight's gradient as soon as it is whole, in the order of
    /// [`Self::backward_order`]. Gives the gradients of the inputs.
    pub fn backward_each(
        &self,
        cx: &Context<'_>,
        stash: Stash,
        weights: &[Tensor],
        grads: Vec<Option<Tensor>>,
        finished: &mut dyn FnMut(usize, Tensor),
    ) -> Vec<Option<Tensor>> {
        assert_eq!(grads.len(), self.outputs.len(), "outputs of the program");
        let mut flowing: Vec<Option<Tensor>> = vec![None; self.slots];
        let mut weight_grads: Vec<Option<Tensor>> = vec![None; self.weights.len()];
        for (&slot, grad) in self.output_slots.iter().zip(grads) {
            if let Some(grad) = grad {
                accumulate(cx.device, &mut flowing[slot], grad);
            }
        }
        for (step, saved) in self.steps.iter().zip(stash.saved).rev() {
            step.backward(cx, saved, weights, &mut flowing, &mut weight_grads);
            for &weight in &step.finishes {
                let grad = weight_grads[weight].take();
                let grad = grad.unwrap_or_else(|| cx.device.fill(weights[weight].shape(), 0.0));
                finished(weight, grad);
            }
        }
        self.input_slots
            .iter()
            .zip(&self.input_wanted)
            .map(|(&slot, &wanted)| flowing[slot].take().filter(|_| wanted))
            .collect()
    }

    /// All weights in the order in which a backward finishes their gradients.
    pub fn backward_order(&self) -> impl Iterator<Item = usize> {
        self.steps
            .iter()
            .rev()
            .flat_map(|s| s.finishes.iter().copied())
    }

    fn stash_bytes(&self, stash: &Stash, states: &[Tensor]) -> usize {
        let mut seen: BTreeSet<usize> = self
            .constants
            .iter()
            .chain(states)
            .map(Tensor::buffer_id)
            .collect();
        let tensors = stash.saved.iter().flat_map(|saved| {
            let positional = saved.inputs.iter().chain(&saved.outputs);
            positional.flatten().chain(&saved.extra)
        });
        tensors
            .filter(|tensor| seen.insert(tensor.buffer_id()))
            .map(Tensor::bytes)
            .sum()
    }
}

/// `sum <- sum + grad`, in place where memory allows.
fn accumulate(device: &dyn Device, sum: &mut Option<Tensor>, grad: Tensor) {
    *sum = Some(match sum.take() {
        Some(before) => device.binary(Binary::Add, before, grad),
        None => grad,
    });
}
