//! The workers of a run: starting them, giving them commands, gathering what they report.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use models::tensor::Tensor;
use planner::schedule::{Schedule, whole_rounds};

use super::clock::Clock;
use super::recruit::Recruit;
use super::{Job, Observer, Step};
use crate::data::loader::{Delivery, Feed, Loader, Reader};
use crate::error::RunError;
use crate::learning_rate::LearningRate;
use crate::stage::{self, Stage};
use crate::transport::{AbortHandle, local};
use crate::worker::{Command, Event, Report, WorkerError};

/// Minibatches over which the rate of a step is taken.
const RATE_WINDOW: usize = 16;

/// The running workers.
pub struct Crew {
    stages: Arc<[Stage]>,
    commands: Vec<Sender<Command>>,
    events: Receiver<Event>,
    threads: Vec<JoinHandle<()>>,
    abort: AbortHandle,
    /// Nanoseconds at work in the running epoch.
    gauges: Vec<Arc<AtomicU64>>,
    reports: Vec<Report>,
    /// What an evaluation gave, by minibatch.
    outputs: BTreeMap<usize, Tensor>,
    pub clock: Clock,
}

/// What training for an epoch gave.
pub struct Trained {
    pub minibatches: usize,
    pub wall: Duration,
    losses: f64,
    correct: usize,
}

impl Trained {
    pub fn mean_loss(&self) -> f64 {
        self.losses / self.minibatches.max(1) as f64
    }

    pub fn accuracy(&self, batch_size: usize) -> f64 {
        self.correct as f64 / (self.minibatches * batch_size).max(1) as f64
    }
}

/// What an evaluation gave.
pub struct Judged {
    pub loss: f64,
    pub accuracy: f64,
    /// Of each minibatch, if asked for.
    pub outputs: Vec<Tensor>,
}

impl Crew {
    /// Starts one thread per worker.
    pub fn start(job: &Job) -> Result<Self, RunError> {
        let workers: usize = job.stages.iter().map(|s| s.shape.replicas).sum();
        let (transports, abort) = local(workers);
        let (report, events) = channel();
        let mut crew = Crew {
            stages: Arc::clone(&job.stages),
            commands: Vec::new(),
            events,
            threads: Vec::new(),
            abort,
            gauges: Vec::new(),
            reports: vec![Report::default(); workers],
            outputs: BTreeMap::new(),
            clock: Clock::default(),
        };
        let roles = job
            .stages
            .iter()
            .flat_map(|stage| (0..stage.shape.replicas).map(move |replica| (stage, replica)));
        for ((stage, replica), transport) in roles.zip(transports) {
            let (command, commands) = channel();
            let gauge = Arc::new(AtomicU64::new(0));
            crew.gauges.push(Arc::clone(&gauge));
            crew.commands.push(command);
            let recruit = Recruit::new(job, stage, replica, transport, gauge, report.clone());
            let thread = std::thread::Builder::new()
                .name(format!("worker {}", stage.first_worker + replica))
                .spawn(move || recruit.run(&commands))
                .map_err(|e| RunError::Model(format!("cannot start a thread: {e}")))?;
            crew.threads.push(thread);
        }
        Ok(crew)
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.commands.len()
    }

    /// The workers' latest accounts of themselves.
    pub fn reports(&self) -> &[Report] {
        &self.reports
    }

