//! Training: the operations of a schedule, one after the other.

use std::collections::HashMap;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use models::device::Device;
use models::device::params::{Binary, Unary};
use models::ops::Context;
use models::optimizer::clip_norm;
use models::tensor::Tensor;
use planner::schedule::{Op, Pace, Schedule};

use super::buckets::{Buckets, Filling};
use super::{Event, Worker, WorkerError};
use crate::data::loader::Delivery;
use crate::learning_rate::LearningRate;
use crate::stage::Stage;
use crate::transport::{Direction, Group, Message, Tag};
use crate::work::Kept;

/// A minibatch between its first and its last operation on this worker.
#[derive(Default)]
struct InFlight {
    /// By position among the program's inputs, until the forward.
    inputs: Vec<Option<Tensor>>,
    /// By position among the program's outputs, from the forward until the last is sent.
    outputs: Vec<Option<Tensor>>,
    /// Links that have not sent their activations yet.
    unsent: usize,
    /// Links that have not sent their gradients yet.
    unreturned: usize,
    /// From forward to backward, where the stage does not recompute.
    stash: Option<Kept>,
    /// The program's inputs, from forward to backward, where it does.
    kept: Vec<Tensor>,
    /// Gradients of the outputs, until the backward.
    gradients: Vec<Option<Tensor>>,
    /// Gradients of the inputs, from the backward until they are sent.
    input_gradients: Vec<Option<Tensor>>,
}

/// What a worker keeps while it carries out a schedule.
struct Segment {
    /// Minibatches of the schedule.
    minibatches: usize,
    /// How the stage's gradients are reduced.
    buckets: Buckets,
    in_flight: HashMap<usize, InFlight>,
    /// Sums of the gradients of the weights, by round, from the first backward to the step, or to the last backward
    /// where the stage has replicas.
    gradients: HashMap<usize, Vec<Tensor>>,
    /// By round, the number of the first bucket's all-reduce among those under way; the others follow.
    reducing: HashMap<usize, u64>,
    /// Backwards that this worker has run, by round, where the stage has replicas and more are to come.
    done: HashMap<usize, usize>,
    /// First of this worker's minibatches that the run was stopped before.
    stopped: Option<usize>,
}

impl Segment {
    fn new(minibatches: usize, buckets: Buckets) -> Self {
        Segment {
            minibatches,
            buckets,
            in_flight: HashMap::new(),
            gradients: HashMap::new(),
            reducing: HashMap::new(),
            done: HashMap::new(),
            stopped: None,
        }
    }

    /// Minibatches of a round, of which the last may be partial.
    fn in_round(&self, round: usize, pace: Pace, stage: &Stage) -> usize {
        let length = pace.round_length(&stage.shape);
        length.min(self.minibatches - round * length)
    }

    fn is_stopped(&self, minibatch: usize) -> bool {
        self.stopped.is_some_and(|first| minibatch >= first)
    }

    /// A run is stopped between whole rounds of every stage.
    fn is_round_stopped(&self, round: usize, pace: Pace, stage: &Stage) -> bool {
        let first = self.stopped.map(|first| pace.round_of(&stage.shape, first));
        first.is_some_and(|first| round >= first)
    }

    /// Counts a backward: whether it is the last of the worker's in a round of so many minibatches. Never in a stage
    /// without replicas, which has nothing to reduce.
    fn is_last(&mut self, round: usize, minibatches: usize, group: &Group, replica: usize) -> bool {
        if group.replicas == 1 {
            return false;
        }
        let own = (replica..minibatches).step_by(group.replicas).count();
        let done = self.done.entry(round).or_default();
        *done += 1;
        let is_last = *done == own;
        if is_last {
            self.done.remove(&round);
        }
        is_last
    }

    fn take_activations(&mut self, stage: &Stage, from: usize, minibatch: usize, message: Message) {
        match message {
            Message::Tensors(tensors) => {
                let slot = self.in_flight.entry(minibatch).or_default();
                slot.inputs.resize(stage.program.inputs().len(), None);
                for (&position, tensor) in stage.link_from(from).positions.iter().zip(tensors) {
                    slot.inputs[position] = tensor;
                }
            }
            Message::Stopped => self.stopped = self.stopped.or(Some(minibatch)),
        }
    }

