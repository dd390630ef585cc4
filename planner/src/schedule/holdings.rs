//! What a worker holds at most while it carries out its schedule: counted from the operations themselves.

use std::collections::{BTreeMap, BTreeSet};

use super::{Op, Schedule};

impl Schedule {
    /// Largest number of weight versions that `worker` holds at once.
    ///
    /// A version lives from the step that makes it to its last reader's backward, and at least until the next
    /// step has read it; a step may write over a version that nobody needs any more.
    #[must_use]
    pub fn versions_held(&self, worker: usize) -> usize {
        let operations = &self.operations[worker];
        // Position of the last operation that needs each version.
        let mut last_use: BTreeMap<usize, usize> = BTreeMap::new();
        for (at, op) in operations.iter().enumerate() {
            match *op {
                Op::Forward { version, .. } | Op::Backward { version, .. } => {
                    last_use.insert(version, at);
                }
                Op::Step { round, .. } => {
                    last_use.insert(round, at);
                }
                _ => {}
            }
        }
        let mut born = BTreeMap::from([(0, 0)]);
        for (at, op) in operations.iter().enumerate() {
            if let Op::Step { round, .. } = *op {
                born.insert(round + 1, at);
            }
        }
        high_water(born.iter().map(|(version, &birth)| {
            // The newest version is never freed: it is what the schedule leaves behind.
            let newest = !born.contains_key(&(version + 1));
            let death = if newest {
                operations.len() + 1
            } else {
                last_use.get(version).copied().unwrap_or(birth)
            };
            (birth, death)
        }))
    }

    /// Largest number of minibatches whose stash `worker` holds at once.
    #[must_use]
    pub fn stashes_held(&self, worker: usize) -> usize {
        let mut held = 0usize;
        let mut most = 0;
        for op in &self.operations[worker] {
            match op {
                Op::Forward { .. } => held += 1,
                Op::Backward { .. } => held = held.saturating_sub(1),
                _ => {}
            }
            most = most.max(held);
        }
        most
    }

    /// Largest number of rounds whose gradients `worker` holds at once: from their backward to their step.
    #[must_use]
    pub fn gradients_held(&self, worker: usize) -> usize {
        let shape = &self.stages[self.roles[worker].stage];
        let mut open = BTreeSet::new();
        let mut most = 0;
        for op in &self.operations[worker] {
            match *op {
                Op::Backward { minibatch, .. } => {
                    open.insert(self.pace.round_of(shape, minibatch));
                }
                Op::AllReduce { round } => {
                    open.insert(round);
                }
                Op::Step { round, .. } => {
                    most = most.max(open.len());
                    open.remove(&round);
                }
                _ => {}
            }
        }
        most.max(open.len())
    }
}

/// Largest number of half-open intervals `[birth, death)` that overlap.
fn high_water(intervals: impl Iterator<Item = (usize, usize)>) -> usize {
    let mut events: Vec<(usize, i32)> = intervals
        .filter(|(birth, death)| birth < death)
        .flat_map(|(birth, death)| [(birth, 1), (death, -1)])
        .collect();
    // At the same place deaths come first (-1 < 1).
    events.sort_unstable();
    let mut live = 0;
    let mut most = 0;
    for (_, change) in events {
        live += change;
        most = most.max(live);
    }
    usize::try_from(most).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use crate::schedule::{Schedule, StageLink, StageShape};

    fn stage(replicas: usize, depth: usize, delay: usize) -> StageShape {
        StageShape {
            replicas,
            depth,
            delay,
        }
    }

    #[test]
    fn a_stage_holds_as_many_versions_and_stashes_as_it_is_deep() {
        let link = |from| StageLink {
            from,
            to: from + 1,
            gradient: true,
        };
        let shapes = [stage(1, 3, 0), stage(1, 2, 0), stage(1, 1, 0)];
        let s = Schedule::one_f_one_b(&shapes, &[link(0), link(1)], 20).unwrap();
        assert_eq!([0, 1, 2].map(|w| s.versions_held(w)), [3, 2, 1]);
        assert_eq!([0, 1, 2].map(|w| s.stashes_held(w)), [3, 2, 1]);
        assert_eq!([0, 1, 2].map(|w| s.gradients_held(w)), [1, 1, 1]);
    }

    #[test]
    fn a_delay_costs_a_second_gradient_buffer() {
        let s = Schedule::one_f_one_b(&[stage(2, 2, 1)], &[], 20).unwrap();
        assert_eq!(s.gradients_held(0), 2);
        assert_eq!(s.versions_held(0), 2);
    }

    #[test]
    fn a_short_schedule_holds_no_more_than_it_makes() {
        let s = Schedule::one_f_one_b(&[stage(1, 5, 0)], &[], 2).unwrap();
        assert_eq!(s.stashes_held(0), 2);
        assert_eq!(s.versions_held(0), 2);
    }
}
