//! The best stages for one minibatch at a time: nothing overlaps, so that it is the sum over the stages and over what
//! they send that has to be small, not the largest of them.
//!
//! A minibatch takes the forward and backward of every stage, the transfer over every border there and back, and the
//! first stage's step, behind which the next one begins (the other stages step meanwhile). That is a shortest path over
//! the places, of at most as many stages as there are devices; memory rules stages out. Time O(stages between places),
//! times the devices where the shortest path of all has more stages than that.

use super::{Problem, Solution};
use crate::cost::{Partition, StageSums};

/// The best way to run the layers up to some place.
#[derive(Clone, Copy, Debug)]
struct Prefix {
    seconds: f64,
    stages: usize,
    /// Bytes of the fullest worker.
    memory: f64,
    /// Where its last stage begins, and whether that recomputes.
    start: usize,
    recompute: bool,
}

impl Prefix {
    const NOTHING: Self = Self {
        seconds: 0.0,
        stages: 0,
        memory: 0.0,
        start: 0,
        recompute: false,
    };

    fn is_better(&self, than: Option<&Self>) -> bool {
        let key = |p: &Self| (p.stages, p.memory);
        than.is_none_or(|than| {
            self.seconds < than.seconds * (1.0 - 1e-12)
                || (self.seconds <= than.seconds && key(self) < key(than))
        })
    }
}

/// The stages, each on one device, that a minibatch gets through soonest, and the seconds that it takes (as
/// [`Solution::bottleneck`]); none if nothing fits the memory. Of equals the one with the fewest stages.
#[must_use]
pub fn solve(problem: &Problem) -> Option<Solution> {
    let places = problem.layers() + 1;
    let mut any = vec![None; places];
    any[0] = Some(Prefix::NOTHING);
    for start in 0..places - 1 {
        if let Some(before) = any[start] {
            extend(problem, start, &before, &mut any);
        }
    }
    let all = any[places - 1]?;
    if all.stages <= problem.devices {
        return Some(partition(&any, |place, _| any[place]));
    }
    // By the number of stages.
    let mut layers: Vec<Vec<Option<Prefix>>> = vec![vec![None; places]];
    layers[0][0] = Some(Prefix::NOTHING);
    for _ in 0..problem.devices {
        let last = layers.last()?;
        let mut next = vec![None; places];
        for (start, before) in last.iter().enumerate().take(places - 1) {
            if let Some(before) = before {
                extend(problem, start, before, &mut next);
            }
        }
        layers.push(next);
    }
    let mut best: Option<(usize, Prefix)> = None;
    for (stages, layer) in layers.iter().enumerate() {
        if let Some(whole) = layer[places - 1]
            && whole.is_better(best.as_ref().map(|(_, best)| best))
        {
            best = Some((stages, whole));
        }
    }
    let (stages, _) = best?;
    Some(partition(&layers[stages], |place, behind| {
        layers[stages - behind][place]
    }))
}

/// Offers every stage from a place to the places that it ends at.
fn extend(problem: &Problem, start: usize, before: &Prefix, at: &mut [Option<Prefix>]) {
    for (end, sums) in problem.table.stages_from(start) {
        let ways = problem.recompute.ways(sums);
        let fitting = ways
            .map(|(sums, recompute)| {
                let holding = problem.keeping.holding(1, 1, 0);
                (sums, recompute, sums.memory_of(1, holding))
            })
            .find(|(_, _, memory)| *memory <= problem.memory);
        let Some((sums, recompute, memory)) = fitting else {
            continue;
        };
        let offer = Prefix {
            seconds: before.seconds + seconds(problem, &sums, start == 0),
            stages: before.stages + 1,
            memory: before.memory.max(memory),
            start,
            recompute,
        };
        if offer.is_better(at[end].as_ref()) {
            at[end] = Some(offer);
        }
    }
}

/// What a stage adds to the way of a minibatch: its compute, what reaches it, and the gradient of that on its way back.
fn seconds(problem: &Problem, sums: &StageSums, is_first: bool) -> f64 {
    let machine = &problem.machine;
    let traffic = &sums.traffic;
    let messages = [traffic.input, traffic.input_gradient];
    let transfers: f64 = messages
        .iter()
        .filter(|&&bytes| bytes > 0.0)
        .map(|bytes| bytes / machine.bandwidth + machine.latency)
        .sum();
    let core = machine.message_s_per_byte * (traffic.sent() + traffic.received());
    let step = if is_first { sums.step } else { 0.0 };
    sums.forward + sums.backward + core + transfers + step
}

/// The stages that lead to the last place, given the best prefix of each place with so many stages behind it.
fn partition(last: &[Option<Prefix>], prefix: impl Fn(usize, usize) -> Option<Prefix>) -> Solution {
    let mut place = last.len() - 1;
    let bottleneck = last[place].map_or(0.0, |whole| whole.seconds);
    let (mut stages, mut recompute) = (Vec::new(), Vec::new());
    while place > 0 {
        let Some(before) = prefix(place, stages.len()) else {
            break;
        };
        stages.push(before.start..place);
        recompute.push(before.recompute);
        place = before.start;
    }
    stages.reverse();
    recompute.reverse();
    let replicas = vec![1; stages.len()];
    Solution {
        partition: Partition {
            recompute,
            ..Partition::new(stages, replicas)
        },
        bottleneck,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::problems;
    use super::*;

    /// Every way to cut the layers into stages.
    fn brute(problem: &Problem) -> Option<f64> {
        let layers = problem.layers();
        let mut best: Option<f64> = None;
        for cuts in 0..1u32 << (layers - 1) {
            let ends = (1..layers).filter(|&i| cuts >> (i - 1) & 1 == 1);
            let ends: Vec<usize> = ends.chain([layers]).collect();
            if ends.len() > problem.devices {
                continue;
            }
            let mut total = Some(0.0);
            let mut start = 0;
            for &end in &ends {
                let holding = problem.keeping.holding(1, 1, 0);
                let fitting = problem
                    .ways(start, end)
                    .find(|(sums, _)| sums.memory_of(1, holding) <= problem.memory);
                total = total
                    .zip(fitting)
                    .map(|(total, (sums, _))| total + seconds(problem, &sums, start == 0));
                start = end;
            }
            best = match (best, total) {
                (Some(best), Some(total)) => Some(best.min(total)),
                (best, total) => best.or(total),
            };
        }
        best
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn no_other_cuts_are_sooner_through(problem in problems()) {
            let found = solve(&problem);
            match (&found, brute(&problem)) {
                (None, None) => {}
                (Some(found), Some(exact)) => {
                    prop_assert!((found.bottleneck - exact).abs() <= 1e-9 * exact);
                    let stages = &found.partition.stages;
                    prop_assert!(stages.len() <= problem.devices);
                    prop_assert_eq!(stages[0].start, 0);
                    prop_assert_eq!(stages.last().unwrap().end, problem.layers());
                    prop_assert!(stages.windows(2).all(|pair| pair[0].end == pair[1].start));
                }
                other => prop_assert!(false, "{:?}", other),
            }
        }
    }
}
