//! A run from its first epoch to its trained weights.

mod clock;
mod crew;
mod recruit;
pub mod remote;
mod squad;
mod task;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use models::graph::Graph;
use models::init;
use models::tensor::Tensor;

use crate::affinity::Seat;
use crate::data::{DataError, Dataset, Minibatch};
use crate::error::RunError;
use crate::learning_rate::Course;
use crate::stage::Stage;
use crate::worker::{Report, Settings};
use crew::Crew;

pub use task::Task;

/// Minibatches in an epoch of made-up data.
const SYNTHETIC_EPOCH: usize = 100;

/// What there is to learn from.
#[derive(Clone, Debug)]
pub enum Material {
    /// A data set: shuffled anew each epoch, judged by its held-out part.
    Dataset(Dataset),
    /// Made-up minibatches, for timing alone.
    Synthetic(Arc<Vec<Minibatch>>),
}

/// Everything a run needs.
#[derive(Debug)]
pub struct Job {
    /// The model, with shapes bound to the batch size; none where compute is emulated.
    pub graph: Option<Arc<Graph>>,
    /// Its stages.
    pub stages: Arc<[Stage]>,
    /// What every worker has in common.
    pub settings: Settings,
    /// Learning rate at the global batch of the first stage.
    pub learning_rate: f32,
    /// How it changes over the run.
    pub course: Course,
    /// Whether the other stages' rates are scaled by their replicas over the first one's.
    pub scale_learning_rate: bool,
    /// Initial value of every parameter of the graph, on the host.
    pub weights: Vec<Tensor>,
    /// Initial value of every running statistic of the graph, on the host.
    pub states: Vec<Tensor>,
    /// Data.
    pub material: Material,
    /// Epochs to run.
    pub epochs: usize,
    /// Most minibatches to run over all epochs.
    pub max_minibatches: Option<usize>,
    /// Name of the device that each worker opens.
    pub device: String,
    /// Cores per worker.
    pub threads: usize,
    /// Whether workers stay on cores of their own, if there are enough.
    pub pin: bool,
    /// Whether to keep what the trained model gives for the held-out samples.
    pub keep_outputs: bool,
    /// Set from outside to stop after the minibatches under way.
    pub stop: Arc<AtomicBool>,
}

/// One trained minibatch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Number in the run, from 1.
    pub step: usize,
    /// Epoch, from 1.
    pub epoch: usize,
    /// Mean loss over its samples, before its update.
    pub loss: f32,
    /// Targets whose class was right.
    pub correct: usize,
    /// Rate over the last few minibatches.
    pub samples_per_s: f64,
    /// Share of the workers' time in this epoch so far that was spent waiting.
    pub bubble_share: f64,
}

/// One epoch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Epoch {
    /// From 1.
    pub epoch: usize,
    /// Mean over its minibatches.
    pub train_loss: f64,
    /// Share of training targets (labels, tokens) whose class was right when they were seen.
    pub train_accuracy: f64,
    /// Loss over the held-out samples afterwards; none without held-out data or when stopped.
    pub test_loss: Option<f64>,
    /// Share of held-out targets whose class is right.
    pub test_accuracy: Option<f64>,
    /// Seconds of training, without the evaluation.
    pub wall_s: f64,
}

/// Watches a run.
pub trait Observer {
    /// An epoch of so many minibatches begins.
    fn begin_epoch(&mut self, epoch: usize, minibatches: usize);

    /// A minibatch was trained; called in the order of the minibatches.
    ///
    /// # Errors
    /// When what is observed cannot be recorded; the run then ends.
    fn step(&mut self, step: &Step) -> Result<(), RunError>;

    /// An epoch ended.
    ///
    /// # Errors
    /// As [`Self::step`].
    fn epoch(&mut self, epoch: &Epoch) -> Result<(), RunError>;
}

/// What a run gave.
#[derive(Debug)]
pub struct Outcome {
    /// Trained weights, one per parameter of the graph.
    pub weights: Vec<Tensor>,
    /// Running statistics, one per state of the graph.
    pub states: Vec<Tensor>,
    /// What the loss reads, for the held-out samples in minibatches; empty unless asked for.
    pub outputs: Vec<Tensor>,
    /// All epochs.
    pub epochs: Vec<Epoch>,
    /// Minibatches trained.
    pub minibatches: usize,
    /// Whether it was stopped from outside.
    pub interrupted: bool,
    /// Samples per second while the pipeline was full: without its filling and draining.
    pub steady_samples_per_s: f64,
    /// Samples per second of training time, filling and draining included.
    pub overall_samples_per_s: f64,
    /// Share of the workers' training time that was spent waiting.
    pub bubble_share: f64,
    /// Seconds of training, without evaluations.
    pub training_s: f64,
    /// What each worker sent, held and so on.
    pub workers: Vec<Report>,
}

impl Outcome {
    /// Weights and running statistics by the names that the model's file has for them.
    pub fn named_tensors(&self, graph: &Graph) -> Vec<(String, Tensor)> {
        let weights = graph.parameters().iter().map(|p| p.name.clone());
        let states = graph.states().iter().map(|s| s.name.clone());
        weights
            .zip(self.weights.iter().cloned())
            .chain(states.zip(self.states.iter().cloned()))
            .collect()
    }
}

