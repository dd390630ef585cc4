//! The workers of a run: starting them, giving them commands, gathering what they report.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use models::loss::Judgement;
use models::tensor::Tensor;
use planner::schedule::whole_rounds;

use super::clock::Clock;
use super::remote::Link;
use super::squad::{Squad, in_flight};
use super::task::Task;
use super::{Job, Observer, Step};
use crate::affinity::Seat;
use crate::error::RunError;
use crate::stage::{self, Stage};
use crate::transport::{AbortHandle, Endpoint, Transport, local};
use crate::worker::{Event, Report, WorkerError};

/// Minibatches over which the rate of a step is taken.
const RATE_WINDOW: usize = 16;

/// The running workers.
pub struct Crew {
    stages: Arc<[Stage]>,
    /// Those of this process.
    squad: Squad,
    /// The way to those of other processes.
    others: Option<Endpoint>,
    events: Receiver<Event>,
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
    targets: usize,
}

impl Trained {
    pub fn mean_loss(&self) -> f64 {
        self.losses / self.minibatches.max(1) as f64
    }

    pub fn accuracy(&self) -> f64 {
        self.correct as f64 / self.targets.max(1) as f64
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
    /// Starts all workers as threads of this process.
    pub fn start(job: &Job) -> Result<Self, RunError> {
        let workers = job.workers();
        let (transports, abort) = local(workers);
        let members = transports.into_iter().enumerate().map(|(worker, end)| {
            let seat = Seat {
                index: worker,
                of: workers,
            };
            (worker, seat, Box::new(end) as Box<dyn Transport>)
        });
        let (report, events) = channel();
        let gauges: Vec<Arc<AtomicU64>> = (0..workers).map(|_| Arc::default()).collect();
        let squad = Squad::start(job, members, &gauges, &report)?;
        Ok(Crew::new(job, squad, None, events, abort, gauges))
    }

    /// Starts worker 0 in this process; the others are in theirs.
    pub fn start_over(job: &Job, link: Link, seat: Seat) -> Result<Self, RunError> {
        let Link {
            end,
            events,
            report,
        } = link;
        let transport: Box<dyn Transport> = Box::new(end.transport());
        let abort = end.abort_handle();
        let gauges = end.gauges.clone();
        let squad = Squad::start(job, [(end.worker, seat, transport)], &gauges, &report)?;
        Ok(Crew::new(job, squad, Some(end), events, abort, gauges))
    }

    fn new(
        job: &Job,
        squad: Squad,
        others: Option<Endpoint>,
        events: Receiver<Event>,
        abort: AbortHandle,
        gauges: Vec<Arc<AtomicU64>>,
    ) -> Self {
        Crew {
            stages: Arc::clone(&job.stages),
            squad,
            others,
            events,
            abort,
            reports: vec![Report::default(); gauges.len()],
            gauges,
            outputs: BTreeMap::new(),
            clock: Clock::default(),
        }
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.gauges.len()
    }

    /// The workers' latest accounts of themselves.
    pub fn reports(&self) -> &[Report] {
        &self.reports
    }

    /// Carries minibatches of an epoch through the pipeline and drains it.
    pub fn train_epoch(
        &mut self,
        job: &Job,
        minibatches: usize,
        first_minibatch: u64,
        steps_before: usize,
        epoch: usize,
        observer: &mut dyn Observer,
    ) -> Result<Trained, RunError> {
        let batch_size = job.settings.batch_size;
        let begin = Instant::now();
        self.begin(
            job,
            Task::Train {
                epoch,
                minibatches,
                first_minibatch,
                steps_before,
            },
        )?;
        let mut trained = Trained {
            minibatches: 0,
            wall: Duration::ZERO,
            losses: 0.0,
            correct: 0,
            targets: 0,
        };
        let gauges = self.gauges.clone();
        let mut times = Vec::with_capacity(minibatches);
        let mut in_order = InOrder::new();
        let mut window = VecDeque::from([begin]);
        self.gather(|minibatch, judged, at| {
            times.push(at);
            in_order.push(minibatch, (judged, at));
            while let Some((judged, at)) = in_order.pop() {
                let Judgement {
                    loss,
                    correct,
                    targets,
                } = judged;
                trained.minibatches += 1;
                trained.losses += f64::from(loss);
                trained.correct += correct;
                trained.targets += targets;
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
        self.squad.end()?;
        let busy = self.reports.iter().map(|r| r.busy).sum();
        let replicas = self.stages.iter().map(|s| s.shape.replicas);
        let cycle = whole_rounds(replicas.chain([job.settings.pace.microbatches.max(1)]));
        self.clock
            .add(times, trained.wall, busy, in_flight(&self.stages), cycle);
        Ok(trained)
    }

    /// Averages running statistics over replicas.
    pub fn average_states(&mut self, job: &Job) -> Result<(), RunError> {
        self.begin(job, Task::AverageStates)?;
        self.gather(|_, _, _| Ok(()))
    }

    /// Judges the held-out samples, each once, in so many minibatches. None when the run was stopped
    /// meanwhile.
    pub fn evaluate(
        &mut self,
        job: &Job,
        minibatches: usize,
        first_minibatch: u64,
        keep_outputs: bool,
    ) -> Result<Option<Judged>, RunError> {
        self.begin(
            job,
            Task::Evaluate {
                first_minibatch,
                keep_outputs,
            },
        )?;
        self.outputs.clear();
        let mut losses = BTreeMap::new();
        self.gather(|minibatch, judged, _| {
            losses.insert(minibatch, judged);
            Ok(())
        })?;
        self.squad.end()?;
        if losses.len() < minibatches {
            return Ok(None);
        }
        // The sums do not depend on the order in which replicas report.
        let all = || losses.values();
        let targets = all().map(|judged| judged.targets).sum::<usize>().max(1) as f64;
        let total: f64 = all().map(|j| f64::from(j.loss) * j.targets as f64).sum();
        let correct: usize = all().map(|judged| judged.correct).sum();
        Ok(Some(Judged {
            loss: total / targets,
            accuracy: correct as f64 / targets,
            outputs: std::mem::take(&mut self.outputs).into_values().collect(),
        }))
    }

    /// Newest weights and running statistics, in the order of the graph's parameters and states.
    pub fn collect(&mut self, job: &Job) -> Result<(Vec<Tensor>, Vec<Tensor>), RunError> {
        let mut weights = job.weights.clone();
        let mut states = job.states.clone();
        if job.is_emulated() {
            return Ok((weights, states));
        }
        self.begin(job, Task::Collect)?;
        let mut missing = self.stages.len();
        while missing > 0 {
            match self.next_event()? {
                Event::Weights {
                    worker,
                    weights: stage_weights,
                    states: stage_states,
                } => {
                    let program = &stage::of_worker(&self.stages, worker).program;
                    for (&parameter, tensor) in program.weights().iter().zip(stage_weights) {
                        weights[parameter] = tensor;
                    }
                    for (&state, tensor) in program.states().iter().zip(stage_states) {
                        states[state] = tensor;
                    }
                    missing -= 1;
                }
                Event::Failed { worker, error } => return Err(self.failure(worker, error)),
                Event::Loss { .. } | Event::Output { .. } | Event::Done { .. } => {}
            }
        }
        Ok((weights, states))
    }

    /// Lets the workers go and waits for those of this process.
    pub fn dismiss(self, failed: bool) {
        if failed {
            self.abort.abort();
        }
        self.squad.dismiss();
        if let Some(others) = self.others
            && !failed
        {
            others.close();
        }
    }

    /// Gives every worker its part of a task.
    fn begin(&mut self, job: &Job, task: Task) -> Result<(), RunError> {
        if let Some(others) = &self.others {
            for worker in (0..others.workers).filter(|&worker| worker != others.worker) {
                others.post(worker, task.to_letter());
            }
        }
        self.squad.begin(job, task).map(|_| ())
    }

    /// Hands events on until every worker has carried out its command.
    fn gather(
        &mut self,
        mut on_loss: impl FnMut(usize, Judgement, Instant) -> Result<(), RunError>,
    ) -> Result<(), RunError> {
        let mut done = 0;
        while done < self.workers() {
            match self.next_event()? {
                Event::Loss {
                    minibatch,
                    loss,
                    correct,
                    targets,
                    at,
                } => {
                    let judged = Judgement {
                        loss,
                        correct,
                        targets,
                    };
                    on_loss(minibatch, judged, at)?;
                }
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
                let stage = stage::of_worker(&self.stages, worker);
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
