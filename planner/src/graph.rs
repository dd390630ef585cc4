//! The layer graph: layers in execution order and the tensors that flow between them.

use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::{DfsEvent, depth_first_search};

/// Nodes along some cycle of the graph, in the direction of its edges; none if it is acyclic.
pub(crate) fn find_cycle<N, E>(graph: &DiGraph<N, E>) -> Option<Vec<NodeIndex>> {
    // Nodes from the root of the search to where it stands.
    let mut path: Vec<NodeIndex> = Vec::new();
    let found = depth_first_search(graph, graph.node_indices(), |event| match event {
        DfsEvent::Discover(node, _) => {
            path.push(node);
            Ok(())
        }
        DfsEvent::Finish(..) => {
            path.pop();
            Ok(())
        }
        DfsEvent::BackEdge(_, node) => Err(node),
        _ => Ok(()),
    });
    let entry = found.err()?;
    let start = path.iter().position(|&node| node == entry)?;
    Some(path.split_off(start))
}
