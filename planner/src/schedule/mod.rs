//! Schedules as data: for every worker the list of operations it carries out, in order.
//!
//! The same list is checked, simulated and executed, so what was proved is what runs.

mod check;
mod generate;
mod holdings;
mod list;
mod pace;

use serde::{Deserialize, Serialize};

pub use check::ScheduleError;
pub use generate::ShapeError;
pub use pace::{Holding, Keeping, Pace};

/// How minibatches move through the stages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleKind {
    /// PipeDream's asynchronous one-forward-one-backward with weight stashing.
    #[default]
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// The same, and a minibatch reads one version in all stages.
    VerticalSync,
    /// PipeDream-2BW: two versions, steps as seldom as minibatches in flight.
    #[serde(rename = "2bw")]
    TwoBw,
    /// One-forward-one-backward within a batch of microbatches, then one step: as if trained in one piece.
    #[serde(rename = "1f1b-flush")]
    OneFOneBFlush,
    /// GPipe: all forwards of a batch, all its backwards, one step.
    Gpipe,
    /// One minibatch at a time through the stages.
    ModelParallel,
    /// Every worker the whole model, synchronised each round.
    DataParallel,
    /// Several stages on a worker, in turn: planned, and neither simulated nor carried out yet.
    Interleaved,
}

impl ScheduleKind {
    /// Whether all stages step behind the same minibatch, so that layers which share weights could be in different ones.
    #[must_use]
    pub fn may_split_ties(self) -> bool {
        matches!(self, Self::TwoBw | Self::OneFOneBFlush | Self::Gpipe)
    }

    /// Whether a gradient is always taken at the weights that it is applied to.
    #[must_use]
    pub fn is_synchronous(self) -> bool {
        matches!(
            self,
            Self::OneFOneBFlush | Self::Gpipe | Self::ModelParallel | Self::DataParallel
        )
    }
}

impl std::fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::OneFOneB => "1f1b",
            Self::VerticalSync => "vertical-sync",
            Self::TwoBw => "2bw",
            Self::OneFOneBFlush => "1f1b-flush",
            Self::Gpipe => "gpipe",
            Self::ModelParallel => "model-parallel",
            Self::DataParallel => "data-parallel",
            Self::Interleaved => "interleaved",
        })
    }
}

/// What a schedule needs to know of one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageShape {
    /// r: replicas; minibatch m is served by replica m mod r.
    pub replicas: usize,
    /// K: minibatches in flight per replica.
    pub depth: usize,
    /// d: rounds by which a replicated stage's all-reduce may lag, 0 or 1.
    pub delay: usize,
}

/// Activations flow from stage `from` to stage `to` (`from < to`), gradients back.
///
/// Stages need not be neighbours: a skip connection is sent directly to the stage that reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageLink {
    /// The producing stage.
    pub from: usize,
    /// The reading stage.
    pub to: usize,
    /// Whether gradients come back over it.
    pub gradient: bool,
}

/// One operation of one worker. Minibatches are numbered from 0 within the schedule.
///
/// Version v of a stage is its weights after v rounds of this schedule; version 0 is what it began with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Wait for the activations of `minibatch` from worker `peer` of stage `stage`.
    ReceiveActivations {
        /// Minibatch.
        minibatch: usize,
        /// Sending stage.
        stage: usize,
        /// Sending worker.
        peer: usize,
    },
    /// Run the stage forward with weight version `version` and keep the stash.
    Forward {
        /// Minibatch.
        minibatch: usize,
        /// Version of the weights it reads.
        version: usize,
    },
    /// Hand the activations of `minibatch` to worker `peer` of stage `stage`; never waits.
    SendActivations {
        /// Minibatch.
        minibatch: usize,
        /// Receiving stage.
        stage: usize,
        /// Receiving worker.
        peer: usize,
    },
    /// Wait for the gradients of `minibatch` from worker `peer` of stage `stage`.
    ReceiveGradients {
        /// Minibatch.
        minibatch: usize,
        /// Sending stage.
        stage: usize,
        /// Sending worker.
        peer: usize,
    },
    /// Run the stage backward with the version that its forward used; frees the stash.
    Backward {
        /// Minibatch.
        minibatch: usize,
        /// Version of the weights it reads: always the one of the same minibatch's forward.
        version: usize,
    },
    /// Hand the gradients of `minibatch` to worker `peer` of stage `stage`; never waits.
    SendGradients {
        /// Minibatch.
        minibatch: usize,
        /// Receiving stage.
        stage: usize,
        /// Receiving worker.
        peer: usize,
    },
    /// Begin to sum this round's gradients over the stage's replicas; never waits.
    ///
    /// A replica without a minibatch in the last, partial round takes part with nothing.
    AllReduce {
        /// Round of the stage.
        round: usize,
    },
    /// Wait for the round's gradient (averaged over its minibatches), make version `round + 1`.
    Step {
        /// Round of the stage.
        round: usize,
        /// Minibatches in the round ([`Pace::round_length`]), fewer in the last one.
        minibatches: usize,
    },
}

