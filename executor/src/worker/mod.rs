//! Workers: one thread each, owning a device, told what to do by the coordinator.

mod buckets;
mod evaluate;
pub mod pacer;
mod training;
pub mod versions;

pub use buckets::BUCKET_BYTES;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use models::device::{Device, DeviceError};
use models::loss::Loss;
use models::ops::Context;
use models::optimizer::{Optimizer, OptimizerState};
use models::tensor::Tensor;
use planner::schedule::{Pace, Schedule};
use serde::{Deserialize, Serialize};

use crate::data::loader::Delivery;
use crate::learning_rate::LearningRate;
use crate::stage::Stage;
use crate::transport::{Group, Traffic, Transport, TransportError};
use crate::usage::{Meter, Usage};
use pacer::{Lateness, Pacer};
use versions::VersionStore;

/// What every worker of a run has in common.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Samples per minibatch.
    pub batch_size: usize,
    /// Seed of the run.
    pub seed: u64,
    /// What is minimised.
    pub loss: Loss,
    /// How weights are stepped.
    pub optimizer: Optimizer,
    /// The kind of schedule, and how many minibatches make a step where all stages step together.
    pub pace: Pace,
    /// Whether a backward reads the version its forward read; without it every pass reads the newest.
    pub weight_stashing: bool,
    /// Largest norm of a stage's gradient.
    pub clip_norm: Option<f32>,
    /// Gradients are all-reduced together until they have so many bytes.
    pub bucket_bytes: usize,
}

/// What the coordinator asks of a worker.
#[derive(Debug)]
pub enum Command {
    /// Carry out this worker's operations of a schedule.
    Train {
        /// The schedule; minibatches and rounds are numbered from 0 in it.
        schedule: Arc<Schedule>,
        /// Features and labels, for the stages that read them.
        feed: Receiver<Delivery>,
        /// Number in the run of the schedule's minibatch 0.
        first_minibatch: u64,
        /// Learning rate of this stage.
        rate: LearningRate,
        /// Minibatches that the run trained before this schedule.
        steps_before: usize,
    },
    /// Average the running statistics over the stage's replicas.
    AverageStates,
    /// Run minibatches forward with the newest weights, nothing kept.
    Evaluate {
        /// How many.
        minibatches: usize,
        /// Features and labels.
        feed: Receiver<Delivery>,
        /// Number in the run of the first one.
        first_minibatch: u64,
        /// Whether to report the values that the loss reads, too.
        keep_outputs: bool,
    },
    /// Hand out the newest weights and the running statistics.
    Collect,
}

/// What a worker reports.
#[derive(Debug)]
pub enum Event {
    /// The loss of a minibatch, from the stage that computes it.
    Loss {
        /// Number in the schedule or evaluation.
        minibatch: usize,
        /// Mean loss over its samples.
        loss: f32,
        /// Targets whose class was right.
        correct: usize,
        /// Targets that count.
        targets: usize,
        /// When it was known.
        at: Instant,
    },
    /// The value that the loss reads, in an evaluation that asked for it.
    Output {
        /// Number in the evaluation.
        minibatch: usize,
        /// On the host, without what only fills the batch.
        output: Tensor,
    },
    /// A command was carried out.
    Done {
        /// The worker.
        worker: usize,
        /// What it did meanwhile.
        report: Report,
    },
    /// Answer to [`Command::Collect`].
    Weights {
        /// The worker.
        worker: usize,
        /// Newest weights, in the order of the program's weights, on the host.
        weights: Vec<Tensor>,
        /// Running statistics, in the order of the program's states, on the host.
        states: Vec<Tensor>,
    },
    /// The worker cannot go on.
    Failed {
        /// The worker.
        worker: usize,
        /// Why; none when it was told to stop because another failed.
        error: Option<WorkerError>,
    },
}

/// A worker's account of itself.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Time at work during the last command: neither waiting for other workers nor for data.
    pub busy: Duration,
    /// Since the start of the run.
    pub traffic: Traffic,
    /// Most bytes its device held at once.
    pub peak_memory_bytes: u64,
    /// Most weight versions it held at once.
    pub most_versions: usize,
    /// What it took of its machine.
    #[serde(default)]
    pub usage: Usage,
    /// How late its waits ended, where they take the place of compute.
    #[serde(default)]
    pub lateness: Lateness,
}

/// Why a worker failed.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The loss is not finite.
    #[error(
        "the loss is {loss} at minibatch {minibatch}: training diverged; lower --lr or check the data"
    )]
    Diverged {
        /// Infinite or not a number.
        loss: f32,
        /// Number in the run.
        minibatch: u64,
    },
    /// Its device cannot be had.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A fault of this program.
    #[error("internal error: {0}")]
    Panic(String),
    /// It happened in another process, which says so.
    #[error("{0}")]
    Elsewhere(String),
    /// Another worker failed first.
    #[error(transparent)]
    Transport(#[from] TransportError),
}