    /// Carries the minibatches of `feed` through the pipeline and drains it.
    pub fn train_epoch(
        &mut self,
        job: &Job,
        feed: Feed,
        first_minibatch: u64,
        steps_before: usize,
        epoch: usize,
        observer: &mut dyn Observer,
    ) -> Result<Trained, RunError> {
        let batch_size = job.settings.batch_size;
        let minibatches = feed.minibatches();
        let schedule = Arc::new(schedule(&self.stages, minibatches)?);
        let granularity = whole_rounds(self.stages.iter().map(|s| s.shape.replicas));
        let (loader, feeds) = self.load(job, feed, granularity);
        let begin = Instant::now();
        let rate = LearningRate {
            base: job.learning_rate,
            decay: job.decay,
            minibatches: job.minibatches()?,
        };
        let first_replicas = self.stages[0].shape.replicas as f32;
        for ((worker, feed), role) in feeds.into_iter().enumerate().zip(&schedule.roles) {
            let replicas = self.stages[role.stage].shape.replicas as f32;
            let factor = if job.scale_learning_rate {
                replicas / first_replicas
            } else {
                1.0
            };
            self.order(
                worker,
                Command::Train {
                    schedule: Arc::clone(&schedule),
                    feed,
                    first_minibatch,
                    rate: rate.scaled(factor),
                    steps_before,
                },
            );
        }

        let mut trained = Trained {
            minibatches: 0,
            wall: Duration::ZERO,
            losses: 0.0,
            correct: 0,
        };
        let gauges = self.gauges.clone();
        let mut times = Vec::with_capacity(minibatches);
        let mut in_order = InOrder::new();
        let mut window = VecDeque::from([begin]);
        self.gather(|minibatch, loss, correct, at| {
            times.push(at);
            in_order.push(minibatch, (loss, correct, at));
            while let Some((loss, correct, at)) = in_order.pop() {
                trained.minibatches += 1;
                trained.losses += f64::from(loss);
                trained.correct += correct;
                let busy: u64 = gauges.iter().map(|g| g.load(Ordering::Relaxed)).sum();
                let available = begin.elapsed().as_nanos() as f64 * gauges.len() as f64;
                window.push_back(at);
                if window.len() > RATE_WINDOW + 1 {
                    window.pop_front();
                }
                let passed = at.saturating_duration_since(window[0]).as_secs_f64();
                let rate = (window.len() - 1) as f64 / passed.max(f64::MIN_POSITIVE);
                observer.step(&Step {
                    step: steps_before + trained.minibatches,
                    epoch,
                    loss,
                    correct,
                    samples_per_s: rate * batch_size as f64,
                    bubble_share: (1.0 - busy as f64 / available).max(0.0),
                })?;
            }
            Ok(())
        })?;
        trained.wall = begin.elapsed();
        if !loader.join() {
            return Err(RunError::Loader);
        }
        let busy = self.reports.iter().map(|r| r.busy).sum();
        self.clock.add(times, trained.wall, busy, self.in_flight());
        Ok(trained)
    }

    /// Averages running statistics over replicas.
    pub fn average_states(&mut self) -> Result<(), RunError> {
        for worker in 0..self.workers() {
            self.order(worker, Command::AverageStates);
        }
        self.gather(|_, _, _, _| Ok(()))
    }

    /// Judges the samples of `feed`, each once; none when the run was stopped meanwhile.
    pub fn evaluate(
        &mut self,
        job: &Job,
        feed: Feed,
        first_minibatch: u64,
        keep_outputs: bool,
    ) -> Result<Option<Judged>, RunError> {
        let minibatches = feed.minibatches();
        let samples = match &feed {
            Feed::Rows { order, .. } => order.len(),
            Feed::Repeat { .. } => minibatches * job.settings.batch_size,
        };
        let (loader, feeds) = self.load(job, feed, 1);
        for (worker, feed) in feeds.into_iter().enumerate() {
            self.order(
                worker,
                Command::Evaluate {
                    minibatches,
                    feed,
                    first_minibatch,
                    keep_outputs,
                },
            );
        }
        self.outputs.clear();
        let mut losses = BTreeMap::new();
        let mut correct = 0;
        self.gather(|minibatch, loss, right, _| {
            losses.insert(minibatch, loss);
            correct += right;
            Ok(())
        })?;
        if !loader.join() {
            return Err(RunError::Loader);
        }
        if losses.len() < minibatches {
            return Ok(None);
        }
        let batch_size = job.settings.batch_size;
        let total: f64 = losses
            .iter()
            .map(|(&minibatch, &loss)| {
                let count = batch_size.min(samples - minibatch * batch_size);
                f64::from(loss) * count as f64
            })
            .sum();
        Ok(Some(Judged {
            loss: total / samples as f64,
            accuracy: correct as f64 / samples as f64,
            outputs: std::mem::take(&mut self.outputs).into_values().collect(),
        }))
    }

    /// Newest weights and running statistics, in the order of the graph's parameters and states.
    pub fn collect(&mut self, job: &Job) -> Result<(Vec<Tensor>, Vec<Tensor>), RunError> {
        let mut weights = job.weights.clone();
        let mut states: Vec<Tensor> = job
            .graph
            .states()
            .iter()
            .map(|s| s.tensor.clone())
            .collect();
        let stages = Arc::clone(&self.stages);
        for stage in stages.iter() {
            self.order(stage.first_worker, Command::Collect);
            let (stage_weights, stage_states) = loop {
                match self.next_event()? {
                    Event::Weights {
                        weights, states, ..
                    } => break (weights, states),
                    Event::Failed { worker, error } => return Err(self.failure(worker, error)),
                    Event::Loss { .. } | Event::Output { .. } | Event::Done { .. } => {}
                }
            };
            for (&parameter, tensor) in stage.program.weights().iter().zip(stage_weights) {
                weights[parameter] = tensor;
            }
            for (&state, tensor) in stage.program.states().iter().zip(stage_states) {
                states[state] = tensor;
            }
        }
        Ok((weights, states))
    }

