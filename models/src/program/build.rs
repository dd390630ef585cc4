//! From nodes of a graph to a program: what flows in and out, and who reads a value last.

use std::collections::{BTreeMap, BTreeSet};

use super::{Argument, NodeId, ParameterId, Program, Source, StateId, Step, ValueId};
use crate::tensor::DType;

/// What is known of the whole graph while a program is made.
pub(super) struct Builder<'a> {
    source: &'a Source<'a>,
    targets: BTreeSet<ValueId>,
    parameters: BTreeMap<ValueId, ParameterId>,
    states: BTreeMap<ValueId, StateId>,
    /// Nodes that a target depends on.
    needed: Vec<bool>,
    /// Values that a gradient flows through: those that depend on a parameter.
    differentiable: BTreeSet<ValueId>,
}

impl<'a> Builder<'a> {
    pub(super) fn new(source: &'a Source<'a>, targets: &[ValueId]) -> Self {
        let index = |values: &[ValueId]| values.iter().enumerate().map(|(i, &v)| (v, i)).collect();
        let parameters: BTreeMap<ValueId, ParameterId> = index(source.parameters);
        let mut wanted: BTreeSet<ValueId> = targets.iter().copied().collect();
        let mut needed = vec![false; source.nodes.len()];
        for (node, needed) in source.nodes.iter().zip(&mut needed).rev() {
            *needed = node.outputs.iter().flatten().any(|v| wanted.contains(v));
            if *needed {
                wanted.extend(node.inputs.iter().flatten());
            }
        }
        let mut differentiable: BTreeSet<ValueId> = parameters.keys().copied().collect();
        for node in source.nodes {
            if node
                .inputs
                .iter()
                .flatten()
                .any(|v| differentiable.contains(v))
            {
                for (output, value) in node.op.outputs().iter().zip(&node.outputs) {
                    if let (DType::F32, Some(value)) = (output.dtype, value) {
                        differentiable.insert(*value);
                    }
                }
            }
        }
        Builder {
            source,
            targets: targets.iter().copied().collect(),
            parameters,
            states: index(source.states),
            needed,
            differentiable,
        }
    }

    pub(super) fn build(&self, nodes: &[NodeId]) -> Program {
        let inside: BTreeSet<NodeId> = nodes.iter().copied().filter(|&n| self.needed[n]).collect();
        let mut program = Program {
            steps: Vec::with_capacity(inside.len()),
            slots: 0,
            inputs: Vec::new(),
            input_slots: Vec::new(),
            input_wanted: Vec::new(),
            outputs: Vec::new(),
            output_slots: Vec::new(),
            weights: Vec::new(),
            states: Vec::new(),
            constants: Vec::new(),
        };
        let mut slots: BTreeMap<ValueId, usize> = BTreeMap::new();
        let mut made: Vec<ValueId> = Vec::new();
        for &id in &inside {
            let node = &self.source.nodes[id];
            let mut arguments = Vec::with_capacity(node.inputs.len());
            for &input in &node.inputs {
                arguments.push(match input {
                    None => Argument::Omitted,
                    Some(value) => self.argument(&mut program, &mut slots, value),
                });
            }
            let mut results = Vec::with_capacity(node.outputs.len());
            for &output in &node.outputs {
                results.push(output.map(|value| {
                    made.push(value);
                    new_slot(&mut program, &mut slots, value)
                }));
            }
            let updates = node
                .op
                .state_updates()
                .iter()
                .filter_map(|&(output, input)| match arguments.get(input) {
                    Some(&Argument::State(state)) => Some((output, state)),
                    _ => None,
                })
                .collect();
            let wanted: Vec<bool> = node
                .inputs
                .iter()
                .map(|input| input.is_some_and(|value| self.differentiable.contains(&value)))
                .collect();
            let saves = if wanted.contains(&true) {
                node.op.saves()
            } else {
                Default::default()
            };
            program.steps.push(Step {
                op: node.op.clone(),
                arguments,
                results,
                updates,
                wanted,
                save_inputs: saves.inputs,
                save_outputs: saves.outputs,
                finishes: Vec::new(),
            });
        }
        let read_outside: BTreeSet<ValueId> = (0..self.source.nodes.len())
            .filter(|id| self.needed[*id] && !inside.contains(id))
            .flat_map(|id| self.source.nodes[id].inputs.iter().flatten().copied())
            .collect();
        for value in made {
            if self.targets.contains(&value) || read_outside.contains(&value) {
                program.outputs.push(value);
                program.output_slots.push(slots[&value]);
            }
        }
        mark_last_uses(&mut program);
        program
    }

    fn argument(
        &self,
        program: &mut Program,
        slots: &mut BTreeMap<ValueId, usize>,
        value: ValueId,
    ) -> Argument {
        if let Some(&parameter) = self.parameters.get(&value) {
            return Argument::Weight(position(&mut program.weights, parameter));
        }
        if let Some(&state) = self.states.get(&value) {
            return Argument::State(position(&mut program.states, state));
        }
        if let Some(constant) = self.source.constants.get(&value) {
            let known = program
                .constants
                .iter()
                .position(|c| c.same_buffer(constant) && c.shape() == constant.shape());
            return Argument::Constant(known.unwrap_or_else(|| {
                program.constants.push(constant.clone());
                program.constants.len() - 1
            }));
        }
        let slot = slots.get(&value).copied().unwrap_or_else(|| {
            let slot = new_slot(program, slots, value);
            program.inputs.push(value);
            program.input_slots.push(slot);
            let fed = self.source.inputs.contains(&value);
            program
                .input_wanted
                .push(!fed && self.differentiable.contains(&value));
            slot
        });
        Argument::Slot { slot, last: false }
    }
}

fn new_slot(program: &mut Program, slots: &mut BTreeMap<ValueId, usize>, value: ValueId) -> usize {
    let slot = program.slots;
    program.slots += 1;
    slots.insert(value, slot);
    slot
}

/// Position of `item`, appended if it is new.
fn position(items: &mut Vec<usize>, item: usize) -> usize {
    items.iter().position(|&i| i == item).unwrap_or_else(|| {
        items.push(item);
        items.len() - 1
    })
}

/// Finds the last reader of each slot that does not leave the program, and drops results that nobody reads.
fn mark_last_uses(program: &mut Program) {
    let mut read: BTreeSet<usize> = program.output_slots.iter().copied().collect();
    for step in program.steps.iter_mut().rev() {
        for result in &mut step.results {
            *result = result.filter(|slot| read.contains(slot));
        }
        for argument in step.arguments.iter_mut().rev() {
            if let Argument::Slot { slot, last } = argument {
                *last = read.insert(*slot);
            }
        }
    }
}
