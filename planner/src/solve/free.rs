//! Layers placed freely on devices, without replicas: better than any cut into convex stages where a device can take a
//! little of what is left over elsewhere.
//!
//! That is a hard problem (without tensors it is makespan scheduling). A local search moves runs of layers off the
//! fullest device and swaps layers with it, from the best convex stages on and from disturbed copies of what it finds;
//! the work that it may do is counted, not timed, so that the answer is always the same. What it finds is called
//! optimal only if it meets the bound: all work spread evenly, or the largest layer.

use crate::cost::Machine;
use crate::cost::devices::DeviceCosts;
use crate::graph::LayerGraph;

/// A free placement.
#[derive(Clone, Debug, PartialEq)]
pub struct Free {
    /// The device of each layer.
    pub device_of: Vec<usize>,
    /// Its largest load, seconds per minibatch.
    pub bottleneck: f64,
    /// No placement has a smaller one.
    pub lower_bound: f64,
}

/// Layers and tensors that all evaluations together look at.
const MOST_WORK: usize = 200_000_000;
/// Disturbed copies of the best placement that are improved again.
const RESTARTS: usize = 100;
/// Longest run of a device's layers that is moved at once.
const LONGEST_RUN: usize = 64;

/// The best placement that is found for so many devices, each of `memory` bytes with `devices` minibatches in flight.
///
/// Begins with `start`, the device of each layer, which has to fit.
#[must_use]
pub fn solve(
    graph: &LayerGraph,
    machine: &Machine,
    devices: usize,
    memory: f64,
    start: Vec<usize>,
) -> Free {
    let mut search = Search {
        graph,
        machine,
        devices,
        memory,
        left: MOST_WORK,
    };
    let mut best = (search.key(&start), start);
    search.improve(&mut best);
    let mut random = 0x9e37_79b9_7f4a_7c15;
    for _ in 0..RESTARTS {
        let mut other = best.1.clone();
        search.disturb(&mut other, &mut random);
        let mut other = (search.key(&other), other);
        search.improve(&mut other);
        if other.0 < best.0 {
            best = other;
        }
        if search.left == 0 {
            break;
        }
    }
    let work = |layer: &crate::graph::Layer| layer.forward + layer.backward + layer.step;
    let total: f64 = graph.layers().map(work).sum();
    let largest = graph.layers().map(work).fold(0.0, f64::max);
    let bottleneck = DeviceCosts::new(graph, &best.1, devices, machine).bottleneck();
    Free {
        device_of: best.1,
        bottleneck,
        lower_bound: largest.max(total / devices as f64).min(bottleneck),
    }
}

/// What is made smaller: what the memory is exceeded by, the largest load, and how uneven all are.
type Key = (f64, f64, f64);

struct Search<'a> {
    graph: &'a LayerGraph,
    machine: &'a Machine,
    devices: usize,
    memory: f64,
    left: usize,
}

