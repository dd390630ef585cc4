//! When stages step and which version a forward reads: what tells the kinds of schedules apart.

use super::{ScheduleKind, ShapeError, StageShape, whole_rounds};

/// A kind of schedule and how many minibatches make a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// The kind.
    pub kind: ScheduleKind,
    /// Minibatches between two steps, which all stages make behind the same minibatch: the microbatches of a batch
    /// where the pipeline is flushed. Zero where each stage steps after a round of its own replicas.
    pub microbatches: usize,
}

/// What a replica holds at its fullest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Versions of the weights.
    pub versions: usize,
    /// Gradients of rounds that are not stepped yet.
    pub gradients: usize,
    /// Stashes of minibatches between their forward and their backward.
    pub stashes: usize,
}

/// What replicas hold under a kind of schedule whose pace is not known yet: at least what is told here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keeping {
    /// The kind.
    pub kind: ScheduleKind,
    /// Microbatches of a batch where the pipeline is flushed.
    pub microbatches: usize,
}

impl Keeping {
    /// Weight stashing.
    pub const STASHING: Self = Self {
        kind: ScheduleKind::OneFOneB,
        microbatches: 0,
    };

    /// What a replica of a stage with so many minibatches in flight per replica holds at its fullest.
    #[must_use]
    pub fn holding(self, replicas: usize, depth: usize, delay: usize) -> Holding {
        let own = self.microbatches.div_ceil(replicas.max(1));
        let (versions, gradients, stashes) = match self.kind {
            ScheduleKind::OneFOneB
            | ScheduleKind::VerticalSync
            | ScheduleKind::ModelParallel
            | ScheduleKind::DataParallel
            | ScheduleKind::Interleaved => (depth, 1 + delay, depth),
            ScheduleKind::TwoBw => (2, 1 + delay, depth),
            ScheduleKind::OneFOneBFlush => (1, 1, depth.min(own)),
            ScheduleKind::Gpipe => (1, 1, own),
        };
        Holding {
            versions,
            gradients,
            stashes,
        }
    }
}

impl Default for Pace {
    fn default() -> Self {
        Self::ONE_F_ONE_B
    }
}

impl Pace {
    /// 1F1B with weight stashing.
    pub const ONE_F_ONE_B: Self = Self {
        kind: ScheduleKind::OneFOneB,
        microbatches: 0,
    };

    /// The kind with as few minibatches per step as these stages allow, or with those that are given.
    ///
    /// 2BW steps no more often than once for all minibatches in flight; with vertical sync all stages step after whole
    /// rounds of each of them.
    ///
    /// # Errors
    /// If the given number does not suit the stages.
    pub fn new(
        kind: ScheduleKind,
        stages: &[StageShape],
        given: Option<usize>,
    ) -> Result<Self, ShapeError> {
        let rounds = whole_rounds(stages.iter().map(|s| s.replicas.max(1)));
        let in_flight = stages
            .iter()
            .map(|s| s.replicas.saturating_mul(s.depth))
            .max();
        let in_flight = in_flight.unwrap_or(1).max(1);
        let least = match kind {
            ScheduleKind::OneFOneB
            | ScheduleKind::ModelParallel
            | ScheduleKind::DataParallel
            | ScheduleKind::Interleaved => 0,
            ScheduleKind::VerticalSync => rounds,
            ScheduleKind::TwoBw => in_flight.div_ceil(rounds).saturating_mul(rounds),
            ScheduleKind::OneFOneBFlush | ScheduleKind::Gpipe => {
                // Enough to fill the pipeline four times: bubbles of a fifth.
                let fill = 4 * in_flight;
                fill.div_ceil(rounds).saturating_mul(rounds)
            }
        };
        let pace = Self {
            kind,
            microbatches: given.filter(|_| least > 0).unwrap_or(least),
        };
        pace.validate(stages)?;
        Ok(pace)
    }

    /// Whether each stage steps after a round of its own replicas.
    #[must_use]
    pub fn has_own_rounds(self) -> bool {
        self.microbatches == 0
    }

    /// Whether nothing of a batch is under way when the next one begins.
    #[must_use]
    pub fn flushes(self) -> bool {
        matches!(self.kind, ScheduleKind::OneFOneBFlush | ScheduleKind::Gpipe)
    }

    /// Minibatches of one round of a stage: what one step averages over.
    #[must_use]
    pub fn round_length(self, shape: &StageShape) -> usize {
        if self.has_own_rounds() {
            shape.replicas
        } else {
            self.microbatches
        }
    }

    /// The round that a minibatch belongs to.
    #[must_use]
    pub fn round_of(self, shape: &StageShape, minibatch: usize) -> usize {
        minibatch / self.round_length(shape)
    }

    /// Rounds that `minibatches` make; the last one may be partial.
    #[must_use]
    pub fn rounds(self, shape: &StageShape, minibatches: usize) -> usize {
        minibatches.div_ceil(self.round_length(shape))
    }

