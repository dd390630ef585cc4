//! The workloads of Tarnawski et al. 2020: JSON with one node per layer or operator, forward and backward apart.
//!
//! Latencies are milliseconds on an accelerator (`fpgaLatency`). An edge's `cost` is the time that its tensor takes
//! the sending and the receiving device, which do not compute meanwhile; here that is a size and the profile's
//! `communication_s_per_byte`. Nodes of one colour class stay together, as do a forward node and its backward: they
//! become one layer. `size` is memory, weights not told from activations.

use std::collections::{HashMap, HashSet};

use petgraph::algo::tarjan_scc;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::unionfind::UnionFind;
use serde::{Deserialize, Deserializer};

use super::ImportError;
use super::draft::{Draft, DraftEdge, size, time};
use super::json;
use crate::profile::LayerProfile;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    id: u64,
    #[serde(default)]
    name: String,
    fpga_latency: f64,
    #[serde(default)]
    size: f64,
    #[serde(default, deserialize_with = "flag")]
    is_backward_node: bool,
    #[serde(default)]
    color_class: Option<i64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Link {
    source_id: u64,
    dest_id: u64,
    cost: f64,
    #[serde(default)]
    size: f64,
}

/// `true`, `false`, 1 or 0.
fn flag<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Flag {
        Bool(bool),
        Number(u8),
    }
    Ok(match Flag::deserialize(deserializer)? {
        Flag::Bool(flag) => flag,
        Flag::Number(number) => number != 0,
    })
}

/// An edge between nodes by their place in the list.
struct Arrow {
    line: usize,
    from: usize,
    to: usize,
    cost_ms: f64,
}

/// Bytes that a millisecond of cost stands for where no edge tells.
const DEFAULT_BYTES_PER_MS: f64 = 1e6;

pub(super) fn parse(text: &str) -> Result<Draft, ImportError> {
    let (nodes, links) = json::nodes_and_edges::<Node, Link>(text)?;
    let mut number = HashMap::new();
    for (i, (line, node)) in nodes.iter().enumerate() {
        if number.insert(node.id, i).is_some() {
            let message = format!("two nodes have the id {}", node.id);
            return Err(ImportError::new(*line, message));
        }
    }
    let mut arrows = Vec::with_capacity(links.len());
    for (line, link) in &links {
        let find = |id: u64| {
            let missing = || ImportError::new(*line, format!("there is no node {id}"));
            number.get(&id).copied().ok_or_else(missing)
        };
        arrows.push(Arrow {
            line: *line,
            from: find(link.source_id)?,
            to: find(link.dest_id)?,
            cost_ms: time(*line, "cost", link.cost)?,
        });
    }
    let groups = groups(&nodes, &arrows);
    let bytes_per_ms = bytes_per_ms(&links);
    let mut draft = Draft {
        layers: layers(&nodes, &groups)?,
        edges: edges(&nodes, &arrows, &groups, bytes_per_ms)?,
        communication_s_per_byte: 1e-3 / bytes_per_ms,
        ..Draft::default()
    };
    draft.notes.push(format!(
        "the file's communication costs are device time at {}: they are in the profile, whatever --bw says",
        crate::units::show_bandwidth(bytes_per_ms * 1e3)
    ));
    if draft.layers.len() < nodes.len() {
        draft.notes.push(format!(
            "{} nodes that have to stay together make {} layers",
            nodes.len(),
            draft.layers.len()
        ));
    }
    Ok(draft)
}

/// The layer of each node: what must share a device in every plan of convex stages.
fn groups(nodes: &[(usize, Node)], arrows: &[Arrow]) -> Vec<usize> {
    let mut together = UnionFind::<usize>::new(nodes.len());
    let mut class = HashMap::new();
    let mut has_forward = vec![false; nodes.len()];
    for (i, (_, node)) in nodes.iter().enumerate() {
        if let Some(color) = node.color_class {
            together.union(i, *class.entry(color).or_insert(i));
        }
    }
    for (i, (_, node)) in nodes.iter().enumerate() {
        has_forward[together.find(i)] |= !node.is_backward_node;
    }
    // A backward without a forward (a loss, an optimizer step) goes with what it reads.
    for arrow in arrows {
        let (from, to) = (together.find(arrow.from), together.find(arrow.to));
        if from != to && !has_forward[to] {
            let forward = has_forward[from];
            together.union(from, to);
            has_forward[together.find(to)] = forward;
        }
    }
    // Convex stages cannot cut through layers that wait for each other.
    let mut graph = DiGraph::<(), ()>::new();
    for _ in nodes {
        graph.add_node(());
    }
    for arrow in arrows.iter().filter(|a| flows_forward(nodes, a)) {
        let ends = [arrow.from, arrow.to].map(|i| NodeIndex::new(together.find(i)));
        graph.add_edge(ends[0], ends[1], ());
    }
    for component in tarjan_scc(&graph) {
        for pair in component.windows(2) {
            together.union(pair[0].index(), pair[1].index());
        }
    }
    // Numbered by their first node.
    let mut numbers = HashMap::new();
    (0..nodes.len())
        .map(|i| {
            let next = numbers.len();
            *numbers.entry(together.find(i)).or_insert(next)
        })
        .collect()
}