impl Search<'_> {
    fn key(&mut self, device_of: &[usize]) -> Key {
        let size = self.graph.len() + self.graph.tensors().len();
        self.left = self.left.saturating_sub(size);
        let costs = DeviceCosts::new(self.graph, device_of, self.devices, self.machine);
        let over = (costs.memory(self.devices) - self.memory).max(0.0);
        let squares = costs.loads.iter().map(|load| load * load).sum();
        (over, costs.bottleneck(), squares)
    }

    /// Takes the best step off the fullest device until none is left.
    fn improve(&mut self, (key, device_of): &mut (Key, Vec<usize>)) {
        while self.left > 0 {
            let costs = DeviceCosts::new(self.graph, device_of, self.devices, self.machine);
            let fullest = (0..self.devices)
                .max_by(|&a, &b| costs.loads[a].total_cmp(&costs.loads[b]))
                .unwrap_or(0);
            let mut best = *key;
            let mut step: Option<Vec<(usize, usize)>> = None;
            for changes in self.steps(device_of, fullest) {
                if self.left == 0 {
                    break;
                }
                let before: Vec<usize> =
                    changes.iter().map(|&(layer, _)| device_of[layer]).collect();
                for &(layer, device) in &changes {
                    device_of[layer] = device;
                }
                let tried = self.key(device_of);
                for (&(layer, _), &device) in changes.iter().zip(&before) {
                    device_of[layer] = device;
                }
                if tried < best {
                    best = tried;
                    step = Some(changes);
                }
            }
            let Some(changes) = step else { return };
            for (layer, device) in changes {
                device_of[layer] = device;
            }
            *key = best;
        }
    }

    /// Runs of the fullest device's layers moved elsewhere, and its layers swapped with others of about the same time.
    fn steps(&self, device_of: &[usize], fullest: usize) -> Vec<Vec<(usize, usize)>> {
        let own: Vec<usize> = (0..device_of.len())
            .filter(|&layer| device_of[layer] == fullest)
            .collect();
        let mut steps = Vec::new();
        for first in 0..own.len() {
            for length in 1..=LONGEST_RUN.min(own.len() - first) {
                let run = &own[first..first + length];
                let others = (0..self.devices).filter(|&device| device != fullest);
                steps.extend(others.map(|to| run.iter().map(|&layer| (layer, to)).collect()));
            }
        }
        for &layer in &own {
            for other in (0..device_of.len()).filter(|&other| device_of[other] != fullest) {
                let to = device_of[other];
                steps.push(vec![(layer, to), (other, fullest)]);
            }
        }
        steps
    }

    /// Moves some layers to where a layer that they exchange a tensor with is.
    fn disturb(&self, device_of: &mut [usize], random: &mut u64) {
        let mut next = |below: usize| {
            // xorshift64: any spread will do, as long as it is the same every time.
            *random ^= *random << 13;
            *random ^= *random >> 7;
            *random ^= *random << 17;
            (*random % below.max(1) as u64) as usize
        };
        let tensors = self.graph.tensors();
        if tensors.is_empty() {
            return;
        }
        for _ in 0..3 + device_of.len() / 30 {
            let tensor = &tensors[next(tensors.len())];
            let reader = tensor.readers[next(tensor.readers.len())];
            if next(2) == 0 {
                device_of[reader] = device_of[tensor.producer];
            } else {
                device_of[tensor.producer] = device_of[reader];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing;

    fn machine() -> Machine {
        Machine {
            bandwidth: 1e4,
            latency: 0.0,
            message_s_per_byte: 1e-6,
            reduce_s_per_byte: 0.0,
            round: None,
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]
        #[test]
        fn it_finds_what_brute_force_finds_on_small_graphs_or_says_it_is_not_proved(
            layers in proptest::collection::vec((1u32..30, 0u64..60), 1..8),
            devices in 1usize..4,
        ) {
            let ms: Vec<f64> = layers.iter().map(|l| f64::from(l.0)).collect();
            let edges: Vec<u64> = layers[1..].iter().map(|l| l.1).collect();
            let profile = testing::chain(&ms, &vec![0; layers.len()], &edges);
            let graph = LayerGraph::new(&profile);
            let mut best = f64::INFINITY;
            for code in 0..devices.pow(u32::try_from(layers.len()).unwrap()) {
                let place = |i| code / devices.pow(i) % devices;
                let device_of: Vec<usize> = (0..u32::try_from(layers.len()).unwrap()).map(place).collect();
                let costs = DeviceCosts::new(&graph, &device_of, devices, &machine());
                best = best.min(costs.bottleneck());
            }
            let found = solve(&graph, &machine(), devices, f64::INFINITY, vec![0; layers.len()]);
            prop_assert!(found.lower_bound <= best * (1.0 + 1e-9));
            prop_assert!(found.bottleneck >= best * (1.0 - 1e-9));
            // Small enough for the search to end in the optimum, or all but.
            prop_assert!(found.bottleneck <= best * 1.15, "{} is far from {}", found.bottleneck, best);
        }
    }

    #[test]
    fn what_is_left_over_goes_to_whoever_has_room() {
        // 4 1 4 3: in runs at best 4+1 | 4+3 or 4 | 1+4+3; freely 4+1... | 4+3 is 7, and 4 + 3 with 1 + 4 swapped: 6.
        let profile = testing::chain(&[4.0, 2.0, 4.0, 2.0], &[0; 4], &[0; 3]);
        let graph = LayerGraph::new(&profile);
        let found = solve(&graph, &machine(), 2, f64::INFINITY, vec![0; 4]);
        assert!((found.bottleneck - 6e-3).abs() < 1e-9);
        assert!((found.lower_bound - 6e-3).abs() < 1e-9);
    }
}
