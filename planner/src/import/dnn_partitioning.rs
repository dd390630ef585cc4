//! The workloads of Tarnawski et al. 2020: JSON with one node per layer or operator, forward and backward apart.
//!
//! Latencies are milliseconds on an accelerator (`fpgaLatency`). An edge's `cost` is the time that its tensor takes
//! the sending and the receiving device, which do not compute meanwhile; here that is a size and the profile's
//! `communication_s_per_byte`. Nodes of one colour class stay together, as do a forward node and its backward: they
//! become one layer. `size` is memory, weights not told from activations.

use std::collections::{BTreeSet, HashMap, HashSet};

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
    let several = gradients_to_several_layers(&draft.edges);
    if several > 0 {
        draft.notes.push(format!(
            "{several} gradients go to several layers each: they count once for each of them, in the file once for each device"
        ));
    }
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
    for (i, (_, node)) in nodes.iter().enumerate() {
        if let Some(color) = node.color_class {
            together.union(i, *class.entry(color).or_insert(i));
        }
    }
    // Convex stages cannot cut through layers that wait for each other.
    let classes = together.clone().into_labeling();
    let mut graph = DiGraph::<(), ()>::new();
    for _ in nodes {
        graph.add_node(());
    }
    for (before, after) in precedence(nodes, arrows, &classes) {
        graph.add_edge(NodeIndex::new(before), NodeIndex::new(after), ());
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

/// Pairs of groups, given that of each node, of which the first must not be behind the second in a pipeline.
///
/// They follow the forward. A group without one (a loss, a sum of gradients) stands where its forward would: against
/// the direction in which gradients reach and leave it.
fn precedence(nodes: &[(usize, Node)], arrows: &[Arrow], groups: &[usize]) -> Vec<(usize, usize)> {
    let mut has_forward = vec![false; nodes.len()];
    for ((_, node), &group) in nodes.iter().zip(groups) {
        has_forward[group] |= !node.is_backward_node;
    }
    let pairs = arrows.iter().filter_map(|arrow| {
        let ends = [arrow.from, arrow.to];
        let [from, to] = ends.map(|i| groups[i]);
        match ends.map(|i| nodes[i].1.is_backward_node) {
            [false, false] => Some((from, to)),
            [true, true] if !(has_forward[from] && has_forward[to]) => Some((to, from)),
            _ => None,
        }
    });
    pairs.filter(|(before, after)| before != after).collect()
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

/// What flows between layers, as edges in the direction of the forward: outputs of forward nodes as tensors, those of
/// backward nodes as gradients that come back on edges without a tensor.
fn edges(
    nodes: &[(usize, Node)],
    arrows: &[Arrow],
    groups: &[usize],
    bytes_per_ms: f64,
) -> Result<Vec<DraftEdge>, ImportError> {
    let precedence: HashSet<(usize, usize)> =
        precedence(nodes, arrows, groups).into_iter().collect();
    let place = places(groups, &precedence);
    // Nodes of several outputs: a tensor is as large as the largest of its node's edges.
    let mut bytes = vec![0; nodes.len()];
    let crossing = || arrows.iter().filter(|a| groups[a.from] != groups[a.to]);
    for arrow in crossing() {
        let own = size(arrow.line, "cost", arrow.cost_ms * bytes_per_ms)?;
        bytes[arrow.from] = own.max(bytes[arrow.from]);
    }
    let edges = crossing().filter_map(|arrow| {
        let (made, read) = (groups[arrow.from], groups[arrow.to]);
        // Some of the files have the backward's edges point the forward's way.
        let onward = place[made] < place[read];
        let (from, to) = if onward { (made, read) } else { (read, made) };
        let size = bytes[arrow.from];
        let tensor = onward && !nodes[arrow.from].1.is_backward_node;
        (size > 0 || precedence.contains(&(from, to))).then(|| DraftEdge {
            line: arrow.line,
            from,
            to,
            tensor: nodes[arrow.from].1.id.to_string(),
            bytes: if tensor { size } else { 0 },
            gradient: !tensor,
            gradient_bytes: (!tensor).then_some(size),
        })
    });
    Ok(edges.collect())
}

/// Number of gradients that come back to several layers: on the edges they are apart.
fn gradients_to_several_layers(edges: &[DraftEdge]) -> usize {
    let mut owners: HashMap<&str, HashSet<usize>> = HashMap::new();
    for edge in edges.iter().filter(|e| e.gradient_bytes > Some(0)) {
        owners.entry(&edge.tensor).or_default().insert(edge.from);
    }
    owners.values().filter(|layers| layers.len() > 1).count()
}

/// The place of each group in one order that keeps the precedence.
fn places(groups: &[usize], precedence: &HashSet<(usize, usize)>) -> Vec<usize> {
    let count = groups.iter().max().map_or(0, |last| last + 1);
    let mut after = vec![Vec::new(); count];
    let mut waits_for = vec![0usize; count];
    for &(before, then) in precedence {
        after[before].push(then);
        waits_for[then] += 1;
    }
    let mut place = vec![0; count];
    let mut ready: BTreeSet<usize> = (0..count).filter(|&g| waits_for[g] == 0).collect();
    let mut next = 0;
    while let Some(group) = ready.pop_first() {
        place[group] = next;
        next += 1;
        for &then in &after[group] {
            waits_for[then] -= 1;
            if waits_for[then] == 0 {
                ready.insert(then);
            }
        }
    }
    place
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
                ("c", 3.0, 0.0, 100),
                ("loss", 0.0, 0.5, 0)
            ]
        );
        let shown: Vec<_> = edges
            .iter()
            .map(|e| (e.from.as_str(), e.to.as_str(), e.bytes, e.gradient_bytes))
            .collect();
        assert_eq!(
            shown,
            [
                ("a", "b", 100, None),
                ("a", "b", 0, Some(100)),
                ("b", "c", 100, None),
                ("b", "loss", 0, Some(100)),
            ]
        );
    }

    #[test]
    fn classes_that_wait_for_each_other_become_one_layer() {
        // b reads from c although b's weights are in the class that c reads.
        let text = TRAINING.replace(
            "{\"sourceId\": 2, \"destId\": 3,",
            "{\"sourceId\": 2, \"destId\": 9, \"cost\": 1, \"size\": 200}, {\"sourceId\": 2, \"destId\": 3,",
        );
        let draft = parse(&text).unwrap();
        let forward: Vec<f64> = draft.layers.iter().map(|l| l.forward_ms).collect();
        // a, b with c, the loss.
        assert_eq!(forward, [1.0, 5.0, 0.0]);
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
