//! Held-out minibatches forward through the stages, round robin over the replicas as in training.

use std::sync::mpsc::Receiver;
use std::time::Instant;

use models::tensor::Tensor;

use super::{Event, Worker, WorkerError};
use crate::data::array::head;
use crate::data::loader::Delivery;
use crate::transport::{Direction, Message, Tag};

impl Worker {
    /// Runs its share of `minibatches` forward and reports their losses.
    pub(super) fn evaluate(
        &mut self,
        minibatches: usize,
        feed: &Receiver<Delivery>,
        first_minibatch: u64,
        keep_outputs: bool,
    ) -> Result<(), WorkerError> {
        let stages = self.stages.clone();
        let stage = &stages[self.stage];
        let worker_of = |other: usize, minibatch: usize| {
            stages[other].first_worker + minibatch % stages[other].shape.replicas
        };
        let reads_data = !stage.graph_inputs.is_empty() || stage.loss_output.is_some();
        for minibatch in (self.replica..minibatches).step_by(stage.shape.replicas) {
            let tag = Tag {
                minibatch: first_minibatch + minibatch as u64,
                direction: Direction::Forward,
            };
            let mut inputs = vec![None; stage.program.inputs().len()];
            let mut stopped = false;
            for link in &stage.incoming {
                let from = worker_of(link.stage, minibatch);
                match self.transport.receive(from, tag)? {
                    Message::Tensors(tensors) => {
                        for (&position, tensor) in link.positions.iter().zip(tensors) {
                            inputs[position] = tensor;
                        }
                    }
                    Message::Stopped => stopped = true,
                }
            }
            let delivery = if reads_data && !stopped {
                self.next_delivery(feed)
            } else {
                None
            };
            if stopped || (reads_data && delivery.is_none()) {
                for link in &stage.outgoing {
                    self.transport
                        .send(worker_of(link.stage, minibatch), tag, Message::Stopped);
                }
                continue;
            }
            let mut target = None;
            let mut samples = 0;
            if let Some(delivery) = delivery {
                samples = delivery.samples;
                if let Some(data) = delivery.inputs {
                    for &(position, input) in &stage.graph_inputs {
                        inputs[position] = Some(self.device.upload(&data[input]));
                    }
                }
                target = delivery.target;
            }
            let outputs = {
                let context = self.context(false, tag.minibatch);
                stage.program.evaluate(
                    &context,
                    inputs.into_iter().flatten().collect(),
                    self.versions.newest(),
                    &self.states,
                )
            };
            for link in &stage.outgoing {
                let tensors = link.positions.iter().map(|&p| Some(outputs[p].clone()));
                self.transport.send(
                    worker_of(link.stage, minibatch),
                    tag,
                    Message::Tensors(tensors.collect()),
                );
            }
            if let (Some(position), Some(target)) = (stage.loss_output, target) {
                let output = self.judge(minibatch, &outputs[position], &target, samples);
                if keep_outputs {
                    let output = self.device.download(&output);
                    self.report(Event::Output { minibatch, output });
                }
            }
        }
        Ok(())
    }

    /// Reports the loss over the first `samples` samples: what lies behind them only fills the batch.
    /// Gives their output.
    fn judge(&self, minibatch: usize, output: &Tensor, target: &Tensor, samples: usize) -> Tensor {
        let batch = self.settings.batch_size;
        let (output, target) = if samples == batch {
            (output.clone(), self.device.upload(target))
        } else {
            let head = |tensor: &Tensor| self.device.upload(&head(tensor, batch, samples));
            (head(&self.device.download(output)), head(target))
        };
        let loss = self.settings.loss;
        let judged = loss.evaluate(&*self.device, &output, &target);
        self.report(Event::Loss {
            minibatch,
            loss: judged.loss,
            correct: judged.correct,
            targets: judged.targets,
            at: Instant::now(),
        });
        output
    }
}