    /// Lets the workers go and waits for them.
    pub fn dismiss(self, failed: bool) {
        if failed {
            self.abort.abort();
        }
        drop(self.commands);
        for thread in self.threads {
            // A panic inside was caught and reported by the worker itself.
            let _ = thread.join();
        }
    }

    /// Hands events on until every worker has carried out its command.
    fn gather(
        &mut self,
        mut on_loss: impl FnMut(usize, f32, usize, Instant) -> Result<(), RunError>,
    ) -> Result<(), RunError> {
        let mut done = 0;
        while done < self.workers() {
            match self.next_event()? {
                Event::Loss {
                    minibatch,
                    loss,
                    correct,
                    at,
                } => on_loss(minibatch, loss, correct, at)?,
                Event::Done { worker, report } => {
                    self.reports[worker] = report;
                    done += 1;
                }
                Event::Output { minibatch, output } => {
                    self.outputs.insert(minibatch, output);
                }
                Event::Weights { .. } => {}
                Event::Failed { worker, error } => return Err(self.failure(worker, error)),
            }
        }
        Ok(())
    }

    fn next_event(&self) -> Result<Event, RunError> {
        self.events
            .recv()
            .map_err(|_| RunError::Model("internal error: all workers are gone".into()))
    }

    fn failure(&self, worker: usize, error: Option<WorkerError>) -> RunError {
        match error {
            Some(error @ WorkerError::Diverged { .. }) => RunError::Diverged(error),
            Some(error) => {
                let stage = self
                    .stages
                    .iter()
                    .rev()
                    .find(|s| s.first_worker <= worker)
                    .expect("stage 0 begins with worker 0");
                RunError::Worker {
                    worker,
                    stage: stage.index,
                    replica: worker - stage.first_worker,
                    error,
                }
            }
            None => RunError::Model("internal error: a worker was aborted".into()),
        }
    }

    fn order(&self, worker: usize, command: Command) {
        // A worker that has gone has sent an event that says why; it is read next.
        let _ = self.commands[worker].send(command);
    }

    fn load(&self, job: &Job, feed: Feed, granularity: usize) -> (Loader, Vec<Receiver<Delivery>>) {
        let readers: Vec<Reader> = self
            .stages
            .iter()
            .flat_map(|stage| {
                (0..stage.shape.replicas).map(|replica| Reader {
                    replicas: stage.shape.replicas,
                    replica,
                    input: !stage.graph_inputs.is_empty(),
                    target: stage.loss_output.is_some(),
                })
            })
            .collect();
        // A plan may be deeper than an epoch is long.
        let window = self
            .in_flight()
            .saturating_add(2)
            .min(feed.minibatches().max(1));
        Loader::start(feed, &readers, window, granularity, Arc::clone(&job.stop))
    }

    /// Most minibatches between their first forward and their last backward.
    fn in_flight(&self) -> usize {
        let of = |stage: &Stage| stage.shape.replicas.saturating_mul(stage.shape.depth);
        self.stages.iter().map(of).max().unwrap_or(1)
    }
}

/// The proved schedule of so many minibatches.
fn schedule(stages: &[Stage], minibatches: usize) -> Result<Schedule, RunError> {
    let shapes: Vec<_> = stages.iter().map(|stage| stage.shape).collect();
    let schedule = Schedule::one_f_one_b(&shapes, &stage::links(stages), minibatches)
        .map_err(|e| RunError::Plan(e.to_string()))?;
    schedule
        .check()
        .map_err(|e| RunError::Plan(e.to_string()))?;
    Ok(schedule)
}

/// Brings what replicas report back into the order of the minibatches.
struct InOrder<T> {
    waiting: BTreeMap<usize, T>,
    next: usize,
}

impl<T> InOrder<T> {
    fn new() -> Self {
        InOrder {
            waiting: BTreeMap::new(),
            next: 0,
        }
    }

    fn push(&mut self, minibatch: usize, value: T) {
        self.waiting.insert(minibatch, value);
    }

    fn pop(&mut self) -> Option<T> {
        let value = self.waiting.remove(&self.next)?;
        self.next += 1;
        Some(value)
    }
}
