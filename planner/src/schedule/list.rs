//! The rules that one worker's list keeps, whatever the other workers do.

use std::collections::HashSet;

use super::{Op, Pace, Schedule, ScheduleError, ScheduleKind, StageLink};

/// Judges the list of one worker.
pub(super) struct List<'a> {
    schedule: &'a Schedule,
    /// Replica 0 of each stage.
    first_workers: &'a [usize],
    worker: usize,
    /// Rounds from a step to the first forward that reads what it made.
    lag: usize,
    /// Position in the list.
    at: usize,
    /// Own minibatches whose forward and backward are done, in their order.
    forwards: usize,
    backwards: usize,
    /// Rounds whose all-reduce and step are done, in their order.
    reduces: usize,
    steps: usize,
    /// Stages whose activations or gradients have come in for the next forward or backward.
    received: [HashSet<usize>; 2],
    /// Stages that still wait for the activations or gradients of the last forward or backward.
    unsent: [HashSet<usize>; 2],
    /// Stages that a forward and a backward receive from.
    sources: [HashSet<usize>; 2],
    /// Stages that they send to.
    readers: [HashSet<usize>; 2],
}

const ACTIVATIONS: usize = 0;
const GRADIENTS: usize = 1;

impl<'a> List<'a> {
    pub(super) fn new(schedule: &'a Schedule, first_workers: &'a [usize], worker: usize) -> Self {
        let stage = schedule.roles[worker].stage;
        let before = |l: &StageLink| (l.to == stage).then_some(l.from);
        let behind = |l: &StageLink| (l.from == stage).then_some(l.to);
        let links = &schedule.links;
        let with_gradient = || links.iter().filter(|l| l.gradient);
        Self {
            schedule,
            first_workers,
            worker,
            lag: schedule.pace.lag(&schedule.stages, stage),
            at: 0,
            forwards: 0,
            backwards: 0,
            reduces: 0,
            steps: 0,
            received: [HashSet::new(), HashSet::new()],
            unsent: [HashSet::new(), HashSet::new()],
            sources: [
                links.iter().filter_map(before).collect(),
                with_gradient().filter_map(behind).collect(),
            ],
            readers: [
                links.iter().filter_map(behind).collect(),
                with_gradient().filter_map(before).collect(),
            ],
        }
    }

    pub(super) fn check(mut self) -> Result<(), ScheduleError> {
        let operations = &self.schedule.operations[self.worker];
        while self.at < operations.len() {
            if let Err(rule) = self.accept(operations[self.at]) {
                return Err(self.schedule.broken(self.worker, self.at, rule));
            }
            self.at += 1;
        }
        self.finish()
            .map_err(|rule| self.schedule.broken(self.worker, self.at, rule))
    }

    fn stage(&self) -> usize {
        self.schedule.roles[self.worker].stage
    }

    /// The `i`-th minibatch that this worker serves, if there is one.
    fn minibatch(&self, i: usize) -> Option<usize> {
        let role = self.schedule.roles[self.worker];
        let minibatch = i * self.schedule.stages[role.stage].replicas + role.replica;
        (minibatch < self.schedule.minibatches).then_some(minibatch)
    }

    /// The version that a minibatch reads.
    fn version(&self, minibatch: usize) -> usize {
        let shape = &self.schedule.stages[self.stage()];
        Pace::version(self.lag, self.schedule.pace.round_of(shape, minibatch))
    }

