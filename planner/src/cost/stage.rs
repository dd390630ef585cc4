//! The terms of one stage: sums over its layers in, loads and memory out.

use serde::{Deserialize, Serialize};

use crate::graph::Layer;
use crate::plan::Cluster;
use crate::schedule::Holding;

/// What the cost model needs to know of the machines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Goodput of each worker's link in each direction, bytes per second.
    pub bandwidth: f64,
    /// Seconds that one message takes besides its bytes.
    pub latency: f64,
    /// kappa for activations and gradients: seconds of the worker's core per byte sent or received.
    pub message_s_per_byte: f64,
    /// kappa for the all-reduce: seconds of the worker's core per byte sent, received or reduced.
    pub reduce_s_per_byte: f64,
    /// Minibatches between two steps, where all stages step together; none where a stage steps once per round of its
    /// own replicas.
    pub round: Option<f64>,
}

impl Machine {
    /// The machine of a cluster and of the kappa that a profile measured.
    ///
    /// Workers of one process hand tensors over by reference: that costs no core time. Their all-reduce does.
    #[must_use]
    pub fn new(cluster: &Cluster, communication_s_per_byte: f64) -> Self {
        Self {
            bandwidth: cluster.bandwidth_bytes_per_s,
            latency: cluster.latency_s,
            message_s_per_byte: if cluster.local {
                0.0
            } else {
                communication_s_per_byte
            },
            reduce_s_per_byte: communication_s_per_byte,
            round: None,
        }
    }

    /// Minibatches between two steps of a stage.
    #[must_use]
    pub fn round_of(&self, replicas: usize) -> f64 {
        self.round.unwrap_or(replicas as f64)
    }

    /// Seconds of the core that one replica spends on the all-reduce of one round.
    #[must_use]
    pub fn reduce_core_s(&self, replicas: usize, parameters: f64) -> f64 {
        // A ring sends and receives 2(r-1)/r of the weights and reduces (r-1)/r of them.
        let r = replicas as f64;
        self.reduce_s_per_byte * 5.0 * (r - 1.0) / r * parameters
    }
}

/// Bytes per minibatch between a stage and all others.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// A_out: activations sent forward, once per tensor and receiving stage.
    pub output: f64,
    /// Gradients that come back for them.
    pub output_gradient: f64,
    /// A_in: activations received, once per tensor.
    pub input: f64,
    /// Gradients sent back for them.
    pub input_gradient: f64,
}

impl Traffic {
    /// Bytes that leave the stage.
    #[must_use]
    pub fn sent(&self) -> f64 {
        self.output + self.input_gradient
    }

    /// Bytes that reach the stage.
    #[must_use]
    pub fn received(&self) -> f64 {
        self.input + self.output_gradient
    }
}

/// Sums over the layers of a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageSums {
    /// Sum of f.
    pub forward: f64,
    /// Sum of b.
    pub backward: f64,
    /// Sum of u.
    pub step: f64,
    /// W: bytes of weights.
    pub parameters: f64,
    /// Bytes of optimizer state.
    pub optimizer: f64,
    /// Bytes of stash of one minibatch.
    pub stash: f64,
    /// Bytes of the model's own inputs that its layers read.
    pub inputs: f64,
    /// Largest scratch of a layer: layers run one after the other.
    pub workspace: f64,
    /// What crosses the stage's border.
    pub traffic: Traffic,
}

/// Seconds per minibatch that one replica's resources are taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Loads {
    /// Forward, backward and step.
    pub compute: f64,
    /// The core's share of communication (kappa); zero where it runs beside the compute.
    pub core: f64,
    /// Activations and gradients on the link, in the busier direction.
    pub traffic: f64,
    /// All-reduce on the link.
    pub sync: f64,
}

impl Loads {
    /// Load of the device.
    #[must_use]
    pub fn device(&self) -> f64 {
        self.compute + self.core
    }

    /// Load of the link, in its busier direction.
    #[must_use]
    pub fn network(&self) -> f64 {
        self.traffic + self.sync
    }

    /// The larger of both.
    #[must_use]
    pub fn largest(&self) -> f64 {
        self.device().max(self.network())
    }
}

impl StageSums {
    /// Adds the layer's own terms (not its traffic).
    pub fn add(&mut self, layer: &Layer) {
        self.forward += layer.forward;
        self.backward += layer.backward;
        self.step += layer.step;
        self.parameters += layer.parameters;
        self.optimizer += layer.optimizer;
        self.stash += layer.stash;
        self.inputs += layer.inputs;
        self.workspace = self.workspace.max(layer.workspace);
    }

    /// The same stage if it keeps its input only and runs forward again before each backward: the forward's time counts
    /// twice, and of the stashes there is one at a time beside the inputs of the minibatches in flight.
    #[must_use]
    pub fn recomputing(&self) -> Self {
        Self {
            backward: self.backward + self.forward,
            stash: self.traffic.input + self.inputs,
            workspace: self.workspace + self.stash,
            ..*self
        }
    }

