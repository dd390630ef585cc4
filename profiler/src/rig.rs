//! What is measured: one model on one device, ready to train layer by layer or in one piece.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use models::device::Device;
use models::device::params::Binary;
use models::graph::{Graph, Value, ValueId};
use models::init::Init;
use models::loss::Loss;
use models::ops::Context;
use models::optimizer::{Optimizer, OptimizerState};
use models::program::{Program, Stash};
use models::random::Stream;
use models::tensor::{DType, Tensor};

use crate::ProfileError;

/// Small enough that thousands of measuring steps on one random minibatch blow nothing up.
const LEARNING_RATE: f32 = 1e-5;

/// A run of layers with its own weights.
struct Part {
    program: Program,
    weights: Vec<Tensor>,
    states: Vec<Tensor>,
    optimizer_state: OptimizerState,
}

/// Time that one part took for one minibatch.
#[derive(Clone, Copy, Debug, Default)]
pub struct PartTime {
    /// Forward.
    pub forward: Duration,
    /// Backward; for the part that ends in the loss, the loss too.
    pub backward: Duration,
    /// Optimizer step.
    pub step: Duration,
}

impl PartTime {
    /// All three.
    pub fn total(&self) -> Duration {
        self.forward + self.backward + self.step
    }
}

/// Bytes that one part holds.
#[derive(Clone, Copy, Debug, Default)]
pub struct PartSize {
    /// Trainable weights.
    pub parameters: usize,
    /// Optimizer state.
    pub optimizer: usize,
    /// What a forward keeps for its backward.
    pub stash: usize,
    /// The most that a minibatch takes beyond weights, optimizer state, stash and what flows between parts.
    pub workspace: usize,
}

/// A model cut into parts that train together on one random minibatch.
pub struct Rig {
    device: Arc<dyn Device>,
    loss: Loss,
    optimizer: Optimizer,
    parts: Vec<Part>,
    loss_value: ValueId,
    inputs: HashMap<ValueId, Tensor>,
    target: Tensor,
    seed: u64,
}

impl Rig {
    /// Cuts `graph` into the given runs of layers; together they must cover what the loss depends on.
    /// `weights` are on the host, in the order of the graph's parameters.
    pub fn new(
        graph: &Graph,
        parts: &[Vec<usize>],
        weights: &[Tensor],
        device: &Arc<dyn Device>,
        loss: Loss,
        optimizer: Optimizer,
        seed: u64,
    ) -> Result<Self, ProfileError> {
        let loss_value = graph.training_output(loss).value;
        let output = &graph.values()[loss_value].ty;
        if output.dtype != DType::F32 {
            return Err(ProfileError::Output {
                model: graph.path().to_owned(),
                output: graph.values()[loss_value].name.clone(),
                dtype: output.dtype,
            });
        }
        let (dtype, shape) = loss.target(&output.shape)?;
        let stream = Stream::new(seed);
        let inputs = graph
            .inputs()
            .iter()
            .map(|&id| {
                let value = &graph.values()[id];
                let host = random_tensor(&value.name, value.ty.dtype, &value.ty.shape, stream);
                (id, device.upload(&host))
            })
            .collect();
        Ok(Self {
            parts: parts
                .iter()
                .map(|layers| part(graph, layers, weights, loss_value, device))
                .collect(),
            device: device.clone(),
            loss,
            optimizer,
            loss_value,
            inputs,
            target: device.upload(&random_tensor("target", dtype, &shape, stream)),
            seed,
        })
    }

    /// The weights of each part, as numbers of the graph's parameters.
    pub fn weights(&self) -> Vec<Vec<usize>> {
        let weights = self.parts.iter().map(|part| part.program.weights());
        weights.map(<[_]>::to_vec).collect()
    }