/// One replica of one stage.
pub struct Worker {
    /// Its number.
    pub id: usize,
    /// All stages of the run.
    pub stages: Arc<[Stage]>,
    /// Which one it runs.
    pub stage: usize,
    /// Which replica it is.
    pub replica: usize,
    /// Its device.
    pub device: Arc<dyn Device>,
    /// Its end of the transport.
    pub transport: Box<dyn Transport>,
    /// Weights on the device.
    pub versions: VersionStore,
    /// Running statistics on the device.
    pub states: Vec<Tensor>,
    /// State of the optimizer.
    pub optimizer_state: OptimizerState,
    /// What all workers have in common.
    pub settings: Settings,
    /// Where it reports.
    pub events: Sender<Event>,
    /// Nanoseconds it has been at work, for whoever watches.
    pub gauge: Arc<AtomicU64>,
    /// Time spent waiting for data.
    pub starved: Duration,
    /// All-reduces so far: numbers them.
    pub rounds: u64,
    /// Waits in place of compute.
    pub pacer: Pacer,
    /// What it takes of its machine.
    pub meter: Meter,
}

impl Worker {
    /// Carries out commands until there are no more, or it fails.
    pub fn run(mut self, commands: &Receiver<Command>) {
        let events = self.events.clone();
        let worker = self.id;
        let outcome = catch_unwind(AssertUnwindSafe(|| self.serve(commands)));
        let error = match outcome {
            Ok(Ok(())) => return,
            Ok(Err(WorkerError::Transport(TransportError::Aborted))) => None,
            Ok(Err(error)) => Some(error),
            Err(panic) => Some(WorkerError::Panic(panic_message(panic.as_ref()))),
        };
        // Nobody listens any more when the coordinator has gone.
        let _ = events.send(Event::Failed { worker, error });
    }

    fn serve(&mut self, commands: &Receiver<Command>) -> Result<(), WorkerError> {
        while let Ok(command) = commands.recv() {
            let begin = Instant::now();
            let idle = self.idle();
            match command {
                Command::Train {
                    schedule,
                    feed,
                    first_minibatch,
                    rate,
                    steps_before,
                } => {
                    self.meter.begin();
                    self.train(&schedule, &feed, first_minibatch, rate, steps_before)?;
                    self.meter.end();
                }
                Command::AverageStates => self.average_states()?,
                Command::Evaluate {
                    minibatches,
                    feed,
                    first_minibatch,
                    keep_outputs,
                } => self.evaluate(minibatches, &feed, first_minibatch, keep_outputs)?,
                Command::Collect => {
                    let weights = self.versions.newest();
                    let host = |tensors: &[Tensor]| -> Vec<Tensor> {
                        tensors.iter().map(|t| self.device.download(t)).collect()
                    };
                    let event = Event::Weights {
                        worker: self.id,
                        weights: host(weights),
                        states: host(&self.states),
                    };
                    self.report(event);
                    continue;
                }
            }
            let report = Report {
                busy: begin.elapsed().saturating_sub(self.idle() - idle),
                traffic: self.transport.traffic(),
                peak_memory_bytes: self.device.memory().peak_bytes as u64,
                most_versions: self.versions.most_held(),
                usage: self.meter.usage(),
                lateness: self.pacer.lateness(),
            };
            self.report(Event::Done {
                worker: self.id,
                report,
            });
        }
        Ok(())
    }

    fn average_states(&mut self) -> Result<(), WorkerError> {
        let group = self.group();
        if group.replicas > 1 && !self.states.is_empty() {
            let round = self.next_rounds(1);
            let states = std::mem::take(&mut self.states);
            self.transport.all_reduce_begin(&group, round, Some(states));
            let means = self.transport.all_reduce_wait(&group, round)?;
            self.states = means.iter().map(|t| self.device.upload(t)).collect();
        }
        Ok(())
    }

    fn stage(&self) -> &Stage {
        &self.stages[self.stage]
    }

    fn group(&self) -> Group {
        Group {
            first: self.stage().first_worker,
            replicas: self.stage().shape.replicas,
        }
    }

    /// Numbers `count` all-reduces of a stage, from the one given: every replica takes part in all of them and
    /// numbers them in the same order.
    fn next_rounds(&mut self, count: usize) -> u64 {
        let first = self.rounds;
        self.rounds += count as u64;
        first
    }

    fn context(&self, training: bool, minibatch: u64) -> Context<'_> {
        Context {
            device: &*self.device,
            training,
            seed: self.settings.seed,
            first_sample: minibatch * self.settings.batch_size as u64,
        }
    }

    /// The next delivery; none when the run was stopped.
    fn next_delivery(&mut self, feed: &Receiver<Delivery>) -> Option<Delivery> {
        let begin = Instant::now();
        let delivery = feed.recv().ok();
        self.starved += begin.elapsed();
        delivery
    }

    fn idle(&self) -> Duration {
        self.transport.traffic().waited + self.starved
    }

    fn report(&self, event: Event) {
        // The coordinator stops listening only when the run is over.
        let _ = self.events.send(event);
    }

    fn show_busy(&self, busy: Duration) {
        self.gauge.store(busy.as_nanos() as u64, Ordering::Relaxed);
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a worker panicked".to_owned())
}