    fn give_activations(&mut self, stage: &Stage, to: usize, minibatch: usize) -> Message {
        let Some(slot) = self.in_flight.get_mut(&minibatch) else {
            // The forward was passed over.
            return Message::Stopped;
        };
        let positions = stage.link_to(to).positions.iter();
        let tensors = positions.map(|&p| slot.outputs[p].clone()).collect();
        slot.unsent -= 1;
        if slot.unsent == 0 {
            slot.outputs.clear();
        }
        Message::Tensors(tensors)
    }

    fn give_gradients(&mut self, stage: &Stage, to: usize, minibatch: usize) -> Message {
        let slot = self
            .in_flight
            .get_mut(&minibatch)
            .expect("a checked schedule sends gradients after their backward");
        let positions = stage.link_from(to).positions.iter();
        let tensors = positions.map(|&p| slot.input_gradients[p].take()).collect();
        slot.unreturned -= 1;
        if slot.unreturned == 0 {
            self.in_flight.remove(&minibatch);
        }
        Message::Tensors(tensors)
    }
}

impl Worker {
    /// Carries out this worker's operations of `schedule`.
    ///
    /// When the run is stopped, minibatches that nobody has begun are passed over: a mark goes
    /// downstream in place of their activations, so every worker ends after the same minibatch.
    pub(super) fn train(
        &mut self,
        schedule: &Schedule,
        feed: &Receiver<Delivery>,
        first_minibatch: u64,
        rate: LearningRate,
        steps_before: usize,
    ) -> Result<(), WorkerError> {
        let stages = self.stages.clone();
        let stage = &stages[self.stage];
        let operations = &schedule.operations[self.id];
        self.versions.begin(operations);
        let pace = self.settings.pace;
        let length = pace.round_length(&stage.shape);
        let limit = self.settings.bucket_bytes;
        let buckets = Buckets::new(&stage.program, self.versions.newest(), limit);
        let mut segment = Segment::new(schedule.minibatches, buckets);
        let begin = Instant::now();
        let idle = self.idle();
        for operation in operations {
            match *operation {
                Op::ReceiveActivations {
                    minibatch,
                    stage: from,
                    peer,
                } => {
                    let tag = tag(first_minibatch, minibatch, Direction::Forward);
                    let message = self.transport.receive(peer, tag)?;
                    segment.take_activations(stage, from, minibatch, message);
                }
                Op::SendActivations {
                    minibatch,
                    stage: to,
                    peer,
                } => {
                    let tag = tag(first_minibatch, minibatch, Direction::Forward);
                    let message = segment.give_activations(stage, to, minibatch);
                    self.transport.send(peer, tag, message);
                }
                Op::Forward { minibatch, version } if !segment.is_stopped(minibatch) => {
                    self.forward(
                        &mut segment,
                        stage,
                        feed,
                        first_minibatch,
                        minibatch,
                        version,
                    )?;
                }
                Op::ReceiveGradients {
                    minibatch,
                    stage: from,
                    peer,
                } if !segment.is_stopped(minibatch) => {
                    let tag = tag(first_minibatch, minibatch, Direction::Backward);
                    let message = self.transport.receive(peer, tag)?;
                    self.take_gradients(&mut segment, stage, from, minibatch, message);
                }
                Op::Backward { minibatch, version } if !segment.is_stopped(minibatch) => {
                    self.backward(&mut segment, stage, first_minibatch, minibatch, version);
                }
                Op::SendGradients {
                    minibatch,
                    stage: to,
                    peer,
                } if !segment.is_stopped(minibatch) => {
                    let tag = tag(first_minibatch, minibatch, Direction::Backward);
                    let message = segment.give_gradients(stage, to, minibatch);
                    self.transport.send(peer, tag, message);
                }
                // The backward of this worker's last minibatch has begun it, if the round has one.
                Op::AllReduce { round }
                    if !segment.is_round_stopped(round, pace, stage)
                        && !segment.reducing.contains_key(&round) =>
                {
                    let first = self.next_rounds(segment.buckets.count());
                    segment.reducing.insert(round, first);
                    for number in numbers(first, &segment.buckets) {
                        self.transport.all_reduce_begin(&self.group(), number, None);
                    }
                }
                Op::Step { round, .. } if !segment.is_round_stopped(round, pace, stage) => {
                    let gradients = match segment.reducing.remove(&round) {
                        Some(first) => self.reduced(&segment.buckets, first)?,
                        // A stage without replicas has its gradients at once.
                        None => {
                            let sums = segment.gradients.remove(&round).unwrap_or_default();
                            let share = 1.0 / segment.in_round(round, pace, stage) as f32;
                            let means = sums.into_iter().map(|s| scaled(&*self.device, s, share));
                            means.collect()
                        }
                    };
                    self.step(gradients, rate.at(steps_before + round * length));
                }
                // Passed over: the run was stopped before this minibatch.
                _ => {}
            }
            self.show_busy(begin.elapsed().saturating_sub(self.idle() - idle));
        }
        Ok(())
    }

