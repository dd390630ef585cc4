//! Data parallelism as frameworks run it: the honest opponent.

use super::stage::{Machine, StageSums};
use crate::graph::LayerGraph;

/// Gradients are all-reduced in buckets of about this size.
pub const BUCKET_BYTES: f64 = 25e6;

/// Seconds of one data-parallel step, in which each of `workers` carries one minibatch.
///
/// Forward, then backward from the last layer; gradients fill buckets, each of which enters the link as soon as it
/// is full and the link is free. The optimizer steps when both the backward and the last bucket are through.
#[must_use]
pub fn step_seconds(graph: &LayerGraph, workers: usize, machine: &Machine) -> f64 {
    let n = workers as f64;
    let ring = |bytes: f64| 2.0 * (n - 1.0) * (bytes / n / machine.bandwidth + machine.latency);
    let mut clock: f64 = graph.layers().map(|l| l.forward).sum();
    let mut link_free = 0.0f64;
    let mut bucket = 0.0;
    let mut core = 0.0;
    for layer in graph.layers().rev() {
        clock += layer.backward;
        bucket += layer.parameters;
        if bucket >= BUCKET_BYTES {
            clock += machine.reduce_core_s(workers, bucket);
            link_free = link_free.max(clock) + ring(bucket);
            bucket = 0.0;
        }
        core += layer.step;
    }
    if bucket > 0.0 && workers > 1 {
        clock += machine.reduce_core_s(workers, bucket);
        link_free = link_free.max(clock) + ring(bucket);
    }
    if workers == 1 {
        return clock + core;
    }
    clock.max(link_free) + core
}

/// Bytes of one worker: one copy of everything and one minibatch's stash.
#[must_use]
pub fn memory(graph: &LayerGraph, workers: usize) -> f64 {
    let mut sums = StageSums::default();
    for layer in graph.layers() {
        sums.add(layer);
    }
    sums.memory(workers, 1, 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn machine(bandwidth: f64) -> Machine {
        Machine {
            bandwidth,
            latency: 0.0,
            message_s_per_byte: 0.0,
            reduce_s_per_byte: 0.0,
            round: None,
        }
    }

    #[test]
    fn one_worker_only_computes() {
        let graph = LayerGraph::new(&testing::chain(&[3.0, 6.0], &[50_000_000, 9], &[1]));
        assert!((step_seconds(&graph, 1, &machine(1e9)) - 9e-3).abs() < 1e-12);
    }

    #[test]
    fn buckets_overlap_the_rest_of_the_backward() {
        // Forward 1 + 2 + 1 ms; backward 2 (L2), 4 (L1), 2 (L0).
        let weights = [30_000_000, 30_000_000, 0];
        let graph = LayerGraph::new(&testing::chain(&[3.0, 6.0, 3.0], &weights, &[1, 1]));
        // Two workers: a bucket of 30 MB takes 30 ms at 1 GB/s. L1's is ready at 10 ms, L0's waits for it.
        let step = step_seconds(&graph, 2, &machine(1e9));
        assert!((step - (10.0 + 30.0 + 30.0) * 1e-3).abs() < 1e-9, "{step}");
        // On a fast link the last bucket alone is exposed.
        let step = step_seconds(&graph, 2, &machine(30e9));
        assert!((step - (12.0 + 1.0) * 1e-3).abs() < 1e-9, "{step}");
    }

    #[test]
    fn small_gradients_share_the_last_bucket() {
        let graph = LayerGraph::new(&testing::chain(&[3.0, 3.0], &[1_000_000, 1_000_000], &[1]));
        let step = step_seconds(&graph, 2, &machine(1e9));
        assert!((step - (6.0 + 2.0) * 1e-3).abs() < 1e-9, "{step}");
    }
}
