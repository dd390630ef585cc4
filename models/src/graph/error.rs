use std::path::PathBuf;

use thiserror::Error;

use crate::onnx::OnnxError;
use crate::ops::OpError;

/// Why no graph can be built from a model.
#[derive(Debug, Error)]
#[error("{}: {kind}", path.display())]
pub struct GraphError {
    /// The model file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub kind: Box<GraphErrorKind>,
}

/// What stands in the way of a graph.
#[derive(Debug, Error)]
pub enum GraphErrorKind {
    /// Control flow that only shows while the model runs, which has no place in a layer graph.
    #[error(
        "operator {operator} (node '{node}') has sub-graphs and cannot be profiled or trained{}; export the model without control flow",
        depends_on(.condition.as_deref())
    )]
    Subgraph {
        /// The operator type.
        operator: String,
        /// The node's name.
        node: String,
        /// The value that an If chooses by.
        condition: Option<String>,
    },
    /// A branch that gives another number of values than its node.
    #[error("operator If (node '{node}') has {expected} outputs, its branch gives {found}")]
    BranchOutputs {
        /// The node's name.
        node: String,
        /// Outputs of the node.
        expected: usize,
        /// Outputs of the branch.
        found: usize,
    },
    /// Functions or branches without end.
    #[error(
        "node '{node}': functions and branches are nested too deeply or call each other in a circle"
    )]
    Nesting {
        /// The node's name.
        node: String,
    },
    /// A weight that training could not write back.
    #[error(
        "node '{node}': its weight '{weight}' is stored inside a function or a branch; export the model with all weights as initializers of the main graph"
    )]
    InnerWeight {
        /// The node's name.
        node: String,
        /// The weight's name.
        weight: String,
    },
    /// A tensor that is stepped by the optimizer in one place and replaced by statistics in another.
    #[error(
        "node '{node}' reads '{value}' as a weight, but it is also the running statistic of a batch norm; export the model again without merging equal tensors"
    )]
    WeightAndState {
        /// The node's name.
        node: String,
        /// The tensor's name.
        value: String,
    },
    /// A node reads a value that nothing makes.
    #[error("node '{node}' reads '{value}', which no node, input or initializer provides")]
    MissingValue {
        /// The node's name; "(graph output)" for an output of the graph.
        node: String,
        /// The value's name.
        value: String,
    },
    /// Two nodes make the same value.
    #[error("value '{value}' is made twice, the second time by node '{node}'")]
    DuplicateValue {
        /// The second node's name.
        node: String,
        /// The value's name.
        value: String,
    },
    /// The nodes cannot be put in an order.
    #[error("node '{node}' depends on its own output (the graph has a cycle)")]
    Cycle {
        /// One node of the cycle.
        node: String,
    },
    /// No output depends on data.
    #[error("no output depends on a data input, so there is nothing to run")]
    NothingToRun,
    /// The loss is to read an output that there is not.
    #[error(
        "--loss-output {output}: the model computes no output of this name, but {}",
        .outputs.join(", ")
    )]
    UnknownOutput {
        /// The name given.
        output: String,
        /// The outputs there are.
        outputs: Vec<String>,
    },
    /// An input that is no tensor of a supported type.
    #[error("input '{input}' {reason}")]
    Input {
        /// The input's name.
        input: String,
        /// What is wrong with it.
        reason: String,
    },
    /// An axis whose size the model leaves open.
    #[error("input '{input}': the size of axis {axis} ('{dim}') is open; give it with {flag}")]
    OpenDimension {
        /// The input's name.
        input: String,
        /// The axis, counted from 0.
        axis: usize,
        /// The dimension's name, or `input:axis` if it has none.
        dim: String,
        /// The flag that binds it.
        flag: String,
    },
    /// A size was given for a dimension that the model hasn't.
    #[error("--dim {dim}={size}: no input has an open dimension of this name{}", known(.open))]
    UnknownDimension {
        /// The name given.
        dim: String,
        /// The size given.
        size: usize,
        /// The open dimensions there are.
        open: Vec<String>,
    },
    /// Two sizes for the same dimension, or a size that no tensor can have.
    #[error("dimension '{dim}' cannot be {size}: {reason}")]
    Dimension {
        /// The dimension's name.
        dim: String,
        /// The size asked for.
        size: usize,
        /// Why not.
        reason: String,
    },
    /// Another batch size was asked for, but the batch isn't the first axis.
    #[error(
        "--batch {requested}: axis 0 of input '{input}' ({extent}) is not the batch, which is {exported} according to the output; leave --batch out or give --batch {exported}"
    )]
    BatchAxis {
        /// The input's name.
        input: String,
        /// Extent of its first axis.
        extent: usize,
        /// Samples according to the output.
        exported: usize,
        /// Batch size asked for.
        requested: usize,
    },
    /// Another batch size was asked for, but the model only works with the exported one.
    #[error(
        "--batch {requested} cannot be applied: the model was exported with batch {exported} and {reason}; use --batch {exported} or export it again with a dynamic batch axis"
    )]
    BatchFixed {
        /// Batch size asked for.
        requested: usize,
        /// Batch size of the export.
        exported: usize,
        /// What depends on it.
        reason: String,
    },
    /// A node that cannot be built: an unknown operator, an unsupported attribute, shapes that don't fit.
    #[error(transparent)]
    Operator(#[from] OpError),
    /// A tensor that is too large to be addressed.
    #[error(
        "value '{value}' of node '{node}' has shape {shape:?}, which is too large for this machine"
    )]
    TooLarge {
        /// The node's name.
        node: String,
        /// The value's name.
        value: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A tensor in an attribute that cannot be read.
    #[error(transparent)]
    Model(#[from] OnnxError),
}

fn depends_on(value: Option<&str>) -> String {
    value.map_or_else(String::new, |value| {
        format!(": its condition '{value}' depends on what is fed to the model")
    })
}

fn known(open: &[String]) -> String {
    if open.is_empty() {
        "; every size is fixed".to_string()
    } else {
        format!("; open are: {}", open.join(", "))
    }
}