fn flows_forward(nodes: &[(usize, Node)], arrow: &Arrow) -> bool {
    !nodes[arrow.from].1.is_backward_node && !nodes[arrow.to].1.is_backward_node
}

/// The ratio of size and cost that most edges have.
fn bytes_per_ms(links: &[(usize, Link)]) -> f64 {
    let mut ratios: Vec<f64> = links
        .iter()
        .map(|(_, link)| link.size / link.cost)
        .filter(|ratio| ratio.is_finite() && *ratio > 0.0)
        .collect();
    ratios.sort_unstable_by(f64::total_cmp);
    let close = |a: &f64, b: &f64| (a - b).abs() <= 1e-6 * b;
    ratios
        .chunk_by(close)
        .max_by_key(|chunk| chunk.len())
        .map_or(DEFAULT_BYTES_PER_MS, |chunk| chunk[chunk.len() / 2])
}

fn layers(nodes: &[(usize, Node)], groups: &[usize]) -> Result<Vec<LayerProfile>, ImportError> {
    let count = groups.iter().max().map_or(0, |last| last + 1);
    let mut layers = vec![LayerProfile::default(); count];
    let mut largest = vec![f64::NEG_INFINITY; count];
    for ((line, node), &group) in nodes.iter().zip(groups) {
        let milliseconds = time(*line, "fpgaLatency", node.fpga_latency)?;
        let bytes = size(*line, "size", node.size)?;
        let layer = &mut layers[group];
        if node.is_backward_node {
            layer.backward_ms += milliseconds;
        } else {
            layer.forward_ms += milliseconds;
        }
        layer.stash_bytes = layer.stash_bytes.saturating_add(bytes);
        // The layer is called after its most expensive forward node.
        let weight = if node.is_backward_node {
            -1.0
        } else {
            milliseconds
        };
        if weight > largest[group] {
            largest[group] = weight;
            layer.name = if node.name.is_empty() {
                format!("node{}", node.id)
            } else {
                node.name.clone()
            };
            layer.kind = layer
                .name
                .trim_end_matches(|c: char| c.is_ascii_digit())
                .to_owned();
        }
    }
    // Names need not be unique in such files; ids are.
    let mut seen = HashSet::new();
    for (group, layer) in layers.iter_mut().enumerate() {
        while !seen.insert(layer.name.clone()) {
            layer.name = format!("{}#{group}", layer.name);
        }
    }
    Ok(layers)
}