    /// Loads of each replica when the stage runs on `replicas` workers.
    ///
    /// A replica serves every r-th minibatch, and steps and all-reduces once per round, of r minibatches or of what the
    /// machine says.
    #[must_use]
    pub fn loads(&self, replicas: usize, machine: &Machine) -> Loads {
        let r = replicas as f64;
        let (sent, received) = (self.traffic.sent(), self.traffic.received());
        let messages = machine.message_s_per_byte * (sent + received);
        let ring = 2.0 * (r - 1.0) / r * self.parameters;
        let round = machine.round_of(replicas);
        Loads {
            compute: (self.forward + self.backward) / r + self.step / round,
            core: messages / r + machine.reduce_core_s(replicas, self.parameters) / round,
            traffic: sent.max(received) / r / machine.bandwidth,
            sync: ring / round / machine.bandwidth,
        }
    }

    /// Bytes that one replica needs at `depth` minibatches in flight with weight stashing.
    #[must_use]
    pub fn memory(&self, replicas: usize, depth: usize, delay: usize) -> f64 {
        let holding = Holding {
            versions: depth,
            gradients: 1 + delay,
            stashes: depth,
        };
        self.memory_of(replicas, holding)
    }

    /// Bytes that one replica needs.
    ///
    /// Weight versions, a gradient buffer per open round, optimizer state, the stashes, one minibatch's messages
    /// in and out, the ring's chunk, and the largest scratch of a layer.
    #[must_use]
    pub fn memory_of(&self, replicas: usize, holding: Holding) -> f64 {
        self.memory_shares(replicas, holding).total()
    }

    /// What [`Self::memory_of`] adds up.
    #[must_use]
    pub fn memory_shares(&self, replicas: usize, holding: Holding) -> MemoryShares {
        let chunk = if replicas > 1 {
            self.parameters / replicas as f64
        } else {
            0.0
        };
        MemoryShares {
            weights: holding.versions as f64 * self.parameters,
            gradients: holding.gradients as f64 * self.parameters,
            optimizer: self.optimizer,
            stashes: holding.stashes as f64 * self.stash,
            messages: self.traffic.sent() + self.traffic.received() + chunk,
            workspace: self.workspace,
        }
    }
}

/// What fills the memory of one replica, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryShares {
    /// Weight versions.
    pub weights: f64,
    /// Gradients of the rounds that are open.
    pub gradients: f64,
    /// Optimizer state.
    pub optimizer: f64,
    /// What the minibatches in flight keep for their backward.
    pub stashes: f64,
    /// One minibatch's messages in and out, and a piece of the all-reduce.
    pub messages: f64,
    /// The largest scratch of a layer.
    pub workspace: f64,
}

impl MemoryShares {
    /// All of them.
    #[must_use]
    pub fn total(&self) -> f64 {
        self.weights
            + self.gradients
            + self.optimizer
            + self.stashes
            + self.messages
            + self.workspace
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: Machine = Machine {
        bandwidth: 100.0,
        latency: 0.0,
        message_s_per_byte: 0.0,
        reduce_s_per_byte: 0.0,
        round: None,
    };

    fn sums() -> StageSums {
        StageSums {
            forward: 1.0,
            backward: 2.0,
            step: 0.5,
            parameters: 300.0,
            optimizer: 300.0,
            stash: 50.0,
            inputs: 5.0,
            workspace: 7.0,
            traffic: Traffic {
                output: 40.0,
                output_gradient: 40.0,
                input: 20.0,
                input_gradient: 0.0,
            },
        }
    }

    #[test]
    fn loads_by_hand() {
        let one = sums().loads(1, &MACHINE);
        assert_eq!((one.compute, one.core, one.sync), (3.5, 0.0, 0.0));
        // 40 leave, 20 + 40 arrive: the busier direction counts.
        assert_eq!(one.traffic, 0.6);
        let three = sums().loads(3, &MACHINE);
        assert!((three.compute - 3.5 / 3.0).abs() < 1e-12);
        // 2 (r-1) / r^2 W / B
        assert!((three.sync - 2.0 * 2.0 / 9.0 * 3.0).abs() < 1e-12);
        assert!((three.traffic - 0.2).abs() < 1e-12);
    }

    #[test]
    fn communication_takes_the_core_where_kappa_says_so() {
        let machine = Machine {
            message_s_per_byte: 0.01,
            reduce_s_per_byte: 0.02,
            ..MACHINE
        };
        // 100 bytes of messages, 5 * 1/2 * 300 of all-reduce, per round of two.
        let loads = sums().loads(2, &machine);
        assert!((loads.core - (1.0 + 15.0) / 2.0).abs() < 1e-12);
    }

    #[test]
    fn recomputing_runs_forward_twice_and_keeps_inputs() {
        let again = sums().recomputing();
        assert_eq!(again.loads(1, &MACHINE).compute, 4.5);
        // Of three minibatches the inputs, and the stash of one.
        let stashes = 3.0 * 50.0;
        let difference = sums().memory(1, 3, 0) - again.memory(1, 3, 0);
        assert_eq!(difference, stashes - (3.0 * (20.0 + 5.0) + 50.0));
    }

    #[test]
    fn memory_by_hand() {
        // Two versions and a gradient, state, two stashes, messages, scratch.
        assert_eq!(
            sums().memory(1, 2, 0),
            3.0 * 300.0 + 300.0 + 100.0 + 100.0 + 7.0
        );
        // A delayed round is a second gradient; replicas keep a chunk of the ring.
        let more = sums().memory(3, 2, 1) - sums().memory(1, 2, 0);
        assert_eq!(more, 300.0 + 100.0);
    }
}