/// Which stage and replica a worker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerRole {
    /// Stage.
    pub stage: usize,
    /// Replica within the stage.
    pub replica: usize,
}

/// What every worker does, from the first minibatch to the drained pipeline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Its kind, and how many minibatches make a step.
    pub pace: Pace,
    /// Number of minibatches it carries through.
    pub minibatches: usize,
    /// The stages that it was made for.
    pub stages: Vec<StageShape>,
    /// Who talks to whom.
    pub links: Vec<StageLink>,
    /// Role of each worker: workers are numbered stage by stage, replica by replica.
    pub roles: Vec<WorkerRole>,
    /// Operations of each worker.
    pub operations: Vec<Vec<Op>>,
}

impl Schedule {
    /// Number of the worker that serves `minibatch` in `stage`.
    #[must_use]
    pub fn worker_of(&self, stage: usize, minibatch: usize) -> usize {
        let before: usize = self.stages[..stage].iter().map(|s| s.replicas).sum();
        before + minibatch % self.stages[stage].replicas
    }
}

/// Number of the worker that is replica 0, for each stage.
fn first_workers(stages: &[StageShape]) -> Vec<usize> {
    let firsts = stages.iter().scan(0, |workers, s| {
        let first = *workers;
        *workers += s.replicas;
        Some(first)
    });
    firsts.collect()
}

/// Least number of minibatches that makes whole rounds in every stage: the least common multiple of their
/// replicas (`usize::MAX` if it is no smaller than that).
#[must_use]
pub fn whole_rounds(replicas: impl IntoIterator<Item = usize>) -> usize {
    replicas.into_iter().fold(1, |all, r| {
        let (mut x, mut y) = (all, r);
        while y != 0 {
            (x, y) = (y, x % y);
        }
        (all / x).saturating_mul(r)
    })
}

/// The paper's NOAM for each stage: ceil(replicas from the stage on / replicas of the stage).
///
/// The least depth that keeps every worker busy when links are free.
#[must_use]
pub fn noam(replicas: &[usize]) -> Vec<usize> {
    let mut from_here = 0;
    let mut depths: Vec<usize> = replicas
        .iter()
        .rev()
        .map(|&r| {
            from_here += r;
            from_here.div_ceil(r)
        })
        .collect();
    depths.reverse();
    depths
}

/// Raises depths upstream until every stage admits what the stages behind it keep in flight.
///
/// Before its first backward a stage t takes in (K_t - 1) r_t minibatches. The stage s before it can deliver them
/// without any gradient of theirs if (K_s - 1) r_s is no less, even where it waits for whole rounds.
pub fn admit(stages: &mut [StageShape]) {
    for i in (1..stages.len()).rev() {
        let warm_up = stages[i]
            .depth
            .saturating_sub(1)
            .saturating_mul(stages[i].replicas);
        let before = &mut stages[i - 1];
        before.depth = before
            .depth
            .max(1 + warm_up.div_ceil(before.replicas.max(1)));
    }
}

#[cfg(test)]
mod tests {
    use super::whole_rounds;

    #[test]
    fn whole_rounds_are_the_least_common_multiple() {
        assert_eq!(whole_rounds([]), 1);
        assert_eq!(whole_rounds([4, 6, 1]), 12);
        assert_eq!(whole_rounds([usize::MAX, 2]), usize::MAX);
    }
}
