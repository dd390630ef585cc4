//! The graph of a model: named, sorted, with every shape bound and every constant folded.
//!
//! [`Graph::build`] turns a [`Model`](crate::onnx::Model) into nodes in execution order whose operators
//! are ready to run, and groups them into [`Layer`]s, the smallest things that are profiled and placed.
//! Nothing here changes after it was built; a graph is shared between the workers of a run.

mod batch_axis;
mod build;
mod error;
mod index_limit;
mod infer;
mod inline;
mod inputs;
mod layers;
mod nodes;
mod rebatch;
mod remarks;
mod sequences;
mod weights;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use build::{BuildOptions, parse_dimension};
pub use error::{GraphError, GraphErrorKind};
pub use layers::{Layer, LayerEdge};
pub use remarks::Remark;

use crate::init::Fan;
use crate::loss::Loss;
use crate::ops::ValueType;
use crate::program::{self, Program};
pub use crate::program::{Node, NodeId, ParameterId, StateId, ValueId};
use crate::tensor::Tensor;

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Data: one of [`Graph::inputs`].
    Input,
    /// A trainable weight.
    Parameter(ParameterId),
    /// A running statistic.
    State(StateId),
    /// Known before anything runs: one of [`Graph::constants`].
    Constant,
    /// An output of this node.
    Node(NodeId),
}

/// A tensor that flows through the graph.
#[derive(Clone, Debug)]
pub struct Value {
    /// Unique name, the file's where it has one.
    pub name: String,
    /// Element type and shape.
    pub ty: ValueType,
    /// What makes it.
    pub origin: Origin,
    /// Nodes that read it, in execution order.
    pub consumers: Vec<NodeId>,
    /// Whether a gradient flows to it: it is a parameter, or a float that is computed from one.
    pub needs_gradient: bool,
}

impl Value {
    /// An integer that made-up data may hold everywhere: token 0, which every vocabulary has, but 1 for a mask, where 0 would
    /// leave attention nothing to read.
    pub fn stand_in(name: &str) -> i64 {
        i64::from(name.contains("mask"))
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.ty.shape.iter().product::<usize>() * self.ty.dtype.size()
    }
}

/// A trainable weight. A tensor that several nodes use is one parameter.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// Name by which [`Model::write_back`](crate::onnx::Model::write_back) knows it.
    pub name: String,
    /// Its value in the graph.
    pub value: ValueId,
    /// What the file has for it, on the host.
    pub tensor: Tensor,
    /// What an initialisation goes by; `None` for biases, scales and shifts.
    pub fan: Option<Fan>,
    /// Whether the file only fills it with one number, so that it has to be initialised before training.
    pub constant_fill: bool,
}

/// A running statistic: read like a weight, replaced by training forwards, without gradient.
#[derive(Clone, Debug)]
pub struct State {
    /// Name by which [`Model::write_back`](crate::onnx::Model::write_back) knows it.
    pub name: String,
    /// Its value in the graph.
    pub value: ValueId,
    /// What the file has for it, on the host.
    pub tensor: Tensor,
}

/// What training attaches the loss to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainingOutput {
    /// The value that the loss reads: the graph's first output, or what goes into its softmax.
    pub value: ValueId,
    /// Nodes after that value, not run in training.
    pub skipped: Vec<NodeId>,
}

/// A model whose shapes are bound, ready to run.
#[derive(Debug)]
pub struct Graph {
    path: PathBuf,
    nodes: Vec<Node>,
    values: Vec<Value>,
    inputs: Vec<ValueId>,
    outputs: Vec<ValueId>,
    constants: BTreeMap<ValueId, Tensor>,
    parameters: Vec<Parameter>,
    parameter_values: Vec<ValueId>,
    states: Vec<State>,
    state_values: Vec<ValueId>,
    layers: Vec<Layer>,
    batch_size: usize,
    exported_batch: Option<usize>,
    /// The softmax over the classes that makes the first output, if one does.
    final_softmax: Option<NodeId>,
    remarks: Vec<Remark>,
}

