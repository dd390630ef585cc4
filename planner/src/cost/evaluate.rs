//! Costs of a finished partition, computed from the layer graph itself.
//!
//! This shares no table with the solvers: what they promise is recomputed here before anything is printed.

use std::collections::BTreeMap;
use std::ops::Range;

use super::formula::Formula;
use super::placement::{CardLoad, Placement, Worst};
use super::stage::{Loads, Machine, StageSums};
use crate::graph::LayerGraph;
use crate::schedule::{Keeping, StageLink, noam};

/// Stages in pipeline order and how often each is replicated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// Layers of each stage: consecutive in execution order, together all of them.
    pub stages: Vec<Range<usize>>,
    /// Replicas of each stage.
    pub replicas: Vec<usize>,
    /// Whether each stage keeps its input only and runs forward again before its backward.
    pub recompute: Vec<bool>,
}

impl Partition {
    /// Stages that keep all that their backward needs.
    #[must_use]
    pub fn new(stages: Vec<Range<usize>>, replicas: Vec<usize>) -> Self {
        Self {
            recompute: vec![false; stages.len()],
            stages,
            replicas,
        }
    }

    /// The same stages, of which those recompute that would not fit `memory` bytes else, at the least depths.
    #[must_use]
    pub fn recomputing_where_needed(
        &self,
        graph: &LayerGraph,
        machine: &Machine,
        keeping: Keeping,
        memory: f64,
    ) -> Self {
        let mut plain = self.clone();
        plain.recompute.fill(false);
        let evaluation = Evaluation::new(graph, &plain, machine);
        let depths = noam(&self.replicas);
        let stages = evaluation.stages.iter().zip(depths);
        plain.recompute = stages
            .map(|(s, depth)| {
                let holding = keeping.holding(s.replicas, depth, 0);
                s.sums.memory_of(s.replicas, holding) > memory
            })
            .collect();
        plain
    }

    /// Workers that it takes.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.replicas.iter().sum()
    }
}

/// Bytes per minibatch from one stage to another and back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkBytes {
    /// The producing stage.
    pub from: usize,
    /// The reading stage.
    pub to: usize,
    /// Activations forward.
    pub activations: f64,
    /// Gradients back.
    pub gradients: f64,
}

impl LinkBytes {
    /// The link as the schedule knows it.
    #[must_use]
    pub fn link(&self) -> StageLink {
        StageLink {
            from: self.from,
            to: self.to,
            gradient: self.gradients > 0.0,
        }
    }
}

/// Costs of one stage.
#[derive(Clone, Debug, PartialEq)]
pub struct StageEvaluation {
    /// Its layers.
    pub layers: Range<usize>,
    /// Its replicas.
    pub replicas: usize,
    /// Sums over its layers, with the traffic that the other stages cause, and with its recomputation.
    pub sums: StageSums,
    /// What counts of the devices that its replicas are on.
    pub worst: Worst,
    /// Loads of each replica: of the slowest one, where they differ.
    pub loads: Loads,
}

/// Costs of a partition.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// In pipeline order.
    pub stages: Vec<StageEvaluation>,
    /// Every pair of stages that exchange tensors, ordered.
    pub links: Vec<LinkBytes>,
    /// Where the replicas are; none where every device has a link of its own.
    pub placement: Option<Placement>,
    /// What the servers' network cards carry; nothing without servers.
    pub cards: Vec<CardLoad>,
    /// The largest load of any resource under the cost model, seconds per minibatch.
    pub bottleneck: f64,
    /// Bytes that cross any link per minibatch: activations, gradients, all-reduce.
    pub bytes_per_minibatch: f64,
}

impl Evaluation {
    /// Evaluates a partition of the graph's layers into non-empty consecutive stages, each device on a link of its own.
    #[must_use]
    pub fn new(graph: &LayerGraph, partition: &Partition, machine: &Machine) -> Self {
        Self::placed(graph, partition, machine, None)
    }

    /// Evaluates a partition whose replicas are where the placement says.
    ///
    /// A stage goes at the pace of its slowest device; a server's card carries all that crosses the server's border.
    #[must_use]
    pub fn placed(
        graph: &LayerGraph,
        partition: &Partition,
        machine: &Machine,
        placement: Option<&Placement>,
    ) -> Self {
        let mut stage_of = vec![0; graph.len()];
        let mut sums: Vec<StageSums> = Vec::new();
        for (stage, layers) in partition.stages.iter().enumerate() {
            let mut stage_sums = StageSums::default();
            for layer in layers.clone() {
                stage_of[layer] = stage;
                stage_sums.add(graph.layer(layer));
            }
            sums.push(stage_sums);
        }
        let links = links(graph, &stage_of);
        for link in &links {
            sums[link.from].traffic.output += link.activations;
            sums[link.from].traffic.output_gradient += link.gradients;
            sums[link.to].traffic.input += link.activations;
            sums[link.to].traffic.input_gradient += link.gradients;
        }
        let stages: Vec<StageEvaluation> = sums
            .into_iter()
            .zip(partition.stages.iter().zip(&partition.replicas))
            .enumerate()
            .map(|(stage, (sums, (layers, &replicas)))| {
                let recompute = partition.recompute[stage];
                let sums = if recompute { sums.recomputing() } else { sums };
                let worst = placement.map_or_else(
                    || Worst::of_machine(machine),
                    |p| p.fabric.worst(&p.counts[stage]),
                );
                StageEvaluation {
                    layers: layers.clone(),
                    replicas,
                    sums,
                    worst,
                    loads: worst.loads(&sums, replicas, machine),
                }
            })
            .collect();
        let cards = placement.map_or_else(Vec::new, |p| {
            let parameters: Vec<f64> = stages.iter().map(|s| s.sums.parameters).collect();
            p.cards(&links, &parameters, machine)
        });
        let loads = stages.iter().map(|s| s.loads.largest());
        let loads = loads.chain(cards.iter().map(|card| card.seconds));
        let bottleneck = loads.fold(0.0, f64::max);
        let messages: f64 = links.iter().map(|l| l.activations + l.gradients).sum();
        let rings: f64 = stages.iter().map(|s| s.ring_bytes(machine)).sum();
        Self {
            stages,
            links,
            placement: placement.cloned(),
            cards,
            bottleneck,
            bytes_per_minibatch: messages + rings,
        }
    }