    /// Rounds between a step and the first forward that reads what it made: the forward of round q reads the version
    /// after round q - lag, else the first one.
    ///
    /// With stashing that is K + d of the stage, with vertical sync one for all stages, with 2BW two, where the pipeline
    /// is flushed one: the version before.
    #[must_use]
    pub fn lag(self, stages: &[StageShape], stage: usize) -> usize {
        match self.kind {
            ScheduleKind::OneFOneB
            | ScheduleKind::ModelParallel
            | ScheduleKind::DataParallel
            | ScheduleKind::Interleaved => stages[stage].depth + stages[stage].delay,
            // The first minibatch of a round finds the steps done that were due before the K - 1 rounds of replicas
            // which its worker has in flight, for the stage of which that is most.
            ScheduleKind::VerticalSync => {
                let before = |s: &StageShape| {
                    let in_flight = (s.depth.saturating_sub(1)).saturating_mul(s.replicas);
                    1 + in_flight.div_ceil(self.microbatches) + s.delay
                };
                stages.iter().map(before).max().unwrap_or(1)
            }
            ScheduleKind::TwoBw => 2,
            ScheduleKind::OneFOneBFlush | ScheduleKind::Gpipe => 1,
        }
    }

    /// What a replica of a stage holds at its fullest.
    #[must_use]
    pub fn holding(self, stages: &[StageShape], stage: usize) -> Holding {
        let shape = &stages[stage];
        let keeping = Keeping {
            kind: self.kind,
            microbatches: self.microbatches,
        };
        let holding = keeping.holding(shape.replicas, shape.depth, shape.delay);
        Holding {
            versions: match self.kind {
                ScheduleKind::VerticalSync => self.lag(stages, stage),
                _ => holding.versions,
            },
            ..holding
        }
    }

    /// The version that a forward of this round reads in a stage of that lag.
    #[must_use]
    pub fn version(lag: usize, round: usize) -> usize {
        (round + 1).saturating_sub(lag)
    }

    /// Refuses numbers of minibatches per step that the stages cannot keep.
    ///
    /// # Errors
    /// The first rule that is broken.
    pub fn validate(self, stages: &[StageShape]) -> Result<(), ShapeError> {
        let error = |rule| {
            Err(ShapeError::Microbatches {
                kind: self.kind,
                microbatches: self.microbatches,
                rule,
            })
        };
        let continuous = matches!(self.kind, ScheduleKind::VerticalSync | ScheduleKind::TwoBw);
        if continuous || self.flushes() {
            if self.microbatches == 0 {
                return error("at least one");
            }
        } else if self.microbatches != 0 {
            return error("none: each stage steps after a round of its own replicas");
        }
        let rounds = whole_rounds(stages.iter().map(|s| s.replicas.max(1)));
        if continuous && !self.microbatches.is_multiple_of(rounds) {
            return error("a multiple of the replicas of every stage");
        }
        let most = stages.iter().map(|s| s.replicas.saturating_mul(s.depth));
        if self.kind == ScheduleKind::TwoBw && most.max().unwrap_or(0) > self.microbatches {
            return error("no fewer than the minibatches in flight (replicas x depth)");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shapes(of: &[(usize, usize)]) -> Vec<StageShape> {
        let shapes = of.iter().map(|&(replicas, depth)| StageShape {
            replicas,
            depth,
            delay: 0,
        });
        shapes.collect()
    }

    #[test]
    fn the_fewest_minibatches_per_step_that_the_stages_allow() {
        let uneven = shapes(&[(2, 3), (3, 1)]);
        let count = |kind| Pace::new(kind, &uneven, None).unwrap().microbatches;
        assert_eq!(count(ScheduleKind::OneFOneB), 0);
        assert_eq!(count(ScheduleKind::VerticalSync), 6);
        assert_eq!(count(ScheduleKind::TwoBw), 6);
        assert_eq!(count(ScheduleKind::Gpipe), 24);
        for (kind, given) in [
            (ScheduleKind::VerticalSync, 4),
            (ScheduleKind::TwoBw, 0),
            (ScheduleKind::TwoBw, 3),
        ] {
            assert!(Pace::new(kind, &uneven, Some(given)).is_err());
        }
        let deep = shapes(&[(1, 5), (1, 4)]);
        assert!(Pace::new(ScheduleKind::TwoBw, &deep, Some(4)).is_err());
        assert!(Pace::new(ScheduleKind::TwoBw, &deep, Some(5)).is_ok());
    }

    /// Vertical sync over n stages without replicas reads w(t - n + 1) everywhere (arXiv 1806.03377).
    #[test]
    fn vertical_sync_of_a_straight_pipeline_is_the_papers() {
        let straight = shapes(&[(1, 4), (1, 3), (1, 2), (1, 1)]);
        let pace = Pace::new(ScheduleKind::VerticalSync, &straight, None).unwrap();
        let version = |t: usize| Pace::version(pace.lag(&straight, 3), t);
        assert_eq!([0, 3, 4, 10].map(version), [0, 0, 1, 7]);
    }
}
