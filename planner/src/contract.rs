//! Layers that stay in one stage: asked for by the user, or because they share weights.

use std::collections::HashMap;

use petgraph::algo::tarjan_scc;
use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::unionfind::UnionFind;

use crate::graph::{Layer, LayerGraph, Tensor};
use crate::layer_name::{self, LayerNameError};
use crate::profile::{LayerProfile, Profile};

/// Layers that the user wants in one stage: both ends of a run in execution order, or each by itself. Names, or numbers
/// from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Together {
    /// `A..B`: these two and all in between.
    Run(String, String),
    /// `A,B,C`.
    Layers(Vec<String>),
}

/// Why layers cannot be kept together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TogetherError {
    /// The text names no layers.
    #[error("`{text}` names no layers to keep together: write FIRST..LAST or LAYER,LAYER,...")]
    Syntax {
        /// What was given.
        text: String,
    },
    /// No such layer.
    #[error("--together: {0}")]
    Layer(#[from] LayerNameError),
    /// A run that ends before it begins.
    #[error("--together {first}..{last}: `{last}` stands before `{first}` in execution order")]
    Order {
        /// Where it begins.
        first: String,
        /// Where it ends.
        last: String,
    },
}

impl std::str::FromStr for Together {
    type Err = TogetherError;

    fn from_str(text: &str) -> Result<Self, TogetherError> {
        let error = || TogetherError::Syntax {
            text: text.to_owned(),
        };
        let named = |name: &str| (!name.is_empty()).then(|| name.to_owned());
        if let Some((first, last)) = text.split_once("..") {
            let ends = named(first.trim()).zip(named(last.trim()));
            return ends.map(|(a, b)| Self::Run(a, b)).ok_or_else(error);
        }
        let names = text.split(',').map(|name| named(name.trim()));
        let names: Option<Vec<String>> = names.collect();
        names
            .filter(|names| names.len() > 1)
            .map(Self::Layers)
            .ok_or_else(error)
    }
}

/// The layer graph of a profile in which layers that share weights, and those of each of `together`, are one layer.
///
/// # Errors
/// If a layer that is named does not exist.
pub fn layer_graph(profile: &Profile, together: &[Together]) -> Result<LayerGraph, TogetherError> {
    let graph = LayerGraph::new(profile);
    if profile.tied.is_empty() && together.is_empty() {
        return Ok(graph);
    }
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for wanted in together {
        groups.push(wanted.layers(&profile.layers)?);
    }
    for tied in &profile.tied {
        let layers = tied.layers.iter();
        groups.push(
            layers
                .filter_map(|name| profile.layers.iter().position(|layer| layer.name == *name))
                .collect(),
        );
    }
    let mut graph = contracted(&graph, &groups);
    for tied in &profile.tied {
        // All layers that share the weights are one now, and have them once.
        let again = tied.layers.len().saturating_sub(1) as f64;
        if let Some(first) = tied.layers.first() {
            graph.share(
                first,
                again * tied.parameter_bytes as f64,
                again * tied.optimizer_bytes as f64,
            );
        }
    }
    Ok(graph)
}

/// The same graph if layers that share weights could be in different stages and nothing had to be paid for that: no plan
/// that splits them is faster than the best one of these.
///
/// # Errors
/// If a layer that is named does not exist.
pub fn untied_graph(profile: &Profile, together: &[Together]) -> Result<LayerGraph, TogetherError> {
    let free = Profile {
        tied: Vec::new(),
        ..profile.clone()
    };
    let mut graph = layer_graph(&free, together)?;
    for tied in &profile.tied {
        for again in tied.layers.iter().skip(1) {
            let (parameters, optimizer) = (tied.parameter_bytes, tied.optimizer_bytes);
            graph.share(again, parameters as f64, optimizer as f64);
        }
    }
    Ok(graph)
}

impl Together {
    fn layers(&self, layers: &[LayerProfile]) -> Result<Vec<usize>, TogetherError> {
        let names: Vec<&str> = layers.iter().map(|layer| layer.name.as_str()).collect();
        let find = |name: &String| Ok(layer_name::find(&names, name)?);
        match self {
            Self::Run(first, last) => {
                let (a, b) = (find(first)?, find(last)?);
                if a > b {
                    return Err(TogetherError::Order {
                        first: first.clone(),
                        last: last.clone(),
                    });
                }
                Ok((a..=b).collect())
            }
            Self::Layers(names) => names.iter().map(find).collect(),
        }
    }
}

/// The graph with each group made one layer, and with each group all that lies on a path between two of its layers: a
/// convex stage cannot be without it.
fn contracted(graph: &LayerGraph, groups: &[Vec<usize>]) -> LayerGraph {
    let mut one = UnionFind::<usize>::new(graph.len());
    for group in groups {
        for pair in group.windows(2) {
            one.union(pair[0], pair[1]);
        }
    }
    loop {
        let mut merged = DiGraph::<(), ()>::new();
        for _ in 0..graph.len() {
            merged.add_node(());
        }
        for tensor in graph.tensors() {
            for &reader in &tensor.readers {
                let (from, to) = (one.find(tensor.producer), one.find(reader));
                if from != to {
                    merged.add_edge(NodeIndex::new(from), NodeIndex::new(to), ());
                }
            }
        }
        // Groups that wait for each other are one stage too. Components come in reverse topological order.
        let components = tarjan_scc(&merged);
        if components.iter().all(|component| component.len() == 1) {
            return build(graph, &one);
        }
        for component in components {
            for pair in component.windows(2) {
                one.union(pair[0].index(), pair[1].index());
            }
        }
    }
}