    /// Bytes of the model's inputs that each part reads.
    pub fn input_bytes(&self) -> Vec<usize> {
        let parts = self.parts.iter().map(|part| {
            let values = part.program.inputs().iter();
            let inputs = values.filter_map(|value| self.inputs.get(value));
            inputs.map(Tensor::bytes).sum()
        });
        parts.collect()
    }

    /// Trains on the minibatch once and says what each part took.
    ///
    /// Old weights stay alive during the step, as they do under weight stashing, so a step writes a new
    /// version instead of changing the old one.
    pub fn train(&mut self) -> Vec<PartTime> {
        let mut times = vec![PartTime::default(); self.parts.len()];
        let mut stashes = Vec::with_capacity(self.parts.len());
        let mut values = self.inputs.clone();
        let mut readers = self.readers();
        for (part, time) in self.parts.iter_mut().zip(&mut times) {
            let inputs = take_inputs(&part.program, &mut values, &mut readers);
            let cx = context(&self.device, self.seed);
            let start = Instant::now();
            let (outputs, stash) =
                part.program
                    .forward(&cx, inputs, &part.weights, &mut part.states);
            time.forward = start.elapsed();
            stashes.push(stash);
            values.extend(part.program.outputs().iter().copied().zip(outputs));
        }
        let mut gradients = self.loss_gradient(&values, &mut times);
        drop(values);
        for (index, stash) in stashes.into_iter().enumerate().rev() {
            self.backward_and_step(index, stash, &mut gradients, &mut times[index]);
        }
        times
    }

    /// Bytes of each part, by training once with the device's memory watched.
    pub fn sizes(&mut self) -> Vec<PartSize> {
        let mut sizes = Vec::with_capacity(self.parts.len());
        let mut values = self.inputs.clone();
        let mut stashes = Vec::new();
        let mut workspaces = Vec::new();
        for part in &mut self.parts {
            let inputs = part
                .program
                .inputs()
                .iter()
                .map(|value| values[value].clone())
                .collect();
            let cx = context(&self.device, self.seed);
            self.device.reset_peak();
            let (outputs, stash) =
                part.program
                    .forward(&cx, inputs, &part.weights, &mut part.states);
            let memory = self.device.memory();
            workspaces.push(memory.peak_bytes.saturating_sub(memory.live_bytes));
            stashes.push(stash);
            values.extend(part.program.outputs().iter().copied().zip(outputs));
        }
        let mut times = vec![PartTime::default(); self.parts.len()];
        let mut gradients = self.loss_gradient(&values, &mut times);
        drop(values);
        for (index, stash) in stashes.into_iter().enumerate().rev() {
            let stash_bytes = stash.bytes();
            self.device.reset_peak();
            let before = self.device.memory().live_bytes;
            self.backward_and_step(index, stash, &mut gradients, &mut times[index]);
            let part = &self.parts[index];
            let parameters = part.weights.iter().map(Tensor::bytes).sum();
            // A step's new version and its gradients are what the plan counts as versions and buffers.
            let counted = before + 2 * parameters;
            let backward = self.device.memory().peak_bytes.saturating_sub(counted);
            sizes.push(PartSize {
                parameters,
                optimizer: part.optimizer_state.bytes(),
                stash: stash_bytes,
                workspace: backward.max(workspaces[index]),
            });
        }
        sizes.reverse();
        sizes
    }

    /// How many parts have yet to read each value: a value is dropped with its last reader's inputs.
    fn readers(&self) -> HashMap<ValueId, usize> {
        let mut readers = HashMap::new();
        for value in self.parts.iter().flat_map(|part| part.program.inputs()) {
            *readers.entry(*value).or_default() += 1;
        }
        readers
    }

    fn loss_gradient(
        &self,
        values: &HashMap<ValueId, Tensor>,
        times: &mut [PartTime],
    ) -> HashMap<ValueId, Tensor> {
        let start = Instant::now();
        let result =
            self.loss
                .forward_backward(&*self.device, &values[&self.loss_value], &self.target);
        let elapsed = start.elapsed();
        let last = self
            .parts
            .iter()
            .position(|part| part.program.outputs().contains(&self.loss_value));
        if let Some(last) = last {
            times[last].backward += elapsed;
        }
        HashMap::from([(self.loss_value, result.gradient)])
    }