/// One tensor for each forward node that another layer reads; its gradient comes back if the file says so.
fn edges(
    nodes: &[(usize, Node)],
    arrows: &[Arrow],
    groups: &[usize],
    bytes_per_ms: f64,
) -> Result<Vec<DraftEdge>, ImportError> {
    let crossing = || arrows.iter().filter(|a| groups[a.from] != groups[a.to]);
    let returned: HashSet<(usize, usize)> = crossing()
        .filter(|a| nodes[a.from].1.is_backward_node && nodes[a.to].1.is_backward_node)
        // Some of the files have the backward's edges point the forward's way.
        .flat_map(|a| {
            [
                (groups[a.to], groups[a.from]),
                (groups[a.from], groups[a.to]),
            ]
        })
        .collect();
    let comes_back =
        |producer: usize, reader: usize| returned.contains(&(groups[producer], groups[reader]));
    // All readers of one tensor agree on whether it has a gradient.
    let mut gradient = vec![false; nodes.len()];
    // Nodes of several outputs: a tensor is as large as the largest of its node's edges.
    let mut bytes = vec![0; nodes.len()];
    for arrow in crossing().filter(|a| flows_forward(nodes, a)) {
        gradient[arrow.from] |= comes_back(arrow.from, arrow.to);
        let own = size(arrow.line, "cost", arrow.cost_ms * bytes_per_ms)?;
        bytes[arrow.from] = own.max(bytes[arrow.from]);
    }
    let forward = crossing().filter(|a| flows_forward(nodes, a));
    Ok(forward
        .map(|arrow| DraftEdge {
            line: arrow.line,
            from: groups[arrow.from],
            to: groups[arrow.to],
            tensor: nodes[arrow.from].1.id.to_string(),
            bytes: bytes[arrow.from],
            gradient: gradient[arrow.from],
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::draft::in_execution_order;

    /// A forward chain a -> b -> c with its backward, a loss, and weights of b.
    const TRAINING: &str = r#"{"maxFPGAs": 2, "nodes": [
{"name": "a", "id": 0, "fpgaLatency": 1, "size": 100, "isBackwardNode": 0, "colorClass": 1},
{"name": "b_w", "id": 9, "fpgaLatency": 0, "size": 40, "isBackwardNode": false, "colorClass": 2},
{"name": "b", "id": 1, "fpgaLatency": 2, "size": 100, "isBackwardNode": false, "colorClass": 2},
{"name": "c", "id": 2, "fpgaLatency": 3, "size": 100, "isBackwardNode": false},
{"name": "loss", "id": 3, "fpgaLatency": 0.5, "size": 0, "isBackwardNode": true},
{"name": "b_grad", "id": 4, "fpgaLatency": 4, "size": 100, "isBackwardNode": true, "colorClass": 2},
{"name": "a_grad", "id": 5, "fpgaLatency": 5, "size": 100, "isBackwardNode": true, "colorClass": 1}
], "edges": [
{"sourceId": 9, "destId": 1, "cost": 0.2, "size": 40},
{"sourceId": 0, "destId": 1, "cost": 0.5, "size": 100},
{"sourceId": 1, "destId": 2, "cost": 0.5, "size": 100},
{"sourceId": 2, "destId": 3, "cost": 0, "size": 0},
{"sourceId": 3, "destId": 4, "cost": 0.5, "size": 100},
{"sourceId": 4, "destId": 5, "cost": 0.5, "size": 100}]}"#;

    #[test]
    fn forward_and_backward_of_a_class_make_a_layer() {
        let draft = parse(TRAINING).unwrap();
        let kappa = draft.communication_s_per_byte;
        // Half a millisecond for a hundred bytes.
        assert!((kappa - 0.5e-3 / 100.0).abs() < 1e-15);
        let (layers, edges) = in_execution_order(draft.layers, draft.edges).unwrap();
        let shown: Vec<_> = layers
            .iter()
            .map(|l| (l.name.as_str(), l.forward_ms, l.backward_ms, l.stash_bytes))
            .collect();
        assert_eq!(
            shown,
            [
                ("a", 1.0, 5.0, 200),
                ("b", 2.0, 4.0, 240),
                ("c", 3.0, 0.5, 100)
            ]
        );
        let shown: Vec<_> = edges
            .iter()
            .map(|e| (e.from.as_str(), e.bytes, e.gradient))
            .collect();
        assert_eq!(shown, [("a", 100, true), ("b", 100, true)]);
    }

    #[test]
    fn classes_that_wait_for_each_other_become_one_layer() {
        // b reads from c although b's weights are in the class that c reads.
        let text = TRAINING.replace(
            "{\"sourceId\": 2, \"destId\": 3,",
            "{\"sourceId\": 2, \"destId\": 9, \"cost\": 1, \"size\": 200}, {\"sourceId\": 2, \"destId\": 3,",
        );
        let draft = parse(&text).unwrap();
        assert_eq!(draft.layers.len(), 2);
        assert_eq!(draft.layers[1].forward_ms, 5.0);
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        for (from, to, expected) in [
            (
                "\"sourceId\": 4,",
                "\"sourceId\": 44,",
                "15: there is no node 44",
            ),
            ("\"id\": 9", "\"id\": 0", "3: two nodes have the id 0"),
            (
                "\"fpgaLatency\": 3",
                "\"fpgaLatency\": -3",
                "5: `fpgaLatency` is -3",
            ),
            (
                "\"cost\": 0.2",
                "\"cost\": \"x\"",
                "10: invalid type: string \"x\"",
            ),
            ("\"fpgaLatency\": 4, ", "", "7: missing field `fpgaLatency`"),
        ] {
            let text = TRAINING.replace(from, to);
            let error = parse(&text).map(|_| ()).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
