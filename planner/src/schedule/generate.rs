//! Makes the schedules: which worker does what, in which order, with which weight version.

use std::collections::HashSet;

use super::{Op, Pace, Schedule, ScheduleKind, StageLink, StageShape, WorkerRole, first_workers};

/// Why no schedule can be made from these stages and links.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// There is no stage.
    #[error("a schedule needs at least one stage")]
    NoStage,
    /// A count that must be at least one is zero.
    #[error("stage {stage}: {what} must be at least 1")]
    Zero {
        /// Stage.
        stage: usize,
        /// `replicas` or `depth`.
        what: &'static str,
    },
    /// The delay is neither 0 nor 1, or the stage has nothing to wait for.
    #[error("stage {stage}: delay {delay} is not possible: 0, or 1 for a replicated stage")]
    Delay {
        /// Stage.
        stage: usize,
        /// What was asked for.
        delay: usize,
    },
    /// A number of minibatches per step that the kind of schedule cannot keep with these stages.
    #[error("schedule `{kind}` with {microbatches} minibatches per step: it takes {rule}")]
    Microbatches {
        /// The kind.
        kind: ScheduleKind,
        /// What was asked for.
        microbatches: usize,
        /// What is possible.
        rule: &'static str,
    },
    /// A link that does not lead forward to an existing stage, or stands there twice.
    #[error(
        "link from stage {from} to stage {to}: links lead forward between the {stages} stages, each listed once"
    )]
    Link {
        /// Sending stage.
        from: usize,
        /// Receiving stage.
        to: usize,
        /// Number of stages.
        stages: usize,
    },
}

impl Schedule {
    /// The schedule of a kind over these stages.
    ///
    /// Every worker runs `depth - 1` warm-up forwards, then alternates forward and backward, then drains: once over all
    /// minibatches, or once for every batch where the pipeline is flushed. GPipe runs all forwards of a batch first.
    ///
    /// # Errors
    /// If the shapes or links make no pipeline. Depths are judged by [`Schedule::check`].
    pub fn new(
        pace: Pace,
        stages: &[StageShape],
        links: &[StageLink],
        minibatches: usize,
    ) -> Result<Self, ShapeError> {
        validate(stages, links)?;
        pace.validate(stages)?;
        let first_workers = first_workers(stages);
        let mut roles = Vec::new();
        let mut operations = Vec::new();
        for (stage, shape) in stages.iter().enumerate() {
            let to = |l: &&StageLink| l.to == stage;
            let from = |l: &&StageLink| l.from == stage;
            let incoming: Vec<StageLink> = links.iter().filter(to).copied().collect();
            let outgoing: Vec<StageLink> = links.iter().filter(from).copied().collect();
            for replica in 0..shape.replicas {
                roles.push(WorkerRole { stage, replica });
                let worker = Worker {
                    pace,
                    lag: pace.lag(stages, stage),
                    stages,
                    first_workers: &first_workers,
                    incoming: &incoming,
                    outgoing: &outgoing,
                    stage,
                    replica,
                    minibatches,
                    settled: 0,
                    stepped: 0,
                    operations: Vec::new(),
                };
                operations.push(worker.run());
            }
        }
        Ok(Self {
            pace,
            minibatches,
            stages: stages.to_vec(),
            links: links.to_vec(),
            roles,
            operations,
        })
    }

    /// One-forward-one-backward with round robin over replicas (1F1B-RR) and weight stashing.
    ///
    /// A stage with r replicas steps once per round of r minibatches; the last round may be partial.
    ///
    /// # Errors
    /// If the shapes or links make no pipeline. Depths are judged by [`Schedule::check`].
    pub fn one_f_one_b(
        stages: &[StageShape],
        links: &[StageLink],
        minibatches: usize,
    ) -> Result<Self, ShapeError> {
        Self::new(Pace::ONE_F_ONE_B, stages, links, minibatches)
    }

    /// One minibatch at a time through `stages` workers: 1F1B with every depth 1.
    ///
    /// # Errors
    /// If there is no stage or a link makes no pipeline.
    pub fn model_parallel(
        stages: usize,
        links: &[StageLink],
        minibatches: usize,
    ) -> Result<Self, ShapeError> {
        let shape = StageShape {
            replicas: 1,
            depth: 1,
            delay: 0,
        };
        Self::one_f_one_b(&vec![shape; stages], links, minibatches)
    }

    /// Every one of `workers` runs the whole model on its own minibatches; gradients are averaged each round.
    ///
    /// # Errors
    /// If there is no worker.
    pub fn data_parallel(workers: usize, minibatches: usize) -> Result<Self, ShapeError> {
        let shape = StageShape {
            replicas: workers,
            depth: 1,
            delay: 0,
        };
        Self::one_f_one_b(&[shape], &[], minibatches)
    }
}

