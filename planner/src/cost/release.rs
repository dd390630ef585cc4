//! The released PipeDream optimizer's formula, on a flat cluster and on servers alike.
//!
//! It knows two levels: devices within a server, and servers. A group of stages runs as a pipeline within each of
//! some servers; to the level above, that pipeline is one stage, replicated as often as the group has servers. Loads
//! are sums of compute and synchronisation, and network cards are not shared. Its two inconsistencies are kept, as
//! its figures could not be compared otherwise: the weights of a level's first stage are synchronised as if every
//! device below had a card of its own, those of later ones are not; and a first stage never pays for what it sends.

use std::ops::Range;

use super::evaluate::Partition;
use crate::graph::LayerGraph;

/// Servers alike. A flat cluster is one server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hierarchy {
    /// Number of servers.
    pub servers: usize,
    /// Devices in each.
    pub per_server: usize,
    /// Bytes per second between servers.
    pub outer_bandwidth: f64,
    /// Bytes per second within a server.
    pub inner_bandwidth: f64,
}

/// Stages that form a pipeline within each of some servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Numbers of the stages.
    pub stages: Range<usize>,
    /// Servers that each run that pipeline.
    pub servers: usize,
}

/// Stages and, for each, its replicas within one server of its group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grouped {
    /// The stages.
    pub stages: Partition,
    /// Who runs them, in pipeline order.
    pub groups: Vec<Group>,
}

impl Grouped {
    /// The stages with their replicas in all servers.
    #[must_use]
    pub fn flatten(&self) -> Partition {
        let mut flat = self.stages.clone();
        for group in &self.groups {
            for replicas in &mut flat.replicas[group.stages.clone()] {
                *replicas *= group.servers;
            }
        }
        flat
    }
}

/// One level's links.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LevelLinks {
    /// Bytes per second.
    pub bandwidth: f64,
    /// Devices of the level below in one of this level's units.
    pub below: f64,
}

impl LevelLinks {
    /// Load of a level's first stage on `units`, seconds per minibatch. Nothing is counted for what it sends.
    pub fn first(&self, compute: f64, weights: f64, units: usize) -> f64 {
        let m = units as f64;
        (compute + 4.0 * (m - 1.0) * weights / (self.bandwidth * m * self.below)) / m
    }

    /// Load of any other stage; `cuts` are the bytes that cross the places where it begins and ends.
    pub fn later(&self, compute: f64, weights: f64, cuts: [f64; 2], units: usize) -> f64 {
        let m = units as f64;
        let device = (compute + 4.0 * (m - 1.0) * weights / (self.bandwidth * m)) / m;
        let links = cuts.map(|bytes| 2.0 * bytes / (self.bandwidth * m));
        device.max(links[0]).max(links[1])
    }
}

impl Hierarchy {
    pub(crate) fn inner(&self) -> LevelLinks {
        LevelLinks {
            bandwidth: self.inner_bandwidth,
            below: 1.0,
        }
    }

    pub(crate) fn outer(&self) -> LevelLinks {
        LevelLinks {
            bandwidth: self.outer_bandwidth,
            below: self.per_server as f64,
        }
    }

    /// No plan takes less: all compute spread evenly over all devices.
    #[must_use]
    pub fn bound(&self, graph: &LayerGraph) -> f64 {
        let compute: f64 = graph.layers().map(|l| l.forward + l.backward).sum();
        compute / (self.servers * self.per_server) as f64
    }

    /// Seconds per minibatch of a plan, and the stage that takes them; `activations`: whether they are counted.
    #[must_use]
    pub fn evaluate(&self, graph: &LayerGraph, plan: &Grouped, activations: bool) -> (f64, usize) {
        let stages = &plan.stages.stages;
        let compute = |layers: Range<usize>| -> f64 {
            layers
                .map(|l| graph.layer(l).forward + graph.layer(l).backward)
                .sum()
        };
        let weights =
            |layers: Range<usize>| -> f64 { layers.map(|l| graph.layer(l).parameters).sum() };
        let cuts = |layers: &Range<usize>| {
            [layers.start, layers.end].map(|place| {
                if activations {
                    crossing(graph, place)
                } else {
                    0.0
                }
            })
        };
        let (inner, outer) = (self.inner(), self.outer());
        let mut largest = (0.0, 0);
        for (number, group) in plan.groups.iter().enumerate() {
            let mut pipeline = (0.0, group.stages.start);
            for stage in group.stages.clone() {
                let (layers, replicas) = (stages[stage].clone(), plan.stages.replicas[stage]);
                let (c, w) = (compute(layers.clone()), weights(layers.clone()));
                let load = if stage == group.stages.start {
                    inner.first(c, w, replicas)
                } else {
                    inner.later(c, w, cuts(&layers), replicas)
                };
                if load > pipeline.0 {
                    pipeline = (load, stage);
                }
            }
            let layers = stages[group.stages.start].start..stages[group.stages.end - 1].end;
            let w = weights(layers.clone());
            let load = if number == 0 {
                outer.first(pipeline.0, w, group.servers)
            } else {
                outer.later(pipeline.0, w, cuts(&layers), group.servers)
            };
            if load > largest.0 {
                largest = (load, pipeline.1);
            }
        }
        largest
    }
}

/// Bytes of the tensors that a layer before `place` makes and one behind it reads.
fn crossing(graph: &LayerGraph, place: usize) -> f64 {
    let tensors = graph.tensors().iter();
    let crossing = tensors
        .filter(|t| t.producer < place && t.readers.last().is_some_and(|&reader| reader >= place));
    crossing.map(|t| t.bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn two_servers_by_hand() {
        let graph = LayerGraph::new(&testing::chain(
            &[6000.0, 3000.0, 3000.0],
            &[100, 200, 400],
            &[50, 30],
        ));
        let hierarchy = Hierarchy {
            servers: 3,
            per_server: 2,
            outer_bandwidth: 10.0,
            inner_bandwidth: 100.0,
        };
        let plan = Grouped {
            stages: Partition::new(vec![0..1, 1..2, 2..3], vec![1, 1, 2]),
            groups: vec![
                Group {
                    stages: 0..2,
                    servers: 2,
                },
                Group {
                    stages: 2..3,
                    servers: 1,
                },
            ],
        };
        // First group: 6 s inside, and 4 (2-1) 300 / (10 * 2 * 2) over two servers.
        assert_eq!(
            hierarchy.evaluate(&graph, &plan, false),
            ((6.0 + 30.0) / 2.0, 0)
        );
        // Last group: (3 + 4 * 400 / (100 * 2)) / 2 = 5.5 inside, and nothing to synchronise outside.
        let mut alone = plan.clone();
        alone.groups[0].servers = 1;
        assert_eq!(hierarchy.evaluate(&graph, &alone, false), (6.0, 0));
        let slower = Hierarchy {
            inner_bandwidth: 50.0,
            ..hierarchy
        };
        assert_eq!(slower.evaluate(&graph, &alone, false), (9.5, 2));
        // 30 bytes cross the servers, forward and back: 6 s; within the first one 50 do in 1 s.
        assert_eq!(hierarchy.evaluate(&graph, &alone, true), (6.0, 0));
        let slow = Hierarchy {
            outer_bandwidth: 5.0,
            ..hierarchy
        };
        assert_eq!(slow.evaluate(&graph, &alone, true), (12.0, 2));
        assert_eq!(plan.flatten().replicas, [2, 2, 2]);
    }
}