/// Runs a job to its end.
///
/// Every epoch is one schedule: the pipeline fills, runs, and drains; then the held-out data is judged
/// by the newest weights. An epoch has as many minibatches as are full; the few samples left over
/// are others in each epoch, since the order is shuffled anew. Every held-out sample counts once.
///
/// # Errors
/// When a worker fails, the loss is not finite, or the observer cannot record.
pub fn train(job: &Job, observer: &mut dyn Observer) -> Result<Outcome, RunError> {
    lead(job, Crew::start(job)?, observer)
}

/// As [`train`], with worker 0 in this process, on this `seat`, and every other one in a process of its own,
/// which [`remote::serve`]s.
///
/// # Errors
/// As [`train`]. After an error the other processes still wait: end them.
pub fn train_over(
    job: &Job,
    link: remote::Link,
    seat: Seat,
    observer: &mut dyn Observer,
) -> Result<Outcome, RunError> {
    lead(job, Crew::start_over(job, link, seat)?, observer)
}

fn lead(job: &Job, mut crew: Crew, observer: &mut dyn Observer) -> Result<Outcome, RunError> {
    let per_epoch = job.minibatches_per_epoch()?;
    let result = run(job, per_epoch, &mut crew, observer);
    // A failed run is aborted first: its workers may wait for each other.
    crew.dismiss(result.is_err());
    result
}

fn run(
    job: &Job,
    per_epoch: usize,
    crew: &mut Crew,
    observer: &mut dyn Observer,
) -> Result<Outcome, RunError> {
    let most = job.max_minibatches.unwrap_or(usize::MAX);
    let mut epochs = Vec::new();
    let mut outputs = Vec::new();
    let mut step = 0;
    // Every minibatch of the run, evaluations included, has a number of its own.
    let mut number = 0;
    for epoch in 1..=job.epochs {
        let minibatches = per_epoch.min(most - step);
        if minibatches == 0 || job.stopped() {
            break;
        }
        observer.begin_epoch(epoch, minibatches);
        let trained = crew.train_epoch(job, minibatches, number, step, epoch, observer)?;
        number += minibatches as u64;
        step += trained.minibatches;
        let mut row = Epoch {
            epoch,
            train_loss: trained.mean_loss(),
            train_accuracy: trained.accuracy(),
            test_loss: None,
            test_accuracy: None,
            wall_s: trained.wall.as_secs_f64(),
        };
        crew.average_states(job)?;
        if let Some(feed) = job.held_out_feed()
            && !job.stopped()
        {
            let minibatches = feed.minibatches();
            let keep = job.keep_outputs;
            if let Some(judged) = crew.evaluate(job, minibatches, number, keep)? {
                row.test_loss = Some(judged.loss);
                row.test_accuracy = Some(judged.accuracy);
                outputs = judged.outputs;
            }
            number += minibatches as u64;
        }
        if trained.minibatches > 0 {
            observer.epoch(&row)?;
            epochs.push(row);
        }
    }
    let (weights, states) = crew.collect(job)?;
    let clock = &crew.clock;
    Ok(Outcome {
        weights,
        states,
        outputs,
        epochs,
        minibatches: step,
        interrupted: job.stopped(),
        steady_samples_per_s: clock.steady_rate() * job.settings.batch_size as f64,
        overall_samples_per_s: clock.overall_rate() * job.settings.batch_size as f64,
        bubble_share: clock.bubble_share(crew.workers()),
        training_s: clock.training_s(),
        workers: crew.reports().to_vec(),
    })
}

/// Cores that this process may use.
pub fn cores_here() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

impl Job {
    /// Minibatches that the run will train when nothing stops it.
    ///
    /// # Errors
    /// As [`Self::minibatches_per_epoch`].
    pub fn minibatches(&self) -> Result<usize, RunError> {
        let all = self.minibatches_per_epoch()?.saturating_mul(self.epochs);
        Ok(all.min(self.max_minibatches.unwrap_or(usize::MAX)))
    }

    /// Full minibatches in one epoch.
    ///
    /// # Errors
    /// When there are fewer training samples than one minibatch needs.
    pub fn minibatches_per_epoch(&self) -> Result<usize, RunError> {
        match &self.material {
            Material::Dataset(dataset) => {
                let (samples, batch) = (dataset.train.len(), self.settings.batch_size);
                if samples < batch {
                    return Err(RunError::Data(DataError::Mismatch(format!(
                        "{samples} training samples make no minibatch of {batch}: profile and plan with a smaller --batch, or lower --test-fraction"
                    ))));
                }
                Ok(samples / batch)
            }
            Material::Synthetic(_) => Ok(self.max_minibatches.unwrap_or(SYNTHETIC_EPOCH)),
        }
    }

    /// Names of weights that hold one number everywhere: all units of their layers stay alike.
    pub fn constant_fills(&self) -> impl Iterator<Item = &str> {
        let parameters = self.graph.iter().flat_map(|graph| graph.parameters());
        let pairs = parameters.zip(&self.weights);
        pairs
            .filter(|(parameter, value)| init::is_constant_fill(value, parameter.fan))
            .map(|(parameter, _)| parameter.name.as_str())
    }

    /// Whether waits take the place of compute.
    pub fn is_emulated(&self) -> bool {
        self.graph.is_none()
    }

    /// Workers of all stages.
    pub fn workers(&self) -> usize {
        self.stages.iter().map(|s| s.shape.replicas).sum()
    }

    /// Cores that all workers together own.
    pub fn cores_wanted(&self) -> usize {
        self.workers() * self.threads
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}