fn validate(stages: &[StageShape], links: &[StageLink]) -> Result<(), ShapeError> {
    if stages.is_empty() {
        return Err(ShapeError::NoStage);
    }
    for (stage, shape) in stages.iter().enumerate() {
        for (what, count) in [("replicas", shape.replicas), ("depth", shape.depth)] {
            if count == 0 {
                return Err(ShapeError::Zero { stage, what });
            }
        }
        if shape.delay > usize::from(shape.replicas > 1) {
            return Err(ShapeError::Delay {
                stage,
                delay: shape.delay,
            });
        }
    }
    let mut known = HashSet::new();
    for link in links {
        let twice = !known.insert((link.from, link.to));
        if link.from >= link.to || link.to >= stages.len() || twice {
            return Err(ShapeError::Link {
                from: link.from,
                to: link.to,
                stages: stages.len(),
            });
        }
    }
    Ok(())
}

/// Collects the operations of one worker. Its minibatches are every r-th one, from its replica's number on.
struct Worker<'a> {
    pace: Pace,
    lag: usize,
    stages: &'a [StageShape],
    /// Replica 0 of each stage.
    first_workers: &'a [usize],
    /// Links that end at this stage.
    incoming: &'a [StageLink],
    /// Links that begin at it.
    outgoing: &'a [StageLink],
    stage: usize,
    replica: usize,
    minibatches: usize,
    /// Rounds whose own backwards are all done, and rounds that are stepped.
    settled: usize,
    stepped: usize,
    operations: Vec<Op>,
}

