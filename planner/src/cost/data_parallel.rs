//! Data parallelism as frameworks run it: the honest opponent.

use super::stage::{Machine, StageSums};
use crate::graph::LayerGraph;

/// Gradients are all-reduced in buckets of about this size.
pub const BUCKET_BYTES: f64 = 25e6;

/// A backward whose gradients leave while it goes on.
#[derive(Clone, Debug, PartialEq)]
pub struct BucketedBackward {
    /// Seconds that it takes, with the core's share of the all-reduce.
    pub seconds: f64,
    /// What is all-reduced, in this order, one bucket after the other.
    pub buckets: Vec<Bucket>,
}

/// Gradients that are all-reduced together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bucket {
    /// Seconds from the start of the backward until they are there.
    pub ready: f64,
    /// Their bytes.
    pub bytes: f64,
}

impl BucketedBackward {
    /// The backward from the last layer to the first, whose gradients fill buckets of about [`BUCKET_BYTES`]; a single
    /// worker has nothing to all-reduce.
    #[must_use]
    pub fn new(graph: &LayerGraph, workers: usize, machine: &Machine) -> Self {
        let mut clock = 0.0;
        let mut buckets = Vec::new();
        let mut bytes = 0.0;
        let mut close = |clock: &mut f64, bytes: &mut f64| {
            *clock += machine.reduce_core_s(workers, *bytes);
            buckets.push(Bucket {
                ready: *clock,
                bytes: *bytes,
            });
            *bytes = 0.0;
        };
        for layer in graph.layers().rev() {
            clock += layer.backward;
            bytes += layer.parameters;
            if workers > 1 && bytes >= BUCKET_BYTES {
                close(&mut clock, &mut bytes);
            }
        }
        if workers > 1 && bytes > 0.0 {
            close(&mut clock, &mut bytes);
        }
        Self {
            seconds: clock,
            buckets,
        }
    }

    /// The same backward behind `seconds` of something else, for example of running forward again.
    #[must_use]
    pub fn after(mut self, seconds: f64) -> Self {
        self.seconds += seconds;
        for bucket in &mut self.buckets {
            bucket.ready += seconds;
        }
        self
    }
}

/// Seconds of one data-parallel step, in which each of `workers` carries one minibatch.
///
/// Forward, then backward from the last layer; gradients fill buckets, each of which enters the link as soon as it
/// is full and the link is free. The optimizer steps when both the backward and the last bucket are through.
#[must_use]
pub fn step_seconds(graph: &LayerGraph, workers: usize, machine: &Machine) -> f64 {
    let n = workers as f64;
    let ring = |bytes: f64| 2.0 * (n - 1.0) * (bytes / n / machine.bandwidth + machine.latency);
    let forward: f64 = graph.layers().map(|l| l.forward).sum();
    let step: f64 = graph.layers().map(|l| l.step).sum();
    let backward = BucketedBackward::new(graph, workers, machine);
    let link_free = backward.buckets.iter().fold(0.0f64, |free, bucket| {
        free.max(forward + bucket.ready) + ring(bucket.bytes)
    });
    link_free.max(forward + backward.seconds) + step
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