impl Graph {
    /// The model file that the graph was built from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Samples per minibatch that the shapes are bound to.
    pub fn batch_size(&self) -> usize {
        self.batch_size
    }

    /// The batch that the file fixes: the only one that other runtimes take the file at, whatever it was trained at.
    /// `None` where the file leaves it open.
    pub fn exported_batch(&self) -> Option<usize> {
        self.exported_batch
    }

    /// How many rows a data input of integers picks from, where it goes into lookups (of an embedding): its numbers must
    /// stay below, and negative ones count from the end. The smallest one if there are several.
    pub fn index_limit(&self, input: ValueId) -> Option<usize> {
        index_limit::of(self, input)
    }

    /// Nodes in execution order; those of a layer stand together.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// All values, by [`ValueId`].
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// Data inputs that the outputs depend on, in the file's order. Initializers are never among them.
    pub fn inputs(&self) -> &[ValueId] {
        &self.inputs
    }

    /// Outputs that nodes compute, in the file's order, or the one that the loss was said to read; there is at least one.
    pub fn outputs(&self) -> &[ValueId] {
        &self.outputs
    }

    /// Values that never change, on the host.
    pub fn constants(&self) -> &BTreeMap<ValueId, Tensor> {
        &self.constants
    }

    /// Trainable weights, in the order of their first use.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Running statistics, in the order of their first use.
    pub fn states(&self) -> &[State] {
        &self.states
    }

    /// Layers in execution order: each one's inputs come from data or from layers before it.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Tensors that go from one layer to a later one, each once per receiving layer. Constants, weights
    /// and data inputs are read locally and are no edges.
    pub fn layer_edges(&self) -> Vec<LayerEdge> {
        layers::edges(self)
    }

    /// Parameters of two or more axes that the file only fills with one number: training from there
    /// leaves all units of a layer alike, so they need an initialisation first.
    pub fn constant_fills(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters
            .iter()
            .filter(|parameter| parameter.constant_fill)
    }

    /// What the export did to the model that whoever trains it should know.
    pub fn remarks(&self) -> &[Remark] {
        &self.remarks
    }

    /// Where training attaches a loss: the first output, or what goes into the (log-)softmax over the
    /// classes that makes it, when the loss is cross-entropy and therefore applies one itself.
    pub fn training_output(&self, loss: Loss) -> TrainingOutput {
        let output = self.outputs[0];
        let softmax = self
            .final_softmax
            .filter(|_| matches!(loss, Loss::CrossEntropy(_)));
        match softmax.and_then(|id| Some((id, self.nodes[id].inputs[0]?))) {
            Some((id, value)) => TrainingOutput {
                value,
                skipped: vec![id],
            },
            None => TrainingOutput {
                value: output,
                skipped: Vec::new(),
            },
        }
    }

    /// Bytes that one training step certainly holds at once: every weight and its gradient, and the data
    /// or the largest tensor.
    pub fn least_training_bytes(&self) -> u64 {
        let bytes = |id: &ValueId| self.values[*id].bytes() as u64;
        let weights: u64 = self.parameter_values.iter().map(bytes).sum();
        let data = self.inputs.iter().map(bytes).fold(0, u64::saturating_add);
        let largest = self.values.iter().map(|value| value.bytes() as u64).max();
        weights
            .saturating_mul(2)
            .saturating_add(data.max(largest.unwrap_or(0)))
    }

    /// A program that runs the given layers (ascending). `targets` are the values wanted of the whole
    /// graph: [`Self::outputs`], or [`TrainingOutput::value`] in training.
    pub fn program(&self, layers: &[usize], targets: &[ValueId]) -> Program {
        let nodes: Vec<NodeId> = layers
            .iter()
            .flat_map(|&layer| self.layers[layer].nodes.clone())
            .collect();
        Program::new(&self.source(), &nodes, targets)
    }

    /// The graph as programs see it.
    pub fn source(&self) -> program::Source<'_> {
        program::Source {
            nodes: &self.nodes,
            parameters: &self.parameter_values,
            states: &self.state_values,
            constants: &self.constants,
            inputs: &self.inputs,
        }
    }
}

#[cfg(test)]
mod tests;