    /// The objective under another formula.
    #[must_use]
    pub fn objective(&self, formula: Formula, machine: &Machine) -> f64 {
        if formula == Formula::Ours {
            return self.bottleneck;
        }
        self.stages
            .iter()
            .map(|s| formula.load(&s.sums, s.replicas, machine))
            .fold(0.0, f64::max)
    }

    /// The stage whose load that objective is; none if it is that of a server's network card.
    #[must_use]
    pub fn objective_stage(&self, formula: Formula, machine: &Machine) -> Option<usize> {
        let largest = self.objective(formula, machine);
        self.stages.iter().position(|s| match formula {
            Formula::Ours => s.loads.largest() >= largest,
            _ => formula.load(&s.sums, s.replicas, machine) >= largest,
        })
    }

    /// Speed of the fastest device that the stage uses.
    #[must_use]
    pub fn fastest(&self, stage: usize) -> f64 {
        self.placement
            .as_ref()
            .map_or(1.0, |p| p.fabric.fastest(&p.counts[stage]))
    }

    /// Seconds that a byte takes between the nearest replicas of two stages.
    #[must_use]
    pub fn quickest(&self, from: usize, to: usize, machine: &Machine) -> f64 {
        let placed = self.placement.as_ref();
        placed.map_or(1.0 / machine.bandwidth, |p| {
            p.fabric.quickest(&p.counts[from], &p.counts[to])
        })
    }

    /// Seconds that a byte takes on the slowest edge of a replicated stage's ring.
    #[must_use]
    pub fn slowest_ring_edge(&self, stage: usize, machine: &Machine) -> f64 {
        let placed = self.placement.as_ref();
        placed.map_or(1.0 / machine.bandwidth, |p| {
            1.0 / p.fabric.ring_bandwidth(&p.counts[stage])
        })
    }

    /// The network card that is taken longest.
    #[must_use]
    pub fn fullest_card(&self) -> Option<&CardLoad> {
        let cards = self.cards.iter();
        cards.max_by(|a, b| a.seconds.total_cmp(&b.seconds))
    }
}

impl StageEvaluation {
    /// Bytes per minibatch that the stage's all-reduce puts on links, all replicas together.
    #[must_use]
    pub fn ring_bytes(&self, machine: &Machine) -> f64 {
        let r = self.replicas as f64;
        2.0 * (r - 1.0) * self.sums.parameters / machine.round_of(self.replicas)
    }
}

/// What flows between stages: each tensor once per receiving stage.
fn links(graph: &LayerGraph, stage_of: &[usize]) -> Vec<LinkBytes> {
    let mut bytes: BTreeMap<(usize, usize), (f64, f64)> = BTreeMap::new();
    for tensor in graph.tensors() {
        let from = stage_of[tensor.producer];
        let mut receivers: Vec<usize> = tensor.readers.iter().map(|&r| stage_of[r]).collect();
        receivers.sort_unstable();
        receivers.dedup();
        for to in receivers.into_iter().filter(|&to| to != from) {
            let sum = bytes.entry((from, to)).or_default();
            sum.0 += tensor.bytes;
            sum.1 += tensor.gradient_bytes;
        }
    }
    bytes
        .into_iter()
        .map(|((from, to), (activations, gradients))| LinkBytes {
            from,
            to,
            activations,
            gradients,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn a_tensor_counts_once_per_receiving_stage() {
        let mut profile = testing::chain(&[3.0; 4], &[10; 4], &[7, 5, 3]);
        // L0's tensor is read in all later layers, without a gradient.
        profile.edges[0].gradient = false;
        for to in ["L2", "L3"] {
            let mut edge = profile.edges[0].clone();
            edge.to = to.to_owned();
            profile.edges.push(edge);
        }
        let partition = Partition::new(vec![0..1, 1..2, 2..4], vec![2, 1, 1]);
        let machine = Machine {
            bandwidth: 1e3,
            latency: 0.0,
            message_s_per_byte: 0.0,
            reduce_s_per_byte: 0.0,
            round: None,
        };
        let e = Evaluation::new(&LayerGraph::new(&profile), &partition, &machine);
        let sizes: Vec<_> = e
            .links
            .iter()
            .map(|l| (l.from, l.to, l.activations, l.gradients))
            .collect();
        assert_eq!(
            sizes,
            [(0, 1, 7.0, 0.0), (0, 2, 7.0, 0.0), (1, 2, 5.0, 5.0)]
        );
        // 19 forward, 5 back, and the ring of two replicas: 2 * 1/2 * 10.
        assert_eq!(e.bytes_per_minibatch, 19.0 + 5.0 + 10.0);
        // Stage 2 receives 12 and sends 5 at 1 kB/s.
        assert!((e.stages[2].loads.traffic - 0.012).abs() < 1e-12);
        assert!((e.bottleneck - 0.012).abs() < 1e-12);
    }
}
