//! Every way to have begun a layer graph: its downsets, and the stages between them.
//!
//! A stage may hold any layers that are convex in the graph, not only a run of the execution order. In pipeline order
//! the layers of the first stages always form a downset (with each layer all that it reads from), so that a plan is a
//! chain of downsets and a stage the difference of two. Where they are few, the solvers search over them as they do
//! over the places of a chain; branches make them many, and then nothing is built.

use std::collections::HashMap;

use crate::cost::interval::{IntervalTable, SkipCount};
use crate::cost::{Partition, StageSums};
use crate::graph::LayerGraph;

/// More downsets than this are not searched: the table of stages grows with their square.
pub const MOST_DOWNSETS: usize = 2_000;

/// Layers, one bit each.
type Bits = Vec<u64>;

/// The downsets of a layer graph, smallest first.
#[derive(Clone, Debug)]
pub struct Downsets {
    layers: usize,
    /// For each downset, which layers it holds.
    sets: Vec<Bits>,
    /// For each downset, the layers that it can do without and the downsets that it is then.
    without: Vec<Vec<(usize, u32)>>,
}

fn has(bits: &Bits, layer: usize) -> bool {
    bits[layer / 64] >> (layer % 64) & 1 == 1
}

fn with(bits: &Bits, layer: usize) -> Bits {
    let mut larger = bits.clone();
    larger[layer / 64] |= 1 << (layer % 64);
    larger
}

fn within(smaller: &Bits, larger: &Bits) -> bool {
    smaller.iter().zip(larger).all(|(s, l)| s & !l == 0)
}

impl Downsets {
    /// All downsets; none if there are more than `most`.
    #[must_use]
    pub fn new(graph: &LayerGraph, most: usize) -> Option<Self> {
        let layers = graph.len();
        let empty: Bits = vec![0; layers.div_ceil(64)];
        let mut reads = vec![empty.clone(); layers];
        for tensor in graph.tensors() {
            for &reader in &tensor.readers {
                reads[reader] = with(&reads[reader], tensor.producer);
            }
        }
        let mut number: HashMap<Bits, u32> = HashMap::from([(empty.clone(), 0)]);
        let mut sets = vec![empty];
        let mut without = vec![Vec::new()];
        // Those found last are one layer larger than those before: the smallest come first.
        let mut next = 0;
        while next < sets.len() {
            for (layer, reads) in reads.iter().enumerate() {
                let set = &sets[next];
                if has(set, layer) || !within(reads, set) {
                    continue;
                }
                let larger = with(set, layer);
                let place = *number.entry(larger).or_insert_with_key(|larger| {
                    sets.push(larger.clone());
                    without.push(Vec::new());
                    sets.len() as u32 - 1
                });
                without[place as usize].push((layer, next as u32));
                if sets.len() > most {
                    return None;
                }
            }
            next += 1;
        }
        Some(Self {
            layers,
            sets,
            without,
        })
    }

    /// Number of downsets.
    #[must_use]
    pub fn count(&self) -> usize {
        self.sets.len()
    }

    /// For each downset, which layers it holds.
    #[must_use]
    pub fn sets(&self) -> Vec<Vec<bool>> {
        let set = |bits: &Bits| (0..self.layers).map(|layer| has(bits, layer)).collect();
        self.sets.iter().map(set).collect()
    }

    /// Sums of every stage between two downsets, the places of the table being their numbers.
    ///
    /// Time and space O(downsets^2), and for each pair the tensors that leave both.
    #[must_use]
    pub fn table(&self, graph: &LayerGraph, skips: SkipCount) -> IntervalTable {
        let borders: Vec<Border> = self
            .sets
            .iter()
            .map(|set| Border::new(graph, set))
            .collect();
        let mut sums = vec![None; self.sets.len()];
        let starts = 0..self.sets.len() - 1;
        let rows = starts.map(|start| {
            let before = &self.sets[start];
            let mut row = Vec::new();
            sums[start] = Some(StageSums::default());
            for end in start + 1..self.sets.len() {
                // The stage without one of its last layers is known already.
                let shorter = self.without[end]
                    .iter()
                    .find(|(layer, _)| !has(before, *layer))
                    .and_then(|&(layer, shorter)| {
                        Some((
                            layer,
                            sums[shorter as usize].filter(|_| shorter as usize >= start)?,
                        ))
                    });
                sums[end] = shorter.map(|(layer, shorter): (usize, StageSums)| {
                    let mut longer = shorter;
                    longer.add(graph.layer(layer));
                    longer
                });
                if let Some(mut stage) = sums[end] {
                    let until = (&self.sets[end], &borders[end]);
                    add_traffic(&mut stage, graph, (before, &borders[start]), until, skips);
                    row.push((end as u32, stage));
                }
            }
            row
        });
        IntervalTable::of_places(rows.collect())
    }

    /// The execution order in which each stage's layers follow one another, and the stages as runs of it.
    #[must_use]
    pub fn unfold(&self, chain: &Partition) -> (Vec<usize>, Partition) {
        let mut order = Vec::new();
        let mut stages = Vec::new();
        for places in &chain.stages {
            let (before, until) = (&self.sets[places.start], &self.sets[places.end]);
            let start = order.len();
            order.extend((0..self.layers).filter(|&l| has(until, l) && !has(before, l)));
            stages.push(start..order.len());
        }
        let partition = Partition {
            stages,
            ..chain.clone()
        };
        (order, partition)
    }
}

/// Tensors that leave a downset: made in it, read outside.
struct Border {
    /// Number of each tensor, and of its readers outside.
    tensors: Vec<(usize, usize)>,
}

impl Border {
    fn new(graph: &LayerGraph, set: &Bits) -> Self {
        let inside = graph.tensors().iter().enumerate();
        let inside = inside.filter(|(_, tensor)| has(set, tensor.producer));
        let leaving = inside.map(|(t, tensor)| {
            let outside = tensor.readers.iter().filter(|&&r| !has(set, r));
            (t, outside.count())
        });
        Self {
            tensors: leaving.filter(|&(_, readers)| readers > 0).collect(),
        }
    }
}

/// Counts what the stage between two downsets receives and sends, tensors counted as in [`IntervalTable::new`].
fn add_traffic(
    stage: &mut StageSums,
    graph: &LayerGraph,
    (before, start): (&Bits, &Border),
    (until, end): (&Bits, &Border),
    skips: SkipCount,
) {
    for &(t, _) in &start.tensors {
        let tensor = &graph.tensors()[t];
        let mut readers = tensor.readers.iter();
        if readers.any(|&r| has(until, r) && !has(before, r)) {
            stage.traffic.input += tensor.bytes;
            stage.traffic.input_gradient += tensor.gradient_bytes;
        }
    }
    for &(t, readers) in &end.tensors {
        let tensor = &graph.tensors()[t];
        if !has(before, tensor.producer) {
            let stages = match skips {
                SkipCount::Once => 1.0,
                SkipCount::PerReader => readers as f64,
            };
            stage.traffic.output += stages * tensor.bytes;
            stage.traffic.output_gradient += stages * tensor.gradient_bytes;
        }
    }
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
        let downsets = Downsets::new(&graph, 4).unwrap();
        assert_eq!(downsets.count(), 4);
        let table = downsets.table(&graph, SkipCount::Once);
        assert!(table.find(1, 2).is_none());
        assert!(table.find(1, 3).is_some() && table.find(2, 3).is_some());
    }
}
