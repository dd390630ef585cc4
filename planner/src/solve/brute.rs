//! Enumerates every partition, every replication and what recomputes: the truth that the solvers are tested against.

use super::{Problem, Recompute, Solution};
use crate::cost::Partition;

/// The best partition: smallest bottleneck, then fewest devices, fewest stages, least memory.
pub fn solve(problem: &Problem) -> Option<Solution> {
    let mut best: Best = None;
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
            for flags in 0u32..1 << stages.len() {
                let mut partition = Partition::new(stages.clone(), replicas.to_vec());
                partition.recompute = (0..stages.len()).map(|s| flags >> s & 1 == 1).collect();
                judge(problem, partition, &mut best);
            }
        });
    }
    best.map(|(key, partition)| Solution {
        partition,
        bottleneck: key.0,
    })
}

type Best = Option<((f64, usize, usize, f64), Partition)>;

fn judge(problem: &Problem, partition: Partition, best: &mut Best) {
    let allowed = match problem.recompute {
        Recompute::Auto => true,
        Recompute::Never => !partition.recompute.contains(&true),
        Recompute::Always => !partition.recompute.contains(&false),
    };
    let memory = largest_memory(problem, &partition);
    if !allowed || memory > problem.memory {
        return;
    }
    let load = (0..partition.stages.len())
        .map(|stage| problem.load_of(&problem.stage(&partition, stage), partition.replicas[stage]))
        .fold(0.0, f64::max);
    let key = (load, partition.workers(), partition.stages.len(), memory);
    if best.as_ref().is_none_or(|(least, _)| key < *least) {
        *best = Some((key, partition));
    }
}

/// Memory of the fullest worker.
pub fn largest_memory(problem: &Problem, partition: &Partition) -> f64 {
    let mut behind = 0;
    let mut most = 0.0f64;
    for (stage, &replicas) in partition.replicas.iter().enumerate().rev() {
        let sums = problem.stage(partition, stage);
        most = most.max(problem.memory_of(&sums, replicas, behind));
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