    fn accept(&mut self, op: Op) -> Result<(), &'static str> {
        let shape = self.schedule.stages[self.stage()];
        match op {
            Op::ReceiveActivations {
                minibatch,
                stage,
                peer,
            } => self.receive(
                ACTIVATIONS,
                self.minibatch(self.forwards),
                minibatch,
                stage,
                peer,
            ),
            Op::ReceiveGradients {
                minibatch,
                stage,
                peer,
            } => self.receive(
                GRADIENTS,
                self.minibatch(self.backwards),
                minibatch,
                stage,
                peer,
            ),
            Op::SendActivations {
                minibatch,
                stage,
                peer,
            } => {
                let last = self.forwards.checked_sub(1).and_then(|q| self.minibatch(q));
                self.send(ACTIVATIONS, last, minibatch, stage, peer)
            }
            Op::SendGradients {
                minibatch,
                stage,
                peer,
            } => {
                let last = self
                    .backwards
                    .checked_sub(1)
                    .and_then(|q| self.minibatch(q));
                self.send(GRADIENTS, last, minibatch, stage, peer)
            }
            Op::Forward { minibatch, version } => {
                require(
                    self.minibatch(self.forwards) == Some(minibatch),
                    "a replica's forwards are those of its minibatches, in order",
                )?;
                require(
                    version == self.version(minibatch),
                    "the forward of round q reads the version after round q - lag",
                )?;
                require(version <= self.steps, "a version is made before it is read")?;
                self.compute(ACTIVATIONS)?;
                self.forwards += 1;
                require(
                    self.forwards - self.backwards <= shape.depth
                        || self.schedule.pace.kind == ScheduleKind::Gpipe,
                    "a replica has at most K minibatches in flight",
                )
            }
            Op::Backward { minibatch, version } => {
                require(
                    self.backwards < self.forwards
                        && self.minibatch(self.backwards) == Some(minibatch),
                    "a backward follows its forward, in the order of the minibatches",
                )?;
                require(
                    version == self.version(minibatch),
                    "a backward reads the version that its forward read",
                )?;
                require(
                    self.schedule.pace.kind != ScheduleKind::Gpipe
                        || self.has_forwards_beside(minibatch),
                    "all forwards of a batch come before its backwards",
                )?;
                self.compute(GRADIENTS)?;
                self.backwards += 1;
                Ok(())
            }
            Op::AllReduce { round } => {
                require(
                    shape.replicas > 1,
                    "an unreplicated stage has nothing to all-reduce",
                )?;
                require(
                    round == self.reduces && self.has_gradients_of(round),
                    "the all-reduce of a round follows its backward, in order",
                )?;
                self.reduces += 1;
                Ok(())
            }
            Op::Step { round, minibatches } => {
                require(
                    round == self.steps && self.has_gradients_of(round),
                    "the step of a round follows its backward, in order",
                )?;
                let length = self.schedule.pace.round_length(&shape);
                let whole = self.schedule.minibatches.saturating_sub(round * length);
                require(
                    minibatches == length.min(whole),
                    "a step averages over the minibatches of its round",
                )?;
                require(
                    shape.replicas == 1 || round < self.reduces,
                    "the step of a round follows its all-reduce",
                )?;
                self.steps += 1;
                Ok(())
            }
        }
    }

    /// Whether this replica's share of the round's gradient is there (it may have none in the last round).
    fn has_gradients_of(&self, round: usize) -> bool {
        let shape = &self.schedule.stages[self.stage()];
        let pace = self.schedule.pace;
        let done = |minibatch| pace.round_of(shape, minibatch) > round;
        round < pace.rounds(shape, self.schedule.minibatches)
            && self.minibatch(self.backwards).is_none_or(done)
    }

    /// Whether the replica is through with the forwards of all its minibatches in the round of this one.
    fn has_forwards_beside(&self, minibatch: usize) -> bool {
        let pace = self.schedule.pace;
        let shape = &self.schedule.stages[self.stage()];
        let next = self.minibatch(self.forwards);
        next.is_none_or(|next| pace.round_of(shape, next) > pace.round_of(shape, minibatch))
    }

    fn is_peer(&self, stage: usize, minibatch: usize, peer: usize) -> bool {
        let stages = &self.schedule.stages;
        stages
            .get(stage)
            .is_some_and(|s| peer == self.first_workers[stage] + minibatch % s.replicas)
    }

    fn receive(
        &mut self,
        kind: usize,
        due: Option<usize>,
        minibatch: usize,
        stage: usize,
        peer: usize,
    ) -> Result<(), &'static str> {
        require(
            due == Some(minibatch) && self.is_peer(stage, minibatch, peer),
            "a receive is for the next minibatch, from the replica that serves it",
        )?;
        require(
            self.received[kind].insert(stage),
            "a message is received once",
        )
    }

    fn send(
        &mut self,
        kind: usize,
        last: Option<usize>,
        minibatch: usize,
        stage: usize,
        peer: usize,
    ) -> Result<(), &'static str> {
        require(
            last == Some(minibatch) && self.is_peer(stage, minibatch, peer),
            "a send is of the minibatch just computed, to the replica that serves it",
        )?;
        require(
            self.unsent[kind].remove(&stage),
            "a message goes once to each stage that reads it",
        )
    }

    fn compute(&mut self, kind: usize) -> Result<(), &'static str> {
        require(
            self.received[kind] == self.sources[kind],
            "everything that is read has been received",
        )?;
        require(
            self.unsent[kind].is_empty(),
            "everything that others read is sent",
        )?;
        self.received[kind].clear();
        self.unsent[kind].clone_from(&self.readers[kind]);
        Ok(())
    }

    fn finish(&self) -> Result<(), &'static str> {
        let shape = self.schedule.stages[self.stage()];
        require(
            self.minibatch(self.forwards).is_none() && self.backwards == self.forwards,
            "every minibatch goes forward and backward once",
        )?;
        require(
            self.steps == self.schedule.pace.rounds(&shape, self.schedule.minibatches),
            "every round ends with a step",
        )?;
        require(
            self.unsent.iter().all(HashSet::is_empty),
            "everything that others read is sent",
        )
    }
}

fn require(holds: bool, rule: &'static str) -> Result<(), &'static str> {
    if holds { Ok(()) } else { Err(rule) }
}
