//! Enumerates every partition and every replication: the truth that the solvers are tested against.

use super::{Problem, Solution};
use crate::cost::Partition;

/// The best partition: smallest bottleneck, then fewest devices, fewest stages, least memory.
pub fn solve(problem: &Problem) -> Option<Solution> {
    let mut best: Option<((f64, usize, usize, f64), Partition)> = None;
    let layers = problem.layers();
    for cuts in 0u32..1 << (layers - 1) {
        let mut stages = Vec::new();
        let mut start = 0;
        for end in 1..=layers {
            if end == layers || cuts >> (end - 1) & 1 == 1 {
                stages.push(start..end);
                start = end;
            }
        }
        for_each_replication(problem, stages.len(), &mut Vec::new(), &mut |replicas| {
            let partition = Partition {
                stages: stages.clone(),
                replicas: replicas.to_vec(),
            };
            let memory = largest_memory(problem, &partition);
            if memory > problem.memory {
                return;
            }
            let load = stages
                .iter()
                .zip(replicas)
                .map(|(s, &r)| problem.load(s.start, s.end, r))
                .fold(0.0, f64::max);
            let key = (load, partition.workers(), stages.len(), memory);
            if best.as_ref().is_none_or(|(least, _)| key < *least) {
                best = Some((key, partition));
            }
        });
    }
    best.map(|(key, partition)| Solution {
        partition,
        bottleneck: key.0,
    })
}

/// Memory of the fullest worker.
pub fn largest_memory(problem: &Problem, partition: &Partition) -> f64 {
    let mut behind = 0;
    let mut most = 0.0f64;
    for (stage, &replicas) in partition.stages.iter().zip(&partition.replicas).rev() {
        most = most.max(problem.memory_of(stage.start, stage.end, replicas, behind));
        behind += replicas;
    }
    most
}

fn for_each_replication(
    problem: &Problem,
    stages: usize,
    replicas: &mut Vec<usize>,
    visit: &mut impl FnMut(&[usize]),
) {
    if replicas.len() == stages {
        visit(replicas);
        return;
    }
    let left = problem.devices - replicas.iter().sum::<usize>();
    for r in 1..=problem.most_replicas.min(left) {
        replicas.push(r);
        for_each_replication(problem, stages, replicas, visit);
        replicas.pop();
    }
}
