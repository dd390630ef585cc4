//! Proves a schedule free of deadlock and right in its weight versions, before anything runs.
//!
//! Each worker's list is first judged on its own (every minibatch of its forward and backward once, versions by
//! the rule, rounds in order), then all lists are executed together symbolically: sends never wait, receives
//! wait for their message, steps wait for every replica's gradients. Since no operation of one worker can take
//! away what another waits for, a run that gets stuck proves a deadlock and a run that ends proves there is none.

use std::collections::{BTreeMap, HashSet};

use super::list::List;
use super::{Op, Schedule, first_workers};

/// What is wrong with a schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// Upstream never has enough minibatches under way to fill one round of a replicated stage.
    #[error(
        "stage {stage} needs {needed} minibatches for a round, but stage {upstream} admits only {admitted} \
         (replicas x depth): raise the depth of stage {upstream}"
    )]
    Admission {
        /// The replicated stage.
        stage: usize,
        /// Minibatches of one of its rounds.
        needed: usize,
        /// The stage before it.
        upstream: usize,
        /// Its replicas times its depth.
        admitted: usize,
    },
    /// No worker can go on.
    #[error("deadlock: worker {worker} waits for ever at operation {position}, {operation}")]
    Deadlock {
        /// The first of the waiting workers.
        worker: usize,
        /// Where in its list.
        position: usize,
        /// The operation it cannot carry out.
        operation: String,
    },
    /// An operation that breaks a rule.
    #[error("worker {worker}, operation {position} ({operation}): {rule}")]
    Broken {
        /// Worker.
        worker: usize,
        /// Where in its list; past its end if something is missing.
        position: usize,
        /// The operation.
        operation: String,
        /// The rule that it breaks.
        rule: &'static str,
    },
}