    fn forward(
        &mut self,
        segment: &mut Segment,
        stage: &Stage,
        feed: &Receiver<Delivery>,
        first_minibatch: u64,
        minibatch: usize,
        version: usize,
    ) -> Result<(), WorkerError> {
        let number = first_minibatch + minibatch as u64;
        let slot = segment.in_flight.entry(minibatch).or_default();
        slot.inputs.resize(stage.program.inputs().len(), None);
        let mut target = None;
        if !stage.graph_inputs.is_empty() || stage.loss_output.is_some() {
            let Some(delivery) = self.next_delivery(feed) else {
                segment.in_flight.remove(&minibatch);
                segment.stopped = Some(minibatch);
                return Ok(());
            };
            debug_assert_eq!(delivery.minibatch, minibatch);
            if let Some(inputs) = delivery.inputs {
                for &(position, input) in &stage.graph_inputs {
                    slot.inputs[position] = Some(self.device.upload(&inputs[input]));
                }
            }
            target = delivery.target.map(|t| self.device.upload(&t));
        }
        let inputs = std::mem::take(&mut slot.inputs).into_iter().flatten();
        let inputs: Vec<Tensor> = inputs.collect();
        if stage.recompute {
            slot.kept.clone_from(&inputs);
        }
        let context = Context {
            device: &*self.device,
            training: true,
            seed: self.settings.seed,
            first_sample: number * self.settings.batch_size as u64,
        };
        let (outputs, stash) = stage.program.forward(
            &context,
            inputs,
            self.versions.get(version),
            &mut self.states,
        );
        self.pacer.forward(self.transport.traffic().waited);
        self.versions.release(version);
        slot.gradients = vec![None; outputs.len()];
        if let (Some(position), Some(target)) = (stage.loss_output, target) {
            let result =
                self.settings
                    .loss
                    .forward_backward(&*self.device, &outputs[position], &target);
            if !result.loss.is_finite() {
                return Err(WorkerError::Diverged {
                    loss: result.loss,
                    minibatch: number,
                });
            }
            slot.gradients[position] = Some(result.gradient);
            self.report(Event::Loss {
                minibatch,
                loss: result.loss,
                correct: result.correct,
                targets: result.targets,
                at: Instant::now(),
            });
        }
        slot.stash = (!stage.recompute).then_some(stash);
        slot.unsent = stage.outgoing.len();
        if slot.unsent > 0 {
            slot.outputs = outputs.into_iter().map(Some).collect();
        }
        Ok(())
    }

    fn take_gradients(
        &self,
        segment: &mut Segment,
        stage: &Stage,
        from: usize,
        minibatch: usize,
        message: Message,
    ) {
        let (Message::Tensors(tensors), Some(slot)) =
            (message, segment.in_flight.get_mut(&minibatch))
        else {
            return;
        };
        for (&position, tensor) in stage.link_to(from).positions.iter().zip(tensors) {
            // Several stages may give gradients for one tensor.
            let total = slot.gradients[position].take();
            slot.gradients[position] = match (total, tensor) {
                (Some(total), Some(more)) => Some(self.device.binary(Binary::Add, total, more)),
                (total, more) => total.or(more),
            };
        }
    }

