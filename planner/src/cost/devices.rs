//! Costs of layers that are placed freely on devices: several pieces of the model on one device, no replicas.

use super::stage::{Machine, StageSums};
use crate::graph::LayerGraph;

/// What each device has to do for a minibatch.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceCosts {
    /// Sums over the layers of each device, with what it sends to and receives from others.
    pub sums: Vec<StageSums>,
    /// Seconds per minibatch that its fuller resource is taken.
    pub loads: Vec<f64>,
}

impl DeviceCosts {
    /// Costs of layer i on device `device_of[i]` of `devices`.
    ///
    /// A tensor is sent once to each device that reads it, its gradient comes back from each; what stays on a device
    /// costs nothing.
    #[must_use]
    pub fn new(graph: &LayerGraph, device_of: &[usize], devices: usize, machine: &Machine) -> Self {
        let mut sums = vec![StageSums::default(); devices];
        for (layer, &device) in device_of.iter().enumerate() {
            sums[device].add(graph.layer(layer));
        }
        for tensor in graph.tensors() {
            let from = device_of[tensor.producer];
            for (i, &reader) in tensor.readers.iter().enumerate() {
                let to = device_of[reader];
                let again = tensor.readers[..i].iter().any(|&r| device_of[r] == to);
                if to == from || again {
                    continue;
                }
                sums[from].traffic.output += tensor.bytes;
                sums[from].traffic.output_gradient += tensor.gradient_bytes;
                sums[to].traffic.input += tensor.bytes;
                sums[to].traffic.input_gradient += tensor.gradient_bytes;
            }
        }
        let loads = sums.iter().map(|sums| sums.loads(1, machine).largest());
        Self {
            loads: loads.collect(),
            sums,
        }
    }

    /// The largest load.
    #[must_use]
    pub fn bottleneck(&self) -> f64 {
        self.loads.iter().copied().fold(0.0, f64::max)
    }

    /// Bytes of the fullest device with so many minibatches in flight.
    #[must_use]
    pub fn memory(&self, depth: usize) -> f64 {
        let memory = self.sums.iter().map(|sums| sums.memory(1, depth, 0));
        memory.fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn what_stays_on_a_device_is_not_sent() {
        // L0's tensor is read by L1 and L3, on another device, and by L2 on its own.
        let mut profile = testing::chain(&[3.0; 4], &[0; 4], &[7, 5, 3]);
        for to in ["L2", "L3"] {
            let mut edge = profile.edges[0].clone();
            edge.to = to.to_owned();
            profile.edges.push(edge);
        }
        let machine = Machine {
            bandwidth: 1.0,
            latency: 0.0,
            message_s_per_byte: 0.0,
            reduce_s_per_byte: 0.0,
            round: None,
        };
        let costs = DeviceCosts::new(&LayerGraph::new(&profile), &[0, 1, 0, 1], 2, &machine);
        // Forward 7 (once) and 3 leave device 0 and 5 comes in; gradients the other way.
        assert_eq!(costs.sums[0].traffic.output, 10.0);
        assert_eq!(costs.sums[0].traffic.input, 5.0);
        assert_eq!(costs.loads, [15.0, 15.0]);
    }
}
