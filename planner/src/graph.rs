//! The layer graph: layers in execution order and the tensors that flow between them.

use std::collections::HashMap;

use petgraph::graph::{DiGraph, NodeIndex};
use petgraph::visit::{DfsEvent, depth_first_search};

use crate::profile::Profile;

/// What one layer costs, in seconds and bytes per minibatch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layer {
    /// Unique name: of several layers made one, that of the first.
    pub name: String,
    /// The layers of the profile that it stands for, in execution order.
    pub members: Vec<String>,
    /// f: seconds.
    pub forward: f64,
    /// b: seconds.
    pub backward: f64,
    /// u: seconds of the optimizer step.
    pub step: f64,
    /// w: bytes of weights.
    pub parameters: f64,
    /// Bytes of optimizer state.
    pub optimizer: f64,
    /// s: bytes that a forward keeps for its backward.
    pub stash: f64,
    /// Bytes of the model's own inputs that it reads.
    pub inputs: f64,
    /// Bytes of scratch while the layer runs.
    pub workspace: f64,
}

/// A tensor that later layers read.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// The layer that makes it.
    pub producer: usize,
    /// The layers that read it, ascending.
    pub readers: Vec<usize>,
    /// a: bytes per minibatch.
    pub bytes: f64,
    /// Bytes per minibatch of the gradient that comes back, 0 if none does.
    pub gradient_bytes: f64,
}

impl Layer {
    /// Adds a layer that is to stay together with this one and runs behind it.
    pub(crate) fn merge(&mut self, other: &Self) {
        if self.members.is_empty() {
            self.name.clone_from(&other.name);
        }
        self.members.extend_from_slice(&other.members);
        self.forward += other.forward;
        self.backward += other.backward;
        self.step += other.step;
        self.parameters += other.parameters;
        self.optimizer += other.optimizer;
        self.stash += other.stash;
        self.inputs += other.inputs;
        self.workspace = self.workspace.max(other.workspace);
    }
}

/// Layers, numbered in execution order, and their tensors.
#[derive(Clone, Debug)]
pub struct LayerGraph {
    /// Node i is layer i; an edge carries the number of its tensor.
    graph: DiGraph<Layer, usize>,
    tensors: Vec<Tensor>,
}

impl LayerGraph {
    /// The layer graph of a valid profile ([`Profile::validate`]).
    #[must_use]
    pub fn new(profile: &Profile) -> Self {
        let mut graph = DiGraph::new();
        let mut number = HashMap::new();
        for (i, layer) in profile.layers.iter().enumerate() {
            number.insert(layer.name.as_str(), i);
            graph.add_node(Layer {
                name: layer.name.clone(),
                members: vec![layer.name.clone()],
                forward: layer.forward_ms / 1e3,
                backward: layer.backward_ms / 1e3,
                step: layer.step_ms / 1e3,
                parameters: layer.parameter_bytes as f64,
                optimizer: layer.optimizer_bytes as f64,
                stash: layer.stash_bytes as f64,
                inputs: layer.input_bytes as f64,
                workspace: layer.workspace_bytes as f64,
            });
        }
        let mut tensors: Vec<Tensor> = Vec::new();
        let mut known: HashMap<(usize, &str), usize> = HashMap::new();
        for edge in &profile.edges {
            let (producer, reader) = (number[edge.from.as_str()], number[edge.to.as_str()]);
            let tensor = *known
                .entry((producer, edge.tensor.as_str()))
                .or_insert_with(|| {
                    tensors.push(Tensor {
                        producer,
                        readers: Vec::new(),
                        bytes: edge.bytes as f64,
                        gradient_bytes: edge.returned_bytes() as f64,
                    });
                    tensors.len() - 1
                });
            tensors[tensor].readers.push(reader);
            graph.add_edge(NodeIndex::new(producer), NodeIndex::new(reader), tensor);
        }
        for tensor in &mut tensors {
            tensor.readers.sort_unstable();
        }
        Self { graph, tensors }
    }

    /// The graph of these layers, in execution order, and of the tensors between them.
    pub(crate) fn of_layers(layers: Vec<Layer>, tensors: Vec<Tensor>) -> Self {
        let mut graph = DiGraph::new();
        for layer in layers {
            graph.add_node(layer);
        }
        for (t, tensor) in tensors.iter().enumerate() {
            for &reader in &tensor.readers {
                graph.add_edge(NodeIndex::new(tensor.producer), NodeIndex::new(reader), t);
            }
        }
        Self { graph, tensors }
    }

    /// Takes away weights and optimizer state (bytes) that the layer with this member counts more than once.
    pub(crate) fn share(&mut self, member: &str, parameters: f64, optimizer: f64) {
        let mut layers = self.graph.node_weights_mut();
        if let Some(layer) = layers.find(|layer| layer.members.iter().any(|m| m == member)) {
            layer.parameters = (layer.parameters - parameters).max(0.0);
            layer.optimizer = (layer.optimizer - optimizer).max(0.0);
        }
    }

    /// The same graph with its layers in another execution order, which must be a topological one: layer i of the
    /// new graph is layer `order[i]` of this.
    #[must_use]
    pub fn reordered(&self, order: &[usize]) -> Self {
        let mut place = vec![0; self.len()];
        let mut graph = DiGraph::new();
        for (new, &old) in order.iter().enumerate() {
            place[old] = new;
            graph.add_node(self.layer(old).clone());
        }
        let mut tensors = self.tensors.clone();
        for (t, tensor) in tensors.iter_mut().enumerate() {
            tensor.producer = place[tensor.producer];
            for reader in &mut tensor.readers {
                *reader = place[*reader];
                graph.add_edge(NodeIndex::new(tensor.producer), NodeIndex::new(*reader), t);
            }
            tensor.readers.sort_unstable();
        }
        Self { graph, tensors }
    }

    /// The same graph on a device that computes so many times as fast.
    #[must_use]
    pub fn at_speed(&self, speed: f64) -> Self {
        let mut other = self.clone();
        for layer in other.graph.node_weights_mut() {
            layer.forward /= speed;
            layer.backward /= speed;
            layer.step /= speed;
        }
        other
    }

    /// Number of layers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.graph.node_count()
    }

    /// Whether there are no layers.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Layer `i` in execution order.
    #[must_use]
    pub fn layer(&self, i: usize) -> &Layer {
        &self.graph[NodeIndex::new(i)]
    }

    /// All layers in execution order.
    pub fn layers(&self) -> impl DoubleEndedIterator<Item = &Layer> + ExactSizeIterator {
        (0..self.len()).map(|i| self.layer(i))
    }

    /// All tensors that some later layer reads.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Whether the execution order is the only one: then every downset is a prefix of it, and a search over
    /// contiguous stages misses no plan.
    #[must_use]
    pub fn is_linear(&self) -> bool {
        (1..self.len()).all(|i| {
            self.graph
                .contains_edge(NodeIndex::new(i - 1), NodeIndex::new(i))
        })
    }

    /// Whether some tensor is read further away than by the next layer.
    #[must_use]
    pub fn has_skips(&self) -> bool {
        self.tensors
            .iter()
            .any(|t| t.readers.last().is_some_and(|&r| r > t.producer + 1))
    }
}

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
