//! What a reader makes of a file: layers in any order, and the way from there to a profile.

use std::collections::HashSet;

use petgraph::graph::{DiGraph, NodeIndex};

use super::ImportError;
use crate::graph::find_cycle;
use crate::profile::{Edge, LayerProfile};

/// A tensor from layer to layer, by their place in the list.
#[derive(Clone, Debug)]
pub(super) struct DraftEdge {
    pub line: usize,
    pub from: usize,
    pub to: usize,
    pub tensor: String,
    pub bytes: u64,
    pub gradient: bool,
    pub gradient_bytes: Option<u64>,
}

/// A file's content.
#[derive(Clone, Debug, Default)]
pub(super) struct Draft {
    pub layers: Vec<LayerProfile>,
    pub edges: Vec<DraftEdge>,
    /// Samples per minibatch, if the file tells.
    pub batch_size: Option<usize>,
    pub communication_s_per_byte: f64,
    pub notes: Vec<String>,
}

/// Layers in an order of execution that keeps branches together, and one edge for each tensor and reader.
///
/// # Errors
/// If the layers wait for each other in a cycle.
pub(super) fn in_execution_order(
    layers: Vec<LayerProfile>,
    edges: Vec<DraftEdge>,
) -> Result<(Vec<LayerProfile>, Vec<Edge>), ImportError> {
    let order = order(&layers, &edges)?;
    let mut place = vec![0; layers.len()];
    for (position, &layer) in order.iter().enumerate() {
        place[layer] = position;
    }
    let mut seen = HashSet::new();
    let mut kept: Vec<&DraftEdge> = edges
        .iter()
        .filter(|e| seen.insert((e.from, e.to, e.tensor.as_str())))
        .collect();
    kept.sort_by_key(|e| (place[e.from], place[e.to]));
    let name = |layer: usize| layers[layer].name.clone();
    let named = kept
        .into_iter()
        .map(|e| Edge {
            from: name(e.from),
            to: name(e.to),
            tensor: e.tensor.clone(),
            bytes: e.bytes,
            gradient: e.gradient,
            gradient_bytes: e.gradient_bytes,
        })
        .collect();
    let mut slots: Vec<Option<LayerProfile>> = layers.into_iter().map(Some).collect();
    let sorted = order
        .iter()
        .filter_map(|&layer| slots[layer].take())
        .collect();
    Ok((sorted, named))
}

/// Depth first: a layer is followed by what it makes ready, so that a branch is left only where it has to wait.
fn order(layers: &[LayerProfile], edges: &[DraftEdge]) -> Result<Vec<usize>, ImportError> {
    let mut readers = vec![Vec::new(); layers.len()];
    let mut waits_for = vec![0usize; layers.len()];
    for edge in edges {
        readers[edge.from].push(edge.to);
        waits_for[edge.to] += 1;
    }
    let mut ready: Vec<usize> = (0..layers.len())
        .rev()
        .filter(|&l| waits_for[l] == 0)
        .collect();
    let mut order = Vec::with_capacity(layers.len());
    while let Some(layer) = ready.pop() {
        order.push(layer);
        for &reader in readers[layer].iter().rev() {
            waits_for[reader] -= 1;
            if waits_for[reader] == 0 {
                ready.push(reader);
            }
        }
    }
    if order.len() == layers.len() {
        return Ok(order);
    }
    Err(cycle(layers, edges))
}

fn cycle(layers: &[LayerProfile], edges: &[DraftEdge]) -> ImportError {
    let mut graph = DiGraph::<(), ()>::new();
    for _ in layers {
        graph.add_node(());
    }
    for edge in edges {
        graph.add_edge(NodeIndex::new(edge.from), NodeIndex::new(edge.to), ());
    }
    let path: Vec<usize> = find_cycle(&graph)
        .unwrap_or_default()
        .iter()
        .map(|node| node.index())
        .collect();
    let closing = path.last().zip(path.first());
    let line = edges
        .iter()
        .find(|e| closing == Some((&e.from, &e.to)))
        .map_or(1, |e| e.line);
    let names: Vec<&str> = path
        .iter()
        .chain(path.first())
        .map(|&layer| layers[layer].name.as_str())
        .collect();
    let message = format!(
        "this edge closes a cycle: {}; a model's layer graph has none, correct the edges",
        names.join(" -> ")
    );
    ImportError::new(line, message)
}

/// `bytes` as a whole number; the profile refuses what is too large.
///
/// # Errors
/// If it is negative or no number.
pub(super) fn size(line: usize, what: &str, bytes: f64) -> Result<u64, ImportError> {
    if bytes.is_finite() && bytes >= 0.0 {
        Ok(bytes.round() as u64)
    } else {
        let message = format!("`{what}` is {bytes}: a size must be finite and not negative");
        Err(ImportError::new(line, message))
    }
}

/// The time as it is.
///
/// # Errors
/// If it is negative or no number.
pub(super) fn time(line: usize, what: &str, time: f64) -> Result<f64, ImportError> {
    if time.is_finite() && time >= 0.0 {
        Ok(time)
    } else {
        let message = format!("`{what}` is {time}: a time must be finite and not negative");
        Err(ImportError::new(line, message))
    }
}
