//! Every way to have begun a layer graph: its downsets, and the stages between them.
//!
//! A stage may hold any layers that are convex in the graph, not only a run of the execution order. In pipeline order
//! the layers of the first stages always form a downset (with each layer all that it reads from), so that a plan is a
//! chain of downsets and a stage the difference of two. Where they are few, the solvers search over them as they do
//! over the places of a chain; branches make them many, and then nothing is built.

use std::collections::HashSet;

use crate::cost::interval::{IntervalTable, SkipCount};
use crate::cost::{Partition, StageSums};
use crate::graph::LayerGraph;

/// More downsets than this are not searched: the table of stages grows with their square.
pub const MOST_DOWNSETS: usize = 500;

/// The downsets of a layer graph, smallest first.
#[derive(Clone, Debug)]
pub struct Downsets {
    /// For each downset, which layers it holds.
    sets: Vec<Vec<bool>>,
}

impl Downsets {
    /// All downsets; none if there are more than `most`.
    #[must_use]
    pub fn new(graph: &LayerGraph, most: usize) -> Option<Self> {
        let layers = graph.len();
        let mut reads: Vec<Vec<usize>> = vec![Vec::new(); layers];
        for tensor in graph.tensors() {
            for &reader in &tensor.readers {
                reads[reader].push(tensor.producer);
            }
        }
        let mut sets = vec![vec![false; layers]];
        let mut known: HashSet<Vec<bool>> = sets.iter().cloned().collect();
        // Those found last are one layer larger than those before: the smallest come first.
        let mut next = 0;
        while next < sets.len() {
            for layer in 0..layers {
                let set = &sets[next];
                if set[layer] || reads[layer].iter().any(|&from| !set[from]) {
                    continue;
                }
                let mut larger = set.clone();
                larger[layer] = true;
                if known.insert(larger.clone()) {
                    sets.push(larger);
                }
                if sets.len() > most {
                    return None;
                }
            }
            next += 1;
        }
        Some(Self { sets })
    }

    /// For each downset, which layers it holds.
    #[must_use]
    pub fn sets(&self) -> &[Vec<bool>] {
        &self.sets
    }

    /// Sums of every stage between two downsets, the places of the table being their numbers.
    #[must_use]
    pub fn table(&self, graph: &LayerGraph, skips: SkipCount) -> IntervalTable {
        IntervalTable::of_places(self.sets.len(), |start, end| {
            let (before, until) = (&self.sets[start], &self.sets[end]);
            let within = before.iter().zip(until).all(|(&b, &u)| u || !b);
            within.then(|| stage_sums(graph, before, until, skips))
        })
    }

    /// The execution order in which each stage's layers follow one another, and the stages as runs of it.
    #[must_use]
    pub fn unfold(&self, chain: &Partition) -> (Vec<usize>, Partition) {
        let mut order = Vec::new();
        let mut stages = Vec::new();
        for places in &chain.stages {
            let (before, until) = (&self.sets[places.start], &self.sets[places.end]);
            let start = order.len();
            order.extend((0..until.len()).filter(|&layer| until[layer] && !before[layer]));
            stages.push(start..order.len());
        }
        let replicas = chain.replicas.clone();
        (order, Partition { stages, replicas })
    }
}

/// Sums of the layers in `until` and not in `before`, tensors counted as in [`IntervalTable::new`].
pub(super) fn stage_sums(
    graph: &LayerGraph,
    before: &[bool],
    until: &[bool],
    skips: SkipCount,
) -> StageSums {
    let mut sums = StageSums::default();
    for (i, layer) in graph.layers().enumerate() {
        if until[i] && !before[i] {
            sums.add(layer);
        }
    }
    for tensor in graph.tensors() {
        if before[tensor.producer] {
            if tensor.readers.iter().any(|&r| until[r] && !before[r]) {
                sums.traffic.input += tensor.bytes;
                sums.traffic.input_gradient += tensor.gradient_bytes();
            }
        } else if until[tensor.producer] {
            let behind = tensor.readers.iter().filter(|&&r| !until[r]).count();
            let stages = match skips {
                SkipCount::Once => behind.min(1),
                SkipCount::PerReader => behind,
            };
            sums.traffic.output += stages as f64 * tensor.bytes;
            sums.traffic.output_gradient += stages as f64 * tensor.gradient_bytes();
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn a_chain_has_one_more_downset_than_layers_and_its_table_is_that_of_intervals() {
        let graph = LayerGraph::new(&testing::chain(&[3.0, 6.0, 9.0], &[1, 2, 3], &[7, 5]));
        let downsets = Downsets::new(&graph, 4).unwrap();
        let table = downsets.table(&graph, SkipCount::Once);
        let intervals = IntervalTable::new(&graph, SkipCount::Once);
        for (start, end) in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)] {
            assert_eq!(table.find(start, end), intervals.find(start, end));
        }
        assert!(Downsets::new(&graph, 3).is_none());
    }

    #[test]
    fn between_downsets_of_different_branches_there_is_no_stage() {
        // Two layers that have nothing to do with each other: {}, {0}, {1}, {0, 1}.
        let mut profile = testing::chain(&[1.0, 1.0], &[0, 0], &[9]);
        profile.edges.clear();
        let graph = LayerGraph::new(&profile);
        let table = Downsets::new(&graph, 4)
            .unwrap()
            .table(&graph, SkipCount::Once);
        assert!(table.find(1, 2).is_none());
        assert!(table.find(1, 3).is_some() && table.find(2, 3).is_some());
    }
}
