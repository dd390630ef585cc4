//! The workers of one process: all of them where a run has one process, one of them where it has many.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use planner::schedule::{Pace, Schedule, whole_rounds};

use super::recruit::Recruit;
use super::task::Task;
use super::{Job, Material};
use crate::affinity::Seat;
use crate::data::loader::{Delivery, Feed, Loader, Reader};
use crate::error::RunError;
use crate::learning_rate::LearningRate;
use crate::stage::{self, Stage};
use crate::transport::Transport;
use crate::worker::{Command, Event};

/// Workers of this process.
pub struct Squad {
    members: Vec<Member>,
    /// Reads ahead for the task under way.
    loader: Option<Loader>,
}

struct Member {
    stage: usize,
    replica: usize,
    commands: Sender<Command>,
    thread: JoinHandle<()>,
}

impl Squad {
    /// Starts a thread for each worker that a seat and a transport are given for; `gauges` has one entry for
    /// every worker of the run.
    pub fn start(
        job: &Job,
        workers: impl IntoIterator<Item = (usize, Seat, Box<dyn Transport>)>,
        gauges: &[Arc<AtomicU64>],
        report: &Sender<Event>,
    ) -> Result<Self, RunError> {
        let roles: Vec<(usize, usize)> = job
            .stages
            .iter()
            .flat_map(|stage| (0..stage.shape.replicas).map(|replica| (stage.index, replica)))
            .collect();
        let mut members = Vec::new();
        let workers: Vec<_> = workers.into_iter().collect();
        let alone = workers.len() == 1;
        for (worker, seat, transport) in workers {
            let (stage, replica) = roles[worker];
            let (command, commands) = channel();
            let gauge = Arc::clone(&gauges[worker]);
            let recruit = Recruit::new(
                job,
                &job.stages[stage],
                replica,
                transport,
                (seat, alone),
                gauge,
                report.clone(),
            );
            let thread = std::thread::Builder::new()
                .name(format!("worker {worker}"))
                .spawn(move || recruit.run(&commands))
                .map_err(|e| RunError::Model(format!("cannot start a thread: {e}")))?;
            members.push(Member {
                stage,
                replica,
                commands: command,
                thread,
            });
        }
        Ok(Squad {
            members,
            loader: None,
        })
    }

    /// Gives the members their part of a task; tells how many of them have one.
    pub fn begin(&mut self, job: &Job, task: Task) -> Result<usize, RunError> {
        match task {
            Task::Train {
                epoch,
                minibatches,
                first_minibatch,
                steps_before,
            } => {
                let pace = job.settings.pace;
                let schedule = Arc::new(schedule(pace, &job.stages, minibatches)?);
                let rounds = whole_rounds(job.stages.iter().map(|s| s.shape.replicas));
                let granularity = rounds.max(pace.microbatches);
                let feeds = self.load(job, job.training_feed(epoch, minibatches), granularity);
                let rate = LearningRate {
                    base: job.learning_rate,
                    course: job.course,
                    minibatches: job.minibatches()?,
                };
                let first_replicas = job.stages[0].shape.replicas as f32;
                for (member, feed) in self.members.iter().zip(feeds) {
                    let replicas = job.stages[member.stage].shape.replicas as f32;
                    // Stages that step together have the same global batch.
                    let factor = if job.scale_learning_rate && pace.has_own_rounds() {
                        replicas / first_replicas
                    } else {
                        1.0
                    };
                    member.order(Command::Train {
                        schedule: Arc::clone(&schedule),
                        feed,
                        first_minibatch,
                        rate: rate.scaled(factor),
                        steps_before,
                    });
                }
            }
            Task::AverageStates => {
                for member in &self.members {
                    member.order(Command::AverageStates);
                }
            }
            Task::Evaluate {
                first_minibatch,
                keep_outputs,
            } => {
                let Some(feed) = job.held_out_feed() else {
                    return Ok(0);
                };
                let minibatches = feed.minibatches();
                let feeds = self.load(job, feed, 1);
                for (member, feed) in self.members.iter().zip(feeds) {
                    member.order(Command::Evaluate {
                        minibatches,
                        feed,
                        first_minibatch,
                        keep_outputs,
                    });
                }
            }
            Task::Collect => {
                let first = self.members.iter().filter(|member| member.replica == 0);
                return Ok(first.map(|member| member.order(Command::Collect)).count());
            }
        }
        Ok(self.members.len())
    }

    /// Puts a carried-out task away.
    pub fn end(&mut self) -> Result<(), RunError> {
        match self.loader.take().map(Loader::join) {
            Some(false) => Err(RunError::Loader),
            _ => Ok(()),
        }
    }

    /// Lets the members go and waits for them.
    pub fn dismiss(self) {
        for member in self.members {
            drop(member.commands);
            // A panic inside was caught and reported by the worker itself.
            let _ = member.thread.join();
        }
    }

    fn load(&mut self, job: &Job, feed: Feed, granularity: usize) -> Vec<Receiver<Delivery>> {
        let readers: Vec<Reader> = self
            .members
            .iter()
            .map(|member| {
                let stage = &job.stages[member.stage];
                Reader {
                    replicas: stage.shape.replicas,
                    replica: member.replica,
                    input: !stage.graph_inputs.is_empty(),
                    target: stage.loss_output.is_some(),
                }
            })
            .collect();
        // A plan may be deeper than an epoch is long.
        let window = in_flight(&job.stages)
            .max(job.settings.pace.microbatches)
            .saturating_add(2)
            .min(feed.minibatches().max(1));
        let (loader, feeds) =
            Loader::start(feed, &readers, window, granularity, Arc::clone(&job.stop));
        self.loader = Some(loader);
        feeds
    }
}

impl Member {
    fn order(&self, command: Command) {
        // A worker that has gone has sent an event that says why; it is read next.
        let _ = self.commands.send(command);
    }
}

/// Most minibatches between their first forward and their last backward.
pub fn in_flight(stages: &[Stage]) -> usize {
    let of = |stage: &Stage| stage.shape.replicas.saturating_mul(stage.shape.depth);
    stages.iter().map(of).max().unwrap_or(1)
}

/// The proved schedule of so many minibatches.
fn schedule(pace: Pace, stages: &[Stage], minibatches: usize) -> Result<Schedule, RunError> {
    let shapes: Vec<_> = stages.iter().map(|stage| stage.shape).collect();
    let schedule = Schedule::new(pace, &shapes, &stage::links(stages), minibatches)
        .map_err(|e| RunError::Plan(e.to_string()))?;
    schedule
        .check()
        .map_err(|e| RunError::Plan(e.to_string()))?;
    Ok(schedule)
}

impl Job {
    /// The first minibatches of an epoch.
    fn training_feed(&self, epoch: usize, minibatches: usize) -> Feed {
        match &self.material {
            Material::Dataset(dataset) => {
                let mut order = dataset.train.order(self.settings.seed, epoch as u64);
                order.truncate(minibatches * self.settings.batch_size);
                Feed::Rows {
                    samples: dataset.train.clone(),
                    order,
                }
            }
            Material::Synthetic(pool) => Feed::Repeat {
                pool: Arc::clone(pool),
                minibatches,
            },
        }
    }

    /// All held-out samples, if there are any.
    pub(super) fn held_out_feed(&self) -> Option<Feed> {
        match &self.material {
            Material::Dataset(dataset) if !dataset.test.is_empty() => {
                Some(Feed::all(&dataset.test))
            }
            _ => None,
        }
    }
}
