//! Operators: one small unit each, with its shape rule, forward and backward.
//!
//! There is no tape. An operator says which of its inputs and outputs its backward reads ([`Operator::saves`]);
//! whoever runs it keeps exactly those, so stash bytes are known. Weights are ordinary inputs: the
//! backward gets them again from the weight version its forward used, they are never part of a stash.

use std::collections::BTreeMap;

use crate::device::Device;
use crate::tensor::{DType, Tensor};

/// An attribute of an ONNX node.
#[derive(Clone, Debug)]
pub enum Attribute {
    /// FLOAT.
    Float(f32),
    /// INT.
    Int(i64),
    /// STRING.
    String(String),
    /// FLOATS.
    Floats(Vec<f32>),
    /// INTS.
    Ints(Vec<i64>),
    /// STRINGS.
    Strings(Vec<String>),
    /// TENSOR, on the host.
    Tensor(Tensor),
    /// A type that no supported operator takes (graphs, sparse tensors), by its ONNX name.
    Other(&'static str),
}

/// A node as it stands in the file, with everything known about its inputs.
#[derive(Debug)]
pub struct NodeSpec<'a> {
    /// Name, for error messages.
    pub name: &'a str,
    /// ONNX operator type, default domain.
    pub op_type: &'a str,
    /// Opset that the model imports for the default domain.
    pub opset: i64,
    /// Attributes by name.
    pub attributes: &'a BTreeMap<String, Attribute>,
    /// Types of the inputs; `None` where an optional input is omitted.
    pub inputs: &'a [Option<ValueType>],
    /// Values of those inputs that are constant (folded or non-trainable), on the host.
    pub constants: &'a [Option<Tensor>],
    /// Number of outputs that the node names.
    pub outputs: usize,
}

/// Type and shape of a value, known before anything runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValueType {
    /// Element type.
    pub dtype: DType,
    /// Extent of each axis.
    pub shape: Vec<usize>,
}

/// What an operator's backward reads again, by position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Saves {
    /// Positions of inputs.
    pub inputs: Vec<usize>,
    /// Positions of outputs.
    pub outputs: Vec<usize>,
}

/// Where and for whom an operator runs.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The worker's device.
    pub device: &'a dyn Device,
    /// Whether dropout drops and batch norm uses the minibatch's statistics.
    pub training: bool,
    /// Seed of the run; random masks depend on it, on the node and on the sample alone.
    pub seed: u64,
    /// Number of the minibatch's first sample since the start of the run.
    pub first_sample: u64,
}

/// What a forward gives.
#[derive(Debug, Default)]
pub struct Forward {
    /// One per ONNX output.
    pub outputs: Vec<Tensor>,
    /// What the backward needs beyond inputs and outputs: masks, indices, statistics.
    pub extra: Vec<Tensor>,
}

/// What a backward gets to see of its forward.
#[derive(Debug, Default)]
pub struct Saved {
    /// As long as the node's inputs; present where [`Saves::inputs`] said so, weights included.
    pub inputs: Vec<Option<Tensor>>,
    /// As long as the node's outputs; present where [`Saves::outputs`] said so.
    pub outputs: Vec<Option<Tensor>>,
    /// [`Forward::extra`] as the forward gave it.
    pub extra: Vec<Tensor>,
}

/// One operator with its attributes resolved and its input types known.
///
/// Tensors are passed by value: an operator may write into an argument that nobody else holds
/// ([`Tensor::is_unique`]) instead of allocating its result.
pub trait Operator: std::fmt::Debug + Send + Sync {
    /// The ONNX operator type.
    fn name(&self) -> &'static str;

    /// Types of the outputs. The operator was made for inputs of known types, so this cannot fail.
    fn outputs(&self) -> &[ValueType];

    /// Positions of inputs that hold trainable weights when they are float initializers.
    fn weights(&self) -> &[usize] {
        &[]
    }

    /// What the backward reads again.
    fn saves(&self) -> Saves;

    /// Outputs that replace an input of the same shape after a training forward, as (output, input):
    /// the running statistics of a batch norm.
    fn state_updates(&self) -> &[(usize, usize)] {
        &[]
    }

    /// Runs forward. `inputs` are as the node lists them; an omitted optional input is `None`.
    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward;

    /// Gradients of the inputs from the gradients of the outputs.
    ///
    /// `grads` has one entry per output (`None`: nothing flows back through it); `wanted` one flag per
    /// input: others may be answered with `None` without being computed.
    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>>;
}
