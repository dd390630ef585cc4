//! The stages that a layer graph can be cut into.

use std::cell::OnceCell;
use std::sync::Arc;

use crate::cost::Partition;
use crate::cost::interval::{IntervalTable, SkipCount};
use crate::graph::LayerGraph;
use crate::solve::hierarchy::Sections;
use crate::solve::{Downsets, MOST_DOWNSETS};

/// A layer graph and the stages that it can be cut into, made once for all searches over it.
pub(super) struct Space<'a> {
    pub graph: &'a LayerGraph,
    /// Where another execution order is possible, stages need not be runs of this one.
    pub downsets: Option<Downsets>,
    linear: bool,
    /// Sums of the stages, where each tensor counts as if it were sent once at most or once to each reader.
    once: OnceCell<Arc<IntervalTable>>,
    per_reader: OnceCell<Arc<IntervalTable>>,
    /// The same of the runs of this execution order.
    once_in_order: OnceCell<Arc<IntervalTable>>,
    per_reader_in_order: OnceCell<Arc<IntervalTable>>,
}

impl<'a> Space<'a> {
    pub(super) fn new(graph: &'a LayerGraph) -> Self {
        let linear = graph.is_linear();
        Self {
            graph,
            downsets: (!linear)
                .then(|| Downsets::new(graph, MOST_DOWNSETS))
                .flatten(),
            linear,
            once: OnceCell::new(),
            per_reader: OnceCell::new(),
            once_in_order: OnceCell::new(),
            per_reader_in_order: OnceCell::new(),
        }
    }

    /// Whether every plan is a chain of the places that are searched: no other order is possible, or all are searched.
    pub(super) fn is_complete(&self) -> bool {
        self.linear || self.downsets.is_some()
    }

    pub(super) fn table(&self, skips: SkipCount) -> Arc<IntervalTable> {
        let Some(downsets) = &self.downsets else {
            return self.table_in_order(skips);
        };
        let cell = match skips {
            SkipCount::Once => &self.once,
            SkipCount::PerReader => &self.per_reader,
        };
        let table = cell.get_or_init(|| Arc::new(downsets.table(self.graph, skips)));
        Arc::clone(table)
    }

    pub(super) fn table_in_order(&self, skips: SkipCount) -> Arc<IntervalTable> {
        let cell = match skips {
            SkipCount::Once => &self.once_in_order,
            SkipCount::PerReader => &self.per_reader_in_order,
        };
        let table = cell.get_or_init(|| Arc::new(IntervalTable::new(self.graph, skips)));
        Arc::clone(table)
    }

    /// The places that are searched, and the bytes that cross each of them.
    pub(super) fn sections(&self, activations: bool) -> Sections {
        let crossing = |is_inside: &dyn Fn(usize) -> bool| -> f64 {
            let tensors = self.graph.tensors().iter();
            let leaving = tensors.filter(|t| {
                is_inside(t.producer) && t.readers.iter().any(|&reader| !is_inside(reader))
            });
            leaving.map(|t| t.bytes).sum()
        };
        let table = self.table(SkipCount::Once);
        let places = table.layers() + 1;
        let crossing = match &self.downsets {
            _ if !activations => vec![0.0; places],
            Some(downsets) => {
                let sets = downsets.sets();
                sets.iter()
                    .map(|set| crossing(&|layer| set[layer]))
                    .collect()
            }
            None => (0..places)
                .map(|place| crossing(&|layer| layer < place))
                .collect(),
        };
        Sections::new(&table, crossing)
    }

    /// The layers in the order in which the stages of a solution are runs of them, and these runs.
    pub(super) fn unfold(&self, chain: Partition) -> (LayerGraph, Partition) {
        match &self.downsets {
            Some(downsets) => {
                let (order, partition) = downsets.unfold(&chain);
                (self.graph.reordered(&order), partition)
            }
            None => (self.graph.clone(), chain),
        }
    }
}
