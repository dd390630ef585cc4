//! Layers: an operator that computes, with the cheap operators after it fused onto it.
//!
//! Every node gets the number of a layer. A node that computes opens a new one; a cheap node joins the
//! latest layer among those it reads from. Numbers therefore never fall along an edge, so the layer
//! graph is acyclic in the order of the numbers and each layer is convex: a path that leaves it cannot
//! come back. Cheap nodes that no layer precedes join the earliest layer that reads from them.

use std::collections::BTreeSet;
use std::ops::Range;

use super::{Graph, NodeId, Origin, ParameterId, StateId, ValueId};

/// The smallest thing that is profiled and placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Name of the node that computes.
    pub name: String,
    /// Its ONNX operator.
    pub kind: &'static str,
    /// Nodes, a run in execution order.
    pub nodes: Range<NodeId>,
    /// Parameters that the nodes read, ascending. Tied layers have some in common.
    pub parameters: Vec<ParameterId>,
    /// Running statistics that the nodes read, ascending.
    pub states: Vec<StateId>,
}

/// A tensor that one layer makes and a later one reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerEdge {
    /// Index of the layer that makes it.
    pub from: usize,
    /// Index of the layer that reads it.
    pub to: usize,
    /// The tensor.
    pub value: ValueId,
    /// Its name. A tensor with several readers has several edges of this name.
    pub tensor: String,
    /// Its size in bytes.
    pub bytes: usize,
    /// Whether a gradient of the same size comes back.
    pub gradient: bool,
}

/// Operators that take no time worth balancing next to those that compute: element-wise functions, and
/// those that only move or rename data.
const CHEAP: &[&str] = &[
    "Abs",
    "Add",
    "And",
    "Cast",
    "Celu",
    "Clip",
    "Concat",
    "Cos",
    "Div",
    "Dropout",
    "Elu",
    "Equal",
    "Erf",
    "Exp",
    "Expand",
    "Flatten",
    "Gelu",
    "Greater",
    "GreaterOrEqual",
    "HardSigmoid",
    "HardSwish",
    "Identity",
    "IsNaN",
    "LeakyRelu",
    "Less",
    "LessOrEqual",
    "Log",
    "LogSoftmax",
    "Max",
    "Min",
    "Mish",
    "Mod",
    "Mul",
    "Neg",
    "Not",
    "Or",
    "PRelu",
    "Pad",
    "Pow",
    "Reciprocal",
    "Relu",
    "Reshape",
    "Selu",
    "Shrink",
    "Sigmoid",
    "Sin",
    "Slice",
    "Softmax",
    "Softplus",
    "Softsign",
    "Split",
    "Sqrt",
    "Squeeze",
    "Sub",
    "Sum",
    "Tanh",
    "ThresholdedRelu",
    "Transpose",
    "Trilu",
    "Unsqueeze",
    "Where",
];

pub(super) fn is_cheap(operator: &str) -> bool {
    CHEAP.contains(&operator)
}

/// The layer of each node. `reads[n]` are the nodes that node `n` reads from, all smaller than `n`.
pub(super) fn assign(cheap: &[bool], reads: &[Vec<usize>]) -> Vec<usize> {
    let mut layers: Vec<Option<usize>> = Vec::with_capacity(cheap.len());
    let mut count = 0;
    for (&cheap, reads) in cheap.iter().zip(reads) {
        layers.push(if cheap {
            reads.iter().filter_map(|&from| layers[from]).max()
        } else {
            count += 1;
            Some(count - 1)
        });
    }
    let mut earliest: Vec<Option<usize>> = vec![None; cheap.len()];
    for node in (0..cheap.len()).rev() {
        // Without any layer to join (all nodes are cheap, or nothing reads it) it goes to the first one.
        let layer = *layers[node].get_or_insert(earliest[node].unwrap_or(0));
        for &from in &reads[node] {
            earliest[from] = Some(earliest[from].map_or(layer, |other| other.min(layer)));
        }
    }
    layers.into_iter().flatten().collect()
}