    /// Runs backward; where the stage has replicas, begins the all-reduce of each bucket when it is full.
    fn backward(
        &mut self,
        segment: &mut Segment,
        stage: &Stage,
        first_minibatch: u64,
        minibatch: usize,
        version: usize,
    ) {
        let pace = self.settings.pace;
        let round = pace.round_of(&stage.shape, minibatch);
        let minibatches = segment.in_round(round, pace, stage);
        let group = self.group();
        let (first, share) = if segment.is_last(round, minibatches, &group, self.replica) {
            // The mean over the replicas that have one will be the mean over the minibatches.
            let givers = group.replicas.min(minibatches);
            let first = self.next_rounds(segment.buckets.count());
            (Some(first), givers as f32 / minibatches as f32)
        } else {
            (None, 1.0)
        };
        let slot = segment.in_flight.get_mut(&minibatch);
        let slot = slot.expect("a checked schedule runs a backward after its forward");
        let (stash, kept) = (slot.stash.take(), std::mem::take(&mut slot.kept));
        let sums = segment.gradients.remove(&round).unwrap_or_default();
        let mut sums: Vec<Option<Tensor>> = sums.into_iter().map(Some).collect();
        sums.resize(stage.program.weights().len(), None);
        let mut filling = Filling::new(&segment.buckets);
        self.pacer.begin_backward(self.transport.traffic().waited);
        let Self {
            device,
            settings,
            states,
            versions,
            transport,
            pacer,
            ..
        } = self;
        let context = Context {
            device: &**device,
            training: true,
            seed: settings.seed,
            first_sample: (first_minibatch + minibatch as u64) * settings.batch_size as u64,
        };
        let stash = stash.unwrap_or_else(|| {
            // The same version, masks and statistics of the minibatch; the running statistics have seen it.
            let mut seen = states.clone();
            let weights = versions.get(version);
            let (_, stash) = stage.program.forward(&context, kept, weights, &mut seen);
            stash
        });
        slot.input_gradients = stage.program.backward_each(
            &context,
            stash,
            versions.get(version),
            std::mem::take(&mut slot.gradients),
            &mut |weight, gradient| {
                pacer.gradient(weight);
                let sum = match sums[weight].take() {
                    None => gradient,
                    Some(sum) => device.binary(Binary::Add, sum, gradient),
                };
                let Some(first) = first else {
                    sums[weight] = Some(sum);
                    return;
                };
                let part = scaled(&**device, sum, share);
                if let Some((bucket, full)) = filling.put(weight, part) {
                    transport.all_reduce_begin(&group, first + bucket as u64, Some(full));
                }
            },
        );
        pacer.end_backward();
        versions.release(version);
        match first {
            None => {
                let sums = sums.into_iter().flatten().collect();
                segment.gradients.insert(round, sums);
            }
            Some(first) => {
                segment.reducing.insert(round, first);
            }
        }
        slot.unreturned = stage.incoming.iter().filter(|link| link.gradient).count();
        if slot.unreturned == 0 {
            segment.in_flight.remove(&minibatch);
        }
    }

    /// Waits for the mean gradients of all buckets; in the order of the weights.
    fn reduced(&mut self, buckets: &Buckets, first: u64) -> Result<Vec<Tensor>, WorkerError> {
        let mut gradients = vec![None; self.stage().program.weights().len()];
        let group = self.group();
        for (bucket, number) in numbers(first, buckets).enumerate() {
            let means = self.transport.all_reduce_wait(&group, number)?;
            for (&weight, mean) in buckets.members(bucket).iter().zip(means) {
                gradients[weight] = Some(mean);
            }
        }
        Ok(gradients.into_iter().flatten().collect())
    }

    fn step(&mut self, mut gradients: Vec<Tensor>, learning_rate: f32) {
        if self.pacer.emulates() {
            self.pacer.step(self.transport.traffic().waited);
            // The next version is as large as the last one; zeros that nobody reads take no memory.
            self.versions
                .step(|weights| weights.iter().map(renewed).collect());
            return;
        }
        if let Some(largest) = self.settings.clip_norm {
            gradients = clip_norm(&*self.device, gradients, largest);
        }
        let Self {
            versions,
            optimizer_state,
            settings,
            device,
            ..
        } = self;
        versions.step(|weights| {
            settings.optimizer.step(
                &**device,
                optimizer_state,
                weights,
                &gradients,
                learning_rate,
            )
        });
    }
}

fn scaled(device: &dyn Device, gradient: Tensor, factor: f32) -> Tensor {
    if factor == 1.0 {
        return gradient;
    }
    device.unary(Unary::Scale(factor), gradient)
}

/// A tensor like this one in memory of its own.
fn renewed(tensor: &Tensor) -> Tensor {
    Tensor::zeros(tensor.dtype(), tensor.shape())
}

/// Numbers of the buckets' all-reduces.
fn numbers(first: u64, buckets: &Buckets) -> std::ops::Range<u64> {
    first..first + buckets.count() as u64
}

fn tag(first_minibatch: u64, minibatch: usize, direction: Direction) -> Tag {
    Tag {
        minibatch: first_minibatch + minibatch as u64,
        direction,
    }
}