/// The graph of the groups: in the order of their first layers as far as what they read allows.
fn build(graph: &LayerGraph, one: &UnionFind<usize>) -> LayerGraph {
    let mut members: HashMap<usize, Vec<usize>> = HashMap::new();
    for layer in 0..graph.len() {
        members.entry(one.find(layer)).or_default().push(layer);
    }
    let mut missing: HashMap<usize, Vec<usize>> = HashMap::new();
    for tensor in graph.tensors() {
        for &reader in &tensor.readers {
            let (from, to) = (one.find(tensor.producer), one.find(reader));
            if from != to {
                missing.entry(to).or_default().push(from);
            }
        }
    }
    let mut waiting: Vec<usize> = members.keys().copied().collect();
    waiting.sort_unstable_by_key(|group| members[group][0]);
    let mut place: HashMap<usize, usize> = HashMap::new();
    while !waiting.is_empty() {
        let ready = |group: &usize| {
            let reads = missing.get(group).map_or(&[][..], Vec::as_slice);
            reads.iter().all(|from| place.contains_key(from))
        };
        // Groups have no cycles: one is always ready.
        let next = waiting.iter().position(ready).unwrap_or(0);
        let number = place.len();
        place.insert(waiting.remove(next), number);
    }
    let mut layers: Vec<Layer> = vec![Layer::default(); place.len()];
    for (group, members) in &members {
        let layer = &mut layers[place[group]];
        for &member in members {
            layer.merge(graph.layer(member));
        }
    }
    let tensors = graph.tensors().iter().filter_map(|tensor| {
        let producer = place[&one.find(tensor.producer)];
        let readers = tensor.readers.iter().map(|&r| place[&one.find(r)]);
        let mut readers: Vec<usize> = readers.filter(|&reader| reader != producer).collect();
        readers.sort_unstable();
        readers.dedup();
        (!readers.is_empty()).then(|| Tensor {
            producer,
            readers,
            ..tensor.clone()
        })
    });
    LayerGraph::of_layers(layers, tensors.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Tied;
    use crate::testing;

    fn names(graph: &LayerGraph) -> Vec<Vec<&str>> {
        let members = graph.layers().map(|layer| layer.members.iter());
        members.map(|m| m.map(String::as_str).collect()).collect()
    }

    #[test]
    fn a_run_becomes_one_layer() {
        let profile = testing::chain(&[3.0; 4], &[10, 20, 30, 40], &[5, 6, 7]);
        let graph = layer_graph(&profile, &["L1..2".parse().unwrap()]).unwrap();
        assert_eq!(names(&graph), [vec!["L0"], vec!["L1", "L2"], vec!["L3"]]);
        assert_eq!(graph.layer(1).parameters, 50.0);
        assert!((graph.layer(1).forward - 2e-3).abs() < 1e-12);
        let bytes: Vec<f64> = graph.tensors().iter().map(|t| t.bytes).collect();
        assert_eq!(bytes, [5.0, 7.0]);
    }

    #[test]
    fn what_lies_between_comes_along_and_what_does_not_stays() {
        // 0 -> 1 -> 3 and 0 -> 2, all beside 4.
        let mut profile = testing::chain(&[1.0; 5], &[0; 5], &[9; 4]);
        profile.edges.truncate(3);
        for (edge, (from, to)) in profile.edges.iter_mut().zip([(0, 1), (0, 2), (1, 3)]) {
            (edge.from, edge.to) = (format!("L{from}"), format!("L{to}"));
        }
        let graph = layer_graph(&profile, &["L0,L3".parse().unwrap()]).unwrap();
        assert_eq!(
            names(&graph),
            [vec!["L0", "L1", "L3"], vec!["L2"], vec!["L4"]]
        );
    }

    #[test]
    fn tied_weights_count_once_and_keep_their_layers_together() {
        let mut profile = testing::chain(&[1.0; 3], &[100, 10, 100], &[9; 2]);
        profile.tied.push(Tied {
            tensor: "embedding".to_owned(),
            parameter_bytes: 100,
            optimizer_bytes: 0,
            layers: vec!["L0".to_owned(), "L2".to_owned()],
        });
        let graph = layer_graph(&profile, &[]).unwrap();
        assert_eq!(names(&graph), [["L0", "L1", "L2"]]);
        assert_eq!(graph.layer(0).parameters, 110.0);
    }

    #[test]
    fn what_names_no_layers_is_refused() {
        for text in ["", "L0", "L0..", "..L1", "L0,,L1"] {
            assert!(matches!(
                text.parse::<Together>(),
                Err(TogetherError::Syntax { .. })
            ));
        }
        let profile = testing::chain(&[1.0; 2], &[0; 2], &[9]);
        let error = |text: &str| layer_graph(&profile, &[text.parse().unwrap()]).unwrap_err();
        assert!(matches!(error("L0,L7"), TogetherError::Layer(_)));
        assert!(matches!(error("L1..L0"), TogetherError::Order { .. }));
    }
}