/// Layers of a graph whose nodes are already in the order of `assigned` and `cheap`.
pub(super) fn describe(graph: &Graph, assigned: &[usize], cheap: &[bool]) -> Vec<Layer> {
    let mut layers: Vec<Layer> = Vec::new();
    let mut start = 0;
    for run in assigned.chunk_by(|a, b| a == b) {
        let nodes = start..start + run.len();
        start = nodes.end;
        let computes = nodes.clone().find(|&node| !cheap[node]);
        let node = &graph.nodes[computes.unwrap_or(nodes.start)];
        let (mut parameters, mut states) = (BTreeSet::new(), BTreeSet::new());
        for &input in graph.nodes[nodes.clone()]
            .iter()
            .flat_map(|node| &node.inputs)
            .flatten()
        {
            match graph.values[input].origin {
                Origin::Parameter(parameter) => drop(parameters.insert(parameter)),
                Origin::State(state) => drop(states.insert(state)),
                Origin::Input | Origin::Constant | Origin::Node(_) => {}
            }
        }
        layers.push(Layer {
            name: node.name.clone(),
            kind: node.op.name(),
            nodes,
            parameters: parameters.into_iter().collect(),
            states: states.into_iter().collect(),
        });
    }
    layers
}

/// The edges between layers, by receiving layer and tensor.
pub(super) fn edges(graph: &Graph) -> Vec<LayerEdge> {
    let mut layer_of = vec![0; graph.nodes.len()];
    for (index, layer) in graph.layers.iter().enumerate() {
        layer_of[layer.nodes.clone()].fill(index);
    }
    let mut edges = Vec::new();
    for (to, layer) in graph.layers.iter().enumerate() {
        let read: BTreeSet<ValueId> = graph.nodes[layer.nodes.clone()]
            .iter()
            .flat_map(|node| &node.inputs)
            .flatten()
            .copied()
            .collect();
        for id in read {
            let value = &graph.values[id];
            match value.origin {
                Origin::Node(node) if layer_of[node] != to => edges.push(LayerEdge {
                    from: layer_of[node],
                    to,
                    value: id,
                    tensor: value.name.clone(),
                    bytes: value.bytes(),
                    gradient: value.needs_gradient,
                }),
                _ => {}
            }
        }
    }
    edges
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_residual_addition_joins_the_later_branch() {
        // conv, relu, conv (a), conv (b), add(a, b), relu.
        let cheap = [false, true, false, false, true, true];
        let reads = [vec![], vec![0], vec![1], vec![1], vec![2, 3], vec![4]];
        assert_eq!(assign(&cheap, &reads.map(Vec::from)), [0, 0, 1, 2, 2, 2]);
    }

    #[test]
    fn leading_cheap_nodes_join_their_first_reader() {
        // A cast of the input, used by the second layer too; a transposed weight of the second.
        let cheap = [true, false, true, false];
        let reads = [vec![], vec![0], vec![], vec![0, 1, 2]];
        assert_eq!(assign(&cheap, &reads.map(Vec::from)), [0, 0, 1, 1]);
    }

    #[test]
    fn a_graph_of_cheap_nodes_is_one_layer() {
        assert_eq!(assign(&[true, true], &[vec![], vec![0]]), [0, 0]);
    }

    proptest! {
        #[test]
        fn layer_numbers_never_fall_along_an_edge(
            nodes in proptest::collection::vec((any::<bool>(), proptest::collection::vec(any::<prop::sample::Index>(), 0..3)), 1..30)
        ) {
            let cheap: Vec<bool> = nodes.iter().map(|(cheap, _)| *cheap).collect();
            let reads: Vec<Vec<usize>> = nodes.iter().enumerate()
                .map(|(node, (_, from))| if node == 0 { vec![] } else { from.iter().map(|i| i.index(node)).collect() })
                .collect();
            let layers = assign(&cheap, &reads);
            prop_assert_eq!(layers.len(), cheap.len());
            for (node, from) in reads.iter().enumerate() {
                for &from in from {
                    prop_assert!(layers[from] <= layers[node]);
                }
            }
            let computing = cheap.iter().filter(|cheap| !**cheap).count().max(1);
            prop_assert!(layers.iter().all(|&layer| layer < computing));
        }
    }
}