    fn backward_and_step(
        &mut self,
        index: usize,
        stash: Stash,
        gradients: &mut HashMap<ValueId, Tensor>,
        time: &mut PartTime,
    ) {
        let part = &mut self.parts[index];
        let cx = context(&self.device, self.seed);
        let start = Instant::now();
        let flowing = part
            .program
            .outputs()
            .iter()
            .map(|value| gradients.remove(value))
            .collect();
        let result = part.program.backward(&cx, stash, &part.weights, flowing);
        for (&value, gradient) in part.program.inputs().iter().zip(result.inputs) {
            let Some(gradient) = gradient else { continue };
            let sum = match gradients.remove(&value) {
                Some(other) => self.device.binary(Binary::Add, other, gradient),
                None => gradient,
            };
            gradients.insert(value, sum);
        }
        time.backward += start.elapsed();

        let start = Instant::now();
        let stashed_version = part.weights.clone();
        let weights = std::mem::take(&mut part.weights);
        part.weights = self.optimizer.step(
            &*self.device,
            &mut part.optimizer_state,
            weights,
            &result.weights,
            LEARNING_RATE,
        );
        drop(stashed_version);
        time.step = start.elapsed();
    }
}

fn context(device: &Arc<dyn Device>, seed: u64) -> Context<'_> {
    Context {
        device: &**device,
        training: true,
        seed,
        first_sample: 0,
    }
}

/// The weights to measure with, on the host: the file's. A model without weights is measured with random
/// ones, since zeros would flatter some processors.
pub fn weights(graph: &Graph, seed: u64) -> Vec<Tensor> {
    let weights = graph.parameters().iter().map(|parameter| {
        let init = if parameter.constant_fill {
            Init::He
        } else {
            Init::Keep
        };
        init.parameter(&parameter.name, &parameter.tensor, parameter.fan, seed)
    });
    weights.collect()
}

fn part(
    graph: &Graph,
    layers: &[usize],
    weights: &[Tensor],
    loss_value: ValueId,
    device: &Arc<dyn Device>,
) -> Part {
    let program = graph.program(layers, &[loss_value]);
    let own = program.weights().iter();
    Part {
        weights: own.map(|&id| device.upload(&weights[id])).collect(),
        states: program
            .states()
            .iter()
            .map(|&id| device.upload(&graph.states()[id].tensor))
            .collect(),
        optimizer_state: OptimizerState::default(),
        program,
    }
}

fn take_inputs(
    program: &Program,
    values: &mut HashMap<ValueId, Tensor>,
    readers: &mut HashMap<ValueId, usize>,
) -> Vec<Tensor> {
    let take = |value: &ValueId| {
        let left = readers.get_mut(value).map_or(0, |count| {
            *count -= 1;
            *count
        });
        // Data inputs are fed again next time; they are owned by the rig anyway.
        if left == 0 {
            values.remove(value)
        } else {
            values.get(value).cloned()
        }
    };
    program.inputs().iter().filter_map(take).collect()
}

fn random_tensor(name: &str, dtype: DType, shape: &[usize], stream: Stream) -> Tensor {
    let stream = stream.named(name);
    let count = shape.iter().product::<usize>();
    match dtype {
        DType::F32 => Tensor::from_f32(
            shape,
            (0..count as u64)
                .map(|i| stream.normal(i))
                .collect::<Vec<f32>>(),
        ),
        // Class 0 and token 0 exist in every model.
        DType::I64 | DType::I32 => Tensor::from_i64(shape, vec![Value::stand_in(name); count]),
        DType::Bool => Tensor::from_bool(shape, vec![true; count]),
    }
}
