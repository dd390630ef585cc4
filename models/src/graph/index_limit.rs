//! How far the numbers of a data input may go before a lookup has no row for them.

use super::{Graph, ValueId};

/// Operators that pass every number of their first input on.
const PASS_ON: [&str; 7] = [
    "Cast",
    "Flatten",
    "Identity",
    "Reshape",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
];

/// The smallest [`index_limit`](crate::ops::Operator::index_limit) of the nodes that a value reaches unchanged.
pub(super) fn of(graph: &Graph, value: ValueId) -> Option<usize> {
    let consumers = &graph.values[value].consumers;
    let limits = consumers.iter().flat_map(|&id| {
        let node = &graph.nodes[id];
        let positions = node.inputs.iter().enumerate();
        let read = positions.filter(move |(_, input)| **input == Some(value));
        read.filter_map(move |(position, _)| {
            let passed = position == 0 && PASS_ON.contains(&node.op.name());
            match (passed, node.outputs.first()) {
                (true, Some(&Some(output))) => of(graph, output),
                _ => node.op.index_limit(position),
            }
        })
    });
    limits.min()
}