impl Schedule {
    /// Proves the schedule: no deadlock, right versions, every minibatch once, every message received.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(&self) -> Result<(), ScheduleError> {
        self.check_admission()?;
        let first_workers = first_workers(&self.stages);
        for worker in 0..self.operations.len() {
            List::new(self, &first_workers, worker).check()?;
        }
        self.execute()
    }

    /// A round of stage t can be under way at once only if every stage before admits as many minibatches.
    ///
    /// Where all stages step together a step waits for no more than what is in flight.
    fn check_admission(&self) -> Result<(), ScheduleError> {
        if !self.pace.has_own_rounds() {
            return Ok(());
        }
        for (stage, shape) in self.stages.iter().enumerate() {
            let needed = shape.replicas.min(self.minibatches);
            for (upstream, before) in self.stages[..stage].iter().enumerate() {
                let admitted = before.replicas.saturating_mul(before.depth);
                if admitted < needed {
                    return Err(ScheduleError::Admission {
                        stage,
                        needed,
                        upstream,
                        admitted,
                    });
                }
            }
        }
        Ok(())
    }

    /// Runs all lists together until all have ended or none can go on.
    fn execute(&self) -> Result<(), ScheduleError> {
        let mut position = vec![0; self.operations.len()];
        let mut messages: HashSet<Message> = HashSet::new();
        // Replicas of the stage that have begun the all-reduce of the round.
        let mut reduced: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        loop {
            let mut moved = false;
            for (worker, at) in position.iter_mut().enumerate() {
                let role = self.roles[worker];
                while let Some(op) = self.operations[worker].get(*at) {
                    let broken = |rule| self.broken(worker, *at, rule);
                    match *op {
                        Op::SendActivations { .. } | Op::SendGradients { .. } => {
                            if !messages.insert(Message::new(worker, op)) {
                                return Err(broken("a message is sent once"));
                            }
                        }
                        Op::ReceiveActivations { .. } | Op::ReceiveGradients { .. } => {
                            if !messages.remove(&Message::new(worker, op)) {
                                break;
                            }
                        }
                        Op::AllReduce { round } => {
                            *reduced.entry((role.stage, round)).or_default() += 1;
                        }
                        Op::Step { round, .. } => {
                            let replicas = self.stages[role.stage].replicas;
                            let begun = reduced.get(&(role.stage, round)).copied().unwrap_or(0);
                            if replicas > 1 && begun < replicas {
                                break;
                            }
                        }
                        Op::Forward { .. } | Op::Backward { .. } => {}
                    }
                    *at += 1;
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        for (worker, &at) in position.iter().enumerate() {
            if let Some(op) = self.operations[worker].get(at) {
                return Err(ScheduleError::Deadlock {
                    worker,
                    position: at,
                    operation: format!("{op:?}"),
                });
            }
        }
        match messages.iter().min() {
            Some(lost) => Err(self.broken(
                lost.to,
                self.operations[lost.to].len(),
                "every message that is sent is received",
            )),
            None => Ok(()),
        }
    }

    pub(super) fn broken(
        &self,
        worker: usize,
        position: usize,
        rule: &'static str,
    ) -> ScheduleError {
        let operation = self.operations[worker]
            .get(position)
            .map_or_else(|| "end".to_owned(), |op| format!("{op:?}"));
        ScheduleError::Broken {
            worker,
            position,
            operation,
            rule,
        }
    }
}

/// A tensor on its way, whichever end names it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Message {
    from: usize,
    to: usize,
    minibatch: usize,
    gradient: bool,
}

impl Message {
    fn new(worker: usize, op: &Op) -> Self {
        let (from, to, minibatch, gradient) = match *op {
            Op::SendActivations {
                minibatch, peer, ..
            } => (worker, peer, minibatch, false),
            Op::ReceiveActivations {
                minibatch, peer, ..
            } => (peer, worker, minibatch, false),
            Op::SendGradients {
                minibatch, peer, ..
            } => (worker, peer, minibatch, true),
            Op::ReceiveGradients {
                minibatch, peer, ..
            } => (peer, worker, minibatch, true),
            Op::Forward { .. } | Op::Backward { .. } | Op::AllReduce { .. } | Op::Step { .. } => {
                unreachable!("only sends and receives carry messages")
            }
        };
        Self {
            from,
            to,
            minibatch,
            gradient,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::schedule::{Pace, ScheduleKind, StageLink, StageShape, admit, noam};

    /// Replicas, depth beyond NOAM, delay, of each stage; which skip links exist; minibatches; the kind and how much
    /// more than the fewest minibatches make a step.
    fn pipelines() -> impl Strategy<Value = (Pace, Vec<StageShape>, Vec<StageLink>, usize)> {
        let stage = (1usize..5, 0usize..3, 0usize..2);
        let stages = proptest::collection::vec(stage, 1..5);
        let kind = prop_oneof![
            Just(ScheduleKind::OneFOneB),
            Just(ScheduleKind::VerticalSync),
            Just(ScheduleKind::TwoBw),
            Just(ScheduleKind::OneFOneBFlush),
            Just(ScheduleKind::Gpipe),
        ];
        (stages, any::<u16>(), 0usize..80, kind, 0usize..30).prop_map(
            |(stages, skips, minibatches, kind, more)| {
                let replicas: Vec<usize> = stages.iter().map(|s| s.0).collect();
                let mut shapes: Vec<StageShape> = stages
                    .iter()
                    .zip(noam(&replicas))
                    .map(|(&(replicas, more, delay), depth)| StageShape {
                        replicas,
                        depth: depth + more,
                        delay: if replicas > 1 { delay } else { 0 },
                    })
                    .collect();
                admit(&mut shapes);
                let least = Pace::new(kind, &shapes, None).unwrap().microbatches;
                let rounds = crate::schedule::whole_rounds(replicas);
                let given = match kind {
                    ScheduleKind::OneFOneBFlush | ScheduleKind::Gpipe => 1 + more,
                    _ => least + more / 10 * rounds,
                };
                let pace = Pace::new(kind, &shapes, Some(given)).unwrap();
                (pace, shapes, links(stages.len(), skips), minibatches)
            },
        )
    }

    fn links(stages: usize, skips: u16) -> Vec<StageLink> {
        let pairs = (0..stages).flat_map(|from| (from + 1..stages).map(move |to| (from, to)));
        pairs
            .enumerate()
            .filter(|&(i, (from, to))| {
                to == from + 1
                    || skips
                        .checked_shr(u32::try_from(i).unwrap())
                        .is_some_and(|bits| bits & 1 == 1)
            })
            .map(|(i, (from, to))| StageLink {
                from,
                to,
                gradient: to == from + 1 || i % 3 != 0,
            })
            .collect()
    }

    proptest! {
        #[test]
        fn what_the_generator_makes_at_noam_or_deeper_is_right(
            (pace, shapes, links, minibatches) in pipelines()
        ) {
            let schedule = Schedule::new(pace, &shapes, &links, minibatches).unwrap();
            prop_assert_eq!(schedule.check(), Ok(()));
            for (worker, role) in schedule.roles.iter().enumerate() {
                let shape = shapes[role.stage];
                let holding = pace.holding(&shapes, role.stage);
                prop_assert!(schedule.versions_held(worker) <= holding.versions);
                prop_assert!(schedule.stashes_held(worker) <= holding.stashes);
                prop_assert!(schedule.gradients_held(worker) <= holding.gradients);
                prop_assert!(holding.stashes <= shape.depth || pace.kind == ScheduleKind::Gpipe);
            }
        }

        #[test]
        fn any_operation_left_out_or_doubled_is_noticed(
            (pace, shapes, links, minibatches) in pipelines(), at in any::<prop::sample::Index>(), double: bool
        ) {
            let mut schedule = Schedule::new(pace, &shapes, &links, minibatches + 1).unwrap();
            let places: Vec<(usize, usize)> = schedule
                .operations
                .iter()
                .enumerate()
                .flat_map(|(w, ops)| (0..ops.len()).map(move |i| (w, i)))
                .collect();
            let (worker, i) = places[at.index(places.len())];
            if double {
                let op = schedule.operations[worker][i];
                schedule.operations[worker].insert(i, op);
            } else {
                schedule.operations[worker].remove(i);
            }
            prop_assert!(schedule.check().is_err());
        }

        #[test]
        fn a_wrong_version_is_noticed(
            (pace, shapes, links, minibatches) in pipelines(), at in any::<prop::sample::Index>()
        ) {
            let mut schedule = Schedule::new(pace, &shapes, &links, minibatches + 1).unwrap();
            let mut versions: Vec<&mut usize> = schedule
                .operations
                .iter_mut()
                .flatten()
                .filter_map(|op| match op {
                    Op::Forward { version, .. } | Op::Backward { version, .. } => Some(version),
                    _ => None,
                })
                .collect();
            let at = at.index(versions.len());
            *versions[at] += 1;
            prop_assert!(schedule.check().is_err());
        }
    }

    fn pair(first: StageShape, second: StageShape) -> Schedule {
        let link = StageLink {
            from: 0,
            to: 1,
            gradient: true,
        };
        Schedule::one_f_one_b(&[first, second], &[link], 60).unwrap()
    }

    fn shape(replicas: usize, depth: usize) -> StageShape {
        StageShape {
            replicas,
            depth,
            delay: 0,
        }
    }

    #[test]
    fn one_to_fifteen_needs_a_round_of_fifteen_admitted() {
        let error = pair(shape(1, 14), shape(15, 1)).check().unwrap_err();
        assert_eq!(
            error,
            ScheduleError::Admission {
                stage: 1,
                needed: 15,
                upstream: 0,
                admitted: 14
            }
        );
        assert_eq!(pair(shape(1, 15), shape(15, 1)).check(), Ok(()));
    }

    #[test]
    fn gpipe_with_a_backward_between_the_forwards_is_noticed() {
        let shapes = [shape(1, 2), shape(1, 1)];
        let link = StageLink {
            from: 0,
            to: 1,
            gradient: true,
        };
        let pace = |kind| Pace::new(kind, &shapes, Some(4)).unwrap();
        let flushed = pace(ScheduleKind::OneFOneBFlush);
        let mut schedule = Schedule::new(flushed, &shapes, &[link], 8).unwrap();
        assert_eq!(schedule.check(), Ok(()));
        schedule.pace = pace(ScheduleKind::Gpipe);
        let error = schedule.check().unwrap_err();
        assert!(error.to_string().contains("all forwards"), "{error}");
    }

    #[test]
    fn a_warm_up_that_upstream_cannot_feed_is_a_deadlock() {
        // Stage 1 wants three forwards before its first backward, stage 0 admits two.
        let error = pair(shape(1, 2), shape(1, 3)).check().unwrap_err();
        assert!(matches!(error, ScheduleError::Deadlock { .. }), "{error}");
    }

    #[test]
    fn a_message_to_the_wrong_replica_is_noticed() {
        let mut schedule = pair(shape(1, 3), shape(2, 1));
        for op in &mut schedule.operations[0] {
            if let Op::SendActivations {
                peer, minibatch, ..
            } = op
                && *minibatch == 7
            {
                *peer = 1;
            }
        }
        let error = schedule.check().unwrap_err();
        assert!(
            matches!(error, ScheduleError::Broken { worker: 0, .. }),
            "{error}"
        );
    }
}