impl Worker<'_> {
    fn run(mut self) -> Vec<Op> {
        let shape = *self.shape();
        let own: Vec<usize> = (self.replica..self.minibatches)
            .step_by(shape.replicas)
            .collect();
        if self.pace.flushes() {
            let pace = self.pace;
            let round_of = |minibatch| pace.round_of(&shape, minibatch);
            for batch in own.chunk_by(|&a, &b| round_of(a) == round_of(b)) {
                let warm_up = match self.pace.kind {
                    ScheduleKind::Gpipe => batch.len(),
                    _ => shape.depth - 1,
                };
                self.one_f_one_b(batch, warm_up);
            }
        } else {
            self.one_f_one_b(&own, shape.depth - 1);
        }
        // Rounds in which the replica has no minibatch, and steps that are still due.
        let rounds = self.pace.rounds(&shape, self.minibatches);
        self.settle_until(rounds);
        self.step_until(rounds);
        self.operations
    }

    fn one_f_one_b(&mut self, own: &[usize], warm_up: usize) {
        let warm_up = warm_up.min(own.len());
        for &minibatch in &own[..warm_up] {
            self.forward(minibatch);
        }
        for (i, &minibatch) in own.iter().enumerate() {
            if let Some(&ahead) = own.get(i + warm_up) {
                self.forward(ahead);
            }
            self.backward(minibatch);
            // What follows may belong to the next round.
            let next = minibatch + self.shape().replicas;
            self.settle_until(self.round_of(next));
        }
    }

    fn shape(&self) -> &StageShape {
        &self.stages[self.stage]
    }

    fn round_of(&self, minibatch: usize) -> usize {
        self.pace.round_of(self.shape(), minibatch)
    }

    fn peer(&self, stage: usize, minibatch: usize) -> usize {
        self.first_workers[stage] + minibatch % self.stages[stage].replicas
    }

    fn forward(&mut self, minibatch: usize) {
        let round = self.round_of(minibatch);
        // Rounds in which this replica has no minibatch end before the ones in which it has.
        if self.pace.flushes() {
            self.settle_until(round);
        }
        let version = Pace::version(self.lag, round);
        if !self.pace.has_own_rounds() {
            self.step_until(version);
        }
        for l in self.incoming {
            self.operations.push(Op::ReceiveActivations {
                minibatch,
                stage: l.from,
                peer: self.peer(l.from, minibatch),
            });
        }
        self.operations.push(Op::Forward { minibatch, version });
        for l in self.outgoing {
            self.operations.push(Op::SendActivations {
                minibatch,
                stage: l.to,
                peer: self.peer(l.to, minibatch),
            });
        }
    }

    fn backward(&mut self, minibatch: usize) {
        let version = Pace::version(self.lag, self.round_of(minibatch));
        for l in self.outgoing.iter().filter(|l| l.gradient) {
            self.operations.push(Op::ReceiveGradients {
                minibatch,
                stage: l.to,
                peer: self.peer(l.to, minibatch),
            });
        }
        self.operations.push(Op::Backward { minibatch, version });
        for l in self.incoming.iter().filter(|l| l.gradient) {
            self.operations.push(Op::SendGradients {
                minibatch,
                stage: l.from,
                peer: self.peer(l.from, minibatch),
            });
        }
    }

    /// Starts the all-reduces of rounds whose backwards are done, and finishes the rounds that are due.
    ///
    /// With delay 1 a round is due when the next one is done, whose forward and backward gave its all-reduce time, or
    /// when a forward reads what it makes.
    fn settle_until(&mut self, rounds: usize) {
        let rounds = rounds.min(self.pace.rounds(self.shape(), self.minibatches));
        while self.settled < rounds {
            if self.shape().replicas > 1 {
                self.operations.push(Op::AllReduce {
                    round: self.settled,
                });
            }
            self.settled += 1;
            let delay = if self.pace.flushes() {
                0
            } else {
                self.shape().delay
            };
            self.step_until(self.settled.saturating_sub(delay));
        }
    }

    fn step_until(&mut self, rounds: usize) {
        let length = self.pace.round_length(self.shape());
        while self.stepped < rounds {
            let round = self.stepped;
            self.operations.push(Op::Step {
                round,
                minibatches: length.min(self.minibatches - round * length),
            });
            self.stepped += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(replicas: usize, depth: usize, delay: usize) -> StageShape {
        StageShape {
            replicas,
            depth,
            delay,
        }
    }

    fn link(from: usize, to: usize) -> StageLink {
        StageLink {
            from,
            to,
            gradient: true,
        }
    }

    /// `F3v1` forward of minibatch 3 with version 1, `B` backward, `R` all-reduce, `S` step.
    fn compute(schedule: &Schedule, worker: usize) -> String {
        let words = schedule.operations[worker]
            .iter()
            .filter_map(|op| match op {
                Op::Forward { minibatch, version } => Some(format!("F{minibatch}v{version}")),
                Op::Backward { minibatch, version } => Some(format!("B{minibatch}v{version}")),
                Op::AllReduce { round } => Some(format!("R{round}")),
                Op::Step { round, minibatches } => Some(format!("S{round}/{minibatches}")),
                _ => None,
            });
        words.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn straight_pipeline_warms_up_alternates_and_drains() {
        let s = Schedule::one_f_one_b(&[shape(1, 2, 0), shape(1, 1, 0)], &[link(0, 1)], 4).unwrap();
        assert_eq!(
            compute(&s, 0),
            "F0v0 F1v0 B0v0 S0/1 F2v1 B1v0 S1/1 F3v2 B2v1 S2/1 B3v2 S3/1"
        );
        assert_eq!(
            compute(&s, 1),
            "F0v0 B0v0 S0/1 F1v1 B1v1 S1/1 F2v2 B2v2 S2/1 F3v3 B3v3 S3/1"
        );
    }

    #[test]
    fn a_delayed_step_waits_one_round_longer() {
        let s = Schedule::one_f_one_b(&[shape(2, 1, 1)], &[], 6).unwrap();
        assert_eq!(
            compute(&s, 0),
            "F0v0 B0v0 R0 F2v0 B2v0 R1 S0/2 F4v1 B4v1 R2 S1/2 S2/2"
        );
    }

    #[test]
    fn a_replica_without_a_minibatch_still_takes_part_in_the_last_round() {
        let s = Schedule::data_parallel(3, 4).unwrap();
        assert_eq!(compute(&s, 0), "F0v0 B0v0 R0 S0/3 F3v1 B3v1 R1 S1/1");
        assert_eq!(compute(&s, 2), "F2v0 B2v0 R0 S0/3 R1 S1/1");
    }

    #[test]
    fn skip_links_go_directly_to_the_stage_that_reads_them() {
        let shapes = [shape(1, 3, 0), shape(1, 2, 0), shape(2, 1, 0)];
        let s = Schedule::one_f_one_b(&shapes, &[link(0, 1), link(1, 2), link(0, 2)], 2).unwrap();
        let sends: Vec<(usize, usize)> = s.operations[0]
            .iter()
            .filter_map(|op| match *op {
                Op::SendActivations {
                    minibatch, peer, ..
                } => Some((minibatch, peer)),
                _ => None,
            })
            .collect();
        assert_eq!(sends, [(0, 1), (0, 2), (1, 1), (1, 3)]);
    }

    #[test]
    fn shapes_that_make_no_pipeline_are_errors() {
        let ok = shape(1, 1, 0);
        let make = |s: &[StageShape], l: &[StageLink]| Schedule::one_f_one_b(s, l, 1).unwrap_err();
        assert_eq!(make(&[], &[]), ShapeError::NoStage);
        assert!(matches!(
            make(&[shape(0, 1, 0)], &[]),
            ShapeError::Zero { .. }
        ));
        assert!(matches!(
            make(&[shape(1, 0, 0)], &[]),
            ShapeError::Zero { .. }
        ));
        assert!(matches!(
            make(&[shape(1, 1, 1)], &[]),
            ShapeError::Delay { .. }
        ));
        assert!(matches!(
            make(&[ok, ok], &[link(1, 0)]),
            ShapeError::Link { .. }
        ));
        assert!(matches!(
            make(&[ok], &[link(0, 1)]),
            ShapeError::Link { .. }
        ));
        assert!(matches!(
            make(&[ok, ok], &[link(0, 1), link(0, 1)]),
            ShapeError::Link { .. }
        ));
    }
}
